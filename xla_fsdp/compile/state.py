"""The state of a step: the modules, optimizers and other objects that it was given.

A step depends on its arguments and its state. Of the state it depends on the tensors, wherever
they are inside, and on facts: plain values that the owners of the state report. A program is right
for as long as the facts are what they were when it was traced.
"""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import logging
import operator
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from xla_fsdp.compile.optimizer_numbers import OptimizerNumbers
from xla_fsdp.compile.slots import Slot, Way
from xla_fsdp.distributed.context_parallel import context_key
from xla_fsdp.fsdp.engine.module_state import is_fsdp_module, units_in
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.optim.optimizers import params_of
from xla_fsdp.xla.loop import Body, Loop
from xla_fsdp.xla.lost import LostTensor

PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
CHOICES = (types.FunctionType, types.BuiltinFunctionType, type, enum.Enum)
"""What an attribute of a module may choose between, such as an activation function."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOK_OPTIONS = (
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
# In C, as a large model has thousands of parameters and attributes.
_HELD = operator.itemgetter(*HOOKS, *HOOK_OPTIONS, "_parameters", "_modules")
_GRAD = operator.attrgetter("grad")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_HOOKS_OF = operator.attrgetter("_backward_hooks")
_LATER_HOOKS_OF = operator.attrgetter("_post_accumulate_grad_hooks")


class CompiledFunction:
    """A function that is compiled. What it keeps for itself is of no state."""


_CLOSED = (
    *PLAIN,
    *CHOICES,
    types.ModuleType,
    types.MethodType,
    functools.partial,
    weakref.ref,
    logging.Logger,
    threading.Thread,
    DataLoader,
    Dataset,
    FSDPState,
    CompiledFunction,
    torch.Generator,
)
"""Objects that are not looked into. A tensor that a step takes from there is an error."""
_CONTAINERS = (dict, list, tuple, collections.deque, set, frozenset)
MOST_ITEMS = 10_000  # of a container that is looked into


class State:
    """What a step was given, and all that is inside.

    Args:
        given: modules, optimizers, and objects or containers that hold such, or tensors.
        device: this rank's.
    """

    def __init__(self, given: Sequence[Any], device: torch.device) -> None:
        self.device = device
        self.labels: dict[nn.Module, str] = {}
        self.optimizers: list[Optimizer] = []
        self._objects: list[tuple[str, Any]] = []  # looked into, with labels
        self._seen: set[int] = set()
        for each in given:
            if not isinstance(each, Tensor):
                self._add(type(each).__name__, each)
        self._objects.append(("state", given))  # where its tensors are
        self._bodies: list[Body] = []
        for label, _, way, inner in self._contents():  # which grows
            if isinstance(inner, Body):
                self._bodies.append(inner)
            elif not isinstance(inner, Tensor):
                self._add(f"{label}{_shown_way(way)}", inner)
        self.modules = list(self.labels)
        self.units = list(dict.fromkeys(unit for root in self.labels for unit in units_in(root)))
        self.params = self._find_params()
        self.numbers = OptimizerNumbers(self.optimizers)
        self._namesakes = self._find_namesakes()
        self._attributes = [*map(vars, self.modules)]
        held = itertools.chain.from_iterable(map(_HELD, self._attributes))
        self._dicts = [each for each in held if isinstance(each, dict)]  # a wrapper has views
        self._others = [*self._find_others()]

    @property
    def constants(self) -> list[Tensor]:
        """Tensors that units make for all steps, and those that loops keep, with a body that was
        traced once. Units trace loops in steps."""
        made = [each for unit in self.units for each in unit.loops.made.values()]
        bodies = [*self._bodies, *(each.body for each in made if isinstance(each, Loop))]
        kept = [tensor for body in bodies for tensor in body.captured.values()]
        return [*kept, *(each for each in made if isinstance(each, Tensor))]

    def _add(self, label: str, value: Any) -> None:
        """Add a module with those inside of it, an optimizer, or an object."""
        if isinstance(value, nn.Module):
            for name, module in value.named_modules():
                if module not in self.labels:
                    self.labels[module] = f"{label} {name}".strip()
                    self._objects.append((self.labels[module], module))
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            if isinstance(value, Optimizer):
                self.optimizers.append(value)
                label = _name(value, len(self.optimizers) - 1)
            self._objects.append((label, value))

    def steppers(self) -> list[Optimizer]:
        """Return the optimizers that hold parameters of the model: not those inside of others,
        whose parameters have values in a step only."""
        inner = [getattr(each, "inner", None) for each in self.optimizers]
        return [each for each in self.optimizers if all(each is not one for one in inner)]

    def has(self, optimizer: Optimizer) -> bool:
        """Return whether this optimizer is a part of the state."""
        return any(each is optimizer for each in self.optimizers)

    # ------------------------------------------------------------ facts

    def facts(self, modes: tuple[Any, ...] | None = None) -> Facts:
        """Return all facts now, to be compared with those of another time.

        Args:
            modes: ``modes_now()`` of another thread than the caller's.
        """
        # All in C: most of the time goes into touching some thousand objects.
        chain = itertools.chain.from_iterable
        filled = [*filter(None, self._dicts)]
        values = (
            map(operator.itemgetter(*names), map(vars, modules))
            for names, modules in self._namesakes.items()
        )
        try:
            plain = [*chain(chain(values))]
        except KeyError as gone:  # an attribute
            plain = [str(gone)]
        held = map(_HELD, self._attributes)
        return Facts(
            plain,
            _Same(itertools.chain(chain(held), chain(filled), chain(map(dict.values, filled)))),
            [*map(_objects_of, self.optimizers)],
            [modes or modes_now(), *(read() for _, read in self._others[1:])],
        )

    def describe(self, before: Facts, now: Facts) -> str:
        """Say in words which facts differ."""
        if changes := self.changed_attributes(before, now):
            [(first, _, _), *_] = changes
            found = (f"{name} {change}" for label, name, change in changes if label == first)
            return f"{first}: {', '.join(found)}"
        if (before.plain, before.parts) != (now.plain, now.parts):
            return "attributes, hooks, children or parameters of modules"
        pairs = enumerate(zip(self.optimizers, before.states, now.states, strict=False))
        for number, (optimizer, old, new) in pairs:
            if old != new:
                return f"parameters or states of {_name(optimizer, number)}"
        for (label, _), old, new in zip(self._others, before.others, now.others, strict=False):
            if old != new:
                return label
        return "the modules or optimizers that the step uses"

    def changed_attributes(self, before: Facts, now: Facts) -> list[tuple[str, str, str]]:
        """Return label of the module, name and change of plain attributes that differ."""
        groups = self._namesakes.items()
        places = (
            (self.labels[m], name) for names, modules in groups for m in modules for name in names
        )
        pairs = zip(places, before.plain, now.plain, strict=False)
        return [(*place, shown([(old, new)])) for place, old, new in pairs if old != new]

    def _find_namesakes(self) -> dict[tuple[str, ...], list[nn.Module]]:
        found: dict[tuple[str, ...], list[nn.Module]] = {}
        for module in self.modules:
            names = sorted(name for name, each in vars(module).items() if _is_plain(each))
            found.setdefault(tuple(dict.fromkeys(("training", *names))), []).append(module)
        return found

    def _find_others(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield "torch's modes (grad, autocast, default dtype), or context_parallel", modes_now
        yield "the number of attributes of a module", lambda: [*map(len, self._attributes)]
        yield (
            "requires_grad, hooks, or whether there is a gradient, of parameters",
            self._param_facts,
        )
        states = [each._fsdp_module_state for each in self.modules if is_fsdp_module(each)]
        yield "which blocks run as a loop", lambda: [each.forward_override for each in states]
        for unit in self.units:
            yield "a unit's settings, or gradients that no_sync left", unit.replay_facts
        for number, optimizer in enumerate(self.optimizers):
            label = f"parameters, options, hooks or states of {_name(optimizer, number)}"
            yield label, functools.partial(_optimizer_facts, optimizer)

    def _param_facts(self) -> tuple[Any, ...]:
        # A grad counts as a fact only by whether it is there.
        missing = [grad is None for grad in map(_GRAD, self.params)]
        hooks = [*map(_HOOKS_OF, self.params), *map(_LATER_HOOKS_OF, self.params)]
        if any(hooks):
            hooks = [tuple(each or ()) for each in hooks]
        return [*map(_REQUIRES_GRAD, self.params)], missing, hooks

    # ------------------------------------------------------------ places of tensors

    def slots(self) -> dict[tuple[Any, ...], tuple[str, Slot]]:
        """Return the places that hold a tensor of this device, with labels, by ``Slot.where``.

        Raises:
            RuntimeError: if one holds a tensor that has no value, as a scanned block has kept it.
        """
        found: dict[tuple[Any, ...], tuple[str, Slot]] = {}
        for label, slot in self._places():
            value = slot.get()
            if isinstance(value, LostTensor):
                raise RuntimeError(f"{label} holds a tensor that was never computed: {value.why}")
            if isinstance(value, Tensor) and value.device == self.device:
                found.setdefault(slot.where, (label, slot))
        return found

    def host_tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors of the host that modules and other objects hold, with labels."""
        buffers = (
            (f"{label}.{name}", each)
            for module, label in self.labels.items()
            for name, each in module._buffers.items()
        )
        inside = (
            (f"{label}{_shown_way(way)}", each)
            for label, _, way, each in self._contents()
            if isinstance(each, Tensor)
        )
        return [
            (label, each)
            for label, each in itertools.chain(buffers, inside)
            if isinstance(each, Tensor) and each.device.type == "cpu" and not each.is_inference()
        ]

    def _contents(self) -> Iterator[tuple[str, Any, Way, Any]]:
        """Yield what is in the objects: the object with its label, the way, and what is there."""
        for label, value in self._objects:
            for way, inner in _tensors_and_parts(value):
                yield label, value, way, inner

    def _places(self) -> Iterator[tuple[str, Slot]]:
        in_modules = {id(p) for module in self.modules for p in module._parameters.values()}
        for module, label in self.labels.items():
            for mapping in (module._parameters, module._buffers, vars(module)):
                is_counted = mapping is not module._parameters
                for name, _ in mapping.items():  # of a wrapper none: the module inside has them
                    yield f"{label}.{name}", Slot(mapping, (("item", name),), is_counted)
        for param in self.params:
            yield "a gradient", Slot(param, (("attribute", "grad"),))
        for number, optimizer in enumerate(self.optimizers):
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    for name in state:
                        slot = Slot(state, (("item", name),), is_counted=False)
                        yield f"{_name(optimizer, number)}'s {name}", slot
            for group in optimizer.param_groups:
                for name in group:
                    yield f"{_name(optimizer, number)}'s {name}", Slot(group, (("item", name),))
                for at, param in enumerate(group["params"]):
                    if id(param) not in in_modules:
                        slot = Slot(group, (("item", "params"), ("item", at)))
                        yield f"a parameter of {_name(optimizer, number)}", slot
        for unit in self.units:
            for way in unit.group.replay_places():
                yield "an unreduced gradient", Slot(unit.group, way)
        for label, value, way, inner in self._contents():
            is_attribute = isinstance(value, nn.Module) and len(way) == 1  # it is above
            if isinstance(inner, Tensor) and not is_attribute:
                yield f"{label}{_shown_way(way)}", Slot(value, way)

    def _find_params(self) -> list[Tensor]:
        in_modules = (p for module in self.modules for p in module._parameters.values())
        in_groups = (p for each in self.optimizers for p in params_of(each))
        found = [p for p in (*in_modules, *in_groups) if isinstance(p, Tensor)]
        return list({id(p): p for p in found}.values())


def refuse_closed(given: Sequence[Any]) -> None:
    """Raise a TypeError for an object of ``state=`` that is not looked into."""
    for each in given:
        of_tensors = isinstance(each, set | frozenset) and any(isinstance(t, Tensor) for t in each)
        if of_tensors or (isinstance(each, _CLOSED) and not isinstance(each, PLAIN)):
            raise TypeError(
                f"state= got {each!r}; what is in a {type(each).__name__} cannot be followed. Give "
                f"the modules, optimizers and objects themselves, and tensors in lists or dicts"
            )


def find_given(values: Sequence[Any]) -> list[Any]:
    """Return the modules and optimizers among ``values``."""
    return [each for each in values if isinstance(each, nn.Module | Optimizer)]


# ---------------------------------------------------------------- what is inside of objects

_OWN = ("_modules", "_parameters", "_buffers", *HOOKS, *HOOK_OPTIONS)
"""What modules hold that is found by itself."""


def _tensors_and_parts(value: Any) -> Iterator[tuple[Way, Any]]:
    """Yield the tensors in an object and its containers, and the objects there to look into, each
    with the way that leads there."""
    seen = {id(value)}
    waiting: collections.deque[tuple[Way, Any]] = collections.deque([((), value)])
    while waiting:
        way, each = waiting.popleft()
        for step, inner in _inside(each):
            if isinstance(inner, Tensor):
                yield (*way, step), inner
            elif isinstance(inner, _CLOSED) or id(inner) in seen:
                continue
            elif isinstance(inner, _CONTAINERS):
                seen.add(id(inner))
                waiting.append(((*way, step), inner))
            elif hasattr(inner, "__dict__") or hasattr(type(inner), "__slots__"):
                seen.add(id(inner))
                yield (*way, step), inner


def _inside(value: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    """Yield what an object or a container holds, each with the step that leads there."""
    if isinstance(value, dict | list | tuple | collections.deque):
        if len(value) <= MOST_ITEMS:
            pairs = list(value.items()) if isinstance(value, dict) else enumerate(value)
            yield from ((("item", key), each) for key, each in pairs)
        if type(value) in (dict, list, tuple):
            return
    elif isinstance(value, set | frozenset):  # nothing leads to what is in it
        yield from ((("item", None), each) for each in value if not isinstance(each, Tensor))
        return
    skipped: tuple[str, ...] = ()
    if isinstance(value, nn.Module):
        skipped = _OWN
    elif isinstance(value, Optimizer):
        skipped = ("state", "param_groups", "defaults")
    attributes = getattr(value, "__dict__", None) or {}
    for name, each in list(attributes.items()):
        if name not in skipped:
            yield ("attribute", name), each
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                with_value = getattr(value, name, None)
                yield ("attribute", name), with_value


def _shown_way(way: Way) -> str:
    return "".join(f".{key}" if kind == "attribute" else f"[{key!r}]" for kind, key in way)


# ---------------------------------------------------------------- facts of modules and optimizers


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN + CHOICES) or (
        isinstance(value, tuple) and all(map(_is_plain, value))
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


class _Same:
    """Equal to that of the same objects; it keeps them, whose ``id`` would be others'."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._objects = [*objects]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Same)
            and len(self._objects) == len(other._objects)
            and all(map(operator.is_, self._objects, other._objects))
        )

    __hash__ = None  # type: ignore[assignment]


class Facts(NamedTuple):
    """What programs depend on of a state, but for its tensors.

    Args:
        plain: attributes of modules.
        parts: parameters, children and hooks of modules, by name, and the dicts that hold them.
        states: parameters and states of each optimizer; states are new ones, if a state dict was
            loaded.
        others: of torch's modes, parameters, units and optimizers.
    """

    plain: list[Any]
    parts: _Same
    states: list[_Same]
    others: list[Any]


def _objects_of(optimizer: Optimizer) -> _Same:
    params = (group["params"] for group in optimizer.param_groups)
    return _Same(itertools.chain(_states(optimizer), *params))


def _optimizer_facts(optimizer: Optimizer) -> tuple[Any, ...]:
    return (
        [
            (
                _Same([group]),
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
