"""Find what a new unit manages, and build the unit, for the wrapper class and ``fully_shard``.

Invariants: a parameter shared by several attributes has one shard, even if these are in different
units. Parameters that are not of floating point are not sharded.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from xla_fsdp.distributed.collectives import (
    Collectives,
    Communication,
    broadcast_,
    communication_for,
)
from xla_fsdp.distributed.garbage import collect_garbage
from xla_fsdp.distributed.mesh import EXPERT, Mesh
from xla_fsdp.distributed.packing import ShardPacking, packing_of
from xla_fsdp.distributed.placement import PLACEMENTS, TensorPlacement, known_placement
from xla_fsdp.distributed.pytree import map_tensors
from xla_fsdp.distributed.shard_layout import join_name, layout_of
from xla_fsdp.fsdp.engine.config import FSDPConfig, warn_caller
from xla_fsdp.fsdp.engine.module_state import (
    CastBuffers,
    FSDPModuleBase,
    ModuleState,
    is_fsdp_module,
)
from xla_fsdp.fsdp.engine.param import (
    FSDPParam,
    ModuleAttr,
    OriginalParam,
    known_shard,
    remember,
)
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup
from xla_fsdp.fsdp.engine.shard_tensor import ShardParameter, is_sharded
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.engine.thread import turn_on_if_asked
from xla_fsdp.fsdp.init.peer_values import note_values
from xla_fsdp.nn.embedding_grad import sum_small_in_float32
from xla_fsdp.nn.large_weights import compute_from_shards
from xla_fsdp.optim import guards
from xla_fsdp.wrap import Ignored, has_forward
from xla_fsdp.xla import ops

# ---------------------------------------------------------------- what a unit manages


def check_wrappable(module: nn.Module) -> None:
    """Raise TypeError or ValueError unless ``module`` can become a unit."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"FSDP wraps an nn.Module, got {type(module).__name__}")
    if is_fsdp_module(module):
        raise ValueError(
            "this module is sharded with FSDP already. For nested units, shard the inner modules "
            "first and then the module that holds them"
        )
    if not has_forward(module):
        raise ValueError(
            f"{type(module).__name__} has no forward, so FSDP cannot know when its parameters are "
            f"needed. Wrap the modules that it holds, or the module that calls them"
        )


def subclass_problems(module: nn.Module, ignored: Ignored) -> Iterator[str]:
    """Yield what cannot be sharded: parameters that are tensors of a class with parts of its own,
    as quantized ones of torchao, and ``DTensor``."""
    for name, param in module.named_parameters():
        if is_traceable_wrapper_subclass(param) and param not in ignored.params:
            yield (
                f"{name} is a {type(param).__name__}, a tensor subclass, whose parts (or own "
                f"all-gather) sharding does not know: make it a plain parameter before sharding, "
                f"or leave it as it is by ignored_params"
            )


def refuse_subclasses(modules: Sequence[nn.Module], ignored: Ignored) -> None:
    """Raise ValueError with all ``subclass_problems``."""
    if problems := [each for module in modules for each in subclass_problems(module, ignored)]:
        raise ValueError("\n".join(problems))


class ManagedParam(NamedTuple):
    """A parameter of a module, under one of its names."""

    root: int  # number of the unit's module that has it
    name: str  # in that
    module: nn.Module  # which holds it
    attribute: str  # of the module
    param: nn.Parameter
    placement: TensorPlacement | None  # how tensor parallelism has cut it


class ManagedModules:
    """The modules of a new unit, usually one, and those below them, except for the units inside and
    for ignored modules. Raises ValueError for layers that cannot run on XLA."""

    def __init__(self, roots: Sequence[nn.Module], ignored: Ignored) -> None:
        self.roots = tuple(roots)
        self.ignored = ignored
        self.units: list[FSDPModuleBase] = []
        # Number of the root, name in it with a dot appended, module, placements in that.
        self._named = [
            (number, prefix, module, vars(module).get(PLACEMENTS, {}))
            for number, root in enumerate(self.roots)
            for prefix, module in self._walk(root, "")
        ]
        for _, prefix, layer, _ in self._named:
            if isinstance(layer, nn.SyncBatchNorm):
                raise ValueError(
                    f"{prefix[:-1] or 'the module'} is torch.nn.SyncBatchNorm, which only runs on "
                    f"CUDA. Convert the model before wrapping it: "
                    f"xla_fsdp.SyncBatchNorm.convert_sync_batchnorm(model)"
                )

    def modules(self) -> list[tuple[str, nn.Module]]:
        """Return all modules, each once, with their dotted names; a root is named ``""``."""
        found: dict[nn.Module, str] = {}
        for _, prefix, module, _ in self._named:
            found.setdefault(module, prefix[:-1])
        return [(name, module) for module, name in found.items()]

    def parameters(self) -> list[ManagedParam]:
        """Return every parameter under every name that it has."""
        ignored = self.ignored.params
        return [
            ManagedParam(number, prefix + name, module, name, param, placements.get(name))
            for number, prefix, module, placements in self._named
            for name, param in module._parameters.items()
            if param is not None and not (ignored and param in ignored)
        ]

    @property
    def on_meta(self) -> bool:
        """Whether a parameter or buffer is on the meta device, ignored parameters included."""
        return any(
            tensor is not None and tensor.is_meta
            for _, _, module, _ in self._named
            for tensor in (*module._parameters.values(), *module._buffers.values())
        )

    def tensors(self) -> list[Tensor]:
        """Return the parameters, except ignored ones, and buffers, each once."""
        params = [each.param for each in self.parameters()]
        buffers = [each for _, module in self.modules() for each in module._buffers.values()]
        return list({id(t): t for t in (*params, *buffers) if t is not None}.values())

    def _walk(self, module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        if is_fsdp_module(module):
            self.units.append(module)
            return
        if module in self.ignored.modules:
            return
        yield prefix, module
        for name, child in module._modules.items():
            if child is not None:
                yield from self._walk(child, f"{prefix}{name}.")


# ---------------------------------------------------------------- the unit


def communicate(
    managed: ManagedModules, config: FSDPConfig, collectives: Collectives | None = None
) -> Communication:
    """Return the collectives among the ranks that share a unit, and among replicas;
    ``collectives`` stand in for those that ``config`` asks for. Raises ValueError for a mesh or
    groups that do not fit the job or the parameters."""
    params = managed.parameters()
    experts = _axis_of_experts(params, config)
    communication = communication_for(
        config.mesh,
        config.sharding_groups,
        config.sharding_rank,
        config.sharding_world_size,
        collectives,
        experts,
    )
    if collectives is None:
        _refuse_tensor_parallel_axis(params, config)
    ranks = communication.shards.num_shards
    size = _smaller_group_size(config, ranks)
    if size and experts is not None:
        raise ValueError(
            f"reshard_after_forward is {size}, ranks that keep all parameters of a unit, but "
            f"experts are cut over axis {EXPERT!r}; give True or False"
        )
    if size and ranks % size:
        raise ValueError(
            f"reshard_after_forward is {size}; to keep parameters in groups of so many ranks, "
            f"it must divide the {ranks} ranks that share them"
        )
    return communication


def broadcast_values(managed: ManagedModules, communication: Communication) -> None:
    """Set parameters and buffers to the values of the first rank that has them."""
    values = [each for each in managed.tensors() if not (is_sharded(each) or each.is_meta)]
    for of_experts in (False, True):
        placed = [(each, known_placement(each)) for each in values]
        own = [each for each, at in placed if bool(at and at.is_of_experts) is of_experts]
        broadcast_(own, communication.everyone.of(of_experts), ops.device())


def build_unit(
    managed: ManagedModules,
    config: FSDPConfig,
    communication: Communication,
    *,
    origins: Mapping[int, Tensor] | None = None,
    dims: Mapping[int, int] | None = None,
) -> list[ModuleState]:
    """Shard the managed parameters, move the buffers, and make a unit of them; return the state to
    attach to each of its root modules.

    Args:
        managed, config: the unit's modules and options.
        communication: collectives among the ranks that share the parameters.
        origins: the meta tensors, by the id of the parameter made of each.
        dims: the dim to shard, by the id of a parameter; others are sharded along dim 0, unless
            that has too few rows.
    """
    device = ops.device()
    sharder = _Sharder(managed, config, communication, device, origins or {}, dims or {})
    params = sharder.shard_all()
    cast_buffers = move_buffers(managed, config, device)
    guards.install()
    turn_on_if_asked()
    shards, roots = communication.shards, managed.roots
    size = _smaller_group_size(config, shards.num_shards)
    smaller = shards.split(size) if size else None
    group = FSDPParamGroup(params, shards, config, communication.replicas, smaller)
    unit = FSDPState(group, config, device, len(roots))
    if any(isinstance(each, nn.Embedding) for root in roots for each in root.modules()):
        group.at_unshard.append(sum_small_in_float32)
    if shards.num_shards > 1:
        unit.at_forward.append(compute_from_shards)
    # Set by chunked heads and embeddings; a unit of several modules cannot run in chunks.
    override = getattr(roots[0], "_fsdp_forward_override", None) if len(roots) == 1 else None
    forward_override = None if override is None else override(unit)
    return [
        ModuleState(
            unit,
            communication,
            part,
            {} if part else cast_buffers,
            forward_override=forward_override,
            forward_buffers=_forward_buffers(managed, config),
        )
        for part in range(len(roots))
    ]


_building = threading.RLock()
"""Ranks on CPU are threads. Those that build at once lose the interpreter's lock to each other at
every operation, which takes them twice the time."""


@contextlib.contextmanager
def sharding(
    managed: ManagedModules, config: FSDPConfig, communication: Communication
) -> Iterator[None]:
    """Compute the shards that the block makes when it ends, so that the unsharded parameters of
    ``managed`` on the device are freed; compare these between ranks."""
    params = managed.parameters()
    held = [each.param for each in params if each.param.device.type == "xla"]
    pending = any(ops.is_pending(param) for param in held)
    on_device: list[weakref.ref[Tensor]] = [weakref.ref(param) for param in held]
    # Groups may hold different parts of a model.
    has_peers = communication.covers_all and communication.everyone.num_shards > 1
    # Not where something may wait for other ranks: all is on the host.
    with contextlib.nullcontext() if on_device or managed.on_meta else _building:
        compare = note_values(params, communication) if has_peers else None
        del params, held
        yield
    if config.execute_sharding_on_init:
        # In a reference cycle one would stay alive. Not always: to collect takes half a second.
        if any(ops.referent(each) is not None for each in on_device):
            collect_garbage()
        # What is pending may be of other units, too, and one program computes it. Where nothing is
        # executed, syncs free the memory of shards.
        if pending or not ops.runtime().executes():
            ops.sync()
        elif on_device:  # a sync would look at the tensors of all units
            ops.compute(managed.tensors())
    if compare is not None:
        compare()


def _axis_of_experts(params: Sequence[ManagedParam], config: FSDPConfig) -> Mesh | None:
    """Return the axis over which experts of the unit are cut; None if none are."""
    for _, name, _, _, _, placement in params:
        if placement is None or not placement.is_of_experts:
            continue
        if config.mesh is None or not config.mesh[config.mesh.axis_names[-1]].covers(
            placement.mesh
        ):
            raise ValueError(
                f"{name} is cut over axis {EXPERT!r} of a mesh, over which FSDP shards all that is "
                f"no expert; give it both axes, as in mesh=mesh['shard', 'expert']"
            )
        return placement.mesh
    return None


def _refuse_tensor_parallel_axis(params: Sequence[ManagedParam], config: FSDPConfig) -> None:
    """Raise ValueError if ranks that share a parameter hold different local parts of it."""
    for _, name, _, _, _, placement in params:
        if placement is None or placement.is_of_experts:
            continue
        groups = config.sharding_groups or (
            config.mesh.groups() if config.mesh else [list(range(ops.world_size()))]
        )
        [own] = [group for group in groups if ops.rank() in group]
        if not placement.is_same_on(own):
            raise ValueError(
                f"{name} is parallelized over axis {placement.axis!r} of a mesh, and FSDP over "
                f"ranks {own} would shard it over that axis again; give FSDP the other axes, as in "
                f"mesh=mesh['shard']"
            )


def _smaller_group_size(config: FSDPConfig, num_ranks: int) -> int | None:
    """Return the size of the groups that share larger shards; None if there are none."""
    reshard = config.reshard_after_forward
    return None if isinstance(reshard, bool) or reshard in (1, num_ranks) else reshard


# ---------------------------------------------------------------- shards and buffers


def _warn_about_lost(params: Sequence[tuple[Tensor, OriginalParam]]) -> None:
    """Warn of hooks that would have seen gradients, and of gradients, which the shards do not take
    over."""
    named = [(original.names[0], tensor) for tensor, original in params]
    if hooked := [name for name, t in named if t._backward_hooks or t._post_accumulate_grad_hooks]:
        warn_caller(
            f"hooks on gradients of {', '.join(hooked)} are not called: the parameter was replaced "
            f"by its shard. Register them after sharding; they then see the shard's gradient"
        )
    if with_grad := [name for name, tensor in named if tensor.grad is not None]:
        warn_caller(
            f"gradients of {', '.join(with_grad)} are dropped: the parameter was replaced by its "
            f"shard, which has none. Shard before backward; where they are not wanted, call "
            f"zero_grad() before sharding"
        )


def move_buffers(
    managed: ManagedModules, config: FSDPConfig, device: torch.device
) -> dict[str, torch.dtype]:
    """Move buffers to ``device``; with ``cast_buffers``, cast those of floating point, and return
    the original dtype of each by dotted name.

    Layers with running statistics, such as BatchNorm, compute in the dtype of the statistics, as
    XLA's verifier refuses torch_xla's BatchNorm with inputs of two dtypes. Statistics are cast by
    ``cast_buffers`` with a ``buffer_dtype`` only: 16 bits are too few for an average over many
    steps.
    """
    originals: dict[str, torch.dtype] = {}
    moved: dict[tuple[int, torch.dtype], Tensor] = {}  # so that shared buffers are moved once
    for prefix, owner in managed.modules():
        statistics = _statistics_dtype(owner, config)
        if config.compute_dtype not in (None, statistics) and statistics is not None:
            owner.register_forward_pre_hook(partial(_cast_input, statistics), with_kwargs=True)
            owner.register_forward_hook(partial(_cast_output, config.compute_dtype))
        wanted = statistics
        if wanted is None and config.cast_buffers:
            wanted = config.buffer_dtype or config.compute_dtype
        for name, buffer in owner._buffers.items():
            if buffer is None or buffer.is_meta:  # the user gives meta buffers memory later
                continue
            dtype = wanted if wanted and buffer.is_floating_point() else buffer.dtype
            if dtype != buffer.dtype:
                originals[join_name(prefix, name)] = buffer.dtype
            new = moved.setdefault((id(buffer), dtype), buffer.to(device=device, dtype=dtype))
            owner._buffers[name] = new
    if originals and config.buffer_dtype is None:
        _warn_about_cast(*next(iter(originals.items())), config.compute_dtype)
    return originals


_told_of_cast = threading.Event()  # once for all ranks and units of the process


def _warn_about_cast(name: str, own: torch.dtype, dtype: torch.dtype | None) -> None:
    if not _told_of_cast.is_set():
        _told_of_cast.set()
        warn_caller(
            f"buffer {name} is cast from {own} to {dtype} for good, and so are others, as "
            f"torch_xla's FSDP does without a buffer_dtype: {dtype} has too few bits for rotary "
            f"frequencies, say. buffer_dtype={own} keeps it, and so does "
            f"xla_fsdp.XlaFullyShardedDataParallel"
        )


def _forward_buffers(managed: ManagedModules, config: FSDPConfig) -> CastBuffers | None:
    """Return what casts buffers for each forward; None if nothing does."""
    if config.buffer_dtype is None or config.cast_buffers:
        return None
    owners = [each for _, each in managed.modules() if each._buffers]
    holders = [each for each in owners if _statistics_dtype(each, config) is None]
    return CastBuffers(holders, config.buffer_dtype) if holders else None


def _statistics_dtype(module: nn.Module, config: FSDPConfig) -> torch.dtype | None:
    """Return the dtype in which a layer with running statistics computes; None for others."""
    if isinstance(module, _NormBase) and module.running_mean is not None:
        cast = config.buffer_dtype if config.cast_buffers else None
        return cast or module.running_mean.dtype
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
    """Replaces the parameters of one unit by shards; fields as for ``build_unit``. Flat shards are
    registered in the first root."""

    managed: ManagedModules
    config: FSDPConfig
    communication: Communication
    device: torch.device
    origins: Mapping[int, Tensor]
    dims: Mapping[int, int]

    def shard_all(self) -> list[FSDPParam]:
        """Replace the managed parameters."""
        _move_not_floating(self.managed, self.device)
        found = [(known_shard(tensor), tensor, each) for tensor, each in _originals(self.managed)]
        new = [(tensor, original) for known, tensor, original in found if known is None]
        # Before others are made, which ``known_shard`` would find, too.
        tied = [(known, tensor, each) for known, tensor, each in found if known is not None]
        adopted = [self.adopt(known, tensor, each) for known, tensor, each in tied]
        _warn_about_lost(new)
        if self.config.flatten_parameters:
            groups = self.flat_groups(new)
            made = [self.shard(f"flat_param_{i}", group) for i, group in enumerate(groups)]
        else:
            made = [self.shard(original.names[0], [(each, original)]) for each, original in new]
        return made + adopted

    def shard(self, key: str, parts: Sequence[tuple[Tensor, OriginalParam]]) -> FSDPParam:
        """Make one shard of the parameters in ``parts``, joined end to end if there are several."""
        tensors, originals = [tensor for tensor, _ in parts], [original for _, original in parts]
        by = self._among(originals[0])
        packing, by_rows = self._packing(originals, self.dims.get(id(tensors[0])), by)
        # Only the shard is copied to the device, so that no parameter is unsharded there.
        own = ops.copied_to(packing.cut(tensors, by.rank, by_rows=by_rows), self.device)
        shard = ShardParameter(own, requires_grad=any(tensor.requires_grad for tensor in tensors))
        shard.shard_rank = by.rank
        if len(tensors) == 1:  # attributes that the user has set, for groups of an optimizer say
            vars(shard).update(vars(tensors[0]))
        home = self.managed.roots[0] if self.config.flatten_parameters else None
        dtype, covers_all = self._compute_dtype(originals[0]), self.communication.covers_all
        param = FSDPParam(key, originals, shard, packing, dtype, home, everywhere=covers_all)
        origins = [self.origins[id(each)] for each in tensors if id(each) in self.origins]
        remember(param, [*tensors, shard, *origins])
        return param

    def adopt(self, theirs: FSDPParam, tensor: Tensor, original: OriginalParam) -> FSDPParam:
        """Return a parameter with the shard that another unit has made of the same tensor."""
        dim = self.dims.get(id(tensor), theirs.packing.dim or None)
        layout = self._packing([original], dim, self._among(original))[0].layout
        name = original.names[0]
        if theirs.is_flat or self.config.flatten_parameters:
            raise ValueError(
                f"{name} is tied to a parameter of another FSDP unit, and flatten_parameters=True: "
                f"a flat shard cannot share one of its originals. Put both into one unit, or set "
                f"flatten_parameters=False"
            )
        if theirs.slots.part is not None:
            raise ValueError(
                f"{name} is tied to {theirs.originals[0].names[0]} of a stacked block, and no "
                f"other unit can hold a slice of a stack. Scan the blocks without stacked, or "
                f"untie them"
            )
        if theirs.packing.layout != layout:
            raise ValueError(
                f"{name} is tied to {theirs.originals[0].names[0]} of another FSDP unit, which "
                f"is sharded as {theirs.packing.layout}, not {layout}. Give both units the same "
                f"options"
            )
        return FSDPParam(
            name,
            [original],
            theirs.leaf,
            theirs.packing,
            self._compute_dtype(original),
            slots=theirs.slots,
            everywhere=self.communication.covers_all,
        )

    def flat_groups(
        self, parts: Sequence[tuple[Tensor, OriginalParam]]
    ) -> list[list[tuple[Tensor, OriginalParam]]]:
        """Group the parameters that can share one flat shard, trainable ones first: same dtypes,
        all trainable or all frozen, all sharded by tensor parallelism or none."""
        groups: dict[tuple[bool, str, str, bool], list[tuple[Tensor, OriginalParam]]] = {}
        for part in parts:
            tensor, computes_in = part[0], self._compute_dtype(part[1]) or part[0].dtype
            kind = (not tensor.requires_grad, str(tensor.dtype), str(computes_in), part[1].is_cut)
            groups.setdefault(kind, []).append(part)
        return [groups[key] for key in sorted(groups)]

    def _among(self, original: OriginalParam) -> Collectives:
        """Return communication among the ranks that share a parameter."""
        shards = self.communication.shards
        return shards if original.placement is None else shards.of(original.is_expert)

    def _compute_dtype(self, original: OriginalParam) -> torch.dtype | None:
        statistics = _statistics_dtype(original.owners[0].module, self.config)
        return statistics or self.config.compute_dtype

    def _packing(
        self, originals: Sequence[OriginalParam], asked: int | None, by: Collectives
    ) -> tuple[ShardPacking, bool]:
        """Return how originals are joined and cut, along dim ``asked`` unless that is None, and
        whether shards have the shape of whole rows."""
        shapes = tuple(original.shape for original in originals)
        flat, on_dim_0 = self.config.flatten_parameters, self.config.shard_param_on_dim_0
        layout, by_rows = layout_of(shapes, by.num_shards, asked, flat, on_dim_0)
        return packing_of(shapes, layout, asked or 0), by_rows


def _originals(managed: ManagedModules) -> list[tuple[Tensor, OriginalParam]]:
    """Return the distinct floating-point parameters, in order, with all their names and owners."""
    found: dict[int, list[ManagedParam]] = {}
    for each in managed.parameters():
        if each.param.is_floating_point():
            found.setdefault(id(each.param), []).append(each)
    return [(named[0].param, _original(named)) for named in found.values()]


def _original(named: Sequence[ManagedParam]) -> OriginalParam:
    """Return what is known of a parameter from all of its names."""
    param = named[0].param
    # A parameter that was tied after wrapping is already another unit's shard.
    known = known_shard(param) if isinstance(param, ShardParameter) else None
    owners = dict.fromkeys((each.module, each.attribute) for each in named)
    return OriginalParam(
        tuple(each.name for each in named),
        param.shape if known is None else known.originals[0].shape,
        tuple(ModuleAttr(*owner) for owner in owners),
        tuple(each.root for each in named),
        named[0].placement,
    )


def _move_not_floating(managed: ManagedModules, device: torch.device) -> None:
    """Move the parameters that are not of floating point, and thus not sharded, to ``device``.
    Raises ValueError for what cannot be sharded."""
    moved: dict[int, nn.Parameter] = {}
    for each in managed.parameters():
        name, param = each.name, each.param
        if isinstance(param, ShardParameter) and param.device != device:
            raise ValueError(
                f"{name} is another rank's shard: ranks on a CPU are threads, and share a model "
                f"that is built outside of the function that launch runs. Build it inside"
            )
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
            each.module._parameters[each.attribute] = moved.setdefault(id(param), new)
