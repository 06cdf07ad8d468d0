"""List the steps of a run as a table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

from xla_fsdp.checkpoint.errors import CheckpointError, one_line, printable
from xla_fsdp.checkpoint.files.storage import Storage
from xla_fsdp.checkpoint.steps.step_directory import (
    MARKER,
    Attempt,
    all_attempts,
    read_marker,
    read_metrics,
)

HEAD = ("step", "folder", "state", "ranks", "files", "bytes", "job", "metrics")
LONGEST_JOB = 80  # characters: a file may hold any name
_TO_THE_RIGHT = {"step", "ranks", "files", "bytes"}


def describe_steps(
    storage: Storage, verify: Callable[[str], Sequence[str]] | None
) -> Iterator[str]:
    """Yield the lines of a table with every attempt in a run's directory, and raise its problems
    then. ``verify`` returns what is wrong with a complete attempt's folder."""
    if not storage.names():
        raise CheckpointError(f"{storage.where}: there is no such directory, or nothing is in it")
    attempts, tree, problems = all_attempts(storage), storage.tree(), list[str]()
    if not attempts and storage.find(MARKER) is not None:
        raise CheckpointError(
            f"{storage.where}: is one step; list {os.path.dirname(storage.where.rstrip('/'))}, or "
            f"inspect this"
        )
    if not attempts:
        raise CheckpointError(f"{storage.where}: holds no step that save_checkpoint wrote")
    rows: list[tuple[str, ...]] = [HEAD]
    for attempt in attempts:
        sizes = tree.get(attempt.folder, {})
        row, found = _row(storage, attempt, sizes)
        if verify is not None and not found and MARKER in sizes:
            found = list(verify(f"{storage.where.rstrip('/')}/{attempt.folder}"))
            row = (*row[:2], "damaged" if found else "verified", *row[3:])
        rows.append(row)
        problems += found
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    for row in rows:
        cells = (
            cell.rjust(width) if name in _TO_THE_RIGHT else cell.ljust(width)
            for cell, width, name in zip(row, widths, HEAD, strict=True)
        )
        yield "  ".join(cells).rstrip()
    if problems:
        raise CheckpointError(problems)


def _row(
    storage: Storage, attempt: Attempt, sizes: dict[str, int]
) -> tuple[tuple[str, ...], list[str]]:
    """Return the cells of a row, and what is wrong with the marker."""
    start = (str(attempt.step), attempt.folder)
    if MARKER not in sizes:
        return (*start, "incomplete", "", str(len(sizes)), f"{sum(sizes.values()):,}", "", ""), []
    try:
        marker = read_marker(storage, attempt.folder)
    except CheckpointError as error:
        return (*start, "damaged", "", "", "", "", ""), error.problems
    nbytes = sum(sizes.get(name, 0) for name in marker.files)
    metrics = read_metrics(storage, attempt).items()
    shown = one_line(", ".join(f"{name}={value}" for name, value in metrics))
    size, count = str(marker.world_size), str(len(marker.files))
    job = printable(marker.job or "")[:LONGEST_JOB]
    folder = f"{storage.where.rstrip('/')}/{attempt.folder}"
    problems = [
        f"{folder}/{name}: {record.nbytes:,} bytes were written, but "
        f"{f'{sizes[name]:,}' if name in sizes else 'none'} are here"
        for name, record in marker.files.items()
        if sizes.get(name) != record.nbytes
    ]
    state = "lacks files" if problems else "complete"
    return (*start, state, size, count, f"{nbytes:,}", job, shown), problems
