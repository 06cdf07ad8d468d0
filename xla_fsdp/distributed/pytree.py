"""Tensors inside nested containers: the arguments and results of any module's forward.

Containers are lists, dicts, deques, named tuples and other types that ``torch.utils._pytree`` knows
(such as the outputs of transformers models), dataclass instances, and ``PackedSequence``. Objects
of any other class are never looked into.
Invariants: tensors are visited in one fixed order, each once, as is each container, also one that
holds itself.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

_ATOMS = frozenset((type(None), bool, int, float, str))


@dataclasses.dataclass
class Contents:
    """What a tree holds, each object once.

    Attributes:
        tensors: all tensors.
        containers: those whose entries can be replaced; tuples and frozen instances are not.
    """

    tensors: list[Tensor]
    containers: list[Any]

    @classmethod
    def of(cls, tree: Any) -> Contents:
        """Collect the contents of ``tree``, outer containers first."""
        tensors: dict[int, Tensor] = {}
        containers: dict[int, Any] = {}
        waiting = [tree]
        while waiting:
            node = waiting.pop()
            if isinstance(node, Tensor):
                tensors[id(node)] = node
            elif type(node) in _ATOMS:
                continue
            elif (parts := _frozen_parts(node)) is not None:
                waiting.extend(reversed(parts))
            elif id(node) not in containers and _is_container(node):
                containers[id(node)] = node
                waiting.extend(reversed([value for _, value in _entries(node)]))
        return cls(list(tensors.values()), list(containers.values()))


def tensors_in(tree: Any) -> list[Tensor]:
    """Return every tensor of ``tree``, each once."""
    return Contents.of(tree).tensors


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return a copy of ``tree`` with every tensor ``t`` replaced by ``fn(t)``. What holds no tensor
    is returned itself."""
    found = Contents.of(tree)
    containers = [each for each in found.containers if tensors_in(each)]
    return copied(tree, containers, substitutes(found.tensors, map(fn, found.tensors)))


# ---------------------------------------------------------------- replacing objects by others

Substitutes = Mapping[int, tuple[Any, Any]]
"""Pairs (object, what takes its place) by the object's ``id``; the pair keeps the object alive."""


def substitutes(objects: Iterable[Any], new: Iterable[Any]) -> dict[int, tuple[Any, Any]]:
    """Return a table that replaces ``objects`` by ``new``."""
    return {id(old): (old, each) for old, each in zip(objects, new, strict=True)}


def replaced(tree: Any, by: Substitutes) -> Any:
    """Return ``tree`` with the objects in its tuples and frozen instances replaced; ``tree`` itself
    if there are none. Other containers in it are not looked into."""
    if (pair := by.get(id(tree))) is not None:
        return pair[1]
    if isinstance(tree, Tensor) or (parts := _frozen_parts(tree)) is None:
        return tree
    changed = [replaced(part, by) for part in parts]
    if all(map(operator.is_, changed, parts)):
        return tree
    return _frozen_like(tree, changed)


def replace_entries(container: Any, by: Substitutes) -> dict[int, tuple[Any, Any]]:
    """Replace objects in the entries of ``container``, one of ``Contents``, in place.

    Returns:
        The table that puts the replaced entries back.
    """
    back = {}
    for key, value in _entries(container):
        if (new := replaced(value, by)) is not value:
            _store(container, key, new)
            back[id(new)] = new, value
    return back


def copied(tree: Any, containers: Sequence[Any], by: Substitutes) -> Any:
    """Return ``tree`` with objects replaced, in copies of ``containers`` and of the tuples and
    frozen instances in it."""
    copies = [copy.copy(each) for each in containers]
    by = {**by, **substitutes(containers, copies)}
    for each in copies:
        replace_entries(each, by)
    return replaced(tree, by)


# ---------------------------------------------------------------- kinds of containers


def _frozen_parts(node: Any) -> Sequence[Any] | None:
    """Return what a tuple or a frozen dataclass instance holds; None for all others."""
    if type(node) is tuple:
        return node
    if isinstance(node, tuple):
        return None if pytree.tree_is_leaf(node) else node  # a torch.Size, say, is a leaf
    if _is_dataclass(node) and node.__dataclass_params__.frozen:
        return [value for _, value in _attributes(node)]
    return None


def _frozen_like(node: Any, parts: list[Any]) -> Any:
    kind = type(node)
    if issubclass(kind, tuple):
        return kind._make(parts) if hasattr(kind, "_make") else kind(parts)
    result = copy.copy(node)
    for (name, _), part in zip(_attributes(node), parts, strict=True):
        _store(result, name, part)
    return result


def _is_container(node: Any) -> bool:
    """Return whether ``node``, no tuple and no frozen instance, is a container."""
    if type(node) in (list, dict) or _is_dataclass(node):
        return True
    if pytree.tree_is_leaf(node):
        return False
    return isinstance(node, dict | list | deque) or hasattr(node, "__dict__")


def _entries(container: Any) -> list[tuple[Any, Any]]:
    if isinstance(container, dict):
        return list(container.items())
    if isinstance(container, list | deque):
        return list(enumerate(container))
    return _attributes(container)


def _attributes(instance: Any) -> list[tuple[str, Any]]:
    if not _is_dataclass(instance):
        return list(vars(instance).items())
    names = [field.name for field in dataclasses.fields(instance)]
    return [(name, getattr(instance, name)) for name in names if hasattr(instance, name)]


def _store(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, dict | list | deque):
        container[key] = value
    else:
        # The class may refuse or check what is set; the value is only lent, or in a new copy.
        object.__setattr__(container, key, value)


def _is_dataclass(node: Any) -> bool:
    return hasattr(type(node), "__dataclass_params__") and not isinstance(node, nn.Module)
