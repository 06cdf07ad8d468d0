"""Open files of full models: what consolidation writes, and what Hugging Face and torch do.

Invariants: no code in a file is run; tensors are read on demand, and whatever checksums a file has
are verified as they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator

from xla_fsdp.checkpoint.convert.model_files import CHECKSUMS
from xla_fsdp.checkpoint.errors import CheckpointError, listed, raise_if, shown
from xla_fsdp.checkpoint.files.checksum import is_checksum
from xla_fsdp.checkpoint.files.copying import verified
from xla_fsdp.checkpoint.files.safetensors_file import METADATA_KEY, read_header
from xla_fsdp.checkpoint.files.tensor_source import (
    LocalFile,
    RecentBlocks,
    TensorSource,
    full_path,
    read_small_file,
)
from xla_fsdp.checkpoint.files.torch_file import read_torch_file
from xla_fsdp.checkpoint.format.alike_files import AlikeFile
from xla_fsdp.checkpoint.format.shard_files import SAFETENSORS

INDEX = ".index.json"
TORCH = (".bin", ".pth", ".pt")
BESIDE_A_MODEL = ("optimizer", "scheduler", "training_args", "rng_state")
"""How names begin of other files that trainers and consolidation write beside a model."""

RECENT = 1 << 26  # bytes of blocks of which only a part was needed so far


def open_model(path: str | os.PathLike[str]) -> dict[str, TensorSource]:
    """Return the tensors of a model in files on this machine, by name.

    Args:
        path: of a ``.safetensors`` file; of a file of ``torch.save`` of a state dict, or of
            ``{"model": state_dict}``; of an index (``*.index.json``) of several such files; or of a
            directory with one of these, beside which there may be files of an optimizer.
    """
    where = full_path(path)
    if os.path.isdir(where):
        where = _file_in(where)
    elif not os.path.exists(where):
        raise CheckpointError(f"{where}: there is no such file or directory")
    files = _indexed_files(where) if where.endswith(INDEX) else [where]
    recent = RecentBlocks(RECENT)
    tensors: dict[str, TensorSource] = {}
    for file in files:
        own = _of_safetensors(file) if file.endswith(SAFETENSORS) else _of_torch(file)
        if twice := tensors.keys() & own.keys():
            raise CheckpointError(f"{file}: has {min(twice)}, which another file of {where} has")
        tensors |= verified(file, own, recent)
    return tensors


def _file_in(folder: str) -> str:
    """Return the path of the one model in a directory, or of its index."""
    with os.scandir(folder) as entries:
        names = sorted(each.name for each in entries if not each.name.startswith("."))
    names = [name for name in names if not name.startswith(BESIDE_A_MODEL)]
    for endings in ((SAFETENSORS,), TORCH):
        indexes = [name for name in names if name.endswith(tuple(e + INDEX for e in endings))]
        files = [
            name
            for name in names
            if name.endswith(endings) and not name.endswith(f".optimizer{SAFETENSORS}")
        ]
        # An index first, as its files are there, too.
        for found in (indexes, files):
            if len(found) == 1:
                return os.path.join(folder, found[0])
        if indexes or files:
            raise CheckpointError(
                f"{folder}: holds {_listed(files)} and {_listed(indexes)}; expected one file, or "
                f"several and one index of them (*{INDEX}). Name the file"
            )
    raise CheckpointError(
        f"{folder}: holds {_listed(names)}, and no file of a whole model "
        f"({', '.join((SAFETENSORS, *TORCH))}). Shards, or a directory of "
        f"torch.distributed.checkpoint, are merged first: consolidate_sharded_ckpts "
        f"--ckpt_prefix {folder}"
    )


def _listed(names: list[str]) -> str:
    return listed(map(shown, names), len(names), 3) or "nothing"


def _indexed_files(index: str) -> list[str]:
    folder = os.path.dirname(index)
    try:
        names = sorted(map(str, set(json.loads(read_small_file(index))["weight_map"].values())))
    except CheckpointError:
        raise
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: is no index of files of a model") from error
    raise_if(list(_problems(index, folder, names)))
    return [os.path.join(folder, name) for name in names]


def _problems(index: str, folder: str, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
            yield f"{index}: lists {shown(name)}, which is no name of a file"
        elif not os.path.exists(os.path.join(folder, name)):
            yield f"{index}: lists {shown(name)}, which is missing"


def _of_safetensors(path: str) -> dict[str, TensorSource]:
    file = LocalFile(path)
    header = read_header(file, path)
    _refuse_shard(path, METADATA_KEY in header.metadata)
    try:
        checksums = json.loads(header.metadata.get(CHECKSUMS, "{}"))
        sound = all(isinstance(each, str) and is_checksum(each) for each in checksums.values())
    except (ValueError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise CheckpointError(f"{path}: its {CHECKSUMS} are no checksums: its header is damaged")
    return dict(AlikeFile(path, file, header.entries, checksums))


def _of_torch(path: str) -> dict[str, TensorSource]:
    read = read_torch_file(path)
    content = read if isinstance(read, dict) else {}
    _refuse_shard(path, "shard_metadata" in content)
    state = content.get("model", content)
    values = state if isinstance(state, dict) else {}
    tensors = {name: value for name, value in values.items() if isinstance(value, TensorSource)}
    if not tensors:
        raise CheckpointError(f"{path}: holds no state dict")
    return tensors


def _refuse_shard(path: str, is_shard: bool) -> None:
    if is_shard:
        raise CheckpointError(
            f"{path}: is one rank's shard, not a whole model. Merge those of all ranks first: "
            f"consolidate_sharded_ckpts --ckpt_prefix {os.path.dirname(path)}"
        )
