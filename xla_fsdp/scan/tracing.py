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
from xla_fsdp.fsdp.engine.param_guards import name_of
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.nn.activation_checkpoint import regions_run_once, undoing_changes
from xla_fsdp.scan.block_inputs import Arguments, BlockState, forward_hooks_apart
from xla_fsdp.scan.block_numbers import Number, Numbers
from xla_fsdp.scan.checks import ADVICE
from xla_fsdp.scan.errors import NoLoopError
from xla_fsdp.xla import ops
from xla_fsdp.xla.loop import Body, ChangedInPlaceError, TensorSpec, trace_body

T = TypeVar("T")

PATIENCE = 5.0
"""Seconds in which autograd's threads drop what they have computed with, also on a busy machine."""


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
    # (index, dtype) of the numbers that are inputs of the loop
    numbers: tuple[tuple[int, torch.dtype], ...] = ()

    def run(
        self,
        params: list[Tensor],
        tensors: Sequence[Tensor],
        given: Sequence[Tensor],
        numbers: Sequence[Tensor] = (),
    ) -> tuple[Returned, Tensor, list[Number]]:
        """Run the forward of the block.

        Args:
            params: unsharded parameters, by original.
            tensors: replace the tensors in ``state``.
            given: tensors of the arguments.
            numbers: tensors without dims that replace ``self.numbers``.

        Returns:
            The form of the output, its only new tensor, and the numbers that the block used.

        Raises:
            NoLoopError: if the output is not one tensor like the first argument, besides other
                arguments and plain values; or if the forward changes a container among the
                arguments.
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
    difference = given.first_difference(now)
    if difference is None and now.tensors[0] is not given.tensors[0]:
        difference = f"its {given.names[0]} is another tensor"
    if difference:
        raise NoLoopError(
            f"a scanned block changes a container that it is given (then {difference}); the change "
            f"would be lost, as blocks run as one loop. Compute new tensors and return one, or do "
            f"not scan these blocks"
        )


@dataclass(frozen=True)
class Returned:
    """The form of a block's output: one new tensor, and other arguments that it hands back."""

    output: Arguments  # without tensors
    sources: tuple[int, ...]  # for each tensor: which argument it is, or 0 for the new tensor

    @classmethod
    def of(cls, output: Arguments, given: Sequence[Tensor]) -> tuple[Returned, Tensor]:
        """Return the form of ``output``, and its new tensor.

        Args:
            output: of a block.
            given: tensors of the arguments; the new tensor is like the first.

        Raises:
            NoLoopError: if there is not exactly one new tensor, or it has another shape or dtype.
        """
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
    gradient: GradientTrace | None = None  # None if the forward tells what it is


@dataclass(frozen=True)
class GradientTrace:
    """The gradients of a block."""

    body: Body  # maps what the forward takes, and the output's gradient, to output and gradients
    reached: tuple[bool, ...]  # which arguments and parameters have a gradient


def trace_block(template: Template, *, undo: bool = False) -> BlockTrace:
    """Trace a block's forward.

    Args:
        template: the block and its call.
        undo: undo what it does to containers and objects that its modules hold.

    Raises:
        NoLoopError: if it changes an input in place, does not return one tensor like its input, or
            computes with values that a loop would keep; with ``undo``, also if that had to be.
            What the trace computed is lost then, also where somebody holds it.
        ChangedOutsideError: if it changes another tensor in place.
    """
    group = template.unit.group
    params = [(param, original) for param in group.params for original in param.originals]
    parts = _specs_of(template)
    names = [
        *template.arguments.names,
        *(f"parameter {original.names[0]}" for _, original in params),
        *(f"buffer {name}" for name in template.state.names),
    ]
    result: list[tuple[Returned, list[Number]]] = []
    made, calls = MadeTensors(), GraphCalls()

    def body(values: list[Tensor]) -> list[Tensor]:
        given, unsharded, tensors, numbers, _ = split(values, list(map(len, parts)))
        made.add(values)
        with made, calls:
            returned, output, used = template.run(unsharded, tensors, given, numbers)
        result.append((returned, used))
        return [output]

    specs = [spec for part in parts for spec in part]
    undoing = undoing_changes(template.module) if undo else contextlib.nullcontext(lambda: False)
    try:
        with undoing as changes:
            traced = refusing_host_draws(lambda: trace_body(body, specs, "fsdp_block"))
    except ChangedInPlaceError as error:
        changed = ", ".join(names[number] for number in error.numbers)
        raise NoLoopError(
            f"a scanned block changes its {changed} in place; the change would be lost, as blocks "
            f"run as one loop. Compute a new tensor instead (x = x + y, not x += y), or do not "
            f"scan these blocks (layers with running statistics, such as BatchNorm, cannot be)"
        ) from None
    if changes():
        raise NoLoopError("a scanned block changes a list, a dict or an object of its modules")
    if problem := _captured_problem(traced) or made.problem():
        raise NoLoopError(problem)
    returned, used = result[-1]
    gradient = _trace_gradient(template, parts) if calls.found else None
    return BlockTrace(traced, returned, tuple(used), template.state.without_tensors(), gradient)


def _specs_of(template: Template) -> list[list[TensorSpec]]:
    """Return what ``Template.run`` takes: arguments, parameters, tensors of the state, numbers."""
    params = [
        TensorSpec(tuple(original.shape), param.compute_dtype or param.leaf.dtype)
        for param in template.unit.group.params
        for original in param.originals
    ]
    held = list(map(TensorSpec.of, template.state.tensors))
    return [
        list(template.specs),
        params,
        held,
        [TensorSpec((), dtype) for _, dtype in template.numbers],
    ]


def _trace_gradient(template: Template, parts: Sequence[Sequence[TensorSpec]]) -> GradientTrace:
    """Trace a block's forward and backward."""
    trained = [
        need
        for param, need in zip(template.unit.group.params, template.trained, strict=True)
        for _ in param.originals
    ]
    reached: list[tuple[bool, ...]] = []

    def body(values: list[Tensor]) -> list[Tensor]:
        given, unsharded, tensors, numbers, [grad] = split(values, list(map(len, parts)))
        with torch.enable_grad():
            given = [_as_leaf(each, each.is_floating_point()) for each in given]
            unsharded = list(map(_as_leaf, unsharded, trained))
            leaves = [each for each in (*given, *unsharded) if each.requires_grad]
            _, output, _ = template.run(unsharded, tensors, given, numbers)
            found: Sequence[Tensor | None] = [None] * len(leaves)
            if output.requires_grad:
                with template.unit.computing_with(unsharded):  # for hooks that read the parameters
                    found = torch.autograd.grad(output, leaves, grad, allow_unused=True)
        reached.append(tuple(each is not None for each in found))
        return [output.detach(), *present(found)]

    specs = [*(spec for part in parts for spec in part), template.specs[0]]
    traced = refusing_host_draws(lambda: trace_body(body, specs, "fsdp_block_gradient"))
    return GradientTrace(traced, reached[-1])


def _as_leaf(tensor: Tensor, needs_grad: bool) -> Tensor:
    return tensor.clone().requires_grad_(needs_grad)


class GraphCalls(TorchFunctionMode):
    """Notes whether functions are called that ask for autograd's graph, or change it: blocks may
    then have other gradients, though their forwards compute the same."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.found |= name_of(func) in _OF_GRAPHS
        return func(*args, **(kwargs or {}))


_OF_GRAPHS = frozenset(
    {
        "detach", "detach_", "data", "requires_grad", "requires_grad_", "is_leaf", "grad_fn",
        "_set_grad_enabled",
    }
)  # fmt: skip


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
    """Number blocks by what they compute: from 0, in order, equal blocks alike.

    Args:
        traces: of the blocks.
        calls: by block, what else is equal for equal blocks.
    """
    firsts: list[int] = []  # the first block of each kind
    kinds: list[int] = []
    for at, (trace, call) in enumerate(zip(traces, calls, strict=True)):
        alike = (call == calls[n] and not block_difference(traces[n], trace) for n in firsts)
        kind = next((kind for kind, found in enumerate(alike) if found), len(firsts))
        firsts += [at] if kind == len(firsts) else []
        kinds.append(kind)
    return kinds


def with_numbers_as_inputs(
    templates: Sequence[Template], traces: Sequence[BlockTrace], calls: Sequence[Hashable]
) -> tuple[list[Template], list[BlockTrace]]:
    """Let numbers be inputs that differ among blocks which hand them to the same operations.

    Returns:
        The templates with these numbers, and their traces.
    """
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for at, (trace, call) in enumerate(zip(traces, calls, strict=True)):
        alike[call, tuple((n.operation, n.dtype) for n in trace.numbers)].append(at)
    found, traced = list(templates), list(traces)
    for group in alike.values():
        by_index = enumerate(zip(*(traces[at].numbers for at in group), strict=True))
        differ = tuple((n, each[0].dtype) for n, each in by_index if len(set(each)) > 1)
        for at in group if differ else []:
            found[at] = replace(templates[at], numbers=differ)
            traced[at] = trace_block(found[at])
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
    if difference := body_difference(mine.body, its.body):
        return difference
    if mine.gradient is None or its.gradient is None:
        return None if mine.gradient is its.gradient else _OTHER_GRADIENTS
    same = mine.gradient.reached == its.gradient.reached
    if not same or body_difference(mine.gradient.body, its.gradient.body):
        return _OTHER_GRADIENTS
    return None


_OTHER_GRADIENTS = "it has other gradients (by detach or no_grad, say)"


def body_difference(mine: Body, its: Body) -> str | None:
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
    """Return ``trace()``.

    If random numbers of Python or numpy were drawn meanwhile, call ``trace`` once more to find out
    whether it drew them, or another thread (one that loads data, say).

    Raises:
        NoLoopError: if ``trace`` draws such numbers.
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


def _drawn_on_host(name: str) -> NoLoopError:
    return NoLoopError(
        f"a scanned block draws random numbers on the host (by {name}); they would be the "
        f"same in every block and step, as its loop is traced once. Draw them on the "
        f"device: device=x.device"
    )
