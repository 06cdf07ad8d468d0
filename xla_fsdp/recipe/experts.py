"""Mixtures of transformers with grouped products: an ``experts_implementation`` of theirs."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

import xla_fsdp.xla.histc  # noqa: F401
from xla_fsdp.nn.experts.api import grouped_linear
from xla_fsdp.nn.experts.routes import Routes

NAME = "xla_fsdp"
READING = ("grouped_mm", "eager")
"""Those of transformers that read the device: they cannot be traced for XLA."""


def register(name: str = NAME, capacity: float | None = None) -> None:
    """Let transformers' mixtures take ``experts_implementation=name``.

    Args:
        name: for several capacities.
        capacity: see ``Routes.of``.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(name, partial(compute, capacity=capacity))


def choose(model: Any) -> str:
    """Let a model of transformers use grouped products in place of what XLA cannot trace; return
    what it used before, or nothing if it stays as it is."""
    before = getattr(model.config, "_experts_implementation", None)
    if before not in READING or not model._can_set_experts_implementation():
        return ""
    register()
    model.set_experts_implementation(NAME)
    return str(before)


def compute(
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    capacity: float | None = None,
) -> Tensor:
    """Compute experts as transformers' own functions do.

    Args:
        experts: module of transformers with ``use_experts_implementation``.
        hidden_states: [tokens, width].
        top_k_index: [tokens, choices], numbers of experts.
        top_k_weights: [tokens, choices].
        capacity: see ``Routes.of``.

    Returns:
        [tokens, width].

    Raises:
        ValueError: if transformers has cut the experts over ranks.
    """
    if experts._is_expert_parallel:
        raise ValueError(
            f"{type(experts).__name__} is cut over ranks by transformers' own expert parallelism, "
            f'which experts_implementation="{NAME}" does not know; load the model without a '
            f"distributed_config and tp_plan"
        )
    routes = Routes.of(top_k_index, experts.num_experts, capacity)
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = _linear(experts, up, routes.spread(hidden_states), routes)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    rows = _linear(experts, "down_proj", inner, routes)
    if experts.has_post_expert_norm:
        rows = experts.post_expert_norm(rows)
    return routes.combine(rows, top_k_weights).to(hidden_states.dtype)


def _linear(experts: Any, name: str, rows: Tensor, routes: Routes) -> Tensor:
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    weight = getattr(experts, name)
    return grouped_linear(rows, weight, routes, bias, transposed=not experts.is_transposed)
