"""Rehearse ``train.py`` on a slice that is not there, beside the plain model.

    python -m xla_fsdp.preflight examples.llm.rehearse:build_step --topology v5e:2x4 --run 3

The text, the windows of each rank and the optimizer are those of training; the sizes are options.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))  # what the examples share

from llama import Sizes, next_token_loss, shard_model
from options import parse_options
from place import Place
from ranks import this_place
from text import BYTES, read_text, tokenizer_of, windows
from xla_fsdp import Mesh, Recipe


def build_step(
    width: int = 128,
    blocks: int = 4,
    length: int = 128,
    batch: int = 8,
    scan: bool = False,
    mesh: Mesh | None = None,
    plain: int = 0,
) -> Callable[[], Tensor]:
    """Return a step that returns its loss.

    With ``plain``, of the unsharded model on the batches of so many ranks together.
    """
    options = parse_options(["--length", str(length), "--batch_size", str(batch)])
    torch.manual_seed(options.seed)
    sizes = Sizes(width, blocks, heads=4, kv_heads=2, ffn=3 * width, vocabulary=BYTES)
    model: Any = LlamaForCausalLM(sizes.config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    places = [Place(rank, plain, torch.device("cpu")) for rank in range(plain)]
    if not plain:
        recipe = Recipe("plain", scan=scan)
        model = shard_model(model, optimizer, recipe, mesh=mesh, compute_dtype=torch.float32).model
        places = [this_place()]
    text = read_text(None, tokenizer_of(None), length)
    batches = [windows(text.trained, place, length, batch, options.seed) for place in places]

    def step() -> Tensor:
        losses = [_backward(_loss(model, each) / len(batches)) for each in batches]
        _clip(model)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    return step


def _backward(loss: Tensor) -> Tensor:
    """Let go of a batch's activations before the next: the plain model has those of all ranks."""
    loss.backward()
    return loss.detach()


def _loss(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    return next_token_loss(model, *next(batches))


def _clip(model: Any) -> None:
    if hasattr(model, "clip_grad_norm_"):
        model.clip_grad_norm_(1.0)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
