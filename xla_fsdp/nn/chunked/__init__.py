"""A head and an embedding that never hold their unsharded weight."""

from __future__ import annotations

from xla_fsdp.nn.chunked.embedding import StreamedEmbedding
from xla_fsdp.nn.chunked.head import LinearCrossEntropy

__all__ = ["LinearCrossEntropy", "StreamedEmbedding"]
