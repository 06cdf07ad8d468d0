"""Everything that can be wrong with shard files gives one clear line, and nothing is written."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from test.common.shard_maker import FullModel, bits, every_kind, snapshot
from xla_fsdp.checkpoint import (
    CheckpointError,
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
    find_problems,
    open_shard,
)


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Load a file, edit its content in place and save it again."""
    content = torch.load(path, weights_only=True)
    edit(content)
    torch.save(content, path)


def truncate(path: Path) -> None:
    """Keep the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def become_directory(path: Path) -> None:
    """Put a directory in the file's place."""
    path.unlink()
    path.mkdir()


def set_model(key: str, value: Any) -> Callable[[Path], None]:
    """Replace one entry of the state dict."""
    return lambda path: change(path, lambda c: c["model"].__setitem__(key, value))


def set_metadata(key: str, value: Any) -> Callable[[Path], None]:
    """Replace one entry of the metadata."""
    return lambda path: change(path, lambda c: c["shard_metadata"].__setitem__(key, value))


def rename_member(path: Path) -> None:
    """Give the first parameter another shape in the metadata."""
    change(path, lambda c: c["shard_metadata"]["params"][0]["members"][0].update(shape=[11, 37]))


BAD_FILES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "missing": (Path.unlink, [r"missing ranks: 1 of 3; \S*00000-of-\S*pth says that 3 ranks"]),
    "truncated": (
        truncate,
        [r"BAD: truncated, or not a file written by torch", r"missing ranks: 1 of 3"],
    ),
    "empty": (lambda p: p.write_bytes(b""), ["BAD: truncated, or not", "missing ranks"]),
    "text": (lambda p: p.write_text("hello"), ["BAD: truncated, or not", "missing ranks"]),
    "unreadable": (
        become_directory,
        ["BAD: cannot be read: it is a directory", "missing ranks"],
    ),
    "code": (
        lambda p: change(p, lambda c: c.update(args=Namespace(lr=1))),
        [r"BAD: refused: it holds a argparse\.Namespace, and loading that would run code", "miss"],
    ),
    "foreign dict": (
        lambda p: torch.save({"model": {}}, p),
        ["BAD: not a shard file: it holds a dict without 'shard_metadata'", "missing ranks"],
    ),
    "foreign list": (
        lambda p: torch.save([1], p),
        ["BAD: not a shard file: it holds a list; expected a dict with 'model' and", "missing"],
    ),
    "foreign model": (
        lambda p: change(p, lambda c: c.update(model=3)),
        ["BAD: not a shard file: it holds a int under 'model'", "missing ranks"],
    ),
    "foreign keys": (
        lambda p: change(p, lambda c: c["model"].update({3: 3})),
        ["BAD: not a shard file: it holds names that are no strings under 'model'", "missing"],
    ),
    "no metadata": (
        lambda p: change(p, lambda c: c.update(shard_metadata=None)),
        ["BAD: shard_metadata is NoneType, expected dict", "missing ranks"],
    ),
    "unknown metadata": (
        set_metadata("format", "other"),
        ["BAD: shard_metadata is of neither xla_fsdp nor torch_xla; expected", "missing ranks"],
    ),
    "newer version": (
        set_metadata("version", 6),
        ["BAD: format version 6 is not known; this xla_fsdp reads version 1, 2, 3, 4, 5", "missin"],
    ),
    "duplicate": (
        set_metadata("rank", 0),
        [r"rank 0 of 3 is there 2 times: \S*00000-of-\S*, BAD\. Keep one", "missing ranks: 1 of 3"],
    ),
    "impossible rank": (
        set_metadata("rank", 3),
        ["BAD: rank 3 of world_size 3 is impossible", "missing ranks: 1 of 3"],
    ),
    "world size": (
        set_metadata("world_size", 2),
        [r"mixed world sizes: 3 in \S*00000-of-\S*, \S*00002-of-\S*; 2 in BAD\. Narrow"],
    ),
    "other format": (
        lambda p: change(
            p, lambda c: c.update(shard_metadata={"shard_info": {}, "rank": 1, "world_size": 3})
        ),
        [r"mixed formats: xla_fsdp in \S*, \S*; torch_xla in BAD\. Narrow"],
    ),
    "wrong length": (
        set_model("embed.weight", torch.ones(64)),
        [
            r"BAD: the shard of embed\.weight is float32 of shape \(64,\), expected float32 of "
            r"shape \(256,\)",
            r"BAD: head\.weight and embed\.weight are tied, but their shards differ",
        ],
    ),
    "wrong dtype": (
        set_model("half", torch.ones(128)),
        [r"BAD: the shard of half is float32 of shape \(128,\), expected bfloat16 of shape \(128"],
    ),
    "no tensor": (
        set_model("scale", 1.5),
        [r"BAD: the shard of scale is a float, expected float32 of shape \(128,\)"],
    ),
    "untied": (
        set_model("head.weight", torch.ones(256)),
        [r"BAD: head\.weight and embed\.weight are tied, but their shards differ"],
    ),
    "wrong whole": (
        set_model("ignored", torch.ones(2)),
        [
            r"BAD: ignored is float32 of shape \(2,\), expected float32 of shape \(3, 2\), as in "
            r"\S*00000-of"
        ],
    ),
    "missing key": (
        lambda p: change(p, lambda c: c["model"].pop("scale")),
        [r"BAD: the shard of scale is missing, expected float32 of shape \(128,\)"],
    ),
    "extra key": (
        set_model("more", torch.ones(2)),
        [r"BAD: more is \w+ of shape \S*, expected nothing of this name, as in \S*00000-of-"],
    ),
    "other metadata": (
        rename_member,
        [r"BAD: shard_metadata differs from that of \S*00000-of-\S* at params\.0\.members\.0\.sh"],
    ),
    "fewer params": (
        lambda p: change(p, lambda c: c["shard_metadata"]["params"].pop()),
        [r"BAD: shard_metadata differs from that of \S* at params: the number of entries"],
    ),
}


@pytest.mark.parametrize(("damage", "lines"), BAD_FILES.values(), ids=BAD_FILES)
def test_one_bad_file_of_three(
    tmp_path: Path, damage: Callable[[Path], Any], lines: list[str]
) -> None:
    bad = every_kind().save(tmp_path, 3)[1]
    damage(bad)
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        consolidate_sharded_model_checkpoints(str(tmp_path / "mnist"))
    problems = caught.value.problems
    assert len(problems) == len(lines), problems
    for problem, line in zip(problems, lines, strict=True):
        assert re.match(line.replace("BAD", re.escape(str(bad))), problem), problem
    assert str(caught.value) == "\n".join(problems)
    assert snapshot(tmp_path) == before


def test_no_file_matches(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^no shard file matches \S*mnist\*\.pth, and"):
        consolidate_sharded_model_checkpoints(str(tmp_path / "mnist"))


def test_problems_of_several_files_come_together(tmp_path: Path) -> None:
    paths = every_kind().save(tmp_path, 4)
    truncate(paths[0])
    set_model("half", torch.ones(128))(paths[2])
    torch.save(3, tmp_path / "mnist_other.pth")
    with pytest.raises(CheckpointError) as caught:
        consolidate_sharded_model_checkpoints(str(tmp_path / "mnist"))
    starts = [f"{tmp_path}/mnist_other.pth: not", f"{paths[0]}: tr", "missing ranks: 0", paths[2]]
    assert len(caught.value.problems) == len(starts)
    for problem, start in zip(caught.value.problems, starts, strict=True):
        assert problem.startswith(str(start))


def test_many_missing_ranks_are_counted(tmp_path: Path) -> None:
    path = every_kind().save(tmp_path, 1)[0]
    set_metadata("world_size", 10**12)(path)
    with pytest.raises(CheckpointError) as caught:
        consolidate_sharded_model_checkpoints(str(tmp_path / "mnist"))
    assert "missing ranks: 1, 2, 3, 4, 5, 6, 7, 8 and 999999999991 more" in str(caught.value)


def test_a_reference_without_a_key_is_named(tmp_path: Path) -> None:
    paths = every_kind().save(tmp_path, 2)
    change(paths[0], lambda c: c["model"].pop("scale"))
    problems = find_problems([open_shard(str(path)) for path in paths])
    assert problems == [
        f"{paths[1]}: scale is float32 of shape (128,), expected nothing of this name, as in "
        f"{paths[0]}"
    ]


def test_equal_shards_with_nan_are_still_tied(tmp_path: Path) -> None:
    model = FullModel({"w": torch.full((3,), float("nan"))}, ties={"v": "w"})
    shard = model.shard(0, 1)
    shard["model"]["v"] = shard["model"]["w"].clone()
    merged = consolidate_sharded_state_dicts([shard["model"]], shard["shard_metadata"])
    assert bits(merged) == bits(model.expected())


def test_one_state_dict_for_every_rank_is_wanted() -> None:
    shard = every_kind().shard(0, 3)
    with pytest.raises(CheckpointError, match=r"holds 2 state dicts, but .* world_size 3"):
        consolidate_sharded_state_dicts([shard["model"]] * 2, shard["shard_metadata"])


def test_bad_state_dicts_are_named_by_their_place() -> None:
    shards = [every_kind().shard(rank, 2) for rank in range(2)]
    del shards[1]["model"]["ignored"]
    with pytest.raises(CheckpointError, match=r"^state_dict_list\[1\]: ignored is missing"):
        consolidate_sharded_state_dicts([s["model"] for s in shards], shards[0]["shard_metadata"])


def test_names_that_collide_are_reported() -> None:
    shard = every_kind().shard(0, 1)
    shard["model"]["layer.weight"] = torch.ones(2)
    with pytest.raises(CheckpointError, match=r"layer\.weight would be in the merged model twice"):
        consolidate_sharded_state_dicts([shard["model"]], shard["shard_metadata"])


def test_a_tie_to_nothing_is_reported() -> None:
    shard = every_kind().shard(0, 1)
    shard["shard_metadata"]["ties"]["a"] = "b"
    with pytest.raises(CheckpointError, match="a is tied to b, which is not in the model"):
        consolidate_sharded_state_dicts([shard["model"]], shard["shard_metadata"])
