"""``fully_shard`` on two ranks: what it makes of a module, and what its methods do."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from test.common.garbage import is_freed
from test.common.in_place import grads, hidden, in_place, loss_of, most_apart, step
from test.common.models import FEATURES, WIDTH, Net
from test.common.scenarios import Scenarios, make, message, rows, states
from test.common.warned import recorded_warnings
from xla_fsdp.fsdp.engine.param import held_shape

scenarios = Scenarios(__name__)
result = scenarios.result


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
        "shape": tuple(held_shape(model.blocks[0].up.weight)),
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


@scenarios.add
def all_reduce_without_replicas(rank: int) -> float:
    """A block's gradients are kept in a pass, and the next one does not run it."""
    model = in_place(make())
    model.set_requires_gradient_sync(False)
    loss_of(model).backward()
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)
    model.blocks[1](hidden()).sum().backward()
    return most_apart(grads(model.blocks[0]), grads_of_block())


def grads_of_block() -> dict[str, Tensor]:
    model = in_place(make())
    loss_of(model).backward()
    return grads(model.blocks[0])


def test_without_replicas_no_gradient_waits_for_them() -> None:
    assert result("all_reduce_without_replicas") == 0


# ---------------------------------------------------------------- full parameters


@scenarios.add
def unshard(rank: int) -> dict[str, Any]:
    from xla_fsdp import MixedPrecisionPolicy
    from xla_fsdp.xla.host import to_host

    plain = make()
    model = in_place(make(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    block = model.blocks[0]
    found = {"sharded": tuple(held_shape(block.up.weight))}
    block.unshard()
    found["full"] = (tuple(held_shape(block.up.weight)), block.up.weight.dtype)
    weight = block.up.weight.float().cpu()
    found["value"] = torch.equal(weight, plain.blocks[0].up.weight.bfloat16().float())
    found["others"] = tuple(held_shape(model.blocks[1].up.weight))
    found["state dict"] = tuple(model.state_dict()["blocks.0.up.weight"].shape)
    block.unshard()
    block.reshard()
    found["again"] = tuple(held_shape(block.up.weight))
    handle = block.unshard(async_op=True)
    found["before wait"] = tuple(held_shape(block.up.weight))
    handle.wait()
    found["after wait"] = tuple(held_shape(block.up.weight))
    (block.up.weight.float().sum() * 3).backward()
    block.reshard()
    found["gradient"] = to_host([block.up.weight.grad])[0].unique().tolist()
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
def shown(rank: int) -> dict[str, Any]:
    """What is done with the parameters of a model that keeps them after backward."""
    import tempfile

    from xla_fsdp import clip_grad_norm_, load_optim_state_dict, optim_state_dict, save_checkpoint
    from xla_fsdp.xla.host import exchange

    found: dict[str, Any] = {}
    model = in_place(make())
    model.set_reshard_after_backward(False)
    optimizer = torch.optim.Adam(model.parameters())
    loss_of(model).backward()
    torch_clip: Any = torch.nn.utils.clip_grad_norm_
    found["refused"] = [
        message(lambda clip=clip: clip(model.parameters(), 1.0))
        for clip in (clip_grad_norm_, torch_clip)
    ]
    found["norm"] = model.clip_grad_norm_(1.0).item() > 0
    optimizer.step()
    found["names"] = "blocks.0.up.weight" in optim_state_dict(model, optimizer)["state"]
    found["states"] = [states(model)]
    loss_of(model).backward()
    load_optim_state_dict(model, optimizer, optim_state_dict(model, optimizer))
    found["states"].append(states(model))
    model.blocks[0].unshard()
    folder = exchange(tempfile.mkdtemp().encode())[0].decode()
    found["saved"] = message(lambda: save_checkpoint(folder, model, optimizer, step=1))
    return found


def test_full_parameters_are_not_taken_for_shards() -> None:
    found = result("shown")
    assert all("was given full parameters" in text for text in found["refused"])
    assert found["norm"]
    assert found["names"]
    assert found["states"] == [{"SHARDED"}, {"SHARDED"}]
    assert found["saved"] == "nothing was raised"


@scenarios.add
def meshes(rank: int) -> dict[str, Any]:
    """A model one unit of which has a mesh of its own."""
    from xla_fsdp import full_state_dict, fully_shard, init_mesh

    model = make()
    fully_shard(model.blocks[0], mesh=init_mesh((2, 1), ("replica", "shard")))
    fully_shard(model.blocks[1], mesh=init_mesh((2,), ("shard",)))
    fully_shard(model)
    full = full_state_dict(model)
    return {
        "files": message(model.get_shard_metadata),
        "full": all(torch.equal(full[name], value) for name, value in make().state_dict().items()),
    }


def test_one_set_of_files_is_of_one_mesh() -> None:
    for rank in range(2):
        found = result("meshes", rank)
        assert "ValueError" in found["files"]
        assert "2 shards, 1 replicas for the outermost" in found["files"]
        assert "other meshes: blocks.0 (1 shards, 2 replicas). Save" in found["files"]
        assert found["full"]


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


# ---------------------------------------------------------------- dtypes


@scenarios.add
def precision(rank: int) -> dict[str, Any]:
    import torch_xla

    from test.common.hlo import Program
    from xla_fsdp import MixedPrecisionPolicy, fully_shard
    from xla_fsdp.xla.graph import lowered_hlo

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
        program = Program(lowered_hlo([shard.grad for shard in shards]))
        torch_xla.sync()  # or the next program would begin with this one's collectives
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
def copied(rank: int) -> dict[str, bool]:
    """A deep copy of a state dict, as keepers of the best weights make it."""
    import copy

    from xla_fsdp import full_state_dict, get_model_state_dict

    model = in_place(make())
    plain = {name: value.clone() for name, value in make().state_dict().items()}
    state = model.state_dict()
    kept = copy.deepcopy(state)
    kinds = [type(kept[name]) is type(value) for name, value in state.items()]
    full = all(torch.equal(v.full_tensor().cpu(), plain[k]) for k, v in kept.items())
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    model.load_state_dict(kept)
    loaded = full_state_dict(model)
    found = get_model_state_dict(model, submodules={model.blocks[0]})
    names = {name for name in state if name.startswith("blocks.0.")}
    alone = message(lambda: get_model_state_dict(model, submodules={nn.Linear(4, 4)}))
    return {
        "kinds": all(kinds),
        "full": full,
        "loaded": rank != 0 or all(torch.equal(loaded[k], plain[k]) for k in plain),
        "submodules": set(found) == names and len(names) > 0,
        "no submodule": "that is no module of the model" in alone,
    }


def test_state_dicts_are_copied_and_limited_to_submodules() -> None:
    for rank in range(2):
        assert all(scenarios.result("copied", rank).values()), scenarios.result("copied", rank)


@scenarios.add
def refusals(rank: int) -> dict[str, Any]:
    from torch.distributed.tensor import Shard

    from xla_fsdp import CPUOffloadPolicy, XlaFullyShardedDataParallel, fully_shard

    def net() -> Any:
        return make()

    def of_two() -> Any:
        model = make()
        first = next(each for each in model.modules() if isinstance(each, nn.Linear))
        first.weight = nn.Parameter(TwoTensor(first.weight.detach(), first.weight.detach()))
        return model

    model = in_place(net())
    with recorded_warnings() as texts:
        model.set_post_optim_event(None)
        model.set_force_sum_reduction_for_comms(True)
        model.set_allocate_memory_from_process_group_for_comm(True)
        model._set_unshard_async_op(True)
        model.set_all_reduce_hook(lambda shard: None, stream=object())
    return {
        "warnings": [text.split(" has no")[0] for text in texts],
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
        "subclass": message(lambda: fully_shard(of_two())),
        "subclass in a wrapper": message(
            lambda: XlaFullyShardedDataParallel(of_two(), auto_wrap_policy=lambda *_, **__: True)
        ),
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
        "subclass": "weight is a TwoTensor, a tensor subclass, whose parts",
        "subclass in a wrapper": "weight is a TwoTensor, a tensor subclass, whose parts",
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


class WithExtra(nn.Linear):
    """Has state that is no tensor."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 3)
        self.seen = {"steps": 0}

    def get_extra_state(self) -> dict[str, int]:
        return self.seen

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state


@scenarios.add
def broadcast_from_rank_0(rank: int) -> dict[str, Any]:
    """Full state dicts of rank 0, some of which do not fit; other ranks have none."""
    from xla_fsdp import StateDictOptions, full_state_dict, fully_shard, set_model_state_dict

    model, other = fully_shard(make(WithExtra)), make(WithExtra, seed=4)
    other.seen = {"steps": 5}
    given = other.state_dict()
    wrong = {
        "fits": given,
        "missing": {name: value for name, value in given.items() if name != "bias"},
        "unexpected": {**given, "more": torch.ones(2)},
        "shape": {**given, "bias": torch.ones(4)},
    }
    found: dict[str, Any] = {}
    for name, state in wrong.items():

        def load(strict: bool, state: Any = state) -> Any:
            options = StateDictOptions(
                full_state_dict=True, broadcast_from_rank0=True, strict=strict
            )
            return set_model_state_dict(model, {} if rank else state, options=options)

        found[name] = message(lambda load=load: load(True))
        if name == "missing":
            found["not strict"] = load(False).missing_keys
    full = full_state_dict(model)
    found["values"] = all(torch.equal(full[name], given[name]) for name in ("weight", "bias"))
    found["extra"] = model.seen
    return found


def test_what_does_not_fit_of_rank_0_is_the_same_error_everywhere() -> None:
    for rank in range(2):
        found = result("broadcast_from_rank_0", rank)
        assert found["fits"] == "nothing was raised"
        assert 'Missing key(s) in state_dict: "bias"' in found["missing"]
        assert found["not strict"] == ["bias"]
        assert 'Unexpected key(s) in state_dict: "more"' in found["unexpected"]
        assert "bias" in found["shape"]
        assert "Error" in found["shape"]
        assert found["values"]
        assert found["extra"] == {"steps": 5}


@scenarios.add
def copied_prefetch(rank: int) -> dict[str, Any]:
    model = in_place(make())
    first, second = model.blocks
    for one, other in ((first, second), (second, first)):
        one.set_modules_to_forward_prefetch([other])
        one.set_modules_to_backward_prefetch([other])
    expected, found = step(model), {}
    for how, copied in {
        "copy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
    }.items():
        units = [block._fsdp_unit for block in copied.blocks]
        told = [unit.settings for unit in reversed(units)]
        named = [(*each.forward_prefetch, *each.backward_prefetch) for each in told]
        found[how] = (
            [{id(ref()) for ref in refs} for refs in named] == [{id(unit)} for unit in units],
            most_apart(expected, step(copied)),
        )
    return found


def test_copies_prefetch_their_own_units() -> None:
    assert result("copied_prefetch") == {"copy": (True, 0.0), "pickle": (True, 0.0)}


@scenarios.add
def several_modules(rank: int) -> dict[str, Any]:
    from xla_fsdp import full_state_dict, fully_shard
    from xla_fsdp.xla.graph import lowered_hlo

    plain, model = make(), make()
    listed = [model.mid, model.mid2, model.head]
    returned = fully_shard(listed)
    fully_shard(model)
    names = [name for name, _ in model.named_parameters()]
    loss_of(model).backward()
    shards = [each.param.shard for each in model._fsdp_named_shards()]
    text = lowered_hlo([shard.grad for shard in shards])
    found = {
        "returned": returned is listed,
        "names": names == [name for name, _ in plain.named_parameters()],
        "values": all(
            value.stands_for is dict(model.named_parameters(remove_duplicate=False))[name]
            for name, value in model.state_dict().items()
        ),
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
    model.mid(hidden()).sum().backward()
    model.zero_grad()
    found["after"] = most_apart(step(model), step(in_place(make())))
    return found


def test_several_modules_share_their_collectives() -> None:
    found = result("several_modules")
    assert found.pop("after") < 1e-5
    assert found == {
        "returned": True,
        "names": True,
        "values": True,  # of the state dict know which shard they are
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
    model.head(hidden()).sum()  # a forward outside of the root changes nothing
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

    from test.common.scenarios import nested
    from xla_fsdp import (
        XlaFullyShardedDataParallel,
        full_state_dict,
        fully_shard,
        load_checkpoint,
        optim_state_dict,
        save_checkpoint,
    )
    from xla_fsdp.xla.host import exchange

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

    folder = exchange(tempfile.mkdtemp().encode())[0].decode()
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


@scenarios.add
def freed(rank: int) -> list[bool]:
    from xla_fsdp import fully_shard

    model = make()
    fully_shard([model.mid, model.mid2])
    in_place(model)
    for block, other in (list(model.blocks), list(model.blocks)[::-1]):
        block.set_modules_to_forward_prefetch([other])
    loss_of(model).backward()
    units = [weakref.ref(unit) for unit in model._fsdp_units()]
    gc.disable()
    try:
        del model, block, other
        return [is_freed(unit) for unit in units]
    finally:
        gc.enable()


def test_a_model_is_freed_with_its_last_reference() -> None:
    assert result("freed") == [True] * 4
