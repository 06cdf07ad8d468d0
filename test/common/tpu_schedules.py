"""Where gathers begin in the schedules that the real TPU compiler makes of small steps.

python -m test.common.tpu_schedules FOLDER '{"prefetch": 2}' ... prints one JSON object for each
step of ``tpu_steps.build_in_place``; compiled programs are kept in the folder. ``offload`` in place
of options: what the compiler says of parameters in host memory. ``head``: the bytes of the largest
tensor that loops of ``tpu_steps.build_streamed`` copy. ``ordinary``: the bytes of tensors that
operations outside of loops write which compute nothing, for units by hand of equal blocks, and the
most that a rank sends in one collective.
``parts``: the elements of what matrix products of a loop over wide blocks compute.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from test.common.tpu_steps import build as build_ordinary
from test.common.tpu_steps import build_in_place, build_streamed
from xla_fsdp.preflight import CompileError
from xla_fsdp.preflight.compile.compiler import compile_program
from xla_fsdp.preflight.read.hlo import Instruction, Module
from xla_fsdp.preflight.read.liveness import most_gathered
from xla_fsdp.preflight.read.traffic import collectives_of
from xla_fsdp.preflight.topologies import GIB, find_topology
from xla_fsdp.preflight.trace.tracing import trace_step

TOPOLOGY = find_topology("v5e:2x2")
PRODUCTS = ("convolution", "dot")
ODD = 50257  # rows that no number of ranks divides


def compiled(folder: Path, build: Callable[[], Callable[[], Any]]) -> Module:
    """The step's largest program."""
    traced = trace_step(build, TOPOLOGY.coords)
    texts = [
        compile_program(program, TOPOLOGY, max_host_mem=6 * GIB, cache_dir=folder).text
        for program in traced.programs
    ]
    return Module(max(texts, key=len))


def schedule(folder: Path, build: Callable[[], Callable[[], Any]]) -> dict[str, Any]:
    module = compiled(folder, build)
    reduced = [each for each in collectives_of(module) if each.kind == "reduce-scatter"]
    return {
        "starts": list(starts(module)),
        "full": most_gathered(module),
        "reduced": sorted({each.dtype for each in reduced}),
        "reduced_bytes": sum(each.total_bytes for each in reduced),
    }


def copied(module: Module) -> int:
    """The bytes of the largest tensor that a loop copies as it is."""
    bodies = [
        module.computations[each.attribute("body")].instructions
        for execution in module.executions
        for each in execution.computation.instructions
        if each.opcode == "while"
    ]
    copies = [each for body in bodies for each in body if each.opcode == "copy"]
    return max((array.nbytes for each in copies for array in each.arrays), default=0)


def written(module: Module) -> dict[str, list[int]]:
    """The bytes of the tensors that are cut, padded or filled outside of loops, or have a value
    added, by opcode; the largest first. Of fused operations the last counts."""
    found: dict[str, list[int]] = {"slice": [], "pad": [], "broadcast": [], "add": []}
    for each in module.entry.instructions:
        called = module.computations.get(each.attribute("calls"))
        last = each if called is None else called.instructions[-1]
        if last.opcode in found:
            found[last.opcode] += [array.nbytes for array in last.arrays]
    return {opcode: sorted(sizes, reverse=True) for opcode, sizes in found.items()}


def multiplied(module: Module) -> list[int]:
    """The numbers of elements that matrix products compute, each once."""
    products = (
        each
        for computation in module.computations.values()
        for each in computation.instructions
        if each.opcode in PRODUCTS
    )
    return sorted({math.prod(array.dims) for each in products for array in each.arrays})


def starts(module: Module) -> Iterator[int]:
    """For every all-gather, in order: how many matrix products run before it begins."""
    products, begun = 0, set()
    for outer in module.entry.instructions:
        inner = list(_inside(module, outer))
        for each in inner:
            is_gather = each.opcode in ("all-gather", "all-gather-start")
            name = each.attributes.partition('op_name="')[2].partition('"')[0] or each.name
            if is_gather and name not in begun:  # pieces of one have one name
                begun.add(name)
                yield products
        products += sum(each.opcode in PRODUCTS for each in inner)


def _inside(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    yield instruction
    called = module.computations.get(instruction.attribute("calls"))
    for each in called.instructions if called is not None else ():
        yield from _inside(module, each)


def offloaded() -> Callable[[], None]:
    """A step that computes with, and updates, parameters marked for host memory."""
    import torch_xla
    from torch_xla.experimental import stablehlo_custom_call as calls

    to_host, to_device = calls._place_to_host_impl, calls._place_to_device_impl
    device = torch_xla.device()
    params = [torch.zeros(4096, 4096).to(device) for _ in range(4)]
    loss = torch.zeros(1).to(device)

    def step() -> None:
        x = torch.ones(128, 4096).to(device)
        for param in params:
            x = torch.tanh(x @ to_device(param))
        for param in params:
            param.copy_(to_host(to_device(param) * 0.9 + x.mean()))
        loss.copy_(x.sum().reshape(1))
        torch_xla.sync()

    return step


def main(folder: str, *wanted: str) -> None:
    for text in wanted:
        if text == "offload":
            try:
                schedule(Path(folder), offloaded)
                found: dict[str, Any] = {"refusal": ""}
            except CompileError as error:
                found = {"refusal": str(error)}
        elif text == "head":
            build = partial(build_streamed, pieces=32)
            found = {"copied": copied(compiled(Path(folder), build))}
        elif text == "ordinary":
            build = partial(build_ordinary, depth=8, width=512, vocabulary=ODD, rows=1)
            module = compiled(Path(folder), build)
            most = max(each.wire_bytes for each in collectives_of(module))
            found = {**written(module), "sent": most}
        elif text == "parts":
            build = partial(build_ordinary, depth=4, width=2048, scan=True)
            found = {"multiplied": multiplied(compiled(Path(folder), build))}
        else:
            options = json.loads(text)
            found = schedule(Path(folder), lambda options=options: build_in_place(**options))
        print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
