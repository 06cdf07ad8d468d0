"""Finds and opens the files that the ranks saved. Reads, never writes.

Words: a *shard* is one rank's model, metadata and (if it was saved in our form) optimizer state,
with a *source* to name it by in messages; a file is *foreign* if it lacks the model or the
metadata.
Always true: nothing in a file is ever executed; tensors stay in the file until they are used; an
earlier output among the matches is passed over.
Whether the shards belong together is judged by ``checks``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import escape, glob
from typing import Any

from xla_fsdp.checkpoint.byte_source import LocalFile
from xla_fsdp.checkpoint.copying import Watched, watch
from xla_fsdp.checkpoint.errors import CheckpointError
from xla_fsdp.checkpoint.fingerprint import is_fingerprint
from xla_fsdp.checkpoint.format import model_name, state_name
from xla_fsdp.checkpoint.safetensors_file import OWN_METADATA, read_header, shard_metadata_of
from xla_fsdp.checkpoint.step_directory import MARKER, Marker, complete_attempts
from xla_fsdp.checkpoint.storage import open_storage
from xla_fsdp.checkpoint.tensor_source import Part, TensorSource
from xla_fsdp.checkpoint.torch_file import read_torch_file

OUTPUT_MARK = "_consolidated"

DEFAULT_SUFFIX = "*.pth"

SAFETENSORS = ".safetensors"

DCP_METADATA = ".metadata"

"""The file that tells a directory of torch.distributed.checkpoint."""

_MODEL, _OPTIMIZER = model_name(""), state_name("", "").rstrip("/") + "/"


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model.

    Args:
        source: where it is from.
        state_dict: a ``TensorSource`` for every tensor, other values as they are.
        metadata: what ``model.get_shard_metadata()`` returned.
        optimizer: tensors of optimizer state by ``format.state_name``.
        others: tensors of a safetensors file that are neither, by name.
        notes: what else the metadata of such a file holds.
    """

    source: str
    state_dict: Mapping[str, Any]
    metadata: Any
    optimizer: Mapping[str, TensorSource] = field(default_factory=dict)
    others: Mapping[str, TensorSource] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, TensorSource]]:
        """Every tensor of the shard by its name in a file."""
        for key, value in self.state_dict.items():
            if isinstance(value, TensorSource):
                yield model_name(key), value
        yield from self.optimizer.items()
        yield from self.others.items()


def matching_files(ckpt_prefix: str, ckpt_suffix: str) -> list[str]:
    """Files named ``ckpt_prefix`` followed by the pattern ``ckpt_suffix``, sorted.

    The prefix is taken literally; only if that matches nothing, as a pattern like the suffix.
    """
    return sorted(glob(escape(ckpt_prefix) + ckpt_suffix) or glob(ckpt_prefix + ckpt_suffix))


def find_files(ckpt_prefix: str, ckpt_suffix: str) -> list[str]:
    """The shard files of one checkpoint.

    Args:
        ckpt_prefix: what their paths start with; or a directory: one that ``save_checkpoint`` wrote
            (its newest complete step is taken), a step's, one of torch.distributed.checkpoint
            (which counts as one file), or any other.
        ckpt_suffix: pattern for the rest of their paths; in a directory, only one that is not
            ``DEFAULT_SUFFIX`` counts, and otherwise files of both kinds do.

    Raises:
        CheckpointError: if a step is not complete.
    """
    if not _is_directory(ckpt_prefix, ckpt_suffix):
        return matching_files(ckpt_prefix, ckpt_suffix)
    if os.path.exists(os.path.join(ckpt_prefix, DCP_METADATA)):
        return [ckpt_prefix]
    if attempts := complete_attempts(open_storage(ckpt_prefix)):
        return _files_of_step(os.path.join(ckpt_prefix, attempts[-1].folder))
    if os.path.exists(os.path.join(ckpt_prefix, MARKER)):
        return _files_of_step(ckpt_prefix)
    folder = os.path.join(escape(ckpt_prefix), "")
    return sorted(glob(f"{folder}*.pth") + glob(f"{folder}*{SAFETENSORS}"))


def nothing_found(ckpt_prefix: str, ckpt_suffix: str) -> str:
    """What to say if ``find_files`` finds nothing."""
    if _is_directory(ckpt_prefix, ckpt_suffix):
        return f"{ckpt_prefix}: holds no complete step and no shard file"
    return f"no shard file matches {ckpt_prefix}{ckpt_suffix}"


def _is_directory(ckpt_prefix: str, ckpt_suffix: str) -> bool:
    return os.path.isdir(ckpt_prefix) and ckpt_suffix == DEFAULT_SUFFIX


def read_marker_file(folder: str) -> Marker:
    """What a step's directory says of itself; ``CheckpointError`` if that makes no sense."""
    path = os.path.join(folder, MARKER)
    data = bytearray((file := LocalFile(path)).nbytes)
    file.read_into(0, memoryview(data))
    return Marker.from_bytes(bytes(data), path)


def _files_of_step(folder: str) -> list[str]:
    """Those that the marker lists: others there are not part of the checkpoint."""
    files = read_marker_file(folder).files
    if strange := [name for name in files if os.path.basename(name) != name or name in ("", "..")]:
        raise CheckpointError(
            f"{os.path.join(folder, MARKER)}: {strange[0]!r} is not the name of a file in its "
            f"directory"
        )
    return [os.path.join(folder, name) for name in sorted(files)]


def open_shards(paths: Sequence[str], output: str) -> tuple[list[Shard], list[str]]:
    """The shards in these files, and one line for each file that is none.

    Args:
        paths: files to open.
        output: where the merged model is going to be: passed over, unless it is a shard.
    """
    shards: list[Shard] = []
    problems: list[str] = []
    for path in paths:
        try:
            shards.append(open_shard(path))
        except CheckpointError as error:
            if not _looks_like_output(path, output):
                problems += error.problems
    return shards, problems


def open_shard(path: str) -> Shard:
    """One rank's shard; its tensors are read from the file when they are used.

    Raises:
        CheckpointError: lines that name the file: it cannot be read, is neither a safetensors nor a
            torch file (nor a directory of torch.distributed.checkpoint), would have to run code, or
            is foreign.
    """
    if os.path.exists(os.path.join(path, DCP_METADATA)):
        from xla_fsdp.checkpoint.dcp_import import import_dcp

        return import_dcp(path)
    return _from_safetensors(path) if path.endswith(SAFETENSORS) else _from_torch(path)


# ---------------------------------------------------------------- safetensors


def _from_safetensors(path: str) -> Shard:
    file = LocalFile(path)
    header = read_header(file, path)
    try:
        metadata = shard_metadata_of(header)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    tensors = {
        name: TensorSource(
            entry.spec,
            Part(file, entry.start, entry.spec.nbytes),
            identity=(path, entry.start, entry.spec) if entry.spec.nbytes else None,
            fingerprint=_fingerprint(metadata, name),
        )
        for name, entry in header.entries.items()
    }
    model = {n.removeprefix(_MODEL): t for n, t in tensors.items() if n.startswith(_MODEL)}
    optimizer = {n: t for n, t in tensors.items() if n.startswith(_OPTIMIZER)}
    others = {n: t for n, t in tensors.items() if not n.startswith((_MODEL, _OPTIMIZER))}
    notes = {key: text for key, text in header.metadata.items() if key not in OWN_METADATA}
    return Shard(path, model, metadata, optimizer, others, notes)


def _fingerprint(metadata: Mapping[str, Any], name: str) -> str | None:
    """What the metadata, which nobody has checked yet, says of a tensor."""
    known = metadata.get("fingerprints")
    text = known.get(name) if isinstance(known, Mapping) else None
    return text if isinstance(text, str) and is_fingerprint(text) else None


# ---------------------------------------------------------------- torch.save


def _from_torch(path: str) -> Shard:
    checkpoint = read_torch_file(path)
    if not isinstance(checkpoint, dict):
        found = f"a {type(checkpoint).__name__}"
    elif missing := [key for key in ("model", "shard_metadata") if key not in checkpoint]:
        found = f"a dict without {' and '.join(repr(key) for key in missing)}"
    elif not isinstance(checkpoint["model"], Mapping):
        found = f"a {type(checkpoint['model']).__name__} under 'model'"
    elif not all(isinstance(key, str) for key in checkpoint["model"]):
        found = "names that are no strings under 'model'"
    else:
        return _shard(path, checkpoint)
    raise CheckpointError(
        f"{path}: not a shard file: it holds {found}; expected a dict with 'model' and "
        f"'shard_metadata'. Narrow ckpt_prefix or ckpt_suffix if it does not belong here."
    )


def _shard(path: str, checkpoint: Mapping[str, Any]) -> Shard:
    metadata = checkpoint["shard_metadata"]
    optimizer = dict(_states(checkpoint.get("optimizer")))
    return Shard(path, checkpoint["model"], metadata, optimizer)


def _states(optimizer: Any) -> Iterator[tuple[str, TensorSource]]:
    """Tensors of ``{"state": {key: {state: tensor}}}``; a state dict by index is of no use here."""
    states = optimizer.get("state") if isinstance(optimizer, Mapping) else None
    for key, state in states.items() if isinstance(states, Mapping) else ():
        for name, value in state.items() if isinstance(state, Mapping) else ():
            if isinstance(value, TensorSource) and isinstance(key, str) and isinstance(name, str):
                yield state_name(key, name), value


# ---------------------------------------------------------------- damage


def watch_shards(shards: Sequence[Shard]) -> tuple[list[Shard], list[Watched]]:
    """The same shards, whose tensors are held against their fingerprints when they are read."""
    same, all_watched = [], []
    for shard in shards:
        known = {k: v for k, v in shard.state_dict.items() if isinstance(v, TensorSource)}
        model, of_model = watch(shard.source, known)
        optimizer, of_optimizer = watch(shard.source, shard.optimizer)
        others, of_others = watch(shard.source, shard.others)
        state_dict = {key: model.get(key, value) for key, value in shard.state_dict.items()}
        same.append(replace(shard, state_dict=state_dict, optimizer=optimizer, others=others))
        all_watched += of_model + of_optimizer + of_others
    return same, all_watched


def _looks_like_output(path: str, output: str) -> bool:
    same = os.path.realpath(path) == os.path.realpath(output)
    return same or OUTPUT_MARK in os.path.basename(path)
