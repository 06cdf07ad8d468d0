"""Shards of identical units that are kept in stacks, one parameter for all units.

A stack is a leaf parameter, [length, *shape of a shard]; slice i is the shard of unit i.
Invariants: optimizers, ``parameters()`` and ``named_parameters()`` see stacks, under the names of
the first unit; state dicts, of models and of optimizers, hold shards, each under its own name.
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
from xla_fsdp.fsdp.engine.param import (
    FSDPParam,
    ShardParameter,
    StackPart,
    gather_like,
    remember,
    remember_group,
)
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


class ShardStack(ShardParameter):
    """The leaf of several units' shards of one parameter.

    Optimizers that step every element by itself need not know; others can look at ``shard_shape``.
    """

    is_stack = True

    @property
    def shard_shape(self) -> torch.Size:
        """Shape of each shard."""
        return self.shape[1:]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One for each axis of the mesh; the first dim is not cut."""
        from torch.distributed.tensor import Shard  # slow to import

        return tuple(
            Shard(each.dim + 1) if isinstance(each, Shard) else each for each in super().placements
        )

    @torch.no_grad()
    def full_tensor(self) -> Tensor:
        """Return the unsharded, global parameters as a stack, on the device."""
        full = torch.stack([gather_like(self, each) for each in self.detach().unbind()])
        ops.compute([full])
        return full


def stack_params(params: Sequence[FSDPParam], group: FSDPParamGroup) -> None:
    """Move the shards of one parameter of identical units into a stack.

    Args:
        params: of each unit, in order.
        group: of the first unit.
    """
    leaves = [param.leaf for param in params]
    stack = ShardStack(
        torch.stack([leaf.detach() for leaf in leaves]), requires_grad=leaves[0].requires_grad
    )
    vars(stack).update(vars(leaves[0]))
    ops.compute([stack])  # one at a time: the device holds one parameter of all units twice
    for number, param in enumerate(params):
        param.slots.stack(stack, StackPart(number, len(params)))
        for original in param.originals:
            for owner in original.owners:
                param.slots.refresh(owner)
    remember(params[0], [stack])
    remember_group(stack, group)


def is_stack(tensor: Tensor) -> bool:
    """Whether it holds shards of several units."""
    return isinstance(tensor, ShardStack)


# ---------------------------------------------------------------- state dicts of models


def slice_of(param: FSDPParam, group: FSDPParamGroup) -> Tensor:
    """Return the shard: the leaf, or a slice of it, which is registered as the parameter's then."""
    if param.slots.part is None:
        return param.leaf
    shard = part_of(param.leaf, param.slots.part.number)
    remember(param, [shard])
    remember_group(shard, group)
    return shard


# Slices of stacks, to the stack and the number of the slice. Of one rank's own tensors.
_cut_from: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def part_of(stack: Tensor, number: int) -> Tensor:
    """Return a slice of a stack: of parameters, or of what an optimizer keeps for them."""
    cut = stack.detach()[number]
    _cut_from[cut] = (stack, number)
    return cut


def copy_stacks_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies in host memory; slices of one stack are copied by one transfer."""
    known = [_cut_from.get(getattr(each, "stands_for", each)) for each in tensors]
    sources = [found or (each, None) for found, each in zip(known, tensors, strict=True)]
    whole = {id(source): source for source, _ in sources}
    copies = dict(zip(whole, to_host(list(whole.values())), strict=True))
    found = [(copies[id(source)], number) for source, number in sources]
    return [copy if number is None else copy[number].clone() for copy, number in found]


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
            state.update((prefix + name, shard) for name in param.originals[0].names)


def stack_loaded_shards(
    shards: Iterable[NamedShard], state: dict[str, Any], prefix: str, missing: list[str]
) -> None:
    """Replace the shards of stacked units by stacks, in a state dict that is to be loaded.

    Args:
        shards: of the module that loads it; others in their stacks, and those that are missing,
            keep their values.
        state: with names that begin with ``prefix``, and shards that fit.
        prefix: of the module.
        missing: gets the names that are missing.
    """
    stacks: dict[ShardStack, list[NamedShard]] = defaultdict(list)
    for shard in shards:
        if shard.param.slots.part is not None:
            stacks[cast(ShardStack, shard.param.leaf)].append(shard)
    for stack, parts in stacks.items():
        _take_in(stack, parts, state, prefix, missing)


def _take_in(
    leaf: ShardStack,
    parts: Sequence[NamedShard],
    state: dict[str, Any],
    prefix: str,
    missing: list[str],
) -> None:
    given: dict[int, Tensor] = {}
    first: list[str] = []  # names under which torch will look for the stack
    for shard in parts:
        part = cast(StackPart, shard.param.slots.part)
        names = [prefix + name for name in shard.names_of(shard.param.originals[0])]
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
    """Return a stack with the given slices; on their device if these are all."""
    slices = [given.get(n, own) for n, own in enumerate(stack.unbind())]
    devices = {each.device for each in slices}
    device = stack.device if len(devices) > 1 else slices[0].device
    return torch.stack([each.detach().to(device) for each in slices])
