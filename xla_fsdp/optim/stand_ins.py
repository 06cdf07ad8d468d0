"""An optimizer that steps other tensors in the place of the parameters it was given.

Words: a *stand-in* is the tensor that the *inner* optimizer steps for a parameter: a slice of it,
or a copy in another dtype. Always true: both optimizers have the same groups with the same options,
those of the outer one counting before a step (schedulers change them) and those of the inner one
after it. What stand-ins are and when they hold values is left to subclasses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from xla_fsdp.fsdp.engine.optimizer_traits import device_options, takes_found_inf

NOT_OPTIONS = ("params", "param_names")


class StandInOptimizer(Optimizer, ABC):
    """Base of optimizers that step stand-ins.

    Args:
        params: parameters, or groups of them, as for any optimizer.
        inner_class: called as ``inner_class(groups, **defaults)``.
        defaults: options of the inner optimizer.
    """

    def __init__(
        self, params: Iterable[Any], inner_class: Callable[..., Optimizer], defaults: dict[str, Any]
    ) -> None:
        self._inner: Optimizer | None = None
        defaults = {**device_options(inner_class), **defaults}
        super().__init__(params, {})  # what the inner optimizer makes of defaults comes back below
        self._inner = inner_class([self._as_inner(g) for g in self.param_groups], **defaults)
        self.defaults = self._inner.defaults
        self._take_options()

    @property
    def inner(self) -> Optimizer:
        """The optimizer of the stand-ins."""
        assert self._inner is not None  # set by __init__
        return self._inner

    @property
    def takes_found_inf(self) -> bool:
        """Whether the inner optimizer decides on the device whether to step."""
        return takes_found_inf(self.inner)

    @property
    def is_built(self) -> bool:
        """Whether there is an inner optimizer; torch's ``__init__`` adds groups before that."""
        return self._inner is not None

    @abstractmethod
    def stand_in(self, param: nn.Parameter) -> nn.Parameter:
        """What the inner optimizer has for ``param``; made when it is first asked for."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to both optimizers."""
        if self.is_built:
            self._hand_options()  # or changes by a scheduler since the last step would be undone
        super().add_param_group(param_group)
        if self.is_built:
            self.inner.add_param_group(self._as_inner(self.param_groups[-1]))
            self._take_options()

    def _as_inner(self, group: dict[str, Any]) -> dict[str, Any]:
        options = {name: value for name, value in group.items() if name not in NOT_OPTIONS}
        return {**options, "params": [self.stand_in(param) for param in group["params"]]}

    def _hand_options(self) -> None:
        _copy_options(self.param_groups, self.inner.param_groups)

    def _take_options(self) -> None:
        _copy_options(self.inner.param_groups, self.param_groups)

    def _step_inner(self, found_inf: Any) -> None:
        self._hand_options()
        if found_inf is None:
            self.inner.step()
        else:
            self.inner.step(found_inf=found_inf)  # type: ignore[call-overload]
        self._take_options()

    def _check_found_inf(self, found_inf: Any) -> None:
        if found_inf is not None and not self.takes_found_inf:
            raise ValueError(
                f"{type(self.inner).__name__} cannot skip a step by found_inf; use an optimizer of "
                f"torch_xla.amp.syncfree, or decide on the host whether to step"
            )


def _copy_options(here: list[dict[str, Any]], there: list[dict[str, Any]]) -> None:
    for source, target in zip(here, there, strict=True):
        target.update({n: value for n, value in source.items() if n not in NOT_OPTIONS})
