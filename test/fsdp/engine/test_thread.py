"""Names of units and phases in the metadata of programs."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter, OrderedDict
from typing import Any

import pytest

from test.common.ranks import run_on_ranks
from xla_fsdp.fsdp.engine.thread import joined, label_of


def trained(rank: int) -> dict[str, Any]:
    """Steps of nested units, one of which reads a value in its forward; the program of the last."""
    import torch
    import torch_xla
    from torch import nn

    from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module
    from xla_fsdp.xla.graph import lowered_hlo, program_of, without_metadata

    class Block(nn.Module):
        reads = True

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.mlp = XlaFullyShardedDataParallel(nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.mlp(self.norm(x))
            if Block.reads:
                hidden.sum().item()
            return torch.tanh(hidden)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4).to(torch_xla.device())).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch.manual_seed(0)
    first = checkpoint_module(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    blocks = nn.Sequential()
    blocks.add_module("first", XlaFullyShardedDataParallel(first))
    blocks.add_module("block", XlaFullyShardedDataParallel(Block()))
    model = XlaFullyShardedDataParallel(blocks, sync_on_finalization=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [step().item()]
    hook = model.module.block.mlp.register_full_backward_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        step()
    hook.remove()
    model._fsdp_unit.schedule._sync_on_end, Block.reads = False, False
    compiled = []
    for _ in range(6):
        losses.append(step().item())
        compiled.append(programs_compiled())
    step()
    parameters = list(model.parameters())
    return {
        "losses": losses,
        "compiled": fewest_anew(compiled),
        "text": lowered_hlo(parameters),
        "program": without_metadata(program_of(parameters)),
        "loop": looped(),
    }


def programs_compiled() -> int:
    """Return how many programs the ranks have compiled so far; all of them call it."""
    import torch_xla.debug.metrics as met

    from xla_fsdp.xla.host import exchange

    exchange(b"")
    count = met.metric_data("CompileTime")[0]
    exchange(b"")
    return count


def fewest_anew(compiled: list[int]) -> int:
    """Return how many programs a later step has compiled at least: now and then one is another
    program, as a thread of autograd has dropped a tensor late, which is then an output."""
    return min(after - before for before, after in itertools.pairwise(compiled[1:]))


def looped() -> dict[str, Any]:
    """Steps of blocks that run as a loop; the program of the last."""
    import torch
    import torch_xla
    from torch import nn

    from xla_fsdp import XlaFullyShardedDataParallel, one_rank_at_a_time, scan_blocks
    from xla_fsdp.xla.graph import lowered_hlo, program_of, without_metadata

    torch_xla.sync()
    with one_rank_at_a_time():
        torch.manual_seed(0)
        plain = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    blocks = nn.Sequential(*map(XlaFullyShardedDataParallel, plain))
    scan_blocks(blocks, stacked=True, gather_once_below=5)
    model = XlaFullyShardedDataParallel(nn.Sequential(OrderedDict(blocks=blocks)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    compiled = []
    for _ in range(6):
        torch_xla.sync()
        compiled.append(programs_compiled())
        optimizer.zero_grad()
        model(torch.ones(2, 4).to(torch_xla.device())).square().sum().backward()
        optimizer.step()
    parameters = list(model.parameters())
    return {
        "compiled": fewest_anew(compiled),
        "text": lowered_hlo(parameters),
        "program": without_metadata(program_of(parameters)),
    }


@functools.cache
def results(*, named: bool) -> dict[str, Any]:
    return run_on_ranks(trained, 2, env={"XLA_FSDP_UNIT_NAMES": "1" if named else "0"})[0]


def labels_in(text: str, opcode: str) -> Counter[str]:
    names = re.findall(rf' {opcode}\(.*?op_name="([^"]*)"', text)
    return Counter(map(label_of, names))


def test_collectives_have_the_names_of_their_units() -> None:
    text = results(named=True)["text"]
    units = ("first", "block", "block.mlp")
    gathers = {f"{unit}: all-gather, {each}" for unit in units for each in ("forward", "backward")}
    assert set(labels_in(text, "all-gather")) == gathers
    assert labels_in(text, "reduce-scatter") == {f"{unit}: reduce-scatter": 1 for unit in units}


def test_operations_have_the_names_of_their_phases() -> None:
    text = results(named=True)["text"]
    found = labels_in(text, "dot")
    assert {"first: forward", "first: recompute", "block.mlp: backward"} <= set(found)
    assert set(labels_in(text, "tanh")) >= {"first: forward", "first: recompute"}


def test_operations_of_loops_have_the_name_of_all_their_blocks() -> None:
    text = results(named=True)["loop"]["text"]
    gathers = {f"blocks.0-3: all-gather, {each}" for each in ("forward", "backward")}
    assert set(labels_in(text, "all-gather")) == gathers
    assert labels_in(text, "reduce-scatter")["blocks.0-3: reduce-scatter"] >= 1
    phases = {f"blocks.0-3: {phase}" for phase in ("forward", "recompute", "backward")}
    assert set(labels_in(text, "dot")) == phases


def test_names_change_no_number_and_compile_nothing_more() -> None:
    named, plain = results(named=True), results(named=False)
    assert named["losses"] == plain["losses"]
    for found in (named, plain):
        assert found["compiled"] == found["loop"]["compiled"] == 0


def test_programs_differ_in_their_metadata_alone() -> None:
    named, plain = results(named=True), results(named=False)
    assert named["program"] == plain["program"]
    assert named["loop"]["program"] == plain["loop"]["program"]


def test_without_the_variable_a_program_has_no_names() -> None:
    plain = results(named=False)
    assert "op_name" not in plain["text"] + plain["loop"]["text"]


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (["blocks.3"], "blocks.3"),
        (["blocks.0", "blocks.1", "blocks.2"], "blocks.0-2"),
        (["h.1.mlp", "h.4.mlp", "h.7.mlp"], "h.1,4,...,7.mlp"),
        (["blocks.0", "blocks.2"], "blocks.0,2"),
        (["first", "second", "third"], "first...third"),
        (["unit", "unit"], "unit"),
    ],
)
def test_names_of_several_blocks(names: list[str], name: str) -> None:
    assert joined(names) == name


@pytest.mark.parametrize(
    ("op_name", "label"),
    [
        ("root/forward.1/blocks.3/all-gather.12/xla", "blocks.3: all-gather, forward"),
        ("a/forward.1/a/backward.2/b/recompute.1/b/all-gather.1/x", "b: all-gather, backward"),
        ("a/backward.1/a/reduce-scatter.1/x", "a: reduce-scatter"),
        ("root/backward.1/blocks.3.mlp/backward.2/aten__mm", "blocks.3.mlp: backward"),
        ("unit/recompute/aten__mm", "unit: recompute"),
        ("aten__mm", ""),
        ("all-gather.12", ""),
    ],
)
def test_labels(op_name: str, label: str) -> None:
    assert label_of(op_name) == label
