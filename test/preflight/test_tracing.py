"""What one pretended rank traces: meshes, minimum, warnings, errors of the user's code.

Nothing is compiled. A child traces every case, as torch_xla must not start in pytest's process.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections import Counter
from functools import partial
from typing import Any

import pytest

from test.common.large_head import BATCH
from test.common.large_head import LENGTH as LENGTH_OF_HEAD
from test.common.large_head import WIDTH as WIDTH_OF_HEAD
from test.common.ranks import cached_outcome, run_python, run_warm
from test.common.tpu_steps import LENGTH, VOCABULARY, WIDTH, build

SIZE, SHARDS, REPLICAS = 16, 8, 2
BLOCK = 12 * WIDTH**2 + 13 * WIDTH
ELEMENTS = BLOCK + 2 * VOCABULARY * WIDTH  # a block, embedding and head
TOPOLOGY = "v5e:4x4"
DEPTHS = {"two blocks": (2, False), "loop of two": (2, True), "loop of five": (5, True)}
KERNELS: dict[str, dict[str, Any]] = {
    "own": {},
    "own kept": {"remat": "attention"},
    "torch_xla's": {"kind": "flash"},
    "its other one, checkpointed": {"kind": "splash", "layers": "checkpointed"},
    "more heads": {"kind": "wide"},
    "in a context": {"kind": "wide", "mesh": {"shard": 2, "context": 2}},
}
OFFLOADED = {"offloaded": True, "kept": False}
IN_UNIT = {"a unit reads": "reads", "computed on the host": "on the host"}


def traced(name: str) -> Any:
    """What is known of one case; run in the child."""
    from xla_fsdp.distributed.mesh import init_mesh, mesh_of
    from xla_fsdp.preflight.read.findings import about_groups
    from xla_fsdp.preflight.topologies import find_topology
    from xla_fsdp.preflight.trace.tracing import trace_step

    if name == "little memory":
        return traced_in_little_memory()
    if name == "ended":
        return traced_without_inputs()
    if name == "meta":
        return traced_on_meta()
    if name == "reads":
        return traced_that_reads()
    if name == "frees":
        return traced_that_frees()
    if name == "others":
        return traced_in_two_programs()
    if name == "pieces":
        return traced_in_pieces()
    if name in IN_UNIT:
        return traced_in_a_unit(IN_UNIT[name])
    if name in KERNELS:
        return traced_with_kernels(**KERNELS[name])
    if name == "names":
        return traced_with_names()
    coords = find_topology(TOPOLOGY).coords
    scattered = [3 * rank % SIZE for rank in range(SIZE)]
    meshes = {
        "all shards": None,
        "hybrid": init_mesh((REPLICAS, SHARDS), ("replica", "shard"), coords=coords),
        "scattered": mesh_of(scattered, (REPLICAS, SHARDS), ("replica", "shard")),
    }
    depth, loop = DEPTHS.get(name, (2, True) if name in OFFLOADED else (1, False))
    options = {"mesh": meshes.get(name), "offload": OFFLOADED.get(name, False)}
    found = trace_step(lambda: build(depth=depth, scan=loop, **options), coords)
    return {
        "collectives": Counter(sorted(key.partition(".")[0] for key in found.programs[0].labels)),
        "placed": [
            found.programs[0].hlo.count(word)
            for word in (b"annotate_device_placement", b"pinned_host")
        ],
        "flops": found.model_flops,
        "minimum": sum(each.gathered_bytes + each.reduced_bytes for each in found.parameters),
        "warnings": list(about_groups(found.parameters)),
        "inputs": sum(each.nbytes for each in found.programs[0].inputs if each.role != "data"),
    }


def traced_with_kernels(mesh: dict[str, int] | None = None, **options: Any) -> dict[str, Any]:
    """Two layers with attention, as one loop."""
    from test.common.tpu_attention import build
    from xla_fsdp.preflight.api import mesh_on
    from xla_fsdp.preflight.topologies import find_topology
    from xla_fsdp.preflight.trace.tracing import trace_step

    slice_ = find_topology("v5e:2x2")
    if mesh is not None:
        options["mesh"] = mesh_on(slice_, mesh)
    found = trace_step(lambda: build(length=256, **options), slice_.coords)
    [program] = found.programs
    return {
        "kernels": program.hlo.count(b"tpu_custom_call"),
        "costs": program.hlo.count(b"cost_estimate"),
        "flops": found.model_flops,
    }


def traced_without_inputs() -> dict[str, Any]:
    """A step that reads the next of two batches."""
    from xla_fsdp.preflight.trace.tracing import trace_step

    def build_ending() -> Any:
        batches = iter([1, 2])
        return lambda: next(batches)

    try:
        trace_step(build_ending, [(0, 0, 0, 0, 0)])
    except ValueError as error:
        return {"error": str(error)}
    return {"error": ""}


def traced_in_pieces() -> dict[str, Any]:
    """FLOPs of models whose heads are used in pieces."""
    from unittest import mock

    from test.common.large_head import step_of
    from xla_fsdp.nn import large_weights
    from xla_fsdp.nn.chunked import chunks
    from xla_fsdp.preflight.topologies import find_topology
    from xla_fsdp.preflight.trace.tracing import trace_step

    coords = find_topology("v5e:2x2").coords
    small = (
        mock.patch.object(large_weights, "LEAST_BYTES", 2**16),
        mock.patch.object(large_weights, "PIECE_BYTES", 2**17),
        mock.patch.object(chunks, "CHUNK_BYTES", 2**17),
    )
    with small[0], small[1], small[2]:
        return {
            kind: trace_step(partial(step_of, kind), coords).model_flops
            for kind in ("plain", "cross entropy")
        }


def traced_that_reads() -> dict[str, Any]:
    """A step that branches on a value, and goes on with what that was computed from."""
    import torch
    import torch_xla

    from xla_fsdp.preflight.topologies import find_topology
    from xla_fsdp.preflight.trace.tracing import trace_step

    def build_reading() -> Any:
        weight = torch.zeros(VOCABULARY, WIDTH, device=torch_xla.device())

        def step() -> None:
            places = torch.arange(LENGTH, device=weight.device)[None].cumsum(-1)
            if (places[:, -1] == 1).all():
                raise ValueError("reads as zeros while traced")
            weight.add_((weight @ weight[places[0]].T).sum())
            torch_xla.sync()

        return step

    found = trace_step(build_reading, find_topology("v5e:2x2").coords)
    return {"programs": len(found.programs), "flops": found.model_flops}


def traced_that_frees() -> dict[str, Any]:
    """A step that drops an input, in whose place new tensors may lie."""
    import torch
    import torch_xla

    from xla_fsdp.preflight.topologies import find_topology
    from xla_fsdp.preflight.trace.tracing import trace_step

    def build_freeing() -> Any:
        device = torch_xla.device()
        weight, held = torch.zeros(5, 5).to(device), [torch.zeros(3).to(device)]

        def step() -> None:
            shift = held.pop().sum()
            results = [weight + shift for _ in range(50)]
            torch_xla.sync()
            held.append(torch.zeros(3).to(device))
            results.clear()

        return step

    [program] = trace_step(build_freeing, find_topology("v5e:2x2").coords).programs
    return {"aliases": len(program.aliases)}


def traced_in_two_programs() -> dict[str, Any]:
    """What lies in memory beside the inputs of each program, where backward ends one or not."""
    import torch
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel
    from xla_fsdp.preflight.topologies import find_topology
    from xla_fsdp.preflight.trace.tracing import trace_step

    def build_layer(*, ends: bool) -> Any:
        layer = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        model = XlaFullyShardedDataParallel(layer, sync_on_finalization=ends)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        averages = [torch.ones(50, 70).to(torch_xla.device())]  # which no step reads

        def step() -> None:
            model(torch.ones(LENGTH, WIDTH).to(torch_xla.device())).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch_xla.sync()
            assert averages

        return step

    coords = find_topology("v5e:2x2").coords
    found = [trace_step(partial(build_layer, ends=ends), coords).programs for ends in (True, False)]
    return {"others": [[dict(each.others) for each in programs] for programs in found]}


def traced_in_a_unit(kind: str) -> dict[str, Any]:
    """A wrapped layer that reads a value, or whose weight the host computes of what was gathered:
    the kinds of collectives in each program."""
    import torch
    import torch_xla
    from torch import nn

    from xla_fsdp import XlaFullyShardedDataParallel
    from xla_fsdp.preflight.topologies import find_topology
    from xla_fsdp.preflight.trace.tracing import trace_step

    class Reading(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = super().forward(x)
            return result + 1 if result.sum().item() else result

    def build_layer() -> Any:
        layer = Reading(WIDTH, WIDTH) if kind == "reads" else nn.Linear(WIDTH, WIDTH)
        if kind == "on the host":
            nn.utils.parametrizations.weight_norm(layer)
        model = XlaFullyShardedDataParallel(layer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            model(torch.ones(LENGTH, WIDTH).to(torch_xla.device())).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch_xla.sync()

        return step

    found = trace_step(build_layer, find_topology("v5e:2x2").coords)
    names = [sorted(each.labels) for each in found.programs]
    return {"kinds": [sorted({name.partition(".")[0] for name in each}) for each in names]}


def traced_with_names() -> dict[str, Any]:
    """Labels of a step's collectives, and whether its program is that of one without names."""
    from contextlib import nullcontext
    from unittest import mock

    from xla_fsdp.preflight.topologies import find_topology
    from xla_fsdp.preflight.trace import tracing

    coords = find_topology("v5e:2x2").coords

    def trace() -> Any:
        return tracing.trace_step(lambda: build(depth=1), coords).programs[0]

    named = trace()
    with mock.patch.object(tracing, "units_named", nullcontext):
        plain = trace()
    return {
        "labels": sorted(filter(None, named.labels.values())),
        "collectives": len(named.labels),
        "same": (named.digest, {*named.labels}) == (plain.digest, {*plain.labels}),
        "plain labels": len([*filter(None, plain.labels.values())]),
    }


@cached_outcome
def outcomes(*names: str) -> dict[str, dict[str, Any]]:
    """What is known of these cases (default: those of quick tests)."""
    names = names or ("all shards", "hybrid", "scattered", "ended", *OFFLOADED)
    done = run_warm("-m", "test.preflight.test_tracing", *names)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def wire(shards: int, replicas: int) -> float:
    """Bytes that a step in bf16 has to send, the root gathered once and blocks twice."""
    gathers = ELEMENTS + BLOCK
    shard = 2 / shards
    reduced = ELEMENTS * shard * (shards - 1 + 2 * (replicas - 1) / replicas)
    return gathers * shard * (shards - 1) + reduced


def test_inputs_that_end_while_steps_are_traced_are_told() -> None:
    expected = "the step has no further input; let it have enough to be traced three times"
    assert outcomes()["ended"]["error"] == expected


@pytest.mark.slow
def test_a_loop_is_one_program_for_any_depth_and_counts_all_its_products() -> None:
    two, looped, five = outcomes(*DEPTHS).values()
    assert looped["collectives"] == five["collectives"] != two["collectives"]
    assert looped["minimum"] == two["minimum"] < five["minimum"]
    assert looped["flops"] == two["flops"] < five["flops"]


def test_a_program_for_a_tpu_keeps_the_inputs_of_blocks_on_the_host_if_asked_to() -> None:
    placed = {name: outcomes()[name]["placed"] for name in OFFLOADED}
    # There, and back: of the last block before the loop, and of the next one in it.
    assert placed == {"offloaded": [3, 1], "kept": [0, 0]}


def test_kernels_are_traced_without_a_tpu() -> None:
    pytest.importorskip("jax")
    found = outcomes(*KERNELS)
    # In the forward loop, and in backward: again, unless it is kept, and two for the gradients.
    # Checkpointed for each of two layers. torch_xla's splash attention has one kernel for the
    # gradients, and runs forward in backward.
    assert {name: each["kernels"] for name, each in found.items()} == {
        "own": 4, "own kept": 3, "torch_xla's": 4, "its other one, checkpointed": 8,
        "more heads": 4, "in a context": 4,
    }  # fmt: skip
    assert found["own"]["costs"] == 4
    assert 2 * found["in a context"]["flops"] == found["more heads"]["flops"]
    assert found["own"]["flops"] == found["own kept"]["flops"] > found["torch_xla's"]["flops"]


def test_shards_over_all_ranks_send_the_least() -> None:
    assert outcomes()["all shards"]["minimum"] == pytest.approx(wire(SIZE, 1), rel=1e-3)


def test_model_flops_are_three_times_the_forwards_products_however_often_they_are_computed() -> (
    None
):
    products = 12 * WIDTH**2 + VOCABULARY * WIDTH + 2 * LENGTH * WIDTH  # the last: attention
    tokens = 2 * LENGTH  # two texts
    assert outcomes()["all shards"]["flops"] == 3 * 2 * tokens * products


@pytest.mark.slow
def test_products_in_pieces_are_counted() -> None:
    forward = 2 * BATCH * LENGTH_OF_HEAD * WIDTH_OF_HEAD * (2 * WIDTH_OF_HEAD + 3072)
    assert outcomes("pieces")["pieces"] == {"plain": 3 * forward, "cross entropy": 3 * forward}


def test_a_mesh_is_seen_by_the_wrapping_and_counts_its_replicas() -> None:
    found = outcomes()["hybrid"]
    assert found["minimum"] == pytest.approx(wire(SHARDS, REPLICAS), rel=1e-3)
    assert found["collectives"]["all-reduce"] > 0
    assert outcomes()["all shards"]["collectives"].get("all-reduce", 0) == 0
    # Parameters and two moments in fp32, of which a rank has one shard.
    assert found["inputs"] == pytest.approx(3 * 4 * ELEMENTS / SHARDS, rel=0.03)  # padding
    assert found["warnings"] == []


def test_groups_off_the_torus_reduce_in_one_step_and_are_warned_of() -> None:
    found, usual = outcomes()["scattered"], outcomes()["hybrid"]
    assert found["collectives"]["reduce-scatter"] < usual["collectives"]["reduce-scatter"]
    [warning] = found["warnings"]
    assert warning.startswith("ranks 0, 3, 6, 9, 12, 15, 2, 5 fill no box on the torus in order")
    assert "`embedding.weight`" in warning


def test_only_what_is_changed_in_place_takes_the_place_of_an_input() -> None:
    assert outcomes("reads", "frees", *IN_UNIT)["frees"]["aliases"] == 0


def test_a_step_may_read_and_go_on_with_what_it_has() -> None:
    found = outcomes("reads", "frees", *IN_UNIT)["reads"]
    assert found == {"programs": 2, "flops": 3 * 2 * VOCABULARY * LENGTH * WIDTH}


def test_what_a_program_does_not_take_is_known() -> None:
    [[backward, step], [whole]] = outcomes("others")["others"]["others"]
    assert backward.pop("optimizer state") == 4 * WIDTH**2 / 4
    for others in (backward, step, whole):
        assert set(others) == {"data"}
        assert 4 * 50 * 70 <= others["data"] < 4 * 50 * 70 + 10_000


@pytest.mark.parametrize("name", IN_UNIT)
def test_a_unit_s_forward_may_read_what_it_has_computed(name: str) -> None:
    first, *_, last = outcomes("reads", "frees", *IN_UNIT)[name]["kinds"]
    assert first == ["all-gather"]
    assert "reduce-scatter" in last


def test_collectives_have_the_names_of_units_and_the_program_has_not() -> None:
    found = outcomes("names")["names"]
    assert len(found["labels"]) == found["collectives"]
    phases = {label.partition(": ")[2] for label in found["labels"]}
    assert {"all-gather, forward", "all-gather, backward"} <= phases
    assert any(label.startswith("root: ") for label in found["labels"])
    assert found["same"]
    assert found["plain labels"] == 0


def test_what_a_step_raises_is_told_in_one_line() -> None:
    pytest.importorskip("libtpu")
    run = ("-m", "xla_fsdp.preflight", "test.common.tpu_steps:build", "--set", "depth=1")
    done = run_warm(*run, "--sweep", "fails=build,step,nothing")
    assert done.returncode == 1
    built, stepped, empty = done.stderr.splitlines()
    start = f"xla_fsdp.preflight: {TOPOLOGY} depth=1 fails"
    where = "(--traceback shows where)"
    assert built == f"{start}=build: ValueError: no model of that name {where}"
    assert stepped == f"{start}=step: ValueError: the batch does not fit the mask {where}"
    assert empty.startswith(f"{start}=nothing: TypeError: build_step() returned a NoneType")
    shown = run_warm(*run, "--set", "fails=step", "--traceback")
    assert shown.returncode == 1
    assert "in step" in shown.stderr
    assert shown.stderr.splitlines()[-1].endswith("does not fit the mask")


WIDE, LAYERS, FEW_RANKS = 16384, 8, "v5e:2x2"


def traced_in_little_memory() -> dict[str, Any]:
    """A rank whose shards and moments are 6 GiB; run in the child."""
    import torch
    import torch_xla
    from torch import nn

    from xla_fsdp import XlaFullyShardedDataParallel
    from xla_fsdp.preflight.topologies import find_topology
    from xla_fsdp.preflight.trace.tracing import trace_step, use_cpu_device
    from xla_fsdp.xla import ops
    from xla_fsdp.xla.fake_rank import ZeroPages
    from xla_fsdp.xla.graph import buffer_id

    use_cpu_device()
    hollow = ZeroPages()
    kinds = [((3, 5), torch.bool), ((), torch.bfloat16), ((0, 2), torch.int64)]
    kinds += [((2,), torch.float8_e4m3fn)] * 2
    made = [hollow.make(*kind) for kind in kinds]
    read: list[float] = []

    def build_wide() -> Any:
        options: dict[str, Any] = {"param_init_fn": lambda module: None}
        with torch.device("meta"):
            layers = [nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS)]
        model = nn.Sequential(*(XlaFullyShardedDataParallel(each, **options) for each in layers))
        optimizer = torch.optim.AdamW(model.parameters())
        rows = torch.ones(1, WIDE).to(torch_xla.device())
        scale = nn.Parameter(torch.full((), 3.0).to(torch_xla.device()))

        def step() -> None:
            (model(rows * scale.detach().item()).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            ops.sync()
            weight = model[0].weight  # type: ignore[union-attr]
            read.extend([scale.detach().item(), float(weight.detach().cpu().sum())])

        return step

    found = trace_step(build_wide, find_topology(FEW_RANKS).coords)
    programs = [each for each in found.programs if len(each.aliases) > 1]
    return {
        "read": read[:2],
        "kinds": [(tuple(each.shape), each.dtype) for each in made] == kinds,
        "distinct": len({buffer_id(each) for each in made}),
        "zeros": not any(each.cpu().float().any() for each in made),
        "inputs": [
            Counter(each.role for each in program.inputs if each.nbytes > 2**20)
            for program in programs
        ],
        "aliases": [len(program.aliases) for program in programs],
        "state": sum(each.nbytes for program in programs for each in program.inputs),
        "peak": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def test_shards_and_moments_take_no_memory_and_are_told_apart() -> None:
    done = run_warm("-m", "test.preflight.test_tracing", "little memory")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["little memory"]
    assert found["state"] > 6 * 2**30
    assert found["peak"] < 2 * 2**30  # half of it torch_xla, half a layer on its way
    assert found["inputs"] == [{"parameters": LAYERS, "optimizer state": 2 * LAYERS}]
    assert found["aliases"] == [3 * LAYERS]
    assert (found["kinds"], found["distinct"], found["zeros"]) == (True, 5, True)
    # What is small has its values, and what is large can still be read.
    assert found["read"] == [3.0, 0.0]


def traced_on_meta() -> int:
    """A Llama of transformers, built on the meta device by its own code; run in the child."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from xla_fsdp import parallelize
    from xla_fsdp.preflight.topologies import find_topology
    from xla_fsdp.preflight.trace.tracing import trace_step

    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}

    def build_llama() -> Any:
        import torch_xla

        with torch.device("meta"):
            plain = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))
        model, optimizer, _ = parallelize(plain, torch.optim.AdamW, "plain")
        tokens = torch.zeros(2, 16, dtype=torch.long).to(torch_xla.device())

        def step() -> None:
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    found = trace_step(build_llama, find_topology("v5e:2x2").coords)
    return sum(each.numel for each in found.parameters)


def test_a_model_of_transformers_on_meta_needs_no_way_to_its_values() -> None:
    done = run_warm("-m", "test.preflight.test_tracing", "meta")
    assert done.returncode == 0, done.stderr
    parameters = json.loads(done.stdout.splitlines()[-1])["meta"]
    block = 2 * 64**2 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    assert parameters == 2 * block + 2 * 128 * 64 + 64


LARGE_WIDTH, LARGE_TOPOLOGY = 6144, "v5e:8x8"
LARGE_BLOCK = 4 * 12 * LARGE_WIDTH**2


def traced_large() -> dict[str, Any]:
    """A model of more bytes than this machine has memory; run in the child."""
    from xla_fsdp.preflight.topologies import find_topology
    from xla_fsdp.preflight.trace.tracing import trace_step

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    depth = 1 + memory // LARGE_BLOCK
    coords = find_topology(LARGE_TOPOLOGY).coords
    found = trace_step(lambda: build(depth=depth, width=LARGE_WIDTH, meta=True), coords)
    [program] = found.programs
    return {
        "memory": memory,
        "model": 4 * sum(each.numel for each in found.parameters),
        "shards": sum(each.nbytes for each in program.inputs),
        "peak": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


@pytest.mark.slow
def test_a_model_larger_than_this_machines_memory_is_traced_unit_by_unit() -> None:
    done = run_python("-m", "test.preflight.test_tracing", timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["model"] > found["memory"]
    assert found["shards"] == pytest.approx(3 * found["model"] / 64, rel=0.01)
    # One unit on its way to its shards, and torch_xla itself.
    assert found["peak"] < 2 * LARGE_BLOCK + 2 * 2**30


if __name__ == "__main__":
    names = sys.argv[1:]
    print(json.dumps({name: traced(name) for name in names} if names else traced_large()))
