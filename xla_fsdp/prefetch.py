"""Gather the parameters of units that the user names, before it is their turn.

Always true: units are named weakly, as those that name each other would be freed some time later,
with their parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from xla_fsdp.unit import Unit


class UnitRef:
    """A unit that another one names. Copied and pickled, it names the unit's copy.

    Args:
        unit: to name; None for one that is gone.
    """

    def __init__(self, unit: Unit | None) -> None:
        self._unit = None if unit is None else weakref.ref(unit)

    def __call__(self) -> Unit | None:
        """The unit, unless it is gone."""
        return None if self._unit is None else self._unit()

    def __reduce__(self) -> tuple[Any, ...]:
        return UnitRef, (self(),)


def prefetch(
    units: Sequence[UnitRef], before: Sequence[Tensor], *, in_backward: bool = False
) -> None:
    """Gather the parameters of ``units`` once ``before`` are computed.

    Args:
        units: that are to run next.
        before: what their gathers wait for.
        in_backward: leave out those that do not gather in backward.
    """
    for reference in units:
        unit = reference()
        if unit is not None and (unit.settings.gathers_in_backward or not in_backward):
            unit.gather_ahead(before)
            unit.linger()
