"""Trace a block apart from the program around it, and compare blocks by what they compute.

Tensors have no values while a block is traced (torch_xla ends the process where one is asked for),
and what runs on the host would run once for all blocks and steps, so both raise an error here.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
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
    """A block that is traced."""

    unit: FSDPState  # its unit
    module: nn.Module  # the module itself, for its submodules' names
    forward: Callable[..., Any]  # its forward
    state: BlockState  # its tensors and settings
    shared: frozenset[int]  # numbers of the tensors that all blocks share
    arguments: Arguments  # what it is called with, without the tensors
    specs: tuple[TensorSpec, ...]  # of the arguments' tensors
    trained: tuple[bool, ...]  # which of its parameters need gradients, in some block

    def run(
        self, params: list[Tensor], tensors: Sequence[Tensor], given: Sequence[Tensor]
    ) -> Arguments:
        """Return what the block returns, taken apart.

        Args:
            params: unsharded parameters.
            tensors: in place of the block's own.
            given: the arguments' tensors.
        """
        args, kwargs = self.arguments.put_together(given)
        with (
            regions_run_once(),  # the loop itself rematerializes
            TraceGuard(),
            self.unit.computing_with(params),
            self.state.replaced(tensors),
        ):
            return Arguments.of(self.forward(*args, **kwargs))


def only_tensor(returned: Arguments, x: Tensor) -> Tensor:
    """Return the tensor that a block returned for its input ``x``.

    Raises:
        ValueError: if there is not one, or it has another shape or dtype.
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
    """Compares every block, traced by itself, with the first one, before a loop of them is run.

    Compared once for each key; keys are equal for calls that can run the same loops.
    """

    def __init__(self) -> None:
        self._first: dict[Hashable, tuple[Body, Arguments, BlockState]] = {}
        self._done: set[Hashable] = set()

    def is_done(self, number: int, key: Hashable) -> bool:
        """Whether block ``number`` was compared with the first one."""
        return (number, key) in self._done

    def compare(self, number: int, template: Template, key: Hashable) -> Arguments:
        """Compare block ``number``, unless that was done; return what blocks return, without the
        tensor.

        Raises:
            ValueError: if it differs, or cannot run in a loop.
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
    """Trace a block by itself: (arguments, parameters, buffers) to the tensor that it returns.
    Return that, and what the block returns without the tensor.

    Raises:
        ValueError: if it changes something in place, or does not return one tensor like its input.
    """
    group = template.unit.group
    params = [(param, original) for param in group.params for original in param.originals]
    specs = [
        *template.specs,
        *(TensorSpec(tuple(m.shape), p.compute_dtype or p.leaf.dtype) for p, m in params),
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
        given, full = values[:count], values[count : count + len(params)]
        returned = template.run(full, values[count + len(params) :], given)
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
    """Return the first setting that differs: a hint only, as not all settings matter."""
    for mine, its in zip(first.settings, other.settings, strict=False):
        # A block that knows its own number differs in that.
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


# ---------------------------------------------------------------- what a trace cannot follow

_READS = frozenset(
    {
        "item", "tolist", "numpy", "cpu", "equal", "allclose", "is_nonzero", "__bool__", "__int__",
        "__float__", "__complex__", "__index__", "__repr__", "__format__", "__contains__",
    }
)  # fmt: skip

_SHAPES = frozenset(
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"}
)  # whose results are as large as values say

_INDEXES = frozenset({"__getitem__", "__setitem__"})

_DRAWS = frozenset(
    {
        "rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "rand_like",
        "randn_like", "randint_like", "bernoulli_", "uniform_", "normal_", "random_",
        "exponential_",
    }
)  # fmt: skip


class TraceGuard(TorchFunctionMode):
    """Inside, what a trace cannot follow raises ValueError."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
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
    """Return what ``trace`` returns.

    Where random numbers of Python or numpy were drawn meanwhile, which another thread may have done
    (one that loads data, say), ``trace`` is called once more to find out.

    Raises:
        ValueError: if it draws such numbers.
    """
    before, before_numpy = random.getstate(), _numpy_state()
    result = trace()
    if random.getstate() != before and _draws_in_python(trace):
        raise _drawn_on_host("random")
    if _numpy_state() != before_numpy and _draws_in_numpy(trace):
        raise _drawn_on_host("numpy.random")
    return result


def _draws_in_python(trace: Callable[[], Any]) -> bool:
    """Whether this thread draws from a generator of the module ``random``."""
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
    """Whether this thread draws from numpy's global generator."""
    lock = np.random.mtrand.get_bit_generator().lock
    # Other threads wait meanwhile, where the generator's lock lets this thread in again.
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
