"""Compile programs for a TPU topology, in a child process with a memory limit.

Results are cached on disk, by a digest of the program, topology, flags and compiler version.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from xla_fsdp.preflight.compile.child import DUMP, Child, CompileError
from xla_fsdp.preflight.topologies import GIB, Topology
from xla_fsdp.preflight.trace.program import Program

INSTALL = "pip install '.[preflight]' in a clone of xla_fsdp"


class _FailsAgainError(CompileError):
    """A failure of the program, not of this machine: kept in the cache."""

    def __init__(self, reason: str, max_host_mem: int | None = None) -> None:
        super().__init__(reason)
        self.max_host_mem = max_host_mem  # the limit in bytes that was too low, if that is why


@dataclass(frozen=True)
class Buffers:
    """Bytes of HBM that the compiler sets aside for a program's buffers, per rank."""

    arguments: int  # inputs with padding; results may reuse their memory
    outputs: int  # results that do not reuse an input's memory
    temporaries: int  # everything else, also constants
    on_host: int  # in the host's memory, not in HBM


@dataclass(frozen=True)
class Compiled(Buffers):
    """A compiled program; sizes in bytes per rank."""

    text: str  # the optimized, scheduled module
    code: int  # the program itself, which lies in HBM, too; 0 if the compiler refused it
    too_large_by: int  # bytes that a chip lacks, if the compiler refused the program as too large
    seconds: float  # duration of compilation
    cpu_seconds: float  # CPU time of compilation
    peak_host_bytes: int  # host memory needed for compilation

    @property
    def peak(self) -> int:
        """Bytes of HBM that the program needs: all its buffers, and its code."""
        return self.arguments + self.outputs + self.temporaries + self.code


def compile_program(
    program: Program,
    topology: Topology,
    *,
    max_host_mem: int = 10 * GIB,
    cache_dir: str | Path | None = None,
    flags: str = "",
    progress: Callable[[float], None] | None = None,
) -> Compiled:
    """Compile for every rank of ``topology``.

    Args:
        program: the program of one rank, or one that the compiler is to partition.
        topology: the slices to compile for.
        max_host_mem: bytes of host memory that the compiler may use.
        cache_dir: folder of compiled programs (default: in the user's cache folder).
        flags: more compiler flags, as in ``LIBTPU_INIT_ARGS``.
        progress: called with the seconds passed, about ten times a second.

    Raises:
        CompileError: if the compiler refuses, needs too much memory or is not installed.
    """
    check_installed()
    if not program.partition_order:  # JAX adds no flags to its programs, torch_xla does
        flags = f"{topology.init_args} {flags}".strip()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(cache_dir or base / "xla_fsdp" / "preflight")
    entry = folder / f"{_key(program, topology, flags)}.json.gz"
    known = _read(entry)
    if isinstance(known, Compiled):
        return known
    if known is not None and (known.max_host_mem is None or max_host_mem <= known.max_host_mem):
        raise CompileError(f"{known} (kept from an earlier run, in {entry})")
    try:
        compiled = _compile(program, topology, flags, max_host_mem, progress)
    except _FailsAgainError as error:
        _write(entry, {"reason": str(error), "max_host_mem": error.max_host_mem})
        raise
    _write(entry, asdict(compiled))
    return compiled


def _compile(
    program: Program,
    topology: Topology,
    flags: str,
    max_host_mem: int,
    progress: Callable[[float], None] | None,
) -> Compiled:
    module, environment = f"{__package__}.compile_child", compiler_environment(topology, flags)
    started = time.monotonic()
    with Child("the TPU compiler", module, environment) as child:
        waiting = partial(_watch, child.process.pid, started, max_host_mem, progress)
        error, found = child.ask("compile", program, topology, waiting=waiting)
        if too_large_by := bytes_over_capacity(error):
            try:
                again, found = child.ask("schedule", program, topology, waiting=waiting)
            except CompileError:  # with more memory there may be a report on it
                raise CompileError(_refusal(error)) from None
            error = error if again else ""
        if error:
            is_kept = error.startswith(_COMPILERS_OWN)
            raise (_FailsAgainError if is_kept else CompileError)(_refusal(error))
        buffers, seconds = assigned_buffers(child.folder / DUMP), time.monotonic() - started
    return Compiled(**asdict(buffers), too_large_by=too_large_by, seconds=seconds, **found)


def check_installed() -> None:
    """Raise CompileError if the TPU compiler is not installed."""
    missing = [name for name in ("jax", "libtpu") if importlib.util.find_spec(name) is None]
    if missing:
        raise CompileError(
            f"the TPU compiler is not installed ({', '.join(missing)}): {INSTALL}, with Python "
            f"3.11 or 3.12, for which its packages are made"
        )


def available_memory() -> int:
    """Return the bytes of memory that this process may still take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    [free] = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    try:
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - used)


# ---------------------------------------------------------------- the cache


def _key(program: Program, topology: Topology, flags: str) -> str:
    versions = [importlib.metadata.version(name) for name in ("libtpu", "jaxlib")]
    facts = [program.digest, topology.name, flags, *versions]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _read(entry: Path) -> Compiled | _FailsAgainError | None:
    try:
        with gzip.open(entry, "rt") as file:
            facts = json.load(file)
        return _FailsAgainError(**facts) if "reason" in facts else Compiled(**facts)
    except (OSError, ValueError, TypeError, EOFError):
        return None  # absent, cut off, or of another version: compiled again


def _write(entry: Path, facts: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a read-only home is no reason to fail
        entry.parent.mkdir(parents=True, exist_ok=True)
        # Under another name first, so that nobody reads half a file.
        fresh = entry.with_name(f"{entry.name}.{os.getpid()}")
        with gzip.open(fresh, "wt", compresslevel=3) as file:
            json.dump(facts, file)
        fresh.replace(entry)


# ---------------------------------------------------------------- the child process


def compiler_environment(topology: Topology, flags: str = "") -> dict[str, str]:
    """Return environment variables with which the TPU compiler works without a TPU."""
    return child_environment(
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE=topology.chip.accelerator,
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        LIBTPU_INIT_ARGS=flags,
    )


def child_environment(**more: str) -> dict[str, str]:
    """Return the environment of a process with JAX: this one's, without what is for torch_xla."""
    unwanted = ("PJRT_DEVICE", "XLA_FLAGS", "TPU_MEGACORE")
    inherited = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {**inherited, "JAX_PLATFORMS": "cpu", **more}


def _watch(
    pid: int, started: float, max_host_mem: int, progress: Callable[[float], None] | None
) -> None:
    if _resident_bytes(pid) > max_host_mem:
        raise _FailsAgainError(
            f"compiling takes more than the {max_host_mem / GIB:.1f} GiB of host memory that it "
            f"may (after {time.monotonic() - started:.0f} s). Raise max_host_mem, or make the "
            f"program smaller",
            max_host_mem,
        )
    if progress is not None:
        progress(time.monotonic() - started)


def _resident_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):  # the child has ended
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_OVER_CAPACITY = re.compile(r"Exceeded hbm capacity by ([0-9.]+)([KMGT]?)")


def bytes_over_capacity(error: str) -> int:
    """Return by how many bytes a program is too large for a chip; 0 for any other error."""
    found = _OVER_CAPACITY.search(error)
    return round(float(found.group(1)) * _UNITS[found.group(2)]) if found else 0


_COMPILERS_OWN = ("XlaRuntimeError", "JaxRuntimeError")
"""Types of errors that are the compiler's; others may be this machine's."""


def _refusal(reason: str) -> str:
    message = f"the TPU compiler refused the program: {reason}"
    if "layout for this output is not set to host memory" not in reason:
        return message
    return (
        f"{message}\nWhat offload_activations leaves on the host cannot outlive its program, so a "
        f"forward and its backward are to be in one: leave out the sync between them, or what "
        f"reads a value there; and what has no backward runs under torch.no_grad()"
    )


# ---------------------------------------------------------------- the compiler's buffer assignment
# Figures are read from the dumped buffer assignment, not from the executable's memory statistics.
# Those count bytes lost to fragmentation twice among the temporaries (many, where there are loops)
# and include on-chip memory. The assignment adds up to the size in the compiler's out-of-memory
# errors.

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*)$", re.MULTILINE)
_NOT_IN_HBM = re.compile(r", color [1-9]|, thread-local")  # HBM has color 0, which is left out
_ON_HOST = ", color 5,"


def assigned_buffers(dump: Path) -> Buffers:
    """Read the sizes in the buffer assignment, the largest if several, that is in folder ``dump``.

    Raises:
        CompileError: if there is none.
    """
    found = [_assigned(path.read_text()) for path in dump.glob("*buffer-assignment.txt")]
    if not found:
        raise CompileError(f"the compiler left no assignment of buffers in {dump}")
    return max(found, key=lambda each: each.arguments + each.outputs + each.temporaries)


def _assigned(text: str) -> Buffers:
    sizes: Counter[str] = Counter()
    for size, properties in _ALLOCATION.findall(text):
        if _ON_HOST in properties:
            sizes["host"] += int(size)
        if not _NOT_IN_HBM.search(properties):
            sizes[_use(properties)] += int(size)
    return Buffers(sizes["argument"], sizes["output"], sizes["temporary"], sizes["host"])


def _use(properties: str) -> str:
    if ", parameter " in properties:
        return "argument"
    return "output" if "live-out" in properties else "temporary"
