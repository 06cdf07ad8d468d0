"""Whether blocks are so much alike that one of them can stand for all in a loop.

Always true: the first thing that tells a block from the first one is named. What can be seen
without running blocks is checked when they are put into a loop; that they compute the same, when
they are called first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xla_fsdp.distributed.xla.loop import Body
from xla_fsdp.fsdp.engine.autograd import on_device
from xla_fsdp.fsdp.engine.module_state import named_hosts
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.scan.state import BlockState

ADVICE = "Only identical blocks can run as one loop; scan these apart, or not at all"


def find_problems(blocks: Sequence[Any]) -> list[str]:
    """Why these hosts of units cannot run as a loop; empty if they can."""
    problems = [each for at, block in enumerate(blocks) for each in _own_problems(at, block)]
    if len({id(block) for block in blocks}) < len(blocks):
        problems.append("a block appears twice; a loop wants each once")
    if problems:
        return problems
    found = ((at, _difference(blocks[0], block)) for at, block in enumerate(blocks))
    return [f"block {at} differs from block 0: {each}. {ADVICE}" for at, each in found if each][:1]


def _own_problems(at: int, block: Any) -> list[str]:
    problems = []
    inner = [name for name, host in named_hosts(block) if host is not block]
    if inner:
        problems.append(
            f"block {at} holds units of its own ({', '.join(inner)}); a block of a loop is one unit"
        )
    shards = {id(shard) for shard in block._fsdp_unit.group.leaves}
    whole = [name for name, param in block.named_parameters() if id(param) not in shards]
    if whole and not inner:
        problems.append(
            f"block {at} has parameters that its unit ignores ({', '.join(whole)}); a loop gives "
            f"gradients to those of the units alone. Let the unit shard them"
        )
    if block._fsdp_unit.parts > 1:
        problems.append(f"block {at} shares its unit with other modules; give it one of its own")
    wrapped = getattr(block, "_fsdp_wrapped_module", None) is not None
    if wrapped and getattr(block.forward, "is_checkpointed", False):
        problems.append(
            f"block {at} is rematerialized around its unit; leave that to the loop (remat=...)"
        )
    if block._fsdp_attachment.runner is not None:
        problems.append(f"block {at} is scanned already")
    return problems


def _difference(first: Any, other: Any) -> str | None:
    ours, theirs = _described(first), _described(other)
    for (what, mine), (_, its) in zip(ours, theirs, strict=False):
        if mine != its:
            return f"{what} {its}, not {mine}" if isinstance(what, str) else f"{its}, not {mine}"
    return None if len(ours) == len(theirs) else "it has other parameters or buffers"


def _described(block: Any) -> list[tuple[str, Any]]:
    unit: FSDPState = block._fsdp_unit
    module = getattr(block, "_fsdp_wrapped_module", block)
    described: list[tuple[str, Any]] = [("it is of class", type(module).__name__)]
    for param in unit.group.params:
        members = [(member.names, list(member.shape)) for member in param.members]
        described.append(("its parameter is", _parameter(members)))
        described.append((f"{param.key} is of dtype", param.leaf.dtype))
        described.append((f"{param.key} is cut as", (param.packing.layout, param.packing.dim)))
    described.append(("its options are", unit.config))
    described.append(("its ranks are", unit.group.collectives.key))
    state = BlockState.of(block)
    for name, tensor in zip(state.names, state.tensors, strict=True):
        described.append(("its buffer is", f"{name} {list(tensor.shape)} {tensor.dtype}"))
    return described


def _parameter(members: list[tuple[tuple[str, ...], list[int]]]) -> str:
    return ", ".join(f"{'/'.join(names)} {shape}" for names, shape in members)


def difference_of_bodies(first: Body, other: Body) -> str | None:
    """What tells a traced block from the first one."""
    if first.text != other.text or first.numbers != other.numbers:
        return "it computes something else"
    for number, mine in first.captured.items():
        its = other.captured[number]
        if mine.shape != its.shape or not torch.equal(mine.cpu(), its.cpu()):
            return f"it computes with {_value(its)}, where block 0 has {_value(mine)}"
    return None


def difference_of_settings(first: BlockState, other: BlockState, number: int) -> str | None:
    """The first setting of block ``number`` that differs; a hint only, as not all settings matter.
    A block that knows its own number differs in that."""
    for mine, its in zip(first.settings, other.settings, strict=False):
        if mine != its and (mine[2], its[2]) != (0, number):
            return f"{its[0]}.{its[1]}".lstrip(".") + f" is {its[2]!r}, not {mine[2]!r}"
    return None


def captured_problem(body: Body) -> str | None:
    """Tensors from elsewhere that a block computes with; they would keep the values of now."""
    large = [value for value in body.captured.values() if value.numel() > 1]
    if not large:
        return None
    shapes = ", ".join(str(list(value.shape)) for value in large)
    return (
        f"a scanned block computes with tensors of shapes {shapes} that are neither its arguments, "
        f"nor its parameters, buffers or attributes. A loop would keep the values of now. Hand "
        f"them to the block as arguments, or register them as buffers"
    )


def _value(tensor: torch.Tensor) -> Any:
    return tensor.item() if tensor.numel() == 1 else f"other values of shape {list(tensor.shape)}"


def refuse_host_tensors(state: BlockState) -> None:
    """Raise ValueError for tensors in host memory: a loop takes them from the device."""
    pairs = zip(state.names, state.tensors, strict=True)
    on_host = [name for name, tensor in pairs if not on_device(tensor)]
    if on_host:
        raise ValueError(
            f"{', '.join(on_host[:5])} of a scanned block is in host memory, and a loop takes "
            f"tensors from the device. Register it as a buffer before the block is sharded, move "
            f"it to the XLA device, or, if it is a constant, make it a number"
        )


def refuse_hooks(state: BlockState) -> None:
    """Raise ValueError for hooks on modules in a block: they would run once, when it is traced."""
    if state.hooked:
        raise ValueError(
            f"{', '.join(state.hooked[:5])} in a scanned block has hooks; they would run when the "
            f"loop is traced, with tensors that have no values, and not in each step. Remove them, "
            f"or do not scan these blocks"
        )
