"""The checkpoint error, and checks of values that come out of a file.

``where`` is the path of a value inside the metadata, such as ``params.2.members.0.shape``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch

T = TypeVar("T")

# Characters of a message: a file may hold names of any length.
MAX_LINE = 2000


class CheckpointError(ValueError):
    """A checkpoint cannot be read, merged or written. One problem per line of the message.

    ``problems`` holds the same lines as a list.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def raise_if(problems: Sequence[str]) -> None:
    """Raise one ``CheckpointError`` for all problems, if there are any."""
    if problems:
        raise CheckpointError(problems)


def prefixed(error: CheckpointError, name: str) -> CheckpointError:
    """Return the error with every line beginning with a file's name, once."""
    lines = (problem.removeprefix(f"{name}: ") for problem in error.problems)
    return CheckpointError([f"{name}: {line}" for line in lines])


def typed(value: Any, kind: type[T], where: str) -> T:
    """Return ``value``, which must be a ``kind`` (a bool is no int).

    Raises:
        CheckpointError: if it is not.
    """
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise CheckpointError(f"{where} is {type(value).__name__}, expected {kind.__name__}")


def item(data: dict[Any, Any], key: str, kind: type[T], where: str) -> T:
    """Return ``data[key]``, which must be there and be a ``kind``.

    Raises:
        CheckpointError: if it is not.
    """
    path = f"{where}.{key}" if where else key
    if key not in data:
        raise CheckpointError(f"{path} is missing")
    return typed(data[key], kind, path)


def check_rank(rank: int, world_size: int) -> None:
    """Raise ``CheckpointError`` unless ``rank`` is one of ``world_size`` ranks."""
    if world_size < 1 or not 0 <= rank < world_size:
        raise CheckpointError(
            f"rank {rank} of world_size {world_size} is impossible; expected 0 <= rank < world_size"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str, where: str = "dtype") -> torch.dtype:
    """Return ``torch.float32`` for ``"float32"``.

    Raises:
        CheckpointError: if torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{where} {name!r} is not a torch dtype")
    return dtype


def refuse_repeated(what: str, names: Iterable[str]) -> None:
    """Raise ``CheckpointError`` if a name is there more than once."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise CheckpointError(f"{what} {name} appears twice")
        seen.add(name)


def find_bad_names(names: Iterable[str]) -> list[str]:
    """Return one line for each name that no module tree can give a tensor.

    Such as ``../../x`` or ``a..b``: every part between dots is the name of a module or a parameter,
    so none is empty. Programs that make paths of names are safe from these.
    """
    return [
        f"{name[:80]!r} is not the name of a tensor of a model"
        for name in names
        if not all(name.split(".")) or not name.isprintable() or name.startswith("/")
    ]


def listed(names: Iterable[str], count: int, limit: int = 8) -> str:
    """Return the first of ``count`` names for a message, and how many more there are."""
    more = f" and {count - limit} more" if count > limit else ""
    return ", ".join(islice(names, limit)) + more


def shown(value: Any) -> str:
    """Return a value of a file's for a message: on one line, and short whatever it is."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def one_line(text: str) -> str:
    """Make a message whose parts come out of files fit for one line of a terminal."""
    short = text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)
