"""Parallel styles, and the mixin that runs a module's forward in its styles.

Invariants: a style has no state, so it may be applied to any number of modules. A parallel module
remains an instance of its original class, with its names and hooks; it can be copied and pickled.
Autograd functions inside of forward do all communication, so recomputing a forward, or tracing it
as the body of a loop, repeats the communication.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.distributed.placement import remember_placements

Forward = Callable[..., Any]


@dataclass(frozen=True)
class ParamCut:
    """How a style distributes one parameter of a module."""

    owner: nn.Module
    attribute: str  # its name in this module
    dim: int | None  # along which it is sharded; None if it is replicated

    @property
    def param(self) -> nn.Parameter:
        """The parameter; raises ValueError if it does not exist."""
        found = self.owner._parameters.get(self.attribute)
        if found is None:
            raise ValueError(
                f"a style cuts {self.attribute!r} of {type(self.owner).__name__}, which has no "
                f"such parameter; leave it out of what the style's cuts() returns"
            )
        return found


def own_cuts(module: nn.Module, dims: Mapping[str, int | None]) -> list[ParamCut]:
    """Return cuts of the parameters in ``dims`` that are not None."""
    present = {name for name, param in module._parameters.items() if param is not None}
    return [ParamCut(module, name, dim) for name, dim in dims.items() if name in present]


class ParallelStyle(ABC):
    """Base class of styles: how a module is parallelized."""

    def find_problems(self, module: nn.Module) -> Iterator[str]:
        """Yield why ``module`` does not support this style; sizes are checked elsewhere."""
        yield from ()

    def cuts(self, module: nn.Module) -> Sequence[ParamCut]:
        """Return how parameters of ``module`` are distributed; others do not change."""
        return ()

    @abstractmethod
    def run(
        self, module: nn.Module, forward: Forward, args: Any, kwargs: Any, axis: AxisComm, name: str
    ) -> Any:
        """Run a module's forward in this style, and return the output.

        Args:
            module: the module, whose parameters are distributed.
            forward: its forward, including the styles that were applied earlier.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
            axis: the ranks over which the module is parallelized.
            name: name of the module, for messages.
        """

    def __repr__(self) -> str:
        options = ", ".join(f"{k}={v}" for k, v in vars(self).items() if not k.startswith("_"))
        return f"{type(self).__name__}({options})"


@dataclass(frozen=True)
class AppliedStyle:
    """A style that is applied to one module."""

    style: ParallelStyle
    axis: AxisComm
    name: str

    def run(self, module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        return self.style.run(module, forward, args, kwargs, self.axis, self.name)


class ParallelModule:
    """Mixin for the class of a module that has styles."""

    _tensor_parallel: list[AppliedStyle]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward in its styles; the last one applied is the outermost."""
        module: Any = self
        remember_placements(module)
        forward: Forward = super().forward  # type: ignore[misc]
        for applied in self._tensor_parallel:
            forward = functools.partial(applied.run, module, forward)
        return forward(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        # Parameters may be new objects now, such as after a move to the device: restore placements.
        module: Any = super()._apply(fn, recurse)  # type: ignore[misc]
        remember_placements(module)
        return module


class _ParallelClass(type):
    """Metaclass of the classes made here, so that they are pickled by their original class."""


def apply_style(module: nn.Module, applied: AppliedStyle) -> None:
    """Add a style to a module."""
    if "_tensor_parallel" not in vars(module):
        original: Any = type(module)
        module.__class__ = parallel_class(original)
        vars(module)["_tensor_parallel"] = []
    vars(module)["_tensor_parallel"].append(applied)


@functools.cache
def parallel_class(original: Any) -> Any:
    """Return the subclass of ``original`` for modules with styles."""
    namespace = {"_parallel_original": original, "__module__": original.__module__}
    return _ParallelClass(f"Parallel{original.__name__}", (ParallelModule, original), namespace)


copyreg.pickle(_ParallelClass, lambda made: (parallel_class, (vars(made)["_parallel_original"],)))


@contextlib.contextmanager
def replaced_params(module: nn.Module, tensors: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Replace parameters of the module by these tensors, or None, inside."""
    before = {name: module._parameters[name] for name in tensors}
    module._parameters.update(tensors)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(before)
