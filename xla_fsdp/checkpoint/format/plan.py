"""Plan how to merge shards, from the metadata and state dict of one of them, and assemble full
(unsharded, global) tensors from the shards of all ranks, without reading any.

The shards are in the format of ``xla_fsdp.checkpoint.format.records`` or in that of
``torch_xla.distributed.fsdp``, whose wrappers put their attribute names into every key:
``_fsdp_wrapped_module.`` for an FSDP unit, ``_fpw_module.`` for flattening.

Invariants: names in a plan are those of the model before it was wrapped; metadata that has neither
format, or contradicts its state dict, raises ``CheckpointError``; names that share memory in the
shards share one ``TensorSource`` object in what is assembled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch

from xla_fsdp.checkpoint.errors import (
    CheckpointError,
    check_rank,
    checked_shape,
    dtype_name,
    dtype_named,
    find_bad_names,
    item,
    raise_if,
    shown,
    typed,
)
from xla_fsdp.checkpoint.files.tensor_source import (
    JoinedShards,
    Part,
    TensorSource,
    TensorSpec,
    global_of,
)
from xla_fsdp.checkpoint.format.alike_files import TensorOfAll
from xla_fsdp.checkpoint.format.records import (
    FORMAT,
    MemberRecord,
    OptimizerRecord,
    OptimizerState,
    ParamRecord,
    ShardMetadata,
    model_name,
    state_name,
)
from xla_fsdp.checkpoint.format.shard_files import Shard, of_all
from xla_fsdp.distributed.shard_layout import ShardLayout, join_name

OWN_KEYS = ("version", "params", "ties", "buffers", "groups", "optimizer", "tensor_parts")
TORCH_XLA_KEYS = ("shard_info", "flatten_info", "buffer_info")

WRAPPERS = ("_fsdp_wrapped_module.", "_fpw_module.")
SHARD_PREFIX = "_fsdp_shard"


@dataclass(frozen=True)
class ShardedEntry:
    """One sharded entry of the state dicts, sharded along dim 0.

    Args:
        members: the parameters flattened into it, in order; exactly one if ``row_shape`` is not
            empty.
        layout: of elements over the ranks of one tensor-parallel part.
        row_shape: a shard's shape without dim 0; ``()`` if the shard is a vector of elements.
        dtype: of every rank's shard.
        parts: number of tensor-parallel parts of the model.
    """

    members: tuple[MemberRecord, ...]
    layout: ShardLayout
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    parts: int = 1

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of every rank's shard."""
        rows = self.layout.shard_numel // max(1, math.prod(self.row_shape))
        return (rows, *self.row_shape)


@dataclass(frozen=True)
class MergePlan:
    """How to merge the state dicts of ``world_size`` ranks, whichever format they are in.

    Args:
        world_size: number of ranks.
        sharded: state dict key to its sharded entry.
        unsharded: state dict key of every other entry (buffers, parameters that are not sharded)
            to its name in the result. These are equal on all ranks, and rank 0's is taken.
        dtypes: state dict key to original dtype, for unsharded tensors saved in another dtype.
        ties: alias to canonical name, both as in the result. Aliases that are keys of the state
            dicts are in neither ``sharded`` nor ``unsharded``.
        optimizer: optimizer state in the shards, by state dict key.
    """

    world_size: int
    sharded: dict[str, ShardedEntry]
    unsharded: dict[str, str]
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    optimizer: OptimizerRecord | None = None

    def names_of(self, key: str) -> list[str]:
        """Return the names in the result of the parameters or buffer under a state dict key."""
        if key in self.sharded:
            return [member.name for member in self.sharded[key].members]
        return [self.unsharded[key]]


@dataclass(frozen=True)
class FullCheckpoint:
    """A model and its optimizer before sharding.

    Args:
        model: by name: sources of tensors, and other values; in the order of rank 0's state dict,
            aliases last.
        ties: alias to canonical name.
        optimizer: by names of the model; None if the shards hold no optimizer state.
    """

    model: dict[str, Any]
    ties: dict[str, str]
    optimizer: OptimizerState | None

    def __str__(self) -> str:
        """Return its size; tied tensors count once."""
        tensors = {id(v): v for v in self.model.values() if isinstance(v, TensorSource)}
        numel = sum(math.prod(tensor.shape) for tensor in tensors.values())
        text = f"{len(tensors)} parameters and buffers, {numel:,} elements"
        if self.optimizer is not None:
            text += f", optimizer state of {len(self.optimizer.states)}"
        return text


class Identity(NamedTuple):
    """The format of a shard, its rank, the number of ranks, and the save that wrote it."""

    format: str
    rank: int
    world_size: int
    step: int | None = None
    job: str | None = None


def identify(metadata: Any) -> Identity:
    """Return the identity of a shard; step and job are None if its metadata does not have them."""
    if _is_torch_xla(typed(metadata, dict, "shard_metadata")):
        return Identity("torch_xla", *_torch_xla_identity(metadata))
    if metadata.get("format") == FORMAT:
        own = ShardMetadata.from_dict(metadata)
        return Identity(FORMAT, own.rank, own.world_size, own.step, own.job)
    raise CheckpointError(
        "shard_metadata is of neither xla_fsdp nor torch_xla; expected what "
        "model.get_shard_metadata() returns"
    )


def absent_names(metadata: dict[str, Any], state_dict: Mapping[str, Any]) -> list[str]:
    """Return the parameters that the metadata lists and the state dict of a script lacks, as it has
    left a part of the model out; they are not merged."""
    if _is_torch_xla(metadata):
        members = dict(_members_of_keys(metadata))
    else:
        members = {r.key: r.members for r in ShardMetadata.from_dict(metadata).params}
    return [each.name for key, own in members.items() if key not in state_dict for each in own]


def shared_part(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the metadata that is equal on all ranks of one model."""
    keys = TORCH_XLA_KEYS if _is_torch_xla(metadata) else OWN_KEYS
    return {key: metadata[key] for key in keys if key in metadata}


def make_plan(
    metadata: dict[str, Any], state_dict: Mapping[str, Any], *, optimizer: bool = True
) -> MergePlan:
    """Return the plan to merge this shard with those of the other ranks. Of torch_xla's metadata,
    the state dict tells the lengths and dtypes of shards."""
    identify(metadata)
    plan = (
        _torch_xla_plan(metadata, state_dict)
        if _is_torch_xla(metadata)
        else _own_plan(ShardMetadata.from_dict(metadata), state_dict)
    )
    if not optimizer:
        plan = replace(plan, optimizer=None)
    raise_if(_name_problems(plan))
    return plan


def _own_plan(metadata: ShardMetadata, state_dict: Mapping[str, Any]) -> MergePlan:
    size, parts = metadata.world_size, metadata.tensor_parts
    sharded = {record.key: _own_entry(record, size, parts) for record in metadata.params}
    absent = [key for key in sharded if key not in state_dict]
    if metadata.step is not None or len(absent) == len(sharded):
        raise_if([f"model has no {key}, which shard_metadata lists" for key in absent])
    for key in absent:
        del sharded[key]
    unsharded = {k: k for k in state_dict if k not in sharded and k not in metadata.ties}
    dtypes = {k: dtype_named(name) for k, name in metadata.buffers.items() if k in unsharded}
    lost = {member.name for r in metadata.params if r.key in absent for member in r.members}
    ties = {alias: name for alias, name in metadata.ties.items() if name not in lost}
    return MergePlan(size, sharded, unsharded, dtypes, ties, metadata.optimizer)


def _own_entry(record: ParamRecord, world_size: int, parts: int) -> ShardedEntry:
    own = record.parts_of(parts)
    row_shape = record.members[0].local_shape(own)[1:] if record.by_rows else ()
    layout, dtype = record.layout(world_size, parts), dtype_named(record.dtype)
    return ShardedEntry(record.members, layout, row_shape, dtype, own)


def _name_problems(plan: MergePlan) -> list[str]:
    names = [member.name for entry in plan.sharded.values() for member in entry.members]
    names += plan.unsharded.values()
    known, optimizer = Counter(names), plan.optimizer
    trained = [key for group in optimizer.groups for key in group.params] if optimizer else []
    return [
        *find_bad_names([*plan.sharded, *known, *plan.ties]),
        *(f"{name} would be in the merged model twice" for name in known if known[name] > 1),
        *(
            f"ties: {alias} is tied to {canonical}, which is not in the model"
            for alias, canonical in plan.ties.items()
            if canonical not in known
        ),
        *(
            f"optimizer: {key} is not in the model"
            for key in dict.fromkeys([*trained, *(optimizer.states if optimizer else ())])
            if key not in plan.sharded and key not in plan.unsharded
        ),
    ]


# ---------------------------------------------------------------- torch_xla's format


def original_name(name: str) -> str:
    """Return a name without the attribute names of torch_xla's wrappers."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _is_torch_xla(metadata: dict[str, Any]) -> bool:
    return "format" not in metadata and "shard_info" in metadata


def _torch_xla_identity(metadata: dict[str, Any]) -> tuple[int, int]:
    rank = item(metadata, "rank", int, "")
    world_size = item(metadata, "world_size", int, "")
    check_rank(rank, world_size)
    return rank, world_size


def _torch_xla_plan(metadata: dict[str, Any], state_dict: Mapping[str, Any]) -> MergePlan:
    # torch_xla does not save aliases of weights tied inside one FSDP unit: the result lacks them,
    # and the model that loads it must tie them again.
    _, world_size = _torch_xla_identity(metadata)
    listed = dict(_members_of_keys(metadata))
    members = {key: own for key, own in listed.items() if key in state_dict} or listed
    raise_if(
        [
            f"model has no tensor {key}, which shard_metadata lists"
            for key in members
            if not isinstance(state_dict.get(key), TensorSource)
        ]
        + [
            f"model has {key}, which shard_metadata does not list"
            for key in state_dict
            if key not in members and f".{SHARD_PREFIX}" in f".{key}"
        ]
    )
    unsharded = {key: original_name(key) for key in state_dict if key not in members}
    dtypes = _buffer_dtypes(metadata)
    return MergePlan(
        world_size,
        {key: _torch_xla_entry(key, m, state_dict[key], world_size) for key, m in members.items()},
        unsharded,
        {key: dtypes[name] for key, name in unsharded.items() if name in dtypes},
    )


def _members_of_keys(metadata: dict[str, Any]) -> Iterator[tuple[str, tuple[MemberRecord, ...]]]:
    """Yield the state dict key and the parameters of every entry of ``shard_info``."""
    flatten_info = metadata.get("flatten_info", {})
    typed(flatten_info, dict, "flatten_info")
    for unit, infos in item(metadata, "shard_info", dict, "").items():
        for suffix, info in typed(infos, dict, f"shard_info.{unit}").items():
            key = join_name(unit, suffix)
            where = f"shard_info.{key}"
            name = join_name(unit, item(typed(info, dict, where), "_orig_name", str, where))
            shape = checked_shape(info.get("_orig_size"), f"{where}._orig_size")
            flat = flatten_info.get(name)
            own = (MemberRecord(original_name(name), shape),)
            yield key, own if flat is None else _flat_members(flat, name)


def _flat_members(info: Any, flat_name: str) -> tuple[MemberRecord, ...]:
    where = f"flatten_info.{flat_name}"
    if not (isinstance(info, Sequence) and len(info) == 3):
        raise CheckpointError(f"{where} is {shown(info)}, expected (names, shapes, sizes)")
    names, shapes = typed(info[0], list, f"{where}.0"), typed(info[1], list, f"{where}.1")
    if len(names) != len(shapes):
        raise CheckpointError(f"{where} has {len(names)} names and {len(shapes)} shapes")
    unit = flat_name.rpartition(".")[0]
    return tuple(
        MemberRecord(
            original_name(join_name(unit, typed(name, str, where))), checked_shape(shape, where)
        )
        for name, shape in zip(names, shapes, strict=True)
    )


def _buffer_dtypes(metadata: dict[str, Any]) -> dict[str, torch.dtype]:
    """Return original dtypes by original names.

    The names in ``buffer_info`` contain ``_fpw_module.``, which torch_xla's ``state_dict()``
    removes, so torch_xla's own merge does not find them and leaves such buffers in the wrong dtype.
    """
    infos = typed(metadata.get("buffer_info", {}), dict, "buffer_info")
    return {
        original_name(name): item(
            typed(info, dict, f"buffer_info.{name}"),
            "_orig_dtype",
            torch.dtype,
            f"buffer_info.{name}",
        )
        for name, info in infos.items()
    }


def _torch_xla_entry(
    key: str, members: tuple[MemberRecord, ...], shard: TensorSource, world_size: int
) -> ShardedEntry:
    # The metadata has neither the padding multiple nor the dtype of shards. The length of the shard
    # as the multiple gives the same slices as the true one. A shard of more than one dim was made
    # with ``shard_param_on_dim_0``.
    by_rows = len(shard.shape) > 1 and len(members) == 1
    multiple = max(math.prod(shard.shape), 1)
    record = ParamRecord(key, dtype_name(shard.dtype), multiple, members, by_rows)
    return _own_entry(record, world_size, 1)


# ---------------------------------------------------------------- full tensors


def full_checkpoint(plan: MergePlan, shards: Sequence[Shard], own: int = 0) -> FullCheckpoint:
    """Return the full model and optimizer from the checked shards of every rank, in rank order;
    unsharded tensors and values are those of rank ``own``."""
    optimizer = None
    if plan.optimizer is not None:
        optimizer = _full_optimizer(plan, plan.optimizer, shards, shards[own])
    return FullCheckpoint(_full_model(plan, shards, shards[own]), dict(plan.ties), optimizer)


def _full_members(
    entry: ShardedEntry, shards: Sequence[TensorSource], once: Once | None = None
) -> Iterator[tuple[str, TensorSource]]:
    """Yield the name and the full tensor of every parameter of an entry, given its shards in rank
    order; with ``once``, the same object again for the same memory."""
    start = 0
    for member in entry.members:

        def join(member: MemberRecord = member, start: int = start) -> TensorSource:
            return global_of(_parts(entry, member, shards, start), member)

        yield member.name, once.get(shards, (member.shape, start), join) if once else join()
        start += member.local_numel(entry.parts)


def _parts(
    entry: ShardedEntry, member: MemberRecord, shards: Sequence[TensorSource], start: int
) -> list[TensorSource]:
    """Return a parameter's local tensor of each tensor-parallel part; if replicated, the first.
    It is in the shards of a part from element ``start`` on."""
    parts, size = entry.parts if member.tensor_dim is not None else 1, entry.layout.num_shards
    spec = TensorSpec(shards[0].dtype, member.local_shape(entry.parts))
    width = entry.layout.shard_numel * spec.dtype.itemsize
    made = []
    for part in range(parts):
        own = shards[part * size : (part + 1) * size]
        joined = own if isinstance(own, TensorOfAll) else JoinedShards(own, width)
        data = Part(joined, start * spec.dtype.itemsize, spec.nbytes)
        made.append(TensorSource(spec, data))
    return made


def _full_model(plan: MergePlan, shards: Sequence[Shard], own: Shard) -> dict[str, Any]:
    full: dict[str, Any] = {}
    once = Once()
    for key, value in own.state_dict.items():
        if key in plan.sharded:
            sources = of_all(shards, model_name(key))
            full.update(_full_members(plan.sharded[key], sources, once))
        elif key in plan.unsharded:
            if isinstance(value, TensorSource):
                cast = partial(value.cast, plan.dtypes.get(key, value.dtype))
                value = once.get([value], plan.dtypes.get(key), cast)
            full[plan.unsharded[key]] = value
    for alias, canonical in plan.ties.items():
        full[alias] = full[canonical]
    return full


class Once:
    """Creates each source once for the same memory, so that tied names share it."""

    def __init__(self) -> None:
        self._results: dict[Hashable, TensorSource] = {}

    def get(
        self, sources: Sequence[TensorSource], variant: Hashable, make: Callable[[], TensorSource]
    ) -> TensorSource:
        """Return ``make()``, or its earlier result for the same memory and ``variant``."""
        identities: Hashable
        if isinstance(sources, TensorOfAll):
            identities = sources.identity
        else:
            # Only until one has none: of files that are not open yet, all have none.
            known = takewhile(lambda each: each is not None, (s.identity for s in sources))
            identities = tuple(known)
            if len(identities) < len(sources):
                return make()
        key = (variant, identities)
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]


def _full_optimizer(
    plan: MergePlan, record: OptimizerRecord, shards: Sequence[Shard], own: Shard
) -> OptimizerState:
    full = {
        (name, state): source
        for key, states in record.states.items()
        for state in states.sharded
        for name, source in _full_members(plan.sharded[key], of_all(shards, state_name(key, state)))
    }
    states = {key: own.states(key, states) for key, states in record.states.items()}
    return OptimizerState(record.groups, states).unsharded(plan.names_of, full)
