"""The collectives of a step before and after the TPU compiler: groups, dtypes, and where they are.

``python -m test.common.tpu_collectives TOPOLOGY FILE OPTION=VALUE ...`` traces and compiles
``tpu_steps.build`` and pickles both texts.
"""

from __future__ import annotations

import itertools
import math
import pickle
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from test.common.ranks import cached_outcome, run_python
from xla_fsdp.preflight.read.hlo import Computation, Instruction, Module
from xla_fsdp.preflight.trace.program import Program

REDUCTIONS = ("reduce-scatter", "all-reduce")
GROUPED = (*REDUCTIONS, "all-gather", "all-to-all")

Groups = frozenset[tuple[int, ...]]
Pairs = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Texts:
    """HLO of the steady step's only program, as torch_xla lowered and as the compiler left it."""

    before: str
    after: str
    program: Program


@dataclass(frozen=True)
class Found:
    """A collective.

    Args:
        kind: opcode; what the compiler makes of a reduce-scatter may be called all-reduce.
        groups: of ranks; of a permutation, its pairs.
        dtype: of the first operand.
        origin: name of torch_xla's instruction.
    """

    kind: str
    groups: Groups
    dtype: str
    origin: str


@cached_outcome
def texts(topology: str, *options: str) -> Texts:
    """Both texts of ``tpu_steps.build`` with these options."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "texts")
        run = ("-m", "test.common.tpu_collectives", topology, str(file), *options)
        done = run_python(*run, timeout=900)
        assert done.returncode == 0, done.stderr
        traced, after = pickle.loads(file.read_bytes())
        program = Path(folder, "program")
        program.write_bytes(traced.hlo)
        code = "import sys; from jax._src.lib import xla_client as c; "
        code += (
            "print(c.XlaComputation(open(sys.argv[1], 'rb').read()).get_hlo_module().to_string())"
        )
        done = run_python("-c", code, str(program), env={"JAX_PLATFORMS": "cpu"})
        assert done.returncode == 0, done.stderr
        return Texts(done.stdout, after, traced)


def collectives(module: Module, num_ranks: int) -> Iterator[Found]:
    """Collectives of all computations that are run; each once, though it may be split."""
    seen = set()
    for execution in module.executions:
        for each in execution.computation.instructions:
            kind = each.opcode.removesuffix("-start")
            if kind in (*GROUPED, "collective-permute"):
                groups = groups_of(each, num_ranks)
                found = Found(kind, groups, _dtype(execution.computation, each), _name(each))
                key = (found, each.find(r"channel_id=(\d+)"))
                if key not in seen:
                    seen.add(key)
                    yield found


def _name(each: Instruction) -> str:
    return each.origin.rpartition("/")[2]  # without the loops that it is in


def _dtype(inside: Computation, each: Instruction) -> str:
    return inside.by_name[each.operands[0]].dtypes[0]


def groups_of(each: Instruction, num_ranks: int) -> Groups:
    """Ranks of each group, or the pairs of a permutation."""
    if listed := re.search(
        r"(?:replica_groups|source_target_pairs)=\{(\{[^=]*?\})\}", each.attributes
    ):
        rows = re.findall(r"\{([\d, ]+)\}", listed.group(1))
        return frozenset(tuple(map(int, row.split(","))) for row in rows)
    iota = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", each.attributes
    )
    if iota is None:
        return frozenset({tuple(range(num_ranks))})
    shape, dims, order = (
        tuple(map(int, (part or "").split(","))) if part else () for part in iota.groups()
    )
    ranks = np.arange(math.prod(dims)).reshape(dims)
    rows = (ranks.transpose(order) if order else ranks).reshape(shape)
    return frozenset(tuple(row) for row in rows.tolist())


def covers_once(groups: Groups, num_ranks: int) -> bool:
    """Whether every rank is in one group, and all are of one size."""
    ranks = sorted(itertools.chain.from_iterable(groups))
    return ranks == list(range(num_ranks)) and len({len(group) for group in groups}) == 1


def rings(pairs: Groups) -> list[list[int]] | None:
    """The cycles of a permutation; None if a rank sends or receives twice, or does not."""
    follows = dict(pairs)  # type: ignore[arg-type]
    if len(follows) != len(pairs) or set(follows) != set(follows.values()):
        return None
    found, left = [], set(follows)
    while left:
        ring = [min(left)]
        while (after := follows[ring[-1]]) != ring[0]:
            ring.append(after)
        left -= set(ring)
        found.append(ring)
    return found


def _main(topology: str, file: str, *options: str) -> None:
    from test.common.tpu_steps import build
    from xla_fsdp.preflight.compile.compiler import compile_program
    from xla_fsdp.preflight.topologies import find_topology
    from xla_fsdp.preflight.trace.tracing import trace_step
    from xla_fsdp.tpu_flags import compiler_flags

    slice_ = find_topology(topology)
    keywords: dict[str, Any] = {
        name: int(value) for name, value in (option.split("=") for option in options)
    }
    programs = trace_step(lambda: build(**keywords), slice_.coords).programs
    program = max(programs, key=lambda each: len(each.hlo))
    with tempfile.TemporaryDirectory() as cache:
        compiled = compile_program(program, slice_, cache_dir=Path(cache), flags=compiler_flags(""))
    Path(file).write_bytes(pickle.dumps((program, compiled.text)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
