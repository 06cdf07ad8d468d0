"""The forward of all parts of a unit, from the gather of its parameters until they are freed.

Words: a *part* is one of the modules whose forwards the unit runs; a *span* is a forward of all of
them, from the first one's gather to the end of the last one.
Always true: a unit is in one span at most; when a span ends, nothing that autograd has saved of its
forward keeps a full parameter alive, unless parameters live until backward.
What is computed inside is ``unit``'s business.

What a unit does in backward: gather, reduce, free; and what its autograd nodes ask for.

The nodes by which backward comes here are in ``unit_nodes``.
Words: see ``backward``; a unit *opens* when its modules get full parameters for backward.
Always true: a unit gathers once the gradients of its outputs, and all pending work, are there, and
closes when the last node of its forward call has run. Barriers tie every gather to what comes
before it; without them XLA is free to merge the second gather into the first.
The forward is left to ``unit``.

One unit's forward: gather, compute, free; and what users ask of the unit.

Words: see ``unit_span``; parameters are *ahead* when they were gathered before their unit's turn.
Always true: outside a span and an open backward a unit holds no full parameter, unless the user
asked for it (``unshard``), so shards are the only truth for optimizers, state dicts and the next
forward.
Backward is left to ``unit_backward``, what the modules hold to ``full_params``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp.distributed.pytree import map_tensors, tensors_in
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.engine.autograd import (
    Enter,
    Exit,
    ForwardCall,
    arrive,
    present,
    through,
    unshard,
)
from xla_fsdp.fsdp.engine.backward_pass import BackwardPass, current_pass, running, running_units
from xla_fsdp.fsdp.engine.config import FSDPConfig
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup
from xla_fsdp.fsdp.engine.reduce_scatter import ReducedBuckets
from xla_fsdp.fsdp.engine.saved_tensors import SavedParams
from xla_fsdp.fsdp.engine.unsharded_params import FullParams, ShardedState, UnitSettings, prefetch


@dataclass
class ForwardPass:
    """One forward of all parts of a unit."""

    call: ForwardCall
    kept: list[Tensor]  # for backward
    saved: SavedParams
    running: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)


class ForwardPasses:
    """The spans of a unit, one after the other.

    Args:
        group: the unit's parameters.
        params: what the modules hold.
        device: this rank's XLA device.

    Attributes:
        current: the span that the unit is in.
    """

    def __init__(self, group: FSDPParamGroup, params: FullParams, device: torch.device) -> None:
        self.current: ForwardPass | None = None
        self._group = group
        self._params = params
        self._dummy = torch.zeros(1, device=device)

    def begin(self, span: ForwardPass, full: list[Tensor]) -> ForwardPass:
        """Let the modules compute with ``full``."""
        self._params.show(full, ShardedState.FORWARD)
        self.current = span
        return span

    def end_forward(self) -> None:
        """The last part is done: let the modules hold shards again.

        Raises:
            ValueError: if the forward has changed a parameter in place.
        """
        if self.current is None or self._params.state is not ShardedState.FORWARD:
            return
        self._params.hide()
        if changed := self.current.saved.changed_in_place():
            self.current = None
            raise self._lost(changed)

    def end(self) -> None:
        """Free the parameters, unless they live until backward. Raises as ``end_forward`` does."""
        self.end_forward()
        span, self.current = self.current, None
        if span is None:
            return
        if span.call.reshards:
            span.saved.release(self._dummy)
        else:
            span.saved.forget()

    def end_idle(self) -> None:
        """End a span that some parts have not taken part in."""
        if self.current is not None and not self.current.running:
            self.end()

    def drop(self) -> None:
        """End it after an exception."""
        self.current = None
        if self._params.state is ShardedState.FORWARD:
            self._params.hide()

    def _lost(self, changed: list[int]) -> ValueError:
        members = [member for param in self._group.params for member in param.members]
        names = ", ".join(members[index].names[0] for index in changed)
        return ValueError(
            f"{names} was changed in place in the forward of its FSDP unit. The change would be "
            f"lost: full parameters are freed after the forward and gathered again from the "
            f"shards. Compute with a changed copy instead, or change it outside the forward."
        )


class UnitBackward:
    """The half of a unit that the autograd graph holds on to.

    Args:
        group: the unit's parameters.
        config: the unit's options.
        settings: what was changed since.
        params: what the modules hold.
        spans: forwards of the unit.
    """

    def __init__(
        self,
        group: FSDPParamGroup,
        config: FSDPConfig,
        settings: UnitSettings,
        params: FullParams,
        spans: ForwardPasses,
    ) -> None:
        self.group = group
        self.config = config
        self.settings = settings
        self._params = params
        self._spans = spans
        self._opened_in = -1  # the backward pass that gathered what the modules hold

    # ------------------------------------------------------------ full parameters

    def ensure_open(self) -> None:
        """Gather the parameters for backward, unless the modules hold full ones already."""
        if self._params.state is ShardedState.SHARDED:
            self.open(self._params.for_backward(self._before([])))

    def open(self, gathered: Callable[[], list[Tensor]]) -> None:
        """Let the modules hold what ``gathered`` returns, until the backward pass is over."""
        # With grad mode on: a reentrant checkpoint inside the unit builds a new graph on these.
        with torch.enable_grad():
            call = ForwardCall(self, recomputed=False)
            self._open_with(unshard(call, gathered), call.versions)

    def close(self) -> None:
        """Free what was gathered for backward."""
        if self._params.state is not ShardedState.BACKWARD:
            return
        if self.settings.reshard_after_backward:
            self._params.hide()
        else:
            full = [tensor.detach() for tensor in self._params.full]
            self._params.show(full, ShardedState.UNSHARDED, versions=self._params.versions)

    def full_for_saved(self) -> list[Tensor]:
        """Full parameters for a saved-tensor reference, which may be asked for before any output's
        gradient has come by (a side channel such as a loss kept on the module)."""
        self.ensure_open()
        return self._params.full

    def end_forward(self) -> None:
        """Free what was gathered for a forward and is not needed any more."""
        self._params.drop_ahead()
        self._spans.end_idle()

    def _open_with(self, full: list[Tensor], versions: list[int]) -> None:
        self._params.show(full, ShardedState.BACKWARD, idle=True, versions=versions)
        self._opened_in = current_pass()
        self.settings.backward.open(self)

    # ------------------------------------------------------------ order

    def tie(self, tensors: Sequence[Tensor], *, recomputed: bool) -> tuple[list[Tensor], list]:
        """``tensors``, each available only once all of them are, and what the gather that comes
        next has to wait for."""
        settings = self.settings
        if recomputed:
            return [tensor.clone() for tensor in tensors], self._before(tensors)
        if not self.config.optimization_barrier_in_forward:
            prefetch(settings.forward_prefetch, [])
            return [tensor.clone() for tensor in tensors], []
        before = settings.backward.forward_gate.swap(tensors)
        prefetch(settings.forward_prefetch, before)
        return ops.barrier(tensors), before

    def _tie_grads(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        if not self.config.optimization_barrier_in_backward:
            return list(grads)
        tied = iter(ops.barrier(present(grads)))
        return [None if grad is None else next(tied) for grad in grads]

    def _before(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What a gather has to wait for in backward, for a computation that begins with
        ``tensors``."""
        before = self.settings.backward.gate(tensors)
        return before if self.config.optimization_barrier_in_backward else []

    # ------------------------------------------------------------ at the nodes

    def start(
        self, call: ForwardCall, kept: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Gather the parameters (unless they are ``kept``) once the gradients of the outputs, and
        all pending work, are there. Returns the gradients, likewise tied."""
        settings = self.settings
        settings.backward.watch()
        if call.reshards:
            refuse_changed(call.versions, self.group.versions)
        call.restart(current_pass())
        self._spans.end_idle()  # where some parts did not run
        closed = self._params.state in (ShardedState.SHARDED, ShardedState.UNSHARDED)
        if closed and self.group.params and (settings.unshard_in_backward or not call.reshards):
            before = self._before(present(grads))
            if kept and not call.reshards:
                self._open_with(list(kept), call.versions)
            else:
                self.open(self._params.for_backward(before, kept))
            prefetch(settings.backward_prefetch, before, in_backward=True)
        return self._tie_grads(grads)

    def reduce_early(self, call: ForwardCall, number: int, grad: Tensor) -> Tensor | None:
        """Reduce the gradient of member ``number`` ahead of the rest, if that makes no collective
        more; if not, returns it."""
        backward = self.settings.backward
        backward.watch()
        if not self.settings.sync_gradients or not self.group.reduces_plainly:
            return grad
        found = self.group.reduction.scatter_alone(number, grad)
        if found is None:
            return grad
        call.early.update(found)
        backward.pending.extend(found.values())
        return None

    def reduce(
        self, grads: Sequence[Tensor | None], early: ReducedBuckets | None = None
    ) -> list[Tensor | None]:
        """Gradient shards from full gradients; none while gradients are not synchronized.

        Args:
            grads: by member.
            early: what ``reduce_early`` made of others.
        """
        backward = self.settings.backward
        backward.watch()
        if not self.settings.sync_gradients:
            self.group.keep(grads)
            self._remember_kept()
            return [None] * len(self.group.params)
        reduced = self.group.reduce(grads, early)
        if self.group.has_kept:  # replicas do not add yet
            self._remember_kept()
        backward.pending.extend(reduced.sums)
        return reduced.grads

    def leave_inputs(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the inputs, on their way to the unit before."""
        self.settings.backward.watch()
        ready = self._tie_grads(grads)
        self.settings.backward.pending.extend(present(ready))
        return ready

    def finish(self, call: ForwardCall) -> None:
        """All gradients of one forward call are computed: free the parameters.

        A pass inside the pass (a reentrant checkpoint's) may reach here while the outer one still
        needs them.
        """
        if call.recomputed or self._opened_in == current_pass():
            self.close()

    def reduce_kept(self) -> None:
        """Reduce gradients that ``no_sync`` kept, where no backward has done so since."""
        if not self.settings.sync_gradients or self.group.waits_for_replicas:
            return
        self.settings.backward.keeping.remove(self)
        if self.group.has_kept:
            with torch.no_grad():
                self.group.accumulate(self.group.reduce([]).grads)

    def _remember_kept(self) -> None:
        keeping = self.settings.backward.keeping
        if self not in keeping:
            keeping.append(self)


def refuse_changed(seen: Sequence[int], now: Sequence[int]) -> None:
    """Raise RuntimeError if shards are of other versions than a forward has ``seen``."""
    if list(seen) != list(now):
        raise RuntimeError(
            "parameters of an FSDP unit were changed between its forward and its backward (by "
            "optimizer.step() or load_state_dict, say). Backward gathers them again and would "
            "mix new parameters with old activations. Change them after backward."
        )


class FSDPState:
    """Runs a module's forward with gathered parameters, and its backward likewise.

    Args:
        group: the unit's parameters; it may have none.
        config: the unit's options.
        device: this rank's XLA device.
        parts: of how many modules the unit runs the forward.

    Attributes:
        settings: what may be changed between steps.
        params: what the modules hold.
        in_backward: the half that backward works with.
    """

    def __init__(
        self, group: FSDPParamGroup, config: FSDPConfig, device: torch.device, parts: int = 1
    ) -> None:
        self.group = group
        self.config = config
        self.device = device
        self.parts = parts
        self.settings = UnitSettings(
            BackwardPass(sync_on_end=config.sync_on_finalization),
            reshard_after_forward=config.frees_after_forward,
            keeps_larger=group.smaller is not None,
            keeps_on_root=config.disable_reshard_on_root,
        )
        self.params = FullParams(group, self.settings)
        self._spans = ForwardPasses(group, self.params, device)
        self.in_backward = UnitBackward(group, config, self.settings, self.params, self._spans)

    def join(self, root: FSDPState) -> None:
        """Become a part of the tree of units under ``root``."""
        self.settings.is_root = False
        self.settings.backward = root.settings.backward

    @property
    def backward(self) -> BackwardPass:
        """What the tree of units shares."""
        return self.settings.backward

    @property
    def state(self) -> ShardedState:
        """What the modules hold."""
        return self.params.state

    # ------------------------------------------------------------ at the user's request

    def gather_ahead(self, before: Sequence[Tensor] = ()) -> None:
        """Gather the parameters now, once ``before`` are computed, for the next forward or
        backward to use."""
        self.params.gather_ahead(before)

    def linger(self) -> None:
        """What was gathered ahead may not be needed: drop it when the forwards are over."""
        self.backward.linger(self.in_backward)

    def unshard(self) -> None:
        """Let the modules hold full parameters until the next forward, backward or ``reshard``.
        They are connected to the shards: what is computed with them has gradients."""
        self.backward.abandon()
        if self.state is ShardedState.SHARDED and self.group.params:
            self.gather_ahead()
            call = ForwardCall(self.in_backward, recomputed=False)
            self.params.show(unshard(call, self.params.take_ahead), ShardedState.UNSHARDED)

    def reshard(self) -> None:
        """Undo ``unshard``."""
        self.params.reshard()

    @contextlib.contextmanager
    def showing(self, full: list[nn.Parameter]) -> Iterator[None]:
        """Let the modules hold these leaf parameters inside the block, in place of shards.

        Raises:
            RuntimeError: if they hold other full parameters at the time.
        """
        self.backward.abandon()
        with self.params.summoned(full):
            yield

    @contextlib.contextmanager
    def computing_with(self, full: list[Tensor]) -> Iterator[None]:
        """Let the modules hold these full parameters inside the block, for a forward that is traced
        apart from the program around it."""
        self.refuse_run()
        self.reshard()
        self.params.show(full, ShardedState.FORWARD)
        try:
            yield
        finally:
            self.params.hide()

    # ------------------------------------------------------------ forward

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any, part: int = 0) -> Any:
        """``forward(*args, **kwargs)``, which is that of a part, with the parameters gathered.

        Raises:
            ValueError: if the forward changed a parameter in place.
        """
        span = self._spans.current
        if span is not None and part in span.running:  # the module calls itself
            return forward(*args, **kwargs)
        self.refuse_run()
        call = self._begin_run(part)
        given = map_tensors(self.cast_input, (args, kwargs))
        inputs = through(partial(Enter.apply, call), given)
        versions = [_version(tensor) for tensor in tensors_in(inputs)]
        compute = self._recompute if call.recomputed else self._compute
        result = compute(call, part, lambda: forward(*inputs[0], **inputs[1]))
        _write_back(given, inputs, versions)
        self._end_run()
        return map_tensors(self.cast_output, result)

    def refuse_run(self) -> None:
        """Raise RuntimeError where the parameters are not to be computed with."""
        if self.state is ShardedState.SUMMONED:
            raise RuntimeError(
                "an FSDP unit was called inside summon_full_params, where its parameters are not "
                "connected to the shards that are trained. ForwardCall it outside of the block"
            )
        on_meta = [param.key for param in self.group.params if param.leaf.is_meta]
        if on_meta:
            raise RuntimeError(
                f"{', '.join(on_meta)}: on the meta device, without values. Give them memory by "
                f"model.to_empty(device=torch_xla.device()), then values by your own "
                f"initialization or load_state_dict"
            )

    def cast_input(self, tensor: Tensor) -> Tensor:
        """An input, as the unit computes with it."""
        return _cast(tensor, self.config.input_dtype(of_root=self.settings.is_root))

    def cast_output(self, tensor: Tensor) -> Tensor:
        """An output, as the unit returns it."""
        return _cast(tensor, self.config.output_dtype)

    def _begin_run(self, part: int) -> ForwardCall:
        """Go on with a span of several parts, or begin anew."""
        self.backward.stay(self.in_backward)
        span = self._spans.current
        if span is not None and part in span.done:
            self._spans.end()
        span = self._spans.current
        if span is None:
            self.backward.abandon()
        recomputed = current_pass() != -1
        return span.call if span and not recomputed else ForwardCall(self.in_backward, recomputed)

    def _end_run(self) -> None:
        spans, backward = self._spans, self.backward
        if spans.current is not None:
            backward.linger(self.in_backward)
        if not running_units():
            backward.forward_gate.clear()
            if self.settings.is_root and spans.current is None and current_pass() == -1:
                backward.end_forwards()

    def _compute(self, call: ForwardCall, part: int, forward: Callable[[], Any]) -> Any:
        """The original forward."""
        before = call.take_before()
        span = self._spans.current or self._begin_span(call, before)
        span.running.add(part)
        try:
            hooks = span.saved.hooks() if span.call.reshards else nullcontext()
            with running(self.in_backward), hooks:
                outputs = forward()
        except BaseException:
            self._spans.drop()
            raise
        span.running.discard(part)
        span.done.add(part)
        if len(span.done) < self.parts:
            return _exit(call, outputs, span.kept)
        self._spans.end_forward()
        outputs = _exit(call, outputs, span.kept)
        self._spans.end()
        return outputs

    def _begin_span(self, call: ForwardCall, before: list[Tensor]) -> ForwardPass:
        kept: list[Tensor] = []
        full = unshard(call, partial(self.params.for_forward, before, kept))
        if self.settings.is_root:
            full = [arrive(call, number, tensor) for number, tensor in enumerate(full)]
        if not call.reshards:
            kept = full
        saved = SavedParams(full, self.in_backward.full_for_saved)
        return self._spans.begin(ForwardPass(call, kept, saved), full)

    def _recompute(self, call: ForwardCall, part: int, forward: Callable[[], Any]) -> Any:
        """The same forward again, for a checkpoint, inside a backward pass.

        What it gathers stays for the backward that follows, which thus needs no gather of its own.
        """
        params, before = self.params, call.take_before()
        if params.state is ShardedState.SHARDED:
            joined = self.group.gather.pack(before, again=True)
            self.in_backward.open(partial(self.group.gather.unshard, joined))
        for_backward, versions = params.full, params.versions
        full = unshard(call, params.copies)
        saved = SavedParams(full, self.in_backward.full_for_saved)
        params.show(full, ShardedState.BACKWARD, versions=versions)
        try:
            with saved.hooks() if call.reshards else nullcontext():
                outputs = forward()
        finally:
            params.show(for_backward, ShardedState.BACKWARD, idle=True, versions=versions)
            saved.forget()
        return _exit(call, outputs, [] if call.reshards else full)


def _exit(call: ForwardCall, outputs: Any, kept: list[Tensor]) -> Any:
    """Tie the outputs; ``kept`` lives until backward."""
    return through(partial(Exit.apply, call, len(kept), *kept), outputs)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _write_back(given: Any, inputs: Any, versions: Sequence[int]) -> None:
    """A forward that changes an input in place changes the caller's tensor, as without FSDP."""
    pairs = zip(tensors_in(given), tensors_in(inputs), versions, strict=True)
    for original, moved, version in pairs:
        if moved is not original and _version(moved) > version:
            original.copy_(moved)
