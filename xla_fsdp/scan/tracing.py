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
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from xla_fsdp.distributed.garbage import collect_garbage
from xla_fsdp.distributed.pytree import tensors_in
from xla_fsdp.fsdp.engine.autograd import present
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.nn.activation_checkpoint import regions_run_once, undoing_changes
from xla_fsdp.scan.block_inputs import Arguments, BlockState, forward_hooks_apart
from xla_fsdp.scan.block_numbers import Number, Numbers
from xla_fsdp.scan.checks import ADVICE
from xla_fsdp.scan.errors import NoLoopError
from xla_fsdp.xla import ops
from xla_fsdp.xla.loop import Body, ChangedInPlaceError, TensorSpec, trace_body

PATIENCE = 5.0
"""Seconds in which autograd's threads drop what they have computed with, also on a busy machine."""

T = TypeVar("T")


@dataclass(frozen=True)
class Block:
    """A block at the beginning of a pass."""

    unit: FSDPState
    module: nn.Module  # without the FSDP wrapper
    state: BlockState
    shared: frozenset[int]  # indices of the tensors in ``state`` that all blocks share
    trained: tuple[bool, ...]  # by original parameter: whether it needs a gradient in any block


@dataclass(frozen=True)
class Template(Block):
    """A block with its call, to be traced."""

    forward: Callable[..., Any]
    arguments: Arguments  # of the call, without tensors
    specs: tuple[TensorSpec, ...]  # of the arguments' tensors
    # (index, dtype) of the numbers that are inputs of the loop
    numbers: tuple[tuple[int, torch.dtype], ...] = ()

    def run(
        self,
        params: list[Tensor],
        tensors: Sequence[Tensor],
        given: Sequence[Tensor],
        numbers: Sequence[Tensor] = (),
    ) -> tuple[Returned, Tensor, list[Number]]:
        """Run the forward of the block with unsharded ``params``, by original, with ``tensors`` in
        place of those in ``state``, with the arguments' tensors that are ``given``, and with
        ``numbers``, tensors without dims, for ``self.numbers``.

        Returns:
            The form of the output, its only new tensor, and the numbers that the block used.
        """
        args, kwargs = self.arguments.put_together(given)
        indices = [at for at, _ in self.numbers]
        used = Numbers(dict(zip(indices, numbers, strict=True)))
        with (
            regions_run_once(),  # the loop recomputes, so checkpoint_module must not
            TraceGuard(used),
            forward_hooks_apart(self.module),
            self.unit.computing_with(params),
            self.state.replaced(tensors),
        ):
            output = Arguments.of(self.forward(*args, **kwargs))
        _refuse_changed(replace(self.arguments, tensors=tuple(given)), Arguments.of((args, kwargs)))
        return *Returned.of(output, given), used.found


def _refuse_changed(given: Arguments, now: Arguments) -> None:
    pairs = zip(given.tensors, now.tensors, strict=False)
    if given.key != now.key or any(mine is not its for mine, its in pairs):
        raise NoLoopError(
            f"a scanned block changes a container that it is given (its tensors are then "
            f"{', '.join(now.names)}); the change would be lost, as blocks run as one loop. "
            f"Compute new tensors and return one, or do not scan these blocks"
        )


@dataclass(frozen=True)
class Returned:
    """The form of a block's output: one new tensor, and other arguments that it hands back."""

    output: Arguments  # without tensors
    sources: tuple[int, ...]  # for each tensor: which argument it is, or 0 for the new tensor

    @classmethod
    def of(cls, output: Arguments, given: Sequence[Tensor]) -> tuple[Returned, Tensor]:
        """Return the form of a block's output, and its new tensor, which is like the first of the
        arguments' tensors."""
        others = {id(each): at for at, each in enumerate(given) if at > 0}
        sources = tuple(others.get(id(each), 0) for each in output.tensors)
        if sources.count(0) != 1 or output.opaque:
            what = [*(name or "a tensor" for name in output.names), *output.opaque]
            raise NoLoopError(
                f"a scanned block must return one tensor (and arguments that it was given, and "
                f"plain values), which is the next one's input; this one returned "
                f"{', '.join(what) or 'no tensor'}"
            )
        x, y = given[0], output.tensors[sources.index(0)]
        if TensorSpec.of(y) != TensorSpec.of(x):
            raise NoLoopError(
                f"a scanned block must return what it is given, {list(x.shape)} {x.dtype}; "
                f"this one returned {list(y.shape)} {y.dtype}. Convert the input before the loop, "
                f"or do not scan these blocks"
            )
        return cls(output.without_tensors(), sources), y

    def put_together(self, result: Tensor, given: Sequence[Tensor]) -> Any:
        """Return the output with ``result`` as the new tensor."""
        return self.output.put_together([given[at] if at else result for at in self.sources])


# ---------------------------------------------------------------- comparing blocks


@dataclass(frozen=True)
class BlockTrace:
    """What a block computes."""

    body: Body  # maps (arguments, unsharded parameters, buffers, numbers) to the output
    returned: Returned
    numbers: tuple[Number, ...]  # that it hands to operations
    state: BlockState  # without tensors
    # Maps what ``body`` takes, and the output's gradient, to output and gradients.
    gradient: Body | None  # None if nothing is trained
    reached: tuple[bool, ...]  # which arguments and parameters have a gradient


def trace_block(template: Template, *, trains: bool, undo: bool = False) -> BlockTrace:
    """Trace a block's forward and backward.

    Args:
        template: the block and its call.
        trains: whether there is a backward.
        undo: undo what it does to containers and objects that its modules hold.

    Raises:
        NoLoopError: if it changes an input in place, does not return one tensor like its input, or
            computes with values that a loop would keep; with ``undo``, also if that had to be.
            What the trace computed is lost then, also where somebody holds it.
        ChangedOutsideError: if it changes another tensor in place.
    """
    group = template.unit.group
    params = [(param, original) for param in group.params for original in param.originals]
    # What ``Template.run`` takes.
    parts = [
        list(template.specs),
        [
            TensorSpec(tuple(original.shape), param.compute_dtype or param.leaf.dtype)
            for param, original in params
        ],
        list(map(TensorSpec.of, template.state.tensors)),
        [TensorSpec((), dtype) for _, dtype in template.numbers],
    ]
    names = [
        *template.arguments.names,
        *(f"parameter {original.names[0]}" for _, original in params),
        *(f"buffer {name}" for name in template.state.names),
    ]
    result: list[tuple[Returned, list[Number]]] = []
    reached: list[bool] = []
    made = MadeTensors()

    def forward(values: list[Tensor]) -> list[Tensor]:
        given, unsharded, tensors, numbers, _ = split(values, list(map(len, parts)))
        made.add(values)
        with made:
            returned, output, used = template.run(unsharded, tensors, given, numbers)
        result.append((returned, used))
        return [output]

    def backward(values: list[Tensor]) -> list[Tensor]:
        given, unsharded, tensors, numbers, [grad] = split(values, list(map(len, parts)))
        with torch.enable_grad():
            given = [_as_leaf(each, each.is_floating_point()) for each in given]
            unsharded = list(map(_as_leaf, unsharded, template.trained))
            leaves = [each for each in (*given, *unsharded) if each.requires_grad]
            _, output, _ = template.run(unsharded, tensors, given, numbers)
            found: Sequence[Tensor | None] = [None] * len(leaves)
            if output.requires_grad:
                with template.unit.computing_with(unsharded):  # for hooks that read the parameters
                    found = torch.autograd.grad(output, leaves, grad, allow_unused=True)
        reached[:] = [each is not None for each in found]
        return [output.detach(), *present(found)]

    specs = [spec for part in parts for spec in part]
    undoing = undoing_changes(template.module) if undo else contextlib.nullcontext(lambda: False)
    try:
        with undoing as changes:
            traced = refusing_host_draws(lambda: trace_body(forward, specs, "fsdp_block"))
            gradient = None
            problem = made.problem()  # before another trace leaves others in their places
            if trains and not problem:
                more = [*specs, template.specs[0]]
                name = "fsdp_block_gradient"
                gradient = refusing_host_draws(lambda: trace_body(backward, more, name))
    except ChangedInPlaceError as error:
        changed = ", ".join(names[number] for number in error.numbers)
        raise NoLoopError(
            f"a scanned block changes its {changed} in place; the change would be lost, as blocks "
            f"run as one loop. Compute a new tensor instead (x = x + y, not x += y), or do not "
            f"scan these blocks (layers with running statistics, such as BatchNorm, cannot be)"
        ) from None
    if changes():
        raise NoLoopError("a scanned block changes a list, a dict or an object of its modules")
    if problem := _captured_problem(traced) or problem:
        raise NoLoopError(problem)
    returned, used = result[-1]
    state = template.state.without_tensors()
    return BlockTrace(traced, returned, tuple(used), state, gradient, tuple(reached))


def _as_leaf(tensor: Tensor, needs_grad: bool) -> Tensor:
    return tensor.clone().requires_grad_(needs_grad)


class MadeTensors(TorchFunctionMode):
    """Which of the tensors that functions return inside are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[weakref.ref[Tensor], list[int]]] = {}  # with their shapes
        self._count = 0

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Add tensors that no function returned."""
        for tensor in tensors:
            self._count += 1
            # Not asked later: that would keep the tensor, if only autograd held it.
            gone = partial(_forget, self._alive, self._count)
            self._alive[self._count] = weakref.ref(tensor, gone), list(tensor.shape)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(tensor) for tensor in tensors_in((args, kwargs))}
        self.add(tensor for tensor in tensors_in(result) if id(tensor) not in given)
        return result

    def problem(self) -> str | None:
        """Return what to tell the user if one of them is alive after the trace: to read it would
        end the process, as it has no value outside of the loop."""
        if self._alive:
            collect_garbage()
        # Autograd's threads drop what a gradient was computed from a moment after they hand it out.
        latest = time.monotonic() + PATIENCE
        while self._alive and time.monotonic() < latest:
            time.sleep(0.001)
        for _, shape in list(self._alive.values())[:1]:
            return (
                f"a scanned block leaves a tensor of shape {shape} in a dict, a list or another "
                f"object; blocks run as one loop, outside of which it has no value. Return it as a "
                f"part of what goes from block to block, or do not scan these blocks"
            )
        return None


def _forget(alive: dict[int, Any], number: int, _: weakref.ref[Tensor]) -> None:
    alive.pop(number, None)


def kinds_of(traces: Sequence[BlockTrace], calls: Sequence[Hashable]) -> list[int]:
    """Number blocks by what they compute: from 0, in order, equal blocks alike. ``calls`` tell what
    else is equal for equal blocks."""
    firsts: list[int] = []  # the first block of each kind
    kinds: list[int] = []
    for at, (trace, call) in enumerate(zip(traces, calls, strict=True)):
        alike = (call == calls[n] and not block_difference(traces[n], trace) for n in firsts)
        kind = next((kind for kind, found in enumerate(alike) if found), len(firsts))
        firsts += [at] if kind == len(firsts) else []
        kinds.append(kind)
    return kinds


def with_numbers_as_inputs(
    templates: Sequence[Template],
    traces: Sequence[BlockTrace],
    calls: Sequence[Hashable],
    *,
    trains: bool,
) -> tuple[list[Template], list[BlockTrace]]:
    """Let numbers be inputs that differ among blocks which hand them to the same operations; return
    the templates with these numbers, and their traces."""
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for at, (trace, call) in enumerate(zip(traces, calls, strict=True)):
        alike[call, tuple((n.operation, n.dtype) for n in trace.numbers)].append(at)
    found, traced = list(templates), list(traces)
    for group in alike.values():
        by_index = enumerate(zip(*(traces[at].numbers for at in group), strict=True))
        differ = tuple((n, each[0].dtype) for n, each in by_index if len(set(each)) > 1)
        for at in group if differ else []:
            found[at] = replace(templates[at], numbers=differ)
            traced[at] = trace_block(found[at], trains=trains)
    return found, traced


def difference_problem(traces: Sequence[BlockTrace], number: int) -> str:
    """Say how block ``number`` differs from block 0."""
    first, other = traces[0], traces[number]
    hint = _different_setting(first.state, other.state, number)
    because = f" ({hint})" if hint else ""
    difference = block_difference(first, other) or "it computes something else"
    return f"block {number} differs from block 0: {difference}{because}. {ADVICE}"


def block_difference(mine: BlockTrace, its: BlockTrace) -> str | None:
    """Say how the second of two blocks differs from the first; None if it does not."""
    if difference := _body_difference(mine.body, its.body):
        return difference
    same = mine.reached == its.reached
    if same and mine.gradient is not None and its.gradient is not None:
        same = not _body_difference(mine.gradient, its.gradient)
    others = "it has other gradients (by detach, no_grad or a torch.autograd.Function, say)"
    return None if same else others


def _body_difference(mine: Body, its: Body) -> str | None:
    """Say how the second of two traced functions differs from the first; None if it does not."""
    if mine.text != its.text or mine.numbers != its.numbers:
        return "it computes something else"
    for number, value in mine.captured.items():
        found = its.captured[number]
        if value.shape != found.shape or not torch.equal(value.cpu(), found.cpu()):
            return f"it computes with {_value(found)}, where block 0 has {_value(value)}"
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


def split(values: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    """Split ``values`` into lists of these sizes, and a last one with the rest."""
    rest, parts = list(values), []
    for size in sizes:
        parts.append(rest[:size])
        rest = rest[size:]
    return [*parts, rest]


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

_VIEWS_ON_HOST = frozenset({"unfold", "_neg_view", "_reshape_alias"})

_INDEXES = frozenset({"__getitem__", "__setitem__"})

_OF_GRADIENTS = frozenset(
    {"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad", "backward"}
)

_DRAWS = frozenset(
    {
        "rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "rand_like",
        "randn_like", "randint_like", "bernoulli_", "uniform_", "normal_", "random_",
        "exponential_",
    }
)  # fmt: skip


class TraceGuard(TorchFunctionMode):
    """Inside, reading a value of a tensor, drawing on the host or asking for a gradient raises
    NoLoopError; ``numbers`` records and replaces the numbers of operations."""

    def __init__(self, numbers: Numbers) -> None:
        super().__init__()
        self._numbers = numbers

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if _wants_values(name, args, kwargs):
            raise NoLoopError(
                f"a scanned block asks for the values of a tensor (by {name}), and has none while "
                f"its loop is traced: one program runs for all values. Decide with torch.where, or "
                f"before the loop, and hand the result to the blocks"
            )
        if name in _OF_GRADIENTS and not any(each.requires_grad for each in tensors_in(args[:1])):
            raise NoLoopError(
                f"a scanned block calls {name} of a tensor; its loop is traced without gradients, "
                f"and no single tensor of a block has one that is kept. Change gradients by a "
                f"torch.autograd.Function, look at them after the loop, or do not scan these blocks"
            )
        if _is_view_on_host(name, args, kwargs):
            raise _on_host(name)
        try:
            result = self._numbers.call(func, name, args, kwargs)
        except ops.NoValueError as error:
            raise _on_host(name) from error
        if name in _DRAWS and isinstance(result, Tensor) and result.device.type == "cpu":
            raise _drawn_on_host(name)
        return result


def _on_host(name: str) -> NoLoopError:
    return NoLoopError(
        f"a scanned block calls {name}, which torch_xla computes on the host, and its tensors have "
        f"no values while its loop is traced: one program runs for all values. Compute the same by "
        f"other operators, or before the loop, and hand the result to the blocks; or do not scan "
        f"these blocks"
    )


def _is_view_on_host(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # Only CPU ranks refuse all operators that need values; elsewhere they end the process.
    if name == "view":
        return any(isinstance(each, torch.dtype) for each in (*args[1:], *kwargs.values()))
    return name in _VIEWS_ON_HOST


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
    """Return ``trace()``, which may draw no random numbers of Python or numpy. If any were drawn
    meanwhile, call it once more to find out whether it was another thread (one that loads data)."""
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


def _drawn_on_host(name: str) -> NoLoopError:
    return NoLoopError(
        f"a scanned block draws random numbers on the host (by {name}); they would be the "
        f"same in every block and step, as its loop is traced once. Draw them on the "
        f"device: device=x.device"
    )
