"""Modules whose forward runs in parallel: the class of a user's module with a forward around it.

Words: a *step* is what one style puts around a forward; the last one applied is the outermost.
Always true: the module stays an instance of its own class, with its names and hooks; a step is a
plain object that knows its module's name and the axis, and is copied and pickled with the module.
All communication is done by autograd functions inside of forward, so recomputing a forward or
tracing it as the body of a loop repeats it.
What steps do is in ``styles`` and ``prepare``.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from xla_fsdp.distributed.placement import remember_placements

Forward = Callable[..., Any]


class Step(Protocol):
    """What a style puts around a module's forward."""

    def __call__(self, module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
        """The output for these inputs; ``forward`` is what there was before."""
        ...


class ParallelModule:
    """Mixed into the class of a module."""

    _tensor_parallel: list[Step]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward inside of its steps."""
        module: Any = self
        remember_placements(module)
        run: Forward = super().forward  # type: ignore[misc]
        for step in self._tensor_parallel:
            run = functools.partial(_run, step, module, run)
        return run(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Tensors that take the place of parameters, on a device say, are placed as these were."""
        module: Any = super()._apply(fn, recurse)  # type: ignore[misc]
        remember_placements(module)
        return module


class _MadeClass(type):
    """Of classes made here, which pickles and copies find by their original class."""


def run_in(module: nn.Module, step: Step) -> None:
    """From now on the module's forward runs in ``step``."""
    if "_tensor_parallel" not in vars(module):
        original: Any = type(module)
        module.__class__ = parallel_class(original)
        vars(module)["_tensor_parallel"] = []
    vars(module)["_tensor_parallel"].append(step)


@functools.cache
def parallel_class(original: Any) -> Any:
    """The class of modules of class ``original`` with steps."""
    namespace = {"_parallel_original": original, "__module__": original.__module__}
    return _MadeClass(f"Parallel{original.__name__}", (ParallelModule, original), namespace)


@contextlib.contextmanager
def computing_with(module: nn.Module, tensors: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Inside, the module's parameters of these names are these tensors, or None."""
    before = {name: module._parameters[name] for name in tensors}
    module._parameters.update(tensors)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(before)


def _run(step: Step, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    return step(module, forward, args, kwargs)


def _reduce_class(made: Any) -> tuple[Any, ...]:
    return parallel_class, (made._parallel_original,)


copyreg.pickle(_MadeClass, _reduce_class)
