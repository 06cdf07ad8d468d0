"""Write the file of one rank.

Each rank writes the shards of its model and optimizer, and *values*: all else (schedulers,
counters, random number states), packed by ``json_values``. A ``.safetensors`` file has the values
in its header and in tensors of their own. A ``.pth`` file has torch_xla's keys, ``model`` and
``shard_metadata``, and the optimizer's state by parameter key. Tensors are written without a copy
(to a ``.pth`` file: with one).
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from xla_fsdp.checkpoint.files.checksum import checksum, digest
from xla_fsdp.checkpoint.files.json_values import Packed
from xla_fsdp.checkpoint.files.safetensors_file import plan_file, shard_file_metadata
from xla_fsdp.checkpoint.files.storage import Storage
from xla_fsdp.checkpoint.files.tensor_source import Buffer, TensorSpec, bytes_of
from xla_fsdp.checkpoint.format.records import (
    VALUE_PREFIX,
    VALUES_KEY,
    ShardMetadata,
    model_name,
    state_name,
)
from xla_fsdp.checkpoint.format.step_files import FileRecord, digest_of_torch_file


@dataclass(frozen=True)
class RankContent:
    """The content of one rank's file, in host memory.

    Args:
        metadata: of its shards, without checksums.
        model: by key of the state dict, without aliases.
        states: tensors of the optimizer by key and state.
        values: everything else.
    """

    metadata: ShardMetadata
    model: Mapping[str, Tensor]
    states: Mapping[str, Mapping[str, Tensor]]
    values: Packed

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by its name in a file."""
        named = {model_name(key): tensor for key, tensor in self.model.items()}
        for key, states in self.states.items():
            named |= {state_name(key, state): tensor for state, tensor in states.items()}
        extra = {f"{VALUE_PREFIX}{i}": tensor for i, tensor in enumerate(self.values.tensors)}
        return {**named, **extra}


class Written(NamedTuple):
    """A rank's file, and one checksum of all its shards.

    Unsharded tensors are left out of the checksum, as they may differ between replicas.
    """

    file: FileRecord
    shards: str


def write_rank_file(storage: Storage | None, name: str, content: RankContent) -> Written:
    """Write one rank's file, as ``.safetensors`` or ``.pth`` by its name; without ``storage``, as
    another rank writes this file, only return what would be written."""
    checksums = {name: checksum(bytes_of(tensor)) for name, tensor in content.tensors().items()}
    full = replace(content, metadata=replace(content.metadata, fingerprints=checksums))
    description, chunks = _pth(full) if name.endswith(".pth") else _safetensors(full)
    if storage is not None:
        storage.write(name, chunks)
    size = sum(len(chunk) for chunk in chunks)
    return Written(FileRecord(size, description), _checksum_of_shards(full))


def _checksum_of_shards(content: RankContent) -> str:
    metadata = content.metadata
    names = [model_name(record.key) for record in metadata.params]
    for key, states in (metadata.optimizer.states if metadata.optimizer else {}).items():
        names += [state_name(key, state) for state in states.sharded]
    return checksum("\n".join(metadata.fingerprints[name] for name in names).encode())


def _safetensors(content: RankContent) -> tuple[str, list[Buffer]]:
    """Return the digest of the file's description, and the bytes of the file."""
    tensors = content.tensors()
    extra = {VALUES_KEY: json.dumps(content.values.json)}
    specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    header = plan_file(specs, shard_file_metadata(content.metadata, extra))
    data = header.to_bytes()
    return digest(data), [data, *(bytes_of(tensors[name]) for name in header.entries)]


def _pth(content: RankContent) -> tuple[str, list[Buffer]]:
    """Return the digest of the file's description, and the bytes of the file."""
    metadata, values = content.metadata.to_dict(), json.dumps(content.values.json)
    # In memory first: to write a zip archive, torch.save has to seek, which a stream cannot.
    buffer = io.BytesIO()
    content_of_file = {
        "model": dict(content.model),
        "shard_metadata": metadata,
        "optimizer": {"state": {key: dict(states) for key, states in content.states.items()}},
        "values": {"json": values, "tensors": content.values.tensors},
    }
    torch.save(content_of_file, buffer)
    return digest_of_torch_file(metadata, values), [buffer.getbuffer()]
