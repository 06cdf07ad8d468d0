"""XLA While loops: a function of tensors, traced apart from the program around it, is run once for
each slice of its inputs.

The words are those of ``jax.lax.scan``: ``carry``, ``xs``, ``ys``. A body shares no chain of
collectives or random numbers with the program around it; all its random numbers come from a seed
that is one of its inputs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch import Tensor

from xla_fsdp.distributed.xla import ops

T = TypeVar("T")


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return those of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @classmethod
    def slice_of(cls, stack: Tensor) -> TensorSpec:
        """Return those of a slice of ``stack`` along its first dim."""
        return cls(tuple(stack.shape[1:]), stack.dtype)


@dataclass(frozen=True)
class Body:
    """A traced function as one XLA computation."""

    # takes the inputs that are used, the seed and the captured values, in the order of their
    # parameter numbers
    computation: Any
    text: bytes  # serialized; equal for functions that compute the same
    numbers: tuple[int, ...]  # parameter number of each input; -1 for one that is not used
    seed: int  # parameter number of the seed, or -1
    captured: dict[int, Tensor]  # other device values that the function used, by parameter number
    outputs: tuple[TensorSpec, ...]  # of the values that it returns

    @property
    def draws_random_numbers(self) -> bool:
        """Whether it needs a seed."""
        return self.seed != -1


class ChangedInPlaceError(Exception):
    """A traced function changed inputs; ``numbers`` says which."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(f"inputs {list(numbers)} were changed in place")
        self.numbers = list(numbers)


def trace_body(
    function: Callable[[list[Tensor]], Sequence[Tensor]], inputs: Sequence[TensorSpec], name: str
) -> Body:
    """Trace ``function`` with tensors that have no values.

    Raises:
        ChangedInPlaceError: if it changes them.
    """
    given = [xb.create_placeholder_tensor(each.shape, each.dtype) for each in inputs]
    before = [graph_hash(tensor) for tensor in given]
    with _separate_graph() as seed, torch.no_grad():
        results = list(function(list(given)))
        changed = [at for at, each in enumerate(given) if graph_hash(each) != before[at]]
        if changed:
            raise ChangedInPlaceError(changed)
        context = torch_xla._XLAC.lowering.LoweringContext(name)
        context.set_name_string(name)
        context.build(results)
        module = context.hlo()
        captured = dict(context.device_parameter_id_tensor_mapping())
        numbers = tuple(context.tensor_parameter_id(each) for each in given)
        seed_number = context.tensor_parameter_id(seed)
        for number in (*numbers, seed_number):
            captured.pop(number, None)
        return Body(
            xb.computation_from_module_proto(name, module),
            bytes(module),
            numbers,
            seed_number,
            captured,
            tuple(TensorSpec.of(each) for each in results),
        )


def cast_in_loop(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor.to(dtype)``, computed in every iteration of a loop."""
    # The TPU compiler would cast the whole float32 stack before the loop instead of a slice, also
    # through a barrier: what is only used in bf16 it casts as early as it can. Integers it leaves.
    if tensor.dtype != torch.float32 or dtype == tensor.dtype:
        return tensor.to(dtype)
    bits = _bitcast(tensor, xb.Type.S32)
    torch_xla._XLAC._xla_optimization_barrier_([bits])
    return _bitcast(bits, xb.Type.F32).to(dtype)


def _bitcast(tensor: Tensor, kind: Any) -> Tensor:
    builder = xb.create_builder("bits")
    param = xb.mkparam(builder, 0, xb.tensor_shape(tensor))
    computation = xb.Op.tuple([param.bitcast(kind)]).build("bits")
    [found] = torch_xla._XLAC._xla_user_computation("xla::bits", [tensor], computation)
    return found


def depends_on(tensor: Tensor, given: Tensor) -> bool:
    """Whether ``tensor`` is computed from ``given``, one of a traced function's inputs."""
    context = torch_xla._XLAC.lowering.LoweringContext("depends")
    context.build([tensor])
    return context.tensor_parameter_id(given) != -1


def graph_hash(tensor: Tensor) -> bytes:
    """Return a hash that is equal for traced tensors that are computed alike."""
    return bytes(torch_xla._XLAC._get_graph_hash([tensor]))


def new_seeds(length: int, device: torch.device) -> Tensor:
    """Draw seeds, [length] int64, from the device's random numbers."""
    # Continue these from a value known on the host, as tracing a body does: else a step whose loop
    # was traced before would be another program than the first one.
    ops.set_rng_state(ops.get_rng_state(device), device)
    return torch.randint(2**31 - 1, (length,), dtype=torch.int64, device=device)


@contextlib.contextmanager
def _separate_graph() -> Iterator[Tensor]:
    """Inside, collectives wait for none outside; yield the seed of all random numbers there."""
    device = ops.device()
    token = torch_xla._XLAC._get_all_reduce_token(str(device))
    state = ops.get_rng_state(device)
    ops.forget_token()
    try:
        ops.set_rng_state(state, device)
        yield torch_xla._XLAC._get_base_seed_as_tensor(str(device))
    finally:
        torch_xla._XLAC._set_all_reduce_token(str(device), token)
        ops.set_rng_state(state, device)


LOOP_NAME = "fsdp_scan"


@dataclass(frozen=True)
class StackUpdate:
    """Change slices of stacks in every iteration, by some of the ys, which are then not stacked."""

    body: Body  # of (the ys that it takes, the slices) to the new slices
    takes: int  # how many of the ys it takes, from the first on
    stacks: tuple[Tensor, ...]  # [length, ...], whose slices it changes
    xs: tuple[int | None, ...]  # for each stack, which of the loop's xs it is; None if none of them

    @property
    def key(self) -> Hashable:
        """Equal for updates that one loop can make, with these operands in its order."""
        body = self.body
        return body.text, body.numbers, tuple(body.captured), self.takes, self.xs

    @property
    def operands(self) -> list[Tensor]:
        """The loop's inputs besides its own."""
        new = [stack for stack, x in zip(self.stacks, self.xs, strict=True) if x is None]
        return [*new, *self.body.captured.values()]


class Loop:
    """A While loop over a body with inputs (carry, xs, constants) and outputs (carry, ys).

    Its state is (counter, carry, xs, constants, captured, seeds, an update's stacks and captured
    values, ys); a stack that is updated and one of the xs is there once. The counter is an int32
    that starts from a constant, so that the compiler knows the number of iterations.

    Args:
        body: the function of one iteration.
        length: number of iterations.
        num_carry: how many tensors go from one iteration to the next.
        num_xs: how many inputs, [length, ...], are sliced along their first dim.
        prefetched: which of the xs come one iteration early; the last iteration gets its own slice
            once more.
        reverse: from the last slice to the first.
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
    ) -> None:
        self._body = body
        self._length = length
        self._num_carry = num_carry
        self._xs = range(num_carry, num_carry + num_xs)
        self._prefetched = frozenset(num_carry + each for each in prefetched)
        self._reverse = reverse
        # An optimizer's update is traced anew in every step, as its numbers change; the loop with
        # it is only built anew if the update computes something else.
        self._computations: dict[Hashable, Any] = {}

    @property
    def draws_random_numbers(self) -> bool:
        """Whether it needs seeds."""
        return self._body.draws_random_numbers

    @property
    def ys(self) -> tuple[TensorSpec, ...]:
        """One iteration's."""
        return self._body.outputs[self._num_carry :]

    def run(
        self, inputs: Sequence[Tensor], seeds: Tensor | None, update: StackUpdate | None = None
    ) -> list[Tensor]:
        """Return the last carry, the ys, [length, ...], and then the stacks that were updated.

        Args:
            inputs: carry, xs and constants.
            seeds: [length] int64, if the body draws random numbers.
            update: stacks to change.
        """
        operands = [*inputs, *self._body.captured.values()]
        if self._body.draws_random_numbers and seeds is not None:
            operands.append(seeds)
        further = [] if update is None else update.operands
        key = None if update is None else update.key
        if key not in self._computations:
            self._computations[key] = self._build(operands, further, update)
        computation = self._computations[key]
        operands += further
        return list(
            torch_xla._XLAC._xla_user_computation(f"xla::{LOOP_NAME}", operands, computation)
        )

    def _build(
        self, operands: Sequence[Tensor], further: Sequence[Tensor], update: StackUpdate | None
    ) -> Any:
        builder = xb.create_builder(LOOP_NAME)
        params = [
            xb.mkparam(builder, at, xb.tensor_shape(each))
            for at, each in enumerate([*operands, *further])
        ]
        counter = _int32(builder, 0)
        ys = self.ys[0 if update is None else update.takes :]
        zeros = [_zeros(builder, self._length, each) for each in ys]
        iterate = functools.partial(self._iterate, update, len(operands))
        done = xb.Op.mkwhile((counter, *params, *zeros), self._condition, iterate)
        stacks = [] if update is None else self._stacks(update, len(operands))
        results = [*range(self._num_carry), *range(len(params), len(params) + len(ys)), *stacks]
        return xb.Op.tuple([done.get_tuple_element(1 + at) for at in results]).build(LOOP_NAME)

    def _stacks(self, update: StackUpdate, first: int) -> list[int]:
        """Return where an update's stacks are in the state, if its own operands begin at
        ``first``."""
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
            slices = [_read(state[place], at) for place in stacks]
            new_slices = _call(update.body, [*ys[: update.takes], *slices], captured)
            for place, new in zip(stacks, new_slices, strict=True):
                new_state[place] = _write(state[place], new, at)
            ys = ys[update.takes :]
        end = len(state) - len(ys)
        stacked = [_write(state[end + k], each, at) for k, each in enumerate(ys)]
        return (counter + one, *carry, *new_state[len(carry) : end], *stacked)

    def _call_body(self, state: Sequence[Any], at: Any, next_at: Any) -> list[Any]:
        body = self._body
        inputs = []
        for place, number in enumerate(body.numbers):
            each = None
            if number != -1:  # else not even a slice of it is computed
                where = next_at if place in self._prefetched else at
                each = _read(state[place], where) if place in self._xs else state[place]
            inputs.append(each)
        end = len(inputs) + len(body.captured)
        seed = _read(state[end], at) if body.draws_random_numbers else None
        return _call(body, inputs, state[len(inputs) : end], seed)


def _call(
    body: Body, inputs: Sequence[Any], captured: Sequence[Any], seed: Any = None
) -> list[Any]:
    """Call a body; return its outputs."""
    by_number = dict(zip(body.numbers, inputs, strict=True))
    by_number.update(zip(body.captured, captured, strict=True))
    by_number[body.seed] = seed
    by_number.pop(-1, None)
    results = xb.Op.call(body.computation, [by_number[at] for at in range(len(by_number))])
    return [results.get_tuple_element(k) for k in range(len(body.outputs))]


class LoopCache:
    """Loops that were traced before, by what they depend on. Copies trace their own."""

    def __init__(self) -> None:
        self.made: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what was made for an equal key, or make it."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def __reduce__(self) -> tuple[Any, ...]:
        return LoopCache, ()


def _int32(builder: Any, value: int) -> Any:
    return xb.Op.scalar(builder, value, dtype=xb.Type.S32)


def _zeros(builder: Any, length: int, spec: TensorSpec) -> Any:
    zero = xb.Op.scalar(builder, 0, dtype=xb.Op.from_torch_type(spec.dtype))
    return zero.broadcast([length, *spec.shape])


def _starts(stack: Any, at: Any) -> tuple[list[int], list[Any]]:
    sizes = list(stack.shape().sizes)
    zero = _int32(at.builder(), 0)
    return sizes, [at, *[zero] * (len(sizes) - 1)]


def _read(stack: Any, at: Any) -> Any:
    sizes, starts = _starts(stack, at)
    return stack.dynamic_slice(starts, [1, *sizes[1:]]).reshape(sizes[1:])


def _write(stack: Any, value: Any, at: Any) -> Any:
    _, starts = _starts(stack, at)
    return stack.dynamic_update_slice(value.broadcast([1]), starts)
