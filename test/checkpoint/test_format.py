"""What shard files say about themselves survives a round trip; what is broken is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from xla_fsdp.checkpoint import (
    CheckpointError,
    GroupRecord,
    MemberRecord,
    OptimizerRecord,
    ParamRecord,
    ShardMetadata,
    StateRecord,
)
from xla_fsdp.checkpoint.format.records import model_name, state_name

FIRST_VERSION = {
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
SECOND_VERSION = {
    **FIRST_VERSION,
    "version": 2,
    "groups": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "global_rank": 3,
    "optimizer": {
        "groups": [
            {"params": ["w"], "options": {"lr": 0.1, "betas": [0.9, 0.99], "foreach": None}}
        ],
        "states": {
            "w": {
                "sharded": ["exp_avg"],
                "whole": ["step"],
                "values": {"scale": 1.5},
                "host": ["step"],
            }
        },
    },
    "fingerprints": {"model/w": "crc32:0012abcd"},
}
THIRD_VERSION = {
    **SECOND_VERSION,
    "version": 3,
    "params": [
        {
            **FIRST_VERSION["params"][0],  # type: ignore[index]
            "members": [{"name": "w", "shape": [2, 3], "tensor_dim": 0}],
        }
    ],
    "tensor_parts": 2,
}
FOURTH_VERSION = {
    **THIRD_VERSION,
    "version": 4,
    "fingerprints": {"model/w": "crc32:0012abcd"},
    "step": 7,
    "job": "host-1-2f",
}
FIFTH_VERSION = {
    **FOURTH_VERSION,
    "version": 5,
    "params": [{**THIRD_VERSION["params"][0], "over_parts": False}],  # type: ignore[index]
}
WHOLE = (ParamRecord("w", "float32", 128, (MemberRecord("w", (2, 3)),)),)


def some_metadata(**changes: Any) -> ShardMetadata:
    """What ``FIFTH_VERSION`` describes, as an object, with some fields replaced."""
    usual = ShardMetadata(
        rank=1,
        world_size=4,
        params=(ParamRecord("w", "float32", 128, (MemberRecord("w", (2, 3), 0),)),),
        ties={"v": "w"},
        buffers={"b": "float64"},
        groups=((0, 2, 4, 6), (1, 3, 5, 7)),
        global_rank=3,
        optimizer=OptimizerRecord(
            (GroupRecord(("w",), {"lr": 0.1, "betas": [0.9, 0.99], "foreach": None}),),
            {"w": StateRecord(("exp_avg",), ("step",), {"scale": 1.5}, ("step",))},
        ),
        fingerprints={"model/w": "crc32:0012abcd"},
        tensor_parts=2,
        step=7,
        job="host-1-2f",
    )
    return replace(usual, **changes)


def test_metadata_survives_a_round_trip_through_files(tmp_path: Path) -> None:
    metadata = some_metadata()
    assert metadata.to_dict() == FIFTH_VERSION
    torch.save(metadata.to_dict(), tmp_path / "m.pth")
    assert ShardMetadata.from_dict(torch.load(tmp_path / "m.pth", weights_only=True)) == metadata
    assert ShardMetadata.from_dict(json.loads(json.dumps(metadata.to_dict()))) == metadata


def test_earlier_versions_are_still_read_and_written() -> None:
    fourth = some_metadata(version=4)
    assert ShardMetadata.from_dict(FOURTH_VERSION) == fourth
    assert fourth.to_dict() == FOURTH_VERSION
    third = some_metadata(version=3, step=None, job=None)
    assert ShardMetadata.from_dict(THIRD_VERSION) == third
    assert third.to_dict() == THIRD_VERSION
    metadata = ShardMetadata.from_dict(SECOND_VERSION)
    second = replace(third, version=2, params=WHOLE, tensor_parts=1)
    assert metadata == second
    assert metadata.to_dict() == SECOND_VERSION
    first = ShardMetadata.from_dict(FIRST_VERSION)
    assert first == replace(
        second, version=1, groups=None, global_rank=None, optimizer=None, fingerprints={}
    )
    assert first.to_dict() == FIRST_VERSION


def test_hyperparameters_are_written_as_json_values() -> None:
    tuples = OptimizerRecord((GroupRecord(("w",), {"betas": (0.9, 0.99)}),), {})
    written = some_metadata(optimizer=tuples).to_dict()["optimizer"]
    assert written["groups"][0]["options"] == {"betas": [0.9, 0.99]}
    tensor = OptimizerRecord((GroupRecord(("w",), {"lr": torch.ones(())}),), {})
    with pytest.raises(
        CheckpointError, match=r"optimizer\.groups\.0\.options\.lr is Tensor; expec"
    ):
        some_metadata(optimizer=tensor).to_dict()


def test_names_in_a_file_never_meet() -> None:
    pairs = [("a/b", "c"), ("a", "b/c"), ("a%2Fb", "c"), ("a%2fb", "c"), ("a", "b%2Fc")]
    assert len({state_name(*pair) for pair in pairs}) == len(pairs)
    assert model_name("w") == "model/w"
    assert state_name("layer.w", "exp_avg") == "optim/layer.w/exp_avg"


def record(**changes: Any) -> dict[str, Any]:
    """A record as a plain dict, with some entries replaced."""
    members = [{"name": "w", "shape": [2], "tensor_dim": None}]
    usual = {"key": "w", "dtype": "float32", "multiple": 1, "by_rows": False, "members": members}
    return {**usual, **changes}


def member(name: Any, shape: Any, dim: Any = None) -> dict[str, Any]:
    """A record with this one member."""
    return record(members=[{"name": name, "shape": shape, "tensor_dim": dim}])


def groups(*params: list[str]) -> dict[str, Any]:
    """An optimizer's record with these groups."""
    return {"groups": [{"params": each, "options": {}} for each in params], "states": {}}


def states(**by_key: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's record with these states."""
    empty: dict[str, Any] = {"sharded": [], "whole": [], "values": {}}
    return {"groups": [], "states": {key: {**empty, **state} for key, state in by_key.items()}}


def deep(levels: int) -> list[Any]:
    """A list in a list in a list."""
    return [deep(levels - 1)] if levels else []


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
        ({"params": [{}]}, "params.0.key is missing"),
        ({"params": [record(key=1)]}, "params.0.key is int, expected str"),
        ({"params": [record(dtype="float33")]}, "w: dtype 'float33' is not a torch dtype"),
        ({"params": [record(dtype="nn")]}, "w: dtype 'nn' is not a torch dtype"),
        ({"params": [record(multiple=0)]}, "w: multiple is 0, must be at least 1"),
        (
            {"params": [record(by_rows=True, multiple=7)]},
            "w: is sharded by rows of 1 elements, but its multiple is 7",
        ),
        (
            {"params": [{**member("w", []), "by_rows": True}]},
            "w: is sharded by rows, so it must have",
        ),
        ({"params": [record(by_rows=1)]}, "params.0.by_rows is int, expected bool"),
        ({"params": [record(members=[])]}, "w: has no members"),
        ({"params": [member(1, [2])]}, "params.0.members.0.name is int, expected str"),
        ({"params": [member("w", 2)]}, "params.0.members.0.shape is int, expected list"),
        ({"params": [member("w", [2.0])]}, "params.0.members.0.shape is [2.0], expected sizes"),
        ({"params": [member("w", [2, -1])]}, "params.0.members.0.shape is [2, -1], expected sizes"),
        ({"params": [record(), record()]}, "key w appears twice"),
        ({"params": [record(), record(key="v")]}, "parameter name w appears twice"),
        ({"ties": []}, "ties is list, expected dict"),
        ({"ties": {"v": 1}}, "ties.v is int, expected str"),
        ({"ties": {"w": "v"}}, "ties: w -> v must lead from an alias"),
        ({"ties": {"a": "b", "b": "w"}}, "ties: a -> b must lead from an alias"),
        ({"buffers": {"b": "float33"}}, "buffers: b 'float33' is not a torch dtype"),
        ({"version": 6}, "version 6 is not known; this xla_fsdp reads version 1, 2, 3, 4, 5. Up"),
        ({"step": "1"}, "step is str, expected int"),
        ({"job": 1}, "job is int, expected str"),
        ({"tensor_parts": 3}, "tensor_parts is 3, which must divide the world_size, 2"),
        ({"tensor_parts": 0}, "tensor_parts is 0, which must divide the world_size, 2"),
        ({"params": [member("w", [2], 1)]}, "w: shape (2,) has no dim 1, its tensor_dim"),
        ({"params": [member("w", [2], "0")]}, "params.0.members.0.tensor_dim is str, expect"),
        (
            {"params": [member("w", [3], 0)], "tensor_parts": 2},
            "w: dim 0 of shape (3,) cannot be cut into 2 equal parts",
        ),
        (
            {
                "params": [
                    {**member("w", [2, 4], 1), "by_rows": True, "multiple": 4},
                ],
                "tensor_parts": 2,
            },
            "w: is sharded by rows of 2 elements, but its multiple is 4",
        ),
        ({"groups": [[0, 1], [1, 2]]}, "groups: rank 1 appears twice"),
        ({"groups": [[0, 1, 2]]}, "groups: ((0, 1, 2),) must all have 2 ranks"),
        ({"groups": [0]}, "groups.0 is int, expected list"),
        ({"groups": [[0, 1]], "global_rank": 1}, "global_rank 1 is not at place 0"),
        ({"global_rank": "0"}, "global_rank is str, expected int"),
        ({"fingerprints": {"model/w": "crc32:12"}}, "model/w 'crc32:12' is not 'crc32:' and"),
        ({"optimizer": 3}, "optimizer is int, expected dict"),
        ({"optimizer": {"groups": [{}], "states": {}}}, "optimizer.groups.0.params is missing"),
        ({"optimizer": groups(["w"], ["w"])}, "optimizer key w appears twice"),
        ({"optimizer": states(v={"sharded": ["m"]})}, "optimizer.states.v: m is sharded, but par"),
        ({"optimizer": states(w={"whole": ["m", "m"]})}, "optimizer state of w: m appears twice"),
        ({"optimizer": states(w={"whole": [1]})}, "optimizer.states.w.whole.0 is int, expected"),
        (
            {"optimizer": states(w={"whole": ["m"], "values": {"m": 1}})},
            "optimizer state of w: m appears twice",
        ),
        (
            {"optimizer": states(w={"values": {"m": deep(30)}})},
            "is nested more than 20 deep",
        ),
    ],
)
def test_broken_metadata_is_refused(changes: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "format": "xla_fsdp",
        "version": 4,
        "rank": 0,
        "world_size": 2,
        "params": [record()],
        "ties": {},
        "buffers": {},
        "groups": None,
        "global_rank": None,
        "optimizer": None,
        "fingerprints": {},
        "tensor_parts": 1,
        "step": None,
        "job": None,
    }
    ShardMetadata.from_dict(good)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        ShardMetadata.from_dict({**good, **changes})
