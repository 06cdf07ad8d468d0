"""The metadata in checkpoint files: names, shapes, optimizer records, versions. No I/O.

A shard file's metadata is a ``ShardMetadata``: a ``ParamRecord`` for each sharded entry of the
state dict, with a ``MemberRecord`` for each original parameter in it (one, unless parameters were
flattened together), and an ``OptimizerRecord``. Tensor parallelism divides a model into *parts*,
each of which is sharded over ranks of its own: with n shards of each part, rank r has shard r % n
of part r // n. So does an axis of experts, but what is no expert is sharded over the ranks of all
parts.

Invariants: every object is validated when it is made; ``to_dict`` returns JSON values only, which
``torch.load(weights_only=True)`` accepts too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from xla_fsdp.checkpoint.errors import (
    CheckpointError,
    check_rank,
    checked_shape,
    dtype_named,
    item,
    refuse_repeated,
    shown,
    typed,
)
from xla_fsdp.checkpoint.files.checksum import is_checksum
from xla_fsdp.checkpoint.format.codec import Record, decoded, encoded
from xla_fsdp.distributed.placement import local_shape
from xla_fsdp.distributed.shard_layout import ROWS, ShardLayout

FORMAT = "xla_fsdp"
VERSION = 5
# Version 2 added groups, global_rank, optimizer and fingerprints; version 3 added tensor_parts and
# tensor_dim; version 4 added step, job and fingerprints of blocks; version 5 added over_parts.
READABLE_VERSIONS = (1, 2, 3, 4, 5)

# Values saved beside the model: JSON under this key of a .safetensors header, and tensors with this
# prefix in their names.
VALUES_KEY = "xla_fsdp.values"
VALUE_PREFIX = "values/"
SUFFIXES = ("safetensors", "pth")

Groups = tuple[tuple[int, ...], ...]


def model_name(key: str) -> str:
    """Return the name in a file of the tensor under ``key`` in the state dict."""
    return f"model/{key}"


def state_name(key: str, state: str) -> str:
    """Return the name in a file of one optimizer state of the parameter ``key``.

    A slash in ``key`` or ``state`` becomes ``%2F``, so that no two states get the same name.
    """
    return f"optim/{_escaped(key)}/{_escaped(state)}"


def _escaped(name: str) -> str:
    return name.replace("%", "%25").replace("/", "%2F")


# ---------------------------------------------------------------- optimizer


UNSHARDED = "unsharded."
"""Prefix of the names of optimizer states that are of a whole parameter which is sharded: tensors
of another shape than its own, the same on every rank."""


class StateKind(Enum):
    """The kind of one optimizer state of one parameter."""

    SHARD = "shard"  # a tensor sharded as the parameter is
    DEVICE = "device"  # another tensor, on the parameter's device
    HOST = "host"  # another tensor, in host memory
    VALUE = "value"  # a JSON value, such as a number


@dataclass(frozen=True)
class StateEntry:
    """One optimizer state of one parameter: a tensor, a ``TensorSource`` or a JSON value."""

    kind: StateKind
    value: Any


@dataclass(frozen=True)
class GroupRecord(Record):
    """A parameter group: the keys in it, in order, and its hyperparameters (``lr``, ...)."""

    params: tuple[str, ...]
    options: dict[str, Any]

    @classmethod
    def of(cls, group: Mapping[str, Any], params: Iterable[str]) -> GroupRecord:
        """Return the record of a group of an optimizer's state dict."""
        return cls(tuple(params), {n: value for n, value in group.items() if n != "params"})


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer's state in a running job, as loaded by one rank, or in a full checkpoint.

    Args:
        groups: in the optimizer's order.
        states: by key of the parameter, then by name (``exp_avg``); without parameters that have no
            state, as before the first step.
    """

    groups: tuple[GroupRecord, ...]
    states: dict[str, dict[str, StateEntry]]

    def record(self) -> OptimizerRecord:
        """Return the record of this state for a file's metadata."""
        states = {key: StateRecord.of(entries) for key, entries in self.states.items()}
        return OptimizerRecord(self.groups, states)

    def tensors(self) -> dict[str, dict[str, Any]]:
        """Return the states that are tensors, by key and name."""
        return {
            key: {n: e.value for n, e in entries.items() if e.kind is not StateKind.VALUE}
            for key, entries in self.states.items()
        }

    def named_tensors(self) -> dict[str, Any]:
        """Return the same by name in a file."""
        tensors = self.tensors().items()
        return {state_name(key, n): value for key, own in tensors for n, value in own.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return an optimizer's state dict with keys in place of numbers of parameters, as FSDP2's
        ``get_optimizer_state_dict`` has it."""
        return {
            "state": {
                key: {n: e.value for n, e in own.items()} for key, own in self.states.items()
            },
            "param_groups": [
                {**group.options, "params": list(group.params)} for group in self.groups
            ],
        }

    def unsharded(
        self,
        names_of: Callable[[str], Sequence[str]],
        full: Mapping[tuple[str, str], Any],
        other: Callable[[Any], Any] = lambda value: value,
    ) -> OptimizerState:
        """Return the state by original names.

        Args:
            names_of: returns those of the parameters under a key, in order.
            full: what is sharded, by original name and name of the state.
            other: converts any other value, which all parameters under a key get.
        """
        groups = (
            GroupRecord(tuple(name for key in each.params for name in names_of(key)), each.options)
            for each in self.groups
        )
        states = {
            name: {
                what.removeprefix(UNSHARDED): StateEntry(
                    e.kind, full[name, what] if e.kind is StateKind.SHARD else other(e.value)
                )
                for what, e in entries.items()
            }
            for key, entries in self.states.items()
            for name in names_of(key)
        }
        return OptimizerState(tuple(groups), states)


@dataclass(frozen=True)
class StateRecord(Record):
    """The optimizer states of one key in a file: names of tensors, and JSON values.

    Args:
        sharded: names of tensors sharded as the parameter is.
        whole: names of all other tensors, such as a step counter.
        values: JSON values by name, which are saved here and not as tensors.
        host: names in ``whole`` of tensors that were in host memory, not on the parameter's device.
    """

    sharded: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    host: tuple[str, ...] = field(default=(), metadata={"required": False})

    @classmethod
    def of(cls, entries: Mapping[str, StateEntry]) -> StateRecord:
        """Return the record of a parameter's entries, by name."""

        def names(*kinds: StateKind) -> tuple[str, ...]:
            return tuple(name for name, entry in entries.items() if entry.kind in kinds)

        return cls(
            sharded=names(StateKind.SHARD),
            whole=names(StateKind.DEVICE, StateKind.HOST),
            values={name: entries[name].value for name in names(StateKind.VALUE)},
            host=names(StateKind.HOST),
        )

    def entries(self, tensor: Callable[[str], Any]) -> dict[str, StateEntry]:
        """Return the states by name; ``tensor`` returns the tensor of a name. Inverse of ``of``."""
        kinds = dict.fromkeys(self.sharded, StateKind.SHARD)
        host = set(self.host)
        kinds |= {n: StateKind.HOST if n in host else StateKind.DEVICE for n in self.whole}
        states = {name: StateEntry(kind, tensor(name)) for name, kind in kinds.items()}
        return states | {n: StateEntry(StateKind.VALUE, v) for n, v in self.values.items()}


@dataclass(frozen=True)
class OptimizerRecord(Record):
    """An optimizer's parameter groups in a file, and the states of every key that has any."""

    groups: tuple[GroupRecord, ...]
    states: dict[str, StateRecord]

    def __post_init__(self) -> None:
        refuse_repeated("optimizer key", (key for group in self.groups for key in group.params))
        for key, state in self.states.items():
            refuse_repeated(f"optimizer state of {key}:", state.sharded + state.whole)
            if strange := set(state.host) - set(state.whole):
                raise CheckpointError(
                    f"optimizer state of {key}: {min(strange)} is in host, but not in whole"
                )
            for name in state.values.keys() & {*state.sharded, *state.whole}:
                raise CheckpointError(f"optimizer state of {key}: {name} appears twice")


# ---------------------------------------------------------------- model


@dataclass(frozen=True)
class MemberRecord(Record):
    """One original parameter.

    Args:
        name: its fully qualified name in the model before wrapping.
        shape: global, unsharded.
        tensor_dim: the dim that tensor parallelism cuts; None if every part has the same tensor.
    """

    name: str
    shape: Annotated[tuple[int, ...], checked_shape]
    tensor_dim: int | None = field(default=None, metadata={"since": 3})

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise CheckpointError(f"{self.name}: shape {self.shape} has a negative size")
        if self.tensor_dim is not None and self.tensor_dim not in range(len(self.shape)):
            raise CheckpointError(
                f"{self.name}: shape {self.shape} has no dim {self.tensor_dim}, its tensor_dim"
            )

    @property
    def numel(self) -> int:
        """Number of elements of the global parameter."""
        return math.prod(self.shape)

    def local_shape(self, parts: int) -> tuple[int, ...]:
        """Return the shape in each of ``parts`` tensor-parallel parts."""
        return tuple(local_shape(self.shape, self.tensor_dim, parts))

    def local_numel(self, parts: int) -> int:
        """Return the number of elements in each of ``parts`` tensor-parallel parts."""
        return math.prod(self.local_shape(parts))


@dataclass(frozen=True)
class ParamRecord(Record):
    """One sharded entry of the state dict.

    Args:
        key: its name in the state dict.
        dtype: of the shard, such as ``"float32"``.
        multiple: the shard's length is a multiple of this, as in ``ShardLayout``; with ``by_rows``
            a row's elements, or ``ROWS`` times as many.
        members: the original parameters flattened into it, in order; at least one.
        by_rows: whether a shard is a tensor of rows along dim 0 of its one parameter, and not a
            vector.
        over_parts: whether the ranks of all parts share it, so that rank r has shard r.
    """

    key: str
    dtype: str
    multiple: int
    members: tuple[MemberRecord, ...]
    by_rows: bool = False
    over_parts: bool = field(default=False, metadata={"since": 5})

    def __post_init__(self) -> None:
        dtype_named(self.dtype, f"{self.key}: dtype")
        if self.multiple < 1:
            raise CheckpointError(f"{self.key}: multiple is {self.multiple}, must be at least 1")
        if not self.members:
            raise CheckpointError(f"{self.key}: has no members, must have at least one")
        if self.by_rows:
            self._check_rows()
        if self.over_parts and any(each.tensor_dim is not None for each in self.members):
            raise CheckpointError(
                f"{self.key}: over_parts is of what parts do not cut, but it has a tensor_dim"
            )

    def layout(self, world_size: int, parts: int = 1) -> ShardLayout:
        """Return the layout of elements; ``world_size`` counts the ranks of all parts."""
        parts = self.parts_of(parts)
        numel = sum(member.local_numel(parts) for member in self.members)
        return ShardLayout((numel,), world_size // parts, self.multiple)

    def parts_of(self, parts: int) -> int:
        """Return of how many parts of the model each has shards of its own."""
        return 1 if self.over_parts else parts

    def _check_rows(self) -> None:
        member = self.members[0]
        if len(self.members) > 1 or not member.shape:
            raise CheckpointError(
                f"{self.key}: is sharded by rows, so it must have one member of at least one dim"
            )


OF_RANK = ("rank", "global_rank", "fingerprints")
"""Keys of the metadata whose values are another rank's own."""


class FileMetadata(dict[str, Any]):
    """The metadata in a file, of which a ``ShardMetadata`` is made once. It is not changed.

    Args:
        content: of the file.
        like: metadata of another rank's file, whose values are taken where ``content`` has none.
    """

    def __init__(self, content: Mapping[str, Any], like: FileMetadata | None = None) -> None:
        super().__init__(content if like is None else {**like, **content})
        self.like = like
        self.known: ShardMetadata | None = None


@dataclass(frozen=True)
class ShardMetadata(Record):
    """All that is needed, beside the state dicts, to merge the shards of a model.

    Args:
        rank: of the saving process in its sharding group, where part 0's ranks come first, then
            part 1's.
        world_size: number of ranks in a sharding group.
        params: one record for each sharded entry of the state dict.
        ties: alias to canonical name. Only the canonical name has a record. An alias of a parameter
            that is not flattened is also a key of the state dict, with the same shard.
        buffers: original dtype of each buffer that is saved in another dtype.
        version: of this format.
        groups: the global ranks of each sharding group, if there are several; the groups hold
            replicas of the model. None if all ranks are one group.
        global_rank: of the saving process among all groups; None if there is one group.
        optimizer: record of the saved optimizer state; None if none is saved.
        fingerprints: checksums of tensors by their names in the file (``model_name``,
            ``state_name``); other tensors cannot be verified.
        tensor_parts: number of tensor-parallel parts of the model.
        step: that was saved; None if ``save_checkpoint`` did not write the file.
        job: token of the job that saved it, or None.
    """

    rank: int
    world_size: int
    params: tuple[ParamRecord, ...]
    ties: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    version: int = VERSION
    groups: Groups | None = field(default=None, metadata={"since": 2})
    global_rank: int | None = field(default=None, metadata={"since": 2})
    optimizer: OptimizerRecord | None = field(default=None, metadata={"since": 2})
    fingerprints: dict[str, str] = field(default_factory=dict, metadata={"since": 2})
    tensor_parts: int = field(default=1, metadata={"since": 3})
    step: int | None = field(default=None, metadata={"since": 4})
    job: str | None = field(default=None, metadata={"since": 4})

    def __post_init__(self) -> None:
        _check_version(self.version)
        check_rank(self.rank, self.world_size)
        refuse_repeated("key", (p.key for p in self.params))
        names = {m.name for p in self.params for m in p.members}
        refuse_repeated("parameter name", (m.name for p in self.params for m in p.members))
        for alias, canonical in self.ties.items():
            if alias in names or canonical in self.ties:
                raise CheckpointError(
                    f"ties: {alias} -> {canonical} must lead from an alias without a record "
                    f"to a name that is not an alias itself"
                )
        for name, dtype in self.buffers.items():
            dtype_named(dtype, f"buffers: {name}")
        _check_groups(self)
        _check_parts(self)
        _check_states(self)
        _check_checksums(self.fingerprints)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, to be saved under the key ``shard_metadata``."""
        own = encoded(self, "", self.version)
        return {"format": FORMAT, "version": self.version, **own}

    @classmethod
    def from_dict(cls, data: Any) -> ShardMetadata:
        """Read the result of ``to_dict``.

        Raises:
            CheckpointError: if anything is missing, of the wrong type, out of range or
                contradictory, or the version is not in ``READABLE_VERSIONS``.
        """
        if not isinstance(data, FileMetadata):
            return cls._read(data)
        if data.known is None:
            data.known = cls._read(data) if data.like is None else cls._of_rank(data, data.like)
        return data.known

    @classmethod
    def _of_rank(cls, data: FileMetadata, like: FileMetadata) -> ShardMetadata:
        """Read what is of this rank; the rest was checked with that of another rank."""
        made = copy(cls.from_dict(like))
        for key in OF_RANK:
            object.__setattr__(made, key, data.get(key, getattr(made, key)))
        check_rank(made.rank, made.world_size)
        _check_groups(made)
        _check_checksums(made.fingerprints)
        return made

    @classmethod
    def _read(cls, data: Any) -> ShardMetadata:
        if typed(data, dict, "shard_metadata").get("format") != FORMAT:
            raise CheckpointError(f"format is {shown(data.get('format'))}, expected {FORMAT!r}")
        # First, as the version decides which other keys exist and what they mean.
        version = item(data, "version", int, "")
        _check_version(version)
        return decoded(cls, data, "", version)


def _check_version(version: int) -> None:
    if version not in READABLE_VERSIONS:
        readable = ", ".join(str(v) for v in READABLE_VERSIONS)
        raise CheckpointError(
            f"format version {version} is not known; this xla_fsdp reads version {readable}. "
            f"Upgrade xla_fsdp to read this file."
        )


def _check_checksums(checksums: Mapping[str, str]) -> None:
    for name, text in checksums.items():
        if not is_checksum(text):
            raise CheckpointError(
                f"fingerprints: {name} {shown(text)} is not 'crc32:' and 8 digits of 0-9, a-f for "
                f"each block"
            )


def _check_groups(metadata: ShardMetadata) -> None:
    if metadata.groups is None:
        return
    refuse_repeated("groups: rank", (str(rank) for group in metadata.groups for rank in group))
    if {len(group) for group in metadata.groups} != {metadata.world_size}:
        raise CheckpointError(
            f"groups: {shown(metadata.groups)} must all have {metadata.world_size} ranks, the "
            f"world_size"
        )
    global_rank = metadata.global_rank
    if global_rank is not None and all(g[metadata.rank] != global_rank for g in metadata.groups):
        raise CheckpointError(
            f"global_rank {global_rank} is not at place {metadata.rank} (the rank) of one of the "
            f"groups {shown(metadata.groups)}"
        )


def _check_parts(metadata: ShardMetadata) -> None:
    parts = metadata.tensor_parts
    if parts < 1 or metadata.world_size % parts:
        raise CheckpointError(
            f"tensor_parts is {parts}, which must divide the world_size, {metadata.world_size}"
        )
    for record in metadata.params:
        for member in record.members:
            if member.tensor_dim is not None and member.shape[member.tensor_dim] % parts:
                raise CheckpointError(
                    f"{member.name}: dim {member.tensor_dim} of shape {member.shape} cannot be cut "
                    f"into {parts} equal parts"
                )
        row = max(1, math.prod(record.members[0].local_shape(parts)[1:]))
        if record.by_rows and record.multiple not in (row, ROWS * row):
            raise CheckpointError(
                f"{record.key}: is sharded by rows of {row} elements, but its multiple is "
                f"{record.multiple}"
            )


def _check_states(metadata: ShardMetadata) -> None:
    if metadata.optimizer is None:
        return
    keys = {record.key for record in metadata.params}
    for key, state in metadata.optimizer.states.items():
        if state.sharded and key not in keys:
            raise CheckpointError(
                f"optimizer.states.{key}: {state.sharded[0]} is sharded, but params has no {key}"
            )
