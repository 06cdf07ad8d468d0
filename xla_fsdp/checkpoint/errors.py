"""``CheckpointError``, checks of values read from files, and formatting for messages.

Whatever reads, checks or writes files raises ``CheckpointError``, with a line for every problem
that it finds. An argument ``where`` is the path of a value in the metadata, such as
``params.2.members.0.shape``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from reprlib import Repr
from typing import Any, TypeVar

import torch

T = TypeVar("T")

MAX_DIMS = 64
MAX_SIZE = 1 << 63
MAX_LINE = 2000  # characters of a printed message: a file may hold names of any length


class CheckpointError(ValueError):
    """A checkpoint cannot be read, merged or written.

    The message has one line for each problem; the attribute ``problems`` is the list of them.
    Whatever names are in them, a line stays one line.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        lines = [problems] if isinstance(problems, str) else problems
        self.problems = [printable(line) for line in lines]
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


class MismatchError(CheckpointError):
    """A checkpoint that may be whole cannot be loaded into this model or these objects."""


def raise_if(problems: Sequence[str]) -> None:
    """Raise one ``CheckpointError`` for all problems, if there are any."""
    if problems:
        raise CheckpointError(problems)


def deleted_meanwhile(path: str) -> str:
    """Return the line for a file or folder that was there before."""
    return (
        f"{path}: was deleted while it was read, as a job that saves there deletes older steps: "
        f"load again"
    )


def whole_number(name: str, value: Any, least: int) -> int:
    """Return a number that a user gave: an int, or what can be an index, as numpy's can.

    Raises:
        ValueError: if it is something else, a bool, or less than ``least``.
    """
    number = operator.index(value) if hasattr(value, "__index__") else least - 1
    if isinstance(value, bool) or number < least:
        raise ValueError(f"{name}={value!r}; expected a whole number, {least} or more")
    return number


def number_or_none(name: str, value: Any) -> int | None:
    """Return a number from 1 on as ``whole_number`` does; None as it is."""
    return None if value is None else whole_number(name, value, 1)


def lines_of(error: Exception) -> list[str]:
    """Return the problems of an error of any class, one line each."""
    if isinstance(error, CheckpointError):
        return error.problems
    return [f"{type(error).__name__}: {printable(str(error).partition(chr(10))[0])}"]


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Put ``"{name}: "`` before every line of a ``CheckpointError`` that does not begin so."""
    try:
        yield
    except CheckpointError as error:
        lines = [line if line.startswith(name) else f"{name}: {line}" for line in error.problems]
        raise type(error)(lines) from error


@contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Add the lines of a ``CheckpointError`` to these, and do not raise it."""
    try:
        yield
    except CheckpointError as error:
        problems += error.problems


def typed(value: Any, kind: type[T], where: str) -> T:
    """Return ``value``; raise ``CheckpointError`` unless it is a ``kind``.

    A bool is no int, and an int of more than 64 bits is none either.
    """
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        if isinstance(value, int) and abs(value) >= MAX_SIZE:
            raise CheckpointError(f"{where} is {shown(value)}, expected an integer below 2^63")
        return value
    raise CheckpointError(f"{where} is {type(value).__name__}, expected {kind.__name__}")


def item(data: dict[Any, Any], key: str, kind: type[T], where: str) -> T:
    """Return ``data[key]``; raise ``CheckpointError`` if it is missing or not a ``kind``."""
    path = f"{where}.{key}" if where else key
    if key not in data:
        raise CheckpointError(f"{path} is missing")
    return typed(data[key], kind, path)


def checked_shape(value: Any, where: str) -> tuple[int, ...]:
    """Return ``value`` as a shape; raise ``CheckpointError`` unless torch can have such tensors."""
    if type(value) not in (list, tuple, torch.Size) or len(value) > MAX_DIMS:
        raise CheckpointError(f"{where} is {shown(value)}, expected at most {MAX_DIMS} sizes")
    sizes = [size for size in value if type(size) is int and 0 <= size < MAX_SIZE]
    # Also without the sizes that are 0, as torch computes strides from the others.
    if len(sizes) < len(value) or math.prod(size or 1 for size in sizes) >= MAX_SIZE:
        raise CheckpointError(
            f"{where} is {shown(value)}, expected sizes from 0 on whose product is below 2^63"
        )
    return tuple(sizes)


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
        f"{name[:80]!r} is not the name of a tensor of a model that can be saved: such names are "
        f"printable, have no empty part between dots, and do not begin with a slash"
        for name in names
        if not all(name.split(".")) or not name.isprintable() or name.startswith("/")
    ]


def listed(names: Iterable[str], count: int, limit: int = 8) -> str:
    """Return the first ``limit`` of ``count`` names, and how many more there are."""
    more = f" and {count - limit} more" if count > limit else ""
    return ", ".join(islice(names, limit)) + more


def shown(value: Any) -> str:
    """Return the ``repr`` of a value read from a file, cut to 80 characters; of a large one, only
    the beginning is looked at."""
    text = _Short().repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class _Short(Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxlong, self.maxother = 4, 80, 40, 80
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 20

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() < 4096 else "a huge integer"


def one_line(text: str) -> str:
    """Return a message as one line that is safe to print: cut, with control characters escaped."""
    return printable(text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}...")


def printable(text: str) -> str:
    """Return a text with control characters escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# torch turns a failed write into a RuntimeError of several lines. Remote file systems have their
# own exceptions, so there every Exception is expected.
LOCAL_ERRORS = (OSError, RuntimeError)


@contextmanager
def failing(
    path: str | Path,
    what: str = "could not be written",
    errors: type[Exception] | tuple[type[Exception], ...] = LOCAL_ERRORS,
) -> Iterator[None]:
    """Convert exceptions to a ``CheckpointError`` of one line: the path, ``what``, the reason."""
    try:
        yield
    except CheckpointError:
        raise
    except errors as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        text = f"{path}: {what}: {reason or type(error).__name__}"
        raise CheckpointError(text) from error
