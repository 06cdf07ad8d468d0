"""What in a program is worth a look, in words.

Always true: a finding names what it is about, with figures, and says what to do where something
can be done. Nothing is found twice: collectives of one kind are told together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from xla_fsdp.preflight.hlo import Instruction, Module
from xla_fsdp.preflight.program import ParameterTraffic
from xla_fsdp.preflight.traffic import Collective

MB = 10**6

WORTH_SAYING = 1 * MB

"""Traffic and memory below this many bytes are not spoken of."""


def about_groups(parameters: Sequence[ParameterTraffic]) -> Iterator[str]:
    """Groups of ranks whose reductions cannot go along the torus axis by axis."""
    by_group: dict[tuple[int, ...], list[str]] = {}
    for each in parameters:
        if each.off_torus:
            by_group.setdefault(each.off_torus, []).append(each.name)
    for group, names in by_group.items():
        ranks = ", ".join(map(str, group[:8])) + (", ..." if len(group) > 8 else "")
        yield (
            f"ranks {ranks} fill no box on the torus in order, so the gradients of "
            f"{_listed(names)} are reduced in one step, of which the compiler may make a full "
            f"all-reduce with twice the traffic. Make groups by init_mesh, which follows the torus"
        )


def about_reductions(
    collectives: Sequence[Collective],
    operand_sizes: Mapping[str, int],
    parameters: Sequence[ParameterTraffic],
) -> Iterator[str]:
    """Gradients that travel as full all-reduces."""
    for each in collectives:
        if each.kind == "all-reduce" and each.only_sliced and each.total_bytes >= WORTH_SAYING:
            names = _names(operand_sizes.get(each.origin, 0), parameters)
            yield (
                f"the gradient of {names} is reduced by a full all-reduce, of which each rank uses "
                f"its slice: {each.total_bytes / MB:.0f} MB, twice what a reduce-scatter sends. "
                f"The compiler does this for a group that is not one ring; make groups boxes on "
                f"the torus, so that they can be reduced axis by axis"
            )


def about_bytes(wire: int, minimum: int, *, activations: bool) -> Iterator[str]:
    """More traffic than necessary; of tensor parallelism, which sends activations, too, how much it
    is."""
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


def about_overlap(collectives: Sequence[Collective]) -> Iterator[str]:
    """Collectives that compute waits for."""
    blocking: Counter[str] = Counter()
    for each in collectives:
        if not each.overlapped:
            blocking[each.kind] += each.total_bytes
    for kind, nbytes in blocking.most_common():
        if nbytes >= WORTH_SAYING:
            yield f"{nbytes / MB:.0f} MB of {kind} are not hidden under compute"


def about_dtypes(modules: Sequence[Module], wanted: str) -> Iterator[str]:
    """Matrix products in another dtype than the parameters are gathered in."""
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


def about_loops(modules: Sequence[Module]) -> Iterator[str]:
    """Loops whose trips the compiler does not know."""
    unknown = [name for module in modules for name in module.unknown_trips]
    if unknown:
        yield (
            f"the number of iterations of {len(unknown)} loop(s) is not known; what is in them "
            f"counts once ({', '.join(unknown[:3])})"
        )


def about_estimates(modules: Sequence[Module]) -> Iterator[str]:
    """Instructions whose time the compiler does not know."""
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


def about_programs(count: int) -> Iterator[str]:
    """A step in pieces."""
    if count > 1:
        yield (
            f"the step runs as {count} programs: something reads a value or syncs in its middle "
            f"(.item(), print, sync_on_finalization), and nothing is overlapped across"
        )


def about_inputs(kept: int) -> Iterator[str]:
    """Parameters and optimizer state that the program does not update in place."""
    if kept >= WORTH_SAYING:
        yield (
            f"{kept / MB:.0f} MB of results do not take the place of an input: gradients kept "
            f"until the next step (call optimizer.zero_grad() before the sync), or outputs"
        )


def about_offloading(on_host: int) -> Iterator[str]:
    """Activations in the memory of the host."""
    if on_host >= WORTH_SAYING:
        yield (
            f"{on_host / MB:.0f} MB of activations per rank go to the host's memory and come back "
            f"in every step. The estimated step has no time for that: it is hidden if twice these "
            f"bytes, at the speed of the link between host and chip, take less than the compute"
        )


def _names(numel: int, parameters: Sequence[ParameterTraffic]) -> str:
    matching = [each.name for each in parameters if numel in (each.padded, each.numel)]
    if not matching:
        return f"parameters of {numel:,} elements together" if numel else "some parameters"
    return _listed(matching) + (" of its size" if len(matching) > 3 else "")


def _listed(names: Sequence[str]) -> str:
    """A few names, and how many more there are."""
    listed = ", ".join(f"`{name}`" for name in names[:3])
    return listed if len(names) <= 3 else f"{listed} and {len(names) - 3} more"


def _operand_dtype(by_name: Mapping[str, Instruction], product: Instruction) -> str:
    dtypes = [by_name[name].dtypes for name in product.operands if name in by_name]
    return max((found[0] for found in dtypes if found), default="")
