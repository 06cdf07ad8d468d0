"""A step that takes a recipe, for searches that ask the TPU compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from test.common.tpu_steps import LENGTH, VOCABULARY, Transformer
from xla_fsdp import Recipe, parallelize


def build_step(
    recipe: Recipe | str, batch: int = 1, depth: int = 16, length: int = LENGTH
) -> Callable[[], None]:
    """A step of a small transformer."""
    import torch_xla

    with torch.device("meta"):
        model = Transformer(depth)

    def optimizer_of(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-3)

    done = parallelize(model, optimizer_of, recipe, param_init_fn=lambda module: None)
    sharded, optimizer, _ = done
    tokens = torch.zeros(batch, length, dtype=torch.long, device=torch_xla.device())

    def step() -> None:
        logits = sharded(tokens).view(-1, VOCABULARY)
        F.cross_entropy(logits, tokens.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()

    return step
