"""Train MNIST with FSDP, save every rank's shards, merge them, and verify the merged model.

    python examples/mnist/train.py                            # 8 CPU ranks, 2 epochs
    python examples/mnist/train.py --num_ranks 4 --flatten_parameters --compute_dtype bfloat16
    python examples/mnist/train.py --auto_wrap_policy size_based --use_gradient_checkpointing
    python examples/mnist/train.py --recipe lean --auto_wrap_policy type_based
    python examples/mnist/train.py --num_epochs 4 --resume    # go on from the newest checkpoint
    python examples/mnist/train.py --fake_data --max_steps 50 # no MNIST files needed

On a TPU the same commands use all its devices. ``--help`` lists every option.
The steps of any FSDP script: build the same model on every rank (``build_model``), wrap it
(``shard_model``), create the optimizer from the wrapped model, and train (``train``).
The other files here hold what is not about FSDP.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

import xla_fsdp  # noqa: F401  (first: torch_xla then does not remark that there is no TPU)

# isort: split
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))  # what the examples share

import checkpoints
from batches import Batch, TrainBatches, test_batches
from checkpoints import Point
from compare import steps_per_second
from data import MnistData, MnistDataError
from evaluate import Score, load_digits
from job import JobFailed, Options, parse_options
from model import MnistNet, normalize
from place import Place
from profiles import Profile, name_units
from progress import Progress
from ranks import average_statistics, global_means, read, this_place, zeros
from verify import check_equal, evaluate_apart, merge
from xla_fsdp import (
    CheckpointError,
    CheckpointManager,
    RankError,
    checkpoint_module,
    compile_step,
    launch,
    one_rank_at_a_time,
    parallelize,
)
from xla_fsdp import XlaFullyShardedDataParallel as FSDP  # noqa: N814
from xla_fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

CPU_RANKS = "8"
INTERRUPTED = 130  # the exit code that shells expect after Ctrl-C
START = time.perf_counter()

Step = Callable[..., tuple[Tensor, Tensor]]


@dataclass
class Job:
    """One rank's part of the job: what it works with, and how far it is."""

    options: Options
    digits: MnistData
    place: Place
    model: FSDP
    optimizer: torch.optim.Optimizer
    manager: CheckpointManager
    batches: TrainBatches
    progress: Progress
    point: Point
    step: Step
    profile: Profile
    steps: int = 0  # taken by this run


# ---------------------------------------------------------------- the model


def build_model(seed: int) -> MnistNet:
    """The network, with the same weights on every rank."""
    with one_rank_at_a_time():  # CPU ranks are threads and share the random number generator
        torch.manual_seed(seed)
        return MnistNet()


def shard_model(model: MnistNet, options: Options) -> FSDP:
    """Wrap each layer, or what a policy selects, or nothing; and then the whole model."""
    wrap = functools.partial(FSDP, **wrapper_options(options))
    # checkpoint_module goes inside: FSDP then gathers the parameters again for the recomputation.
    remat = checkpoint_module if options.use_gradient_checkpointing else _unchanged
    if options.auto_wrap_policy == "none":
        for name in ("conv1", "conv2", "fc1", "fc2"):
            layer = remat(getattr(model, name))
            setattr(model, name, wrap(layer) if options.use_nested_fsdp else layer)
        return wrap(model)
    return wrap(
        model,
        auto_wrap_policy=policy_of(options),
        auto_wrapper_callable=lambda module, **keywords: FSDP(remat(module), **keywords),
    )


def wrapper_options(options: Options) -> dict[str, Any]:
    """Options of every unit."""
    return {
        "reshard_after_forward": options.reshard_after_forward,
        "flatten_parameters": options.flatten_parameters,
        "compute_dtype": getattr(torch, options.compute_dtype),
        "fp32_reduce_scatter": options.fp32_reduce_scatter,
        "shard_param_on_dim_0": options.shard_param_on_dim_0,
    }


def policy_of(options: Options) -> Callable[..., bool] | None:
    """What chooses the units, if a policy does."""
    policies: dict[str, Callable[..., bool]] = {
        "size_based": functools.partial(
            size_based_auto_wrap_policy, min_num_params=options.auto_wrap_min_num_params
        ),
        "type_based": functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={nn.Conv2d, nn.Linear}
        ),
    }
    return policies.get(options.auto_wrap_policy)


def shard_with_optimizer(model: MnistNet, options: Options) -> tuple[FSDP, torch.optim.Optimizer]:
    """Shard the model by hand, or as the recipe says; make its optimizer."""
    if options.recipe is None:
        model = shard_model(model, options)
        return model, make_optimizer(model, options)
    wanted, policy = wrapper_options(options), policy_of(options)
    sharded, optimizer, recipe = parallelize(
        model, make_optimizer(model, options), options.recipe, auto_wrap_policy=policy, **wanted
    )
    if xr.global_ordinal() == 0:
        recipe.explain()
    return sharded, optimizer


def _unchanged(module: nn.Module) -> nn.Module:
    return module


def make_optimizer(model: nn.Module, options: Options) -> torch.optim.Optimizer:
    """SGD; the learning rate grows with the number of ranks, as the global batch does."""
    lr = options.lr * xr.world_size()
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=options.momentum)


# ---------------------------------------------------------------- training


def train(job: Job) -> Score:
    """Train from ``job.point`` to the last epoch, evaluating and saving after each.

    Returns the score of the last evaluation; of the loaded model if no epoch was left.
    """
    score = None
    while job.point.epochs < job.options.num_epochs:
        with job.progress.timed("training"):
            train_epoch(job)
        with job.progress.timed("evaluation"):
            average_statistics(job.model)
            score, loss = evaluate(job.model, job.digits, job.place)
        job.progress.say(
            f"epoch {job.point.epochs}: {job.progress.summary}, "
            f"test accuracy {score.accuracy:.2f}%, test loss {loss:.4f}"
        )
        with job.progress.timed("saving"):
            save(job)
    return score or evaluate(job.model, job.digits, job.place)[0]


def train_epoch(job: Job) -> None:
    """Train the rest of the epoch in which ``job.point`` is."""
    epochs, done = job.point
    every = job.options.ckpt_every_steps
    end = min(job.batches.per_epoch, job.options.max_steps or job.batches.per_epoch)
    correct, seen = zeros(job.place), 0
    job.model.train()
    with job.progress.epoch(epochs + 1, done, end):
        for step, batch in enumerate(job.batches.epoch(epochs, done, end), start=done + 1):
            job.profile.step()
            loss, correct = job.step(job.model, job.optimizer, batch, correct)
            seen += len(batch[1])
            job.progress.step()
            if step % job.options.log_interval == 0 or step == end:
                mean_loss, mean_correct = global_means(loss, correct)
                job.progress.report(step, mean_loss, 100 * mean_correct / seen)
            if every and step % every == 0 and step < end:
                job.point = Point(epochs, step)
                save(job)
    job.profile.stop()
    job.steps += max(end - done, 0)
    job.point = Point(epochs + 1)


def make_step(options: Options) -> Step:
    """``train_step`` as one program: replayed after the first steps, or traced every time."""
    if options.compile_step:
        return compile_step(train_step)

    def traced(*args: Any) -> tuple[Tensor, Tensor]:
        results = train_step(*args)
        torch_xla.sync()
        return results

    return traced


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    correct: Tensor,
    update: Callable[[torch.optim.Optimizer], Any] = methodcaller("step"),
) -> tuple[Tensor, Tensor]:
    """Make one step; returns its loss, and ``correct`` plus how many images it got right."""
    images, labels = batch
    optimizer.zero_grad()
    output = model(normalize(images)).float()
    loss = F.nll_loss(output, labels)
    loss.backward()
    update(optimizer)
    return loss.detach(), correct + (output.argmax(1) == labels).sum()


# ---------------------------------------------------------------- evaluation


@torch.no_grad()
def evaluate(model: nn.Module, digits: MnistData, place: Place) -> tuple[Score, float]:
    """Score and mean loss on the test images, each of which one rank evaluates."""
    model.eval()
    sums = zeros(place, 2)
    for images, labels in test_batches(digits.test_images, digits.test_labels, place):
        output = model(normalize(images)).float()
        loss = F.nll_loss(output, labels, ignore_index=-1, reduction="sum")
        sums = sums + torch.stack([(output.argmax(1) == labels).sum().float(), loss])
        torch_xla.sync()
    correct, loss_sum = read(xm.all_reduce(xm.REDUCE_SUM, [sums])[0])
    total = len(digits.test_labels)
    return Score(round(correct), total), loss_sum / total


# ---------------------------------------------------------------- checkpoints


def save(job: Job) -> None:
    """Save the shards of model and optimizer, and how far the job is; written while it goes on."""
    step = job.point.epochs * job.batches.per_epoch + job.point.steps
    extra = checkpoints.describe(job.point, job.options, job.place.world_size)
    job.manager.save(step, job.model, job.optimizer, extra=extra)


def resume(
    manager: CheckpointManager,
    model: FSDP,
    optimizer: torch.optim.Optimizer,
    place: Place,
    options: Options,
) -> Point:
    """Load the newest checkpoint that is whole; returns its point."""
    restored = manager.restore(model, optimizer)
    if restored is None:
        raise JobFailed(f"--resume: found no complete checkpoint in {options.prefix}")
    point = checkpoints.point_of(restored.extra, options, place.world_size)
    if place.rank == 0:
        print(f"resuming after {point}")
    return point


def begin_anew(place: Place, options: Options) -> Point:
    """Move an earlier run's checkpoints out of the way, on rank 0."""
    if place.rank == 0 and (moved := checkpoints.set_aside(options.prefix)):
        print(f"moved the checkpoints of an earlier run to {moved}")
    xm.rendezvous("the directory is free")
    return Point(0)


# ---------------------------------------------------------------- the job


def run_rank(index: int, options: Options, digits: MnistData) -> None:
    """The whole job on one rank."""
    with CheckpointManager(options.prefix) as manager:
        job = set_up(options, digits, manager)
        score = train(job)
        rates = compare(job) if options.compare_steps else {}
    if job.place.rank == 0:
        finish(job, score, rates)


def set_up(options: Options, digits: MnistData, manager: CheckpointManager) -> Job:
    """Build, shard and, on ``--resume``, load."""
    place = this_place()
    batches = make_batches(digits, place, options)
    model, optimizer = shard_with_optimizer(build_model(options.seed), options)
    if options.resume:
        point = resume(manager, model, optimizer, place, options)
    else:
        point = begin_anew(place, options)
    progress = Progress(place, options.loss_log, point)
    step, profile = make_step(options), Profile(options.profile if place.rank == 0 else None)
    return Job(
        options, digits, place, model, optimizer, manager, batches, progress, point, step, profile
    )


def make_batches(digits: MnistData, place: Place, options: Options) -> TrainBatches:
    """This rank's training batches; raises JobFailed if there is not even one."""
    images, labels = digits.train_images, digits.train_labels
    batches = TrainBatches(
        images,
        labels,
        place,
        size=options.batch_size,
        drop_last=options.drop_last,
        seed=options.seed,
    )
    if not batches.per_epoch:
        raise JobFailed(
            f"{len(labels)} training images are not enough for one batch of {options.batch_size} "
            f"on each of {place.world_size} ranks; use a smaller --batch_size"
        )
    return batches


def compare(job: Job) -> dict[str, float]:
    """Steps per second with FSDP and with plain data parallel training, alternating."""
    plain = build_model(job.options.seed).to(job.place.device)
    plain_optimizer = make_optimizer(plain, job.options)
    batch = next(job.batches.epoch(0))
    plain_step = make_step(job.options)
    correct = zeros(job.place)  # counted as in training, for the same graph
    job.model.train()

    def fsdp() -> None:
        nonlocal correct
        _, correct = job.step(job.model, job.optimizer, batch, correct)

    def data_parallel() -> None:
        nonlocal correct
        _, correct = plain_step(plain, plain_optimizer, batch, correct, xm.optimizer_step)

    with job.progress.timed("comparison"):
        ways = {"FSDP": fsdp, "data parallel": data_parallel}
        return steps_per_second(ways, job.options.compare_steps)


def finish(job: Job, score: Score, rates: Mapping[str, float]) -> None:
    """Merge, verify and summarize, on rank 0; raises JobFailed if the job missed its goal."""
    options, progress = job.options, job.progress
    if options.ckpt_consolidation:
        with progress.timed("merging and verification"):
            path = merge(options, job.point)
            merged = evaluate_apart(path, options)
        check_equal(path, score, merged)
        progress.say(f"{path}: {merged.correct} of {merged.total} right without torch_xla, too")
    progress.say(summary(job, score, rates))
    if score.accuracy < options.min_accuracy:
        raise JobFailed(
            f"test accuracy is {score.accuracy:.2f}%, below --min_accuracy {options.min_accuracy:g}"
        )


def summary(job: Job, score: Score, rates: Mapping[str, float]) -> str:
    """The last lines of output."""
    lines = [
        f"test accuracy {score.accuracy:.2f}% on {job.place.world_size} ranks, "
        f"{time.perf_counter() - START:.0f} s since start-up ({job.progress.phases()})"
    ]
    if job.steps:
        lines += [
            f"{job.steps / job.progress.seconds('training'):.1f} steps/s, compilation included"
        ]
    if rates:
        ratio = rates["FSDP"] / rates["data parallel"]
        steps = job.options.compare_steps
        both = ", ".join(
            f"{name} {rate:.1f} steps/s ({steps / rate:.1f} s for {steps})"
            for name, rate in rates.items()
        )
        lines += [f"steady state: {both}, ratio {ratio:.2f}"]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that the command line describes; returns the exit code."""
    options = parse_options(argv)
    try:
        digits = load_digits(options.data_dir, options.fake_data)
        print(f"digits: {digits.source}" + (f"\n{digits.notice}" if digits.notice else ""))
        # Only read on CPU; elsewhere every device is a rank.
        os.environ.setdefault("XLA_FSDP_NUM_RANKS", CPU_RANKS)
        if options.profile:
            name_units()
        launch(
            run_rank,
            (options, digits),
            num_ranks=options.num_ranks,
            compile_cache=options.compile_cache,
        )
    except (JobFailed, MnistDataError) as error:
        return _complain(error)
    except RankError as error:
        if not isinstance(error.__cause__, JobFailed | CheckpointError):
            raise
        return _complain(error.__cause__)
    except KeyboardInterrupt:
        print("train.py: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _complain(error: Exception) -> int:
    print(f"train.py: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
