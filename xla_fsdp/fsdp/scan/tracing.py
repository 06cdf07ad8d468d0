"""Trace a block apart from the program around it, and compare blocks by what they compute.

Tensors have no values while a block is traced; torch_xla aborts the process if code reads one.
Random numbers drawn on the host would be the same in all blocks and steps. Both raise here.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from xla_fsdp.distributed.xla.loop import Body, ChangedInPlaceError, TensorSpec, trace_body
from xla_fsdp.fsdp.engine.activation_checkpoint import regions_run_once
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.scan.block_inputs import Arguments, BlockState
from xla_fsdp.fsdp.scan.checks import ADVICE

T = TypeVar("T")


@dataclass(frozen=True)
class Template:
    """A block to trace."""

    unit: FSDPState
    module: nn.Module  # without the FSDP wrapper
    forward: Callable[..., Any]
    state: BlockState
    shared: frozenset[int]  # indices of the tensors in ``state`` that all blocks share
    arguments: Arguments  # of the call, without tensors
    specs: tuple[TensorSpec, ...]  # of the arguments' tensors
    trained: tuple[bool, ...]  # by parameter: whether it needs a gradient in any block

    def run(
        self, params: list[Tensor], tensors: Sequence[Tensor], given: Sequence[Tensor]
    ) -> Arguments:
        """Run the forward of the block, and return its output.

        Args:
            params: unsharded parameters, by original.
            tensors: replace the tensors in ``state``.
            given: tensors of the arguments.

        Raises:
            ValueError: if the forward changes a container among the arguments.
        """
        args, kwargs = self.arguments.put_together(given)
        with (
            regions_run_once(),  # the loop recomputes, so checkpoint_module must not
            TraceGuard(),
            self.unit.computing_with(params),
            self.state.replaced(tensors),
        ):
            returned = Arguments.of(self.forward(*args, **kwargs))
        _refuse_changed(replace(self.arguments, tensors=tuple(given)), Arguments.of((args, kwargs)))
        return returned


def _refuse_changed(given: Arguments, now: Arguments) -> None:
    difference = given.first_difference(now)
    if difference is None and now.tensors[0] is not given.tensors[0]:
        difference = f"its {given.names[0]} is another tensor"
    if difference:
        raise ValueError(
            f"a scanned block changes a container that it is given (then {difference}); the change "
            f"would be lost, as blocks run as one loop. Compute new tensors and return one, or do "
            f"not scan these blocks"
        )


def only_tensor(returned: Arguments, x: Tensor) -> Tensor:
    """Return the tensor that a block returned for its input ``x``.

    Raises:
        ValueError: if there is not exactly one, or it has another shape or dtype than ``x``.
    """
    if len(returned.tensors) != 1 or returned.opaque:
        what = [*(name or "a tensor" for name in returned.names), *returned.opaque]
        raise ValueError(
            f"a scanned block must return one tensor (and plain values), which is the next one's "
            f"input; this one returned {', '.join(what) or 'no tensor'}"
        )
    [y] = returned.tensors
    if TensorSpec.of(y) != TensorSpec.of(x):
        raise ValueError(
            f"a scanned block must return what it is given, {list(x.shape)} {x.dtype}; "
            f"this one returned {list(y.shape)} {y.dtype}. Convert the input before the loop, or "
            f"do not scan these blocks"
        )
    return y


# ---------------------------------------------------------------- comparing blocks


class BlockComparison:
    """Compares the trace of every block with that of block 0, once for each key of a call."""

    def __init__(self) -> None:
        self._first: dict[Hashable, tuple[Body, Arguments, BlockState]] = {}
        self._done: set[Hashable] = set()

    def is_done(self, number: int, key: Hashable) -> bool:
        """Return whether block ``number`` was compared for this key."""
        return (number, key) in self._done

    def compare(self, number: int, template: Template, key: Hashable) -> Arguments:
        """Compare block ``number`` with block 0, unless that was done; return the output of block 0
        without the tensor.

        Raises:
            ValueError: if it computes something else than block 0, or cannot run in a loop.
        """
        if not self.is_done(number, key):
            body, returned = refusing_host_draws(lambda: trace_block(template))
            own = (body, returned, template.state.without_tensors())
            first, _, state = self._first.setdefault(key, own)
            problem = _captured_problem(body)
            difference = _difference(first, body)
            if not problem and difference:
                hint = _different_setting(state, template.state, number)
                because = f" ({hint})" if hint else ""
                problem = f"block {number} differs from block 0: {difference}{because}. {ADVICE}"
            if problem:
                if number == 0:
                    del self._first[key]
                raise ValueError(problem)
            self._done.add((number, key))
        return self._first[key][1]


def trace_block(template: Template) -> tuple[Body, Arguments]:
    """Trace the function from (arguments, unsharded parameters, buffers) to the block's output.

    Returns:
        The traced function, and the block's output without the tensor.

    Raises:
        ValueError: if it changes an input in place, or does not return one tensor like its input.
    """
    group = template.unit.group
    params = [(param, original) for param in group.params for original in param.originals]
    specs = [
        *template.specs,
        *(
            TensorSpec(tuple(original.shape), param.compute_dtype or param.leaf.dtype)
            for param, original in params
        ),
        *map(TensorSpec.of, template.state.tensors),
    ]
    names = [
        *template.arguments.names,
        *(f"parameter {original.names[0]}" for _, original in params),
        *(f"buffer {name}" for name in template.state.names),
    ]
    count = len(template.specs)
    result: list[Arguments] = []

    def body(values: list[Tensor]) -> list[Tensor]:
        given, unsharded = values[:count], values[count : count + len(params)]
        returned = template.run(unsharded, values[count + len(params) :], given)
        result.append(returned.without_tensors())
        return [only_tensor(returned, given[0])]

    try:
        return trace_body(body, specs, "fsdp_block"), result[-1]
    except ChangedInPlaceError as error:
        changed = ", ".join(names[number] for number in error.numbers)
        raise ValueError(
            f"a scanned block changes its {changed} in place; the change would be lost, as blocks "
            f"run as one loop. Compute a new tensor instead (x = x + y, not x += y), or do not "
            f"scan these blocks (layers with running statistics, such as BatchNorm, cannot be)"
        ) from None


def _difference(first: Body, other: Body) -> str | None:
    if first.text != other.text or first.numbers != other.numbers:
        return "it computes something else"
    for number, mine in first.captured.items():
        its = other.captured[number]
        if mine.shape != its.shape or not torch.equal(mine.cpu(), its.cpu()):
            return f"it computes with {_value(its)}, where block 0 has {_value(mine)}"
    return None


def _value(tensor: Tensor) -> Any:
    return tensor.item() if tensor.numel() == 1 else f"other values of shape {list(tensor.shape)}"


def _different_setting(first: BlockState, other: BlockState, number: int) -> str | None:
    """Describe the first setting that differs. It may not be the cause: some settings do not
    matter."""
    for mine, its in zip(first.settings, other.settings, strict=False):
        # Skip attributes that hold the index of the block.
        if mine != its and (mine[2], its[2]) != (0, number):
            return f"{its[0]}.{its[1]}".lstrip(".") + f" is {its[2]!r}, not {mine[2]!r}"
    return None


def _captured_problem(body: Body) -> str | None:
    large = [value for value in body.captured.values() if value.numel() > 1]
    if not large:
        return None
    shapes = ", ".join(str(list(value.shape)) for value in large)
    return (
        f"a scanned block computes with tensors of shapes {shapes} that are neither its arguments, "
        f"nor its parameters, buffers or attributes. A loop would keep the values of now. Hand "
        f"them to the block as arguments, or register them as buffers"
    )


# ---------------------------------------------------------------- values read or drawn on the host

_READS = frozenset(
    {
        "item", "tolist", "numpy", "cpu", "equal", "allclose", "is_nonzero", "__bool__", "__int__",
        "__float__", "__complex__", "__index__", "__repr__", "__format__", "__contains__",
    }
)  # fmt: skip

_SHAPES = frozenset(
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"}
)  # the shapes of their results depend on values

_INDEXES = frozenset({"__getitem__", "__setitem__"})

_DRAWS = frozenset(
    {
        "rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "rand_like",
        "randn_like", "randint_like", "bernoulli_", "uniform_", "normal_", "random_",
        "exponential_",
    }
)  # fmt: skip


class TraceGuard(TorchFunctionMode):
    """Inside, reading a value of a tensor or drawing on the host raises ValueError."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if _wants_values(name, args, kwargs):
            raise ValueError(
                f"a scanned block asks for the values of a tensor (by {name}), and has none while "
                f"its loop is traced: one program runs for all values. Decide with torch.where, or "
                f"before the loop, and hand the result to the blocks"
            )
        result = func(*args, **kwargs)
        if name in _DRAWS and isinstance(result, Tensor) and result.device.type == "cpu":
            raise _drawn_on_host(name)
        return result


def _wants_values(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    on_device = [each for each in args[:1] if _on_device(each)]
    if name in _INDEXES and on_device:
        index = args[1] if isinstance(args[1], tuple) else args[1:2]
        masks = (torch.bool, torch.uint8)
        return any(_on_device(each) and each.dtype in masks for each in index)
    if name == "where":
        return len(args) == 1 and not kwargs
    if name == "to" and on_device:
        named = (*args[1:2], kwargs.get("device"))
        return any(isinstance(each, str | torch.device) and "cpu" in str(each) for each in named)
    return bool(on_device) and name in _READS | _SHAPES


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "xla"


def refusing_host_draws(trace: Callable[[], T]) -> T:
    """Return ``trace()``.

    If random numbers of Python or numpy were drawn meanwhile, call ``trace`` once more to find out
    whether it drew them, or another thread (one that loads data, say).

    Raises:
        ValueError: if ``trace`` draws such numbers.
    """
    before, before_numpy = random.getstate(), _numpy_state()
    result = trace()
    if random.getstate() != before and _draws_in_python(trace):
        raise _drawn_on_host("random")
    if _numpy_state() != before_numpy and _draws_in_numpy(trace):
        raise _drawn_on_host("numpy.random")
    return result


def _draws_in_python(trace: Callable[[], Any]) -> bool:
    """Return whether this thread draws from a generator of the module ``random``."""
    found = False
    profile = sys.getprofile()

    def note(frame: FrameType, event: str, called: Any) -> None:
        nonlocal found
        found |= event == "c_call" and isinstance(getattr(called, "__self__", None), random.Random)

    sys.setprofile(note)
    try:
        trace()
    finally:
        sys.setprofile(profile)
    return found


def _draws_in_numpy(trace: Callable[[], Any]) -> bool:
    """Return whether this thread draws from numpy's global generator."""
    lock = np.random.mtrand.get_bit_generator().lock
    # Holding the generator's lock makes other threads wait. With a lock that is not reentrant
    # this thread would wait, too, forever.
    with lock if isinstance(lock, type(threading.RLock())) else contextlib.nullcontext():
        before = _numpy_state()
        trace()
        return _numpy_state() != before


def _numpy_state() -> bytes:
    return pickle.dumps(np.random.mtrand.get_bit_generator().state)


def _drawn_on_host(name: str) -> ValueError:
    return ValueError(
        f"a scanned block draws random numbers on the host (by {name}); they would be the "
        f"same in every block and step, as its loop is traced once. Draw them on the "
        f"device: device=x.device"
    )
