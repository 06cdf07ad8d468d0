"""examples/mnist/train.py: the whole job as a subprocess, on synthetic digits and 2 or 3 CPU ranks.

Every launch takes few steps; several tests look at the files and losses of one full run.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from test.common.ranks import ROOT, run_python, run_warm
from xla_fsdp.checkpoint.convert.consolidate import read_shards
from xla_fsdp.checkpoint.format.shard_files import Shard

MNIST = ROOT / "examples" / "mnist"
MODULES = ("batches", "checkpoints", "evaluate", "fake_data", "job", "model", "progress", "verify")
RANKS = 3
STEPS = 6


@pytest.fixture(scope="module")
def mnist() -> Iterator[SimpleNamespace]:
    """The example's modules that need no ranks. They are forgotten afterwards: names like ``data``
    are other examples', too."""
    before = set(sys.modules)
    sys.path.insert(0, str(MNIST))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    sys.path.remove(str(MNIST))
    for name in set(sys.modules) - before:
        if str(MNIST) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def train(*arguments: str, ranks: int = RANKS) -> CompletedProcess[str]:
    """Run the job with small defaults."""
    small = ("--fake_data", f"--num_ranks={ranks}", f"--max_steps={STEPS}", "--log_interval=1")
    return run_warm("examples/mnist/train.py", *small, *arguments)


def losses(path: Path) -> dict[tuple[int, int], float]:
    """The loss log, by epoch and step."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line["epoch"], line["step"]): line["loss"] for line in lines}


def read(path: Path) -> dict[str, Any]:
    """A merged file."""
    return torch.load(path, weights_only=True)


def steps_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(folder.glob("step_*"))


def shards_in(folder: Path) -> list[Shard]:
    """The files of all ranks in a checkpoint."""
    return read_shards(str(folder), "*.pth", None, overwrite=False)


# ---------------------------------------------------------------- an uninterrupted run


@dataclass(frozen=True)
class FullRun:
    """What the uninterrupted run printed and wrote."""

    done: CompletedProcess[str]
    checkpoints: Path
    losses: dict[tuple[int, int], float]


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> FullRun:
    """Two epochs with a checkpoint in the middle of each."""
    folder = tmp_path_factory.mktemp("full")
    log, directory = folder / "log.jsonl", folder / "checkpoints"
    done = train(
        f"--ckpt_dir={directory}",
        f"--loss_log={log}",
        "--ckpt_every_steps=4",
        "--compare_steps=4",
        "--min_accuracy=50",
    )
    assert done.returncode == 0, done.stderr
    return FullRun(done, directory, losses(log))


def test_a_run_reports_both_epochs_and_ends_with_a_summary(full_run: FullRun) -> None:
    lines = full_run.done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[1:3]] == ["epoch 1", "epoch 2"]
    verified, accuracy, rate, comparison = lines[3:]
    assert re.search(
        r"mnist_epoch_2_consolidated.pth: \d+ of 509 right without torch_xla", verified
    )
    assert re.match(r"test accuracy [\d.]+% on 3 ranks, \d+ s since start-up \(training ", accuracy)
    assert re.match(r"[\d.]+ steps/s, compilation included$", rate)
    fsdp, plain = (float(rate) for rate in re.findall(r"([\d.]+) steps/s \(", comparison))
    ratio = float(comparison.rpartition("ratio ")[2])
    rounded = 0.05 / fsdp + 0.05 / plain  # the rates, by so much of themselves: they may be small
    assert ratio == pytest.approx(fsdp / plain, abs=rounded * fsdp / plain + 0.01)


@pytest.mark.slow
def test_traced_steps_have_the_same_losses(full_run: FullRun, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    files = (f"--ckpt_dir={tmp_path / 'checkpoints'}", f"--loss_log={log}")
    done = train("--no_compile_step", "--compare_steps=0", *files)
    assert done.returncode == 0, done.stderr
    assert losses(log) == full_run.losses


def test_output_that_is_not_a_terminal_has_no_progress_bar(full_run: FullRun) -> None:
    both = full_run.done.stdout + full_run.done.stderr
    assert "\r" not in both
    assert "step/s" not in both  # as the bar would say; the summary says steps/s


def test_every_rank_saves_its_shards_at_every_point(full_run: FullRun) -> None:
    found = {path.name for path in full_run.checkpoints.iterdir()}
    assert found == {"mnist", "mnist_epoch_2_consolidated.pth"}
    first, epoch_1, inside, epoch_2 = steps_in(full_run.checkpoints / "mnist")
    numbers = [int(path.name[5:]) for path in (first, epoch_1, inside, epoch_2)]
    per_epoch = numbers[1]
    assert numbers == [4, per_epoch, per_epoch + 4, 2 * per_epoch]
    shards = shards_in(inside)
    assert [shard.metadata["rank"] for shard in shards] == list(range(RANKS))
    # Rank 0 has a part of every parameter, the small ones do not reach the others.
    momenta = {name for name in load_file(shards[0].source) if name.endswith("momentum_buffer")}
    assert len(momenta) == len(shards[0].metadata["params"])


def test_the_merged_file_is_a_plain_model(full_run: FullRun, mnist: SimpleNamespace) -> None:
    path = full_run.checkpoints / "mnist_epoch_2_consolidated.pth"
    model = mnist.model.MnistNet()
    model.load_state_dict(read(path)["model"])
    digits = mnist.fake_data.make_fake_digits()
    score = mnist.evaluate.score(model, digits.test_images, digits.test_labels, close=0.0)
    assert f"{score.correct} of {score.total} right" in full_run.done.stdout


def test_the_merged_file_differs_from_the_untrained_model(
    full_run: FullRun, mnist: SimpleNamespace
) -> None:
    torch.manual_seed(0)
    fresh = mnist.model.MnistNet().state_dict()
    merged = read(full_run.checkpoints / "mnist_epoch_2_consolidated.pth")["model"]
    assert merged.keys() == fresh.keys()
    unchanged = [name for name in fresh if torch.equal(fresh[name], merged[name])]
    assert unchanged == []


def test_the_loss_log_has_every_step(full_run: FullRun) -> None:
    assert list(full_run.losses) == [(e, s) for e in (1, 2) for s in range(1, STEPS + 1)]
    assert full_run.losses[2, STEPS] < full_run.losses[1, 1]


# ---------------------------------------------------------------- resuming


def test_a_resumed_run_has_the_same_losses(full_run: FullRun, tmp_path: Path) -> None:
    shutil.copytree(full_run.checkpoints / "mnist", tmp_path / "mnist")
    _, damaged, incomplete, last = steps_in(tmp_path / "mnist")
    shutil.rmtree(last)
    (incomplete / "complete.json").unlink()
    lost = next(damaged.glob("rank-00001*.safetensors"))
    lost.unlink()
    log = tmp_path / "log.jsonl"
    log.write_text('{"epoch": 1, "step": 4, "loss": 7}\n{"epoch": 1, "step": 5, "loss": 8}\n')
    done = train(f"--ckpt_dir={tmp_path}", f"--loss_log={log}", "--resume", "--compare_steps=0")
    assert done.returncode == 0, done.stderr
    assert f"{damaged} cannot be loaded, so an older step is tried: " in done.stderr
    assert str(lost) in done.stderr
    assert "resuming after 0 epochs and 4 steps\n" in done.stdout
    later = {point: loss for point, loss in full_run.losses.items() if point > (1, 4)}
    assert losses(log) == {(1, 4): 7, **later}
    name = "mnist_epoch_2_consolidated.pth"
    before, now = read(full_run.checkpoints / name)["model"], read(tmp_path / name)["model"]
    assert all(torch.equal(before[key], now[key]) for key in before)


def test_resuming_without_a_complete_checkpoint_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mnist" / "step_00000004").mkdir(parents=True)
    done = train(f"--ckpt_dir={tmp_path}", "--resume")
    assert done.returncode == 1
    message = f"train.py: --resume: found no complete checkpoint in {tmp_path / 'mnist'}\n"
    assert done.stderr.endswith(message)
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- options


@pytest.mark.slow
def test_flat_bf16_rematerialized_units_chosen_by_size(tmp_path: Path) -> None:
    done = train(
        f"--ckpt_dir={tmp_path}",
        "--flatten_parameters",
        "--auto_wrap_policy=size_based",
        "--use_gradient_checkpointing",
        "--compute_dtype=bfloat16",
        "--fp32_reduce_scatter",
        "--num_epochs=1",
        "--compare_steps=0",
        "--min_accuracy=100",
        ranks=2,
    )
    assert done.returncode == 1
    assert re.search(r"train.py: test accuracy is [\d.]+%, below --min_accuracy 100", done.stderr)
    assert "Traceback" not in done.stderr
    assert "right without torch_xla, too" in done.stdout
    (step,) = steps_in(tmp_path / "mnist")
    metadata = shards_in(step)[0].metadata
    owners = {member["name"] for param in metadata["params"] for member in param["members"]}
    assert "conv2.weight" in owners
    assert len(metadata["params"]) < len(owners)


@pytest.mark.slow
def test_fp16_rows_kept_after_forward_units_chosen_by_type(tmp_path: Path) -> None:
    done = train(
        f"--ckpt_prefix={tmp_path / 'here'}",
        "--auto_wrap_policy=type_based",
        "--compute_dtype=float16",
        "--shard_param_on_dim_0",
        "--no_reshard_after_forward",
        "--no_drop_last",
        "--no_ckpt_consolidation",
        "--num_epochs=1",
        "--compare_steps=0",
        ranks=2,
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    (step,) = steps_in(tmp_path / "here")
    first, second = shards_in(step)
    assert first.state_dict["conv2.weight"].spec.shape == (10, 10, 5, 5)
    assert second.state_dict["conv2.weight"].spec.shape == (10, 10, 5, 5)


def test_a_wrong_flag_ends_with_exit_code_2() -> None:
    done = run_python("examples/mnist/train.py", "--batch_size", "none")
    assert done.returncode == 2
    assert "--batch_size: 'none' is not a whole number, 1 or more" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num_ranks 0", "--num_ranks: '0' is not a whole number, 1 or more"),
        ("--seed -1", "--seed: '-1' is not a whole number, 0 or more"),
        ("--lr inf", "--lr: 'inf' is not a number 0 up"),
        ("--momentum 2", "--momentum: '2' is not a number from 0 to 1"),
        ("--min_accuracy nan", "--min_accuracy: 'nan' is not a number from 0 to 100"),
        ("--compute_dtype int8", "--compute_dtype: invalid choice: 'int8'"),
        ("--use_nested_fsdp --auto_wrap_policy size_based", "both choose the units; give one"),
        ("--unknown", "unrecognized arguments: --unknown"),
    ],
)
def test_wrong_flags(
    flags: str, message: str, mnist: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        mnist.job.parse_options(flags.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_units_are_nested_by_hand_unless_told_otherwise(mnist: SimpleNamespace) -> None:
    def nested(flags: str) -> bool:
        return mnist.job.parse_options(flags.split()).use_nested_fsdp

    assert nested("")
    assert nested("--use_nested_fsdp --drop_last")
    assert not nested("--no_nested_fsdp")
    assert not nested("--auto_wrap_policy type_based")


def test_incomplete_digits_end_the_run_before_it_trains(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte").touch()
    done = run_warm("examples/mnist/train.py", f"--data_dir={tmp_path}")
    assert done.returncode == 1
    assert f"train.py: {tmp_path}: found 1 of the 4 MNIST files, expected also" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


# ---------------------------------------------------------------- parts that need no ranks


def places(mnist: SimpleNamespace, world_size: int) -> list[Any]:
    """The ranks of a job on the CPU."""
    cpu = torch.device("cpu")
    return [mnist.batches.Place(rank, world_size, cpu) for rank in range(world_size)]


@pytest.mark.parametrize(("count", "world_size"), [(10, 3), (1, 4), (2000, 2), (509, 8)])
def test_every_test_image_is_evaluated_once(
    count: int, world_size: int, mnist: SimpleNamespace
) -> None:
    images, labels = torch.zeros(count, 28, 28, dtype=torch.uint8), torch.arange(count)
    by_rank = [
        list(mnist.batches.test_batches(images, labels, p)) for p in places(mnist, world_size)
    ]
    assert len({tuple(len(targets) for _, targets in batches) for batches in by_rank}) == 1
    seen = torch.cat([targets for batches in by_rank for _, targets in batches])
    assert sorted(seen[seen >= 0].tolist()) == list(range(count))


def test_an_epoch_can_be_continued_and_ranks_share_its_images(mnist: SimpleNamespace) -> None:
    images, labels = torch.zeros(50, 28, 28, dtype=torch.uint8), torch.arange(50)

    def taken(place: Any, epoch: int, position: int = 0) -> list[int]:
        batches = mnist.batches.TrainBatches(images, labels, place, size=4, drop_last=True, seed=3)
        assert batches.per_epoch == 6
        return torch.cat([targets for _, targets in batches.epoch(epoch, position)]).tolist()

    first, second = places(mnist, 2)
    assert taken(first, 1, position=2) == taken(first, 1)[8:]
    assert not set(taken(first, 1)) & set(taken(second, 1))
    assert taken(first, 1) != taken(first, 2)


def test_without_drop_last_every_image_is_taken(mnist: SimpleNamespace) -> None:
    images, labels = torch.zeros(10, 28, 28, dtype=torch.uint8), torch.arange(10)
    (place,) = places(mnist, 1)
    batches = mnist.batches.TrainBatches(images, labels, place, size=4, drop_last=False, seed=3)
    sizes = [len(targets) for _, targets in batches.epoch(0)]
    assert (sizes, batches.per_epoch) == ([4, 4, 2], 3)


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        ("--batch_size=8", 4, "batch_size=16, this run has batch_size=8"),
        ("--compute_dtype=bfloat16", 4, "compute_dtype=float32, this run has"),
        ("", 2, "num_ranks=4, this run has num_ranks=2"),
    ],
)
def test_options_that_changed_since_the_checkpoint_are_refused(
    flags: str, ranks: int, message: str, mnist: SimpleNamespace
) -> None:
    point, before = mnist.checkpoints.Point(1, 5), mnist.job.parse_options([])
    described = mnist.checkpoints.describe(point, before, 4)
    longer = mnist.job.parse_options(["--num_epochs=9", "--flatten_parameters"])
    assert mnist.checkpoints.point_of(described, longer, 4) == point
    with pytest.raises(mnist.job.JobFailed, match=message):
        mnist.checkpoints.point_of(described, mnist.job.parse_options(flags.split()), ranks)


def test_checkpoints_of_an_earlier_run_are_moved_not_deleted(
    tmp_path: Path, mnist: SimpleNamespace
) -> None:
    assert mnist.checkpoints.set_aside(tmp_path / "mnist") is None
    for step in ("step_00000001", "step_00000002"):
        (tmp_path / "mnist" / step).mkdir(parents=True)
        (tmp_path / "other.pth").touch()
        assert mnist.checkpoints.set_aside(tmp_path / "mnist") == tmp_path / "replaced" / "mnist"
        assert [path.name for path in (tmp_path / "replaced" / "mnist").iterdir()] == [step]
    assert {path.name for path in tmp_path.iterdir()} == {"other.pth", "replaced"}


def test_a_merged_model_must_be_as_good_as_the_sharded_one(mnist: SimpleNamespace) -> None:
    score = mnist.evaluate.Score
    mnist.verify.check_equal(Path("m.pth"), score(90, 100), score(90, 100))
    mnist.verify.check_equal(Path("m.pth"), score(90, 100), score(88, 100, near_ties=2))
    with pytest.raises(mnist.job.JobFailed, match="gets 89 of 100 test images right"):
        mnist.verify.check_equal(Path("m.pth"), score(90, 100), score(89, 100))


def test_near_ties_are_counted(mnist: SimpleNamespace) -> None:
    model = mnist.model.MnistNet()
    for param in model.parameters():
        torch.nn.init.zeros_(param)  # every class is equally likely
    digits = mnist.fake_data.make_fake_digits()
    score = mnist.evaluate.score(model, digits.test_images[:7], digits.test_labels[:7], 1e-4)
    assert (score.total, score.near_ties) == (7, 7)
