"""Averages of replicas that train apart, at some steps and over some ranks; post-local SGD.

Invariants: whether to average depends on the step's number alone, so all ranks take the same
decision, and there is one program for each kind of step. The number is counted on the host and
never enters a program.

The semantics are those of ``torch.distributed.algorithms.model_averaging``.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.param import is_sharded
from xla_fsdp.optim.distributed_optimizer import DelegatingOptimizer
from xla_fsdp.optim.high_precision import masters_of
from xla_fsdp.optim.rank_groups import Groups, check_groups, find_slice_problems, own_group

# Tensors of fewer elements travel in one buffer: below some 100 KB the start of a collective costs
# more than its bytes. Larger ones travel by themselves, without a copy.
BUCKETED_BELOW = 2**15

# The option of the first group that holds the averager's step: checkpoints of shards know
# parameters and groups only.
AVERAGER_STEP = "averager_step"

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


class ModelAverager(ABC):
    """Base of the averagers. A step is one call of ``average_parameters``.

    Args:
        warmup_steps: number of first steps that average nothing; average gradients in them.
        groups: lists of ranks that average among themselves (default: one of all ranks).

    Attributes:
        step: number of the next step, from 0; what is saved of an averager.

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
        """Return the ranks that average at a ``step`` after the warm-up; None for none."""

    def average_parameters(
        self, params: Params, masters: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        """Average the parameters that have a gradient, if it is time to; count the step.

        Args:
            params: parameters of a model, or ``param_groups`` of an optimizer.
            masters: ``masters_of(optimizer)`` of one that keeps fp32 values of parameters between
                steps (``PostLocalSGDOptimizer`` gives them). These are averaged, and the parameters
                rounded from them. Without, the optimizer's next step would undo the average.

        Raises:
            ValueError: for shards, of which ranks hold different slices, unless the averager was
                given ``groups``: of replicas of the same slices; for tensor-parallel parameters of
                which the ranks of a group hold different slices.
            TypeError: if ``params`` holds anything else.
        """
        groups = self.groups_of(self.step) if self.step >= self.warmup_steps else None
        if groups is not None:
            _average(list(self._with_grad(params)), masters or {}, groups)
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
    """Averages over the whole group every ``period`` steps after the warm-up, at its end first
    (post-local SGD, arxiv.org/abs/1808.07217).

    Args:
        period: in steps; 1 averages always (which costs as much as averaging gradients).
        warmup_steps: number of first steps that average nothing.
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
    """Averages over small groups often and over large ones seldom (hierarchical SGD,
    arxiv.org/abs/2010.12998). At a step that several periods divide, the longest counts.

    Args:
        period_group_size_dict: period in steps to the number of ranks that average then, shortest
            period first; the last number must be that of all ranks of a group. A group of ``n``
            are the ranks that follow each other.
        warmup_steps: number of first steps that average nothing. As in torch, periods are counted
            from step 0.
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


class PostLocalSGDOptimizer(DelegatingOptimizer):
    """Post-local SGD (arxiv.org/abs/1808.07217): ``optim`` steps, then ``averager`` averages
    if it is time to.

    In the warm-up of the averager, average gradients before each step
    (``xm.reduce_gradients(optimizer)``, say); afterwards do not.

    Args:
        optim: the local optimizer, over the whole parameters of a replica.
        averager: decides at which steps replicas are averaged.
    """

    def __init__(self, optim: Optimizer, averager: ModelAverager) -> None:
        # Not torch's own __init__, which would make other groups and state than those of optim,
        # which schedulers, hooks and checkpoints of either are to see.
        self.optim = optim
        self.averager = averager
        self.defaults = optim.defaults

    def __repr__(self) -> str:
        return f"PostLocalSGDOptimizer({self.optim!r}, {type(self.averager).__name__})"

    @property
    def delegates(self) -> list[Optimizer]:
        """The local optimizer; so hooks after a step run before an average."""
        return [self.optim]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a local step, and average if it is time to; return what the closure returned."""
        result = self.optim.step() if closure is None else self.optim.step(closure)
        self.averager.average_parameters(self.param_groups, masters_of(self.optim))
        self.param_groups[0][AVERAGER_STEP] = self.averager.step
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the local optimizer's state, and under ``step`` that of the averager."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, or what a checkpoint of shards has of it.

        A state without the averager's step starts the averager anew, with a warning.
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


@torch.no_grad()
def _average(params: list[Tensor], masters: Mapping[Tensor, Tensor], groups: Groups) -> None:
    _average_in_place([masters.get(param, param) for param in params], groups)
    for param in params:
        if param in masters:
            param.copy_(masters[param])


def _average_in_place(tensors: Sequence[Tensor], groups: Groups) -> None:
    """Set every tensor to its average over the ranks of the caller's group.

    As in torch, values are divided before they are summed, in the tensors' own dtype.
    """
    size = len(groups[0])
    if size == 1:
        return
    for bucket in _buckets(tensors):
        if len(bucket) == 1:
            bucket[0].copy_(ops.all_reduce("sum", bucket[0] / size, groups))
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        average = ops.all_reduce("sum", flat / size, groups)
        numels = [tensor.numel() for tensor in bucket]
        for tensor, numel, start in zip(
            bucket, numels, accumulate(numels, initial=0), strict=False
        ):
            tensor.copy_(ops.cut(average, 0, start, numel).reshape(tensor.shape))


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    small: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    large = []
    for tensor in tensors:
        if tensor.numel() >= BUCKETED_BELOW:
            large.append([tensor])
        elif tensor.numel():
            small[tensor.dtype].append(tensor)
    return [*small.values(), *large]
