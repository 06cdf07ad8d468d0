"""Train models by ``parallelize`` on N ranks, and the plain ones on the joined batch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common.ranks import run_on_ranks
from test.common.scenarios import make

VOCABULARY, LENGTH, WIDTH, CLASSES = 61, 8, 16, 7
ROWS = 3  # of a rank's batch
STEPS = 3
RATE = 1e-2
MAX_NORM = 0.3  # less than the norms here, so that every step is clipped

# ---------------------------------------------------------------- models


class Block(nn.Module):
    """Pre-norm, with dropout."""

    def __init__(self, dropout: float = 0.0, inner: int = 40) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Transformer(nn.Module):
    """Tokens to logits."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Mlp(nn.Module):
    """Blocks of unequal sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(inner=size) for size in (17, 40, 23)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x.float() / VOCABULARY)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Cnn(nn.Module):
    """As MNIST's, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, 5, 3, bias=False)  # its gradient would be rounding
        self.norm = nn.BatchNorm1d(5)
        self.fc = nn.Linear(30, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv1(x.float()[:, None] / VOCABULARY))
        return self.fc(F.relu(x).flatten(1))


class Normed(nn.Module):
    """A block that changes its statistics in place, as no loop can."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        # Variances of three rows are near 0: divided by them alone, rounding would show.
        self.norm = nn.BatchNorm1d(WIDTH, eps=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x))


class NormedMlp(Mlp):
    """Blocks that are alike, and that no loop can run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Normed() for _ in range(3)])


def language_model(kind: str, tied: bool, **changes: Any) -> Any:
    """A tiny model of transformers."""
    import transformers

    ids = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    ids |= {"tie_word_embeddings": tied, "attn_implementation": "sdpa", "use_cache": True}
    if kind == "GPT2LMHead":
        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = {"n_positions": 16, "n_embd": WIDTH, "n_layer": 3, "n_head": 2, **drop}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **ids, **changes}))
    if kind == "T5":
        sizes = {"d_model": WIDTH, "d_kv": 4, "d_ff": 40, "num_layers": 3, "num_heads": 4}
        more = {"dropout_rate": 0.0, "decoder_start_token_id": 0}
        config = transformers.T5Config(**{**sizes, **more, **ids, **changes})
        return transformers.T5ForConditionalGeneration(config)
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **ids, **changes})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "transformer": Transformer,
    "dropout": partial(Transformer, 0.3),
    "mlp": Mlp,
    "cnn": Cnn,
    "normed": NormedMlp,
    **{
        f"{name}_{'tied' if tied else 'untied'}": partial(language_model, kind, tied)
        for name, kind in (("llama", "Llama"), ("gpt2", "GPT2LMHead"), ("qwen", "Qwen2"))
        for tied in (True, False)
    },
    "t5": partial(language_model, "T5", True),
}


# ---------------------------------------------------------------- jobs


@dataclass(frozen=True)
class Job:
    """How to train a model.

    Args:
        model: name in MODELS.
        recipe: its name, with changes of fields.
        changes: of the recipe.
        clip: whether to clip gradients.
        micro_batches: backward passes per step, all but the last under ``no_sync``.
        options: of ``parallelize``.
    """

    model: str
    recipe: str = "lean"
    changes: tuple[tuple[str, Any], ...] = ()
    clip: bool = False
    micro_batches: int = 1
    options: tuple[tuple[str, Any], ...] = ()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, whose weight decay is chosen by name."""
    named = dict(model.named_parameters())
    plain = [name for name in named if name.endswith("bias") or "norm" in name]
    return torch.optim.AdamW(
        [
            {"params": [named[name] for name in named if name not in plain], "weight_decay": 0.3},
            {"params": [named[name] for name in plain], "weight_decay": 0.0},
        ],
        lr=RATE,
        eps=1e-5,  # of smaller gradients fp32 has few digits, and a step is of their sign alone
    )


def batches(job: Job, num_ranks: int) -> Tensor:
    """Tokens [steps, micro batches, ranks, rows, length]."""
    generator = torch.Generator().manual_seed(7)
    shape = (STEPS, job.micro_batches, num_ranks, ROWS, LENGTH)
    return torch.randint(1, VOCABULARY, shape, generator=generator)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """The loss of a rank's batch."""
    if hasattr(model, "config"):
        return model(tokens, labels=tokens).loss
    output = model(tokens)
    targets = tokens if output.dim() == 3 else tokens[:, 0] % CLASSES
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


@dataclass
class Outcome:
    losses: list[float]
    state: dict[str, Tensor]
    names: list[str]
    lines: list[str]


def train_plain(job: Job, num_ranks: int) -> Outcome:
    """Train the plain model on the joined batch."""
    model = make(MODELS[job.model])
    optimizer, losses = optimizer_of(model), []
    parts = job.micro_batches * num_ranks
    for step in batches(job, num_ranks):
        # Of each rank apart, as batch statistics are.
        loss = torch.stack([loss_of(model, each) for each in step.flatten(0, 1)]).sum() / parts
        loss.backward()
        if job.clip:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Outcome(losses, model.state_dict(), [name for name, _ in model.named_parameters()], [])


def train_on_ranks(
    jobs: Mapping[str, Job], num_ranks: int, **options: Any
) -> dict[str, list[Outcome]]:
    """Train every job; return what each rank has."""
    found = run_on_ranks(_train_all, num_ranks, dict(jobs), **options)
    return {name: [each[name] for each in found] for name in jobs}


def _train_all(rank: int, jobs: dict[str, Job]) -> dict[str, Outcome]:
    return {name: train(rank, job) for name, job in jobs.items()}


def train(rank: int, job: Job, folder: Path | None = None) -> Outcome:
    """Train a job on this rank, in a step that is compiled if the recipe says so."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    from xla_fsdp import Recipe, full_state_dict, parallelize

    plain = make(MODELS[job.model])
    recipe = Recipe(job.recipe, **dict(job.changes))
    model, optimizer, done = parallelize(plain, optimizer_of(plain), recipe, **dict(job.options))
    num_ranks = xr.world_size()

    def step(tokens: Tensor) -> Tensor:
        total = torch.zeros((), device=tokens.device)
        for number, part in enumerate(tokens, 1):
            is_last = number == job.micro_batches
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = loss_of(model, part) / job.micro_batches
                loss.backward()
            total = total + loss.detach()
        if job.clip:
            model.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return xm.all_reduce("sum", total, 1.0 / num_ranks)

    with warnings.catch_warnings():
        # Steps of transformers that read the device are traced every time, with a warning.
        warnings.filterwarnings("ignore", message=".*traced")
        compiled, losses = done.compile(step), []
        for tokens in batches(job, num_ranks):
            losses.append(compiled(tokens[:, rank].to(torch_xla.device())).item())
    state = {name: each.cpu() for name, each in full_state_dict(model).items()}
    names = [name for name, _ in model.named_parameters()]
    return Outcome(losses, state, names, list(done._report))
