"""``scan_blocks``: run blocks as one loop."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from xla_fsdp.fsdp.engine.module_state import is_fsdp_module
from xla_fsdp.fsdp.engine.stacked_params import stack_params
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.optim import guards
from xla_fsdp.scan.automatic import FEWEST_ROUNDS, scan_where_possible
from xla_fsdp.scan.block_scan import GATHER_ONCE_BELOW, BlockScan, Options
from xla_fsdp.scan.checks import are_stacked, find_problems, plan_of
from xla_fsdp.scan.errors import NoLoopError


def scan_blocks(
    blocks: nn.ModuleList | nn.Sequential | Sequence[nn.Module],
    *,
    remat: str | Sequence[str] = "full",
    gather_once_below: int = GATHER_ONCE_BELOW,
    stacked: bool = False,
    offload_activations: bool = False,
) -> BlockScan:
    """Run blocks, each sharded as a unit of its own, as one While loop. The size of the program and
    its compile time then do not depend on the number of blocks.

    The forward of the model stays as it is, if it calls the blocks in order: ``for block in blocks:
    x = block(x, ...)``; it may keep what they return. Parameters, their names, optimizers and
    checkpoints do not change.

    Blocks compute the same, but for numbers in arithmetic, which become inputs of the loop. If
    several kinds of blocks take turns, an iteration runs one of each. Blocks that differ at either
    end run beside the loop, as units by themselves.

    With ``stacked``, parameters of the same name in all blocks become one parameter, [number of
    blocks, *shape of the shard], under its name in the first block. Make the optimizer afterwards.
    State dicts and checkpoints do not change.

    Args:
        blocks: a container or a list of the blocks, in the order in which they are called; each
            returns one tensor of the shape and dtype of its first tensor argument.
        remat: "full" recomputes a block in backward from its input, "none" saves all activations, a
            list of names saves the outputs of these submodules of a block, and activations named by
            ``checkpoint_name``.
        gather_once_below: parameters of fewer elements are gathered once for all blocks, and stay
            unsharded from forward to backward.
        stacked: store the parameters of all blocks in stacks, so that neither tracing a step nor
            its program grows with the number of blocks.
        offload_activations: store each block's input and the activations that ``remat`` saves in
            host memory until backward; copies overlap with compute. Forward and backward must be
            in one program then: do not call ``torch_xla.sync()`` between them. Without effect on
            CPU.

    Returns:
        The scan; its ``remove()`` runs each block by itself again (stacked ones then compute with
        slices of their stacks).

    Raises:
        TypeError: if a block is not a module, or ``offload_activations`` not a bool.
        ValueError: if blocks are not units, none are alike, some cannot be stacked, or an option is
            invalid.
    """
    if not isinstance(offload_activations, bool):
        raise TypeError(f"offload_activations is {offload_activations!r}; give True or False")
    found: list[Any] = list(blocks)
    plan = plan_of(found)
    problems = find_problems(found, plan, stacked=stacked)
    if plan is None or problems:
        others = f"; and {len(problems) - 3} more problems like these" if problems[3:] else ""
        raise NoLoopError("; ".join(problems[:3]) + others)
    names = remat if isinstance(remat, str) else tuple(remat)
    in_loop = [found[number] for number in plan.numbers]
    scan = BlockScan(in_loop, Options(names, gather_once_below, offload_activations), plan.period)
    _warn_about_ignored([block._fsdp_unit for block in in_loop])
    for position in range(plan.period):
        units = [found[number]._fsdp_unit for number in plan.numbers_at(position)]
        if stacked and not are_stacked(units):
            _stack(units)
    for block in in_loop:
        block._fsdp_module_state.forward_override = scan
    return scan


def scan_containers(
    module: nn.Module, names: bool | str | Iterable[str] | None, *, stacked: bool = False
) -> Sequence[BlockScan]:
    """Call ``scan_blocks`` for containers in ``module``: those with these ``names``, or, for True,
    all that hold two or more units and nothing else. For "auto", let these run as loops where that
    is possible; for None, where the loops are also long enough to gain by it.

    Raises:
        ValueError: if there is no such container, or its blocks cannot be scanned.
    """
    inner = dict(module.named_modules())
    if names is None or names == "auto":
        fewest = FEWEST_ROUNDS if names is None else 2
        found = [list(each.children()) for each in inner.values() if holds_blocks(each)]
        scans = [scan_where_possible(blocks, fewest) for blocks in found]
        return [scan for scan in scans if scan is not None]
    if names is True:
        wanted = [name for name, each in inner.items() if holds_blocks(each)]
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


def holds_blocks(module: nn.Module) -> bool:
    """Return whether a container holds several units, and nothing else."""
    children = list(module.children())
    is_container = isinstance(module, (nn.ModuleList, nn.Sequential)) and not is_fsdp_module(module)
    return is_container and len(children) > 1 and all(is_fsdp_module(each) for each in children)


def _warn_about_ignored(units: Sequence[FSDPState]) -> None:
    if any(unit.settings.keeps_larger or not unit.settings.reshard_after_forward for unit in units):
        warnings.warn(
            "reshard_after_forward is ignored for scanned blocks: a loop holds the parameters of "
            "one block at a time",
            stacklevel=3,
        )


def _stack(units: Sequence[FSDPState]) -> None:
    for unit in units:
        unit.reshard()
    for params in zip(*(unit.group.params for unit in units), strict=True):
        stack_params(params)
    guards.install()  # report optimizers that were made before, with the unstacked parameters
