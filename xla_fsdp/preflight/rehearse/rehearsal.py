"""Rehearse training on virtual chips: the programs that a TPU slice would get, run with numbers.

``rehearse(build_step, topology="v5e:2x4", steps=3)`` makes steps of the user's own code as every
rank of a slice that is not there. ``run_on_chips`` does so with any function.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import time
import timeit
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xla_fsdp.preflight.api import check_options, describe_options, mesh_on
from xla_fsdp.preflight.compile.compiler import available_memory
from xla_fsdp.preflight.read.report import options_text
from xla_fsdp.preflight.rehearse.virtual_chips import VirtualChips
from xla_fsdp.preflight.topologies import GIB, Topology, find_topology

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from xla_fsdp.distributed.mesh import Mesh

PLAIN = "plain"
"""The keyword of ``build_step`` that asks for the plain model."""

OVERHEAD = 3 * GIB // 2
"""Bytes that torch_xla and JAX take themselves."""

LOSS = "the loss"

SHOWN = 5
"""Problems of a kind that are printed after a step; in a large model each parameter has one."""

REMAT = 4 / 3
"""FLOPs of a step that computes its forward twice, relative to one that does so once."""


class RehearsalError(RuntimeError):
    """A rehearsal does not fit this machine."""


def run_on_chips(
    fn: Callable[..., Any],
    coords: Sequence[Sequence[int]],
    chips: VirtualChips,
    args: Sequence[Any] = (),
) -> list[Any]:
    """Call ``fn(rank, *args)``, as ``launch`` does, on every rank of a slice that is not there, one
    after the other until each needs the others; return what it has returned, in rank order.

    Raises:
        RankError: if a rank failed.
        RuntimeError: if torch_xla has started in this process with fewer CPU devices than ranks.
    """
    from xla_fsdp.distributed.launcher import supervise
    from xla_fsdp.distributed.turns import TurnRun
    from xla_fsdp.xla.virtual_ranks import VirtualRanks, prepare_devices

    prepare_devices(len(coords))
    run = TurnRun(len(coords))
    ranks = VirtualRanks(run, coords, chips.execute)
    with ranks.installed():
        supervise(run, lambda: run.start(fn, tuple(args), ranks.enter, ranks.leave), math.inf)
    return [run.results.get(rank) for rank in range(len(coords))]


# ---------------------------------------------------------------- steps of the user's own code


@dataclass(frozen=True)
class Needs:
    """What a rehearsal takes on this machine, as known before it begins; estimates."""

    memory: int  # bytes, of all ranks together
    available: int  # bytes that this machine has left
    compile_seconds: float  # for the programs
    step_seconds: float  # for each step

    def text(self, steps: int) -> str:
        """Return the estimates in one line."""
        return (
            f"needs about {self.memory / GIB:.1f} of {self.available / GIB:.1f} GiB of memory, and "
            f"{_duration(2 * self.compile_seconds + steps * self.step_seconds)}"
        )


@dataclass(frozen=True)
class StepResult:
    """One step."""

    loss: float | None  # mean over the ranks of what the step returned, if that was a number
    grad_norm: float | None  # of the gradients that optimizers got, over all ranks; None without
    not_finite: tuple[str, ...]  # where a number is not, as text
    disagreements: tuple[str, ...]  # what differs between ranks that must hold the same, as text
    seconds: float  # duration, with compilation
    compared: bool = True  # whether there was anything to compare between ranks
    plain_loss: float | None = None  # of the plain model
    plain_grad_norm: float | None = None

    @property
    def is_sound(self) -> bool:
        """Whether all numbers are finite and ranks agree."""
        return not self.not_finite and not self.disagreements


@dataclass(frozen=True)
class Rehearsal:
    """The result of ``rehearse``.

    Args:
        topology: name of the slice.
        num_ranks: its number of ranks.
        options: options of the model.
        needs: what was known beforehand.
        steps: one for each step.
        num_programs: number of programs with collectives that the steps have run.
    """

    topology: str
    num_ranks: int
    options: dict[str, Any]
    needs: Needs
    steps: tuple[StepResult, ...]
    num_programs: int

    @property
    def is_sound(self) -> bool:
        """Whether all numbers are finite and ranks agree, in all steps."""
        return all(step.is_sound for step in self.steps)


def rehearse(
    build_step: Callable[..., Callable[[], Any]],
    *,
    topology: str = "v5e:2x2",
    steps: int = 3,
    mesh: Mesh | Mapping[str, int] | None = None,
    tell: Callable[[str], None] | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Rehearsal:
    """Make training steps as every rank of a TPU slice, on this machine.

    Args:
        build_step: as for ``preflight``, called on every rank; the step that it returns should
            return the loss. If it has a keyword ``plain``, it is called once more with the number
            of ranks as ``plain``, and is to return a step of the plain model on the batches of all
            ranks together, which is made without torch_xla. If that raises, ``tell`` is told, and
            the ranks have nothing beside them.
        topology: name of the slice, as ``find_topology`` takes it.
        steps: number of steps.
        mesh: passed on as ``build_step(mesh=mesh, ...)``, as by ``preflight``.
        tell: called with lines of text: what it takes, and each step as soon as it is made.
        progress: called with a line on what is being done, and with an empty one before ``tell``.
        options: passed to ``build_step``.

    Raises:
        ValueError: as ``preflight``, or if ``steps`` is not positive.
        RehearsalError: if it does not fit this machine's memory.
        CompileError: if JAX is not installed.
        RankError: if a rank failed.
        RuntimeError: if torch_xla has started in this process with fewer CPU devices than ranks.
    """
    _check_request(steps, options)
    slice_ = find_topology(topology)
    if mesh is not None:
        options = {"mesh": mesh_on(slice_, mesh), **options}
    check_options(build_step, options)
    from xla_fsdp.distributed.process_state import RandomState
    from xla_fsdp.xla.virtual_ranks import prepare_devices  # loads torch_xla

    prepare_devices(slice_.num_ranks)
    random_state = RandomState.now()  # in which each side starts
    show = progress or (lambda text: None)

    def say(line: str) -> None:
        show("")
        if tell is not None:
            tell(line)

    with VirtualChips(slice_.num_ranks) as chips:
        needs = _needs(build_step, slice_, options, chips, show)
        say(f"{topology} {options_text(describe_options(options))}".rstrip())
        say(f"{steps} step(s) of {slice_.num_ranks} ranks on this machine: {needs.text(steps)}")
        check_fits(topology, needs, steps)
        random_state.restore()
        plain = _plain_steps(build_step, slice_.num_ranks, options, steps, show, say)
        random_state.restore()
        table = Table(slice_.num_ranks, plain, say)
        first = len(chips.runs)
        run_on_chips(_make_steps, slice_.coords, chips, (build_step, options, steps, table, show))
    used = {number for number in chips.runs[first:] if chips.is_joint(number)}
    described = describe_options(options)
    return Rehearsal(topology, slice_.num_ranks, described, needs, tuple(table.results), len(used))


# ---------------------------------------------------------------- beforehand


def _check_request(steps: Any, options: Mapping[str, Any]) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r}; expected a whole number of steps, 1 or more")
    if PLAIN in options:
        raise ValueError(
            f"{PLAIN}={options[PLAIN]!r}: a rehearsal gives build_step this keyword itself, where "
            f"it asks for the plain model; leave it out"
        )


def _needs(
    build_step: Callable[..., Any],
    slice_: Topology,
    options: dict[str, Any],
    chips: VirtualChips,
    show: Callable[[str], None],
) -> Needs:
    """Trace a step as one rank does, which takes no memory, and compile it."""
    import torch

    from xla_fsdp.preflight.trace.tracing import trace_step

    show("tracing a step as one rank")
    traced = trace_step(lambda: build_step(**options), slice_.coords)
    show(f"compiling it for {slice_.num_ranks} virtual chips")
    started = time.monotonic()
    largest = max(chips.memory(program.hlo, slice_.num_ranks) for program in traced.programs)
    compiling = time.monotonic() - started
    held = max(sum(each.nbytes for each in program.inputs) for program in traced.programs)
    matrix = torch.ones(1024, 1024)
    product = min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=4))
    forward_and_backward = REMAT * traced.model_flops * product / (2 * 1024**3)
    return Needs(
        memory=largest + 2 * slice_.num_ranks * held + OVERHEAD,  # held, and on their way
        available=available_memory(),
        compile_seconds=compiling,
        step_seconds=slice_.num_ranks * (traced.seconds + forward_and_backward),
    )


def check_fits(topology: str, needs: Needs, steps: int) -> None:
    """Raise RehearsalError if a rehearsal takes more memory than there is."""
    if needs.memory > needs.available:
        raise RehearsalError(
            f"{steps} step(s) on {topology}: {needs.text(steps)}: that does not fit. Take a "
            f"smaller model, batch or slice; how ranks communicate does not depend on their size"
        )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


# ---------------------------------------------------------------- on a rank


@dataclass(frozen=True)
class RankStep:
    """What a rank holds after a step."""

    loss: float | None  # what the step returned, if that was a number
    squares: float | None  # its part of the squared norm of the gradients; None without any
    not_finite: tuple[str, ...]  # names of what is not finite
    # Of all values of which other ranks have copies, by name and by place among those that hold
    # different parts.
    digests: dict[tuple[str, tuple[int, ...]], str]


def _make_steps(
    rank: int,
    build_step: Callable[..., Any],
    options: dict[str, Any],
    steps: int,
    table: Table,
    show: Callable[[str], None],
) -> None:
    from xla_fsdp.xla import ops

    whose = f": rank {rank} of {ops.world_size()}"
    for number, loss, seen in _made(build_step, options, steps, whose, show):
        ops.sync()
        table.add(number, rank, _after_step(loss, seen))


def _made(
    build_step: Callable[..., Any],
    options: dict[str, Any],
    steps: int,
    whose: str,
    show: Callable[[str], None],
) -> Iterator[tuple[int, Any, _Seen]]:
    """Make steps; yield the number of each, what it returned, and what optimizers were given."""
    from xla_fsdp.preflight.trace.tracing import fed

    with _watched() as seen:
        step = fed(build_step(**options), f"for {steps} step(s)")
        for number in range(steps):
            seen.grads.clear()
            show(f"step {number + 1} of {steps}{whose}")
            yield number, step(), seen


@dataclass
class _Seen:
    """What optimizers were given: their gradients in this step, by parameter."""

    optimizers: dict[int, torch.optim.Optimizer] = field(default_factory=dict)
    grads: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    has_all_grads: bool = True  # else some never leave a loop, or a compiled step's program
    depth: int = 0  # an optimizer may call another

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        from xla_fsdp.compile.seen import is_traced
        from xla_fsdp.optim.optimizers import STEPS_SLICES_OF

        if not self.depth:
            stepped = vars(optimizer).get(STEPS_SLICES_OF, optimizer)
            self.optimizers[id(stepped)] = stepped
            if stepped is not optimizer or is_traced():
                self.has_all_grads = False
            else:
                self._keep_grads(optimizer)
        self.depth += 1

    def after(self) -> None:
        self.depth -= 1

    def squared_norm(self, count: Callable[[Tensor], float]) -> float | None:
        """Sum the squares of the gradients, of each parameter times ``count``; None without all."""
        if not self.grads or not self.has_all_grads:
            return None
        return sum(
            float(grad.cpu().double().square().sum()) * count(param)
            for param, grad in self.grads.values()
        )

    def _keep_grads(self, optimizer: torch.optim.Optimizer) -> None:
        from xla_fsdp.optim.optimizers import params_of

        for param in params_of(optimizer):
            if param.grad is not None:
                self.grads[id(param)] = param, param.grad.detach().clone()


@contextmanager
def _watched() -> Iterator[_Seen]:
    """See what the optimizers of this rank, in autograd's thread as well, are given inside the
    block."""
    from torch.optim import optimizer as hooks

    from xla_fsdp.optim.optimizers import StepWatch
    from xla_fsdp.xla import ops

    seen, device = _Seen(), ops.device()

    def before(optimizer: Any) -> None:
        if ops.device() == device:
            seen.before(optimizer)

    def after(optimizer: Any) -> None:
        if ops.device() == device:
            seen.after()

    handles = [
        hooks.register_optimizer_step_pre_hook(StepWatch(before)),
        hooks.register_optimizer_step_post_hook(StepWatch(after)),
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _after_step(loss: Any, seen: _Seen) -> RankStep:
    from xla_fsdp.optim.clip_grad import shared_by
    from xla_fsdp.optim.optimizers import params_of
    from xla_fsdp.xla import ops

    params = {id(p): p for each in seen.optimizers.values() for p in params_of(each)}
    names = {key: _name(param, number) for number, (key, param) in enumerate(params.items())}
    places = {key: shared_by(param, None) for key, param in params.items()}
    found, digests = _number(loss), {}
    not_finite = [LOSS] if found is not None and not math.isfinite(found) else []
    for key, (_, grad) in seen.grads.items():
        if not _is_finite(grad.cpu()):
            not_finite.append(f"the gradient of {names[key]}")
    for key, param in params.items():
        value = param.detach().cpu()
        place = tuple(each.rank for each in places[key])
        digests[names[key], place] = _digest(value)
        if not _is_finite(value):
            not_finite.append(names[key])
    states = [state for each in seen.optimizers.values() for state in each.state.values()]
    for count in sorted({float(state["step"]) for state in states if "step" in state}):
        digests["the optimizer's number of steps", ()] = str(count)
    squares = seen.squared_norm(
        lambda param: math.prod(each.num_shards for each in places[id(param)]) / ops.world_size()
    )
    return RankStep(found, squares, tuple(not_finite), digests)


def _name(param: Tensor, number: int) -> str:
    from xla_fsdp.fsdp.engine.param import known_shard

    shard = known_shard(param)
    return f"parameter {number}" if shard is None else shard.originals[0].names[0]


def _digest(value: Tensor) -> str:
    import torch

    data = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()


def _is_finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(value.isfinite().all())


def _number(value: Any) -> float | None:
    import torch

    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.detach().cpu())
    return float(value) if isinstance(value, int | float) else None


# ---------------------------------------------------------------- the plain model


def _plain_steps(
    build_step: Callable[..., Any],
    num_ranks: int,
    options: dict[str, Any],
    steps: int,
    show: Callable[[str], None],
    say: Callable[[str], None],
) -> list[tuple[float | None, float | None]]:
    """Make the steps of the plain model, if there is one; say so if it fails.

    Returns:
        Loss and norm of the gradients, of each step.
    """
    if PLAIN not in inspect.signature(build_step).parameters:
        return []
    options = {**options, PLAIN: num_ranks}
    found = []
    try:
        for _, loss, seen in _made(build_step, options, steps, " of the plain model", show):
            squares = seen.squared_norm(lambda param: 1.0)
            found.append((_number(loss), None if squares is None else math.sqrt(squares)))
    except Exception as error:  # the user's code may raise anything
        text = " ".join(str(error).split())
        say(f"the plain model raised {type(error).__name__}: {text}; the ranks run without it")
        return []
    return found


# ---------------------------------------------------------------- the table


class Table:
    """Puts together what ranks hold after each step, and tells it line by line."""

    def __init__(
        self,
        num_ranks: int,
        plain: Sequence[tuple[float | None, float | None]],
        say: Callable[[str], None],
    ) -> None:
        self.results: list[StepResult] = []
        self._num_ranks = num_ranks
        self._plain = plain
        self._say = say
        self._found: dict[int, dict[int, RankStep]] = defaultdict(dict)
        self._started = time.monotonic()

    def add(self, number: int, rank: int, found: RankStep) -> None:
        """Take what a rank holds after step ``number``."""
        self._found[number][rank] = found
        if len(self._found[number]) < self._num_ranks:
            return
        by_rank = self._found.pop(number)
        ranks = [by_rank[each] for each in range(self._num_ranks)]
        losses = [each.loss for each in ranks if each.loss is not None]
        squares = [each.squares for each in ranks if each.squares is not None]
        now = time.monotonic()
        result = StepResult(
            sum(losses) / len(losses) if losses else None,
            math.sqrt(sum(squares)) if squares else None,
            tuple(_not_finite(ranks)),
            tuple(_disagreements(ranks)),
            now - self._started,
            any(each.digests for each in ranks),
            *(self._plain[number] if self._plain else ()),
        )
        self._started = now
        self._tell(number + 1, result)
        self.results.append(result)

    def _tell(self, number: int, result: StepResult) -> None:
        agree = "no" if result.disagreements else "yes" if result.compared else "-"
        columns = [
            ("step", f"{number:>4}"),
            ("loss", _figure(result.loss)),
            ("plain", _figure(result.plain_loss)),
            ("grad norm", _figure(result.grad_norm)),
            ("plain", _figure(result.plain_grad_norm)),
            ("finite", f"{'no' if result.not_finite else 'yes':<6}"),
            ("ranks agree", f"{agree:<11}"),
            ("seconds", f"{result.seconds:>7.1f}"),
        ]
        shown = [each for each in columns if self._plain or each[0] != "plain"]
        if not self.results:
            self._say("  ".join(heading.rjust(len(cell)) for heading, cell in shown))
        self._say("  ".join(cell for _, cell in shown))
        for problems in (result.not_finite, result.disagreements):
            for line in problems[:SHOWN]:
                self._say(f"      {line}")
            if len(problems) > SHOWN:
                self._say(f"      and {len(problems) - SHOWN} more")


def _figure(value: float | None) -> str:
    return f"{'-' if value is None else format(value, '.6g'):>11}"


def _not_finite(ranks: Sequence[RankStep]) -> Iterator[str]:
    where: dict[str, list[int]] = defaultdict(list)
    for rank, each in enumerate(ranks):
        for name in each.not_finite:
            where[name].append(rank)
    for name in sorted(where, key=lambda name: name != LOSS):  # the likely cause first
        yield f"{name} is not finite on ranks {where[name]}"


def _disagreements(ranks: Sequence[RankStep]) -> Iterator[str]:
    holders: dict[tuple[str, tuple[int, ...]], dict[str, list[int]]] = {}
    for rank, each in enumerate(ranks):
        for key, digest in each.digests.items():
            holders.setdefault(key, defaultdict(list))[digest].append(rank)
    for (name, _), by_digest in holders.items():
        if len(by_digest) > 1:
            groups = ", ".join(str(which) for which in by_digest.values())
            yield f"{name} must be the same on ranks that hold copies, and differs: {groups}"
