"""Models that are never whole: built on the meta device, or wrapped block by block. Two ranks."""

from __future__ import annotations

import copy
import json
import pickle
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from test.common.compare import same
from test.common.models import FEATURES, WIDTH, Net
from test.common.ranks import run_on_ranks
from test.common.recipes import Transformer
from test.common.scenarios import Scenarios, fsdp, make, message
from xla_fsdp.wrap import always_wrap_policy

scenarios = Scenarios(__name__)
scenario, result = scenarios.add, scenarios.result


def full(model: Any) -> dict[str, Tensor]:
    from xla_fsdp import full_state_dict

    return full_state_dict(model)


class Scale(nn.Module):
    """Without reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum()


class MixedMeta(nn.Module):
    """A tied weight on the meta device beside a buffer that has values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.first.register_buffer("table", torch.arange(3.0, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def on_meta(model_class: Any) -> Any:
    with torch.device("meta"):
        return model_class()


@scenario
def initialized(rank: int) -> dict[str, Any]:
    torch.manual_seed(4)
    by_default = fsdp(on_meta(lambda: nn.Linear(FEATURES, WIDTH)))
    torch.manual_seed(4)
    plain = nn.Linear(FEATURES, WIDTH)
    by_function = fsdp(
        on_meta(Scale), param_init_fn=lambda module: nn.init.constant_(module.weight, 4.0)
    )
    return {
        "default": same(full(by_default), plain.state_dict()),
        "function": full(by_function)["weight"].tolist(),
        "neither": message(lambda: fsdp(on_meta(Scale))),
    }


def test_modules_on_the_meta_device_are_initialized() -> None:
    found = result("initialized")
    assert (found["default"], found["function"]) == (True, [4.0, 4.0, 4.0])
    assert "has no reset_parameters(). Pass param_init_fn" in found["neither"]


@scenario
def ties(rank: int) -> dict[str, Any]:
    torch.manual_seed(5)
    one_unit = fsdp(on_meta(MixedMeta))
    torch.manual_seed(5)
    two_units = on_meta(MixedMeta)
    two_units.first, two_units.second = fsdp(two_units.first), fsdp(two_units.second)
    two_units = fsdp(two_units)
    torch.manual_seed(5)
    plain = MixedMeta()
    return {
        "one unit": len(list(one_unit.parameters())),
        "two units": len(list(two_units.parameters())),
        "one tensor": two_units.first.weight is two_units.second.weight,
        "values": same(full(two_units), plain.state_dict()),
        "computed": two_units(torch.ones(1, 4).to(two_units.xla_device)).sum().item(),
        "expected": plain(torch.ones(1, 4)).sum().item(),
        "table": one_unit.get_buffer("first.table").cpu().tolist(),
        "ignored": ignored_tie(),
        "mark": getattr(marked_weight(), "mark", None),
    }


def ignored_tie() -> bool:
    """Whether an ignored parameter of two units is still one."""
    model = on_meta(MixedMeta)
    torch.manual_seed(5)
    model = fsdp(model, auto_wrap_policy=always_wrap_policy, ignored_params=[model.first.weight])
    return model.first.weight is model.second.weight and model.first.weight.shape == (4, 4)


def marked_weight() -> Any:
    layer = on_meta(lambda: nn.Linear(4, 4))
    layer.weight.mark = "no decay"
    torch.manual_seed(5)
    return fsdp(layer).module.weight


def test_ties_and_buffers_with_values_are_kept() -> None:
    found = result("ties")
    assert (found["one unit"], found["two units"], found["one tensor"]) == (3, 3, True)
    assert found["table"] == [0.0, 1.0, 2.0]
    assert (found["ignored"], found["mark"]) == (True, "no decay")
    assert found["values"]
    assert found["computed"] == pytest.approx(found["expected"], rel=1e-5)


@scenario
def unit_by_unit(rank: int) -> dict[str, bool]:
    from xla_fsdp import one_rank_at_a_time

    found = {}
    torch.manual_seed(6)
    policy = fsdp(
        on_meta(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))),
        auto_wrap_policy=always_wrap_policy,
    )
    torch.manual_seed(6)
    blocks = [fsdp(nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    built = fsdp(nn.Sequential(*blocks, nn.Linear(WIDTH, 2)))
    after = torch.rand(2)
    torch.manual_seed(6)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 2))
    found["random numbers go on"] = torch.equal(after, torch.rand(2))
    full(built)  # ranks meet
    with one_rank_at_a_time():  # not while the other rank is making its model
        here = torch.get_rng_state()
    fsdp(make(lambda: nn.Linear(2, 2)))
    with one_rank_at_a_time():
        found["and not back"] = torch.equal(here, torch.get_rng_state())
    found["wrapped as built"] = same(full(built), plain.state_dict())
    found["policy"] = len(full(policy)) == 4
    return found


def test_a_model_may_be_wrapped_block_by_block_as_it_is_built() -> None:
    assert result("unit_by_unit") == {
        "wrapped as built": True,
        "random numbers go on": True,
        "and not back": True,
        "policy": True,
    }


# ---------------------------------------------------------------- a checkpoint as the source


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same state dict in every form that can be read."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoints(folder)
    return folder


def write_checkpoints(folder: Path) -> None:
    state = make(seed=8).state_dict()
    untied = {name: value for name, value in state.items() if name != "mid2.weight"}
    save_file(untied, folder / "one.safetensors")
    torch.save(state, folder / "state.pth")
    torch.save({"model": state}, folder / "merged.pth")
    several = folder / "several"
    several.mkdir()
    names = sorted(untied)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: untied[name] for name in part}, several / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = several / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


SOURCES = ["one.safetensors", "state.pth", "merged.pth", "several"]


@scenario
def from_checkpoint(rank: int) -> dict[str, bool]:
    from xla_fsdp import init_from_checkpoint

    found = {}
    with tempfile.TemporaryDirectory() as name:
        write_checkpoints(Path(name))
        for source in SOURCES:
            model = on_meta(Net)
            init = init_from_checkpoint(model, Path(name, source))
            wrapped = fsdp(model, auto_wrap_policy=always_wrap_policy, param_init_fn=init)
            found[source] = same(full(wrapped), make(seed=8).state_dict())
    return found


def test_a_checkpoint_fills_the_model_unit_by_unit() -> None:
    assert result("from_checkpoint") == dict.fromkeys(SOURCES, True)


@scenario
def streamed_ends(rank: int) -> bool:
    """Of modules that take the places of those for which the checkpoint was read."""
    from xla_fsdp import Recipe, init_from_checkpoint, parallelize
    from xla_fsdp.nn.chunked import LinearCrossEntropy

    state = make(Transformer, seed=8).state_dict()
    with tempfile.TemporaryDirectory() as folder:
        save_file(state, Path(folder, "model.safetensors"))
        model = on_meta(Transformer)
        init = init_from_checkpoint(model, folder)
        model.head = LinearCrossEntropy.from_linear(model.head)
        recipe = Recipe("lean", streamed_embedding=True)  # which raises if it is not possible
        wrapped, _, _ = parallelize(model, None, recipe, param_init_fn=init)
    return same(full(wrapped), state)


def test_streamed_ends_are_filled_from_a_checkpoint() -> None:
    assert result("streamed_ends")


def test_what_a_checkpoint_lacks_is_said_at_once(checkpoints: Path) -> None:
    from xla_fsdp import CheckpointError, init_from_checkpoint

    with torch.device("meta"):
        model = Net()
        model.extra = nn.Linear(2, 2)
        model.head = nn.Linear(WIDTH, 3)
        model.register_buffer("table", torch.zeros(2), persistent=False)
    with pytest.raises(CheckpointError) as caught:
        init_from_checkpoint(model, checkpoints / "one.safetensors")
    text = str(caught.value).replace(str(checkpoints), "")
    for name in ("extra.weight", "extra.bias", "table"):
        assert f"/one.safetensors: has no {name}, which the model needs. Give its value" in text
    assert "/one.safetensors: head.bias has shape (7,), the model's (3,)" in text
    assert len(caught.value.problems) == 5
    with pytest.raises(CheckpointError) as caught:
        init_from_checkpoint(Net(), checkpoints / "one.safetensors")
    assert "has inp.weight, but inp is not on the meta device and would keep its" in str(
        caught.value
    )
    other = on_meta(lambda: nn.Linear(2, 2))
    for strict in (True, False):  # with no name of the model, it is another model's
        with pytest.raises(CheckpointError, match=r"has head\.bias, which the model has not"):
            init_from_checkpoint(
                other, checkpoints / "one.safetensors", otherwise=print, strict=strict
            )


def test_otherwise_gives_what_the_checkpoint_lacks(checkpoints: Path) -> None:
    from xla_fsdp import init_from_checkpoint

    with torch.device("meta"):
        model = Net()
        model.register_buffer("table", torch.zeros(2), persistent=False)
    called = []

    def otherwise(module: Any) -> None:
        called.append(module)
        module.table.fill_(3.0)

    init = init_from_checkpoint(model, checkpoints / "one.safetensors", otherwise=otherwise)
    model.to_empty(device="cpu")
    for module in model.modules():
        init(module)
    assert called == [model]
    assert model.table.tolist() == [3.0, 3.0]
    assert torch.equal(model.scale, make(seed=8).scale)
    with pytest.raises(ValueError, match="Linear was not in the model when init_from_checkpoint"):
        init(nn.Linear(2, 2))


def test_files_that_are_no_checkpoint(checkpoints: Path, tmp_path: Path) -> None:
    from xla_fsdp import CheckpointError, init_from_checkpoint

    bad = {
        "none": (tmp_path / "none.safetensors", "there is no such file"),
        "cut": (tmp_path / "cut.safetensors", "truncated: its tensors end"),
        "text": (tmp_path / "text.pth", "truncated, or not a file written by torch.save"),
        "number": (tmp_path / "number.pth", "holds no state dict"),
        "folder": (tmp_path / "folder", "holds nothing, and no file of a whole model"),
        "index": (tmp_path / "x.safetensors.index.json", "is no index of files of a model"),
        "lost": (
            tmp_path / "y.safetensors.index.json",
            "lists 'gone.safetensors', which is missing",
        ),
        "out": (tmp_path / "z.safetensors.index.json", "gone.safetensors', which is no name of a"),
    }
    whole = (checkpoints / "one.safetensors").read_bytes()
    bad["cut"][0].write_bytes(whole[:-10])
    bad["text"][0].write_text("hello")
    torch.save(3, bad["number"][0])
    bad["folder"][0].mkdir()
    bad["index"][0].write_text("[]")
    bad["lost"][0].write_text('{"weight_map": {"a": "gone.safetensors"}}')
    bad["out"][0].write_text('{"weight_map": {"a": "../gone.safetensors"}}')
    for path, text in bad.values():
        with pytest.raises(CheckpointError, match=text):
            init_from_checkpoint(Net(), path)


# ---------------------------------------------------------------- memory

RANKS = 64
HIDDEN, BLOCKS = 2560, 26
"""Blocks of a transformer's size: 12 * 2560**2 elements each, 2.04e9 together, 8.2e9 bytes."""


class Big(nn.Module):
    """The parameters of a transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def build_as_one_of_64(rank: int, how: str) -> dict[str, int]:
    """Peak host memory, which on CPU holds the device's, too, in bytes above what imports took."""
    from xla_fsdp import LocalCollectives

    options = {"collectives": LocalCollectives(3, RANKS)}
    fsdp(nn.Linear(HIDDEN, 8), **options)  # what torch_xla sets up at its first use
    before = peak_memory()
    if how == "meta":
        blocks = on_meta(lambda: nn.Sequential(*(Big() for _ in range(BLOCKS))))
        policy = lambda module, recurse, **_: recurse or isinstance(module, Big)  # noqa: E731
        model = fsdp(blocks, auto_wrap_policy=policy, **options)
    else:
        model = fsdp(nn.Sequential(*(fsdp(Big(), **options) for _ in range(BLOCKS))), **options)
    return {
        "elements": sum(param.to_local().numel() for param in model.parameters()),
        "peak": peak_memory() - before,
    }


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.slow
@pytest.mark.parametrize("how", ["meta", "interleaved"])
def test_two_billion_parameters_as_one_of_64_ranks(how: str) -> None:
    found = run_on_ranks(build_as_one_of_64, 1, how)[0]
    unit = 12 * HIDDEN**2 * 4
    shards = BLOCKS * unit // RANKS
    assert found["elements"] == BLOCKS * unit // 4 // RANKS >= 2_000_000_000 // RANKS
    # All shards and one full unit; the allocator adds what lies free between the shards.
    assert found["peak"] < 2 * shards + unit + unit // 8


# ---------------------------------------------------------------- values from the host


@scenario
def assigned(rank: int) -> dict[str, bool]:
    """Whole tensors and shards on the host, given by ``load_state_dict(assign=True)``."""
    import torch_xla

    from xla_fsdp import fully_shard

    plain, found = make(lambda: nn.Linear(4, 6)), {}
    shards = fully_shard(make(lambda: nn.Linear(4, 6))).state_dict()
    host = {name: shard.to_local().detach().cpu() for name, shard in shards.items()}
    x = torch.ones(2, 4)
    for dtype in (torch.float32, torch.bfloat16):
        for kind, state in (("whole", plain.state_dict()), ("shards", host)):
            model = fully_shard(on_meta(lambda: nn.Linear(4, 6)))
            model.load_state_dict({k: v.to(dtype) for k, v in state.items()}, assign=True)
            y = model(x.to(torch_xla.device(), dtype))
            y.sum().backward()
            expected = copy.deepcopy(plain).to(dtype)(x.to(dtype))
            near = torch.allclose(y.detach().cpu(), expected, atol=0.01)
            found[f"{kind} {dtype}"] = near and y.dtype == dtype
    return found


def test_what_is_assigned_moves_to_the_device_of_its_rank() -> None:
    assert result("assigned") == dict.fromkeys(result("assigned"), True)
    assert len(result("assigned")) == 4


# ---------------------------------------------------------------- values that are pending


@scenario
def looked_at(rank: int) -> dict[str, list[float]]:
    """The parameter that was initialized last, by every way to look at its shard."""
    import torch_xla

    from xla_fsdp import fully_shard

    def model() -> nn.Sequential:
        with torch.device("meta"):
            made = nn.Sequential(fully_shard(nn.Linear(4, 8)))
        fully_shard(made).to_empty(device=torch_xla.device())
        made[0].bias.detach().fill_(1337)
        nn.init.constant_(made[0].weight, 0.5)
        nn.init.constant_(made[0].bias, 0.25)
        return made

    looks = {
        "to_local": lambda made: made[0].bias.to_local(),
        "full_tensor": lambda made: made[0].bias.full_tensor(),
        "pickle": lambda made: pickle.loads(pickle.dumps(made[0].bias)),
        "deepcopy": lambda made: copy.deepcopy(made[0].bias),
        "a copied model": lambda made: copy.deepcopy(made)[0].bias,
        "state_dict": lambda made: made.state_dict()["0.bias"],
        "full_state_dict": lambda made: full(made)["0.bias"],
    }
    return {name: look(model()).detach().tolist() for name, look in looks.items()}


def test_whoever_looks_at_a_shard_sees_the_values_it_was_given_last() -> None:
    for rank in range(2):
        for name, values in result("looked_at", rank).items():
            length = 8 if name.startswith("full") else 4
            assert values == [0.25] * length, name
