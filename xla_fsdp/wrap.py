"""Policies that choose which submodules FSDP wraps, and parameters that it ignores.

A policy is called as ``policy(module, recurse, unwrapped_params)``. With ``recurse=True`` it
returns whether to look inside ``module``, with ``recurse=False`` whether to wrap it;
``unwrapped_params`` is the number of elements of its parameters that are not wrapped yet. Bind
other arguments of the policies below with ``functools.partial``.

Those of ``torch.distributed.fsdp.wrap`` are policies, too: functions to which the number is
``nonwrapped_numel``, and objects (``ModuleWrapPolicy``, ``CustomPolicy``) that choose modules and
their options all at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn


class Ignored:
    """Parameters and modules that FSDP does not manage.

    An ignored parameter is not sharded or moved to another device, and its gradient is not reduced.

    Args:
        modules: modules to ignore, with all their submodules and parameters.
        params: parameters to ignore.
        states: modules or parameters to ignore (as in torch's FSDP).

    Attributes:
        modules: ignored modules and all their submodules; a dict, to be ordered.
        params: ignored parameters; likewise.

    Raises:
        TypeError: if an element is of another type.
        ValueError: if a parameter is sharded already.
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
        self.modules = dict.fromkeys(inner for root in roots for inner in root.modules())
        self.params: dict[Any, None] = dict.fromkeys(own)

    def add(self, param: Any) -> None:
        """Ignore ``param``, too, as it has replaced an ignored parameter in the model."""
        self.params[param] = None

    def as_keywords(self) -> dict[str, Any]:
        """Return keywords of the wrapper with which inner FSDP modules ignore the same."""
        states = [*self.modules, *self.params]
        return {"ignored_states": states} if states else {}


def _of_type(kind: Any, given: Iterable[Any] | None, option: str) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, nn.Module | nn.Parameter):
        raise TypeError(f"{option} is one {type(given).__name__}; put it into a list")
    found = list(given)
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


Policy = Callable[..., Any]
"""Of any kind that the module's docstring names."""


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every submodule that has a forward."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int = 0,
    *,
    lambda_fn: Callable[[nn.Module], bool],
    nonwrapped_numel: int = 0,
) -> bool:
    """Wrap the submodules for which ``lambda_fn(submodule)`` is true."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int = 0,
    *,
    transformer_layer_cls: Collection[type[nn.Module]],
    nonwrapped_numel: int = 0,
) -> bool:
    """Wrap the instances of the given layer classes.

    Raises:
        TypeError: if one of them is no class.
    """
    if wrong := [each for each in transformer_layer_cls if not isinstance(each, type)]:
        raise TypeError(
            f"transformer_layer_cls holds {wrong[0]!r}; give classes of layers, such as {{Block}}"
        )
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int = 0,
    min_num_params: int = int(1e8),
    force_leaf_modules: Iterable[type[nn.Module]] | None = None,
    exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
    *,
    nonwrapped_numel: int = 0,
) -> bool:
    """Wrap a submodule that has at least ``min_num_params`` elements that are not wrapped yet.

    Args:
        module: the submodule.
        recurse: whether to decide about looking inside ``module``, not about wrapping it.
        unwrapped_params: number of elements of its parameters that are not wrapped yet.
        min_num_params: the threshold, in elements.
        force_leaf_modules: classes never looked into (default: attention, whose forward uses its
            children's weights directly).
        exclude_wrap_modules: classes never wrapped (default: containers).
        nonwrapped_numel: torch's name of ``unwrapped_params``, for policies that call this one.
    """
    leaves = tuple(force_leaf_modules or (nn.MultiheadAttention,))
    excluded = tuple(exclude_wrap_modules or (nn.ModuleList, nn.ModuleDict))
    if max(unwrapped_params, nonwrapped_numel) < min_num_params:
        return False
    return not isinstance(module, leaves if recurse else excluded)


def wrap_children(
    module: nn.Module,
    policy: Policy,
    wrap_fn: Callable[..., nn.Module],
    ignored: Ignored | None = None,
) -> int:
    """Replace every descendant of ``module`` that ``policy`` selects by ``wrap_fn(descendant)``.

    The policy is asked about children before their parent. A module that appears twice is wrapped
    once. A module without a forward (``nn.ModuleList``) is never wrapped, nor is any inside
    ``nn.MultiheadAttention``.

    Args:
        module: the root, which is not replaced.
        policy: of any kind that this module's docstring names.
        wrap_fn: wraps a module; keywords are options that the policy has for this one.
        ignored: modules that the policy is not asked about, and parameters that are not counted.

    Returns:
        The number of elements of the parameters that were wrapped.

    Raises:
        TypeError: if ``policy`` is not one.
    """
    ignored = ignored or Ignored()
    return _Walker(_chooser(policy, module, ignored), wrap_fn, ignored).visit_children(module)


_Chooser = Callable[[nn.Module, bool, int], dict[str, Any] | None]
"""Asked as a policy is; returns None for no, and for yes the options of the module."""


def _chooser(policy: Any, root: nn.Module, ignored: Ignored) -> _Chooser:
    if hasattr(policy, "_run_policy"):  # of torch.distributed.fsdp.wrap
        chosen: dict[nn.Module, dict[str, Any]] = policy._run_policy(root, {*ignored.modules}, {})
        return lambda module, recurse, _: {} if recurse else chosen.get(module)
    if not callable(policy):
        raise TypeError(
            f"auto_wrap_policy must be callable, or a policy of torch.distributed.fsdp.wrap, got "
            f"{type(policy).__name__}; see xla_fsdp.wrap"
        )
    # By which keyword it takes the number of elements not wrapped yet.
    is_torchs = "nonwrapped_numel" in inspect.signature(policy).parameters
    name = "nonwrapped_numel" if is_torchs else "unwrapped_params"

    def choose(module: nn.Module, recurse: bool, number: int) -> dict[str, Any] | None:
        return {} if policy(module=module, recurse=recurse, **{name: number}) else None

    return choose


class _Walker:
    def __init__(
        self, choose: _Chooser, wrap_fn: Callable[..., nn.Module], ignored: Ignored
    ) -> None:
        self._choose = choose
        self._wrap_fn = wrap_fn
        self._ignored = ignored
        self._replacements: dict[nn.Module, nn.Module] = {}  # itself for one that is not wrapped

    def visit_children(self, module: nn.Module) -> int:
        # Attention computes with its children's weights, without calling the children.
        if isinstance(module, nn.MultiheadAttention):
            return 0
        if self._choose(module, True, self._numel(module)) is None:
            return 0
        taken = 0
        for name, child in list(module._modules.items()):
            if child is None or child in self._ignored.modules:
                continue
            replacement, numel = self._visit(child)
            if replacement is not child:
                setattr(module, name, replacement)
            taken += numel
        return taken

    def _visit(self, module: nn.Module) -> tuple[nn.Module, int]:
        if module in self._replacements:
            return self._replacements[module], 0
        total = self._numel(module)
        taken = self.visit_children(module)
        replacement = module
        options = self._choose(module, False, total - taken) if has_forward(module) else None
        if options is not None:
            replacement, taken = self._wrap_fn(module, **options), total
        self._replacements[module] = replacement
        return replacement, taken

    def _numel(self, module: nn.Module) -> int:
        params = module.parameters()
        return sum(param.numel() for param in params if param not in self._ignored.params)


def has_forward(module: nn.Module) -> bool:
    """Return whether ``module`` defines a forward (``nn.ModuleList`` does not)."""
    forward = getattr(module, "forward", None)
    # nn.Module's default forward, which raises, has this name.
    return getattr(forward, "__name__", "") != "_forward_unimplemented"
