"""``XlaFullyShardedDataParallel``: a module wrapper over one unit.

Words: see ``unit`` and ``sharded_param``. Always true: the wrapper does not show in names.
``named_parameters``, ``state_dict`` and messages use the names that the module had before it was
wrapped, at any depth of nesting.
The wrapper translates between ``nn.Module`` and the unit; gathering, freeing and reducing are done
below it. Merging saved shards is done by ``checkpoint``.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from xla_fsdp import xla_ops
from xla_fsdp.collectives import Collectives, LocalCollectives, XlaCollectives
from xla_fsdp.config import FSDPConfig
from xla_fsdp.grad_norm import clip_grads_
from xla_fsdp.meta_init import materialize
from xla_fsdp.names import HiddenChild, join_name
from xla_fsdp.ownership import move_buffers, shard_own_parameters
from xla_fsdp.param_group import ParamGroup
from xla_fsdp.shard_metadata import UnitContent, describe
from xla_fsdp.sharded_param import ShardedParam, is_sharded
from xla_fsdp.summon import SummonOptions, summoned
from xla_fsdp.unit import Unit
from xla_fsdp.wrap import has_forward, wrap_children

_INNER = "_fsdp_wrapped_module"


class XlaFullyShardedDataParallel(nn.Module):
    """Shard a module's parameters, gradients and optimizer state over the ranks.

    Wrap inner modules first (or give ``auto_wrap_policy``), the whole model last; create the
    optimizer afterwards, and call ``optimizer.step()`` itself, not ``xm.optimizer_step``. Each
    wrapped module is one unit: its parameters are gathered before its forward and again before its
    backward, with one all-gather and one reduce-scatter per dtype (and one for each large matrix).
    Gradients are averaged over the ranks. Parameters and buffers move to this rank's XLA device.
    All ranks must hold the same values before wrapping (on CPU ranks that is checked).

    Args:
        module: what to wrap; it must define ``forward``.
        reshard_after_forward: free full parameters after forward and gather them again in
            backward. Without it they live until backward.
        flatten_parameters: join the unit's parameters into one vector (trainable and frozen ones,
            and different dtypes, apart). Optimizers then see that vector, so parameters in it
            cannot be in different optimizer groups.
        execute_sharding_on_init: run the sharding at once, to free the full parameters.
        optimization_barrier_in_forward: tie the unit's gather to its inputs, and fence its outputs.
        optimization_barrier_in_backward: the same for gradients.
        sync_on_finalization: run the graph when a backward pass ends, before the optimizer.
        disable_reshard_on_root: for the outermost unit, whose backward follows at once, act as if
            ``reshard_after_forward`` were False.
        compute_dtype: dtype in which parameters are gathered and used, gradients are computed and
            reduced, and floating-point inputs are cast; None keeps each parameter's own. Shards
            and their gradients keep the parameter's dtype.
        buffer_dtype: dtype of floating-point buffers; None means ``compute_dtype``, except for
            running statistics (BatchNorm), which then keep their own. A layer with such statistics
            computes in their dtype.
        fp32_reduce_scatter: reduce gradients in fp32 whatever the compute dtype.
        sharding_groups: replica groups to shard over (default: one group of all ranks).
        sharding_rank: the caller's position in its group.
        sharding_world_size: the size of a group.
        shard_param_on_dim_0: shard whole rows of dim 0; shards are then [rows, ...].
        pin_layout_in_collective_ops: accepted, and ignored with a warning.
        reduce_scatter_bucket_size_mb: None for one reduce-scatter per unit and dtype, 0 for one
            per parameter, else at most so many MB in one.
        coalesce_all_gather_ops: one all-gather per unit and dtype; False for one per parameter.
        auto_wrap_policy: see ``xla_fsdp.wrap``; selects descendants to become units with the same
            options.
        auto_wrapper_callable: called as ``f(module, **options)`` to wrap what the policy selects
            (default: this class), for example to add ``checkpoint_module``.
        param_init_fn: initializes modules built on the meta device (default: their
            ``reset_parameters``).
        collectives: replaces the communication, for example ``LocalCollectives`` to measure a
            program without it.

    Raises:
        TypeError: if ``module`` is not an ``nn.Module`` or a dtype is not a floating-point one.
        ValueError: if the module is wrapped already or has no forward, or options contradict.
    """

    def __init__(
        self,
        module: nn.Module,
        reshard_after_forward: bool = True,
        flatten_parameters: bool = False,
        execute_sharding_on_init: bool = True,
        optimization_barrier_in_forward: bool = True,
        optimization_barrier_in_backward: bool = True,
        sync_on_finalization: bool = False,
        disable_reshard_on_root: bool = True,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        fp32_reduce_scatter: bool = False,
        sharding_groups: list[list[int]] | None = None,
        sharding_rank: int | None = None,
        sharding_world_size: int | None = None,
        shard_param_on_dim_0: bool = False,
        pin_layout_in_collective_ops: bool = False,
        reduce_scatter_bucket_size_mb: float | None = None,
        coalesce_all_gather_ops: bool = True,
        auto_wrap_policy: Callable[..., bool] | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        *,
        collectives: Collectives | None = None,
    ) -> None:
        _check_wrappable(module)
        super().__init__()
        self._options = FSDPConfig(
            reshard_after_forward=reshard_after_forward,
            flatten_parameters=flatten_parameters,
            execute_sharding_on_init=execute_sharding_on_init,
            optimization_barrier_in_forward=optimization_barrier_in_forward,
            optimization_barrier_in_backward=optimization_barrier_in_backward,
            sync_on_finalization=sync_on_finalization,
            disable_reshard_on_root=disable_reshard_on_root,
            compute_dtype=compute_dtype,
            buffer_dtype=buffer_dtype,
            fp32_reduce_scatter=fp32_reduce_scatter,
            sharding_groups=sharding_groups,
            sharding_rank=sharding_rank,
            sharding_world_size=sharding_world_size,
            shard_param_on_dim_0=shard_param_on_dim_0,
            pin_layout_in_collective_ops=pin_layout_in_collective_ops,
            reduce_scatter_bucket_size_mb=reduce_scatter_bucket_size_mb,
            coalesce_all_gather_ops=coalesce_all_gather_ops,
        )
        if auto_wrap_policy is not None:
            inherited = {"param_init_fn": param_init_fn, "collectives": collectives}
            self._auto_wrap(module, auto_wrap_policy, auto_wrapper_callable, inherited)
        materialize(module, _is_unit, param_init_fn)
        self.xla_device = xla_ops.device()
        self._collectives = collectives or _collectives_for(self._options)
        self.rank, self.world_size = self._collectives.rank, self._collectives.num_shards
        params = shard_own_parameters(
            module,
            _is_unit,
            self._options,
            rank=self.rank,
            num_shards=self.world_size,
            device=self.xla_device,
        )
        self._cast_buffers = move_buffers(module, _is_unit, self._options, self.xla_device)
        self._forward_methods: set[str] = set()
        self._fsdp_wrapped_module = module
        self._unit = Unit(
            ParamGroup(params, self._collectives, self._options), self._options, self.xla_device
        )
        self._join_units_below()
        HiddenChild(_INNER).register_on(self)
        for register in (self.register_state_dict_pre_hook, self.register_load_state_dict_pre_hook):
            register(_close_failed_passes)
        xla_ops.refuse_reduce_gradients_of(is_sharded)
        if execute_sharding_on_init:
            gc.collect()  # full parameters in reference cycles would survive the sync
            xla_ops.sync()

    # ------------------------------------------------------------ use

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, with its parameters gathered."""
        return self._unit.run(self._fsdp_wrapped_module, args, kwargs)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    def __getattr__(self, name: str) -> Any:
        """Attributes that the wrapper lacks are the wrapped module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == _INNER:
                raise
            if name in self.__dict__["_forward_methods"]:
                return partial(self._run_method, name)
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        """Indexing goes to the wrapped module (``nn.Sequential``)."""
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    def __len__(self) -> int:
        """Length of the wrapped module (``nn.Sequential``)."""
        return len(self._fsdp_wrapped_module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        """True, as for any module; ``__len__`` would otherwise decide, and fail for most."""
        return True

    def extra_repr(self) -> str:
        """The options that differ between units."""
        options = self._options
        return (
            f"rank={self.rank}, world_size={self.world_size}, "
            f"compute_dtype={options.compute_dtype}, "
            f"flatten_parameters={options.flatten_parameters}, "
            f"reshard_after_forward={options.reshard_after_forward}"
        )

    def _run_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._unit.run(getattr(self._fsdp_wrapped_module, name), args, kwargs)

    # ------------------------------------------------------------ training

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep full gradients on this rank; the first one outside adds them
        and reduces the sum. Saves traffic, costs the memory of the full gradients."""
        units = [wrapper._unit for wrapper in self._wrappers()]
        before = [unit.sync_gradients for unit in units]
        for unit in units:
            unit.sync_gradients = False
        try:
            yield
        finally:
            for unit, flag in zip(units, before, strict=True):
                unit.sync_gradients = flag

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in ``nn.Module``; gradients kept by ``no_sync`` are dropped as well (which
        ``optimizer.zero_grad()`` cannot do)."""
        super().zero_grad(set_to_none)
        for wrapper in self._wrappers():
            wrapper._unit.drop_kept()

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters that have a gradient."""
        return [param for param in self.parameters() if param.grad is not None]

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        groups: list[list[int]] | None = None,
    ) -> Tensor:
        """Scale all gradients so that their norm, as one vector over all ranks, is at most
        ``max_norm``. Every rank must call it. May be called at any time outside of backward, also
        before the first forward or with no gradients at all (the norm is then 0).

        Args:
            max_norm: the largest norm allowed.
            norm_type: p of the p-norm, or ``float("inf")``.
            groups: replica groups to combine the norm over (default: the sharding groups).

        Returns:
            The norm before clipping, a lazy fp32 scalar on the device.

        Raises:
            ValueError: if ``norm_type`` is not positive.
            RuntimeError: if ``no_sync`` kept gradients that no backward has reduced since.
        """
        if any(wrapper._unit.group.has_kept for wrapper in self._wrappers()):
            raise RuntimeError(
                "clip_grad_norm_ was called while gradients kept by no_sync() are not reduced yet; "
                "run the last backward of the accumulation outside no_sync() first"
            )
        collectives = self._collectives
        if groups is not None:
            collectives = XlaCollectives(groups, self.rank, len(groups[0]))
        grads = [param.grad for param in self.params_with_grad if param.grad is not None]
        return clip_grads_(grads, max_norm, norm_type, collectives, self.xla_device)

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        """Divide gradients by ``pre`` before the sum over ranks and by ``post`` after it (default:
        factors whose product is the number of ranks, so that gradients are averaged).

        Args:
            pre: positive divisor before the reduce-scatter.
            post: positive divisor after it.
            recursive: for the units inside as well.

        Raises:
            ValueError: if a factor is not positive.
        """
        if not (pre > 0 and post > 0):
            raise ValueError(f"gradient divide factors must be positive, got {pre} and {post}")
        for wrapper in self._wrappers() if recursive else [self]:
            wrapper._unit.group.predivide, wrapper._unit.group.postdivide = pre, post

    # ------------------------------------------------------------ names and state

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As in ``nn.Module``; wrapper and wrapped module go by the same name."""
        _close_failed_passes(self)
        memo = set() if memo is None else memo
        if remove_duplicate and self in memo:
            return
        memo.add(self)
        yield prefix, self
        yield from self._fsdp_wrapped_module.named_modules(memo, prefix, remove_duplicate)

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Inside the block, the modules of the units in ``module`` hold full leaf parameters, in
        the shards' dtype and under their original names. Every rank must enter it.

        Args:
            module: a wrapped module, or one that holds wrapped modules.
            recurse: also for units inside units; otherwise only the outermost.
            writeback: cut what the block leaves in the parameters into shards again.
            rank0_only: gather on every rank, but show the result to rank 0 only; not together
                with ``writeback``.
            offload_to_cpu: hold them in host memory; the device then holds one unit's at a time.
            with_grads: full gradients, too.

        Raises:
            ValueError: for ``writeback`` together with ``rank0_only``.
            RuntimeError: inside a forward, a backward or another such block, and if a unit is
                called inside the block.
        """
        options = SummonOptions(writeback, rank0_only, offload_to_cpu, with_grads)
        wrappers = [each for each in module.modules() if _is_unit(each)]
        units = [wrapper._unit for wrapper in wrappers if recurse or wrapper._unit.is_root]
        with summoned(units, options):
            yield

    def get_original_names_and_sharded_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Name and shard of every sharded parameter, with the names from before wrapping."""
        return [(key, param.shard) for key, param in self._sharded_params()]

    def get_shard_metadata(self) -> dict[str, Any]:
        """What is needed to merge this model's shards; save it along with ``state_dict()`` under
        the key ``shard_metadata``. A plain dict, see ``xla_fsdp.checkpoint.format``."""
        units = [
            UnitContent(name, wrapper._unit.group.params, wrapper._cast_buffers)
            for name, wrapper in self._named_wrappers()
        ]
        return describe(units, self.rank, self.world_size).to_dict()

    def _sharded_params(self) -> Iterator[tuple[str, ShardedParam]]:
        for prefix, wrapper in self._named_wrappers():
            for param in wrapper._unit.group.params:
                yield join_name(prefix, param.key), param

    def _named_wrappers(self) -> Iterator[tuple[str, XlaFullyShardedDataParallel]]:
        for name, module in self.named_modules():
            if isinstance(module, XlaFullyShardedDataParallel):
                yield name, module

    def _wrappers(self) -> list[XlaFullyShardedDataParallel]:
        return [wrapper for _, wrapper in self._named_wrappers()]

    # ------------------------------------------------------------ construction

    def _auto_wrap(
        self,
        module: nn.Module,
        policy: Callable[..., bool],
        wrapper: Callable[..., nn.Module] | None,
        inherited: dict[str, Any],
    ) -> None:
        for name, inner in module.named_modules():
            if _is_unit(inner):
                raise ValueError(
                    f"{name} is wrapped with FSDP already; auto_wrap_policy wants a module without "
                    f"FSDP units inside. Wrap by hand or by policy, not both"
                )
        wrap = wrapper or XlaFullyShardedDataParallel
        given = {name: value for name, value in inherited.items() if value is not None}
        options = {**self._options.as_keywords(), **given}
        wrap_children(module, policy, lambda selected: wrap(selected, **options))

    def _join_units_below(self) -> None:
        for wrapper in self._wrappers():
            if wrapper is not self:
                wrapper._unit.join(self._unit)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.method_name(...)`` run like the module's forward: with its parameters gathered,
    and with gradients. For modules that are used by other methods than ``forward`` (``encode``,
    ``generate``). Does nothing if ``module`` is not wrapped, as in torch.

    Raises:
        ValueError: if the wrapped module has no such method.
    """
    if not _is_unit(module):
        return
    if not callable(getattr(module.module, method_name, None)):
        raise ValueError(
            f"{type(module.module).__name__} has no method {method_name!r} to register; give the "
            f"name of a method of the wrapped module"
        )
    module._forward_methods.add(method_name)


def _check_wrappable(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"FSDP wraps an nn.Module, got {type(module).__name__}")
    if _is_unit(module):
        raise ValueError(
            "this module is wrapped with FSDP already. For nested units, wrap the inner modules "
            "first and then the module that holds them"
        )
    if not has_forward(module):
        raise ValueError(
            f"{type(module).__name__} has no forward, so FSDP cannot know when its parameters are "
            f"needed. Wrap the modules that it holds, or the module that calls them"
        )


def _is_unit(module: nn.Module) -> TypeGuard[XlaFullyShardedDataParallel]:
    return isinstance(module, XlaFullyShardedDataParallel)


def _collectives_for(config: FSDPConfig) -> Collectives:
    if config.sharding_groups is not None:
        assert config.sharding_rank is not None  # FSDPConfig has checked both
        assert config.sharding_world_size is not None
        rank, num_shards = config.sharding_rank, config.sharding_world_size
    else:
        rank, num_shards = xla_ops.rank(), xla_ops.world_size()
    if num_shards == 1:
        return LocalCollectives()
    return XlaCollectives(config.sharding_groups, rank, num_shards)


def _close_failed_passes(wrapper: XlaFullyShardedDataParallel, *_: Any) -> None:
    """Whoever looks at parameters must see shards, also after a backward pass that raised."""
    wrapper._unit.backward.abandon()
