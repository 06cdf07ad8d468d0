"""An optimizer's state in the words of the checkpoint format, and back.

Words: see ``optim_entries`` for places and entries, ``checkpoint.optimizer_format`` for records.
Always true: converting there and back changes nothing. Reading and writing an optimizer is
``optim_state``'s business, cutting state anew for other ranks ``checkpoint.reshard``'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from xla_fsdp.checkpoint.optimizer_format import GroupRecord, OptimizerRecord, StateRecord
from xla_fsdp.checkpoint.reshard import CutState
from xla_fsdp.optim_entries import Entry, GroupState, OptimizerState, Place


def record_of(state: OptimizerState) -> OptimizerRecord:
    """What is written about ``state``, beside its tensors."""
    return OptimizerRecord(
        groups=tuple(GroupRecord(group.keys, group.options) for group in state.groups),
        states={key: _state_record(entries) for key, entries in state.entries.items()},
    )


def tensors_of(state: OptimizerState) -> dict[str, dict[str, Tensor]]:
    """The tensors of ``state``, by key and name."""
    return {
        key: {name: e.value for name, e in entries.items() if isinstance(e.value, Tensor)}
        for key, entries in state.entries.items()
    }


def state_from(
    groups: Iterable[GroupRecord],
    states: Mapping[str, Mapping[str, CutState]],
    params: Mapping[str, Tensor],
) -> OptimizerState:
    """The state that was cut for a rank, in the shapes of its parameters."""
    entries = {
        key: {name: _entry(state, params[key]) for name, state in each.items()}
        for key, each in states.items()
    }
    return OptimizerState(
        tuple(GroupState(dict(group.options), group.params) for group in groups), entries
    )


def _state_record(entries: Mapping[str, Entry]) -> StateRecord:
    tensors = {name: e for name, e in entries.items() if isinstance(e.value, Tensor)}
    whole = [name for name, entry in tensors.items() if entry.place is not Place.SHARD]
    return StateRecord(
        sharded=tuple(name for name in tensors if name not in whole),
        whole=tuple(whole),
        values={name: e.value for name, e in entries.items() if name not in tensors},
        host=tuple(name for name in whole if tensors[name].place is Place.HOST),
    )


def _entry(state: CutState, param: Tensor) -> Entry:
    place = Place(state.kind.value)
    value = state.value.reshape(param.shape) if place is Place.SHARD else state.value
    return Entry(place, value)
