"""What one rank saves: its shards, its optimizer's, and whatever the user adds.

Words: *values* are what has no shards (schedulers, counters, random number states), by topic; see
``plain_values``.
Always true: tensors are written straight from where they are, none is copied (into a ``.pth`` file:
once); every tensor's fingerprint is in the file.
A ``.safetensors`` file holds values in its header and in tensors of their own; a ``.pth`` file has
upstream's keys, ``model`` and ``shard_metadata``, and the optimizer's state by parameter key.
Files are read by ``rank_reader``; where they are and when they count are ``storage``'s and
``step_directory``'s business.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from xla_fsdp.checkpoint.byte_source import bytes_of
from xla_fsdp.checkpoint.fingerprint import fingerprint
from xla_fsdp.checkpoint.format import ShardMetadata, model_name, state_name
from xla_fsdp.checkpoint.plain_values import Packed
from xla_fsdp.checkpoint.safetensors_file import plan_file, shard_file_metadata, specs_of
from xla_fsdp.checkpoint.storage import Chunk

VALUES_KEY = "xla_fsdp.values"

VALUE_PREFIX = "values/"

SUFFIXES = ("safetensors", "pth")


@dataclass(frozen=True)
class RankContent:
    """All that one rank saves, in host memory.

    Args:
        metadata: of its shards; fingerprints are filled in when it is written.
        model: by key of the state dict, without aliases.
        states: tensors of the optimizer by key and state.
        values: everything else.
    """

    metadata: ShardMetadata
    model: Mapping[str, Tensor]
    states: Mapping[str, Mapping[str, Tensor]]
    values: Packed

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name in a file."""
        named = {model_name(key): tensor for key, tensor in self.model.items()}
        for key, states in self.states.items():
            named |= {state_name(key, state): tensor for state, tensor in states.items()}
        extra = {f"{VALUE_PREFIX}{i}": tensor for i, tensor in enumerate(self.values.tensors)}
        return {**named, **extra}

    def with_fingerprints(self) -> RankContent:
        """The same with a fingerprint of every tensor in the metadata."""
        prints = {name: fingerprint(bytes_of(t)) for name, t in self.tensors().items()}
        return replace(self, metadata=replace(self.metadata, fingerprints=prints))


class Written(NamedTuple):
    """A rank's file: its size, and a fingerprint of all its shards (not of whole tensors, which
    may differ between replicas)."""

    nbytes: int
    digest: str


class Sink(Protocol):
    """What a rank's file is written to: a ``Storage``, or something that drops it."""

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        """See ``Storage``."""


def write_rank_file(storage: Sink, name: str, content: RankContent) -> Written:
    """Write one rank's file, as ``.safetensors`` or ``.pth`` by its name.

    Raises:
        CheckpointError: if it cannot be written, or holds what the format has not.
    """
    full = content.with_fingerprints()
    size = 0

    def counted(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        nonlocal size
        for chunk in chunks:
            size += len(chunk)
            yield chunk

    chunks = _pth_chunks(full) if name.endswith(".pth") else _safetensors_chunks(full)
    storage.write(name, counted(chunks))
    return Written(size, digest(full))


def digest(content: RankContent) -> str:
    """A fingerprint of all shards of a rank; ``content`` has fingerprints already."""
    metadata = content.metadata
    names = [model_name(record.key) for record in metadata.params]
    for key, states in (metadata.optimizer.states if metadata.optimizer else {}).items():
        names += [state_name(key, state) for state in states.sharded]
    return fingerprint("\n".join(metadata.fingerprints[name] for name in names).encode())


def _safetensors_chunks(content: RankContent) -> Iterator[Chunk]:
    tensors = content.tensors()
    extra = {VALUES_KEY: json.dumps(content.values.json)}
    header = plan_file(specs_of(tensors.items()), shard_file_metadata(content.metadata, extra))
    yield header.to_bytes()
    for name in header.entries:
        yield bytes_of(tensors[name])


def _pth_chunks(content: RankContent) -> Iterator[Chunk]:
    """One chunk: the whole file. Its length is known only at its end, which a stream cannot
    go back from."""
    buffer = io.BytesIO()
    content_of_file = {
        "model": dict(content.model),
        "shard_metadata": content.metadata.to_dict(),
        "optimizer": {"state": {key: dict(states) for key, states in content.states.items()}},
        "values": {"json": json.dumps(content.values.json), "tensors": content.values.tensors},
    }
    torch.save(content_of_file, buffer)
    yield buffer.getbuffer()
