"""Small transformers jobs: a Llama, its data, a Trainer that sees the data in order, and the same
training in plain torch.

Imports transformers, so only files that skip without it may import this one. Every job has a total
batch of ``BATCH`` sequences per optimizer step, on any number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

VOCABULARY = 61
LENGTH = 8
BATCH = 8
STEPS = 4
RATE = 1e-2
MAX_NORM = 0.5  # less than the norms of this model, so every step is clipped
LAYER = "LlamaDecoderLayer"


class Sentences(torch.utils.data.Dataset):
    """Random tokens, the same for everyone. The first label is ignored, as no token predicts it."""

    def __init__(self, count: int = BATCH * STEPS) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator)
        self.labels = self.ids.clone()
        self.labels[:, 0] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class InOrder(transformers.Seq2SeqTrainer):
    """A Trainer that does not shuffle."""

    def _get_train_sampler(self, *_: Any) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def build_llama(**changes: Any) -> Any:
    """Two layers, with a head tied to the embedding unless told otherwise."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changes}))


def arguments(
    directory: str | Path,
    num_ranks: int,
    *,
    accumulate: int = 1,
    settings: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """``TrainingArguments`` of a sharded job."""
    fsdp_config = {"xla": True, "xla_fsdp_settings": settings or {}, **(config or {})}
    own = {
        "output_dir": str(directory),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH // num_ranks // accumulate,
        "per_device_eval_batch_size": BATCH // num_ranks,
        "gradient_accumulation_steps": accumulate,
        "learning_rate": RATE,
        "max_grad_norm": MAX_NORM,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "fsdp": "full_shard" if transformers.__version__ < "5" else True,
        "fsdp_config": fsdp_config,
    }
    return transformers.Seq2SeqTrainingArguments(**{**own, **changes})


def logged(trainer: Any, key: str) -> list[float]:
    """What the Trainer logged under ``key``, step by step."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def train_plain(model: Any) -> tuple[list[float], list[float]]:
    """The same training of all parameters in plain torch; returns losses and norms."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    data, losses, norms = Sentences(), [], []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)  # the Trainer's schedule
        rows = slice(step * BATCH, (step + 1) * BATCH)
        loss = plain_loss(model, data.ids[rows])
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def plain_loss(model: Any, ids: Tensor) -> Tensor:
    """The mean loss of the tokens that can be predicted."""
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits.float(), ids[:, 1:].flatten())
