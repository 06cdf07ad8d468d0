"""What the code of a step does while it is traced: operations, numbers, optimizers, reads."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from xla_fsdp.compile.host_numbers import HostNumbers, plain
from xla_fsdp.optim.optimizers import STEPS_SLICES_OF, StepWatch
from xla_fsdp.xla import hooks, ops, torch_xla
from xla_fsdp.xla.graph import tensor_id
from xla_fsdp.xla.programs import buffers_of

_SKIPPED = tuple(
    str(Path(each).parent) + os.sep
    for each in (torch.__file__, torch_xla.__file__, __file__, contextlib.__file__)
)
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
DRAWS = (
    *("bernoulli", "multinomial", "normal", "rand", "rand_like", "randint", "randint_like"),
    *("randn", "randn_like", "randperm"),
    *("bernoulli_", "exponential_", "normal_", "random_", "uniform_"),
)
"""Functions of torch that draw random numbers."""
_XLA = str(Path(ops.__file__).parent) + os.sep


class CompileStepError(RuntimeError):
    """A step that cannot be replayed with right results."""


def _reads_ourselves() -> bool:
    """Return whether the code that reads a value is this package's."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((*_SKIPPED, _XLA, "<")):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_filename.startswith(_PACKAGE)


class Place:
    """The line of the user's innermost code that called something."""

    __slots__ = ("_code", "_line")

    def __init__(self, frame: Any) -> None:
        while frame is not None and _is_library(frame.f_code.co_filename):
            frame = frame.f_back
        self._code = None if frame is None else frame.f_code
        self._line = 0 if frame is None else frame.f_lineno

    def __str__(self) -> str:
        if self._code is None:
            return "backward (a hook, or what runs in autograd's own thread)"
        return f"{self._code.co_filename}:{self._line}, in {self._code.co_name}"


@functools.cache
def _is_library(file: str) -> bool:
    return file.startswith((*_SKIPPED, _PACKAGE, "<"))


def user_place() -> str:
    """Return file, line and function of the innermost code that is not torch's or ours."""
    return str(Place(sys._getframe(1)))


Operation = tuple[str, Place]
"""A function of torch that a step called, with what stands for its arguments, and where."""

_NO_OPERATIONS = ("__get__", "__set__", "size", "dim", "register_hook", "backward")


def _shown(value: Any) -> Any:
    """Return what stands for an argument: a tensor's shape and dtype, a number; those of optimizers
    are no constants."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{[*value.shape]}".removeprefix("torch.")
    if isinstance(value, list | tuple):
        return tuple(map(_shown, value))
    if isinstance(value, dict):
        return tuple((str(key), _shown(each)) for key, each in value.items())
    if plain(value) is not value:
        return "a number of the optimizer"
    return value if isinstance(value, int | float | str | torch.dtype) else type(value).__name__


class Seen(TorchFunctionMode):
    """Records what happens inside the block; ``hooks`` tell it of reads.

    Args:
        numbers: of optimizers.
        known: host tensors with numbers of optimizers: their keys and numbers, by ``id``.
        refuses: raise where the step reads the device; else only record the first place.
    """

    def __init__(
        self, numbers: HostNumbers, known: dict[int, tuple[Any, float]], *, refuses: bool
    ) -> None:
        super().__init__()
        self.optimizers: dict[int, Optimizer] = {}
        self.operations: list[Operation] = []
        self._entered: list[tuple[weakref.ref[Tensor], Place]] = []  # older than the trace
        self._began = tensor_id(ops.upload(torch.zeros(())))
        self.places: dict[Any, Place] = {}
        self.first_read = ""
        self.draws: dict[str, None] = {}
        self._numbers = numbers
        self._known = known
        self._refuses = refuses
        self._tensors: dict[int, weakref.ref[Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():  # some allow no use, not even to be asked
            place = Place(sys._getframe(1))
            from_host = self._note([args, kwargs or {}], place)
            self._note(result, place)
            name = getattr(func, "__name__", "")
            if name not in _NO_OPERATIONS:
                called = f"{name}{_shown(args)}{_shown(kwargs) if kwargs else ''}"
                self.operations.append((called.replace("'", ""), place))
            on_device = isinstance(result, Tensor) and result.is_xla  # type: ignore[attr-defined]
            if name in DRAWS and not on_device:
                self.draws.setdefault(str(place))
            if from_host and on_device:
                self.places.setdefault(tuple(result.shape), place)
        return result

    def is_older(self, number: int) -> bool:
        """Return whether a tensor, given its ``tensor_id``, was there before the trace; the host's
        numbers have -1."""
        return 0 <= number < self._began

    def scalars(self) -> set[int | None]:
        """Return the buffers of scalars that are older than the trace. Those of one value may share
        one, with constants, too, and ``tensor_id`` is then the last one's."""
        entered = (ops.referent(reference) for reference, _ in self._entered)
        return {*buffers_of([each for each in entered if each is not None and not each.dim()])}

    def place_of(self, buffer: int) -> str:
        """Return where a tensor that is older than the trace was first used, given its buffer."""
        for reference, place in self._entered:
            tensor = ops.referent(reference)
            if tensor is not None and buffers_of([tensor]) == [buffer]:
                return str(place)
        return str(Place(None))

    def tensors(self) -> list[Tensor]:
        """Return the XLA tensors that it has seen and that still exist."""
        found = map(ops.referent, list(self._tensors.values()))
        return [each for each in found if each is not None]

    def _note(self, value: Any, place: Place) -> bool:
        """Record tensors and numbers; return whether something comes from the host."""
        if isinstance(value, Tensor):
            if not value.is_xla:  # type: ignore[attr-defined]
                return True
            known = self._tensors.get(id(value))  # of a tensor that is gone, perhaps
            if known is None or known() is not value:
                # Last, or the order of tensors would depend on which memory is used again.
                self._tensors.pop(id(value), None)
                self._tensors[id(value)] = weakref.ref(value)
                # What stands for an input of a loop's body is no tensor of the device.
                if torch._is_functional_tensor(value) and self.is_older(tensor_id(value)):
                    self._entered.append((self._tensors[id(value)], place))
        elif isinstance(value, bool):
            return False
        elif isinstance(value, int | float):
            self.places.setdefault(float(plain(value)), place)
            return True
        elif isinstance(value, list | tuple):
            return bool(sum([self._note(each, place) for each in value]))  # every one, so not any()
        elif isinstance(value, dict):
            return self._note(list(value.values()), place)
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
        if id(tensor) not in self._known:
            return None
        key, begin = self._known[id(tensor)]
        number = Tensor.__float__(tensor)
        source: Any = ("source", key)
        if number == begin:
            return self._numbers.traced(number, source)
        if number == begin + 1:
            return self._numbers.traced(number, (operator.add, source, ("constant", 1)))
        return None


class _HostDraws:
    """Watches the host's random numbers while any rank traces."""

    def __init__(self) -> None:
        self._changing = Lock()
        self._tracing = 0
        self._replaced = contextlib.ExitStack()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        with self._changing:
            self._tracing += 1
            for owner, name in _host_draws() if self._tracing == 1 else ():
                watched = _watched_draw(getattr(owner, name))
                self._replaced.enter_context(mock.patch.object(owner, name, watched))
        try:
            yield
        finally:
            with self._changing:
                self._tracing -= 1
                if not self._tracing:
                    self._replaced.close()


_draws = _HostDraws()


def is_traced() -> bool:
    """Return whether the caller's code is traced by ``compile_step``."""
    return hooks.current_reader() is not None


def _host_draws() -> Iterator[tuple[Any, str]]:
    """Yield module and name of the functions that draw from Python's and numpy's generators."""
    owners = [random, getattr(sys.modules.get("numpy"), "random", None)]
    for owner in filter(None, owners):
        for name, each in vars(owner).items():
            generator = type(getattr(each, "__self__", None)).__name__
            if generator in ("Random", "RandomState") and "state" not in name:
                yield owner, name


def _watched_draw(draw: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(draw)
    def watched(*args: Any, **kwargs: Any) -> Any:
        seen = hooks.current_reader()
        if isinstance(seen, Seen):
            seen.draws.setdefault(user_place())
        return draw(*args, **kwargs)

    return watched


def _note_optimizer(optimizer: Optimizer) -> None:
    seen = hooks.current_reader()
    if isinstance(seen, Seen) and STEPS_SLICES_OF not in vars(optimizer):
        seen.optimizers.setdefault(id(optimizer), optimizer)


register_optimizer_step_pre_hook(StepWatch(_note_optimizer))


@contextlib.contextmanager
def watching(seen: Seen) -> Iterator[None]:
    """Record what the caller's device does in ``seen`` inside the block."""
    with hooks.reading_by(seen), _draws.watched(), seen:
        yield
