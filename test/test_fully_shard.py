"""``fully_shard`` on two ranks: what it makes of a module, and what its methods do."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.models import FEATURES, WIDTH, Net
from test.scenarios import Scenarios, make, message, rows, states

scenarios = Scenarios(__name__)
result = scenarios.result


def in_place(model: Any, **options: Any) -> Any:
    """``model`` with each block a unit, and the rest the root."""
    from xla_fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


@scenarios.add
def what_it_makes(rank: int) -> dict[str, Any]:
    from xla_fsdp import FSDPModule, fully_shard

    plain, model = make(), make()
    before = model.blocks[0]
    returned = in_place(model)
    sequence = fully_shard(make(lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))))
    return {
        "same": returned is model and model.blocks[0] is before,
        "classes": [type(model).__name__, type(model.blocks[1]).__name__],
        "instance": isinstance(model, FSDPModule) and isinstance(model, Net),
        "names": [n for n, _ in model.named_parameters()]
        == [n for n, _ in plain.named_parameters()],
        "keys": list(model.state_dict()) == list(plain.state_dict()),
        "shape": tuple(model.blocks[0].up.weight.shape),
        "slice": type(sequence[:1]).__name__,
        "equal": (plain(rows().cpu()) - model(rows()).cpu()).abs().max().item() < 1e-5,
        "states": states(model),
    }


def test_a_module_is_sharded_in_place() -> None:
    assert result("what_it_makes") == {
        "same": True,
        "classes": ["FSDPNet", "FSDPBlock"],
        "instance": True,
        "names": True,
        "keys": True,
        "shape": (9, WIDTH),  # of 17 rows
        "slice": "Sequential",
        "equal": True,
        "states": {"SHARDED"},
    }


def loss_of(model: Any, x: Tensor | None = None) -> Tensor:
    return model(rows() if x is None else x).square().mean()


def grads(model: nn.Module) -> dict[str, Tensor]:
    import torch_xla

    torch_xla.sync()
    shards = [(each.key, each.param.shard) for each in model._fsdp_named_shards()]
    return {name: shard.grad.cpu() for name, shard in shards if shard.grad is not None}


def most_apart(a: dict[str, Tensor], b: dict[str, Tensor], factor: float = 1.0) -> float:
    assert a.keys() == b.keys()
    return max((a[name] * factor - b[name]).abs().max().item() for name in a)


def step(model: Any) -> dict[str, Tensor]:
    """Gradients of one pass, which are then dropped."""
    loss_of(model).backward()
    found = grads(model)
    model.zero_grad()
    return found


# ---------------------------------------------------------------- full parameters


@scenarios.add
def unshard(rank: int) -> dict[str, Any]:
    from xla_fsdp import MixedPrecisionPolicy, xla_ops

    plain = make()
    model = in_place(make(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    block = model.blocks[0]
    found = {"sharded": tuple(block.up.weight.shape)}
    block.unshard()
    found["full"] = (tuple(block.up.weight.shape), block.up.weight.dtype)
    weight = block.up.weight.float().cpu()
    found["value"] = torch.equal(weight, plain.blocks[0].up.weight.bfloat16().float())
    found["others"] = tuple(model.blocks[1].up.weight.shape)
    found["state dict"] = tuple(model.state_dict()["blocks.0.up.weight"].shape)
    block.unshard()
    block.reshard()
    found["again"] = tuple(block.up.weight.shape)
    handle = block.unshard(async_op=True)
    found["before wait"] = tuple(block.up.weight.shape)
    handle.wait()
    found["after wait"] = tuple(block.up.weight.shape)
    (block.up.weight.float().sum() * 3).backward()
    block.reshard()
    found["gradient"] = xla_ops.to_host([block.up.weight.grad])[0].unique().tolist()
    return found


def test_unshard_shows_full_parameters_in_the_compute_dtype_until_reshard() -> None:
    assert result("unshard") == {
        "sharded": (9, WIDTH),
        "full": ((17, WIDTH), torch.bfloat16),
        "value": True,
        "others": (9, WIDTH),
        "state dict": (9, WIDTH),
        "again": (9, WIDTH),
        "before wait": (9, WIDTH),
        "after wait": (17, WIDTH),
        "gradient": [3.0],
    }
    assert result("unshard", 1)["gradient"] == [0.0, 3.0]  # the other rank's shard has padding


@scenarios.add
def gathers(rank: int) -> dict[str, int]:
    """All-gathers in the program of one step."""

    def count(change: Any, steps: int = 1, **options: Any) -> int:
        import torch_xla

        from xla_fsdp import xla_ops

        model = in_place(make(), **options)
        change(model)
        torch_xla.sync()
        for _ in range(steps):
            loss_of(model).backward()
        shards = [each.param.shard for each in model._fsdp_named_shards()]
        text = xla_ops.lowered_hlo([shard.grad for shard in shards])
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

    from xla_fsdp import xla_ops

    found = {}
    for unshards in (True, False):
        model = in_place(make(EmbeddingNet))
        model.blocks[0].set_unshard_in_backward(unshards)
        tokens = torch.tensor([1, 5, 1]).to(torch_xla.device())
        model(tokens).sum().backward()
        text = xla_ops.lowered_hlo([param.grad for param in model.parameters()])
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
    shown = tuple(model.blocks[0].up.weight.shape)
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


# ---------------------------------------------------------------- gradients


@scenarios.add
def gradient_sync(rank: int) -> dict[str, Any]:
    from xla_fsdp import clip_grad_norm_

    model, expected = in_place(make()), step(in_place(make()))
    model.set_requires_gradient_sync(False)
    loss_of(model).backward()
    found: dict[str, Any] = {
        "without": len(grads(model)),
        "clip": message(lambda: clip_grad_norm_(model.parameters(), 1.0)),
    }
    model.set_requires_gradient_sync(True)
    loss_of(model).backward()
    found["with"] = most_apart(expected, grads(model), 2.0)
    model.zero_grad()
    model.set_requires_gradient_sync(False, recurse=False)
    loss_of(model).backward()
    found["root only"] = {name.split(".")[0] for name in grads(model)}
    return found


def test_gradients_wait_until_they_are_to_be_reduced() -> None:
    found = result("gradient_sync")
    assert found["without"] == 0
    assert "not reduced yet" in found["clip"]
    assert found["with"] < 1e-5
    assert found["root only"] == {"blocks"}


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
    from xla_fsdp import comm_hooks, xla_ops

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
        text = xla_ops.lowered_hlo([shard.grad for shard in shards])
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
    from test.hlo import Program
    from xla_fsdp import xla_ops

    found = {}
    for is_last in (True, False):
        model = in_place(make())
        model.set_is_last_backward(is_last)
        loss_of(model).backward()
        model.set_is_last_backward(True)
        loss_of(model).backward()
        shards = [each.param.shard for each in model._fsdp_named_shards()]
        program = Program(xla_ops.lowered_hlo([shard.grad for shard in shards]))
        held = [
            program.instructions[name] for b in program.all("opt-barrier") for name in b.operands
        ]
        found[is_last] = sum(len(each.operands) for each in held)
    return found


def test_more_backwards_to_come_wait_for_this_one() -> None:
    found = result("last_backward")
    assert found[False] > found[True]


# ---------------------------------------------------------------- order of gathers


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
    from test.hlo import Program
    from xla_fsdp import fully_shard, xla_ops

    def waits(ahead: int, backward_ahead: int) -> tuple[list[int], dict[str, Tensor]]:
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
        program = Program(xla_ops.lowered_hlo([shard.grad for shard in shards]))
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
    model.blocks[0](_hidden())
    unit = model.blocks[1]._fsdp_unit
    waiting = unit._has_ahead()
    model(rows())
    return {
        "waiting": waiting,
        "after": unit._has_ahead(),
        "refused": message(lambda: model.set_modules_to_forward_prefetch([nn.Linear(1, 1)])),
    }


def _hidden() -> Tensor:
    import torch_xla

    return torch.ones(2, WIDTH).to(torch_xla.device())


def test_what_was_prefetched_for_nothing_is_dropped() -> None:
    found = result("prefetch_unused")
    assert found["waiting"]
    assert not found["after"]
    assert "a Linear cannot be prefetched" in found["refused"]


# ---------------------------------------------------------------- dtypes


@scenarios.add
def precision(rank: int) -> dict[str, Any]:
    import torch_xla

    from test.hlo import Program
    from xla_fsdp import MixedPrecisionPolicy, fully_shard, xla_ops

    def look(**policy: Any) -> dict[str, Any]:
        seen = []
        model = make(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        model[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(**policy), reshard_after_forward=True)
        x = torch.ones(2, 4).to(torch_xla.device())
        if policy.get("cast_forward_inputs") is False:
            x = x.to(policy["param_dtype"])
        out = model(x)
        out.float().sum().backward()
        shards = list(model.parameters())
        program = Program(xla_ops.lowered_hlo([shard.grad for shard in shards]))
        return {
            "input": seen[0],
            "output": out.dtype,
            "gathered": {each.dtype for each in program.all("all-gather")},
            "reduced": {each.dtype for each in program.all("reduce-scatter")},
            "grad": shards[0].grad.dtype,
            "shard": shards[0].dtype,
        }

    return {
        "param": look(param_dtype=torch.bfloat16),
        "reduce": look(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "compress": look(reduce_dtype=torch.bfloat16),
        "output": look(param_dtype=torch.bfloat16, output_dtype=torch.float32),
        "inputs": look(param_dtype=torch.bfloat16, cast_forward_inputs=False),
        "buffer": in_place(
            make(lambda: WithBuffer()), mp_policy=MixedPrecisionPolicy(torch.bfloat16)
        ).table.dtype,
    }


class WithBuffer(nn.Module):
    """Has a buffer, and no parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2)])
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


def test_each_field_of_the_precision_policy() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    usual = {"shard": fp32, "grad": fp32, "input": bf16, "output": bf16}
    expected = {
        "param": {**usual, "gathered": {"bf16"}, "reduced": {"bf16"}},
        "reduce": {**usual, "gathered": {"bf16"}, "reduced": {"f32"}},
        "compress": {
            **usual,
            "input": fp32,
            "output": fp32,
            "gathered": {"f32"},
            "reduced": {"bf16"},
        },
        "output": {**usual, "output": fp32, "gathered": {"bf16"}, "reduced": {"bf16"}},
        "inputs": {**usual, "gathered": {"bf16"}, "reduced": {"bf16"}},
        "buffer": fp32,
    }
    assert result("precision") == expected


@scenarios.add
def refusals(rank: int) -> dict[str, Any]:
    from torch.distributed.tensor import Shard

    from xla_fsdp import CPUOffloadPolicy, fully_shard

    def net() -> Any:
        return make()

    model = in_place(net())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.set_post_optim_event(None)
        model.set_force_sum_reduction_for_comms(True)
        model.set_allocate_memory_from_process_group_for_comm(True)
        model._set_unshard_async_op(True)
        model.set_all_reduce_hook(lambda shard: None, stream=object())
    return {
        "warnings": [str(each.message).split(" has no")[0] for each in caught],
        "twice": message(lambda: fully_shard(model)),
        "container": message(lambda: fully_shard(model.blocks)),
        "none": message(lambda: fully_shard([])),
        "offload": message(lambda: fully_shard(net(), offload_policy=CPUOffloadPolicy())),
        "groups": message(lambda: fully_shard(net(), reshard_after_forward=3)),
        "zero": message(lambda: fully_shard(net(), reshard_after_forward=0)),
        "dim": message(lambda: fully_shard(net(), shard_placement_fn=lambda p: Shard(2))),
        "placement": message(lambda: fully_shard(net(), shard_placement_fn=lambda p: "0")),
        "mesh": message(lambda: fully_shard(net(), mesh=[0, 1])),
        "set": message(lambda: model.set_reshard_after_forward(2)),
        "metadata": message(
            lambda: fully_shard(
                make(lambda: nn.Linear(4, 6)), shard_placement_fn=lambda p: Shard(p.dim() - 1)
            ).get_shard_metadata()
        ),
    }


@pytest.mark.parametrize(
    ("name", "text"),
    {
        "twice": "sharded with FSDP already",
        "container": "ModuleList has no forward",
        "none": "no module",
        "offload": "CPUOffloadPolicy cannot be met",
        "groups": "must divide the 2 ranks",
        "zero": "reshard_after_forward is 0",
        "dim": "has no such dim",
        "placement": "returned a str",
        "mesh": "made by xla_fsdp.init_mesh",
        "set": "not a bool",
        "metadata": "along dim 1",
    }.items(),
)
def test_refusals_say_why(name: str, text: str) -> None:
    assert text in result("refusals")[name]


def test_what_has_no_meaning_is_ignored_with_a_warning_each() -> None:
    assert result("refusals")["warnings"] == [
        "set_post_optim_event",
        "set_force_sum_reduction_for_comms",
        "set_allocate_memory_from_process_group_for_comm",
        "_set_unshard_async_op",
        "set_all_reduce_hook(stream=...)",
    ]


# ---------------------------------------------------------------- other methods, several modules


class TwoWays(nn.Module):
    """Is used by another method than forward, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


@scenarios.add
def forward_methods(rank: int) -> dict[str, Any]:
    import torch_xla

    from xla_fsdp import fully_shard, register_fsdp_forward_method

    plain, model = make(TwoWays), fully_shard(make(TwoWays), reshard_after_forward=True)
    register_fsdp_forward_method(model, "encode")
    register_fsdp_forward_method(plain, "encode")  # does nothing
    plain.encode(rows().cpu()).sum().backward()
    model.encode(rows()).sum().backward()
    bias = model.layer.bias.grad.cpu()
    copied = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(fully_shard(make(_linear))))
    return {
        "gradient": (bias[:1] - plain.layer.bias.grad[rank * 2 : rank * 2 + 1]).abs().max().item(),
        "class": type(model).__name__,
        "missing": message(lambda: register_fsdp_forward_method(model, "decode")),
        "copy": torch.equal(copied.encode(rows()).cpu(), model.encode(rows()).cpu()),
        "own": copied.layer.weight is not model.layer.weight,
        "loaded": tuple(loaded(torch.ones(1, FEATURES).to(torch_xla.device())).shape),
    }


def _linear() -> nn.Module:
    return nn.Linear(FEATURES, 3)


def test_other_methods_run_like_the_forward() -> None:
    found = result("forward_methods")
    assert found["gradient"] < 1e-5
    assert found["class"] == "FSDPTwoWays"
    assert "TwoWays has no method 'decode'" in found["missing"]
    assert found["copy"]
    assert found["own"]
    assert found["loaded"] == (1, 3)


@scenarios.add
def several_modules(rank: int) -> dict[str, Any]:
    from xla_fsdp import full_state_dict, fully_shard, xla_ops

    plain, model = make(), make()
    listed = [model.mid, model.mid2, model.head]
    returned = fully_shard(listed)
    fully_shard(model)
    names = [name for name, _ in model.named_parameters()]
    loss_of(model).backward()
    shards = [each.param.shard for each in model._fsdp_named_shards()]
    text = xla_ops.lowered_hlo([shard.grad for shard in shards])
    found = {
        "returned": returned is listed,
        "names": names == [name for name, _ in plain.named_parameters()],
        "tied": model.mid.weight is model.mid2.weight,
        "gathers": text.count(" all-gather("),
        "reductions": text.count(" reduce-scatter("),
        "states": states(model),
    }
    model.zero_grad()
    full = full_state_dict(model)
    found["full"] = all(torch.equal(full[k], v) for k, v in plain.state_dict().items())
    found["loaded"] = str(model.load_state_dict(plain.state_dict()))
    # Only one of them runs, then all of them do.
    model.mid(_hidden()).sum().backward()
    model.zero_grad()
    found["after"] = most_apart(step(model), step(in_place(make())))
    return found


def test_several_modules_share_their_collectives() -> None:
    found = result("several_modules")
    assert found.pop("after") < 1e-5
    assert found == {
        "returned": True,
        "names": True,
        "tied": True,
        "gathers": 3,  # theirs twice, and the root's
        "reductions": 2,
        "states": {"SHARDED"},
        "full": True,
        "loaded": "<All keys matched successfully>",
    }


# ---------------------------------------------------------------- replicas, state


@scenarios.add
def all_reduce(rank: int) -> dict[str, Any]:
    from xla_fsdp import init_mesh

    mesh = init_mesh((2, 1), ("replica", "shard"))
    model, expected = in_place(make(), mesh=mesh), step(in_place(make(), mesh=mesh))
    seen = []
    model.blocks[1].set_all_reduce_hook(lambda shard: seen.append(shard.shape))
    model.set_requires_all_reduce(False)
    loss_of(model).backward()
    found: dict[str, Any] = {"without": len(grads(model)), "early": len(seen)}
    model.set_requires_all_reduce(True)
    loss_of(model).backward()
    found["with"] = most_apart(expected, grads(model), 2.0)
    found["late"] = len(seen)
    model.zero_grad()
    model.blocks[0].set_requires_all_reduce(False, recurse=False)
    loss_of(model).backward()
    found["one unit"] = {key for key in expected if key not in grads(model)}
    model.blocks[0].set_requires_all_reduce(True)
    model.head(_hidden()).sum()  # a forward outside of the root changes nothing
    model.zero_grad()
    found["dropped"] = most_apart(expected, step(model))
    return found


def test_sums_over_replicas_can_wait() -> None:
    found = result("all_reduce")
    assert found["without"] == found["early"] == 0
    assert found["with"] < 1e-5
    assert found["late"] == 5
    assert found["one unit"] == {
        f"blocks.0.{name}"
        for name in ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight")
    }
    assert found["dropped"] < 1e-6


@scenarios.add
def checkpoints(rank: int) -> dict[str, Any]:
    import tempfile

    import torch_xla

    from test.scenarios import nested
    from xla_fsdp import (
        XlaFullyShardedDataParallel,
        full_state_dict,
        fully_shard,
        load_checkpoint,
        optim_state_dict,
        save_checkpoint,
        xla_ops,
    )

    def listed() -> Any:
        model = make()
        fully_shard([model.mid, model.mid2, model.blocks[0]])
        return fully_shard(model)

    def train(model: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        return optimizer

    folder = xla_ops.exchange(tempfile.mkdtemp().encode())[0].decode()
    model = listed()
    optimizer = train(model)
    save_checkpoint(folder, model, optimizer, step=1)
    expected, found = full_state_dict(model), {}
    state = optim_state_dict(model, optimizer)["state"]
    for name, other in {"in place": in_place(make()), "wrapper": nested(make())}.items():
        its = torch.optim.AdamW(other.parameters(), lr=0.1)
        load_checkpoint(folder, other, its)
        loaded = optim_state_dict(other, its)["state"]
        found[name] = all(torch.equal(full_state_dict(other)[k], v) for k, v in expected.items())
        found[f"{name} optimizer"] = all(
            torch.equal(loaded[key]["exp_avg"], state[key]["exp_avg"]) for key in state
        )
    with XlaFullyShardedDataParallel.summon_full_params(model):
        found["summoned"] = tuple(model.mid.weight.shape)
        with torch.no_grad():
            model.mid.bias.fill_(3.0)
    found["written back"] = full_state_dict(model)["mid.bias"].unique().tolist()
    return found


def test_checkpoints_go_from_one_interface_to_the_other() -> None:
    assert result("checkpoints") == {
        "in place": True,
        "in place optimizer": True,
        "wrapper": True,
        "wrapper optimizer": True,
        "summoned": (WIDTH, WIDTH),
        "written back": [3.0],
    }
