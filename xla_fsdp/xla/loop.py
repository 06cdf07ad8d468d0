"""XLA While loops: run a traced function once for each slice of its inputs.

Terms are those of ``jax.lax.scan``: ``carry``, ``xs``, ``ys``. The function (*body*) is traced
apart from the program around the loop: it has a chain of collectives of its own, and draws all
random numbers from a seed that is one of its inputs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch import Tensor

from xla_fsdp.distributed.tracebacks import forget_locals
from xla_fsdp.xla import ops
from xla_fsdp.xla.graph import has_metadata, without_metadata
from xla_fsdp.xla.lost import ChangedOutsideError, TracedTensors

T = TypeVar("T")


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype)

    @classmethod
    def slice_of(cls, stack: Tensor) -> TensorSpec:
        """Return the spec of a slice of ``stack`` along its first dim."""
        return cls(tuple(stack.shape[1:]), stack.dtype)


@dataclass(frozen=True)
class Body:
    """A traced function as one XLA computation.

    Its parameters are the inputs that it uses, the seeds and the captured values, in the order of
    their parameter numbers.
    """

    computation: Any
    text: bytes  # serialized, without metadata; equal for functions that compute the same
    numbers: tuple[int, ...]  # parameter number of each input; -1 if it is not used
    seeds: dict[int, int]  # parameter number of each seed that it uses, by number of the seed
    captured: dict[int, Tensor]  # other device tensors that the function uses, by parameter number
    outputs: tuple[TensorSpec, ...]

    @property
    def draws_random_numbers(self) -> bool:
        return bool(self.seeds)


class ChangedInPlaceError(Exception):
    """A traced function changed inputs in place; ``numbers`` has their indices."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(f"inputs {list(numbers)} were changed in place")
        self.numbers = list(numbers)


def trace_body(
    function: Callable[[list[Tensor]], Sequence[Tensor]], inputs: Sequence[TensorSpec], name: str
) -> Body:
    """Trace ``function`` with placeholders for its inputs.

    What it computed from these and somebody holds afterwards is a ``TensorOfTrace``.

    Raises:
        ChangedInPlaceError: if it changes an input in place.
        ChangedOutsideError: if it changes another tensor in place, which gets its values back.
    """
    made = TracedTensors()
    # A caller's hooks, such as those of a checkpointed forward around, see no tensors of a trace.
    own_hooks = torch.autograd.graph.saved_tensors_hooks(made.save, made.unpack)
    with made, own_hooks, _without_cached_casts():
        body = _traced(function, inputs, name)
    if made.changed:
        raise ChangedOutsideError(made.changed[0])
    return body


def _traced(
    function: Callable[[list[Tensor]], Sequence[Tensor]], inputs: Sequence[TensorSpec], name: str
) -> Body:
    given = [xb.create_placeholder_tensor(each.shape, each.dtype) for each in inputs]
    before = [graph_hash(tensor) for tensor in given]
    # Wait for the execution in flight, if there is one. torch_xla knows inputs by the addresses of
    # their buffers, and by others until these are made: then it would not find below what was
    # lowered before.
    torch_xla._XLAC._xla_sync_multi(given, [], False, True)  # computes nothing
    with _separate_graph() as seeds, torch.no_grad(), _without_values():
        results = list(function(list(given)))
        if changed := [at for at, each in enumerate(given) if graph_hash(each) != before[at]]:
            raise ChangedInPlaceError(changed)
        context = torch_xla._XLAC.lowering.LoweringContext(name)
        context.set_name_string(name)
        context.build(results)
        module = bytes(context.hlo())
        captured = dict(context.device_parameter_id_tensor_mapping())
        numbers = tuple(context.tensor_parameter_id(each) for each in given)
        found = {at: context.tensor_parameter_id(seed) for at, seed in seeds.items()}
        used = {at: number for at, number in found.items() if number != -1}
        for number in (*numbers, *used.values()):
            captured.pop(number, None)
        return Body(
            xb.computation_from_module_proto(name, module),
            without_metadata(module) if has_metadata() else module,
            numbers,
            used,
            captured,
            tuple(TensorSpec.of(each) for each in results),
        )


def cast_in_loop(tensor: Tensor, dtype: torch.dtype, varying: Tensor) -> Tensor:
    """Cast a slice of a stack inside of a loop, not the stack before the loop.

    Args:
        tensor: the slice.
        dtype: to cast it to.
        varying: any floating-point tensor that differs between iterations.
    """
    # The TPU compiler moves a cast from float32 to bf16 before the loop, where it needs memory for
    # the cast stack, even through a barrier; but not past a sum with what only an iteration knows:
    # zero, or 1e-30 if the first element of ``varying`` is NaN.
    if tensor.dtype != torch.float32 or dtype == tensor.dtype:
        return tensor.to(dtype)
    first = varying.detach().reshape(-1)[:1]
    return (tensor + (first != first).any().float() * 1e-30).to(dtype)


def read_slice(tensor: Tensor, dim: int, at: Tensor, length: int) -> Tensor:
    """Return ``tensor.narrow(dim, at, length)`` for an index ``at``, [1] int32, on the device."""

    def read(tensor: Any, at: Any) -> Any:
        sizes = list(tensor.shape().sizes)
        sizes[dim] = length
        return tensor.dynamic_slice(_starts(tensor, at.reshape([]), dim), sizes)

    return _computed("read_slice", [tensor, at], read)


def write_slice(tensor: Tensor, value: Tensor, dim: int, at: Tensor) -> Tensor:
    """Return ``tensor`` with ``value`` from index ``at``, [1] int32, of ``dim`` on."""

    def write(tensor: Any, value: Any, at: Any) -> Any:
        return tensor.dynamic_update_slice(value, _starts(tensor, at.reshape([]), dim))

    return _computed("write_slice", [tensor, value, at], write)


def _computed(name: str, tensors: Sequence[Tensor], make: Callable[..., Any]) -> Tensor:
    builder = xb.create_builder(name)
    inputs = [xb.mkparam(builder, at, xb.tensor_shape(each)) for at, each in enumerate(tensors)]
    computation = xb.Op.tuple([make(*inputs)]).build(name)
    # Computations of one name but other shapes may not be mixed up.
    shapes = "_".join(str(size) for each in tensors for size in (*each.shape, ""))
    [result] = torch_xla._XLAC._xla_user_computation(
        f"xla::{name}_{shapes}", list(tensors), computation
    )
    return result


def depends_on(tensor: Tensor, given: Tensor) -> bool:
    """Return whether ``tensor`` is computed from ``given``, an input of the traced function."""
    if tensor.device.type != "xla":
        return False
    context = torch_xla._XLAC.lowering.LoweringContext("depends")
    context.build([tensor])
    return context.tensor_parameter_id(given) != -1


def graph_hash(tensor: Tensor) -> bytes:
    """Return a hash of the graph that computes ``tensor``, and of the inputs that it has."""
    # torch_xla's own hash has the shapes of inputs only: two layers of one input have the same.
    inputs, _ = torch_xla._XLAC._get_tensors_xla_device_data_node([tensor])
    return bytes(torch_xla._XLAC._get_graph_hash([tensor])) + repr(list(inputs)).encode()


def new_seeds(length: int, device: torch.device) -> Tensor:
    """Draw seeds, [length] int64, from the random numbers of the device."""
    # Tracing a body sets the RNG state to a value known on the host. Do the same in a step that
    # finds its loop in the cache: otherwise its program would differ from that of the first step.
    ops.set_rng_state(ops.get_rng_state(device), device)
    return torch.randint(2**31 - 1, (length,), dtype=torch.int64, device=device)


_BETWEEN_SEEDS = 0x9E3779B97F4A7C  # odd, and unlike the integers that programs compute with
_seeds: ContextVar[tuple[int, dict[int, Tensor]]] = ContextVar("_seeds")


def use_seed(number: int) -> None:
    """In a traced function: draw random numbers from seed ``number`` from here on.

    Parts of a function with seeds of their own draw the same numbers in another order of the parts.
    The function begins with seed 0.
    """
    device, (state, seeds) = ops.device(), _seeds.get()
    # torch_xla tells scalars apart by their value, so no other integer may have that of a seed.
    ops.set_rng_state((state + number * _BETWEEN_SEEDS) % 2**63, device)
    seeds[number] = torch_xla._XLAC._get_base_seed_as_tensor(str(device))


@contextlib.contextmanager
def _separate_graph() -> Iterator[dict[int, Tensor]]:
    """Order collectives inside only among each other; yield the seeds of all random numbers."""
    device = ops.device()
    token = torch_xla._XLAC._get_all_reduce_token(str(device))
    state = ops.get_rng_state(device)
    ops.forget_token()
    ops.set_rng_state(state, device)
    seeds = {0: torch_xla._XLAC._get_base_seed_as_tensor(str(device))}
    outside = _seeds.set((state, seeds))
    try:
        yield seeds
    finally:
        _seeds.reset(outside)
        torch_xla._XLAC._set_all_reduce_token(str(device), token)
        ops.set_rng_state(state, device)


@contextlib.contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Let autocast keep no casts of placeholders, which it does, in C++, until it ends."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


@contextlib.contextmanager
def _without_values() -> Iterator[None]:
    """Refuse to read values inside; let an error keep no tensor."""
    try:
        with ops.runtime().without_values():
            yield
    except BaseException as error:
        forget_locals(error)
        raise


LOOP_NAME = "fsdp_scan"


@dataclass(frozen=True)
class StackUpdate:
    """Replaces a slice of each stack in every iteration, computed from the first ys of the loop,
    which the loop then does not return."""

    body: Body  # maps (first ys, old slices) to the new slices
    takes: int  # number of ys that it takes
    stacks: tuple[Tensor, ...]  # [length, ...] each
    xs: tuple[int | None, ...]  # for each stack: its index among the loop's xs, None if not there

    @property
    def key(self) -> Hashable:
        """Equal for updates that the same loop can make, with other operands."""
        body = self.body
        return body.text, body.numbers, tuple(body.captured), self.takes, self.xs

    @property
    def operands(self) -> list[Tensor]:
        """Operands of the While operation in addition to the loop's own."""
        new = [stack for stack, x in zip(self.stacks, self.xs, strict=True) if x is None]
        return [*new, *self.body.captured.values()]


class Loop:
    """A While loop over a body with inputs (carry, xs, constants) and outputs (carry, ys).

    Its state is (counter, carry, xs, constants, captured, seeds, an update's stacks and captured
    values, ys). A stack that is updated and is one of the xs is in the state once, among the xs.
    The counter is an int32 that starts from a constant, so the compiler knows the trip count.

    Args:
        body: computes one iteration.
        length: number of iterations.
        num_carry: number of carried tensors.
        num_xs: number of inputs, [length, ...], that are sliced along their first dim.
        prefetched: indices of xs of which an iteration gets the slice of the next one; the last
            iteration gets its own slice.
        reverse: iterate from the last slice to the first.
        in_pairs: let an iteration of the While operation compute two slices, the first of an odd
            number before all. What the body carries and replaces while it is still in use, such as
            a gathered tensor that the next slice needs, XLA otherwise copies in each iteration.
    """

    def __init__(
        self,
        body: Body,
        length: int,
        num_carry: int,
        num_xs: int,
        *,
        prefetched: Iterable[int] = (),
        reverse: bool = False,
        in_pairs: bool = False,
    ) -> None:
        self.body = body
        self._length = length
        self._num_carry = num_carry
        self._xs = range(num_carry, num_carry + num_xs)
        self._prefetched = frozenset(num_carry + each for each in prefetched)
        self._reverse = reverse
        # One pair alone would be no loop: XLA could then hold what both need at once.
        self._at_once = 2 if in_pairs and length >= 4 else 1
        # By key of the update: an optimizer's update is traced in every step, but the loop is built
        # again only if the update computes something else.
        self._computations: dict[Hashable, Any] = {}

    @property
    def ys(self) -> tuple[TensorSpec, ...]:
        """Specs of the ys of one iteration."""
        return self.body.outputs[self._num_carry :]

    def run(
        self, inputs: Sequence[Tensor], seeds: Tensor | None, update: StackUpdate | None = None
    ) -> list[Tensor]:
        """Return the last carry, the ys [length, ...] that no update takes, and the updated stacks.

        Args:
            inputs: carry, xs and constants.
            seeds: [length] int64; required if the body draws random numbers.
            update: stacks to update in the loop.
        """
        operands = [*inputs, *self.body.captured.values()]
        if self.body.draws_random_numbers and seeds is not None:
            operands.append(seeds)
        further = [] if update is None else update.operands
        ys = self.ys[0 if update is None else update.takes :]
        further += [
            ops.uninitialized((self._length, *each.shape), each.dtype, operands[0]) for each in ys
        ]
        key = None if update is None else update.key
        if key not in self._computations:
            self._computations[key] = self._build(operands, further, len(ys), update)
        computation = self._computations[key]
        operands += further
        return list(
            torch_xla._XLAC._xla_user_computation(f"xla::{LOOP_NAME}", operands, computation)
        )

    def _build(
        self,
        operands: Sequence[Tensor],
        further: Sequence[Tensor],
        num_ys: int,
        update: StackUpdate | None,
    ) -> Any:
        builder = xb.create_builder(LOOP_NAME)
        params = [
            xb.mkparam(builder, at, xb.tensor_shape(each))
            for at, each in enumerate([*operands, *further])
        ]
        iterate = functools.partial(self._iterate, update, len(operands))

        def at_once(*state: Any) -> tuple[Any, ...]:
            for _ in range(self._at_once):
                state = iterate(*state)
            return state

        start = (_int32(builder, 0), *params)
        for _ in range(self._length % self._at_once):
            start = iterate(*start)
        done = xb.Op.mkwhile(start, self._condition, at_once)
        stacks = [] if update is None else self._stacks(update, len(operands))
        ys = range(len(params) - num_ys, len(params))
        results = [*range(self._num_carry), *ys, *stacks]
        return xb.Op.tuple([done.get_tuple_element(1 + at) for at in results]).build(LOOP_NAME)

    def _stacks(self, update: StackUpdate, first: int) -> list[int]:
        """Return the index of each of the update's stacks in the state (without the counter), where
        the update's operands start at ``first``."""
        at = itertools.count(first)
        return [next(at) if x is None else self._xs[x] for x in update.xs]

    def _condition(self, counter: Any, *rest: Any) -> Any:
        return counter < _int32(counter.builder(), self._length)

    def _iterate(
        self, update: StackUpdate | None, first: int, counter: Any, *state: Any
    ) -> tuple[Any, ...]:
        one = _int32(counter.builder(), 1)
        at = _int32(counter.builder(), self._length - 1) - counter if self._reverse else counter
        next_at = at - one if self._reverse else at + one  # XLA clamps slices to the ends
        outputs = self._call_body(state, at, next_at)
        carry, ys = outputs[: self._num_carry], outputs[self._num_carry :]
        new_state = list(state)
        if update is not None:
            captured = state[first + update.xs.count(None) :][: len(update.body.captured)]
            stacks = self._stacks(update, first)
            slices = [_read(state[index], at) for index in stacks]
            new_slices = _call(update.body, [*ys[: update.takes], *slices], captured)
            for index, new in zip(stacks, new_slices, strict=True):
                new_state[index] = _write(state[index], new, at)
            ys = ys[update.takes :]
        end = len(state) - len(ys)
        stacked = [_write(state[end + k], each, at) for k, each in enumerate(ys)]
        return (counter + one, *carry, *new_state[len(carry) : end], *stacked)

    def _call_body(self, state: Sequence[Any], at: Any, next_at: Any) -> list[Any]:
        body = self.body
        inputs = []
        for index, number in enumerate(body.numbers):
            each = None
            if number != -1:  # do not even slice an input that is not used
                where = next_at if index in self._prefetched else at
                each = _read(state[index], where) if index in self._xs else state[index]
            inputs.append(each)
        end = len(inputs) + len(body.captured)
        seed = _read(state[end], at) if body.draws_random_numbers else None
        return _call(body, inputs, state[len(inputs) : end], seed)


def traced_loop(
    function: Callable[[list[Tensor]], Sequence[Tensor]],
    name: str,
    length: int,
    carry: Sequence[Tensor],
    xs: Sequence[Tensor],
    constants: Sequence[Tensor],
    **options: Any,
) -> Loop:
    """Trace ``function`` for inputs like these, and return the ``Loop`` over it."""
    of_slices = map(TensorSpec.slice_of, xs)
    specs = [*map(TensorSpec.of, carry), *of_slices, *map(TensorSpec.of, constants)]
    return Loop(trace_body(function, specs, name), length, len(carry), len(xs), **options)


def _call(
    body: Body, inputs: Sequence[Any], captured: Sequence[Any], seed: Any = None
) -> list[Any]:
    by_number = dict(zip(body.numbers, inputs, strict=True))
    by_number.update(zip(body.captured, captured, strict=True))
    by_number.pop(-1, None)
    for each, number in body.seeds.items():
        by_number[number] = _derived(seed, each)
    results = xb.Op.call(body.computation, [by_number[at] for at in range(len(by_number))])
    return [results.get_tuple_element(k) for k in range(len(body.outputs))]


def _derived(seed: Any, number: int) -> Any:
    """Return seed ``number`` of an iteration whose seed 0 is given."""
    if number == 0:
        return seed
    return seed + xb.Op.scalar(seed.builder(), number * _BETWEEN_SEEDS, dtype=xb.Type.S64)


@dataclass(eq=False)
class LoopCache:
    """Caches traced loops by key. A copy starts empty."""

    made: dict[Hashable, Any] = field(default_factory=dict)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value for ``key``; call ``make`` for it the first time."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def __reduce__(self) -> tuple[Any, ...]:
        return LoopCache, ()


def _int32(builder: Any, value: int) -> Any:
    return xb.Op.scalar(builder, value, dtype=xb.Type.S32)


def _starts(stack: Any, at: Any, dim: int = 0) -> list[Any]:
    starts = [_int32(at.builder(), 0)] * len(stack.shape().sizes)
    starts[dim] = at
    return starts


def _read(stack: Any, at: Any) -> Any:
    sizes = list(stack.shape().sizes)[1:]
    return stack.dynamic_slice(_starts(stack, at), [1, *sizes]).reshape(sizes)


def _write(stack: Any, value: Any, at: Any) -> Any:
    return stack.dynamic_update_slice(value.broadcast([1]), _starts(stack, at))
