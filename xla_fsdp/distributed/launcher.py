"""``launch``: run a function on every rank, on TPU through torch_xla, on CPU as threads.

Invariants: arguments and environment are checked before anything starts; ``launch`` returns only
when every rank has returned; it imports torch and torch_xla only when called, after it has set the
environment variables that they read.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import inspect
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from xla_fsdp.distributed.cpu_ranks import Failure, Run, current_rank_thread
from xla_fsdp.distributed.garbage import only_new_objects_collected
from xla_fsdp.distributed.preemption import Listening, listen
from xla_fsdp.distributed.process_state import ProcessState, root_logger_kept
from xla_fsdp.distributed.tracebacks import forget_locals
from xla_fsdp.distributed.whole_lines import whole_lines
from xla_fsdp.tpu_flags import compiler_flags

T = TypeVar("T")

NUM_RANKS_VARIABLE = "XLA_FSDP_NUM_RANKS"
NUMBER_VARIABLES = (NUM_RANKS_VARIABLE, "CPU_NUM_DEVICES")

GRACE = 3.0
"""Seconds that the other ranks get to unwind after a failure."""

SYNC_TIMEOUT = 600.0
"""Seconds that a rank waits for the others before the run fails."""

WARN_AFTER = 4.0
"""Seconds of waiting at the gate before a warning; XLA itself aborts the process after 15."""

START_PATIENCE = 60.0
"""Seconds without computing after which a rank that starts alone lets the next one start."""

ONE_RANK = (
    "launch starts one rank, as this is a CPU and nothing says how many; for eight: "
    f"launch(fn, num_ranks=8), or {NUM_RANKS_VARIABLE}=8"
)

NO_CACHE = "compile_cache is left out, as a CPU cannot read compiled programs again"

POLL = 0.2
"""Seconds between checks of a run."""

BLOCKED_EXIT_CODE = 1
INTERRUPTED_EXIT_CODE = 130


class RankError(RuntimeError):
    """A rank failed. ``rank`` is its number, ``__cause__`` the exception that it raised, if any."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rank)


def launch(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    *,
    num_ranks: int | None = None,
    start_method: str = "spawn",
    sync_timeout: float = SYNC_TIMEOUT,
    stop_signals: Sequence[signal.Signals] = (),
    compile_cache: str | os.PathLike[str] | None = None,
) -> list[T]:
    """Call ``fn(index, *args)`` on every rank.

    On CPU (``PJRT_DEVICE=CPU``, or unset and no TPU visible) the ranks are threads of this process:
    all of them share its modules, its global variables and the CPU random number generator. To
    build equal models, seed and then build: ``torch.manual_seed`` makes other ranks that seed wait
    until this one makes a collective. Torch's own CPU threads are limited to one
    while several ranks run, as the ranks already use all cores.
    Elsewhere ``torch_xla.launch`` is called. Inside a rank of a running launch, ``fn`` is simply
    called in that rank, whatever ``num_ranks`` is.

    Args:
        fn: called with the rank's number, from 0, and ``args``. On CPU tensors that it returns are
            computed when it ends; other lazy ones that need a collective cannot be after the run.
        args: further arguments of ``fn``; on CPU shared by all ranks, not copied.
        num_ranks: how many CPU ranks; default ``XLA_FSDP_NUM_RANKS``, else ``CPU_NUM_DEVICES``,
            else 1. On TPU it must be 1 or the number of devices there, which is the default.
        start_method: how torch_xla starts processes; not used on CPU.
        sync_timeout: seconds a CPU rank may wait for the others before the run fails.
        stop_signals: signals, such as ``signal.SIGTERM``, that do not end the process but ask the
            ranks to stop; ``Preemption`` tells them. The caller must be the main thread.
        compile_cache: folder that keeps compiled programs, so that the same job compiles none when
            it starts again: torch_xla's persistent cache, with a folder in it for each process. On
            CPU, which cannot read what it has written, it is left out, and stderr has a line.

    Returns:
        On CPU the values ``fn`` returned, in rank order (inside a rank: this rank's only). Nothing,
        [], where the ranks are processes.

    Raises:
        TypeError: ``fn`` cannot be called, or not with a rank and ``args``.
        ValueError: ``num_ranks`` is not a number of ranks that can be started here, or
            ``stop_signals`` cannot be listened for.
        RuntimeError: torch_xla was started before, in a way that does not fit.
        RankError: a rank failed. ``launch`` can be called again; tensors that were still to be
            computed raise RuntimeError where they are used. If other ranks are blocked inside XLA
            they cannot be stopped: then the error is printed and the process ends with a non-zero
            exit code.
        SystemExit: the first rank that failed raised it, with a code other than 0 or None (with
            0 or None a rank just ends).
    """
    if not callable(fn):
        raise TypeError(
            f"launch got a {type(fn).__name__}, which it cannot call; give the function itself, as "
            f"in launch(train), not launch(train())"
        )
    _check_arguments(fn, args)
    inside = current_rank_thread()
    if inside is not None:
        return [fn(inside.rank, *args)]
    wanted = None if num_ranks is None else _checked(num_ranks, "num_ranks")
    signals = tuple(stop_signals)
    if _device_type() != "CPU":
        called: Callable[..., Any] = fn
        if compile_cache is not None:
            called = functools.partial(_with_cache, fn, os.fspath(compile_cache))
        if signals:
            called = Listening(called, signals)
        with listen(signals, to_children=True):
            _launch_processes(called, tuple(args), wanted, start_method)
        return []
    count = wanted or _default_num_ranks()
    if wanted is None and not any(map(os.environ.get, NUMBER_VARIABLES)):
        _say(ONE_RANK)
    if compile_cache is not None:
        _say(NO_CACHE)
    with listen(signals, to_children=False):
        _prepare_process(count)
        return _run_cpu_ranks(fn, tuple(args), Run(count), sync_timeout)


def _with_cache(fn: Callable[..., T], folder: str, *args: Any) -> T:
    import torch_xla.runtime as xr

    own = os.path.join(folder, f"process-{xr.process_index()}")
    with _caching:  # the ranks of one process are threads
        if os.environ.get("XLA_PERSISTENT_CACHE_PATH") != own:
            xr.initialize_cache(own, readonly=False)
    return fn(*args)


_caching = threading.Lock()


def _check_arguments(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    try:
        inspect.signature(fn).bind(0, *args)
    except ValueError:  # of a function of C, which does not tell
        pass
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"launch calls {name}(rank{', *args' if args else ''}), which it does not take "
            f"({error}); let the number of the rank be its first argument, as in def {name}(rank)"
        ) from None


def launch_script(
    fn: Callable[..., Any],
    args: Sequence[Any],
    num_ranks: int | None,
    start_state: Callable[[ProcessState, int], ProcessState],
) -> list[Any]:
    """Call ``fn`` on CPU ranks that start as processes would: one after the other, each with the
    process to itself until it makes a collective or ends.

    Args:
        fn, args, num_ranks: as for ``launch``, which this is inside a rank.
        start_state: returns the state in which a rank starts, given the process's state now, which
            is restored in the end, and the rank's number.
    """
    if current_rank_thread() is not None:
        return launch(fn, args)
    count = _default_num_ranks() if num_ranks is None else _checked(num_ranks, "num_ranks")
    _prepare_process(count)
    state = ProcessState.now()
    try:
        run = Run(count, lambda rank: start_state(state, rank).restore())
        return _run_cpu_ranks(fn, tuple(args), run, SYNC_TIMEOUT)
    finally:
        state.restore()


@contextlib.contextmanager
def one_rank_at_a_time() -> Iterator[None]:
    """Let only one CPU rank at a time into the block; do nothing where ranks are processes.

    Use it for what the ranks share, above all the CPU random number generator:
    ``with one_rank_at_a_time(): torch.manual_seed(0); model = Model()`` gives every rank the same
    model; without it, the ranks draw alternately. A rank that seeds inside lets the others in when
    it makes a collective after the block, or ends. A ``torch_xla.sync()`` of collectives inside the
    block raises RuntimeError, as the other ranks could not join it.
    """
    thread = current_rank_thread()
    with contextlib.nullcontext() if thread is None else thread.turn():
        yield


# ---------------------------------------------------------------- arguments and environment


def _checked(num_ranks: Any, name: str) -> int:
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
        raise ValueError(f"{name}={num_ranks!r}; expected a whole number of ranks, 1 or more")
    return num_ranks


def _default_num_ranks() -> int:
    for name in NUMBER_VARIABLES:
        text = os.environ.get(name)
        if text:
            return _checked(int(text) if text.strip().isdecimal() else text, name)
    return 1


def _device_type() -> str:
    if "PJRT_DEVICE" not in os.environ:
        import xla_fsdp.xla  # noqa: F401  (torch_xla sets PJRT_DEVICE if it sees a TPU)

        os.environ.setdefault("PJRT_DEVICE", "CPU")
    return os.environ["PJRT_DEVICE"].partition("_")[0].upper()


def _launch_processes(
    fn: Callable[..., Any], args: tuple[Any, ...], num_ranks: int | None, start_method: str
) -> None:
    import torch_xla

    if _device_type() == "TPU":  # the flags are read where a process first uses its TPU
        name = "LIBTPU_INIT_ARGS"
        os.environ[name] = compiler_flags(os.environ.get(name, ""))
    if num_ranks not in (None, 1):
        from xla_fsdp.xla import ops

        found = ops.expected_device_count()
        if num_ranks != found:
            raise ValueError(
                f"num_ranks={num_ranks}, but there are {found} {os.environ['PJRT_DEVICE']} devices "
                "and torch_xla starts one rank on each. Leave num_ranks out, or pass 1 to debug."
            )
    torch_xla.launch(fn, args, start_method, debug_single_process=num_ranks == 1)


def _needed_environment(num_ranks: int) -> dict[str, str]:
    pool = os.environ.get("XLA_THREAD_POOL_SIZE", "")
    size = max(int(pool) if pool.isdecimal() else 0, 2 * num_ranks + 2)
    return {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(num_ranks),
        # A collective blocks its thread; with fewer threads than ranks, all wait forever.
        "XLA_THREAD_POOL_SIZE": str(size),
        # The asynchronous client waits, holding the GIL, for a running execution before it frees a
        # buffer. If that execution needs other ranks, they cannot reach it: a deadlock.
        "PJRT_CPU_ASYNC_CLIENT": "0",
    }


def _prepare_process(num_ranks: int) -> None:
    """Set the environment, or check it if torch_xla has read it already; then start the devices."""
    needed = _needed_environment(num_ranks)
    if "torch_xla" not in sys.modules:
        os.environ.update(needed)
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    with root_logger_kept():
        from xla_fsdp.xla import ops
        from xla_fsdp.xla.cpu_rank_patches import prepare_cpu_ranks

    if ops.runtime_started():
        _check_started(needed, num_ranks, ops.local_device_count())
    os.environ.update(needed)
    prepare_cpu_ranks()


def _check_started(needed: dict[str, str], num_ranks: int, found: int) -> None:
    wrong = [name for name, value in needed.items() if os.environ.get(name) != value]
    if found == num_ranks and (num_ranks == 1 or not wrong):
        return
    settings = " ".join(f"{name}={value}" for name, value in needed.items())
    raise RuntimeError(
        f"launch needs {num_ranks} CPU devices, but torch_xla was started before with {found}"
        + (f" and with other values of {', '.join(wrong)}" if wrong else "")
        + ". This is fixed once torch_xla has created its devices. Call launch before anything "
        f"that uses a device, always with the same num_ranks, or start Python with {settings}."
    )


# ---------------------------------------------------------------- one run


def _run_cpu_ranks(
    fn: Callable[..., Any], args: tuple[Any, ...], run: Run, sync_timeout: float
) -> list[Any]:
    from xla_fsdp.xla import cpu_rank_patches as patches

    start = functools.partial(run.start, fn, args, patches.enter_cpu_rank, patches.leave_cpu_rank)
    with (
        patches.running(run),
        _crash_report(),
        _one_torch_thread(run.num_ranks),
        only_new_objects_collected(),
        whole_lines(),
    ):
        supervise(run, start, sync_timeout)
    return [run.results.get(rank) for rank in range(run.num_ranks)]


def supervise(run: Run, start: Callable[[], None], sync_timeout: float) -> None:
    """Start the ranks and wait for them in the main thread, which so still receives Ctrl-C."""
    try:
        start()
        _watch(run, sync_timeout)
        if run.failures:
            _end_failed(run)
        run.join_finished()
    except KeyboardInterrupt:
        try:
            _end_interrupted(run)
        except KeyboardInterrupt:
            _say("interrupted again; the process ends at once")
            _exit_now(INTERRUPTED_EXIT_CODE)
        raise


def _watch(run: Run, sync_timeout: float) -> None:
    """Wait until the run is over; warn, and then end it, if ranks wait for others too long."""
    warned: set[str] = set()
    while not run.wait(POLL):
        if run.longest_wait() > sync_timeout:
            run.fail(_timeout(run, sync_timeout))
        elif late := run.late_to_execute(WARN_AFTER):
            _warn_of_compilation(run, late, warned)
        # Not while a rank compiles, which ends by itself: the others can only wait for it.
        elif run.longest_wait() > WARN_AFTER and not run.execution.locked():
            _warn_once(run, warned)
        elif (rank := run.idle_starter(START_PATIENCE)) is not None:
            _end_start(run, rank)


def _timeout(run: Run, sync_timeout: float) -> Failure:
    waiting, missing = run.who_waits()
    return Failure(
        missing[0] if missing else 0,
        f"ranks {waiting} waited {sync_timeout:g} s in torch_xla.sync() to run a collective; "
        f"missing are ranks {missing}.\n{_stacks(run, missing)}"
        "Bring all ranks to the same collective, or pass a longer sync_timeout to launch.",
    )


def _warn_once(run: Run, warned: set[str]) -> None:
    waiting, missing = run.who_waits()
    stacks = _stacks(run, missing)
    if not waiting or stacks in warned:
        return
    warned.add(stacks)
    _say(
        f"ranks {waiting} have waited {WARN_AFTER:g} s in torch_xla.sync() to run a "
        f"collective; ranks {missing} are elsewhere:\n{stacks}"
        "If such a rank is only slow, this is harmless. If it reads a value that needs a "
        "collective (.item(), .cpu(), print) and the waiting ranks do not, it can never get it, "
        "and XLA ends the process about 15 s after it began: read such values on all ranks."
    )


def _warn_of_compilation(run: Run, late: list[int], warned: set[str]) -> None:
    others = [rank for rank in range(run.num_ranks) if rank not in late]
    if str(late) in warned:
        return
    warned.add(str(late))
    _say(
        f"ranks {others} have waited {WARN_AFTER:g} s in a collective for ranks {late}, "
        "which still compile: their program is another one. XLA ends the process about 15 s after "
        "the first began to wait. Let all ranks trace the same program: numbers that depend on the "
        "rank as tensors, torch.tensor(rank).to(device), the same tensors alive at "
        "torch_xla.sync(), values read (.item(), print) by all or by none, and batches of one "
        "shape (a DataLoader's last one is smaller unless drop_last=True). "
        "XLA_FLAGS=--xla_backend_optimization_level=0 shortens compilation."
    )


def _end_start(run: Run, rank: int) -> None:
    _say(
        f"rank {rank} has the process to itself until its first collective, "
        f"but has computed nothing for {START_PATIENCE:g} s. In case it waits for another rank, "
        f"those go on now; they may change its random numbers, sys.argv, environment and working "
        f"directory.\n"
        f"{_stacks(run, [rank])}"
    )
    run.end_seeding(rank)


def _say(text: str) -> None:
    print(f"xla_fsdp: {text.rstrip()}", file=sys.stderr, flush=True)


def _stacks(run: Run, ranks: Sequence[int]) -> str:
    return "".join(f"  rank {rank} is at:\n{run.stack(rank)}" for rank in ranks)


def _end_failed(run: Run) -> NoReturn:
    run.wait(GRACE, for_all=True)
    failure = run.failures[0]
    blocked = run.join_finished()
    if blocked:
        _exit_blocked(failure, blocked)
    for each in run.failures:
        # Else whoever keeps the error would keep a model, and the threads of a data loader, which
        # the interpreter waits for when it exits.
        forget_locals(each.error)
    if isinstance(failure.error, SystemExit):
        _say(failure.message)  # Python says nothing of it
        raise failure.error
    others = sorted({each.rank for each in run.failures[1:] if each.error is not None})
    message = failure.message + (f" (ranks {others} raised, too)" if others else "")
    raise RankError(message, failure.rank) from failure.error


def _exit_blocked(failure: Failure, blocked: list[int]) -> NoReturn:
    if failure.error is not None:
        print("".join(traceback.format_exception(failure.error)).rstrip(), file=sys.stderr)
    _say(
        f"{failure.message}\nRanks {blocked} do not stop (they may be blocked in a "
        "collective that cannot complete any more): the process ends here."
    )
    code = failure.error.code if isinstance(failure.error, SystemExit) else None
    _exit_now(code if isinstance(code, int) else BLOCKED_EXIT_CODE)  # it may be a text


def _end_interrupted(run: Run) -> None:
    run.fail(Failure(-1, "interrupted"))
    time.sleep(POLL)
    run.give_up_unstarted()
    run.wait(GRACE, for_all=True)
    blocked = run.join_finished()
    if blocked:
        _say(f"interrupted; ranks {blocked} are blocked, the process ends without them")
        _exit_now(INTERRUPTED_EXIT_CODE)


def _exit_now(code: int) -> NoReturn:
    """End the process without waiting for threads; name those for which Python would have waited,
    such as one that saves a step."""
    unfinished = [
        thread.name
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    ]
    if unfinished:
        _say(f"did not wait for the end of: {', '.join(unfinished)}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def _one_torch_thread(num_ranks: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    if num_ranks > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _crash_report() -> Iterator[None]:
    if faulthandler.is_enabled() or sys.__stderr__ is None:
        yield
        return
    faulthandler.enable(file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.disable()
