"""Products of experts that are computed after the rest of a block's backward, a piece at a time.

The gradient of an expert's weight is as large as the weight, and experts are most of a block. Made
as the block is differentiated, gradients are in memory together with the weights. So a product only
notes what its weight's gradient is made of; the loop over blocks makes it once the gradient of the
block's input is there, and no weight is needed any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import NamedTuple

from torch import Tensor

from xla_fsdp.nn.experts.products import Outer
from xla_fsdp.xla import ops


class Product(NamedTuple):
    """A summand of a weight's gradient: of each group, the product of its rows."""

    left: Tensor  # [rows, rows of a group's weight]
    right: Tensor  # [rows, columns of it]
    sizes: Tensor  # [groups] int32
    total: int  # as for ``Outer``
    outer: Outer
    of_rows: Tensor | None  # the gradient of the product's rows

    def columns(self, start: int, stop: int, after: Sequence[Tensor]) -> Tensor:
        """Return some columns of all groups, [groups, rows, stop - start], computed after small
        tensors."""
        # Added in the pass that copies the columns, for a kernel, anyway.
        [right] = ops.with_data_dependency(after, [self.right[:, start:stop]])
        return self.outer(self.left, right, self.sizes, self.total)


Take = Callable[[Product], None]


class LateProducts:
    """Takes what the gradients of some weights are made of, in place of these gradients.

    Args:
        weights: by a number of the caller's.
    """

    def __init__(self, weights: Mapping[int, Tensor]) -> None:
        self._numbers = {id(weight): number for number, weight in weights.items()}
        self._found: dict[int, list[Product]] = {}

    def taker_of(self, weight: Tensor) -> Take | None:
        """Return what takes the products with this very tensor; None if it is none of them."""
        number = self._numbers.get(id(weight))
        return None if number is None else partial(self._take, number)

    def _take(self, number: int, product: Product) -> None:
        self._found.setdefault(number, []).append(product)

    def handed_out(self) -> dict[int, list[Product]]:
        """Return the products of each weight, in the order of backward, and forget them."""
        found, self._found = self._found, {}
        return found


_late: ContextVar[LateProducts | None] = ContextVar("_late", default=None)


@contextmanager
def computing_late(products: LateProducts) -> Iterator[None]:
    """Let the backward of grouped products that are traced inside leave theirs to ``products``."""
    token = _late.set(products)
    try:
        yield
    finally:
        _late.reset(token)


def taker_of(weight: Tensor) -> Take | None:
    """Return what takes the products with a weight in the current forward, if anything does."""
    late = _late.get()
    return None if late is None else late.taker_of(weight)
