"""The three autograd nodes that a forward call of a unit adds to the graph.

``Enter`` takes the inputs, ``Unshard`` turns shard parameters into full ones, ``Exit`` takes the
outputs. Backward meets them in reverse: ``Exit`` gathers the parameters again, ``Unshard``
reduce-scatters their gradients, ``Enter`` hands the input gradients on.
Always true: autograd itself decides when a unit's gradients are complete, and accumulates the
shards. What happens at each node is ``unit``'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xla_fsdp import xla_ops
from xla_fsdp.graph_nodes import mark_constants

if TYPE_CHECKING:
    from xla_fsdp.unit import Unit


class Call:
    """What the three graph nodes of one forward call share."""

    def __init__(self, unit: Unit, recomputed: bool) -> None:
        self.unit = unit
        self.recomputed = recomputed
        self.shards: list[Tensor] = []  # tied to the inputs
        self.versions = unit.group.versions
        self._taking_part: set[type] = set()
        self._waiting: set[type] = set()

    def take_shards(self) -> list[Tensor]:
        """The tied shards. The graph holds this object: kept here, they would live as long."""
        shards, self.shards = self.shards, []
        return shards

    def expect(self, node: type) -> None:
        """``node`` takes part in this call's backward."""
        self._taking_part.add(node)

    def restart(self) -> None:
        """A backward begins; with ``retain_graph`` there may be several."""
        self._waiting = set(self._taking_part)

    def done(self, node: type) -> None:
        """``node`` has run backward; after the last one the unit's parameters can go."""
        self._waiting.discard(node)
        if not self._waiting:
            self.unit.finish_backward(self)


class Enter(torch.autograd.Function):
    """Inputs tied to the shards; backward hands their gradients on."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ready, call.shards = call.unit.tie(inputs, recomputed=call.recomputed)
        mark_constants(ctx, ready, ctx.needs_input_grad[1:])
        if any(ctx.needs_input_grad):
            call.expect(Enter)
        return tuple(ready)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        result = ctx.call.unit.leave_inputs(grads)
        ctx.call.done(Enter)
        return (None, *result)


class Unshard(torch.autograd.Function):
    """All-gather shards into full parameters; backward reduce-scatters their gradients.

    ``shards`` are the values to gather (the parameters' own, behind a barrier), or None to copy
    what the unit has gathered already.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, shards: Sequence[Tensor] | None, *params: Tensor
    ) -> tuple[Tensor, ...]:
        unit = call.unit
        ctx.call = call
        if shards is None:
            full = [tensor.clone() for tensor in unit.full]
        else:
            full = unit.group.gather(shards)
        needs = [
            need
            for param, need in zip(unit.group.params, ctx.needs_input_grad[2:], strict=True)
            for _ in param.members
        ]
        mark_constants(ctx, full, needs)
        if any(needs):
            call.expect(Unshard)
        return tuple(full)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        result = ctx.call.unit.reduce(grads)
        ctx.call.done(Unshard)
        return (None, None, *result)


class Exit(torch.autograd.Function):
    """Outputs behind a barrier; backward gathers the parameters again.

    The first ``num_kept`` tensors are full parameters that live until backward. They are saved the
    way autograd saves tensors, which frees them when the backward is over; as attributes they would
    live as long as the loss that the user still holds.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, num_kept: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.num_kept = call, num_kept
        ctx.save_for_backward(*tensors[:num_kept])
        outputs = tensors[num_kept:]
        if call.unit.config.optimization_barrier_in_forward:
            ready = xla_ops.barrier(outputs)
        else:
            ready = [output.clone() for output in outputs]
        mark_constants(ctx, ready, ctx.needs_input_grad[2 + num_kept :])
        return tuple(ready)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        result = ctx.call.unit.start_backward(ctx.call, ctx.saved_tensors, grads)
        return (None, None, *[None] * ctx.num_kept, *result)
