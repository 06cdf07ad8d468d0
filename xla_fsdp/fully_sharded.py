"""``XlaFullyShardedDataParallel``: a module wrapper over one unit, with upstream's interface.

Words: see ``unit`` and ``sharded_param``. Always true: methods that concern parameters reach all
units inside the wrapped module, too.
Talks to users, and delegates: making the unit is ``construction``'s job, names are
``unit_module``'s, gathering, freeing and reducing are done below the unit. Merging saved shards is
done by ``checkpoint``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp import xla_ops
from xla_fsdp.collectives import Collectives, XlaCollectives
from xla_fsdp.config import FSDPConfig
from xla_fsdp.construction import build_unit, check_wrappable, finish_unit, wrap_by_policy
from xla_fsdp.grad_clip import Slices, clip_grads_by_norm_, clip_grads_by_value_
from xla_fsdp.ignored import Ignored
from xla_fsdp.names import join_name
from xla_fsdp.shard_metadata import UnitContent, describe
from xla_fsdp.sharded_param import ShardedParam, is_sharded
from xla_fsdp.summon import SummonOptions, summoned
from xla_fsdp.unit import Unit
from xla_fsdp.unit_module import UnitModule, named_units


class XlaFullyShardedDataParallel(UnitModule):
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
        ignored_modules: modules to leave alone, with all that is in them: not sharded, not moved
            to the device, gradients not reduced. Units inside ignore them, too.
        ignored_params: parameters to leave alone in the same way.
        ignored_states: modules or parameters; another spelling of the two above.

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
        ignored_modules: Iterable[nn.Module] | None = None,
        ignored_params: Iterable[nn.Parameter] | None = None,
        ignored_states: Iterable[nn.Module | nn.Parameter] | None = None,
    ) -> None:
        check_wrappable(module)
        options = FSDPConfig(
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
        ignored = Ignored(ignored_modules, ignored_params, ignored_states)
        if auto_wrap_policy is None and auto_wrapper_callable is not None:
            warnings.warn("auto_wrapper_callable is ignored without auto_wrap_policy", stacklevel=2)
        with xla_ops.own_random_numbers():
            if auto_wrap_policy is not None:
                wrapper = auto_wrapper_callable or XlaFullyShardedDataParallel
                given = {"param_init_fn": param_init_fn, "collectives": collectives}
                wrap_by_policy(module, auto_wrap_policy, wrapper, options, ignored, given)
            built = build_unit(module, options, ignored, param_init_fn, collectives)
            super().__init__(module, built.unit, built.cast_buffers)
            self.xla_device = built.unit.device
            self.rank, self.world_size = built.collectives.rank, built.collectives.num_shards
            self._options = options
            self._collectives = built.collectives
            finish_unit(options)

    def extra_repr(self) -> str:
        """The options that differ between units."""
        options = self._options
        return (
            f"rank={self.rank}, world_size={self.world_size}, "
            f"compute_dtype={options.compute_dtype}, "
            f"flatten_parameters={options.flatten_parameters}, "
            f"reshard_after_forward={options.reshard_after_forward}"
        )

    # ------------------------------------------------------------ training

    @contextlib.contextmanager
    def no_sync(self, *, sharded: bool = False) -> Iterator[None]:
        """Accumulate gradients over the backward passes inside, and the first one outside.

        Args:
            sharded: False keeps full gradients on this rank, which that last pass adds and reduces
                in one: no traffic inside, at the cost of the memory of the full gradients. True
                reduces in every pass and adds shards, as without ``no_sync``: the traffic of every
                pass, and no memory beyond the shards. Loops that always use ``no_sync`` (those of
                integrations) choose between the two here.
        """
        units = self._units()
        before = [(unit.sync_gradients, unit.is_last_backward) for unit in units]
        for unit in units:
            unit.sync_gradients, unit.is_last_backward = sharded, False
        try:
            yield
        finally:
            for unit, flags in zip(units, before, strict=True):
                unit.sync_gradients, unit.is_last_backward = flags

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in ``nn.Module``; gradients kept by ``no_sync`` are dropped as well (which
        ``optimizer.zero_grad()`` cannot do)."""
        super().zero_grad(set_to_none)
        for unit in self._units():
            unit.drop_kept()

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
            RuntimeError: if ``no_sync`` kept gradients that no backward has reduced since, or the
                model is stepped in backward.
        """
        self._check_gradients("clip_grad_norm_")
        over = None if groups is None else XlaCollectives(groups, self.rank, len(groups[0]))
        whole = [param.grad for param in self.params_with_grad if not is_sharded(param)]
        return clip_grads_by_norm_(
            self._slices(over),
            [grad for grad in whole if grad is not None],
            max_norm,
            norm_type,
            self.xla_device,
        )

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every gradient element into [-clip_value, clip_value].

        Args:
            clip_value: the largest magnitude allowed, not negative.

        Raises:
            ValueError: if it is negative or not a number.
            RuntimeError: if ``no_sync`` kept gradients that no backward has reduced since, or the
                model is stepped in backward.
        """
        self._check_gradients("clip_grad_value_")
        clip_grads_by_value_(self.params_with_grad, clip_value)

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
        for unit in self._units() if recursive else [self._unit]:
            unit.group.predivide, unit.group.postdivide = pre, post

    # ------------------------------------------------------------ state

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
        all_units = [wrapper._unit for _, wrapper in named_units(module)]
        units = [unit for unit in all_units if recurse or unit.is_root]
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
            for name, wrapper in named_units(self, remove_duplicate=False)
        ]
        groups = self._options.sharding_groups
        if self._options.sharding_world_size != self.world_size:
            groups = None  # other collectives were passed
        return describe(units, self.rank, self.world_size, groups).to_dict()

    def _sharded_params(self) -> Iterator[tuple[str, ShardedParam]]:
        for prefix, wrapper in self._named_wrappers():
            for param in wrapper._unit.group.params:
                yield join_name(prefix, param.key), param

    def _named_wrappers(self) -> Iterator[tuple[str, XlaFullyShardedDataParallel]]:
        for name, module in named_units(self):
            if isinstance(module, XlaFullyShardedDataParallel):
                yield name, module

    def _units(self) -> list[Unit]:
        return [wrapper._unit for _, wrapper in named_units(self)]

    def _slices(self, over: Collectives | None) -> list[Slices]:
        """Gradients of all units, those that are shared by the same ranks together."""
        grads: dict[Any, list[Tensor]] = {}
        collectives: dict[Any, Collectives] = {}
        seen: set[int] = set()  # a shard that is tied across units counts once
        for unit in self._units():
            by = over or unit.group.collectives
            key = by.key
            collectives.setdefault(key, by)
            for shard in unit.group.shards:
                if shard.grad is not None and id(shard) not in seen:
                    grads.setdefault(key, []).append(shard.grad)
                seen.add(id(shard))
        return [Slices(grads.get(key, []), by) for key, by in collectives.items()]

    def _check_gradients(self, method: str) -> None:
        if any(unit.steps_in_backward for unit in self._units()):
            raise RuntimeError(
                f"{method} was called on a model that is stepped in backward: its gradients are "
                f"gone by now. Do without, or step after backward (remove() of what "
                f"step_in_backward returned)"
            )
        if any(unit.group.has_kept for unit in self._units()):
            raise RuntimeError(
                f"{method} was called while gradients kept by no_sync() are not reduced yet; run "
                f"the last backward of the accumulation outside no_sync() first"
            )
