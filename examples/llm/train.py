"""Train a causal language model of transformers: a small Llama from the start, or one to fine-tune.

    python examples/llm/train.py                                  # 8 CPU ranks, or all TPU devices
    python examples/llm/train.py --config examples/llm/small.yaml # checkpoints, metrics, an export
    python examples/llm/train.py --config examples/llm/fine_tune.yaml  # LoRA on what that exported
    python examples/llm/generate.py runs/llm/export               # in plain transformers
    python examples/llm/train.py --mesh replica=2,shard=4         # shards in groups of 4 ranks
    python examples/llm/train.py --recipe lean                    # in the least memory
    python examples/llm/train.py --attention xla_fsdp --context 4 # windows cut over 4 ranks

The text is Python's own reference, as ``help()`` shows it, which comes with Python; or any file.
Words: a *window* is as many tokens as the model sees. A new model's tokens are bytes.
Always true: one program trains, one evaluates and one writes: text that is written lies in a window
of fixed size, whose end the model cannot see from before. A resumed run reads the windows that the
interrupted one would have read.
A new model and its units are in ``llama.py``, at any size; the text is in ``text.py``.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import xla_fsdp  # noqa: F401  (first: torch_xla then does not remark that there is no TPU)

# isort: split
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))  # what the examples share

from llama import NAME, build_model, loss_over, next_token_loss, shard_model
from options import Options, parse_options
from place import Place
from profiles import Profile, name_units
from ranks import global_means, this_place
from scalars import Scalars
from text import Text, read_text, tokenizer_of, windows
from xla_fsdp import (
    CheckpointError,
    CheckpointManager,
    Mesh,
    Parallelized,
    Preemption,
    RankError,
    Recipe,
    full_state_dict,
    init_mesh,
    launch,
    one_rank_at_a_time,
)

CPU_RANKS = "8"
PREEMPTED = 75  # the exit code of "try again"
Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass
class Job:
    """A rank's part of the whole.

    Args:
        place: of this rank.
        reads: whose windows it reads: those that share windows are one.
        mesh: the ranks as the flags lay them out; None for one axis of all.
        sharded: the model, its optimizer, and the recipe of both.
        flops: of a token, in forward and backward.
    """

    options: Options
    text: Text
    place: Place
    reads: Place
    mesh: Mesh | None
    sharded: Parallelized
    flops: float
    scalars: Scalars

    def windows(self, tokens: Tensor, seed: int, done: int = 0) -> Batches:
        """The rank's batches."""
        options = self.options
        return windows(tokens, self.reads, options.length, options.batch_size, seed, done)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean over the rank's tokens."""
        return loss_over(self.mesh, next_token_loss, self.sharded.model, tokens, targets)

    def say(self, step: int, line: str, **values: float) -> None:
        """One line, and the values of a step for TensorBoard; only rank 0 says anything."""
        if self.place.rank == 0:
            print(f"step {step}: {line}", flush=True)
            self.scalars.add(step, **values)


# ---------------------------------------------------------------- the model


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


def plain_model(options: Options) -> Any:
    """The model before it is sharded: on the meta device, or from a folder, with adapters."""
    if options.model is None:
        return build_model(options.sizes, attention=options.attention)
    from transformers import AutoModelForCausalLM

    if options.attention == NAME:
        from xla_fsdp.integrations.attention import register

        register()
    own = {"attn_implementation": options.attention, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(options.model, **own)
    model.config.use_cache = False
    return with_adapters(model, options.lora) if options.lora else model


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """The model, frozen, with low-rank adapters of all its linear layers."""
    from peft import LoraConfig, get_peft_model

    how = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    return get_peft_model(model, how)


def flops_of_token(model: Any, length: int) -> float:
    """Of forward and backward: 2 of each parameter in forward, 2 for gradients of inputs, 2 for
    gradients of parameters that have one; and of attention's two products (Chowdhery et al., 2022,
    appendix B)."""
    params = list(model.parameters())
    trained = sum(param.numel() for param in params if param.requires_grad)
    attention = 12 * model.config.num_hidden_layers * model.config.hidden_size * length
    return 4 * sum(param.numel() for param in params) + 2 * trained + attention


def make_job(options: Options, text: Text) -> Job:
    """Build and shard the model on this rank."""
    place = this_place()
    mesh = mesh_of(place, options)
    torch.manual_seed(options.seed)  # for the values, which wrapping draws, unit by unit
    with one_rank_at_a_time():  # what a folder holds is on the host once
        model = plain_model(options)
        torch.manual_seed(options.seed)
        flops = flops_of_token(model, options.length)
    optimizer = partial(torch.optim.AdamW, lr=options.lr, weight_decay=0.1)
    recipe = replace(
        Recipe.of(options.recipe),
        step_in_backward=False,  # as gradients are clipped
        compile_step=options.compile_step,
    )
    dtype = getattr(torch, options.compute_dtype)
    sharded = shard_model(model, optimizer, recipe, mesh=mesh, compute_dtype=dtype)
    scalars = Scalars(options.logdir if place.rank == 0 else None)
    reads = reader(place, mesh, options)
    return Job(options, text, place, reads, mesh, sharded, flops, scalars)


# ---------------------------------------------------------------- training


def rate_of(options: Options, done: int) -> float:
    """The learning rate's part after ``done`` steps: a rise along a line, then half a cosine."""
    warmup = options.warmup_steps
    if done < warmup:
        return (done + 1) / warmup
    return 0.5 + 0.5 * math.cos(math.pi * (done - warmup) / max(options.steps - warmup, 1))


def train(job: Job, manager: CheckpointManager | None) -> None:
    """Train, from the newest checkpoint on if the flags say so."""
    options, (model, optimizer, recipe) = job.options, job.sharded
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate_of, options))
    objects = {"lr_scheduler": schedule}

    def train_step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = job.loss(tokens, targets)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    take_step = recipe.compile(train_step)
    done = resume(job, manager, objects)
    profile = Profile(options.profile if job.place.rank == 0 else None)
    preemption, meter = Preemption(), Meter(job, done)
    batches = job.windows(job.text.trained, options.seed, done)
    for step, (tokens, targets) in zip(range(done + 1, options.steps + 1), batches, strict=False):
        profile.step()
        loss = take_step(tokens, targets)
        schedule.step()
        preemption.vote()
        if step % options.log_steps == 0 or step == options.steps:
            meter.report(step, loss.detach())
        if options.eval_steps and step % options.eval_steps == 0 and step < options.steps:
            evaluate(job, step)
        stop = preemption.agreed()
        if manager is not None:
            last = stop or step == options.steps
            manager.save(step, model, optimizer, objects=objects, force=last)
        if stop:
            raise SystemExit(PREEMPTED)
    profile.stop()


def resume(job: Job, manager: CheckpointManager | None, objects: dict[str, Any]) -> int:
    """Go on from the newest checkpoint, on any number of ranks; returns the steps it has made."""
    if manager is None:
        return 0
    if job.options.resume == "none":
        if steps := manager.steps():
            raise ValueError(
                f"{job.options.ckpt_dir} holds checkpoints up to step {max(steps)}: go on with "
                f"--resume auto, or give another --ckpt_dir"
            )
        return 0
    found = manager.restore(job.sharded.model, job.sharded.optimizer, objects=objects)
    return 0 if found is None else found.step


class Meter:
    """Losses and rates, of the steps since the last report."""

    def __init__(self, job: Job, done: int) -> None:
        self._job, self._last, self._time = job, done, time.perf_counter()

    def report(self, step: int, loss: Tensor) -> None:
        """Say how far training has come; every rank calls it."""
        (mean,) = global_means(loss)
        now, options, place = time.perf_counter(), self._job.options, self._job.reads
        rate = (step - self._last) / (now - self._time)
        self._last, self._time = step, now
        tokens = rate * place.world_size * options.batch_size * options.length
        values = {"train_loss": mean, "train_tokens_per_second": tokens}
        use = ""
        if options.peak_tflops:
            peak = options.peak_tflops * 1e12 * self._job.place.world_size
            values["train_mfu"] = tokens * self._job.flops / peak
            use = f"{100 * values['train_mfu']:.1f} % MFU, "
        self._job.say(
            step, f"loss {mean:.3f}, {use}{tokens:,.0f} tokens/s, {rate:.1f} steps/s", **values
        )


@torch.no_grad()
def evaluate(job: Job, step: int) -> float:
    """The mean loss on the same windows of what is held out, each time; every rank calls it."""
    model, count = job.sharded.model, job.options.eval_batches
    model.eval()
    total = torch.zeros((), device=job.place.device)
    for tokens, targets in islice(job.windows(job.text.held_out, job.options.seed), count):
        total = total + job.loss(tokens, targets)
        torch_xla.sync()
    model.train()
    (mean,) = global_means(total / count)
    words = f"perplexity {math.exp(mean):.2f} on what is held out"
    job.say(step, words, eval_loss=mean)
    return mean


# ---------------------------------------------------------------- what it leaves


@torch.no_grad()
def write(job: Job, tokenizer: Any) -> str:
    """The prompt and what the model makes of it; the same on every rank, all of which call it."""
    model, options, device = job.sharded.model, job.options, job.place.device
    model.eval()
    draw = torch.Generator().manual_seed(options.seed)
    written = tokenizer.encode(options.prompt)
    for _ in range(options.generate):
        seen = written[-options.length :]
        window = torch.tensor([seen + [0] * (options.length - len(seen))]).to(device)
        last = torch.tensor([len(seen) - 1]).to(device)
        logits = model(window).logits[0].index_select(0, last)[0].float()
        torch_xla.sync()
        chances = (logits.cpu() / options.temperature).softmax(0)
        written.append(int(torch.multinomial(chances, 1, generator=draw)))
    return tokenizer.decode(written)


def export(job: Job, tokenizer: Any) -> None:
    """Write the whole model, with its adapters merged into it, for transformers; a collective.

    Rank 0 holds all of it on its host. What no host can hold is merged from a checkpoint's files,
    by ``consolidate_sharded_ckpts convert RUN --to hf``.
    """
    state = full_state_dict(job.sharded.model, rank0_only=True)
    folder = job.options.export
    if job.place.rank == 0:
        plain = plain_model(job.options)
        plain.load_state_dict(state, assign=True)
        if job.options.lora:
            plain = plain.merge_and_unload()
        plain.config.use_cache = True
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(str(folder))
        print(f"exported to {folder}", flush=True)
    xm.rendezvous("the model is exported")


# ---------------------------------------------------------------- the job


def run_rank(index: int, options: Options, text: Text, tokenizer: Any) -> None:
    """The whole job on one rank."""
    job = make_job(options, text)
    with contextlib.ExitStack() as stack:
        manager = None
        if options.ckpt_dir:
            manager = stack.enter_context(
                CheckpointManager(
                    options.ckpt_dir, save_interval_steps=options.save_steps, keep_last=2
                )
            )
        train(job, manager)
    evaluate(job, options.steps)
    job.scalars.close()
    if options.export:
        export(job, tokenizer)
    if options.generate:
        written = write(job, tokenizer)
        if job.place.rank == 0:
            print(written)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that the command line describes; returns the exit code."""
    options = parse_options(argv)
    try:
        tokenizer = tokenizer_of(options.model)
        text = read_text(options.text, tokenizer, options.length)
        # Only read on CPU; elsewhere every device is a rank.
        os.environ.setdefault("XLA_FSDP_NUM_RANKS", CPU_RANKS)
        if options.profile:
            name_units()
        job = (options, text, tokenizer)
        launch(
            run_rank,
            job,
            num_ranks=options.num_ranks,
            stop_signals=[signal.SIGTERM],
            compile_cache=options.compile_cache,
        )
    except (OSError, ValueError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except RankError as error:
        if isinstance(error.__cause__, SystemExit):
            print("train.py: asked to end; go on with --resume auto", file=sys.stderr)
            return PREEMPTED
        if not isinstance(error.__cause__, (ValueError, CheckpointError)):
            raise
        print(f"train.py: {error.__cause__}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
