"""An optimizer that steps every replica by itself and has an averager join them now and then.

Always true: parameters, groups and state are the wrapped optimizer's own objects, so schedulers,
hooks and checkpoints of either see the same. When and with whom to average is left to
``model_averagers``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from xla_fsdp.optim.high_precision import masters_of
from xla_fsdp.optim.joined_hooks import HooksOfOthers
from xla_fsdp.optim.model_averagers import ModelAverager

AVERAGER_STEP = "averager_step"

"""Name of the option of the first group that holds the averager's step: checkpoints of shards know
parameters and groups only."""


class PostLocalSGDOptimizer(HooksOfOthers):
    """Post-local SGD (arxiv.org/abs/1808.07217): ``optim`` steps, then ``averager`` averages if it
    is time to.

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
    def hooked(self) -> list[Optimizer]:
        """See ``HooksOfOthers``: hooks after a step run before an average."""
        return [self.optim]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The local optimizer's."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The local optimizer's."""
        return self.optim.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One local step, and an average if it is time to. Returns what the closure returned."""
        result = self.optim.step() if closure is None else self.optim.step(closure)
        self.averager.average_parameters(self.param_groups, masters_of(self.optim))
        self.param_groups[0][AVERAGER_STEP] = self.averager.step
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The local optimizer's."""
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The local optimizer's."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """That of the local optimizer, and under ``step`` the number of the averager's next."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The same back, or what a checkpoint of shards holds of it. A state without the averager's
        step starts the averager anew, with a warning."""
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
