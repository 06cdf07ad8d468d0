"""Directories of torch.distributed.checkpoint: FSDP2 reads ours, we read its, nothing runs code."""

from __future__ import annotations

import pathlib
import pickle
import random
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, StorageMeta
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from test.common.ranks import ROOT
from test.common.shard_maker import FullModel, bits, run, snapshot
from xla_fsdp.checkpoint import CheckpointError, find_problems, open_shard
from xla_fsdp.checkpoint.convert import dcp_output
from xla_fsdp.checkpoint.convert.consolidate import load_model, merge_shards
from xla_fsdp.checkpoint.files import outputs
from xla_fsdp.checkpoint.format.records import StateKind

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
)


class Net(nn.Module):
    """Tied, normalized, with a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x))) * self.scale


def trained(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    """A model after two steps."""
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01 * (seed + 1))
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randint(0, 11, (7,))).logsumexp(-1).sum().backward()
        optimizer.step()
    return net, optimizer


def sharded(net: Net, optimizer: torch.optim.Optimizer) -> FullModel:
    """The same as shards are made of."""
    names = {id(p): n for n, p in net.named_parameters()}
    states = optimizer.state_dict()["state"]
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    return FullModel(
        params={n: p.detach() for n, p in net.named_parameters()},
        ties={"head.weight": "embed.weight"},
        whole=dict(net.named_buffers()),
        states={
            n: {w: states[i][w] for w in ("exp_avg", "exp_avg_sq")} for i, n in enumerate(order)
        },
        steps={n: states[i]["step"] for i, n in enumerate(order)},
    )


def flat(states: Any) -> dict[str, torch.Tensor]:
    """All tensors of an optimizer's state."""
    return {f"{key}.{w}": value for key, state in states.items() for w, value in state.items()}


def states_of(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The same by the names of parameters."""
    names = [name for name, _ in net.named_parameters()]
    return flat({names[i]: state for i, state in optimizer.state_dict()["state"].items()})


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DCP directory made of shards of a model trained with seed 0."""
    base = tmp_path_factory.mktemp("dcp")
    (base / "run").mkdir()
    sharded(*trained(0)).save_safetensors(base / "run", 3)
    item = dcp_output.ITEM
    dcp_output.ITEM = 64  # several items for a tensor
    try:
        assert run("--ckpt_prefix", base / "run", "--save_path", base / "d", "--format", "dcp") == 0
    finally:
        dcp_output.ITEM = item
    assert {path.name for path in base.iterdir()} == {"run", "d"}
    return base / "d"


def test_fsdp2s_functions_load_what_is_exported(exported: Path) -> None:
    expected, expected_optimizer = trained(0)
    net, optimizer = trained(1)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    for group in optimizer_state["param_groups"]:  # shards here know only these settings
        group_keys = {"params", "lr", "betas"}
        assert group_keys <= group.keys()
        for key in group.keys() - group_keys:
            del group[key]
    content = {"model": model_state, "optim": optimizer_state}
    dcp.load(content, checkpoint_id=exported, no_dist=True)
    assert bits(content["model"]) == bits(expected.state_dict())
    assert content["optim"]["param_groups"][0]["lr"] == 0.1
    assert content["optim"]["param_groups"][0]["betas"] == [0.9, 0.99]
    set_state_dict(
        net, optimizer, model_state_dict=content["model"], optim_state_dict=content["optim"]
    )
    assert bits(net.state_dict()) == bits(expected.state_dict())
    assert bits(states_of(net, optimizer)) == bits(states_of(net, expected_optimizer))


def test_torchtitan_loads_what_is_converted(tmp_path: Path) -> None:
    """Its names: those of the model by themselves, and the optimizer's flat."""
    (tmp_path / "run").mkdir()
    expected, expected_optimizer = trained(0)
    sharded(expected, expected_optimizer).save_safetensors(tmp_path / "run", 3)
    assert run("convert", tmp_path / "run", "--to", "dcp", "--torchtitan") == 0
    net, optimizer = trained(1)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(net, optimizer, options=options)
    known = {k for k in optimizer_state if not k.startswith("param_groups.") or k.endswith(".lr")}
    content = {**model_state, "optimizer": {k: optimizer_state[k] for k in known}}
    dcp.load(content, checkpoint_id=tmp_path / "run_dcp", no_dist=True)
    found = content.pop("optimizer")
    assert bits(content) == bits(expected.state_dict())
    set_state_dict(
        net, optimizer, model_state_dict=content, optim_state_dict={**optimizer_state, **found}
    )
    assert bits(states_of(net, optimizer)) == bits(states_of(net, expected_optimizer))
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("flatten", [False, True])
def test_what_fsdp2s_functions_save_is_imported(tmp_path: Path, flatten: bool) -> None:
    net, optimizer = trained(2)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model_state, optimizer_state = get_state_dict(net, optimizer, options=options)
    dcp.save(
        {"model": model_state, "optim": optimizer_state}, checkpoint_id=tmp_path / "d", no_dist=True
    )
    out = tmp_path / "full.pth"
    assert run("--ckpt_prefix", tmp_path / "d", "--save_path", out) == 0
    content = torch.load(out, weights_only=True)
    assert bits(content["model"]) == bits(net.state_dict())
    assert bits(flat(content["optimizer"]["state"])) == bits(states_of(net, optimizer))
    if not flatten:
        assert content["optimizer"]["param_groups"][0]["lr"] == 0.03
    new = tmp_path / "new"
    assert run("--ckpt_prefix", tmp_path / "d", "--save_path", new, "--to_world_size", 2) == 0
    again = tmp_path / "again.pth"
    assert run("--ckpt_prefix", new, "--save_path", again) == 0
    assert bits(torch.load(again, weights_only=True)["model"]) == bits(net.state_dict())


@pytest.mark.parametrize(
    ("kind", "sharded", "whole"),
    [
        ("AdamW", {"exp_avg", "exp_avg_sq"}, {"step"}),
        ("Adafactor", set(), {"step", "unsharded.row_var", "unsharded.col_var"}),
    ],
)
def test_state_that_is_no_parameters_is_not_cut(
    tmp_path: Path, kind: str, sharded: set[str], whole: set[str]
) -> None:
    """Not the count of steps of a scalar, either, which has the scalar's shape."""
    torch.manual_seed(0)
    net = Net()
    optimizer = getattr(torch.optim, kind)(net.parameters())
    net(torch.randint(0, 11, (7,))).logsumexp(-1).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save(
        {"model": model_state, "optim": optimizer_state}, checkpoint_id=tmp_path / "d", no_dist=True
    )
    new = tmp_path / "new"
    assert run("--ckpt_prefix", tmp_path / "d", "--save_path", new, "--to_world_size", 2) == 0
    for path in new.rglob("*.safetensors"):
        states = open_shard(str(path)).metadata["optimizer"]["states"]
        assert set(states["embed.weight"]["sharded"]) == sharded
        assert set(states["embed.weight"]["whole"]) == whole
        assert states["scale"]["whole"] == ["step"]


@pytest.mark.slow
def test_a_job_of_two_fsdp2_ranks_goes_on_from_here_and_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"0.weight": (7, 6), "0.bias": (7,), "1.weight": (5, 7), "1.bias": (5,)}
    params, *states = (
        {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
        for _ in range(3)
    )
    model = FullModel(
        params,
        states={n: {"exp_avg": states[0][n], "exp_avg_sq": states[1][n]} for n in shapes},
        steps={n: torch.tensor(2.0) for n in shapes},
    )
    (tmp_path / "run").mkdir()
    model.save_safetensors(tmp_path / "run", 3)
    merged, ours, theirs = tmp_path / "full.pth", tmp_path / "ours", tmp_path / "theirs"
    assert run("--ckpt_prefix", tmp_path / "run", "--save_path", merged) == 0
    assert run("--ckpt_prefix", tmp_path / "run", "--save_path", ours, "--format", "dcp") == 0
    command = [sys.executable, str(ROOT / "test" / "common" / "fsdp2_user.py")]
    files = [str(path) for path in (tmp_path / "meet", ours, merged, theirs)]
    ranks = [
        subprocess.Popen([*command, str(r), "2", *files], stderr=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    for rank in ranks:
        _, err = rank.communicate(timeout=300)
        assert rank.returncode == 0, err
    assert run("--ckpt_prefix", theirs, "--save_path", tmp_path / "back.pth") == 0
    content = torch.load(tmp_path / "back.pth", weights_only=True)
    assert bits(content["model"]) == bits(params)
    for name, state in content["optimizer"]["state"].items():
        assert torch.equal(state["exp_avg"], states[0][name])
        assert torch.equal(state["exp_avg_sq"], states[1][name])
        assert state["step"] == 2


@pytest.mark.parametrize(
    "form", ["torchtitan", "accelerate", "accelerate model", "app", "lightning"]
)
def test_what_others_save_is_imported(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The optimizer is not lost, and what is neither model nor optimizer is named."""
    net, optimizer = trained(2)
    flattened = StateDictOptions(flatten_optimizer_state_dict=form == "torchtitan")
    model_state, optimizer_state = get_state_dict(net, optimizer, options=flattened)
    if form == "torchtitan":  # learning rates may be tensors
        for option in [name for name in optimizer_state if name.endswith(".lr")]:
            optimizer_state[option] = torch.tensor(0.03, dtype=torch.float64)
    else:
        optimizer_state["param_groups"][0] |= {
            "lr": torch.tensor([0.03], dtype=torch.float64),
            "betas": (torch.tensor(0.9, dtype=torch.float64), 0.999),
            "eps": [torch.tensor(1e-8)],  # is told, as parts of lists are entries of their own
        }
    saved: dict[str, dict[str, Any]] = {
        "torchtitan": {
            "": {
                **model_state,
                "optimizer": optimizer_state,
                "lr_scheduler": {"last_epoch": 2},
                "train_state": {"step": torch.tensor(2)},
            }
        },
        "app": {"": {"app": {"model": model_state, "optim": optimizer_state}}},
        "lightning": {
            "": {
                "state_dict": {**model_state, "head._extra_state": {"scale": 2}},
                "optimizer_0": optimizer_state,
                "rng": torch.get_rng_state(),
            }
        },
    }
    of_accelerate = {
        "pytorch_model_fsdp_0": {"model": model_state},
        "optimizer_0": {"optimizer": optimizer_state},
    }
    folder = tmp_path / "d"
    for name, content in saved.get(form, of_accelerate).items():
        dcp.save(content, checkpoint_id=folder / name, no_dist=True)
    prefix = folder / "pytorch_model_fsdp_0" if form == "accelerate model" else folder
    out = tmp_path / "full.pth"
    assert run("--ckpt_prefix", prefix, "--save_path", out) == 0
    told = capsys.readouterr().out
    assert ("nor optimizer: train_state, lr_scheduler" in told) == (form == "torchtitan")
    assert (
        "nor optimizer: optimizer_0.param_groups.0.eps.0, rng, state_dict.head._extra" in told
    ) == (form == "lightning")
    assert ("param_groups.0.eps.0" in told) == (form != "torchtitan")
    content = torch.load(out, weights_only=True)
    assert bits(content["model"]) == bits(net.state_dict())
    assert bits(flat(content["optimizer"]["state"])) == bits(states_of(net, optimizer))
    [group] = content["optimizer"]["param_groups"]
    assert (group["lr"], tuple(group["betas"])) == (0.03, (0.9, 0.999))
    assert sorted(group["params"]) == sorted(name for name, _ in net.named_parameters())
    if form.startswith("accelerate"):
        assert run("--ckpt_prefix", folder / "optimizer_0", "--save_path", tmp_path / "o.pth") == 2
        assert "give the directory pytorch_model_fsdp_0" in capsys.readouterr().err


def test_an_optimizer_without_names_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net, optimizer = trained(2)
    content = {"model": net.state_dict(), "optim": optimizer.state_dict()}
    dcp.save(content, checkpoint_id=tmp_path / "d", no_dist=True)
    assert run("--ckpt_prefix", tmp_path / "d", "--save_path", tmp_path / "out.pth") == 2
    assert "params holds no names; save get_optimizer_state_dict" in capsys.readouterr().err


def test_a_model_alone_is_imported(tmp_path: Path) -> None:
    net, _ = trained(3)
    dcp.save(net.state_dict(), checkpoint_id=tmp_path / "d", no_dist=True)
    assert run("--ckpt_prefix", tmp_path / "d", "--save_path", tmp_path / "f.pth") == 0
    content = torch.load(tmp_path / "f.pth", weights_only=True)
    assert content.keys() == {"model"}
    assert bits(content["model"]) == bits(net.state_dict())


def test_directories_of_python_3_13_are_read(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where paths, of which DCP's metadata holds one, are in another module."""
    shutil.copytree(exported, tmp_path / "d")
    monkeypatch.setitem(sys.modules, "pathlib._local", pathlib)
    monkeypatch.setattr(pathlib.PosixPath, "__module__", "pathlib._local")
    path = tmp_path / "d"
    edit(lambda metadata: setattr(metadata, "storage_meta", StorageMeta(path)))(path)
    assert b"pathlib._local" in (tmp_path / "d" / ".metadata").read_bytes()
    assert run("--ckpt_prefix", tmp_path / "d", "--save_path", tmp_path / "full.pth") == 0


def test_an_existing_directory_is_kept_unless_overwrite(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "notes").write_text("mine")
    arguments = ["--ckpt_prefix", exported, "--save_path", tmp_path / "d", "--format", "dcp"]
    assert run(*arguments) == 2
    assert "d: exists already; " in capsys.readouterr().err
    assert snapshot(tmp_path / "d") == {"notes": b"mine"}
    assert run(*arguments, "--overwrite") == 0
    assert (tmp_path / "d" / ".metadata").exists()
    assert not (tmp_path / "d" / "notes").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_damage_of_a_shard_leaves_no_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sharded(*trained(0)).save_safetensors(tmp_path, 1)[0]
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    assert run("--ckpt_prefix", tmp_path, "--save_path", tmp_path / "d", "--format", "dcp") == 2
    assert "is damaged" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


class Evil:
    """Runs code when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return warnings.warn, ("code of the file ran",)


def edit(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Damage to a directory: its metadata changed in place, or replaced."""

    def damage(directory: Path) -> None:
        metadata = pickle.loads((directory / ".metadata").read_bytes())
        (directory / ".metadata").write_bytes(pickle.dumps(change(metadata) or metadata))

    return damage


def elsewhere(metadata: Any) -> None:
    """Put the tensors into a file outside of the directory."""
    for place in metadata.storage_data.values():
        place.relative_path = "../../etc/passwd"


def enlarge(metadata: Any) -> None:
    """Claim more elements than there are bytes."""
    metadata.state_dict_metadata["model.embed.weight"].size = torch.Size([10**12, 10**3])


def move(metadata: Any) -> None:
    """Give a tensor the item of another one."""
    items = {index.fqn: index for index in metadata.storage_data}
    first, second = items["model.norm.weight"], items["model.norm.bias"]
    metadata.storage_data[first] = metadata.storage_data[second]


def forget(metadata: Any) -> None:
    """Leave the item of a tensor out."""
    index = next(i for i in metadata.storage_data if i.fqn == "model.norm.weight")
    del metadata.storage_data[index]


def shrink(metadata: Any) -> None:
    """Leave one of a tensor's parts out."""
    metadata.state_dict_metadata["model.embed.weight"].chunks.pop()


def rename_path(metadata: Any) -> None:
    """Let a tensor come from another name."""
    metadata.planner_data["model.norm.weight"] = ("model", "norm.bias")


def without_paths(metadata: Any) -> None:
    """Leave out where the entries come from."""
    del metadata.planner_data


def without_a_path(metadata: Any) -> None:
    """Leave out where one entry comes from."""
    del metadata.planner_data["optim.param_groups.0.lr"]


def recast(metadata: Any) -> None:
    """State another dtype of the same size."""
    entry = metadata.state_dict_metadata["model.norm.weight"]
    entry.properties = replace(entry.properties, dtype=torch.int32)


M = (1 << 61) - 1  # has the hash of 0
ALIKE = [M * k for k in range(1, 300)]
PLACES = [
    torch.Size([M * times if dim == at else 0 for dim in range(32)])
    for at in range(32)
    for times in (1, 2, 3)
]  # of one hash, all that a tensor can have


def many_items(metadata: Any) -> None:
    """Items at offsets that have one hash."""
    index, place = next(iter(metadata.storage_data.items()))
    metadata.storage_data |= {replace(index, offset=offset): place for offset in PLACES}


def many_parts(metadata: Any) -> None:
    """Parts at offsets that have one hash, and as many items."""
    index, place = next(iter(metadata.storage_data.items()))
    metadata.storage_data |= {replace(index, fqn=f"x{number}"): place for number in range(300)}
    entry = metadata.state_dict_metadata["model.embed.weight"]
    entry.chunks = [ChunkStorageMetadata(offset, entry.chunks[0].sizes) for offset in PLACES]


def many_keys(metadata: Any) -> None:
    """Numbers of one hash for names."""
    metadata.planner_data |= dict.fromkeys(ALIKE, ("model",))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit(many_items), "refused: more than 64 of its keys have one hash"),
        (edit(many_parts), "refused: more than 64 of its keys have one hash"),
        (edit(many_keys), "refused: more than 64 of its keys have one hash"),
        (edit(move), "model.norm.weight have the same bytes of __"),
        (edit(forget), "'model.norm.weight' at (0,) has no item in the files"),
        (edit(shrink), "the parts of model.embed.weight of shape (11, 5) do not fill it exactly"),
        (edit(rename_path), "'model.norm.weight' comes from ('model', 'norm.bias'), which is an"),
        (edit(without_paths), "planner_data is missing"),
        (edit(without_a_path), "planner_data lacks 'optim.param_groups.0.lr'"),
        (edit(recast), "model.norm.weight is TensorSpec(dtype=torch.float32, shape=(5,)) in its"),
        (edit(lambda m: Evil()), "refused: it holds a _warnings.warn, and loading that would run"),
        (edit(lambda m: [1]), "holds a list, expected DCP's Metadata"),
        (edit(elsewhere), "model.embed.weight is in '../../etc/passwd', which is not the name of"),
        (edit(enlarge), "model.embed.weight of shape (1000000000000, 1000) is larger than what"),
        (lambda d: (d / ".metadata").write_bytes(b"hello"), "truncated, or not DCP's metadata"),
        (lambda d: (d / "__0_0.distcp").unlink(), "the file __0_0.distcp is missing"),
        (lambda d: (d / "__0_0.distcp").write_bytes(b""), "__0_0.distcp, which has 0 bytes: trunc"),
    ],
)
def test_damaged_directories_are_refused(
    exported: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], Any],
    message: str,
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in exported.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    damage(copy)
    assert run("--ckpt_prefix", copy, "--save_path", tmp_path / "full.pth") == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(message in line for line in lines), lines
    assert all(line.startswith(f"consolidate_sharded_ckpts: {copy}") for line in lines), lines
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def changed_reads(
    exported: Path, work: Path, metadata: bool, count: int, seed: int
) -> dict[str, int]:
    """Flip bits of a directory's metadata, or of its tensors and values, and merge; what came of
    it."""
    chance = random.Random(seed)
    sound = {path.name: path.read_bytes() for path in exported.iterdir()}
    names = [name for name in sound if (name == ".metadata") == metadata]
    expected = content_of(exported)
    copy = work / "copy"
    shutil.copytree(exported, copy)
    found = {"refused": 0, "right": 0, "wrong": 0}
    for _ in range(count):
        name = chance.choice(names)
        data = bytearray(sound[name])
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (copy / name).write_bytes(data)
        try:
            found["right" if content_of(copy) == expected else "wrong"] += 1
        except CheckpointError:
            found["refused"] += 1
        (copy / name).write_bytes(sound[name])
    return found


def content_of(directory: Path) -> Any:
    """The model and the optimizer in a directory."""
    shard = open_shard(str(directory))
    if problems := find_problems([shard]):
        raise CheckpointError(problems)
    full, _ = merge_shards([shard], optimizer=True)
    states = {
        (name, what): each.value if each.kind is StateKind.VALUE else bits({"": each.value.load()})
        for name, entries in full.optimizer.states.items()
        for what, each in entries.items()
    }
    return bits(load_model(full)), states, full.optimizer.groups


@pytest.mark.parametrize("metadata", [False, True], ids=["items", "metadata"])
@pytest.mark.parametrize("count", [60, pytest.param(1500, marks=pytest.mark.slow)])
def test_no_changed_item_is_merged(
    exported: Path, tmp_path: Path, metadata: bool, count: int
) -> None:
    found = changed_reads(exported, tmp_path, metadata, count, seed=5)
    print(found)
    assert found["wrong"] == 0
    assert found["refused"] > count // 10


def test_a_damaged_tensor_is_named(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in exported.iterdir():
        (copy / path.name).write_bytes(path.read_bytes().replace(b"data.pkl", b"data.xxx"))
    assert run("--ckpt_prefix", copy, "--save_path", tmp_path / "full.pth") == 2
    assert "cannot be read: its file is damaged, or not DCP's" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


@pytest.mark.parametrize("verify", [True, False])
def test_a_written_directory_is_read_again(
    exported: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    verify: bool,
) -> None:
    copy = outputs.copy
    weight = bits({"": trained(0)[0].norm.weight})[""][2]

    def copy_to_a_failing_disk(tasks: Any, **options: Any) -> Any:
        crcs = copy(tasks, **options)
        (path,) = {Path(task.path) for task in tasks}
        assert weight in path.read_bytes()
        path.write_bytes(path.read_bytes().replace(weight, bytes(len(weight))))
        return crcs

    arguments = ["--ckpt_prefix", exported, "--save_path", tmp_path / "d", "--format", "dcp"]
    arguments += ["--verify"] if verify else []
    assert run(*arguments) == 0
    shutil.rmtree(tmp_path / "d")
    monkeypatch.setattr(outputs, "copy", copy_to_a_failing_disk)
    capsys.readouterr()
    assert run(*arguments) == (2 if verify else 0)
    if verify:
        assert re.search(
            f"{tmp_path}/d/__0_0.distcp: bytes from \\d+ on are not what was written there",
            capsys.readouterr().err,
        )
        assert list(tmp_path.iterdir()) == []
        return
    assert run("inspect", "--ckpt_prefix", tmp_path / "d", "--verify") == 2
    out, err = capsys.readouterr()
    assert f"{tmp_path}/d: model.norm.weight cannot be read: its file is damaged" in err
    assert re.search(r"verified \d+ tensors; 0 have no checksum", out)
