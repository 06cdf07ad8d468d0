"""Code for ``torch_xla.distributed.fsdp`` on this package: a whole script, and every import."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from test.common.ranks import run_on_ranks, run_python

NAMES = """
import warnings

import torch_xla.distributed.fsdp
import xla_fsdp.compat

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    xla_fsdp.compat.install()
    xla_fsdp.compat.install()
late = "torch_xla.distributed.fsdp was imported before xla_fsdp.compat.install()"
assert [late in str(w.message) for w in caught] == [True], caught

import torch_xla
import torch_xla.distributed.fsdp as theirs
import torch_xla.distributed.fsdp.consolidate_sharded_ckpts as command
import torch_xla.distributed.fsdp.utils
from torch_xla.distributed import fsdp
from torch_xla.distributed.fsdp import *
from torch_xla.distributed.fsdp import wrap
from torch_xla.distributed.fsdp.state_dict_utils import consolidate_sharded_state_dicts
from torch_xla.distributed.fsdp.wrap import (
    always_wrap_policy, lambda_auto_wrap_policy, size_based_auto_wrap_policy
)
from torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel import (
    XlaFullyShardedDataParallel as Direct
)
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

import xla_fsdp
import xla_fsdp.compat.merge
import xla_fsdp.consolidate_sharded_ckpts
import xla_fsdp.wrap as ours

assert fsdp is theirs is torch_xla.distributed.fsdp
assert Direct is XlaFullyShardedDataParallel
assert issubclass(Direct, xla_fsdp.XlaFullyShardedDataParallel)
assert checkpoint_module is xla_fsdp.checkpoint_module is theirs.utils.checkpoint_module
merge = xla_fsdp.compat.merge.consolidate_sharded_model_checkpoints
assert consolidate_sharded_model_checkpoints is merge
assert consolidate_sharded_state_dicts is xla_fsdp.consolidate_sharded_state_dicts
assert wrap.transformer_auto_wrap_policy is ours.transformer_auto_wrap_policy
assert command.main is xla_fsdp.consolidate_sharded_ckpts.main
for absent in ("from torch_xla.distributed.fsdp.utils import dummy_all_gather",
               "import torch_xla.distributed.fsdp.xla_flatten_params_wrapper"):
    try:
        exec(absent)
    except ImportError:
        continue
    raise SystemExit(absent)
print("all there")
"""


@pytest.mark.parametrize(
    ("options", "close"),
    [
        ([], 1e-5),
        pytest.param(
            ["--policy", "type", "--flatten_parameters"], 1e-5, marks=pytest.mark.slow, id="flat"
        ),
        pytest.param(
            ["--policy", "none", "--compute_dtype", "bfloat16", "--fp32_reduce_scatter"],
            0.1,
            marks=pytest.mark.slow,
            id="by hand in bfloat16",
        ),
    ],
)
def test_a_script_for_torch_xla_runs_unchanged(
    tmp_path: Path, options: list[str], close: float
) -> None:
    out, prefix = tmp_path / "out.json", tmp_path / "run"
    launch = ["-m", "xla_fsdp.launch", "--compat", "--num_ranks", "2"]
    script = ["test/common/upstream_script.py", "--out", str(out), "--ckpt_prefix", str(prefix)]
    done = run_python(*launch, *script, *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["home"] == "xla_fsdp.fsdp.torch_xla_wrapper"
    assert (found["ranks"], found["times run"]) == (2, "x")
    assert found["apart"] < close
    assert len(found["losses"]) == 6
    assert found["losses"][-1] < found["losses"][0]
    first, last = found["accuracies"]
    assert last >= first > 10


def test_every_name_is_ours_also_after_torch_xlas_was_imported() -> None:
    done = run_python("-c", NAMES)
    assert done.stdout.strip() == "all there", done.stderr


def wrapped_for_torch_xla(rank: int) -> dict[str, Any]:
    from xla_fsdp import XlaFullyShardedDataParallel
    from xla_fsdp.fsdp.torch_xla_wrapper import XlaFullyShardedDataParallel as Theirs
    from xla_fsdp.wrap import always_wrap_policy

    def model() -> nn.Sequential:
        blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
        for block in blocks[:2]:
            block.register_buffer("table", torch.full((2,), 1 / 3))
        return blocks

    bf16 = {"compute_dtype": torch.bfloat16}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        cast = Theirs(model(), auto_wrap_policy=always_wrap_policy, **bf16)
    return {
        "dtypes": {name: str(buffer.dtype) for name, buffer in cast.named_buffers()},
        "stored": cast.get_shard_metadata()["buffers"],
        "isinstance": isinstance(XlaFullyShardedDataParallel(nn.Linear(2, 2)), Theirs),
        "other": isinstance(nn.Linear(2, 2), Theirs),
        "warnings": [str(each.message) for each in found],
    }


def test_buffers_are_cast_for_good_under_torch_xlas_name_with_one_warning() -> None:
    ranks = run_on_ranks(wrapped_for_torch_xla, 1)
    for found in ranks:
        assert {name: dtype for name, dtype in found["dtypes"].items() if "2." not in name} == {
            "0.table": "torch.bfloat16",
            "1.table": "torch.bfloat16",
        }
        assert found["dtypes"]["2.running_mean"] == "torch.float32"
        assert found["stored"] == {"0.table": "float32", "1.table": "float32"}
        assert (found["isinstance"], found["other"]) == (True, False)
    [told] = [text for found in ranks for text in found["warnings"] if "for good" in text]
    assert "buffer table is cast from torch.float32 to torch.bfloat16 for good" in told
