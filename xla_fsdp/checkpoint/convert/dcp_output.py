"""Write directories of ``torch.distributed.checkpoint`` (DCP), without a process group.

Names are those of FSDP2's ``get_state_dict`` under ``model`` and ``optim``, so ``dcp.load`` and
``set_state_dict`` load them on any number of ranks; every name of a tied tensor has its own copy.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from xla_fsdp.checkpoint.errors import CheckpointError
from xla_fsdp.checkpoint.files.copying import CopyTask
from xla_fsdp.checkpoint.files.outputs import Output
from xla_fsdp.checkpoint.files.tensor_source import TensorSource, TensorSpec
from xla_fsdp.checkpoint.files.torch_file import write_skeleton
from xla_fsdp.checkpoint.format.shard_files import DCP_METADATA
from xla_fsdp.checkpoint.steps.step_directory import is_step_file

ITEM = 1 << 26  # bytes of a part of a tensor, or one row of dim 0, if that is larger


@dataclass(frozen=True)
class DcpOutput(Output):
    """A directory, whose parent exists.

    Args:
        path: of the directory, without a slash at its end.
        content: nested dicts and lists, with a ``TensorSource`` in place of each tensor.
        limit: bytes of a file of tensors, after which the next one begins.
    """

    path: str
    content: Mapping[str, Any]
    limit: int
    is_directory = True

    @property
    def nbytes(self) -> int:
        return sum(v.spec.nbytes for _, v in self._leaves() if isinstance(v, TensorSource))

    def irreplaceable(self) -> list[str]:
        if not os.path.isdir(self.path):
            return []
        with os.scandir(self.path) as entries:
            strange = sorted(
                each.name
                for each in entries
                if not each.is_file(follow_symlinks=False) or is_step_file(each.name)
            )
        return [
            f"{self.path}: holds {name}, which is no regular file or belongs to a run, and the "
            f"whole directory would be replaced; choose another save_path"
            for name in strange[:1]
        ]

    def begin(self, temporary: str) -> list[CopyTask]:
        os.makedirs(temporary, exist_ok=True)
        tasks: list[CopyTask] = []
        metadata = Metadata({}, {}, {}, version=CURRENT_DCP_VERSION)
        number = at = 0
        for path, value in self._leaves():
            name = ".".join(map(str, path))
            if name in metadata.planner_data:
                raise CheckpointError(f"{self.path}: two of its values get the name {name}")
            metadata.planner_data[name] = path
            metadata.state_dict_metadata[name], parts = _described(name, value)
            for index, part in parts:
                if at >= self.limit:
                    number, at = number + 1, 0
                file = f"__0_{number}.distcp"
                tasks += write_skeleton(part, os.path.join(temporary, file), at)
                start, at = at, os.path.getsize(os.path.join(temporary, file))
                metadata.storage_data[index] = _StorageInfo(file, start, at - start)
        with open(os.path.join(temporary, DCP_METADATA), "wb") as out:
            pickle.dump(metadata, out)
        return tasks

    def _leaves(self) -> list[tuple[tuple[Any, ...], Any]]:
        """Return every tensor and value with its keys, as DCP divides nested dicts and lists."""
        leaves: list[tuple[tuple[Any, ...], Any]] = []
        traverse_state_dict(
            dict(self.content),
            lambda path, value: leaves.append((path, value)),
            lambda value: isinstance(value, TensorSource),
        )
        return leaves


def _described(name: str, value: Any) -> tuple[Any, list[tuple[MetadataIndex, Any]]]:
    """Return DCP's description of an entry, and its items: parts of a tensor of about ``ITEM``
    bytes, as whoever reads one has it in memory."""
    if not isinstance(value, TensorSource):
        return BytesStorageMetadata(), [(MetadataIndex(name), value)]
    entry = TensorStorageMetadata(TensorProperties(value.dtype), torch.Size(value.shape), [])
    rows, *more = value.shape or (1,)
    row = math.prod(more)
    step = max(1, rows if value.spec.nbytes <= ITEM else ITEM * rows // value.spec.nbytes)
    items: list[tuple[MetadataIndex, Any]] = []
    for first in range(0, max(rows, 1), step):
        count = min(step, rows - first)
        offsets = (first, *[0] * len(more))[: len(value.shape)]
        shape = (count, *more)[: len(value.shape)]
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)))
        data = value.elements(first * row, (first + count) * row)
        part = TensorSource(TensorSpec(value.dtype, shape), data)
        items.append((MetadataIndex(name, offsets, len(items)), part))
    return entry, items
