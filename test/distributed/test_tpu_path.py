"""What ``launch`` and ranks do on a TPU, with torch_xla's own functions replaced at their edge.

Replaced are: ``torch_xla.launch``, by processes of this machine, or, under the examples, by itself
with torch_xla's CPU device; ``xr.device_type`` and ``xr.global_runtime_device_attributes``, by
those of a v5e-8; ``xm.rendezvous``, by one that knows what the other rank sends. What nobody has
run on a TPU is listed in docs/hardware.md.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from test.common.ranks import ROOT, run_python
from xla_fsdp import tpu_flags
from xla_fsdp.distributed import launcher
from xla_fsdp.distributed.preemption import was_asked

RANKS = 2
CHECKS = ("versions", "ranks", "topology", "collectives", "wrapper", "fully_sharded")


def start_processes(
    fn: Any, args: tuple[Any, ...], start_method: str, debug_single_process: bool
) -> None:
    """Run ``fn`` in processes as torch_xla's launch does."""
    count = 1 if debug_single_process else RANKS
    context = multiprocessing.get_context(start_method)
    with ProcessPoolExecutor(count, mp_context=context) as executor:
        for done in [executor.submit(fn, rank, *args) for rank in range(count)]:
            done.result()


def tells(rank: int, folder: Path, waits: bool) -> None:
    """A rank that writes down what it finds in its process."""
    Path(folder, f"ready{rank}").write_text(str(os.getppid()))
    end = time.monotonic() + 600
    while waits and not was_asked() and time.monotonic() < end:
        time.sleep(0.01)
    names = ("PJRT_DEVICE", "LIBTPU_INIT_ARGS", "XLA_PERSISTENT_CACHE_PATH")
    found = [*(os.environ.get(name, "none") for name in names), str(was_asked())]
    Path(folder, f"rank{rank}").write_text("\n".join(found))


@pytest.fixture
def tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_xla

    monkeypatch.setattr(torch_xla, "launch", start_processes)
    monkeypatch.setattr(tpu_flags, "_installed_version", lambda: tpu_flags.KNOWN_TO)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--own=1")


@pytest.mark.usefixtures("tpu")
def test_processes_start_with_the_compilers_flags_and_hear_signals(tmp_path: Path) -> None:
    asked = multiprocessing.get_context("spawn").Process(target=ask, args=(os.getpid(), tmp_path))
    asked.start()
    launcher.launch(tells, (tmp_path, True), stop_signals=(signal.SIGUSR1,))
    asked.join()
    for rank in range(RANKS):
        device, flags, cache, heard = Path(tmp_path, f"rank{rank}").read_text().splitlines()
        assert device == "TPU"
        assert flags.split() == ["--own=1", *tpu_flags.ADDED]
        assert (cache, heard) == ("none", "True")


@pytest.mark.usefixtures("tpu")
def test_each_process_keeps_programs_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch_xla.runtime as xr

    monkeypatch.setattr(xr, "process_index", lambda: 3)
    for name in ("XLA_PERSISTENT_CACHE_PATH", "XLA_PERSISTENT_CACHE_READ_ONLY"):
        monkeypatch.setenv(name, "")  # so that later tests' processes have none
        monkeypatch.delenv(name)
    cache = tmp_path / "cache"

    def in_this_process(fn: Any, args: tuple[Any, ...], *_: Any, **options: Any) -> None:
        for rank in range(RANKS):
            fn(rank, *args)

    monkeypatch.setattr("torch_xla.launch", in_this_process)
    launcher.launch(tells, (tmp_path, False), compile_cache=cache)
    for rank in range(RANKS):
        found = Path(tmp_path, f"rank{rank}").read_text().splitlines()
        assert found[2] == str(cache / "process-3")
    assert os.environ["XLA_PERSISTENT_CACHE_READ_ONLY"] == "0"


def ask(pid: int, folder: Path) -> None:
    """Send a signal to the process that launches, once all ranks are there."""
    while len(list(folder.glob("ready*"))) < RANKS:
        time.sleep(0.01)
    os.kill(pid, signal.SIGUSR1)


@pytest.mark.usefixtures("tpu")
def test_one_process_is_for_debugging(tmp_path: Path) -> None:
    launcher.launch(tells, (tmp_path, False), num_ranks=1)
    assert [each.name for each in tmp_path.glob("rank*")] == ["rank0"]


def test_coordinates_are_in_the_order_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_xla.runtime as xr

    from xla_fsdp.xla import ops

    attributes = [
        {"name": f"TPU:{x + 2 * y}", "coords": [x, y, 0], "core_on_chip": 0}
        for x in range(2)
        for y in range(4)
    ]
    random.Random(0).shuffle(attributes)
    monkeypatch.setattr(xr, "device_type", lambda: "TPU")
    monkeypatch.setattr(xr, "global_runtime_device_attributes", lambda: attributes)
    assert ops.RankRuntime().torus_coords() == [[0, x, y, 0, 0] for y in range(4) for x in range(2)]


def test_host_data_of_unequal_length_reach_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_xla.core.xla_model as xm

    from xla_fsdp.xla import ops

    sent: list[bytes] = []

    def rendezvous(tag: str, payload: bytes) -> list[bytes]:
        sent.append(payload)
        return list(sent)

    monkeypatch.setattr(xm, "rendezvous", rendezvous)
    monkeypatch.setattr(ops, "world_size", lambda: RANKS)
    ops.RankRuntime().exchange(b"a")
    assert ops.RankRuntime().exchange(b"much longer" * 9) == [b"a", b"much longer" * 9]
    assert {len(each) % ops.EXCHANGE_MULTIPLE for each in sent} == {0}


# ---------------------------------------------------------------- the examples

# Python imports this before the script, there and in the process that torch_xla starts.
ONE_CPU_DEVICE = """
import os

if os.environ["PJRT_DEVICE"] == "TPU":
    import torch_xla

    start = torch_xla.launch

    def launch(*args, **options):
        os.environ["PJRT_DEVICE"] = "CPU"
        return start(*args, **options)

    torch_xla.launch = launch
"""

MNIST = "--fake_data --num_epochs=1 --max_steps=20 --compare_steps=3 --ckpt_every_steps=7"
IMAGENET = (
    "--fake_data --fake_pictures=32 --model=resnet18 --img_size=32 --batch_size=4 --num_epochs=1"
)
LLM = "--width=16 --blocks=2 --heads=2 --kv_heads=1 --ffn=32 --length=16 --steps=8 --generate=3"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "options", "last"),
    [
        ("mnist", f"{MNIST} --ckpt_dir=runs", "steady state"),
        ("mnist", f"{MNIST} --ckpt_dir=runs --compute_dtype=bfloat16 --profile=runs", "steady"),
        ("imagenet", f"{IMAGENET} --ckpt_dir=runs --use_nested_fsdp", "accuracy"),
        ("llm", LLM, "steps/s"),
    ],
)
def test_examples_run_in_a_process_that_torch_xla_starts(
    tmp_path: Path, example: str, options: str, last: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(ONE_CPU_DEVICE)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    script = str(ROOT / "examples" / example / "train.py")
    env = {"PJRT_DEVICE": "TPU", "PYTHONPATH": paths}
    done = run_python(script, *options.split(), cwd=tmp_path, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    assert last in done.stdout
    assert " on 8 ranks" not in done.stdout  # CPU ranks', not torch_xla's process


# ---------------------------------------------------------------- tools/tpu_smoke.sh, on CPU ranks


def smoke(*checks: str) -> list[list[str]]:
    """Rows of the table."""
    code = (
        f"import os, sys; os.environ.update(PYTHON=sys.executable, XLA_FSDP_NUM_RANKS='2');"
        f"os.execv('tools/tpu_smoke.sh', ['tpu_smoke.sh', *{list(checks)!r}])"
    )
    done = run_python("-c", code, timeout=900, cwd=ROOT)
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    assert done.returncode == sum(row[1] != "ok" for row in rows), done.stdout + done.stderr
    return rows


@pytest.mark.slow
def test_the_smoke_test_tells_what_failed() -> None:
    [row] = smoke("no_such_check")
    assert row[:2] == ["no_such_check", "FAILED (2)"]
    assert "give one of versions" in row[3]


def test_the_smoke_test_says_how_to_call_it() -> None:
    done = subprocess.run(
        ["tools/tpu_smoke.sh", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout.startswith("Run on a TPU")
    assert done.stdout.endswith("checks that failed.\n")


@pytest.mark.slow
def test_the_whole_smoke_test_passes_on_cpu_ranks() -> None:
    rows = smoke()
    assert {row[0] for row in rows} > set(CHECKS)
    assert [row for row in rows if row[1] != "ok"] == []
