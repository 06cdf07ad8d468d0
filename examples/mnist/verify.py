"""Merge the last checkpoint's shards, and check the merged file in a process without torch_xla.

Words: *sharded* is the score of the model on its ranks, *merged* that of the merged file in plain
PyTorch.
Always true: the merged model must get exactly as many test images right as the sharded one; only
near ties (see ``evaluate``) may fall differently, because rounding does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from checkpoints import Point
from evaluate import Score
from job import JobFailed, Options
from xla_fsdp import CheckpointError, consolidate_sharded_model_checkpoints

EVALUATE = Path(__file__).with_name("evaluate.py")


def merge(options: Options, point: Point) -> Path:
    """Merge the shards of the newest checkpoint, that of ``point``, and return the file's path."""
    steps = f"_step_{point.steps}" if point.steps else ""
    path = Path(f"{options.prefix}_epoch_{point.epochs}{steps}_consolidated.pth")
    try:
        consolidate_sharded_model_checkpoints(
            str(options.prefix), save_path=str(path), overwrite=True
        )
    except CheckpointError as error:
        raise JobFailed(f"the shards could not be merged: {error}") from error
    return path


def evaluate_apart(path: Path, options: Options) -> Score:
    """The score of a merged file, from a process of its own."""
    command = [sys.executable, str(EVALUATE), str(path), f"--data_dir={options.data_dir}"]
    command += [f"--compute_dtype={options.compute_dtype}"]
    command += ["--fake_data"] * options.fake_data
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise JobFailed(f"{path}: the merged file could not be evaluated:\n{done.stderr.rstrip()}")
    return Score(**json.loads(done.stdout))


def check_equal(path: Path, sharded: Score, merged: Score) -> None:
    """Raise JobFailed if the merged file is not the model that was trained."""
    difference = abs(sharded.correct - merged.correct)
    if sharded.total != merged.total or difference > merged.near_ties:
        raise JobFailed(
            f"{path}: the merged model gets {merged.correct} of {merged.total} test images right, "
            f"the sharded model {sharded.correct} of {sharded.total}; rounding explains a "
            f"difference of at most {merged.near_ties}. The merged file is not the trained model."
        )
