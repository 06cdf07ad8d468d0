"""What the code of a step does while it is traced: tensors, numbers, modules, optimizers, reads."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import torch_xla
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.replay.host_numbers import HostNumbers, plain

_SKIPPED = tuple(
    str(Path(each).parent) + os.sep
    for each in (torch.__file__, torch_xla.__file__, __file__, contextlib.__file__)
)
_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_XLA = str(Path(ops.__file__).parent) + os.sep


class CompileStepError(RuntimeError):
    """A step that cannot be replayed with right results."""


def user_place() -> str:
    """Return file, line and function of the innermost code that is not torch's or ours."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_SKIPPED, _PACKAGE, "<")):
            return f"{name}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "backward (a hook, or what runs in autograd's own thread)"


def _reads_ourselves() -> bool:
    """Return whether the code that reads a value is this package's."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((*_SKIPPED, _XLA, "<")):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_filename.startswith(_PACKAGE)


class Seen(TorchFunctionMode):
    """Records what happens inside the block; ``reading_by`` tells it of reads.

    Args:
        numbers: of optimizers.
        keys: the keys of counts by their number before the step.
        refuses: raise where the step reads the device; else only record the first place.
    """

    def __init__(self, numbers: HostNumbers, keys: dict[float, Any], *, refuses: bool) -> None:
        super().__init__()
        self.modules: dict[nn.Module, None] = {}
        self.optimizers: dict[int, Optimizer] = {}
        self.places: dict[Any, str] = {}
        self.first_read = ""
        self._numbers = numbers
        self._keys = keys
        self._refuses = refuses
        self._tensors: dict[int, weakref.ref[Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        from_host = self._note([args, kwargs or {}])
        self._note(result)
        if from_host and isinstance(result, Tensor) and result.is_xla:  # type: ignore[attr-defined]
            self.places.setdefault(tuple(result.shape), user_place())
        return result

    def tensors(self) -> list[Tensor]:
        """Return the XLA tensors that it has seen and that still exist."""
        found = (reference() for reference in list(self._tensors.values()))
        return [each for each in found if each is not None]

    def _note(self, value: Any) -> bool:
        """Record tensors and numbers; return whether something comes from the host."""
        if isinstance(value, Tensor):
            if not value.is_xla:  # type: ignore[attr-defined]
                return True
            known = self._tensors.get(id(value))  # of a tensor that is gone, perhaps
            if known is None or known() is not value:
                self._tensors[id(value)] = weakref.ref(value)
        elif isinstance(value, bool):
            return False
        elif isinstance(value, int | float):
            if float(plain(value)) not in self.places:
                self.places[float(plain(value))] = user_place()
            return True
        elif isinstance(value, list | tuple):
            return bool(sum([self._note(each) for each in value]))  # every one, so not any()
        elif isinstance(value, dict):
            return self._note(list(value.values()))
        return False

    # ------------------------------------------------------------ a Reader

    def before_read(self, value: Any) -> None:
        tensors = value if isinstance(value, list | tuple) else [value]
        if value is not None and not any(isinstance(t, Tensor) and t.is_xla for t in tensors):  # type: ignore[attr-defined]
            return
        if value is not None and _reads_ourselves() and not any(map(ops.is_pending, tensors)):
            return  # whether blocks have equal buffers, which programs of scans depend on
        place = user_place()
        self.first_read = self.first_read or place
        if self._refuses:
            what = "runs what is pending (torch_xla.sync())" if value is None else "reads a value"
            raise CompileStepError(
                f"the step {what} of the device at {place}. A replay runs the whole step as one "
                f"program: return the tensor and read it outside, or leave the sync away (the step "
                f'runs its program itself). compile_step(..., unknown="trace") traces every step'
            )

    def item(self, tensor: Tensor) -> Any:
        number = Tensor.__float__(tensor) if tensor.is_floating_point() else None
        if tensor.dim() or number is None:
            return None
        for begin, key in self._keys.items():
            if number - begin in (0, 1):
                source: Any = ("source", key)
                expression = source if number == begin else (_plus, source, ("constant", 1))
                return self._numbers.traced(number, expression)
        return None


def _plus(number: float, other: float) -> float:
    return number + other


class _Watchers:
    """The ``Seen`` of every rank that traces a step now, by device."""

    def __init__(self) -> None:
        self._by_device: dict[str, Seen] = {}
        self._changing = Lock()
        self._call: Any = None

    def add(self, seen: Seen) -> None:
        with self._changing:
            if not self._by_device:
                self._call = nn.Module.__call__
                nn.Module.__call__ = _watched_call  # type: ignore[method-assign]
            self._by_device[_device()] = seen

    def remove(self) -> None:
        with self._changing:
            del self._by_device[_device()]
            if not self._by_device:
                nn.Module.__call__ = self._call  # type: ignore[method-assign]

    @property
    def current(self) -> Seen | None:
        return self._by_device.get(_device())


_watchers = _Watchers()


def _device() -> str:
    return str(ops.device())


def _watched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    seen = _watchers.current
    if seen is not None:
        seen.modules.setdefault(module)
    return module._wrapped_call_impl(*args, **kwargs)


class _OptimizerWatch:
    only_watches = True

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        seen = _watchers.current
        if seen is not None and "steps_slices" not in vars(optimizer):
            seen.optimizers.setdefault(id(optimizer), optimizer)


register_optimizer_step_pre_hook(_OptimizerWatch())


@contextlib.contextmanager
def watching(seen: Seen) -> Iterator[None]:
    """Record modules and optimizers of the caller's device in ``seen`` inside the block."""
    _watchers.add(seen)
    try:
        with seen:
            yield
    finally:
        _watchers.remove()
