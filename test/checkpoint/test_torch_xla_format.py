"""Files of torch_xla's own FSDP, written by itself, give the original model back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from test.common.ranks import run_on_ranks, run_warm, skip_without_torch_xla
from test.common.shard_maker import bits, file_of
from xla_fsdp.checkpoint import (
    CheckpointError,
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
)
from xla_fsdp.consolidate_sharded_ckpts import main

CASES = ["plain", "nested", "flat", "flat_nested", "rows", "rows_nested", "bfloat16"]


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with files written by torch_xla's own FSDP, one directory for each case."""
    skip_without_torch_xla()
    directory = tmp_path_factory.mktemp("upstream")
    child = run_warm("-m", "test.common.upstream_writer", str(directory))
    assert child.returncode == 0, child.stderr
    return directory


@pytest.mark.parametrize("case", CASES)
def test_upstreams_files_give_the_original_model(upstream: Path, tmp_path: Path, case: str) -> None:
    directory = upstream / case
    merged, _ = consolidate_sharded_model_checkpoints(
        f"{directory}/rank", save_path=str(tmp_path / "full.pth")
    )
    original = torch.load(directory / "original.pt", weights_only=True)
    # Upstream's file does not mention the second name of a weight tied inside one unit.
    assert original.pop("right.weight") is not None
    if case == "bfloat16":
        for name, value in original.items():
            if "running" in name:
                original[name] = value.bfloat16().float()
    assert bits(merged) == bits(original)


@pytest.mark.parametrize("case", ["flat_nested", "rows_nested", "bfloat16"])
def test_upstreams_files_are_resharded(upstream: Path, tmp_path: Path, case: str) -> None:
    prefix = f"{upstream / case}/rank"
    arguments = ["--ckpt_prefix", prefix, "--save_path", str(tmp_path / "new")]
    assert main([*arguments, "--to_world_size", "2"]) == 0
    merged, _ = consolidate_sharded_model_checkpoints(str(tmp_path / "new"), save_model=False)
    expected, _ = consolidate_sharded_model_checkpoints(prefix, save_model=False)
    assert bits(merged) == bits(expected)


def upstream_shards(directory: Path) -> list[dict[str, Any]]:
    """The content of all files of a case, in rank order."""
    return [torch.load(directory / f"rank{r}.pth", weights_only=True) for r in range(3)]


def test_upstreams_state_dicts_merge_in_memory(upstream: Path) -> None:
    shards = upstream_shards(upstream / "flat_nested")
    merged = consolidate_sharded_state_dicts(
        [s["model"] for s in shards], shards[2]["shard_metadata"]
    )
    original = torch.load(upstream / "flat_nested" / "original.pt", weights_only=True)
    del original["right.weight"]
    assert bits(merged) == bits(original)


def test_a_unit_that_is_used_twice_stays_tied_in_upstreams_files() -> None:
    info = {"_fsdp_shard_w": {"_orig_size": torch.Size([3]), "_orig_name": "_fpw_module.w"}}
    metadata = {"shard_info": {"a": info, "b": info}, "rank": 0, "world_size": 1}
    shard = torch.ones(128)
    merged = consolidate_sharded_state_dicts(
        [{"a._fsdp_shard_w": shard, "b._fsdp_shard_w": shard}], metadata
    )
    assert merged.keys() == {"a.w", "b.w"}
    assert merged["a.w"].data_ptr() == merged["b.w"].data_ptr()


def broken_upstream(edit: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Callable[..., str]:
    """The message for a small file of upstream's whose state dict and metadata were edited."""

    def message() -> str:
        shard_info = {
            "u": {"_fsdp_shard_flat": {"_orig_size": torch.Size([3]), "_orig_name": "flat"}}
        }
        metadata = {
            "shard_info": shard_info,
            "flatten_info": {"u.flat": (["w", "b"], [torch.Size([2]), torch.Size([])], [2, 1])},
            "buffer_info": {"u.n": {"_orig_dtype": torch.float32}},
            "rank": 0,
            "world_size": 1,
        }
        state_dict = {"u._fsdp_shard_flat": torch.ones(128), "u.n": torch.ones(1)}
        edit(state_dict, metadata)
        with pytest.raises(CheckpointError) as caught:
            consolidate_sharded_state_dicts([state_dict], metadata)
        return str(caught.value)

    return message


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda s, m: s.clear(), "model has no tensor u._fsdp_shard_flat, which shard_metadata"),
        (lambda s, m: s.update({"u._fsdp_shard_x": 1}), "model has u._fsdp_shard_x, which shard"),
        (lambda s, m: s.update({"u.w": 1}), "u.w would be in the merged model twice"),
        (lambda s, m: s.update({"u._fsdp_shard_flat": torch.ones(2)}), "is float32 of shape (2,)"),
        (lambda s, m: m.pop("world_size"), "world_size is missing"),
        (lambda s, m: m.update(shard_info=3), "shard_info is int, expected dict"),
        (lambda s, m: m.update(flatten_info=3), "flatten_info is int, expected dict"),
        (lambda s, m: m["flatten_info"].update({"u.flat": 3}), "flatten_info.u.flat is 3, expec"),
        (
            lambda s, m: m["flatten_info"].update({"u.flat": (["w"], [], [])}),
            "has 1 names and 0 shapes",
        ),
        (lambda s, m: m["buffer_info"].update({"u.n": {}}), "buffer_info.u.n._orig_dtype is miss"),
        (
            lambda s, m: m["shard_info"]["u"]["_fsdp_shard_flat"].pop("_orig_size"),
            "_orig_size is None, expected at most 64 sizes",
        ),
    ],
)
def test_broken_upstream_files_are_refused(
    edit: Callable[[dict[str, Any], dict[str, Any]], Any], expected: str
) -> None:
    assert expected in broken_upstream(edit)()


def test_mixed_shards_of_two_upstream_runs(upstream: Path, tmp_path: Path) -> None:
    for rank, case in enumerate(["plain", "nested", "plain"]):
        content = (upstream / case / f"rank{rank}.pth").read_bytes()
        file_of(tmp_path, rank, 3).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"00001-of-\S*: shard_metadata differs from that"):
        consolidate_sharded_model_checkpoints(str(tmp_path / "mnist"))


def loaded_by_every_rank(rank: int, directory: str, case: str) -> dict[str, Any]:
    """What our model holds after every rank, one after the other, has loaded upstream's file."""
    import torch_xla

    from test.common import upstream_model
    from xla_fsdp import XlaFullyShardedDataParallel

    arrange, options = upstream_model.CASES[case]
    found, reports = [], []
    for pretended in range(upstream_model.WORLD_SIZE):
        wrap = partial(
            XlaFullyShardedDataParallel,
            sharding_groups=[list(range(upstream_model.WORLD_SIZE))],
            sharding_rank=pretended,
            sharding_world_size=upstream_model.WORLD_SIZE,
            **options,
        )
        net = upstream_model.Net(scalar="shard_param_on_dim_0" not in options)
        model: Any = arrange(net, wrap)
        shard = torch.load(Path(directory, case, f"rank{pretended}.pth"), weights_only=True)
        reports.append(str(model.load_state_dict(shard["model"])))
        found.append({name: value.cpu() for name, value in model.state_dict().items()})
        metadata = model.get_shard_metadata()
        torch_xla.sync()
    return {"state": consolidate_sharded_state_dicts(found, metadata), "reports": set(reports)}


def load_all(rank: int, directory: str) -> dict[str, Any]:
    return {case: loaded_by_every_rank(rank, directory, case) for case in CASES}


@pytest.fixture(scope="module")
def loaded(upstream: Path) -> dict[str, Any]:
    return run_on_ranks(load_all, 1, str(upstream))[0]


@pytest.mark.parametrize("case", CASES)
def test_a_sharded_model_loads_upstreams_state_dict(
    upstream: Path, loaded: dict[str, Any], case: str
) -> None:
    original = torch.load(upstream / case / "original.pt", weights_only=True)
    assert loaded[case]["reports"] == {"<All keys matched successfully>"}
    state = loaded[case]["state"]
    for name, value in original.items():
        if case == "bfloat16" and "running" in name:
            value = value.bfloat16().float()
        assert torch.equal(state[name], value), name
    assert state.keys() == original.keys()
