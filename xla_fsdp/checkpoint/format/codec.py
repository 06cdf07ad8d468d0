"""Records of a file's metadata as JSON values, and back, by the types of their fields.

A record is a dataclass, in JSON a dict. Its fields are ``int``, ``str`` or ``bool``, other records,
or ``Any`` JSON value; or tuples of these (in JSON lists), dicts of these by strings, or ``None`` in
place of one. The ``metadata`` of a field tells the version of the format ``since`` which files have
it (those before have its default), and if it may be missing there: ``required`` is False then.

Invariants: all that is read is checked before a record is made of it, and the path of what is
missing or of another type is in the message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache, partial
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from xla_fsdp.checkpoint.errors import CheckpointError, typed

MAX_DEPTH = 20  # of nested hyperparameters, so that no file can exhaust the stack

R = TypeVar("R")
Code = Callable[[Any, str, int], Any]
"""Takes a value, its path for messages, and the version of the format."""


def encoded(record: Any, where: str, version: int) -> dict[str, Any]:
    """Return a record in JSON values; raise ``CheckpointError`` if ``Any`` value of it is none."""
    start = f"{where}." if where else ""
    return {
        each.name: each.encode(getattr(record, each.name), f"{start}{each.name}", version)
        if each.encode
        else getattr(record, each.name)
        for each in _fields(record.__class__, version)
    }


def decoded(kind: Callable[..., R], data: Any, where: str, version: int) -> R:
    """Return the record that was ``encoded``; raise ``CheckpointError`` if it is malformed."""
    typed(data, dict, where)
    start, found = f"{where}." if where else "", {}
    for each in _fields(kind, version):
        if each.name in data:
            found[each.name] = each.decode(data[each.name], f"{start}{each.name}", version)
        elif each.required:
            raise CheckpointError(f"{start}{each.name} is missing")
    return kind(**found)


def json_value(value: Any, where: str, depth: int = 0) -> Any:
    """Return ``value`` with tuples as lists; raise ``CheckpointError`` if it is no JSON value."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{where} is nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [json_value(each, f"{where}.{i}", depth + 1) for i, each in enumerate(value)]
    if isinstance(value, Mapping):
        return {
            typed(key, str, where): json_value(each, f"{where}.{key}", depth + 1)
            for key, each in value.items()
        }
    raise CheckpointError(
        f"{where} is {type(value).__name__}; expected a number, string, list or dict. Take it out, "
        f"or turn it into one of these"
    )


class _Field(NamedTuple):
    name: str
    required: bool
    encode: Code | None  # None if its values are JSON already
    decode: Code


@cache
def _fields(record: Any, version: int) -> list[_Field]:
    kinds = get_type_hints(record, include_extras=True)
    return [
        _Field(each.name, each.metadata.get("required", True), *_codec(kinds[each.name]))
        for each in fields(record)
        if each.metadata.get("since", 1) <= version
    ]


def _codec(kind: Any) -> tuple[Code | None, Code]:
    """Return how values of a type are encoded and decoded."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return (lambda value, where, version: json_value(value, where),) * 2
    if hasattr(kind, "from_json"):  # its JSON is not a dict of its fields
        return (lambda value, *_: value.to_json()), kind.from_json
    if hasattr(kind, "__dataclass_fields__"):
        return encoded, partial(decoded, kind)
    if origin is None:
        return None, lambda value, where, version: typed(value, kind, where)
    if origin is Annotated:  # with a function that checks a list
        check = inner[1]
        return (lambda value, *_: list(value)), lambda value, where, _: check(
            typed(value, list, where), where
        )
    if origin is tuple:
        return _codec_of_tuple(*_codec(inner[0]))
    if origin is dict:
        return _codec_of_dict(*_codec(inner[1]))
    encode, decode = _codec(inner[0])
    return _or_none(encode) if encode else None, _or_none(decode)


def _codec_of_tuple(encode: Code | None, decode: Code) -> tuple[Code, Code]:
    def write(values: Any, where: str, version: int) -> list[Any]:
        if encode is None:
            return list(values)
        return [encode(each, f"{where}.{i}", version) for i, each in enumerate(values)]

    def read(values: Any, where: str, version: int) -> tuple[Any, ...]:
        numbered = enumerate(typed(values, list, where))
        return tuple(decode(each, f"{where}.{i}", version) for i, each in numbered)

    return write, read


def _codec_of_dict(encode: Code | None, decode: Code) -> tuple[Code, Code]:
    def write(values: Any, where: str, version: int) -> dict[str, Any]:
        if encode is None:
            return dict(values)
        return {key: encode(each, f"{where}.{key}", version) for key, each in values.items()}

    def read(values: Any, where: str, version: int) -> dict[str, Any]:
        return {
            typed(key, str, where): decode(each, f"{where}.{key}", version)
            for key, each in typed(values, dict, where).items()
        }

    return write, read


def _or_none(code: Code) -> Code:
    return lambda value, *more: None if value is None else code(value, *more)
