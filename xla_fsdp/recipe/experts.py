"""Mixtures of transformers with grouped products: an ``experts_implementation`` of theirs."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from xla_fsdp.distributed.mesh import EXPERT, Mesh
from xla_fsdp.nn.experts.api import grouped_linear
from xla_fsdp.nn.experts.exchange import ExpertParallel, axis_of, exchanged
from xla_fsdp.nn.experts.routes import Routes
from xla_fsdp.tensor_parallel.api import parallelize_module

NAME = "xla_fsdp"
READING = ("grouped_mm", "eager")
"""Those of transformers that read the device: they cannot be traced for XLA."""


def register(name: str = NAME, capacity: float | None = None) -> None:
    """Let transformers' mixtures take ``experts_implementation=name``; ``capacity`` is that of
    ``Routes.of``."""
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


def cut(model: nn.Module, mesh: Mesh, source: int | None = None) -> bool:
    """Cut experts of transformers' models over the axis ``expert`` of a mesh, with the values of
    the rank ``source`` on it, or of each rank; return whether there are any."""
    plan = {name: ExpertParallel() for name in whole(model)}
    if plan:
        parallelize_module(model, mesh[EXPERT], plan, src_data_rank=source)
    return bool(plan)


def refuse_unfit(model: nn.Module, mesh: Mesh) -> None:
    """Raise ValueError if experts cannot be cut over the axis ``expert``."""
    ranks, modules = mesh.size(EXPERT), dict(model.named_modules())
    names = whole(model)
    numbers = {name: int(modules[name].num_experts) for name in names}
    if uneven := [f"{name} has {each}" for name, each in numbers.items() if each % ranks]:
        raise ValueError(
            f"the {ranks} ranks of axis {EXPERT!r} cannot share experts equally: "
            f"{', '.join(uneven)}; let the axis divide their number"
        )
    for name in names:
        outer = type(modules[name.rpartition(".")[0]])
        if outer.__module__.startswith("peft."):
            raise ValueError(
                f"{name} is adapted by PEFT's {outer.__name__}, whose matrices are of all experts, "
                f"and axis {EXPERT!r} leaves each rank some of them; leave the axis out"
            )
        _refuse_other_function(name, modules[name])


def _refuse_other_function(name: str, experts: Any) -> None:
    chosen = experts.config._experts_implementation
    if chosen not in READING and is_of_transformers(chosen):
        raise ValueError(
            f"{name} computes by experts_implementation={chosen!r} of transformers, which sends no "
            f"tokens along axis {EXPERT!r}; leave the choice to parallelize, or give {NAME!r} or "
            f"a name that xla_fsdp.integrations.experts.register has made"
        )


def is_of_transformers(name: str) -> bool:
    """Return whether an ``experts_implementation`` of that name is one of transformers' own."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    function = ALL_EXPERTS_FUNCTIONS.get(name)
    return name in READING or getattr(function, "__module__", "").startswith("transformers.")


def whole(model: nn.Module) -> list[str]:
    """Return the names of transformers' modules that hold experts, and are not cut."""
    return [
        name
        for name, each in model.named_modules()
        if hasattr(each, "_is_expert_parallel") and axis_of(each) is None
    ]


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

    def of_rows(rows: Tensor, routes: Routes, weights: Tensor) -> Tensor:
        up = "gate_up_proj" if experts.has_gate else "up_proj"
        inner = _linear(experts, up, rows, routes)
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        if experts.has_post_expert_norm:  # of a row without its weight
            result = _linear(experts, "down_proj", inner, routes)
            return (experts.post_expert_norm(result) * weights).to(result.dtype)
        return _linear(experts, "down_proj", inner, routes, weights)

    return exchanged(experts, hidden_states, top_k_index, top_k_weights, of_rows, capacity)


def _linear(
    experts: Any, name: str, rows: Tensor, routes: Routes, weights: Tensor | None = None
) -> Tensor:
    """Return the layer of that name of each row, times its weight if given: [rows, outputs]."""
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    weight, transposed = getattr(experts, name), not experts.is_transposed
    if weights is None:
        return grouped_linear(rows, weight, routes, bias, transposed=transposed)
    rows = (rows * weights).to(rows.dtype)
    result = grouped_linear(rows, weight, routes, transposed=transposed)
    if bias is None:
        return result
    return result + (routes.rows_of_experts(bias) * weights).to(result.dtype)
