"""Step the parameters of a sharded model one by one while its backward still runs.

Words: a shard's gradient is *consumed* when the optimizer has made its step with it; it is gone
then. Always true: a gradient is consumed once in a backward pass, when all uses of its parameter
have added to it; the optimizer is the user's own object, whose groups, state and state dict stay as
they are. What could only be done with all gradients at hand (clipping by norm) is refused.
Loops over blocks with stacked parameters ask for the step themselves (``slice_steps``). Gathering
and reducing is ``unit``'s, the order of units ``backward``'s.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from xla_fsdp.fsdp.engine.module_state import units_in
from xla_fsdp.fsdp.engine.param_group import SliceSteps
from xla_fsdp.fsdp.engine.state import FSDPState, current_pass
from xla_fsdp.optim.post_local_sgd import PostLocalSGDOptimizer
from xla_fsdp.optim.slice_steps import OptimizerSliceSteps, can_slice


class StepInBackward:
    """What ``step_in_backward`` has put in place; ``remove`` undoes it.

    Shards hold this object by their hooks, so it holds nothing in turn: cycles would keep a model's
    memory until some later collection.

    Args:
        units: of the model.
        optimizer: over their shards.
        in_loops: whether loops may step slices of stacks.
    """

    def __init__(self, units: list[FSDPState], optimizer: Optimizer, *, in_loops: bool) -> None:
        self._in_loops = in_loops
        self._units = [weakref.ref(unit) for unit in units]
        self._optimizer = weakref.ref(optimizer)
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        unit_of = {
            shard: unit
            for unit in units
            for shard in unit.group.leaves
            if id(shard) in held and shard.requires_grad
        }
        self._hooks = [
            shard.register_post_accumulate_grad_hook(partial(self._consume, weakref.ref(unit)))
            for shard, unit in unit_of.items()
        ]
        # The number of the pass in which a loop stepped them.
        self._stepped: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        for unit in units:
            unit.group.stepper = self

    def remove(self) -> None:
        """Step no more in backward; gradients stay until ``optimizer.step()`` again."""
        for hook in self._hooks:
            hook.remove()
        for reference in self._units:
            if (unit := reference()) is not None:
                unit.group.stepper = None

    def slice_steps(self, stacks: Sequence[Tensor]) -> SliceSteps | None:
        """See ``stepping.Stepper``; for loops over blocks whose parameters are stacked."""
        optimizer = self._kept_optimizer()
        if not self._in_loops or not can_slice(optimizer, stacks):
            return None
        return OptimizerSliceSteps(optimizer, stacks, partial(self._note, stacks))

    def _note(self, stacks: Sequence[Tensor]) -> None:
        for stack in stacks:
            self._stepped[stack] = current_pass()

    def _kept_optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError(
                "the optimizer that step_in_backward was given is gone, and its state with it; "
                "keep it for as long as the model is trained"
            )
        return optimizer

    def _consume(self, reference: weakref.ref[FSDPState], shard: Tensor) -> None:
        unit = reference()
        if unit is None or shard.grad is None:
            return
        if not (unit.settings.is_last_backward and unit.context.is_last):
            return
        if self._stepped.get(shard, -1) == current_pass():
            raise RuntimeError(
                "a parameter of scanned blocks was stepped in their loop, and then got a gradient "
                "from elsewhere: the loss uses it directly, too. The step was made without that, "
                "so load the last checkpoint, and call step_in_backward(..., in_loops=False)"
            )
        optimizer = self._kept_optimizer()
        with _others_hidden(optimizer, shard):
            optimizer.step()
        shard.grad = None
        unit.context.wait_for(shard.detach())


@contextlib.contextmanager
def _others_hidden(optimizer: Optimizer, shard: Tensor) -> Iterator[None]:
    """Inside, no other parameter has a gradient: those of earlier passes, and of parameters that
    FSDP ignores, wait for their turn."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    others = [param for param in params if param is not shard and param.grad is not None]
    grads = [param.grad for param in others]
    for param in others:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in zip(others, grads, strict=True):
            param.grad = grad


def step_in_backward(
    model: nn.Module, optimizer: Optimizer, *, in_loops: bool = True
) -> StepInBackward:
    """Make ``optimizer``'s steps inside ``loss.backward()``: each shard is stepped as soon as its
    gradient is reduced, and the gradient freed at once.

    Call it once, before training. Loops stay as they are: ``optimizer.step()`` afterwards steps
    what has a gradient left (parameters that FSDP ignores), and schedulers go on as usual. Under
    ``model.no_sync()`` gradients accumulate, and the first backward outside makes the step. Loops
    over blocks with stacked parameters step slice by slice, where that comes to the same.

    A backward pass changes the model: run it once per step, and not with ``retain_graph``. Hooks on
    the optimizer's step run once for every parameter. Clip by value with a tensor hook, if need be.
    Scale no losses: steps would be made with the scaled gradients (``ShardedGradScaler`` refuses).

    Args:
        model: wrapped with FSDP, or a module that holds wrapped ones.
        optimizer: over the model's parameters; any that steps parameters one by one. Keep it: only
            a weak reference is kept here.
        in_loops: let loops over blocks with stacked parameters step each block's slices, so that
            gradients of all never exist; a loss that uses these parameters directly, too (a penalty
            on weights), is refused then.

    Returns:
        A handle whose ``remove()`` goes back to steps after backward.

    Raises:
        ValueError: if the model is not wrapped, the optimizer holds none of its shards or needs a
            closure, or averages replicas, or this has been done already.
    """
    units = units_in(model)
    problems = list(_problems(units, optimizer))
    if problems:
        raise ValueError("\n".join(problems))
    return StepInBackward(units, optimizer, in_loops=in_loops)


def _problems(units: list[FSDPState], optimizer: Optimizer) -> Iterator[str]:
    if not units:
        yield (
            "the model has no FSDP units, whose gradients are complete one after the other; wrap "
            "it first, or call optimizer.step() after backward"
        )
        return
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if not any(id(shard) in held for unit in units for shard in unit.group.leaves):
        yield (
            f"{type(optimizer).__name__} holds no shard of the model; create it after wrapping, "
            f"from model.parameters()"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        yield f"{type(optimizer).__name__} needs a closure, which runs backward itself"
    if isinstance(optimizer, PostLocalSGDOptimizer):
        yield (
            "PostLocalSGDOptimizer averages once all parameters are stepped, and here they are "
            "stepped one by one; call its step() after backward"
        )
    if any(unit.group.steps_in_backward for unit in units):
        yield "units of the model are stepped in backward already; remove() that first"
