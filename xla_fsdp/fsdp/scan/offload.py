"""Where what the forward loop collects waits until backward needs it.

Words: a *kept* value is a slice of what was collected, of one round. Always true: backward computes
with kept values in the device's memory.
What is collected is decided by ``activations``, and where in a loop that is by ``program``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from xla_fsdp.distributed.xla.host import fetch, offload
from xla_fsdp.distributed.xla.loop import Like


class Keeping(Protocol):
    """See the module's docstring."""

    def collected(self, values: Sequence[Tensor]) -> list[Tensor]:
        """What a round of the forward loop collects, to keep these."""
        ...

    def carried(self, stacks: Sequence[Tensor]) -> list[Like]:
        """What the backward loop carries besides, for what was collected."""
        ...

    def first(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """That, for the round that comes first, of the last block."""
        ...

    def of_round(
        self, carried: Sequence[Tensor], sliced: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """A round's kept values, and what it carries on, from what it was given of both."""
        ...


class OnDevice:
    """In the device's memory."""

    def collected(self, values: Sequence[Tensor]) -> list[Tensor]:
        """See ``Keeping``."""
        return list(values)

    def carried(self, stacks: Sequence[Tensor]) -> list[Like]:
        """See ``Keeping``: nothing."""
        return []

    def first(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """See ``Keeping``."""
        return []

    def of_round(
        self, carried: Sequence[Tensor], sliced: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """See ``Keeping``."""
        return list(sliced), []


class OnHost:
    """In the host's memory. Backward takes slices one round early, and carries them: else each
    round, which begins with them, would wait for the copy."""

    def collected(self, values: Sequence[Tensor]) -> list[Tensor]:
        """See ``Keeping``."""
        return [offload(each) for each in values]

    def carried(self, stacks: Sequence[Tensor]) -> list[Like]:
        """See ``Keeping``: the values that the next round needs."""
        return [Like.slice_of(each) for each in stacks]

    def first(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """See ``Keeping``."""
        return [fetch(each[-1]) for each in stacks]

    def of_round(
        self, carried: Sequence[Tensor], sliced: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """See ``Keeping``."""
        return list(carried), [fetch(each) for each in sliced]
