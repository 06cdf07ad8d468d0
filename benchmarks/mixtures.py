"""Compile one training step of a mixture of experts for TPU: ours, and JAX's.

    python benchmarks/mixtures.py --topology v5p:4x4x4 --model mixtral --layers 4

``ours`` is ``examples/llm/mixtures.py``; ``expert`` is that with experts cut over ``--experts``
ranks, ``capacity`` with at most an even share of tokens besides. ``jax`` is a scan over layers with
JAX's megablox and splash attention kernels (``jax_mixture.py``). All have one text per rank, AdamW
with fp32 state, bf16 compute and layers that are recomputed in backward, in the steady state.
Figures are as in ``tpu_compile``.


The second table is of what experts compute and exchange in a step, as the compiled programs have
it, over the least that can be: what kernels state, what batched products have by their shapes, and
tensors that travel along the axis, times the trips of their loops.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tpu_compile import MB, Result, in_child, table, tell
from xla_fsdp.nn.experts.megablox import height_of
from xla_fsdp.preflight.api import report_on
from xla_fsdp.preflight.compile.compiler import CompileError, compile_program, compiler_environment
from xla_fsdp.preflight.read.hlo import Module
from xla_fsdp.preflight.read.traffic import collectives_of
from xla_fsdp.preflight.topologies import GIB, Topology, find_topology
from xla_fsdp.preflight.trace.program import Traced
from xla_fsdp.tpu_flags import compiler_flags

SIZES: dict[str, dict[str, int]] = {
    "mixtral": {"width": 4096, "ffn": 14336, "experts": 8, "choices": 2, "vocabulary": 32000},
    "qwen3": {
        "width": 2048,
        "ffn": 768,
        "experts": 128,
        "choices": 8,
        "kv_heads": 4,
        "vocabulary": 151936,
    },
}
LAYERS = {"mixtral": 32, "qwen3": 48}


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, and print the table; return the exit code."""
    options = _parser().parse_args(argv)
    words = shlex.join(sys.argv[1:] if argv is None else argv)
    print(f"    python benchmarks/mixtures.py {words}\n")
    results = list(_results(options.model, find_topology(options.topology), options))
    fits = " | ".join("yes" if each.report.fits else each.report.shortage for each in results)
    lines = table(results)
    print("\n".join([*lines[:2], f"| fits | {fits} |", *lines[2:]]))
    heads = [COUNTED, ["---"] * 3 + ["---:"] * (len(COUNTED) - 3)]
    counts = [[options.model, options.topology, *_counted(each, options)] for each in results]
    print("\n" + "\n".join(f"| {' | '.join(row)} |" for row in [*heads, *counts]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--topology", default="v5p:4x4x4")
    parser.add_argument("--model", default="mixtral", help=", ".join(SIZES))
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=4, help="ranks that share experts")
    parser.add_argument("--only", default="ours,expert,capacity,jax", metavar="NAME,...")
    parser.add_argument("--max_host_mem", type=float, default=10, metavar="GIB")
    return parser


def _results(model: str, topology: Topology, options: argparse.Namespace) -> Iterator[Result]:
    for name in options.only.split(","):
        tell(f"{model} on {topology.name}: {name}")
        try:
            yield _examine(name, model, topology, options)
        except CompileError as error:
            print(f"{name}: {error}\n")


def _examine(name: str, model: str, topology: Topology, options: argparse.Namespace) -> Result:
    of = _lowered_by_jax if name == "jax" else _traced
    traced = in_child(of, name, model, topology, options)
    [program] = traced.programs
    flags = "" if name == "jax" else compiler_flags()
    most = round(options.max_host_mem * GIB)
    compiled = compile_program(program, topology, max_host_mem=most, flags=flags)
    report = report_on(traced, [compiled], topology, {})
    tokens = topology.num_ranks * options.length
    return Result(name, report, compiled, program, flags, tokens)


def _traced(name: str, model: str, topology: Topology, options: argparse.Namespace) -> Traced:
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from examples.llm import mixtures
    from xla_fsdp.preflight.api import mesh_on
    from xla_fsdp.preflight.trace.tracing import trace_step

    how: dict[str, Any] = {"model": model, "length": options.length}
    how["layers"] = options.layers or LAYERS[model]
    if name != "ours":
        axes = {"shard": topology.num_ranks // options.experts, "expert": options.experts}
        how["mesh"] = mesh_on(topology, axes)
    if name == "capacity":
        how["capacity"] = 1.0
    return trace_step(lambda: mixtures.step(**how), topology.coords)


def _lowered_by_jax(
    name: str, model: str, topology: Topology, options: argparse.Namespace
) -> Traced:
    os.environ.update(compiler_environment(topology))
    import jax_mixture

    blocks = options.layers or LAYERS[model]
    shape = jax_mixture.Shape(options.length, blocks, **SIZES[model])
    return jax_mixture.lowered(shape, topology)


# ---------------------------------------------------------------- what experts compute and exchange

COUNTED = (
    "model", "slice", "program", "experts' FLOPs / least", "with tiles computed again, at most",
    "exchanged, MB", "least, MB", "exchanged / least",
)  # fmt: skip
PRODUCTS = 3 + 2 + 6
"""Of each pair with one of an expert's three matrices, at least: forward, those that recomputing
needs (not the last one's results), and for the gradients of rows and of weights."""
TRAVELS = 2 + 1 + 2
"""Of a row or its result between ranks, in the same phases."""


def _counted(result: Result, options: argparse.Namespace) -> Iterator[str]:
    model = options.model
    sizes, module = SIZES[model], Module(result.compiled.text)
    yield result.name
    width, pairs = sizes["width"], options.length * sizes["choices"]
    ranks = 1 if result.name in ("ours", "jax") else options.experts
    experts, layers = sizes["experts"] // ranks, options.layers or LAYERS[model]
    share = 2 * PRODUCTS * layers * pairs * width * sizes["ffn"]
    found = flops_of_experts(module, experts) / share
    yield f"{found:.2f}"
    again = 1.0 if result.name == "capacity" else _again(pairs, experts, ranks)
    yield "" if result.name == "jax" else f"{found * again:.2f}"  # its tiles are others
    least = TRAVELS * layers * pairs * width * 2 * (ranks - 1) // ranks
    sent = exchanged(module, options.length, sizes, ranks) if ranks > 1 else 0
    yield from (f"{sent / MB:,.0f}", f"{least / MB:,.0f}", f"{sent / least:.2f}" if least else "")


def flops_of_experts(module: Module, experts: int) -> float:
    """Return the operations of all products of rows with weights of ``experts`` experts."""
    total = 0.0
    for execution in module.executions:
        inside = execution.computation
        for each in inside.instructions:
            if each.kernel_flops and "gmm" in each.origin:
                total += each.kernel_flops * execution.times
            elif each.opcode in ("dot", "convolution"):
                arrays = [inside.by_name[name].sizes for name in each.operands] + [each.sizes]
                # [experts, a, b] by [experts, b, c] is [experts, a, c]; no other is in three dims
                if all(len(sizes) == 3 and experts in sizes for sizes in arrays):
                    product = math.prod(map(math.prod, arrays)) // experts
                    total += 2 * math.isqrt(product) * execution.times
    return total


def _again(pairs: int, experts: int, ranks: int) -> float:
    """Return the most of what kernels compute over what they state, if experts have an even load:
    a tile in which several of them have rows is computed for each, and one without not at all."""
    height = height_of(pairs // ranks, experts)  # of the rows that a rank's experts have in a round
    return (-(-pairs // (ranks * height)) + experts - 1) * height / pairs


def exchanged(module: Module, length: int, sizes: dict[str, int], ranks: int) -> int:
    """Return the bytes of rows, their results and weights that leave this rank for others that
    share its experts. Gathered parameters have other groups, and sums of gradients other dims."""
    width, choices = sizes["width"], sizes["choices"]
    rows = {(length * choices // ranks, width)}
    tokens = {(each, dim) for each in (length // ranks, length) for dim in (width, choices)}
    return sum(
        each.total_bytes
        for each in collectives_of(module)
        if each.kind == "all-to-all"
        or (each.kind == "collective-permute" and each.sizes in rows)
        or (each.group_size == ranks and each.sizes in tokens)
    )


if __name__ == "__main__":
    sys.exit(main())
