"""Changes to a full checkpoint on its way into other files: names and dtypes. Nothing is read.

Words: a *rule* ``OLD=NEW`` replaces a prefix of names; the first rule that fits a name is used.
Always true: model and optimizer keep the same names, and two names never become one; the
optimizer keeps its dtypes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from xla_fsdp.checkpoint.errors import CheckpointError
from xla_fsdp.checkpoint.full_tensors import FullCheckpoint, FullOptimizer
from xla_fsdp.checkpoint.optimizer_format import GroupRecord
from xla_fsdp.checkpoint.tensor_source import TensorSource

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


@dataclass(frozen=True)
class Rule:
    """Names that begin with ``old`` begin with ``new`` instead."""

    old: str
    new: str


def parse_rule(text: str) -> Rule:
    """A rule from ``"OLD=NEW"``, where NEW may be empty.

    Raises:
        CheckpointError: if it is not of this form.
    """
    old, equals, new = text.partition("=")
    if not equals or not old:
        raise CheckpointError(f"--key_map {text!r} must be OLD=NEW, such as module.= or a.=b.")
    return Rule(old, new)


def renamed(full: FullCheckpoint, rules: Sequence[Rule]) -> FullCheckpoint:
    """The same checkpoint under other names.

    Raises:
        CheckpointError: if two names become one, one becomes empty, or a rule fits no name.
    """
    names = {name: _renamed(name, rules) for name in full.model}
    problems = [
        f"key_map: {rule.old}={rule.new} fits no name of the model"
        for rule in rules
        if not any(name.startswith(rule.old) for name in names)
    ]
    problems += [
        f"key_map: {count} names become {name!r}" if name else "key_map: a name becomes empty"
        for name, count in Counter(names.values()).items()
        if count > 1 or not name
    ]
    if problems:
        raise CheckpointError(problems)
    return FullCheckpoint(
        model={names[name]: value for name, value in full.model.items()},
        ties={names[alias]: names[canonical] for alias, canonical in full.ties.items()},
        optimizer=full.optimizer and _renamed_optimizer(full.optimizer, names.__getitem__),
    )


def in_dtype(full: FullCheckpoint, dtype: torch.dtype) -> FullCheckpoint:
    """The model's floating-point tensors in another dtype; the optimizer's stay as they are."""
    known: dict[int, TensorSource] = {}  # a tied tensor stays one object

    def cast(value: Any) -> Any:
        if not isinstance(value, TensorSource) or not value.dtype.is_floating_point:
            return value
        return known.setdefault(id(value), value.cast(dtype))

    return replace(full, model={name: cast(value) for name, value in full.model.items()})


def _renamed(name: str, rules: Sequence[Rule]) -> str:
    rule = next((rule for rule in rules if name.startswith(rule.old)), None)
    return name if rule is None else rule.new + name.removeprefix(rule.old)


def _renamed_optimizer(optimizer: FullOptimizer, new: Callable[[str], str]) -> FullOptimizer:
    return FullOptimizer(
        groups=tuple(
            GroupRecord(tuple(new(name) for name in group.params), group.options)
            for group in optimizer.groups
        ),
        states={new(name): state for name, state in optimizer.states.items()},
    )
