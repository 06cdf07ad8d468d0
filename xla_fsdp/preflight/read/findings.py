"""Findings: sentences about what could be better in a step, with figures and a remedy if known."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from xla_fsdp.preflight.compile.compiler import Compiled
from xla_fsdp.preflight.read.hlo import Instruction, Module
from xla_fsdp.preflight.read.report import MB
from xla_fsdp.preflight.read.traffic import Collective
from xla_fsdp.preflight.topologies import MIB
from xla_fsdp.preflight.trace.program import ParameterTraffic, Traced

# Traffic and memory of fewer bytes are not reported.
WORTH_SAYING = 1 * MB


def all_findings(
    traced: Traced,
    compiled: Sequence[Compiled],
    largest: Compiled,
    modules: Sequence[Module],
    collectives: Sequence[Collective],
) -> Iterator[str]:
    """Yield all findings about a step; ``largest`` is the program that needs most memory."""
    yield from about_programs(len(modules))
    yield from about_reductions(collectives)
    yield from about_bytes(
        sum(each.total_bytes for each in collectives),
        traced.minimum_wire_bytes,
        activations=any(each.is_tensor_parallel for each in traced.parameters),
    )
    yield from about_overlap(collectives)
    yield from about_dtypes(modules, _gathered_dtype(collectives))
    yield from about_outputs(largest.outputs)
    yield from about_loops(modules)
    yield from about_estimates(modules)
    yield from about_offloading(max(each.on_host for each in compiled))


def about_groups(parameters: Sequence[ParameterTraffic]) -> Iterator[str]:
    """Report groups of ranks whose reductions cannot go along the torus axis by axis."""
    by_group: dict[tuple[int, ...], list[str]] = {}
    for each in parameters:
        if each.off_torus:
            by_group.setdefault(each.off_torus, []).append(each.name)
    for group, names in by_group.items():
        ranks = ", ".join(map(str, group[:8])) + (", ..." if len(group) > 8 else "")
        listed = ", ".join(f"`{name}`" for name in names[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield (
            f"ranks {ranks} fill no box on the torus in order, so the gradients of "
            f"{listed}{more} are reduced in one step, of which the compiler may make a full "
            f"all-reduce with twice the traffic. Make groups by init_mesh, which follows the torus"
        )


def about_host_memory(on_host: int, capacity: int) -> Iterator[str]:
    """Report more offloaded activations than the host has memory for."""
    if on_host > capacity:
        yield (
            f"{on_host / MIB:,.0f} MiB of activations per rank go to the host's memory, which has "
            f"{capacity / MIB:,.0f} MiB for each: lower the batch, or offload_activations=False"
        )


def about_programs(count: int) -> Iterator[str]:
    """Report a step in several programs."""
    if count > 1:
        yield (
            f"the step runs as {count} programs: something reads a value or syncs in its middle "
            f"(.item(), print, sync_on_finalization), and nothing is overlapped across"
        )


def about_reductions(collectives: Sequence[Collective]) -> Iterator[str]:
    """Report gradients that are reduced by full all-reduces."""
    for each in collectives:
        if each.kind == "all-reduce" and each.only_sliced and each.total_bytes >= WORTH_SAYING:
            unit = f" (`{each.unit}`)" if each.unit else ""
            yield (
                f"gradients are reduced by a full all-reduce{unit}, of which each rank uses its "
                f"slice: {each.total_bytes / MB:.0f} MB, twice what a reduce-scatter sends. The "
                f"compiler does this for a group that is not one ring; make groups boxes on the "
                f"torus, so that they can be reduced axis by axis"
            )


def about_bytes(wire: int, minimum: int, *, activations: bool) -> Iterator[str]:
    """Report more bytes than the parameters need, which are ``minimum`` in the dtypes that units
    gather them in, and say how it can be less; tensor parallelism also sends activations."""
    more = minimum and wire > 1.05 * minimum and wire - minimum >= WORTH_SAYING
    if more and activations:
        yield (
            f"of {wire / MB:.0f} MB that are sent in a step, the parameters need "
            f"{minimum / MB:.0f} MB; the rest is activations of tensor parallelism and their "
            f"gradients"
        )
    elif more:
        yield (
            f"{wire / MB:.0f} MB are sent in a step, {wire / minimum:.2f} times the "
            f"{minimum / MB:.0f} MB that the parameters need"
        )
    elif minimum - wire >= WORTH_SAYING:
        yield (
            f"{wire / MB:.0f} MB are sent in a step, less than the {minimum / MB:.0f} MB of all "
            f"parameters in the dtypes that units gather them in: the compiler sends as bf16 what "
            f"is only used in products that round to bf16, and a large embedding sends the rows "
            f"that are looked up"
        )


def about_overlap(collectives: Sequence[Collective]) -> Iterator[str]:
    """Report collectives that compute waits for."""
    blocking: Counter[str] = Counter()
    units: dict[str, Counter[str]] = defaultdict(Counter)
    for each in collectives:
        if not each.overlapped:
            blocking[each.kind] += each.total_bytes
            units[each.kind][each.unit] += each.total_bytes
    for kind, nbytes in blocking.most_common():
        if nbytes >= WORTH_SAYING:
            largest = _largest(units[kind])
            where = f" ({largest})" if largest else ""
            yield f"{nbytes / MB:.0f} MB of {kind} are not hidden under compute{where}"


def _largest(by_unit: Counter[str]) -> str:
    """Say which units send most of what is not hidden, and how much has no name."""
    named = [(unit, nbytes) for unit, nbytes in by_unit.most_common() if unit]
    said = [
        f"`{unit}` {nbytes / MB:.0f} MB" for unit, nbytes in named[:3] if nbytes >= WORTH_SAYING
    ]
    rest = by_unit.total() - sum(nbytes for _, nbytes in named[: len(said)])
    if said and rest >= WORTH_SAYING:
        said.append(f"and {rest / MB:.0f} MB of units with less, or of which no name is left")
    return ", ".join(said)


def about_dtypes(modules: Sequence[Module], wanted: str) -> Iterator[str]:
    """Report matrix products in another dtype than the parameters are gathered in."""
    products: Counter[str] = Counter()
    for module in modules:
        for execution in module.executions:
            for each in execution.computation.instructions:
                if each.opcode in ("dot", "convolution"):
                    products[_operand_dtype(execution.computation.by_name, each)] += execution.times
    others = {dtype: count for dtype, count in products.items() if dtype != wanted and dtype}
    for dtype, count in sorted(others.items()):
        yield (
            f"{count} of {products.total()} matrix products take {dtype}, not {wanted}: look for "
            f"inputs or buffers in {dtype} inside the units"
        )


def about_outputs(nbytes: int) -> Iterator[str]:
    """Report results that do not reuse the memory of an input."""
    if nbytes >= WORTH_SAYING:
        yield (
            f"{nbytes / MB:.0f} MB of results do not take the place of an input: gradients kept "
            f"until the next step (call optimizer.zero_grad() before the sync), or outputs"
        )


def about_loops(modules: Sequence[Module]) -> Iterator[str]:
    """Report loops with an unknown trip count."""
    unknown = [name for module in modules for name in module.unknown_trips]
    if unknown:
        yield (
            f"the number of iterations of {len(unknown)} loop(s) is not known; what is in them "
            f"counts once ({', '.join(unknown[:3])})"
        )


def about_estimates(modules: Sequence[Module]) -> Iterator[str]:
    """Report instructions whose time the compiler cannot estimate."""
    unknown = [
        each.name
        for module in modules
        for execution in module.executions
        for each in execution.computation.instructions
        if each.has_no_estimate
    ]
    if unknown:
        yield (
            f"the compiler cannot say how long {len(unknown)} instruction(s) take "
            f"({', '.join(unknown[:3])}); the estimated step is without them"
        )


def about_offloading(on_host: int) -> Iterator[str]:
    """Report activations that are offloaded to the host's memory."""
    if on_host >= WORTH_SAYING:
        yield (
            f"{on_host / MB:.0f} MB of activations per rank go to the host's memory and come back "
            f"in every step. The estimate lets them travel beside all compute, at the published "
            f"speed of v4's link to its host"
        )


def _gathered_dtype(collectives: Sequence[Collective]) -> str:
    gathered: Counter[str] = Counter()
    for each in collectives:
        if each.kind == "all-gather":
            gathered[each.dtype] += each.total_bytes
    return gathered.most_common(1)[0][0] if gathered else "bf16"


def _operand_dtype(by_name: Mapping[str, Instruction], product: Instruction) -> str:
    dtypes = [by_name[name].dtypes for name in product.operands if name in by_name]
    return max((found[0] for found in dtypes if found), default="")
