"""Step 16-bit parameters in fp32: with fp32 master weights, with stochastic rounding, or both.

Invariants: a master weight is an entry of its parameter's state and has its shape, so it is
sharded, saved and resharded like any other state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xla_fsdp.distributed.random_bits import random_bits, salt_of
from xla_fsdp.optim.guards import fitting
from xla_fsdp.optim.optimizers import is_elementwise, params_of
from xla_fsdp.optim.surrogate_optimizer import SurrogateOptimizer, free
from xla_fsdp.xla import ops

# The entry of a parameter's state that holds its master weight.
MASTER = "master"

# The group option that counts steps with stochastic rounding, so that it is saved.
ROUNDED_STEPS = "rounded_steps"

STEPPED_IN_FP32 = (torch.bfloat16, torch.float16)

# What can be rounded to stochastically. Not fp16: its range is narrower than that of fp32.
LOW_DTYPES = (torch.bfloat16,)


def masters_of(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Return the fp32 master weights in an optimizer's state, by parameter.

    Code that changes a parameter's value must change its master, too, or the next step undoes it.
    """
    return {param: state[MASTER] for param, state in optimizer.state.items() if MASTER in state}


def stochastic_round(value: Tensor, bits: Tensor) -> Tensor:
    """Round to one of the two bf16 neighbours at random, so that the expected result is ``value``.

    Values that bf16 can represent, infinities and NaNs do not change.

    Args:
        value: fp32.
        bits: random int32 of the same shape, of which the low 16 bits are used.

    Returns:
        A bf16 tensor of the same shape.
    """
    # bf16 is the upper 16 bits of fp32. Adding 16 random bits to the lower ones carries into the
    # upper ones with a probability proportional to the lower ones, for either sign.
    as_bits = ops.bitcast(value.detach(), torch.int32)
    rounded = (as_bits + (bits & 0xFFFF)) & ~0xFFFF
    exact = ops.bitcast(rounded, torch.float32).to(torch.bfloat16)
    return torch.where(torch.isfinite(value), exact, value.to(torch.bfloat16))


class HighPrecisionOptimizer(SurrogateOptimizer):
    """Step fp32 versions of bf16 and fp16 parameters by an ``inner_class``.

    Gradients are cast to fp32, the step is made in fp32 with fp32 state, and the result is rounded
    to the parameter's dtype. Parameters of other dtypes are stepped as they are. Parameters may be
    shards of an FSDP model, unsharded, or slices, if this is the ``optimizer_class`` of
    ``ZeroRedundancyOptimizer``::

        HighPrecisionOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        ZeroRedundancyOptimizer(
            model.parameters(), HighPrecisionOptimizer, inner_class=torch.optim.AdamW, lr=1e-3
        )

    Random bits for rounding are a hash of the seed, the number of the step, the index of the
    parameter in the optimizer and the index of the shard or slice. So replicas, and equal shards in
    different sharding groups, get the same bits on every rank and remain equal. No random number
    generator is used.

    With master weights, a step starts from these: other changes of a parameter since the last step
    are lost, unless ``masters_of(optimizer)`` are changed, too.

    Args:
        params: parameters, or groups of them.
        inner_class: any optimizer.
        master_weights: store the fp32 values between steps. Otherwise updates of less than half a
            bit of the parameter are lost, unless rounding is stochastic.
        stochastic_rounding: round bf16 parameters at random, without bias. With master weights it
            affects forward and backward only.
        seed: seed of the rounding, the same on all ranks.
        defaults: options of ``inner_class``.

    Raises:
        ValueError: for neither masters nor stochastic rounding, or for stochastic rounding of fp16.
    """

    def __init__(
        self,
        params: Iterable[Any],
        inner_class: Callable[..., Optimizer],
        *,
        master_weights: bool = True,
        stochastic_rounding: bool = False,
        seed: int = 0,
        **defaults: Any,
    ) -> None:
        if not (master_weights or stochastic_rounding):
            raise ValueError(
                "master_weights=False and stochastic_rounding=False: nothing would differ from "
                "stepping 16-bit parameters as they are. Set one of them, or use inner_class itself"
            )
        self._fp32: dict[nn.Parameter, nn.Parameter] = {}
        self._keeps_masters, self._rounds, self._seed = master_weights, stochastic_rounding, seed
        super().__init__(params, inner_class, defaults)

    @staticmethod
    def is_elementwise(options: Mapping[str, Any]) -> bool:
        """Return whether the inner optimizer treats every element by itself."""
        return is_elementwise(options["inner_class"], options)

    def surrogates(self, param: nn.Parameter) -> list[nn.Parameter]:
        """Return the fp32 version of ``param``."""
        return [self.surrogate(param)]

    def surrogate(self, param: nn.Parameter) -> nn.Parameter:
        """Return the fp32 version of a 16-bit parameter; any other parameter itself."""
        if param.dtype not in STEPPED_IN_FP32:
            return param
        if self._rounds and param.dtype not in LOW_DTYPES:
            raise ValueError(
                f"stochastic_rounding=True, and a parameter of shape {tuple(param.shape)} is "
                f"{param.dtype}; it can round to {LOW_DTYPES}. Use master_weights alone"
            )
        if param not in self._fp32:
            self._fp32[param] = nn.Parameter(param.detach().float(), requires_grad=False)
        return self._fp32[param]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._rounds:
            param_group = {ROUNDED_STEPS: 0, **param_group}
        super().add_param_group(param_group)

    def _step_surrogates(self, options: dict[str, Any]) -> None:
        stepped = [param for param in params_of(self) if param.grad is not None]
        salts = self._salts(stepped)
        for param in stepped:
            self._to_inner(param)
        self._step_inner(options)
        for param in stepped:
            self._from_inner(param, salts.get(param))
        for group in self.param_groups if self._rounds else ():
            group[ROUNDED_STEPS] += 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but without casts: torch would cast master weights to the 16-bit
        dtype of their parameters."""
        state_dict = fitting(self, state_dict)
        super().load_state_dict(state_dict)
        for group in self.param_groups if self._rounds else ():
            group.setdefault(ROUNDED_STEPS, 0)  # saved without rounding
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        for param, name in zip(params_of(self), names, strict=True):
            for entry, value in state_dict["state"].get(name, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    device = self.state[param][entry].device
                    self.state[param][entry] = value.detach().to(device, copy=True)

    def _to_inner(self, param: nn.Parameter) -> None:
        """Move value, gradient and state of ``param`` to the inner optimizer."""
        fp32, state = self.surrogate(param), self.state[param]
        if fp32 is not param and param.grad is not None:
            # Popped, as an optimizer creates its state only if there is no entry at all.
            master = state.pop(MASTER, None)
            if master is not fp32:  # there is none yet, or it was loaded
                fp32.data = param.detach().float() if master is None else master
            fp32.grad = param.grad.float()
        self.inner.state[fp32] = state

    def _from_inner(self, param: nn.Parameter, salt: Tensor | None) -> None:
        """Move value and state back to ``param``, and free fp32 tensors that are no state."""
        fp32 = self.surrogate(param)
        self.state[param] = self.inner.state.pop(fp32)
        if fp32 is param:
            return
        if salt is None:
            param.copy_(fp32)
        else:
            param.copy_(stochastic_round(fp32, random_bits(fp32.shape, salt)))
        fp32.grad = None
        if self._keeps_masters:
            self.state[param][MASTER] = fp32
        else:
            free(fp32)

    def _take_initial_state(self) -> None:
        # The first step copies fp32 values, as parameters may change before it.
        for param in params_of(self):
            fp32 = self.surrogate(param)
            if fp32 in self.inner.state:
                self.state[param] = self.inner.state.pop(fp32)
            if fp32 is not param and MASTER not in self.state.get(param, {}):
                free(fp32)

    def _salts(self, params: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Return hash inputs for rounding, int32 [1] on the parameters' device, by one upload."""
        rounded = [param for param in params if param in self._fp32] if self._rounds else []
        if not rounded:
            return {}
        order = [(p, group[ROUNDED_STEPS]) for group in self.param_groups for p in group["params"]]
        salt = {
            param: salt_of(self._seed, steps, index, getattr(param, "shard_rank", 0))
            for index, (param, steps) in enumerate(order)
        }
        numbers = torch.tensor([salt[param] for param in rounded], dtype=torch.int32)
        salts = ops.upload(numbers) if rounded[0].device.type == "xla" else numbers
        return dict(zip(rounded, salts.split(1), strict=True))
