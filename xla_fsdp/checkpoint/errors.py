"""``CheckpointError``, checks of values read from files, and formatting for messages.

An argument ``where`` is the path of a value in the metadata, such as ``params.2.members.0.shape``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch

T = TypeVar("T")

MAX_LINE = 2000  # characters of a printed message: a file may hold names of any length


class CheckpointError(ValueError):
    """A checkpoint cannot be read, merged or written.

    The message has one line for each problem; the attribute ``problems`` is the list of them.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class MismatchError(CheckpointError):
    """A checkpoint that may be whole cannot be loaded into this model or these objects."""


def raise_if(problems: Sequence[str]) -> None:
    """Raise one ``CheckpointError`` for all problems, if there are any."""
    if problems:
        raise CheckpointError(problems)


def prefixed(error: CheckpointError, name: str) -> CheckpointError:
    """Return the error with ``"{name}: "`` before every line that does not begin with it."""
    lines = (problem.removeprefix(f"{name}: ") for problem in error.problems)
    return CheckpointError([f"{name}: {line}" for line in lines])


def typed(value: Any, kind: type[T], where: str) -> T:
    """Return ``value``; raise ``CheckpointError`` unless it is a ``kind`` (a bool is no int)."""
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise CheckpointError(f"{where} is {type(value).__name__}, expected {kind.__name__}")


def item(data: dict[Any, Any], key: str, kind: type[T], where: str) -> T:
    """Return ``data[key]``; raise ``CheckpointError`` if it is missing or not a ``kind``."""
    path = f"{where}.{key}" if where else key
    if key not in data:
        raise CheckpointError(f"{path} is missing")
    return typed(data[key], kind, path)


def check_rank(rank: int, world_size: int) -> None:
    if world_size < 1 or not 0 <= rank < world_size:
        raise CheckpointError(
            f"rank {rank} of world_size {world_size} is impossible; expected 0 <= rank < world_size"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str, where: str = "dtype") -> torch.dtype:
    """Return ``torch.float32`` for ``"float32"``; raise ``CheckpointError`` for an unknown name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{where} {name!r} is not a torch dtype")
    return dtype


def refuse_repeated(what: str, names: Iterable[str]) -> None:
    """Raise ``CheckpointError`` if a name occurs more than once."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise CheckpointError(f"{what} {name} appears twice")
        seen.add(name)


def find_bad_names(names: Iterable[str]) -> list[str]:
    """Return one line for each name that no parameter or buffer of a module can have.

    Every part between dots names a module or a tensor, so none is empty: ``a..b`` and ``../../x``
    are refused. This also protects programs that make file paths of names.
    """
    return [
        f"{name[:80]!r} is not the name of a tensor of a model"
        for name in names
        if not all(name.split(".")) or not name.isprintable() or name.startswith("/")
    ]


def listed(names: Iterable[str], count: int, limit: int = 8) -> str:
    """Return the first ``limit`` of ``count`` names, and how many more there are."""
    more = f" and {count - limit} more" if count > limit else ""
    return ", ".join(islice(names, limit)) + more


def shown(value: Any) -> str:
    """Return the ``repr`` of a value read from a file, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def one_line(text: str) -> str:
    """Return a message as one line that is safe to print: cut, with control characters escaped."""
    short = text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)
