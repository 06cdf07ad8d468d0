"""Train a model of torchvision on ImageNet, or on any folders of pictures, with FSDP.

    python examples/imagenet/train.py --datadir DIR --model resnet50 --use_nested_fsdp
    python examples/imagenet/train.py --fake_data --max_steps 100 --num_epochs 1   # for speed
    python examples/imagenet/train.py --datadir DIR --resume auto                  # go on

On a TPU all devices are used, on CPU 8 ranks. ``--help`` lists every option, README.md has the
recipe of 75.9%. Asked to end by SIGTERM, the job saves, and ends with exit code 75; the same
command with ``--resume auto`` goes on at the very next step.
The steps of any FSDP script: build the same model on every rank, wrap it (``model.py``), make the
optimizer of the wrapped model, and train (``train``). The other files hold what is not about FSDP.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import xla_fsdp  # noqa: F401  (first: torch_xla then does not remark that there is no TPU)

# isort: split
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))  # what the examples share

from batches import Batch, Batches, Loading, Picks
from job import JobFailed, Options, parse_options
from model import build_model, shard_model
from pictures import IGNORED, load_pictures, normalize
from place import Place
from profiles import Profile, name_units
from progress import Progress
from ranks import average_statistics, read, summed, this_place
from reports import Compilations, Damage
from scalars import Scalars
from schedule import learning_rate
from xla_fsdp import (
    CheckpointError,
    Preemption,
    RankError,
    compile_step,
    latest_step,
    launch,
    load_checkpoint,
    save_checkpoint,
)
from xla_fsdp import XlaFullyShardedDataParallel as FSDP  # noqa: N814

CPU_RANKS = "8"
INTERRUPTED = 130  # the exit code that shells expect after Ctrl-C
MISSED = 21  # that of torch_xla's script, below --target_accuracy
COUNTED = 4  # what ``losses`` counts
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again
MUST_AGREE = ("model", "fake_data", "batch_size", "seed", "drop_last", "img_size", "max_steps")
"""Options that a resumed run must have in common with the run that it continues."""
START = time.perf_counter()


@dataclass(frozen=True)
class Score:
    """What a model makes of the validation pictures: percent among the best one and five, loss."""

    top1: float
    top5: float
    loss: float


@dataclass
class Position:
    """How far training has come: whole epochs, steps of the one begun after them, all steps of all
    runs; and the best top-1 accuracy so far."""

    epochs: int = 0
    steps: int = 0
    total_steps: int = 0
    best: float = 0.0


@dataclass
class Reports:
    """All that tells the user something."""

    progress: Progress
    scalars: Scalars
    profile: Profile
    damage: Damage
    compilations: Compilations = field(default_factory=Compilations)


Step = Callable[["Job", Batch, Tensor], Tensor]
"""Takes a job, a batch and what was counted so far; returns that with what the step adds."""


@dataclass
class Job:
    """One rank's part of the job: what it works with, and how far it is."""

    options: Options
    place: Place
    model: FSDP
    optimizer: torch.optim.Optimizer
    train_batches: Batches
    val_batches: Batches
    reports: Reports
    at: Position
    take_step: Step
    preemption: Preemption = field(default_factory=Preemption)
    own_steps: int = 0  # of this run

    @property
    def steps_per_epoch(self) -> int:
        """Of this run."""
        per_epoch = self.train_batches.per_epoch
        return min(per_epoch, self.options.max_steps or per_epoch)


# ---------------------------------------------------------------- training


def train(job: Job) -> Score | None:
    """Train from where the job is to the last epoch; returns the last score, if there was one."""
    score = None
    while job.at.epochs < job.options.num_epochs:
        with job.reports.progress.timed("training"):
            train_epoch(job)
        score = None
        if _is_evaluated(job):
            with job.reports.progress.timed("evaluation"):
                score = evaluate(job)
            _report_score(job, score)
        job.at.epochs, job.at.steps = job.at.epochs + 1, 0
        with job.reports.progress.timed("saving"):
            save(job, asynchronous=job.at.epochs < job.options.num_epochs)
        job.reports.compilations.end("saving")
        if job.options.metrics_debug:
            job.reports.progress.say(metrics.metrics_report())
    return score


def train_epoch(job: Job) -> None:
    """Train the rest of the epoch."""
    options, end, every = job.options, job.steps_per_epoch, job.options.ckpt_every_steps
    totals = nothing_counted(job.place)
    job.model.train()
    bar = job.reports.progress.epoch(job.at.epochs + 1, job.at.steps, end)
    with bar, job.train_batches.epoch(job.at.epochs, job.at.steps, end) as batches:
        for batch in batches:
            set_learning_rate(job)
            job.reports.profile.step()
            before, totals = totals, job.take_step(job, batch, totals)
            _count_step(job, batch)
            if job.preemption.agreed():
                end_early(job)
            if job.at.steps % options.log_steps == 0 or job.at.steps == end:
                _report_step(job, before.tolist(), totals.tolist())
            if every and job.at.steps % every == 0 and job.at.steps < end:
                save(job)
    job.reports.compilations.end("later steps")


def make_step(options: Options) -> Step:
    """``train_step`` as one program, replayed after the first steps, or traced every time; votes
    come after it, as a replay does not run the code of a step."""
    compiled = compile_step(train_step, unknown="trace")  # some models draw on the host

    def take_step(job: Job, batch: Batch, totals: Tensor) -> Tensor:
        step = compiled if options.compile_step else train_step
        smoothing = options.label_smoothing
        totals = step(job.model, job.optimizer, batch.pixels, batch.labels, smoothing, totals)
        job.preemption.vote()
        if not options.compile_step:
            torch_xla.sync()
        return totals

    return take_step


def set_learning_rate(job: Job) -> None:
    """Set the rate of the step that comes next."""
    epoch = job.at.epochs + (job.at.steps + 1) / job.steps_per_epoch
    for group in job.optimizer.param_groups:
        group["lr"] = learning_rate(job.options, epoch)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pixels: Tensor,
    labels: Tensor,
    smoothing: float,
    totals: Tensor,
) -> Tensor:
    """Make one step; returns ``totals`` with what it adds."""
    loss, counts = losses(model, pixels, labels, smoothing)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return totals + summed(counts)


def losses(
    model: nn.Module, pixels: Tensor, labels: Tensor, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The mean loss over this rank's pictures, blanks left out; and what is counted of them: the
    sum of losses, how many there are, how many are recognized, how many are among the best five."""
    output = model(normalize(pixels)).float()
    loss_sum = F.cross_entropy(
        output, labels, ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum"
    )
    real = (labels != IGNORED).sum().float()
    best = output.topk(min(5, output.shape[1]), dim=1).indices == labels.unsqueeze(1)
    right = best.float().sum(0)
    counts = torch.stack([loss_sum.detach(), real, right[0], right.sum()])
    return loss_sum / real.clamp(min=1), counts


def nothing_counted(place: Place) -> Tensor:
    """Zeros, uploaded: made on the device they would be a constant of the first step's program,
    which would then be compiled apart from that of the later steps."""
    return torch.zeros(COUNTED).to(place.device)


def _count_step(job: Job, batch: Batch) -> None:
    job.at.steps += 1
    job.at.total_steps += 1
    job.own_steps += 1
    job.reports.progress.step()
    job.reports.damage.add(batch.problems)
    if job.own_steps == 2:
        job.reports.compilations.end("the first two steps")


def _report_step(job: Job, before: Sequence[float], totals: Sequence[float]) -> None:
    loss = (totals[0] - before[0]) / max(totals[1] - before[1], 1)
    accuracy = 100 * totals[2] / max(totals[1], 1)
    rate = job.optimizer.param_groups[0]["lr"]
    job.reports.progress.report(job.at.steps, loss, accuracy)
    job.reports.scalars.add(
        job.at.total_steps, train_loss=loss, train_accuracy=accuracy, train_learning_rate=rate
    )


# ---------------------------------------------------------------- evaluation


def _is_evaluated(job: Job) -> bool:
    number, options = job.at.epochs + 1, job.options
    chosen = number % options.eval_interval == 0 and not options.test_only_at_end
    return chosen or number == options.num_epochs


@torch.no_grad()
def evaluate(job: Job) -> Score:
    """Score on the validation pictures, each of which one rank evaluates."""
    average_statistics(job.model)
    job.model.eval()
    totals = nothing_counted(job.place)
    with job.val_batches.epoch(0) as batches:
        for batch in batches:
            totals = totals + losses(job.model, batch.pixels, batch.labels)[1]
            job.preemption.vote()
            torch_xla.sync()
            job.reports.damage.add(batch.problems)
            if job.preemption.agreed():
                end_early(job)
    loss, count, top1, top5 = read(summed(totals))
    job.reports.compilations.end("evaluation")
    return Score(100 * top1 / max(count, 1), 100 * top5 / max(count, 1), loss / max(count, 1))


def _report_score(job: Job, score: Score) -> None:
    job.at.best = max(job.at.best, score.top1)
    job.reports.progress.say(
        f"epoch {job.at.epochs + 1}: {job.reports.progress.summary}, top-1 {score.top1:.2f}%, "
        f"top-5 {score.top5:.2f}%, loss {score.loss:.4f}"
    )
    job.reports.scalars.add(
        job.at.total_steps, val_top1=score.top1, val_top5=score.top5, val_loss=score.loss
    )


# ---------------------------------------------------------------- checkpoints


def save(job: Job, *, asynchronous: bool = True) -> None:
    """Save this rank's shards of model and optimizer, and how far the job is."""
    options = job.options
    extra = {
        "epochs": job.at.epochs,
        "pictures": job.at.steps * options.batch_size * job.place.world_size,
        "best": job.at.best,
        "options": {name: getattr(options, name) for name in MUST_AGREE},
    }
    save_checkpoint(
        options.ckpt_dir,
        job.model,
        job.optimizer,
        extra=extra,
        step=job.at.total_steps,
        keep_last=options.ckpt_keep,
        asynchronous=asynchronous,
        take_over=options.resume == "none",  # nothing was complete there
    )


def end_early(job: Job) -> None:
    """Save, and end the job for now; it was asked to."""
    job.reports.profile.stop()
    save(job, asynchronous=False)
    xm.rendezvous("every rank knows that the checkpoint is complete")
    raise JobFailed(
        f"asked to end: saved after {job.at.epochs} epochs and {job.at.steps} steps; go on with "
        "--resume auto",
        PREEMPTED,
    )


def resume(model: FSDP, optimizer: torch.optim.Optimizer, options: Options) -> Position:
    """Go on from the newest checkpoint, if there is one, on any number of ranks."""
    if options.resume == "none":
        found = latest_step(options.ckpt_dir)
        if found is not None:
            raise JobFailed(
                f"{options.ckpt_dir} holds checkpoints up to step {found}: go on with "
                "--resume auto, or give another --ckpt_dir"
            )
        return Position()
    loaded = load_checkpoint(options.ckpt_dir, model, optimizer, missing_ok=True)
    extra: dict[str, Any] | None = loaded["extra"]
    if extra is None:
        return Position()
    for name, before in extra["options"].items():
        if before != getattr(options, name):
            raise JobFailed(
                f"--resume: {options.ckpt_dir} was written with {name}={before}, this run has "
                f"{name}={getattr(options, name)}. Use the same value, or another --ckpt_dir."
            )
    steps = extra["pictures"] // (options.batch_size * this_place().world_size)
    return Position(extra["epochs"], steps, loaded["step"], extra["best"])


# ---------------------------------------------------------------- the job


def run_rank(index: int, options: Options) -> None:
    """The whole job on one rank."""
    job = set_up(options)
    score = train(job)
    damaged = job.reports.damage.of_all_ranks()
    job.reports.profile.stop()
    job.reports.scalars.close()
    job.reports.progress.say(summary(job, damaged))
    if score is not None and score.top1 < options.target_accuracy:
        xm.rendezvous("rank 0 has told the summary")
        raise JobFailed(
            f"top-1 accuracy is {score.top1:.2f}%, below --target_accuracy "
            f"{options.target_accuracy:g}",
            MISSED,
        )


def set_up(options: Options) -> Job:
    """Build, shard and, on ``--resume auto``, load."""
    place, (train_data, val_data) = this_place(), load_pictures(options)
    loading = Loading.of(options)
    train_picks, val_picks = make_picks(train_data, val_data, place, options)
    model = build_model(options, len(train_data.classes))
    make_optimizer = partial(
        torch.optim.SGD,
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
    )
    model, optimizer = shard_model(model, make_optimizer, options, place.world_size)
    xm.set_rng_state(options.seed + place.rank)  # dropout masks that differ between ranks
    at = resume(model, optimizer, options)
    reports = make_reports(place, at, options)
    if options.resume == "auto":
        reports.progress.say(f"going on after {at.epochs} epochs and {at.steps} steps")
    return Job(
        options,
        place,
        model,
        optimizer,
        Batches(train_data, train_picks, place, loading),
        Batches(val_data, val_picks, place, loading),
        reports,
        at,
        make_step(options),
    )


def make_picks(train: Sized, val: Sized, place: Place, options: Options) -> tuple[Picks, Picks]:
    """What this rank picks of both sets; raises JobFailed if it cannot train."""
    picks = Picks(
        train, place, size=options.batch_size, seed=options.seed, drop_last=options.drop_last
    )
    if not picks.per_epoch:
        raise JobFailed(
            f"{len(train)} pictures are not enough for one batch of {options.batch_size} on each "
            f"of {place.world_size} ranks; use a smaller --batch_size, or no --drop_last"
        )
    return picks, Picks(val, place, size=options.test_set_batch_size, seed=None, drop_last=False)


def make_reports(place: Place, at: Position, options: Options) -> Reports:
    """What tells the user how it goes; on ranks other than 0, nothing does."""
    logdir = options.logdir if place.rank == 0 else None
    profiled = logdir / "profile" if logdir is not None and options.profile else None
    return Reports(
        Progress(place, options.loss_log, (at.epochs, at.steps)),
        Scalars(logdir),
        Profile(profiled, options.profiler_port),
        Damage(place.rank),
    )


def summary(job: Job, damaged: Sequence[str]) -> str:
    """The last lines of output."""
    reports, world_size = job.reports, job.place.world_size
    lines = [
        f"best top-1 accuracy {job.at.best:.2f}% on {world_size} ranks, "
        f"{time.perf_counter() - START:.0f} s since start-up ({reports.progress.phases()})",
        str(reports.compilations),
    ]
    if job.own_steps:
        rate = job.own_steps / reports.progress.seconds("training")
        pictures = rate * job.options.batch_size * world_size
        lines.append(f"{rate:.2f} steps/s, {pictures:.0f} pictures/s, compilation included")
    if damaged:
        lines.append(f"{len(damaged)} damaged pictures were left out: {', '.join(damaged)}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that the command line describes; returns the exit code."""
    options = parse_options(argv)
    print("\n".join(options.notices), end="\n" * bool(options.notices))
    # Only read on CPU; elsewhere every device is a rank.
    os.environ.setdefault("XLA_FSDP_NUM_RANKS", CPU_RANKS)
    num_ranks = 1 if options.debug else options.num_ranks
    if options.profile:
        name_units()
    try:
        launch(
            run_rank,
            (options,),
            num_ranks=num_ranks,
            stop_signals=(signal.SIGTERM,),
            compile_cache=options.compile_cache,
        )
    except (JobFailed, CheckpointError) as error:
        return _complain(error)
    except RankError as error:
        if not isinstance(error.__cause__, (JobFailed, CheckpointError)):
            raise
        return _complain(error.__cause__)
    except KeyboardInterrupt:
        print("train.py: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _complain(error: Exception) -> int:
    print(f"train.py: {error}", file=sys.stderr)
    return error.exit_code if isinstance(error, JobFailed) else 1


if __name__ == "__main__":
    sys.exit(main())
