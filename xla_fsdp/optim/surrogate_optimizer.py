"""Base of optimizers whose inner optimizer steps other tensors than the given parameters.

Invariants: both optimizers have the same groups. Options are copied to the inner optimizer before a
step, as schedulers change those of the outer one, and back after it, as a step may change them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xla_fsdp.distributed.collectives import Collectives
from xla_fsdp.distributed.mesh import Mesh
from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.distributed.placement import TensorPlacement
from xla_fsdp.optim.optimizers import device_options, takes_found_inf, watch_steps
from xla_fsdp.state.optim import NOT_OPTIONS
from xla_fsdp.xla import ops


class SurrogateOptimizer(Optimizer, ABC):
    """An optimizer whose ``inner`` one steps surrogates of its parameters: slices of them, copies
    in another dtype, or the whole parameters that they are shards of."""

    inner: Optimizer

    def __init__(
        self, params: Iterable[Any], inner_class: Callable[..., Optimizer], defaults: dict[str, Any]
    ) -> None:
        watch_steps()
        defaults = {**device_options(inner_class), **defaults}
        super().__init__(params, {})  # without defaults: they are copied from the inner optimizer
        self.inner = inner_class([self._as_inner(g) for g in self.param_groups], **defaults)
        self.defaults = self.inner.defaults
        self._options_from_inner()
        self._take_initial_state()

    @property
    def takes_found_inf(self) -> bool:
        """Whether the inner optimizer decides on the device whether to step."""
        return takes_found_inf(self.inner)

    @abstractmethod
    def surrogates(self, param: nn.Parameter) -> list[nn.Parameter]:
        """Return what the inner optimizer steps for ``param``, always the same tensors."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to both optimizers."""
        is_built = "inner" in vars(self)  # torch's __init__ adds groups earlier
        if is_built:
            self._options_to_inner()  # _options_from_inner would undo changes by a scheduler
        super().add_param_group(param_group)
        if is_built:
            self.inner.add_param_group(self._as_inner(self.param_groups[-1]))
            self._options_from_inner()
            self._take_initial_state()

    @abstractmethod
    def _take_initial_state(self) -> None:
        """Free surrogates that are new, and take state that the inner optimizer has made."""

    def _as_inner(self, group: dict[str, Any]) -> dict[str, Any]:
        options = {name: value for name, value in group.items() if name not in NOT_OPTIONS}
        params = [each for param in group["params"] for each in self.surrogates(param)]
        return {**options, "params": params}

    def _options_to_inner(self) -> None:
        _copy_options(self.param_groups, self.inner.param_groups)

    def _options_from_inner(self) -> None:
        _copy_options(self.inner.param_groups, self.param_groups)

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        found_inf: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Make one step of the inner optimizer. Where ranks share parameters, all must call it.

        Args:
            closure: computes loss and gradients again; called once.
            found_inf: for the optimizers of ``torch_xla.amp.syncfree``: a scalar, not 0 skips the
                step; the same on every rank, as ``ShardedGradScaler`` makes it.
            others: given to the ``step`` of the inner optimizer.

        Raises:
            ValueError: if ``found_inf`` is given to an optimizer that does not take it, or if
                flattened parameters have state of another shape than their own.
        """
        self._check_found_inf(found_inf)
        if found_inf is not None:
            others["found_inf"] = found_inf
        result = None
        if closure:  # callers of torch's own ZeRO pass 0, too
            with torch.enable_grad():
                result = closure()
        self._step_surrogates(others)
        return result

    @abstractmethod
    def _step_surrogates(self, options: dict[str, Any]) -> None:
        """Give the surrogates values and gradients, ``_step_inner``, and take the results."""

    def _step_inner(self, options: dict[str, Any]) -> None:
        self._options_to_inner()
        self.inner.step(**options)
        self._options_from_inner()

    def _check_found_inf(self, found_inf: Any) -> None:
        if found_inf is not None and not self.takes_found_inf:
            raise ValueError(
                f"{type(self.inner).__name__} cannot skip a step by found_inf; use an optimizer of "
                f"torch_xla.amp.syncfree, or decide on the host whether to step"
            )


class OwnParts:
    """Selects this rank's part of tensors; its numbers among others are inputs of programs, not
    constants, so that all ranks have one program."""

    def __init__(self) -> None:
        self._ranks: dict[Hashable, Tensor] = {}
        self._axes: dict[Mesh, AxisComm] = {}

    def of_shards(self, shards: Tensor, collectives: Collectives) -> Tensor:
        """Return this rank's of ``shards``, [num_shards, ...], as [1, ...]."""
        if collectives.num_shards == 1:
            return shards
        key = (collectives.key, collectives.rank)
        if key not in self._ranks:
            self._ranks[key] = ops.upload(torch.tensor([collectives.rank], dtype=torch.int32))
        return shards.index_select(0, self._ranks[key])

    def of_global(self, value: Tensor, placement: TensorPlacement | None) -> Tensor:
        """Return the local part of a global tensor of tensor parallelism."""
        if placement is None or placement.dim is None:
            return value
        axis = self._axes.setdefault(placement.mesh, AxisComm(placement.mesh))
        return axis.own_slice(value, placement.dim)


def free(surrogate: nn.Parameter) -> None:
    """Free value and gradient of a surrogate."""
    surrogate.grad = None
    surrogate.data = surrogate.new_empty(0)


def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for here, there in zip(source, target, strict=True):
        there.update({name: value for name, value in here.items() if name not in NOT_OPTIONS})
