"""Give every rank its slices of a model's parameters.

Invariants: all cuts are checked before any is made. The slices are those of the global parameter,
bit for bit. Tied parameters stay tied. Parameters stay on their device; those on the meta device
get values later, when global ones are made and sliced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from xla_fsdp.distributed.broadcast import broadcast_
from xla_fsdp.distributed.collectives import XlaCollectives
from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.distributed.placement import TensorPlacement, place, placement_in
from xla_fsdp.distributed.shard_layout import join_name
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.shard_parameter import is_sharded
from xla_fsdp.tensor_parallel.parallel_module import ParamCut

# By global parameter: the local one, which all modules that share it get, in later calls, too.
# Parameters are each rank's own, so ranks that are threads of one process never meet here.
_local_params: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def find_cut_problems(
    root: nn.Module, cuts: Sequence[tuple[str, ParamCut]], axis: AxisComm
) -> Iterator[str]:
    """Yield why these cuts cannot be made.

    Args:
        root: the model, whose other modules must not hold what is cut.
        cuts: with the names of the modules that were given the styles.
        axis: the ranks that share the parameters.
    """
    names_by_dim: dict[int, dict[int | None, str]] = defaultdict(dict)  # by id of the parameter
    sites: dict[tuple[int, str], str] = {}
    for name, cut in cuts:
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
    for prefix, module in root.named_modules():
        for attribute, param in module._parameters.items():
            if id(param) in names_by_dim and (id(module), attribute) not in sites:
                [first, *_] = names_by_dim[id(param)].values()
                yield (
                    f"{join_name(prefix, attribute)} is tied to {first}, but is not in the plan; "
                    f"give its module a style that cuts it the same way"
                )


def _param_problems(name: str, cut: ParamCut, axis: AxisComm) -> Iterator[str]:
    param, known = cut.param, placement_in(cut.owner, cut.attribute)
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


def distribute_params(cuts: Sequence[ParamCut], axis: AxisComm, src_data_rank: int | None) -> None:
    """Replace global parameters by local ones.

    Args:
        cuts: that have no problems.
        axis: the ranks that share the parameters.
        src_data_rank: the rank on the axis whose values are taken; None for each rank's own.
    """
    for cut in cuts:
        param = cut.param
        placement = TensorPlacement(axis.mesh, cut.dim, tuple(param.shape))
        local = _local_params.get(param)
        if local is None:
            local = _local_params[param] = _local(param, placement, axis, src_data_rank)
        cut.owner._parameters[cut.attribute] = local
        place(cut.owner, cut.attribute, placement)


@torch.no_grad()
def _local(
    param: nn.Parameter, placement: TensorPlacement, axis: AxisComm, source: int | None
) -> nn.Parameter:
    value = param.detach()
    if source is not None and not value.is_meta and axis.size > 1:
        value = _broadcast_from(value, axis, source)
    value = placement.slice_of(value, axis.place).clone()
    local = nn.Parameter(value, requires_grad=param.requires_grad)
    vars(local).update(vars(param))  # such as a mark that an optimizer's grouping looks for
    return local


def _broadcast_from(value: Tensor, axis: AxisComm, source: int) -> Tensor:
    copy = value.clone()
    # broadcast_ takes the values of rank 0, so ranks are counted from the source.
    rank = (axis.place - source) % axis.size
    broadcast_([copy], XlaCollectives(axis.groups, rank, axis.size), ops.device())
    return copy
