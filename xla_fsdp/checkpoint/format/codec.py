"""Records of a file's metadata as JSON values, and back, by the types of their fields.

A record is a dataclass, in JSON a dict. Its fields are ``int``, ``str`` or ``bool``, other records,
or ``Any`` JSON value; or tuples of these (in JSON lists), dicts of these by strings, or ``None`` in
place of one. The ``metadata`` of a field tells the version of the format ``since`` which files have
it (those before have its default), and if it may be missing there: ``required`` is False then.

Invariants: all that is read is checked before a record is made of it, and the path of what is
missing or of another type is in the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from xla_fsdp.checkpoint.errors import CheckpointError, typed

MAX_DEPTH = 20  # of nested hyperparameters, so that no file can exhaust the stack


class Record:
    """A dataclass with a JSON form: a dict of its fields, or what ``to_json`` returns and
    ``from_json`` takes."""


def encoded(value: Any, where: str, version: int) -> Any:
    """Return a record in JSON values; raise ``CheckpointError`` if a part of it is none."""
    if isinstance(value, Record) and hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, Record):
        kind: Any = type(value)
        names = [each.name for each in _fields(kind, version)]
        return {name: encoded(getattr(value, name), _at(where, name), version) for name in names}
    if isinstance(value, tuple):
        return [encoded(each, _at(where, i), version) for i, each in enumerate(value)]
    if isinstance(value, Mapping) and any(isinstance(each, Record) for each in value.values()):
        return {key: encoded(each, _at(where, key), version) for key, each in value.items()}
    return json_value(value, where)


def decoded(kind: Any, data: Any, where: str, version: int) -> Any:
    """Return the value of type ``kind`` that was ``encoded``; raise ``CheckpointError`` if it is
    malformed."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return json_value(data, where)
    if hasattr(kind, "from_json"):
        return kind.from_json(data, where, version)
    if origin is None and issubclass(kind, Record):
        found, typed_data = {}, typed(data, dict, where)
        for each in _fields(kind, version):
            if each.name in typed_data:
                value = typed_data[each.name]
                found[each.name] = decoded(each.kind, value, _at(where, each.name), version)
            elif each.required:
                raise CheckpointError(f"{_at(where, each.name)} is missing")
        return kind(**found)
    if origin is None:
        return typed(data, kind, where)
    if origin is Annotated:  # with a function that checks a list
        return inner[1](typed(data, list, where), where)
    if origin is tuple:
        numbered = enumerate(typed(data, list, where))
        return tuple(decoded(inner[0], each, _at(where, i), version) for i, each in numbered)
    if origin is dict:
        return {
            typed(key, str, where): decoded(inner[1], each, _at(where, key), version)
            for key, each in typed(data, dict, where).items()
        }
    return None if data is None else decoded(inner[0], data, where, version)


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
    kind: Any
    required: bool


@cache
def _fields(record: Any, version: int) -> list[_Field]:
    kinds = get_type_hints(record, include_extras=True)
    return [
        _Field(each.name, kinds[each.name], each.metadata.get("required", True))
        for each in fields(record)
        if each.metadata.get("since", 1) <= version
    ]


def _at(where: str, key: object) -> str:
    return f"{where}.{key}" if where else f"{key}"
