"""Layers with running statistics, such as BatchNorm, in a unit that computes in another dtype.

Always true: such a layer computes in the dtype of its statistics, parameters included; what goes in
is cast to it, what comes out is cast back. The statistics keep their own dtype unless the user
gives a ``buffer_dtype``: an average over thousands of steps is beyond 16 bits. (A mixture is no
way out: XLA's verifier refuses torch_xla's BatchNorm with inputs of two dtypes.)

Make a unit's parameters into shards, and move its buffers.

Words: see ``members`` and ``sharded_param``. Always true: a parameter that several attributes share
has one shard, also when the attributes lie in different units. Parameters that cannot be sharded
(integer and boolean ones) stay whole on every rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

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


def statistics_dtype(module: nn.Module, config: FSDPConfig) -> torch.dtype | None:
    """What ``module`` computes in if it has running statistics, else None."""
    if isinstance(module, _NormBase) and module.running_mean is not None:
        return config.buffer_dtype or module.running_mean.dtype
    return None


def compute_in(dtype: torch.dtype, outside: torch.dtype, module: nn.Module) -> None:
    """Cast the input of ``module`` to ``dtype``, and its output to ``outside``."""
    module.register_forward_pre_hook(partial(_cast_input, dtype), with_kwargs=True)
    module.register_forward_hook(partial(_cast_output, outside))


def _cast_input(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return map_tensors(lambda tensor: tensor.to(dtype), (args, kwargs))


def _cast_output(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], output: Tensor
) -> Tensor:
    return output.to(dtype)


CHECKED_VALUES = 4096


def shard_own_parameters(
    scope: ManagedModules,
    config: FSDPConfig,
    *,
    communication: Communication,
    device: torch.device,
    origins: Mapping[int, Tensor],
    dims: Mapping[int, int],
) -> list[FSDPParam]:
    """Replace the parameters in ``scope`` by this rank's shards.

    Args:
        scope: what belongs to the unit.
        config: the unit's options.
        communication: who shares the parameters.
        device: where shards go.
        origins: by the id of a parameter that was made of a meta tensor, that tensor.
        dims: by the id of a parameter, which dim of it to cut, where that is not the first.

    Raises:
        ValueError: if a parameter is tied to one in another unit that is sharded differently.
    """
    _move_whole(scope, device)
    members = _members(scope)
    sharder = _Sharder(scope.parts[0], config, communication, device, origins, dims)
    known = {id(tensor): known_shard(tensor) for tensor, _ in members}
    adopted = [
        sharder.adopt(theirs, tensor, member)
        for tensor, member in members
        if (theirs := known[id(tensor)])
    ]
    new = [(tensor, member) for tensor, member in members if known[id(tensor)] is None]
    if config.flatten_parameters:
        made = [sharder.shard(f"flat_param_{i}", part) for i, part in enumerate(sharder.alike(new))]
    else:
        made = [sharder.shard(member.names[0], [(tensor, member)]) for tensor, member in new]
    return made + adopted


def move_buffers(
    scope: ManagedModules, config: FSDPConfig, device: torch.device
) -> dict[str, torch.dtype]:
    """Move the buffers in ``scope`` to ``device``; cast floating-point ones to the buffer dtype, or
    that of the layer's statistics.

    Returns:
        The original dtype of every buffer that was cast, by dotted name.
    """
    cast: dict[str, torch.dtype] = {}
    moved: dict[tuple[int, torch.dtype], Tensor] = {}  # shared buffers stay one
    for prefix, owner in scope.modules():
        statistics = statistics_dtype(owner, config)
        if config.compute_dtype not in (None, statistics) and statistics is not None:
            compute_in(statistics, config.compute_dtype, owner)
        wanted = statistics or config.wanted_buffer_dtype
        for name, buffer in owner._buffers.items():
            if buffer is None or buffer.is_meta:  # that gets its memory from the user
                continue
            dtype = wanted if wanted and buffer.is_floating_point() else buffer.dtype
            if dtype != buffer.dtype:
                cast[join_name(prefix, name)] = buffer.dtype
            new = moved.setdefault((id(buffer), dtype), buffer.to(device=device, dtype=dtype))
            owner._buffers[name] = new
    return cast


class _Sharder:
    """Makes shards for one unit."""

    def __init__(
        self,
        home: nn.Module,
        config: FSDPConfig,
        communication: Communication,
        device: torch.device,
        origins: Mapping[int, Tensor],
        dims: Mapping[int, int],
    ) -> None:
        self._home = home
        self._config = config
        self._rank = communication.shards.rank
        self._num_shards = communication.shards.num_shards
        self._all_alike = communication.covers_all
        self._device = device
        self._origins = origins
        self._dims = dims

    def shard(self, key: str, parts: Sequence[tuple[Tensor, OriginalParam]]) -> FSDPParam:
        """One shard for the joined ``parts``."""
        tensors, members = [tensor for tensor, _ in parts], [member for _, member in parts]
        dim = self._dims.get(id(tensors[0]), 0)
        layout, row_shape = self._layout([member.shape for member in members], dim)
        self._compare_with_peers(tensors, members)
        shard = make_shard(tensors, layout, self._rank, self._device, row_shape, dim)
        home = self._home if self._config.flatten_parameters else None
        dtype = self._compute_dtype(members[0])
        param = FSDPParam(key, members, shard, layout, dtype, home, dim=dim)
        remember(param, [*tensors, shard, *self._meta_origins(tensors)])
        return param

    def adopt(self, theirs: FSDPParam, tensor: Tensor, member: OriginalParam) -> FSDPParam:
        """Share the shard that another unit made of the same parameter."""
        layout, _ = self._layout([member.shape], self._dims.get(id(tensor), theirs.packing.dim))
        name = member.names[0]
        if theirs.is_flat or self._config.flatten_parameters:
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
        """Parts that can share one flat shard: same dtypes, all trainable or all frozen, all cut by
        tensor parallelism or none.

        Trainable ones come first.
        """
        groups: dict[tuple[bool, str, str, bool], list[tuple[Tensor, OriginalParam]]] = {}
        for part in parts:
            tensor, computes_in = part[0], self._compute_dtype(part[1]) or part[0].dtype
            kind = (not tensor.requires_grad, str(tensor.dtype), str(computes_in), part[1].is_cut)
            groups.setdefault(kind, []).append(part)
        return [groups[key] for key in sorted(groups)]

    def _meta_origins(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self._origins[id(tensor)] for tensor in tensors if id(tensor) in self._origins]

    def _compare_with_peers(
        self, tensors: Sequence[Tensor], members: Sequence[OriginalParam]
    ) -> None:
        """CPU ranks share one random number generator, and a model that every rank seeds and builds
        for itself then differs between them."""
        if not self._all_alike:
            return  # groups may hold different parts of a model
        for tensor, member in zip(tensors, members, strict=True):
            if tensor.device.type == "cpu":
                ops.runtime().expect_on_all_ranks(
                    f"sharding of {member.names[0]} with checksum {_checksum(tensor):08x} (equal "
                    f"on all ranks if they seed and build under one_rank_at_a_time())"
                )

    def _compute_dtype(self, member: OriginalParam) -> torch.dtype | None:
        own = statistics_dtype(member.owners[0].module, self._config)
        return own or self._config.compute_dtype

    def _layout(self, shapes: Sequence[torch.Size], dim: int) -> tuple[ShardLayout, Sequence[int]]:
        """How to cut members of these shapes along ``dim``, and the shape of a row."""
        size = (sum(shape.numel() for shape in shapes),)
        by_rows = self._config.shard_param_on_dim_0 and not self._config.flatten_parameters
        row_shape = torch.Size([*shapes[0][:dim], *shapes[0][dim + 1 :]])
        if (by_rows or dim) and len(shapes[0]) > 0 and row_shape.numel() > 0:
            return ShardLayout(size, self._num_shards, row_shape.numel()), row_shape
        flat = self._config.flatten_parameters
        multiple = LANES if flat else shard_multiple(shapes[0], self._num_shards)
        return ShardLayout(size, self._num_shards, multiple), ()


def _checksum(tensor: Tensor) -> int:
    """Of the first values: enough to tell apart what different random numbers have filled."""
    head = tensor.detach().reshape(-1)[:CHECKED_VALUES].contiguous()
    return zlib.crc32(head.view(torch.uint8).numpy().tobytes())


def _members(scope: ManagedModules) -> list[tuple[Tensor, OriginalParam]]:
    """Distinct floating-point parameters with all their names and owners, in order."""
    places: dict[int, tuple[Tensor, list[str], list[int], list[ModuleAttr]]] = {}
    for part, name, owner, attribute, param in scope.parameters():
        if param.is_floating_point():
            _, names, parts, owners = places.setdefault(id(param), (param, [], [], []))
            names.append(name)
            parts.append(part)
            if ModuleAttr(owner, attribute) not in owners:
                owners.append(ModuleAttr(owner, attribute))
    return [
        (tensor, _member(tensor, names, parts, owners))
        for tensor, names, parts, owners in places.values()
    ]


def _member(
    tensor: Tensor, names: Sequence[str], parts: Sequence[int], owners: Sequence[ModuleAttr]
) -> OriginalParam:
    placement = placement_in(owners[0].module, owners[0].attribute)
    return OriginalParam(tuple(names), _full_shape(tensor), tuple(owners), tuple(parts), placement)


def _full_shape(tensor: Tensor) -> torch.Size:
    """A parameter that was tied after wrapping is already another unit's shard."""
    known = known_shard(tensor) if is_sharded(tensor) else None
    return known.members[0].shape if known is not None else tensor.shape


def _move_whole(scope: ManagedModules, device: torch.device) -> None:
    moved: dict[int, nn.Parameter] = {}
    for _, name, owner, attribute, param in list(scope.parameters()):  # all, before any is replaced
        if param.is_floating_point():
            continue
        if param.requires_grad:
            raise ValueError(
                f"{name} is {param.dtype} and needs a gradient; only floating-point parameters can "
                f"be trained under FSDP. Keep it as two real parameters (torch.view_as_real), "
                f"freeze it, or list it in ignored_params"
            )
        if param.is_meta:
            continue
        new = moved.setdefault(
            id(param), nn.Parameter(param.detach().to(device), requires_grad=False)
        )
        owner._parameters[attribute] = new
