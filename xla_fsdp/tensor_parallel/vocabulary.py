"""Which modules hand out logits that are cut along their classes.

Words: a *head* is an nn.Linear cut by its outputs, of which the plan says that they stay cut and
are not for general use (``use_local_output=False``), as logits for ``loss_parallel`` are.
Always true: heads are known to the thread that made them, and no longer than they live. Ranks may
be threads of one process.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import nn

from xla_fsdp.mesh_axis import MeshAxis


class _Heads(threading.local):
    """Of this rank: the modules, and the axis that each is cut along."""

    def __init__(self) -> None:
        self.known: list[tuple[weakref.ref[Any], MeshAxis]] = []


_heads = _Heads()


def remember_head(module: nn.Module, axis: MeshAxis) -> None:
    """``module`` is a head."""
    if isinstance(module, nn.Linear):
        _heads.known.append((weakref.ref(module), axis))


def known_heads() -> list[tuple[int, MeshAxis]]:
    """Of all heads that are alive: the number of classes on a rank, and the axis."""
    _heads.known = [each for each in _heads.known if each[0]() is not None]
    alive: list[tuple[Any, MeshAxis]] = [(head(), axis) for head, axis in _heads.known]
    return [(head.out_features // axis.size, axis) for head, axis in alive]
