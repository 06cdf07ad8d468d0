"""Keep the parameters of blocks that run as a loop in stacks, one for each parameter.

Always true: all problems are found before anything is changed; blocks that are stacked already
stay so. What a stack is, and what becomes of state dicts, is in ``shard_stacks``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xla_fsdp import guards
from xla_fsdp.shard_stacks import stack_params
from xla_fsdp.sharded_param import ShardedParam
from xla_fsdp.unit import Unit


def find_stacking_problems(units: Sequence[Unit]) -> list[str]:
    """Why the parameters of these blocks, which are alike, cannot be stacked; empty if they can, or
    if they are."""
    if _are_stacked(units):
        return []
    problems: list[str] = []
    for number, unit in enumerate(units):
        pairs = zip(units[0].group.params, unit.group.params, strict=True)
        for param, first in ((param, first) for first, param in pairs):
            problems += (f"block {number}: {each}" for each in _problems(param, first))
        if unit.group.steps_in_backward:
            problems.append(
                f"block {number} is stepped in backward, by hooks on its shards; stack them before "
                f"step_in_backward"
            )
        if unit.group.has_kept:
            problems.append(
                f"block {number} has gradients that wait to be reduced (no_sync); run the last "
                f"backward of the accumulation, or zero_grad(), before its parameters are stacked"
            )
    return problems


def find_order_problems(units: Sequence[Unit]) -> list[str]:
    """Why blocks of which some are stacked cannot run as a loop."""
    parts = [[param.places.part for param in unit.group.params] for unit in units]
    stacked = [each for each in parts if any(part is not None for part in each)]
    if not stacked:
        return []
    for number, (unit, own) in enumerate(zip(units, parts, strict=True)):
        leaves = zip(unit.group.leaves, units[0].group.leaves, strict=True)
        here = all(part is not None and part.number == number for part in own)
        if not (here and all(leaf is first for leaf, first in leaves)):
            return [_other_stack(number, len(units))]
    lengths = {part.length for each in parts for part in each if part is not None}
    return [] if lengths <= {len(units)} else [_other_stack(len(units), len(units))]


def stack_blocks(units: Sequence[Unit]) -> None:
    """Stack all parameters of these blocks; ``find_stacking_problems`` has found none."""
    if _are_stacked(units):
        return
    for unit in units:
        unit.reshard()
    group = units[0].group
    for params in zip(*(unit.group.params for unit in units), strict=True):
        stack_params(params, group)
    guards.install()  # optimizers that hold what was stacked are to be told


def _are_stacked(units: Sequence[Unit]) -> bool:
    return any(param.places.part is not None for param in units[0].group.params)


def _problems(param: ShardedParam, first: ShardedParam) -> Iterator[str]:
    name, leaf = param.key, param.leaf
    if param.is_flat:
        yield (
            f"{name} joins several parameters (flatten_parameters=True), and stacks are of one "
            f"parameter each; shard the blocks with flatten_parameters=False"
        )
    if leaf.is_meta:
        yield (
            f"{name} is on the meta device; give the model memory and values before its blocks are "
            f"stacked"
        )
    if param.places.users > 1:
        yield (
            f"{name} is tied to a parameter of another unit, which cannot hold a slice of a stack; "
            f"do without stacked, or untie them"
        )
    if leaf.requires_grad != first.leaf.requires_grad:
        yield (
            f"{name} {_trained(param)}, but {_trained(first)} in block 0; a stack is trained or "
            f"frozen as a whole. Freeze the parameter in all blocks or in none"
        )
    if leaf.grad is not None:
        yield f"{name} has a gradient; call zero_grad() before its blocks are stacked"


def _trained(param: ShardedParam) -> str:
    return "is trained" if param.leaf.requires_grad else "is frozen"


def _other_stack(number: int, length: int) -> str:
    return (
        f"block {number} of {length} is not at this place of a stack of {length} blocks; blocks "
        f"that were stacked together are scanned together, in the same order"
    )
