"""``XlaFullyShardedDataParallel``: a module wrapper over one unit, with upstream's interface.

Words: see ``unit`` and ``sharded_param``. Always true: options are checked before anything changes.
Making the unit is ``construction``'s job, names are ``unit_module``'s, what users do with the model
is in ``sharded_module``; gathering, freeing and reducing are done below the unit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from xla_fsdp.distributed.collectives import Collectives
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.fsdp1_options import TorchOptions, translate
from xla_fsdp.fsdp.fsdp1_state_dict_type import StateDictTypes
from xla_fsdp.fsdp.init.build import build_unit, check_wrappable, finish_unit, wrap_by_policy
from xla_fsdp.fsdp.module_base import ShardedModule
from xla_fsdp.fsdp.scan import scan_containers
from xla_fsdp.wrap import Ignored


class XlaFullyShardedDataParallel(ShardedModule, StateDictTypes):
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
            backward. Without it they live until backward. A number of ranks keeps them until
            backward in shards of groups of so many neighbours, among which they are gathered again.
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
        scan_layers: run containers of identical units inside as one loop each (see
            ``scan_blocks``, which has options, to offload activations, say): True for all that hold
            two or more units and nothing else, or names of containers.
        scan_stacked: keep the parameters of these in stacks, one for all blocks (``stacked`` of
            ``scan_blocks``).
        torch_options: ``mesh``, and the options of torch's own FSDP under its names: see
            ``torch_options.TorchOptions``.

    Raises:
        TypeError: if ``module`` is not an ``nn.Module`` or a dtype is not a floating-point one.
        ValueError: if the module is wrapped already or has no forward, options contradict, the
            mesh is not one of this job's ranks, or blocks cannot be scanned.
    """

    def __init__(
        self,
        module: nn.Module,
        reshard_after_forward: bool | int = True,
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
        scan_layers: bool | str | Iterable[str] = False,
        scan_stacked: bool = False,
        **torch_options: Any,
    ) -> None:
        check_wrappable(module)
        upstream = {
            "reshard_after_forward": reshard_after_forward,
            "flatten_parameters": flatten_parameters,
            "execute_sharding_on_init": execute_sharding_on_init,
            "optimization_barrier_in_forward": optimization_barrier_in_forward,
            "optimization_barrier_in_backward": optimization_barrier_in_backward,
            "sync_on_finalization": sync_on_finalization,
            "disable_reshard_on_root": disable_reshard_on_root,
            "compute_dtype": compute_dtype,
            "buffer_dtype": buffer_dtype,
            "fp32_reduce_scatter": fp32_reduce_scatter,
            "sharding_groups": sharding_groups,
            "sharding_rank": sharding_rank,
            "sharding_world_size": sharding_world_size,
            "shard_param_on_dim_0": shard_param_on_dim_0,
            "pin_layout_in_collective_ops": pin_layout_in_collective_ops,
            "reduce_scatter_bucket_size_mb": reduce_scatter_bucket_size_mb,
            "coalesce_all_gather_ops": coalesce_all_gather_ops,
        }
        theirs = TorchOptions(**torch_options)
        options = translate(theirs, upstream)
        ignored = Ignored(ignored_modules, ignored_params, ignored_states)
        if scan_stacked and not scan_layers:
            raise ValueError("scan_stacked says how scan_layers run; give scan_layers=True, too")
        if auto_wrap_policy is None and auto_wrapper_callable is not None:
            warnings.warn("auto_wrapper_callable is ignored without auto_wrap_policy", stacklevel=2)
        with ops.runtime().keep_host_rng():
            if auto_wrap_policy is not None:
                wrapper = auto_wrapper_callable or XlaFullyShardedDataParallel
                given = {
                    "param_init_fn": param_init_fn,
                    "collectives": collectives,
                    "mesh": options.mesh,
                    "mixed_precision": theirs.mixed_precision,
                    "sync_module_states": theirs.sync_module_states or None,
                }
                wrap_by_policy(module, auto_wrap_policy, wrapper, options, ignored, given)
            if scan_layers:
                scan_containers(module, scan_layers, stacked=scan_stacked)
            built = build_unit(
                [module],
                options,
                ignored,
                param_init_fn,
                collectives,
                sync_module_states=theirs.sync_module_states,
            )
            super().__init__(module, built.attachment())
            self.xla_device = built.unit.device
            self.rank = built.communication.shards.rank
            self.world_size = built.communication.shards.num_shards
            finish_unit(options)

    def extra_repr(self) -> str:
        """The options that differ between units."""
        options = self._fsdp_unit.config
        return (
            f"rank={self.rank}, world_size={self.world_size}, "
            f"compute_dtype={options.compute_dtype}, "
            f"flatten_parameters={options.flatten_parameters}, "
            f"reshard_after_forward={options.reshard_after_forward}"
        )
