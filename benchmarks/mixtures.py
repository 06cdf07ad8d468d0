"""Compile one training step of a mixture of experts for TPU: ours, and JAX's.

    python benchmarks/mixtures.py --topology v5p:4x4x4 --model mixtral --layers 4

``ours`` is ``examples/llm/mixtures.py``; ``expert`` is that with experts cut over ``--experts``
ranks, ``capacity`` with at most an even share of tokens besides. ``jax`` is a scan over layers with
JAX's megablox and splash attention kernels (``jax_mixture.py``). All have one text per rank, AdamW
with fp32 state, bf16 compute and layers that are recomputed in backward, in the steady state.
Figures are as in ``tpu_compile``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpu_compile import Result, in_child, table, tell
from xla_fsdp.preflight.api import report_on
from xla_fsdp.preflight.compile.compiler import CompileError, compile_program, compiler_environment
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
    topology, results = find_topology(options.topology), []
    print(f"    python benchmarks/mixtures.py {shlex.join(sys.argv[1:] if argv is None else argv)}")
    for name in options.only.split(","):
        tell(f"{options.model} on {topology.name}: {name}")
        try:
            results.append(_examine(name, topology, options))
        except CompileError as error:
            print(f"\n{name}: {error}")
    fits = " | ".join("yes" if each.report.fits else each.report.shortage for each in results)
    lines = table(results)
    print("\n".join(["", *lines[:2], f"| fits | {fits} |", *lines[2:]]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--topology", default="v5p:4x4x4")
    parser.add_argument("--model", default="mixtral", choices=SIZES)
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=4, help="ranks that share experts")
    parser.add_argument("--only", default="ours,expert,capacity,jax", metavar="NAME,...")
    parser.add_argument("--max_host_mem", type=float, default=10, metavar="GIB")
    return parser


def _examine(name: str, topology: Topology, options: argparse.Namespace) -> Result:
    of = _lowered_by_jax if name == "jax" else _traced
    traced = in_child(of, name, topology, options)
    [program] = traced.programs
    flags = "" if name == "jax" else compiler_flags()
    most = round(options.max_host_mem * GIB)
    compiled = compile_program(program, topology, max_host_mem=most, flags=flags)
    report = report_on(traced, [compiled], topology, {})
    tokens = topology.num_ranks * options.length
    return Result(name, report, compiled, program, flags, tokens)


def _traced(name: str, topology: Topology, options: argparse.Namespace) -> Traced:
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from examples.llm import mixtures
    from xla_fsdp.preflight.api import mesh_on
    from xla_fsdp.preflight.trace.tracing import trace_step

    how: dict[str, Any] = {"model": options.model, "length": options.length}
    how["layers"] = options.layers or LAYERS[options.model]
    if name != "ours":
        axes = {"shard": topology.num_ranks // options.experts, "expert": options.experts}
        how["mesh"] = mesh_on(topology, axes)
    if name == "capacity":
        how["capacity"] = 1.0
    return trace_step(lambda: mixtures.step(**how), topology.coords)


def _lowered_by_jax(name: str, topology: Topology, options: argparse.Namespace) -> Traced:
    os.environ.update(compiler_environment(topology))
    import jax_mixture

    blocks = options.layers or LAYERS[options.model]
    shape = jax_mixture.Shape(options.length, blocks, **SIZES[options.model])
    return jax_mixture.lowered(shape, topology)


if __name__ == "__main__":
    sys.exit(main())
