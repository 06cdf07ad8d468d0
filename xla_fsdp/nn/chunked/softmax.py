"""Cross-entropy of logits that are computed chunk by chunk, and its gradient.

A row is a position that has a target; of its logits only a few sums are stored.

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

from xla_fsdp.nn.chunked.chunks import NO_CLASS


@dataclass(frozen=True)
class OnlineCrossEntropy:
    """The cross-entropy with these targets."""

    targets: Tensor  # class of each row, [rows] int32
    num_classes: int  # in all chunks together
    smoothing: float  # label smoothing, from 0 to 1

    @property
    def num_sums(self) -> int:
        """Number of sums per row."""
        return 4 if self.smoothing else 3

    def no_sums(self) -> list[Tensor]:
        """Return the sums before the first chunk, [rows] float32 each."""
        start = self.targets.new_zeros(len(self.targets), dtype=torch.float32)
        # Not -inf: after a chunk of padding alone, whose maximum is -inf, sums would be NaN.
        lowest = torch.finfo(torch.float32).min
        return [start + lowest, *(start.clone() for _ in range(self.num_sums - 1))]

    def sums(self, so_far: Sequence[Tensor], logits: Tensor, classes: Tensor) -> list[Tensor]:
        """Add a chunk of logits, [rows, classes] float32, to the sums, [rows] each: the maximum
        logit, the sum of exponentials relative to that, the target's logit, and with smoothing the
        sum of logits. ``classes`` are int32, ``NO_CLASS`` for padding."""
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
        """Return the loss of each row, and its norm, the logarithm of the sum of exponentials, both
        [rows] float32, from the sums of all chunks."""
        top, total, of_target, *of_all = sums
        norm = top + total.log()
        losses = norm - of_target
        if self.smoothing:
            spread = norm - of_all[0] / self.num_classes
            losses = (1 - self.smoothing) * losses + self.smoothing * spread
        return losses, norm

    def gradient(self, logits: Tensor, classes: Tensor, norm: Tensor, share: Tensor) -> Tensor:
        """Return the gradient with respect to a chunk's logits, [rows, classes] float32, where
        ``share`` [rows] is the gradient of the losses."""
        hit = self._is_target(classes).to(torch.float32) * (1 - self.smoothing)
        wanted = hit + self.smoothing / self.num_classes if self.smoothing else hit
        found = share[:, None] * ((logits - norm[:, None]).exp() - wanted)
        return found.masked_fill((classes == NO_CLASS)[None, :], 0.0)

    def _is_target(self, classes: Tensor) -> Tensor:
        # A comparison instead of a gather: XLA fuses it with its consumers.
        return classes[None, :] == self.targets[:, None]


def logits_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return float32 logits of ``x`` [rows, width], with a product in the dtype of ``weight``."""
    return F.linear(x, weight, bias).float()
