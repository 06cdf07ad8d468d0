"""The options of one unit: as one frozen dataclass that checks them, and those that may change."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from xla_fsdp.distributed.mesh import REPLICA, SHARD, Mesh

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class UpstreamOptions:
    """Options of torch_xla's own FSDP, documented in ``XlaFullyShardedDataParallel``."""

    reshard_after_forward: bool | int = True
    flatten_parameters: bool = False
    execute_sharding_on_init: bool = True
    optimization_barrier_in_forward: bool = True
    optimization_barrier_in_backward: bool = True
    sync_on_finalization: bool = False
    disable_reshard_on_root: bool = True
    compute_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    fp32_reduce_scatter: bool = False
    sharding_groups: list[list[int]] | None = None
    sharding_rank: int | None = None
    sharding_world_size: int | None = None
    shard_param_on_dim_0: bool = False
    pin_layout_in_collective_ops: bool = False
    reduce_scatter_bucket_size_mb: float | None = None
    coalesce_all_gather_ops: bool = True


@dataclass(frozen=True)
class FSDPConfig(UpstreamOptions):
    """All options of a unit.

    Args:
        mesh: of one axis, to shard over, or of two: replicas and shards.
        reduce_dtype: of the reduction of gradients; None for the dtype they are computed in.
        output_dtype: to which floating-point outputs are cast; None for no cast.
        cast_buffers: cast buffers for good, as torch_xla's FSDP does: to the buffer dtype, or to
            the compute dtype if there is none. Otherwise they are cast to the buffer dtype for a
            forward, and stored in their own.
        cast_forward_inputs: cast inputs of units inside others to the compute dtype.
        cast_root_forward_inputs: cast inputs of the outermost unit to the compute dtype.

    Raises:
        ValueError: for options that contradict each other or are out of range.
        TypeError: for a dtype that is not a floating-point ``torch.dtype``.
    """

    mesh: Mesh | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_buffers: bool = False
    cast_forward_inputs: bool = True
    cast_root_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("compute_dtype", "buffer_dtype", "reduce_dtype", "output_dtype"):
            if (dtype := getattr(self, name)) not in (None, *FLOAT_DTYPES):
                raise TypeError(f"{name} must be one of {FLOAT_DTYPES} or None, got {dtype!r}")
        if problems := [*self._problems(), *self._problems_of_groups(), *self._problems_of_mesh()]:
            raise ValueError("\n".join(problems))

    def _problems(self) -> Iterator[str]:
        reshard, megabytes = self.reshard_after_forward, self.reduce_scatter_bucket_size_mb
        if not isinstance(reshard, int) or (not isinstance(reshard, bool) and reshard < 1):
            yield (
                f"reshard_after_forward is {reshard!r}; give True, False, or the number of ranks "
                f"in each of the groups that keep the parameters between forward and backward"
            )
        if self.fp32_reduce_scatter and self.reduce_dtype not in (None, torch.float32):
            yield (
                f"fp32_reduce_scatter=True and reduce_dtype={self.reduce_dtype} contradict each "
                f"other; give one"
            )
        if megabytes is not None and megabytes < 0:
            yield (
                f"reduce_scatter_bucket_size_mb is {megabytes}; give 0 for one reduce-scatter per "
                f"parameter, a positive size in MB, or None for one per unit and dtype"
            )

    def _problems_of_groups(self) -> Iterator[str]:
        groups, rank, size = self.sharding_groups, self.sharding_rank, self.sharding_world_size
        if groups is None or rank is None or size is None:
            if (groups, rank, size) != (None, None, None):
                yield (
                    "sharding_groups, sharding_rank and sharding_world_size (the caller's position "
                    "in its group, and the group's size) only have a meaning together; pass all "
                    "of them, or none"
                )
            return
        if any(len(group) != size for group in groups):
            yield (
                f"every group of sharding_groups must have sharding_world_size={size} ranks, got "
                f"{groups}"
            )
        ranks = [each for group in groups for each in group]
        if len(set(ranks)) != len(ranks):
            yield f"a rank appears twice in sharding_groups {groups}"
        if not 0 <= rank < size:
            yield f"sharding_rank {rank} is not in range(sharding_world_size={size})"

    def _problems_of_mesh(self) -> Iterator[str]:
        if self.mesh is None:
            return
        names = self.mesh.axis_names
        if self.sharding_groups is not None:
            yield (
                "both a mesh (or a strategy that makes one) and sharding_groups say who shares "
                "parameters; give one"
            )
        if len(names) > 2:
            yield (
                f"the mesh has axes {', '.join(names)}; give the one to shard over, or two, "
                f"replicas first: mesh['shard'], mesh['replica', 'shard']"
            )
        elif len(names) == 2 and (names[0] == SHARD or names[1] == REPLICA):
            yield (
                f"the mesh has axes {', '.join(names)}; the first one is for replicas, the second "
                f"for shards"
            )

    def as_keywords(self) -> dict[str, Any]:
        """Return the upstream options as keywords of a wrapper's constructor."""
        return {each.name: getattr(self, each.name) for each in fields(UpstreamOptions)}

    def warn_about_ignored(self) -> None:
        """Warn about options that have no effect; once in a process that wraps in many places."""
        if self.pin_layout_in_collective_ops:
            _warn_once(
                "pin_layout_in_collective_ops=True is ignored: pinned, torch_xla turns every "
                "all-gather into an all-reduce with twice the traffic"
            )
        if self.shard_param_on_dim_0 and self.flatten_parameters:
            _warn_once(
                "shard_param_on_dim_0=True is ignored because flatten_parameters=True joins the "
                "parameters into one vector"
            )

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """Dtype of the reduction of gradients; None for the dtype they are computed in."""
        return torch.float32 if self.fp32_reduce_scatter else self.reduce_dtype


@dataclass
class FSDPSettings:
    """Options that may change between steps; ``FSDPConfig`` has the initial ones."""

    reshard_after_forward: bool  # free unsharded parameters between forward and backward
    keeps_larger: bool  # between them, hold shards over smaller groups of ranks
    keeps_on_root: bool  # do not reshard after forward if the unit is a root
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True  # gather the parameters before backward
    sync_gradients: bool = True  # reduce gradients in backward
    is_last_backward: bool = True  # False if more backward passes follow before the optimizer step
    # ``WeakRef``s to units to gather together with this one.
    forward_prefetch: Sequence[Any] = ()
    backward_prefetch: Sequence[Any] = ()
    is_root: bool = True  # whether the unit is inside no other unit
    trains_in_loop: bool = True  # in one that nobody asked for, until a forward was none

    @property
    def reshards_after_forward(self) -> bool:
        """Whether unsharded parameters are freed between forward and backward."""
        return self.reshard_after_forward and not (self.is_root and self.keeps_on_root)

    @property
    def keeps_larger_shards(self) -> bool:
        """Whether backward gathers from larger shards."""
        return self.keeps_larger and self.reshards_after_forward

    @property
    def gathers_in_backward(self) -> bool:
        """Whether backward gathers from the shards."""
        return self.reshards_after_forward and not self.keeps_larger


@functools.cache
def _warn_once(text: str) -> None:
    # Python itself forgets what it has shown wherever filters change, as in torch's own functions.
    warnings.warn(text, stacklevel=1)


def warn_caller(text: str) -> None:
    """Warn at the line of the innermost code that is not this package's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("xla_fsdp."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
