"""Cross-entropy of logits that come chunk by chunk: what a chunk adds, and its gradient.

A few numbers per row are kept of the logits. Rows are the positions that have a target.

Sources: Milakov and Gimelshein, Online normalizer calculation for softmax (arXiv 1805.02867);
Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models (arXiv 2411.09009), and Hsu et
al., Liger Kernel (arXiv 2410.10989), for the head's product and the loss chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xla_fsdp.fsdp.chunked.chunks import NO_CLASS


@dataclass(frozen=True)
class OnlineCrossEntropy:
    """The cross-entropy with some targets."""

    targets: Tensor  # a class for every row, [rows] int32
    num_classes: int  # of all chunks
    smoothing: float  # what part of the target is spread over all classes

    @property
    def num_sums(self) -> int:
        """How many numbers per row are kept."""
        return 4 if self.smoothing else 3

    def no_sums(self) -> list[Tensor]:
        """Return the sums of no classes at all."""
        start = self.targets.new_zeros(len(self.targets), dtype=torch.float32)
        # Not minus infinity, with which a chunk of nothing but padding would make it NaN.
        lowest = torch.finfo(torch.float32).min
        return [start + lowest, *(start.clone() for _ in range(self.num_sums - 1))]

    def sums(self, so_far: Sequence[Tensor], logits: Tensor, classes: Tensor) -> list[Tensor]:
        """Add a chunk to the sums, [rows] each: the greatest logit, the sum of exponentials
        relative to that, the target's logit, and with smoothing the sum of logits.

        Args:
            so_far: those of earlier chunks.
            logits: of this chunk, [rows, classes] float32.
            classes: of this chunk, [classes] int32, ``NO_CLASS`` for padding.
        """
        top, total, of_target, *of_all = so_far
        known = logits.masked_fill((classes == NO_CLASS)[None, :], float("-inf"))
        new_top = torch.maximum(top, known.amax(1))
        exponentials = (known - new_top[:, None]).exp()
        found = [
            new_top,
            total * (top - new_top).exp() + exponentials.sum(1),
            of_target + logits.masked_fill(~self._is_target(classes), 0.0).sum(1),
        ]
        if self.smoothing:
            is_padding = (classes == NO_CLASS)[None, :]
            found.append(of_all[0] + logits.masked_fill(is_padding, 0.0).sum(1))
        return found

    def losses(self, sums: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss of every row, and its norm, the logarithm of the sum of exponentials,
        from the sums of all chunks."""
        top, total, of_target, *of_all = sums
        norm = top + total.log()
        losses = norm - of_target
        if self.smoothing:
            spread = norm - of_all[0] / self.num_classes
            losses = (1 - self.smoothing) * losses + self.smoothing * spread
        return losses, norm

    def gradient(self, logits: Tensor, classes: Tensor, norm: Tensor, share: Tensor) -> Tensor:
        """Return the gradient of the rows' losses, each times its ``share``, with respect to a
        chunk's logits."""
        hit = self._is_target(classes).to(torch.float32) * (1 - self.smoothing)
        wanted = hit + self.smoothing / self.num_classes if self.smoothing else hit
        found = share[:, None] * ((logits - norm[:, None]).exp() - wanted)
        return found.masked_fill((classes == NO_CLASS)[None, :], 0.0)

    def _is_target(self, classes: Tensor) -> Tensor:
        # Compared, not looked up: XLA fuses it with what is computed of it.
        return classes[None, :] == self.targets[:, None]


def logits_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the logits, float32, of rows [rows, width] and the weights of some classes; the
    product is computed in their dtype."""
    return F.linear(x, weight, bias).float()
