"""``StreamedEmbedding``: an embedding of which no rank ever holds the whole table.

Always true: parameters, their names and state dicts are those of ``nn.Embedding``, and so is what
it computes. How rows are looked up is replaced (``instead``) where an FSDP unit runs it (see
``embedding_runner``); what is here knows nothing of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp.fsdp.chunked.hooks import compute_of


class StreamedEmbedding(nn.Embedding):
    """An ``nn.Embedding`` that, as a unit of its own under FSDP, never holds its whole table.

    Where that sends less than the table, and the rows of all ranks take up to 64 MiB, every rank
    looks up what all ranks ask for in its own shard, and rows are sent, and their gradients; all
    ranks have to ask for as many then. Else a loop gathers a piece of all shards at a time and
    takes from it what the input asks for; backward makes the gradient of a piece at a time and
    reduces it to the shards at once, so that as much is sent as for a table that is gathered whole.
    Gradients that ``no_sync`` keeps, and those that go through a user's hook, are whole. Without
    FSDP, and as a part of a larger unit, it is an ``nn.Embedding``.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: width of a row.
        pieces: in how many to gather the table, at most; None for pieces of up to 16 MiB, or for
            sending rows where that is less. A table that is one piece is gathered whole, like any
            unit.
        options: those of ``nn.Embedding``. With ``max_norm``, ``scale_grad_by_freq`` or ``sparse``
            the table is gathered whole, with a warning; units refuse to run the first, which
            changes the table, and XLA to train the last.

    Raises:
        ValueError: if ``pieces`` is not a number from 1, or None.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, pieces: int | None = None, **options: Any
    ) -> None:
        if pieces is not None and (not isinstance(pieces, int) or pieces < 1):
            raise ValueError(
                f"StreamedEmbedding: pieces is {pieces!r}; expected a number from 1, or None"
            )
        super().__init__(num_embeddings, embedding_dim, **options)
        self.pieces = pieces

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, *, pieces: int | None = None
    ) -> StreamedEmbedding:
        """One with the very parameter of ``embedding``, to put in its place in a model, before
        anything is wrapped. Ties to other modules stay.

        Args:
            embedding: the layer; of transformers' models, ``model.get_input_embeddings()``.
            pieces: see the class.

        Raises:
            TypeError: if it is no ``nn.Embedding``, or one with a forward of its own (as those of
                transformers that scale their rows), which would be lost.
            ValueError: if its table is sharded already, or for ``pieces`` out of range.
        """
        if not isinstance(embedding, nn.Embedding):
            raise TypeError(
                f"from_embedding takes an nn.Embedding, got {type(embedding).__name__}; make it "
                f"before the model is wrapped"
            )
        if type(embedding).forward not in (nn.Embedding.forward, StreamedEmbedding.forward):
            raise TypeError(
                f"{type(embedding).__name__} has a forward of its own, which a StreamedEmbedding "
                f"would not run; keep it as it is"
            )
        sizes = (embedding.num_embeddings, embedding.embedding_dim)
        if embedding.weight.shape != sizes:
            raise ValueError(
                f"the embedding's table has shape {tuple(embedding.weight.shape)}, not {sizes}: it "
                f"is sharded. Make the streamed one of the plain model's, then shard that"
            )
        made = cls(
            *sizes,
            pieces=pieces,
            padding_idx=embedding.padding_idx,
            max_norm=embedding.max_norm,
            norm_type=embedding.norm_type,
            scale_grad_by_freq=embedding.scale_grad_by_freq,
            sparse=embedding.sparse,
            device="meta",
            dtype=embedding.weight.dtype,
        )
        made.weight = embedding.weight
        return made.train(embedding.training)

    def forward(self, input: Tensor) -> Tensor:
        """The rows of ``input``.

        Args:
            input: row numbers, [...], int32 or int64. Where the table is never whole, a number that
                is no row's gives NaN.

        Returns:
            [..., embedding_dim].

        Raises:
            TypeError: if they are no such integers.
        """
        if input.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"the input of {type(self).__name__} is {input.dtype}; give row numbers, as int32 "
                f"or int64"
            )
        return compute_of(self, super().forward)(input)

    def extra_repr(self) -> str:
        """The layer's, and in how many pieces."""
        return f"{super().extra_repr()}, pieces={self.pieces}"
