"""Average the parameters of replicas at some steps, as in post-local SGD.

Semantics are those of ``torch.distributed.algorithms.model_averaging``.
Invariants: whether to average depends on the number of the step alone, so all ranks decide alike.
That number is counted on the host and is no constant of a program, so there is one program for each
kind of step.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xla_fsdp.fsdp.engine.shard_tensor import is_sharded
from xla_fsdp.optim.high_precision import masters_of
from xla_fsdp.optim.optimizers import make_state
from xla_fsdp.optim.rank_groups import (
    Groups,
    average_,
    check_groups,
    find_slice_problems,
    own_group,
)

# Option of the first group that holds the averager's step, as checkpoints of shards save only
# parameters' state and groups.
AVERAGER_STEP = "averager_step"

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


class ModelAverager(ABC):
    """Base of the averagers. A step is one call of ``average_parameters``.

    Args:
        warmup_steps: number of first steps without averages; average gradients in them.
        groups: lists of ranks that average among themselves (default: one of all ranks).

    Attributes:
        step: number of the next step, from 0; save it with a checkpoint.

    Raises:
        ValueError: if ``warmup_steps`` is negative, or groups do not split the ranks evenly.
    """

    def __init__(
        self, warmup_steps: int = 0, groups: Sequence[Sequence[int]] | None = None
    ) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps is {warmup_steps}; give 0 or more")
        self.warmup_steps = warmup_steps
        self.groups = check_groups(groups)
        self._takes_shards = groups is not None
        self.step = 0

    @abstractmethod
    def groups_of(self, step: int) -> Groups | None:
        """Return the groups of ranks that average at a ``step`` after the warm-up, None if none."""

    @torch.no_grad()
    def average_parameters(
        self, params: Params, masters: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        """Average the parameters that have a gradient if this step is one to average at, and count
        the step.

        Args:
            params: parameters of a model, or ``param_groups`` of an optimizer.
            masters: ``masters_of(optimizer)`` of an optimizer with fp32 master weights, whose next
                step would otherwise undo the average. They are averaged, and the parameters rounded
                from them. (``PostLocalSGDOptimizer`` passes them.)

        Raises:
            ValueError: for FSDP shards, unless the averager was given ``groups`` of ranks that hold
                the same slices; for tensor-parallel parameters of which the ranks of a group hold
                different parts.
            TypeError: if ``params`` holds anything else.
        """
        groups = self.groups_of(self.step) if self.step >= self.warmup_steps else None
        if groups is not None:
            averaged, held = list(self._with_grad(params)), masters or {}
            average_([held.get(param, param) for param in averaged], groups)
            for param in averaged:
                if param in held:
                    param.copy_(held[param])
        self.step += 1

    def _with_grad(self, params: Params) -> Iterator[Tensor]:
        for each in params:
            if isinstance(each, Mapping):
                yield from self._with_grad(each["params"])
            elif not isinstance(each, Tensor):
                raise TypeError(
                    f"average_parameters was given a {type(each).__name__}; expected parameters, "
                    f"or the param_groups of an optimizer"
                )
            elif is_sharded(each) and not self._takes_shards:
                raise ValueError(
                    f"average_parameters was given a shard of shape {tuple(each.shape)}: ranks "
                    f"hold different slices of a parameter, whose average means nothing. Average "
                    f"replicas: models that are not wrapped with FSDP, or give groups of ranks "
                    f"that hold the same slices"
                )
            elif each.grad is not None:
                what = f"average_parameters: a parameter of shape {tuple(each.shape)}"
                for problem in find_slice_problems(each, own_group(self.groups), what):
                    raise ValueError(problem)
                yield each


class PeriodicModelAverager(ModelAverager):
    """Average over each group every ``period`` steps, first at the end of the warm-up (post-local
    SGD, arxiv.org/abs/1808.07217).

    Args:
        period: number of steps; 1 averages always (which costs as much as averaging gradients).
        warmup_steps: number of first steps without averages.
        groups: lists of ranks that average among themselves (default: one of all ranks).
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(warmup_steps, groups)
        if period < 1:
            raise ValueError(f"period is {period}; give 1 or more steps")
        if period == 1:
            _warn_about_every_step()
        self.period = period

    def groups_of(self, step: int) -> Groups | None:
        return self.groups if (step - self.warmup_steps) % self.period == 0 else None


class HierarchicalModelAverager(ModelAverager):
    """Average over small groups often and over large ones seldom (hierarchical SGD,
    arxiv.org/abs/2010.12998). At a step that several periods divide, the longest counts.

    Args:
        period_group_size_dict: numbers of ranks that average together, by period in steps, shortest
            period first; the last number must be that of all ranks of a group. Ranks that follow
            each other are averaged.
        warmup_steps: number of first steps without averages. As in torch, periods are counted from
            step 0.
        groups: lists of ranks that average among themselves (default: one of all ranks).

    Raises:
        ValueError: with every problem, if periods or sizes do not make a hierarchy.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int],
        warmup_steps: int = 0,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(warmup_steps, groups)
        problems = list(_hierarchy_problems(period_group_size_dict, len(self.groups[0])))
        if problems:
            raise ValueError("period_group_size_dict: " + "; ".join(problems))
        if list(period_group_size_dict)[-1] == 1:
            _warn_about_every_step()
        self.period_groups = {
            period: [g[at : at + size] for g in self.groups for at in range(0, len(g), size)]
            for period, size in period_group_size_dict.items()
        }

    def groups_of(self, step: int) -> Groups | None:
        due = [period for period in self.period_groups if step % period == 0]
        return self.period_groups[max(due)] if due else None


def _of_local(name: str) -> Any:
    """A method that calls that of the local optimizer."""
    return lambda self, *args, **kwargs: getattr(self.optim, name)(*args, **kwargs)


class PostLocalSGDOptimizer(Optimizer):
    """Step by ``optim``, then let ``averager`` average (post-local SGD, arxiv.org/abs/1808.07217).

    During the averager's warm-up, average gradients before each step, by
    ``xm.reduce_gradients(optimizer)`` for example; afterwards do not.

    Args:
        optim: the local optimizer, of the parameters of a replica.
        averager: decides at which steps replicas are averaged.
    """

    def __init__(self, optim: Optimizer, averager: ModelAverager) -> None:
        # Without super().__init__(), which would make groups and state; here they are properties,
        # those of optim, so that schedulers and checkpoints of either optimizer see the same.
        self.optim = optim
        self.averager = averager
        self.defaults = optim.defaults

    def __repr__(self) -> str:
        return f"PostLocalSGDOptimizer({self.optim!r}, {type(self.averager).__name__})"

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the local optimizer."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the local optimizer."""
        return self.optim.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step locally, average if due, and return the closure's result."""
        result = self.optim.step() if closure is None else self.optim.step(closure)
        self.averager.average_parameters(self.param_groups, masters_of(self.optim))
        self.param_groups[0][AVERAGER_STEP] = self.averager.step
        return result

    def make_state(self) -> None:
        """Give the local optimizer's parameters the state with which its first step begins."""
        make_state(self.optim)

    zero_grad = _of_local("zero_grad")
    add_param_group = _of_local("add_param_group")
    # Hooks get the local optimizer; those after a step run before the average.
    register_step_pre_hook = _of_local("register_step_pre_hook")
    register_step_post_hook = _of_local("register_step_post_hook")
    register_state_dict_pre_hook = _of_local("register_state_dict_pre_hook")
    register_state_dict_post_hook = _of_local("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _of_local("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _of_local("register_load_state_dict_post_hook")

    def state_dict(self) -> dict[str, Any]:
        """Return the local optimizer's state dict, with the averager's step under ``step``."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of ``state_dict``, or the state in a checkpoint of shards.

        Without the averager's step the averager starts at step 0, with a warning.
        """
        own = {name: value for name, value in state_dict.items() if name != "step"}
        self.optim.load_state_dict(own)
        step = state_dict.get("step", self.param_groups[0].get(AVERAGER_STEP))
        if step is None:
            warnings.warn(
                "the state dict has no 'step' of an averager (was it saved by the local optimizer "
                "alone?); the averager starts at step 0, with its warm-up",
                stacklevel=2,
            )
        self.averager.step = step or 0


def _hierarchy_problems(levels: Mapping[int, int], num_ranks: int) -> Iterator[str]:
    if not levels:
        yield "it is empty; give at least one period and its number of ranks"
        return
    periods, sizes = list(levels), list(levels.values())
    if periods[0] < 1:
        yield f"the shortest period is {periods[0]}; give 1 or more steps"
    if periods != sorted(periods):
        yield f"periods {periods} are not in increasing order"
    if sizes[-1] != num_ranks:
        yield f"the last number of ranks is {sizes[-1]}, expected {num_ranks}, a whole group"
    for size in sizes:
        if size < 1 or num_ranks % size:
            yield f"{size} ranks do not divide a group of {num_ranks}"


def _warn_about_every_step() -> None:
    warnings.warn(
        "parameters are averaged at every step, which costs no less than averaging gradients; "
        "a longer period is what saves traffic",
        stacklevel=3,
    )
