"""Steps of mixtures of transformers, for tests that ask the TPU compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def build(
    experts: int = 8,
    inner: int = 3584,
    width: int = 1024,
    choices: int = 2,
    layers: int = 2,
    tokens: int = 2048,
    recipe: str = "lean",
    implementation: str = "",
) -> Callable[[], Any]:
    """A step of a Mixtral in bf16, by ``parallelize``.

    Args:
        experts: of a layer.
        inner: width of an expert.
        width: of the model.
        choices: experts of a token.
        layers: of the model.
        tokens: of a rank's batch, one text.
        recipe: its name.
        implementation: of experts; that of ``parallelize`` by default.
    """
    import torch_xla
    from transformers import MixtralConfig, MixtralForCausalLM

    from xla_fsdp import parallelize

    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    heads = {"num_attention_heads": width // 128, "num_key_value_heads": width // 128}
    routing = {"num_local_experts": experts, "num_experts_per_tok": choices}
    config = MixtralConfig(vocab_size=8192, **sizes, **heads, **routing)
    if implementation:
        config._experts_implementation = implementation
    model: Any = MixtralForCausalLM(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = parallelize(model, optimizer, recipe, compute_dtype=torch.bfloat16)
    ids = torch.zeros(1, tokens, dtype=torch.long).to(torch_xla.device())

    def step() -> None:
        done.model(ids, labels=ids).loss.backward()
        done.optimizer.step()
        done.optimizer.zero_grad()
        torch_xla.sync()

    return step


def build_with_whole_gradients(inner: int = 3584) -> Callable[[], Any]:
    """The same, without pieces of the gradients of experts."""
    from xla_fsdp.scan import weights

    weights.IN_PIECES = 2**62  # of this child process
    return build(inner=inner)
