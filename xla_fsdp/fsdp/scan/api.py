"""``scan_blocks``: say which blocks run as one loop, and how.

Always true: blocks are checked, and all problems are found, before anything is changed.
What happens when they are called is in ``blocks``.

Keep the parameters of blocks that run as a loop in stacks, one for each parameter.

Always true: all problems are found before anything is changed; blocks that are stacked already
stay so. What a stack is, and what becomes of state dicts, is in ``shard_stacks``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from xla_fsdp.fsdp.engine import guards
from xla_fsdp.fsdp.engine.module_state import is_unit
from xla_fsdp.fsdp.engine.param import FSDPParam
from xla_fsdp.fsdp.engine.stacked_params import stack_params
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.scan.block_scan import GATHER_ONCE_BELOW, BlockScan, Options
from xla_fsdp.fsdp.scan.identical import find_problems


def scan_blocks(
    blocks: nn.ModuleList | nn.Sequential | Sequence[nn.Module],
    *,
    remat: str | Sequence[str] = "full",
    gather_once_below: int = GATHER_ONCE_BELOW,
    stacked: bool = False,
    offload_activations: bool = False,
) -> BlockScan:
    """Run identical blocks, each sharded as a unit of its own, as one loop of the program, which is
    then as large, and compiles as fast, for any number of them.

    A forward that calls the blocks in order, ``for block in blocks: x = block(x, ...)``, stays as
    it is. Parameters, names, optimizers and checkpoints are those of blocks that run one by one.

    With ``stacked``, an optimizer sees one parameter, [number of blocks, *shape of the shard], for
    all that go by one name in the blocks, under the name that it has in the first; so make it
    afterwards. State dicts and checkpoints stay those of blocks that run one by one.

    Args:
        blocks: a container of the blocks, or a list, in the order in which they are called. All are
            of one class, with parameters of the same shapes, and compute the same; each returns one
            tensor of the shape and dtype of its first tensor argument.
        remat: "full" computes a block again in backward from its input, "none" keeps all
            activations, a list keeps those of these names: submodules of a block, or
            ``name_activation``.
        gather_once_below: parameters of fewer elements travel once for all blocks, and are held
            whole from forward to backward.
        stacked: keep the parameters of all blocks in stacks for good, so that neither tracing a
            step nor its program grows with the number of blocks.
        offload_activations: what blocks keep for backward (each one's input, and what ``remat``
            keeps) waits in the host's memory, [number of blocks, ...] each, copied there and back
            beside compute. A forward and its backward are then to be in one program: no
            ``torch_xla.sync()`` between them. On CPU, whose memory that is, it changes nothing.

    Returns:
        What the blocks share; its ``remove()`` lets them run one by one again (stacked ones then
        compute with slices of their stacks).

    Raises:
        TypeError: if something is no module, or no bool.
        ValueError: if blocks are no units, are not identical, cannot be stacked, or an option
            makes no sense.
    """
    if not isinstance(offload_activations, bool):
        raise TypeError(f"offload_activations is {offload_activations!r}; give True or False")
    found: list[Any] = list(blocks)
    problems = [
        f"block {at} ({type(each).__name__}) is not sharded; wrap each block first, or give "
        f"scan_layers=True together with auto_wrap_policy"
        for at, each in enumerate(found)
        if not is_unit(each)
    ]
    if not found:
        problems = ["there are no blocks to scan"]
    problems = problems or find_problems(found) or _find_stack_problems(found, stacked)
    if problems:
        others = f"; and {len(problems) - 3} more problems like these" if problems[3:] else ""
        raise ValueError("; ".join(problems[:3]) + others)
    names = remat if isinstance(remat, str) else tuple(remat)
    scan = BlockScan(found, Options(names, gather_once_below, offload_activations))
    _warn_about_ignored(found)
    if stacked:
        stack_blocks([block._fsdp_unit for block in found])
    for block in found:
        block._fsdp_attachment.runner = scan
    return scan


def _find_stack_problems(blocks: Sequence[Any], stacked: bool) -> list[str]:
    units = [block._fsdp_unit for block in blocks]
    problems = find_order_problems(units)
    return problems or (find_stacking_problems(units) if stacked else [])


def scan_containers(
    module: nn.Module, names: bool | str | Iterable[str], *, stacked: bool = False
) -> list[BlockScan]:
    """Scan containers of blocks in ``module``: those of these ``names``, or, for True, all that
    hold two or more units and nothing else; ``stacked`` as in ``scan_blocks``.

    Raises:
        ValueError: if there is no such container, or its blocks cannot be scanned.
    """
    inner = dict(module.named_modules())
    if names is True:
        wanted = [name for name, each in inner.items() if _holds_blocks(each)]
    else:
        wanted = [names] if isinstance(names, str) else list(names or ())
    missing = [name for name in wanted if not isinstance(inner.get(name), nn.Module)]
    if missing or not wanted:
        raise ValueError(
            f"scan_layers found no container {', '.join(missing)}".rstrip()
            + "; give the names of the nn.ModuleList or nn.Sequential that hold the blocks, and an "
            "auto_wrap_policy that makes each block a unit"
        )
    return [scan_blocks(list(inner[name].children()), stacked=stacked) for name in wanted]


def _holds_blocks(module: nn.Module) -> bool:
    children = list(module.children())
    is_container = isinstance(module, (nn.ModuleList, nn.Sequential)) and not is_unit(module)
    return is_container and len(children) > 1 and all(is_unit(each) for each in children)


def _warn_about_ignored(blocks: Sequence[Any]) -> None:
    units = [block._fsdp_unit for block in blocks]
    if any(unit.settings.keeps_larger or not unit.settings.reshard_after_forward for unit in units):
        warnings.warn(
            "reshard_after_forward is ignored for scanned blocks: a loop holds the parameters of "
            "one block at a time",
            stacklevel=3,
        )


def find_stacking_problems(units: Sequence[FSDPState]) -> list[str]:
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
        if unit.group.has_unreduced:
            problems.append(
                f"block {number} has gradients that wait to be reduced (no_sync); run the last "
                f"backward of the accumulation, or zero_grad(), before its parameters are stacked"
            )
    return problems


def find_order_problems(units: Sequence[FSDPState]) -> list[str]:
    """Why blocks of which some are stacked cannot run as a loop."""
    parts = [[param.slots.part for param in unit.group.params] for unit in units]
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


def stack_blocks(units: Sequence[FSDPState]) -> None:
    """Stack all parameters of these blocks; ``find_stacking_problems`` has found none."""
    if _are_stacked(units):
        return
    for unit in units:
        unit.reshard()
    group = units[0].group
    for params in zip(*(unit.group.params for unit in units), strict=True):
        stack_params(params, group)
    guards.install()  # optimizers that hold what was stacked are to be told


def _are_stacked(units: Sequence[FSDPState]) -> bool:
    return any(param.slots.part is not None for param in units[0].group.params)


def _problems(param: FSDPParam, first: FSDPParam) -> Iterator[str]:
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


def _other_stack(number: int, length: int) -> str:
    return (
        f"block {number} of {length} is not at this place of a stack of {length} blocks; blocks "
        f"that were stacked together are scanned together, in the same order"
    )
