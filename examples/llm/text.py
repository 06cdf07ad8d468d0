"""Text for a language model: tokens, and the windows that each rank reads.

Words: a *window* is as many tokens as the model sees. What is *held out* is never trained on.
Always true: what a step reads depends on the seed and the step alone, so a resumed run reads what
the interrupted one would have read, on any number of ranks with the same windows in all.
Needs no torch_xla.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from place import Place

BYTES = 256
HELD_OUT = 20
"""One token of so many, at the end of the text, is held out."""


class Bytes:
    """A tokenizer to which each byte is a token."""

    def encode(self, text: str, **_: Any) -> list[int]:
        """The bytes of a text in UTF-8."""
        return list(text.encode())

    def decode(self, tokens: list[int], **_: Any) -> str:
        """The text; a sign stands for what is none."""
        return bytes(tokens).decode(errors="replace")

    def save_pretrained(self, folder: str) -> None:
        """Nothing to keep."""


def tokenizer_of(folder: Path | None) -> Any:
    """The tokenizer that lies beside a model, else ``Bytes``."""
    if folder is None or not (folder / "tokenizer_config.json").exists():
        return Bytes()
    from transformers import AutoTokenizer  # takes seconds to import

    return AutoTokenizer.from_pretrained(folder)


@dataclass(frozen=True)
class Text:
    """Tokens, int64 [N] each, to train on and held out."""

    trained: Tensor
    held_out: Tensor


def read_text(path: Path | None, tokenizer: Any, length: int) -> Text:
    """The tokens of a file, or of Python's own reference, which comes with Python; raises
    ValueError if a part has no window of ``length`` and the token after it."""
    if path is None:
        topics = pydoc_data.topics.topics
        content = "\n".join(topics[name] for name in sorted(topics))
    else:
        content = path.read_bytes().decode(errors="replace")
    tokens = torch.tensor(tokenizer.encode(content, add_special_tokens=False))
    held_out = len(tokens) // HELD_OUT
    if held_out <= length:
        raise ValueError(
            f"the text has {len(tokens)} tokens, {held_out} of them held out, a window {length}: "
            f"use less, or a longer text"
        )
    return Text(tokens[:-held_out], tokens[-held_out:])


def windows(
    tokens: Tensor, place: Place, length: int, batch_size: int, seed: int, done: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """The rank's tokens and next tokens, int64 [batch_size, length], from anywhere in ``tokens``,
    one batch for each step after the ``done`` ones, without end."""
    offsets = torch.arange(length + 1)
    for step in count(done):
        own = torch.Generator().manual_seed(seed * 1_000_000_007 + step)
        wanted = (place.world_size, batch_size, 1)
        starts = torch.randint(len(tokens) - length, wanted, generator=own)[place.rank]
        chosen = tokens[starts + offsets]
        yield chosen[:, :-1].to(place.device), chosen[:, 1:].to(place.device)
