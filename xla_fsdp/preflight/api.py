"""``preflight``: report on a training step of the user's own code.

The step is traced as rank 0 would trace it and compiled by the real TPU compiler in a child
process; the report is read from the compiled program. Nothing is executed.
"""

from __future__ import annotations

import inspect
import itertools
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xla_fsdp.preflight.compile.compiler import Compiled, check_installed, compile_program
from xla_fsdp.preflight.read.estimate import estimate, timeline
from xla_fsdp.preflight.read.findings import about_groups, about_host_memory, all_findings
from xla_fsdp.preflight.read.hlo import Module
from xla_fsdp.preflight.read.liveness import GATHERED, Peak, fullest_moment, most_gathered
from xla_fsdp.preflight.read.report import Buffer, Memory, Report, Traffic, fastest_of, options_text
from xla_fsdp.preflight.read.traffic import Collective, collectives_of
from xla_fsdp.preflight.topologies import GIB, Topology, find_topology
from xla_fsdp.preflight.trace.program import GRADIENT, PARAMETER, STATE, Program, Traced
from xla_fsdp.tpu_flags import compiler_flags

if TYPE_CHECKING:  # it loads torch, which the compiler's child process does not need
    from xla_fsdp.distributed.mesh import Mesh


class PreflightWarning(UserWarning):
    """The configuration makes the step send more than necessary."""


def preflight(
    build_step: Callable[..., Callable[[], Any]],
    *,
    topology: str = "v5e:4x4",
    mesh: Mesh | Mapping[str, int] | None = None,
    max_host_mem: int = 10 * GIB,
    cache_dir: str | Path | None = None,
    flags: str = "",
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Report:
    """Find out what a training step needs on a TPU slice, without one.

    Args:
        build_step: called as ``build_step(**options)``; builds the wrapped model and its optimizer
            and returns a function that makes one training step. Tensors on the XLA device hold
            zeros while it runs. Build models that are too large for this machine on the meta
            device: then only one rank's shards take memory.
        topology: name of the slice, as ``find_topology`` takes it.
        mesh: passed on as ``build_step(mesh=mesh, **options)``; a mapping of axis names to sizes,
            outermost axis first, is laid out on the slice by ``init_mesh``.
        max_host_mem: bytes of host memory that the compiler may use; a compilation that needs more
            is killed.
        cache_dir: folder of compiled programs (default: in the user's cache folder).
        flags: more compiler flags, as in ``LIBTPU_INIT_ARGS``; they win over those that torch_xla
            and ``launch`` set.
        progress: called with a line of text while waiting.
        options: passed to ``build_step``, and shown in the report.

    Returns:
        The report on a step in the steady state, when the optimizer's state exists already.

    Raises:
        ValueError: if there is no such topology, the mesh does not have its ranks, ``build_step``
            does not take the options, or the step traces nothing.
        CompileError: if the TPU compiler is not installed, refuses the program or needs too much
            memory.
        RuntimeError: if this process uses torch_xla with other devices than CPUs.
    """
    slice_ = find_topology(topology)
    if mesh is not None:
        options = {**options, "mesh": mesh_on(slice_, mesh)}
    check_options(build_step, options)
    check_installed()
    tell = progress or (lambda text: None)
    tell(f"{topology}: tracing")
    report = compiled_report(
        traced_on(slice_, build_step, options),
        slice_,
        describe_options(options),
        lambda seconds: tell(f"{topology}: compiling, {seconds:.0f} s"),
        flags,
        max_host_mem=max_host_mem,
        cache_dir=cache_dir,
    )
    for warning in report.warnings:
        warnings.warn(f"{topology}: {warning}", PreflightWarning, stacklevel=2)
    return report


def traced_on(
    topology: Topology, build_step: Callable[..., Callable[[], Any]], options: Mapping[str, Any]
) -> Traced:
    """Trace the step that ``build_step(**options)`` returns, as a rank of the slice would."""
    from xla_fsdp.preflight.trace.tracing import trace_step  # loads torch_xla

    folder = Path.cwd()
    try:
        return trace_step(lambda: build_step(**options), topology.coords)
    finally:
        os.chdir(folder)  # else where the user's code went is where reports and children would be


def compiled_report(
    traced: Traced,
    topology: Topology,
    options: dict[str, Any],
    progress: Callable[[float], None],
    flags: str,
    **limits: Any,
) -> Report:
    """Compile a step's programs, or read them from the cache, and report on them; ``limits`` are
    ``max_host_mem`` and ``cache_dir`` of ``compile_program``."""
    limits.update(flags=compiler_flags(flags), progress=progress)
    compiled = [compile_program(program, topology, **limits) for program in traced.programs]
    return report_on(traced, compiled, topology, options)


def fastest(
    build_step: Callable[..., Callable[[], Any]],
    choices: Mapping[str, Sequence[Any]],
    **options: Any,
) -> Report:
    """Choose options by what ``preflight`` says of all combinations.

        best = fastest(build_step, {"method": ["ring", "ulysses"]}, topology="v5e:4x4")
        method = best.options["method"]

    A combination that raises is left out, with a ``PreflightWarning``.

    Args:
        build_step: as for ``preflight``.
        choices: values of its options, by name.
        options: of ``preflight``, and others of ``build_step``.

    Returns:
        The report on that which makes most of the chip by estimate, among those that fit.

    Raises:
        ValueError: if none fits; or what the last combination raises, if all do.
    """
    reports, failed = [], None
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        try:
            reports.append(preflight(build_step, **options, **chosen))
        except Exception as error:  # the user's code may raise anything
            failed = error
            warnings.warn(f"{options_text(chosen)}: {error}", PreflightWarning, stacklevel=2)
    if failed is not None and not reports:
        raise failed
    best = fastest_of(reports)
    if best is None:
        sizes = ", ".join(f"{options_text(each.options)} lacks {each.shortage}" for each in reports)
        raise ValueError(f"none of {len(reports)} configurations fits: {sizes}")
    return best


def mesh_on(topology: Topology, mesh: Mesh | Mapping[str, int]) -> Mesh:
    """Return the mesh, or lay out sizes by axis name on the slice.

    Raises:
        ValueError: if the number of ranks is not the slice's.
        TypeError: for anything else.
    """
    from xla_fsdp.distributed.mesh import Mesh, init_mesh

    if isinstance(mesh, Mapping):
        return init_mesh(tuple(mesh.values()), tuple(mesh), coords=topology.coords)
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh is {mesh!r}; give the result of init_mesh, or sizes by name of the axis, such "
            f"as {{'replica': 2, 'shard': {topology.num_ranks // 2}}}"
        )
    if mesh.world_size != topology.num_ranks:
        raise ValueError(
            f"the mesh lays out {mesh.world_size} ranks, but {topology.name} has "
            f"{topology.num_ranks}; give sizes that multiply to {topology.num_ranks}"
        )
    return mesh


def check_options(build_step: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise ValueError if ``build_step`` cannot be called with these keywords."""
    signature = inspect.signature(build_step)
    try:
        signature.bind(**options)
    except TypeError as error:
        names = ", ".join(options) or "no options"
        called = getattr(build_step, "__name__", type(build_step).__name__)
        raise ValueError(f"{called}{signature} cannot be called with {names}: {error}") from None


def describe_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as a report shows them: a mesh by its axes."""
    from xla_fsdp.distributed.mesh import Mesh

    return {
        name: " x ".join(f"{axis.name} {axis.size}" for axis in value.axes)
        if isinstance(value, Mesh)
        else value
        for name, value in options.items()
    }


# ---------------------------------------------------------------- from compiled programs


def report_on(
    traced: Traced, compiled: Sequence[Compiled], topology: Topology, options: dict[str, Any]
) -> Report:
    """Report on a step; ``compiled`` are its programs in the order of ``traced.programs``."""
    modules = [Module(each.text) for each in compiled]
    by_module = [
        collectives_of(module, program.labels)
        for module, program in zip(modules, traced.programs, strict=True)
    ]
    collectives = [each for found in by_module for each in found]
    needed = [
        _bytes_needed(*each, topology) for each in zip(traced.programs, compiled, strict=True)
    ]
    largest = needed.index(max(needed))
    peak = fullest_moment(modules[largest])
    on_host = max(each.on_host for each in compiled)
    host_capacity = topology.chip.host_capacity
    return Report(
        topology=topology.name,
        num_ranks=topology.num_ranks,
        options=options,
        memory=_memory(traced.programs[largest], compiled[largest], peak, topology),
        full_parameters=max(map(most_gathered, modules)),
        largest=tuple(Buffer(*each) for each in peak.largest),
        traffic=_by_kind(collectives),
        minimum_wire_bytes=traced.minimum_wire_bytes,
        step_time=estimate(
            modules,
            collectives,
            traced.model_flops,
            sum(each.on_host for each in compiled),
            topology,
        ),
        compile_seconds=sum(each.seconds for each in compiled),
        compile_cpu_seconds=sum(each.cpu_seconds for each in compiled),
        host_bytes=max(each.peak_host_bytes for each in compiled),
        offloaded_bytes=on_host,
        host_capacity=host_capacity,
        warnings=(*about_groups(traced.parameters), *about_host_memory(on_host, host_capacity)),
        findings=tuple(all_findings(traced, compiled, compiled[largest], modules, collectives)),
        timeline=timeline(modules[largest], by_module[largest], topology),
    )


def _bytes_needed(program: Program, compiled: Compiled, topology: Topology) -> int:
    refused = topology.chip.usable_bytes + compiled.too_large_by if compiled.too_large_by else 0
    return max(compiled.peak, refused) + sum(program.others.values())


def _memory(program: Program, compiled: Compiled, peak: Peak, topology: Topology) -> Memory:
    by_role = Counter(program.others)
    for each in program.inputs:
        by_role[each.role] += each.nbytes
    others = sum(program.others.values())
    held = {role: by_role[role] for role in (PARAMETER, GRADIENT, STATE)}
    # The compiler's total of temporaries is exact; ``peak``, an estimate, divides it into parts.
    in_gathers = peak.by_purpose.get(GATHERED, 0)
    gathered = min(in_gathers, compiled.temporaries)
    activations = min(peak.total - in_gathers, compiled.temporaries - gathered)
    return Memory(
        parameters=held[PARAMETER],
        gradients=held[GRADIENT],
        optimizer_state=held[STATE],
        data=compiled.arguments + others - sum(held.values()),
        outputs=compiled.outputs,
        gathered_parameters=gathered,
        activations=activations,
        scratch=compiled.temporaries - gathered - activations,
        code=compiled.code,
        capacity=topology.chip.usable_bytes,
        too_large_by=compiled.too_large_by + others if compiled.too_large_by else 0,
    )


def _by_kind(collectives: Sequence[Collective]) -> tuple[Traffic, ...]:
    counts: dict[tuple[str, str, int, bool], list[int]] = defaultdict(lambda: [0, 0])
    for each in collectives:
        entry = counts[each.kind, each.dtype, each.group_size, each.overlapped]
        entry[0] += each.times
        entry[1] += each.total_bytes
    return tuple(Traffic(*key, *counts[key]) for key in sorted(counts))
