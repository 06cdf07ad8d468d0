"""Modules that never hold their whole weight: the catalogue of what others use."""

from xla_fsdp.streamed.embedding import StreamedEmbedding
from xla_fsdp.streamed.head import LinearCrossEntropy

__all__ = ["LinearCrossEntropy", "StreamedEmbedding"]
