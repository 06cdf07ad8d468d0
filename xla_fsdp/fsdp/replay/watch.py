"""What a traced step depends on besides tensors: modules, units, optimizers and plain values.

A program is right for as long as these facts are what they were when it was traced. Slots are the
places that hold tensors: a program reads its inputs from them and puts its results into them.
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xla_fsdp.distributed.context_parallel import context_key
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.module_state import units_in
from xla_fsdp.fsdp.engine.param_guards import ReshardedParam
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.replay.optimizer_numbers import OptimizerNumbers

PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOK_OPTIONS = (
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
DICTS = (*HOOKS, "_parameters", "_modules")
LIBRARIES = ("torch", "torch_xla", "numpy", "builtins", "functools")
# In C, as a large model has thousands of parameters and attributes.
_GRAD = operator.attrgetter("grad")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_HOOKS_OF = operator.attrgetter("_backward_hooks")
_LATER_HOOKS_OF = operator.attrgetter("_post_accumulate_grad_hooks")
DEEPEST = 3
"""How far the values that a step's code names are followed through containers and objects."""


# ---------------------------------------------------------------- places that hold tensors


@dataclass(frozen=True)
class Entry:
    """A tensor in a dict.

    Args:
        is_counted: whether somebody may ask ``ops.num_changes`` of it: not of parameters and
            states of optimizers.
    """

    mapping: dict[Any, Any]
    key: Any
    is_counted: bool = True

    @property
    def where(self) -> tuple[Any, ...]:
        return id(self.mapping), self.key

    def get(self) -> Any:
        return self.mapping.get(self.key)

    def set(self, value: Tensor | None) -> None:
        if value is None:
            self.mapping.pop(self.key, None)
        else:
            self.mapping[self.key] = value


@dataclass(frozen=True)
class NestedEntry:
    """A tensor in a dict that is an attribute of an object, which may replace the dict."""

    attributes: dict[str, Any]
    name: str
    key: Any

    @property
    def where(self) -> tuple[Any, ...]:
        return id(self.attributes), self.name, self.key

    def get(self) -> Any:
        return self.attributes[self.name].get(self.key)

    def set(self, value: Tensor | None) -> None:
        Entry(self.attributes[self.name], self.key).set(value)


@dataclass(frozen=True)
class Gradient:
    """The gradient of a parameter."""

    param: Tensor

    @property
    def where(self) -> tuple[Any, ...]:
        return id(self.param), "grad"

    def get(self) -> Any:
        return self.param.grad

    def set(self, value: Tensor | None) -> None:
        self.param.grad = value


@dataclass(frozen=True)
class Cell:
    """A variable of a function around the step."""

    cell: Any

    @property
    def where(self) -> tuple[Any, ...]:
        return id(self.cell), "cell"

    def get(self) -> Any:
        return self.cell.cell_contents

    def set(self, value: Tensor | None) -> None:
        self.cell.cell_contents = value


@dataclass(frozen=True)
class Item:
    """A tensor in a list."""

    items: list[Any]
    number: int

    @property
    def where(self) -> tuple[Any, ...]:
        return id(self.items), self.number

    def get(self) -> Any:
        return self.items[self.number] if self.number < len(self.items) else None

    def set(self, value: Tensor | None) -> None:
        self.items[self.number] = value


@dataclass(frozen=True)
class Somewhere:
    """A tensor that some object holds, which the step does not replace."""

    reference: weakref.ref[Tensor]
    number: int

    @property
    def where(self) -> tuple[Any, ...]:
        return "somewhere", self.number

    def get(self) -> Any:
        return ops.referent(self.reference)

    def set(self, value: Tensor | None) -> None:
        raise TypeError("a tensor in an unknown place cannot be replaced")


Slot = Entry | NestedEntry | Gradient | Cell | Item | Somewhere


def kind(slot: Slot) -> int:
    """Return what ``SlotReader`` wants slots to be sorted by."""
    return {Entry: 0, Gradient: 1}.get(type(slot), 2)


class SlotReader:
    """Reads many slots, sorted by ``kind``, at once."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        entries = [slot for slot in slots if isinstance(slot, Entry)]
        self._mappings = [slot.mapping for slot in entries]
        self._keys = [slot.key for slot in entries]
        self._params = [slot.param for slot in slots if isinstance(slot, Gradient)]
        self._others = [slot for slot in slots if kind(slot) == 2]

    def read(self) -> list[Any]:
        """Return what is in the slots."""
        return [
            *map(dict.get, self._mappings, self._keys),
            *[param.grad for param in self._params],
            *[slot.get() for slot in self._others],
        ]


# ---------------------------------------------------------------- values that code names


@dataclass
class Named:
    """What a function's code reaches by the names that it uses.

    Attributes:
        slots: of tensors, with labels.
        plain: reads a plain value, with a label.
        held: returns which object a name stands for, with a label.
    """

    modules: list[nn.Module]
    optimizers: list[Optimizer]
    slots: list[tuple[str, Slot]]
    plain: list[tuple[str, Callable[[], Any]]]
    held: list[tuple[str, Callable[[], _Identity]]]


class _Names:
    """Follows a function's variables, globals and attributes as far as its code names them.

    Of the methods that it calls, only plain values, also in lists and dicts, and tensors of their
    objects are followed.
    """

    def __init__(self) -> None:
        self.found = Named([], [], [], [], [])
        self._attributes: set[str] = set()
        self._in_methods: set[str] = set()
        self._done: set[tuple[int, str]] = set()
        self._seen: set[int] = set()
        self._objects: list[tuple[str, Any, int]] = []

    def function(self, function: Any) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        if isinstance(function, functools.partial):
            for number, value in enumerate((*function.args, *function.keywords.values())):
                self._add(f"partial argument {number}", value, None, 0)
            self.function(function.func)
        elif isinstance(function, types.MethodType):
            self._add("self", function.__self__, None, 0)
            self.function(function.__func__)
        elif isinstance(function, types.FunctionType):
            self._code(function)
        elif hasattr(function, "__wrapped__"):  # another compiled step
            self.function(function.__wrapped__)
        else:
            self._objects.append((type(function).__name__, function, 0))
            call = vars(type(function)).get("__call__")
            if isinstance(call, types.FunctionType):
                self.function(call)

    def optimizer(self, optimizer: Optimizer) -> None:
        """Follow what an optimizer's step names."""
        self._in_methods.add("step")
        self._objects.append((type(optimizer).__name__, optimizer, 0))

    def finish(self) -> Named:
        known = -1
        while known != (known := len(self._objects) + len(self._done) + len(self._in_methods)):
            for label, value, depth in list(self._objects):
                self._follow_methods(type(value))
                self._follow_attributes(label, value, depth)
        return self.found

    def _follow_methods(self, owner: type) -> None:
        for base in owner.__mro__:
            for name in (self._attributes | self._in_methods) & vars(base).keys():
                method = vars(base)[name]
                function = method.fget if isinstance(method, property) else method
                if isinstance(function, types.FunctionType) and not _is_torch(function):
                    self._in_methods |= _names_in(function.__code__)

    def _follow_attributes(self, label: str, value: Any, depth: int) -> None:
        for name, each in _attributes_in(value).items():
            # The state of an optimizer is known otherwise.
            named = name in self._attributes and not isinstance(value, Optimizer)
            has_plain = isinstance(each, list | dict) and any(map(_is_plain, _items_of(each)))
            simple = isinstance(each, Tensor) or _is_plain(each) or _is_object(each) or has_plain
            by_method = simple and name in self._in_methods
            if (id(value), name) in self._done or not (named or by_method):
                continue
            self._done.add((id(value), name))
            if has_plain and not named:
                # Only what is in it: a method may make another list in each step.
                read = functools.partial(_plain_items_in, Entry(vars(value), name))
                self.found.plain.append((f"{label}.{name}", read))
            elif named or not _is_object(each):
                self._add(f"{label}.{name}", each, Entry(vars(value), name), depth + 1)
            elif depth < DEEPEST and id(each) not in self._seen:
                self._seen.add(id(each))
                self._objects.append((f"{label}.{name}", each, depth + 1))

    def _code(self, function: types.FunctionType) -> None:
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self.function(wrapped)
        code = function.__code__
        self._attributes.update(_names_in(code))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                self._add(name, cell.cell_contents, Cell(cell), 0)
            except ValueError:  # not assigned yet
                continue
        defaults = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        by_name = dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})
        for name, value in by_name.items():
            self._add(name, value, None, 0)
        for name in sorted(_names_in(code)):
            if name in function.__globals__:
                held = Entry(function.__globals__, name)
                self._add(name, function.__globals__[name], held, 0)

    def _add(self, label: str, value: Any, slot: Slot | None, depth: int) -> None:
        found = self.found
        is_plain = _is_plain(value)
        if slot is not None and not is_plain and not isinstance(value, Tensor):
            found.held.append((f"which object {label} is", functools.partial(_identity_in, slot)))
        if is_plain:
            if slot is not None:
                found.plain.append((label, slot.get))
        elif isinstance(value, Tensor):
            if slot is not None:
                found.slots.append((label, slot))
        elif isinstance(value, nn.Module):
            found.modules.append(value)
        elif isinstance(value, Optimizer):
            found.optimizers.append(value)
        elif isinstance(
            value, types.FunctionType | types.MethodType | functools.partial
        ) or hasattr(value, "__wrapped__"):
            if not _is_library(value):
                self.function(value)
        elif id(value) in self._seen or depth >= DEEPEST or _is_library(value):
            return
        elif isinstance(value, dict):
            self._seen.add(id(value))
            for key, each in list(value.items()):
                self._add(f"{label}[{key!r}]", each, Entry(value, key), depth + 1)
        elif isinstance(value, list | tuple):
            self._seen.add(id(value))
            if isinstance(value, list):
                found.plain.append((label, functools.partial(_PlainItems.of, value)))
            for number, each in enumerate(value):
                if not _is_plain(each):
                    held = Item(value, number) if isinstance(value, list) else None
                    self._add(f"{label}[{number}]", each, held, depth + 1)
        elif not isinstance(value, type | types.ModuleType):
            self._seen.add(id(value))
            self._objects.append((label, value, depth))


def _is_plain(value: Any) -> bool:
    """Return whether this is a plain value, or a tuple of such."""
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _attributes_in(value: Any) -> dict[str, Any]:
    """Return an object's attributes, and the plain ones of its classes, which it may hide later."""
    if not hasattr(value, "__dict__"):
        return {}
    in_classes = [vars(base).items() for base in reversed(type(value).__mro__)]
    plain = {name: each for base in in_classes for name, each in base if _is_plain(each)}
    return plain | vars(value)


class _PlainItems(list[Any]):
    """The plain values in a list or dict, which are those of another time if those that both have
    are: what a step appends, it appends while it is traced only."""

    @classmethod
    def of(cls, items: Iterable[Any]) -> _PlainItems:
        return cls(each if _is_plain(each) else None for each in items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and all(map(operator.eq, self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other


def _items_of(items: list[Any] | dict[Any, Any]) -> Iterable[Any]:
    return items.values() if isinstance(items, dict) else items


def _plain_items_in(slot: Slot) -> _PlainItems | None:
    items = slot.get()
    return _PlainItems.of(_items_of(items)) if isinstance(items, list | dict) else None


class _Identity:
    """Equal to that of the same object while it lives; its ``id`` may be another one's later."""

    def __init__(self, value: Any) -> None:
        try:
            self._get: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # of dicts and lists there are no weak references
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        value = self._get()
        return value is not None and isinstance(other, _Identity) and value is other._get()


def _identity_in(slot: Slot) -> _Identity:
    return _Identity(slot.get())


def _names_in(code: types.CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _is_object(value: Any) -> bool:
    """Return whether this is an object with attributes that are followed."""
    kinds = (type, types.ModuleType, nn.Module, Optimizer, Tensor)
    if isinstance(value, kinds) or callable(value) or _is_library(value):
        return False
    return hasattr(value, "__dict__")


def _is_torch(function: types.FunctionType) -> bool:
    return function.__module__.partition(".")[0] in LIBRARIES


def _is_library(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return False
    module = (getattr(value, "__module__", None) or type(value).__module__ or "").partition(".")[0]
    return module in LIBRARIES or (module == "xla_fsdp" and callable(value))


def named_by(function: Any, optimizers: Sequence[Optimizer] = ()) -> Named:
    """Return what ``function`` reaches by the names in its code and that of functions it calls,
    and what the steps of ``optimizers`` that are not torch's do."""
    names = _Names()
    names.function(function)
    for optimizer in dict.fromkeys([*names.found.optimizers, *optimizers]):
        if not _is_library(optimizer):
            names.optimizer(optimizer)
    return names.finish()


# ---------------------------------------------------------------- facts


class Watched:
    """Everything that one rank's step has been seen to use.

    Args:
        function: the step.
        modules: whose forward it has called.
        optimizers: whose step it has called.
        device: this rank's.
        others: tensors that it has used, wherever they are held.
    """

    def __init__(
        self,
        function: Any,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        device: torch.device,
        others: Sequence[weakref.ref[Tensor]] = (),
    ) -> None:
        named = named_by(function, optimizers)
        self.device = device
        self._others = list(others)
        self.optimizers = list(dict.fromkeys([*named.optimizers, *optimizers]))
        roots = dict.fromkeys([*named.modules, *modules])
        self.labels: dict[nn.Module, str] = {}
        for root in roots:
            for name, module in root.named_modules():
                self.labels.setdefault(module, f"{type(root).__name__} {name}".strip())
        self.modules = list(self.labels)
        self.units = list(dict.fromkeys(unit for root in roots for unit in units_in(root)))
        self._named = named
        self.params = self._find_params()
        self.numbers = OptimizerNumbers(self.optimizers)
        self._module_facts = [_ModuleFacts(module) for module in self.modules]
        self._attributes = _attributes_of(self._module_facts)
        self._dicts = [each for module in self.modules for each in _dicts_of(module)]
        self._held: list[Any] = []
        self._facts_of_held: list[Any] = []
        self._facts = [*self._make_facts_of_held(), *self._make_facts()]

    def knows(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> bool:
        """Return whether these are among what is watched."""
        return all(each in self.labels for each in modules) and all(
            any(each is known for known in self.optimizers) for each in optimizers
        )

    def facts(self, modes: tuple[Any, ...] | None = None) -> list[Any]:
        """Return all facts now, to be compared with those of another time.

        Args:
            modes: ``modes_now()`` of another thread than the caller's.
        """
        # Nothing is compared one by one if the very objects are held that were held before.
        try:
            held = [*self._find_held()]
        except KeyError:  # an attribute is gone
            held = []
        same = len(held) == len(self._held) and all(map(operator.is_, held, self._held))
        number = len(self.modules) + len(self.optimizers)
        if not (same and held):
            self._held = held
            self._facts_of_held = [read() for _, read in self._facts[:number]]
        modes = modes_now() if modes is None else modes
        return [*self._facts_of_held, modes, *(read() for _, read in self._facts[number + 1 :])]

    def _find_held(self) -> Iterator[Any]:
        """Return what modules and optimizers hold, as far as facts come from it."""
        # No more of a module than that: most of the time goes into touching a thousand objects.
        groups = (group for each in self.optimizers for group in each.param_groups)
        attributes = (map(get, each) for get, each in self._attributes)
        return itertools.chain(
            itertools.chain.from_iterable(itertools.chain.from_iterable(attributes)),
            itertools.chain.from_iterable(map(len, each) for _, each in self._attributes),
            itertools.chain.from_iterable(map(dict.values, filter(None, self._dicts))),
            itertools.chain.from_iterable(each.state.values() for each in self.optimizers),
            itertools.chain.from_iterable(group["params"] for group in groups),
        )

    def has_states_of(self, before: Sequence[Any], now: Sequence[Any]) -> bool:
        """Return whether optimizers hold the parameters and states that they held before."""
        of_optimizers = slice(len(self.modules), len(self.modules) + len(self.optimizers))
        return before[of_optimizers] == now[of_optimizers]

    def describe(self, before: Sequence[Any], now: Sequence[Any]) -> str:
        """Say in words which facts differ."""
        if len(before) != len(now):
            return "the modules or optimizers that the step uses"
        plain = {id(read) for _, read in self._named.plain}
        for (label, read), old, new in zip(self._facts, before, now, strict=True):
            if old == new:
                continue
            if isinstance(read, _ModuleFacts):
                return f"{label}: {read.difference(old, new)}"
            return f"{label}: {shown([(old, new)])}" if id(read) in plain else label
        return "nothing"

    def changed_numbers(
        self, before: Sequence[Any], now: Sequence[Any]
    ) -> Iterator[tuple[str, str]]:
        """Yield label and change of the plain values of modules, or named by the step's code, that
        differ."""
        plain = {id(read) for _, read in self._named.plain}
        for (label, read), old, new in zip(self._facts, before, now, strict=False):
            if isinstance(read, _ModuleFacts):
                for name, a, b in zip(("training", *read.names), old[0], new[0], strict=False):
                    if a != b:
                        yield f"{label}.{name}", shown([(a, b)])
            elif id(read) in plain and old != new:
                yield label, shown([(old, new)])

    def slots(self) -> dict[tuple[Any, ...], tuple[str, Slot]]:
        """Return the places that hold a tensor of this device, with labels, by ``Slot.where``."""
        found: dict[tuple[Any, ...], tuple[str, Slot]] = {}
        for label, slot in self._places():
            value = slot.get()
            if isinstance(value, Tensor) and value.device == self.device:
                found.setdefault(slot.where, (label, slot))
        known = {id(slot.get()) for _, slot in found.values()}
        for reference in self._others:
            tensor = ops.referent(reference)
            if tensor is None or isinstance(tensor, ReshardedParam):  # which has lost its values
                continue
            if id(tensor) not in known:
                slot = Somewhere(reference, id(tensor))
                found[slot.where] = ("a tensor that some object holds", slot)
        return found

    def _places(self) -> Iterator[tuple[str, Slot]]:
        for module, label in self.labels.items():
            for mapping in (module._parameters, module._buffers, vars(module)):
                is_counted = mapping is not module._parameters
                for name, _ in mapping.items():  # of a wrapper none: the module inside has them
                    yield f"{label}.{name}", Entry(mapping, name, is_counted)
        for param in self.params:
            yield "a gradient", Gradient(param)
        for number, optimizer in enumerate(self.optimizers):
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    for name in state:
                        yield f"{_name(optimizer, number)}'s {name}", Entry(state, name, False)
            for group in optimizer.param_groups:
                for name in group:
                    yield f"{_name(optimizer, number)}'s {name}", Entry(group, name)
        for unit in self.units:
            attributes = vars(unit.group)
            for name in ("_unreduced", "_not_all_reduced"):
                for key in attributes[name]:
                    yield "an unreduced gradient", NestedEntry(attributes, name, key)
        yield from self._named.slots

    def _find_params(self) -> list[Tensor]:
        in_modules = (p for module in self.modules for p in module._parameters.values())
        in_groups = (
            p for each in self.optimizers for group in each.param_groups for p in group["params"]
        )
        found = [p for p in (*in_modules, *in_groups) if isinstance(p, Tensor)]
        return list({id(p): p for p in found}.values())

    def _make_facts_of_held(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield from zip(self.labels.values(), self._module_facts, strict=True)
        for number, optimizer in enumerate(self.optimizers):
            label = f"parameters or states of {_name(optimizer, number)}"
            yield label, functools.partial(_optimizer_objects, optimizer)

    def _make_facts(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield "torch's modes (grad, autocast, default dtype), or context_parallel", modes_now
        yield (
            "requires_grad, hooks, or whether there is a gradient, of parameters",
            self._param_facts,
        )
        for unit in self.units:
            yield (
                "a unit's settings, or gradients that no_sync left",
                functools.partial(_unit_facts, unit),
            )
        for number, optimizer in enumerate(self.optimizers):
            label = f"parameters, options, hooks or states of {_name(optimizer, number)}"
            yield label, functools.partial(_optimizer_facts, optimizer)
        yield from self._named.plain
        yield from self._named.held

    def _param_facts(self) -> tuple[Any, ...]:
        # A grad counts as a fact only by whether it is there.
        missing = [grad is None for grad in map(_GRAD, self.params)]
        hooks = [*map(_HOOKS_OF, self.params), *map(_LATER_HOOKS_OF, self.params)]
        if any(hooks):
            hooks = [tuple(each or ()) for each in hooks]
        return [*map(_REQUIRES_GRAD, self.params)], missing, hooks


def _attributes_of(
    facts: Sequence[_ModuleFacts],
) -> list[tuple[Callable[[dict[str, Any]], tuple[Any, ...]], list[dict[str, Any]]]]:
    """Return the attributes of modules, those with the same names together, and what reads those
    that facts come from."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for each in facts:
        found.setdefault((*each.names, *DICTS), []).append(each.attributes)
    return [(operator.itemgetter(*names), each) for names, each in found.items()]


def _dicts_of(module: nn.Module) -> list[dict[str, Any]]:
    """Return the dicts that the facts of a module come from, but for buffers, which steps
    replace."""
    found = [vars(module)[name] for name in DICTS]
    return [each for each in found if isinstance(each, dict)]  # those of a wrapper are views


class _ModuleFacts:
    """Reads the plain attributes, hooks and children of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.attributes = vars(module)
        names = [name for name, each in self.attributes.items() if _is_plain(each)]
        self.names = sorted(names)
        self._plain = operator.itemgetter("training", *self.names)
        self._hooks = operator.itemgetter(*HOOKS, *HOOK_OPTIONS)
        self._held = operator.itemgetter("_parameters", "_buffers")

    def difference(self, old: tuple[Any, ...], new: tuple[Any, ...]) -> str:
        """Say which attributes differ between two results of a call."""
        if old[0] == new[0]:
            return "its attributes, hooks, children or parameters"
        pairs = zip(("training", *self.names), old[0], new[0], strict=False)
        found = (f"{name} {shown([(a, b)])}" for name, a, b in pairs if a != b)
        return ", ".join(dict.fromkeys(found))

    def __call__(self) -> tuple[Any, ...]:
        attributes = self.attributes
        try:
            plain = self._plain(attributes)
        except KeyError as gone:
            plain = (str(gone),)
        return (
            plain,
            len(attributes),
            [*map(tuple, self._hooks(attributes))],
            [(id(held), *held) for held in self._held(attributes)],
            [*map(id, attributes["_parameters"].values())],
            [*map(id, attributes["_modules"].values())],
        )


def shown(pairs: list[tuple[Any, Any]]) -> str:
    """Say what each old value is now."""
    return ", ".join(f"{str(old)[:60]} is now {str(new)[:60]}" for old, new in pairs)


def modes_now() -> tuple[Any, ...]:
    """Return what a step depends on that each thread has for itself."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("xla"),
        torch.get_autocast_dtype("xla"),
        torch.get_default_dtype(),
        context_key(),
    )


def _unit_facts(unit: FSDPState) -> tuple[Any, ...]:
    group, context = unit.group, unit.context
    return (
        [[*each] if isinstance(each, list) else each for each in vars(unit.settings).values()],
        context.is_last,
        [*map(id, context.unreduced)],
        group.all_reduces,
        group.sharded_state,
        group._prefetched is None,
        tuple(group._unreduced),
        tuple(group._not_all_reduced),
        group.stepper and _Identity(group.stepper),
    )


def _optimizer_objects(optimizer: Optimizer) -> tuple[Any, ...]:
    # States are new ones, if a state dict was loaded.
    return (
        [[*map(id, group["params"])] for group in optimizer.param_groups],
        [*map(id, _states(optimizer))],
    )


def _optimizer_facts(optimizer: Optimizer) -> tuple[Any, ...]:
    return (
        [
            (
                _Identity(group),
                len(group["params"]),
                [v for v in group.values() if v is None or isinstance(v, bool | str)],
                len(group),
            )
            for group in optimizer.param_groups
        ],
        [*map(len, _states(optimizer))],
        # One that passes its steps on to others has no hooks of its own.
        tuple(getattr(optimizer, "_optimizer_step_pre_hooks", ())),
        tuple(getattr(optimizer, "_optimizer_step_post_hooks", ())),
    )


def _states(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [state for state in optimizer.state.values() if isinstance(state, dict)]


def _name(optimizer: Optimizer, number: int) -> str:
    return f"{type(optimizer).__name__} {number}" if number else type(optimizer).__name__
