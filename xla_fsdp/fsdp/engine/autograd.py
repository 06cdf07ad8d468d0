"""What the autograd nodes of this package have in common.

Words: a *node* is an ``autograd.Function`` that takes tensors and returns as many. Always true:
only tensors on an XLA device go through a node; others pass by untouched, as there is nothing to
order or recompute for them.

The autograd nodes that a forward call of a unit adds to the graph.

``Enter`` takes the inputs, ``Unshard`` turns shard parameters into full ones, ``Exit`` takes the
outputs. Backward meets them in reverse: ``Exit`` gathers the parameters again, ``Unshard``
reduce-scatters their gradients, ``Enter`` hands the input gradients on. ``Arrive`` stands between
``Unshard`` and the forward of a root.
Always true: autograd itself decides when a unit's gradients are complete, and accumulates the
shards. What happens at each node is ``unit_backward``'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xla_fsdp.distributed.pytree import replace_tensors, tensors_in
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.reduce_scatter import ReducedBuckets

if TYPE_CHECKING:
    from xla_fsdp.fsdp.engine.state import UnitBackward


def through(node: Callable[..., tuple[Tensor, ...]], tree: Any) -> Any:
    """``tree`` with its device tensors replaced by ``node(*device_tensors)``."""
    given = tensors_in(tree)
    moved = iter(node(*filter(on_device, given)))
    return replace_tensors(tree, [next(moved) if on_device(t) else t for t in given])


def on_device(tensor: Tensor) -> bool:
    """Whether ``tensor`` is lazy, on an XLA device."""
    return tensor.device.type == "xla"


def mark_constants(ctx: Any, outputs: Sequence[Tensor], needs_grad: Sequence[bool]) -> None:
    """Declare outputs whose inputs need no gradient to need none either; one input that needs a
    gradient would otherwise make every output of the node need one."""
    constants = [out for out, needed in zip(outputs, needs_grad, strict=True) if not needed]
    ctx.mark_non_differentiable(*constants)
    ctx.set_materialize_grads(False)


def present(items: Sequence[Tensor | None]) -> list[Tensor]:
    """The items that are there."""
    return [item for item in items if item is not None]


class ForwardCall:
    """What the three graph nodes of one forward call share."""

    def __init__(self, unit: UnitBackward, recomputed: bool) -> None:
        self.unit = unit
        self.recomputed = recomputed
        self.before: list[Tensor] = []  # what the gather waits for
        self.early: ReducedBuckets = {}  # what was reduced before the rest
        self.versions = unit.group.versions
        self.reshards = unit.settings.reshards_after_forward
        self._num_nodes = 0  # that take part in backward
        self._waiting: set[int] = set()
        self._restarted_in = -1

    def take_before(self) -> list[Tensor]:
        """What the gather waits for. The graph holds this object: kept here, it would live as
        long."""
        before, self.before = self.before, []
        return before

    def take_early(self) -> ReducedBuckets:
        """What was reduced early in this backward pass."""
        early, self.early = self.early, {}
        return early

    def expect(self) -> int:
        """One more node takes part in this call's backward; returns its number."""
        self._num_nodes += 1
        return self._num_nodes

    def restart(self, number: int) -> None:
        """The backward pass of this number begins, or goes on from another output; with
        ``retain_graph`` there may be several passes."""
        if number != self._restarted_in:
            self._restarted_in = number
            self._waiting = set(range(1, self._num_nodes + 1))

    def done(self, node: int) -> None:
        """This node has run backward; after the last one the unit's parameters can go."""
        self._waiting.discard(node)
        if not self._waiting:
            self.unit.finish(self)


class Enter(torch.autograd.Function):
    """Inputs behind a barrier; backward hands their gradients on."""

    @staticmethod
    def forward(ctx: Any, call: ForwardCall, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ready, call.before = call.unit.tie(inputs, recomputed=call.recomputed)
        mark_constants(ctx, ready, ctx.needs_input_grad[1:])
        if any(ctx.needs_input_grad):
            ctx.number = call.expect()
        return tuple(ready)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        result = ctx.call.unit.leave_inputs(grads)
        ctx.call.done(ctx.number)
        return (None, *result)


class Unshard(torch.autograd.Function):
    """All-gather shards into full parameters; backward reduce-scatters their gradients.

    ``gathered`` returns the full parameters, of tensors that autograd knows nothing of.
    """

    @staticmethod
    def forward(
        ctx: Any, call: ForwardCall, gathered: Callable[[], list[Tensor]], *params: Tensor
    ) -> tuple[Tensor, ...]:
        unit = call.unit
        ctx.call = call
        full = gathered()
        needs = [
            need
            for param, need in zip(unit.group.params, ctx.needs_input_grad[2:], strict=True)
            for _ in param.members
        ]
        mark_constants(ctx, full, needs)
        if any(needs):
            ctx.number = call.expect()
        return tuple(full)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        result = ctx.call.unit.reduce(grads, ctx.call.take_early())
        ctx.call.done(ctx.number)
        return (None, None, *result)


def unshard(call: ForwardCall, gathered: Callable[[], list[Tensor]]) -> list[Tensor]:
    """The full parameters that ``gathered`` returns, connected to the shards."""
    shards = call.unit.group.shards
    return list(Unshard.apply(call, gathered, *shards)) if shards else []


class Arrive(torch.autograd.Function):
    """A full parameter; backward reduces its gradient at once, if it travels alone.

    A root's ``Unshard`` has all gradients when the last one is there, which is after the units
    inside it. Until then the head's would wait, or what it is computed from: the logits.
    """

    @staticmethod
    def forward(ctx: Any, call: ForwardCall, number: int, full: Tensor) -> Tensor:
        ctx.call, ctx.number = call, number
        ctx.set_materialize_grads(False)
        return full.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, Tensor | None]:
        if grad is not None:
            grad = ctx.call.unit.reduce_early(ctx.call, ctx.number, grad)
        return None, None, grad


def arrive(call: ForwardCall, number: int, full: Tensor) -> Tensor:
    """``full``, member ``number``, behind an ``Arrive`` that runs when its gradient is complete."""
    if not full.requires_grad:
        return full
    arrived = Arrive.apply(call, number, full)
    node: Any = arrived.grad_fn
    node._set_sequence_nr(AT_ONCE)
    return cast(Tensor, arrived)


AT_ONCE = 2**64 - 1

"""Sequence number of a node that comes before any others that are ready, as autograd's own nodes of
leaves do; else those of the latest forward operations come first."""


class Exit(torch.autograd.Function):
    """Outputs behind a barrier; backward gathers the parameters again.

    The first ``num_kept`` tensors are what the unit keeps of its parameters until backward. They
    are saved the way autograd saves tensors, which frees them when the backward is over; as
    attributes they would live as long as the loss that the user still holds.
    """

    @staticmethod
    def forward(ctx: Any, call: ForwardCall, num_kept: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.num_kept = call, num_kept
        ctx.save_for_backward(*tensors[:num_kept])
        outputs = tensors[num_kept:]
        if call.unit.config.optimization_barrier_in_forward:
            ready = ops.barrier(outputs)
        else:
            ready = [output.clone() for output in outputs]
        mark_constants(ctx, ready, ctx.needs_input_grad[2 + num_kept :])
        return tuple(ready)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        result = ctx.call.unit.start(ctx.call, ctx.saved_tensors, grads)
        return (None, None, *[None] * ctx.num_kept, *result)
