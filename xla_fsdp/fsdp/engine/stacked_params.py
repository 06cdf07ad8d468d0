"""Stacks: one leaf parameter for the shards of the same parameter in identical units.

A stack is [length, *shard shape]; slice i is the shard of unit i.

Invariants: optimizers, ``parameters()`` and ``named_parameters()`` have stacks, under the names of
the first unit; state dicts, of models and of optimizers, have shards, each under its own name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from xla_fsdp.distributed.packing import shaped
from xla_fsdp.fsdp.engine.param import (
    FSDPParam,
    StackPart,
    held_bytes,
    held_shape,
    print_without,
    remember,
)
from xla_fsdp.fsdp.engine.param_group import NamedShard
from xla_fsdp.fsdp.engine.shard_tensor import ShardParameter, gather_like
from xla_fsdp.fsdp.engine.thread import package_code
from xla_fsdp.xla import ops
from xla_fsdp.xla.host import to_host

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


class ShardStack(ShardParameter):
    """The leaf for several units' shards of one parameter, [length, *shard_shape]; a vector of
    whole rows is stacked as these.

    Elementwise optimizers step it as any parameter; others may use ``shard_shape``.
    """

    is_stack = True

    @property
    def shard_shape(self) -> torch.Size:
        """Shape of each shard."""
        return held_shape(self)[1:]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One for each axis of the mesh; the first dim is not cut."""
        from torch.distributed.tensor import Shard  # slow to import

        return tuple(
            Shard(each.dim + 1) if isinstance(each, Shard) else each for each in super().placements
        )

    @torch.no_grad()
    @package_code()
    def full_tensor(self) -> Tensor:
        """Return the unsharded, global parameters as a stack, on the device."""
        full = torch.stack([gather_like(self, each) for each in self.detach().unbind()])
        ops.compute([full])
        return full


def stack_params(params: Sequence[FSDPParam]) -> None:
    """Move the shards of one parameter of identical units, in their order, into a stack."""
    leaves = [param.leaf for param in params]
    shape = params[0].shard_shape
    stored = shape if len(shape) > 1 else params[0].packing.sent_shape
    joined = torch.stack([shaped(leaf.detach(), stored) for leaf in leaves])
    stack = ShardStack(joined, requires_grad=leaves[0].requires_grad)
    vars(stack).update(vars(leaves[0]))
    # At once, so that memory holds two copies of one parameter's shards, not of all parameters'.
    ops.compute([stack])
    for number, param in enumerate(params):
        param.slots.stack(stack, StackPart(number, len(params), shape))
        for original in param.originals:
            print_without(original)
            for owner in original.owners:
                param.slots.refresh(owner)
    remember(params[0], [stack])


def is_stack(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a stack of shards."""
    return isinstance(tensor, ShardStack)


# ---------------------------------------------------------------- state dicts of models


def slice_of(param: FSDPParam) -> Tensor:
    """Return the shard: the leaf, or a slice of it, for which ``known_shard`` returns ``param``."""
    if param.slots.part is None:
        return param.leaf
    shard = part_of(param.leaf, param.slots.part)
    remember(param, [shard])
    return shard


# For a slice of a stack, the stack and the number of the slice.
_cut_from: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def part_of(stack: Tensor, part: StackPart) -> Tensor:
    """Return a slice of a stack: of parameters, or of an optimizer's states for them."""
    cut = shaped(stack.detach()[part.number], part.shape)
    _cut_from[cut] = (stack, part.number)
    return cut


AT_ONCE = 64 << 20
"""Bytes that ``HostCopies`` transfers together: torch_xla holds them twice meanwhile."""


class HostCopies:
    """Copies of tensors in host memory; the next ones are written over them."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies, with one transfer for all slices of a stack; those of the last call change
        where shape and dtype are the same."""
        known = [_cut_from.get(getattr(each, "stands_for", each)) for each in tensors]
        sources = [found or (each, None) for found, each in zip(known, tensors, strict=True)]
        places: dict[int, list[int]] = defaultdict(list)
        for place, (source, _) in enumerate(sources):
            places[id(source)].append(place)
        earlier = dict(enumerate(self._copies))
        made: dict[int, Tensor] = {}
        for part in _parts({id(source): source for source, _ in sources}.values()):
            for source, whole in zip(part, to_host(part), strict=True):
                for place in places[id(source)]:
                    number = sources[place][1]
                    shape = held_shape(tensors[place])
                    made[place] = _written_over(earlier.get(place), whole, number, shape)
        self._copies = [made[place] for place in range(len(tensors))]
        return self._copies


def _parts(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors of up to ``AT_ONCE`` bytes together, or of one."""
    part: list[Tensor] = []
    for tensor in tensors:
        if part and sum(map(held_bytes, [*part, tensor])) > AT_ONCE:
            yield part
            part = []
        part.append(tensor)
    if part:
        yield part


def _written_over(
    earlier: Tensor | None, whole: Tensor, number: int | None, shape: torch.Size
) -> Tensor:
    """Return ``whole``, or a slice of it, in that shape: in ``earlier``, if that is like it."""
    copy = whole if number is None else whole[number].reshape(shape)
    if earlier is not None and (earlier.shape, earlier.dtype) == (copy.shape, copy.dtype):
        return earlier.copy_(copy)
    return copy if number is None else copy.clone()


def put_stacked_shards(params: Iterable[FSDPParam], state: dict[str, Any], prefix: str) -> None:
    """Put the shards of stacked parameters into the state dict of their unit's module, with names
    that begin with ``prefix``; torch has put the stack for the first unit, nothing for others."""
    for param in params:
        if param.slots.part is not None:
            shard = slice_of(param)
            state.update((prefix + name, shard) for name in param.originals[0].names)


def stack_loaded_shards(
    shards: Iterable[NamedShard], state: dict[str, Any], prefix: str, missing: list[str]
) -> None:
    """Replace the shards of stacked units by stacks, in a state dict that is to be loaded, with
    shards of the right shapes under names that begin with ``prefix``; add missing names to
    ``missing``, as torch reports them.

    Slices of the stacks that are in other modules, or missing in ``state``, are not changed."""
    stacks: dict[ShardStack, list[NamedShard]] = defaultdict(list)
    for shard in shards:
        if shard.param.slots.part is not None:
            stacks[cast(ShardStack, shard.param.leaf)].append(shard)
    for stack, parts in stacks.items():
        _load_stack(stack, parts, state, prefix, missing)


def _load_stack(
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
    """Return a copy of ``stack`` with the given slices; on their device if all slices are given."""
    slices = [given.get(n, own) for n, own in enumerate(stack.unbind())]
    devices = {each.device for each in slices}
    device = stack.device if len(devices) > 1 else slices[0].device
    return torch.stack([each.detach().to(device).reshape(stack.shape[1:]) for each in slices])
