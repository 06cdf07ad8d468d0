"""An optimizer's step on stacks, made slice by slice by a loop that has one slice's gradient at a
time.

Why: gradients of all slices need never exist. Words: see ``shard_stacks``.
Always true: it is the user's optimizer that steps, on stand-ins for a slice of each stack, with the
options that its groups have now, and what it keeps (moments, counts of steps) stays where it is.
Where that would not come to the same as a step on whole stacks, there is none.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from xla_fsdp.fsdp.engine.guards import is_guard
from xla_fsdp.fsdp.engine.optimizer_traits import device_options, steps_elementwise
from xla_fsdp.fsdp.engine.param_group import CannotSliceError


class OptimizerSliceSteps:
    """One step of an optimizer on some of its parameters, which are stacks.

    Args:
        optimizer: of which ``can_slice`` holds for these stacks.
        stacks: parameters of it.
        on_take: called when the step is made.
    """

    def __init__(
        self, optimizer: Optimizer, stacks: Sequence[Tensor], on_take: Callable[[], None]
    ) -> None:
        self._optimizer = optimizer
        self._stacks = list(stacks)
        self._on_take = on_take
        self._names = [_kept_names(self._state(each), each) for each in self._stacks]
        self._others: list[dict[str, Any]] = []

    @property
    def kept(self) -> list[list[Tensor]]:
        """See ``stepping.SliceSteps``."""
        return [
            [stack, *(self._state(stack)[name] for name in names)]
            for stack, names in zip(self._stacks, self._names, strict=True)
        ]

    def new_slices(self, grads: Sequence[Tensor], slices: Sequence[Tensor]) -> list[Tensor]:
        """See ``stepping.SliceSteps``."""
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
        for param, names in zip(params, self._names, strict=True):
            if _kept_names(state[param], param) != names:
                raise CannotSliceError
        self._others = [
            {name: each for name, each in state[param].items() if name not in names}
            for param, names in zip(params, self._names, strict=True)
        ]
        return [
            each
            for param, names in zip(params, self._names, strict=True)
            for each in (param.detach(), *(state[param][name] for name in names))
        ]

    def take(self, stacks: Sequence[Tensor]) -> None:
        """See ``stepping.SliceSteps``."""
        with torch.no_grad():
            old = [each for kept in self.kept for each in kept]
            for each, new in zip(old, stacks, strict=True):
                each.copy_(new)
            for stack, others in zip(self._stacks, self._others, strict=True):
                if others:
                    _put(self._optimizer.state[stack], others)
        self._on_take()

    def _state(self, stack: Tensor) -> dict[str, Any]:
        """What is kept for a stack; the optimizer's own dict makes entries when it is asked."""
        return self._optimizer.state.get(stack, {})

    def _step(self, params: Sequence[Tensor], state: defaultdict[Tensor, dict[str, Any]]) -> None:
        """The optimizer's step on ``params`` in the place of its own."""
        by_stack = {id(stack): each for stack, each in zip(self._stacks, params, strict=True)}
        stand_in = object.__new__(type(self._optimizer))
        vars(stand_in).update(vars(self._optimizer))
        vars(stand_in).pop("step", None)  # a scheduler's, which counts the steps of the user's
        stand_in.state = state
        stand_in.param_groups = [
            {**group, "params": [by_stack[id(p)] for p in group["params"] if id(p) in by_stack]}
            for group in self._optimizer.param_groups
        ]
        stand_in.step()


def can_slice(optimizer: Optimizer, stacks: Sequence[Tensor]) -> bool:
    """Whether steps of slices come to the same as those of the stacks, and nobody sees a
    difference: no hooks on steps or on a stack, but for the one that steps it."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return (
        _is_plain(optimizer)
        and all(id(stack) in held and _is_free(stack) for stack in stacks)
        and not any(_has_others(optimizer.state.get(stack, {}), stack) for stack in stacks)
    )


def _is_plain(optimizer: Optimizer) -> bool:
    """Whether it steps elements, without reading values, as its class does and unobserved."""
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
        and all(map(is_guard, hooks))
        and all(group[name] == value for group in optimizer.param_groups for name, value in wanted)
        and (own_step is None or getattr(own_step, "_wrapped_by_lr_sched", False))
    )


def _is_free(stack: Any) -> bool:
    hooks = stack._post_accumulate_grad_hooks or {}
    return stack.grad is None and not stack._backward_hooks and len(hooks) == 1


def _kept_names(state: dict[str, Any], like: Tensor) -> list[str]:
    """What is kept for every element."""
    return [
        name
        for name, value in state.items()
        if isinstance(value, Tensor) and value.dim() and value.shape == like.shape
    ]


def _has_others(state: dict[str, Any], stack: Tensor) -> bool:
    """Whether there is a tensor of another shape in it, so that elements are not all."""
    tensors = {name for name, value in state.items() if isinstance(value, Tensor) and value.dim()}
    return not tensors <= set(_kept_names(state, stack))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and not value.dim() else value


def _put(state: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, Tensor) and isinstance(state.get(name), Tensor):
            state[name].copy_(value)
        else:
            state[name] = value
