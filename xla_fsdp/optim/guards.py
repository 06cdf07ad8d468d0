"""Mend or refuse torch functions that would compute something wrong from shards without an error.

The first unit or tensor-parallel module of a process replaces functions of torch and torch_xla by
ones that are right for shards, or raise. A function that a script imported by name before that is
not guarded.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.utils import clip_grad as torch_clip_grad
from torch.nn.utils import parametrize
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from xla_fsdp.fsdp.engine import conversions
from xla_fsdp.fsdp.engine.param import FSDPParam, known_shard
from xla_fsdp.fsdp.engine.param_guards import begin_step, end_step, held_shape
from xla_fsdp.fsdp.engine.positional_state import forget_order, guard_state_dicts
from xla_fsdp.fsdp.engine.registry import (
    known_group,
    owners_of_grads,
    refuse_shown,
    slices_without_grads,
)
from xla_fsdp.fsdp.engine.shard_tensor import is_part, is_sharded
from xla_fsdp.optim.clip_grad import check_gradients, get_total_norm
from xla_fsdp.optim.initial_state import make_missing_states
from xla_fsdp.optim.traits import (
    StepWatch,
    acts_elementwise,
    needs_closure,
    params_of,
    steps_elementwise,
)
from xla_fsdp.state import save_guards
from xla_fsdp.xla import ops


class _OptimizerGuard:
    """Checks the parameters of optimizers before their first step, and again after a change."""

    def __init__(self) -> None:
        self._num_checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._is_registered = False

    def register(self) -> bool:
        """Check all optimizers from now on; return whether that is new."""
        is_new, self._is_registered = not self._is_registered, True
        if is_new:
            make_missing_states()
            register_optimizer_step_pre_hook(StepWatch(self._before_step))
            register_optimizer_step_post_hook(StepWatch(lambda optimizer: end_step()))
        return is_new

    def forget(self) -> None:
        """Check every optimizer again, as a new unit may have replaced its parameters."""
        self._num_checked.clear()

    def _before_step(self, optimizer: Optimizer) -> None:
        self._check(optimizer)
        _refuse_partial_stacks(optimizer)
        forget_order(optimizer)
        begin_step()

    def _check(self, optimizer: Optimizer) -> None:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._num_checked.get(optimizer) == count:
            return
        for param in params_of(optimizer):
            _refuse_replaced(optimizer, param)
        _refuse_empty_groups(optimizer)
        _warn_unless_elementwise(optimizer)
        self._num_checked[optimizer] = count


# Process-wide, not by rank, as are the functions that are replaced.
_installing = Lock()
_optimizer_guard = _OptimizerGuard()


def install() -> None:
    """Install the guards once; check optimizers again, as a new unit was made."""
    with _installing:
        ops.refuse_reduce_gradients_of(is_part)
        ops.before_gather_with_gradient(_warn_of_gather)
        _optimizer_guard.forget()
        if _optimizer_guard.register():
            _guard("clip_grad_norm_", _refuse_shards)
            _guard("get_total_norm", _count_all_ranks)
            _guard("clip_grads_with_norm_", _need_gradients_of_shards)
            save_guards.install()
            conversions.install()
            guard_state_dicts()
            parametrize.register_parametrization = _of_full_parameters(
                parametrize.register_parametrization
            )


def _warn_of_gather() -> None:
    warnings.warn(
        "torch_xla.core.functions.all_gather is differentiated: its backward returns this rank's "
        "slice of this rank's gradient, and leaves out those of the other ranks' losses. Write "
        "xla_fsdp.distributed.all_gather(x, dim), whose backward sums them",
        stacklevel=5,  # the caller of all_gather, which calls an autograd function
    )


def _guard(name: str, instead: Callable[[list[Tensor]], Callable[..., Any] | None]) -> None:
    """Let a function of ``torch.nn.utils``, under both names that it may have, first show
    ``instead`` its tensors; that may return what is to be called in its place."""
    original = getattr(torch.nn.utils, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        first, tensors = next(iter(bound.arguments.items()))
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        refuse_shown(given, f"torch.nn.utils.{name}")
        bound.arguments[first] = given
        return (instead(given) or original)(*bound.args, **bound.kwargs)

    setattr(torch.nn.utils, name, guarded)
    setattr(torch_clip_grad, name if hasattr(torch_clip_grad, name) else f"_{name}", guarded)


def _count_all_ranks(given: list[Tensor]) -> Callable[..., Tensor] | None:
    return get_total_norm if any(map(is_part, owners_of_grads(given))) else None


def _need_gradients_of_shards(given: list[Tensor]) -> None:
    check_gradients([known_group(param) for param in given], "clip_grads_with_norm_")


def _refuse_shards(given: list[Tensor]) -> None:
    if any(map(is_part, given)):
        raise RuntimeError(
            "torch.nn.utils.clip_grad_norm_ was given parameters sharded by xla_fsdp. Each "
            "rank would compute the norm of its own slices and scale by another factor. Call "
            "xla_fsdp.clip_grad_norm_ with the same arguments, or "
            "model.clip_grad_norm_(max_norm) on the outermost sharded module"
        )
    check_gradients([known_group(param) for param in given], "clip_grad_norm_")


def _of_full_parameters(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(module: Any, tensor_name: str, *args: Any, **kwargs: Any) -> Any:
        given = getattr(module, tensor_name, None)
        if isinstance(given, Tensor) and is_sharded(given):
            raise RuntimeError(
                f"a parametrization of {tensor_name} was registered, which is a shard by now. It "
                f"would compute with this rank's part. Register parametrizations before sharding: "
                f"the unit then shards what they compute from"
            )
        return original(module, tensor_name, *args, **kwargs)

    return guarded


def _refuse_replaced(optimizer: Optimizer, param: Tensor) -> None:
    known = known_shard(param)
    if known is not None and known.leaf is not param:
        now = "shard" if known.slots.part is None else "stack of shards of scanned blocks"
        raise ValueError(
            f"{type(optimizer).__name__} holds {_names(known)} as it was before wrapping; FSDP "
            f"trains the {now} that replaced it, which this optimizer would never change. Create "
            f"the optimizer after wrapping, from model.parameters()"
        )


def _refuse_partial_stacks(optimizer: Optimizer) -> None:
    """Raise RuntimeError if some blocks of a stack have no gradient, and others have."""
    for stack in params_of(optimizer):
        if not getattr(stack, "is_stack", False) or stack.grad is None:
            continue
        if missing := slices_without_grads(stack, held_shape(stack)[0]):
            known = known_shard(stack)
            name = "a stack" if known is None else f"the stack of {_names(known)}"
            raise RuntimeError(
                f"blocks {', '.join(map(str, missing))} have no gradient in {name}, and others "
                f"have: backward has not used them (layers that are dropped, detached, run "
                f"without gradients, or never called). A stack is stepped as one, so "
                f"{type(optimizer).__name__} would decay and move these, too. Give each block "
                f'parameters of its own: parallelize(..., "plain"), Recipe(stacked=False), or '
                f"scan_layers without stacked"
            )


def _refuse_empty_groups(optimizer: Optimizer) -> None:
    # A group chosen by name, as for weight decay, finds no parameter among flat shards.
    empty = [i for i, group in enumerate(optimizer.param_groups) if not group["params"]]
    known = map(known_shard, params_of(optimizer))
    flat = next((param for param in known if param is not None and param.is_flat), None)
    if empty and flat is not None:
        names = ", ".join(original.names[0] for original in flat.originals)
        raise ValueError(
            f"group {empty[0]} of {type(optimizer).__name__} is empty, and {flat.key} joins "
            f"{names}: with flatten_parameters=True an optimizer only sees whole units, so its "
            f"groups cannot tell their parameters apart. Set flatten_parameters=False to have "
            f"groups by parameter, or make one group"
        )


def _warn_unless_elementwise(optimizer: Optimizer) -> None:
    # An elementwise optimizer steps a shard, or a stack, as it would step the whole parameter.
    if getattr(optimizer, "steps_whole_parameters", False):
        return
    parts = [param for param in params_of(optimizer) if not _is_whole(param)]
    if parts and not steps_elementwise(optimizer) and not acts_elementwise(optimizer):
        name = type(optimizer).__name__
        stacks = [param for param in parts if getattr(param, "is_stack", False)]
        blocks = held_shape(stacks[0])[0] if stacks else 0
        given = f"stacks, each of one parameter of {blocks} blocks" if stacks else "shards"
        by = (
            f"Leave the model unsharded, and step it by xla_fsdp.optim.ZeroRedundancyOptimizer("
            f"params, {name}, ...), which takes a closure,"
            if needs_closure(optimizer)
            else f"Step these by xla_fsdp.optim.WholeParameterOptimizer(params, {name}, ...),"
        )
        warnings.warn(
            f"{name} is not known to treat every element of a parameter by itself, and was given "
            f"{given}: its steps may differ from those of whole parameters. {by} or say by a "
            f"static method is_elementwise(options) of its class that they do not",
            stacklevel=4,
        )


def _is_whole(param: Tensor) -> bool:
    """Return whether ``param`` is a parameter of the original model, as it was there."""
    if getattr(param, "is_stack", False) or is_part(param):
        return False
    known = known_shard(param)
    return known is None or [held_shape(param)] == [each.whole_shape for each in known.originals]


def _names(param: FSDPParam) -> str:
    # For a flat shard it is not known which of its originals the optimizer holds.
    names = [original.names[0] for original in param.originals]
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
