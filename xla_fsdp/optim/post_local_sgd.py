"""An optimizer that steps each replica by itself and averages the replicas now and then.

Invariants: parameters, groups and state are the wrapped optimizer's own objects, so schedulers,
hooks and checkpoints of either see the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from xla_fsdp.optim.distributed_optimizer import DelegatingOptimizer
from xla_fsdp.optim.high_precision import masters_of
from xla_fsdp.optim.model_averagers import ModelAverager

# The option of the first group that holds the averager's step: checkpoints of shards know
# parameters and groups only.
AVERAGER_STEP = "averager_step"


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
        # Not torch's own __init__: it would make groups and state of its own.
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

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)

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
