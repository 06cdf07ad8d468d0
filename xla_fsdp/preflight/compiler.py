"""Compile a program for a TPU topology in a child process with a memory limit, and keep results.

Words: a *compiled* program is the optimized module's text with the compiler's memory figures.
Always true: a child that takes more host memory than it may is ended and reported, and the same
program, topology and flags are compiled once: results are kept in a folder, by their digest.
What the child does is ``compile_child``'s business; what the text means that of ``traffic``.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from xla_fsdp.preflight.buffers import assigned_buffers
from xla_fsdp.preflight.program import Program
from xla_fsdp.preflight.topologies import GIB, Topology

POLL_SECONDS = 0.1

INSTALL = "pip install 'xla_fsdp[preflight]'"


class CompileError(RuntimeError):
    """The TPU compiler refused a program, or needed more host memory than allowed."""


@dataclass(frozen=True)
class Compiled:
    """Result of a compilation; sizes in bytes per rank.

    Args:
        text: the optimized, scheduled module.
        arguments: see ``buffers``.
        outputs: see there.
        temporaries: see there.
        on_host: see there.
        code: of the program itself, which lies in device memory, too.
        too_large_by: what a chip is short of, if the compiler refused the program for that; then
            ``code`` is not known, and 0.
        seconds: that compiling took.
        cpu_seconds: the same as CPU time.
        peak_host_bytes: host memory that it took.
    """

    text: str
    arguments: int
    outputs: int
    temporaries: int
    on_host: int
    code: int
    too_large_by: int
    seconds: float
    cpu_seconds: float
    peak_host_bytes: int

    @property
    def peak(self) -> int:
        """Device memory that the program needs: all its buffers, and its code."""
        return self.arguments + self.outputs + self.temporaries + self.code


def compile_program(
    program: Program,
    topology: Topology,
    *,
    max_host_mem: int = 10 * GIB,
    cache_dir: Path | None = None,
    flags: str = "",
    progress: Callable[[float], None] | None = None,
) -> Compiled:
    """Compile for every rank of ``topology``.

    Args:
        program: what to compile.
        topology: for which slice.
        max_host_mem: bytes of host memory that the compiler may take.
        cache_dir: where results are kept (default: the user's cache folder).
        flags: more compiler flags, as in ``LIBTPU_INIT_ARGS``.
        progress: called with the seconds gone by, about ten times a second.

    Raises:
        CompileError: if the compiler refuses, takes too much memory or is not installed.
    """
    check_installed()
    folder = cache_dir or default_cache_dir()
    entry = folder / f"{_key(program, topology, flags)}.json.gz"
    if (known := _read(entry)) is not None:
        return known
    with tempfile.TemporaryDirectory(prefix="preflight-") as name:
        job = Path(name)
        _write_job(job, program, topology)
        environment = compiler_environment(topology, _all_flags(program, topology, flags))
        try:
            _run_child(job, environment, max_host_mem, progress)
        except CompileError:
            if not (job / "result.json").exists():
                raise
        compiled = _result(job)
    _keep(entry, compiled)
    return compiled


def check_installed() -> None:
    """Raise CompileError if the TPU compiler is not installed."""
    missing = [name for name in ("jax", "libtpu") if importlib.util.find_spec(name) is None]
    if missing:
        raise CompileError(f"the TPU compiler is not installed ({', '.join(missing)}): {INSTALL}")


def default_cache_dir() -> Path:
    """The folder for results in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "xla_fsdp" / "preflight"


def _key(program: Program, topology: Topology, flags: str) -> str:
    facts = [
        program.digest,
        topology.name,
        _all_flags(program, topology, flags),
        importlib.metadata.version("libtpu"),
        importlib.metadata.version("jaxlib"),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _all_flags(program: Program, topology: Topology, flags: str) -> str:
    """With those that torch_xla sets, in its programs; JAX sets none."""
    return flags if program.partition_order else f"{topology.init_args} {flags}".strip()


def _read(entry: Path) -> Compiled | None:
    try:
        with gzip.open(entry, "rt") as file:
            return Compiled(**json.load(file))
    except (OSError, ValueError, TypeError, EOFError):
        return None  # absent, cut off, or of another version: compiled again


def _keep(entry: Path, compiled: Compiled) -> None:
    """Write under another name first: a reader never sees half a file."""
    with contextlib.suppress(OSError):  # a read-only home is no reason to fail
        entry.parent.mkdir(parents=True, exist_ok=True)
        fresh = entry.with_suffix(f".{os.getpid()}")
        with gzip.open(fresh, "wt", compresslevel=3) as file:
            json.dump(asdict(compiled), file)
        fresh.replace(entry)


def _write_job(folder: Path, program: Program, topology: Topology) -> None:
    job = {
        "topology": topology.slice_name,
        "slices": topology.slices,
        "chip_config": topology.chip.config,
        "coords": topology.coords,
        "aliases": program.aliases,
        "partition_order": program.partition_order,
    }
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "program.pb").write_bytes(program.hlo)


def compiler_environment(topology: Topology, flags: str = "") -> dict[str, str]:
    """What makes the compiler answer on a machine without a TPU."""
    unwanted = ("PJRT_DEVICE", "XLA_FLAGS", "TPU_MEGACORE")
    inherited = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {
        **inherited,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": topology.chip.accelerator,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": flags,
    }


def _run_child(
    folder: Path,
    environment: dict[str, str],
    max_host_mem: int,
    progress: Callable[[float], None] | None,
) -> None:
    command = [sys.executable, "-m", f"{__package__}.compile_child", str(folder)]
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            _watch(child, max_host_mem, progress)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
    if child.returncode and not (folder / "result.json").exists():
        tail = (folder / "log").read_text(errors="replace")[-2000:]
        raise CompileError(
            f"the TPU compiler ended with exit code {child.returncode}; its last lines:\n{tail}"
        )


def _watch(
    child: subprocess.Popen[bytes], max_host_mem: int, progress: Callable[[float], None] | None
) -> None:
    """Wait for the child, and end it when it takes more memory than it may."""
    started = time.monotonic()
    with contextlib.suppress(OSError):  # should the machine run out all the same
        Path(f"/proc/{child.pid}/oom_score_adj").write_text("1000")
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL_SECONDS)
            return
        used = _resident(child.pid)
        if used > max_host_mem:
            raise CompileError(
                f"compiling takes more than the {max_host_mem / GIB:.1f} GiB of host memory that "
                f"it may (after {time.monotonic() - started:.0f} s). Raise max_host_mem, or make "
                f"the program smaller"
            )
        if progress is not None:
            progress(time.monotonic() - started)


def _resident(pid: int) -> int:
    """Bytes of host memory that a process has in use."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):  # it has ended
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _refusal(said: str) -> str:
    """What is said of a program that the compiler refused, and what to do, if that is known."""
    told = f"the TPU compiler refused the program: {said}"
    if "layout for this output is not set to host memory" not in said:
        return told
    return (
        f"{told}\nWhat offload_activations leaves on the host cannot outlive its program, so a "
        f"forward and its backward are to be in one: leave out the sync between them, or what "
        f"reads a value there; and what has no backward runs under torch.no_grad()"
    )


def _result(folder: Path) -> Compiled:
    result = json.loads((folder / "result.json").read_text())
    if "error" in result:
        raise CompileError(_refusal(result["error"]))
    try:
        buffers = assigned_buffers(folder / "dump")
    except FileNotFoundError as error:
        raise CompileError(str(error)) from error
    return Compiled(
        text=(folder / "optimized.txt").read_text(),
        arguments=buffers.arguments,
        outputs=buffers.outputs,
        temporaries=buffers.temporaries,
        on_host=buffers.on_host,
        code=result["code"],
        too_large_by=result["too_large_by"],
        seconds=result["seconds"],
        cpu_seconds=result["cpu_seconds"],
        peak_host_bytes=result["peak_host_bytes"],
    )
