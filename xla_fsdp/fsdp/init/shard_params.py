"""Replace a unit's parameters by shards, and move its buffers.

Invariants: a parameter that several attributes share has one shard, also when they lie in different
units. Parameters that are not of floating point stay unsharded on every rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from xla_fsdp.distributed.groups import Communication
from xla_fsdp.distributed.placement import placement_in
from xla_fsdp.distributed.pytree import map_tensors
from xla_fsdp.distributed.shard_layout import LANES, ShardLayout, join_name, shard_multiple
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.config import FSDPConfig
from xla_fsdp.fsdp.engine.param import FSDPParam, ModuleAttr, OriginalParam
from xla_fsdp.fsdp.engine.registry import known_shard, remember
from xla_fsdp.fsdp.engine.shard_parameter import is_sharded, make_shard
from xla_fsdp.fsdp.init.managed import ManagedModules

# Of a tensor's first values: enough to tell apart what different random numbers have filled.
CHECKED_VALUES = 4096


def shard_parameters(
    managed: ManagedModules,
    config: FSDPConfig,
    communication: Communication,
    device: torch.device,
    *,
    origins: Mapping[int, Tensor],
    dims: Mapping[int, int],
) -> list[FSDPParam]:
    """Replace the managed parameters by this rank's shards.

    Args:
        managed: by the new unit.
        config: the unit's options.
        communication: who shares the parameters.
        device: where shards go.
        origins: by the id of a parameter that was made of a meta tensor, that tensor.
        dims: by the id of a parameter, which dim of it to cut, where that is not the first.

    Raises:
        ValueError: if a parameter cannot be trained, or is tied to one in another unit that is
            sharded differently.
    """
    _move_not_floating(managed, device)
    sharder = _Sharder(managed.roots[0], config, communication, device, origins, dims)
    new, adopted = [], []
    # All lookups come first: what is sharded below becomes known, too.
    found = [(known_shard(tensor), tensor, member) for tensor, member in _members(managed)]
    for known, tensor, member in found:
        if known is None:
            new.append((tensor, member))
        else:
            adopted.append(sharder.adopt(cast(FSDPParam, known), tensor, member))
    if config.flatten_parameters:
        made = [sharder.shard(f"flat_param_{i}", part) for i, part in enumerate(sharder.alike(new))]
    else:
        made = [sharder.shard(member.names[0], [(tensor, member)]) for tensor, member in new]
    return made + adopted


def move_buffers(
    managed: ManagedModules, config: FSDPConfig, device: torch.device
) -> dict[str, torch.dtype]:
    """Move buffers to ``device``; cast floating-point ones to the buffer dtype.

    Layers with running statistics, such as BatchNorm, compute in the dtype of these, parameters
    included: XLA's verifier refuses torch_xla's BatchNorm with inputs of two dtypes. Statistics
    keep their own dtype unless there is a ``buffer_dtype``: an average over thousands of steps is
    beyond 16 bits.

    Returns:
        The original dtype of every buffer that was cast, by dotted name.
    """
    originals: dict[str, torch.dtype] = {}
    moved: dict[tuple[int, torch.dtype], Tensor] = {}  # shared buffers stay one
    for prefix, owner in managed.modules():
        statistics = _statistics_dtype(owner, config)
        if config.compute_dtype not in (None, statistics) and statistics is not None:
            owner.register_forward_pre_hook(partial(_cast_input, statistics), with_kwargs=True)
            owner.register_forward_hook(partial(_cast_output, config.compute_dtype))
        wanted = statistics or config.wanted_buffer_dtype
        for name, buffer in owner._buffers.items():
            if buffer is None or buffer.is_meta:  # that gets its memory from the user
                continue
            dtype = wanted if wanted and buffer.is_floating_point() else buffer.dtype
            if dtype != buffer.dtype:
                originals[join_name(prefix, name)] = buffer.dtype
            new = moved.setdefault((id(buffer), dtype), buffer.to(device=device, dtype=dtype))
            owner._buffers[name] = new
    return originals


def _statistics_dtype(module: nn.Module, config: FSDPConfig) -> torch.dtype | None:
    """Return the dtype in which a layer with running statistics computes."""
    if isinstance(module, _NormBase) and module.running_mean is not None:
        return config.buffer_dtype or module.running_mean.dtype
    return None


def _cast_input(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return map_tensors(lambda tensor: tensor.to(dtype), (args, kwargs))


def _cast_output(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], output: Tensor
) -> Tensor:
    return output.to(dtype)


@dataclass(frozen=True)
class _Sharder:
    """Makes shards for one unit; ``home`` registers flat ones."""

    home: nn.Module
    config: FSDPConfig
    communication: Communication
    device: torch.device
    origins: Mapping[int, Tensor]
    dims: Mapping[int, int]

    def shard(self, key: str, parts: Sequence[tuple[Tensor, OriginalParam]]) -> FSDPParam:
        """Make one shard of ``parts`` joined end to end."""
        tensors, members = [tensor for tensor, _ in parts], [member for _, member in parts]
        dim = self.dims.get(id(tensors[0]), 0)
        layout, row_shape = self._layout([member.shape for member in members], dim)
        self._compare_with_peers(tensors, members)
        rank = self.communication.shards.rank
        shard = make_shard(tensors, layout, rank, self.device, row_shape, dim)
        home = self.home if self.config.flatten_parameters else None
        dtype = self._compute_dtype(members[0])
        param = FSDPParam(key, members, shard, layout, dtype, home, dim=dim)
        origins = [self.origins[id(each)] for each in tensors if id(each) in self.origins]
        remember(param, [*tensors, shard, *origins])
        return param

    def adopt(self, theirs: FSDPParam, tensor: Tensor, member: OriginalParam) -> FSDPParam:
        """Share the shard that another unit made of the same parameter."""
        layout, _ = self._layout([member.shape], self.dims.get(id(tensor), theirs.packing.dim))
        name = member.names[0]
        if theirs.is_flat or self.config.flatten_parameters:
            raise ValueError(
                f"{name} is tied to a parameter of another FSDP unit, and flatten_parameters=True: "
                f"a flat shard cannot share one of its members. Put both into one unit, or set "
                f"flatten_parameters=False"
            )
        if theirs.slots.part is not None:
            raise ValueError(
                f"{name} is tied to {theirs.members[0].names[0]} of a stacked block, and no other "
                f"unit can hold a slice of a stack. Scan the blocks without stacked, or untie them"
            )
        if theirs.packing.layout != layout:
            raise ValueError(
                f"{name} is tied to {theirs.members[0].names[0]} of another FSDP unit, which "
                f"is sharded as {theirs.packing.layout}, not {layout}. Give both units the same "
                f"options"
            )
        dtype = self._compute_dtype(member)
        return FSDPParam(
            name, [member], theirs.leaf, layout, dtype, places=theirs.slots, dim=theirs.packing.dim
        )

    def alike(
        self, parts: Sequence[tuple[Tensor, OriginalParam]]
    ) -> list[list[tuple[Tensor, OriginalParam]]]:
        """Group the parts that can share one flat shard, trainable ones first: same dtypes, all
        trainable or all frozen, all cut by tensor parallelism or none."""
        groups: dict[tuple[bool, str, str, bool], list[tuple[Tensor, OriginalParam]]] = {}
        for part in parts:
            tensor, computes_in = part[0], self._compute_dtype(part[1]) or part[0].dtype
            kind = (not tensor.requires_grad, str(tensor.dtype), str(computes_in), part[1].is_cut)
            groups.setdefault(kind, []).append(part)
        return [groups[key] for key in sorted(groups)]

    def _compare_with_peers(
        self, tensors: Sequence[Tensor], members: Sequence[OriginalParam]
    ) -> None:
        # CPU ranks share one random number generator, so a model that every rank seeds and builds
        # for itself differs between them.
        if not self.communication.covers_all:
            return  # groups may hold different parts of a model
        for tensor, member in zip(tensors, members, strict=True):
            if tensor.device.type == "cpu":
                ops.runtime().expect_on_all_ranks(
                    f"sharding of {member.names[0]} with checksum {_checksum(tensor):08x} (equal "
                    f"on all ranks if they seed and build under one_rank_at_a_time())"
                )

    def _compute_dtype(self, member: OriginalParam) -> torch.dtype | None:
        statistics = _statistics_dtype(member.owners[0].module, self.config)
        return statistics or self.config.compute_dtype

    def _layout(self, shapes: Sequence[torch.Size], dim: int) -> tuple[ShardLayout, Sequence[int]]:
        """Return how to cut members of these shapes along ``dim``, and the shape of a row."""
        size = (sum(shape.numel() for shape in shapes),)
        num_shards = self.communication.shards.num_shards
        flat = self.config.flatten_parameters
        by_rows = self.config.shard_param_on_dim_0 and not flat
        row_shape = torch.Size([*shapes[0][:dim], *shapes[0][dim + 1 :]])
        if (by_rows or dim) and len(shapes[0]) > 0 and row_shape.numel() > 0:
            return ShardLayout(size, num_shards, row_shape.numel()), row_shape
        multiple = LANES if flat else shard_multiple(shapes[0], num_shards)
        return ShardLayout(size, num_shards, multiple), ()


def _checksum(tensor: Tensor) -> int:
    head = tensor.detach().reshape(-1)[:CHECKED_VALUES].contiguous()
    return zlib.crc32(head.view(torch.uint8).numpy().tobytes())


def _members(managed: ManagedModules) -> list[tuple[Tensor, OriginalParam]]:
    """Return distinct floating-point parameters with all their names and owners, in order."""
    found: dict[int, tuple[Tensor, list[str], list[int], list[ModuleAttr]]] = {}
    for root, name, module, attribute, param in managed.parameters():
        if param.is_floating_point():
            _, names, roots, owners = found.setdefault(id(param), (param, [], [], []))
            names.append(name)
            roots.append(root)
            if (owner := ModuleAttr(module, attribute)) not in owners:
                owners.append(owner)
    return [
        (
            tensor,
            OriginalParam(
                tuple(names),
                _unsharded_shape(tensor),
                tuple(owners),
                tuple(roots),
                placement_in(owners[0].module, owners[0].attribute),
            ),
        )
        for tensor, names, roots, owners in found.values()
    ]


def _unsharded_shape(tensor: Tensor) -> torch.Size:
    # A parameter that was tied after wrapping is already another unit's shard.
    known = known_shard(tensor) if is_sharded(tensor) else None
    return tensor.shape if known is None else known.members[0].shape


def _move_not_floating(managed: ManagedModules, device: torch.device) -> None:
    """Move parameters that are not of floating point, which stay unsharded."""
    moved: dict[int, nn.Parameter] = {}
    for _, name, owner, attribute, param in list(managed.parameters()):  # all, before any changes
        if param.is_floating_point():
            continue
        if param.requires_grad:
            raise ValueError(
                f"{name} is {param.dtype} and needs a gradient; only floating-point parameters can "
                f"be trained under FSDP. Keep it as two real parameters (torch.view_as_real), "
                f"freeze it, or list it in ignored_params"
            )
        if not param.is_meta:
            new = nn.Parameter(param.detach().to(device), requires_grad=False)
            owner._parameters[attribute] = moved.setdefault(id(param), new)
