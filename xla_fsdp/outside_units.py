"""Parameters that tensor parallelism has cut and no unit has taken, as those that units ignore.

Words: see ``tensor_placement``. Always true: ranks hold different parts of them, so they are joined
to be whole (``full_state_dict`` does), and nothing that takes what is outside of units for whole
may have them. Full parameters that units show meanwhile are not outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor, nn

from xla_fsdp.names import join_name
from xla_fsdp.shard_parameter import is_sharded
from xla_fsdp.tensor_placement import TensorPlacement, placement_in
from xla_fsdp.unit_host import units_in


class OutsideParam(NamedTuple):
    """A parameter, its name, and where the local one is in the whole."""

    name: str
    param: Tensor
    placement: TensorPlacement


def cut_outside_units(model: nn.Module) -> Iterator[OutsideParam]:
    """Those of a model, tied ones under each of their names."""
    taken = {
        (id(owner.module), owner.attribute)
        for unit in units_in(model)
        for param in unit.group.params
        for member in param.members
        for owner in member.owners
    }
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, param in module._parameters.items():
            placement = placement_in(module, attribute)
            if param is None or placement is None or placement.dim is None:
                continue
            if not is_sharded(param) and (id(module), attribute) not in taken:
                yield OutsideParam(join_name(prefix, attribute), param, placement)


def refuse_cut_outside(params: Iterable[OutsideParam], what: str) -> None:
    """Raise ValueError if there are any of which ranks hold different parts.

    Args:
        params: of a model.
        what: what cannot have them.
    """
    names = [each.name for each in params if each.placement.parts > 1]
    if names:
        raise ValueError(
            f"{what} cannot have parameters that tensor parallelism has cut and no FSDP unit "
            f"shards (ignored ones, say), of which ranks hold different parts: {', '.join(names)}. "
            f"Shard them, too (an axis of one rank will do), or leave them out of the plan of "
            f"parallelize_module; xla_fsdp.full_state_dict(model) has their whole values"
        )
