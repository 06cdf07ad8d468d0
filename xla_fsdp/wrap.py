"""Which submodules become units of their own, and what a unit ignores.

A policy is called as ``policy(module, recurse, unwrapped_params)``. With ``recurse=True`` it tells
whether to look inside ``module``; with ``recurse=False`` whether to wrap it, given the number of
parameter elements in it that no unit has taken yet. Bind extra arguments of the policies here with
``functools.partial``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn


class Ignored:
    """Parameters and modules that a unit leaves alone.

    An ignored parameter stays unsharded, on the device where the user put it, wherever it is used;
    its gradient is not reduced. Units that a policy makes inside ignore it, too.

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
        self._modules = dict.fromkeys(inner for root in roots for inner in root.modules())
        self._params: dict[Any, None] = dict.fromkeys(own)

    def has_module(self, module: nn.Module) -> bool:
        """Return whether ``module`` is ignored with all that is in it."""
        return module in self._modules

    def has_param(self, param: nn.Parameter) -> bool:
        """Return whether ``param`` is ignored."""
        return param in self._params

    def add(self, param: Any) -> None:
        """Ignore ``param``, which has replaced an ignored one in the model."""
        self._params[param] = None

    def as_keywords(self) -> dict[str, Any]:
        """Return constructor keywords that let units inside ignore the same."""
        states = [*self._modules, *self._params]
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


Policy = Callable[..., bool]


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every submodule that has a forward."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Wrap the submodules for which ``lambda_fn(submodule)`` is true."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    transformer_layer_cls: Collection[type[nn.Module]],
) -> bool:
    """Wrap the instances of the given layer classes."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Iterable[type[nn.Module]] | None = None,
    exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
) -> bool:
    """Wrap a submodule once it holds ``min_num_params`` elements that no unit inside it has.

    Args:
        module: the submodule in question.
        recurse: whether the question is to look inside ``module``, and not to wrap it.
        unwrapped_params: elements in ``module`` not yet taken by a unit.
        min_num_params: the threshold, in elements.
        force_leaf_modules: classes never looked into (default: attention, whose forward uses its
            children's weights directly).
        exclude_wrap_modules: classes never wrapped (default: containers).
    """
    leaves = tuple(force_leaf_modules or (nn.MultiheadAttention,))
    excluded = tuple(exclude_wrap_modules or (nn.ModuleList, nn.ModuleDict))
    if unwrapped_params < min_num_params:
        return False
    return not isinstance(module, leaves if recurse else excluded)


def wrap_children(
    module: nn.Module,
    policy: Policy,
    wrap_fn: Callable[[nn.Module], nn.Module],
    ignored: Ignored | None = None,
) -> int:
    """Replace every descendant of ``module`` that ``policy`` selects by ``wrap_fn(descendant)``.

    Children are decided before their parent. A module that appears twice is wrapped once; a module
    without a forward (``nn.ModuleList``) is never wrapped, nor is any in ``nn.MultiheadAttention``.

    Args:
        module: the root, which is not replaced.
        policy: called as policies of this module are.
        wrap_fn: makes a unit of a module.
        ignored: modules that the policy is not asked about, and parameters that are not counted.

    Returns:
        The number of parameter elements that the new units took.
    """
    return _Walker(policy, wrap_fn, ignored or Ignored()).visit_children(module)


class _Walker:
    def __init__(
        self, policy: Policy, wrap_fn: Callable[[nn.Module], nn.Module], ignored: Ignored
    ) -> None:
        self._policy = policy
        self._wrap_fn = wrap_fn
        self._ignored = ignored
        self._done: dict[nn.Module, nn.Module] = {}  # what each became

    def visit_children(self, module: nn.Module) -> int:
        # Attention computes with its children's weights, without calling the children.
        if isinstance(module, nn.MultiheadAttention):
            return 0
        if not self._policy(module=module, recurse=True, unwrapped_params=self._numel(module)):
            return 0
        taken = 0
        for name, child in list(module._modules.items()):
            if child is None or self._ignored.has_module(child):
                continue
            replacement, numel = self._visit(child)
            if replacement is not child:
                setattr(module, name, replacement)
            taken += numel
        return taken

    def _visit(self, module: nn.Module) -> tuple[nn.Module, int]:
        if module in self._done:
            return self._done[module], 0
        total = self._numel(module)
        taken = self.visit_children(module)
        replacement = module
        if has_forward(module) and self._policy(
            module=module, recurse=False, unwrapped_params=total - taken
        ):
            replacement, taken = self._wrap_fn(module), total
        self._done[module] = replacement
        return replacement, taken

    def _numel(self, module: nn.Module) -> int:
        params = module.parameters()
        return sum(param.numel() for param in params if not self._ignored.has_param(param))


def has_forward(module: nn.Module) -> bool:
    """Return whether calling ``module`` computes something (``nn.ModuleList`` has no forward)."""
    forward = getattr(module, "forward", None)
    # nn.Module's own forward only raises; torch keeps it under this name.
    return getattr(forward, "__name__", "") != "_forward_unimplemented"
