"""A Llama of transformers in units, of any size: the model, its sharding, and a step for preflight.

    python -m xla_fsdp.preflight examples.llm.llama:step --topology v5p:4x4x4 --set scan=on
    python -m xla_fsdp.preflight examples.llm.llama:step --topology v4:4x8x8 --set lean=on ...
    python -m xla_fsdp.preflight examples.llm.llama:step --tune --depth blocks --set width=4096 ...
    python examples/llm/llama.py --ranks 64                # host memory of building one rank
    python examples/llm/train.py --help                    # training a small one

Words: *sizes* are all that the model's parameters depend on; the default ones are Llama 3's with 70
billion parameters. A *unit* is what is gathered together: a layer, the embedding, or the head.
Always true: the model is built on the meta device, so no process ever holds more of it than its
shards and one unit; layers are recomputed in backward unless asked not to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))  # what the examples share

from large_models import build_one_rank, leave_alone, optimizer_of, training_step
from xla_fsdp import Mesh, Parallelized, Recipe, context_parallel, parallelize
from xla_fsdp.integrations.attention import NAME, register

SDPA = "sdpa"  # torch's; lean and fast recipes compute it without all scores, if these are many
EAGER = "eager"  # plain operations on all scores, which XLA fuses itself
ATTENTION = (SDPA, EAGER, NAME)


@dataclass(frozen=True)
class Sizes:
    """What parameters depend on: ``width`` of the residual stream, ``blocks``, query ``heads``,
    ``kv_heads``, ``ffn`` width, size of the ``vocabulary``."""

    width: int = 8192
    blocks: int = 80
    heads: int = 64
    kv_heads: int = 8
    ffn: int = 28672
    vocabulary: int = 128256

    def config(self, attention: str = SDPA) -> LlamaConfig:
        """The same for transformers."""
        return LlamaConfig(
            hidden_size=self.width,
            num_hidden_layers=self.blocks,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.ffn,
            vocab_size=self.vocabulary,
            rope_theta=500_000.0,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation=attention,
        )


def build_model(sizes: Sizes, *, attention: str = SDPA) -> LlamaForCausalLM:
    """The model, without memory but for its table of rotary frequencies, which has no values of
    its own to load or to draw."""
    if attention == NAME:
        register()
    config = sizes.config(attention)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model


def shard_model(
    model: LlamaForCausalLM, optimizer: Any = None, recipe: Recipe | str = "plain", **options: Any
) -> Parallelized:
    """Embedding, every layer, and head each a unit; the last norm is left to the outermost one.

    ``options`` are those of the wrapper, which gives each unit memory and values when it makes it.
    """
    own = {"compute_dtype": torch.bfloat16, "param_init_fn": initialize}
    return parallelize(model, optimizer, recipe, **{**own, **options})


def initialize(module: nn.Module) -> None:
    """Values of one layer's own parameters: matrices normal, norms one."""
    for param in module.parameters(recurse=False):
        with torch.no_grad():
            param.normal_(std=0.02) if param.dim() > 1 else param.fill_(1.0)


def step(
    batch: int = 1,
    length: int = 2048,
    width: int = 8192,
    blocks: int = 80,
    heads: int = 64,
    kv_heads: int = 8,
    ffn: int = 28672,
    vocabulary: int = 128256,
    remat: bool = True,
    scan: bool = False,
    lean: bool = False,
    offload: bool = False,
    flat: bool = False,
    attention: str = SDPA,
    method: str = "auto",
    mesh: Mesh | None = None,
    recipe: Recipe | None = None,
) -> Callable[[], None]:
    """One training step on ``batch`` texts of ``length`` tokens per rank, as preflight wants it, or
    per group of ranks along an axis ``context`` of the mesh, which by ``method`` compute
    ``attention``; ``lean`` needs the least memory: layers as a loop over stacked parameters, which
    AdamW steps in backward, and an embedding and a head that are never whole; ``offload`` for what
    layers that run as a loop keep for backward. A ``recipe`` decides all of these."""
    import torch_xla

    sizes = Sizes(width, blocks, heads, kv_heads, ffn, vocabulary)
    name, loop = ("lean", True) if lean else ("plain", scan)
    recipe = recipe or Recipe(
        name,
        scan=loop,
        offload_activations=offload,
        remat="full" if remat else "none",
    )
    model, optimizer, _ = shard_model(
        build_model(sizes, attention=attention),
        optimizer_of,
        recipe,
        flatten_parameters=flat,
        mesh=mesh,
        param_init_fn=leave_alone,
    )
    device = torch_xla.device()
    tokens, targets = (torch.zeros(batch, length, dtype=torch.long).to(device) for _ in range(2))
    return training_step(
        optimizer, lambda: loss_over(mesh, next_token_loss, model, tokens, targets, method)
    )


def loss_over(
    mesh: Mesh | None,
    loss: Callable[..., Tensor],
    model: nn.Module,
    tokens: Tensor,
    targets: Tensor,
    method: str = "auto",
) -> Tensor:
    """``loss(model, tokens, targets)``; if the mesh has an axis ``context``, of sequences that are
    cut over it, and equal on its ranks."""
    if mesh is None or "context" not in mesh.axis_names:
        return loss(model, tokens, targets)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    parts = [each.clone() for each in (tokens, targets, positions)]
    cut = {"buffers": parts, "buffer_seq_dims": [1, 1, 1], "no_restore_buffers": parts}
    with context_parallel(mesh["context"], method=method, **cut):
        return loss(model, *parts)


def next_token_loss(
    model: nn.Module, tokens: Tensor, targets: Tensor, positions: Tensor | None = None
) -> Tensor:
    """Mean cross entropy of the next tokens; tokens, targets and positions (by default 0 to length)
    are [N, length]."""
    mask = {"attention_mask": mask_of(model, tokens), "position_ids": positions}
    targets = targets.contiguous()  # transformers takes a view of them as one row
    return model(tokens, labels=targets, shift_labels=targets, **mask).loss


def mask_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """What the model's attention takes for a causal mask for tokens [N, length].

    Without one transformers reads values in every step, to see whether texts are packed.
    """
    if model.config._attn_implementation != EAGER:
        return torch.ones_like(tokens)  # nothing is padded
    length, device = tokens.shape[1], tokens.device
    unseen = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    return torch.where(unseen, -1e30, 0.0)[None, None]  # added to scores


def main(argv: list[str] | None = None) -> int:
    """Build one rank's shards, with real values, and say what that took."""
    return build_one_rank(
        "Build the shards of one rank of many.",
        64,
        vars(Sizes()),
        lambda sizes, **options: shard_model(build_model(Sizes(**sizes)), **options).model,
        argv,
    )


if __name__ == "__main__":
    sys.exit(main())
