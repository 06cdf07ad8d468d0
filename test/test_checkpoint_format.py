"""What shard files say about themselves survives a round trip; what is broken is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from xla_fsdp.checkpoint import (
    CheckpointError,
    MemberRecord,
    ParamRecord,
    ShardMetadata,
)


def test_metadata_survives_a_round_trip_through_a_file(tmp_path: Path) -> None:
    metadata = ShardMetadata(
        rank=1,
        world_size=4,
        params=(ParamRecord("w", "float32", 128, (MemberRecord("w", (2, 3)),)),),
        ties={"v": "w"},
        buffers={"b": "float64"},
    )
    torch.save(metadata.to_dict(), tmp_path / "m.pth")
    assert ShardMetadata.from_dict(torch.load(tmp_path / "m.pth", weights_only=True)) == metadata
    assert metadata.to_dict() == {
        "format": "xla_fsdp",
        "version": 1,
        "rank": 1,
        "world_size": 4,
        "params": [
            {
                "key": "w",
                "dtype": "float32",
                "multiple": 128,
                "by_rows": False,
                "members": [{"name": "w", "shape": [2, 3]}],
            }
        ],
        "ties": {"v": "w"},
        "buffers": {"b": "float64"},
    }


def record(**changes: Any) -> dict[str, Any]:
    """A record as a plain dict, with some entries replaced."""
    members = [{"name": "w", "shape": [2]}]
    usual = {"key": "w", "dtype": "float32", "multiple": 1, "by_rows": False, "members": members}
    return {**usual, **changes}


def member(name: Any, shape: Any) -> dict[str, Any]:
    """A record with this one member."""
    return record(members=[{"name": name, "shape": shape}])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "x"}, "format is 'x', expected 'xla_fsdp'"),
        ({"version": 99}, "version 99 is not known"),
        ({"version": "1"}, "version is str, expected int"),
        ({"rank": True}, "rank is bool, expected int"),
        ({"rank": -1}, "rank -1 of world_size 2 is impossible"),
        ({"world_size": 0}, "rank 0 of world_size 0 is impossible"),
        ({"params": {}}, "params is dict, expected list"),
        ({"params": [3]}, "params.0 is int, expected dict"),
        ({"params": [{}]}, "params.0.members is missing"),
        ({"params": [record(key=1)]}, "params.0.key is int, expected str"),
        ({"params": [record(dtype="float33")]}, "w: dtype 'float33' is not a torch dtype"),
        ({"params": [record(dtype="nn")]}, "w: dtype 'nn' is not a torch dtype"),
        ({"params": [record(multiple=0)]}, "w: multiple is 0, must be at least 1"),
        ({"params": [record(by_rows=True, multiple=7)]}, "w: is sharded by rows, so it must have"),
        ({"params": [record(by_rows=1)]}, "params.0.by_rows is int, expected bool"),
        ({"params": [record(members=[])]}, "w: has no members"),
        ({"params": [member(1, [2])]}, "params.0.members.0.name is int, expected str"),
        ({"params": [member("w", 2)]}, "params.0.members.0.shape is int, expected list"),
        ({"params": [member("w", [2.0])]}, "params.0.members.0.shape.0 is float, expected int"),
        ({"params": [member("w", [2, -1])]}, "w: shape (2, -1) has a negative size"),
        ({"params": [record(), record()]}, "key w appears twice"),
        ({"params": [record(), record(key="v")]}, "parameter name w appears twice"),
        ({"ties": []}, "ties is list, expected dict"),
        ({"ties": {"v": 1}}, "ties.v is int, expected str"),
        ({"ties": {"w": "v"}}, "ties: w -> v must lead from an alias"),
        ({"ties": {"a": "b", "b": "w"}}, "ties: a -> b must lead from an alias"),
        ({"buffers": {"b": "float33"}}, "buffers: b 'float33' is not a torch dtype"),
    ],
)
def test_broken_metadata_is_refused(changes: dict[str, Any], message: str) -> None:
    good = {
        "format": "xla_fsdp",
        "version": 1,
        "rank": 0,
        "world_size": 2,
        "params": [record()],
        "ties": {},
        "buffers": {},
    }
    ShardMetadata.from_dict(good)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        ShardMetadata.from_dict({**good, **changes})
