"""``compile_step``: trace a training step a few times, then run its program again and again.

The first steps are traced as always. Each is turned into a ``Program``; when the next one traces
the same program, it is confirmed and replayed from then on, for as long as nothing that it depends
on has changed.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from xla_fsdp.compile.program import FIRST_CHECK, Program, kind_of
from xla_fsdp.compile.seen import CompileStepError, is_traced
from xla_fsdp.compile.state import (
    PLAIN,
    CompiledFunction,
    State,
    find_given,
    modes_now,
    refuse_closed,
    shown,
)
from xla_fsdp.compile.trace import Trace
from xla_fsdp.fsdp.engine.deferred import UninitializedShard
from xla_fsdp.optim.optimizers import make_state
from xla_fsdp.xla import ops
from xla_fsdp.xla.worker import Worker

MANY_TRACES = 12
FIRST = "the first step"
MOST_CHECKED = 0.01  # of the time since the first replay
HAND_OVER = "Hand it to the step as an argument (a tensor), or keep it in a tensor on the device; "

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
            containers. Returned tensors have no graph. Tensors of the host among its arguments
            are copied to the device.
        state: what the step reads or changes on the device besides its arguments: modules,
            optimizers, and objects or containers that hold tensors (averages, a scaler). Modules
            and optimizers among the arguments, and the object of a method, belong to it.
        check: how often a replay is checked, by tracing the step again without running it: before
            every ``check``-th replay of a program; 0 is never. By default before replays 2, 16,
            128, 1,024 and so on, but for the first no sooner than all checks take less than 1 % of
            the time; ``XLA_FSDP_CHECK=1`` in the environment stands for ``check=1``.
        unknown: what to do if a replay would be wrong, because the step reads the device, uses a
            value that the host computes anew in each step, or fails a check: "raise", or "trace"
            every step.

    Returns:
        A callable with the arguments of ``step``.

    Raises:
        TypeError: if ``step`` is no function, or a generator or coroutine, or what is in an object
            of ``state`` cannot be followed: a weak reference, a partial, a set of tensors.
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
    if inspect.iscoroutinefunction(step) or inspect.isgeneratorfunction(step):
        raise TypeError(
            f"compile_step got {step!r}, a generator or coroutine, which runs only in parts; give "
            f"it a function that makes a whole step and returns its result"
        )
    refuse_closed(_as_list(state))
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


class TensorKind(NamedTuple):
    """What programs depend on of a tensor among the arguments, all but its values.

    Args:
        views: how it is a view of another tensor.
        same_as: the first argument that is this tensor.
    """

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    device: torch.device
    views: tuple[str, ...]
    same_as: int


def _difference(old: Any, new: Any) -> str:
    """Say how an argument differs from what it was, given what ``_kinds`` makes of both."""
    if type(old) is not type(new) or new[0] == "object":
        return "another object"
    names = TensorKind._fields if isinstance(new, TensorKind) else ("type", "value")
    fields = zip(names, old, new, strict=True)
    return ", ".join(f"{name} {shown([(a, b)])}" for name, a, b in fields if a != b)


class CompiledStep(CompiledFunction, Generic[P, T]):
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
        self._first_replay = math.inf  # in seconds of ``time.perf_counter``
        self._step = step
        self._options = options
        self._traces_always = ""
        self._device = ops.device()
        self._programs: dict[Any, list[Program]] = {}
        self._happened: Counter[str] = Counter()  # what only a first step may do
        self._given = _given_to(step, options.state)
        self._state = State(self._given, self._device)
        self._objects: dict[int, Any] = {}  # arguments that are no tensors or plain values

    def __call__(self, args: Any, kwargs: Any) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        self._take(find_given(leaves))
        if self._traces_always or not ops.runtime().executes():
            return self._run_plainly(args, kwargs)
        leaves = _moved(leaves)
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
        if not checked and self._is_due(program):
            return False, program
        self._first_replay = min(self._first_replay, time.perf_counter())
        found = program.replay(leaves, self._state.numbers)
        self.replays += 1
        return True, pytree.tree_unflatten(found, program.tree)

    def _is_due(self, program: Program) -> bool:
        replay, every = program.replays + 1, self._options.check
        if every is not None:
            return every > 0 and replay % every == 0
        return replay >= program.next_check and (
            program.next_check == FIRST_CHECK
            # Ranks that go on traced do so at the same step, which their clocks cannot tell.
            or not self._options.refuses
            or self._time_with_a_check() <= MOST_CHECKED
        )

    def _time_with_a_check(self) -> float:
        """Return which part of the time since the first replay checks take, with one more."""
        passed = time.perf_counter() - self._first_replay
        return (self.checks + 1) / self.checks * self.check_seconds / passed

    def _check(self, program: Program, leaves: Sequence[Any], tree: Any) -> bool:
        """Trace the step again without running it; return whether it is traced from now on, as that
        gives another program."""
        began = time.perf_counter()
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        numbers = program.numbers
        # With other numbers the program would differ: zeros are constants, equal ones one input.
        with self._state.numbers.set_to(numbers.options, numbers.counts):
            trace = Trace(self._state, leaves, self._device, refuses=True)
            try:
                problem = trace.compare(self._step, args, kwargs, program)
            except CompileStepError as error:
                problem = str(error)
        while program.next_check <= program.replays + 1:
            program.next_check *= 8
        self.checks += 1
        self.check_seconds += time.perf_counter() - began
        if self.checks == 1:
            _log.info("compile_step checked a replay in %.2f s", self.check_seconds)
        if problem:
            self._give_up(problem, HAND_OVER)
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
                shape, dtype, device, *views = kind_of(leaf)  # type: ignore[misc]
                fixed = shape, dtype, leaf.requires_grad, device, tuple(views)
                kinds.append(TensorKind(*fixed, same_as))
            elif isinstance(leaf, PLAIN):
                # By its text, in which zeros differ by their sign, and NaN is itself.
                kinds.append((type(leaf), repr(leaf)))
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
                param.finalize()  # which runs a program of its own
        for optimizer in self._state.steppers():
            make_state(optimizer)  # or the first step would be a program of its own
        self._renew()
        trace = Trace(self._state, leaves, self._device, refuses=self._options.refuses)
        result = trace.run(self._step, args, kwargs)
        if trace.seen.first_read:
            self._give_up(f"the step reads the device at {trace.seen.first_read}")
            ops.sync()
            return result
        # In a worker, so that no interrupt parts what is donated from what takes its place.
        result = self._tracer.call(functools.partial(trace.execute, result))
        self._learn(key, trace)
        return result

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
            if (kept := [each for each in known if same and each.facts.states == facts.states])
        }

    def _learn(self, key: Any, trace: Trace) -> None:
        program = trace.program
        if trace.problem or program is None:
            self._give_up(trace.problem or "the step computes nothing on the device")
            return
        if problem := self._find_repeated(trace):
            self._give_up(problem, HAND_OVER)
            return
        known = self._programs.setdefault(key, [])
        for each in known:
            if each.is_same(program):
                if problem := each.counts_otherwise(program):
                    self._give_up(problem)
                elif problem := trace.unknown(each, each.confirm(program)):
                    self._give_up(problem, HAND_OVER)
                return
        known.append(program)

    def _find_repeated(self, trace: Trace) -> str:
        """Return what is wrong if the step has twice changed a plain value of the state, or drawn
        random numbers on the host, which a first step alone may."""
        changes = self._state.changed_attributes(trace.facts, trace.facts_after)
        found = {
            f"changes a number of the host itself: {module}.{name}": f" ({change})"
            for module, name, change in changes
        }
        found |= {f"draws random numbers on the host at {place}": "" for place in trace.seen.draws}
        self._happened.update(found.keys())
        again = (f"the step {each}{how}" for each, how in found.items() if self._happened[each] > 1)
        return next(again, "")

    def _give_up(self, problem: str, advice: str = "") -> None:
        if self._options.refuses:
            raise CompileStepError(
                f"{problem}. A replay would not follow that. {advice}"
                f'compile_step(..., unknown="trace") traces every step'
            )
        if not self._traces_always:
            warnings.warn(f"every step is traced, because {problem}", stacklevel=4)
        self._traces_always, self._programs = problem, {}


def _moved(leaves: Sequence[Any]) -> list[Any]:
    """Return the arguments with device copies of the host's tensors: one that the step's Python
    code could read would be a constant of the program."""
    host = {id(each): each for each in leaves if isinstance(each, Tensor) and each.is_cpu}
    moved = ops.upload_all([each.detach() for each in host.values()]) if host else []
    copies = dict(zip(host, moved, strict=True))
    for key, each in host.items():
        copies[key].requires_grad_(each.requires_grad)
    return [copies.get(id(each), each) for each in leaves]


def _as_list(state: Any) -> list[Any]:
    if state is None:
        return []
    return list(state) if isinstance(state, list | tuple) else [state]


def _given_to(step: Any, state: Any) -> list[Any]:
    """Return what belongs to the state of a step before it is called: the object of a method, and
    modules and optimizers among the arguments of a partial."""
    given = _as_list(state)
    while isinstance(step, functools.partial):
        given += find_given(pytree.tree_leaves((step.args, step.keywords)))
        step = step.func
    if isinstance(step, types.MethodType):
        given.append(step.__self__)
    elif isinstance(step, nn.Module):
        given.append(step)
    return given
