"""Collect the arguments of a block's call, and the buffers and settings of its modules.

Invariants: tensors become inputs of the loop, so their values may change in every step. If a plain
value changes, the loop is traced again. Arguments that are neither are refused by name, as a loop
cannot see what a block does to them.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp.fsdp.engine.inputs import version_of
from xla_fsdp.fsdp.engine.module_state import is_wrapper
from xla_fsdp.scan.errors import NoLoopError

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)

# ---------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Slot:
    """Marks the position of tensor ``number`` in a tree."""

    number: int


@dataclass(frozen=True)
class Arguments:
    """The arguments or the output of a block, flattened."""

    form: Any  # the tree, with a ``Slot`` for each tensor
    tensors: tuple[Tensor, ...]  # of arguments, the first is the output of the previous block
    names: tuple[str, ...]  # of the tensors
    plain: tuple[tuple[str, Any], ...]  # (name, value) of plain leaves; comparable and hashable
    opaque: tuple[str, ...]  # names and types of all other leaves

    @classmethod
    def of(cls, tree: Any) -> Arguments:
        """Flatten ``tree``: (args, kwargs), or the output of a block."""
        tensors: list[Tensor] = []
        names: list[str] = []
        plain: list[tuple[str, Any]] = []
        opaque: list[str] = []

        def visit(leaf: Any, name: str) -> Any:
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
                names.append(name)
                return Slot(len(tensors) - 1)
            if isinstance(leaf, PLAIN):
                plain.append((name, leaf))
            else:
                opaque.append(f"{name} ({type(leaf).__name__})")
            return leaf

        form = _map_leaves(visit, tree, "")
        return cls(form, tuple(tensors), tuple(names), tuple(plain), tuple(opaque))

    @property
    def key(self) -> Any:
        """Equal for arguments that only differ in their tensors."""
        return self.names, self.plain

    def without_tensors(self) -> Arguments:
        return replace(self, tensors=())

    def put_together(self, tensors: Sequence[Tensor]) -> Any:
        """Return the tree with these tensors."""

        def visit(leaf: Any, name: str) -> Any:
            return tensors[leaf.number] if isinstance(leaf, Slot) else leaf

        return _map_leaves(visit, self.form, "")


def _map_leaves(visit: Callable[[Any, str], Any], tree: Any, name: str) -> Any:
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        fields = zip(tree._fields, tree, strict=True)
        return type(tree)(*(_map_leaves(visit, each, _join(name, key)) for key, each in fields))
    if type(tree) in (tuple, list):
        return type(tree)(
            _map_leaves(visit, each, _join(name, str(at))) for at, each in enumerate(tree)
        )
    if type(tree) is dict:
        return {key: _map_leaves(visit, each, _join(name, str(key))) for key, each in tree.items()}
    return visit(tree, _argument_name(name))


def _argument_name(name: str) -> str:
    """Name a position in (args, kwargs): "0.2" is argument 2, "1.masks.0" argument masks[0]."""
    kind, *path = name.split(".")
    if not path or kind not in ("0", "1"):
        return name
    return f"argument {path[0]}{''.join(f'[{key}]' for key in path[1:])}"


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


# ---------------------------------------------------------------- buffers and settings of modules

_OF_ANY_MODULE = frozenset(vars(nn.Module())) - {"training"}

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class BlockState:
    """Buffers, tensor attributes and plain attributes of the modules in a block."""

    names: tuple[str, ...]  # of the tensors
    tensors: tuple[Tensor, ...]  # buffers, and tensors that are attributes
    # (module, attribute, value) of plain values, such as an epsilon or ``training``, also of those
    # in lists and dicts
    settings: tuple[Any, ...]
    hooked: tuple[str, ...]  # names of modules with hooks
    _objects: tuple[Any, ...]  # other attributes that have a __dict__, such as a model's config
    _slots: tuple[tuple[dict[str, Any], str], ...]  # (holder, key) of each tensor
    _holders: tuple[tuple[str, dict[str, Any]], ...]  # (module name, its buffers or attributes)

    @classmethod
    def of(cls, block: nn.Module) -> BlockState:
        """Collect the current state of ``block``."""
        names: list[str] = []
        slots: list[tuple[dict[str, Any], str]] = []
        settings: list[Any] = []
        hooked: list[str] = []
        objects: list[Any] = []
        holders: list[tuple[str, dict[str, Any]]] = []
        own = getattr(block, "_fsdp_wrapped_module", block)
        for prefix, module in block.named_modules():
            fields = vars(module)
            if _has_hooks(module, is_block=module in (block, own)):
                hooked.append(prefix or type(module).__name__)
            # A wrapper shows the buffers of the module inside.
            for holder in (fields,) if is_wrapper(module) else (module._buffers, fields):
                holders.append((prefix, holder))
                for key, value in holder.items():
                    if isinstance(value, Tensor):
                        names.append(_join(prefix, key))
                        slots.append((holder, key))
                    elif key not in _OF_ANY_MODULE:
                        settings += ((prefix, *each) for each in _plain_values(key, value))
                        if hasattr(value, "__dict__") and not callable(value):
                            objects.append(value)
        tensors = [holder[key] for holder, key in slots]
        parts: tuple[list[Any], ...]
        parts = (names, tensors, settings, hooked, objects, slots, holders)
        return cls(*map(tuple, parts))

    def without_tensors(self) -> BlockState:
        """Return the names and settings, without references to tensors and modules."""
        return replace(self, tensors=(), _objects=(), _slots=(), _holders=())

    @contextlib.contextmanager
    def replaced(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Replace the tensors of the block inside; then give it all attributes back.

        Raises:
            NoLoopError: if the block itself assigns a tensor, or changes a number, inside.
        """
        original = [dict(holder) for _, holder in self._holders]
        for (holder, key), tensor in zip(self._slots, tensors, strict=True):
            holder[key] = tensor
        given = [dict(holder) for _, holder in self._holders]
        try:
            yield
            if assigned := self._assigned(given):
                raise NoLoopError(
                    f"a scanned block assigns a tensor or a number to its {', '.join(assigned)}; "
                    f"it would be lost, as blocks run as one loop. Return it as a part of what "
                    f"goes from block to block, or do not scan these blocks"
                )
        finally:
            for (_, holder), items in zip(self._holders, original, strict=True):
                for key in holder.keys() - items.keys():
                    del holder[key]
                holder.update(items)

    def _assigned(self, before: Sequence[dict[str, Any]]) -> list[str]:
        """Return the names of tensors that were assigned, replaced or deleted, and of numbers that
        are others, since the holders had the items ``before``."""
        found: list[str] = []
        for (prefix, holder), items in zip(self._holders, before, strict=True):
            for key in {**items, **holder}:
                then, now = items.get(key), holder.get(key)
                if then is not now and (
                    isinstance(then, Tensor)
                    or isinstance(now, Tensor)
                    # What is None at first may be a size that the block remembers.
                    or ({type(then), type(now)} <= {int, float} and then != now)
                ):
                    found.append(_join(prefix, key))
        return found


def _has_hooks(module: nn.Module, *, is_block: bool) -> bool:
    """Return whether a module has hooks that would run inside a loop."""
    fields = vars(module)
    if not any(fields[kind] for kind in _HOOKS):
        return False
    hooks = [hook for kind in _HOOKS[1:] for hook in fields[kind].values()]
    if not is_block:  # forward hooks of a block run outside, see ``forward_hooks_apart``
        hooks += fields["_forward_hooks"].values()
    return not all(map(_is_idle, hooks))


def _is_idle(hook: Any) -> bool:
    """Return whether ``hook`` is a recorder of transformers that does nothing in this forward.
    Models install those for all that they can record as soon as anything is recorded."""
    if getattr(hook, "__qualname__", "").rpartition(".")[2] != "output_capturing_hook":
        return False
    values = inspect.getclosurevars(hook)
    collector = values.globals.get("_active_collector")
    recorded = None if collector is None else collector.get()
    return recorded is None or values.nonlocals.get("key") not in recorded


@contextlib.contextmanager
def forward_hooks_apart(module: nn.Module) -> Iterator[None]:
    """Do not run the forward hooks of ``module`` itself inside; ``run_forward_hooks`` runs them."""
    hooks, module._forward_hooks = module._forward_hooks, OrderedDict()
    try:
        yield
    finally:
        module._forward_hooks = hooks


def run_forward_hooks(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Run the forward hooks of a block, and return what it then returns."""
    for key, hook in list(module._forward_hooks.items()):
        options = (kwargs,) if key in module._forward_hooks_with_kwargs else ()
        changed = hook(module, args, *options, output)
        output = output if changed is None else changed
    return output


def settings_of(states: Sequence[BlockState]) -> Any:
    """Return the settings of blocks, and of attributes that hold only plain values themselves, such
    as a model's config, as a comparable value."""
    objects = {id(each): each for state in states for each in state._objects}
    configs = (vars(each) for each in objects.values() if _is_plain(vars(each)))
    return (
        tuple(state.settings for state in states),
        tuple(tuple(_plain_values("", config)) for config in configs),
    )


def _plain_values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            yield from _plain_values(_join(name, str(key)), each)
    elif _is_plain(value):
        yield name, frozenset(value) if isinstance(value, set) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict | list | tuple | set | frozenset):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, PLAIN)


MAX_COMPARISONS = 4
"""How often values are compared; each time compiles and runs what has been traced so far."""


class SharedTensors:
    """Finds the tensors in the state of blocks that are equal in all of them."""

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, int]] = []
        self._shared: frozenset[int] = frozenset()
        self._left = MAX_COMPARISONS

    def of(self, states: Sequence[BlockState]) -> frozenset[int]:
        """Return the indices of the equal tensors.

        Values are compared if tensors are new or were changed in place, at most
        ``MAX_COMPARISONS`` times; after that, tensors only count if they are the same object.
        """
        now = [(each, version_of(each)) for state in states for each in state.tensors]
        ids = [[(id(each), version) for each, version in held] for held in (now, self._seen)]
        if ids[0] != ids[1]:
            by_number = enumerate(zip(*(state.tensors for state in states), strict=True))
            equal = _all_equal if self._left else _all_same
            self._shared = frozenset(at for at, (first, *rest) in by_number if equal(first, rest))
            self._seen = now
            self._left = max(0, self._left - 1)
        return self._shared


def _all_same(first: Tensor, rest: Sequence[Tensor]) -> bool:
    return all(each is first for each in rest)


def _all_equal(first: Tensor, rest: Sequence[Tensor]) -> bool:
    if _all_same(first, rest):
        return True
    value = first.cpu()
    return all(each.dtype == value.dtype and torch.equal(each.cpu(), value) for each in rest)
