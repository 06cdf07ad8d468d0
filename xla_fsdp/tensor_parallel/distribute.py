"""Give every rank its slices of a model's parameters.

Words: see ``style``; the *original* is the parameter that a model was built with.
Always true: all cuts are checked before any is made; the slices are those of the original, bit for
bit, so a sharded initialization is the slices of a full one; tied parameters stay tied; parameters
stay on their device, and those on the meta device get values later (see ``meta_init`` and
``deferred_init``, which make whole ones and cut them).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from xla_fsdp.distributed.collectives import XlaCollectives, broadcast_
from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.distributed.placement import TensorPlacement, placement_in, set_placement
from xla_fsdp.distributed.shard_layout import join_name
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.shard_parameter import is_sharded
from xla_fsdp.tensor_parallel.style import ParamCut

# What became of an original: so that modules which share it share its slice. Tensors are each
# rank's own, so ranks that are threads of one process never meet here.
_became: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def find_cut_problems(
    root: nn.Module, cuts: Sequence[tuple[str, ParamCut]], axis: AxisComm
) -> Iterator[str]:
    """Why these cuts cannot be made, one line each.

    Args:
        root: the model, whose other modules must not hold what is cut.
        cuts: with the names of the modules that were given the styles.
        axis: the ranks that share it.
    """
    wanted: dict[int, dict[int | None, str]] = defaultdict(dict)
    sites: dict[tuple[int, str], str] = {}
    for name, cut in cuts:
        param = cut.param
        own = join_name(name, cut.attribute)
        first = sites.setdefault((id(cut.owner), cut.attribute), own)
        if first is not own:
            yield (
                f"{own} is given a style twice, also as {first}: names that match one module, or "
                f"two names of it; give it one style, under one name"
            )
        yield from _size_problems(own, cut, param, axis)
        wanted[id(param)].setdefault(cut.dim, own)
    for names in wanted.values():
        if len(names) > 1:
            ways = ", ".join(f"{name} along {dim}" for dim, name in names.items())
            yield f"one parameter is to be cut in several ways: {ways}; give its owners one way"
    for prefix, module in root.named_modules():
        for attribute, param in module._parameters.items():
            if id(param) in wanted and (id(module), attribute) not in sites:
                [first, *_] = wanted[id(param)].values()
                yield (
                    f"{join_name(prefix, attribute)} is tied to {first}, but is not in the plan; "
                    f"give its module a style that cuts it the same way"
                )


def distribute(cuts: Sequence[ParamCut], axis: AxisComm, src_data_rank: int | None) -> None:
    """Make the cuts.

    Args:
        cuts: that have no problems.
        axis: the ranks that share the parameters.
        src_data_rank: place on the axis of the rank whose values are taken; None for each rank's
            own.
    """
    for cut in cuts:
        _make(cut, axis, src_data_rank)


def _make(cut: ParamCut, axis: AxisComm, source: int | None) -> None:
    param = cut.param
    placement = TensorPlacement(axis.mesh, cut.dim, tuple(param.shape))
    known = _became.get(param)
    if known is None:
        known = _became[param] = _sliced(param, placement, axis, source)
    cut.owner._parameters[cut.attribute] = known
    set_placement(cut.owner, cut.attribute, placement)


@torch.no_grad()
def _sliced(
    param: nn.Parameter, placement: TensorPlacement, axis: AxisComm, source: int | None
) -> nn.Parameter:
    whole = param.detach()
    if source is not None and not whole.is_meta:
        whole = _of_source(whole, axis, source)
    local = placement.slice_of(whole, axis.local_rank).clone()
    new = nn.Parameter(local, requires_grad=param.requires_grad)
    vars(new).update(vars(param))  # such as a mark that an optimizer's grouping looks for
    return new


def _of_source(whole: Tensor, axis: AxisComm, source: int) -> Tensor:
    """The values of the rank in place ``source``, which ``broadcast_`` sees as the first."""
    if axis.size == 1:
        return whole
    copy = whole.clone()
    seen_from = (axis.local_rank - source) % axis.size
    broadcast_([copy], XlaCollectives(axis.groups, seen_from, axis.size), ops.device())
    return copy


def _size_problems(name: str, cut: ParamCut, param: nn.Parameter, axis: AxisComm) -> Iterator[str]:
    known = placement_in(cut.owner, cut.attribute)
    if known is not None:
        how = "whole on every rank" if known.dim is None else f"along dim {known.dim}"
        yield (
            f"{name} is parallelized already ({how}, over axis {known.axis!r}), and a second style "
            f"would communicate twice; do it once"
        )
        return
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
