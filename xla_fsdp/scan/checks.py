"""Checks of blocks before they run as a loop, or are stacked. ``tracing.kinds_of`` compares later
what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xla_fsdp.fsdp.engine.autograd import on_device
from xla_fsdp.fsdp.engine.module_state import is_fsdp_module, named_fsdp_modules
from xla_fsdp.fsdp.engine.param import FSDPParam
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.scan.block_inputs import BlockState
from xla_fsdp.scan.errors import NoLoopError
from xla_fsdp.scan.plan import Plan, find_plan

ADVICE = (
    "Blocks run as one loop if they compute the same but for numbers in arithmetic, or repeat a "
    "pattern of blocks; a few at either end may differ. Scan these apart, or not at all"
)


def find_problems(blocks: Sequence[Any], plan: Plan | None, *, stacked: bool) -> list[str]:
    """Return why these modules cannot run as a loop with this ``plan``, or with ``stacked`` cannot
    be stacked."""
    if not blocks:
        return ["there are no blocks to scan"]
    not_sharded = [
        f"block {at} ({type(each).__name__}) is not sharded; wrap each block first, or give "
        f"scan_layers=True together with auto_wrap_policy"
        for at, each in enumerate(blocks)
        if not is_fsdp_module(each)
    ]
    if not_sharded:
        return not_sharded
    if len({id(block) for block in blocks}) < len(blocks):
        return ["a block appears twice; a loop wants each once"]
    if plan is None:
        problems = [each for at, block in enumerate(blocks) for each in _problems_of(at, block)]
        every = range(len(blocks))
        return problems or [f"{e}. {ADVICE}" for e in _differences(blocks, every, _described)][:1]
    problems = [each for at in plan.numbers for each in _problems_of(at, blocks[at])]
    problems += _differences(blocks, plan.numbers, _options_of)
    for position in range(plan.period):
        units = [blocks[at]._fsdp_unit for at in plan.numbers_at(position)]
        problems += _stack_order_problems(units)
        problems += _stacking_problems(units) if stacked and not are_stacked(units) else []
    return problems


def plan_of(blocks: Sequence[Any]) -> Plan | None:
    """Return which blocks can run in a loop by their parameters, buffers and options; None if none
    can, or some are no units."""
    if not all(is_fsdp_module(each) for each in blocks):
        return None
    described = [_described(block) for block in blocks]
    return find_plan([described.index(each) for each in described])


def are_stacked(units: Sequence[FSDPState]) -> bool:
    """Return whether the parameters of these blocks are in stacks."""
    return any(param.slots.part is not None for param in units[0].group.params)


# ---------------------------------------------------------------- single blocks


def _problems_of(at: int, block: Any) -> Iterator[str]:
    inner = [name for name, module in named_fsdp_modules(block) if module is not block]
    if inner:
        yield (
            f"block {at} holds units of its own ({', '.join(inner)}); a block of a loop is one unit"
        )
    shards = {id(shard) for shard in block._fsdp_unit.group.leaves}
    ignored = [name for name, param in block.named_parameters() if id(param) not in shards]
    if ignored and not inner:
        yield (
            f"block {at} has parameters that its unit ignores ({', '.join(ignored)}); a loop gives "
            f"gradients to those of the units alone. Let the unit shard them"
        )
    if block._fsdp_unit.parts > 1:
        yield f"block {at} shares its unit with other modules; give it one of its own"
    wrapped = getattr(block, "_fsdp_wrapped_module", None) is not None
    if wrapped and getattr(block.forward, "is_checkpointed", False):
        yield f"block {at} is rematerialized around its unit; leave that to the loop (remat=...)"
    override = block._fsdp_module_state.forward_override
    if override is not None and not getattr(override, "is_automatic", False):
        yield f"block {at} is scanned already"


# ---------------------------------------------------------------- differences


def _differences(
    blocks: Sequence[Any], numbers: Sequence[int], describe: Callable[[Any], list[tuple[str, Any]]]
) -> Iterator[str]:
    """Yield how blocks with these numbers differ from the first of them."""
    ours = describe(blocks[numbers[0]])
    for number in numbers:
        theirs = describe(blocks[number])
        pairs = zip(ours, theirs, strict=False)
        found = [f"{what} {its}, not {mine}" for (what, mine), (_, its) in pairs if mine != its]
        if len(ours) != len(theirs):
            found.append("it has other parameters or buffers")
        if found:
            yield f"block {number} differs from block {numbers[0]}: {found[0]}"


def _options_of(block: Any) -> list[tuple[str, Any]]:
    unit: FSDPState = block._fsdp_unit
    return [
        ("its options are", unit.config),
        ("its ranks are", unit.group.collectives.key),
    ]


def _described(block: Any) -> list[tuple[str, Any]]:
    unit: FSDPState = block._fsdp_unit
    module = getattr(block, "_fsdp_wrapped_module", block)
    described: list[tuple[str, Any]] = [("it is of class", type(module).__name__)]
    for param in unit.group.params:
        originals = (f"{'/'.join(each.names)} {list(each.shape)}" for each in param.originals)
        described.append(("its parameter is", ", ".join(originals)))
        described.append((f"{param.key} is of dtype", param.leaf.dtype))
        described.append((f"{param.key} is cut as", (param.packing.layout, param.packing.dim)))
    described += _options_of(block)
    state = BlockState.of(block)
    for name, tensor in zip(state.names, state.tensors, strict=True):
        described.append(("its buffer is", f"{name} {list(tensor.shape)} {tensor.dtype}"))
    return described


# ---------------------------------------------------------------- stacks


def _stack_order_problems(units: Sequence[FSDPState]) -> list[str]:
    """Return why blocks cannot run as a loop if they are part of stacks already: a loop needs all
    blocks of one stack, in their order."""
    parts = [[param.slots.part for param in unit.group.params] for unit in units]
    if all(part is None for own in parts for part in own):
        return []
    for number, (unit, own) in enumerate(zip(units, parts, strict=True)):
        place = number, len(units)
        here = all(part is not None and (part.number, part.length) == place for part in own)
        leaves = zip(unit.group.leaves, units[0].group.leaves, strict=True)
        if not (here and all(leaf is first for leaf, first in leaves)):
            return [
                f"block {number} of {len(units)} is not at this place of a stack of {len(units)} "
                f"blocks; blocks that were stacked together are scanned together, in the same order"
            ]
    return []


def _stacking_problems(units: Sequence[FSDPState]) -> list[str]:
    problems: list[str] = []
    blocks_with: dict[str, list[int]] = {}
    for number, unit in enumerate(units):
        for first, param in zip(units[0].group.params, unit.group.params, strict=True):
            for each in _param_problems(param, first):
                blocks_with.setdefault(each, []).append(number)
        if unit.group.steps_in_backward:
            problems.append(
                f"block {number} is stepped in backward, by hooks on its shards; stack them before "
                f"step_in_backward"
            )
        if unit.group.has_unreduced:
            problems.append(
                f"block {number} has gradients that wait to be reduced (no_sync); run the last "
                f"backward of the accumulation, or zero_grad(), before its parameters are stacked"
            )
    for each, numbers in blocks_with.items():
        where = ", ".join(f"block {number}" for number in numbers)
        problems.append(f"{'every block' if len(numbers) == len(units) else where}: {each}")
    return problems


def _param_problems(param: FSDPParam, first: FSDPParam) -> Iterator[str]:
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
    if param.slots.users > 1:
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


def _trained(param: FSDPParam) -> str:
    return "is trained" if param.leaf.requires_grad else "is frozen"


# ---------------------------------------------------------------- when blocks are called


def refuse_host_tensors(state: BlockState) -> None:
    """Raise NoLoopError if the block has tensors in host memory, where a loop cannot read them."""
    pairs = zip(state.names, state.tensors, strict=True)
    on_host = [name for name, tensor in pairs if not on_device(tensor)]
    if on_host:
        raise NoLoopError(
            f"{', '.join(on_host[:5])} of a scanned block is in host memory, and a loop takes "
            f"tensors from the device. Register it as a buffer before the block is sharded, move "
            f"it to the XLA device, or, if it is a constant, make it a number"
        )


def refuse_hooks(state: BlockState) -> None:
    """Raise NoLoopError if modules in the block have hooks: they would run only while tracing."""
    if state.hooked:
        raise NoLoopError(
            f"{', '.join(state.hooked[:5])} in a scanned block has hooks; they would run when the "
            f"loop is traced, with tensors that have no values, and not in each step. Remove them, "
            f"or do not scan these blocks"
        )
