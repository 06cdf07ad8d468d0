"""examples/imagenet: the whole job on 2 CPU ranks, uninterrupted and resumed after a SIGTERM.

Pictures show a class by their colour, so a small transformer learns them in two epochs; some files
are damaged. The slow tests fetch real photographs.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from test.common.ranks import ROOT, environment, run_python

IMAGENET = ROOT / "examples" / "imagenet"
TRAIN = "examples/imagenet/train.py"
MODULES = ("batches", "cifar10", "job", "pictures", "schedule")
RANKS, BATCH, EPOCHS = 2, 4, 2
CLASSES = ("blue", "green", "red")
PER_CLASS, VAL_PER_CLASS = 43, 9
DAMAGED = ("train/red/damaged.jpg", "val/blue/damaged.jpg")
STEPS = 17  # 130 pictures, two of them twice with the last batch filled, on 2 ranks of 4
PREEMPTED, MISSED = 75, 21


@pytest.fixture(scope="module")
def imagenet() -> Iterator[SimpleNamespace]:
    """The example's modules that need no ranks. They are forgotten afterwards: names like ``job``
    are other examples', too."""
    before = set(sys.modules)
    sys.path.insert(0, str(IMAGENET))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    sys.path.remove(str(IMAGENET))
    for name in set(sys.modules) - before:
        if str(IMAGENET) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write_pictures(folder: Path, per_class: int, rng: np.random.Generator) -> None:
    """Noise around the colour that the class is named after."""
    for channel, name in enumerate(reversed(CLASSES)):
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            pixels = rng.integers(0, 120, (40, 48, 3), dtype=np.uint8)
            pixels[..., channel] += 100
            Image.fromarray(pixels).save(folder / name / f"{number}.jpg")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of JPEG files; one file of each set is cut short."""
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    write_pictures(folder / "train", PER_CLASS, rng)
    write_pictures(folder / "val", VAL_PER_CLASS, rng)
    for damaged in DAMAGED:
        whole = (folder / damaged).with_name("0.jpg").read_bytes()
        (folder / damaged).write_bytes(whole[: len(whole) // 3])
    return folder


def command(pictures: Path, folder: Path, *more: str) -> list[str]:
    """A small job that keeps all its files in ``folder``."""
    options = {
        "datadir": pictures,
        "model": "vit_10b",
        "vit_sizes": "32x2x2",
        "img_size": 28,
        "auto_wrap_policy": "type_based",
        "batch_size": BATCH,
        "test_set_batch_size": 5,
        "num_epochs": EPOCHS,
        "num_workers": 1,
        "num_ranks": RANKS,
        "lr": 0.02,
        "num_warmup_epochs": 0.5,
        "label_smoothing": 0.1,
        "log_steps": 1,
        "ckpt_dir": folder / "checkpoints",
        "loss_log": folder / "losses.jsonl",
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [TRAIN, *flags, "--use_gradient_checkpointing", *more]


def losses(folder: Path) -> dict[tuple[int, int], float]:
    """The loss log, by epoch and step."""
    log = folder / "losses.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return {(line["epoch"], line["step"]): line["loss"] for line in lines}


# ---------------------------------------------------------------- an uninterrupted run


@dataclass(frozen=True)
class Run:
    """What a run printed, and where it wrote."""

    done: subprocess.CompletedProcess[str]
    folder: Path


@pytest.fixture(scope="module")
def full_run(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two epochs."""
    folder = tmp_path_factory.mktemp("full")
    logdir = f"--logdir={folder / 'log'}"
    done = run_python(*command(pictures, folder, logdir, "--target_accuracy=60"))
    assert done.returncode == 0, done.stderr
    return Run(done, folder)


def test_a_run_learns_and_reports_both_accuracies(full_run: Run) -> None:
    found = re.findall(r"epoch (\d): .* top-1 ([\d.]+)%, top-5 ([\d.]+)%", full_run.done.stdout)
    assert [epoch for epoch, _, _ in found] == ["1", "2"]
    assert float(found[-1][1]) > 60
    assert [top5 for _, _, top5 in found] == ["100.00"] * 2  # there are three classes
    assert list(losses(full_run.folder)) == [(e, s) for e in (1, 2) for s in range(1, STEPS + 1)]


def test_damaged_pictures_are_named_and_counted_and_no_failure(full_run: Run) -> None:
    for damaged in DAMAGED:
        assert re.search(rf"rank \d: left out \S+{damaged}: .*runcated", full_run.done.stderr)
    assert "2 damaged pictures were left out: " in full_run.done.stdout


def test_nothing_is_compiled_after_step_2_but_the_first_evaluation(full_run: Run) -> None:
    (line,) = re.findall(r"programs compiled: .*", full_run.done.stdout)
    counts = dict(re.findall(r"(\w[\w ]*?) ([\d+]+)(?:,|$)", line.partition(": ")[2]))
    first, *later = counts["evaluation"].split("+")
    assert int(counts["the first two steps"]) >= 2
    assert int(first) >= 1
    assert later == ["0"]
    assert counts["saving"] == "0+0"
    # An evaluation reads the parameters; the compiled step after the first one gives those that
    # were read buffers of their own, by a program of each rank.
    epochs = [int(each) for each in counts["later steps"].split("+")]
    assert epochs[0] == 0
    assert epochs[1] <= RANKS


def test_tensorboard_scalars(full_run: Run) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    (path,) = (full_run.folder / "log").glob("events.*")
    found: dict[str, int] = {}
    for event in LegacyEventFileLoader(str(path)).Load():
        for value in event.summary.value:
            found[value.tag] = found.get(value.tag, 0) + 1
    per_step = dict.fromkeys(("train/loss", "train/accuracy", "train/learning_rate"), 2 * STEPS)
    assert found == {**per_step, **dict.fromkeys(("val/top1", "val/top5", "val/loss"), EPOCHS)}


# ---------------------------------------------------------------- ended early


@pytest.fixture(scope="module")
def ended_run(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """SIGTERM to every process of the job, as a shutdown sends it, once three steps are done."""
    folder = tmp_path_factory.mktemp("ended")
    process = subprocess.Popen(
        [sys.executable, *command(pictures, folder)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while len(losses(folder)) < 3 and process.poll() is None:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGTERM)
    try:
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    return Run(subprocess.CompletedProcess([], process.returncode, out, err), folder)


def test_sigterm_saves_and_ends_with_an_exit_code_of_its_own(ended_run: Run) -> None:
    assert ended_run.done.returncode == PREEMPTED, ended_run.done.stderr
    said = re.search(r"saved after (\d) epochs and (\d+) steps", ended_run.done.stderr)
    assert said, ended_run.done.stderr
    assert "Traceback" not in ended_run.done.stderr
    saved = int(said[1]) * STEPS + int(said[2])
    newest = max((ended_run.folder / "checkpoints").iterdir())
    assert newest.name == f"step_{saved:08d}"
    assert 3 <= saved < EPOCHS * STEPS


@pytest.mark.slow
def test_a_resumed_run_loses_no_step(ended_run: Run, full_run: Run, pictures: Path) -> None:
    assert ended_run.done.returncode == PREEMPTED, ended_run.done.stderr
    reached = len(losses(ended_run.folder))
    done = run_python(*command(pictures, ended_run.folder, "--resume=auto"), timeout=300)
    assert done.returncode == 0, done.stderr
    (last,) = re.findall(r"going on after (\d) epochs and (\d+) steps", done.stdout)
    # The step that was under way was made, and saved, but no longer reported.
    assert int(last[0]) * STEPS + int(last[1]) - reached in (0, 1)
    found, expected = losses(ended_run.folder), losses(full_run.folder)
    assert len(found) >= len(expected) - 1
    # A run's first step is a program of its own, which may round in another order.
    assert found == pytest.approx({point: expected[point] for point in found}, rel=1e-5)
    ends = [run.stdout.splitlines() for run in (done, full_run.done)]
    accuracy = [re.findall(r"best top-1 accuracy \S+", "\n".join(lines)) for lines in ends]
    assert accuracy[0] == accuracy[1]


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model resnet51", "--model: invalid choice: 'resnet51'"),
        ("--num_cores 0", "--num_ranks/--num_cores: '0' is not a whole number, 1 or more"),
        ("--label_smoothing 2", "--label_smoothing: '2' is not a number from 0 to 1"),
        ("--vit_sizes 10x2", "--vit_sizes: '10x2' is not of the form WIDTHxBLOCKSxHEADS"),
        ("--vit_sizes 10x2x3", "3 heads do not divide width 10"),
        ("--use_nested_fsdp --auto_wrap_policy size_based", "both choose the units; give one"),
        ("--debug --num_ranks 2", "--debug runs one rank"),
        ("--profile", "--profile writes into --logdir; give one"),
    ],
)
def test_wrong_flags(
    flags: str, message: str, imagenet: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        imagenet.job.parse_options(flags.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


UPSTREAM_FLAGS = """
    --datadir d --logdir l --num_cores 4 --batch_size 1 --num_epochs 1 --num_workers 1
    --prefetch_factor 1 --pin_memory True --persistent_workers --loader_prefetch_size 1
    --device_prefetch_size 1 --cpu_to_device_transfer_threads 1 --log_steps 1 --profiler_port 1
    --lr 1 --momentum 1 --target_accuracy 1 --drop_last --fake_data --tidy --metrics_debug
    --async_closures --model vit_b_16 --test_set_batch_size 1
    --lr_scheduler_type WarmupAndExponentialDecayScheduler --lr_scheduler_divide_every_n_epochs 1
    --lr_scheduler_divisor 1 --test_only_at_end --num_warmup_epochs 0.5 --eval_interval 1
    --flatten_parameters --auto_wrap_policy none --auto_wrap_min_num_params 1 --use_nested_fsdp
    --use_gradient_checkpointing --compute_dtype bfloat16 --fp32_reduce_scatter
    --shard_param_on_dim_0 --pin_layout_in_collective_ops
"""


def test_every_flag_of_torch_xlas_script_is_taken(imagenet: SimpleNamespace) -> None:
    options = imagenet.job.parse_options(UPSTREAM_FLAGS.split())
    assert (options.num_ranks, options.model, options.num_warmup_epochs) == (4, "vit_b_16", 0.5)
    said = " ".join(options.notices)
    for name in ("async_closures", "pin_memory", "pin_layout_in_collective_ops", "tidy"):
        assert f"--{name} has no effect: " in said
    assert imagenet.job.parse_options(["--debug"]).debug


def test_defaults_are_those_of_torch_xlas_script(imagenet: SimpleNamespace) -> None:
    options = imagenet.job.parse_options([])
    assert (options.model, options.lr, options.batch_size, options.img_size) == (
        "resnet50",
        0.5,
        128,
        224,
    )
    assert imagenet.job.parse_options(["--model=vit_b_16"]).lr == 0.1
    assert imagenet.job.parse_options(["--model=inception_v3"]).img_size == 299
    assert options.notices == ()


def test_the_published_recipe_is_one_command(imagenet: SimpleNamespace) -> None:
    text = (IMAGENET / "README.md").read_text()
    first = re.sub(r"\\\n", " ", text.split("```")[1])
    [line] = first.strip().splitlines()
    assert line.split()[:2] == ["python", TRAIN]
    options = imagenet.job.parse_options(line.split()[2:])
    found = (options.model, options.batch_size, options.num_epochs, options.lr)
    assert found == ("resnet50", 128, 100, 0.4)
    divided = (options.lr_scheduler_divide_every_n_epochs, options.lr_scheduler_divisor)
    assert (*divided, options.num_warmup_epochs) == (30, 10, 5)
    assert (options.use_nested_fsdp, options.notices) == (True, ())


def test_learning_rate(imagenet: SimpleNamespace) -> None:
    flags = "--lr 0.4 --num_warmup_epochs 5 --lr_scheduler_divide_every_n_epochs 30"
    options = imagenet.job.parse_options([*flags.split(), "--lr_scheduler_divisor=10"])
    at = [imagenet.schedule.learning_rate(options, epochs) for epochs in (1, 5, 29.9, 30, 60, 90)]
    assert at == pytest.approx([0.08, 0.4, 0.4, 0.04, 0.004, 0.0004])
    constant = imagenet.job.parse_options(["--lr=0.4", "--lr_scheduler_type=constant"])
    assert imagenet.schedule.learning_rate(constant, 0.1) == 0.4


# ---------------------------------------------------------------- pictures and picks


def picks(imagenet: SimpleNamespace, count: int, ranks: int, **options: Any) -> list[Any]:
    """Every rank's."""
    place, cpu = importlib.import_module("place").Place, torch.device("cpu")
    return [
        imagenet.batches.Picks(range(count), place(rank, ranks, cpu), **options)
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(("count", "ranks"), [(10, 3), (1, 4), (2000, 2), (509, 8)])
def test_every_validation_picture_is_picked_once(
    count: int, ranks: int, imagenet: SimpleNamespace
) -> None:
    each = picks(imagenet, count, ranks, size=4, seed=None, drop_last=False)
    by_rank = [[index for batch in own for index, _ in batch] for own in each]
    assert len({len(own) for own in by_rank}) == 1
    assert sorted(index for own in by_rank for index in own if index >= 0) == list(range(count))


def test_training_batches_are_full_and_begin_anywhere(imagenet: SimpleNamespace) -> None:
    first, second = picks(imagenet, 50, 2, size=4, seed=3, drop_last=False)
    whole = list(first)
    assert [len(batch) for batch in whole] == [4] * 7
    assert {i for own in (first, second) for batch in own for i, _ in batch} == set(range(50))
    assert whole[-1][1:] == whole[0][:3]  # filled from the beginning
    first.begin, first.end = 2, 5
    assert list(first) == whole[2:5]
    first.epoch = 1
    assert [i for i, _ in next(iter(first))] != [i for i, _ in whole[2]]
    assert len(list(picks(imagenet, 50, 2, size=4, seed=3, drop_last=True)[0])) == 6


def test_the_first_pictures_of_an_epoch_are_the_same_on_any_number_of_ranks(
    imagenet: SimpleNamespace,
) -> None:
    def begin(ranks: int, steps: int) -> set[int]:
        each = picks(imagenet, 48, ranks, size=4, seed=3, drop_last=False)
        return {i for own in each for batch in list(own)[:steps] for i, _ in batch}

    assert begin(2, 4) == begin(4, 2) == begin(1, 8)


class Numbered(torch.utils.data.Dataset[Any]):
    """The picture of a pick is full of its number; one of them cannot be had."""

    def __init__(self, picture: Any, broken: int | None = None) -> None:
        self._picture, self._broken = picture, broken

    def __len__(self) -> int:
        return 40

    def __getitem__(self, pick: tuple[int, int]) -> Any:
        if pick[0] == self._broken:
            raise LookupError(f"no picture {self._broken}")
        return self._picture(torch.full((3, 2, 2), pick[0], dtype=torch.uint8), pick[0])


def numbered(imagenet: SimpleNamespace, *, workers: int, broken: int | None = None) -> Any:
    """Batches of 4 of them, on the CPU, in the files' order."""
    place = importlib.import_module("place").Place(0, 1, torch.device("cpu"))
    data = Numbered(imagenet.pictures.Picture, broken)
    picked = imagenet.batches.Picks(data, place, size=4, seed=None, drop_last=False)
    loading = imagenet.batches.Loading(workers, 2, True, on_host=2, on_device=2, threads=3)
    return imagenet.batches.Batches(data, picked, place, loading)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_wait_in_order_and_can_be_left(workers: int, imagenet: SimpleNamespace) -> None:
    threads, batches = set(threading.enumerate()), numbered(imagenet, workers=workers)
    for begin, taken in ((0, 10), (3, 2), (3, 7)):
        with batches.epoch(1, begin) as found:
            seen = [batch.labels.tolist() for batch, _ in zip(found, range(taken), strict=False)]
        assert seen == [list(range(4 * i, 4 * i + 4)) for i in range(begin, begin + taken)]
    if not workers:
        assert set(threading.enumerate()) <= threads


def test_what_loading_raises_reaches_the_rank(imagenet: SimpleNamespace) -> None:
    with numbered(imagenet, workers=0, broken=9).epoch(0) as found:
        assert [next(found).labels[0].item() for _ in range(2)] == [0, 4]
        with pytest.raises(LookupError, match="no picture 9"):
            next(found)


def test_a_damaged_picture_is_blank(pictures: Path, imagenet: SimpleNamespace) -> None:
    options = imagenet.job.parse_options([f"--datadir={pictures}", "--img_size=28"])
    train, _ = imagenet.pictures.load_pictures(options)
    found = [train[index, 0] for index in range(len(train))]
    (damaged,) = [each for each in found if each.problem]
    assert damaged.problem[0] == str(pictures / DAMAGED[0])
    assert damaged.label == -1
    assert not damaged.pixels.any()
    batch = imagenet.pictures.joined([damaged, found[0]])
    assert batch.labels.tolist() == [-1, 0]
    assert batch.problems == (damaged.problem,)


def test_crops_and_flips_follow_seed_and_epoch(
    pictures: Path, imagenet: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imagenet.pictures, "get_worker_info", lambda: True)  # as in a worker

    def pixels(seed: int, epoch: int) -> bytes:
        flags = [f"--datadir={pictures}", "--img_size=28", f"--seed={seed}"]
        train, _ = imagenet.pictures.load_pictures(imagenet.job.parse_options(flags))
        return bytes(train[0, epoch].pixels.numpy().tobytes())

    with torch.random.fork_rng(devices=[]):
        assert pixels(0, 0) == pixels(0, 0)
        assert len({pixels(seed, epoch) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_folders_that_are_missing_or_differ_are_named(
    tmp_path: Path, imagenet: SimpleNamespace
) -> None:
    options = imagenet.job.parse_options([f"--datadir={tmp_path}"])
    with pytest.raises(imagenet.job.JobFailed, match=r"train: .*or use --fake_data"):
        imagenet.pictures.load_pictures(options)
    rng = np.random.default_rng(0)
    write_pictures(tmp_path / "train", 1, rng)
    write_pictures(tmp_path / "val", 1, rng)
    (tmp_path / "val" / "red").rename(tmp_path / "val" / "rot")
    with pytest.raises(imagenet.job.JobFailed, match="different classes: red, rot"):
        imagenet.pictures.load_pictures(options)


# ---------------------------------------------------------------- what takes longer


def fake(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """A few steps on noise."""
    small = (
        "--fake_data --fake_pictures=64 --num_ranks=2 --batch_size=4 --test_set_batch_size=4 "
        "--img_size=32 --num_epochs=1 --num_workers=0 --log_steps=2"
    )
    return run_python(
        TRAIN, *small.split(), f"--ckpt_dir={folder / 'checkpoints'}", *more, timeout=500
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--model=resnet18",
        "--model=resnet18 --use_nested_fsdp --flatten_parameters --compute_dtype=bfloat16",
        "--model=resnet18 --auto_wrap_policy=type_based --use_gradient_checkpointing "
        "--shard_param_on_dim_0 --fp32_reduce_scatter --compute_dtype=bfloat16 --num_ranks=4 "
        "--num_replicas=2",
        "--model=vit_b_16 --auto_wrap_policy=size_based --auto_wrap_min_num_params=500000 "
        "--max_steps=3 --drop_last --metrics_debug",
    ],
)
def test_every_way_to_shard(flags: str, tmp_path: Path) -> None:
    done = fake(tmp_path, *flags.split(), "--ckpt_every_steps=2")
    assert done.returncode == 0, done.stderr
    assert "best top-1 accuracy" in done.stdout
    assert "later steps 0," in done.stdout
    assert ("Metric: CompileTime" in done.stdout) == ("metrics_debug" in flags)


@pytest.mark.slow
def test_the_default_is_resnet50_and_a_profile_is_recorded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    more = ("--fake_pictures=128", "--test_only_at_end", "--profile", f"--logdir={log}")
    done = fake(tmp_path, *more)
    assert done.returncode == 0, done.stderr
    assert list((log / "profile").rglob("*.xplane.pb"))


@pytest.mark.slow
def test_refusals_are_one_line_and_a_missed_target_has_its_exit_code(tmp_path: Path) -> None:
    # Blocks in a list, which is no unit itself.
    tiny = ("--model=vit_10b", "--vit_sizes=32x1x2", "--img_size=28", "--use_nested_fsdp")
    done = fake(tmp_path, *tiny, "--target_accuracy=100")
    assert (done.returncode, "Traceback" in done.stderr) == (MISSED, False)
    assert "below --target_accuracy 100" in done.stderr
    again = fake(tmp_path, *tiny)
    assert (again.returncode, "Traceback" in again.stderr) == (1, False)
    assert "holds checkpoints up to step 8: go on with --resume auto" in again.stderr
    other = fake(tmp_path, *tiny, "--resume=auto", "--batch_size=8")
    assert "was written with batch_size=4, this run has batch_size=8" in other.stderr
    odd = fake(tmp_path, *tiny, "--num_replicas=3")
    assert (odd.returncode, "Traceback" in odd.stderr) == (1, False)
    assert "--num_replicas 3 does not divide the 2 ranks" in odd.stderr
    ranks = fake(tmp_path, *tiny, "--resume=auto", "--num_ranks=4", "--num_epochs=2")
    assert "going on after 1 epochs and 0 steps" in ranks.stdout


@pytest.mark.slow
def test_real_photographs_are_learned_on_8_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "cifar10"
    write = ("examples/imagenet/cifar10.py", str(folder), "--per_class=400", "--classes")
    fetched = run_python(*write, "airplane", "automobile", "frog", timeout=400)
    if "npm is not installed" in fetched.stderr:
        pytest.skip("npm is not installed")
    assert fetched.stdout == f"2400 pictures in {folder}\n", fetched.stderr
    flags = (
        "--model=resnet18 --img_size=32 --min_crop=0.5 --num_ranks=8 --batch_size=15 "
        "--num_epochs=12 --eval_interval=4 --num_workers=1 --test_set_batch_size=50 --lr=0.05 "
        "--num_warmup_epochs=1 --lr_scheduler_divide_every_n_epochs=9 --use_nested_fsdp "
        "--label_smoothing=0.1 --target_accuracy=75"
    )
    places = (f"--datadir={folder}", f"--ckpt_dir={tmp_path / 'checkpoints'}")
    done = run_python(TRAIN, *places, *flags.split(), timeout=1800, env={"XLA_FLAGS": ""})
    assert done.returncode == 0, done.stderr
