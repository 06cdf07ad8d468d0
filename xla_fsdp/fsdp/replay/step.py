"""``compile_step``: trace a training step a few times, then run its program again and again.

The first steps are traced as always. Each is turned into a ``Program``; when the next one traces
the same program, it is confirmed and replayed from then on, for as long as nothing that it depends
on has changed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import operator
import os
import time
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from xla_fsdp.distributed.xla import host, ops, programs
from xla_fsdp.distributed.xla.graph import tensor_id
from xla_fsdp.distributed.xla.worker import Worker
from xla_fsdp.fsdp.engine.initial_state import make_state
from xla_fsdp.fsdp.engine.param import UninitializedShard
from xla_fsdp.fsdp.replay.host_numbers import HostNumbers, plain
from xla_fsdp.fsdp.replay.program import (
    HostInput,
    Numbers,
    Program,
    Reference,
    Returned,
    candidates_of,
)
from xla_fsdp.fsdp.replay.seen import CompileStepError, Seen, is_traced, watching
from xla_fsdp.fsdp.replay.slots import Slot
from xla_fsdp.fsdp.replay.state import PLAIN, State, find_given, modes_now, shown

MANY_TRACES = 12
MOST_ORDERS = 8  # of results, that are tried
_FIRST = operator.itemgetter(0)
FIRST = "the first step"

_log = logging.getLogger("xla_fsdp")


P = ParamSpec("P")
T = TypeVar("T")
Unknown = Literal["raise", "trace"]


@overload
def compile_step(
    step: Callable[P, T],
    *,
    state: Any = None,
    check: int | None = None,
    unknown: Unknown = "raise",
) -> CompiledStep[P, T]: ...
@overload
def compile_step(
    step: None = None,
    *,
    state: Any = None,
    check: int | None = None,
    unknown: Unknown = "raise",
) -> Callable[[Callable[P, T]], CompiledStep[P, T]]: ...
def compile_step(
    step: Callable[..., Any] | None = None,
    *,
    state: Any = None,
    check: int | None = None,
    unknown: Unknown = "raise",
) -> Any:
    """Make a training or evaluation step that is traced a few times and then replayed.

    A compiled step depends on its arguments and on its state; everything else of Python is a
    constant of its program, as under ``jax.jit``. Its Python code runs only while it is traced:
    what it does to lists and other objects of the host does not happen in a replay. The step runs
    its program itself; a ``torch_xla.sync()`` after it is not needed.

    Args:
        step: a function of tensors and plain values. It makes a whole step (forward, backward,
            clipping, optimizer step, ``zero_grad``), and returns tensors and plain values in any
            containers. Returned tensors have no graph.
        state: what the step reads or changes on the device besides its arguments: modules,
            optimizers, and objects or containers that hold tensors (averages, a scaler). Modules
            and optimizers among the arguments, and the object of a method, belong to it.
        check: how often a replay is checked, by tracing the step again without running it: before
            every ``check``-th replay of a program; 0 is never. By default before replays 2, 16,
            128, 1,024 and so on; ``XLA_FSDP_CHECK=1`` in the environment stands for ``check=1``.
        unknown: what to do if a replay would be wrong, because the step reads the device, uses a
            value that the host computes anew in each step, or fails a check: "raise", or "trace"
            every step.

    Returns:
        A callable with the arguments of ``step``.

    Raises:
        TypeError: if ``step`` is no function.
        ValueError: if ``unknown`` is neither, or ``check`` is negative.
    """
    if unknown not in ("raise", "trace"):
        raise ValueError(f"unknown={unknown!r}; expected 'raise' or 'trace'")
    if check is None and os.environ.get("XLA_FSDP_CHECK") == "1":
        check = 1
    if check is not None and not (isinstance(check, int) and check >= 0):
        raise ValueError(f"check={check!r}; expected a number of replays, 0 for never")
    if step is None:
        return functools.partial(compile_step, state=state, check=check, unknown=unknown)
    if not callable(step):
        raise TypeError(
            f"compile_step got {step!r}, which cannot be called; give it the function that makes a "
            f"training step"
        )
    return CompiledStep(step, _Options(state, check, refuses=unknown == "raise"))


@dataclass(frozen=True)
class _Options:
    """The options of ``compile_step``.

    Args:
        refuses: raise where a replay would be wrong; else trace every step.
    """

    state: Any
    check: int | None
    refuses: bool

    def is_due(self, replay: int) -> bool:
        """Return whether this replay of a program, counted from 1, is checked."""
        if self.check is None:
            return replay in _CHECKED
        return self.check > 0 and replay % self.check == 0


_CHECKED = frozenset(2 * 8**n for n in range(20))


class TensorKind(NamedTuple):
    """What programs depend on of a tensor among the arguments, all but its values.

    Args:
        same_as: the first argument that is this tensor.
    """

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    device: torch.device
    same_as: int


def _difference(old: Any, new: Any) -> str:
    """Say how an argument differs from what it was, given what ``_kinds`` makes of both."""
    if type(old) is not type(new) or new[0] == "object":
        return "another object"
    names = TensorKind._fields if isinstance(new, TensorKind) else ("type", "value")
    fields = zip(names, old, new, strict=True)
    return ", ".join(f"{name} {shown([(a, b)])}" for name, a, b in fields if a != b)


class CompiledStep(Generic[P, T]):
    """What ``compile_step`` returns. CPU ranks that share it trace and replay each for itself."""

    def __init__(self, step: Callable[P, T], options: _Options) -> None:
        functools.update_wrapper(self, step)
        self._step = step
        self._options = options
        self._ranks: dict[str, _RankStep] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if is_traced():  # a part of the step around it
            return pytree.tree_map_only(Tensor, Tensor.detach, self._step(*args, **kwargs))
        result: T = self._own(args, kwargs)
        return result

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        if isinstance(instance, nn.Module):  # an argument
            return types.MethodType(self, instance)
        bound: CompiledStep[..., T] = CompiledStep(
            types.MethodType(self._step, instance), self._options
        )
        return vars(instance).setdefault(self.__name__, bound)  # type: ignore[attr-defined]

    @property
    def traces(self) -> Counter[str]:
        """How often the calling rank has traced the step, by reason."""
        return self._own.traces

    @property
    def replays(self) -> int:
        """How often the calling rank has replayed the step."""
        return self._own.replays

    @property
    def checks(self) -> int:
        """How often the calling rank has checked a replay."""
        return self._own.checks

    @property
    def check_seconds(self) -> float:
        """How long these checks took the host."""
        return self._own.check_seconds

    @property
    def _own(self) -> _RankStep:
        on = str(ops.device())
        if on not in self._ranks:
            self._ranks[on] = _RankStep(self._step, self._options)
        return self._ranks[on]


class _RankStep:
    """The programs of one rank's step."""

    def __init__(self, step: Callable[..., Any], options: _Options) -> None:
        self.traces: Counter[str] = Counter()
        self.replays = 0
        self.checks = 0
        self.check_seconds = 0.0
        self._step = step
        self._options = options
        self._traces_always = ""
        self._device = ops.device()
        self._programs: dict[Any, list[Program]] = {}
        self._changed_plain: Counter[str] = Counter()
        self._drawn: Counter[str] = Counter()
        self._given = _given_to(step, options.state)
        self._state = State(self._given, self._device)
        self._objects: dict[int, Any] = {}  # arguments that are no tensors or plain values

    def __call__(self, args: Any, kwargs: Any) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        self._take(find_given(leaves))
        if self._traces_always or not ops.runtime().executes():
            return self._run_plainly(args, kwargs)
        try:
            key = tree, *self._kinds(leaves)
        except TypeError as error:
            if self._options.refuses:
                raise
            self._give_up(str(error))
            return self._run_plainly(args, kwargs)
        # All in one thread: another core would find nothing of it in its cache.
        attempt = functools.partial(self._try_replay, key, leaves, modes_now())
        replayed, found = self._replayer.call(attempt)
        if not replayed and isinstance(found, Program):
            if self._check(found, leaves, tree):
                return self._run_plainly(args, kwargs)
            replayed, found = self._replayer.call(functools.partial(attempt, checked=True))
        if replayed:
            return found
        self._count(found)
        # In containers of its own: what a step does to the caller's would not happen in a replay.
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        return self._trace(key, args, kwargs, leaves)

    def _take(self, given: Sequence[Any]) -> None:
        """Let modules and optimizers among the arguments belong to the state."""
        if self._options.state is None and not (self._given or given):
            name = getattr(self._step, "__name__", "step")
            raise CompileStepError(
                f"compile_step does not know the state of {name}. Name the modules, optimizers and "
                f"other objects with tensors that it reads or changes: compile_step({name}, "
                f"state=[model, optimizer]), or @compile_step(state=[model, optimizer]); state=[] "
                f"if it has arguments only. What is neither an argument nor state is a constant of "
                f"the compiled program"
            )
        self._given += [each for each in given if all(each is not known for known in self._given)]

    def _try_replay(
        self, key: Any, leaves: Sequence[Any], modes: tuple[Any, ...], *, checked: bool = False
    ) -> tuple[bool, Any]:
        """Replay if there is a program for that; return whether, and the step's result, or the
        program if it is to be checked first, or why there is none."""
        program = self._find(key, leaves, modes)
        if not isinstance(program, Program):
            return False, program
        if not checked and self._options.is_due(program.replays + 1):
            return False, program
        try:
            found = program.replay(leaves, self._state.numbers)
        except programs.ProgramGoneError:
            self._programs[key].remove(program)
            return False, "torch_xla had dropped the program"
        self.replays += 1
        return True, pytree.tree_unflatten(found, program.returned.tree)

    def _check(self, program: Program, leaves: Sequence[Any], tree: Any) -> bool:
        """Trace the step again without running it; return whether it is traced from now on, as that
        gives another program."""
        began = time.perf_counter()
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        self._separate()
        numbers = program.numbers
        # With other numbers the program would differ: zeros are constants, equal ones one input.
        with self._state.numbers.set_to(numbers.options, numbers.counts):
            trace = _Trace(self._state, leaves, self._device, refuses=True)
            try:
                problem = trace.compare(self._step, args, kwargs, program)
            except CompileStepError as error:
                problem = str(error)
        self.checks += 1
        self.check_seconds += time.perf_counter() - began
        if self.checks == 1:
            _log.info("compile_step checked a replay in %.2f s", self.check_seconds)
        if problem:
            self._give_up(problem)
        return bool(problem)

    @functools.cached_property
    def _replayer(self) -> Worker:
        """Replays, in memory that is not scattered; an interrupt of the caller comes after it."""
        return Worker()

    @functools.cached_property
    def _tracer(self) -> Worker:
        """Runs what was traced, which leaves memory scattered that replays would be slow in."""
        return Worker()

    def _kinds(self, leaves: Sequence[Any]) -> list[Any]:
        """Return what programs depend on of each argument: all but the values of tensors."""
        first: dict[int, int] = {}
        kinds: list[Any] = []
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                same_as = first.setdefault(id(leaf), number)
                kind = leaf.shape, leaf.dtype, leaf.requires_grad, leaf.device, same_as
                kinds.append(TensorKind(*kind))
            elif isinstance(leaf, PLAIN):
                kinds.append((type(leaf), leaf))
            elif isinstance(leaf, nn.Module | torch.optim.Optimizer) or callable(leaf):
                self._objects[id(leaf)] = leaf  # or another object might get its id
                kinds.append(("object", id(leaf)))
            else:
                raise TypeError(
                    f"a compiled step got a {type(leaf).__name__}; pass tensors and plain values, "
                    f"in containers that torch.utils._pytree knows if need be, modules, optimizers "
                    f"and functions"
                )
        return kinds

    def _run_plainly(self, args: Any, kwargs: Any) -> Any:
        self.traces[self._traces_always or "programs of fake ranks are not executed"] += 1
        result = pytree.tree_map_only(Tensor, Tensor.detach, self._step(*args, **kwargs))
        ops.sync()
        return result

    def _find(self, key: Any, leaves: Sequence[Any], modes: tuple[Any, ...]) -> Program | str:
        """Return the program to replay, or why there is none."""
        known = self._programs.get(key, [])
        if not known:
            return self._new_arguments(key) if self._programs else FIRST
        facts = self._state.facts(modes)
        reason = ""
        for program in reversed(known):
            if program.facts != facts:
                reason = reason or self._state.describe(program.facts, facts)
                continue
            program.facts = facts  # the same objects are compared faster next time
            reason = program.why_not(leaves, self._state.numbers)
            if not reason:
                return program
        return reason

    def _new_arguments(self, key: Any) -> str:
        """Say how the arguments differ from those of the program that came last."""
        (old_tree, *old), (tree, *new) = next(reversed(self._programs)), key
        if old_tree != tree:
            return "arguments in other containers, or another number of them"
        pairs = enumerate(zip(old, new, strict=True))
        return "; ".join(f"argument {n}: {_difference(a, b)}" for n, (a, b) in pairs if a != b)

    def _count(self, reason: str) -> None:
        self.traces[reason] += 1
        if sum(self.traces.values()) == MANY_TRACES:
            table = "\n".join(f"{n:6} {each}" for each, n in self.traces.most_common())
            warnings.warn(
                f"a compiled step was traced {MANY_TRACES} times, which costs the host as much as "
                f"without compile_step. How often, and what had changed:\n{table}",
                stacklevel=4,
            )
        if reason == FIRST:
            _log.info("compile_step traces a step; replays do not run its Python code")

    # ------------------------------------------------------------ tracing

    def _trace(self, key: Any, args: Any, kwargs: Any, leaves: Sequence[Any]) -> Any:
        self._renew()
        for param in self._state.params:
            if isinstance(param, UninitializedShard):
                param.settle()  # which runs a program of its own
        for optimizer in self._state.steppers():
            make_state(optimizer)  # or the first step would be a program of its own
        self._renew()
        self._separate()
        trace = _Trace(self._state, leaves, self._device, refuses=self._options.refuses)
        result = trace.run(self._step, args, kwargs)
        if trace.seen.first_read:
            self._give_up(f"the step reads the device at {trace.seen.first_read}")
            ops.sync()
            return result
        # In a worker, so that no interrupt parts what is donated from what takes its place.
        result = self._tracer.call(functools.partial(trace.execute, result))
        self._learn(key, trace)
        return result

    def _separate(self) -> None:
        """Let copies that the caller has made between steps share no buffer with what the step
        changes."""
        host.settle()
        for known in itertools.chain(*self._programs.values()):
            known.separate()

    def _renew(self) -> None:
        """Look into the state again; let programs go that hold other modules, optimizers or
        parameters, or states that a state dict has replaced."""
        old, new = self._state, State(self._given, self._device)
        same = (
            [*map(id, new.modules)] == [*map(id, old.modules)]
            and [*map(id, new.optimizers)] == [*map(id, old.optimizers)]
            and [*map(id, new.params)] == [*map(id, old.params)]
        )
        self._state, facts = new, new.facts()
        self._programs = {
            key: kept
            for key, known in self._programs.items()
            if (kept := [each for each in known if same and new.has_states_of(each.facts, facts)])
        }

    def _learn(self, key: Any, trace: _Trace) -> None:
        problem = trace.problem or self._find_counter(trace) or self._find_draws(trace)
        program = trace.program
        if problem or program is None:
            self._give_up(problem or "the step computes nothing on the device")
            return
        known = self._programs.setdefault(key, [])
        for each in known:
            if each.is_same(program):
                problem = each.counts_otherwise(program)
                problem = problem or trace.unknown(each, each.confirm(program))
                if problem:
                    self._give_up(problem)
                return
        known.append(program)

    def _find_counter(self, trace: _Trace) -> str:
        """Return what is wrong if the step itself has changed the same plain value twice."""
        for label, change in self._state.changed_numbers(trace.facts, trace.facts_after):
            self._changed_plain[label] += 1
            if self._changed_plain[label] > 1:
                return f"the step changes a number of the host itself: {label} ({change})"
        return ""

    def _find_draws(self, trace: _Trace) -> str:
        """Return what is wrong if the host drew random numbers, which a first step alone may."""
        for place in trace.seen.draws:
            self._drawn[place] += 1
            if self._drawn[place] > 1:
                return f"the step draws random numbers on the host at {place}"
        return ""

    def _give_up(self, problem: str) -> None:
        if self._options.refuses:
            raise CompileStepError(
                f"{problem}. A replay would not follow that. Hand it to the step as an argument "
                f"(a tensor), or keep it in a tensor on the device; "
                f'compile_step(..., unknown="trace") traces every step'
            )
        if not self._traces_always:
            warnings.warn(f"every step is traced, because {problem}", stacklevel=4)
        self._traces_always, self._programs = problem, {}


def _given_to(step: Any, state: Any) -> list[Any]:
    """Return what belongs to the state of a step before it is called: the object of a method, and
    modules and optimizers among the arguments of a partial."""
    given = [] if state is None else list(state) if isinstance(state, list | tuple) else [state]
    while isinstance(step, functools.partial):
        given += find_given(pytree.tree_leaves((step.args, step.keywords)))
        step = step.func
    if isinstance(step, types.MethodType):
        given.append(step.__self__)
    elif isinstance(step, nn.Module):
        given.append(step)
    return given


class _Trace:
    """One traced step, from the tensors before it to the program that it makes."""

    def __init__(
        self, state: State, leaves: Sequence[Any], device: torch.device, *, refuses: bool
    ) -> None:
        self.problem = ""
        self.program: Program | None = None
        self._device = device
        self._state = state
        self._arguments = list(leaves)
        self._numbers = state.numbers
        host.settle()
        self._slots = state.slots()
        self._before: dict[Any, Any] = {w: slot.get() for w, (_, slot) in self._slots.items()}
        held = [*self._own(leaves), *self._before.values()]
        ops.compute(held)
        programs.unshare(held)
        self._seed = ops.get_rng_state(device)
        self.facts = state.facts()
        self.facts_after = self.facts
        self._options = self._numbers.options()
        self._counts = [count.read() for count in self._numbers.counts()]
        self._with_state = [set(map(id, each.state)) for each in state.optimizers]
        self._unreduced = [(each.context, list(each.context.unreduced)) for each in state.units]
        begins = sorted(set(self._counts))
        self._begins = begins
        keys = {begin: ("count", number) for number, begin in enumerate(begins)}
        self._found = HostNumbers()
        self._keys = keys
        self.seen = Seen(self._found, self._numbers.tensors(keys), refuses=refuses)
        self._buffers = self._find_buffers()
        self._saved = dict(zip(map(id, held), programs.holders_of(held), strict=True))

    def _own(self, values: Sequence[Any]) -> list[Tensor]:
        return [v for v in values if isinstance(v, Tensor) and v.device == self._device]

    def _find_buffers(self) -> dict[int, tuple[Reference, Tensor]]:
        """Return the reference of each buffer that the step may use; slots are named by place."""
        held: list[tuple[Reference, Tensor]] = [
            (("slot", where), tensor) for where, tensor in self._before.items()
        ]
        held += [
            (("argument", number), leaf)
            for number, leaf in enumerate(self._arguments)
            if isinstance(leaf, Tensor) and leaf.device == self._device
        ]
        found: dict[int, tuple[Reference, Tensor]] = {}
        for each, buffer in zip(held, programs.buffers_of([t for _, t in held]), strict=True):
            if buffer is None:
                continue
            reference, tensor = found.setdefault(buffer, each)
            if each[0][0] == "argument" and tensor is not each[1]:
                known = (
                    "another argument" if reference[0] == "argument" else "a tensor of the model"
                )
                self.problem = f"argument {each[0][1]} of the step shares its memory with {known}"
        return found

    def run(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the step and return its result, without a graph, as that would keep tensors which
        the program would compute; if it raises, put the tensors back that it has changed."""
        try:
            with (
                programs.reading_by(self.seen),
                self._numbers.traced(self._found, self._keys) as self._changes,
                watching(self.seen),
            ):
                result = pytree.tree_map_only(Tensor, Tensor.detach, step(*args, **kwargs))
        except BaseException:
            self._undo()
            raise
        self.problem = self.problem or self._changes.problem or self._unknown_optimizer()
        return result

    def _unknown_optimizer(self) -> str:
        for optimizer in self.seen.optimizers.values():
            params = itertools.chain.from_iterable(g["params"] for g in optimizer.param_groups)
            # Copies that this package steps to learn what an optimizer does are on the host.
            if self._own([*params]) and not self._state.has(optimizer):
                return (
                    f"the step calls the step of {type(optimizer).__name__}, an optimizer that is "
                    f"not in state="
                )
        return ""

    def _undo(self, *, compute_what_is_left: bool = False) -> None:
        """Put back what the step has changed: tensors, the places that hold them, and numbers."""
        held = [*self._own(self._arguments), *self._before.values()]
        changed = programs.find_pending(held)
        programs.put(changed, [self._saved[id(each)] for each in changed])
        for where, (_, slot) in {**self._state.slots(), **self._slots}.items():
            if slot.get() is not self._before.get(where):
                slot.set(self._before.get(where))
        for optimizer, known in zip(self._state.optimizers, self._with_state, strict=True):
            for param in [each for each in optimizer.state if id(each) not in known]:
                del optimizer.state[param]
        for count, number in zip(self._numbers.counts(), self._counts, strict=False):
            count.write(number)
        self._numbers.write_options(self._options)
        for context, units in self._unreduced:
            context.unreduced[:] = units
        if compute_what_is_left:
            known = {*map(id, held)}
            left = [each for each in self.seen.tensors() if id(each) not in known]
            ops.compute(programs.find_pending(self._own(left)))
        ops.set_rng_state(self._seed, self._device)
        ops.runtime().forget_collectives()
        programs.drop_pending()

    def compare(self, step: Callable[..., Any], args: Any, kwargs: Any, program: Program) -> str:
        """Trace the step, and undo what that changes; return how it differs from ``program``, which
        is about to be replayed, "" if it does not."""
        result = self.run(step, args, kwargs)
        try:
            traced = self._traced(result)
            again = None
            if traced is not None:
                inputs = traced.inputs
                code = programs.identify(traced.outputs, inputs.values, traced.donated)
                again = self._program(traced, code)
        finally:
            # What the step keeps in places that nobody knows is not put back: it gets its values.
            result = traced = None
            self._undo(compute_what_is_left=True)
        if self.problem:
            return self.problem
        if again is not None and program.does_the_same(again):
            return ""
        return self._difference(program, again)

    def _difference(self, program: Program, again: Program | None) -> str:
        what = "a check traced the step again and found another program than the one replayed"
        for old, new in itertools.zip_longest(program.operations, self.seen.operations):
            if old is None or new is None or not old.is_like(new):
                if new is None:
                    return f"{what}: it no longer calls {old}, as it did at {old.place}"
                was = "" if old is None else f"; it was {old} at {old.place}"
                return f"{what}: first differs {new} at {new.place}{was}"
        if again is not None and len(again.hosts) == len(program.hosts):
            changed = [
                number
                for number, (old, new) in enumerate(zip(program.hosts, again.hosts, strict=True))
                if not old.same_constant(new)
            ]
            if changed:
                return f"{what}: {self.unknown(again, changed)}"
        return f"{what}, in backward, in what the step returns or in where it puts tensors"

    # ------------------------------------------------------------ the program

    def execute(self, result: Any) -> Any:
        """Run what was traced, and make ``program`` from it; returns the step's result."""
        leaves, tree = pytree.tree_flatten(result)
        traced = self._traced(result)
        self._saved = {}
        if traced is not None:
            leaves = self._run_program(traced)
        del traced, result
        programs.drop_pending()
        ops.sync()  # step closures, and the random number state
        if self.program is not None:
            self.program.last_seed = self._last_seed()
        return pytree.tree_unflatten([plain(each) for each in leaves], tree)

    def _traced(self, result: Any) -> _Traced | None:
        """Return what the step has traced, None if it computes nothing."""
        leaves, tree = pytree.tree_flatten(result)
        after = self._state.slots()
        held = {id(slot.get()): slot.get() for _, slot in after.values()}
        for each in (*self._own(leaves), *self.seen.tensors(), *self._own(self._arguments)):
            if each.device == self._device:
                held.setdefault(id(each), each)
        groups = _by_tensor(programs.find_pending(list(held.values())))
        self.facts_after = self._state.facts()
        if not groups:
            return None
        pending = {id(each) for group in groups for each in group}
        kept = set(programs.buffers_of([each for each in held.values() if id(each) not in pending]))
        donors = {
            buffer: id(tensor)
            for buffer, (_, tensor) in self._buffers.items()
            if id(tensor) in pending and buffer not in kept
        }
        inputs = _sort_like_donors(groups, donors)
        donated = [number for number, buffer in enumerate(inputs.buffers) if buffer in donors]
        constants = {*programs.buffers_of(self._own(self._state.constants))}
        builder = _Builder(
            self._slots, self._before, after, self._arguments, self._buffers, constants
        )
        return _Traced(groups, inputs, donated, builder, leaves, tree)

    def _last_seed(self) -> tuple[str, int]:
        now = ops.get_rng_state(self._device)
        draws = programs.draws_until(self._seed, now, programs.next_seed)
        return ("constant", now) if draws is None else ("draws", draws)

    def _run_program(self, traced: _Traced) -> list[Any]:
        program = self._program(traced, b"")
        code, results = programs.run_traced(traced.outputs, traced.inputs.values, traced.donated)
        self.program = dataclasses.replace(program, code=code, compiled=programs.compiled())
        self.program.place(results, self._arguments)
        goals = self.program.outputs
        for group, goal, value in zip(traced.groups, goals, results, strict=True):
            # What the step's code has kept elsewhere, perhaps besides a place that it knows.
            elsewhere = [t for t in programs.find_pending(group) if not (goal and t._is_view())]
            programs.put_apart(elsewhere, value)
        return self.program.leaves(results, self._arguments)

    def _program(self, traced: _Traced, code: bytes) -> Program:
        builder = traced.builder
        references, hosts = builder.inputs(traced.inputs, self._found, self._seed, self.seen)
        goals = [builder.goals(group) for group in traced.groups]
        returned = builder.returned(traced.leaves, traced.groups)
        self.problem = self.problem or builder.problem
        return Program(
            code=code,
            facts=self.facts,
            slots=builder.slots,
            shapes=builder.shapes(),
            inputs=references,
            hosts=hosts,
            outputs=goals,
            new=builder.new,
            emptied=builder.emptied(),
            returned=Returned(returned, traced.tree),
            numbers=self._numbers_after(),
            collectives=ops.runtime().traced_collectives(),
            last_seed=("draws", 0),
            unreduced=[(each.context, list(each.context.unreduced)) for each in self._state.units],
            compiled=programs.compiled(),
            arguments=[
                weakref.ref(each) if isinstance(each, Tensor) else None for each in self._arguments
            ],
            operations=self.seen.operations,
        ).compact()

    def _numbers_after(self) -> Numbers:
        now = [count.read() for count in self._numbers.counts()]
        deltas = [new - old for new, old in zip(now, self._counts, strict=False)]
        members = [[n for n, c in enumerate(self._counts) if c == b] for b in self._begins]
        outcomes, updates = self._found.outcomes, self._changes.updates
        return Numbers(
            self._options, self._counts, members, self._begins, deltas, outcomes, updates
        )

    def unknown(self, program: Program, positions: Sequence[int]) -> str:
        """Say which host inputs of a program nothing explains, and where they entered."""
        found = []
        for number in positions:
            value = program.hosts[number].value
            what = value.item() if not value.dim() else f"a tensor of shape {list(value.shape)}"
            place = self._place_of(value)
            found.append(f"{what:g}" if isinstance(what, float) else str(what))
            found[-1] += f" (entered at {place})" if place else ""
        if not found:
            return ""
        shown = "; ".join(dict.fromkeys(found))
        return f"the host computes a value anew in every step: {shown}"

    def _place_of(self, value: Tensor) -> str:
        if value.dim():
            return str(self.seen.places.get(tuple(value.shape), ""))
        for number, place in self.seen.places.items():
            if isinstance(number, float):
                try:
                    if torch.tensor(number, dtype=value.dtype) == value:
                        return str(place)
                except (OverflowError, RuntimeError):
                    continue
        return ""


def _by_tensor(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group Python tensors that are the same XLA tensor."""
    groups: dict[int, list[Tensor]] = {}
    for each in tensors:
        groups.setdefault(tensor_id(each), []).append(each)
    return list(groups.values())


def _sort_like_donors(groups: list[list[Tensor]], donors: dict[int, int]) -> programs.ProgramInputs:
    """Sort results like the inputs that they replace; return the program's inputs.

    XLA writes results over donated inputs of their size, first over first. Where that is not the
    input that the result is computed from, it keeps a copy of one of both.

    Args:
        groups: the tensors of each result, sorted in place.
        donors: of each donated buffer, the ``id`` of the tensor that has it.
    """
    inputs = programs.inputs_of([group[0] for group in groups])
    for _ in range(MOST_ORDERS):  # inputs are in the order in which results first need them
        order = {donors[b]: number for number, b in enumerate(inputs.buffers) if b in donors}
        keys = [min(order.get(id(each), len(inputs.buffers)) for each in group) for group in groups]
        if keys == sorted(keys):
            break
        groups[:] = [group for _, group in sorted(zip(keys, groups, strict=True), key=_FIRST)]
        inputs = programs.inputs_of([group[0] for group in groups])
    return inputs


@dataclass(frozen=True)
class _Traced:
    """What a step has traced.

    Args:
        groups: the tensors of each result.
        inputs: of the program.
        donated: positions of the inputs whose buffers results may use.
        builder: finds where inputs come from, and results go.
        leaves: of what the step returns.
        tree: the containers around them.
    """

    groups: list[list[Tensor]]
    inputs: programs.ProgramInputs
    donated: list[int]
    builder: _Builder
    leaves: list[Any]
    tree: Any

    @property
    def outputs(self) -> list[Tensor]:
        return [group[0] for group in self.groups]


class _Builder:
    """Finds where inputs of a traced program come from, and where its results go."""

    def __init__(
        self,
        before: dict[Any, tuple[str, Slot]],
        tensors: dict[Any, Tensor],
        after: dict[Any, tuple[str, Slot]],
        arguments: Sequence[Any],
        buffers: dict[int, tuple[Reference, Tensor]],
        constants: set[int | None],
    ) -> None:
        self.problem = ""
        self._constants = constants
        self.new: set[int] = set()
        self._before, self._tensors, self._after = before, tensors, after
        self._arguments = list(arguments)
        self._buffers = buffers
        both = {**before, **after}
        self._numbers = {where: number for number, where in enumerate(both)}
        self.slots: list[Slot] = [slot for _, slot in both.values()]
        self._labels = [label for label, _ in both.values()]
        self._holders: dict[int, list[int]] = {}
        for where, (_, slot) in after.items():
            self._holders.setdefault(id(slot.get()), []).append(self._numbers[where])

    def shapes(self) -> list[tuple[Any, ...] | None]:
        """Return shape, dtype and device of the tensors before the step, None without one."""
        found: list[tuple[Any, ...] | None] = [None] * len(self.slots)
        for where, tensor in self._tensors.items():
            found[self._numbers[where]] = (tensor.shape, tensor.dtype, tensor.device)
        return found

    def emptied(self) -> list[int]:
        """Return the slots that hold nothing after the step."""
        return [self._numbers[where] for where in self._before if where not in self._after]

    def inputs(
        self, inputs: programs.ProgramInputs, found: HostNumbers, seed: int, seen: Seen
    ) -> tuple[list[Reference], list[HostInput]]:
        """Return where each input comes from, and those that come from the host."""
        references: list[Reference] = []
        values: list[Tensor] = []
        seeds = self._seeds(inputs, seed)
        for number, (buffer, value) in enumerate(zip(inputs.buffers, inputs.values, strict=True)):
            if number in seeds:
                references.append(("seed", seeds[number]))
            elif buffer in self._buffers:
                references.append(self._named(self._buffers[buffer][0]))
            else:
                if seen.is_older(inputs.tensors[number]) and buffer not in self._constants:
                    self.problem = self.problem or _unknown_tensor(value, seen.place_of(buffer))
                references.append(("host", len(values)))
                values.append(value)
        hosts = [
            HostInput(at_host, at_host, value, candidates_of(at_host, found.found))
            for at_host, value in zip(host.copies(values), values, strict=True)
        ]
        return references, hosts

    def _seeds(self, inputs: programs.ProgramInputs, seed: int) -> dict[int, int]:
        """Return after how many drawings each random number state is what an input holds; a state
        that is not reached so was set by the step itself."""
        states = host.copies([inputs.values[position] for position in inputs.seeds])
        draws = [programs.draws_until(seed, int(state.item()) % 2**64) for state in states]
        pairs = zip(inputs.seeds, draws, strict=True)
        return {position: count for position, count in pairs if count is not None}

    def goals(self, group: Sequence[Tensor]) -> list[Reference]:
        """Return where a result goes, whose traced tensor these Python tensors are."""
        found: list[Reference] = []
        for tensor in group:
            for number in self._holders.get(id(tensor), ()):
                if tensor is not self._tensors.get(self._where(number)):
                    self.new.add(number)
                    if tensor.requires_grad:
                        self.problem = f"the step replaces {self._labels[number]}, a parameter"
                found.append(("slot", number))
            for number, argument in enumerate(self._arguments):
                if argument is tensor:
                    found.append(("argument", number))
        return list(dict.fromkeys(found))

    def returned(self, leaves: Sequence[Any], groups: list[list[Tensor]]) -> list[tuple[Any, ...]]:
        """Return what each leaf of the step's result is."""
        numbers = {id(each): n for n, group in enumerate(groups) for each in group}
        return [self._returned(leaf, numbers) for leaf in leaves]

    def _returned(self, leaf: Any, numbers: dict[int, int]) -> tuple[Any, ...]:
        if not isinstance(leaf, Tensor):
            return ("plain", plain(leaf))
        if id(leaf) in numbers:
            return ("result", numbers[id(leaf)])
        [buffer] = programs.buffers_of([leaf]) if leaf.is_xla else [None]  # type: ignore[attr-defined]
        if buffer in self._buffers:
            return self._named(self._buffers[buffer][0])
        self.problem = (
            f"the step returns a tensor of shape {list(leaf.shape)} that is neither computed on "
            f"the device nor one of its arguments or of the model"
        )
        return ("plain", None)

    def _where(self, number: int) -> Any:
        return self.slots[number].where

    def _named(self, reference: Reference) -> Reference:
        if reference[0] == "slot":
            return ("slot", self._numbers[reference[1]])
        return reference


def _unknown_tensor(value: Tensor, place: str) -> str:
    return (
        f"the step takes a tensor of shape {list(value.shape)} ({value.dtype}) that is neither an "
        f"argument nor inside of its state; it entered at {place}. Add what holds it to state="
    )
