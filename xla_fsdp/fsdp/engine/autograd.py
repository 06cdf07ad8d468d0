"""The autograd nodes that one forward call of an FSDP unit adds to the graph, and what it saves.

    inputs ── PostBackward ── module's forward ── outputs
    shards ── Unshard ── (EarlyReduce, of a root) ──┘

Backward runs them in reverse. Before the nodes that have made the outputs ``gather_again`` gathers
the parameters; ``Unshard`` reduce-scatters their gradients, ``PostBackward`` returns those of the
inputs. The caller computes the tensors that a node returns in forward, and passes them to it.

Invariants: autograd decides when a unit's gradients are complete, and accumulates the gradients of
the shards. Only tensors on an XLA device go through a node; others need no ordering. What a node
returns in backward may be differentiated again (``create_graph=True``): backward is then a part of
the graph, in which autograd connects what ``SavedParams`` unpacks to the first graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from xla_fsdp.distributed.higher_order import Linear, linear
from xla_fsdp.fsdp.engine.inputs import changed_since, changes_of, num_changes, version_of
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup, Reshard
from xla_fsdp.fsdp.engine.schedule import Dummies
from xla_fsdp.fsdp.engine.thread import current_pass
from xla_fsdp.fsdp.engine.unit_collectives import ReducedBuckets
from xla_fsdp.xla import ops


class ForwardCall:
    """One forward of all modules of a unit: state shared by its autograd nodes.

    Args:
        unit: the ``FSDPState``, which runs the unit's part of backward.
        recomputed: whether the call recomputes a forward inside a backward pass.

    Attributes:
        reshards: whether the parameters are freed between forward and backward.
        versions: version of each shard at the time of the call.
        saved: the ``SavedParams`` of the forward, until the parameters are freed.
        for_backward: tensors to save for backward: larger shards, unsharded parameters, or none.
        running: numbers of the modules whose forward runs.
        done: numbers of the modules whose forward has returned.
    """

    def __init__(self, unit: Any, *, recomputed: bool = False) -> None:
        self.unit = unit
        self.recomputed = recomputed
        self.reshards: bool = unit.settings.reshards_after_forward
        self.versions: list[int] = unit.group.versions
        self.saved: Any = None
        self.for_backward: Sequence[Tensor] = ()
        self.running: set[int] = set()
        self.done: set[int] = set()
        # By number of the backward pass: one that raised leaves what it has reduced, which the next
        # must not add; inside of one a reentrant checkpoint runs another.
        self.reduced_early: dict[int, ReducedBuckets] = {}
        self.num_nodes = 0  # that take part in backward
        self._waiting = 0  # of them, those that this backward pass has not run yet
        self._restarted_in = -1

    def add_reduced_early(self, reduced: ReducedBuckets) -> None:
        """Keep gradients that were reduced before this pass runs the ``Unshard`` node."""
        if so_far := self.reduced_early.get(current_pass()):
            reduced = self.unit.group.reduction.add(so_far, reduced)
        self.reduced_early[current_pass()] = reduced

    def node_done(self) -> None:
        """Record that a node has run backward; after the last one, free the parameters."""
        if current_pass() != self._restarted_in:  # with ``retain_graph`` there are several
            self._restarted_in = current_pass()
            self._waiting = self.num_nodes
        self._waiting -= 1
        if not self._waiting:
            self.unit.post_backward(self)


def refuse_changed(seen: Sequence[int], now: Sequence[int]) -> None:
    """Raise RuntimeError if shards have other versions ``now`` than in the forward (``seen``)."""
    if list(seen) != list(now):
        raise RuntimeError(
            "parameters of an FSDP unit were changed between its forward and its backward (by "
            "optimizer.step() or load_state_dict, say). Backward gathers them again and would "
            "mix new parameters with old activations. Change them after backward."
        )


class PostBackward(torch.autograd.Function):
    """Identity of the inputs; backward frees the parameters once all nodes of the call have run.

    ``ready`` are the inputs behind a barrier.
    """

    @staticmethod
    def forward(
        ctx: Any, call: ForwardCall, ready: list[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        mark_constants(ctx, ready, ctx.needs_input_grad[2:])
        call.num_nodes += any(ctx.needs_input_grad)
        return tuple(ready)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        result = _mapped(ctx.call.unit.post_backward_inputs, grads)
        ctx.call.node_done()
        return (None, None, *result)


class Unshard(torch.autograd.Function):
    """Shards to unsharded parameters; backward reduce-scatters the gradients.

    ``unsharded`` are the gathered parameters, which have no graph.
    """

    @staticmethod
    def forward(
        ctx: Any, call: ForwardCall, unsharded: list[Tensor], *shards: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        needs = [
            need
            for param, need in zip(call.unit.group.params, ctx.needs_input_grad[2:], strict=True)
            for _ in param.originals
        ]
        mark_constants(ctx, unsharded, needs)
        call.num_nodes += any(needs)
        return tuple(unsharded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call, unit = ctx.call, ctx.call.unit
        if torch.is_grad_enabled():
            unit.refuse_unreduced()
        reduce = partial(unit.reduce_grads, early=call.reduced_early.pop(current_pass(), {}))
        # The shards of a gradient are parts of one mean over the ranks, so gradients with respect
        # to them are gathered as the shards themselves are, without another division.
        result = _mapped(reduce, grads, unit.group.mean, unit.group.unsharded_grads)
        call.node_done()
        return (None, None, *result)


def connect(call: ForwardCall, unsharded: list[Tensor]) -> list[Tensor]:
    """Return the gathered parameters, connected to the shards of the call's unit."""
    shards = [param.shard for param in call.unit.group.params]
    return list(Unshard.apply(call, unsharded, *shards)) if shards else []


class EarlyReduce(torch.autograd.Function):
    """Identity of an unsharded parameter; backward reduces its gradient at once, if the gradient
    has a bucket of its own.

    The ``Unshard`` node of a root runs after the backward of all units inside it. Until then the
    gradient of the head would take memory, or the logits that it is computed from.
    """

    @staticmethod
    def forward(ctx: Any, call: ForwardCall, number: int, unsharded: Tensor) -> Tensor:
        ctx.call, ctx.number = call, number
        ctx.set_materialize_grads(False)
        return unsharded.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, Tensor | None]:
        if grad is not None and not torch.is_grad_enabled():  # else ``Unshard`` makes its graph
            grad = ctx.call.unit.reduce_early(ctx.call, ctx.number, grad)
        return None, None, grad


AT_ONCE = 2**64 - 1
"""Sequence number of a node that runs before all others that are ready, as autograd's own nodes of
leaves do. By default the nodes of the latest forward operations run first."""


def reduce_early(call: ForwardCall, number: int, unsharded: Tensor) -> Tensor:
    """Return original parameter ``number`` as the output of an ``EarlyReduce`` node that runs as
    soon as the gradient is complete."""
    if not unsharded.requires_grad:
        return unsharded
    result = EarlyReduce.apply(call, number, unsharded)
    node: Any = result.grad_fn
    node._set_sequence_nr(AT_ONCE)
    return cast(Tensor, result)


def gather_again(
    call: ForwardCall, saved: list[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gather the parameters of a unit before backward goes on with gradients of its outputs. What
    was ``saved`` is emptied unless the graph is kept, as it would live as long as the user holds
    the loss."""
    held = list(saved)
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        saved.clear()
    return _mapped(partial(call.unit.pre_backward, call, held), grads)


def _mapped(
    compute: Linear, grads: Sequence[Tensor | None], again: Linear = list, adjoint: Linear = list
) -> list[Tensor | None]:
    """Return ``compute(grads)``; where backward is to have a graph, by ``linear``."""
    return linear(compute, grads, again, adjoint) if torch.is_grad_enabled() else compute(grads)


# ---------------------------------------------------------------- outputs

GradStep = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]
"""What happens to gradients before backward goes on with them."""


def before_backward(step: GradStep, outputs: Sequence[Tensor]) -> None:
    """Call ``step`` once in each backward pass, before the first of the nodes that have made the
    outputs of a forward.

    Outputs stay the tensors that the forward has made, as some may be computed from others, or
    share memory: what reads the gradient of one (a hook, ``retain_grad``) sees what comes through
    the others, and what the module keeps of one sees the changes that a caller makes in place.
    """
    once = _OncePerPass(step)
    for output in outputs:
        if not (on_device(output) and output.requires_grad):
            continue
        base = output if output._base is None else output._base
        if base.is_leaf or isinstance(base.grad_fn, _PARAM_NODES):
            continue  # a parameter, or a view of one: no node of the forward has made it
        if output._backward_hooks:
            once.before_hooks_of(output)
        # A change of a view in place gives it another node, but leaves that of its base.
        for node in (output.grad_fn, base.grad_fn):
            if node is not None:
                once.add_to(node)


_PARAM_NODES = (Unshard._backward_cls, EarlyReduce._backward_cls)


class _OncePerPass:
    """Calls ``step`` once in each backward pass, before the first of some nodes."""

    def __init__(self, step: GradStep) -> None:
        self._step = step
        self._begun_in = -1

    def add_to(self, node: Any) -> None:
        """Call before ``node``, and before the steps of what is inside and has the same output."""
        if _STEPS not in node.metadata:
            node.metadata[_STEPS] = []
            node.register_prehook(partial(_run_steps, node.metadata[_STEPS]))
        if self not in node.metadata[_STEPS]:
            node.metadata[_STEPS].insert(0, self)

    def before_hooks_of(self, tensor: Tensor) -> None:
        """Call before the hooks that the forward has put on ``tensor``, which may use parameters,
        and run before those of nodes."""
        hooks: Any = tensor._backward_hooks
        theirs = dict(hooks)
        tensor.register_hook(lambda grad: self.run((grad,))[0])
        ours = {key: hook for key, hook in hooks.items() if key not in theirs}
        hooks.clear()
        hooks.update({**ours, **theirs})

    def run(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradients that the node takes."""
        if current_pass() == self._begun_in:
            return grads
        self._begun_in = current_pass()
        return self._step(grads)


_STEPS = "xla_fsdp.before_backward"


def _run_steps(
    steps: list[_OncePerPass], grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    for each in steps:
        grads = tuple(each.run(grads))
    return grads


# ---------------------------------------------------------------- saved tensors


def _unchanged(tensor: Tensor, changes: Callable[[Tensor], int], num_changes: int) -> Tensor:
    """Return a tensor that was saved, unless it was changed in place since. Autograd looks for that
    only where no hooks are on what it saves."""
    if changes(tensor) != num_changes:
        raise changed_in_place(tensor)
    return tensor


def changed_in_place(tensor: Tensor) -> RuntimeError:
    """Return the error for a tensor that was changed between being saved and backward."""
    return RuntimeError(
        f"a tensor of shape {list(tensor.shape)} that backward needs was changed in place after "
        f"autograd had saved it. Compute another one (x = x + y in place of x += y), or save a "
        f"copy (layer(x.clone()))"
    )


class SavedParams:
    """Saved-tensor hooks of one forward, so that autograd saves no unsharded parameter.

    Autograd saves a function that returns what it needs: of a parameter, and of a view such as the
    transpose that ``F.linear`` saves, by its index among the parameters gathered again. Every other
    tensor goes through the hooks that were active outside (a checkpoint's, say).

    Args:
        unsharded: the parameters that this forward computes with.
        regathered: returns the parameters in backward, in the same order.
    """

    def __init__(
        self, unsharded: Sequence[Tensor], regathered: Callable[[], Sequence[Tensor]]
    ) -> None:
        self._unsharded = list(unsharded)
        self._versions = [version_of(tensor) for tensor in unsharded]
        self._changes = num_changes(unsharded)
        self._memory = list(map(ops.memory_of, unsharded))
        self._index = {id(tensor): index for index, tensor in enumerate(unsharded)}
        self._views: list[tuple[int, Tensor]] = []
        self._regathered = regathered
        self._outside = torch._C._autograd._top_saved_tensors_default_hooks(True)

    @property
    def unsharded(self) -> Sequence[Tensor]:
        """The parameters that the forward computes with, until ``reshard``."""
        return self._unsharded

    def own(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, or a copy if it shares memory with a parameter, which is freed."""
        is_shared = on_device(tensor) and ops.memory_of(tensor) in self._memory
        return tensor.clone() if is_shared else tensor

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context manager to run the forward in."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed())

    def no_other_saved_tensor_hooks(self, *, active: bool) -> bool:
        """Whether autograd saves tensors by these hooks alone now, or by none if they are not
        ``active``."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        innermost = top is not None and top[0] == self._pack if active else top is None
        return innermost and self._outside is None

    def changed_in_place(self) -> list[int]:
        """Return the indices of parameters that the forward modified, also through their ``data``,
        or by giving them other ``data``."""
        changed = set(changed_since(self._changes, self._unsharded))
        now = map(ops.memory_of, self._unsharded)
        pairs = enumerate(zip(self._memory, now, strict=True))
        return sorted(changed | {index for index, (old, new) in pairs if old != new})

    def reshard(
        self, group: FSDPParamGroup, versions: Sequence[int], dummies: Dummies | None
    ) -> None:
        """Turn the parameters of this forward, which the modules of ``group`` let go, and their
        saved views into ``ReshardedParam``s; drop this object's own references, as the hooks
        outlive the forward. Tensors get ``dummies`` as data, if there are, so that their own is
        freed."""
        Reshard(group, versions, freed=dummies is not None).take(self._unsharded, self._views)
        if dummies is not None:
            for tensor in (*self._unsharded, *(view for _, view in self._views)):
                ops.free_keeping_aliases(tensor, dummies.like(tensor))
        self._unsharded.clear()
        self._views.clear()
        self._index.clear()

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        index = self._index.get(id(tensor))
        if index is not None:
            return partial(self._param, index)
        index = self._index.get(id(tensor._base)) if tensor._base is not None else None
        if index is not None and tensor._version == self._versions[index]:
            self._views.append((index, tensor))
            return partial(self._param, index, tensor)
        if self._outside is not None:
            pack, unpack = self._outside
            return partial(unpack, pack(tensor))
        if tensor.is_leaf:
            # Not changes of its memory: kernels that set running statistics are none for autograd.
            return partial(_unchanged, tensor, version_of, version_of(tensor))
        # An output that a node saves would keep this node alive, and all before it, until backward.
        # Autograd connects what is unpacked to the graph again.
        return partial(_unchanged, tensor.data, changes_of, changes_of(tensor))

    def _param(self, index: int, view: Tensor | None = None) -> Tensor:
        """Return a parameter, or a view made by the view ops of ``view``, which was released."""
        unsharded = self._regathered()[index]
        if view is None:
            return unsharded
        # The strides of an XLA tensor do not describe its views; the recorded view ops do.
        with torch.no_grad():
            return view._view_func_unsafe(unsharded)


# ---------------------------------------------------------------- shared by all nodes


def on_device(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is on an XLA device."""
    # Reading it takes a fourth of the time of device.type.
    return tensor.is_xla  # type: ignore[attr-defined]


def mark_constants(ctx: Any, outputs: Sequence[Tensor], needs_grad: Sequence[bool]) -> None:
    """Mark outputs whose inputs need no gradient as not differentiable; autograd would otherwise
    let every output need one as soon as any input does."""
    constants = [out for out, needed in zip(outputs, needs_grad, strict=True) if not needed]
    ctx.mark_non_differentiable(*constants)
    ctx.set_materialize_grads(False)


def present(items: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the items that are not None."""
    return [item for item in items if item is not None]
