"""Loops that come by themselves: what ordinary wrapping runs as a loop where nobody can tell.

Nothing that works one by one may fail here. So a block's call is put off, as in any loop, but an
output that is used too early is computed then, one block after the other, and whatever no loop can
run goes on so. Only blocks that are recomputed (``checkpoint_module``) become a loop: a loop
recomputes, too, and forwards that are recomputed already run twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.engine.thread import current_pass, this_thread
from xla_fsdp.fsdp.engine.transitions import UnitState
from xla_fsdp.nn.activation_checkpoint import in_region, is_checkpointed, regions_run_once
from xla_fsdp.scan.block_inputs import Arguments
from xla_fsdp.scan.block_scan import (
    BlockScan,
    Options,
    Pass,
    module_of,
    run_alone,
)
from xla_fsdp.scan.checks import find_problems, plan_of
from xla_fsdp.scan.errors import NoLoopError
from xla_fsdp.scan.placeholder import Placeholder
from xla_fsdp.scan.plan import Plan
from xla_fsdp.scan.tracing import BlockTrace, Template, trace_block
from xla_fsdp.xla import ops

_logger = logging.getLogger("xla_fsdp")

ADVICE = "Give scan_layers=False to the unit around these blocks"

FEWEST_ROUNDS = 8
"""Of loops that nobody has asked for."""


class AutomaticScan(BlockScan):
    """Runs blocks as a loop in the forwards that allow it, and one by one in all others.

    Args:
        blocks: FSDP modules.
        period: block n has parameters and buffers like block n + period.

    Attributes:
        why: why the latest forward, and after one that trained all others, ran one by one; empty if
            it was a loop.
    """

    is_automatic = True

    def __init__(self, blocks: Sequence[Any], period: int) -> None:
        super().__init__(blocks, Options(), period)

    def __setstate__(self, state: tuple[Any, Options, int]) -> None:
        super().__setstate__(state)
        self.why = ""
        self._draws = False

    def run(self, unit: FSDPState, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the call of one block: return a placeholder, or the output."""
        if self._pass is not None and self._pass.next_unit is not unit:
            self._give_up(f"block {len(self._pass.calls)} was left out, or another called twice")
        for each in Arguments.of((args, kwargs)).tensors:
            if isinstance(each, Placeholder) and (
                self._pass is None or each is not self._pass.last
            ):
                each.clone()  # computes it: it is of other blocks, or of an earlier one
        is_first = self._blocks[0]() is not None and unit is self._blocks[0]()._fsdp_unit
        if not self._may_loop(unit) or (self._pass is None and not is_first):
            self._run_called()
            return unit.run(forward, args, kwargs)
        before, why = self._pass, ""
        try:
            result = super().run(unit, forward, args, kwargs)
        except Exception as error:  # if it is the user's, it is raised again below
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
        else:
            self._wait_for_next(unit)
            return result
        # Not in the handler: the error's traceback would keep tensors of the loop.
        self._pass = before
        del before
        self._give_up(why)
        return unit.run(forward, args, kwargs)

    def _wait_for_next(self, unit: FSDPState) -> None:
        waiting = unit.schedule.deferred
        if self in waiting:
            waiting.remove(self)
        if self._pass is not None:
            waiting.append(self)

    def finish(self) -> None:
        """Run the blocks that were called and have not run, as the forward ends."""
        if self._pass is not None:
            self._give_up(f"the forward called the first {len(self._pass.calls)} blocks only")

    def drop(self) -> None:
        """Forget the blocks that were called and have not run, as the forward has raised."""
        self._pass = None

    # ------------------------------------------------------------ what allows a loop

    def _may_loop(self, unit: FSDPState) -> bool:
        trains = torch.is_grad_enabled()
        # In training without gradients somebody may recompute: then with the same random numbers.
        evaluates = not trains and not any(block.training for block in self._living_blocks())
        is_inside = bool(this_thread.units) and current_pass() == -1 and not in_region()
        return is_inside and (evaluates or (trains and unit.settings.trains_in_loop))

    def _living_blocks(self) -> list[Any]:
        return [block for reference in self._blocks if (block := reference()) is not None]

    def _begin(self, blocks: list[Any], given: Arguments) -> Pass:
        if problem := next(_problems_now(blocks), None):
            raise NoLoopError(problem)
        return super()._begin(blocks, given)

    def _trace(self, template: Template, *, trains: bool) -> BlockTrace:
        trace = trace_block(template, trains=trains, undo=True)
        self._draws |= trace.body.draws_random_numbers
        return trace

    def _collects(self, kept: Sequence[int], length: int) -> bool:
        if others := [at for at in kept if at < length - 2]:
            raise NoLoopError(f"the forward keeps the output of block {others[0]}")
        return False

    def _run_all(self, current: Pass) -> Tensor:
        last, current.last = current.last, None
        result = super()._run_all(current)
        if last is not None:
            last.late = current
        self.why = "" if torch.is_grad_enabled() else self.why
        return result

    def _one_by_one(self, current: Pass, plan: Plan, x: Tensor, others: Sequence[Tensor]) -> Tensor:
        again = replace(current, given=[x, *others])
        with regions_run_once():  # this recomputes already
            for number in range(plan.first, plan.stop):
                x = run_alone(again, number, x)
        self.why = "gradients are differentiated again"
        self._train_one_by_one()
        return x

    # ------------------------------------------------------------ what ends one

    def _give_up(self, why: str) -> None:
        """Run the blocks that were called one by one, and from now on all that are trained."""
        if why != self.why and ops.rank() == 0:
            _logger.debug("blocks run one by one: %s", why)
        self.why = why
        if torch.is_grad_enabled():
            self._train_one_by_one()
        self._run_called()

    def _train_one_by_one(self) -> None:
        for block in self._living_blocks():
            block._fsdp_unit.settings.trains_in_loop = False

    def _run_called(self) -> None:
        current, self._pass = self._pass, None
        if current is not None:
            with current.around.restored():
                current.run_called()

    def _compute(self, placeholder: Placeholder) -> None:
        """Compute an output that is used before the last block is called, or after it."""
        current, is_late = placeholder.late or self._pass, placeholder.late is not None
        if current is None or (is_late and self._draws):
            return  # the placeholder raises
        # Off in the forward of an autograd.Function, and in inference mode, which has no graph.
        if not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled():
            raise NoLoopError(
                f"an autograd.Function was called with the output of block {placeholder.block} "
                f"before the last block was called, and would not see how it was computed. {ADVICE}"
            )
        self._pass = current
        self._give_up(f"the forward uses the output of block {placeholder.block}")


def scan_where_possible(blocks: Sequence[Any], fewest: int = 2) -> AutomaticScan | None:
    """Let units run as a loop in the forwards that allow it; return None if none can, or only one
    with less than ``fewest`` rounds."""
    plan = plan_of(blocks)
    if plan is None or plan.times < fewest or find_problems(blocks, plan, stacked=False):
        return None
    in_loop = [blocks[number] for number in plan.numbers]
    scan = AutomaticScan(in_loop, plan.period)
    for block in in_loop:
        block._fsdp_module_state.forward_override = scan
    return scan


def why_one_by_one(blocks: Sequence[Any]) -> str:
    """Return why units with an ``AutomaticScan`` run one by one; "" if they do not."""
    return blocks[0]._fsdp_module_state.forward_override.why or next(_problems_now(blocks), "")


def _problems_now(blocks: Sequence[Any]) -> Iterator[str]:
    """Yield what forbids a loop now, and may be otherwise in another forward."""
    if torch.nn.modules.module._has_any_global_hook() or torch._C._len_torch_dispatch_stack():
        yield "hooks of all modules, or a mode of torch's dispatcher, would miss what a loop runs"
    first = blocks[0]._fsdp_unit
    for at, block in enumerate(blocks):
        module, unit = module_of(block), block._fsdp_unit
        if not is_checkpointed(module):
            yield f"block {at} is not recomputed (checkpoint_module)"
        if module._forward_pre_hooks:
            yield f"block {at} has hooks before its forward"
        settings = unit.settings
        if not settings.gathers_in_backward or unit.state is not UnitState.SHARDED:
            yield f"block {at} keeps its parameters"
        if settings.forward_prefetch or settings.backward_prefetch:
            yield f"block {at} is gathered with others"
        pairs = zip(unit.group.leaves, first.group.leaves, strict=True)
        if any(own.requires_grad != other.requires_grad for own, other in pairs):
            yield f"other parameters are trained in block {at} than in block 0"
