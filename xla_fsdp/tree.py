"""Tensors inside nested containers: the arguments and results of any module's forward.

Words: a *leaf* is anything that is not a container. Containers are what ``torch.utils._pytree``
knows (dict, list, tuple, named tuple, OrderedDict, and types registered there, such as the outputs
of transformers models), dataclass instances, and ``PackedSequence``.
Always true: tensors are visited in one fixed order, and everything that is not a tensor passes
through unchanged, by identity.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """A copy of ``tree`` with every tensor ``t`` replaced by ``fn(t)``."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return fn(leaf)
        if isinstance(leaf, PackedSequence):
            return type(leaf)(*(map_tensors(fn, part) for part in leaf))
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            return _map_dataclass(fn, leaf)
        return leaf

    # A PackedSequence is a subclass of a named tuple, which pytree would rebuild as the latter.
    return pytree.tree_map(visit, tree, is_leaf=lambda node: isinstance(node, PackedSequence))


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor of ``tree``, in the order of ``map_tensors``; repeats are kept."""
    found: list[Tensor] = []
    map_tensors(found.append, tree)
    return found


def replace_tensors(tree: Any, new: Sequence[Tensor]) -> Any:
    """A copy of ``tree`` whose tensors are ``new``, in the order of ``tensors_in``."""
    source = iter(new)
    return map_tensors(lambda _: next(source), tree)


def _map_dataclass(fn: Callable[[Tensor], Any], instance: Any) -> Any:
    result = copy.copy(instance)
    for field in dataclasses.fields(instance):
        value = map_tensors(fn, getattr(instance, field.name))
        # Past a frozen dataclass's own __setattr__: the copy is still private to us.
        object.__setattr__(result, field.name, value)
    return result
