"""What one run of the MNIST job was asked to do: its options, read from the command line.

Words: an *option* is one flag.
Always true: an ``Options`` object that came from ``parse_options`` is consistent; a wrong flag ends
the program with exit code 2 and says what was expected.
Names and defaults follow torch_xla's own MNIST example for FSDP where it has the option.
What the options mean to the model is left to ``train.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flags import add_switch, at_least, number

ROOT = Path(__file__).resolve().parents[2]


class JobFailed(Exception):  # noqa: N818 - it names the outcome, which is not always an error
    """The job cannot go on or missed its goal; the text is one clear line for the user."""


@dataclass(frozen=True)
class Options:
    """One field per flag; see ``python examples/mnist/train.py --help``."""

    num_ranks: int | None
    compile_cache: Path | None
    data_dir: Path
    fake_data: bool
    batch_size: int
    num_epochs: int
    max_steps: int | None
    compile_step: bool
    drop_last: bool
    lr: float
    momentum: float
    seed: int
    recipe: str | None
    use_nested_fsdp: bool
    auto_wrap_policy: str
    auto_wrap_min_num_params: int
    flatten_parameters: bool
    reshard_after_forward: bool
    use_gradient_checkpointing: bool
    compute_dtype: str
    fp32_reduce_scatter: bool
    shard_param_on_dim_0: bool
    ckpt_dir: Path
    ckpt_prefix: str
    ckpt_every_steps: int | None
    ckpt_consolidation: bool
    resume: bool
    log_interval: int
    loss_log: Path | None
    profile: Path | None
    compare_steps: int
    min_accuracy: float

    @property
    def prefix(self) -> Path:
        """The directory of this run's checkpoints; what the paths of merged files start with."""
        return self.ckpt_dir / self.ckpt_prefix


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """The options of a command line (default: this program's); exits with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train MNIST with FSDP; save, merge and verify the shards.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    _add_run(parser.add_argument_group("run"))
    _add_model(parser.add_argument_group("sharding"))
    _add_checkpoints(parser.add_argument_group("checkpoints"))
    _add_reports(parser.add_argument_group("reports"))
    values = vars(parser.parse_args(argv))
    automatic = values["auto_wrap_policy"] != "none"
    if automatic and values["use_nested_fsdp"]:
        parser.error("--use_nested_fsdp and --auto_wrap_policy both choose the units; give one")
    by_recipe = values["recipe"] is not None
    if by_recipe and (values["use_nested_fsdp"] or values["use_gradient_checkpointing"]):
        parser.error("--recipe says what is nested and recomputed; leave the flags for that out")
    if values["use_nested_fsdp"] is None:
        values["use_nested_fsdp"] = not (automatic or by_recipe)
    return Options(**values)


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--num_ranks", type=at_least(1), help="default: 8 on CPU, all devices elsewhere"
    )
    group.add_argument("--compile_cache", type=Path, help="on TPU: keep compiled programs there")
    group.add_argument("--data_dir", type=Path, default=ROOT / "data" / "mnist")
    add_switch(group, "fake_data", False, "train on synthetic digits, without MNIST files")
    group.add_argument("--batch_size", type=at_least(1), default=16, help="images per rank")
    group.add_argument("--num_epochs", type=at_least(1), default=2)
    group.add_argument("--max_steps", type=at_least(1), help="end each epoch after so many steps")
    add_switch(group, "compile_step", True, "trace the first steps only, and replay them")
    add_switch(group, "drop_last", True, "leave out the last, smaller batch of an epoch")
    group.add_argument("--lr", type=number(0), default=0.01, help="times the number of ranks")
    group.add_argument("--momentum", type=number(0, 1), default=0.5)
    group.add_argument("--seed", type=at_least(0), default=0, help="of weights and data order")


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--recipe", help="of parallelize: lean, fast, plain, or the file of one")
    add_switch(group, "use_nested_fsdp", None, "wrap each layer by hand (unless a policy does)")
    policies = ("none", "size_based", "type_based")
    group.add_argument("--auto_wrap_policy", choices=policies, default="none")
    group.add_argument("--auto_wrap_min_num_params", type=at_least(0), default=1000)
    add_switch(group, "flatten_parameters", False, "join each unit's parameters into one vector")
    add_switch(group, "reshard_after_forward", True, "gather again in backward instead of keeping")
    add_switch(group, "use_gradient_checkpointing", False, "recompute activations in backward")
    dtypes = ("float32", "float16", "bfloat16")
    group.add_argument("--compute_dtype", choices=dtypes, default="float32")
    add_switch(group, "fp32_reduce_scatter", False, "reduce gradients in fp32")
    add_switch(group, "shard_param_on_dim_0", False, "shard whole rows of each parameter")


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ckpt_dir", type=Path, default=ROOT / "runs" / "mnist")
    group.add_argument("--ckpt_prefix", default="mnist", help="name of this run's directory there")
    group.add_argument("--ckpt_every_steps", type=at_least(1), help="save within epochs, too")
    add_switch(group, "ckpt_consolidation", True, "merge and verify the last checkpoint")
    add_switch(group, "resume", False, "continue from the newest complete checkpoint")


def _add_reports(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log_interval", "--log_steps", type=at_least(1), default=20, help="in steps"
    )
    group.add_argument("--profile", type=Path, help="record some steps into this folder, for xprof")
    group.add_argument("--loss_log", type=Path, help="write the losses to this file, as JSON lines")
    group.add_argument(
        "--compare_steps",
        type=at_least(0),
        default=100,
        help="steps of the comparison with data parallel training; 0 to leave it out",
    )
    group.add_argument(
        "--min_accuracy",
        type=number(0, 100),
        default=0.0,
        help="fail below this test accuracy, %%",
    )
