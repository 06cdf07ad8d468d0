"""``parallelize_module``: apply styles to the modules of a model, by name.

Invariants: the complete plan is checked, and all problems are reported, before anything changes.
Local parameters equal slices of the global ones bit for bit; parameters on the meta device stay
there. Tied parameters stay tied.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from xla_fsdp.distributed.collectives import XlaCollectives, broadcast_
from xla_fsdp.distributed.mesh import as_mesh
from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.distributed.placement import (
    TensorPlacement,
    known_placement,
    local_of,
    placement_in,
    remember_local,
    set_placement,
)
from xla_fsdp.distributed.shard_layout import join_name
from xla_fsdp.fsdp.engine.shard_tensor import is_sharded
from xla_fsdp.optim import guards
from xla_fsdp.tensor_parallel.loss_parallel import remember_head
from xla_fsdp.tensor_parallel.parallel_module import (
    AppliedStyle,
    ParallelModule,
    ParallelStyle,
    ParamCut,
    apply_style,
)
from xla_fsdp.tensor_parallel.styles import ColwiseParallel
from xla_fsdp.xla import ops

Module = TypeVar("Module", bound=nn.Module)

Plan = ParallelStyle | Mapping[str, ParallelStyle]


class Site(NamedTuple):
    """A module and the style that the plan has for it."""

    name: str
    module: nn.Module
    style: ParallelStyle

    @property
    def label(self) -> str:
        return self.name or type(self.module).__name__


def parallelize_module(
    module: Module,
    device_mesh: Any = None,
    parallelize_plan: Plan | None = None,
    *,
    src_data_rank: int | None = 0,
) -> Module:
    """Parallelize modules over the ranks along one mesh axis, in place. Call it on every rank,
    before the model is sharded and its optimizer is made.

        mesh = init_mesh((2, 4), ("shard", "tensor"))
        plan = {"layers.*.w1": ColwiseParallel(), "layers.*.w2": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["shard"])

    Parameters are replaced by local ones, this rank's slices, on the same device (host, XLA or
    meta); ``tensor_placement`` tells which slice a parameter is.

    Args:
        module: the model, or one module of it.
        device_mesh: a mesh of one axis, also a ``DeviceMesh`` of ``torch.distributed``.
        parallelize_plan: a style for the module itself, or styles by the names of modules in it,
            where wildcards such as ``*`` match within one level of a name, and ``""`` is the
            module.
        src_data_rank: the rank on the axis whose values are distributed; with None, every rank
            slices its own values, which saves a broadcast if they are equal.

    Returns:
        ``module``.

    Raises:
        TypeError: if something is of a wrong type.
        ValueError: if the mesh has several axes or not this rank, a size is not divisible by the
            number of ranks, a layer does not support its style, or tied parameters are sharded in
            different ways; all problems in one message.
    """
    if device_mesh is None:
        raise ValueError("parallelize_module needs the mesh to parallelize over: mesh['tensor']")
    axis = AxisComm(as_mesh(device_mesh))
    if src_data_rank is not None and src_data_rank not in range(axis.size):
        raise ValueError(
            f"src_data_rank is {src_data_rank!r}; expected None or a place on axis {axis.name!r}, "
            f"from 0 to {axis.size - 1}"
        )
    if parallelize_plan is None:
        warnings.warn("parallelize_module did nothing: it was given no plan", stacklevel=2)
        return module
    sites = _sites(module, parallelize_plan)
    _check(module, sites, axis)
    cuts = [cut for site in sites for cut in site.style.cuts(site.module)]
    _expect_cuts(module, cuts)
    _distribute(cuts, axis, src_data_rank)
    guards.install()
    for site in sites:
        apply_style(site.module, AppliedStyle(site.style, axis, site.label))
        if isinstance(site.style, ColwiseParallel) and site.style.is_for_loss_parallel:
            remember_head(site.module, axis)
    return module


def _sites(module: nn.Module, plan: Any) -> list[Site]:
    """Return the modules that the plan matches, in its order, once for each matching entry."""
    entries = {"": plan} if isinstance(plan, ParallelStyle) else plan
    if not isinstance(entries, Mapping):
        raise TypeError(
            f"parallelize_plan is a {type(plan).__name__}; expected a ParallelStyle, or a dict of "
            f"them by names of modules"
        )
    sites: list[Site] = []
    for pattern, style in entries.items():
        if not isinstance(style, ParallelStyle):
            raise TypeError(
                f"the plan has a {type(style).__name__} for {pattern!r}; expected a ParallelStyle "
                f"of xla_fsdp.tensor_parallel"
            )
        found = {id(inner): Site(name, inner, style) for name, inner in _matching(module, pattern)}
        sites += found.values()
        if not found:
            warnings.warn(
                f"the plan's {pattern!r} names no module of {type(module).__name__}; it was "
                f"passed over",
                stacklevel=3,
            )
    return sites


def _matching(module: nn.Module, pattern: str, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in ``module`` whose names match level by level."""
    if not pattern:
        yield prefix, module
        return
    token, _, rest = pattern.partition(".")
    for name, child in module.named_children():
        if fnmatch(name, token):
            yield from _matching(child, rest, join_name(prefix, name))


def _check(module: nn.Module, sites: Sequence[Site], axis: AxisComm) -> None:
    problems = [
        f"{site.label}: {problem}"
        for site in sites
        for problem in (*site.style.find_problems(site.module), *_forward_problems(site.module))
    ]
    if not problems:
        problems = list(_cut_problems(sites, axis))
    if problems:
        raise ValueError("the plan cannot be carried out: " + "; ".join(dict.fromkeys(problems)))


def _forward_problems(module: nn.Module) -> Iterator[str]:
    # A style wraps the forward of the module's class; an attribute of the instance would bypass it.
    if "forward" in vars(module) and not isinstance(module, ParallelModule):
        yield (
            "has a forward of its own (as of checkpoint_module), around which a style cannot go; "
            "parallelize it first"
        )


def _cut_problems(plan: Sequence[Site], axis: AxisComm) -> Iterator[str]:
    names_by_dim: dict[int, dict[int | None, str]] = defaultdict(dict)  # by id of the parameter
    sites: dict[tuple[int, str], str] = {}
    for name, cut in ((site.name, cut) for site in plan for cut in site.style.cuts(site.module)):
        path = join_name(name, cut.attribute)
        first = sites.setdefault((id(cut.owner), cut.attribute), path)
        if first is not path:
            yield (
                f"{path} is given a style twice, also as {first}: names that match one "
                f"module, or two names of it; give it one style, under one name"
            )
        yield from _param_problems(path, cut, axis)
        names_by_dim[id(cut.param)].setdefault(cut.dim, path)
    for names in names_by_dim.values():
        if len(names) > 1:
            ways = ", ".join(f"{name} along {dim}" for dim, name in names.items())
            yield f"one parameter is to be cut in several ways: {ways}; give its owners one way"


def _expect_cuts(root: nn.Module, cuts: Sequence[ParamCut]) -> None:
    """Let modules that hold a parameter of ``cuts``, and are not in the plan, raise in a forward
    unless a later call has cut it for them, too, or it was tied again."""
    planned = {(id(cut.owner), cut.attribute) for cut in cuts}
    params = {id(cut.param): cut for cut in cuts}
    for prefix, module in root.named_modules():
        for attribute, param in module._parameters.items():
            cut = params.get(id(param))
            if cut and cut.dim is not None and (id(module), attribute) not in planned:
                _ExpectedCut(module, attribute, join_name(prefix, attribute), cut)


class _ExpectedCut:
    """A hook before forwards of a module whose parameter is tied to one that was cut."""

    def __init__(self, module: nn.Module, attribute: str, name: str, cut: ParamCut) -> None:
        self._attribute, self._shape = attribute, cut.param.shape
        self._problem = (
            f"{name} is tied to {cut.attribute} of a {type(cut.owner).__name__} that was "
            f"parallelized, and is not cut itself: they are two parameters now. Give its module a "
            f"style that cuts it the same way, and tie them again if they are to have one"
        )
        self._handle = module.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: Any) -> None:
        param = getattr(module, self._attribute, None)
        # Where it was tied again, it has the shape of a part.
        is_whole = param is not None and param.shape == self._shape
        if is_whole and placement_in(module, self._attribute) is None:
            raise ValueError(self._problem)
        self._handle.remove()


def _param_problems(name: str, cut: ParamCut, axis: AxisComm) -> Iterator[str]:
    param, known = cut.param, placement_in(cut.owner, cut.attribute)
    if known is not None:
        how = "whole on every rank" if known.dim is None else f"along dim {known.dim}"
        yield (
            f"{name} is parallelized already ({how}, over axis {known.axis!r}), and a second style "
            f"would communicate twice; do it once"
        )
        return
    local = local_of(param)
    tied = None if local is None else known_placement(local)
    if tied is not None and tied.dim != cut.dim:
        yield (
            f"{name} is tied to a parameter that was cut along {tied.dim}, and is to be cut along "
            f"{cut.dim}; give its owners one way"
        )
    if is_sharded(param):
        yield f"{name} is sharded by FSDP already; parallelize modules first, then shard them"
    if cut.dim is not None and param.shape[cut.dim] % axis.size:
        size = param.shape[cut.dim]
        yield (
            f"{name} has shape {tuple(param.shape)}, and the {axis.size} ranks of axis "
            f"{axis.name!r} cannot share the {size} of dim {cut.dim} equally; build the model with "
            f"{-(-size // axis.size) * axis.size} (and do not use what is more than {size}), or "
            f"take another number of ranks"
        )


def _distribute(cuts: Sequence[ParamCut], axis: AxisComm, src_data_rank: int | None) -> None:
    for cut in cuts:
        param = cut.param
        placement = TensorPlacement(axis.mesh, cut.dim, tuple(param.shape))
        local = local_of(param)
        if local is None:
            local = _local(param, placement, axis, src_data_rank)
            remember_local(param, local)
        cut.owner._parameters[cut.attribute] = local
        set_placement(cut.owner, cut.attribute, placement)


@torch.no_grad()
def _local(
    param: nn.Parameter, placement: TensorPlacement, axis: AxisComm, source: int | None
) -> nn.Parameter:
    value = param.detach()
    if source is not None and not value.is_meta and axis.size > 1:
        value = value.clone()
        # broadcast_ sends the values of rank 0, so count ranks from the source.
        rank = (axis.local_rank - source) % axis.size
        broadcast_([value], XlaCollectives(axis.groups, rank, axis.size), ops.device())
    value = placement.slice_of(value, axis.local_rank).clone()
    local = nn.Parameter(value, requires_grad=param.requires_grad)
    vars(local).update(vars(param))  # attributes of the user, such as a mark for weight decay
    return local
