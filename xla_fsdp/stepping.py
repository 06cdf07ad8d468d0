"""Who steps shards while a backward pass still runs, and how a loop has slices of stacks stepped.

Always true: these are roles alone. ``optim.in_backward`` plays them, and loops (``scan.stepping``)
need not know which optimizer there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class SliceSteps(Protocol):
    """One step of an optimizer on some stacks, made slice by slice."""

    @property
    def kept(self) -> list[list[Tensor]]:
        """Of each stack, itself and what the optimizer keeps in its shape."""
        ...

    def new_slices(self, grads: Sequence[Tensor], slices: Sequence[Tensor]) -> list[Tensor]:
        """What becomes of ``slices`` of all that is kept, in that order, if these are the gradients
        of those of the stacks.

        Raises:
            CannotSliceError: if the optimizer would have to keep more than it does.
        """
        ...

    def take(self, stacks: Sequence[Tensor]) -> None:
        """Make the step: these are the new values of all that is kept, in that order."""
        ...


class Stepper(Protocol):
    """Steps shards in backward."""

    def slice_steps(self, stacks: Sequence[Tensor]) -> SliceSteps | None:
        """How to step these slice by slice; None if they cannot be, or not now."""
        ...


class CannotSliceError(Exception):
    """A step cannot be made slice by slice; it is made with whole stacks then."""
