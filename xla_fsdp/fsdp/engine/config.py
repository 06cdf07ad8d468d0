"""The options of one unit, as one frozen object that is validated when it is made.

Words: *compute dtype* is what full parameters are gathered and used in; *reduce dtype* is what
gradients are reduce-scattered in; *buffer dtype* is what floating-point buffers are kept in; the
*upstream* options are those of ``torch_xla.distributed.fsdp``, the first ones here.
Always true: a config that exists is consistent, and it never changes afterwards.
Names and order of the upstream options are those of the constructor of
``XlaFullyShardedDataParallel``, so that they can be handed to any wrapper callable as keywords.
The others are said in other words there (``mixed_precision``) and translated by ``torch_options``.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any

import torch

from xla_fsdp.distributed.mesh import REPLICA, SHARD, Mesh

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FSDPConfig:
    """See ``XlaFullyShardedDataParallel`` for what each option does.

    Raises:
        ValueError: for options that contradict each other or are out of range.
        TypeError: for a dtype that is not a floating-point ``torch.dtype``.
    """

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
    # Beyond upstream's. The mesh has one axis, to shard over, or two: replicas and shards.
    mesh: Mesh | None = None
    reduce_dtype: torch.dtype | None = None  # None: fp32, or the gradient's own
    output_dtype: torch.dtype | None = None  # None: as computed
    cast_buffers: bool = True  # to the compute dtype, where no buffer dtype is given
    cast_forward_inputs: bool = True  # of units inside others
    cast_root_forward_inputs: bool = True

    def __post_init__(self) -> None:
        _check_reshard(self.reshard_after_forward)
        _check_dtype("compute_dtype", self.compute_dtype)
        _check_dtype("buffer_dtype", self.buffer_dtype)
        _check_dtype("reduce_dtype", self.reduce_dtype)
        _check_dtype("output_dtype", self.output_dtype)
        _check_reduction(self.reduce_dtype, fp32=self.fp32_reduce_scatter)
        _check_bucket(self.reduce_scatter_bucket_size_mb)
        _check_groups(self.sharding_groups, self.sharding_rank, self.sharding_world_size)
        _check_mesh(self.mesh, self.sharding_groups)
        _warn_about_ignored(self)

    @property
    def frees_after_forward(self) -> bool:
        """Whether full parameters are freed after forward; in groups of one rank they are not."""
        return self.reshard_after_forward is True or self.reshard_after_forward > 1

    def as_keywords(self) -> dict[str, Any]:
        """The upstream options as constructor keywords, by reference (nothing is copied)."""
        names = [field.name for field in fields(self)]
        return {name: getattr(self, name) for name in names[: names.index("mesh")]}

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """What gradients are reduced in; None for the dtype that they are computed in."""
        return torch.float32 if self.fp32_reduce_scatter else self.reduce_dtype

    @property
    def wanted_buffer_dtype(self) -> torch.dtype | None:
        """What floating-point buffers are cast to; None for no cast."""
        return self.buffer_dtype or (self.compute_dtype if self.cast_buffers else None)

    def input_dtype(self, *, of_root: bool) -> torch.dtype | None:
        """What floating-point inputs of a unit are cast to; None for no cast."""
        casts = self.cast_root_forward_inputs if of_root else self.cast_forward_inputs
        return self.compute_dtype if casts else None


def _check_reshard(reshard: object) -> None:
    if not isinstance(reshard, int) or (not isinstance(reshard, bool) and reshard < 1):
        raise ValueError(
            f"reshard_after_forward is {reshard!r}; give True, False, or the number of ranks in "
            f"each of the groups that keep the parameters between forward and backward"
        )


def _check_dtype(name: str, dtype: object) -> None:
    if dtype is not None and dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be one of {FLOAT_DTYPES} or None, got {dtype!r}")


def _check_reduction(dtype: torch.dtype | None, *, fp32: bool) -> None:
    if fp32 and dtype not in (None, torch.float32):
        raise ValueError(
            f"fp32_reduce_scatter=True and reduce_dtype={dtype} contradict each other; give one"
        )


def _check_bucket(size_mb: float | None) -> None:
    if size_mb is not None and size_mb < 0:
        raise ValueError(
            f"reduce_scatter_bucket_size_mb is {size_mb}; give 0 for one reduce-scatter per "
            f"parameter, a positive size in MB, or None for one per unit and dtype"
        )


def _check_groups(groups: list[list[int]] | None, rank: int | None, world_size: int | None) -> None:
    if groups is None:
        if rank is not None or world_size is not None:
            raise ValueError(
                "sharding_rank and sharding_world_size only have a meaning together with "
                "sharding_groups; pass sharding_groups too, or neither"
            )
        return
    if rank is None or world_size is None:
        raise ValueError(
            "sharding_groups needs sharding_rank and sharding_world_size: the caller's position "
            "in its group and the group's size"
        )
    if any(len(group) != world_size for group in groups):
        raise ValueError(
            f"every group of sharding_groups must have sharding_world_size={world_size} ranks, "
            f"got {groups}"
        )
    members = [member for group in groups for member in group]
    if len(set(members)) != len(members):
        raise ValueError(f"a rank appears twice in sharding_groups {groups}")
    if not 0 <= rank < world_size:
        raise ValueError(f"sharding_rank {rank} is not in range(sharding_world_size={world_size})")


def _check_mesh(mesh: Mesh | None, groups: list[list[int]] | None) -> None:
    if mesh is None:
        return
    if groups is not None:
        raise ValueError("both a mesh and sharding_groups say who shares parameters; give one")
    if mesh.ndim > 2:
        raise ValueError(
            f"the mesh has axes {', '.join(mesh.axis_names)}; give the one to shard over, or two, "
            f"replicas first: mesh['shard'], mesh['replica', 'shard']"
        )
    if mesh.ndim == 2 and (mesh.axis_names[0] == SHARD or mesh.axis_names[1] == REPLICA):
        raise ValueError(
            f"the mesh has axes {', '.join(mesh.axis_names)}; the first one is for replicas, the "
            f"second for shards"
        )


def _warn_about_ignored(config: FSDPConfig) -> None:
    # The level is that of who calls the wrapper, from where options come by ``torch_options``.
    if config.pin_layout_in_collective_ops:
        warnings.warn(
            "pin_layout_in_collective_ops=True is ignored: pinned, torch_xla turns every "
            "all-gather into an all-reduce with twice the traffic",
            stacklevel=6,
        )
    if config.shard_param_on_dim_0 and config.flatten_parameters:
        warnings.warn(
            "shard_param_on_dim_0=True is ignored because flatten_parameters=True joins the "
            "parameters into one vector",
            stacklevel=6,
        )
