"""What a shard file says about the optimizer state in it. No I/O.

Words: a *key* is a parameter's in the model's state dict (of a flat parameter, the joined one's); a
*state* is one value that the optimizer keeps for a key, such as ``exp_avg``. A state is *sharded*
(a tensor of the shard's shape, cut as the parameter is), *whole* (any other tensor, such as a step
counter) or a *value* (a number, say, that is written here and not as a tensor).
Always true: a key is in at most one group, a state of a key is of one kind, and everything here is
a JSON value: ``None``, ``bool``, ``int``, ``float``, ``str``, ``list`` or ``dict``.
Under which names the tensors lie in a file is said by ``format``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xla_fsdp.checkpoint.errors import CheckpointError, item, refuse_repeated, typed

MAX_DEPTH = 20

"""How deep hyperparameters may be nested: a file's author must not make us run out of stack."""


@dataclass(frozen=True)
class GroupRecord:
    """A parameter group: the keys in it, in order, and its hyperparameters (``lr``, ...)."""

    params: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class StateRecord:
    """The states of one key, by kind. Names of sharded and whole ones, values as they are.

    ``host`` names those of the whole ones that the optimizer keeps in host memory, beside a
    parameter on a device.
    """

    sharded: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    host: tuple[str, ...] = ()


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer's parameter groups, and the states of every key that has any."""

    groups: tuple[GroupRecord, ...]
    states: dict[str, StateRecord]

    def __post_init__(self) -> None:
        refuse_repeated("optimizer key", (key for group in self.groups for key in group.params))
        for key, state in self.states.items():
            refuse_repeated(f"optimizer state of {key}:", state.sharded + state.whole)
            if strange := set(state.host) - set(state.whole):
                raise CheckpointError(
                    f"optimizer state of {key}: {min(strange)} is in host, but not in whole"
                )
            for name in state.values:
                if name in state.sharded or name in state.whole:
                    raise CheckpointError(f"optimizer state of {key}: {name} appears twice")

    def to_dict(self) -> dict[str, Any]:
        """Plain values.

        Raises:
            CheckpointError: if a hyperparameter or a value is not a JSON value.
        """
        return {
            "groups": [
                {
                    "params": list(group.params),
                    "options": json_value(group.options, f"optimizer.groups.{i}.options"),
                }
                for i, group in enumerate(self.groups)
            ],
            "states": {
                key: {
                    "sharded": list(state.sharded),
                    "whole": list(state.whole),
                    "host": list(state.host),
                    "values": json_value(state.values, f"optimizer.states.{key}.values"),
                }
                for key, state in self.states.items()
            },
        }

    @classmethod
    def from_dict(cls, data: Any) -> OptimizerRecord:
        """The inverse of ``to_dict``; ``CheckpointError`` if anything is not as it writes it."""
        groups = enumerate(item(typed(data, dict, "optimizer"), "groups", list, "optimizer"))
        states = item(data, "states", dict, "optimizer").items()
        return cls(
            groups=tuple(_group_from_dict(group, f"optimizer.groups.{i}") for i, group in groups),
            states={
                typed(key, str, "optimizer.states"): _state_from_dict(
                    state, f"optimizer.states.{key}"
                )
                for key, state in states
            },
        )


def json_value(value: Any, where: str, depth: int = 0) -> Any:
    """``value`` with tuples as lists, if it is a JSON value; else ``CheckpointError``."""
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


def _group_from_dict(data: Any, where: str) -> GroupRecord:
    params = item(typed(data, dict, where), "params", list, where)
    options = json_value(item(data, "options", dict, where), f"{where}.options")
    return GroupRecord(_names(params, f"{where}.params"), options)


def _state_from_dict(data: Any, where: str) -> StateRecord:
    typed(data, dict, where)
    return StateRecord(
        sharded=_names(item(data, "sharded", list, where), f"{where}.sharded"),
        whole=_names(item(data, "whole", list, where), f"{where}.whole"),
        host=_names(item({"host": [], **data}, "host", list, where), f"{where}.host"),
        values=json_value(item(data, "values", dict, where), f"{where}.values"),
    )


def _names(data: list[Any], where: str) -> tuple[str, ...]:
    return tuple(typed(name, str, f"{where}.{i}") for i, name in enumerate(data))
