"""Shards of identical units that are kept in stacks, and the way from these to shards and back.

Words: a *stack* is a leaf parameter, [length, *shape of a shard]; slice i is the shard of unit i.
Always true: an optimizer, ``parameters()`` and ``named_parameters()`` see stacks, under the names
of the first unit; state dicts, of models and of optimizers, know shards alone, each under its own
name. ``shown`` and ``taken_in`` convert those of models, ``stacked_entries`` those of optimizers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from xla_fsdp.distributed.xla import ops
from xla_fsdp.distributed.xla.host import to_host
from xla_fsdp.fsdp.engine.named_params import NamedShard
from xla_fsdp.fsdp.engine.param import FSDPParam, StackPart
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup
from xla_fsdp.fsdp.engine.registry import known_group, known_shard, remember, remember_group
from xla_fsdp.fsdp.engine.shard_parameter import ShardParameter
from xla_fsdp.fsdp.engine.tp_params import all_joined

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


class ShardStack(ShardParameter):
    """The leaf of several units' shards of one parameter.

    Optimizers that step every element by itself need not know. Rules that look at the number of
    dims can take ``shard_shape``.
    """

    is_stack = True

    @property
    def shard_shape(self) -> torch.Size:
        """Shape of each of the shards."""
        return self.shape[1:]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """As of shards; the first dim is not cut."""
        from torch.distributed.tensor import Shard  # slow to import

        return tuple(
            Shard(each.dim + 1) if isinstance(each, Shard) else each for each in super().placements
        )

    @torch.no_grad()
    def full_tensor(self) -> Tensor:
        """The whole parameters, stacked, on the device; see ``ShardView``."""
        param, group = known_shard(self), known_group(self)
        if param is None or group is None:
            raise RuntimeError("this stack's model is gone, so who shares it is not known any more")
        full = torch.stack(
            [
                all_joined(group.gather.as_stored([param], [each]), param.members)[0]
                for each in self.detach().unbind()
            ]
        )
        ops.compute([full])
        return full


def stack_params(params: Sequence[FSDPParam], group: FSDPParamGroup) -> None:
    """Keep these shards, one of each unit and all alike, in one stack from now on.

    Args:
        params: in the order of the units.
        group: the first one's.
    """
    leaves = [param.leaf for param in params]
    stack = ShardStack(
        torch.stack([leaf.detach() for leaf in leaves]), requires_grad=leaves[0].requires_grad
    )
    vars(stack).update(vars(leaves[0]))
    ops.compute([stack])  # one at a time: the device holds one parameter of all units twice
    for number, param in enumerate(params):
        param.slots.stack(stack, StackPart(number, len(params)))
        for member in param.members:
            for owner in member.owners:
                param.slots.refresh(owner)
    remember(params[0], [stack])
    remember_group(stack, group)


# ---------------------------------------------------------------- state dicts of models


def slice_of(param: FSDPParam, group: FSDPParamGroup) -> Tensor:
    """The shard: the leaf, or a slice of it, which is then known to stand for the parameter."""
    if param.slots.part is None:
        return param.leaf
    shard = part_of(param.leaf, param.slots.part.number)
    remember(param, [shard])
    remember_group(shard, group)
    return shard


_cut_from: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

"""Slices of stacks, to the stack and the number of the slice."""


def part_of(stack: Tensor, number: int) -> Tensor:
    """A slice of a stack, of parameters or what an optimizer keeps for them."""
    cut = stack.detach()[number]
    _cut_from[cut] = (stack, number)
    return cut


def copy_stacks_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in host memory. Stacks travel whole and are cut there, one transfer for all slices."""
    known = [_cut_from.get(getattr(each, "stands_for", each)) for each in tensors]
    places = [place or (each, None) for place, each in zip(known, tensors, strict=True)]
    whole = {id(source): source for source, _ in places}
    copies = dict(zip(whole, to_host(list(whole.values())), strict=True))
    found = [(copies[id(source)], number) for source, number in places]
    return [copy if number is None else copy[number].clone() for copy, number in found]


def is_stack(tensor: Tensor) -> bool:
    """Whether it holds shards of several units."""
    return isinstance(tensor, ShardStack)


def shown(group: FSDPParamGroup, state: dict[str, Any], prefix: str) -> None:
    """Put shards into a unit's state dict that has stacks, or none of them.

    Args:
        group: of the unit.
        state: with names that begin with ``prefix``.
        prefix: of the unit's module.
    """
    for param in group.params:
        if param.slots.part is not None:
            shard = slice_of(param, group)
            state.update((prefix + name, shard) for name in param.members[0].names)


def taken_in(
    shards: Iterable[NamedShard], state: dict[str, Any], prefix: str, missing: list[str]
) -> None:
    """Make stacks of the shards in a state dict that is to be loaded.

    Args:
        shards: of the module that loads it; others in their stacks, and those that are missing,
            keep their values.
        state: with names that begin with ``prefix``, and shards that fit.
        prefix: of the module.
        missing: takes the names that are missing.
    """
    together: dict[int, list[NamedShard]] = defaultdict(list)
    for shard in shards:
        if shard.param.slots.part is not None:
            together[id(shard.param.leaf)].append(shard)
    for parts in together.values():
        _take_in(parts, state, prefix, missing)


def _take_in(
    parts: Sequence[NamedShard], state: dict[str, Any], prefix: str, missing: list[str]
) -> None:
    leaf = parts[0].param.leaf
    given: dict[int, Tensor] = {}
    first: list[str] = []  # names under which torch will look for the stack
    for shard in parts:
        part = cast(StackPart, shard.param.slots.part)
        names = [prefix + name for name in shard.names_of(shard.param.members[0])]
        found = [value for name in names if isinstance(value := state.pop(name, None), Tensor)]
        if found:
            given[part.number] = found[0]
            first += names if part.number == 0 else []
        elif part.number:
            missing += names
    if not given:
        return
    stack = _merged(leaf.detach(), given)
    state.update((name, stack) for name in first)
    if not first:
        with torch.no_grad():
            leaf.copy_(stack)


def _merged(stack: Tensor, given: Mapping[int, Tensor]) -> Tensor:
    """A stack with some slices in the place of its own; on their device if it is all of them."""
    slices = [given.get(n, own) for n, own in enumerate(stack.unbind())]
    devices = {each.device for each in slices}
    device = stack.device if len(devices) > 1 else slices[0].device
    return torch.stack([each.detach().to(device) for each in slices])
