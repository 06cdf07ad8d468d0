"""``parallelize_module``: give the modules of a model their styles, by name.

Invariants: all modules of a plan are checked, and all problems reported, before anything changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple, TypeVar

from torch import nn

from xla_fsdp.distributed.mesh import as_mesh
from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.distributed.shard_layout import join_name
from xla_fsdp.fsdp.engine import guards
from xla_fsdp.tensor_parallel.distribute import distribute_params, find_cut_problems
from xla_fsdp.tensor_parallel.loss_parallel import remember_head
from xla_fsdp.tensor_parallel.parallel_module import (
    AppliedStyle,
    ParallelModule,
    ParallelStyle,
    apply_style,
)
from xla_fsdp.tensor_parallel.styles import ColwiseParallel

Module = TypeVar("Module", bound=nn.Module)

Plan = ParallelStyle | Mapping[str, ParallelStyle]


class Site(NamedTuple):
    """A module that a plan gives a style."""

    name: str
    module: nn.Module
    style: ParallelStyle

    @property
    def label(self) -> str:
        """The module in messages."""
        return self.name or type(self.module).__name__


def parallelize_module(
    module: Module,
    device_mesh: Any = None,
    parallelize_plan: Plan | None = None,
    *,
    src_data_rank: int | None = 0,
) -> Module:
    """Parallelize a model, or parts of it, over the ranks along one axis of a mesh, in place. Every
    rank calls it, before the model is sharded and before its optimizer is made.

        mesh = init_mesh((2, 4), ("shard", "tensor"))
        plan = {"layers.*.w1": ColwiseParallel(), "layers.*.w2": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["shard"])

    Parameters become ordinary ones that hold this rank's slice, where they were (host, device or
    meta); ``tensor_placement`` tells which slice it is.

    Args:
        module: the model, or one module of it.
        device_mesh: of one axis; a ``torch.distributed`` DeviceMesh is understood, too.
        parallelize_plan: a style for the module itself, or styles by the names of modules in it,
            where ``*`` and the like match within one level of a name, and ``""`` is the module.
        src_data_rank: the rank on the axis whose values are distributed; None to let every rank
            slice its own, which saves a broadcast where they are equal.

    Returns:
        ``module``.

    Raises:
        TypeError: if something is of a wrong type.
        ValueError: if the mesh has several axes or other ranks, a size cannot be shared equally, a
            layer cannot have its style, or tied parameters are cut in different ways; all problems
            in one message.
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
    distribute_params([cut for s in sites for cut in s.style.cuts(s.module)], axis, src_data_rank)
    guards.install()
    for site in sites:
        apply_style(site.module, AppliedStyle(site.style, axis, site.label))
        if isinstance(site.style, ColwiseParallel) and site.style.is_for_loss_parallel:
            remember_head(site.module, axis)
    return module


def _sites(module: nn.Module, plan: Any) -> list[Site]:
    """Return every module that the plan names, in its order; once for each entry that matches."""
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
    """Yield the modules whose names below ``module`` match, level by level."""
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
        cuts = [(s.name, cut) for s in sites for cut in s.style.cuts(s.module)]
        problems = list(find_cut_problems(module, cuts, axis))
    if problems:
        raise ValueError("the plan cannot be carried out: " + "; ".join(dict.fromkeys(problems)))


def _forward_problems(module: nn.Module) -> Iterator[str]:
    # A style goes around the forward of the module's class.
    if "forward" in vars(module) and not isinstance(module, ParallelModule):
        yield (
            "has a forward of its own (as of checkpoint_module), around which a style cannot go; "
            "parallelize it first"
        )
