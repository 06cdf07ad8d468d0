"""``grouped_linear``: a linear layer whose weight depends on the row."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.distributed.higher_order import differentiable_once
from xla_fsdp.nn import late_products
from xla_fsdp.nn.experts import megablox
from xla_fsdp.nn.experts.products import BATCHED, Implementation
from xla_fsdp.nn.experts.routes import Pairs, Routes
from xla_fsdp.nn.experts.segments import SEGMENTS
from xla_fsdp.nn.late_products import Product, Take
from xla_fsdp.xla import ops

ONCE = "products of experts save no graph of their backward. Use experts of plain torch"


def grouped_linear(
    rows: Tensor,
    weight: Tensor,
    routes: Routes,
    bias: Tensor | None = None,
    *,
    transposed: bool = True,
) -> Tensor:
    """Return each row times the weight of its expert, plus its bias: by one batched product if
    experts have a capacity, and otherwise by JAX's megablox kernels on a TPU and in preflight, by
    products of segments elsewhere.

    Args:
        rows: [rows, width], sorted as ``routes.spread`` does.
        weight: [experts, outputs, width], or [experts, width, outputs] if not ``transposed``.
        routes: of the rows to the experts.
        bias: [experts, outputs], or None.
        transposed: whether weights are those of ``torch.nn.Linear``.

    Returns:
        [rows, outputs] in the weight's dtype. Rows of no expert are zero.

    Raises:
        ValueError: if shapes do not fit.
    """
    given, (rows, weight) = weight, _cast(rows, weight)
    if problem := _problem(rows, weight, routes, bias, transposed):
        raise ValueError(problem)
    implementation = _implementation(rows) if routes.each is None else BATCHED
    pairs: Pairs | None = None
    if routes.joined is not None:
        if id(given) not in routes.joined:  # its cast is another tensor in each round
            pairs = {}
            routes.joined[id(given)] = (given, _Joined.apply(weight, pairs), pairs)
        _, weight, pairs = routes.joined[id(given)]
    how = (implementation, transposed, routes.total)
    result: Tensor = _Product.apply(
        *how, rows, weight, routes.sizes, pairs, late_products.taker_of(weight)
    )
    return result if bias is None else result + routes.rows_of_experts(bias.to(result.dtype))


class _Product(torch.autograd.Function):
    """Map (rows, weight) to the product of each row and the weight of its expert."""

    @staticmethod
    def forward(
        implementation: Implementation,
        transposed: bool,
        total: int,
        rows: Tensor,
        weight: Tensor,
        sizes: Tensor,
        pairs: Pairs | None,
        take: Take | None,
    ) -> Tensor:
        return implementation.multiply(rows, weight, sizes, transposed, total)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.implementation, ctx.transposed, ctx.total, rows, weight, sizes, *others = inputs
        ctx.pairs, ctx.take = others
        ctx.save_for_backward(rows, weight, sizes)

    @staticmethod
    @differentiable_once(ONCE)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, sizes = ctx.saved_tensors
        of_rows = of_weight = None
        if ctx.needs_input_grad[3]:
            of_rows = ctx.implementation.multiply(
                grad, weight, sizes, not ctx.transposed, ctx.total
            )
        if ctx.needs_input_grad[4]:
            left, right = (grad, rows) if ctx.transposed else (rows, grad)
            outer = partial(ctx.implementation.outer, sizes=sizes, total=ctx.total)
            product = Product(left, right, outer, of_rows)
            if ctx.pairs is not None:
                ctx.pairs[id(ctx)] = left, right
            elif ctx.take is None or not ctx.take(product):
                of_weight = product.whole()
        return None, None, None, of_rows, of_weight, None, None, None


class _Joined(torch.autograd.Function):
    """A weight of products of which each leaves a pair; its gradient is one product of all rows."""

    @staticmethod
    def forward(weight: Tensor, pairs: Pairs) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.experts, ctx.pairs = len(inputs[0]), inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    @differentiable_once(ONCE)
    def backward(ctx: Any, grad: None) -> tuple[Tensor, None]:
        sides = (
            torch.cat([rows.unflatten(0, (ctx.experts, -1)) for rows in side], 1)
            for side in zip(*ctx.pairs.values(), strict=True)
        )
        ctx.pairs.clear()
        left, right = ops.barrier(list(sides))  # joined again for each tile of the product without
        return torch.bmm(left.mT, right), None


def _implementation(rows: Tensor) -> Implementation:
    if rows.device.type != "xla" or not ops.runtime().has_kernels():
        return SEGMENTS
    if problem := megablox.problem(rows):
        warnings.warn(f"experts run in segments, without their kernel: {problem}", stacklevel=3)
        return SEGMENTS
    return megablox.MEGABLOX


def _cast(rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cast both as autocast does for a linear layer; without it, rows to the weight's dtype."""
    kind = rows.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        weight = weight.to(torch.get_autocast_dtype(kind))
    return rows.to(weight.dtype), weight


def _problem(
    rows: Tensor, weight: Tensor, routes: Routes, bias: Tensor | None, transposed: bool
) -> str | None:
    experts, pairs = len(routes.sizes), len(routes.order)
    shape = weight.mT.shape if transposed and weight.dim() == 3 else weight.shape
    if shape[:-1] != (experts, rows.shape[-1]) or rows.shape[:-1] != (pairs,):
        layout = "[experts, outputs, width]" if transposed else "[experts, width, outputs]"
        return (
            f"rows {list(rows.shape)} and weight {list(weight.shape)} do not fit {pairs} rows of "
            f"{experts} experts: give rows [{pairs}, width] and a weight {layout}"
        )
    outputs = shape[-1]
    if bias is not None and bias.shape != (experts, outputs):
        return f"bias is {list(bias.shape)}, not [experts, outputs] = [{experts}, {outputs}]"
    return None
