"""One optimizer for several models, or several stages of one, each stepped where it lives.

Why: torch's class of this name drives optimizers on remote workers over RPC, which cannot hold XLA
devices, and whose gradients live in distributed autograd contexts that XLA tensors cannot enter.
What it is used for, one call that steps parameters wherever they are, needs no RPC here: every rank
runs the same call and steps what it holds, whole parameters or shards.
Words: a *part* is a model, a stage, or a list of parameters, under a name.
Always true: each part has an optimizer of its own; groups and state are theirs, in the order of
the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from xla_fsdp.optim.joined_hooks import HooksOfOthers

Part = nn.Module | Iterable[Any] | None


class DistributedOptimizer(HooksOfOthers):
    """``optimizer_class`` over each of several parts, used as one optimizer.

    ::

        optimizer = DistributedOptimizer(
            torch.optim.AdamW, {"encoder": encoder, "decoder": decoder}, lr=1e-3
        )

    Args:
        optimizer_class: called as ``optimizer_class(params, *args, **kwargs)`` for every part; any,
            also those of this package. A mapping of names gives parts optimizers of their own.
        parts: by name: modules (wrapped with FSDP or not), or parameters or groups of them; or a
            list of such, which are then named by their numbers. A part that is None or has no
            parameters lives on other ranks, and is left out here.
        args: further arguments of ``optimizer_class``.
        kwargs: further keywords of it.

    Raises:
        TypeError: for RRefs of torch's RPC, or anything else that is no part.
        ValueError: if this rank has no part, a parameter is in two, or names do not fit.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer] | Mapping[str, Callable[..., Optimizer]],
        parts: Mapping[str, Part] | Iterable[Part],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # Not torch's own __init__: groups and state are those of the parts.
        named = _named(parts)
        classes = _classes(optimizer_class, named)
        params = {name: _params(name, part) for name, part in named.items()}
        _check(params)
        self.optimizers: dict[str, Optimizer] = {
            name: classes[name](own, *args, **kwargs) for name, own in params.items() if own
        }
        self._state = JoinedState(list(self.optimizers.values()))
        self.defaults = next(iter(self.optimizers.values())).defaults

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}: {each!r}" for name, each in self.optimizers.items())
        return f"DistributedOptimizer({parts})"

    @property
    def hooked(self) -> list[Optimizer]:
        """See ``HooksOfOthers``."""
        return list(self.optimizers.values())

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all parts, the very objects, so that schedulers reach them."""
        return [group for each in self.optimizers.values() for group in each.param_groups]

    @property
    def state(self) -> JoinedState:  # type: ignore[override]
        """The state of all parts, by parameter; each entry is the part's own."""
        return self._state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every part.

        Args:
            closure: computes loss and gradients anew; called once, before all steps.

        Returns:
            What the closure returned.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for each in self.optimizers.values():
            each.step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of every part."""
        for each in self.optimizers.values():
            each.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: it does not say to which part.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"a group belongs to one of the parts {list(self.optimizers)}; call "
            f"optimizer.optimizers[name].add_param_group(group)"
        )

    def state_dict(self) -> dict[str, Any]:
        """``{"parts": {name: state dict of the part}}``."""
        return {"parts": {name: each.state_dict() for name, each in self.optimizers.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What ``state_dict`` returned, for the same parts; or one state of all groups in torch's
        form, as checkpoints of a model have it.

        Raises:
            ValueError: if parts or groups are missing or unknown; nothing has been changed then.
        """
        if "parts" not in state_dict and "param_groups" in state_dict:
            state_dict = {"parts": self._split(state_dict)}
        there, here = set(state_dict.get("parts", ())), set(self.optimizers)
        if there != here:
            raise ValueError(
                f"the state has parts {sorted(there)}, this optimizer {sorted(here)}; load each "
                f"part by optimizer.optimizers[name].load_state_dict"
            )
        for name, each in self.optimizers.items():
            each.load_state_dict(state_dict["parts"][name])

    def _split(self, joined: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """A state of all groups, in the order of the parts, by part."""
        groups = list(joined["param_groups"])
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(groups)} parameter groups, the parts of this optimizer have "
                f"{len(self.param_groups)}; create it with the same parts and groups"
            )
        parts = {}
        for name, each in self.optimizers.items():
            own, groups = groups[: len(each.param_groups)], groups[len(each.param_groups) :]
            numbers = [number for group in own for number in group["params"]]
            state = {n: joined["state"][n] for n in numbers if n in joined["state"]}
            parts[name] = {"state": state, "param_groups": own}
        return parts


class JoinedState(MutableMapping[torch.Tensor, Any]):
    """The states of several optimizers as one, which writes through to them.

    Like torch's own, it makes an empty entry for a parameter that is asked for by ``[]``.

    Args:
        optimizers: no parameter is in two of them.
    """

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, param: torch.Tensor) -> Any:
        return self._of(param)[param]

    def __setitem__(self, param: torch.Tensor, entry: Any) -> None:
        self._of(param)[param] = entry

    def __delitem__(self, param: torch.Tensor) -> None:
        del self._of(param)[param]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return chain.from_iterable(each.state for each in self._optimizers)

    def __len__(self) -> int:
        return sum(len(each.state) for each in self._optimizers)

    def __contains__(self, param: object) -> bool:
        return any(param in each.state for each in self._optimizers)

    def get(self, param: torch.Tensor, default: Any = None) -> Any:
        """The entry of ``param``, if there is one."""
        return super().get(param, default) if param in self else default

    def _of(self, param: torch.Tensor) -> MutableMapping[torch.Tensor, Any]:
        for each in self._optimizers:
            if param in each.state:
                return each.state
        for each in self._optimizers:
            if any(param is own for group in each.param_groups for own in group["params"]):
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
    if hasattr(part, "to_here") or not isinstance(part, Iterable):
        raise TypeError(_no_part(name, part))
    params = list(part)
    for each in params:
        if not isinstance(each, torch.Tensor | Mapping | tuple):
            raise TypeError(_no_part(name, each))
    return params


def _no_part(name: str, found: Any) -> str:
    return (
        f"part {name!r} holds a {type(found).__name__}; expected a module, or parameters of this "
        f"rank. Remote references cannot be stepped: RPC workers hold no XLA devices. Call this on "
        f"every rank with the parameters that it has"
    )


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
