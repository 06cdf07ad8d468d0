"""What a rank of a new job takes from the files of an old one: which bytes, and what is refused."""

from __future__ import annotations

import contextlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from test.common.saving import Picture, differences, read, same_bits, save_step
from xla_fsdp.checkpoint import CheckpointError, consolidate_sharded_model_checkpoints
from xla_fsdp.checkpoint.convert.reshard import Selection
from xla_fsdp.checkpoint.files import checksum, copying
from xla_fsdp.checkpoint.files.storage import LocalStorage, open_storage
from xla_fsdp.checkpoint.files.tensor_source import ByteSource
from xla_fsdp.checkpoint.format.records import StateKind, StateRecord
from xla_fsdp.checkpoint.steps.step_directory import MARKER, complete_attempts

NAMES = ["a", "b.weight", "b.bias", "c", "d"]


def tensors() -> dict[str, Tensor]:
    """Uneven, scalar, empty and large enough for several ranks."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"a": (37, 11), "b.weight": (13, 3, 2), "b.bias": (13,), "c": (), "d": (0, 3)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@st.composite
def wrappings(draw: st.DrawFn) -> Picture:
    """The same tensors, joined, cut by rows or neither, with any multiple."""
    joined = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=5))
    at = draw(st.integers(0, len(joined)))
    flat = {f"flat_param_{i}": names for i, names in enumerate((joined[:at], joined[at:])) if names}
    free = [name for name in ("a", "b.weight", "b.bias") if name not in joined]
    rows = draw(st.lists(st.sampled_from(free), unique=True)) if free else []
    return Picture(tensors(), flat, rows, {"count": torch.tensor(3)}, draw(st.integers(1, 130)))


@given(wrappings(), wrappings(), st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_any_wrapping_on_any_ranks_gets_its_own_slices(
    old: Picture, new: Picture, old_ranks: int, new_ranks: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        assert save_step(directory, 1, old_ranks, shown=old) == [None] * old_ranks
        for rank in range(new_ranks):
            loaded = read(open_storage(directory), new, rank, new_ranks)
            assert differences(loaded, new, rank, new_ranks, 1) == []


def test_it_is_what_merging_and_slicing_gives(tmp_path: Path) -> None:
    old = Picture(tensors(), {"flat_param_0": ["b.weight", "b.bias", "c"]})
    new = Picture(tensors(), rows=["a"])
    save_step(tmp_path, 1, 5, shown=old)
    merged, _ = consolidate_sharded_model_checkpoints(
        f"{tmp_path}/step_00000001/rank", "*.safetensors", save_model=False
    )
    after = replace(new, params={name: merged[name] for name in new.params})
    for rank in range(3):
        loaded = read(open_storage(tmp_path), new, rank, 3)
        for key in after.keys():  # noqa: SIM118 (not a dict)
            expected = after.shard(key, rank, 3).reshape(-1)
            assert same_bits(loaded.model[key].reshape(-1), expected)


# ---------------------------------------------------------------- bytes


class Counting(LocalStorage):
    """Counts the bytes that are read, by file."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.read_bytes: dict[str, int] = {}

    def source(self, name: str, nbytes: int | None = None) -> ByteSource:
        inner = super().source(name, nbytes)
        counts = self.read_bytes

        class Source:
            nbytes = inner.nbytes

            def read_into(self, start: int, buffer: memoryview) -> None:
                counts[name] = counts.get(name, 0) + len(buffer)
                inner.read_into(start, buffer)

        return Source()


@pytest.mark.parametrize(("old_ranks", "new_ranks"), [(2, 8), (8, 3), (8, 8), (8, 1)])
def test_a_rank_reads_the_blocks_of_its_share_and_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_ranks: int, new_ranks: int
) -> None:
    block = 1 << 13
    monkeypatch.setattr(checksum, "BLOCK", block)
    monkeypatch.setattr(copying, "BLOCK", block)
    params = {f"layer{i}.weight": torch.randn(512, 128) for i in range(4)}
    old = Picture(params, {"flat_param_0": list(params)})
    save_step(tmp_path, 1, old_ranks, shown=old)
    data = 2 * sum(tensor.nbytes for tensor in params.values())  # with one state each
    headers = 4096  # more than a file's header, whole tensors and values take
    for rank in range(new_ranks):
        counting = Counting(str(tmp_path))
        assert differences(read(counting, Picture(params), rank, new_ranks), Picture(params), rank,
                           new_ranks, 1) == []  # fmt: skip
        opened = len(counting.read_bytes)
        assert data / new_ranks <= sum(counting.read_bytes.values())
        more = opened * headers + 16 * block  # the ends of 4 parameters and their states
        assert sum(counting.read_bytes.values()) <= data / new_ranks + more


def test_only_files_that_hold_something_needed_are_opened(tmp_path: Path) -> None:
    """And the first one, for what all have in common."""
    shown = Picture({"w": torch.randn(1024)})
    save_step(tmp_path, 1, 8, shown=shown)
    counting = Counting(str(tmp_path))
    read(counting, shown, 3, 4)
    opened = sorted(name[-22:-21] for name in counting.read_bytes)
    assert opened == ["0", "6", "7"]


# ---------------------------------------------------------------- refusals


def refusal(
    tmp_path: Path, old: Picture, new: Picture, ranks: int = 3, **options: Any
) -> list[str]:
    save_step(tmp_path, 1, 2, shown=old)
    with pytest.raises(CheckpointError) as caught:
        read(open_storage(tmp_path), new, 0, ranks, **options)
    folder = f"{tmp_path}/{complete_attempts(open_storage(tmp_path))[-1].folder}: "
    assert all(problem.startswith(folder) for problem in caught.value.problems)
    return [problem.removeprefix(folder) for problem in caught.value.problems]


def test_all_that_does_not_fit_is_reported_at_once(tmp_path: Path) -> None:
    old = Picture({"same": torch.ones(3), "old": torch.ones(3), "shape": torch.ones(2, 3)})
    new = Picture(
        {"same": torch.ones(3), "new": torch.ones(3), "shape": torch.ones(3, 2)},
        flat={"flat_param_0": ["same", "new"]},
        whole={"count": torch.ones(1)},
    )
    assert refusal(tmp_path, old, new) == [
        "shape has shape (2, 3) in the checkpoint, but (3, 2) in the model",
        "new (a part of flat_param_0) is in the model, but not in the checkpoint",
        "count is in the model, but not in the checkpoint",
        "old is in the checkpoint, but not in the model",
        "new is in group 0 of the optimizer, but in none of the checkpoint's",
        "the checkpoint has optimizer state of old, which is in no group of the optimizer",
    ]


def test_names_of_one_side_may_be_passed_over(tmp_path: Path) -> None:
    old = Picture({"same": torch.ones(3), "old": torch.ones(3)})
    new = Picture({"same": torch.ones(3), "new": torch.ones(3)})
    save_step(tmp_path, 1, 2, shown=old)
    loaded = read(open_storage(tmp_path), new, 0, 3, selection=Selection(strict=False))
    assert loaded.model.keys() == {"same"}
    assert loaded.optimizer.states.keys() == {"same"}
    joined = Picture(new.params, flat={"flat_param_0": ["same", "new"]})
    problems = refusal(tmp_path, old, joined, selection=Selection(strict=False))
    assert problems == ["new (a part of flat_param_0) is in the model, but not in the checkpoint"]


def test_groups_follow_the_parameters(tmp_path: Path) -> None:
    old = Picture(tensors(), groups=[(["a", "c"], 0.1), (["b.weight", "b.bias", "d"], 0.2)])
    other = Picture(
        tensors(), groups=[(["d", "b.weight"], 0), (["a"], 0), (["b.bias"], 0), (["c"], 0)]
    )
    save_step(tmp_path, 1, 2, shown=old)
    loaded = read(open_storage(tmp_path), other, 0, 3)
    assert [group.options["lr"] for group in loaded.optimizer.groups] == [0.2, 0.1, 0.2, 0.1]
    assert loaded.optimizer.groups[0].params == ("d", "b.weight")
    joined = Picture(tensors(), flat={"flat_param_0": NAMES})
    assert refusal(tmp_path, old, joined) == [
        "group 0 of the optimizer joins parameters of several groups of the checkpoint with "
        "different settings: a, b.weight. Create the optimizer with the same groups "
        "(flatten_parameters joins parameters, too)"
    ]


class Steps(Picture):
    """Parameters that were not updated equally often."""

    def states(self, step: int, rank: int, shards: Any) -> Any:
        states = super().states(step, rank, shards)
        states["a"]["step"] = torch.tensor(17.0)
        return states


def test_joined_parameters_must_have_made_the_same_steps(tmp_path: Path) -> None:
    joined = Picture(tensors(), flat={"flat_param_0": NAMES})
    assert refusal(tmp_path, Steps(tensors()), joined) == [
        "flat_param_0 joins parameters whose optimizer state step differs. Load with the wrapping "
        "that was used for saving"
    ]


class Factored(Picture):
    """With optimizer state of a shape of its own, as Adafactor keeps it."""

    def metadata(self, rank: int, world_size: int, optimizer: bool = True) -> Any:
        metadata = super().metadata(rank, world_size, optimizer)
        record = metadata.optimizer
        if record is None:
            return metadata
        odd = {
            key: replace(s, sharded=(), whole=("exp_avg", "step"))
            for key, s in record.states.items()
        }
        return replace(metadata, optimizer=replace(record, states=odd))

    def states(self, step: int, rank: int, shards: Any) -> Any:
        own, states = torch.full((4, 1), float(rank)), super().states(step, rank, shards)
        return {key: {**state, "exp_avg": own} for key, state in states.items()}


def test_state_of_another_shape_needs_the_same_ranks(tmp_path: Path) -> None:
    shown = Factored({"w": torch.randn(1024)})
    save_step(tmp_path, 1, 2, shown=shown)
    for rank in range(2):
        loaded = read(open_storage(tmp_path), shown, rank, 2)
        assert loaded.optimizer.states["w"]["exp_avg"].value.tolist() == [[rank]] * 4
    assert refusal(tmp_path, shown, shown) == [
        "optimizer state exp_avg of w has shape (4, 1), neither that of the parameter nor one "
        "number, so it cannot be cut anew. Load it with the wrapping and the 2 ranks that it was "
        "saved with, or load without optimizer"
    ]


def test_a_model_can_be_loaded_without_its_optimizer(tmp_path: Path) -> None:
    shown = Picture(tensors())
    save_step(tmp_path, 1, 2, shown=shown)

    class NoOptimizer(Picture):
        def target(self, rank: int, world_size: int) -> Any:
            return replace(super().target(rank, world_size), groups=None)

    loaded = read(open_storage(tmp_path), NoOptimizer(tensors()), 0, 3)
    assert loaded.optimizer is None
    assert loaded.model.keys() == set(NAMES)


class Ignored(Picture):
    """A parameter, ``w``, that is trained but not sharded."""

    def metadata(self, rank: int, world_size: int, optimizer: bool = True) -> Any:
        metadata = super().metadata(rank, world_size, optimizer)
        record = metadata.optimizer
        if record is None:
            return metadata
        states = {**record.states, "w": StateRecord((), ("exp_avg", "step"), {}, ("step",))}
        return replace(metadata, optimizer=replace(record, states=states))

    def states(self, step: int, rank: int, shards: Any) -> Any:
        own = {"exp_avg": self.whole["w"] * 2, "step": torch.tensor(float(step))}
        return {**super().states(step, rank, shards), "w": own}


@pytest.mark.parametrize("to_sharded", [True, False])
def test_a_whole_parameter_may_become_a_sharded_one(tmp_path: Path, to_sharded: bool) -> None:
    """And the other way round, with its optimizer state."""
    w, a, groups = torch.randn(300), torch.ones(5), [(("a", "w"), 0.1)]
    whole = Ignored({"a": a}, whole={"w": w}, groups=groups)
    sharded = Picture({"a": a, "w": w}, groups=groups)
    old, new = (whole, sharded) if to_sharded else (sharded, whole)
    save_step(tmp_path, 1, 2, shown=old)
    for rank in range(3):
        loaded = read(open_storage(tmp_path), new, rank, 3)
        state = loaded.optimizer.states["w"]
        expected = new.shard("w", rank, 3) if to_sharded else w
        assert same_bits(loaded.model["w"], expected)
        assert same_bits(state["exp_avg"].value, expected * 2)
        assert state["exp_avg"].kind is (StateKind.SHARD if to_sharded else StateKind.DEVICE)
        assert (state["step"].value.item(), state["step"].kind) == (1.0, StateKind.HOST)


# ---------------------------------------------------------------- damaged files


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in a JSON value."""
    parts: Any = ()
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
    return [path, *(found for key, part in parts for found in leaves(part, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with something else at a path; without it if ``new`` is None."""
    if not path:
        return new
    copy = value.copy()
    if new is None and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return copy


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_metadata_is_refused_or_harmless(data: st.DataObject) -> None:
    shown = Picture(tensors(), {"flat_param_0": ["b.weight", "b.bias"]}, whole={"i": torch.ones(2)})
    new_ranks = data.draw(st.sampled_from([2, 3]))
    with tempfile.TemporaryDirectory() as directory:
        save_step(directory, 1, 2, shown=shown)
        path = Path(directory, "step_00000001", "rank-00000-of-00002.safetensors")
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        own = json.loads(header["__metadata__"]["xla_fsdp"])
        where = data.draw(st.sampled_from(leaves(own)[1:]))
        odd = st.sampled_from([None, 0, -1, 3, 10**15, "a", "b.bias", [], {}, [1], {"a": 1}, 0.5])
        header["__metadata__"]["xla_fsdp"] = json.dumps(changed(own, where, data.draw(odd)))
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[start:])
        marker = Path(directory, "step_00000001", MARKER)
        listed = json.loads(marker.read_text())
        listed["files"][path.name] = path.stat().st_size
        marker.write_text(json.dumps(listed))
        with contextlib.suppress(CheckpointError):
            loaded = read(open_storage(directory), shown, 0, new_ranks)
            assert differences(loaded, shown, 0, new_ranks, 1) == [], where
