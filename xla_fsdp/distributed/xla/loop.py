"""Functions of tensors traced apart from the program around them, for loops to run.

Words: a *body* is such a function as one XLA computation.
Always true: a body shares no chain of collectives or random numbers with the program around it; all
its random numbers come from a seed that is one of its inputs.
Loops of bodies are ``loop_xla_ops``'; what they compute is decided in ``scan``.

Loops of XLA: a traced function run once for each slice of its inputs.

Words: a *body* is such a function (``scan_xla_ops``); *carried* tensors go from one round to the
next; *sliced* ones, [length, ...], are cut along their first dim, a slice for each round (those
*ahead* one round early); *constant* ones are the same in all; *collected* ones are stacked again;
an *update* makes new slices of stacks of what would be collected.
Layout of a loop: one While whose state is (counter, carried, sliced, constant, captured, seeds, an
update's stacks and what it captured, collected); a stack that is sliced anyway is there once. The
counter is an int32 that starts from a constant, so that the compiler knows the number of rounds;
each round calls the body once and writes its slices of what is collected.
What loops compute is decided in ``scan``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch import Tensor

from xla_fsdp.distributed.xla import ops


@dataclass(frozen=True)
class Like:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        """Those of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @classmethod
    def slice_of(cls, stack: Tensor) -> Like:
        """Those of a slice of ``stack``."""
        return cls(tuple(stack.shape[1:]), stack.dtype)


@dataclass(frozen=True)
class Body:
    """A traced function.

    Args:
        computation: takes the inputs that are used, the seed and what is captured, in the order of
            their parameter numbers.
        text: serialized; equal for functions that compute the same.
        numbers: parameter number of each input; -1 for one that is not used.
        seed: parameter number of the seed, or -1.
        captured: other device values that the function used, by parameter number.
        outputs: what it returns.
    """

    computation: Any
    text: bytes
    numbers: tuple[int, ...]
    seed: int
    captured: dict[int, Tensor]
    outputs: tuple[Like, ...]

    @property
    def draws_random_numbers(self) -> bool:
        """Whether a seed is needed."""
        return self.seed != -1


class ChangedInPlaceError(Exception):
    """A traced function changed inputs; ``numbers`` says which."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(f"inputs {list(numbers)} were changed in place")
        self.numbers = list(numbers)


def trace_body(
    function: Callable[[list[Tensor]], Sequence[Tensor]], inputs: Sequence[Like], name: str
) -> Body:
    """Trace ``function``, called with tensors that have no values.

    Raises:
        ChangedInPlaceError: if it changes them.
    """
    given = [xb.create_placeholder_tensor(each.shape, each.dtype) for each in inputs]
    before = [identity(tensor) for tensor in given]
    with _apart() as seed, torch.no_grad():
        results = list(function(list(given)))
        changed = [at for at, each in enumerate(given) if identity(each) != before[at]]
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
            tuple(Like.of(each) for each in results),
        )


def cast_here(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, computed where it stands, in every round of a loop.

    Of a float32 slice the TPU compiler would cast the whole stack before the loop, also from behind
    a barrier: what is only used in bf16 it turns into bf16 as far back as it can. What it takes
    for integers it leaves alone.
    """
    if tensor.dtype != torch.float32 or dtype == tensor.dtype:
        return tensor.to(dtype)
    bits = _as_type(tensor, xb.Type.S32)
    torch_xla._XLAC._xla_optimization_barrier_([bits])
    return _as_type(bits, xb.Type.F32).to(dtype)


def _as_type(tensor: Tensor, kind: Any) -> Tensor:
    """The same bits."""
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


def identity(tensor: Tensor) -> bytes:
    """Equal for traced tensors that are computed alike."""
    return bytes(torch_xla._XLAC._get_graph_hash([tensor]))


def new_seeds(length: int, device: torch.device) -> Tensor:
    """Seeds, [length], from the device's random numbers."""
    return torch.randint(2**31 - 1, (length,), dtype=torch.int64, device=device)


def reroot_random_numbers(device: torch.device) -> None:
    """Continue the device's random numbers from a value known on the host. Tracing a body apart
    does so, too: a step makes one program whether it traces bodies or not."""
    ops.set_rng_state(ops.get_rng_state(device), device)


@contextlib.contextmanager
def _apart() -> Iterator[Tensor]:
    """Inside, collectives wait for nothing outside, and random numbers come from the tensor that
    this yields."""
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
class Update:
    """New values for slices of stacks, in every round, from what the round would collect.

    Args:
        body: of (what it takes, the slices) to the new slices.
        takes: how many of what is collected it takes, from the first on; they are not collected.
        stacks: [length, ...], whose slices it changes.
        sliced: for each stack, which of the loop's sliced inputs it is; None if none of them.
    """

    body: Body
    takes: int
    stacks: tuple[Tensor, ...]
    sliced: tuple[int | None, ...]

    @property
    def key(self) -> Hashable:
        """Equal for updates that one loop can make, with these operands in its order."""
        body = self.body
        return body.text, body.numbers, tuple(body.captured), self.takes, self.sliced

    @property
    def operands(self) -> list[Tensor]:
        """What the loop takes besides its own inputs."""
        new = [stack for stack, at in zip(self.stacks, self.sliced, strict=True) if at is None]
        return [*new, *self.body.captured.values()]


class Loop:
    """``length`` rounds of a body with inputs (carried, sliced, constant) and outputs (carried,
    collected).

    Args:
        body: the function of a round.
        length: number of rounds.
        carried: how many tensors are carried.
        sliced: how many are sliced.
        ahead: which of the sliced come one round early; the last round gets its own once more.
        backwards: from the last slice to the first.
    """

    def __init__(
        self,
        body: Body,
        length: int,
        carried: int,
        sliced: int,
        *,
        ahead: Sequence[int] = (),
        backwards: bool = False,
    ) -> None:
        self._body = body
        self._length = length
        self._carried = range(carried)
        self._sliced = range(carried, carried + sliced)
        self._ahead = frozenset(carried + each for each in ahead)
        self._backwards = backwards
        self._inputs = len(body.numbers)
        self._computations: dict[Hashable, Any] = {}  # by what the update computes, and of what

    @property
    def collected(self) -> tuple[Like, ...]:
        """What a round collects."""
        return self._body.outputs[len(self._carried) :]

    def run(
        self, inputs: Sequence[Tensor], seeds: Tensor | None, update: Update | None = None
    ) -> list[Tensor]:
        """The carried tensors after the last round, the collected ones, [length, ...], and then
        the stacks that were updated.

        Args:
            inputs: carried, sliced and constant ones.
            seeds: [length] int64, if the body draws random numbers.
            update: what becomes of stacks.
        """
        operands = [*inputs, *self._body.captured.values()]
        if self._body.draws_random_numbers and seeds is not None:
            operands.append(seeds)
        further = [] if update is None else update.operands
        key = None if update is None else update.key
        if key not in self._computations:
            self._computations[key] = self._build(operands, further, update)
        name = f"xla::{LOOP_NAME}"
        computation = self._computations[key]
        operands += further
        return list(torch_xla._XLAC._xla_user_computation(name, operands, computation))

    def _build(
        self, operands: Sequence[Tensor], further: Sequence[Tensor], update: Update | None
    ) -> Any:
        builder = xb.create_builder(LOOP_NAME)
        params = [
            xb.mkparam(builder, at, xb.tensor_shape(each))
            for at, each in enumerate([*operands, *further])
        ]
        counter = _int32(builder, 0)
        updated = None if update is None else self._updated(update, len(operands))
        collected = self.collected[0 if update is None else update.takes :]
        zeros = [_zeros(builder, self._length, each) for each in collected]
        done = xb.Op.mkwhile(
            (counter, *params, *zeros), self._goes_on, functools.partial(self._round, updated)
        )
        end = 1 + len(params)
        kept = [1 + at for at in self._carried] + [end + at for at in range(len(zeros))]
        kept += [] if updated is None else [1 + at for at in updated.places]
        return xb.Op.tuple([done.get_tuple_element(at) for at in kept]).build(LOOP_NAME)

    def _updated(self, update: Update, first: int) -> _Updated:
        """Where an update's stacks and captured values are, if what it adds begins at ``first``."""
        at = itertools.count(first)
        places = [next(at) if k is None else self._sliced[k] for k in update.sliced]
        return _Updated(update.body, update.takes, places, [next(at) for _ in update.body.captured])

    def _goes_on(self, counter: Any, *rest: Any) -> Any:
        return counter < _int32(counter.builder(), self._length)

    def _round(self, updated: _Updated | None, counter: Any, *state: Any) -> tuple[Any, ...]:
        one = _int32(counter.builder(), 1)
        at = _int32(counter.builder(), self._length - 1) - counter if self._backwards else counter
        then = at - one if self._backwards else at + one  # slices are clamped to the ends
        results = xb.Op.call(self._body.computation, self._arguments(state, at, then))
        parts = [results.get_tuple_element(k) for k in range(len(self._body.outputs))]
        carried, collected = parts[: len(self._carried)], parts[len(self._carried) :]
        now = list(state)
        if updated is not None:
            for place, stack in updated.stacks(state, collected, at):
                now[place] = stack
            collected = collected[updated.takes :]
        first = len(state) - len(collected)
        stacks = [_write(state[first + k], each, at) for k, each in enumerate(collected)]
        return (counter + one, *carried, *now[len(carried) : first], *stacks)

    def _arguments(self, state: Sequence[Any], at: Any, then: Any) -> list[Any]:
        """What the body takes in this round, by parameter number."""
        body, found = self._body, {}
        for place, number in enumerate(body.numbers):
            if number != -1:
                where = then if place in self._ahead else at
                cut = place in self._sliced
                found[number] = _read(state[place], where) if cut else state[place]
        for place, number in enumerate(body.captured, self._inputs):
            found[number] = state[place]
        if body.draws_random_numbers:
            found[body.seed] = _read(state[self._inputs + len(body.captured)], at)
        return [found[number] for number in range(len(found))]


@dataclass(frozen=True)
class _Updated:
    """An update in a loop: its body, how much it takes, and the places in the loop's state of its
    stacks and captured values."""

    body: Body
    takes: int
    places: list[int]
    captured: list[int]

    def stacks(
        self, state: Sequence[Any], collected: Sequence[Any], at: Any
    ) -> Iterator[tuple[int, Any]]:
        """Place and new value of each stack."""
        slices = [_read(state[place], at) for place in self.places]
        given = [*collected[: self.takes], *slices]
        pairs = zip(self.body.numbers, given, strict=True)
        found = {number: each for number, each in pairs if number != -1}
        for number, place in zip(self.body.captured, self.captured, strict=True):
            found[number] = state[place]
        arguments = [found[number] for number in range(len(found))]
        results = xb.Op.call(self.body.computation, arguments)
        for k, place in enumerate(self.places):
            yield place, _write(state[place], results.get_tuple_element(k), at)


def _int32(builder: Any, value: int) -> Any:
    return xb.Op.scalar(builder, value, dtype=xb.Type.S32)


def _zeros(builder: Any, length: int, like: Like) -> Any:
    zero = xb.Op.scalar(builder, 0, dtype=xb.Op.from_torch_type(like.dtype))
    return zero.broadcast([length, *like.shape])


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
