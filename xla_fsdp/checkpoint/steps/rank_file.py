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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xla_fsdp.checkpoint.files.checksum import checksum, digest
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
from xla_fsdp.checkpoint.format.shard_files import MODEL_PREFIX, is_of_model
from xla_fsdp.checkpoint.steps.step_directory import FileRecord, digest_of_torch_file


@dataclass(frozen=True)
class RankContent:
    """The content of one rank's file, in host memory.

    Args:
        metadata: of its shards, without checksums.
        tensors: by name in a file, without aliases.
        values: everything else, as JSON.
    """

    metadata: ShardMetadata
    tensors: Mapping[str, Tensor]
    values: Any


class Written(NamedTuple):
    """A rank's file, and one checksum of all its shards.

    Unsharded tensors are left out of the checksum, as they may differ between replicas.
    """

    file: FileRecord
    shards: str


def write_rank_file(storage: Storage | None, name: str, content: RankContent) -> Written:
    """Write one rank's file, as ``.safetensors`` or ``.pth`` by its name; without ``storage``, as
    another rank writes this file, only return what would be written."""
    checksums = {name: checksum(bytes_of(tensor)) for name, tensor in content.tensors.items()}
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
    tensors = content.tensors
    extra = {VALUES_KEY: json.dumps(content.values)}
    specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    header = plan_file(specs, shard_file_metadata(content.metadata, extra))
    data = header.to_bytes()
    return digest(data), [data, *(bytes_of(tensors[name]) for name in header.entries)]


def _pth(content: RankContent) -> tuple[str, list[Buffer]]:
    """Return the digest of the file's description, and the bytes of the file."""
    metadata, values, tensors = content.metadata, json.dumps(content.values), content.tensors
    states = {} if metadata.optimizer is None else metadata.optimizer.states
    # In memory first: to write a zip archive, torch.save has to seek, which a stream cannot.
    buffer = io.BytesIO()
    content_of_file = {
        "model": {n.removeprefix(MODEL_PREFIX): t for n, t in tensors.items() if is_of_model(n)},
        "shard_metadata": metadata.to_dict(),
        "optimizer": {
            "state": {
                key: {name: tensors[state_name(key, name)] for name in (*of.sharded, *of.whole)}
                for key, of in states.items()
            }
        },
        "values": {
            "json": values,
            "tensors": [t for n, t in tensors.items() if n.startswith(VALUE_PREFIX)],
        },
    }
    torch.save(content_of_file, buffer)
    return digest_of_torch_file(metadata.to_dict(), values), [buffer.getbuffer()]
