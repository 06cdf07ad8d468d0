"""Cross-entropy of logits that come piece by piece: what a piece adds, and its gradient.

Words: *rows* are the positions that have a target; *logits* of a piece are [rows, classes] in
float32, with their *classes* (``pieces.NO_CLASS`` for padding). The *norm* of a row is the
logarithm of the sum of the exponentials of its logits.
Always true: what is kept of the logits are a few numbers per row. Targets are classes; who leaves
rows out does so afterwards.
Sources: Milakov and Gimelshein, Online normalizer calculation for softmax (arXiv 1805.02867);
Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models (arXiv 2411.09009), and Hsu et
al., Liger Kernel (arXiv 2410.10989), for the head's product and the loss piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xla_fsdp.fsdp.chunked.chunks import NO_CLASS


@dataclass(frozen=True)
class Goal:
    """What logits are compared with.

    Args:
        targets: a class for every row, [rows] int32.
        num_classes: of all pieces.
        smoothing: what part of the target is spread over all classes.
    """

    targets: Tensor
    num_classes: int
    smoothing: float

    @property
    def num_sums(self) -> int:
        """How many numbers per row are kept."""
        return 4 if self.smoothing else 3

    def no_sums(self) -> list[Tensor]:
        """Of no classes at all. The greatest logit so far is a number: with minus infinity, a piece
        of nothing but padding would make it NaN."""
        start = self.targets.new_zeros(len(self.targets), dtype=torch.float32)
        lowest = torch.finfo(torch.float32).min
        return [start + lowest, *(start.clone() for _ in range(self.num_sums - 1))]

    def sums(self, so_far: Sequence[Tensor], logits: Tensor, classes: Tensor) -> list[Tensor]:
        """Per row: the greatest logit, the sum of exponentials relative to that, the target's
        logit, and with smoothing the sum of logits.

        Args:
            so_far: the same of earlier pieces.
            logits: of this piece.
            classes: of this piece.
        """
        top, total, of_target, *of_all = so_far
        known = logits.masked_fill((classes == NO_CLASS)[None, :], float("-inf"))
        new_top = torch.maximum(top, known.amax(1))
        exponentials = (known - new_top[:, None]).exp()
        found = [
            new_top,
            total * (top - new_top).exp() + exponentials.sum(1),
            of_target + logits.masked_fill(~self._hits(classes), 0.0).sum(1),
        ]
        if self.smoothing:
            is_padding = (classes == NO_CLASS)[None, :]
            found.append(of_all[0] + logits.masked_fill(is_padding, 0.0).sum(1))
        return found

    def losses(self, sums: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Of every row, and the norms, from the sums of all pieces."""
        top, total, of_target, *of_all = sums
        norm = top + total.log()
        losses = norm - of_target
        if self.smoothing:
            spread = norm - of_all[0] / self.num_classes
            losses = (1 - self.smoothing) * losses + self.smoothing * spread
        return losses, norm

    def gradient(self, logits: Tensor, classes: Tensor, norm: Tensor, share: Tensor) -> Tensor:
        """Of the rows' losses, each times its ``share``, with respect to a piece's logits."""
        hit = self._hits(classes).to(torch.float32) * (1 - self.smoothing)
        wanted = hit + self.smoothing / self.num_classes if self.smoothing else hit
        found = share[:, None] * ((logits - norm[:, None]).exp() - wanted)
        return found.masked_fill((classes == NO_CLASS)[None, :], 0.0)

    def _hits(self, classes: Tensor) -> Tensor:
        # Compared, not looked up: it is fused with what is computed of it.
        return classes[None, :] == self.targets[:, None]


def logits_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of rows [rows, width] and the weights of some classes; computed in their dtype."""
    return F.linear(x, weight, bias).float()
