"""Plan shard files for another number of ranks, as a step that ``load_checkpoint`` reads.

The new files have the same tensors under the same keys, so that a model with the same wrapping
loads them; shards in torch_xla's format get one key per parameter. Values saved beside model and
optimizer are copied from rank 0's file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import Any

from xla_fsdp.checkpoint.convert.reshard import shard_of
from xla_fsdp.checkpoint.errors import CheckpointError, dtype_name, raise_if
from xla_fsdp.checkpoint.files.checksum import digest
from xla_fsdp.checkpoint.files.copying import CopyTask
from xla_fsdp.checkpoint.files.outputs import (
    BlockCrcs,
    Checksums,
    FilesJob,
    Output,
    SafetensorsOutput,
)
from xla_fsdp.checkpoint.files.safetensors_file import shard_file_metadata
from xla_fsdp.checkpoint.files.storage import is_url, split_path
from xla_fsdp.checkpoint.files.tensor_source import TensorSource, full_path
from xla_fsdp.checkpoint.format.full_tensors import (
    MergePlan,
    full_members,
    model_shards,
    state_shards,
)
from xla_fsdp.checkpoint.format.plan import make_plan
from xla_fsdp.checkpoint.format.records import (
    FORMAT,
    VERSION,
    FileRecord,
    Marker,
    ParamRecord,
    ShardMetadata,
    model_name,
    rank_file_name,
    state_name,
)
from xla_fsdp.checkpoint.format.shard_files import (
    Shard,
    has_marker,
    read_marker_file,
    verifying_shards,
)
from xla_fsdp.checkpoint.steps.step_directory import MARKER, Attempt, job_token
from xla_fsdp.distributed.shard_layout import LANES, shard_multiple


@dataclass(frozen=True)
class _Content:
    """The unsharded content of the old files.

    Args:
        metadata: of rank 0, in our format and for the new number of ranks.
        model: global tensor of every sharded parameter, by name.
        states: global tensors of sharded optimizer states: by (key, state), then by parameter name.
        unsharded: all other tensors, by their names in a file.
        notes: further metadata in the header of rank 0's file.
    """

    metadata: ShardMetadata
    model: dict[str, TensorSource]
    states: dict[tuple[str, str], dict[str, TensorSource]]
    unsharded: dict[str, TensorSource]
    notes: Mapping[str, str]


def plan_reshard(
    shards: Sequence[Shard],
    directory: str,
    world_size: int,
    *,
    optimizer: bool = True,
    step: int = 0,
) -> FilesJob:
    """Return the job that writes the files of ``world_size`` ranks.

    Args:
        shards: of every rank, checked, in rank order.
        directory: in which to create the step.
        world_size: number of ranks to shard over.
        optimizer: whether to write optimizer state too.
        step: number of the new step.

    Raises:
        CheckpointError: if such files cannot hold a value, or ``world_size`` or ``step`` is out of
            range.
    """
    directory, world_size, step = full_path(directory), index(world_size), index(step)
    if not 1 <= world_size <= 1_000_000:
        raise CheckpointError(f"--to_world_size {world_size} must be from 1 to 1,000,000")
    if not 0 <= step <= 10**15:
        raise CheckpointError(f"--step {step} must be from 0 to 10^15")
    same, verifiers = verifying_shards(shards)
    plan = make_plan(same[0].metadata, same[0].state_dict, optimizer=optimizer)
    content = _content(plan, same, world_size)
    job = job_token()
    content = replace(content, metadata=replace(content.metadata, step=step, job=job))
    folder = os.path.join(directory, Attempt(step).folder)
    files = [_rank_output(content, folder, rank, world_size) for rank in range(world_size)]
    marker = Marker(step, world_size, {}, job)
    outputs = [*files, MarkerOutput(os.path.join(folder, MARKER), files, marker)]
    sources = [shard.source for shard in shards]
    told = f"{world_size} ranks"
    return FilesJob(outputs, verifiers, make_directories=True, sources=sources, content=told)


@dataclass(frozen=True)
class MarkerOutput(Output):
    """The marker of a step, which lists the files of all ranks.

    Args:
        path: of the marker.
        files: of the ranks.
        marker: without files.
    """

    path: str
    files: Sequence[SafetensorsOutput]
    marker: Marker

    @property
    def nbytes(self) -> int:
        return len(self.marker.to_bytes())

    def begin(self, temporary: str) -> list[CopyTask]:
        return []

    def finish(self, temporary: str, crcs: Mapping[str, BlockCrcs]) -> None:
        headers = {os.path.basename(file.path): file.final_header(crcs) for file in self.files}
        files = {n: FileRecord(h.file_size, digest(h.to_bytes())) for n, h in headers.items()}
        with open(temporary, "wb") as file:
            file.write(replace(self.marker, files=files).to_bytes())


def step_of(shard: Shard) -> int:
    """Return the step of a shard file; 0 if it is not in a step's directory."""
    source = shard.source if is_url(shard.source) else os.path.abspath(shard.source)
    folder, _ = split_path(source)
    if not has_marker(folder):
        return 0
    return read_marker_file(folder).step


def _rank_output(content: _Content, folder: str, rank: int, world_size: int) -> SafetensorsOutput:
    metadata = replace(content.metadata, rank=rank, world_size=world_size)
    return SafetensorsOutput(
        path=os.path.join(folder, rank_file_name(rank, world_size, "safetensors")),
        tensors={**dict(_shards(content, rank, world_size)), **content.unsharded},
        metadata=partial(_header_metadata, metadata, content.notes),
    )


def _header_metadata(
    metadata: ShardMetadata, notes: Mapping[str, str], checksums: Checksums
) -> dict[str, str]:
    return shard_file_metadata(replace(metadata, fingerprints=dict(checksums)), notes)


def _content(plan: MergePlan, shards: Sequence[Shard], world_size: int) -> _Content:
    first = shards[0]
    raise_if(
        [
            f"{name} is a {type(first.state_dict[key]).__name__}, no tensor: such files cannot "
            f"hold it"
            for key, name in plan.unsharded.items()
            if not isinstance(first.state_dict[key], TensorSource)
        ]
    )
    metadata = _metadata_of(plan, first.metadata)
    params = tuple(_for_ranks(record, world_size) for record in metadata.params)
    metadata = replace(metadata, params=params)
    model: dict[str, TensorSource] = {}
    for key, entry in plan.sharded.items():
        model.update(full_members(entry, model_shards(shards, key)))
    unsharded = {model_name(name): first.state_dict[key] for key, name in plan.unsharded.items()}
    states: dict[tuple[str, str], dict[str, TensorSource]] = {}
    for key, record in (metadata.optimizer.states if metadata.optimizer else {}).items():
        for state in record.sharded:
            sources = state_shards(shards, key, state)
            states[key, state] = dict(full_members(plan.sharded[key], sources))
        names = [state_name(key, state) for state in record.whole]
        unsharded |= {name: first.optimizer[name] for name in names}
    return _Content(metadata, model, states, {**unsharded, **first.others}, first.notes)


def _shards(content: _Content, rank: int, world_size: int) -> Iterator[tuple[str, TensorSource]]:
    """Yield the name in the file and the shard of every sharded tensor of a rank."""
    records = {record.key: record for record in content.metadata.params}
    for key, record in records.items():
        yield model_name(key), _shard_of(record, content.model, rank, world_size)
    for (key, state), full in content.states.items():
        yield state_name(key, state), _shard_of(records[key], full, rank, world_size)


def _shard_of(
    record: ParamRecord, full: Mapping[str, TensorSource], rank: int, world_size: int
) -> TensorSource:
    vector = shard_of(record, [full[member.name] for member in record.members], rank, world_size)
    if not record.by_rows:
        return vector
    row = record.members[0].shape[1:]
    rows = record.layout(world_size).shard_numel // record.multiple
    return replace(vector, spec=replace(vector.spec, shape=(rows, *row)))


# ---------------------------------------------------------------- metadata


def _metadata_of(plan: MergePlan, metadata: Mapping[str, Any]) -> ShardMetadata:
    if metadata.get("format") == FORMAT:
        own = ShardMetadata.from_dict(metadata)
        return replace(
            own,
            params=tuple(_without_tensor_parallelism(record) for record in own.params),
            version=VERSION,
            groups=None,
            global_rank=None,
            optimizer=plan.optimizer,
            tensor_parts=1,
        )
    names = plan.unsharded
    return ShardMetadata(
        rank=0,
        world_size=plan.world_size,
        params=tuple(_records(plan)),
        buffers={names[key]: dtype_name(dtype) for key, dtype in plan.dtypes.items()},
    )


def _without_tensor_parallelism(record: ParamRecord) -> ParamRecord:
    members = tuple(replace(member, tensor_dim=None) for member in record.members)
    row = math.prod(members[0].shape[1:])
    multiple = max(1, row) if record.by_rows else record.multiple
    return replace(record, members=members, multiple=multiple, over_parts=False)


def _for_ranks(record: ParamRecord, world_size: int) -> ParamRecord:
    """Return the record that a model on ``world_size`` ranks has."""
    if record.by_rows or [member.name for member in record.members] != [record.key]:
        return record
    return replace(record, multiple=shard_multiple(record.members[0].shape, world_size))


def _records(plan: MergePlan) -> Iterator[ParamRecord]:
    for entry in plan.sharded.values():
        by_rows = bool(entry.row_shape)
        multiple = max(1, entry.row_numel) if by_rows else LANES
        for member in entry.members:
            yield ParamRecord(member.name, dtype_name(entry.dtype), multiple, (member,), by_rows)
