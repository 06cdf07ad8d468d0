"""What an optimizer holds of its parameters elsewhere than in its groups.

``Optimizer`` asks for no more than ``param_groups``; LBFGS, Lookahead and many of other packages
keep parameters, copies or other optimizers in attributes of their own, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from xla_fsdp.optim.optimizers import StepWatch, params_of

NOT_SEARCHED = (str, bytes, type, ModuleType, FunctionType, MethodType, nn.Module, StepWatch)
"""The parameters of modules are replaced in these."""


def held_elsewhere(optimizer: Optimizer) -> str:
    """Return a place other than the ``params`` of groups where ``optimizer`` holds one of its
    parameters, as "self.inner[0]"; an empty string if there is none."""
    held = HeldParams({id(param): param for param in params_of(optimizer)})
    held.search(optimizer)
    return next(iter(held.places), "")


class HeldParams:
    """The places where optimizers hold parameters that ``new`` has, by ``id``, what shall stand in
    their place. A tensor of one of ``shapes``, which is no parameter, is a copy."""

    def __init__(self, new: Mapping[int, Any], shapes: frozenset[Any] = frozenset()) -> None:
        self.places: list[str] = []
        self.problems: list[str] = []  # places of copies, and of numbers (``id``) of parameters
        self.optimizers: list[Optimizer] = []
        self._new = new
        self._shapes = shapes
        self._seen: dict[int, Any] = {}
        self._changes: list[Callable[[], Any]] = []

    def search(self, optimizer: Optimizer, place: str = "self") -> None:
        """Search attributes, but neither state nor the ``params`` of groups."""
        self.optimizers.append(optimizer)
        known = [optimizer, optimizer.state, *(each["params"] for each in optimizer.param_groups)]
        self._seen.update((id(each), each) for each in known)
        self._new_attributes(optimizer, place)

    def replace(self) -> None:
        """Replace what was found. Lists, dicts and objects stay the same."""
        for change in self._changes:
            change()

    def _new_value(self, value: Any, place: str, *, is_own: bool = True) -> Any:
        """Return what shall stand in place of ``value``; ``is_own`` says that it is not that of an
        object which may hold anything, as the data of a training loop."""
        if isinstance(value, Tensor):
            return self._new_tensor(value, place, is_own=is_own)
        if isinstance(value, int) and value in self._new:
            self.problems.append(f"{place} (the id of a parameter)")
        if isinstance(value, NOT_SEARCHED):
            return value
        if id(value) not in self._seen:
            self._seen[id(value)] = value  # what is inside may hold it
            self._seen[id(value)] = self._new_inside(value, place, is_own)
        return self._seen[id(value)]

    def _new_tensor(self, tensor: Tensor, place: str, *, is_own: bool) -> Any:
        if id(tensor) in self._new:
            self.places.append(place)
        elif is_own and tensor.numel() > 1 and tensor.shape in self._shapes:
            self.problems.append(f"{place} (a tensor of a parameter's shape)")
        return self._new.get(id(tensor), tensor)

    def _new_inside(self, value: Any, place: str, is_own: bool) -> Any:
        if isinstance(value, Optimizer):
            self.search(value, place)
        elif isinstance(value, dict):
            self._new_items(value, place, is_own)
        elif isinstance(value, tuple | list | set | frozenset | deque):
            return self._new_elements(value, place, is_own)
        elif isinstance(getattr(value, "__dict__", None), dict):
            self._new_attributes(value, place)
        return value

    def _new_attributes(self, owner: Any, place: str) -> None:
        is_own = isinstance(owner, Optimizer)
        for name, value in list(vars(owner).items()):
            new = self._new_value(value, f"{place}.{name}", is_own=is_own)
            if new is not value:
                self._changes.append(partial(vars(owner).__setitem__, name, new))

    def _new_items(self, items: dict[Any, Any], place: str, is_own: bool) -> None:
        new = {}
        for key, value in list(items.items()):
            own = f"{place}[{key!r}]" if isinstance(key, str | int) else place
            new_key = self._new_value(key, place, is_own=False)
            new[new_key] = self._new_value(value, own, is_own=is_own)
        if [*map(id, [*new, *new.values()])] != [*map(id, [*items, *items.values()])]:
            self._changes += [items.clear, partial(items.update, new)]

    def _new_elements(self, elements: Any, place: str, is_own: bool) -> Any:
        old = list(elements)
        new = [self._new_value(v, f"{place}[{at}]", is_own=is_own) for at, v in enumerate(old)]
        if all(a is b for a, b in zip(new, old, strict=True)):
            return elements
        if isinstance(elements, tuple | frozenset):
            named = hasattr(elements, "_fields")
            return type(elements)(*new) if named else type(elements)(new)
        fill = elements.update if isinstance(elements, set) else elements.extend
        self._changes += [elements.clear, partial(fill, new)]
        return elements
