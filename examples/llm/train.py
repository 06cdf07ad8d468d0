"""Train a small Llama of transformers, byte by byte, and let it write a few lines.

    python examples/llm/train.py                                  # 8 CPU ranks, or all TPU devices
    python examples/llm/train.py --mesh replica=2,shard=4         # shards in groups of 4 ranks
    python examples/llm/train.py --recipe lean                    # in the least memory
    python examples/llm/train.py --attention xla_fsdp             # without all scores in memory
    python examples/llm/train.py --attention xla_fsdp --context 4 # windows cut over 4 ranks
    python examples/llm/train.py --text book.txt --steps 2000 --width 256 --blocks 8

The text is Python's own reference, as ``help()`` shows it, which comes with Python; or any file.
Words: a *window* is as many bytes as the model sees; tokens are bytes.
Always true: one program trains and one writes: text that is written lies in a window of fixed size,
whose end the model cannot see from before.
The model and its units are in ``llama.py``, at any size.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import xla_fsdp  # noqa: F401  (first: torch_xla then does not remark that there is no TPU)

# isort: split
import torch
import torch_xla
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))  # what the examples share

from flags import add_switch, at_least, number
from llama import ATTENTION, EAGER, Sizes, build_model, loss_over, next_token_loss, shard_model
from place import Place
from profiles import Profile, name_units
from ranks import global_means, this_place
from xla_fsdp import Mesh, Parallelized, RankError, Recipe, init_mesh, launch

CPU_RANKS = "8"
BYTES = 256


@dataclass(frozen=True)
class Options:
    """One field per flag; see ``--help``."""

    num_ranks: int | None
    mesh: dict[str, int] | None
    recipe: str
    attention: str
    context: int
    sizes: Sizes
    text: Path | None
    length: int
    batch_size: int
    steps: int
    compile_step: bool
    lr: float
    seed: int
    log_steps: int
    profile: Path | None
    prompt: str
    generate: int
    temperature: float


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """The options of a command line; exits with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        description="Train a Llama on bytes of a text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--num_ranks", type=at_least(1), help="default: 8 on CPU, all devices elsewhere")
    add("--mesh", type=_mesh, help="as replica=2,shard=4: the last axis shards")
    add("--recipe", default="plain", help="lean, fast or plain, or the file of a recipe")
    add("--attention", choices=ATTENTION, default=EAGER, help="xla_fsdp: memory linear in --length")
    add("--context", type=at_least(1), default=1, help="ranks that share each window")
    small = {"width": 128, "blocks": 4, "heads": 4, "kv_heads": 2, "ffn": 384}
    for name, size in small.items():
        add(f"--{name}", type=at_least(1), default=size)
    add("--text", type=Path, help="default: the reference that comes with Python")
    add("--length", type=at_least(2), default=128, help="of a window")
    add("--batch_size", type=at_least(1), default=8, help="windows per rank")
    add("--steps", type=at_least(1), default=300)
    add_switch(parser, "compile_step", True, "trace the first steps only, and replay them")
    add("--lr", type=number(0), default=3e-3)
    add("--seed", type=at_least(0), default=0)
    add("--log_steps", type=at_least(1), default=20)
    add("--profile", type=Path, help="record some steps into this folder, for xprof")
    add("--prompt", default="The ")
    add("--generate", type=at_least(0), default=200, help="bytes to write at the end")
    add("--temperature", type=number(0.01), default=0.5)
    values = vars(parser.parse_args(argv))
    sizes = Sizes(**{name: values.pop(name) for name in small}, vocabulary=BYTES)
    if sizes.width % sizes.heads or sizes.heads % sizes.kv_heads:
        parser.error("--heads must divide --width, and --kv_heads must divide --heads")
    if values["context"] > 1 and values["attention"] == EAGER:
        parser.error("--context wants --attention xla_fsdp, which sees what other ranks have")
    return Options(sizes=sizes, **values)


def _mesh(words: str) -> dict[str, int]:
    pairs = [word.partition("=") for word in words.split(",")]
    if not all(name.isidentifier() and size.isdecimal() for name, _, size in pairs):
        raise argparse.ArgumentTypeError(f"{words!r} is not of the form axis=size,axis=size")
    return {name: int(size) for name, _, size in pairs}


# ---------------------------------------------------------------- the text


def read_text(path: Path | None) -> Tensor:
    """All bytes, uint8 [N], of a file or of the reference that comes with Python."""
    if path is None:
        topics = pydoc_data.topics.topics
        content = "\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        content = path.read_bytes()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def windows(text: Tensor, place: Place, options: Options) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and next tokens, int64 [N, length], from anywhere in the text, without end."""
    # Its own: CPU ranks share the one of the process.
    own = torch.Generator().manual_seed(options.seed * place.world_size + place.rank)
    offsets = torch.arange(options.length + 1)
    while True:
        starts = torch.randint(len(text) - options.length, (options.batch_size, 1), generator=own)
        chosen = text[starts + offsets].long()
        yield chosen[:, :-1].to(place.device), chosen[:, 1:].to(place.device)


# ---------------------------------------------------------------- training and writing


def mesh_of(place: Place, options: Options) -> Mesh | None:
    """The ranks as the flags lay them out; None for one axis of all."""
    axes = options.mesh
    if options.context > 1:
        axes = (axes or {"shard": place.world_size // options.context}) | {
            "context": options.context
        }
    return axes and init_mesh(tuple(axes.values()), tuple(axes))


def reader(place: Place, mesh: Mesh | None, options: Options) -> Place:
    """Whose windows the rank reads: those that share windows are one."""
    if mesh is None or options.context == 1:
        return place
    others = [name for name in mesh.axis_names if name != "context"]
    count = place.world_size // options.context
    return Place(mesh.local_rank(place.rank, *others), count, place.device)


def shard(options: Options, mesh: Mesh | None) -> Parallelized:
    """The sharded model, its optimizer, and the recipe of both."""
    model = build_model(options.sizes, attention=options.attention)
    optimizer = partial(torch.optim.AdamW, lr=options.lr, weight_decay=0.1)
    recipe = replace(
        Recipe.of(options.recipe),
        step_in_backward=False,  # as gradients are clipped
        compile_step=options.compile_step,
    )
    return shard_model(model, optimizer, recipe, mesh=mesh, compute_dtype=torch.float32)


def train(
    sharded: Parallelized, text: Tensor, place: Place, options: Options, mesh: Mesh | None
) -> float:
    """Train; returns the last loss that was reported, averaged over the ranks."""
    model, optimizer, recipe = sharded

    def train_step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_over(mesh, next_token_loss, model, tokens, targets)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    take_step = recipe.compile(train_step)
    start, mean = time.perf_counter(), float("nan")
    profile = Profile(options.profile if place.rank == 0 else None)
    batches = windows(text, reader(place, mesh, options), options)
    for step, (tokens, targets) in enumerate(batches, start=1):
        profile.step()
        loss = take_step(tokens, targets)
        if step % options.log_steps == 0 or step == options.steps:
            (mean,) = global_means(loss.detach())
            if place.rank == 0:
                rate = step / (time.perf_counter() - start)
                print(f"step {step}: loss {mean:.3f}, {rate:.1f} steps/s", flush=True)
        if step == options.steps:
            break
    profile.stop()
    return mean


@torch.no_grad()
def write(model: nn.Module, place: Place, options: Options) -> str:
    """The prompt and what the model makes of it; the same on every rank, all of which call it."""
    model.eval()
    draw = torch.Generator().manual_seed(options.seed)
    written = list(options.prompt.encode())
    for _ in range(options.generate):
        seen = written[-options.length :]
        window = torch.tensor([seen + [0] * (options.length - len(seen))]).to(place.device)
        last = torch.tensor([len(seen) - 1]).to(place.device)
        logits = model(window).logits[0].index_select(0, last)[0].float()
        torch_xla.sync()
        chances = (logits.cpu() / options.temperature).softmax(0)
        written.append(int(torch.multinomial(chances, 1, generator=draw)))
    return bytes(written).decode(errors="replace")


# ---------------------------------------------------------------- the job


def run_rank(index: int, options: Options, text: Tensor) -> None:
    """The whole job on one rank."""
    place = this_place()
    mesh = mesh_of(place, options)
    torch.manual_seed(options.seed)  # for the values, which wrapping draws, unit by unit
    sharded = shard(options, mesh)
    train(sharded, text, place, options, mesh)
    if options.generate:
        written = write(sharded.model, place, options)
        if place.rank == 0:
            print(written)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that the command line describes; returns the exit code."""
    options = parse_options(argv)
    try:
        text = read_text(options.text)
        if len(text) <= options.length:
            raise ValueError(f"the text has {len(text)} bytes, a window {options.length}: use less")
        # Only read on CPU; elsewhere every device is a rank.
        os.environ.setdefault("XLA_FSDP_NUM_RANKS", CPU_RANKS)
        if options.profile:
            name_units()
        launch(run_rank, (options, text), num_ranks=options.num_ranks)
    except (OSError, ValueError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except RankError as error:
        if not isinstance(error.__cause__, ValueError):
            raise
        print(f"train.py: {error.__cause__}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
