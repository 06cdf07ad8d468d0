"""Data loaders of ranks that raise in the thread of ``MpDeviceLoader``."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from test.common.ranks import run_warm
from xla_fsdp.distributed.launcher import RankError, launch

BATCHES = 4
BROKEN = 2
KINDS = ("batch", "batch of a worker", "batch on all ranks", "order", "upload")
SECONDS = 60  # on a busy machine; without the error, ranks wait for ever


class BrokenError(Exception):
    pass


@dataclass(frozen=True)
class Data:
    """Rows of ones, one of which cannot be read."""

    broken: bool

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, number: int) -> Any:
        import torch

        if self.broken and number == BROKEN:
            raise BrokenError("no such picture")
        return torch.ones(3)


@dataclass(frozen=True)
class Order:
    """The sequence of rows, which may be one that cannot be made, or is of no tensors."""

    kind: str

    def __iter__(self) -> Iterator[Any]:
        if self.kind == "order":
            raise BrokenError("no order")
        return iter(range(BATCHES))

    def __len__(self) -> int:
        return BATCHES


def sum_up(rank: int, kind: str) -> int:
    """Return how many batches there are, of which the ranks add up a sum each."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    fails = rank == 1 or kind == "batch on all ranks"
    loader: Any = torch.utils.data.DataLoader(
        Data(fails and kind.startswith("batch")),
        sampler=Order(kind if fails else ""),
        num_workers=int(kind == "batch of a worker"),
    )
    if fails and kind == "order":
        loader = Order(kind)  # raises where the loop over it begins
    if fails and kind == "upload":
        loader = [torch.ones(1, 3).to_sparse()]
    batches = 0
    for batch in MpDeviceLoader(loader, torch_xla.device()):
        xm.all_reduce("sum", batch.sum())
        batches += 1
    torch_xla.sync()
    return batches


def run_all() -> dict[str, list[Any]]:
    """Return what each launch ended with, the functions that its error came through, and how long
    it took."""
    report = {}
    for kind in (*KINDS, "nothing"):
        begun = time.monotonic()
        found: list[Any]
        try:
            found = ["returned", launch(sum_up, (kind,), num_ranks=2)]
        except RankError as error:
            found = [error.rank, str(error), functions_of(error.__cause__)]
        report[kind] = [*found, time.monotonic() - begun]
    return report


def functions_of(error: BaseException | None) -> list[str]:
    frames = error.__traceback__ if error is not None else None
    names = []
    while frames is not None:
        names.append(frames.tb_frame.f_code.co_name)
        frames = frames.tb_next
    return names


@functools.cache
def reports() -> dict[str, list[Any]]:
    code = "import json, test.distributed.test_loaders as t; print(json.dumps(t.run_all()))"
    done = run_warm("-c", code, timeout=60 + SECONDS * (len(KINDS) + 1))
    assert done.returncode == 0, done.stderr
    assert "Exception in thread" not in done.stderr
    found: dict[str, list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("kind", "error", "function"),
    [
        ("batch", "BrokenError: no such picture", "__getitem__"),
        ("batch of a worker", "BrokenError: Caught BrokenError in DataLoader worker", "reraise"),
        ("order", "BrokenError: no order", "__iter__"),
        ("upload", "RuntimeError: ", "send_cpu_data_to_device"),
    ],
)
def test_a_rank_raises_what_its_loader_raises(kind: str, error: str, function: str) -> None:
    rank, message, functions, seconds = reports()[kind]
    assert rank == 1
    assert message.startswith(f"rank 1 raised {error}")
    assert function in functions
    assert seconds < SECONDS


def test_no_epoch_ends_early_where_all_loaders_raise() -> None:
    rank, message, *_ = reports()["batch on all ranks"]
    assert message.startswith(f"rank {rank} raised BrokenError: no such picture")


def test_loaders_that_do_not_raise_give_all_batches() -> None:
    assert reports()["nothing"][:2] == ["returned", [BATCHES, BATCHES]]
