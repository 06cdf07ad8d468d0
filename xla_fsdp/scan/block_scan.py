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

from xla_fsdp.distributed.context_parallel import context_key
from xla_fsdp.fsdp.engine.autograd import on_device
from xla_fsdp.fsdp.engine.inputs import num_changes
from xla_fsdp.fsdp.engine.module_state import named_fsdp_modules
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.engine.thread import current_pass, joined
from xla_fsdp.nn.remat_policy import ActivationStore, policy_of
from xla_fsdp.scan.autograd import ForwardCounter, ScanCall
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
from xla_fsdp.scan.placeholder import InnerOutput, Placeholder
from xla_fsdp.scan.plan import Plan, find_plan
from xla_fsdp.scan.program import Blocks, Position
from xla_fsdp.scan.tracing import (
    Block,
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

    template: Template
    others: tuple[int, ...]  # which of all other tensor arguments it takes
    key: int  # equal for calls that only differ in tensors
    returned: Returned
    trace: BlockTrace | None  # None if the block was traced in an earlier pass


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

    blocks: list[Block]
    blocks_key: int  # equal for blocks with the same settings
    # The input of block 0, and the other tensor arguments of all blocks: as they were when a block
    # was called with them, in the compute dtype.
    given: list[Tensor]
    # By id and number of changes of an argument: its index among the others, and itself.
    known: dict[tuple[int, int], tuple[int, Tensor]] = field(default_factory=dict)
    calls: list[_Call] = field(default_factory=list)
    outputs: list[weakref.ref[Placeholder]] = field(default_factory=list)
    last: Placeholder | None = None  # output of the block that was called last
    around: Surroundings = field(default_factory=Surroundings.now)  # of its calls

    @property
    def next_unit(self) -> FSDPState:
        """The unit of the block that is to be called now."""
        return self.blocks[len(self.calls)].unit

    @property
    def kept(self) -> list[int]:
        """The numbers of the blocks whose outputs somebody holds."""
        return [at for at, output in enumerate(self.outputs) if output() is not None]

    def index_of(self, argument: Tensor) -> int:
        """Return the index of a tensor among the others; add it if it is new, or was changed."""
        key = id(argument), num_changes([argument])[0]
        if key not in self.known:
            self.known[key] = len(self.given) - 1, argument
            self.given.append(_as_now(self.blocks[0].unit, argument))
        return self.known[key][0]

    def without_tensors(self) -> Pass:
        """Return what tells how to call the blocks. A graph that outlives its step may hold it:
        tensors would become outputs of the step's program."""
        return replace(self, given=[], known={}, outputs=[], last=None)

    def run_called(self) -> None:
        """Run the blocks one by one that returned placeholders; let these become their outputs."""
        x = self.given[0]
        for number, output in enumerate(self.outputs):
            x = run_alone(self, number, x)
            if (found := output()) is not None:
                found.become(x)
                x = found  # so that its hooks see the gradients of the blocks that follow

    @property
    def trains(self) -> bool:
        """Whether gradients flow back from the blocks' outputs."""
        needs = any(each.requires_grad for each in self.given)
        return self.around.trains and (needs or any(any(block.trained) for block in self.blocks))

    @property
    def key(self) -> Any:
        """Equal for passes that can run the same loop."""
        calls = tuple((call.key, call.others) for call in self.calls)
        return self.blocks_key, self.trains, calls


@dataclass(frozen=True)
class _LoopPlan:
    """How the calls of a pass run."""

    plan: Plan  # which blocks run in the loop
    # By position: (index, dtype) of the numbers that are inputs of the loop, and these numbers of
    # all blocks, [iterations] each.
    numbers: list[tuple[tuple[int, torch.dtype], ...]]
    values: list[list[Tensor]]


class BlockScan:
    """The ``ForwardOverride`` shared by all blocks of a loop.

    Args:
        blocks: FSDP modules; referenced weakly, as each of them holds this object.
        options: options of the loop.
        period: block n has parameters and buffers like block n + period.
    """

    is_automatic = False  # whether blocks may also run one by one, or as another loop

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
            like = current.given[0]
            dtype = unit.config.output_dtype or like.dtype
            result = Placeholder.after(
                number, len(blocks), like, dtype, trains=current.trains, compute=self._compute
            )
            current.outputs.append(weakref.ref(result))
            current.last, self._pass = result, current
        output = call.returned.put_together(result, given.tensors)
        hooked = run_forward_hooks(current.blocks[number].module, args, kwargs, output)
        if hooked is not output and not self.is_automatic:
            raise NoLoopError(
                "a forward hook of a scanned block returned another output, which a loop would "
                "not use; let hooks return None, or do not scan these blocks"
            )
        return hooked

    def _begin(self, blocks: list[Any], given: Arguments) -> Pass:
        units: list[FSDPState] = [block._fsdp_unit for block in blocks]
        units[0].schedule.cleanup_failed_passes()
        for unit in units:
            unit.refuse_run()
        states = [BlockState.of(block) for block in blocks]
        for state in states:
            refuse_hooks(state)
            refuse_host_tensors(state)
        period = self._period
        shared = [self._shared[at].of(states[at::period]) for at in range(period)]
        trained = [_trained(units[at::period]) for at in range(period)]
        key = (
            [TensorSpec.of(each) for state in states[:period] for each in state.tensors],
            settings_of(states),
            shared,
            trained,
            (torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("xla"), context_key()),
        )
        found = [
            Block(unit, module_of(block), state, shared[at % period], trained[at % period])
            for at, (unit, block, state) in enumerate(zip(units, blocks, states, strict=True))
        ]
        number = self._number(tuple(map(tuple, key)))
        return Pass(found, number, [_as_now(units[0], given.tensors[0])])

    def _number(self, key: Any) -> int:
        return self._keys.setdefault(key, len(self._keys))

    def _call(
        self, current: Pass, number: int, forward: Callable[..., Any], given: Arguments
    ) -> _Call:
        """Describe the call of a block; trace the block if that is new."""
        others = tuple(map(current.index_of, given.tensors[1:]))
        specs = tuple(TensorSpec.of(current.given[at]) for at in (0, *(1 + at for at in others)))
        arguments, key = given.without_tensors(), self._number((given.key, specs))
        block = current.blocks[number]
        template = Template(**vars(block), forward=forward, arguments=arguments, specs=specs)
        known, trace = (number, current.blocks_key, current.trains, key), None
        if known not in self._returned:
            trace = self._trace(template, trains=current.trains)
            self._returned[known] = trace.returned
        return _Call(template, others, key, self._returned[known], trace)

    def _trace(self, template: Template, *, trains: bool) -> BlockTrace:
        return trace_block(template, trains=trains)

    def _run_all(self, current: Pass) -> Tensor:
        """Run all blocks; let the outputs that the caller has kept become tensors."""
        if current.key not in self._plans:
            self._plans[current.key] = _make_plan(current, self._period)
        found = self._plans[current.key]
        plan, x, kept = found.plan, current.given[0], current.kept
        collects = self._collects(kept, plan.length)
        outputs: dict[int, Tensor] = {}
        for number in range(plan.first):
            outputs[number] = x = run_alone(current, number, x)
        x, in_loop = self._run_loop(current, found, x, collects=collects)
        outputs.update(in_loop)
        outputs[plan.stop - 1] = x
        for number in range(plan.stop, plan.length):
            outputs[number] = x = run_alone(current, number, x)
        if current.last is not None and not collects:
            current.last.late = True
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
        """Run the blocks of the loop; return the output of the last one, and, if the caller
        ``collects`` them, those of the others by number of the block."""
        plan, first = found.plan, current.blocks[found.plan.first].unit
        positions = []
        for at, numbers in enumerate(map(plan.numbers_at, range(plan.period))):
            call, blocks = current.calls[numbers[0]], [current.blocks[n] for n in numbers]
            template = replace(call.template, numbers=found.numbers[at])
            name = joined([block.unit.log.unit for block in blocks])
            weights = BlockWeights(template.unit.group, self._options.gather_once_below, name)
            units, held = [block.unit for block in blocks], _held(blocks, found.values[at])
            shards = shards_of([unit.group for unit in units])
            positions.append(Position(template, weights, call.others, units, shards, *held))
        scan = ScanCall(
            Blocks(positions, plan.times, self._policy, self._store),
            collects,
            self._loops,
            current.key,
            self._counter,
            self._one_by_one and partial(self._one_by_one, current.without_tensors(), plan),
        )
        output, inner = scan.run(first.cast_input(x), current.given[1:])
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
    whose numbers differ by a multiple of ``period`` have like parameters."""
    calls, trains = current.calls, current.trains
    templates = [call.template for call in calls]
    traces = [
        call.trace
        if call.trace is not None and (call.trace.gradient is not None or not trains)
        else trace_block(call.template, trains=trains)
        for call in calls
    ]
    places = [(at % period, call.template.specs, call.others) for at, call in enumerate(calls)]
    kinds = kinds_of(traces, places)
    if any(kinds):
        templates, traces = with_numbers_as_inputs(templates, traces, places, trains=trains)
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
    device = current.given[0].device
    return _LoopPlan(plan, differing, [[each.to(device) for each in own] for own in stacks])


def _difference_problem(current: Pass, traces: Sequence[BlockTrace], number: int) -> str:
    first, call = current.calls[0], current.calls[number]
    if call.others == first.others:
        return difference_problem(traces, number)
    before = 1 + max(first.others, default=-1)
    names = zip(call.template.arguments.names[1:], call.others, strict=True)
    new = [name for name, at in names if at >= before]
    return (
        f"block {number} was called with other arguments than block 0: its "
        f"{', '.join(new) or 'arguments'} is another tensor, or was changed in place. Make what "
        f"all blocks share once, before the loop, and give all of them the same, or the same to "
        f"every second one, say"
    )


def _held(blocks: Sequence[Block], numbers: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return stacks of the tensors and numbers that differ between blocks, and what all hold."""
    by_tensor = [
        [tensor.detach() for tensor in of_blocks]
        for of_blocks in zip(*(block.state.tensors for block in blocks), strict=True)
    ]
    shared = blocks[0].shared
    own = [torch.stack(of) for at, of in enumerate(by_tensor) if at not in shared]
    return [*own, *numbers], [by_tensor[at][0] for at in sorted(shared)]


def run_alone(current: Pass, number: int, x: Tensor) -> Tensor:
    """Run block ``number`` as a unit by itself; return its new tensor."""
    call = current.calls[number]
    others, template = [current.given[1 + at] for at in call.others], call.template
    args, kwargs = template.arguments.put_together([x, *others])
    with forward_hooks_apart(template.module):
        output = Arguments.of(template.unit.run(template.forward, args, kwargs))
    return output.tensors[call.returned.sources.index(0)]


def _as_now(unit: FSDPState, argument: Tensor) -> Tensor:
    """Return an argument in the compute dtype, whatever is done to it later."""
    return unit.cast_input(argument).clone()


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
    """Return for each original parameter whether any block trains it."""
    by_param = zip(*(unit.group.params for unit in units), strict=True)
    trained = [any(param.leaf.requires_grad for param in params) for params in by_param]
    pairs = zip(units[0].group.params, trained, strict=True)
    return tuple(each for param, each in pairs for _ in param.originals)


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
    """Return the pass if block ``number`` is next, and called with the output of the one before."""
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
