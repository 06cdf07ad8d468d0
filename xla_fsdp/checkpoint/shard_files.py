"""Finds and opens the files that the ranks saved. Reads, never writes.

Words: a *shard* is one rank's ``model`` and ``shard_metadata``, with a *source* to name it by in
messages; a file is *foreign* if it lacks one of the two.
Always true: nothing in a file is ever executed (``weights_only``); tensors stay in the file, mapped
into memory, until they are used, so other content (optimizer state) costs nothing; an earlier
output among the matches is passed over.
Whether the shards belong together is judged by ``checks``.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import escape, glob
from pickle import UnpicklingError
from typing import Any

import torch

from xla_fsdp.checkpoint.validate import CheckpointError

OUTPUT_MARK = "_consolidated"
ZIP_MAGIC = b"PK\x03\x04"


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model: where it is from, its state dict and its metadata."""

    source: str
    state_dict: Mapping[str, Any]
    metadata: Any


def matching_files(ckpt_prefix: str, ckpt_suffix: str) -> list[str]:
    """Files named ``ckpt_prefix`` followed by the pattern ``ckpt_suffix``, sorted.

    The prefix is taken literally; only if that matches nothing, as a pattern like the suffix.
    """
    return sorted(glob(escape(ckpt_prefix) + ckpt_suffix) or glob(ckpt_prefix + ckpt_suffix))


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
        CheckpointError: one line that names the file: it cannot be read, is no torch file, would
            have to run code, or is foreign.
    """
    checkpoint = _load(path)
    if not isinstance(checkpoint, dict):
        found = f"a {type(checkpoint).__name__}"
    elif missing := [key for key in ("model", "shard_metadata") if key not in checkpoint]:
        found = f"a dict without {' and '.join(repr(key) for key in missing)}"
    elif not isinstance(checkpoint["model"], Mapping):
        found = f"a {type(checkpoint['model']).__name__} under 'model'"
    elif not all(isinstance(key, str) for key in checkpoint["model"]):
        found = "names that are no strings under 'model'"
    else:
        return Shard(path, checkpoint["model"], checkpoint["shard_metadata"])
    raise CheckpointError(
        f"{path}: not a shard file: it holds {found}; expected a dict with 'model' and "
        f"'shard_metadata'. Narrow ckpt_prefix or ckpt_suffix if it does not belong here."
    )


def _load(path: str) -> Any:
    try:
        with warnings.catch_warnings():
            # A file saved with a newer pickle protocol than torch's default is fine.
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            # Files in torch's format from before 1.6 are no zip files and cannot be mapped.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:
        raise CheckpointError(f"{path}: {_why_not_loaded(error)}") from error


def _is_zip(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(len(ZIP_MAGIC)) == ZIP_MAGIC


def _why_not_loaded(error: Exception) -> str:
    """torch's own messages run over many lines and advise to load with ``weights_only=False``."""
    refused = re.search(r"GLOBAL ([\w.]+)", str(error))
    if isinstance(error, UnpicklingError) and refused:
        return (
            f"refused: it holds a {refused[1]}, and loading that would run code from the file. "
            f"Save only tensors, numbers, strings, lists and dicts (vars(args) in place of args)."
        )
    return "truncated, or not a file written by torch.save or xm.save"


def _looks_like_output(path: str, output: str) -> bool:
    same = os.path.realpath(path) == os.path.realpath(output)
    return same or OUTPUT_MARK in os.path.basename(path)
