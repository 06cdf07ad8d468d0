"""Plan shard files for another number of ranks, as a step that ``load_checkpoint`` reads.

The new files have one key per parameter, whatever was flattened or cut by tensor parallelism.
Values saved beside model and optimizer are copied from rank 0's file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path

from xla_fsdp.checkpoint.convert.reshard import (
    EVERYTHING,
    LoadTarget,
    SourceCheckpoint,
    plan_read,
)
from xla_fsdp.checkpoint.errors import CheckpointError, dtype_name, raise_if
from xla_fsdp.checkpoint.files.checksum import digest
from xla_fsdp.checkpoint.files.outputs import (
    BytesOutput,
    Checksums,
    FilesJob,
    SafetensorsOutput,
)
from xla_fsdp.checkpoint.files.safetensors_file import shard_file_metadata
from xla_fsdp.checkpoint.files.storage import split_path
from xla_fsdp.checkpoint.files.tensor_source import TensorSource, full_path
from xla_fsdp.checkpoint.format.plan import MergePlan, make_plan
from xla_fsdp.checkpoint.format.records import (
    ParamRecord,
    ShardMetadata,
    StateKind,
    model_name,
    state_name,
)
from xla_fsdp.checkpoint.format.shard_files import Shard, verifying_shards
from xla_fsdp.checkpoint.steps.step_directory import (
    MARKER,
    Attempt,
    FileRecord,
    Marker,
    find_marker,
    job_token,
    rank_file_name,
)
from xla_fsdp.distributed.shard_layout import rows_layout, shard_multiple


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
    plan, first = make_plan(same[0].metadata, same[0].state_dict, optimizer=optimizer), same[0]
    raise_if(
        [
            f"{name} is a {type(first.state_dict[key]).__name__}, no tensor: such files cannot "
            f"hold it"
            for key, name in plan.unsharded.items()
            if not isinstance(first.state_dict[key], TensorSource)
        ]
    )
    job, folder = job_token(), os.path.join(directory, Attempt(step).folder)
    names = plan.unsharded
    metadata = ShardMetadata(
        rank=0,
        world_size=world_size,
        params=tuple(_records(plan, world_size)),
        ties=plan.ties,
        buffers={names[key]: dtype_name(dtype) for key, dtype in plan.dtypes.items()},
        step=step,
        job=job,
    )
    source = SourceCheckpoint(plan, same, 0)
    files = [
        _rank_output(source, replace(metadata, rank=rank), folder) for rank in range(world_size)
    ]
    marker = Marker(step, world_size, {}, job)
    path = os.path.join(folder, MARKER)
    outputs = [*files, MarkerOutput(path, marker.to_bytes(), files, marker)]
    sources = [shard.source for shard in shards]
    told = f"{world_size} ranks"
    return FilesJob(outputs, verifiers, make_directories=True, sources=sources, content=told)


@dataclass
class MarkerOutput(BytesOutput):
    """The marker of a step, which lists the files of all ranks once they are written."""

    files: Sequence[SafetensorsOutput]
    marker: Marker

    def finish(self, temporary: str, crcs: Sequence[Sequence[int]]) -> None:
        headers = {os.path.basename(file.path): file.final_header for file in self.files}
        files = {n: FileRecord(h.file_size, digest(h.to_bytes())) for n, h in headers.items() if h}
        Path(temporary).write_bytes(replace(self.marker, files=files).to_bytes())


def step_of(shard: Shard) -> int:
    """Return the step of a shard file; 0 if it is not in a step's directory."""
    marker = find_marker(split_path(full_path(shard.source))[0])
    return 0 if marker is None else marker.step


def _rank_output(
    source: SourceCheckpoint, metadata: ShardMetadata, folder: str
) -> SafetensorsOutput:
    """Return the file of a rank, of what this rank would load."""
    optimizer = source.optimizer
    groups = None if optimizer is None else [group.params for group in optimizer.groups]
    unsharded = {name: source.tensors[name].shape for name in source.plan.unsharded.values()}
    plan = plan_read(source, LoadTarget(metadata, unsharded, groups), EVERYTHING)
    raise_if(plan.problems)
    if plan.optimizer is not None:
        metadata = replace(metadata, optimizer=plan.optimizer.record())
    records = {record.key: record for record in metadata.params}
    ranks = metadata.world_size
    tensors = {
        model_name(key): _in_rows(records.get(key), tensor, ranks)
        for key, tensor in plan.model.items()
    }
    for key, states in (plan.optimizer.states if plan.optimizer else {}).items():
        for state, entry in states.items():
            if entry.kind is not StateKind.VALUE:
                record = records[key] if entry.kind is StateKind.SHARD else None
                tensors[state_name(key, state)] = _in_rows(record, entry.value, ranks)

    def header_metadata(checksums: Checksums) -> dict[str, str]:
        own = replace(metadata, fingerprints=dict(checksums))
        return shard_file_metadata(own, source.own.notes)

    return SafetensorsOutput(
        path=os.path.join(folder, rank_file_name(metadata.rank, ranks, "safetensors")),
        tensors={**tensors, **source.own.others},
        metadata=header_metadata,
    )


def _in_rows(record: ParamRecord | None, shard: TensorSource, ranks: int) -> TensorSource:
    """Return a shard, which is a vector, in the shape of its record; other tensors as they are."""
    if record is None or not record.by_rows:
        return shard
    row_shape = record.members[0].shape[1:]
    count = record.layout(ranks).shard_numel // max(1, math.prod(row_shape))
    return replace(shard, spec=replace(shard.spec, shape=(count, *row_shape)))


def _records(plan: MergePlan, ranks: int) -> Iterator[ParamRecord]:
    """Yield the record of each parameter of a model without tensor parallelism on so many ranks."""
    for entry in plan.sharded.values():
        by_rows = bool(entry.row_shape)
        for member in entry.members:
            layout, own = rows_layout(member.shape, ranks), replace(member, tensor_dim=None)
            multiple = layout.multiple if by_rows else shard_multiple(member.shape, ranks)
            yield ParamRecord(member.name, dtype_name(entry.dtype), multiple, (own,), by_rows)
