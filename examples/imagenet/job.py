"""What one run of the ImageNet job was asked to do: its options, read from the command line.

Words: an *option* is one flag.
Always true: an ``Options`` object that came from ``parse_options`` is consistent; a wrong flag ends
the program with exit code 2 and says what was expected. Names and defaults are those of torch_xla's
own ImageNet script for FSDP where it has the option; its flags that have nothing to act on here are
taken, and ``notices`` says why they change nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torchvision

from flags import add_switch, at_least, number

ROOT = Path(__file__).resolve().parents[2]
BIGGEST = "vit_10b"
"""The model that is built on the meta device."""

WITHOUT_EFFECT = {
    "async_closures": "reports are read from what a step has computed already, so none waits",
    "pin_memory": "host memory is pinned for CUDA only",
    "pin_layout_in_collective_ops": "it would double the traffic",
    "tidy": "nothing is left behind but logs and checkpoints",
}
"""Flags of torch_xla's script that are taken and ignored, and why."""


class JobFailed(Exception):  # noqa: N818 - it names the outcome, which is not always an error
    """The job cannot go on or missed its goal.

    Args:
        message: one clear line for the user.
        exit_code: of the process.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message, exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Options:
    """One field per flag; see ``python examples/imagenet/train.py --help``."""

    num_ranks: int | None
    compile_cache: Path | None
    debug: bool
    datadir: Path
    fake_data: bool
    fake_pictures: int
    model: str
    vit_sizes: tuple[int, int, int]
    img_size: int
    min_crop: float
    num_epochs: int
    max_steps: int | None
    compile_step: bool
    batch_size: int
    test_set_batch_size: int
    drop_last: bool
    seed: int
    num_workers: int
    prefetch_factor: int
    persistent_workers: bool
    loader_prefetch_size: int
    device_prefetch_size: int
    cpu_to_device_transfer_threads: int
    lr: float
    momentum: float
    weight_decay: float
    label_smoothing: float
    lr_scheduler_type: str
    lr_scheduler_divide_every_n_epochs: int
    lr_scheduler_divisor: float
    num_warmup_epochs: float
    recipe: str | None
    use_nested_fsdp: bool
    auto_wrap_policy: str
    auto_wrap_min_num_params: int
    num_replicas: int
    flatten_parameters: bool
    use_gradient_checkpointing: bool
    compute_dtype: str
    fp32_reduce_scatter: bool
    shard_param_on_dim_0: bool
    eval_interval: int
    test_only_at_end: bool
    target_accuracy: float
    ckpt_dir: str
    ckpt_every_steps: int | None
    ckpt_keep: int
    resume: str
    log_steps: int
    logdir: Path | None
    loss_log: Path | None
    metrics_debug: bool
    profile: bool
    profiler_port: int
    notices: tuple[str, ...] = ()


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """The options of a command line (default: this program's); exits with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train a model of torchvision on ImageNet with FSDP.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    _add_run(parser.add_argument_group("run"))
    _add_data(parser.add_argument_group("pictures"))
    _add_optimizer(parser.add_argument_group("optimizer"))
    _add_sharding(parser.add_argument_group("sharding"))
    _add_checkpoints(parser.add_argument_group("evaluation and checkpoints"))
    _add_reports(parser.add_argument_group("reports"))
    _add_without_effect(parser.add_argument_group("taken for torch_xla's sake, without effect"))
    values = vars(parser.parse_args(argv))
    if values["use_nested_fsdp"] and values["auto_wrap_policy"] != "none":
        parser.error("--use_nested_fsdp and --auto_wrap_policy both choose the units; give one")
    by_hand = values["use_nested_fsdp"] or values["use_gradient_checkpointing"]
    if values["recipe"] is not None and by_hand:
        parser.error("--recipe says what is nested and recomputed; leave the flags for that out")
    if values["debug"] and values["num_ranks"] not in (None, 1):
        parser.error("--debug runs one rank; leave --num_ranks out")
    if values["profile"] and values["logdir"] is None:
        parser.error("--profile writes into --logdir; give one")
    return Options(**_with_defaults(values))


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Fill in what depends on other options, and turn flags without effect into notices."""
    resnet50 = values["model"] == "resnet50"
    values["img_size"] = values["img_size"] or (299 if values["model"] == "inception_v3" else 224)
    values["lr"] = (0.5 if resnet50 else 0.1) if values["lr"] is None else values["lr"]
    given = [name for name in WITHOUT_EFFECT if values.pop(name)]
    values["notices"] = tuple(f"--{name} has no effect: {WITHOUT_EFFECT[name]}" for name in given)
    return values


def model_names() -> list[str]:
    """The models that ``--model`` takes."""
    return [*torchvision.models.list_models(module=torchvision.models), BIGGEST]


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--num_ranks",
        "--num_cores",
        type=at_least(1),
        help="default: 8 on CPU, all devices elsewhere",
    )
    group.add_argument("--compile_cache", type=Path, help="on TPU: keep compiled programs there")
    add_switch(group, "debug", False, "one rank, in this process")
    group.add_argument("--model", choices=model_names(), default="resnet50", metavar="NAME")
    group.add_argument(
        "--vit_sizes",
        type=_sizes,
        default="5120x32x32",
        help=f"width, blocks and heads of {BIGGEST}",
    )
    group.add_argument("--num_epochs", type=at_least(1), default=18)
    group.add_argument("--max_steps", type=at_least(1), help="end each epoch after so many steps")
    add_switch(group, "compile_step", True, "trace the first steps only, and replay them")
    group.add_argument("--batch_size", type=at_least(1), default=128, help="pictures per rank")
    group.add_argument("--test_set_batch_size", type=at_least(1), default=64, help="per rank")
    group.add_argument("--seed", type=at_least(0), default=42, help="of weights, order and crops")


def _sizes(text: str) -> tuple[int, int, int]:
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form WIDTHxBLOCKSxHEADS")
    width, blocks, heads = map(int, parts)
    if width % heads:
        raise argparse.ArgumentTypeError(f"{text!r}: {heads} heads do not divide width {width}")
    return width, blocks, heads


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--datadir",
        type=Path,
        default=ROOT / "data" / "imagenet",
        help="holds train/<class>/*.JPEG and val/<class>/*.JPEG",
    )
    add_switch(group, "fake_data", False, "noise instead of pictures, for speed")
    group.add_argument(
        "--fake_pictures", type=at_least(1), default=1_200_000, help="of an epoch of --fake_data"
    )
    group.add_argument("--img_size", type=at_least(8), help="default: 224, inception_v3 299")
    group.add_argument(
        "--min_crop", type=number(0.01, 1), default=0.08, help="least part of a picture's area"
    )
    add_switch(group, "drop_last", False, "leave out an epoch's last batch instead of filling it")
    group.add_argument(
        "--num_workers",
        type=at_least(0),
        default=4,
        help="processes per rank that decode; with 0 crops are not repeatable",
    )
    group.add_argument("--prefetch_factor", type=at_least(1), default=8, help="batches per worker")
    add_switch(group, "persistent_workers", True, "keep workers from epoch to epoch")
    group.add_argument(
        "--loader_prefetch_size", type=at_least(1), default=8, help="batches waiting on the host"
    )
    group.add_argument(
        "--device_prefetch_size", type=at_least(1), default=4, help="batches waiting on the device"
    )
    group.add_argument("--cpu_to_device_transfer_threads", type=at_least(1), default=1)


def _add_optimizer(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--lr", type=number(0), help="default: 0.5 for resnet50, else 0.1")
    group.add_argument("--momentum", type=number(0, 1), default=0.9)
    group.add_argument("--weight_decay", type=number(0), default=1e-4)
    group.add_argument("--label_smoothing", type=number(0, 1), default=0.0)
    schedules = ("WarmupAndExponentialDecayScheduler", "constant")
    group.add_argument("--lr_scheduler_type", choices=schedules, default=schedules[0])
    group.add_argument("--lr_scheduler_divide_every_n_epochs", type=at_least(1), default=20)
    group.add_argument("--lr_scheduler_divisor", type=number(1), default=5.0)
    group.add_argument("--num_warmup_epochs", type=number(0), default=0.9)


def _add_sharding(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--recipe", help="of parallelize: lean, fast, plain, or the file of one")
    add_switch(group, "use_nested_fsdp", False, "each child of the model is a unit")
    policies = ("none", "size_based", "type_based")
    group.add_argument("--auto_wrap_policy", choices=policies, default="none")
    group.add_argument("--auto_wrap_min_num_params", type=at_least(0), default=1_000_000)
    group.add_argument(
        "--num_replicas",
        type=at_least(1),
        default=1,
        help="groups of ranks that each hold a whole model; on several slices, their number",
    )
    add_switch(group, "flatten_parameters", False, "join each unit's parameters into one vector")
    add_switch(group, "use_gradient_checkpointing", False, "recompute inner units in backward")
    dtypes = ("float32", "float16", "bfloat16")
    group.add_argument("--compute_dtype", choices=dtypes, default="float32")
    add_switch(group, "fp32_reduce_scatter", False, "reduce gradients in fp32")
    add_switch(group, "shard_param_on_dim_0", False, "shard whole rows of each parameter")


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--eval_interval", type=at_least(1), default=1, help="in epochs")
    add_switch(group, "test_only_at_end", False, "evaluate after the last epoch only")
    group.add_argument(
        "--target_accuracy", type=number(0, 100), default=0.0, help="exit code 21 below it, %%"
    )
    group.add_argument(
        "--ckpt_dir",
        default=str(ROOT / "runs" / "imagenet"),
        help="a directory that all hosts share, or a URL (gs://bucket/run)",
    )
    group.add_argument("--ckpt_every_steps", type=at_least(1), help="save within epochs, too")
    group.add_argument("--ckpt_keep", type=at_least(1), default=2, help="checkpoints to keep")
    group.add_argument(
        "--resume",
        choices=("none", "auto"),
        default="none",
        help="auto: go on from the newest checkpoint if there is one",
    )


def _add_reports(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--log_steps", type=at_least(1), default=20)
    group.add_argument("--logdir", type=Path, help="write TensorBoard scalars and profiles here")
    group.add_argument("--loss_log", type=Path, help="write the losses to this file, as JSON lines")
    add_switch(group, "metrics_debug", False, "print torch_xla's counters after each epoch")
    add_switch(group, "profile", False, "record some steps into --logdir, and serve a profiler")
    group.add_argument("--profiler_port", type=at_least(1), default=9012)


def _add_without_effect(group: argparse._ArgumentGroup) -> None:
    for name in ("async_closures", "pin_layout_in_collective_ops", "tidy"):
        group.add_argument(f"--{name}", action="store_true", help=WITHOUT_EFFECT[name])
    group.add_argument(
        "--pin_memory",
        type=lambda text: text.lower() not in ("", "0", "false", "no"),
        default=False,
        help=WITHOUT_EFFECT["pin_memory"],
    )
