"""Run the calls of blocks as one loop.

All calls but the last return placeholders; the call of the last block runs the loop, and those
that differ at either end before and after it. A forward must call the blocks in order, each with
the output of the previous block; it may keep the outputs, for use after the last call. Anything
else raises.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from xla_fsdp.distributed.context_parallel import context_key
from xla_fsdp.fsdp.engine.autograd import on_device
from xla_fsdp.fsdp.engine.module_state import named_fsdp_modules
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.engine.thread import current_pass, joined
from xla_fsdp.nn.remat_policy import ActivationStore, policy_of
from xla_fsdp.scan.autograd import ForwardCounter, PositionCall, ScanCall
from xla_fsdp.scan.block_inputs import (
    Arguments,
    BlockState,
    SharedTensors,
    forward_hooks_apart,
    run_forward_hooks,
    settings_of,
)
from xla_fsdp.scan.checks import refuse_hooks, refuse_host_tensors
from xla_fsdp.scan.errors import NoLoopError
from xla_fsdp.scan.plan import Plan, find_plan
from xla_fsdp.scan.program import Blocks, Position
from xla_fsdp.scan.tracing import (
    BlockTrace,
    Returned,
    Template,
    difference_problem,
    kinds_of,
    trace_block,
    with_numbers_as_inputs,
)
from xla_fsdp.scan.weights import BlockWeights, shards_of
from xla_fsdp.xla.loop import LoopCache, TensorSpec

# ---------------------------------------------------------------- placeholders

_METADATA = frozenset(
    {
        "shape.__get__", "dtype.__get__", "device.__get__", "ndim.__get__", "requires_grad.__get__",
        "is_leaf.__get__", "grad_fn.__get__", "layout.__get__", "size", "dim", "numel", "nelement",
        "ndimension", "is_floating_point", "is_complex", "element_size", "is_inference",
        "get_device", "_base.__get__", "is_meta.__get__", "is_cuda.__get__", "is_sparse.__get__",
        "is_quantized.__get__", "is_nested.__get__", "names.__get__", "itemsize.__get__",
        "is_xla.__get__", "is_cpu.__get__",
    }
)  # fmt: skip


class Placeholder(Tensor):
    """The output of block ``block`` of ``length``, before it is computed.

    It has a shape, a dtype and other metadata. Any other use raises, as a forward may only pass it
    to the next block, and keep it until ``become`` makes it the output. If there is a function
    ``compute``, that is called first, and may make it the output.
    """

    block: int
    length: int
    is_late: bool  # the loop has run, without returning this output
    late: Pass | None  # the pass of one that is late, if ``compute`` needs it
    trains: bool  # whether gradients will flow back from the output
    compute: Callable[[Placeholder], None] | None

    @classmethod
    def after(
        cls,
        block: int,
        length: int,
        like: Tensor,
        dtype: torch.dtype,
        compute: Callable[[Placeholder], None] | None = None,
    ) -> Placeholder:
        # Without requires_grad: torch's module hooks would pass it through an autograd node.
        made = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=dtype, device=like.device)
        made.block, made.length, made.is_late = block, length, False
        made.late, made.compute, made.trains = None, compute, False
        return made

    def become(self, output: Tensor, kind: type[Tensor] = Tensor) -> None:
        """Turn this object into the output, a tensor of that ``kind``."""
        own = output.view(output.shape)  # a tensor of which nothing else holds the implementation
        vars(self).clear()
        self.__class__ = kind  # type: ignore[assignment]
        torch._C._swap_tensor_impl(self, own)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placeholder(output of block {self.block} of {self.length})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _name(func)
        used = _placeholders_in(args, kwargs)
        waits = [each for each in used if each.compute is not None]
        if name in _OF_GRAPH and not waits and name != "grad_fn.__get__":
            return used[0].trains == (name == "requires_grad.__get__")
        if name in _METADATA and not (name in _OF_GRAPH and (waits or used[0].trains)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for each in waits:
            if isinstance(each, Placeholder) and each.compute is not None:
                each.compute(each)
        if used := [each for each in used if isinstance(each, Placeholder)]:
            raise _misused(used[0], name)
        return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Too late for ``compute``: autograd has seen a tensor without a graph.
        raise _misused(_placeholders_in(args, kwargs)[0], str(func))


class InnerOutput(Tensor):
    """The output of a block that has run in a loop, with others after it: gradients of those do not
    pass through this tensor, so what would see or change them raises."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _name(func)
        with_respect_to = args[1] if func is torch.autograd.grad else ()
        asked = any(isinstance(each, InnerOutput) for each in pytree.tree_leaves(with_respect_to))
        if asked or name in ("register_hook", "retain_grad"):
            raise NoLoopError(
                f"{name} was called with the output of a scanned block that is not the last one. "
                f"The blocks after it have run in the same loop, so it would not see their "
                f"gradients. Do not scan these blocks"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_OF_GRAPH = frozenset({"requires_grad.__get__", "is_leaf.__get__", "grad_fn.__get__"})
"""Of the metadata, what only the output itself knows."""


def _placeholders_in(args: Any, kwargs: Any) -> list[Any]:
    flat, _ = pytree.tree_flatten((args, kwargs))
    return [each for each in flat if isinstance(each, Placeholder)]


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)  # the descriptor, if func reads a property
    return f"{owner.__name__}.{name}" if name == "__get__" and owner is not None else name


def _misused(used: Placeholder, name: str) -> NoLoopError:
    if used.is_late:
        return NoLoopError(
            f"the output of block {used.block} of {used.length} was used (by {name}) after the "
            f"last block, and is the only one that was kept, which a loop cannot know in time. "
            f"Keep the outputs of all blocks (in a list), or do not scan these"
        )
    return NoLoopError(
        f"the output of block {used.block} of {used.length} was used (by {name}) before block "
        f"{used.length - 1} was called. Scanned blocks run as one loop: between them a forward may "
        f"do nothing but hand each block's output to the next, as in `for block in blocks: x = "
        f"block(x, ...)`, for all of them, and keep outputs for later. Move the rest into the "
        f"blocks, or do not scan these"
    )


# ---------------------------------------------------------------- the scan

_NOTHING = Returned(Arguments.of(()), ())

GATHER_ONCE_BELOW = 2**14
"""Elements. Biases and norms of blocks up to a width of 4096 are gathered once for all blocks and
stay unsharded from forward to backward, at most 32 KiB each in 16 bits."""


@dataclass(frozen=True)
class Options:
    """The options of ``scan_blocks`` that its loops depend on."""

    remat: str | tuple[str, ...] = "full"
    gather_once_below: int = GATHER_ONCE_BELOW
    offload_activations: bool = False


@dataclass(frozen=True)
class _Call:
    """The call of one block."""

    arguments: Arguments  # without tensors
    forward: Callable[..., Any]
    specs: tuple[TensorSpec, ...]  # of its tensors, in the compute dtype
    others: tuple[int, ...]  # which of all other tensor arguments it takes
    key: int  # equal for calls that only differ in tensors
    returned: Returned
    trace: BlockTrace | None  # None if the block was traced in an earlier pass


@dataclass(frozen=True)
class _BlockList:
    """The blocks at the beginning of a pass."""

    units: list[FSDPState]
    modules: list[nn.Module]  # without FSDP wrappers
    states: list[BlockState]
    shared: list[frozenset[int]]  # by block: indices of the tensors that are equal in all
    trained: list[tuple[bool, ...]]  # by block
    key: int  # equal for blocks with the same settings

    def template(
        self, number: int, call: _Call, numbers: tuple[tuple[int, torch.dtype], ...] = ()
    ) -> Template:
        """Return block ``number`` with its call, to be traced."""
        return Template(
            self.units[number],
            self.modules[number],
            call.forward,
            self.states[number],
            self.shared[number],
            call.arguments,
            call.specs,
            self.trained[number],
            numbers,
        )


class Surroundings(NamedTuple):
    """What the code around a block's call decides about it."""

    trains: bool
    autocasts: bool
    autocast_dtype: torch.dtype
    others: Any

    @classmethod
    def now(cls) -> Surroundings:
        return cls(
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("xla"),
            torch.get_autocast_dtype("xla"),
            (torch.is_inference_mode_enabled(), context_key()),
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        autocast = torch.autocast("xla", self.autocast_dtype, self.autocasts)
        with torch.set_grad_enabled(self.trains), autocast:
            yield


@dataclass
class Pass:
    """A forward in which some, but not yet all, blocks have been called.

    Has no references to placeholders but the last: the caller would seem to keep the others.
    """

    blocks: _BlockList
    given: Arguments  # of block 0
    others: list[Tensor]  # the tensor arguments of all blocks but the first of each
    cast: list[Tensor]  # the input of block 0 and the others, in the compute dtype
    calls: list[_Call] = field(default_factory=list)
    outputs: list[weakref.ref[Placeholder]] = field(default_factory=list)
    last: Placeholder | None = None  # output of the block that was called last
    around: Surroundings = field(default_factory=Surroundings.now)  # of its calls

    @property
    def next_unit(self) -> FSDPState:
        """The unit of the block that is to be called now."""
        return self.blocks.units[len(self.calls)]

    @property
    def kept(self) -> list[int]:
        """The numbers of the blocks whose outputs somebody holds."""
        return [at for at, output in enumerate(self.outputs) if output() is not None]

    def give(self, number: int, tensor: Tensor) -> None:
        """Replace the input of block 0, or one of the others, from number 1 on."""
        if number:
            self.others[number - 1] = tensor
        else:
            self.given = replace(self.given, tensors=(tensor, *self.given.tensors[1:]))

    def without_tensors(self) -> Pass:
        """Return what tells how to call the blocks. A graph that outlives its step may hold it:
        tensors would become outputs of the step's program."""
        given = self.given.without_tensors()
        return replace(self, given=given, others=[], cast=[], outputs=[], last=None)

    def run_called(self) -> None:
        """Run the blocks one by one that returned placeholders; let these become their outputs."""
        x = self.given.tensors[0]
        for number, output in enumerate(self.outputs):
            x = run_alone(self, number, x)
            if (found := output()) is not None:
                found.become(x)
                x = found  # so that its hooks see the gradients of the blocks that follow

    @property
    def trains(self) -> bool:
        """Whether gradients flow back from the blocks' outputs."""
        inputs = any(each.requires_grad for each in self.given.tensors)
        return self.around.trains and (inputs or any(map(any, self.blocks.trained)))

    @property
    def key(self) -> Any:
        """Equal for passes that can run the same loop."""
        return self.blocks.key, tuple((call.key, call.others) for call in self.calls)


@dataclass(frozen=True)
class _LoopPlan:
    """How the calls of a pass run.

    Args:
        plan: which blocks run in the loop.
        numbers: by position, (index, dtype) of the numbers that are inputs of the loop.
        values: by position, these numbers of all blocks, [iterations] each.
    """

    plan: Plan
    numbers: list[tuple[tuple[int, torch.dtype], ...]]
    values: list[list[Tensor]]


class BlockScan:
    """The ``ForwardOverride`` shared by all blocks of a loop.

    Args:
        blocks: FSDP modules; referenced weakly, as each of them holds this object.
        options: options of the loop.
        period: block n has parameters and buffers like block n + period.
    """

    def __init__(self, blocks: Sequence[Any], options: Options, period: int = 1) -> None:
        self.__setstate__(([_BlockRef(block) for block in blocks], options, period))

    def __getstate__(self) -> tuple[list[_BlockRef], Options, int]:
        # A copy runs the copied blocks and traces its own loops, so those are not copied.
        return self._blocks, self._options, self._period

    def __setstate__(self, state: tuple[list[_BlockRef], Options, int]) -> None:
        self._blocks, self._options, self._period = state
        self._policy = policy_of(self._options.remat)
        self._store = ActivationStore(self._options.offload_activations)
        self._pass: Pass | None = None
        self._without_loop = False
        self._keys: dict[Any, int] = {}  # numbers keys, as large ones are slow to hash
        self._returned: dict[Any, Returned] = {}
        self._plans: dict[Any, _LoopPlan] = {}
        self._loops = LoopCache()
        self._shared = [SharedTensors() for _ in range(self._period)]
        self._counter = ForwardCounter()

    _compute: Callable[[Placeholder], None] | None = None
    """What computes an output that is used before the last block is called."""

    _one_by_one: Callable[[Pass, Plan, Tensor, Sequence[Tensor]], Tensor] | None = None
    """What runs the blocks of a loop, given its input and all other arguments, for a backward that
    a loop cannot run; the forward then finds out that a loop can run all others."""

    def remove(self) -> None:
        """Run each block by itself again."""
        self._pass = None
        for block in (reference() for reference in self._blocks):
            if block is not None:
                block._fsdp_module_state.forward_override = None

    def run(self, unit: FSDPState, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the call of one block: return a placeholder, or for the last block the output.

        Raises:
            NoLoopError: if another block should be called now, for arguments that a loop cannot
                take, or that follow no pattern, and if blocks differ in what no loop can run.
        """
        given = Arguments.of((args, kwargs))
        blocks = [reference() for reference in self._blocks]
        if None in blocks:  # only this block was copied, without the others
            return unit.run(forward, args, kwargs)
        if current_pass() == -1:
            self._without_loop = _without_loop.get()
        if self._without_loop:
            self._pass = None  # left by a forward that raised
        # Otherwise this forward is recomputed in backward, maybe in a thread of autograd, which
        # does not have the context variable: it runs as the first time.
        if self._without_loop or (given.opaque and not torch.is_grad_enabled()):
            return unit.run(forward, args, kwargs)
        number = next(at for at, each in enumerate(blocks) if each._fsdp_unit is unit)
        current, self._pass = self._pass, None  # an error below ends the pass
        _check_arguments(number, given)
        current = self._begin(blocks, given) if number == 0 else _continued(current, number, given)
        call = self._call(current, number, forward, given)
        current.calls.append(call)
        if number == len(blocks) - 1:
            result = self._run_all(current)
        else:
            like, dtype = current.cast[0], _output_dtype(current)
            result = Placeholder.after(number, len(blocks), like, dtype, self._compute)
            result.trains = current.trains
            current.outputs.append(weakref.ref(result))
            current.last, self._pass = result, current
        output = call.returned.put_together(result, given.tensors)
        module = current.blocks.modules[number]
        if module._forward_hooks:
            run_forward_hooks(module, args, kwargs, output)
        return output

    def _begin(self, blocks: list[Any], given: Arguments) -> Pass:
        units: list[FSDPState] = [block._fsdp_unit for block in blocks]
        units[0].schedule.cleanup_failed_passes()
        for unit in units:
            unit.refuse_run()
        states = [BlockState.of(block) for block in blocks]
        for state in states:
            refuse_hooks(state)
            refuse_host_tensors(state)
        period = range(self._period)
        shared = [self._shared[at].of(states[at :: self._period]) for at in period]
        trained = [_trained(units[at :: self._period]) for at in period]
        key = (
            [TensorSpec.of(each) for state in states[: self._period] for each in state.tensors],
            settings_of(states),
            shared,
            trained,
            (torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("xla"), context_key()),
        )
        times = len(blocks) // self._period
        held = _BlockList(
            units,
            list(map(module_of, blocks)),
            states,
            shared * times,
            trained * times,
            self._number(tuple(map(tuple, key))),
        )
        return Pass(held, given, [], [units[0].cast_input(given.tensors[0])])

    def _number(self, key: Any) -> int:
        return self._keys.setdefault(key, len(self._keys))

    def _call(
        self, current: Pass, number: int, forward: Callable[..., Any], given: Arguments
    ) -> _Call:
        """Describe the call of a block; trace the block if that is new.

        Raises:
            NoLoopError: if the block cannot run in a loop.
        """
        if current.calls and not current.given.first_difference(given):
            call = replace(current.calls[0], forward=forward)
        else:
            others = _indices_of(given.tensors[1:], current)
            cast = (current.cast[0], *(current.cast[1 + at] for at in others))
            specs = tuple(map(TensorSpec.of, cast))
            key = self._number((given.key, specs))
            call = _Call(given.without_tensors(), forward, specs, others, key, _NOTHING, None)
        known = (number, current.blocks.key, call.key)
        if known in self._returned:
            return replace(call, returned=self._returned[known], trace=None)
        trace = self._trace(current.blocks.template(number, call))
        self._returned[known] = trace.returned
        return replace(call, returned=trace.returned, trace=trace)

    def _trace(self, template: Template) -> BlockTrace:
        return trace_block(template)

    def _plan(self, current: Pass) -> _LoopPlan:
        key = current.key
        if key not in self._plans:
            self._plans[key] = _make_plan(current, self._period)
        return self._plans[key]

    def _run_all(self, current: Pass) -> Tensor:
        """Run all blocks; let the outputs that the caller has kept become tensors."""
        found = self._plan(current)
        plan, x, kept = found.plan, current.given.tensors[0], current.kept
        collects = self._collects(kept, plan.length)
        outputs: dict[int, Tensor] = {}
        for number in range(plan.first):
            outputs[number] = x = run_alone(current, number, x)
        x, in_loop = self._run_loop(current, found, x, collects=collects)
        outputs.update(in_loop)
        outputs[plan.stop - 1] = x
        for number in range(plan.stop, plan.length):
            outputs[number] = x = run_alone(current, number, x)
        if current.last is not None:
            current.last.is_late = not collects
        for number in kept if collects else []:
            if (output := current.outputs[number]()) is not None:
                inner = plan.first <= number < plan.stop - 1 and outputs[number].requires_grad
                output.become(outputs[number], InnerOutput if inner else Tensor)
        return x

    def _collects(self, kept: Sequence[int], length: int) -> bool:
        """Return whether the loop returns the outputs of inner blocks, of which the caller holds
        those with these numbers."""
        # The caller always holds the output of the block before the last, as an argument. Whether
        # it will use that once more, nobody knows.
        return len(kept) > 1 or length == 2

    def _run_loop(
        self, current: Pass, found: _LoopPlan, x: Tensor, *, collects: bool
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run the blocks of the loop.

        Returns:
            The output of the last one; if the caller ``collects`` them, the outputs of the others,
            by number of the block.
        """
        plan, blocks, calls = found.plan, current.blocks, current.calls
        first = blocks.units[plan.first]

        def template_of(position: int, iteration: int) -> Template:
            number = plan.numbers_at(position)[iteration]
            return blocks.template(number, calls[number], found.numbers[position])

        positions, inputs = [], []
        for at in range(plan.period):
            numbers = plan.numbers_at(at)
            template = template_of(at, 0)
            name = joined([blocks.units[number].log.unit for number in numbers])
            below = self._options.gather_once_below
            weights = BlockWeights(template.unit.group, below, name)
            positions.append(Position(template, weights, calls[numbers[0]].others))
            inputs.append(_position_call(blocks, template, numbers, found.values[at]))
        call = ScanCall(
            inputs,
            Blocks(positions, plan.times, self._policy, self._store, template_of),
            collects,
            self._loops,
            current.key,
            self._counter,
            self._one_by_one and partial(self._one_by_one, current.without_tensors(), plan),
        )
        output, inner = call.run(first.cast_input(x), current.cast[1:])
        first.schedule.end_forward(of_root=False)
        collected = {
            number - 1: first.cast_output(inner[at][iteration])
            for at in range(plan.period if inner else 0)
            for iteration, number in enumerate(plan.numbers_at(at))
            if number > plan.first
        }
        return first.cast_output(output), collected


def _make_plan(current: Pass, period: int) -> _LoopPlan:
    """Find out which blocks run in the loop, and with which numbers as its inputs. Only blocks
    whose numbers differ by a multiple of ``period`` have like parameters.

    Raises:
        NoLoopError: if nothing repeats.
    """
    calls = current.calls
    templates = [current.blocks.template(number, call) for number, call in enumerate(calls)]
    traces = [
        call.trace or trace_block(template) for call, template in zip(calls, templates, strict=True)
    ]
    places = [(number % period, call.specs, call.others) for number, call in enumerate(calls)]
    kinds = kinds_of(traces, places)
    if any(kinds):
        templates, traces = with_numbers_as_inputs(templates, traces, places)
        kinds = kinds_of(traces, places)
    plan = find_plan(kinds)
    if plan is None:
        raise NoLoopError(_difference_problem(current, traces, kinds.index(1)))
    differing: list[tuple[tuple[int, torch.dtype], ...]] = []
    stacks: list[list[Tensor]] = []
    with torch.inference_mode(False):  # later passes may need gradients
        for blocks in map(plan.numbers_at, range(plan.period)):
            differing.append(templates[blocks[0]].numbers)
            values = [[traces[at].numbers[n].value for at in blocks] for n, _ in differing[-1]]
            pairs = zip(values, differing[-1], strict=True)
            stacks.append([torch.tensor(own, dtype=dtype) for own, (_, dtype) in pairs])
    device = current.cast[0].device
    return _LoopPlan(plan, differing, [[each.to(device) for each in own] for own in stacks])


def _difference_problem(current: Pass, traces: Sequence[BlockTrace], number: int) -> str:
    first, call = current.calls[0], current.calls[number]
    if call.others == first.others:
        return difference_problem(traces, number)
    before = len(current.given.tensors) - 1
    names = zip(call.arguments.names[1:], call.others, strict=True)
    new = [name for name, at in names if at >= before]
    return (
        f"block {number} was called with other arguments than block 0: its "
        f"{', '.join(new) or 'arguments'} is another tensor. Make what all blocks share once, "
        f"before the loop, and give all of them the same, or the same to every second one, say"
    )


def _position_call(
    blocks: _BlockList, template: Template, numbers: Sequence[int], values: Sequence[Tensor]
) -> PositionCall:
    units = [blocks.units[number] for number in numbers]
    states = [blocks.states[number] for number in numbers]
    own = [at for at in range(len(template.state.tensors)) if at not in template.shared]
    return PositionCall(
        units,
        shards_of([unit.group for unit in units]),
        [*(torch.stack([s.tensors[at].detach() for s in states]) for at in own), *values],
        [template.state.tensors[at].detach() for at in sorted(template.shared)],
    )


def run_alone(current: Pass, number: int, x: Tensor) -> Tensor:
    """Run block ``number`` as a unit by itself; return its new tensor."""
    call = current.calls[number]
    others = [current.others[at] for at in call.others]
    args, kwargs = call.arguments.put_together([x, *others])
    blocks = current.blocks
    with forward_hooks_apart(blocks.modules[number]):
        output = Arguments.of(blocks.units[number].run(call.forward, args, kwargs))
    return output.tensors[call.returned.sources.index(0)]


def _indices_of(others: Sequence[Tensor], current: Pass) -> tuple[int, ...]:
    """Return the index of each tensor argument among those of all blocks; add new ones to these."""
    before = {id(each): at for at, each in enumerate(current.others)}
    found = []
    for each in others:
        found.append(before.get(id(each), len(current.others)))
        if id(each) not in before:
            current.others.append(each)
            current.cast.append(current.blocks.units[0].cast_input(each))
    return tuple(found)


def _output_dtype(current: Pass) -> torch.dtype:
    return current.blocks.units[0].config.output_dtype or current.cast[0].dtype


_without_loop: ContextVar[bool] = ContextVar("_without_loop", default=False)


@contextlib.contextmanager
def blocks_one_by_one() -> Iterator[None]:
    """Run scanned blocks without a loop inside, and when backward recomputes these forwards."""
    token = _without_loop.set(True)
    try:
        yield
    finally:
        _without_loop.reset(token)


class _BlockRef:
    """A weak reference to a block that can be copied and pickled."""

    def __init__(self, block: Any) -> None:
        self._block = None if block is None else weakref.ref(block)

    def __reduce__(self) -> tuple[Any, ...]:
        return _BlockRef, (self(),)

    def __call__(self) -> Any:
        return None if self._block is None else self._block()


def scans_in(model: nn.Module) -> list[BlockScan]:
    """Return what runs blocks of ``model`` as loops, each once."""
    found = [each._fsdp_module_state.forward_override for _, each in named_fsdp_modules(model)]
    return list(dict.fromkeys(each for each in found if isinstance(each, BlockScan)))


def module_of(block: Any) -> nn.Module:
    """Return the module of a unit, without its wrapper."""
    return getattr(block, "_fsdp_wrapped_module", block)


def _trained(units: Sequence[FSDPState]) -> tuple[bool, ...]:
    """Return for each parameter whether any block trains it."""
    by_param = zip(*(unit.group.leaves for unit in units), strict=True)
    return tuple(any(leaf.requires_grad for leaf in leaves) for leaves in by_param)


def _check_arguments(number: int, given: Arguments) -> None:
    if given.opaque:
        raise NoLoopError(
            f"scanned block {number} was called with {', '.join(given.opaque)}, and a loop cannot "
            f"see what it does to that. Leave it out (the cache of a transformers model: "
            f"config.use_cache=False). Without gradients such calls run block by block"
        )
    if not given.tensors:
        raise NoLoopError(f"scanned block {number} was called without a tensor")
    pairs = zip(given.names, given.tensors, strict=True)
    on_host = [name for name, tensor in pairs if not on_device(tensor)]
    if on_host:
        raise NoLoopError(
            f"scanned block {number} was called with {', '.join(on_host)} in host memory; a loop "
            f"would keep the values of now. Move it to the XLA device before the loop"
        )


def _continued(current: Pass | None, number: int, given: Arguments) -> Pass:
    """Return the pass if block ``number`` is next, and called with the output of the one before.

    Raises:
        NoLoopError: if it is not next, or is called with something else.
    """
    if current is None or len(current.calls) != number:
        found = "block 0" if current is None else f"block {len(current.calls)}"
        raise NoLoopError(
            f"block {number} of the scanned blocks was called where {found} was expected. Scanned "
            f"blocks run as one loop, so a forward calls each of them once, in order. Call them "
            f"so, or run them one by one: remove() of what scan_blocks returned"
        )
    x, *others = given.tensors
    if x is not current.last:
        what = repr(x) if isinstance(x, Placeholder) else "another tensor"
        raise NoLoopError(
            f"block {number} was called with {what} in the place of the output of block "
            f"{number - 1}. Scanned blocks run as one loop: a forward hands each one's output to "
            f"the next, and does nothing else between them"
        )
    if current.around != Surroundings.now():
        raise NoLoopError(
            f"modes of gradients or of autocast change before block {number} of the scanned blocks "
            f"(torch.no_grad around some of them). They run as one loop, in one mode: call all in "
            f"the same, or do not scan these"
        )
    if early := [each for each in others if isinstance(each, Placeholder)]:
        raise NoLoopError(
            f"block {number} was called with {early[0]!r} besides the output of block "
            f"{number - 1}. Scanned blocks run as one loop, in which each gets the output of the "
            f"one before, and arguments that are known before the loop"
        )
    return current
