"""``FSDPModule``: the methods that ``fully_shard`` adds to the class of a user's module."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp.fsdp.engine.deferred import take_memory
from xla_fsdp.fsdp.engine.param import WeakRef
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.module_base import ShardedModule

NO_MEANING = (
    "has no meaning on XLA, where one program of a whole step is scheduled by the compiler: there "
    "are no streams, events or communication buffers to choose. It was ignored"
)


class UnshardHandle:
    """The result of ``FSDPModule.unshard(async_op=True)``."""

    def __init__(self, unit: FSDPState) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Let the module hold the unsharded parameters; they are computed with the program that
        uses them, so this does not block."""
        self._unit.unshard()


class FSDPModule(ShardedModule):
    """A module that ``fully_shard`` has sharded in place, with the methods of torch's FSDP2."""

    _fsdp_original: Any  # the class before fully_shard
    _fsdp_methods: frozenset[str]  # names registered by register_fsdp_forward_method

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object of the original class: ``nn.Sequential`` and ``nn.ModuleList`` make new
        containers of their own class for slices, which are no units."""
        return cls._fsdp_original(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle and copy by the original class, as this one cannot be imported."""
        return _remade, (self._fsdp_original, self._fsdp_methods), self.__dict__

    @torch.compiler.disable(recursive=False)  # so that a call from dynamo arrives here
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own ``__call__`` with its parameters gathered.

        Raises:
            RuntimeError: under ``torch.compile``.
        """
        return self._fsdp_run(super().__call__, args, kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        # A pass that raised may have left parameters unsharded; callers expect shards.
        self._fsdp_module_state.unit.schedule.cleanup_failed_passes()
        yield from super().named_modules(memo, prefix, remove_duplicate)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Apply ``fn`` as ``nn.Module`` does; shards on the meta device may get memory by it."""
        self._fsdp_unit.reshard()
        params = self._fsdp_unit.group.params
        waiting = [each for each in params if any(held.is_meta for held in each.owned())]
        result = super()._apply(fn, recurse)
        for param in waiting:
            take_memory(param, has_values=False)
        return result

    def _fsdp_register_method(self, name: str) -> None:
        if name in vars(self):
            vars(self)[name] = functools.partial(_run_attribute, self, vars(self)[name])
            return
        self.__class__ = class_for(self._fsdp_original, self._fsdp_methods | {name})

    # ------------------------------------------------------------ unsharded parameters

    def reshard(self) -> None:
        """Free the unsharded parameters after ``unshard``. Not recursive."""
        self._fsdp_unit.reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module, in their compute dtype. Not recursive.

        The module holds them until its next forward or backward is done, or ``reshard``.

        Args:
            async_op: return a handle; the module holds them after its ``wait()``, or in the next
                forward.
        """
        if not async_op:
            self._fsdp_unit.unshard()
            return None
        self._fsdp_unit.prefetch()
        return UnshardHandle(self._fsdp_unit)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether to free unsharded parameters between forward and backward, from the next
        forward on. Backward gathers them from all ranks that share them, also where
        ``reshard_after_forward`` was a number.

        Raises:
            ValueError: if it is not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward is {reshard_after_forward!r}, not a bool")
        for unit in self._fsdp_own_units(recurse):
            unit.settings.reshard_after_forward = reshard_after_forward
            unit.settings.keeps_on_root = unit.settings.keeps_larger = False

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether to free unsharded parameters after backward; otherwise the next forward needs
        no gather, unless the shards have changed by then."""
        for unit in self._fsdp_own_units(recurse):
            unit.settings.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether to gather before backward. If not, parameters are gathered only if backward
        uses them; that of an embedding does not."""
        self._fsdp_unit.settings.unshard_in_backward = unshard_in_backward

    # ------------------------------------------------------------ gradients

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients: ``no_sync`` as a setting. If not, unsharded
        gradients accumulate on this rank until the first backward that does."""
        for unit in self._fsdp_own_units(recurse):
            unit.settings.sync_gradients = requires_gradient_sync
            unit.group.all_reduces = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward sums gradient shards over the replicas of the mesh. If not, reduce-
        scattered gradients accumulate on this rank until the first backward that does."""
        for unit in self._fsdp_own_units(recurse):
            unit.group.all_reduces = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last one before the gradients are used. If not,
        reductions that it leaves pending are computed before the next backward's first gather."""
        self._fsdp_unit.schedule.is_last = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients over all ranks by ``factor`` instead of their number.

        Raises:
            ValueError: if it is not positive.
        """
        if not factor > 0:
            raise ValueError(f"the gradient divide factor is {factor}; give a positive number")
        self._fsdp_unit.group.reduction.divide_by(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call ``set_gradient_divide_factor``, the newer name of this."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], Tensor | None], *, stream: Any = None
    ) -> None:
        """Call ``hook`` with every reduced gradient shard of this module, after the reduction over
        replicas and before the last division. It changes the tensor in place, or returns a new one.

        Args:
            hook: takes a tensor in the reduce dtype: [n], or [rows, width] of a large matrix.
            stream: ignored with a warning.
        """
        if stream is not None:
            _warn("set_all_reduce_hook(stream=...)")
        self._fsdp_unit.group.reduction.all_reduce_hook = hook

    # ------------------------------------------------------------ order of gathers

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather the parameters of ``modules`` (those that run next) no later than this module's
        own, in forward. By default a gather waits for the inputs of the module before the previous
        one.

        Raises:
            ValueError: if one of them is not sharded.
        """
        self._fsdp_unit.settings.forward_prefetch = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather the parameters of ``modules`` no later than this module's own, in backward.

        Raises:
            ValueError: if one of them is not sharded.
        """
        self._fsdp_unit.settings.backward_prefetch = _units_of(modules)

    # ------------------------------------------------------------ ignored with a warning

    def set_post_optim_event(self, event: Any) -> None:
        """Do nothing but warn: FSDP2's streams have no counterpart in a program of a whole step."""
        _warn("set_post_optim_event")

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Do nothing but warn: reductions are sums in any case."""
        _warn("set_force_sum_reduction_for_comms")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Do nothing but warn: the compiler allocates the buffers of collectives."""
        _warn("set_allocate_memory_from_process_group_for_comm")

    def _set_unshard_async_op(self, async_op: bool) -> None:
        _warn("_set_unshard_async_op")

    def _fsdp_own_units(self, recurse: bool) -> list[FSDPState]:
        return self._fsdp_units() if recurse else [self._fsdp_unit]


@functools.cache
def class_for(original: Any, methods: frozenset[str] = frozenset()) -> type[FSDPModule]:
    """Return the class FSDP<Class> of an original class, the same one for the same arguments.

    Args:
        original: the class before ``fully_shard``.
        methods: names of methods that run with parameters gathered, like the forward.
    """
    namespace: dict[str, Any] = {name: _running(original, name) for name in methods}
    namespace.update(_fsdp_original=original, _fsdp_methods=methods, __module__=original.__module__)
    return type(f"FSDP{original.__name__}", (FSDPModule, original), namespace)


def _running(original: type[nn.Module], name: str) -> Callable[..., Any]:
    method = getattr(original, name)

    @functools.wraps(method)
    def run(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        return self._fsdp_run_alone(functools.partial(method, self), args, kwargs)

    return run


def _run_attribute(
    module: FSDPModule, method: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return module._fsdp_run_alone(method, args, kwargs)


def _remade(original: Any, methods: frozenset[str]) -> Any:
    return object.__new__(class_for(original, methods))


def _units_of(modules: Iterable[nn.Module]) -> list[WeakRef]:
    found = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"a {type(module).__name__} cannot be prefetched: it is not a module that "
                f"fully_shard was applied to"
            )
        found.append(WeakRef(module._fsdp_unit))
    return found


def _warn(what: str) -> None:
    warnings.warn(f"{what} {NO_MEANING}", stacklevel=3)
