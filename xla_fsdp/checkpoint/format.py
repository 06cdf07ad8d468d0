"""What a shard file says about itself: names, shapes and a version. No I/O.

Words: a *record* describes one entry of a rank's state dict that holds a shard; its *members* are
the original parameters joined in it, in order (one, unless parameters were flattened together); an
*alias* is a second name of a tied parameter, the *canonical* name is the one that has a record.
Tensor parallelism makes several *parts* of a model, each of which ranks of its own share: rank r of
files of p parts and n shards is shard r % n of part r // n.
Always true: an object of these classes is consistent, however it was made; ``to_dict`` gives
``str``, ``int``, ``list`` and ``dict`` only, so ``torch.load(weights_only=True)`` reads it back.
Where the elements of a shard lie is ``layout``'s business; files are ``shard_files``'.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from xla_fsdp.checkpoint.errors import (
    CheckpointError,
    check_rank,
    dtype_named,
    item,
    refuse_repeated,
    typed,
)
from xla_fsdp.checkpoint.fingerprint import is_fingerprint
from xla_fsdp.checkpoint.optimizer_format import OptimizerRecord
from xla_fsdp.distributed.placement import local_shape
from xla_fsdp.distributed.shard_layout import ShardLayout

FORMAT = "xla_fsdp"

VERSION = 3

READABLE_VERSIONS = (1, 2, 3)

"""Version 2 added groups, global_rank, optimizer and fingerprints, version 3 tensor_parts and
tensor_dim; all else is as in version 1."""

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class MemberRecord:
    """One original parameter: its fully qualified name and full shape, and the dim along which
    every part of the model has a slice of it; None if each part has all of it."""

    name: str
    shape: tuple[int, ...]
    tensor_dim: int | None = None

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise CheckpointError(f"{self.name}: shape {self.shape} has a negative size")
        if self.tensor_dim is not None and self.tensor_dim not in range(len(self.shape)):
            raise CheckpointError(
                f"{self.name}: shape {self.shape} has no dim {self.tensor_dim}, its tensor_dim"
            )

    @property
    def numel(self) -> int:
        """Number of elements of the full parameter."""
        return math.prod(self.shape)

    def local_shape(self, parts: int) -> tuple[int, ...]:
        """Shape of what each of so many parts has."""
        return tuple(local_shape(self.shape, self.tensor_dim, parts))

    def local_numel(self, parts: int) -> int:
        """Number of elements of that."""
        return math.prod(self.local_shape(parts))


@dataclass(frozen=True)
class ParamRecord:
    """One sharded entry of the state dict.

    Args:
        key: its name in the state dict.
        dtype: of the shard, such as ``"float32"``.
        multiple: the shard's length is a multiple of this; see ``ShardLayout``.
        members: the original parameters joined in it, in order; at least one.
        by_rows: whether a shard has the shape of whole rows of its one member's dim 0, instead of
            being a vector.
    """

    key: str
    dtype: str
    multiple: int
    members: tuple[MemberRecord, ...]
    by_rows: bool = False

    def __post_init__(self) -> None:
        dtype_named(self.dtype, f"{self.key}: dtype")
        if self.multiple < 1:
            raise CheckpointError(f"{self.key}: multiple is {self.multiple}, must be at least 1")
        if not self.members:
            raise CheckpointError(f"{self.key}: has no members, must have at least one")
        if self.by_rows:
            _check_rows(self)

    def layout(self, world_size: int, parts: int = 1) -> ShardLayout:
        """How the joined members are cut for ``world_size`` ranks, those of all parts together."""
        numel = sum(member.local_numel(parts) for member in self.members)
        return ShardLayout((numel,), world_size // parts, self.multiple)


@dataclass(frozen=True)
class ShardMetadata:
    """Everything needed, beside the state dicts, to merge the shards of a model.

    Args:
        rank: of the saving process among those that share the model, its parts one after the other.
        world_size: how many they are.
        params: one record for each sharded entry of the state dict.
        ties: alias to canonical name. An alias of a parameter that is not flattened is a key of
            the state dict too, with the same shard.
        buffers: original dtype of each buffer that is saved in another one.
        version: of this format.
        groups: the sharding groups, if the ranks are divided into several: each group shares a
            whole model, so shards of the same ``rank`` in different groups are equal. None if all
            ranks share one.
        global_rank: of the saving process among all groups; None if there is one group.
        optimizer: what is saved of the optimizer; None for nothing.
        tensor_parts: how many parts tensor parallelism has made of the model.
        fingerprints: of tensors in the file, by their names in it (``model_name``,
            ``state_name``); those that are not listed cannot be verified.
    """

    rank: int
    world_size: int
    params: tuple[ParamRecord, ...]
    ties: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    version: int = VERSION
    groups: Groups | None = None
    global_rank: int | None = None
    optimizer: OptimizerRecord | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)
    tensor_parts: int = 1

    def __post_init__(self) -> None:
        _check_version(self.version)
        check_rank(self.rank, self.world_size)
        refuse_repeated("key", (p.key for p in self.params))
        names = [m.name for p in self.params for m in p.members]
        refuse_repeated("parameter name", names)
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
        for name, text in self.fingerprints.items():
            if not is_fingerprint(text):
                raise CheckpointError(
                    f"fingerprints: {name} {text!r} is not 'crc32:' and 8 digits of 0-9, a-f"
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, to be saved under the key ``shard_metadata``."""
        own = {
            "groups": None if self.groups is None else [list(group) for group in self.groups],
            "global_rank": self.global_rank,
            "optimizer": None if self.optimizer is None else self.optimizer.to_dict(),
            "fingerprints": dict(self.fingerprints),
        }
        parts = {"tensor_parts": self.tensor_parts} if self.version > 2 else {}
        return {**self._first_version(), **(own if self.version > 1 else {}), **parts}

    def _first_version(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": self.version,
            "rank": self.rank,
            "world_size": self.world_size,
            "params": [_record_to_dict(record, self.version) for record in self.params],
            "ties": dict(self.ties),
            "buffers": dict(self.buffers),
        }

    @classmethod
    def from_dict(cls, data: Any) -> ShardMetadata:
        """The inverse of ``to_dict``.

        Raises:
            CheckpointError: if anything is missing, of the wrong type, out of range or
                contradictory, or the version is not one this library reads.
        """
        if typed(data, dict, "shard_metadata").get("format") != FORMAT:
            raise CheckpointError(f"format is {data.get('format')!r}, expected {FORMAT!r}")
        # The version decides what the other keys mean: nothing else is looked at before it.
        version = item(data, "version", int, "")
        _check_version(version)
        own = _second_version(data) if version > 1 else {}
        if version > 2:
            own["tensor_parts"] = item(data, "tensor_parts", int, "")
        return cls(
            rank=item(data, "rank", int, ""),
            world_size=item(data, "world_size", int, ""),
            params=tuple(
                _record_from_dict(record, f"params.{i}", version)
                for i, record in enumerate(item(data, "params", list, ""))
            ),
            ties=_strings(item(data, "ties", dict, ""), "ties"),
            buffers=_strings(item(data, "buffers", dict, ""), "buffers"),
            version=version,
            **own,
        )


# ---------------------------------------------------------------- names in a file


def model_name(key: str) -> str:
    """Where the state dict's ``key`` lies among a file's tensors."""
    return f"model/{key}"


def state_name(key: str, state: str) -> str:
    """Where one optimizer state of ``key`` lies among a file's tensors.

    A slash in ``key`` or ``state`` is written as ``%2F``, so that two names never meet.
    """
    return f"optim/{_escaped(key)}/{_escaped(state)}"


def _escaped(name: str) -> str:
    return name.replace("%", "%25").replace("/", "%2F")


# ---------------------------------------------------------------- plain values


def _second_version(data: dict[str, Any]) -> dict[str, Any]:
    """What version 2 has more than version 1."""
    groups, global_rank, optimizer = (
        item(data, key, object, "") for key in ("groups", "global_rank", "optimizer")
    )
    return {
        "groups": None if groups is None else _groups(groups),
        "global_rank": None if global_rank is None else typed(global_rank, int, "global_rank"),
        "optimizer": None if optimizer is None else OptimizerRecord.from_dict(optimizer),
        "fingerprints": _strings(item(data, "fingerprints", dict, ""), "fingerprints"),
    }


def _groups(data: Any) -> Groups:
    return tuple(
        tuple(typed(rank, int, f"groups.{i}") for rank in typed(group, list, f"groups.{i}"))
        for i, group in enumerate(typed(data, list, "groups"))
    )


def _record_to_dict(record: ParamRecord, version: int) -> dict[str, Any]:
    members: list[dict[str, Any]] = [
        {"name": m.name, "shape": list(m.shape)} for m in record.members
    ]
    if version > 2:
        for member, m in zip(members, record.members, strict=True):
            member["tensor_dim"] = m.tensor_dim
    return {
        "key": record.key,
        "dtype": record.dtype,
        "multiple": record.multiple,
        "members": members,
        "by_rows": record.by_rows,
    }


def _record_from_dict(data: Any, where: str, version: int) -> ParamRecord:
    typed(data, dict, where)
    members = enumerate(item(data, "members", list, where))
    return ParamRecord(
        key=item(data, "key", str, where),
        dtype=item(data, "dtype", str, where),
        multiple=item(data, "multiple", int, where),
        members=tuple(_member_from_dict(m, f"{where}.members.{i}", version) for i, m in members),
        by_rows=item(data, "by_rows", bool, where),
    )


def _member_from_dict(data: Any, where: str, version: int) -> MemberRecord:
    name = item(typed(data, dict, where), "name", str, where)
    sizes = enumerate(item(data, "shape", list, where))
    shape = tuple(typed(size, int, f"{where}.shape.{i}") for i, size in sizes)
    dim = item(data, "tensor_dim", object, where) if version > 2 else None
    return MemberRecord(
        name, shape, None if dim is None else typed(dim, int, f"{where}.tensor_dim")
    )


def _strings(data: dict[Any, Any], where: str) -> dict[str, str]:
    return {typed(k, str, where): typed(v, str, f"{where}.{k}") for k, v in data.items()}


# ---------------------------------------------------------------- checks


def _check_version(version: int) -> None:
    """Raise ``CheckpointError`` unless this library reads ``version``."""
    if version not in READABLE_VERSIONS:
        readable = ", ".join(str(v) for v in READABLE_VERSIONS)
        raise CheckpointError(
            f"format version {version} is not known; this xla_fsdp reads version {readable}. "
            f"Upgrade xla_fsdp to read this file."
        )


def _check_rows(record: ParamRecord) -> None:
    member = record.members[0]
    row = max(1, math.prod(member.shape[1:]))
    is_row = record.multiple == row or (member.tensor_dim and row % record.multiple == 0)
    if len(record.members) > 1 or not member.shape or not is_row:
        raise CheckpointError(
            f"{record.key}: is sharded by rows, so it must have one member of at least one dim, "
            f"and a row's number of elements as its multiple"
        )


def _check_groups(metadata: ShardMetadata) -> None:
    if metadata.groups is None:
        return
    refuse_repeated("groups: rank", (str(rank) for group in metadata.groups for rank in group))
    if {len(group) for group in metadata.groups} != {metadata.world_size}:
        raise CheckpointError(
            f"groups: {metadata.groups} must all have {metadata.world_size} ranks, the world_size"
        )
    at = metadata.global_rank
    if at is not None and not any(group[metadata.rank] == at for group in metadata.groups):
        raise CheckpointError(
            f"global_rank {at} is not at place {metadata.rank} (the rank) of one of the groups "
            f"{metadata.groups}"
        )


def _check_parts(metadata: ShardMetadata) -> None:
    """Parts are shared by equally many ranks, and have equal slices."""
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
        row = math.prod(record.members[0].local_shape(parts)[1:])
        if record.by_rows and record.multiple != max(1, row):
            raise CheckpointError(
                f"{record.key}: is sharded by rows of {row} elements, but its multiple is "
                f"{record.multiple}"
            )


def _check_states(metadata: ShardMetadata) -> None:
    """A state that is sharded has to be like a shard."""
    if metadata.optimizer is None:
        return
    keys = {record.key for record in metadata.params}
    for key, state in metadata.optimizer.states.items():
        if state.sharded and key not in keys:
            raise CheckpointError(
                f"optimizer.states.{key}: {state.sharded[0]} is sharded, but params has no {key}"
            )
