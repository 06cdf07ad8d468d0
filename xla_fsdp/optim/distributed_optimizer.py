"""One optimizer for several models, or for stages of one model.

torch's class of this name drives optimizers on remote workers over RPC, which cannot hold XLA
devices. Here every rank makes the same calls and steps the parameters or shards that it has.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partialmethod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Part = nn.Module | Iterable[Any] | None

Hook = Callable[..., Any]


class DelegatingOptimizer(Optimizer, ABC):
    """Base of optimizers that step other optimizers, the delegates.

    Hooks are registered with each delegate, and get it as their first argument.
    """

    @property
    @abstractmethod
    def delegates(self) -> list[Optimizer]:
        """The optimizers that step the parameters."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.delegates:
            each.zero_grad(set_to_none)

    def _register(self, event: str, *args: Any, **kwargs: Any) -> Handles:
        handles = Handles()
        for each in self.delegates:
            handles.callback(getattr(each, f"register_{event}_hook")(*args, **kwargs).remove)
        return handles

    register_step_pre_hook: Any = partialmethod(_register, "step_pre")
    register_step_post_hook: Any = partialmethod(_register, "step_post")
    register_state_dict_pre_hook: Any = partialmethod(_register, "state_dict_pre")
    register_state_dict_post_hook: Any = partialmethod(_register, "state_dict_post")
    register_load_state_dict_pre_hook: Any = partialmethod(_register, "load_state_dict_pre")
    register_load_state_dict_post_hook: Any = partialmethod(_register, "load_state_dict_post")


class Handles(contextlib.ExitStack):
    """The handles of one hook that is registered with several optimizers."""

    remove = contextlib.ExitStack.close


class DistributedOptimizer(DelegatingOptimizer):
    """Use one optimizer for each of several parts as if they were one.

    ::

        optimizer = DistributedOptimizer(
            torch.optim.AdamW, {"encoder": encoder, "decoder": decoder}, lr=1e-3
        )

    Args:
        optimizer_class: called as ``optimizer_class(params, *args, **kwargs)`` for every part; or a
            mapping of such classes by the names of parts.
        parts: modules (sharded or not), or lists of parameters or groups, by name; or a list of
            such, named "0", "1", ... A part without parameters on this rank may be None or empty.
        args: further arguments of ``optimizer_class``.
        kwargs: further keywords of it.

    Raises:
        TypeError: for RRefs of torch's RPC, or anything else that is no part.
        ValueError: if this rank has no part, a parameter is in two parts, or the names of classes
            and parts differ.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer] | Mapping[str, Callable[..., Optimizer]],
        parts: Mapping[str, Part] | Iterable[Part],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # Without super().__init__(), which would assign groups and state; here they are properties.
        named = _named(parts)
        classes = _classes(optimizer_class, named)
        params = {name: _params(name, part) for name, part in named.items()}
        _check(params)
        self.optimizers: dict[str, Optimizer] = {
            name: classes[name](own, *args, **kwargs) for name, own in params.items() if own
        }
        self.defaults = next(iter(self.optimizers.values())).defaults

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}: {each!r}" for name, each in self.optimizers.items())
        return f"DistributedOptimizer({parts})"

    @property
    def delegates(self) -> list[Optimizer]:
        return list(self.optimizers.values())

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all parts: the same dicts, so that schedulers change them."""
        return [group for each in self.optimizers.values() for group in each.param_groups]

    @property
    def state(self) -> StateOfParts:  # type: ignore[override]
        """The state of all parts, by parameter; writes go to the parts' own state."""
        return StateOfParts(self.delegates)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call ``closure`` once, step every part, and return the closure's result."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for each in self.optimizers.values():
            each.step()
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError: a group does not say which part it belongs to."""
        raise ValueError(
            f"a group belongs to one of the parts {list(self.optimizers)}; call "
            f"optimizer.optimizers[name].add_param_group(group)"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"parts": {name: state dict of the part}}``."""
        return {"parts": {name: each.state_dict() for name, each in self.optimizers.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of ``state_dict`` for the same parts, or one state of all groups in torch's
        form, as checkpoints have it.

        Raises:
            ValueError: if parts or groups are missing or unknown; nothing has been changed then.
        """
        if "parts" not in state_dict and "param_groups" in state_dict:
            state_dict = {"parts": self._split(state_dict)}
        given, own = set(state_dict.get("parts", ())), set(self.optimizers)
        if given != own:
            raise ValueError(
                f"the state has parts {sorted(given)}, this optimizer {sorted(own)}; load each "
                f"part by optimizer.optimizers[name].load_state_dict"
            )
        for name, each in self.optimizers.items():
            each.load_state_dict(state_dict["parts"][name])

    def _split(self, state_dict: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Split a state of all groups, in the order of the parts, into one state per part."""
        groups, entries = list(state_dict["param_groups"]), state_dict["state"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(groups)} parameter groups, the parts of this optimizer have "
                f"{len(self.param_groups)}; create it with the same parts and groups"
            )
        parts = {}
        for name, each in self.optimizers.items():
            own, groups = groups[: len(each.param_groups)], groups[len(each.param_groups) :]
            numbers = [number for group in own for number in group["params"]]
            state = {number: entries[number] for number in numbers if number in entries}
            parts[name] = {"state": state, "param_groups": own}
        return parts


class StateOfParts(ChainMap[torch.Tensor, Any]):
    """A view of the states of several optimizers that share no parameter.

    Like torch's own state, it makes an empty entry when a parameter is looked up by ``[]``.
    """

    def __init__(self, optimizers: list[Optimizer]) -> None:
        super().__init__(*(each.state for each in optimizers))
        self._optimizers = optimizers

    def __getitem__(self, param: torch.Tensor) -> Any:
        return self._state_with(param)[param]

    def __setitem__(self, param: torch.Tensor, entry: Any) -> None:
        self._state_with(param)[param] = entry

    def __delitem__(self, param: torch.Tensor) -> None:
        del self._state_with(param)[param]

    pop: Any = MutableMapping.pop  # that of ``ChainMap`` looks at the first state alone

    def _state_with(self, param: torch.Tensor) -> MutableMapping[torch.Tensor, Any]:
        for each in self._optimizers:
            params = (own for group in each.param_groups for own in group["params"])
            if param in each.state or any(param is own for own in params):
                return each.state
        raise KeyError(param)


def _named(parts: Mapping[str, Part] | Iterable[Part]) -> dict[str, Part]:
    if isinstance(parts, Mapping):
        return dict(parts)
    if isinstance(parts, nn.Module | torch.Tensor):
        raise TypeError(
            f"parts is one {type(parts).__name__}; give a list or a mapping of parts, or use its "
            f"optimizer by itself"
        )
    return {str(number): part for number, part in enumerate(parts)}


def _classes(given: Any, named: Mapping[str, Part]) -> dict[str, Callable[..., Optimizer]]:
    if not isinstance(given, Mapping):
        return dict.fromkeys(named, given)
    if set(given) != set(named):
        raise ValueError(
            f"optimizer_class names the parts {sorted(given)}, but there are {sorted(named)}"
        )
    return dict(given)


def _params(name: str, part: Part) -> list[Any]:
    if part is None:
        return []
    if isinstance(part, nn.Module):
        return list(part.parameters())
    is_reference = hasattr(part, "to_here")  # of torch's RPC
    params = list(part) if isinstance(part, Iterable) and not is_reference else [part]
    for each in params:
        if not isinstance(each, torch.Tensor | Mapping | tuple):
            raise TypeError(
                f"part {name!r} holds a {type(each).__name__}; expected a module, or parameters of "
                f"this rank. Remote references cannot be stepped: RPC workers hold no XLA devices. "
                f"Call this on every rank with the parameters that it has"
            )
    return params


def _tensors(params: Iterable[Any]) -> Iterator[torch.Tensor]:
    for each in params:
        if isinstance(each, Mapping):
            own = each["params"]
            yield from _tensors([own] if isinstance(own, torch.Tensor) else own)
        else:
            yield each[1] if isinstance(each, tuple) else each


def _check(params: Mapping[str, list[Any]]) -> None:
    if not any(params.values()):
        raise ValueError(
            f"none of the parts {list(params)} has parameters on this rank; a rank that holds "
            f"nothing needs no optimizer"
        )
    seen: dict[int, str] = {}
    for name, own in params.items():
        for tensor in _tensors(own):
            if seen.setdefault(id(tensor), name) != name:
                raise ValueError(
                    f"a parameter of shape {tuple(tensor.shape)} is in parts {seen[id(tensor)]!r} "
                    f"and {name!r}, and would be stepped twice; leave it out of one"
                )
