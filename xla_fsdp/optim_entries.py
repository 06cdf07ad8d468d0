"""What an optimizer holds, by the names of the parameters it belongs to.

Words: a *key* names a parameter in the state dict (of a flattened unit, ``flat_param_0``); an
*entry* is one value that the optimizer keeps for one parameter; its *place* says what it is: cut
like the parameter (``SHARD``), or whole, on the device or on the host.
Always true: these are data. Reading them out of an optimizer, and back into it, is
``optim_state``'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor


class Place(Enum):
    """Where an entry lives, and whether other ranks hold other parts of it."""

    SHARD = "shard"
    """A tensor of the shard's shape, cut like the parameter."""
    DEVICE = "device"
    """A whole tensor on the parameter's device."""
    HOST = "host"
    """A tensor in host memory, or a plain value."""


@dataclass(frozen=True)
class Entry:
    """One value of an optimizer for one parameter: a tensor or a plain value."""

    place: Place
    value: Any


@dataclass(frozen=True)
class GroupState:
    """One parameter group: hyperparameters as plain values, and the keys of its parameters."""

    options: dict[str, Any]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class OptimizerState:
    """All that an optimizer holds.

    Args:
        groups: in the optimizer's order.
        entries: key, then name of the state (``exp_avg``, ``step``), to its entry. Parameters
            without state, as all are before the first step, are left out.
    """

    groups: tuple[GroupState, ...]
    entries: dict[str, dict[str, Entry]]


def is_number(value: Tensor) -> bool:
    """One number, or the empty tensor that torch_xla's optimizers keep for what they do not use."""
    return value.dim() == 0 or value.shape in ((0,), (1,))
