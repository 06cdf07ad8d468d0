"""Step 16-bit parameters in fp32: with fp32 master weights, with stochastic rounding, or both.

Words: *wide* is the fp32 stand-in of a 16-bit parameter; a *master* is a wide value that is kept
between steps. Always true: masters lie in the optimizer's state, as entries of the parameter's
shape, so they are sharded, sliced, saved and resharded like any other state; without masters
nothing is kept, and the wide value of a step is the parameter's own. Parameters of other dtypes are
stepped as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xla_fsdp.distributed.random_bits import random_bits, salt_of
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.optimizer_traits import is_elementwise
from xla_fsdp.optim.rounding import LOW_DTYPES, stochastic_round
from xla_fsdp.optim.stand_ins import StandInOptimizer

MASTER = "master"

"""Name of the master weight in a parameter's state."""

ROUNDED_STEPS = "rounded_steps"

"""Name of the group option that counts steps with stochastic rounding, so that it is saved."""

WIDENED = (torch.bfloat16, torch.float16)


def masters_of(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """The masters that an optimizer keeps (or one that it wraps), by parameter. Who changes a
    parameter's value must change them, or the next step undoes it."""
    return {param: state[MASTER] for param, state in optimizer.state.items() if MASTER in state}


class HighPrecisionOptimizer(StandInOptimizer):
    """``inner_class`` over fp32 versions of bf16 and fp16 parameters.

    Gradients are widened, the step is made in fp32 with fp32 state, and the result is rounded to
    the parameter's dtype. For parameters on this rank, whole or shards: of a model wrapped with
    FSDP, of a plain one, or as the ``optimizer_class`` of ``ZeroRedundancyOptimizer``::

        HighPrecisionOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        ZeroRedundancyOptimizer(
            model.parameters(), HighPrecisionOptimizer, inner_class=torch.optim.AdamW, lr=1e-3
        )

    Random bits for rounding depend on the seed, the number of the step, the place of the parameter
    in the optimizer and, for shards and slices, on which of them it is; whole parameters, and equal
    shards in different sharding groups, get the same bits on every rank, so that replicas stay
    replicas. They come from no random number generator.

    With masters, a step begins with these: parameters that were changed by anything else since the
    last step get their old values again, unless ``masters_of(optimizer)`` are changed alike.

    Args:
        params: parameters, or groups of them.
        inner_class: any optimizer.
        master_weights: keep the fp32 values between steps. Without, what rounding cuts off is lost,
            so updates below half a bit of a parameter never happen; unless rounding is stochastic.
        stochastic_rounding: round bf16 parameters at random, right on average. With masters it
            changes only what forward and backward see.
        seed: of the rounding; equal on all ranks.
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
        self._wide: dict[nn.Parameter, nn.Parameter] = {}
        self._keeps_masters, self._rounds, self._seed = master_weights, stochastic_rounding, seed
        super().__init__(params, inner_class, defaults)
        self._settle_new()

    @staticmethod
    def is_elementwise(options: Mapping[str, Any]) -> bool:
        """See ``elementwise``: it is if what it wraps is."""
        return is_elementwise(options["inner_class"], options)

    def stand_in(self, param: nn.Parameter) -> nn.Parameter:
        """See ``StandInOptimizer``."""
        if param.dtype not in WIDENED:
            return param
        if self._rounds and param.dtype not in LOW_DTYPES:
            raise ValueError(
                f"stochastic_rounding=True, and a parameter of shape {tuple(param.shape)} is "
                f"{param.dtype}; it can round to {LOW_DTYPES}. Use master_weights alone"
            )
        if param not in self._wide:
            self._wide[param] = nn.Parameter(_widened(param), requires_grad=False)
        return self._wide[param]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        if self._rounds:
            param_group = {ROUNDED_STEPS: 0, **param_group}
        super().add_param_group(param_group)
        if self.is_built:
            self._settle_new()

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, found_inf: Tensor | None = None
    ) -> Any:
        """One step of ``inner_class`` in fp32.

        Args:
            closure: computes loss and gradients anew; called once.
            found_inf: for the optimizers of ``torch_xla.amp.syncfree``: not 0 skips the step.

        Returns:
            What the closure returned.

        Raises:
            ValueError: if ``found_inf`` is given to an optimizer that does not take it.
        """
        self._check_found_inf(found_inf)
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        salts = self._salts(stepped)
        for param in stepped:
            self._widen(param)
        self._step_inner(found_inf)
        for param in stepped:
            self._narrow(param, salts.get(param))
        for group in self.param_groups if self._rounds else ():
            group[ROUNDED_STEPS] += 1
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but entries keep their dtypes: torch casts state to that of the parameter,
        which would cut masters off."""
        super().load_state_dict(state_dict)
        for group in self.param_groups if self._rounds else ():
            group.setdefault(ROUNDED_STEPS, 0)  # saved without rounding
        order = [param for group in self.param_groups for param in group["params"]]
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        for param, name in zip(order, names, strict=True):
            for entry, value in state_dict["state"].get(name, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    on = self.state[param][entry].device
                    self.state[param][entry] = value.detach().to(on, copy=True)

    # ------------------------------------------------------------ one parameter

    def _widen(self, param: nn.Parameter) -> None:
        """Give the inner optimizer value, gradient and state of ``param``."""
        wide, state = self.stand_in(param), self.state[param]
        if wide is not param and param.grad is not None:
            master = state.pop(MASTER, None)  # or an optimizer takes its state for made already
            if master is not wide:  # there is none yet, or it was loaded
                wide.data = _widened(param) if master is None else master
            wide.grad = param.grad.float()
        self.inner.state[wide] = state

    def _narrow(self, param: nn.Parameter, salt: Tensor | None) -> None:
        """Take them back; nothing wide is left but the master."""
        wide = self.stand_in(param)
        self.state[param] = self.inner.state.pop(wide)
        if wide is param:
            return
        if salt is None:
            param.copy_(wide)
        else:
            param.copy_(stochastic_round(wide, random_bits(wide.shape, salt)))
        wide.grad = None
        if self._keeps_masters:
            self.state[param][MASTER] = wide
        else:
            _empty(wide)

    def _settle_new(self) -> None:
        """What the inner optimizer has made of new stand-ins becomes the parameters' state, and
        their values go: until its first step a parameter may still be given others."""
        for group in self.param_groups:
            for param in group["params"]:
                wide = self.stand_in(param)
                if wide in self.inner.state:
                    self.state[param] = self.inner.state.pop(wide)
                if wide is not param and MASTER not in self.state.get(param, {}):
                    _empty(wide)

    def _salts(self, params: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """What makes rounding of each parameter its own, on the device, by one upload."""
        if not self._rounds:
            return {}
        wanted = [param for param in params if param in self._wide]
        if not wanted:
            return {}
        order = [(p, group[ROUNDED_STEPS]) for group in self.param_groups for p in group["params"]]
        found = {
            param: salt_of(self._seed, steps, index, getattr(param, "shard_rank", 0))
            for index, (param, steps) in enumerate(order)
        }
        numbers = torch.tensor([found[param] for param in wanted], dtype=torch.int32)
        salts = ops.upload(numbers) if wanted[0].device.type == "xla" else numbers
        return dict(zip(wanted, salts.split(1), strict=True))


def _widened(param: Tensor) -> Tensor:
    return param.detach().float()


def _empty(wide: nn.Parameter) -> None:
    wide.data = wide.new_empty(0)
