"""Products that are computed after the rest of a block's backward: the gradients of large weights.

In a loop over blocks, autograd would make a weight's gradient where it differentiates the block,
before anything is known of how it is reduced. So the functions here only note its two sides, and
the loop multiplies them where it fits: the gradient of an expert's weight, which is as large as the
weight, in pieces once no weight is needed any more; that of a matrix in the parts that rings send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from xla_fsdp.distributed.higher_order import in_transform
from xla_fsdp.fsdp.engine.thread import current_pass
from xla_fsdp.nn.forward_weight import compute_by
from xla_fsdp.xla import ops
from xla_fsdp.xla.lost import has_hooks


class Product(NamedTuple):
    """A summand of a weight's gradient, ``outer(left, right)``."""

    left: Tensor  # [rows, rows of the weight]
    right: Tensor  # [rows, columns of it]
    outer: Callable[[Tensor, Tensor], Tensor]
    of_rows: Tensor | None = None  # of experts, the gradient of the product's rows

    def whole(self) -> Tensor:
        return self.outer(self.left, self.right)

    def columns(self, start: int, stop: int, after: Sequence[Tensor]) -> Tensor:
        """Return some columns of the product, computed after small tensors."""
        # Added in the pass that copies the columns, for a kernel, anyway.
        [right] = ops.with_data_dependency(after, [self.right[:, start:stop]])
        return self.outer(self.left, right)


Take = Callable[[Product], bool]
"""Takes a product, or returns False: its caller then computes the gradient."""


class LateProducts:
    """Takes what the gradients of some weights are made of, in place of these gradients.

    Args:
        weights: by a number of the caller's.
    """

    def __init__(self, weights: Mapping[int, Tensor]) -> None:
        self._weights = {id(weight): (number, weight) for number, weight in weights.items()}
        self._found: dict[int, list[Product]] = {}
        self._pass: int | None = None

    def taker_of(self, weight: Tensor) -> Take | None:
        """Return what takes the products with this very tensor; None if it is none of them."""
        found = self._weights.get(id(weight))
        return None if found is None else partial(self._take, *found)

    def start_with(self, output: Tensor) -> None:
        """Take products in the backward pass that begins at ``output``, and in none inside of it or
        before, where a block differentiates something itself."""
        output.register_hook(self._begin)

    def _begin(self, _: Tensor) -> None:
        self._pass = current_pass()

    def _take(self, number: int, weight: Tensor, product: Product) -> bool:
        if self._pass != current_pass() or has_hooks(weight):
            return False
        self._found.setdefault(number, []).append(product)
        return True

    def handed_out(self) -> dict[int, list[Product]]:
        """Return the products of each weight, in the order of backward, and forget them."""
        found, self._found = self._found, {}
        return found


_late: ContextVar[LateProducts | None] = ContextVar("_late", default=None)


@contextmanager
def computing_late(products: LateProducts) -> Iterator[None]:
    """Let the backward of products that are traced inside leave theirs to ``products``."""
    token = _late.set(products)
    try:
        yield
    finally:
        _late.reset(token)


def taker_of(weight: Tensor) -> Take | None:
    """Return what takes the products with a weight in the current forward, if anything does."""
    late = _late.get()
    return None if late is None else late.taker_of(weight)


def leave_linear(weight: Tensor) -> None:
    """Let ``F.linear`` with this weight, [outputs, inputs], leave the product that is its gradient
    to the ``LateProducts`` in whose context it runs."""
    compute_by(weight, F.linear, _linear)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    plainly = torch.is_autocast_enabled("xla") or in_transform() or input.dim() < 2
    if plainly or not torch.is_grad_enabled() or not weight.requires_grad:
        return F.linear(input, weight, bias)
    result: Tensor = _Linear.apply(input, weight, bias, taker_of(weight))
    return result


class _Linear(torch.autograd.Function):
    """``F.linear``; backward is made of differentiable functions."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None, take: Take | None) -> Tensor:
        return F.linear(input, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, _, ctx.take = inputs
        ctx.save_for_backward(input, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        left, right = grad.flatten(0, -2), input.flatten(0, -2)
        of_input = grad @ weight if ctx.needs_input_grad[0] else None
        product = Product(left, right, _of_matrix)
        taken = ctx.take is not None and ctx.take(product)
        of_weight = None if taken else product.whole()
        of_bias = left.sum(0) if ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias, None


def _of_matrix(left: Tensor, right: Tensor) -> Tensor:
    return left.t() @ right
