"""Compile one training step of a GPT for TPU: ours, upstream's, and JAX's.

    python benchmarks/tpu_compile.py --models 1024x4,1024x24,2048x24 --topology v5e:4x4

``ours`` is ``xla_fsdp``, ``scan`` the same with its blocks as one loop, ``stacked`` that with the
parameters of all blocks stacked, ``streamed`` that with a head that computes the loss in chunks and
an optimizer that steps in backward, ``offloaded`` that with the blocks' inputs on the host,
``upstream`` is ``torch_xla.distributed.fsdp`` at its best settings, ``jax`` a scan over layers
under ``jit`` (``gpt.py``, ``jax_fsdp.py``). ``alone`` is the model without any sharding, in the
compute dtype, of which one chip steps 1/N of the parameters: what an FSDP could at best be; the row
"step over alone" says what each takes more. All have per-chip batch 1, sequence 1024, AdamW with
fp32 state, bf16 compute, rematerialized blocks, in the steady state.
Memory, code and collectives are those of the compiled program; trace times are this machine's, of
alternating steps (JAX traces once). ``--write FILE`` keeps each table in a file, with the command
that makes it; other sections of the file stay. Preflight caches compiled programs, so a second run
takes only the time to trace. With ``--compilations N`` each program is compiled N times more, in
turn with the others, and compile times are the medians of these.

    python benchmarks/tpu_compile.py --goals --models 1024x24 --topology v5e:4x4 --topology v5e:8x8

makes one table of the streamed program, with a row for each model and topology, and what misses its
goal in bold.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gpt
from xla_fsdp.preflight.api import report_on
from xla_fsdp.preflight.compile.compiler import (
    Compiled,
    CompileError,
    compile_program,
    compiler_environment,
)
from xla_fsdp.preflight.read.hlo import Computation, Instruction, Module
from xla_fsdp.preflight.read.report import Report
from xla_fsdp.preflight.topologies import GIB, Topology, find_topology
from xla_fsdp.preflight.trace.program import Program, Traced
from xla_fsdp.tpu_flags import compiler_flags

MIB, MB = 2**20, 10**6
FLAGGED = ("ours", "scan", "stacked", "streamed", "offloaded")
PROGRAMS = (*FLAGGED, "upstream", "jax", "alone")
TRACED_EVERY_STEP = (*FLAGGED, "upstream")
WARM_UP = 2  # steps that are not timed; they make the optimizer's state


@dataclass(frozen=True)
class Case:
    """A model on a topology."""

    shape: gpt.Shape
    topology: Topology

    @property
    def model(self) -> str:
        return f"{self.shape.width}x{self.shape.blocks}"

    def is_like(self, other: Case) -> bool:
        """Return whether the model and the generation are the same."""
        return (self.shape, self.topology.chip) == (other.shape, other.topology.chip)

    @property
    def title(self) -> str:
        return (
            f"width {self.shape.width}, {self.shape.blocks} blocks, {self.topology.name} "
            f"({self.topology.num_ranks} ranks)"
        )


@dataclass
class Result:
    """Report and times of one program."""

    name: str
    report: Report
    compiled: Compiled
    program: Program
    flags: str  # that it was compiled with
    tokens: int  # of all ranks
    trace_seconds: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, and print the tables; return the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.goals and options.compilations:
        parser.error("--compilations is for tables of programs; --goals compiles each once")
    for title, lines in _goals(options) if options.goals else _tables(options):
        print("\n".join(["", f"## {title}", "", *lines]), flush=True)
        if options.write:  # after every case: a run may take hours
            write_section(options.write, title, lines)
    return 0


def _tables(options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Yield title and text of a section for each case."""
    for case in _cases(options):
        results, problems = _results(case, options)
        yield case.title, [*_command(options, [case]), *table(results), *problems]


def _goals(options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Yield title and text of the table of goals, again with each row that it gains."""
    cases = list(_cases(options))
    sizes = ", ".join(str(each) for each in sorted({each.topology.num_ranks for each in cases}))
    names = ", ".join(dict.fromkeys(each.topology.name.partition(":")[0] for each in cases))
    found: list[tuple[Case, Result]] = []
    problems: list[str] = []
    for case in cases:
        try:
            found.append((case, _examine("streamed", case, options)))
        except CompileError as error:
            problems += ["", f"{case.title}: {error}"]
        title = f"Goals of the streamed program, {names}, {sizes} ranks"
        yield title, [*_command(options, cases), *goals_table(found), *problems]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="1024x4,1024x24,2048x24", metavar="WIDTHxBLOCKS,...")
    parser.add_argument("--topology", action="append", help="default v5e:4x4; may be repeated")
    parser.add_argument("--only", default=",".join(PROGRAMS), metavar="NAME,...")
    parser.add_argument("--rounds", type=int, default=5, help="steps traced for the time of one")
    parser.add_argument(
        "--compilations", type=int, default=0, help="more of each program, for the compile times"
    )
    parser.add_argument("--max_host_mem", type=float, default=10, metavar="GIB")
    parser.add_argument("--cache_dir", type=Path, help="default: in the user's cache folder")
    parser.add_argument(
        "--plain", action="store_true", help="compile ours without the flags that launch sets"
    )
    parser.add_argument(
        "--goals", action="store_true", help="one table of the streamed program and its goals"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep the tables")
    return parser


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    for name in options.topology or ["v5e:4x4"]:
        for model in options.models.split(","):
            width, _, blocks = model.partition("x")
            yield Case(gpt.Shape(int(width), int(blocks)), find_topology(name))


def _results(case: Case, options: argparse.Namespace) -> tuple[list[Result], list[str]]:
    results, problems = [], []
    for name in [name for name in PROGRAMS if name in options.only.split(",")]:
        try:
            results.append(_examine(name, case, options))
        except CompileError as error:
            problems += ["", f"{name}: {error}"]
    if options.compilations:
        _time_compilations(results, case, options)
    traced = [result.name for result in results if result.name in TRACED_EVERY_STEP]
    tell(f"{case.title}: host time of a step")
    seconds = in_child(_trace_seconds, traced, case, options.rounds) if traced else {}
    for result in results:
        result.trace_seconds = seconds.get(result.name, [])
    return results, problems


def _examine(name: str, case: Case, options: argparse.Namespace) -> Result:
    tell(f"{case.title}: tracing {name}")
    traced: Traced = in_child(_lowered_by_jax if name == "jax" else _traced, name, case)
    tell(f"{case.title}: compiling {name}")
    [program] = traced.programs
    flags = compiler_flags() if name in FLAGGED and not options.plain else ""
    compiled = _compile(program, flags, case, options, options.cache_dir)
    tokens = case.topology.num_ranks * case.shape.batch * case.shape.length
    report = report_on(traced, [compiled], case.topology, {})
    return Result(name, report, compiled, program, flags, tokens)


def _compile(
    program: Program, flags: str, case: Case, options: argparse.Namespace, cache_dir: Path | None
) -> Compiled:
    return compile_program(
        program,
        case.topology,
        max_host_mem=round(options.max_host_mem * GIB),
        cache_dir=cache_dir,
        flags=flags,
    )


def _time_compilations(results: Sequence[Result], case: Case, options: argparse.Namespace) -> None:
    """Compile again without the cache; set the compile times to the medians.

    Programs alternate, so that other load on the machine affects all of them.
    """
    times: dict[str, list[Compiled]] = {result.name: [] for result in results}
    for number in range(options.compilations):
        tell(f"{case.title}: compilation {number + 1} of {options.compilations}")
        for result in results:
            with tempfile.TemporaryDirectory() as folder:
                again = _compile(result.program, result.flags, case, options, Path(folder))
            times[result.name].append(again)
    for result in results:
        cpu = statistics.median(each.cpu_seconds for each in times[result.name])
        wall = statistics.median(each.seconds for each in times[result.name])
        result.compiled = replace(result.compiled, cpu_seconds=cpu, seconds=wall)


def in_child(work: Callable[..., Any], *arguments: Any) -> Any:
    """Call in a new process: torch_xla and JAX cannot share one, and its memory is freed."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def _traced(name: str, case: Case) -> Traced:
    from xla_fsdp.preflight.trace.tracing import trace_step

    return trace_step(lambda: getattr(gpt, name)(case.shape), case.topology.coords)


def _lowered_by_jax(name: str, case: Case) -> Traced:
    os.environ.update(compiler_environment(case.topology))
    from jax_fsdp import lowered

    return lowered(case.shape, case.topology)


def _trace_seconds(names: Sequence[str], case: Case, rounds: int) -> dict[str, list[float]]:
    """Return CPU seconds of each of ``rounds`` steps, by name, until a step would first execute.

    Steps of all models alternate, so that other load on the machine affects all of them.
    """
    from xla_fsdp.preflight.trace.tracing import Recorder, use_cpu_device
    from xla_fsdp.xla.fake_rank import fake_rank

    use_cpu_device()
    recorder, stopped = Recorder(), []
    seconds: dict[str, list[float]] = {name: [] for name in names}

    def stop() -> None:
        stopped.append(time.process_time())
        recorder.cut()

    with fake_rank(case.topology.coords, stop):
        steps = {}
        for name in names:
            steps[name] = getattr(gpt, name)(case.shape)
            recorder.cut()
        for _ in range(WARM_UP + rounds):
            for name, step in steps.items():
                stopped.clear()
                started = time.process_time()
                step()
                stopped.append(time.process_time())
                recorder.cut()
                seconds[name].append(stopped[0] - started)
    return {name: found[WARM_UP:] for name, found in seconds.items()}


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- tables


INTRODUCTION = """\
# One training step as the TPU compiler makes it

Per rank and step. Peak is arguments, temporaries and program code together, as the compiler lays
them out in HBM. Wire bytes by ring accounting; hidden are those under which compute is scheduled.
Steps are estimated as preflight does, with all hidden traffic for free. Ours is compiled with the
flags that launch sets on TPU, unless --plain is given, the others without them. The last columns
are ours divided by the others. Compile times are those of the first compilation, with whatever the
machine did then.

Each section has the command that made it; programs compiled before are kept."""
HEADING = "\n\n## "


def _command(options: argparse.Namespace, cases: Sequence[Case]) -> list[str]:
    """Return the lines with the command that makes the section of these cases."""
    models = dict.fromkeys(each.model for each in cases)
    words = ["--goals"] if options.goals else []
    words += ["--models", ",".join(models)]
    for name in dict.fromkeys(each.topology.name for each in cases):
        words += ["--topology", name]
    for option in ("only", "rounds", "compilations", "max_host_mem"):
        if (value := getattr(options, option)) != _parser().get_default(option):
            words += [f"--{option}", f"{value:g}" if isinstance(value, float) else str(value)]
    words += ["--plain"] if options.plain else []
    return [f"    {shlex.join(['python', 'benchmarks/tpu_compile.py', *words])}", ""]


def write_section(path: Path, title: str, lines: Sequence[str]) -> None:
    """Put a section in the place of that of the same title, or at the end of the file."""
    text = path.read_text().rstrip("\n") if path.exists() else ""
    sections = dict(each.split("\n", 1) for each in text.split(HEADING)[1:])
    sections[title] = "\n".join(["", *lines]).rstrip("\n")
    joined = [INTRODUCTION, *(f"{name}\n{body}" for name, body in sections.items())]
    path.write_text(HEADING.join(joined) + "\n")


def table(results: Sequence[Result]) -> list[str]:
    """Return a Markdown table: one row per figure, one column per program, then ratios."""
    names = [result.name for result in results]
    ratios = [f"/ {name}" for name in names if name != "ours"] if "ours" in names else []
    rows = [["", *names, *ratios], ["---", *["---:"] * (len(names) + len(ratios))]]
    # JAX's are not counted, and upstream's with those of recomputation.
    flops = min(filter(None, (each.report.step_time.model_flops for each in results)), default=0)
    figures = [_figures(result, flops) for result in results]
    if "alone" in names:
        alone = results[names.index("alone")].report.step_time.total
        for each, result in zip(figures, results, strict=True):
            each["step over alone"] = result.report.step_time.total / alone
            each |= {f"{part}, ms": seconds * 1e3 for part, seconds in _parts(result).items()}
    for label in dict.fromkeys(label for each in figures for label in each):
        values = [each.get(label) for each in figures]
        rows.append([label, *map(_shown, values), *_ratios(names, values)])
    return [f"| {' | '.join(row)} |" for row in rows]


def _ratios(names: Sequence[str], values: Sequence[float | None]) -> list[str]:
    if "ours" not in names:
        return []
    own = values[names.index("ours")]
    return [
        f"{own / value:.2f}" if own is not None and value else ""
        for name, value in zip(names, values, strict=True)
        if name != "ours"
    ]


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:.3g}"


def _figures(result: Result, flops: int) -> dict[str, float]:
    report, compiled = result.report, result.compiled
    time, chip = report.step_time, find_topology(report.topology).chip
    figures: dict[str, float] = {
        "peak, MiB": compiled.peak / MIB,
        "arguments, MiB": compiled.arguments / MIB,
        "temporaries, MiB": compiled.temporaries / MIB,
        "program code, MiB": compiled.code / MIB,
        "in the host's memory, MiB": compiled.on_host / MIB,
        "wire, MB": report.wire_bytes / MB,
        "blocking, MB": report.blocking_bytes / MB,
        **_by_kind(report),
        "collectives": sum(each.count for each in report.traffic),
        "estimated step, ms": time.total * 1e3,
        "compute in it, ms": time.compute * 1e3,
        "wire time at full link speed, ms": (time.blocking + time.overlapped) * 1e3,
        "tokens/s, estimated": result.tokens / time.total,
        "MFU, estimated, %": 100 * flops / (time.total * chip.peak_flops),
        "compile, CPU s": compiled.cpu_seconds,
        "compile, wall s": compiled.seconds,
    }
    if report.minimum_wire_bytes:
        figures["minimum on the wire, MB"] = report.minimum_wire_bytes / MB
    if result.trace_seconds:
        figures["tracing a step, CPU ms"] = 1e3 * statistics.median(result.trace_seconds)
    return figures


_MOVES = frozenset(
    {
        "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "reshape", "copy",
        "copy-start", "copy-done", "transpose", "slice", "slice-start", "slice-done",
        "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "broadcast", "iota",
        "async-start", "async-done", "async-update", "fusion", "add", "multiply", "compare",
        "select", "clamp", "and", "subtract",
    }
)  # fmt: skip
"""What moves values and computes where they are."""


PARTS = ("products", "optimizer", "sums in rings", "collectives", "casts", "copies", "others")


def _parts(result: Result) -> dict[str, float]:
    """Return seconds of compute by what is done, as the compiler's cycles have it. A fusion counts
    for the first of these that is in it."""
    module = Module(result.compiled.text)
    chip = find_topology(result.report.topology).chip
    found = dict.fromkeys(PARTS, 0.0)
    for execution in module.executions:
        if execution.caller is not None and execution.caller.opcode == "fusion":
            continue
        for each in execution.computation.instructions:
            seconds = each.cycles / chip.clock_hz + each.kernel_flops / chip.peak_flops
            if seconds:
                found[_part(module, execution.computation, each)] += seconds * execution.times
    return found


def _part(module: Module, inside: Computation, each: Instruction) -> str:
    lines = list(_lines_in(module, each))
    opcodes = {line.opcode for line in lines}
    if opcodes & {"dot", "convolution"} or each.kernel_flops:
        return "products"
    if "sqrt" in opcodes:  # norms have rsqrt
        return "optimizer"
    if any(opcode.startswith(("all-", "collective-", "reduce-scatter")) for opcode in opcodes):
        return "collectives"
    sources = (_source(inside, name) for name in each.operands)
    if any(source and source.opcode.startswith("collective-permute") for source in sources):
        return "sums in rings"
    arithmetic = any(line.opcode in _ARITHMETIC and "f" in "".join(line.dtypes) for line in lines)
    if arithmetic or opcodes - _MOVES - {"convert"}:
        return "others"
    return "casts" if "convert" in opcodes else "copies"


def _source(inside: Computation, name: str) -> Instruction | None:
    """Return the instruction that computes a value, looking through copies and conversions."""
    each = inside.by_name.get(name)
    while each is not None and each.opcode in ("bitcast", "copy", "reshape", "convert"):
        each = inside.by_name.get(each.operands[0])
    return each


_ARITHMETIC = frozenset({"add", "subtract", "multiply", "select", "clamp", "compare"})
"""Moves if they are of integers, as those of indices are."""


def _lines_in(module: Module, each: Instruction) -> Iterator[Instruction]:
    yield each
    called = module.computations.get(each.attribute("calls"))
    for line in called.instructions if called else ():
        yield from _lines_in(module, line)


GOALS = {
    "blocking, % of wire": 10,
    "wire / minimum": 1.05,
    "code, MiB": 30,
    "step / longer of compute and wire": 1.25,
    "compile at 64 / at 16 ranks": 1.5,
}
"""Columns of the table of goals, and the most that each may be."""


def goals_table(found: Sequence[tuple[Case, Result]]) -> list[str]:
    """Return a Markdown table: one row per case, with what misses its goal in bold."""
    labels = [f"{label} (at most {most})" for label, most in GOALS.items()]
    labels += ["compile, CPU s", "tokens/s", "MFU, %"]
    rows = [["", "width", "blocks", *labels], ["---", *["---:"] * (2 + len(labels))]]
    for case, result in found:
        reached = [_against(_reached(case, result, found)[each], GOALS[each]) for each in GOALS]
        figures = _figures(result, result.report.step_time.model_flops)
        others = ("compile, CPU s", "tokens/s, estimated", "MFU, estimated, %")
        sizes = [str(case.shape.width), str(case.shape.blocks)]
        rows.append([case.topology.name, *sizes, *reached, *(_shown(figures[o]) for o in others)])
    return [f"| {' | '.join(row)} |" for row in rows]


def _reached(
    case: Case, result: Result, found: Sequence[tuple[Case, Result]]
) -> dict[str, float | None]:
    """Return the figures that have goals; None where there is none."""
    report, compiled, time = result.report, result.compiled, result.report.step_time
    ranks = {other.topology.num_ranks: each for other, each in found if other.is_like(case)}
    at_16 = ranks.get(16) if case.topology.num_ranks == 64 else None
    values = (
        100 * report.blocking_bytes / report.wire_bytes,
        report.wire_bytes / report.minimum_wire_bytes if report.minimum_wire_bytes else None,
        compiled.code / MIB,
        time.total / max(time.compute, time.blocking + time.overlapped),
        compiled.cpu_seconds / at_16.compiled.cpu_seconds if at_16 else None,
    )
    return dict(zip(GOALS, values, strict=True))


def _against(value: float | None, most: float) -> str:
    return f"**{_shown(value)}**" if value is not None and value > most else _shown(value)


def _by_kind(report: Report) -> dict[str, float]:
    figures: dict[str, float] = {}
    for each in report.traffic:
        label = f"{each.kind}, {'hidden' if each.overlapped else 'blocking'}, MB"
        figures[label] = figures.get(label, 0) + each.wire_bytes / MB
    return figures


if __name__ == "__main__":
    sys.exit(main())
