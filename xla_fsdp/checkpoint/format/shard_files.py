"""Find and open the files that the ranks saved.

Invariants: opening runs no code from a file, and reads no tensors.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from glob import escape, glob
from typing import Any

from xla_fsdp.checkpoint.errors import CheckpointError, failing, listed, naming
from xla_fsdp.checkpoint.files.checksum import digest, is_checksum, written
from xla_fsdp.checkpoint.files.copying import Verifier, verified, verifying
from xla_fsdp.checkpoint.files.json_values import unpack
from xla_fsdp.checkpoint.files.safetensors_file import (
    OWN_METADATA,
    Entry,
    Header,
    header_bytes,
    read_header,
    shard_metadata_of,
)
from xla_fsdp.checkpoint.files.storage import (
    Staging,
    fetch,
    is_url,
    open_storage,
    split_path,
)
from xla_fsdp.checkpoint.files.tensor_source import (
    LOCAL,
    ByteSource,
    LazyMapping,
    LazySequence,
    LocalFile,
    RecentBlocks,
    TensorSource,
    full_path,
)
from xla_fsdp.checkpoint.files.torch_file import Archive, read_torch_file
from xla_fsdp.checkpoint.format.alike_files import AlikeFile, AlikeFiles
from xla_fsdp.checkpoint.format.records import (
    OF_RANK,
    VALUE_PREFIX,
    VALUES_KEY,
    FileMetadata,
    StateEntry,
    StateRecord,
    model_name,
    state_name,
)
from xla_fsdp.checkpoint.steps.step_directory import (
    MARKER,
    complete_attempts,
    digest_of_torch_file,
    find_marker,
    read_marker,
)

DEFAULT_SUFFIX = "*.pth"
SAFETENSORS = ".safetensors"
DCP_METADATA = ".metadata"  # the file that every directory of torch.distributed.checkpoint has

MODEL_PREFIX = model_name("")
OPTIMIZER_PREFIX = state_name("", "").rstrip("/") + "/"


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model.

    Args:
        source: path of its file, or another name for messages.
        content: by name in a file, with a ``TensorSource`` in place of every tensor.
        metadata: result of ``model.get_shard_metadata()``, not checked yet.
        notes: further metadata in the header of a safetensors file; in both kinds of files, the
            JSON of values beside the tensors under ``VALUES_KEY``.
        digest: of the file's description; None if it was not read from one.
        verified: whether whatever is read is verified, without checksums that are listed.
        copy: that was made of a remote file, and is deleted with the shard.
        left_behind: what else is there, and is not read.
        layout: of a safetensors file; the same object in shards whose files are laid out alike.
        file: the content of that file.
        alike: the files of all ranks, if they are laid out alike and are read together.
    """

    source: str
    content: Mapping[str, Any]
    metadata: Any
    notes: Mapping[str, str] = field(default_factory=dict)
    digest: str | None = None
    verified: bool = False
    copy: Any = field(default=None, repr=False, compare=False)
    left_behind: tuple[str, ...] = ()
    layout: SafetensorsLayout | TorchLayout | None = field(default=None, repr=False, compare=False)
    file: AlikeFile | None = field(default=None, repr=False, compare=False)
    alike: AlikeFiles | None = field(default=None, repr=False, compare=False)

    def tensors(self) -> Iterator[tuple[str, TensorSource]]:
        """Yield every tensor of the shard by its name in a file."""
        return ((n, value) for n, value in self.content.items() if isinstance(value, TensorSource))

    @property
    def state_dict(self) -> Mapping[str, Any]:
        """What is in the state dict of the model, by key."""
        names = {n.removeprefix(MODEL_PREFIX): n for n in self.content if is_of_model(n)}
        return LazyMapping(names, lambda key: self.content[names[key]])

    @property
    def optimizer(self) -> Mapping[str, TensorSource]:
        """The tensors of optimizer state by ``format.state_name``."""
        names = dict.fromkeys(filter(is_state, self.content))
        return LazyMapping(names, self.content.__getitem__)

    @property
    def others(self) -> Mapping[str, TensorSource]:
        """All other tensors of the file, by name."""
        names = dict.fromkeys(n for n in self.content if not (is_of_model(n) or is_state(n)))
        return LazyMapping(names, self.content.__getitem__)

    def states(self, key: str, record: StateRecord) -> dict[str, StateEntry]:
        """Return the optimizer states of ``key``, whose record is ``record``."""
        return record.entries(lambda name: self.content[state_name(key, name)])


def is_of_model(name: str) -> bool:
    """Return whether this is the name in a file of something in the model's state dict."""
    return name.startswith(MODEL_PREFIX)


def is_state(name: str) -> bool:
    """Return whether this is the name in a file of a tensor of optimizer state."""
    return name.startswith(OPTIMIZER_PREFIX)


def find_files(ckpt_prefix: str, ckpt_suffix: str) -> list[str]:
    """Return the full paths of the shard files of one checkpoint, sorted.

    Args:
        ckpt_prefix: start of their paths, taken literally, or as a pattern if that matches nothing;
            or a directory: of ``save_checkpoint`` (the newest complete step is returned), of a
            step, of torch.distributed.checkpoint (returned as one path), or with any shard files.
        ckpt_suffix: pattern for the rest of their paths. A directory as ``ckpt_prefix`` is searched
            for ``.pth`` and ``.safetensors`` files if this is ``DEFAULT_SUFFIX``.
    """
    if ckpt_suffix == DEFAULT_SUFFIX:
        full_path(ckpt_prefix, "ckpt_prefix")  # raises if that is empty
    if _is_directory(ckpt_prefix, ckpt_suffix):
        return _find_in(full_path(ckpt_prefix))
    if is_url(ckpt_prefix):  # whose last part is no pattern
        folder, start = split_path(ckpt_prefix)
        names, pattern = open_storage(folder).names(), escape(start) + ckpt_suffix
        return [os.path.join(folder, name) for name in names if fnmatchcase(name, pattern)]
    start = _local(ckpt_prefix)
    found = sorted(glob(escape(start) + ckpt_suffix) or glob(start + ckpt_suffix))
    return [full_path(path) for path in found]


def _find_in(folder: str) -> list[str]:
    storage = open_storage(folder)
    folder = folder.rstrip("/") if is_url(folder) else folder
    if DCP_METADATA in storage.sizes(""):
        return [folder]
    if attempts := complete_attempts(storage):
        return _files_of_step(os.path.join(folder, attempts[-1].folder))
    names = storage.names()
    if MARKER in names:
        return _files_of_step(folder)
    if dirs := glob(os.path.join(escape(folder), "pytorch_model_fsdp_*", DCP_METADATA)):
        return sorted(map(os.path.dirname, dirs))  # of accelerate
    return [os.path.join(folder, name) for name in names if name.endswith((".pth", SAFETENSORS))]


def describe_found(paths: Sequence[str], ckpt_prefix: str, ckpt_suffix: str) -> str:
    """Return a text for the user on the shard files that ``find_files`` found."""
    count = f"{len(paths)} checkpoint file{'s' if len(paths) > 1 else ''}"
    if not _is_directory(ckpt_prefix, ckpt_suffix):
        return f"{count} in {ckpt_prefix}{ckpt_suffix}"
    if list(paths) == [full_path(ckpt_prefix)]:
        return f"a directory of torch.distributed.checkpoint in {ckpt_prefix}"
    folder, _ = split_path(paths[0])
    kinds = dict.fromkeys(os.path.splitext(path)[1] for path in paths)
    marker = find_marker(folder)
    step = "" if marker is None else f", step {marker.step}"
    return f"{count} ({' and '.join(kinds)}) in {folder}{step}"


def nothing_found(ckpt_prefix: str, ckpt_suffix: str) -> str:
    """Return the error message if ``find_files`` finds nothing."""
    if not is_url(ckpt_prefix) and os.path.isfile(_local(ckpt_prefix)):
        return (
            f"{ckpt_prefix}: is one file, and no prefix of shard files; "
            f"'inspect {ckpt_prefix}' shows what is in it"
        )
    if _is_directory(ckpt_prefix, ckpt_suffix):
        return f"{ckpt_prefix}: holds no complete step and no shard file"
    if ckpt_suffix != DEFAULT_SUFFIX:
        return f"no shard file matches {ckpt_prefix}{ckpt_suffix}"
    above, _ = split_path(full_path(ckpt_prefix).rstrip("/"))
    steps = [attempt.folder for attempt in complete_attempts(open_storage(above))]
    there = f"; complete in {above}: {listed(steps, len(steps))}" if steps else ""
    return (
        f"no shard file matches {ckpt_prefix}{ckpt_suffix}, and there is no directory "
        f"{ckpt_prefix}{there}"
    )


def _is_directory(ckpt_prefix: str, ckpt_suffix: str) -> bool:
    if ckpt_suffix != DEFAULT_SUFFIX:
        return False
    return bool(
        open_storage(ckpt_prefix).names()
        if is_url(ckpt_prefix)
        else os.path.isdir(_local(ckpt_prefix))
    )


def _local(path: str) -> str:
    return os.path.expanduser(path.removeprefix(LOCAL))


def _files_of_step(folder: str) -> list[str]:
    files = read_marker(open_storage(folder)).files
    if strange := [name for name in files if os.path.basename(name) != name or name in ("", "..")]:
        raise CheckpointError(
            f"{os.path.join(folder, MARKER)}: {strange[0]!r} is not the name of a file in its "
            f"directory"
        )
    return [os.path.join(folder, name) for name in sorted(files)]


# ---------------------------------------------------------------- opening


def open_safetensors(file: ByteSource, name: str, like: Shard | None = None) -> Shard:
    """Open the shard in a safetensors file, local or remote, of whose tensors it reads none; it
    shares with ``like``, of another rank, what is equal in both."""
    known = like.layout if like is not None else None
    if isinstance(known, SafetensorsLayout) and (twin := known.twin(file, name)):
        return twin
    header = read_header(file, name)
    with naming(name):
        metadata = FileMetadata(shard_metadata_of(header))
    notes = {key: text for key, text in header.metadata.items() if key not in OWN_METADATA}
    layout = SafetensorsLayout(file, header, metadata, notes)
    own = AlikeFile(name, file, header.entries, _checksums(metadata))
    return Shard(name, own, metadata, notes, header.digest, layout=layout, file=own)


class SafetensorsLayout:
    """What safetensors files that are alike have in common, as the first of them and its header
    have it."""

    def __init__(
        self, file: ByteSource, header: Header, metadata: FileMetadata, notes: Mapping[str, str]
    ) -> None:
        self._file, self._header = file, header
        self._metadata, self._notes = metadata, notes
        self._fixed = b""

    def twin(self, file: ByteSource, name: str) -> Shard | None:
        """Return the shard in a file whose header differs only in the rank and the checksums, which
        takes a fiftieth of the time of reading all of it; None if it differs in more."""
        if not self._fixed:
            # Not the file's own text if a name looks like a checksum, or there are none.
            self._fixed, own, checksums = _divided(header_bytes(self._file))
            known = [self._metadata.get(key, -1) for key in OF_RANK[:2]]
            known.append(self._notes.get(VALUES_KEY, -1))
            if own != known or checksums != list(_checksums(self._metadata).values()):
                self._fixed = b"-"
        with naming(name):
            data = header_bytes(file)
        try:
            fixed, (*ranks, values), checksums = _divided(data)
        except (ValueError, RecursionError):  # damaged; reading all of it tells how
            return None
        shift = len(data) - self._header.data_start
        if fixed != self._fixed or file.nbytes - shift != self._header.file_size:
            return None
        sums = dict(zip(self._metadata["fingerprints"], checksums, strict=True))
        of_rank = {k: v for k, v in zip(OF_RANK, (*ranks, sums), strict=True) if v != -1}
        notes = self._notes if values == -1 else {**self._notes, VALUES_KEY: values}
        metadata = FileMetadata(of_rank, self._metadata)
        twin = AlikeFile(name, file, self._header.entries, sums, shift)
        return Shard(name, twin, metadata, notes, digest(data), layout=self, file=twin)


_CHECKSUM = re.compile(rb"(crc32:[0-9a-f]{8,})")
_OF_RANK = (
    re.compile(rb'\\"rank\\": ?(\d{1,9})'),
    re.compile(rb'\\"global_rank\\": ?(\d{1,9}|null)'),
    re.compile(rb'"%s": ?("(?:[^"\\]|\\.)*")' % re.escape(VALUES_KEY.encode())),
)


def _divided(header: bytes) -> tuple[bytes, list[Any], list[str]]:
    """Divide a header into what is equal on all ranks; the rank, the global rank and the text of
    values, each -1 where there is not one of it; and checksums."""
    parts = _CHECKSUM.split(header[8:].rstrip(b" "))
    fixed, own = b"crc32".join(parts[::2]), []
    for pattern in _OF_RANK:
        around = pattern.split(fixed)
        own.append(json.loads(around[1]) if len(around) == 3 else -1)
        fixed = b"own".join(around[::2])
    return fixed, own, [text.decode() for text in parts[1::2]]


def _checksums(metadata: Any) -> dict[str, str]:
    """Return those in metadata, which may be malformed."""
    known = metadata.get("fingerprints") if isinstance(metadata, Mapping) else None
    pairs = known.items() if isinstance(known, Mapping) else ()
    return {name: text for name, text in pairs if isinstance(text, str) and is_checksum(text)}


def open_torch(path: str, like: Shard | None = None) -> Shard:
    """Open the shard in a torch file on this machine; it shares with ``like``, of another rank,
    what is equal in both."""
    known = like.layout if like is not None else None
    if isinstance(known, TorchLayout) and (twin := known.twin(path)):
        return twin
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
        shard = _torch_shard(path, checkpoint)
        layout = TorchLayout.of(shard)
        if layout is None:
            return shard
        sums = {name: t.checksum for name, t in shard.tensors() if t.checksum is not None}
        return replace(
            shard, layout=layout, file=AlikeFile(path, LocalFile(path), layout.entries, sums)
        )
    raise CheckpointError(
        f"{path}: not a shard file: it holds {found}; expected a dict with 'model' and "
        f"'shard_metadata'. Narrow ckpt_prefix or ckpt_suffix if it does not belong here."
    )


class TorchLayout:
    """What torch files have in common whose pickles differ in the rank only; use ``of``."""

    _RANK = re.compile(rb"X\x04\0\0\0rank(?:q.|r....)K(.)", re.DOTALL)  # a key, and its value

    def __init__(self, first: Shard, entries: Mapping[str, Entry]) -> None:
        self.entries, self._first = entries, first
        self._metadata = FileMetadata(first.metadata)
        # The names of the tensors whose checksums are the CRC-32s of their records.
        self._summed = [name for name, tensor in first.tensors() if tensor.checksum is not None]

    @classmethod
    def of(cls, shard: Shard) -> TorchLayout | None:
        """Return the layout of a file; None if it holds what others cannot share (tensors that are
        not contiguous, or values beside them)."""
        metadata = shard.metadata
        if not isinstance(metadata, dict) or "fingerprints" in metadata:
            return None
        if shard.notes or not all(is_of_model(n) or is_state(n) for n in shard.content):
            return None
        entries = {}
        for name, tensor in shard.content.items():
            if not isinstance(tensor, TensorSource):
                return None
            identity = tensor.identity if tensor.spec.nbytes else (shard.source, 0, tensor.spec)
            if not isinstance(identity, tuple) or len(identity) != 3:
                return None
            entries[name] = Entry(tensor.spec, identity[1])
        return cls(shard, entries)

    def twin(self, path: str) -> Shard | None:
        """Return the shard in a file that differs only in the rank and the tensors; None if it
        differs in more, or cannot be read."""
        try:
            rank, crcs = self._archive.twin(path)
        except (OSError, ValueError):  # which reading all of it tells
            return None
        sums = {name: written(crcs[self.entries[name].start]) for name in self._summed}
        metadata = FileMetadata({"rank": rank}, self._metadata)
        own = AlikeFile(path, LocalFile(path), self.entries, sums)
        return Shard(path, own, metadata, layout=self, file=own)

    @cached_property
    def _archive(self) -> Archive:
        return Archive(self._first.source, self._RANK)


def open_remote_torch(url: str) -> Shard:
    """Open the shard in a torch file at a URL, of which it makes a local copy."""
    with failing(url, "cannot be copied"):
        copy = Staging()
    path = fetch(url, copy.path)
    try:
        shard = open_torch(path)
    except CheckpointError as error:
        lines = [line.replace(path, url) for line in error.problems]
        raise CheckpointError(lines) from error
    return replace(shard, source=url, copy=copy)


def _torch_shard(path: str, checkpoint: Mapping[str, Any]) -> Shard:
    metadata, (values, tensors) = checkpoint["shard_metadata"], _values(checkpoint.get("values"))
    content = {model_name(key): value for key, value in checkpoint["model"].items()}
    content |= {**dict(_states(checkpoint.get("optimizer"))), **tensors}
    for name, checksum in _checksums(metadata).items():
        if isinstance(content.get(name), TensorSource):
            content[name] = replace(content[name], checksum=checksum)
    return Shard(
        path,
        content,
        metadata,
        {} if values is None else {VALUES_KEY: values},
        _digest(metadata, values or ""),
    )


def _values(values: Any) -> tuple[str | None, dict[str, TensorSource]]:
    """Return the JSON and the tensors of values beside model and optimizer."""
    saved = values if isinstance(values, Mapping) else {}
    text, tensors = saved.get("json"), saved.get("tensors")
    if not isinstance(text, str) or not isinstance(tensors, list):
        return None, {}
    named = {f"{VALUE_PREFIX}{i}": t for i, t in enumerate(tensors) if isinstance(t, TensorSource)}
    return text, named


def _digest(metadata: Any, values: str) -> str | None:
    try:
        return digest_of_torch_file(metadata, values)
    except (TypeError, ValueError, RecursionError):  # torch_xla's metadata is no JSON
        return None


def values_of(shard: Shard) -> Any:
    """Return the values that were saved beside model and optimizer; ``{}`` if there are none."""
    try:
        packed = json.loads(shard.notes.get(VALUES_KEY, "{}"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{shard.source}: {VALUES_KEY} is not JSON: {error}") from error
    count = sum(name.startswith(VALUE_PREFIX) for name in shard.content)
    names = [f"{VALUE_PREFIX}{index}" for index in range(count)]
    if absent := [name for name in names if name not in shard.content]:
        raise CheckpointError(f"{shard.source}: {absent[0]} is missing")
    with naming(shard.source):
        return unpack(packed, [shard.content[name].load() for name in names])


def _states(optimizer: Any) -> Iterator[tuple[str, TensorSource]]:
    """Yield the tensors of ``{"state": {key: {state: tensor}}}`` by their names in a file.

    Entries under indices, as in the state dict of a torch optimizer, are ignored.
    """
    states = optimizer.get("state") if isinstance(optimizer, Mapping) else None
    for key, state in states.items() if isinstance(states, Mapping) else ():
        for name, value in state.items() if isinstance(state, Mapping) else ():
            if isinstance(value, TensorSource) and isinstance(key, str) and isinstance(name, str):
                yield state_name(key, name), value


def verified_shard(shard: Shard, recent: RecentBlocks) -> Shard:
    """Return the same shard; reading what is damaged raises ``CheckpointError``."""
    return replace(shard, content=verified(shard.source, shard.content, recent))


def of_all(shards: Sequence[Shard], name: str) -> Sequence[Any]:
    """Return the tensor of this name in a file of every shard; the shards are in rank order."""
    alike = shards[0].alike
    if alike is not None and alike.is_small(name):
        return alike.tensor(name)
    return LazySequence(shards, lambda shard: shard.content[name])


def are_alike(shards: Sequence[Shard]) -> bool:
    """Whether the files of these shards are laid out alike."""
    return shards[0].layout is not None and all(s.layout is shards[0].layout for s in shards)


def verifying_shards(shards: Sequence[Shard]) -> tuple[list[Shard], list[Verifier]]:
    """Return the same shards, reading through verifiers of their tensors' checksums.

    Of files that are alike, small tensors are read, and verified, for all ranks together: only the
    first shard has them.
    """
    alike = None
    if len(shards) > 1 and are_alike(shards):
        files = [shard.file for shard in shards if shard.file is not None]
        alike = AlikeFiles(files[0].entries, files)
    same: list[Shard] = []
    verifiers: list[Verifier] = [] if alike is None else [alike]
    for shard in shards:
        left_out = alike.is_small if alike is not None and same else lambda _: False
        names = [name for name in shard.content if not left_out(name)]
        content, own = verifying(shard.source, {name: shard.content[name] for name in names})
        same.append(replace(shard, content=content))
        verifiers += own
    same[0] = replace(same[0], alike=alike)
    return same, verifiers
