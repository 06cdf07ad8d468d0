"""Options of torch's own FSDP on the wrapper: what they come to, and what they refuse."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from test.common.compare import same
from test.common.models import FEATURES, BatchNormNet, Block
from test.common.scenarios import RANKS, Scenarios, fsdp, make, message, nested, rows
from xla_fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    init_mesh,
)
from xla_fsdp.distributed.mesh import as_mesh

scenarios = Scenarios(__name__)
result = scenarios.result
HSDP = ("replica", "shard")
BF16, FP32 = torch.bfloat16, torch.float32


def facts(unit: Any) -> dict[str, Any]:
    """What a unit came to."""
    group, options = unit.group, unit.config
    return {
        "shards": group.collectives.num_shards,
        "replicas": group.replicas.num_shards,
        "reshards": options.reshard_after_forward,
        "flat": options.flatten_parameters,
    }


# ---------------------------------------------------------------- strategies


def at_once(module: nn.Module, **options: Any) -> Any:
    """Wrapped, and nothing run."""
    return fsdp(module, execute_sharding_on_init=False, **options)


@scenarios.add
def strategies(rank: int) -> dict[str, dict[str, Any]]:
    mesh = init_mesh((RANKS, 1), HSDP)
    one = init_mesh((RANKS,), ("data",))
    found = {}
    for strategy in ShardingStrategy:
        more = {"device_mesh": mesh} if "HYBRID" in strategy.name else {}
        found[strategy.name] = facts(at_once(make(), sharding_strategy=strategy, **more)._fsdp_unit)
    no_shard = ShardingStrategy.NO_SHARD
    found["no_shard_1d"] = facts(at_once(make(), sharding_strategy=no_shard, mesh=one)._fsdp_unit)
    found["no_shard_2d"] = facts(at_once(make(), sharding_strategy=no_shard, mesh=mesh)._fsdp_unit)
    found["mesh_1d"] = facts(at_once(make(), mesh=one)._fsdp_unit)
    found["torch_mesh"] = facts(at_once(make(), device_mesh=torch_mesh(1, RANKS))._fsdp_unit)
    found["flat"] = facts(at_once(make(), use_orig_params=False)._fsdp_unit)
    found["not_flat"] = facts(at_once(make(), use_orig_params=True)._fsdp_unit)
    return found


def torch_mesh(
    *shape: int, names: tuple[str, ...] | None = None, device: str = "xla"
) -> DeviceMesh:
    ranks = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return DeviceMesh(device, ranks, mesh_dim_names=names)


@pytest.mark.parametrize(
    ("name", "shards", "replicas", "reshards"),
    [
        ("FULL_SHARD", RANKS, 1, True),
        ("SHARD_GRAD_OP", RANKS, 1, False),
        ("NO_SHARD", 1, RANKS, True),
        ("HYBRID_SHARD", 1, RANKS, True),
        ("_HYBRID_SHARD_ZERO2", 1, RANKS, False),
        ("no_shard_1d", 1, RANKS, True),
        ("no_shard_2d", 1, RANKS, True),
        ("mesh_1d", RANKS, 1, True),
        ("torch_mesh", RANKS, 1, True),
    ],
)
def test_what_is_sharded_over_whom(name: str, shards: int, replicas: int, reshards: bool) -> None:
    found = result("strategies")[name]
    assert (found["shards"], found["replicas"], found["reshards"]) == (shards, replicas, reshards)


def test_original_parameters_are_flattened_where_they_are_not_used() -> None:
    found = result("strategies")
    assert (found["flat"]["flat"], found["not_flat"]["flat"]) == (True, False)


def test_hybrid_sharding_makes_a_slice_a_replica() -> None:
    from xla_fsdp.fsdp.fsdp1_options import _one_replica_per_slice

    coords = [(0, x, y, 0, at) for at in range(2) for y in range(2) for x in range(4)]
    mesh = _one_replica_per_slice(coords)
    assert mesh.groups("shard") == [list(range(8)), list(range(8, 16))]
    assert mesh.groups("replica")[5] == [5, 13]


@scenarios.add
def by_policy(rank: int) -> list[dict[str, Any]]:
    from xla_fsdp.wrap import transformer_auto_wrap_policy

    model = fsdp(
        make(),
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2,
        mesh=init_mesh((RANKS, 1), HSDP),
        mixed_precision=MixedPrecision(param_dtype=BF16),
        sync_module_states=True,
    )
    inner = model._fsdp_units()[1:]
    return [{**facts(each), "dtype": each.config.compute_dtype} for each in inner]


def test_units_inside_get_the_same_options() -> None:
    found = result("by_policy")
    assert len(found) == 2
    expected = {"shards": 1, "replicas": RANKS, "reshards": False, "flat": False, "dtype": BF16}
    assert all(each == expected for each in found)


@scenarios.add
def own_options(rank: int) -> list[dict[str, Any]]:
    from torch.distributed.fsdp.wrap import CustomPolicy

    model = make()
    blocks = [each for each in model.modules() if isinstance(each, Block)]
    own = {
        "sharding_strategy": ShardingStrategy.FULL_SHARD,
        "mixed_precision": None,
        "use_orig_params": False,
    }
    model = fsdp(
        model,
        auto_wrap_policy=CustomPolicy(lambda each: own if each is blocks[0] else each is blocks[1]),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        mixed_precision=MixedPrecision(param_dtype=BF16),
    )
    inner = model._fsdp_units()[1:]
    return [{**facts(each), "dtype": each.config.compute_dtype} for each in inner]


def test_a_policy_of_torch_gives_units_options_of_their_own() -> None:
    first, second = result("own_options")
    assert (first["reshards"], first["flat"], first["dtype"]) == (True, True, None)
    assert (second["reshards"], second["flat"], second["dtype"]) == (False, False, BF16)


# ---------------------------------------------------------------- contradictions


@scenarios.add
def contradictions(rank: int) -> dict[str, str]:
    hybrid, one = init_mesh((RANKS, 1), HSDP), init_mesh((RANKS,), ("shard",))
    groups = {"sharding_groups": [[0], [1]], "sharding_rank": 0, "sharding_world_size": 1}
    bf16 = MixedPrecision(param_dtype=BF16, reduce_dtype=BF16)
    strategy = ShardingStrategy
    wrong: dict[str, dict[str, Any]] = {
        "two meshes": {"mesh": hybrid, "device_mesh": one},
        "mesh and groups": {"mesh": one, **groups},
        "full on two axes": {"mesh": hybrid, "sharding_strategy": strategy.FULL_SHARD},
        "hybrid on one axis": {"mesh": one, "sharding_strategy": strategy.HYBRID_SHARD},
        "hybrid on none": {"sharding_strategy": strategy.HYBRID_SHARD},
        "hybrid and groups": {"sharding_strategy": strategy.HYBRID_SHARD, **groups},
        "no_shard and groups": {"sharding_strategy": strategy.NO_SHARD, **groups},
        "full and kept": {
            "sharding_strategy": strategy.FULL_SHARD,
            "reshard_after_forward": False,
        },
        "two dtypes": {"mixed_precision": bf16, "compute_dtype": torch.float16},
        "two reduce dtypes": {"mixed_precision": bf16, "fp32_reduce_scatter": True},
        "low grads": {"mixed_precision": MixedPrecision(keep_low_precision_grads=True)},
        "classes": {"mixed_precision": MixedPrecision(_module_classes_to_ignore=(nn.Linear,))},
        "original and flat": {"use_orig_params": True, "flatten_parameters": True},
        "offload": {"cpu_offload": CPUOffload(offload_params=True)},
        "device": {"device_id": torch.device("cpu")},
        "two groups": {"process_group": (None, None)},
        "group kind": {"process_group": [0, 1]},
        "kind": {"sharding_strategy": "FULL_SHARD"},
        "mesh kind": {"mesh": [[0, 1]]},
        "typo": {"shardingstrategy": None},
        "shards first": {"mesh": init_mesh((1, RANKS), ("shard", "x"))},
        "three axes": {"mesh": init_mesh((1, 1, RANKS), (*HSDP, "tensor"))},
        "another job": {"mesh": init_mesh((4,), ("shard",), world_size=4)},
        "several": {
            "use_orig_params": True,
            "flatten_parameters": True,
            "cpu_offload": True,
            "mixed_precision": bf16,
            "compute_dtype": torch.float16,
        },
    }
    return {name: message(lambda o=o: fsdp(make(), **o)) for name, o in wrong.items()}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("two meshes", ["ValueError", "two names of one option"]),
        ("mesh and groups", ["ValueError", "both a mesh", "and sharding_groups say who"]),
        ("full on two axes", ["ValueError", "FULL_SHARD shards over one axis", "HYBRID_SHARD"]),
        ("hybrid on one axis", ["ValueError", "mesh of two axes", "has shard"]),
        ("hybrid on none", ["ValueError", "each TPU slice a replica", "init_mesh((2, 4)"]),
        ("hybrid and groups", ["ValueError", "each TPU slice a replica", "give device_mesh"]),
        ("no_shard and groups", ["ValueError", "a strategy that makes one", "and sharding_groups"]),
        ("full and kept", ["ValueError", "reshard_after_forward=False keeps them"]),
        ("two dtypes", ["ValueError", "param_dtype=torch.bfloat16", "compute_dtype=torch.float16"]),
        ("two reduce dtypes", ["ValueError", "reduce_dtype=torch.bfloat16"]),
        ("low grads", ["ValueError", "keep_low_precision_grads=True cannot be met"]),
        ("classes", ["ValueError", "_module_classes_to_ignore"]),
        ("original and flat", ["ValueError", "use_orig_params=True shows every parameter"]),
        ("offload", ["ValueError", "cpu_offload cannot be met", "device memory"]),
        ("device", ["ValueError", "device_id is cpu"]),
        ("two groups", ["ValueError", "process_group is a tuple", "device_mesh=init_mesh("]),
        ("group kind", ["TypeError", "process_group is a list"]),
        ("kind", ["TypeError", "sharding_strategy is a str", "xla_fsdp.ShardingStrategy"]),
        ("mesh kind", ["TypeError", "init_mesh, got a list"]),
        ("typo", ["TypeError", "shardingstrategy"]),
        ("shards first", ["ValueError", "the first one is for replicas"]),
        ("three axes", ["ValueError", "mesh['replica', 'shard']"]),
        ("another job", ["ValueError", "lays out 4 ranks, but the job has 2"]),
        ("several", ["compute_dtype=torch.float16", "use_orig_params=True", "cpu_offload"]),
    ],
)
def test_contradictions_and_what_cannot_be_met(name: str, parts: list[str]) -> None:
    found = result("contradictions")[name]
    assert all(part in found for part in parts), found


@scenarios.add
def warned(rank: int) -> tuple[list[str], list[str]]:
    from xla_fsdp.fsdp.fsdp1_options import TorchOptions, _ignored

    # Not by catching warnings: filters belong to the process, in which the other rank goes on.
    ignored = _ignored(TorchOptions(backward_prefetch=None, limit_all_gathers=False, device_id=0))
    usual = TorchOptions(
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=True,
        device_id=torch.device("xla", rank),
        cpu_offload=CPUOffload(offload_params=False),
    )
    return list(ignored), list(_ignored(usual))


def test_options_without_a_meaning_are_named() -> None:
    ignored, usual = result("warned")
    assert ignored == ["backward_prefetch=None", "limit_all_gathers=False", "device_id=0"]
    assert usual == []


@pytest.mark.parametrize("dtype", [BF16, None])
def test_full_precision_in_evaluation_is_not_ignored_silently(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xla_fsdp.fsdp.engine.config import FSDPConfig
    from xla_fsdp.fsdp.fsdp1_options import TorchOptions, translate

    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    options = TorchOptions(mixed_precision=MixedPrecision(param_dtype=dtype))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        translate(options, FSDPConfig())
    said = [str(each.message).split(":")[0] for each in found]
    assert said == (["FSDP_USE_FULL_PREC_IN_EVAL=1"] if dtype else [])


def test_one_warning_for_all_of_them() -> None:
    from xla_fsdp.fsdp.engine.config import FSDPConfig
    from xla_fsdp.fsdp.fsdp1_options import TorchOptions, translate

    options = TorchOptions(backward_prefetch=BackwardPrefetch.BACKWARD_POST, device_id=3)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        translate(options, FSDPConfig())
    [warning] = found
    assert "backward_prefetch=BACKWARD_POST, device_id=3: ignored" in str(warning.message)


# ---------------------------------------------------------------- dtypes and values


@scenarios.add
def precision(rank: int) -> dict[str, Any]:
    seen: dict[str, torch.dtype] = {}

    def note(name: str) -> Any:
        return lambda module, args: seen.__setitem__(name, args[0].dtype)

    policy = MixedPrecision(param_dtype=BF16, reduce_dtype=FP32)
    model = make(BatchNormNet)
    model.register_buffer("extra", torch.zeros(3))
    model.blocks[0].register_forward_pre_hook(note("inner"))
    model.blocks[0] = fsdp(model.blocks[0], mixed_precision=policy)
    model.register_forward_pre_hook(note("root"))
    model = fsdp(model, mixed_precision=policy)
    model(rows())
    seen["buffer"] = model.extra.dtype
    seen["reduced"] = model._fsdp_unit.config.gradient_dtype
    return {name: str(dtype) for name, dtype in seen.items()}


def test_mixed_precision_casts_the_roots_inputs_and_leaves_buffers() -> None:
    assert result("precision") == {
        "root": "torch.bfloat16",
        "inner": "torch.bfloat16",  # as the root made it
        "buffer": "torch.float32",
        "reduced": "torch.float32",
    }


@scenarios.add
def inner_inputs(rank: int) -> list[str]:
    """What a linear layer in an inner unit is given, in a root that computes in fp32."""
    seen = []
    for casts in (False, True):
        policy = MixedPrecision(param_dtype=BF16, cast_forward_inputs=casts)
        inner = nn.Identity()
        inner.register_forward_pre_hook(lambda module, args: seen.append(str(args[0].dtype)))
        model = fsdp(nn.Sequential(fsdp(inner, mixed_precision=policy)))
        model(rows())
    return seen


def test_inner_inputs_are_cast_on_request() -> None:
    assert result("inner_inputs") == ["torch.float32", "torch.bfloat16"]


class Odd(nn.Module):
    """Parameters and buffers of several dtypes."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 3)
        nn.init.constant_(self.layer.weight, value)
        nn.init.constant_(self.layer.bias, 0.5 if value == 0 else float("nan"))
        self.low = nn.Parameter(torch.full((5,), value, dtype=BF16))
        self.steps = nn.Parameter(torch.tensor([int(value)]), requires_grad=False)
        self.register_buffer("flag", torch.tensor([value == 0, True]))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: Any) -> Any:
        return self.layer(x)


@scenarios.add
def synced(rank: int) -> dict[str, torch.Tensor]:
    from xla_fsdp import full_state_dict

    model = Odd(float(rank))
    model.layer = fsdp(model.layer, sync_module_states=True)
    return full_state_dict(fsdp(model, sync_module_states=True))


def test_states_are_those_of_the_first_rank() -> None:
    expected = Odd(0.0).state_dict()
    for rank in range(RANKS):
        found = result("synced", rank)
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value)


@scenarios.add
def same_bits(rank: int) -> list[torch.Tensor]:
    import torch_xla

    from xla_fsdp.distributed.collectives import LocalCollectives, XlaCollectives, broadcast_

    values = special_values() if rank == 0 else [torch.ones_like(t) for t in special_values()]
    broadcast_(values, XlaCollectives(None, rank, RANKS), torch_xla.device())
    broadcast_(values, LocalCollectives(0, 4), torch_xla.device())  # stands for any ranks
    return [value.contiguous().view(torch.uint8) for value in values]


def special_values() -> list[torch.Tensor]:
    numbers = torch.tensor([-0.0, float("nan"), float("-inf"), 1e-45, 3.0])
    dtypes = (FP32, BF16, torch.float16, torch.float64)
    return [numbers.to(dtype) for dtype in dtypes] + [
        torch.tensor([2**62 + 1, -1]),
        torch.tensor([True, False]),
        torch.tensor([1 - 2j, 0j]),
        torch.arange(6.0).reshape(2, 3).t(),
    ]


def test_every_bit_is_the_first_ranks() -> None:
    for rank in range(RANKS):
        found = result("same_bits", rank)
        for value, expected in zip(found, special_values(), strict=True):
            assert torch.equal(value, expected.contiguous().view(torch.uint8))


# ---------------------------------------------------------------- meshes of torch


def test_a_device_mesh_of_torch_is_a_mesh() -> None:
    mesh = torch_mesh(2, 4, names=HSDP)
    assert as_mesh(mesh) == init_mesh((2, 4), HSDP, world_size=8)
    assert as_mesh(torch_mesh(8)).axis_names == ("shard",)
    assert as_mesh(torch_mesh(2, 4)).axis_names == HSDP
    with pytest.raises(ValueError, match="3 dims without names"):
        as_mesh(torch_mesh(2, 2, 2))


@pytest.fixture
def process_group() -> Iterator[None]:
    """Of eight ranks that do not exist: torch slices no DeviceMesh without one."""
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_slices_of_a_device_mesh_have_the_groups_of_the_whole_job() -> None:
    theirs = torch_mesh(2, 2, 2, names=(*HSDP, "tensor"), device="cpu")
    ours = init_mesh((2, 2, 2), (*HSDP, "tensor"), world_size=8)
    assert as_mesh(theirs["shard"]) == ours["shard"]
    assert as_mesh(theirs["replica", "shard"]) == ours["replica", "shard"]
    joined = theirs["replica", "shard"]._flatten("data")
    assert as_mesh(joined) == ours["replica", "shard"].flatten("data")
    assert as_mesh(joined).groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]


# ---------------------------------------------------------------- state dicts


@scenarios.add
def an_earlier_state(rank: int) -> dict[str, Any]:
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel

    model = nested(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    convert = partial(XlaFullyShardedDataParallel.optim_state_dict, model, optimizer)

    def step() -> None:
        model(rows()).sum().backward()
        optimizer.step()
        torch_xla.sync()

    step()
    earlier, full = copy.deepcopy(optimizer.state_dict()), convert()
    optimizer.param_groups[0]["lr"] = 0.2
    step()
    found = convert(optim_state_dict=earlier, group=None)
    moments = {name: entries["exp_avg"] for name, entries in found["state"].items()}
    back = XlaFullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, found)
    return {
        "moments": same(moments, {n: each["exp_avg"] for n, each in full["state"].items()}),
        "later": same(moments, {n: each["exp_avg"] for n, each in convert()["state"].items()}),
        "options": (found["param_groups"][0]["lr"], optimizer.param_groups[0]["lr"]),
        "no groups": message(lambda: convert(optim_state_dict={"state": earlier["state"]})),
        "cut again": same_moments(
            back, {i: each["exp_avg"].cpu() for i, each in earlier["state"].items()}
        ),
    }


def test_an_earlier_state_dict_of_the_optimizer_is_converted() -> None:
    found = dict(result("an_earlier_state"))
    assert "with state and param_groups" in found.pop("no groups")
    assert found == {
        "moments": True,
        "later": False,
        "options": (0.1, 0.2),
        "cut again": True,
    }


@scenarios.add
def types(rank: int) -> dict[str, Any]:
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel, full_state_dict

    model = nested(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(rows()).sum().backward()
    optimizer.step()
    torch_xla.sync()
    full, shards = full_state_dict(model), to_cpu(model.state_dict())
    moments = {i: v["exp_avg"].cpu() for i, v in optimizer.state_dict()["state"].items()}
    found: dict[str, Any] = {}
    holder = nn.ModuleDict({"inside": model})
    with XlaFullyShardedDataParallel.state_dict_type(holder, StateDictType.FULL_STATE_DICT):
        found["full"] = same(model.state_dict(), full)
        found["with a prefix"] = same(
            model.state_dict(prefix="its."), {f"its.{name}": value for name, value in full.items()}
        )
        found["below a plain module"] = same(
            holder.state_dict(), {f"inside.{name}": value for name, value in full.items()}
        )
        state = XlaFullyShardedDataParallel.optim_state_dict(model, optimizer)
        found["optimizer, full"] = state["state"]["head.weight"]["exp_avg"].shape
        to_load = XlaFullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)
        found["cut again"] = same_moments(to_load, moments)
    with XlaFullyShardedDataParallel.state_dict_type(
        model, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()
    ):
        found["local"] = same(to_cpu(model.state_dict()), shards)
        state = XlaFullyShardedDataParallel.optim_state_dict(model, optimizer)
        to_load = XlaFullyShardedDataParallel.optim_state_dict_to_load(
            model, optimizer, state, load_directly=True
        )
        found["optimizer, local"] = same_moments(to_load, moments)
        found["loaded"] = same_moments(optimizer.state_dict(), moments)
    only = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    before = XlaFullyShardedDataParallel.set_state_dict_type(
        model, StateDictType.FULL_STATE_DICT, *only
    )
    found["before"] = before.state_dict_type.name
    found["rank 0 only"] = (
        len(model.state_dict()),
        len(XlaFullyShardedDataParallel.optim_state_dict(model, optimizer)),
    )
    found["chosen"] = XlaFullyShardedDataParallel.get_state_dict_type(
        model
    ).state_dict_config.rank0_only
    found["again"] = str(model.load_state_dict({n: v + 1 for n, v in full.items()}))
    changed = full_state_dict(model)
    found["took"] = same(changed, {name: value + 1 for name, value in full.items()})
    fresh = torch.optim.AdamW(model.parameters())
    XlaFullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    XlaFullyShardedDataParallel.optim_state_dict_to_load(model, fresh, state)
    found["left alone"] = len(fresh.state)
    return found


def to_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() for name, value in state.items()}


def same_moments(state: Any, moments: Any) -> bool:
    found = state["state"]
    return set(found) == set(moments) and all(
        torch.equal(found[i]["exp_avg"].cpu(), value) for i, value in moments.items()
    )


@pytest.mark.parametrize("rank", range(RANKS))
def test_state_dicts_of_the_type_that_is_chosen(rank: int) -> None:
    found = result("types", rank)
    for name in ("full", "with a prefix", "below a plain module", "cut again", "local"):
        assert found[name] is True, name
    assert found["optimizer, local"] is True
    assert found["loaded"] is True
    assert found["took"] is True
    assert found["again"] == "<All keys matched successfully>"
    assert tuple(found["optimizer, full"]) == tuple(make_head_shape())
    assert found["before"] == "SHARDED_STATE_DICT"
    assert found["chosen"] is True
    assert (found["rank 0 only"][0] > 0, found["rank 0 only"][1] > 0) == (rank == 0, rank == 0)
    assert found["left alone"] == 0


def make_head_shape() -> torch.Size:
    return make().head.weight.shape


@scenarios.add
def wrong_types(rank: int) -> list[str]:
    from xla_fsdp import XlaFullyShardedDataParallel

    model = fsdp(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = LocalStateDictConfig()
    full = StateDictType.FULL_STATE_DICT
    with XlaFullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        bad = {"state": {}, "param_groups": [{"params": [0]}]}
        not_named = message(
            lambda: XlaFullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, bad)
        )
    return [
        message(lambda: XlaFullyShardedDataParallel.set_state_dict_type(model, full, local)),
        message(lambda: XlaFullyShardedDataParallel.set_state_dict_type(model, "full")),
        message(lambda: XlaFullyShardedDataParallel.set_state_dict_type(nn.Linear(1, 1), full)),
        message(
            lambda: XlaFullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, {}, True)
        ),
        not_named,
    ]


def test_types_that_do_not_fit() -> None:
    config, kind, plain, named, numbers = result("wrong_types")
    assert "FULL_STATE_DICT goes with a FullStateDictConfig, got a LocalStateDictConfig" in config
    assert kind.startswith("TypeError: state_dict_type is 'full'")
    assert "no XlaFullyShardedDataParallel in this Linear" in plain
    assert "is_named_optimizer=True" in named
    assert "holds no names" in numbers


@scenarios.add
def saved_whatever_the_type(rank: int) -> bool:
    import tempfile

    from xla_fsdp import (
        XlaFullyShardedDataParallel,
        full_state_dict,
        load_checkpoint,
        save_checkpoint,
    )
    from xla_fsdp.xla.host import exchange

    model = nested(make())
    XlaFullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
    folder = exchange(tempfile.mkdtemp().encode())[0].decode()
    save_checkpoint(folder, model, step=1)
    before = full_state_dict(model)
    with XlaFullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        for param in model.parameters():
            param.zero_()
    load_checkpoint(folder, model)
    return same(full_state_dict(model), before)


def test_a_checkpoint_holds_shards_whatever_the_type() -> None:
    assert result("saved_whatever_the_type") is True
