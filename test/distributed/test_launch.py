"""``launch`` and ``python -m xla_fsdp.launch``: several real ranks on CPU.

Ranks are started once for each number of ranks, and their host values compared with numpy. Failures
that a launch survives share one child, so the next launch of the process is tested, too.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import linecache
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test.common.ranks import (
    ROOT,
    ChildError,
    environment,
    run_on_ranks,
    run_python,
    run_warm,
    warm_python,
)
from xla_fsdp import tpu_flags
from xla_fsdp.distributed import cpu_ranks, launcher
from xla_fsdp.xla import ops

SIZES = [1, 2, 3, 4, 8, 16]
STEPS = 4

# ---------------------------------------------------------------- cases, run on every rank


def row(rank: int) -> np.ndarray:
    """Five numbers (not a multiple of any tested number of ranks but 1), different on each rank."""
    return np.arange(1, 6, dtype=np.float32) + rank


def host(values: dict[str, Any]) -> dict[str, Any]:
    """Tensors as lists, after one sync: reading them one by one would compile each on each rank."""
    import torch_xla

    torch_xla.sync()
    return {name: tensor.detach().cpu().tolist() for name, tensor in values.items()}


def all_gather(rank: int) -> dict[str, Any]:
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    x = torch.from_numpy(row(rank)).to(torch_xla.device())
    out = torch.zeros(5 * xr.world_size(), device=x.device)
    returned = xm.all_gather(x, output=out, pin_layout=False)
    floats, flags = xm.all_gather([x.reshape(5, 1), (x > 3)], dim=0, pin_layout=False)
    values = {
        "pinned": xm.all_gather(x),
        "last dim": xm.all_gather(x.reshape(5, 1), dim=-1, pin_layout=False),
        "output": out,
        "list, floats": floats.reshape(-1),
        "list, flags": flags,
    }
    return {**host(values), "same object": returned is out}


def reduce_scatter(rank: int, world: int) -> dict[str, Any]:
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    x = torch.from_numpy(row(rank)).to(torch_xla.device()).repeat(world)
    scatter = functools.partial(
        xm.reduce_scatter, "sum", scale=0.5, scatter_dim=0, shard_count=world, pin_layout=False
    )
    out = torch.zeros(5, device=x.device)
    scatter(x, output=out)
    other = torch.zeros(2, 4, device=x.device)  # torch_xla gives it the shape of the result
    scatter(x, output=other)
    once, twice = scatter([x, 2 * x])
    outputs = {"output": out, "other output": other}
    return host({"plain": scatter(x), **outputs, "list, x": once, "list, 2 x": twice})


def all_reduce(rank: int) -> dict[str, Any]:
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    x = torch.from_numpy(row(rank)).to(torch_xla.device())
    kinds = ("sum", "min", "max", "mul")
    results = {kind: xm.all_reduce(kind, x) for kind in kinds}
    flags = torch.tensor([rank == 0, True, False], device=x.device)
    results["or"] = xm.all_reduce("or", flags)
    results["and"] = xm.all_reduce("and", flags)
    results["scaled"] = xm.all_reduce("sum", x, scale=0.25)
    results["int"] = xm.all_reduce("sum", x.int())
    results["bfloat16"] = xm.all_reduce("sum", x.bfloat16()).float()
    results["empty"] = xm.all_reduce("sum", x[:0])
    return host(results)


def all_reduce_in_place(rank: int) -> dict[str, Any]:
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    x = torch.from_numpy(row(rank)).to(torch_xla.device())
    scalar, leaf = x[0].clone(), x.clone().requires_grad_()
    version = leaf._version
    whole = torch.stack([x, x])
    tensors = [scalar, leaf, whole[1]]
    returned = xm.all_reduce("sum", tensors, scale=2.0)
    results = host({"scalar": scalar, "leaf": leaf, "whole": whole})
    return {**results, "same objects": returned is tensors, "version": leaf._version == version}


def groups(rank: int, world: int) -> dict[str, Any]:
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    halves = [list(range(world // 2)), list(range(world // 2, world))]
    x = torch.from_numpy(row(rank)).to(torch_xla.device())
    total = xm.all_reduce("sum", x, groups=halves)
    joined = xm.all_gather(x, groups=halves, pin_layout=False)
    with pytest.raises(ValueError, match="differ in size"):
        xm.all_gather(x, groups=[[0], list(range(1, world + 1))], pin_layout=False)
    return host({"total": total, "joined": joined})


def implicit_syncs(rank: int) -> list[Any]:
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    x = torch.from_numpy(row(rank)).to(torch_xla.device())
    total = xm.all_reduce("sum", x).sum()
    text = str(xm.all_reduce("max", x) * 2)
    (x * (rank + 1)).sum().item()  # local: the graphs of the ranks differ
    return [total.item(), bool(total > 0), text]


def rank_dependent(rank: int) -> list[Any]:
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    x = torch.from_numpy(row(rank)).to(torch_xla.device())
    extra = None
    if rank == 0:
        extra = (x.cos() ** 2 + x.sin() ** 2).sum()  # local ops in the graph of one rank
    total = xm.all_reduce("sum", x)
    torch_xla.sync()
    if rank == 0:
        again = x + 1
        torch_xla.sync()  # and a sync that only one rank makes
        print("rank 0 prints", again, file=io.StringIO())
    return [total.cpu().tolist(), None if extra is None else round(extra.item(), 4)]


def some_drop(rank: int) -> list[float]:
    """Gather what every second rank has dropped when it comes to the sync, and then reduce."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    x = torch.from_numpy(row(rank)).to(torch_xla.device())
    gathered = xm.all_gather(x, pin_layout=False)
    if rank % 2:
        del gathered
    torch_xla.sync()
    total = xm.all_reduce("sum", x)
    torch_xla.sync()
    return total.cpu().tolist()


def host_exchange(rank: int) -> dict[str, Any]:
    import torch_xla.core.xla_model as xm

    return {
        "rendezvous": xm.rendezvous("here", payload=b"r" * (rank + 1)),
        "mesh_reduce": xm.mesh_reduce("sum", float(rank), sum),
    }


def closures(rank: int) -> list[Any]:
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    x = torch.from_numpy(row(rank)).to(torch_xla.device())
    seen: list[float] = []
    total = xm.all_reduce("sum", x).sum()
    xm.add_step_closure(lambda t: seen.append(t.item()), args=(total,))
    before = list(seen)
    torch_xla.sync()
    return [before, seen]


def waits(rank: int, world: int) -> list[float]:
    """Wait for the device while one rank, each in its turn, has yet to start its execution."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    from xla_fsdp.xla.cpu_rank_patches import run_slot

    run: Any = run_slot().run
    gate = run.pass_gate

    def pass_late(late: int, number: int) -> None:
        gate(number)
        time.sleep(0.2 if number == late else 0)

    found = []
    for turn in range(world):
        xm.rendezvous("nobody is at the gate")
        # Every rank sets its own, which do the same.
        run.pass_gate = functools.partial(pass_late, turn)
        total = xm.all_reduce("sum", torch.from_numpy(row(rank)).to(torch_xla.device()))
        torch_xla.sync()
        xm.wait_device_ops()
        found.append(total[0].item())
        xm.rendezvous("all have waited")
        run.pass_gate = gate
    return found


def training(rank: int) -> dict[str, Any]:
    """A data-parallel loop over MpDeviceLoader, an evaluation, and how often XLA compiled."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    device = torch_xla.device()
    with launcher.one_rank_at_a_time():
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 1)
    first_weight = model.weight.tolist()
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.from_numpy(row(rank + step)).reshape(1, 5) for step in range(STEPS)]
    for _ in range(2):  # once the second is through, every rank has left the first
        xm.rendezvous("compiled")
    compiled = met.metric_data("CompileTime")[0]
    for batch in MpDeviceLoader(batches, device):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        xm.optimizer_step(optimizer)
    compiled = met.metric_data("CompileTime")[0] - compiled
    xm.rendezvous("counted")
    with torch.no_grad():
        outputs = [model(batch).sum() for batch in MpDeviceLoader(batches, device)]
    mean = xm.mesh_reduce("outputs", sum(o.item() for o in outputs), np.mean)
    weight = model.weight.detach().cpu().tolist()
    return {"first": first_weight, "weight": weight, "mean": mean, "compiled": compiled}


def launch_inside(rank: int) -> list[Any]:
    import torch_xla
    import torch_xla.distributed.xla_multiprocessing as xmp

    calls: list[Any] = []

    def note(index: int, name: str) -> str:
        calls.append((index, name))
        return name

    returned = launcher.launch(note, ("ours",), num_ranks=99)
    torch_xla.launch(note, args=("torch_xla.launch",))
    xmp.spawn(note, args=("xmp.spawn",))
    return [calls, returned]


def compiled(rank: int, **options: Any) -> dict[str, Any]:
    """Collectives inside of ``torch_xla.compile``, twice."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    def both(x: Any) -> Any:
        return xm.all_gather(x * 2), xm.all_reduce("sum", x)

    step = torch_xla.compile(both, **options)
    inputs = [torch.full((2,), value, device="xla") for value in (rank + 1.0, rank + 3.0)]
    return {"found": [[each.tolist() for each in step(x)] for x in inputs]}


def scans_of_torch_xla(rank: int) -> dict[str, Any]:
    """Outputs of nn.GRU, which torch_xla runs as a scan."""
    import torch
    import torch_xla

    from xla_fsdp import one_rank_at_a_time

    with one_rank_at_a_time():
        torch.manual_seed(rank)
        x = torch.randn(2, 3, 4)
        layer = torch.nn.GRU(4, 6, batch_first=True).to("xla")
    found = []
    for _ in range(2):
        output, _ = layer(x.to("xla"))
        layer.zero_grad()
        output.square().sum().backward()
        torch_xla.sync()
        found.append([output.detach().cpu(), layer.weight_hh_l0.grad.cpu()])
    again = torch.nn.GRU._orig(4, 6, batch_first=True)  # torch's own
    again.load_state_dict(layer.cpu().state_dict())
    again.zero_grad()
    output, _ = again(x)
    output.square().sum().backward()
    return {"found": found, "plain": [output.detach(), again.weight_hh_l0.grad]}


def cached_parametrization(rank: int) -> list[float]:
    """What the first rank reads of a weight, before and after a change, while others are inside
    ``parametrize.cached``, too."""
    import torch
    import torch_xla.core.xla_model as xm
    from torch.nn.utils import parametrize

    class Doubled(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    layer = parametrize.register_parametrization(torch.nn.Linear(1, 1), "weight", Doubled())
    found = []
    with contextlib.nullcontext() if rank == 0 else parametrize.cached():
        xm.rendezvous("others are inside")
        for value in (1.0, 3.0):
            with torch.no_grad():
                layer.parametrizations["weight"].original.fill_(value)
            with parametrize.cached():
                found.append(float(layer.weight))
        xm.rendezvous("the first rank has read")
    return found


def with_tracers(rank: int) -> list[dict[str, Any]]:
    """Both, by tracers of torch."""
    return [compiled(rank, full_graph=True), scans_of_torch_xla(rank)]


def every_case(rank: int, world: int) -> dict[str, Any]:
    """All of the above in one launch."""
    import torch

    cases: list[Callable[[int], Any]] = [all_gather, all_reduce, all_reduce_in_place, closures]
    cases += [implicit_syncs, rank_dependent, some_drop, host_exchange, training, launch_inside]
    cases += [compiled, cached_parametrization]
    results = {case.__name__: case(rank) for case in cases}
    results["reduce_scatter"] = reduce_scatter(rank, world)
    if world <= 3:
        results["waits"] = waits(rank, world)
    if world % 2 == 0:
        results["groups"] = groups(rank, world)
    return {**results, "torch threads": torch.get_num_threads()}


@functools.cache
def results_of(world: int) -> list[dict[str, Any]]:
    return run_on_ranks(every_case, world, world)


@pytest.fixture(params=SIZES)
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return results_of(request.param)


def rows(results: list[Any]) -> np.ndarray:
    return np.stack([row(rank) for rank in range(len(results))])


# ---------------------------------------------------------------- values


def assert_compiled(found: list[Any], world: int) -> None:
    for number, (gathered, total) in enumerate(found):
        values = [rank + 1.0 + 2 * number for rank in range(world)]
        assert gathered == [2 * value for value in values for _ in range(2)]
        assert total == [sum(values)] * 2


def test_collectives_may_be_compiled(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert_compiled(rank["compiled"]["found"], len(results))


@pytest.mark.slow
def test_collectives_and_scans_by_tracers() -> None:
    for collectives, scans in run_on_ranks(with_tracers, 3):
        assert_compiled(collectives["found"], 3)
        for found in scans["found"]:
            for mine, plain in zip(found, scans["plain"], strict=True):
                np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-6)


def test_a_rank_reads_no_parametrization_of_an_earlier_forward(
    results: list[dict[str, Any]],
) -> None:
    assert results[0]["cached_parametrization"] == [2.0, 6.0]


def test_all_gather_joins_the_ranks_in_order(results: list[dict[str, Any]]) -> None:
    joined = rows(results).reshape(-1)
    for rank in results:
        got = rank["all_gather"]
        assert got["pinned"] == joined.tolist()
        assert got["last dim"] == rows(results).T.tolist()
        assert got["output"] == got["list, floats"] == joined.tolist()
        assert got["list, flags"] == (joined > 3).tolist()
        assert got["same object"] is True


def test_reduce_scatter_gives_each_rank_its_part(results: list[dict[str, Any]]) -> None:
    expected = 0.5 * rows(results).sum(0)
    for rank in results:
        got = rank["reduce_scatter"]
        assert got["plain"] == got["output"] == got["list, x"] == expected.tolist()
        assert got["other output"] == expected.tolist()
        assert got["list, 2 x"] == (2 * expected).tolist()


def test_all_reduce_reduces(results: list[dict[str, Any]]) -> None:
    all_rows = rows(results)
    for rank in results:
        got = rank["all_reduce"]
        assert got["sum"] == got["int"] == all_rows.sum(0).tolist()
        assert got["min"] == all_rows.min(0).tolist()
        assert got["max"] == all_rows.max(0).tolist()
        np.testing.assert_allclose(got["mul"], all_rows.prod(0, dtype=np.float64), rtol=1e-5)
        assert got["or"] == [True, True, False]
        assert got["and"] == [len(results) == 1, True, False]
        np.testing.assert_allclose(got["bfloat16"], all_rows.sum(0), rtol=0.02)
        assert got["empty"] == []


def test_all_reduce_scales(results: list[dict[str, Any]]) -> None:
    # torch_xla returns the input of a lone rank as it is, without the scale
    scale = 0.25 if len(results) > 1 else 1.0
    for rank in results:
        assert rank["all_reduce"]["scaled"] == (scale * rows(results).sum(0)).tolist()


def test_all_reduce_of_a_list_works_in_place(results: list[dict[str, Any]]) -> None:
    total = (2 if len(results) > 1 else 1) * rows(results).sum(0)
    for index, rank in enumerate(results):
        assert rank["all_reduce_in_place"] == {
            "scalar": total[0],
            "leaf": total.tolist(),
            "whole": [row(index).tolist(), total.tolist()],
            "same objects": True,
            "version": True,
        }


@pytest.mark.parametrize("world", [n for n in SIZES if n % 2 == 0])
def test_groups_reduce_and_gather_among_themselves(world: int) -> None:
    results = results_of(world)
    for half in np.split(np.arange(world), 2):
        members = rows(results)[half]
        for rank in half:
            total, joined = members.sum(0).tolist(), members.reshape(-1).tolist()
            assert results[rank]["groups"] == {"total": total, "joined": joined}


def test_values_can_be_read_without_a_sync(results: list[dict[str, Any]]) -> None:
    for rank in results:
        total, positive, text = rank["implicit_syncs"]
        assert total == rows(results).sum()
        assert positive is True
        assert f"{2 * rows(results).max():.0f}." in text


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_waits_for_its_own_device_only(world: int) -> None:
    """Those that wait do not hold the device of a rank whose execution they need."""
    for rank in results_of(world):
        assert rank["waits"] == [rows(results_of(world))[:, 0].sum()] * world


def test_one_rank_may_do_more_local_work(results: list[dict[str, Any]]) -> None:
    for index, rank in enumerate(results):
        total = rows(results).sum(0).tolist()
        assert rank["rank_dependent"] == [total, 5.0 if index == 0 else None]


def test_results_may_be_dropped_on_some_ranks(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["some_drop"] == rows(results).sum(0).tolist()


def test_host_values_are_exchanged(results: list[dict[str, Any]]) -> None:
    world = len(results)
    for rank in results:
        assert rank["host_exchange"] == {
            "rendezvous": [b"r" * (r + 1) for r in range(world)],
            "mesh_reduce": world * (world - 1) / 2,
        }


def test_step_closures_run_after_the_sync(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["closures"] == [[], [rows(results).sum()]]


def trained(world: int, weight: np.ndarray, bias: float) -> np.ndarray:
    """The weight after the steps of ``training``, in plain numpy."""
    for step in range(STEPS):
        x = np.stack([row(rank + step) for rank in range(world)]).astype(np.float64)
        slope = 2 * (x @ weight + bias) / world
        weight, bias = weight - 0.01 * slope @ x, bias - 0.01 * slope.sum()
    return weight


def test_training_matches_numpy(results: list[dict[str, Any]]) -> None:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(5, 1)
    expected = trained(len(results), model.weight.detach().numpy()[0], model.bias.item())
    for rank in results:
        got = rank["training"]
        assert got["first"] == model.weight.tolist()
        np.testing.assert_allclose(got["weight"][0], expected, rtol=1e-4, atol=1e-5)
        assert got["mean"] == results[0]["training"]["mean"]


@pytest.mark.parametrize("world", [n for n in SIZES if n >= 4])
def test_ranks_share_one_compilation(world: int) -> None:
    # One program. Now and then a second: autograd's threads drop the last tensors of a backward
    # late, and a tensor alive at the sync is one more output. Compiling apart would give `world`.
    assert 1 <= results_of(world)[0]["training"]["compiled"] < world


def test_launch_inside_a_rank_calls_the_function(results: list[dict[str, Any]]) -> None:
    for index, rank in enumerate(results):
        names = ["ours", "torch_xla.launch", "xmp.spawn"]
        assert rank["launch_inside"] == [[(index, name) for name in names], ["ours"]]


def test_torch_uses_one_thread_per_rank() -> None:
    assert [rank["torch threads"] for rank in results_of(4)] == [1] * 4


# ---------------------------------------------------------------- failures


def failing(rank: int, how: str) -> str:
    """A rank that does ``how`` wrong; with "nothing" all is well."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    x = torch.full((5 if how == "shapes" and rank == 2 else 4,), 1.0, device=torch_xla.device())
    if how == "raise" and rank == 1:
        raise KeyError("lost")
    if how == "exit" and rank == 1:
        sys.exit(7)
    if how == "exit 0":
        sys.exit(0)
    if how == "early" and rank == 1:
        return "too early"
    if how == "late" and rank == 1:
        wait_until_it_is_late()
    alone = how == "alone" and rank == 0
    with launcher.one_rank_at_a_time() if alone else contextlib.nullcontext():
        total = xm.all_reduce("max" if how == "kinds" and rank == 0 else "sum", x)
        torch_xla.sync()
    return str(total.sum().item())


def wait_until_it_is_late() -> None:
    """Return when the run has failed, as the other two ranks have waited for this one for too
    long."""
    from xla_fsdp.xla.cpu_rank_patches import run_slot

    run: Any = run_slot().run
    while len(run.who_waits()[0]) < 2:
        time.sleep(0.01)
    launcher.WARN_AFTER = 0.3
    run.wait(60)


def train_another(rank: int, how: str) -> None:
    """Train the second of two equal layers on rank 1, and the first on the others."""
    import torch
    import torch_xla
    from torch import nn

    from xla_fsdp import XlaFullyShardedDataParallel
    from xla_fsdp.optim import ZeroRedundancyOptimizer

    class Either(nn.ModuleList):
        def forward(self, x: Any, number: int) -> Any:
            return self[number](x)

    with launcher.one_rank_at_a_time():
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(3, 3), nn.Linear(3, 3)]
    if how == "unit":
        layers = [XlaFullyShardedDataParallel(layer) for layer in layers]
    if how == "optimizer":
        model: nn.Module = Either(layers).to(torch_xla.device())
    else:
        model = XlaFullyShardedDataParallel(Either(layers))
    model(torch.ones(2, 3, device=torch_xla.device()), int(rank == 1)).sum().backward()
    if how == "optimizer":
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1).step()
    torch_xla.sync()


def test_the_error_of_a_rank_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(launcher.RankError("rank 1 raised", 1)))
    assert (str(again), again.rank) == ("rank 1 raised", 1)


def survive(how: str, work: Any = failing, **options: Any) -> tuple[Any, ...]:
    try:
        return ("returned", launcher.launch(work, (how,), num_ranks=3, **options))
    except launcher.RankError as error:
        return (error.rank, str(error), repr(error.__cause__))
    except SystemExit as error:
        return ("ended", error.code)
    except RuntimeError as error:
        return ("refused", str(error))


def slope(rank: int) -> float:
    import torch
    import torch_xla

    x = torch.full((), 3.0, device=torch_xla.device(), requires_grad=True)
    return torch.autograd.grad(x.square(), x)[0].item()


def several_failures() -> dict[str, Any]:
    """Launches that fail, one after the other; runs in a child's main thread, not on a rank."""
    import torch

    # Before there are devices, so that autograd has no threads for them.
    torch.ones((), requires_grad=True).square().backward()
    report: dict[str, Any] = {"slopes": launcher.launch(slope, num_ranks=3)}
    for how in ("gradient", "unit", "optimizer"):
        report[how] = survive(how, train_another)
    launcher.WARN_AFTER = math.inf  # whatever another rank needs on a busy machine
    for how in ("nothing", "raise", "shapes", "kinds", "exit", "exit 0", "early", "alone"):
        report[how] = survive(how)
    report["late"] = survive("late", sync_timeout=5.0)
    launcher.WARN_AFTER = math.inf
    report["again"] = survive("nothing")
    try:
        launcher.launch(failing, ("nothing",), num_ranks=2)
    except RuntimeError as error:
        report["other number"] = str(error)
    report["originals"] = originals_are_back()
    return report


def originals_are_back() -> list[Any]:
    """After a launch, collectives trace and sync on this thread as torch_xla's own do."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    on_one = xm.all_gather(
        torch.ones(2, device=torch_xla.device()), groups=[[0], [1], [2]], pin_layout=False
    )
    torch_xla.sync()
    return on_one.cpu().tolist()


@functools.cache
def failures() -> tuple[dict[str, Any], str]:
    code = "import json, test.distributed.test_launch as t; print(json.dumps(t.several_failures()))"
    done = run_warm("-c", code)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_backward_passes_work_after_one_without_devices() -> None:
    assert failures()[0]["slopes"] == [6.0] * 3


def autograd_threads_at_entry() -> list[int]:
    """Return how many threads autograd has where each rank begins; runs in a child."""
    from xla_fsdp.xla import cpu_rank_patches

    found: list[int] = []
    enter = cpu_rank_patches.enter_cpu_rank

    def enter_counted(rank: int) -> None:
        names = [each.read_text() for each in Path("/proc/self/task").glob("*/comm")]
        found.append(sum(name.startswith("pt_autograd") for name in names))
        enter(rank)

    cpu_rank_patches.enter_cpu_rank = enter_counted
    launcher.launch(slope, num_ranks=3)
    return found


def test_autograd_has_started_before_ranks_do() -> None:
    # Several first backward passes of a process at once end it now and then.
    code = "import test.distributed.test_launch as t; print(t.autograd_threads_at_entry())"
    done = run_warm("-c", code)
    assert done.stdout == "[3, 3, 3]\n", done.stderr


def test_a_rank_that_raises_is_named() -> None:
    assert failures()[0]["raise"] == [1, "rank 1 raised KeyError: 'lost'", "KeyError('lost')"]


def test_a_launch_after_a_failed_one_works() -> None:
    report, _ = failures()
    assert report["nothing"] == report["again"] == ["returned", ["12.0"] * 3]
    assert report["originals"] == [1.0, 1.0]


def test_exit_codes_of_ranks_count() -> None:
    report, _ = failures()
    assert report["exit"] == ["ended", 7]
    assert report["exit 0"] == ["returned", [None, None, None]]


def test_a_plain_script_ends_with_the_exit_code_of_its_ranks() -> None:
    code = "import sys, xla_fsdp; xla_fsdp.launch(lambda rank: sys.exit(75), num_ranks=2)"
    done = run_warm("-c", code)
    assert (done.returncode, "Traceback" in done.stderr) == (75, False), done.stderr
    assert "raised SystemExit: 75" in done.stderr


@pytest.mark.parametrize(
    ("how", "odd_rank", "first", "second"),
    [
        ("shapes", 2, "all_reduce(float32[4], sum", "all_reduce(float32[5], sum"),
        ("kinds", 0, "all_reduce(float32[4], max", "all_reduce(float32[4], sum"),
    ],
)
def test_different_collectives_are_reported(
    how: str, odd_rank: int, first: str, second: str
) -> None:
    rank, message, cause = failures()[0][how]
    assert (rank, cause) == (odd_rank, "None")
    assert "the ranks differ in what they traced" in message
    assert first in message
    assert second in message


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("gradient", "gradient of 0.weight", "gradient of 1.weight"),
        ("unit", "of 0.weight (sharded parameter 1)", "of 1.weight (sharded parameter 3)"),
        ("optimizer", "gradient of 0 (", "gradient of 2 ("),
    ],
)
def test_collectives_of_one_size_for_other_parameters_are_reported(
    how: str, first: str, second: str
) -> None:
    """They would add gradients of one parameter to those of another."""
    rank, message, _ = failures()[0][how]
    assert rank == 1
    assert f"{first}" in message
    assert f"{second}" in message


def test_a_rank_that_returns_early_is_named() -> None:
    rank, message, _ = failures()[0]["early"]
    assert rank == 1
    assert "wait in torch_xla.sync() to run all_reduce(float32[4]" in message
    assert "ranks [1] have already returned" in message


def test_a_sync_in_one_rank_at_a_time_is_refused() -> None:
    rank, message, _ = failures()[0]["alone"]
    assert rank == 0
    assert "inside one_rank_at_a_time()" in message


def test_a_rank_that_is_late_is_named_with_its_place() -> None:
    report, stderr = failures()
    rank, message, _ = report["late"]
    assert rank == 1
    assert "ranks [0, 2] waited 5 s" in message
    assert "in wait_until_it_is_late" in message
    warnings = [line for line in stderr.splitlines() if "have waited" in line]
    assert {line.endswith("ranks [1] are elsewhere:") for line in warnings} == {True}
    assert len(warnings) <= 2  # one for each place, not one whenever it is looked


def test_the_stack_of_a_rank_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, leave = threading.Event(), threading.Event()
    held: list[weakref.ref[cpu_ranks.Run]] = []

    def work() -> None:
        local = cpu_ranks.Run(1)
        held.append(weakref.ref(local))
        inside.set()
        leave.wait()

    def go_on(filename: str, number: int, *_: Any) -> str:
        leave.set()
        thread.join()
        is_alive.append(held[0]() is not None)
        return ""

    run, is_alive = cpu_ranks.Run(1), []
    thread: Any = threading.Thread(target=work)
    run.threads.append(thread)
    thread.start()
    inside.wait()
    while "in wait" not in run.stack(0):
        time.sleep(0.001)
    monkeypatch.setattr(linecache, "getline", go_on)
    assert "in wait" in run.stack(0)
    assert is_alive
    assert not any(is_alive)


def test_another_number_of_ranks_is_refused() -> None:
    message = failures()[0]["other number"]
    assert "needs 2 CPU devices" in message
    assert "started before with 3" in message


def test_a_runtime_started_without_the_environment_is_refused() -> None:
    code = """if True:
        import torch_xla, xla_fsdp.distributed.launcher as launcher
        torch_xla.device()
        print(launcher.launch(lambda rank: rank, num_ranks=1))
        try:
            launcher.launch(print, num_ranks=2)
        except RuntimeError as error:
            print(error)"""
    done = run_warm("-c", code, env={"CPU_NUM_DEVICES": "1"})
    assert done.stdout.startswith("[0]\n"), done.stderr
    assert "needs 2 CPU devices, but torch_xla was started before with 1 " in done.stdout
    assert "Call launch before anything that uses a device" in done.stdout
    assert "PJRT_CPU_ASYNC_CLIENT=0" in done.stdout


def blocked(rank: int) -> None:
    """Rank 0 is inside C code that nothing can stop, and rank 1 raises."""
    if rank == 0:
        time.sleep(600)
    time.sleep(0.5)
    raise KeyError("nobody comes")


def test_the_process_ends_if_ranks_are_blocked_in_a_collective() -> None:
    with pytest.raises(ChildError, match="nobody comes") as caught:
        run_on_ranks(blocked, 2)
    assert caught.value.returncode == launcher.BLOCKED_EXIT_CODE
    assert 'KeyError("nobody comes")' in caught.value.stderr  # the traceback's source line
    assert "rank 1 raised KeyError" in caught.value.stderr
    assert "Ranks [0] do not stop" in caught.value.stderr


def interrupted(rank: int, stuck: bool) -> None:
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    from xla_fsdp.xla.cpu_rank_patches import run_slot

    launcher.WARN_AFTER = 0.5
    launcher.GRACE = 3.0 if stuck else 60.0
    run: Any = run_slot().run
    print("ready", file=sys.stderr, flush=True)
    while True:
        total = xm.all_reduce("sum", torch.ones(3, device=torch_xla.device()))
        if stuck and rank == 0:
            time.sleep(600)
        while stuck and "time.sleep(600)" not in run.stack(0):
            time.sleep(0.01)
        torch_xla.sync()
        del total


def interrupt(stuck: bool, when: str) -> tuple[int, str]:
    """Start a launch, send SIGINT once ``when`` shows up on its stderr; exit code and stderr."""
    code = f"""if True:
        import signal
        import xla_fsdp.distributed.launcher as launcher, test.distributed.test_launch as tests
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job may ignore it
        try:
            launcher.launch(tests.interrupted, ({stuck},), num_ranks=2)
        except KeyboardInterrupt:
            raise SystemExit(55)"""
    command = [sys.executable, "-c", code]
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True
    )
    timer = threading.Timer(300, child.kill)
    timer.start()
    assert child.stderr is not None
    with child, child.stderr:
        lines = []
        for line in child.stderr:
            if when in line and not any(when in earlier for earlier in lines):
                os.kill(child.pid, signal.SIGINT)
            lines.append(line)
        returncode = child.wait()
    timer.cancel()
    return returncode, "".join(lines)


def test_ctrl_c_reaches_the_caller_of_launch() -> None:
    assert interrupt(stuck=False, when="ready")[0] == 55


def test_a_second_ctrl_c_ends_at_once_and_says_what_is_not_completed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted_now(*_: Any) -> None:
        raise KeyboardInterrupt

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(launcher, "_end_interrupted", interrupted_now)
    done = threading.Event()
    saving = threading.Thread(target=done.wait, name="saving step 2 in run", daemon=False)
    saving.start()
    try:
        with pytest.raises(SystemExit, match=str(launcher.INTERRUPTED_EXIT_CODE)):
            launcher.supervise(cpu_ranks.Run(1), interrupted_now, 60)
    finally:
        done.set()
        saving.join()
    first, second = capsys.readouterr().err.splitlines()
    assert first == "xla_fsdp: interrupted again; the process ends at once"
    assert second.startswith("xla_fsdp: did not wait for the end of: ")
    assert "saving step 2 in run" in second


def test_ctrl_c_ends_blocked_ranks_after_a_warning_that_names_them() -> None:
    returncode, stderr = interrupt(stuck=True, when="read such values on all ranks")
    assert returncode == launcher.INTERRUPTED_EXIT_CODE
    assert "ranks [1] have waited 0.5 s" in stderr
    assert "time.sleep(600)" in stderr
    assert "interrupted; ranks [0] are blocked" in stderr


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize("wrong", [0, -1, 2.0, "2", True])
def test_num_ranks_must_be_a_positive_whole_number(wrong: Any) -> None:
    with pytest.raises(ValueError, match="num_ranks="):
        launcher.launch(print, num_ranks=wrong)


def test_the_result_of_a_function_is_no_function() -> None:
    with pytest.raises(TypeError, match=r"got a int, .* as in launch\(train\), not launch\(train"):
        launcher.launch(3, num_ranks=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["XLA_FSDP_NUM_RANKS", "CPU_NUM_DEVICES"])
@pytest.mark.parametrize("wrong", ["four", "0", "-2", "1.5"])
def test_number_from_the_environment_is_checked(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: str
) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.delenv("XLA_FSDP_NUM_RANKS", raising=False)
    monkeypatch.setenv(name, wrong)
    with pytest.raises(ValueError, match=name):
        launcher.launch(print)


def test_elsewhere_torch_xla_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_xla

    calls: list[Any] = []
    monkeypatch.setattr(torch_xla, "launch", lambda *args, **options: calls.append((args, options)))
    monkeypatch.setattr(ops, "expected_device_count", lambda: 8)
    monkeypatch.setattr(tpu_flags, "_installed_version", lambda: tpu_flags.KNOWN_TO)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--own=1")
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    for num_ranks in (None, 1, 8):
        returned = launcher.launch(print, (1,), num_ranks=num_ranks, start_method="fork")
        assert returned == []
    one_process = [options["debug_single_process"] for _, options in calls]
    assert one_process == [False, True, False]
    assert {args for args, _ in calls} == {(print, (1,), "fork")}
    assert os.environ["LIBTPU_INIT_ARGS"].split() == ["--own=1", *tpu_flags.ADDED]
    with pytest.raises(ValueError, match="num_ranks=4, but there are 8 TPU devices"):
        launcher.launch(print, num_ranks=4)


def test_compiler_flags_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_flags, "_installed_version", lambda: tpu_flags.KNOWN_TO)
    own = f"{tpu_flags.ADDED[0].partition('=')[0]}=4 --other"
    assert tpu_flags.compiler_flags(own).split() == [*own.split(), *tpu_flags.ADDED[1:]]
    assert tpu_flags.compiler_flags().split() == list(tpu_flags.ADDED)
    for version in (None, "0.0.22"):  # it would end the process at a name that it does not know
        monkeypatch.setattr(tpu_flags, "_installed_version", lambda version=version: version)
        assert tpu_flags.compiler_flags(own) == own


def test_importing_the_launcher_does_not_import_torch() -> None:
    code = "import sys, xla_fsdp.distributed.launcher as _; print('torch' in sys.modules)"
    assert run_python("-c", code).stdout == "False\n"


def test_one_rank_at_a_time_does_nothing_outside_ranks() -> None:
    with launcher.one_rank_at_a_time(), launcher.one_rank_at_a_time():
        assert cpu_ranks.current_rank_thread() is None


def test_one_rank_at_a_time_excludes_others_and_nests() -> None:
    inside: list[int] = []
    most: list[int] = []

    def body(rank: int) -> None:
        with launcher.one_rank_at_a_time(), launcher.one_rank_at_a_time():
            inside.append(rank)
            time.sleep(0.01)
            most.append(len(inside))
            inside.remove(rank)

    run = cpu_ranks.Run(4)
    run.start(body, (), enter=lambda rank: None, leave=lambda rank: None)
    assert run.wait(60, for_all=True)
    assert not run.failures
    assert most == [1] * 4


# ---------------------------------------------------------------- the command line

SCRIPT = """
import sys, threading
import torch, torch_xla, torch_xla.core.xla_model as xm
import beside

LOCK = beside.LOCK

def main(index, word):
    device = torch_xla.device()
    total = xm.all_reduce("sum", torch.full((2,), index + 1.0, device=device))
    torch_xla.sync()
    with LOCK:
        print(index, word, total[0].item(), __name__, __file__ == sys.argv[0])
    {ending}

if __name__ == "__main__":
    torch_xla.launch(main, args=(sys.argv[1],))
"""


def run_script(
    folder: Path,
    ending: str,
    *options: str,
    run: Callable[..., subprocess.CompletedProcess[str]] = run_warm,
) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT.replace("{ending}", ending))
    (folder / "beside.py").write_text("import threading\nLOCK = threading.Lock()\n")
    return run("-m", "xla_fsdp.launch", *options, str(script), "--word")


def test_cli_runs_a_script_that_launches_for_itself(tmp_path: Path) -> None:
    done = run_script(tmp_path, "pass", "--num_ranks", "3", run=run_python)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{r} --word 6.0 __main__ True" for r in range(3)]


def test_cli_passes_exit_codes_on(tmp_path: Path) -> None:
    done = run_script(tmp_path, "sys.exit(9)", "--num_ranks=2")
    assert done.returncode == 9
    assert "Traceback" not in done.stderr


def test_cli_shows_the_traceback_of_a_script_that_failed_outside_of_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("{}['seven']")
    done = run_warm("-m", "xla_fsdp.launch", "--compat", "--num_ranks=2", str(script))
    assert done.returncode == 1
    assert "{}['seven']" in done.stderr
    assert "KeyError: 'seven'" in done.stderr
    assert "launch.py" not in done.stderr


def test_cli_shows_where_the_script_failed(tmp_path: Path) -> None:
    done = run_script(tmp_path, "index == 1 and int('seven')", "--num_ranks=2")
    assert done.returncode == 1
    assert "index == 1 and int('seven')" in done.stderr
    assert "ValueError: invalid literal" in done.stderr
    assert "rank 1 raised ValueError" in done.stderr
    assert "cpu_ranks.py" not in done.stderr


def test_cli_runs_a_module(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import os, sys\nfrom . import __name__ as name\n"
        "os.write(1, f'{__name__} {name} {sys.argv[1:]}\\n'.encode())\n"
    )
    code = f"import os, sys; os.chdir({str(tmp_path)!r}); import xla_fsdp.launch as cli; "
    code += "sys.exit(cli.main(['--num_ranks', '2', '-m', 'pack', '-x']))"
    done = run_warm("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "__main__ pack ['-x']\n" * 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["no_such_script.py"], 2, "no_such_script.py"),
        (["-m", "no_such_module"], 2, "no_such_module"),
        (["--num_ranks", "0", "test/common/ranks.py"], 2, "num_ranks=0"),
        ([], 2, "required: program\n"),
    ],
)
def test_cli_refuses_in_one_line(arguments: list[str], code: int, words: str) -> None:
    done = run_python("-m", "xla_fsdp.launch", *arguments)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_cli_shows_syntax_errors(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("x = = 1\n")
    done = run_python("-m", "xla_fsdp.launch", str(script))
    assert done.returncode == 1
    assert "SyntaxError" in done.stderr
    assert "x = = 1" in done.stderr


def test_cli_is_for_cpu() -> None:
    done = run_python("-m", "xla_fsdp.launch", "test/common/ranks.py", env={"PJRT_DEVICE": "TPU"})
    assert done.returncode == 2
    assert "PJRT_DEVICE=TPU" in done.stderr


# ---------------------------------------------------------------- values read without a sync


def unequal_read(rank: int) -> Any:
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    size = 9000 if rank == 0 else 4
    return xm.all_reduce("sum", torch.ones(size, device=torch_xla.device())).tolist()


def test_reading_what_unequal_collectives_compute_is_an_error() -> None:
    with pytest.raises(ChildError, match="the ranks differ in what they traced") as caught:
        run_on_ranks(unequal_read, 3)
    assert "float32[9000], sum, scale 1" in caught.value.stderr
    assert "on ranks [0]" in caught.value.stderr


def reads(rank: int) -> list[Any]:
    """Rank 0 reads a local value between collectives, and alone what a collective computes, also by
    an operator that torch_xla computes on the host; then all ranks read."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    device = torch_xla.device()
    first = xm.all_reduce("sum", torch.ones(2, device=device))
    local = (torch.ones(2, device=device) * 3).sum()
    found = [local.item() if rank == 0 else 6.0]
    second = xm.all_reduce("sum", torch.ones(2, device=device))
    found.append((first + second).sum().item() if rank == 0 else 12.0)
    torch_xla.sync()
    other = xm.all_reduce("sum", torch.ones(2, device=device))
    found.append(torch.isin(other, other[:1]).tolist() if rank == 0 else [True, True])
    torch_xla.sync()
    third = xm.all_gather(torch.full((1,), float(rank), device=device))
    random_state = xm.get_rng_state()
    found += [third.tolist(), third.to("cpu").tolist(), third.cpu().tolist(), str(third[1])]
    found += [float(third.sum()), int(third[1]), bool(third[2] == 2), repr(third.sum())]
    return [*found, xm.get_rng_state() == random_state]


def test_values_can_be_read_on_all_ranks_or_on_one() -> None:
    gathered = [0.0, 1.0, 2.0]
    for found in run_on_ranks(reads, 3):
        assert found[:6] == [6.0, 12.0, [True, True], gathered, gathered, gathered]
        assert found[6].startswith("tensor(1.")
        assert found[7:10] == [3.0, 1, True]
        assert found[10].startswith("tensor(3.")
        assert found[11]


def seeded_as_usual(rank: int) -> list[float]:
    """Seeds and builds on every rank, several times, as scripts do that know only processes."""
    import torch

    from xla_fsdp import XlaFullyShardedDataParallel

    found = []
    for seed in range(4):
        torch.manual_seed(seed)
        layers = []
        for _ in range(20):
            layers.append(torch.nn.Linear(30, 30))
            time.sleep(0.001)  # lets the other ranks run
        found.append(layers[-1].weight.sum().item())
        XlaFullyShardedDataParallel(torch.nn.Sequential(*layers))
    torch.manual_seed(9)  # and never meets the others again
    return [*found, torch.rand(()).item()]


def test_seeding_and_building_gives_the_same_model_on_every_rank() -> None:
    ranks = run_on_ranks(seeded_as_usual, 4)
    assert all(found == ranks[0] for found in ranks)
    assert len(set(ranks[0])) == 5


def drawing_after_building(rank: int) -> list[float]:
    """Each rank builds a model in its turn, and then draws data as it likes, while others build."""
    import torch

    from xla_fsdp import one_rank_at_a_time

    with one_rank_at_a_time():
        torch.manual_seed(3)
        values = []
        for _ in range(30):
            values.append(torch.rand(()).item())
            time.sleep(0.001)
    for _ in range(300):
        torch.rand(5 + rank)
        time.sleep(0.001)
    return values


def test_what_a_rank_draws_after_its_turn_changes_no_other_model() -> None:
    ranks = run_on_ranks(drawing_after_building, 3)
    assert all(found == ranks[0] for found in ranks)


SHARED: list[Any] = []  # one model for all ranks


def one_model_for_all(rank: int) -> None:
    import torch

    from xla_fsdp import XlaFullyShardedDataParallel, one_rank_at_a_time

    with one_rank_at_a_time():
        SHARED[:] = SHARED or [torch.nn.Linear(3, 3)]
        XlaFullyShardedDataParallel(SHARED[0])


def test_a_model_that_ranks_share_is_refused() -> None:
    with pytest.raises(ChildError, match="another rank's shard: ranks on a CPU are threads"):
        run_on_ranks(one_model_for_all, 2)


def models_that_differ(rank: int) -> None:
    import torch
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel

    module = torch.nn.Linear(3, 3)
    with torch.no_grad():
        module.weight.fill_(rank)
        module.bias.fill_(0)
    XlaFullyShardedDataParallel(module)
    torch_xla.sync()


def last_rows_that_differ(rank: int) -> None:
    import torch
    import torch_xla

    from xla_fsdp import fully_shard

    table = torch.nn.Embedding(5000, 2)
    with torch.no_grad():
        table.weight.fill_(0)
        table.weight[-1] = rank
    fully_shard(table)
    torch_xla.sync()


def wrap_on_device(rank: int) -> None:
    import torch
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel

    torch_xla.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(3, 3, device=torch_xla.device()))
    XlaFullyShardedDataParallel(model)
    torch_xla.sync()
    raise AssertionError("the ranks have not met")


def wrap_on_device_and_end(rank: int) -> None:
    import torch
    import torch_xla

    from xla_fsdp import fully_shard

    torch_xla.manual_seed(rank)
    fully_shard(torch.nn.Linear(3, 3, device=torch_xla.device()))


def wrap_on_device_of_processes(rank: int) -> None:
    """Wrap where ranks are processes, which compare by a collective."""
    from xla_fsdp.xla.cpu_rank_patches import _CpuRanks

    _CpuRanks.compares_facts = lambda self: False
    wrap_on_device(rank)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (models_that_differ, "sharding of weight with checksum"),
        (models_that_differ, "have built models of different values"),
        (models_that_differ, "call torch.manual_seed(0) before they build"),
        (last_rows_that_differ, "sharding of weight with checksum"),
        (wrap_on_device, "sharding of 1.weight with checksum"),
        (wrap_on_device, "call torch_xla.manual_seed(0) before they build, as torch.manual_seed"),
        (wrap_on_device_and_end, "have built models of different values"),
        (wrap_on_device_of_processes, "1.weight, 1.bias have not the same values on all ranks"),
    ],
)
def test_models_that_differ_between_ranks_are_refused(fn: Any, said: str) -> None:
    assert said in refusal_of(fn)


@functools.cache
def refusal_of(fn: Any) -> str:
    with pytest.raises(ChildError) as caught:
        run_on_ranks(fn, 2)
    return str(caught.value.stderr)


def alike_on_device(rank: int, compares_facts: bool) -> None:
    import torch
    import torch_xla

    from xla_fsdp import fully_shard
    from xla_fsdp.xla.cpu_rank_patches import _CpuRanks

    _CpuRanks.compares_facts = lambda self: compares_facts
    torch.manual_seed(3)
    torch_xla.manual_seed(3)
    kinds = (torch.float32, torch.bfloat16, torch.float64)
    layers = [torch.nn.Linear(3, 3, device=torch_xla.device(), dtype=each) for each in kinds]
    fully_shard(torch.nn.Sequential(*layers, torch.nn.Linear(3, 3)))


@pytest.mark.parametrize("compares_facts", [True, False])
def test_equal_models_on_devices_and_the_host_are_sharded(compares_facts: bool) -> None:
    run_on_ranks(alike_on_device, 2, compares_facts)


def one_wraps_alone(rank: int) -> None:
    import torch

    from xla_fsdp import fully_shard

    for width in (3,) if rank else (2, 3):
        torch.manual_seed(width)
        fully_shard(torch.nn.Sequential(*[torch.nn.LayerNorm(width)] * (4 - width)))


def test_models_that_one_rank_wraps_alone_are_not_compared() -> None:
    run_on_ranks(one_wraps_alone, 2)


# ---------------------------------------------------------------- the tests' own processes


def _program(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(text)
    return str(path)


def _run_warm(program: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return warm_python().run([program], environment(), timeout)


def test_a_process_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    program = _program(tmp_path, "import sys, time; print('on', file=sys.stderr); time.sleep(60)")
    with pytest.raises(subprocess.TimeoutExpired):
        _run_warm(program, timeout=0.5)
    done = _run_warm(_program(tmp_path, "import sys; print('next'); sys.exit(3)"))
    assert (done.stdout, done.returncode) == ("next\n", 3)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where the shell that started the tests ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_call_leaves_no_process_and_no_answer_behind(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    text = f"import os, time\nopen({str(noted)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while not (noted.exists() and noted.read_text()):
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        _run_warm(_program(tmp_path, text))
    done = _run_warm(_program(tmp_path, "import sys; print('next'); sys.exit(3)"))
    assert (done.stdout, done.returncode) == ("next\n", 3)
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)


def test_processes_do_not_draw_the_same_numbers(tmp_path: Path) -> None:
    text = "import random, numpy; print(random.random(), numpy.random.rand())"
    program = _program(tmp_path, text)
    first, second = (_run_warm(program).stdout.split() for _ in range(2))
    assert len({*first, *second}) == 4
