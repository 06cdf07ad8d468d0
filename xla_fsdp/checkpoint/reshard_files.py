"""Shard files for another number of ranks, made from those there are.

Words: see ``reshard``, which cuts what one rank takes; here all ranks' files are written. What is
saved beside model and optimizer (*values*) is copied from rank 0's file.
Always true: the new files hold the same tensors under the same keys, so that the same wrapping
loads them; files of ``torch_xla.distributed.fsdp`` become ours, with one key per parameter.
A new directory is one that ``load_checkpoint`` reads: a step with its marker.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from xla_fsdp.checkpoint.errors import CheckpointError, dtype_name
from xla_fsdp.checkpoint.format import (
    FORMAT,
    VERSION,
    ParamRecord,
    ShardMetadata,
    model_name,
    state_name,
)
from xla_fsdp.checkpoint.full_tensors import Plan, joined_members
from xla_fsdp.checkpoint.jobs import FilesJob, Job
from xla_fsdp.checkpoint.outputs import BytesOutput, Fingerprints, Output, SafetensorsOutput
from xla_fsdp.checkpoint.plan import make_plan
from xla_fsdp.checkpoint.reshard import slice_of
from xla_fsdp.checkpoint.safetensors_file import shard_file_metadata
from xla_fsdp.checkpoint.shard_files import Shard, read_marker_file, watch_shards
from xla_fsdp.checkpoint.step_directory import MARKER, Attempt, Marker, rank_file_name
from xla_fsdp.checkpoint.tensor_source import TensorSource
from xla_fsdp.distributed.shard_layout import LANES, shard_multiple


@dataclass(frozen=True)
class _Old:
    """What there is, in full.

    Args:
        metadata: of rank 0, in our form.
        model: full tensor of every member by its name.
        states: full tensor by key, sharded state and member's name.
        whole: what is the same on all ranks, by its name in a file.
        notes: what else rank 0's header says.
    """

    metadata: ShardMetadata
    model: dict[str, TensorSource]
    states: dict[tuple[str, str], dict[str, TensorSource]]
    whole: dict[str, TensorSource]
    notes: Mapping[str, str]


def plan_reshard(
    shards: Sequence[Shard],
    directory: str,
    world_size: int,
    *,
    optimizer: bool = True,
    step: int = 0,
) -> Job:
    """The files of ``world_size`` ranks.

    Args:
        shards: of every rank, checked, in rank order.
        directory: to make a step in.
        world_size: number of ranks that will share the model.
        optimizer: whether to take optimizer state along.
        step: to save it as.

    Raises:
        CheckpointError: if something cannot be in such files, or ``world_size`` is impossible.
    """
    if not 1 <= world_size <= 1_000_000:
        raise CheckpointError(f"--to_world_size {world_size} must be from 1 to 1,000,000")
    if not 0 <= step <= 10**15:
        raise CheckpointError(f"--step {step} must be from 0 to 10^15")
    same, watched = watch_shards(shards)
    plan = make_plan(same[0].metadata, same[0].state_dict, optimizer=optimizer)
    _refuse_values_that_are_no_tensors(plan, same[0])
    old = _old(plan, same, world_size)
    folder = os.path.join(directory, Attempt(step).folder)
    outputs: list[Output] = [
        _rank_output(old, folder, rank, world_size) for rank in range(world_size)
    ]
    sizes = {os.path.basename(output.path): output.nbytes for output in outputs}
    marker = Marker(step, world_size, sizes)
    outputs.append(BytesOutput(os.path.join(folder, MARKER), marker.to_bytes()))
    return FilesJob(outputs, watched, make_directories=True)


def step_of(shard: Shard) -> int:
    """The step that a shard was saved as; 0 if it is not in a step's directory."""
    folder = os.path.dirname(os.path.abspath(shard.source))
    if not os.path.exists(os.path.join(folder, MARKER)):
        return 0
    return read_marker_file(folder).step


def _rank_output(old: _Old, folder: str, rank: int, world_size: int) -> SafetensorsOutput:
    metadata = replace(old.metadata, rank=rank, world_size=world_size)
    return SafetensorsOutput(
        path=os.path.join(folder, rank_file_name(rank, world_size, "safetensors")),
        tensors={**dict(_shards(old, rank, world_size)), **old.whole},
        metadata=partial(_header_metadata, metadata, old.notes),
    )


def _header_metadata(
    metadata: ShardMetadata, notes: Mapping[str, str], fingerprints: Fingerprints
) -> dict[str, str]:
    return shard_file_metadata(replace(metadata, fingerprints=dict(fingerprints)), notes)


# ---------------------------------------------------------------- tensors


def _old(plan: Plan, shards: Sequence[Shard], world_size: int) -> _Old:
    """What there is, with records of how ``world_size`` ranks will share it."""
    first = shards[0]
    metadata = _metadata_of(plan, first.metadata)
    params = tuple(_cut_anew(record, world_size) for record in metadata.params)
    metadata = replace(metadata, params=params)
    states = metadata.optimizer.states if metadata.optimizer else {}
    return _Old(
        metadata,
        model={
            name: source
            for key, piece in plan.pieces.items()
            for name, source in joined_members(piece, [each.state_dict[key] for each in shards])
        },
        states={
            (key, what): dict(
                joined_members(
                    plan.pieces[key], [each.optimizer[state_name(key, what)] for each in shards]
                )
            )
            for key, state in states.items()
            for what in state.sharded
        },
        whole={
            **{model_name(name): first.state_dict[key] for key, name in plan.whole.items()},
            **{
                (name := state_name(key, what)): first.optimizer[name]
                for key, state in states.items()
                for what in state.whole
            },
            **first.others,
        },
        notes=first.notes,
    )


def _shards(old: _Old, rank: int, world_size: int) -> Iterator[tuple[str, TensorSource]]:
    """What a rank gets, by name in its file."""
    records = {record.key: record for record in old.metadata.params}
    for key, record in records.items():
        yield model_name(key), _shard_of(record, old.model, rank, world_size)
    for (key, what), full in old.states.items():
        yield state_name(key, what), _shard_of(records[key], full, rank, world_size)


def _shard_of(
    record: ParamRecord, full: Mapping[str, TensorSource], rank: int, world_size: int
) -> TensorSource:
    sources = [full[member.name] for member in record.members]
    vector = slice_of(record, sources, rank, world_size)
    if not record.by_rows:
        return vector
    row = record.members[0].shape[1:]
    rows = record.layout(world_size).shard_numel // record.multiple
    return replace(vector, spec=replace(vector.spec, shape=(rows, *row)))


# ---------------------------------------------------------------- metadata


def _metadata_of(plan: Plan, metadata: Mapping[str, Any]) -> ShardMetadata:
    if metadata.get("format") == FORMAT:
        own = ShardMetadata.from_dict(metadata)
        return replace(
            own,
            params=tuple(_of_one_part(record) for record in own.params),
            version=VERSION,
            groups=None,
            global_rank=None,
            optimizer=plan.optimizer,
            tensor_parts=1,
        )
    names = plan.whole
    return ShardMetadata(
        rank=0,
        world_size=plan.world_size,
        params=tuple(_records(plan)),
        buffers={names[key]: dtype_name(dtype) for key, dtype in plan.dtypes.items()},
    )


def _of_one_part(record: ParamRecord) -> ParamRecord:
    """The record without tensor parallelism."""
    members = tuple(replace(member, tensor_dim=None) for member in record.members)
    row = math.prod(members[0].shape[1:])
    multiple = max(1, row) if record.by_rows else record.multiple
    return replace(record, members=members, multiple=multiple)


def _cut_anew(record: ParamRecord, world_size: int) -> ParamRecord:
    """The record as a model on ``world_size`` ranks has it."""
    if record.by_rows or [member.name for member in record.members] != [record.key]:
        return record
    return replace(record, multiple=shard_multiple(record.members[0].shape, world_size))


def _records(plan: Plan) -> Iterator[ParamRecord]:
    for piece in plan.pieces.values():
        for member in piece.members:
            multiple = max(1, piece.row_numel) if piece.row_shape else LANES
            yield ParamRecord(
                member.name, dtype_name(piece.dtype), multiple, (member,), bool(piece.row_shape)
            )


def _refuse_values_that_are_no_tensors(plan: Plan, shard: Shard) -> None:
    problems = [
        f"{name} is a {type(shard.state_dict[key]).__name__}, no tensor: such files cannot hold it"
        for key, name in plan.whole.items()
        if not isinstance(shard.state_dict[key], TensorSource)
    ]
    if problems:
        raise CheckpointError(problems)
