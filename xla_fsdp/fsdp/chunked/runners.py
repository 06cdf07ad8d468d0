"""What runs a module that streams its weight, if it is a unit of its own."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import nn

from xla_fsdp.fsdp.chunked import embedding_runner, head_runner
from xla_fsdp.fsdp.chunked.embedding import StreamedEmbedding
from xla_fsdp.fsdp.chunked.embedding_runner import EmbeddingRunner
from xla_fsdp.fsdp.chunked.head import LinearCrossEntropy
from xla_fsdp.fsdp.chunked.head_runner import HeadRunner
from xla_fsdp.fsdp.chunked.weights import why_whole
from xla_fsdp.fsdp.engine.state import FSDPState


@dataclass(frozen=True)
class _Kind:
    """How a module would stream.

    Args:
        runner: what would run it.
        why_not: what keeps the module from it; empty if nothing does.
        whole: what is held otherwise.
        keeping: what ``reshard_after_forward=False`` does.
    """

    runner: HeadRunner | EmbeddingRunner
    why_not: str
    whole: str
    keeping: str


def runner_for(unit: FSDPState, module: nn.Module) -> HeadRunner | EmbeddingRunner | None:
    """What runs ``module``, the one host of ``unit``; None if that runs as any other."""
    kind = _kind_of(module)
    if kind is None:
        return None
    name = type(module).__name__
    if why := kind.why_not or why_whole(unit.group):
        warnings.warn(
            f"{name} will hold {kind.whole}: {why}. With pieces=1 that is what it is meant to do",
            stacklevel=5,
        )
        return None
    if unit.settings.keeps_larger:
        warnings.warn(
            f"{name} gathers a piece of its weight at a time, from all ranks: a number for "
            f"reshard_after_forward is ignored; False {kind.keeping}",
            stacklevel=5,
        )
    return kind.runner


def _kind_of(module: nn.Module) -> _Kind | None:
    """None for a module that does not stream."""
    if isinstance(module, LinearCrossEntropy) and module.pieces != 1:
        return _Kind(
            HeadRunner(),
            head_runner.why_not(module),
            "its whole weight, and all logits",
            "keeps the pieces for backward",
        )
    if isinstance(module, StreamedEmbedding) and module.pieces != 1:
        return _Kind(
            EmbeddingRunner(),
            embedding_runner.why_not(module),
            "its whole table",
            "is, too, as backward needs no table",
        )
    return None
