"""Read pickles as plain values: nothing that a pickle names is imported or called.

Python's own unpicklers trust what they read. A few bytes can call a class with any arguments,
allocate room for as much as one instruction states, or nest tuples whose hash takes years. Here a
class or function becomes a ``Global``, and its call an ``Object``, for the reader to interpret.

Invariants: time and memory are at most proportional to the pickle's length, as each instruction
takes both at most in proportion to its own length and to what it takes from the stack; the keys of
dicts and sets are numbers, text or short tuples of these.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from xla_fsdp.checkpoint.errors import CheckpointError, shown

MAX_INT_BYTES = 512  # as long as JSON's integers may be in Python; hashing longer ones takes time
MAX_KEY_PARTS = 64
MAX_ALIKE = 64  # keys of one hash
MAX_DEPTH = 100  # far below the depth at which Python's recursion ends
EXPANSION = 16  # values in the containers of a pickle, for each of its bytes

_REFUSED = b"".join(  # which neither torch nor DCP write
    (
        pickle.INST,
        pickle.OBJ,
        pickle.NEWOBJ_EX,
        pickle.EXT1,
        pickle.EXT2,
        pickle.EXT4,
        pickle.NEXT_BUFFER,
        pickle.READONLY_BUFFER,
    )
)
_KEYS = {  # the places in the stack of the keys of dicts and sets
    pickle.SETITEM: slice(-2, -1),
    pickle.SETITEMS: slice(None, None, 2),
    pickle.DICT: slice(None, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
}

_MAPPINGS = ("collections.OrderedDict", "collections.Counter")

PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Global:
    """A class or function that a pickle names; a call makes an ``Object``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any) -> Object:
        return Object(self.name, args)

    def __repr__(self) -> str:
        return self.name


@dataclass(eq=False, repr=False, slots=True)
class Object:
    """An object that a pickle makes.

    Args:
        name: of its class, or of the function that makes it.
        args: of the call.
        state: attributes that are set afterwards.
        items: put into it afterwards, as into a dict.
    """

    name: str
    args: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def __repr__(self) -> str:
        return f"a {self.name}"


def read_pickle(
    file: Any,
    is_known: Callable[[str], bool],
    persistent: Callable[[Any], Any] | None = None,
    advice: str = "",
) -> Any:
    """Return the value of one pickle, with ``Global`` and ``Object`` in place of all objects.

    Args:
        file: with ``read`` and ``readline``, neither of which returns more than is there.
        is_known: whether the reader knows a class or function, such as ``"torch.Size"``.
        persistent: returns the value for a persistent id, which may be any value.
        advice: follows the message if the pickle names what is not known.

    Raises:
        CheckpointError: if the pickle names what is not known.
        Exception: of any kind, if it is malformed.
    """
    reader = _Reader(file, is_known, advice)
    if persistent is not None:
        reader.persistent_load = persistent
    return reader.load()


def convert_plain(value: Any, length: int, convert: Callable[[Any], Any]) -> Any:
    """Return a copy of a value from a pickle of so many bytes, in which no container is in two
    places. ``convert`` is called with everything that is neither plain nor a container."""
    room, keys = EXPANSION * (length + MAX_INT_BYTES), Keys()

    def walk_key(key: Any, depth: int) -> Any:
        converted = walk(key, depth)
        keys.check([converted])
        return converted

    def walk(value: Any, depth: int) -> Any:
        nonlocal room
        room -= 1
        if room < 0:
            raise CheckpointError(
                f"refused: its containers repeat each other, with more than {EXPANSION} values for "
                f"each of its bytes. Save a copy in which each container is in one place"
            )
        if depth > MAX_DEPTH:
            raise CheckpointError(f"refused: its containers are nested more than {MAX_DEPTH} deep")
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, dict):
            return {walk_key(k, depth + 1): walk(v, depth + 1) for k, v in value.items()}
        if type(value) in (set, frozenset):
            return type(value)(walk_key(each, depth + 1) for each in value)
        if type(value) in (list, tuple):
            return type(value)(walk(each, depth + 1) for each in value)
        if isinstance(value, Object) and value.name in _MAPPINGS:
            return {walk_key(k, depth + 1): walk(v, depth + 1) for k, v in _items(value)}
        if isinstance(value, Object) and value.name == "builtins.set":
            return {walk_key(each, depth + 1) for each in value.args[0]}
        return convert(value)

    return walk(value, 0)


def _items(mapping: Object) -> Iterator[tuple[Any, Any]]:
    """Yield what is in an ``OrderedDict`` or ``Counter``; protocol 2 gives it as an argument."""
    for given in mapping.args:
        yield from given.items() if isinstance(given, dict) else given
    yield from mapping.items.items()


class Keys:
    """Checks the keys of all dicts and sets that are made of one file.

    A dict takes time in proportion to the square of the number of its keys that have one hash.
    Python's hashes of text are random; those of numbers and tuples can be chosen.
    """

    def __init__(self) -> None:
        self._of_hash: dict[int, set[Any]] = {}

    def check(self, keys: Iterable[Any]) -> None:
        """Raise ``CheckpointError`` for a key of another kind, or if too many have one hash."""
        for key in keys:
            if isinstance(key, str | bytes):
                continue
            parts = key if isinstance(key, tuple) else (key,)
            kinds = (*PLAIN, Object, Global, torch.device, torch.dtype)
            if len(parts) > MAX_KEY_PARTS or not all(isinstance(part, kinds) for part in parts):
                raise CheckpointError(f"refused: a key of a dict or set is a {type(key).__name__}")
            self.count(key, hash(key))

    def count(self, key: Any, hashed: int) -> None:
        """Raise ``CheckpointError`` if too many keys have this hash."""
        alike = self._of_hash.setdefault(hashed, set())
        alike.add(key)
        if len(alike) > MAX_ALIKE:
            raise CheckpointError(f"refused: more than {MAX_ALIKE} of its keys have one hash")


_PythonUnpickler: Any = pickle._Unpickler  # whose methods the types of Python leave out


def _checking(code: bytes, keys: slice) -> Callable[[Any], None]:
    """Return what executes an instruction once the keys in the stack are checked."""
    load = _PythonUnpickler.dispatch[code[0]]

    def checked(reader: Any) -> None:
        reader._keys.check(reader.stack[keys])
        load(reader)

    return checked


class _Reader(_PythonUnpickler):
    """Python's unpickler that is written in Python, without what trusts the file."""

    def __init__(self, file: Any, is_known: Callable[[str], bool], advice: str) -> None:
        super().__init__(file, encoding="utf-8")
        self._is_known, self._advice, self._keys = is_known, advice, Keys()

    def find_class(self, module: str, name: str) -> Global:
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if not self._is_known(full):
            raise CheckpointError(
                f"refused: it holds a {shown(full)[1:-1]}, and loading that would run code from "
                f"the file{self._advice}"
            )
        return Global(full)

    def load_newobj(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self.stack[-1](*args)

    def load_build(self) -> None:
        state = self.stack.pop()
        if not isinstance(made := self.stack[-1], Object):
            raise pickle.UnpicklingError("state of what has none")
        made.state = state

    def load_long4(self) -> None:
        length = int.from_bytes(self.read(4), "little")
        if length > MAX_INT_BYTES:
            raise CheckpointError(f"refused: it holds an integer of {length:,} bytes")
        self.append(pickle.decode_long(self.read(length)))

    def load_bytearray8(self) -> None:
        self.append(self.read(int.from_bytes(self.read(8), "little")))

    dispatch = {  # noqa: RUF012 (a class attribute there, too)
        **{c: load for c, load in _PythonUnpickler.dispatch.items() if c not in _REFUSED},
        **{code[0]: _checking(code, keys) for code, keys in _KEYS.items()},
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
        pickle.LONG4[0]: load_long4,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }
