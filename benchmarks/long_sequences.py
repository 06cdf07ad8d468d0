"""Compile one training step of Llama 8B on long sequences for TPU: ours, and JAX's.

    python benchmarks/long_sequences.py --topology v6e:8x8 --lengths 8192,32768

``ours`` is ``examples/llm/llama.py`` with ``attention`` of ``xla_fsdp``: layers as one loop over
stacked parameters, streamed embedding and head, an optimizer that steps in backward. ``offloaded``
is that with the layers' inputs in the host's memory, ``ring`` and ``ulysses`` have each sequence
cut over ``--context`` ranks besides. ``jax`` is a scan over layers with JAX's splash attention
kernel (``jax_llama.py``). ``ordinary`` are layers, embedding and head that are wrapped and no more,
and ``alone`` is the model without any sharding, both as in ``tpu_compile``. All have one sequence
per rank, or per context, AdamW with fp32 state, bf16 compute and layers that are recomputed in
backward, in the steady state. Figures are as in ``tpu_compile``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tpu_compile import Result, in_child, table, tell
from xla_fsdp.preflight.api import report_on
from xla_fsdp.preflight.compile.compiler import CompileError, compile_program, compiler_environment
from xla_fsdp.preflight.topologies import GIB, Topology, find_topology
from xla_fsdp.preflight.trace.program import Traced
from xla_fsdp.tpu_flags import compiler_flags

SIZES = {"width": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336}
LEAN = {"lean": True, "attention": "xla_fsdp"}
OFFLOADED = {**LEAN, "offload": True}
OURS: dict[str, dict[str, Any]] = {
    "ours": LEAN,
    "offloaded": OFFLOADED,
    "ring": {**OFFLOADED, "method": "ring"},
    "ulysses": {**OFFLOADED, "method": "ulysses"},
}
PROGRAMS = (*OURS, "ordinary", "jax", "alone")


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, and print the tables; return the exit code."""
    options = _parser().parse_args(argv)
    command = shlex.join(sys.argv[1:] if argv is None else argv)
    lines = []
    for name in options.topology or ["v6e:8x8"]:
        for length in map(int, options.lengths.split(",")):
            lines += _section(find_topology(name), length, options)
    print(f"    python benchmarks/long_sequences.py {command}\n")
    print("\n".join(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--topology", action="append", help="default v6e:8x8; may be repeated")
    parser.add_argument("--lengths", default="8192", metavar="LENGTH,...")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--sizes", default="", metavar="NAME=N,...", help="others than the 8B's")
    parser.add_argument("--context", type=int, default=4, help="ranks that share a sequence")
    parser.add_argument("--only", default="ours,jax", metavar="NAME,...", help=", ".join(PROGRAMS))
    parser.add_argument("--max_host_mem", type=float, default=10, metavar="GIB")
    parser.add_argument("--cache_dir", type=Path, help="default: in the user's cache folder")
    return parser


def _section(topology: Topology, length: int, options: argparse.Namespace) -> list[str]:
    title = f"{length:,} tokens on {topology.name}"
    results, problems = [], []
    fits = []
    for name in options.only.split(","):
        tell(f"{title}: {name}")
        try:
            result = _examine(name, topology, length, options)
        except CompileError as error:
            problems += ["", f"{name}: {error}"]
            continue
        short = f"no, short of {result.report.shortage}"
        fits.append("yes" if result.report.fits else short)
        results.append(result)
    figures = table(results)
    width = figures[0].count("|") - 1 if figures else 0
    row = f"| fits | {' | '.join(fits)} |{' |' * (width - 1 - len(fits))}"
    return ["", f"## {title}", "", *figures[:2], row, *figures[2:], *problems]


def _sharers(name: str, options: argparse.Namespace) -> int:
    return options.context if "method" in OURS.get(name, ()) else 1


def _examine(name: str, topology: Topology, length: int, options: argparse.Namespace) -> Result:
    if name == "jax":
        traced = in_child(_lowered_by_jax, topology, length, options.blocks, _sizes(options))
    else:
        traced = in_child(_traced, name, topology, length, options)
    [program] = traced.programs
    flags = "" if name == "jax" else compiler_flags()
    compiled = compile_program(
        program,
        topology,
        max_host_mem=round(options.max_host_mem * GIB),
        cache_dir=options.cache_dir,
        flags=flags,
    )
    tokens = topology.num_ranks // _sharers(name, options) * length
    report = report_on(traced, [compiled], topology, {})
    return Result(name, report, compiled, program, flags, tokens)


def _traced(name: str, topology: Topology, length: int, options: argparse.Namespace) -> Traced:
    sys.path.append(str(Path(__file__).resolve().parents[1] / "examples/llm"))
    import llama
    from xla_fsdp.preflight.api import mesh_on
    from xla_fsdp.preflight.trace.tracing import trace_step

    sharers = _sharers(name, options)
    mesh = {}
    if sharers > 1:
        sizes = {"shard": topology.num_ranks // sharers, "context": sharers}
        mesh = {"mesh": mesh_on(topology, sizes)}
    sizes = {**_sizes(options), "blocks": options.blocks}
    if name in ("ordinary", "alone"):
        return trace_step(lambda: _by_hand(name, llama, sizes, length), topology.coords)
    how = {**sizes, **OURS[name], **mesh, "length": length}
    return trace_step(lambda: llama.step(**how), topology.coords)


def _sizes(options: argparse.Namespace) -> dict[str, int]:
    given = (each.split("=") for each in options.sizes.split(",") if each)
    return {**SIZES, **{name: int(size) for name, size in given}}


def _by_hand(name: str, llama: Any, sizes: dict[str, int], length: int) -> Callable[[], None]:
    """Return a step of the Llama in ordinary nesting, or ``alone``, which nobody shards."""
    import torch
    import torch_xla

    from gpt import part_of
    from large_models import leave_alone, optimizer_of
    from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module

    device = torch_xla.device()
    model = llama.build_model(llama.Sizes(**sizes), attention="xla_fsdp")
    layers = model.model.layers
    if name == "alone":
        model.to(torch.bfloat16).to_empty(device=device)
        for layer in layers:
            checkpoint_module(layer)
        stepped, hand_over = part_of(model)
    else:
        options: Any = {"compute_dtype": torch.bfloat16, "param_init_fn": leave_alone}
        for number, layer in enumerate(layers):
            layers[number] = XlaFullyShardedDataParallel(checkpoint_module(layer), **options)
        model = XlaFullyShardedDataParallel(model, **options)
        stepped, hand_over = list(model.parameters()), lambda: None
    optimizer = optimizer_of(stepped)
    tokens, targets = (torch.zeros(1, length, dtype=torch.long).to(device) for _ in range(2))

    def step() -> None:
        llama.next_token_loss(model, tokens, targets).backward()
        hand_over()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()

    return step


def _lowered_by_jax(topology: Topology, length: int, blocks: int, sizes: dict[str, int]) -> Traced:
    os.environ.update(compiler_environment(topology))
    import jax_llama

    return jax_llama.lowered(jax_llama.Shape(length, blocks, **sizes), topology)


if __name__ == "__main__":
    sys.exit(main())
