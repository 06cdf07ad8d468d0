"""Merging shards gives the full tensors bit for bit, and writes them completely or not at all."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from test.common.shard_maker import FullModel, bits, every_kind, snapshot
from xla_fsdp.checkpoint import (
    CheckpointError,
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
)

# ---------------------------------------------------------------- merging


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_files_merge_bit_for_bit(tmp_path: Path, world_size: int) -> None:
    model = every_kind()
    model.save(tmp_path, world_size, optimizer={"state": torch.ones(3)}, epoch=2)
    merged, path = consolidate_sharded_model_checkpoints(str(tmp_path / "mnist"))
    assert path == str(tmp_path / "mnist_consolidated.pth")
    assert bits(merged) == bits(model.expected())
    saved = torch.load(path, weights_only=True)
    assert saved.keys() == {"model"}
    assert bits(saved["model"]) == bits(merged)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=5),
    world_size=st.integers(1, 8),
    multiple=st.sampled_from([1, 3, 128]),
    flat=st.booleans(),
)
def test_any_shapes_merge(
    shapes: list[tuple[int, ...]], world_size: int, multiple: int, flat: bool
) -> None:
    model = FullModel({f"p{i}": torch.randn(s) for i, s in enumerate(shapes)}, multiple=multiple)
    if flat:
        model.flat = {"flat_param_0": list(model.params)}
    shards = [model.shard(rank, world_size) for rank in range(world_size)]
    merged = consolidate_sharded_state_dicts(
        [shard["model"] for shard in shards], shards[-1]["shard_metadata"]
    )
    assert bits(merged) == bits(model.params)


def test_whole_tensors_are_those_of_rank_0(tmp_path: Path) -> None:
    for value, path in enumerate(every_kind().save(tmp_path, 2)):
        content = torch.load(path, weights_only=True)
        content["model"]["ignored"].fill_(value)
        torch.save(content, path)
    merged, _ = consolidate_sharded_model_checkpoints(str(tmp_path / "mnist"))
    assert torch.equal(merged["ignored"], torch.zeros(3, 2))


def test_tied_names_share_memory_in_the_result_and_in_the_file(tmp_path: Path) -> None:
    every_kind().save(tmp_path, 2)
    merged, path = consolidate_sharded_model_checkpoints(str(tmp_path / "mnist"))
    for model in (merged, torch.load(str(path), weights_only=True)["model"]):
        for alias, canonical in every_kind().ties.items():
            assert model[alias].data_ptr() == model[canonical].data_ptr()


def test_members_of_a_flat_parameter_do_not_share_memory(tmp_path: Path) -> None:
    every_kind().save(tmp_path, 2)
    merged, _ = consolidate_sharded_model_checkpoints(str(tmp_path / "mnist"))
    bias = merged["layer.bias"]
    assert bias.untyped_storage().nbytes() == bias.numel() * bias.element_size()


def test_result_is_independent_of_the_state_dicts() -> None:
    shard = FullModel({"w": torch.ones(128)}, whole={"b": torch.ones(2)}).shard(0, 1)
    merged = consolidate_sharded_state_dicts([shard["model"]], shard["shard_metadata"])
    shard["model"]["w"].fill_(5)
    shard["model"]["b"].fill_(5)
    assert torch.equal(merged["w"], torch.ones(128))
    assert torch.equal(merged["b"], torch.ones(2))


def test_extra_state_that_is_no_tensor_is_kept() -> None:
    shard = FullModel({"w": torch.ones(3)}).shard(0, 1)
    shard["model"]["_extra_state"] = {"step": 3}
    merged = consolidate_sharded_state_dicts([shard["model"]], shard["shard_metadata"])
    assert merged["_extra_state"] == {"step": 3}


def test_nothing_is_saved_unless_asked(tmp_path: Path) -> None:
    every_kind().save(tmp_path, 2)
    before = snapshot(tmp_path)
    _, path = consolidate_sharded_model_checkpoints(str(tmp_path / "mnist"), save_model=False)
    assert path is None
    assert snapshot(tmp_path) == before


def test_suffix_and_save_path_are_followed(tmp_path: Path) -> None:
    model = every_kind()
    model.save(tmp_path, 2)
    (tmp_path / "mnist_notes.txt").write_text("not matched by the suffix")
    out = str(tmp_path / "full.pth")
    _, path = consolidate_sharded_model_checkpoints(str(tmp_path / "mnist"), "_rank-*-of-*", out)
    assert path == out
    assert bits(torch.load(out, weights_only=True)["model"]) == bits(model.expected())


def test_a_prefix_with_brackets_is_taken_literally(tmp_path: Path) -> None:
    directory = tmp_path / "run[1]"
    directory.mkdir()
    every_kind().save(directory, 2)
    _, path = consolidate_sharded_model_checkpoints(str(directory / "mnist"))
    assert path == str(directory / "mnist_consolidated.pth")


def test_files_in_torchs_old_format_are_refused(tmp_path: Path) -> None:
    for path in every_kind().save(tmp_path, 2):
        torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"before 1\.6, .* save it anew by torch\.save"):
        consolidate_sharded_model_checkpoints(str(tmp_path / "mnist"))


def test_files_never_execute_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every_kind().save(tmp_path, 2)

    def unpickle(*_: Any, **__: Any) -> None:
        raise AssertionError("Python's or torch's own unpickler ran")

    monkeypatch.setattr(torch, "load", unpickle)
    monkeypatch.setattr(pickle._Unpickler, "find_class", unpickle)
    consolidate_sharded_model_checkpoints(str(tmp_path / "mnist"))


# ---------------------------------------------------------------- the output file


def test_existing_output_is_kept_unless_overwrite(tmp_path: Path) -> None:
    model = every_kind()
    model.save(tmp_path, 2)
    prefix = str(tmp_path / "mnist")
    _, path = consolidate_sharded_model_checkpoints(prefix)
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match=r"mnist_consolidated\.pth: exists already; "):
        consolidate_sharded_model_checkpoints(prefix)
    assert snapshot(tmp_path) == before
    Path(str(path)).write_bytes(b"half an older outp")
    consolidate_sharded_model_checkpoints(prefix, overwrite=True)
    assert bits(torch.load(str(path), weights_only=True)["model"]) == bits(model.expected())


def test_an_output_under_another_name_is_passed_over_too(tmp_path: Path) -> None:
    every_kind().save(tmp_path, 2)
    prefix, out = str(tmp_path / "mnist"), str(tmp_path / "mnist_full.pth")
    consolidate_sharded_model_checkpoints(prefix)
    consolidate_sharded_model_checkpoints(prefix, save_path=out)
    consolidate_sharded_model_checkpoints(prefix, save_path=out, overwrite=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_shard_is_never_overwritten(tmp_path: Path, overwrite: bool) -> None:
    paths = every_kind().save(tmp_path, 2)
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match="is one of the shard files"):
        consolidate_sharded_model_checkpoints(
            str(tmp_path / "mnist"), save_path=str(paths[1]), overwrite=overwrite
        )
    assert snapshot(tmp_path) == before


def test_impossible_output_is_found_before_merging(tmp_path: Path) -> None:
    every_kind().save(tmp_path, 2)
    prefix = str(tmp_path / "mnist")
    with pytest.raises(CheckpointError, match="there is no directory"):
        consolidate_sharded_model_checkpoints(prefix, save_path=str(tmp_path / "no" / "f.pth"))
    with pytest.raises(CheckpointError, match="is a directory; save_path must name a file"):
        consolidate_sharded_model_checkpoints(prefix, save_path=str(tmp_path), overwrite=True)


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (OSError(28, "No space left on device"), CheckpointError),
        (RuntimeError("PytorchStreamWriter failed"), CheckpointError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_failed_write_leaves_everything_as_it_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    raised: type[BaseException],
) -> None:
    every_kind().save(tmp_path, 2)
    prefix = str(tmp_path / "mnist")
    consolidate_sharded_model_checkpoints(prefix)
    before = snapshot(tmp_path)

    def fail_halfway(content: Any, file: Any, **_: Any) -> None:
        file.write(b"half")
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert len(files) == len(before) + 1, "the temporary file is elsewhere"
        raise failure

    monkeypatch.setattr(torch, "save", fail_halfway)
    with pytest.raises(raised):
        consolidate_sharded_model_checkpoints(prefix, overwrite=True)
    assert snapshot(tmp_path) == before


def test_a_file_that_appears_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_kind().save(tmp_path, 2)
    output = tmp_path / "mnist_consolidated.pth"
    save = torch.save

    def save_while_another_does(content: Any, file: Any, **how: Any) -> None:
        save(content, file, **how)
        output.write_bytes(b"of another process")

    monkeypatch.setattr(torch, "save", save_while_another_does)
    with pytest.raises(CheckpointError, match="exists already"):
        consolidate_sharded_model_checkpoints(str(tmp_path / "mnist"))
    assert snapshot(tmp_path)[output.name] == b"of another process"
    assert not list(tmp_path.glob(".*"))
