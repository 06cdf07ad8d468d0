"""What the methods of ``FSDPModule`` change in the program or the numbers, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.in_place import grads, hidden, in_place, loss_of, most_apart, step
from test.common.models import FEATURES, WIDTH
from test.common.scenarios import Scenarios, make, message, rows, states
from xla_fsdp.fsdp.engine.param import held_shape

pytestmark = pytest.mark.slow
scenarios = Scenarios(__name__)
result = scenarios.result


@scenarios.add
def gathers(rank: int) -> dict[str, int]:
    """All-gathers in the program of one step."""

    def count(change: Any, steps: int = 1, **options: Any) -> int:
        import torch_xla

        from xla_fsdp.xla.graph import lowered_hlo

        model = in_place(make(), **options)
        change(model)
        torch_xla.sync()
        for _ in range(steps):
            loss_of(model).backward()
        shards = [each.param.shard for each in model._fsdp_named_shards()]
        text = lowered_hlo([shard.grad for shard in shards])
        torch_xla.sync()
        return text.count(" all-gather(")

    def shown_again(model: Any) -> None:
        model.blocks[0].unshard()

    def ahead(model: Any) -> None:
        model.blocks[0].unshard(async_op=True)

    return {
        "usual": count(lambda model: None),
        "always": count(lambda model: None, reshard_after_forward=True),
        "never": count(lambda model: None, reshard_after_forward=False),
        "set never": count(lambda model: model.set_reshard_after_forward(False)),
        "set always": count(lambda model: model.set_reshard_after_forward(True)),
        "set for root only": count(
            lambda model: model.set_reshard_after_forward(True, recurse=False)
        ),
        "not in backward": count(lambda model: model.blocks[0].set_unshard_in_backward(False)),
        "unshard": count(shown_again),
        "unshard ahead": count(ahead),
        "two passes": count(lambda model: None, steps=2),
        "two, kept": count(lambda model: model.set_reshard_after_backward(False), steps=2),
        "two, root kept": count(
            lambda model: model.set_reshard_after_backward(False, recurse=False), steps=2
        ),
    }


def test_methods_change_how_often_parameters_are_gathered() -> None:
    assert result("gathers") == {
        "usual": 5,  # two blocks twice, and the root
        "always": 6,
        "never": 3,
        "set never": 3,
        "set always": 6,
        "set for root only": 6,
        "not in backward": 5,  # its weights are asked for all the same
        "unshard": 4,  # and one before the step
        "unshard ahead": 4,
        "two passes": 10,
        "two, kept": 7,  # the second forward needs none
        "two, root kept": 9,
    }


class EmbeddingNet(nn.Module):
    """Backward computes nothing with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Embedding(9, 5)])
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](x))


@scenarios.add
def embedding(rank: int) -> dict[bool, Any]:
    import torch_xla

    from xla_fsdp.xla.graph import lowered_hlo

    found = {}
    for unshards in (True, False):
        model = in_place(make(EmbeddingNet))
        model.blocks[0].set_unshard_in_backward(unshards)
        tokens = torch.tensor([1, 5, 1]).to(torch_xla.device())
        model(tokens).sum().backward()
        text = lowered_hlo([param.grad for param in model.parameters()])
        found[unshards] = text.count(" all-gather("), grads(model)["blocks.0.weight"]
    return found


def test_what_backward_does_not_need_is_not_gathered_for_it() -> None:
    found = result("embedding")
    assert torch.equal(found[True][1], found[False][1])
    assert found[True][0] == 3
    assert found[False][0] == 2


@scenarios.add
def kept_after_backward(rank: int) -> dict[str, Any]:
    model = in_place(make())
    model.set_reshard_after_backward(False)
    first = step(model)
    shown = tuple(held_shape(model.blocks[0].up.weight))
    model.reshard()
    with torch.no_grad():
        for param in (block._fsdp_unit.group.params[0].shard for block in model.blocks):
            param.mul_(0.5)
    second = step(model)
    plain = in_place(make())
    with torch.no_grad():
        for block in plain.blocks:
            block._fsdp_unit.group.params[0].shard.mul_(0.5)
    return {
        "shown": shown,
        "states": states(model),
        "first": most_apart(first, step(in_place(make()))),
        "after a change": most_apart(second, step(plain)),
    }


def test_parameters_kept_after_backward_are_gathered_anew_once_shards_change() -> None:
    found = result("kept_after_backward")
    assert found["shown"] == (17, WIDTH)
    assert found["states"] == {"UNSHARDED"}
    assert found["first"] < 1e-6
    assert found["after a change"] < 1e-6


@scenarios.add
def divide_factor(rank: int) -> dict[str, Any]:
    model, expected = in_place(make()), step(in_place(make()))
    for module in (model, *model.blocks):
        module.set_gradient_divide_factor(6.0)
    found = {"by 6": most_apart(expected, step(model), 2 / 6)}
    model.set_reduce_scatter_divide_factor(2.0)
    model.blocks[0].set_gradient_divide_factor(1.0)
    both = step(model)
    found["by 1"] = (both["blocks.0.up.bias"] / expected["blocks.0.up.bias"]).nanmean().item()
    found["refused"] = message(lambda: model.set_gradient_divide_factor(0.0))
    return found


def test_sums_of_gradients_are_divided_as_asked() -> None:
    found = result("divide_factor")
    assert found["by 6"] < 1e-5
    assert found["by 1"] == pytest.approx(2.0, rel=1e-4)
    assert found["refused"].startswith("ValueError: the gradient divide factor is 0.0")


@scenarios.add
def hooks(rank: int) -> dict[str, Any]:
    from xla_fsdp import comm_hooks
    from xla_fsdp.xla.graph import lowered_hlo

    expected, seen = step(in_place(make())), []

    def halve(shard: Tensor) -> None:
        seen.append((shard.dtype, shard.dim()))
        shard.mul_(0.5)

    model = in_place(make())
    model.blocks[0].set_all_reduce_hook(halve)
    halved = step(model)
    model.blocks[0].set_all_reduce_hook(lambda shard: shard * 3)
    tripled = step(model)
    name = "blocks.0.down.weight"
    found: dict[str, Any] = {
        "halved": (halved[name] - expected[name] / 2).abs().max().item(),
        "tripled": (tripled[name] - expected[name] * 3).abs().max().item(),
        "others": (halved["head.bias"] - expected["head.bias"]).abs().max().item(),
        "calls": len(seen),
    }
    for hook in (comm_hooks.reduce_scatter_hook, comm_hooks.bf16_compress_hook):
        model = in_place(make())
        model.register_comm_hook(comm_hooks.DefaultState(), hook)
        loss_of(model).backward()
        shards = [each.param.shard for each in model._fsdp_named_shards()]
        text = lowered_hlo([shard.grad for shard in shards])
        lines = [line for line in text.splitlines() if " reduce-scatter(" in line]
        found[hook.__name__] = (
            most_apart(expected, grads(model)),
            {line.split()[2].split("[")[0] for line in lines},
        )
    found["twice"] = message(lambda: model.register_comm_hook(None, comm_hooks.reduce_scatter_hook))
    model = in_place(make())
    given: list[Any] = []

    def mine(state: Any, grad: Tensor, shard: Tensor) -> Tensor:
        given.append((state, grad.numel(), shard.numel()))
        return torch.ones_like(shard)

    model.register_comm_hook("state", mine)
    ones = step(model)
    found["mine"] = all(torch.equal(grad, torch.ones_like(grad)) for grad in ones.values())
    found["given"] = {(state, whole // part) for state, whole, part in given}, len(given)
    model = in_place(make())
    model.register_comm_hook(None, lambda state, grad, shard: shard[:1])
    found["short"] = message(lambda: step(model))
    return found


def test_hooks_stand_in_for_the_reduction_or_follow_it() -> None:
    found = result("hooks")
    assert found["halved"] < 1e-6
    assert found["tripled"] < 1e-5
    assert found["others"] < 1e-6
    assert found["calls"] == 5  # one for each parameter of the block
    error, dtypes = found["reduce_scatter_hook"]
    assert (error < 1e-6, dtypes) == (True, {"f32"})
    error, dtypes = found["bf16_compress_hook"]
    assert 0 < error < 0.02
    assert dtypes == {"bf16"}
    assert "registered already" in found["twice"]
    assert found["mine"]
    assert found["given"] == ({("state", 2)}, 3)  # one call for each unit
    assert "returned 1 elements for a shard of" in found["short"]


def _before(program: Any, name: str, op: str) -> int:
    """How many instructions of a kind an instruction needs, however indirectly."""
    waiting, seen = [name], {name}
    while waiting:
        instruction = program.instructions[waiting.pop()]
        new = set(instruction.operands) & program.instructions.keys() - seen
        seen |= new
        waiting += new
    return sum(program.instructions[each].op == op for each in seen)


@scenarios.add
def last_backward(rank: int) -> dict[bool, int]:
    """How many tensors the barriers of two passes wait for."""
    from test.common.hlo import Program
    from xla_fsdp.xla.graph import lowered_hlo

    found = {}
    for is_last in (True, False):
        model = in_place(make())
        model.set_is_last_backward(is_last)
        loss_of(model).backward()
        model.set_is_last_backward(True)
        loss_of(model).backward()
        shards = [each.param.shard for each in model._fsdp_named_shards()]
        program = Program(lowered_hlo([shard.grad for shard in shards]))
        held = [
            program.instructions[name] for b in program.all("opt-barrier") for name in b.operands
        ]
        found[is_last] = sum(len(each.operands) for each in held)
    return found


def test_more_backwards_to_come_wait_for_this_one() -> None:
    found = result("last_backward")
    assert found[False] > found[True]


class Deep(nn.Module):
    """Layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@scenarios.add
def prefetch(rank: int) -> dict[str, Any]:
    """For each gather of a block, how many matrix products it has to wait for."""
    import torch_xla

    from test.common.hlo import Program
    from xla_fsdp import fully_shard
    from xla_fsdp.xla.graph import lowered_hlo

    def waits(ahead: int, backward_ahead: int) -> tuple[list[int], dict[str, Tensor]]:
        torch_xla.sync()  # a program has all collectives that were traced before it
        model = make(Deep)
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=True)
        fully_shard(model)
        for index, block in enumerate(model.blocks):
            if ahead:
                block.set_modules_to_forward_prefetch(
                    list(model.blocks[index + 1 : index + 1 + ahead])
                )
            if backward_ahead:
                start = max(index - backward_ahead, 0)
                block.set_modules_to_backward_prefetch(list(model.blocks[start:index])[::-1])
        loss_of(model).backward()
        shards = [each.param.shard for each in model._fsdp_named_shards()]
        program = Program(lowered_hlo([shard.grad for shard in shards]))
        found = [_before(program, gather.name, "dot") for gather in program.all("all-gather")]
        return sorted(found), grads(model)

    usual, expected = waits(0, 0)
    found = {"usual": usual}
    for name, settings in {"forward": (2, 0), "backward": (0, 2), "both": (2, 2)}.items():
        found[name], gradients = waits(*settings)
        found[f"{name} error"] = most_apart(expected, gradients)
    return found


def test_prefetched_gathers_wait_for_less() -> None:
    found = result("prefetch")
    assert len(found["usual"]) == 10
    assert found["usual"][:5] == [0, 0, 1, 2, 3]  # one unit behind
    assert found["forward"][:5] == [0, 0, 0, 0, 1]  # two ahead, and one behind
    assert found["forward"][5:] == found["usual"][5:]
    assert found["backward"][:5] == found["usual"][:5]
    assert sum(found["backward"][5:]) < sum(found["usual"][5:])
    assert found["both"] == found["forward"][:5] + found["backward"][5:]
    assert max(found[f"{name} error"] for name in ("forward", "backward", "both")) < 1e-6


@scenarios.add
def prefetch_unused(rank: int) -> dict[str, Any]:
    model = in_place(make())
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.blocks[0](hidden())
    unit = model.blocks[1]._fsdp_unit
    waiting = unit.group._prefetched is not None
    model(rows())
    return {
        "waiting": waiting,
        "after": unit.group._prefetched is not None,
        "refused": message(lambda: model.set_modules_to_forward_prefetch([nn.Linear(1, 1)])),
    }


def test_what_was_prefetched_for_nothing_is_dropped() -> None:
    found = result("prefetch_unused")
    assert found["waiting"]
    assert not found["after"]
    assert "a Linear cannot be prefetched" in found["refused"]
