"""Modules that never hold their whole weight: the catalogue of what others use."""

from __future__ import annotations

from xla_fsdp.fsdp.chunked.embedding import StreamedEmbedding
from xla_fsdp.fsdp.chunked.head import LinearCrossEntropy

__all__ = ["LinearCrossEntropy", "StreamedEmbedding"]
