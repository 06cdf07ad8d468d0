"""Writes a file completely or not at all.

Words: the *temporary file* lies beside the final one, under a name that starts with a dot and that
no checkpoint pattern matches.
Always true: whatever happens, the final name holds either what it held before or the complete new
content, and no temporary file stays behind.
What is written is the caller's business.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from typing import Any

import torch

from xla_fsdp.checkpoint.validate import CheckpointError

EXISTS = "exists already; remove it, choose another save_path, or overwrite it (--overwrite)"


def save_atomically(content: Any, path: str, *, overwrite: bool = False) -> None:
    """``torch.save`` that leaves nothing half-written.

    Args:
        content: anything ``torch.save`` takes.
        path: of the file.
        overwrite: whether an existing file may be replaced.

    Raises:
        CheckpointError: if the file exists and may not be replaced, or cannot be written.
    """
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name}.{secrets.token_hex(4)}.tmp")
    try:
        _write(content, temporary)
        if not overwrite and os.path.lexists(path):
            raise CheckpointError(f"{path}: {EXISTS}")
        os.replace(temporary, path)
        _sync_directory(directory or ".")
    except (OSError, RuntimeError) as error:  # torch turns a failed write into a RuntimeError
        raise CheckpointError(f"{path}: could not be written: {error}") from error
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def _write(content: Any, path: str) -> None:
    with open(path, "xb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: str) -> None:
    """Make the new name itself durable, where the file system can do that."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
