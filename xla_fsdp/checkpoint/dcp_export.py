"""Writes full checkpoints as ``torch.distributed.checkpoint`` (DCP) does, for FSDP2 and others.

Words: DCP's *items* are what it writes one by one; its *planner* says which there are.
Always true: names are those of FSDP2's ``get_state_dict``, saved under ``model`` and ``optim``, so
``dcp.load`` and ``set_state_dict`` take them on any number of ranks; every name of a tied tensor
has its own copy, as there; no more than ``ITEM`` bytes per thread are in memory (a row of dim 0, if
that is longer); no process group is needed; the directory appears whole or not at all.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from xla_fsdp.checkpoint.atomic_files import EXISTS, writing
from xla_fsdp.checkpoint.copying import Progress, Watched, default_threads, find_damage
from xla_fsdp.checkpoint.errors import CheckpointError
from xla_fsdp.checkpoint.full_tensors import FullCheckpoint
from xla_fsdp.checkpoint.model_files import optimizer_content
from xla_fsdp.checkpoint.outputs import WriteOptions
from xla_fsdp.checkpoint.safetensors_file import TensorSpec
from xla_fsdp.checkpoint.tensor_source import TensorSource

ITEM = 1 << 26


def export_dcp(
    full: FullCheckpoint,
    directory: str,
    options: WriteOptions,
    watched: Sequence[Watched] = (),
) -> None:
    """Write a full checkpoint into a new directory.

    Args:
        full: from ``full_checkpoint``.
        directory: to make, in one that exists; see ``find_directory_problems``.
        options: as for other outputs; what was written is not read again.
        watched: tensors of ``full`` to hold against their fingerprints.

    Raises:
        CheckpointError: if the directory cannot be written, or what is read is damaged.
    """
    path = directory.rstrip(os.sep)
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        with writing(path):
            _save(full, temporary, options)
        if damage := find_damage(watched, unread=options.verify):
            raise CheckpointError(damage)
        with writing(path):
            _replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def find_directory_problems(directory: str, nbytes: int, *, overwrite: bool) -> list[str]:
    """Why a directory of this size could not be made, one line each."""
    path = directory.rstrip(os.sep)
    parent = os.path.dirname(path) or "."
    if os.path.lexists(path) and not (overwrite and os.path.isdir(path)):
        return [f"{path}: {EXISTS}"]
    if not os.path.isdir(parent):
        return [f"{path}: cannot be written, there is no directory {parent}"]
    if not os.access(parent, os.W_OK | os.X_OK):
        return [f"{path}: cannot be written, {parent} may not be changed"]
    free = shutil.disk_usage(parent).free
    return [f"{path}: {nbytes:,} bytes are needed, and {free:,} are free"] if nbytes > free else []


def _save(full: FullCheckpoint, path: str, options: WriteOptions) -> None:
    sources: dict[int, TensorSource] = {}
    content: dict[str, Any] = {"model": dict(full.model)}
    if full.optimizer is not None:
        content["optim"] = optimizer_content(full.optimizer)
    content = _stand_ins(content, sources)
    writer = dcp.FileSystemWriter(path, thread_count=options.threads or default_threads())
    planner = _Planner(sources, options.progress)
    try:
        with warnings.catch_warnings():
            # That there is no process group, and a deprecation inside of DCP itself.
            warnings.simplefilter("ignore", UserWarning)
            dcp.save(content, storage_writer=writer, planner=planner, no_dist=True)
    except dcp.CheckpointException as error:  # which is no Exception
        first, _ = next(iter(error.failures.values()))
        if isinstance(first, CheckpointError):
            raise first from error
        raise OSError(str(first)) from error


def _replace(temporary: str, path: str) -> None:
    old = f"{temporary}.old"
    if os.path.lexists(path):
        os.rename(path, old)
    os.rename(temporary, path)
    shutil.rmtree(old, ignore_errors=True)


def _stand_ins(value: Any, sources: dict[int, TensorSource]) -> Any:
    """``value`` with a tensor without elements in place of every source, which is noted down."""
    if isinstance(value, TensorSource):
        tensor = torch.empty(value.shape, dtype=value.dtype, device="meta")
        sources[id(tensor)] = value
        return tensor
    if isinstance(value, Mapping):
        return {key: _stand_ins(each, sources) for key, each in value.items()}
    return value


# ---------------------------------------------------------------- what DCP calls


@dataclass(frozen=True)
class _Rows:
    """Some of a tensor's rows (all of them, for a scalar)."""

    source: TensorSource
    first: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of these rows."""
        return (self.count, *self.source.shape[1:]) if self.source.shape else ()

    def load(self) -> Tensor:
        """These rows, in memory of their own."""
        row = math.prod(self.source.shape[1:])
        stop = (self.first + self.count) * row
        spec = TensorSpec(self.source.dtype, self.shape)
        return TensorSource(spec, self.source.elements(self.first * row, stop)).load()


class _Planner(dcp.DefaultSavePlanner):
    """Cuts tensors into items, and reads each when DCP is about to write it."""

    def __init__(self, sources: Mapping[int, TensorSource], progress: Progress) -> None:
        super().__init__()
        self._sources = sources
        self._progress = progress
        self._rows: dict[MetadataIndex, _Rows] = {}

    def create_local_plan(self) -> SavePlan:
        """What there is to write."""
        plan = super().create_local_plan()
        items = [part for item in plan.items for part in self._parts(item)]
        self.plan = SavePlan(items, plan.storage_data, plan.planner_data)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The tensor to write now."""
        rows = self._rows.get(write_item.index)
        if rows is None:
            return super().resolve_data(write_item)
        tensor = rows.load()
        self._progress(tensor.nbytes)
        return tensor

    def _parts(self, item: WriteItem) -> Iterator[WriteItem]:
        source = self._sources.get(id(self.state_dict[item.index.fqn]))
        if source is None:
            yield item
            return
        properties = TensorProperties(dtype=source.dtype)
        for rows in _cut(source):
            offsets = (rows.first,) + (0,) * (len(source.shape) - 1) if source.shape else ()
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(rows.shape))
            index = MetadataIndex(item.index.fqn, chunk.offsets)
            self._rows[index] = rows
            data = TensorWriteData(chunk, properties, torch.Size(source.shape))
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _cut(source: TensorSource) -> Iterator[_Rows]:
    if source.spec.nbytes <= ITEM:
        yield _Rows(source, 0, source.shape[0] if source.shape else 1)
        return
    rows = source.shape[0]
    step = max(1, ITEM * rows // source.spec.nbytes)
    for first in range(0, rows, step):
        yield _Rows(source, first, min(step, rows - first))
