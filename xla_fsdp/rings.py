"""A reduce-scatter made of sends around a ring, which the TPU compiler hides under compute.

Words: a *ring* is a replica group whose ranks each send to the next one, the last to the first; a
*chunk* is what one rank is to end up with; its *partial sum* travels the ring and grows at each
rank.
Always true: every rank has the same program, as its place is a value and not a constant; as many
bytes are sent as by a reduce-scatter. Sums are rounded to the operand's dtype at every rank.
Why: the TPU compiler leaves every reduce-scatter blocking, but starts a collective-permute early
and ends it late. The same rings hide reductions in JAX's windowed products (S. Wang et al., Overlap
Communication with Dependent Computation via Decomposition, ASPLOS 2023).
Which operands are reduced so is decided by ``collectives``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xla_fsdp import xla_ops
from xla_fsdp.torus import Groups


class Rings:
    """Rings over replica groups of one size.

    Args:
        groups: the ranks of each ring, in order; every rank of the job is in one.
        place: the caller's place in its ring.
    """

    def __init__(self, groups: Groups, place: int) -> None:
        self.size = len(groups[0])
        self._sends = [
            (rank, ring[(at + 1) % self.size]) for ring in groups for at, rank in enumerate(ring)
        ]
        # Of the chunk of which a partial sum is sent at each step; the own one comes last.
        chunks = [(place - 1 - step) % self.size for step in range(self.size)]
        self._chunks = xla_ops.upload(torch.tensor(chunks, dtype=torch.int32))

    def reduce_scatter(self, stack: Tensor) -> Tensor:
        """Stack [size, rows, width] to this rank's chunk [rows, width] of the sum over the ring."""
        partial_sum = self._chunk(stack, 0)
        for step in range(1, self.size):
            received = xla_ops.collective_permute(partial_sum, self._sends)
            partial_sum = received + self._chunk(stack, step)
        return partial_sum[0]

    def _chunk(self, stack: Tensor, step: int) -> Tensor:
        return stack.index_select(0, self._chunks[step : step + 1])
