"""The forward of all parts of a unit, from the gather of its parameters until they are freed.

Words: a *part* is one of the modules whose forwards the unit runs; a *span* is a forward of all of
them, from the first one's gather to the end of the last one.
Always true: a unit is in one span at most; when a span ends, nothing that autograd has saved of its
forward keeps a full parameter alive, unless parameters live until backward.
What is computed inside is ``unit``'s business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from xla_fsdp.full_params import FullParams, UnitState
from xla_fsdp.param_group import ParamGroup
from xla_fsdp.saved_params import SavedParams
from xla_fsdp.unit_nodes import Call


@dataclass
class Span:
    """One forward of all parts of a unit."""

    call: Call
    kept: list[Tensor]  # for backward
    saved: SavedParams
    running: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)


class Spans:
    """The spans of a unit, one after the other.

    Args:
        group: the unit's parameters.
        params: what the modules hold.
        device: this rank's XLA device.

    Attributes:
        current: the span that the unit is in.
    """

    def __init__(self, group: ParamGroup, params: FullParams, device: torch.device) -> None:
        self.current: Span | None = None
        self._group = group
        self._params = params
        self._dummy = torch.zeros(1, device=device)

    def begin(self, span: Span, full: list[Tensor]) -> Span:
        """Let the modules compute with ``full``."""
        self._params.show(full, UnitState.FORWARD)
        self.current = span
        return span

    def end_forward(self) -> None:
        """The last part is done: let the modules hold shards again.

        Raises:
            ValueError: if the forward has changed a parameter in place.
        """
        if self.current is None or self._params.state is not UnitState.FORWARD:
            return
        self._params.hide()
        if changed := self.current.saved.changed_in_place():
            self.current = None
            raise self._lost(changed)

    def end(self) -> None:
        """Free the parameters, unless they live until backward. Raises as ``end_forward`` does."""
        self.end_forward()
        span, self.current = self.current, None
        if span is None:
            return
        if span.call.reshards:
            span.saved.release(self._dummy)
        else:
            span.saved.forget()

    def end_idle(self) -> None:
        """End a span that some parts have not taken part in."""
        if self.current is not None and not self.current.running:
            self.end()

    def drop(self) -> None:
        """End it after an exception."""
        self.current = None
        if self._params.state is UnitState.FORWARD:
            self._params.hide()

    def _lost(self, changed: list[int]) -> ValueError:
        members = [member for param in self._group.params for member in param.members]
        names = ", ".join(members[index].names[0] for index in changed)
        return ValueError(
            f"{names} was changed in place in the forward of its FSDP unit. The change would be "
            f"lost: full parameters are freed after the forward and gathered again from the "
            f"shards. Compute with a changed copy instead, or change it outside the forward."
        )
