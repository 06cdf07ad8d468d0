"""Step each parameter of a sharded model during backward, as soon as its gradient is complete.

Invariants: a shard is stepped once in a backward pass, when all uses of its parameter have added to
its gradient, which is freed at once. Groups and state are those of the user's optimizer.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from xla_fsdp.fsdp.engine.module_state import units_in
from xla_fsdp.fsdp.engine.param import held_shape
from xla_fsdp.fsdp.engine.param_group import CannotSliceError
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.engine.thread import current_pass
from xla_fsdp.optim.held_params import held_elsewhere
from xla_fsdp.optim.model_averagers import PostLocalSGDOptimizer
from xla_fsdp.optim.optimizers import (
    STEPS_SLICES_OF,
    StepWatch,
    device_options,
    make_state,
    needs_closure,
    params_of,
    shallow_copy,
    steps_elementwise,
)


def step_in_backward(
    model: nn.Module, optimizer: Optimizer, *, in_loops: bool = True
) -> StepInBackward:
    """Make ``optimizer``'s steps inside ``loss.backward()``: each shard is stepped as soon as its
    gradient is reduced, and the gradient is freed at once.

    Call it once, before training. Training loops need no change: ``optimizer.step()`` steps the
    parameters that still have a gradient (those that FSDP ignores), and schedulers work as usual.
    Under ``model.no_sync()`` gradients accumulate, and the first backward outside makes the step; a
    second one outside before ``optimizer.step()`` makes another, which warns.

    A loss of another model must not reach this one's parameters, as a GAN's generator's reaches the
    discriminator: a forward whose inputs were computed from parameters of another model raises
    RuntimeError, unless those of this model need no gradient then (``requires_grad_(False)``).

    A backward pass changes the model: run it once per step, and not with ``retain_graph``. Hooks on
    the optimizer's step run once for every parameter. To clip by value use a tensor hook. Do not
    scale losses: steps would use the scaled gradients (``ShardedGradScaler`` raises).

    Args:
        model: a sharded module, or one that holds sharded modules.
        optimizer: the optimizer of its parameters, any that steps each parameter independently.
            Hold a reference to it: the handle has a weak one only.
        in_loops: step stacked parameters slice by slice in the loop over their blocks, where the
            result is the same, so that the gradients of all blocks never exist at once. The loss
            must not use these parameters directly then (a penalty on weights); that raises.

    Returns:
        A handle whose ``remove()`` goes back to steps after backward.

    Raises:
        ValueError: if the model is not sharded or is stepped in backward already, or the optimizer
            holds none of its shards, needs a closure, or averages replicas.
    """
    units = units_in(model)
    problems = list(_problems(units, optimizer))
    if problems:
        raise ValueError("\n".join(problems))
    return StepInBackward(model, units, optimizer, in_loops=in_loops)


def _problems(units: list[FSDPState], optimizer: Optimizer) -> Iterator[str]:
    if not units:
        yield (
            "the model has no FSDP units, whose gradients are complete one after the other; wrap "
            "it first, or call optimizer.step() after backward"
        )
        return
    held = {id(param) for param in params_of(optimizer)}
    if not any(id(shard) in held for unit in units for shard in unit.group.leaves):
        yield (
            f"{type(optimizer).__name__} holds no shard of the model; create it after wrapping, "
            f"from model.parameters()"
        )
    if needs_closure(optimizer):
        yield f"{type(optimizer).__name__} needs a closure, which runs backward itself"
    if isinstance(optimizer, PostLocalSGDOptimizer):
        yield (
            "PostLocalSGDOptimizer averages once all parameters are stepped, and here they are "
            "stepped one by one; call its step() after backward"
        )
    if any(unit.group.steps_in_backward for unit in units):
        yield "units of the model are stepped in backward already; remove() that first"


class StepInBackward:
    """The handle that ``step_in_backward`` returns."""

    # Shards hold this object by their hooks. It holds them, and the optimizer, by weak references
    # only: a cycle would keep the model's memory until some later garbage collection.

    def __init__(
        self, model: nn.Module, units: list[FSDPState], optimizer: Optimizer, *, in_loops: bool
    ) -> None:
        self._in_loops = in_loops
        self._model = weakref.ref(model)
        self._units = [weakref.ref(unit) for unit in units]
        self._optimizer = weakref.ref(optimizer)
        held = {id(param) for param in params_of(optimizer)}
        unit_of = {
            shard: unit
            for unit in units
            for shard in unit.group.leaves
            if id(shard) in held and shard.requires_grad
        }
        self._hooks: list[RemovableHandle] = [
            shard.register_post_accumulate_grad_hook(partial(self._step, weakref.ref(unit)))
            for shard, unit in unit_of.items()
        ]
        self._hooks.append(optimizer.register_step_pre_hook(StepWatch(self._before_step)))
        self._is_stepping = False
        # By parameter, the backward pass that has stepped it since the user's optimizer.step().
        self._passes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        for unit in units:
            unit.group.stepper = self

    def remove(self) -> None:
        """Go back to steps by ``optimizer.step()`` after backward."""
        for hook in self._hooks:
            hook.remove()
        for reference in self._units:
            if (unit := reference()) is not None:
                unit.group.stepper = None

    def slice_steps(self, stacks: Sequence[Tensor]) -> OptimizerSliceSteps | None:
        """Return the steps of ``stacks`` for a loop over blocks; None if it must not step them."""
        optimizer = self._live_optimizer()
        if not self._in_loops or not can_slice(optimizer, stacks):
            return None
        make_state(optimizer, stacks)  # a loop steps nothing that has none
        return OptimizerSliceSteps(optimizer, stacks, self._note)

    def refuse_losses_of_others(self, root: FSDPState, inputs: Sequence[Tensor]) -> None:
        """Raise RuntimeError if ``inputs`` of the model with this root were computed from
        trained parameters that are neither the model's nor the optimizer's, unless nothing of the
        model is trained now."""
        is_root = root.settings.is_root and root.settings.is_last_backward
        if not (is_root and torch.is_grad_enabled()):
            return
        model, optimizer = self._model(), self._live_optimizer()
        units = [unit for each in self._units if (unit := each()) is not None]
        own = [leaf for unit in units for leaf in unit.group.leaves]
        if model is None or not any(leaf.requires_grad for leaf in own):
            return
        known = {id(each) for each in (*own, *model.parameters(), *params_of(optimizer))}
        if any(id(leaf) not in known for leaf in _trained_before(inputs)):
            kind = type(getattr(model, "module", model)).__name__  # of what a wrapper wraps
            raise RuntimeError(
                f"a {kind}, whose steps lie in backward, was called with an input that depends on "
                f"parameters of another model. If the loss is to train the other model only (as a "
                f"GAN's generator), backward would step the {kind}, too: call "
                f"requires_grad_(False) of the {kind} before this forward, and "
                f"requires_grad_(True) after backward. If it is to train both, shard them as one "
                f"module with one optimizer, or leave out the steps in backward: "
                f"Recipe(step_in_backward=False)"
            )

    def _before_step(self, optimizer: Optimizer) -> None:
        if not self._is_stepping and optimizer is self._optimizer():  # no copy that steps slices
            self._passes = WeakTensorKeyDictionary()

    def _note(self, param: Tensor) -> None:
        if self._passes.get(param, current_pass()) != current_pass():
            warnings.warn(
                "backward ran again before optimizer.step() was called, on a model that is stepped "
                "in backward: each backward made a step of its own. Let gradients accumulate under "
                "model.no_sync(), and call optimizer.step() after each backward outside of it; to "
                "skip steps, step after backward",
                stacklevel=2,
            )
            self._passes = WeakTensorKeyDictionary()  # one warning for each such backward
        self._passes[param] = current_pass()

    def _live_optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError(
                "the optimizer that step_in_backward was given is gone, and its state with it; "
                "keep it for as long as the model is trained"
            )
        return optimizer

    def _step(self, reference: weakref.ref[FSDPState], shard: Tensor) -> None:
        unit = reference()
        if unit is None or shard.grad is None:
            return
        if not (unit.settings.is_last_backward and unit.schedule.is_last):
            return
        if self._passes.get(shard) == current_pass():
            raise RuntimeError(
                "a parameter of scanned blocks was stepped in their loop, and then got a gradient "
                "from elsewhere: the loss uses it directly, too. The step was made without that, "
                "so load the last checkpoint, and call step_in_backward(..., in_loops=False)"
            )
        optimizer = self._live_optimizer()
        self._is_stepping = True
        try:
            with _other_grads_hidden(optimizer, shard):
                optimizer.step()
        finally:
            self._is_stepping = False
        self._note(shard)
        shard.grad = None
        unit.schedule.finish_first([shard.detach()])


def _trained_before(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the parameters that autograd reaches from ``tensors``."""
    waiting = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            yield leaf
        waiting += [before for before, _ in node.next_functions]


@contextlib.contextmanager
def _other_grads_hidden(optimizer: Optimizer, shard: Tensor) -> Iterator[None]:
    others = [param for param in params_of(optimizer) if param is not shard]
    grads = [(param, param.grad) for param in others if param.grad is not None]
    for param, _ in grads:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in grads:
            param.grad = grad


class OptimizerSliceSteps:
    """One step of an optimizer on stacked parameters [num_blocks, ...], made slice by slice in a
    loop over blocks, so that the gradients of all blocks never exist at once. A shallow copy of the
    optimizer, with its current options, steps one slice of each stack."""

    def __init__(
        self, optimizer: Optimizer, stacks: Sequence[Tensor], note: Callable[[Tensor], None]
    ) -> None:
        self._optimizer = optimizer
        self._stacks = list(stacks)
        self._note = note
        # By stack: the names of state that has its shape (moments); and other state after the step
        # (a count of steps), which is the same for all slices.
        self._names = [_elementwise_names(self._state(each), each) for each in self._stacks]
        self._others: list[dict[str, Any]] = []

    @property
    def kept(self) -> list[list[Tensor]]:
        """By stack: the stack itself, and the optimizer's state that has its shape."""
        return [
            [stack, *(self._state(stack)[name] for name in names)]
            for stack, names in zip(self._stacks, self._names, strict=True)
        ]

    def new_slices(self, grads: Sequence[Tensor], slices: Sequence[Tensor]) -> list[Tensor]:
        """Step one slice of each stack; return new values of ``slices``, which are those of all
        tensors of ``kept``. Raise CannotSliceError if the step creates or removes such state."""
        given = (each.clone() for each in slices)
        state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        params: list[Tensor] = []
        for stack, names, grad in zip(self._stacks, self._names, grads, strict=True):
            param = next(given).requires_grad_()
            param.grad = grad
            own = {name: _copy(each) for name, each in self._state(stack).items()}
            state[param] = {**own, **{name: next(given) for name in names}}
            params.append(param)
        self._step(params, state)
        new: list[Tensor] = []
        self._others = []
        for param, names in zip(params, self._names, strict=True):
            after = state[param]
            if _elementwise_names(after, param) != names:
                raise CannotSliceError
            new += [param.detach(), *(after[name] for name in names)]
            self._others.append({name: each for name, each in after.items() if name not in names})
        return new

    def take(self, stacks: Sequence[Tensor]) -> None:
        """Copy the new values ``stacks`` into all tensors of ``kept``, in that order."""
        with torch.no_grad():
            old = [each for tensors in self.kept for each in tensors]
            for each, new in zip(old, stacks, strict=True):
                each.copy_(new)
            for stack, others in zip(self._stacks, self._others, strict=True):
                if others:
                    _update(self._optimizer.state[stack], others)
                self._note(stack)

    def _state(self, stack: Tensor) -> dict[str, Any]:
        # Not by [], which would make an entry in the optimizer's defaultdict.
        return self._optimizer.state.get(stack, {})

    def _step(self, params: Sequence[Tensor], state: defaultdict[Tensor, dict[str, Any]]) -> None:
        """Step ``params`` by a shallow copy of the optimizer with this ``state``."""
        by_stack = {id(stack): each for stack, each in zip(self._stacks, params, strict=True)}
        groups = [
            {**group, "params": [by_stack[id(p)] for p in group["params"] if id(p) in by_stack]}
            for group in self._optimizer.param_groups
        ]
        copy = shallow_copy(self._optimizer, state, groups)
        vars(copy)[STEPS_SLICES_OF] = self._optimizer  # for hooks that watch optimizers
        vars(copy).pop("step", None)  # the wrapper of a scheduler, which counts calls
        copy.step()


def can_slice(optimizer: Optimizer, stacks: Sequence[Tensor]) -> bool:
    """Return whether stepping slices gives the same result as stepping the stacks, and no hook on
    the optimizer or a stack (except the one that steps it) would see a difference."""
    held = {id(param) for param in params_of(optimizer)}
    return (
        _steps_slices_alike(optimizer)
        and all(id(stack) in held and _has_no_grad_or_hooks(stack) for stack in stacks)
        and not any(_has_other_shapes(optimizer.state.get(stack, {}), stack) for stack in stacks)
    )


def _steps_slices_alike(optimizer: Optimizer) -> bool:
    """Return whether the optimizer treats each element by itself, reads no values from the device,
    and has neither hooks nor a ``step`` that replaces that of its class."""
    hooks = itertools.chain(
        optimizer._optimizer_step_pre_hooks.values(),
        optimizer._optimizer_step_post_hooks.values(),
        _global_optimizer_pre_hooks.values(),
        _global_optimizer_post_hooks.values(),
    )
    wanted = device_options(type(optimizer)).items()
    own_step = vars(optimizer).get("step")
    return (
        steps_elementwise(optimizer)
        and not hasattr(optimizer, "inner")
        and all(isinstance(hook, StepWatch) for hook in hooks)
        and all(group[name] == value for group in optimizer.param_groups for name, value in wanted)
        and (own_step is None or getattr(own_step, "_wrapped_by_lr_sched", False))
        and not held_elsewhere(optimizer)
    )


def _has_no_grad_or_hooks(stack: Any) -> bool:
    hooks = stack._post_accumulate_grad_hooks or {}  # one is that of StepInBackward
    return stack.grad is None and not stack._backward_hooks and len(hooks) == 1


def _elementwise_names(state: dict[str, Any], like: Tensor) -> list[str]:
    return [
        name
        for name, value in state.items()
        if isinstance(value, Tensor) and value.dim() and value.shape == held_shape(like)
    ]


def _has_other_shapes(state: dict[str, Any], stack: Tensor) -> bool:
    tensors = (value for value in state.values() if isinstance(value, Tensor) and value.dim())
    return any(tensor.shape != held_shape(stack) for tensor in tensors)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and not value.dim() else value


def _update(state: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, Tensor) and isinstance(state.get(name), Tensor):
            state[name].copy_(value)
        else:
            state[name] = value
