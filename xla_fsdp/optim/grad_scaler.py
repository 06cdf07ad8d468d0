"""Loss scaling for fp16 with sharded gradients.

Invariants: either all ranks make a step or none: an overflow in one rank's shard, or before
gradients were reduced, skips the step on all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xla_fsdp.fsdp.engine.param import known_group
from xla_fsdp.optim.optimizers import params_of, takes_found_inf
from xla_fsdp.xla import ops


class ShardedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for sharded gradients; used in the same way.

    An optimizer whose ``step`` takes ``found_inf`` (those of ``torch_xla.amp.syncfree``) decides on
    the device; for others the value is read, which ends the step's program before the optimizer.
    Parameters that ``step_in_backward`` steps are refused (RuntimeError): they are stepped with
    scaled gradients before an overflow anywhere is known.

    Args:
        init_scale: first factor.
        growth_factor: multiplies the factor after ``growth_interval`` steps without overflow.
        backoff_factor: multiplies the factor after an overflow.
        growth_interval: number of steps.
        enabled: False disables scaling: losses do not change, and ``step`` just steps.
        groups: replica groups that skip a step together (default: all ranks).
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        groups: list[list[int]] | None = None,
    ) -> None:
        super().__init__("xla", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._groups = groups

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        _check_steps_after_backward(optimizer)
        # True allows fp16 gradients, which torch refuses; shards of fp16 parameters have them.
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        # A rank without gradients must join the all-reduce; ignored parameters may be on the CPU.
        here = [value.to(found_inf.device) for value in found.values()]
        own = torch.stack([torch.zeros_like(found_inf), *here]).max()
        if ops.world_size() > 1:
            own = ops.all_reduce("max", own, self._groups)
        return {inv_scale.device: own}

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        if takes_found_inf(optimizer):
            [kwargs["found_inf"]] = optimizer_state["found_inf_per_device"].values()
            return optimizer.step(*args, **kwargs)
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)


def _check_steps_after_backward(optimizer: torch.optim.Optimizer) -> None:
    for param in params_of(optimizer):
        found = known_group(param)
        if found is not None and found.steps_in_backward:
            raise RuntimeError(
                f"{type(optimizer).__name__} was given to a ShardedGradScaler; step_in_backward "
                f"makes its steps: with scaled gradients, overflows or not. The last backward has "
                f"changed the model so. Start again with compute_dtype=torch.bfloat16 and no "
                f"scaler, or without step_in_backward"
            )
