"""A job that saves in the background, and ends while the files are written.

``python -m test.common.exit_without_wait <directory> <how>``; if it "fails", rank 1 cannot write.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel, launch, one_rank_at_a_time, save_checkpoint
from xla_fsdp.checkpoint import CheckpointError
from xla_fsdp.checkpoint.steps.save_step import Written, write_rank_file
from xla_fsdp.state import train_checkpoint


def slow(sink: Any, name: str, content: Any) -> Written:
    time.sleep(1)
    if sys.argv[2] == "fails" and "rank-00001" in name:
        raise CheckpointError("no room")
    return write_rank_file(sink, name, content)


def work(rank: int) -> None:
    with one_rank_at_a_time():
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
    model = XlaFullyShardedDataParallel(layer)
    save_checkpoint(sys.argv[1], model, step=1, asynchronous=True)


if __name__ == "__main__":
    train_checkpoint.write_rank_file = slow
    launch(work, num_ranks=2)
