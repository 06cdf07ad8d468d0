"""Code for ``torch_xla.distributed.fsdp`` on this package: a whole script, and every import."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from test.common.ranks import run_python

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
assert Direct is XlaFullyShardedDataParallel is xla_fsdp.XlaFullyShardedDataParallel
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
    assert found["home"] == "xla_fsdp.fsdp.wrapper"
    assert (found["ranks"], found["times run"]) == (2, "x")
    assert found["apart"] < close
    assert len(found["losses"]) == 6
    assert found["losses"][-1] < found["losses"][0]
    first, last = found["accuracies"]
    assert last >= first > 10


def test_every_name_is_ours_also_after_torch_xlas_was_imported() -> None:
    done = run_python("-c", NAMES)
    assert done.stdout.strip() == "all there", done.stderr
