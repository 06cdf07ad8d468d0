"""The gradient of an embedding's table: sums of rows in float32.

PyTorch/XLA adds the gradients of equal numbers in the dtype of the table. In bfloat16 a sum stops
growing at some 256 times what is added to it: so would the two rows of BERT's token types, to which
every token of a batch adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xla_fsdp.distributed.higher_order import in_transform
from xla_fsdp.distributed.shard_layout import LANES
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup
from xla_fsdp.nn.forward_weight import compute_by

SMALL_BYTES = 2**24
"""Size of the largest 16-bit table whose gradient is summed in float32. For a vocabulary that would
take memory for two more tables; ``StreamedEmbedding`` sums in float32 and holds no table."""


def sum_small_in_float32(group: FSDPParamGroup) -> None:
    """Let ``F.embedding`` sum the gradients of small 16-bit tables in float32, among the unsharded
    parameters that the modules of a unit hold."""
    for original, tensor in zip(group.originals, group.unsharded, strict=True):
        if tensor.dtype.itemsize == 2 and tensor.dim() == 2 and 0 < tensor.nbytes <= SMALL_BYTES:
            is_table = any(isinstance(owner.module, nn.Embedding) for owner in original.owners)
            # Leaves belong to the user, as in ``summon_full_params``.
            if is_table and type(tensor) is Tensor and tensor.requires_grad:
                compute_by(tensor, F.embedding, embedding_by(_Embedding.apply))


def sum_rows(num_rows: int, rows: Tensor, is_counted: Tensor, grad: Tensor) -> Tensor:
    """Sum gradients by row, in float32 or a wider dtype.

    Args:
        num_rows: rows of the table.
        rows: [n] integers, the row of each gradient.
        is_counted: [n] bool, whether a gradient is added.
        grad: [n, width].

    Returns:
        The gradient of the table, [num_rows, width]: float64 from float64, else float32.
    """
    dtype = torch.promote_types(grad.dtype, torch.float32)
    share = torch.where(is_counted[:, None], grad.to(dtype), 0.0)
    width = grad.shape[-1]
    # A row that is whole tiles takes a fifth of the code that the TPU needs for one in each tile.
    shape = (width // LANES, LANES) if width % LANES == 0 else (width,)
    start = torch.zeros(num_rows, *shape, dtype=dtype, device=grad.device)
    return start.index_add(0, rows, share.reshape(-1, *shape)).reshape(num_rows, width)


LookUp = Callable[[Tensor, Tensor, int | None, bool], Tensor | None]
"""Maps input, weight, ``padding_idx`` and ``scale_grad_by_freq`` to the rows, or to None where it
does not look up such ones."""


def embedding_by(look_up: LookUp) -> Callable[..., Tensor]:
    """Return ``F.embedding``, by ``look_up`` where that can have a gradient as torch's has."""

    def embedding(
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        found = None
        if max_norm is None and not sparse and not in_transform() and torch.is_grad_enabled():
            found = look_up(input, weight, padding_idx, scale_grad_by_freq)
        if found is not None:
            return found
        others = max_norm, norm_type, scale_grad_by_freq, sparse
        return F.embedding(input, weight, padding_idx, *others)

    return embedding


class _Embedding(torch.autograd.Function):
    """Map (input, weight) to ``F.embedding(input, weight, padding_idx)``, whose gradients are
    divided by how often their row was looked up, if ``by_frequency``. Backward is made of
    operations that have gradients themselves."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, padding_idx: int | None, by_frequency: bool
    ) -> Tensor:
        ctx.save_for_backward(input)
        ctx.num_rows, ctx.dtype = len(weight), weight.dtype
        ctx.padding_idx, ctx.by_frequency = padding_idx, by_frequency
        return F.embedding(input, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        [input] = ctx.saved_tensors
        rows = input.reshape(-1)
        padding = ctx.padding_idx
        skipped = -1 if padding is None else padding % ctx.num_rows
        is_counted = rows != skipped
        summed = sum_rows(ctx.num_rows, rows, is_counted, grad.reshape(-1, grad.shape[-1]))
        if ctx.by_frequency:
            ones = torch.ones(len(rows), 1, device=rows.device)
            summed = summed / sum_rows(ctx.num_rows, rows, is_counted, ones).clamp(min=1)
        return None, summed.to(ctx.dtype), None, None
