"""Mixtures of experts of transformers at their real size, for preflight.

    python -m xla_fsdp.preflight examples.llm.mixtures:step --topology v5p:4x4x4
    python -m xla_fsdp.preflight examples.llm.mixtures:step --mesh shard=16,expert=4 ...

The model is built on the meta device; its layers run as one loop, recomputed in backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))  # what the examples share

from examples.llm.llama import next_token_loss
from large_models import leave_alone, optimizer_of, training_step
from xla_fsdp import Mesh, Recipe, parallelize
from xla_fsdp.integrations import attention, experts

MODELS: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "mixtral": (  # 8x7B
        MixtralForCausalLM,
        MixtralConfig,
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 32000,
        },
    ),
    "qwen3": (  # 30B-A3B
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "vocab_size": 151936,
        },
    ),
}


def step(
    model: str = "mixtral",
    length: int = 4096,
    batch: int = 1,
    layers: int = 0,
    capacity: float = 0.0,
    mesh: Mesh | None = None,
    recipe: Recipe | None = None,
) -> Callable[[], None]:
    """One training step in bf16 with AdamW on ``batch`` texts of ``length`` tokens per rank, of
    the first ``layers`` (all by default) of a model in MODELS. Over an axis ``expert`` of the mesh
    ranks share experts, which take at most ``capacity`` times their even share if that is not 0."""
    import torch_xla

    kind, config_of, sizes = MODELS[model]
    attention.register()
    config: Any = config_of(
        **{**sizes, **({"num_hidden_layers": layers} if layers else {})},
        max_position_embeddings=length,
        attn_implementation=attention.NAME,
        tie_word_embeddings=False,
    )
    if capacity:
        experts.register("with_capacity", capacity=capacity)
        config._experts_implementation = "with_capacity"
    with torch.device("meta"):
        plain: Any = kind(config)
    plain.model.rotary_emb = type(plain.model.rotary_emb)(config)
    done = parallelize(
        plain,
        optimizer_of,
        recipe or Recipe("lean", offload_activations=False),
        mesh=mesh,
        compute_dtype=torch.bfloat16,
        param_init_fn=leave_alone,
    )
    done.recipe.explain()
    device = torch_xla.device()
    tokens, targets = (torch.zeros(batch, length, dtype=torch.long).to(device) for _ in range(2))
    return training_step(done.optimizer, lambda: next_token_loss(done.model, tokens, targets))
