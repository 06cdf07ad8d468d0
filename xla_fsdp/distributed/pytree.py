"""Tensors inside nested containers: the arguments and results of any module's forward.

Containers are what ``torch.utils._pytree`` knows (dict, list, tuple, named tuple, OrderedDict, and
registered types such as the outputs of transformers models), dataclass instances, and
``PackedSequence``.
Invariants: tensors are visited in one fixed order; containers are copied. Everything else, also a
dataclass instance without tensors, is returned itself.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return a copy of ``tree`` with every tensor ``t`` replaced by ``fn(t)``."""
    if isinstance(tree, Tensor):
        return fn(tree)
    # The common containers first: pytree is many times slower, in every forward of every module.
    if type(tree) in (tuple, list):
        return type(tree)(map_tensors(fn, item) for item in tree)
    if type(tree) is dict:
        return {key: map_tensors(fn, value) for key, value in tree.items()}
    if isinstance(tree, PackedSequence):  # pytree would return the named tuple that it subclasses
        return type(tree)(*(map_tensors(fn, part) for part in tree))
    if pytree.tree_is_leaf(tree):
        is_instance = dataclasses.is_dataclass(tree) and not isinstance(tree, type)
        return _map_dataclass(fn, tree) if is_instance else tree
    top = [tree]
    try:
        return pytree.tree_map(partial(map_tensors, fn), tree, is_leaf=lambda n: n is not top[0])
    finally:
        # pytree's recursive helper is a reference cycle that holds the lambda. With ``tree`` in it,
        # the outputs of a transformers model would live until the next garbage collection, and
        # become results of the step's program if the step ends before.
        top.clear()


def tensors_in(tree: Any) -> list[Tensor]:
    """Return every tensor of ``tree``, in the order of ``map_tensors``, with repeats."""
    found: list[Tensor] = []
    map_tensors(found.append, tree)
    return found


def replace_tensors(tree: Any, new: Sequence[Tensor]) -> Any:
    """Return a copy of ``tree`` whose tensors are ``new``, in the order of ``tensors_in``."""
    source = iter(new)
    return map_tensors(lambda _: next(source), tree)


def _map_dataclass(fn: Callable[[Tensor], Any], instance: Any) -> Any:
    values = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    if not tensors_in(list(values.values())):
        return instance
    result = copy.copy(instance)
    for name, value in values.items():
        # A frozen dataclass refuses setattr; nobody else has the copy yet.
        object.__setattr__(result, name, map_tensors(fn, value))
    return result
