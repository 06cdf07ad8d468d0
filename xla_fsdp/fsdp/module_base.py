"""The methods that wrappers and modules sharded by ``fully_shard`` share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from xla_fsdp.checkpoint.format.save_numbers import numbered
from xla_fsdp.comm_hooks import CommHook, Hook
from xla_fsdp.distributed.collectives import XlaCollectives
from xla_fsdp.fsdp.engine.module_state import FSDPModuleBase, outermost_units, units_in
from xla_fsdp.fsdp.engine.stacked_params import slice_of
from xla_fsdp.optim.clip_grad import check_gradients, clip_grads
from xla_fsdp.optim.guards import without_swaps
from xla_fsdp.state.metadata import describe
from xla_fsdp.state.summon import SummonOptions, summoned


class ShardedModule(FSDPModuleBase):
    """A module that runs as a unit. Methods reach the units inside it, too, unless they say no."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        with without_swaps():
            return super()._apply(fn, recurse)

    @contextlib.contextmanager
    def no_sync(self, *, sharded: bool = False) -> Iterator[None]:
        """Accumulate gradients over the backward passes inside, and the first one outside.

        Args:
            sharded: False accumulates unsharded gradients on this rank, which the pass outside
                reduces: no communication inside, but the memory of unsharded gradients. True
                reduces in every pass and accumulates shards.
        """
        units = self._fsdp_units()
        before = [(unit.settings.sync_gradients, unit.settings.is_last_backward) for unit in units]
        for unit in units:
            unit.settings.sync_gradients, unit.settings.is_last_backward = sharded, False
        try:
            yield
        finally:
            for unit, flags in zip(units, before, strict=True):
                unit.settings.sync_gradients, unit.settings.is_last_backward = flags

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, also those of ``no_sync`` that are not reduced yet, which
        ``optimizer.zero_grad()`` cannot reach."""
        for param in self.params_with_grad:
            if set_to_none or param.grad is None:
                param.grad = None
            else:
                param.grad.detach_().zero_()
        for unit in self._fsdp_units():
            unit.group.drop_unreduced()

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters that have a gradient."""
        return [param for param in self._fsdp_parameters() if param.grad is not None]

    def _fsdp_parameters(self) -> list[nn.Parameter]:
        """Return shards and other parameters, also while modules hold unsharded ones."""
        leaves = [leaf for unit in self._fsdp_units() for leaf in unit.group.leaves]
        held = self.parameters()
        others = [param for param in held if isinstance(param, nn.Parameter)]
        return list({id(param): param for param in (*leaves, *others)}.values())

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        groups: list[list[int]] | None = None,
    ) -> Tensor:
        """Scale all gradients so that their norm, as one vector over all ranks, is at most
        ``max_norm``. Every rank must call it, outside of backward; without gradients the norm is 0.

        Args:
            max_norm: the largest norm allowed.
            norm_type: p of the p-norm, or ``float("inf")``.
            groups: replica groups to combine the norm over (default: the sharding groups).

        Returns:
            The norm before clipping, a lazy fp32 scalar on the device.

        Raises:
            ValueError: if ``norm_type`` is not positive.
            RuntimeError: if gradients of ``no_sync`` are not reduced yet, or the model is stepped
                in backward.
        """
        check_gradients([unit.group for unit in self._fsdp_units()], "clip_grad_norm_")
        rank = self._fsdp_unit.group.collectives.rank
        over = None if groups is None else XlaCollectives(groups, rank, len(groups[0]))
        return clip_grads(self._fsdp_parameters(), max_norm, norm_type, over)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every gradient element into [-clip_value, clip_value].

        Args:
            clip_value: the largest magnitude allowed, not negative.

        Raises:
            ValueError: if it is negative or not a number.
            RuntimeError: as ``clip_grad_norm_``.
        """
        check_gradients([unit.group for unit in self._fsdp_units()], "clip_grad_value_")
        if not clip_value >= 0:
            raise ValueError(f"clip_value must not be negative, got {clip_value}")
        if params := self.params_with_grad:  # torch takes no empty list
            nn.utils.clip_grad_value_(params, clip_value, foreach=False)

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Reduce the gradients of all units in this module by ``hook``.

        Hooks that cast to bf16 or fp16 are in ``xla_fsdp.comm_hooks``.

        Args:
            state: passed to the hook; ``DefaultState()`` for the hooks of that module.
            hook: called as ``hook(state, grad, shard)`` with the unsharded gradients of one dtype,
                flat and padded; writes this rank's part of their average to ``shard``, or returns
                it.

        Raises:
            TypeError: if the hook cannot be called.
            ValueError: if a unit has a hook already, or shares its parameters with replicas.
        """
        if not callable(hook):
            raise TypeError(f"a communication hook is a function, got a {type(hook).__name__}")
        groups = [unit.group for unit in self._fsdp_units()]
        if any(group.reduction.comm_hook is not None for group in groups):
            raise ValueError("a communication hook is registered already; there is one for a unit")
        if any(group.replicas.num_shards > 1 for group in groups):
            raise ValueError(
                "a communication hook stands in for the reduce-scatter, but this mesh has "
                "replicas, over which gradients are summed after it; use set_all_reduce_hook"
            )
        if any(param.is_expert for group in groups for param in group.params):
            raise ValueError(
                "a communication hook averages all gradients of a unit over the same ranks, but "
                "those of experts are of others, along an axis of the mesh; leave the hook out"
            )
        for group in groups:
            group.reduction.comm_hook = CommHook(state, hook, group.collectives)

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        """Divide gradients by ``pre`` before the sum over ranks and by ``post`` after it (default:
        factors whose product is the number of ranks, so that gradients are averaged).

        Args:
            pre: positive divisor before the reduce-scatter.
            post: positive divisor after it.
            recursive: also for the units inside this module.

        Raises:
            ValueError: if a factor is not positive.
        """
        if not (pre > 0 and post > 0):
            raise ValueError(f"gradient divide factors must be positive, got {pre} and {post}")
        for unit in self._fsdp_units() if recursive else [self._fsdp_unit]:
            reduction = unit.group.reduction
            reduction.predivide, reduction.postdivide = pre, post

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
        """Hold unsharded parameters inside the block, in the shards' dtype and under their original
        names. Every rank must enter it.

        Args:
            module: a sharded module, or one that holds sharded modules.
            recurse: also for units inside units; otherwise only the outermost in ``module``.
            writeback: write changed values back to the shards when the block ends.
            rank0_only: gather on every rank, but show the result to rank 0 only; not together
                with ``writeback``.
            offload_to_cpu: copy them to host memory, one unit at a time.
            with_grads: show unsharded gradients, too.

        Raises:
            ValueError: for ``writeback`` together with ``rank0_only``.
            RuntimeError: inside a forward, a backward or another such block, and if a unit is
                called inside the block.
        """
        options = SummonOptions(writeback, rank0_only, offload_to_cpu, with_grads)
        units = units_in(module) if recurse else outermost_units(module)
        with summoned(units, options):
            yield

    def get_original_names_and_sharded_parameters(self) -> list[tuple[str, Tensor]]:
        """Return name and shard of every sharded parameter, with the names from before wrapping.

        For stacked blocks these are slices of the stacks that an optimizer steps.
        """
        return [(each.key, slice_of(each.param)) for each in self._fsdp_named_shards()]

    def get_shard_metadata(self) -> dict[str, Any]:
        """Return the metadata that is needed to merge this model's shards.

        Save it along with ``state_dict()`` under the key ``shard_metadata``. With
        ``xla_fsdp.compat`` installed it holds a number that counts the calls of this rank.

        Raises:
            ValueError: if units have different meshes or are sharded along other dims than the
                first, or if tensor parallelism has cut parameters that no unit shards.
        """
        return numbered(describe(self).to_dict())
