"""Ranks of scripts start one after the other, as processes would."""

from __future__ import annotations

import ast
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from test.common.ranks import run_python, run_warm
from xla_fsdp.distributed import launcher
from xla_fsdp.distributed.cpu_ranks import Failure, Run
from xla_fsdp.distributed.process_state import RandomState

# As scripts for torch_xla: options are parsed and removed where the module is read, data are loaded
# by workers and by a thread, and nothing is seeded.
SCRIPT = """
import argparse, os, random, sys
parser = argparse.ArgumentParser()
parser.add_argument("--fake_data", action="store_true")
parser.add_argument("--dir")
FLAGS, rest = parser.parse_known_args()
sys.argv = sys.argv[:1] + rest
if FLAGS.dir:
    os.chdir(FLAGS.dir)

import threading
import numpy as np
import torch
import torch_xla
import torch_xla.distributed.parallel_loader as pl
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP

DRAWS = random.random(), np.random.rand()

def main(index):
    found = {"rank": index, "fake": FLAGS.fake_data, "rest": sys.argv[1:], "cwd": os.getcwd()}
    found["draws"] = DRAWS
    loader = torch.utils.data.DataLoader(torch.arange(8.0).reshape(4, 2), num_workers=1)
    thread = threading.Thread(target=lambda: found.update(loaded=len(list(loader))))
    thread.start()
    thread.join()
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    found["first"] = model[0].weight.tolist()
    model[0] = FSDP(model[0], pin_layout_in_collective_ops=True)
    model[1] = nn.Linear(3, 1)
    found["last"] = model[1].weight.tolist()
    model = FSDP(model, pin_layout_in_collective_ops=True)
    losses = [model(batch).sum() for batch in pl.MpDeviceLoader(loader, torch_xla.device())]
    torch_xla.sync()
    found["losses"] = [loss.item() for loss in losses]
    os.write(1, (repr(found) + "\\n").encode())

if __name__ == "__main__":
    torch_xla.launch(main)
"""

COMPAT = "import xla_fsdp.compat; xla_fsdp.compat.install()\n"

ABSL = """
import os
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer("steps", 1, "how many")
flags.DEFINE_multi_string("layer", [], "one or more")

class Kept:
    pass

def main(argv):
    import pickle
    import torch_xla.core.xla_model as xm
    found = FLAGS.steps, FLAGS.layer, argv[1:], isinstance(pickle.loads(pickle.dumps(Kept())), Kept)
    xm.rendezvous("there")
    os.write(1, (repr(found) + "\\n").encode())

if __name__ == "__main__":
    app.run(main)
"""

# What a process may do once, and what its main module may find only as the process began.
ONCE = """
import logging, multiprocessing, os, sys
from pathlib import Path

token = os.environ.pop("TOKEN")
multiprocessing.set_start_method("spawn")
os.chdir("/")
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")

import torch_xla

def main(index):
    logging.info(repr((token, sys.argv[0], Path(__file__).is_file(), __file__[0])))

if __name__ == "__main__":
    torch_xla.launch(main)
"""

PROCESS_GROUP = """
import torch.distributed as dist
import torch_xla.distributed.xla_backend

dist.init_process_group("xla", init_method="xla://")
"""

WITHOUT_COLLECTIVES = """
import os, sys, threading, time
import torch
late = threading.Thread(target=lambda: (time.sleep(0.5), os.write(1, b"late\\n")), daemon=False)
late.start()
os.write(1, (repr(torch.nn.Linear(2, 2).weight.tolist()) + "\\n").encode())
sys.exit(0)
"""


def run_ranks(
    folder: Path, source: str, *arguments: str, options: tuple[str, ...] = (), ranks: int = 3
) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(source)
    launch = ["-m", "xla_fsdp.launch", *options, f"--num_ranks={ranks}"]
    return run_warm(*launch, str(script), *arguments)


def printed(done: subprocess.CompletedProcess[str]) -> list[Any]:
    assert done.returncode == 0, done.stderr
    return [ast.literal_eval(line) for line in done.stdout.splitlines()]


def default_layers() -> list[Any]:
    """The layers that an unseeded process of torch's default seed builds after loading data."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(torch.Generator().get_state())
        torch.empty((), dtype=torch.int64).random_()  # the loader's seed
        first = torch.nn.Linear(2, 3).weight.tolist()
        torch.nn.Linear(3, 1)
        return [first, torch.nn.Linear(3, 1).weight.tolist()]


@pytest.mark.parametrize("options", [(), ("--compat",)], ids=["plain", "compat"])
def test_a_script_finds_its_command_line_and_random_numbers_on_every_rank(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    source = SCRIPT if options else COMPAT + SCRIPT
    arguments = ["--fake_data", "--dir", str(tmp_path), "--other", "3"]
    done = run_ranks(tmp_path, source, *arguments, options=options)
    found = printed(done)
    assert sorted(each["rank"] for each in found) == [0, 1, 2]
    for each in found:
        assert each["fake"] is True
        assert (each["rest"], each["cwd"]) == (["--other", "3"], str(tmp_path))
        assert [each["first"], each["last"]] == default_layers()
        assert (each["loaded"], each["losses"]) == (4, found[0]["losses"])
    if not options:  # with --compat, the main module runs once
        assert len({each["draws"] for each in found}) == 3
    # Six places wrap. Python shows the line of source below a warning.
    warning, *source_line = done.stderr.splitlines()
    assert "pin_layout_in_collective_ops=True is ignored" in warning
    assert len(source_line) <= 1


def test_what_a_script_seeds_before_it_starts_ranks_is_seeded_in_each(tmp_path: Path) -> None:
    source = SCRIPT.replace("DRAWS =", "torch.manual_seed(5); np.random.seed(6); DRAWS =")
    source = source.replace('found["draws"] = DRAWS', 'found["draws"] = np.random.rand()')
    found = printed(run_ranks(tmp_path, source, options=("--compat",), ranks=2))
    torch_draws = torch.Generator().manual_seed(5)
    torch.empty((), dtype=torch.int64).random_(generator=torch_draws)
    weight = torch.empty(3, 2)
    torch.nn.init.kaiming_uniform_(weight, a=5**0.5, generator=torch_draws)
    numbers = np.random.RandomState(6)
    numbers.rand()
    second = numbers.rand()
    for each in found:
        assert (each["first"], each["draws"]) == (weight.tolist(), second)


def test_flags_of_absl_have_the_values_of_one_command_line(tmp_path: Path) -> None:
    arguments = ["--steps=4", "--layer=a", "--layer=b", "--", "rest"]
    done = run_ranks(tmp_path, ABSL, *arguments)
    assert printed(done) == [(4, ["a", "b"], ["rest"], True)] * 3


def test_what_a_process_does_once_each_rank_does(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ONCE)
    launch = ["-m", "xla_fsdp.launch", "--num_ranks=2", os.path.relpath(script)]
    # Not run_warm(), where torch_xla has set up the root logger.
    done = run_python(*launch, env={"TOKEN": "secret"})
    assert printed(done) == [("secret", os.path.relpath(script), True, "/")] * 2
    assert done.stderr == ""


def test_a_process_group_of_ranks_that_are_threads_is_refused(tmp_path: Path) -> None:
    done = run_ranks(tmp_path, PROCESS_GROUP, ranks=2)
    assert done.returncode == 1
    assert "Leave the call out here" in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("xla_fsdp.launch: rank 0 raised RuntimeError")


def test_ranks_that_never_meet_start_one_after_the_other(tmp_path: Path) -> None:
    done = run_ranks(tmp_path, WITHOUT_COLLECTIVES)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rows = [line for line in done.stdout.splitlines() if line != "late"]
    assert len(rows) == 3
    assert len(set(rows)) == 1


def test_wrong_options_are_told_once(tmp_path: Path) -> None:
    source = SCRIPT.replace("parse_known_args()", "parse_args(), []")
    wrong = run_ranks(tmp_path, source, "--no_such_option")
    assert wrong.returncode == 2
    assert wrong.stderr.count("unrecognized arguments: --no_such_option") == 1


# ---------------------------------------------------------------- runs without devices


def run_threads(fn: Callable[[Run, int], Any], ranks: int = 3) -> tuple[Run, list[int]]:
    """Run ``fn(run, rank)`` on ranks that start one after the other; also return their order."""
    started: list[int] = []
    run = Run(ranks, started.append)
    launcher.supervise(
        run,
        lambda: run.start(lambda rank: fn(run, rank), (), lambda _: None, lambda _: None),
        60.0,
    )
    return run, started


def test_ranks_start_in_order_and_go_on_when_all_have_started() -> None:
    seen: list[tuple[str, int]] = []

    def work(run: Run, rank: int) -> None:
        seen.append(("begins", rank))
        time.sleep(0.02)
        seen.append(("records", rank))
        run.record(rank, "a sum")
        seen.append(("goes on", rank))

    _, started = run_threads(work)
    assert started == [0, 1, 2]
    assert seen[:6] == [(what, rank) for rank in range(3) for what in ("begins", "records")]
    assert {what for what, _ in seen[6:]} == {"goes on"}


def test_a_failure_in_the_start_of_a_rank_keeps_others_from_starting() -> None:
    def work(run: Run, rank: int) -> None:
        if rank == 1:
            raise KeyError("lost")
        run.record(rank, "a sum")

    with pytest.raises(launcher.RankError, match=r"rank 1 raised KeyError: 'lost'$"):
        run_threads(work)


def test_ranks_may_take_turns_and_wrap_while_they_start() -> None:
    inside: list[int] = []

    def work(run: Run, rank: int) -> None:
        with run.turn(rank):
            run.record(rank, "wrapped")
            inside.append(rank)
        run.begin_seeding(rank)
        run.record(rank, "a sum")
        run.resume_seeding(rank)
        run.exchange(rank, b"")

    run_threads(work)
    assert inside == [0, 1, 2]


def test_a_rank_that_waits_for_another_lets_it_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "START_PATIENCE", 0.5)
    prepared = threading.Event()

    def work(run: Run, rank: int) -> None:
        if rank == 1:
            prepared.set()
        assert prepared.wait(30)
        run.exchange(rank, b"")

    run_threads(work)
    told = capsys.readouterr().err
    assert told.count("rank 0 has the process to itself until its first collective") == 1
    assert "assert prepared.wait(30)" in told


def test_a_rank_that_computes_keeps_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "START_PATIENCE", 1.0)
    seen: list[int] = []

    def work(run: Run, rank: int) -> None:
        seen.append(rank)
        end = time.monotonic() + (2.0 if rank == 0 else 0.0)
        while time.monotonic() < end:
            pass
        seen.append(rank)
        run.record(rank, "a sum")

    run_threads(work, ranks=2)
    assert seen == [0, 0, 1, 1]


def test_ranks_that_compile_while_others_wait_in_a_collective_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "WARN_AFTER", math.inf)
    told: list[str] = []

    def work(run: Run, rank: int) -> None:
        for _ in range(2):  # in the second, all ranks have compiled
            run.exchange(rank, b"")
            if rank == 2 and not told:
                while run.late_to_execute(0.0) != [2]:
                    time.sleep(0.001)
                monkeypatch.setattr(launcher, "WARN_AFTER", 0.3)
                while not (text := capsys.readouterr().err):
                    time.sleep(0.05)
                told.append(text)
            run.begin_execution(rank)

    run, _ = run_threads(work)
    assert told[0].startswith(
        "xla_fsdp: ranks [0, 1] have waited 0.3 s in a collective for ranks [2], which still "
        "compile"
    )
    assert run.late_to_execute(0.0) == []


def test_an_interrupt_ends_ranks_that_have_not_started() -> None:
    def work(run: Run, rank: int) -> None:
        run.fail(Failure(-1, "interrupted"))
        run.record(rank, "a sum")

    with pytest.raises(launcher.RankError, match="interrupted"):
        run_threads(work)


def test_fresh_states_are_those_of_a_new_process() -> None:
    before = RandomState.now()
    try:
        fresh = RandomState.fresh()
        fresh.restore()
        assert torch.get_rng_state().equal(torch.Generator().get_state())
        np.random.rand()
        mixed = RandomState.now().or_fresh_where_equal(fresh)
        assert mixed.numpy[2] == np.random.get_state()[2]
        assert mixed.python != fresh.python
        assert mixed.torch.equal(fresh.torch)
    finally:
        before.restore()


def test_the_process_is_as_before_when_the_script_has_run(tmp_path: Path) -> None:
    script, caller = tmp_path / "script.py", tmp_path / "caller.py"
    script.write_text(f"import os, sys; os.chdir({str(tmp_path)!r}); sys.argv = []")
    caller.write_text(
        f"import os, sys, xla_fsdp.launch as cli; before = os.getcwd(), list(sys.argv);"
        f"cli.main(['--num_ranks=2', {str(script)!r}]); print((os.getcwd(), sys.argv) == before)"
    )
    done = run_warm(str(caller))
    assert done.stdout == "True\n", done.stderr
