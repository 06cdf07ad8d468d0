"""What one run of the language model's job was asked to do: flags, and files of them.

Words: a *configuration* is a file of lines ``option: value``, in YAML. Flags win.
Always true: an ``Options`` object is consistent; a wrong flag, also one in a file, ends the program
with exit code 2 and says what was expected.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flags import add_switch, at_least, number
from llama import ATTENTION, NAME, SDPA, Sizes
from text import BYTES


@dataclass(frozen=True)
class Options:
    """One field per flag; see ``--help``."""

    config: Path | None
    num_ranks: int | None
    compile_cache: Path | None
    mesh: dict[str, int] | None
    recipe: str
    attention: str
    context: int
    compute_dtype: str
    model: Path | None
    lora: int
    sizes: Sizes
    text: Path | None
    length: int
    batch_size: int
    steps: int
    compile_step: bool
    lr: float
    warmup_steps: int
    seed: int
    log_steps: int
    eval_steps: int
    eval_batches: int
    ckpt_dir: str | None
    save_steps: int
    resume: str
    logdir: Path | None
    peak_tflops: float
    profile: Path | None
    export: Path | None
    prompt: str
    generate: int
    temperature: float


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """The options of a command line (default: this program's); exits with code 2 if it is wrong."""
    parser, sizes = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    given = parser.parse_args(words)
    if given.config:
        given = parser.parse_args([*_flags_in(given.config, parser), *words])
    values = vars(given)
    values["sizes"] = Sizes(**{name: values.pop(name) for name in sizes}, vocabulary=BYTES)
    options = Options(**values)
    if problem := _problem(options):
        parser.error(problem)
    return options


def _problem(options: Options) -> str | None:
    sizes = options.sizes
    if sizes.width % sizes.heads or sizes.heads % sizes.kv_heads:
        return "--heads must divide --width, and --kv_heads must divide --heads"
    if options.context > 1 and options.attention != NAME:
        return "--context wants --attention xla_fsdp, which sees what other ranks have"
    if options.lora and options.model is None:
        return "--lora adapts a model that was trained before: give its folder as --model"
    if options.resume == "auto" and options.ckpt_dir is None:
        return "--resume auto goes on from a checkpoint: say where they lie by --ckpt_dir"
    return None


def _flags_in(path: Path, parser: argparse.ArgumentParser) -> list[str]:
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        parser.error(f"--config: {error}")
    if not isinstance(content, dict):
        parser.error(f"--config: {path} holds no lines 'option: value'")
    return [_flag(name, value) for name, value in content.items()]


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    return f"--{name}={value}"


def _parser() -> tuple[argparse.ArgumentParser, dict[str, int]]:
    parser = argparse.ArgumentParser(
        description="Train a causal language model of transformers, or fine-tune one.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, help="a file of options, as small.yaml")
    _add_ranks(parser.add_argument_group("ranks and memory"))
    sizes = _add_model(parser.add_argument_group("model"))
    _add_training(parser.add_argument_group("text and optimizer"))
    _add_reports(parser.add_argument_group("evaluation, checkpoints and reports"))
    _add_results(parser.add_argument_group("at the end"))
    return parser, sizes


def _add_ranks(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num_ranks", type=at_least(1), help="default: 8 on CPU, all devices elsewhere")
    add("--compile_cache", type=Path, help="on TPU: keep compiled programs there")
    add("--mesh", type=_mesh, help="as replica=2,shard=4: the last axis shards")
    add("--recipe", default="plain", help="lean, fast or plain, or the file of a recipe")
    add("--attention", choices=ATTENTION, default=SDPA, help="xla_fsdp: memory linear in --length")
    add("--context", type=at_least(1), default=1, help="ranks that share each window")
    add("--compute_dtype", choices=("float32", "bfloat16"), default="float32")


def _mesh(words: str) -> dict[str, int]:
    pairs = [word.partition("=") for word in words.split(",")]
    if not all(name.isidentifier() and size.isdecimal() for name, _, size in pairs):
        raise argparse.ArgumentTypeError(f"{words!r} is not of the form axis=size,axis=size")
    return {name: int(size) for name, _, size in pairs}


def _add_model(group: argparse._ArgumentGroup) -> dict[str, int]:
    add = group.add_argument
    add("--model", type=Path, help="folder of a model in Hugging Face's layout, to fine-tune it")
    add("--lora", type=at_least(0), default=0, help="rank of adapters to train in place of --model")
    small = {"width": 128, "blocks": 4, "heads": 4, "kv_heads": 2, "ffn": 384}
    for name, size in small.items():
        add(f"--{name}", type=at_least(1), default=size, help="of a new model")
    return small


def _add_training(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--text", type=Path, help="default: the reference that comes with Python")
    add("--length", type=at_least(2), default=128, help="of a window, in tokens")
    add("--batch_size", type=at_least(1), default=8, help="windows per rank")
    add("--steps", type=at_least(1), default=300)
    add_switch(group, "compile_step", True, "trace the first steps only, and replay them")
    add("--lr", type=number(0), default=3e-3)
    add("--warmup_steps", type=at_least(0), default=0, help="the rate then falls along a cosine")
    add("--seed", type=at_least(0), default=0)


def _add_reports(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--log_steps", type=at_least(1), default=20)
    add("--eval_steps", type=at_least(0), default=0, help="between evaluations; 0: at the end")
    add("--eval_batches", type=at_least(1), default=4, help="of an evaluation, per rank")
    add("--ckpt_dir", help="a directory that all hosts share, or a URL (gs://bucket/run)")
    add("--save_steps", type=at_least(1), default=100, help="steps between checkpoints")
    add("--resume", choices=("none", "auto"), default="none", help="auto: go on if there is one")
    add("--logdir", type=Path, help="write TensorBoard scalars here")
    add("--peak_tflops", type=number(0), default=0.0, help="of a chip, for MFU: 197 for v5e")
    add("--profile", type=Path, help="record some steps into this folder, for xprof")


def _add_results(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--export", type=Path, help="write the model into this folder, in Hugging Face's layout")
    add("--prompt", default="The ")
    add("--generate", type=at_least(0), default=200, help="tokens to write")
    add("--temperature", type=number(0.01), default=0.5)
