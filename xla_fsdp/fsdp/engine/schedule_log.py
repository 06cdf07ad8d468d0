"""Tells by ``logging.getLogger("xla_fsdp.schedule")``, at debug level, what units gather, free and
reduce, as it is traced. What is replayed, or found in a cache of loops, is not traced again."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from xla_fsdp.xla import ops

_log = logging.getLogger("xla_fsdp.schedule")


class _Named(Protocol):
    @property
    def key(self) -> str: ...


class ScheduleLog:
    """Tells what one unit does.

    Attributes:
        unit: name of the unit's first module, as far out as there are units.
    """

    def __init__(self) -> None:
        self.unit = "root"

    def sends(
        self, what: str, sent: Tensor, numbers: Iterable[int] = (), params: Sequence[_Named] = ()
    ) -> Tensor:
        """Tell of a collective, and return what it sends.

        Args:
            what: its name.
            sent: the tensor that it is given.
            numbers: of those in ``params`` that are in it.
            params: parameters of the unit, if they are known.
        """
        if _log.isEnabledFor(logging.DEBUG):
            names = [params[at].key for at in numbers if params] or ["a part"]
            of = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            dtype = str(sent.dtype).removeprefix("torch.")
            self._tell(f"{what} of {of}, {list(sent.shape)} {dtype}")
        return sent

    def frees(self, *, kept: bool) -> None:
        """Tell that modules hold shards again; ``kept`` if backward uses the parameters."""
        if _log.isEnabledFor(logging.DEBUG):
            self._tell("keep until backward" if kept else "free")

    def _tell(self, what: str) -> None:
        # The rank, as CPU ranks share a process, and autograd's threads have names of their own.
        backward = torch._C._current_graph_task_id() != -1
        when = "backward" if backward else "forward"
        _log.debug("rank %d, %s: %s, in %s", ops.rank(), self.unit, what, when)
