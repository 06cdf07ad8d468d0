"""What one rank of a new job takes of an old job's optimizer.

Words: see ``reshard``. A state is cut like its parameter if it has the parameter's shape; one
number (a step counter) is whole, and the same for all parameters that are joined; a state of any
other shape belongs to one rank's shard, and fits only that.
Always true: parameters that had no state, joined with ones that had, get zeros, which is what
their state would have been with gradients of zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from xla_fsdp.checkpoint.format import ParamRecord, state_name
from xla_fsdp.checkpoint.optimizer_format import GroupRecord, OptimizerRecord
from xla_fsdp.checkpoint.reshard import Cut, CutState, Kind, Saved, Target, slice_of
from xla_fsdp.checkpoint.safetensors_file import TensorSpec
from xla_fsdp.checkpoint.tensor_source import TensorSource

SHOWN = 5


def cut_optimizer(
    saved: Saved,
    target: Target,
    groups: Sequence[Sequence[str]],
    result: Cut,
    *,
    strict: bool,
) -> None:
    """Fill in the optimizer's groups and states of ``result``, after its model.

    Args:
        saved: the old job's files.
        target: a rank of the new job.
        groups: keys of the parameters in each of its optimizer's groups.
        result: gets the states, and a line for each that cannot be had.
        strict: whether parameters that only one side's optimizer has are problems.
    """
    if saved.plan.optimizer is None:
        result.problems.append("the checkpoint holds no optimizer state; load without one")
    else:
        _Cutter(saved, target, saved.plan.optimizer, result, strict).run(groups)


class _Cutter:
    """Cuts optimizer state for one target."""

    def __init__(
        self, saved: Saved, target: Target, old: OptimizerRecord, result: Cut, strict: bool
    ) -> None:
        self._saved = saved
        self._metadata = target.metadata
        self._records = {record.key: record for record in target.metadata.params}
        self._result = result
        self._strict = strict
        self._old_groups = old.groups
        self._group_of = {
            name: index
            for index, group in enumerate(self._old_groups)
            for key in group.params
            for name in saved.plan.names_of(key)
        }

    def run(self, groups: Sequence[Sequence[str]]) -> None:
        """Fill groups and states of the result."""
        used: set[str] = set()
        for index, keys in enumerate(groups):
            names = [name for key in keys for name in self._names(key)]
            used.update(names)
            self._result.groups.append(GroupRecord(tuple(keys), self._options(index, names)))
            for key in keys:
                if key in self._result.model:  # else it has been reported, or is passed over
                    self._cut_key(key)
        if self._strict:
            self._result.problems += [
                f"the checkpoint has optimizer state of {name}, which is in no group of the "
                f"optimizer"
                for name in self._group_of
                if name not in used and self._saved.record(self._saved.key_of[name])
            ]

    def _names(self, key: str) -> list[str]:
        """Under which names the members of a target's key are saved."""
        record = self._records.get(key)
        members = [member.name for member in record.members] if record else [key]
        return [self._saved.resolve(name) for name in members]

    def _options(self, index: int, names: Sequence[str]) -> dict[str, Any]:
        """Hyperparameters of a group: those that all its parameters had."""
        if self._strict:
            self._result.problems += [
                f"{name} is in group {index} of the optimizer, but in none of the checkpoint's"
                for name in names
                if name not in self._group_of
            ]
        by_group: dict[int, str] = {}
        for name in names:
            if name in self._group_of:
                by_group.setdefault(self._group_of[name], name)
        found = [self._old_groups[each].options for each in by_group]
        if not found:
            return {}
        if any(options != found[0] for options in found):
            self._result.problems.append(
                f"group {index} of the optimizer joins parameters of several groups of the "
                f"checkpoint with different settings: {_listed(by_group.values())}. Create the "
                f"optimizer with the same groups (flatten_parameters joins parameters, too)"
            )
        return found[0]

    def _cut_key(self, key: str) -> None:
        names = self._names(key)
        old_keys = list(dict.fromkeys(self._saved.key_of[name] for name in names))
        if not any(self._saved.record(old) for old in old_keys):
            return
        states = dict(self._cut_sharded(key, names))
        for old in old_keys:
            for state, value in self._whole_states(key, old):
                self._agree(key, state, value, states)
        self._result.states[key] = states

    def _cut_sharded(self, key: str, names: Sequence[str]) -> Iterator[tuple[str, CutState]]:
        record, saved = self._records.get(key), self._saved
        old = None if record is None else saved.same_shard(record, self._metadata)
        state_record = None if old is None else saved.record(old)
        if old is not None and state_record is not None:
            for state in state_record.sharded:
                yield state, CutState(Kind.SHARD, saved.own.optimizer[state_name(old, state)])
            return
        full = [saved.cut_states(name) for name in names]
        for state in dict.fromkeys(state for states in full for state in states):
            sources = [states.get(state) for states in full]
            if record is None:
                yield state, CutState(Kind.DEVICE, sources[0])
            else:
                yield state, CutState(Kind.SHARD, self._joined(record, sources))

    def _joined(self, record: ParamRecord, sources: Sequence[TensorSource | None]) -> TensorSource:
        dtype = next(source.dtype for source in sources if source is not None)
        alike = [source and source.cast(dtype) for source in sources]
        own = self._metadata
        return slice_of(record, alike, own.rank, own.world_size, own.tensor_parts)

    def _whole_states(self, key: str, old: str) -> Iterator[tuple[str, CutState]]:
        record = self._saved.record(old)
        if record is None:
            return
        in_full = self._saved.cut_states(self._saved.plan.names_of(old)[0])
        for state in record.whole:
            source = self._saved.own.optimizer[state_name(old, state)]
            if state in in_full:
                continue
            if _is_number(source.spec) or self._fits_as_it_is(key, old):
                yield state, CutState(Kind.HOST if state in record.host else Kind.DEVICE, source)
            else:
                self._result.problems.append(
                    f"optimizer state {state} of {old} has shape {source.shape}, neither that of "
                    f"the parameter nor one number, so it cannot be cut anew. Load it with the "
                    f"wrapping and the {self._saved.plan.world_size} ranks that it was saved with, "
                    f"or load without optimizer"
                )
        for state, value in record.values.items():
            yield state, CutState(Kind.HOST, value)

    def _fits_as_it_is(self, key: str, old: str) -> bool:
        record = self._records.get(key)
        if record is None:
            return old in self._saved.plan.whole
        return self._saved.same_shard(record, self._metadata) == old

    def _agree(self, key: str, state: str, new: CutState, states: dict[str, CutState]) -> None:
        """Add a value that all parameters joined in ``key`` must have in common."""
        known = states.setdefault(state, new)
        if known is new or _equal(known.value, new.value):
            return
        problem = (
            f"{key} joins parameters whose optimizer state {state} differs. Load with the wrapping "
            f"that was used for saving"
        )
        if problem not in self._result.problems:
            self._result.problems.append(problem)


def _is_number(spec: TensorSpec) -> bool:
    """One number, or the empty tensor that torch_xla's optimizers keep for what they do not use."""
    return spec.shape in ((), (0,), (1,))


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, TensorSource) and isinstance(second, TensorSource):
        return first.spec == second.spec and torch.equal(first.load(), second.load())
    return type(first) is type(second) and first == second


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return ", ".join(every[:SHOWN]) + more
