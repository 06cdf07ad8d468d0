"""What a unit leaves alone: parameters and modules that the user handles.

Words: an *ignored* parameter stays whole, on the device where the user put it, and its gradient is
not reduced; an ignored module is left alone with everything in it.
Always true: a parameter of an ignored module is ignored wherever else it is used, too. What is
ignored by a unit is ignored by the units that its policy makes inside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


class Ignored:
    """The parameters and modules that a unit leaves alone.

    Args:
        modules: modules to ignore with all that is in them.
        params: parameters to ignore.
        states: of either kind (as in torch's FSDP).

    Raises:
        TypeError: if an element is of another type.
        ValueError: if a parameter is a shard of a unit already.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module] | None = None,
        params: Iterable[nn.Parameter] | None = None,
        states: Iterable[nn.Module | nn.Parameter] | None = None,
    ) -> None:
        roots = _of_type(nn.Module, modules, "ignored_modules")
        own = _of_type(nn.Parameter, params, "ignored_params")
        mixed = _of_type((nn.Module, nn.Parameter), states, "ignored_states")
        roots += [each for each in mixed if isinstance(each, nn.Module)]
        own += [each for each in mixed if isinstance(each, nn.Parameter)]
        own += [param for root in roots for param in root.parameters()]
        _refuse_shards(own)
        # The objects themselves are kept, so that their ids stay theirs.
        self._modules = {id(inner): inner for root in roots for inner in root.modules()}
        self._params = {id(param): param for param in own}

    def has_module(self, module: nn.Module) -> bool:
        """Whether ``module`` is left alone with all that is in it."""
        return id(module) in self._modules

    def has_param(self, param: nn.Parameter) -> bool:
        """Whether ``param`` stays as it is."""
        return id(param) in self._params

    def add(self, param: Any) -> None:
        """Ignore ``param``, too: it has replaced an ignored one in the model."""
        self._params[id(param)] = param

    def as_keywords(self) -> dict[str, Any]:
        """The same, as constructor keywords of the units inside; nothing where nothing is."""
        states = [*self._modules.values(), *self._params.values()]
        return {"ignored_states": states} if states else {}


def _of_type(kind: Any, given: Iterable[Any] | None, option: str) -> list[Any]:
    if isinstance(given, nn.Module | nn.Parameter):
        raise TypeError(f"{option} is one {type(given).__name__}; put it into a list")
    found = [] if given is None else list(given)
    for each in found:
        if not isinstance(each, kind):
            raise TypeError(
                f"{option} holds a {type(each).__name__}; give the objects of the model, not their "
                f"names or values"
            )
    return found


def _refuse_shards(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        if getattr(param, "_is_sharded", False):
            raise ValueError(
                f"a parameter to be ignored, of shape {tuple(param.shape)}, is a shard of an FSDP "
                f"unit already. Pass it as ignored to the unit that holds it, before it is wrapped"
            )
