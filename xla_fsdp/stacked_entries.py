"""An optimizer's entries for stacks, as those of the single parameters in them, and back.

Words: see ``optim_entries`` and ``shard_stacks``. Always true: what is cut like a stack has a slice
for each parameter; what is one number for a stack is so for all of them, and can only be written if
it is the same for all. ``optim_state`` decides when.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from xla_fsdp.optim_entries import Entry, OptimizerState, Place, is_number
from xla_fsdp.places import StackPart
from xla_fsdp.shard_stacks import is_stack, part_of
from xla_fsdp.ties import known_shard


class Holding:
    """What an optimizer holds of a model's parameters.

    Args:
        params: by key; of one that is in a stack, its slice, as ``slice_of`` gives it.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._places = {key: _place_of(param) for key, param in params.items()}
        self._keys: dict[int, list[str]] = defaultdict(list)
        by_number = sorted(self._places, key=lambda key: self.number(key) or 0)
        for key in by_number:
            self._keys[id(self.leaf(key))].append(key)

    @property
    def leaves(self) -> list[Tensor]:
        """Each once."""
        return list({id(leaf): leaf for leaf, _ in self._places.values()}.values())

    def leaf(self, key: str) -> Tensor:
        """What the optimizer may hold of the parameter ``key``."""
        return self._places[key][0]

    def number(self, key: str) -> int | None:
        """Which slice of a stack the parameter is."""
        part = self._places[key][1]
        return None if part is None else part.number

    def keys(self, leaf: Tensor) -> list[str]:
        """Of the parameters that are in ``leaf``, in order; none if it is not of the model."""
        return self._keys.get(id(leaf), [])

    def all_keys(self, leaves: Iterable[Tensor]) -> list[str]:
        """Of the parameters that are in these."""
        return [key for leaf in leaves for key in self.keys(leaf)]


def _place_of(param: Tensor) -> tuple[Tensor, StackPart | None]:
    known = known_shard(param)
    if known is None or known.places.part is None or is_stack(param):
        return param, None
    return known.leaf, known.places.part


def part_of_entries(entries: dict[str, Entry], number: int | None) -> dict[str, Entry]:
    """Those of one slice, of what is kept for a stack."""
    if number is None:
        return entries
    return {
        name: Entry(each.place, part_of(each.value, number)) if each.place is Place.SHARD else each
        for name, each in entries.items()
    }


def stacked(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """The inverse, of one entry's values for all slices, in order; a copy."""
    return torch.stack([value.detach() for value in values]).to(device)


def find_stack_problems(
    optimizer: str, key: str, stack: Tensor, entries: Mapping[str, Entry]
) -> Iterator[str]:
    """Why what an optimizer keeps for a stack cannot be taken apart, one line each.

    Args:
        optimizer: what it is called.
        key: of the first parameter in the stack.
        stack: the parameters.
        entries: of the whole stack.
    """
    for name, entry in entries.items():
        value = entry.value
        if entry.place is not Place.SHARD and isinstance(value, Tensor) and not is_number(value):
            yield (
                f"{optimizer} keeps {name!r} of shape {tuple(value.shape)} for the stack that "
                f"{key} is in, of shape {tuple(stack.shape)}, which cannot be taken apart by "
                f"block. Scan the blocks without stacked"
            )


def find_stack_mismatches(keys: Sequence[str], state: OptimizerState) -> Iterator[str]:
    """What is written to a stack must be there, and alike, for all that are in it."""
    first = state.entries.get(keys[0], {})
    for key in keys[1:]:
        own = state.entries.get(key, {})
        for name in sorted({*first, *own}):
            if name not in own or name not in first:
                without, other = (key, keys[0]) if name not in own else (keys[0], key)
                yield f"the state has {name!r} for {other}, but not for {without} of the same stack"
            elif own[name].place is not Place.SHARD and not _same(first[name], own[name]):
                yield (
                    f"{name!r} differs between {keys[0]} and {key}, which are in one stack and "
                    f"have one value; load this state without stacked"
                )


def _same(a: Entry, b: Entry) -> bool:
    if isinstance(a.value, Tensor) and isinstance(b.value, Tensor):
        return torch.equal(a.value.cpu(), b.value.cpu())
    return bool(a.value == b.value)
