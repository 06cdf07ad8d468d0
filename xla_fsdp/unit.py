"""One unit's forward and backward: gather, compute, free; gather again, compute, reduce, free.

The nodes of the autograd graph by which this happens are in ``unit_nodes``.
Words: a *part* is one of the modules whose forwards the unit runs; a *span* is a forward of all of
them, from the first one's gather to the end of the last one; parameters are *ahead* when they were
gathered before their unit's turn.
Always true: outside a span and an open backward a unit holds no full parameter, unless the user
asked for it (``unshard``), so shards are the only truth for optimizers, state dicts and the next
forward. Barriers tie every gather to what comes before it; without them XLA is free to merge the
second gather into the first.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp import xla_ops
from xla_fsdp.backward import BackwardPass, current_pass, running, running_units
from xla_fsdp.config import FSDPConfig
from xla_fsdp.graph_nodes import present, through
from xla_fsdp.param_group import ParamGroup
from xla_fsdp.saved_params import SavedParams
from xla_fsdp.ties import remember_shown
from xla_fsdp.tree import map_tensors, tensors_in
from xla_fsdp.unit_nodes import Call, Enter, Exit, Unshard, arrive


class UnitState(Enum):
    """What the attributes of a unit's modules hold."""

    SHARDED = auto()
    FORWARD = auto()  # full parameters, while the unit's forward runs
    BACKWARD = auto()  # full parameters, gathered for backward
    UNSHARDED = auto()  # full parameters, until the next forward or backward is done with them
    SUMMONED = auto()  # full leaf parameters, for the user to look at or change


@dataclass
class Span:
    """One forward of all parts of a unit."""

    call: Call
    full: list[Tensor]
    kept: list[Tensor]  # for backward
    saved: SavedParams
    running: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Ahead:
    """Full parameters gathered before their unit's turn, of shards that had these versions; and
    the larger shards that backward gathers from, where there are."""

    full: list[Tensor]
    versions: list[int]
    kept: list[Tensor]


class Unit:
    """Runs a module's forward with gathered parameters, and its backward likewise.

    Args:
        group: the unit's parameters; it may have none.
        config: the unit's options.
        device: this rank's XLA device.
        parts: of how many modules the unit runs the forward.
    """

    def __init__(
        self, group: ParamGroup, config: FSDPConfig, device: torch.device, parts: int = 1
    ) -> None:
        self.group = group
        self.config = config
        self.device = device
        self.parts = parts
        self.state = UnitState.SHARDED
        self.is_root = True
        self.sync_gradients = True
        self.reshard_after_forward = config.frees_after_forward
        self.keeps_larger = group.smaller is not None  # shards, between forward and backward
        self.keeps_on_root = config.disable_reshard_on_root
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.is_last_backward = True  # no further pass adds to the gradients before the step
        self.forward_prefetch: list[UnitRef] = []
        self.backward_prefetch: list[UnitRef] = []
        self.backward = BackwardPass(sync_on_end=config.sync_on_finalization)
        self.full: list[Tensor] = []  # what the attributes hold while not SHARDED
        self._span: Span | None = None
        self._ahead: Ahead | None = None
        self._shown_versions: list[int] = []  # of the shards that ``full`` was gathered from
        self._opened_in = -1  # the backward pass that gathered _full
        self._dummy = torch.zeros(1, device=device)

    def join(self, root: Unit) -> None:
        """Become a part of the tree of units under ``root``."""
        self.is_root = False
        self.backward = root.backward

    @property
    def reshards_after_forward(self) -> bool:
        """Whether full parameters are freed between forward and backward."""
        if self.is_root and self.keeps_on_root:
            return False
        return self.reshard_after_forward

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any, part: int = 0) -> Any:
        """``forward(*args, **kwargs)``, which is that of a part, with the parameters gathered.

        Raises:
            ValueError: if the forward changed a parameter in place.
        """
        if self._span is not None and part in self._span.running:  # the module calls itself
            return forward(*args, **kwargs)
        self.refuse_run()
        self._begin_run(part)
        recomputed = current_pass() != -1
        call = self._span.call if self._span and not recomputed else Call(self, recomputed)
        given = map_tensors(self.cast_input, (args, kwargs))
        inputs = through(partial(Enter.apply, call), given)
        versions = [_version(tensor) for tensor in tensors_in(inputs)]
        compute = self._recompute if recomputed else self._compute
        result = compute(call, part, lambda: forward(*inputs[0], **inputs[1]))
        _write_back(given, inputs, versions)
        self._end_run()
        return map_tensors(self.cast_output, result)

    @contextlib.contextmanager
    def showing(self, full: list[nn.Parameter]) -> Iterator[None]:
        """Let the modules hold these leaf parameters inside the block, in place of shards.

        Raises:
            RuntimeError: if they hold other full parameters at the time.
        """
        self.backward.abandon()
        self.reshard()
        if self.state is not UnitState.SHARDED:
            raise RuntimeError(
                f"full parameters cannot be summoned while a unit is in state {self.state.name}; "
                f"do it outside of forward, backward and other summon_full_params blocks"
            )
        with contextlib.ExitStack() as stack:
            self._show(list(full), UnitState.SUMMONED)
            stack.callback(self._hide)
            for param in self.group.params:
                stack.enter_context(param.without_shard())
            yield

    @contextlib.contextmanager
    def computing_with(self, full: list[Tensor]) -> Iterator[None]:
        """Let the modules hold these full parameters inside the block, for a forward that is traced
        apart from the program around it."""
        self.refuse_run()
        self.reshard()
        self._show(full, UnitState.FORWARD)
        try:
            yield
        finally:
            self._hide()

    # ------------------------------------------------------------ at the user's request

    def gather_ahead(self, before: Sequence[Tensor] = ()) -> None:
        """Gather the parameters now, once ``before`` are computed, for the next forward or
        backward to use."""
        if self.state is not UnitState.SHARDED or self._has_ahead() or not self.group.params:
            return
        kept: list[Tensor] = []
        with torch.no_grad():
            full = self._gather(_after(before, self.group.shards), kept)
        self._ahead = Ahead(full, self.group.versions, kept)

    def unshard(self) -> None:
        """Let the modules hold full parameters until the next forward, backward or ``reshard``.
        They are connected to the shards: what is computed with them has gradients."""
        self.backward.abandon()
        if self.state is UnitState.SHARDED and self.group.params:
            self.gather_ahead()
            call = Call(self, recomputed=False)
            self._show(self._unshard(call, self._take_ahead), UnitState.UNSHARDED)

    def reshard(self) -> None:
        """Undo ``unshard``."""
        self._ahead = None
        if self.state is UnitState.UNSHARDED:
            self._hide()

    def end_forward(self) -> None:
        """Free what was gathered for a forward and is not needed any more."""
        self._ahead = None
        if self._span is not None and not self._span.running:
            self._end_span()

    def ensure_open(self) -> None:
        """Gather the parameters for backward, unless the modules hold full ones already."""
        if self.state is UnitState.SHARDED:
            self._open(self._source(self._before_backward([])))

    def close(self) -> None:
        """Free what was gathered for backward."""
        if self.state is not UnitState.BACKWARD:
            return
        if self.reshard_after_backward:
            self._hide()
        else:
            full = [tensor.detach() for tensor in self.full]
            self._show(full, UnitState.UNSHARDED, versions=self._shown_versions)

    # ------------------------------------------------------------ forward

    def refuse_run(self) -> None:
        """Raise RuntimeError where the parameters are not to be computed with."""
        if self.state is UnitState.SUMMONED:
            raise RuntimeError(
                "an FSDP unit was called inside summon_full_params, where its parameters are not "
                "connected to the shards that are trained. Call it outside of the block"
            )
        on_meta = [param.key for param in self.group.params if param.shard.is_meta]
        if on_meta:
            raise RuntimeError(
                f"{', '.join(on_meta)}: on the meta device, without values. Give them memory by "
                f"model.to_empty(device=torch_xla.device()), then values by your own "
                f"initialization or load_state_dict"
            )

    def _begin_run(self, part: int) -> None:
        """Go on with a span of several parts, or begin anew."""
        self.backward.stay(self)
        if self._span is not None and part in self._span.done:
            self._end_span()
        if self._span is None:
            self.backward.abandon()

    def _end_run(self) -> None:
        if self._span is not None:
            self.backward.linger(self)
        if not running_units():
            self.backward.forward_gate.clear()
            if self.is_root and self._span is None and current_pass() == -1:
                self.backward.end_forwards()

    def cast_input(self, tensor: Tensor) -> Tensor:
        """An input, as the unit computes with it."""
        return _cast(tensor, self.config.input_dtype(of_root=self.is_root))

    def cast_output(self, tensor: Tensor) -> Tensor:
        """An output, as the unit returns it."""
        return _cast(tensor, self.config.output_dtype)

    def _compute(self, call: Call, part: int, forward: Callable[[], Any]) -> Any:
        """The original forward."""
        span = self._span = self._span or self._begin_span(call)
        span.running.add(part)
        try:
            hooks = span.saved.hooks() if span.call.reshards else nullcontext()
            with running(self), hooks:
                outputs = forward()
        except BaseException:
            self._drop_span()
            raise
        span.running.discard(part)
        span.done.add(part)
        if len(span.done) < self.parts:
            return self._exit(call, outputs, span.kept)
        self._hide()
        if changed := span.saved.changed_in_place():
            self._drop_span()
            self._reject(changed)
        outputs = self._exit(call, outputs, span.kept)
        self._end_span()
        return outputs

    def _begin_span(self, call: Call) -> Span:
        shards = call.take_shards()
        kept: list[Tensor] = []
        full = self._unshard(call, partial(self._gathered, shards, kept))
        if self.is_root:
            full = [arrive(call, number, tensor) for number, tensor in enumerate(full)]
        if not call.reshards:
            kept = full
        saved = SavedParams(full, self._for_backward)
        self._show(full, UnitState.FORWARD)
        return Span(call, full, kept, saved)

    def _gathered(self, shards: Sequence[Tensor], kept: list[Tensor]) -> list[Tensor]:
        """Full parameters for a forward; what backward is to gather from goes into ``kept``."""
        if self.state is UnitState.UNSHARDED and self._shown_versions == self.group.versions:
            return self._copies()
        if self._ahead is not None and self._has_ahead():
            kept += self._ahead.kept
            return self._take_ahead()
        self.reshard()
        return self._gather(shards, kept)

    def _gather(self, shards: Sequence[Tensor], kept: list[Tensor]) -> list[Tensor]:
        if not (self.keeps_larger and self.reshards_after_forward):
            return self.group.gather(shards)
        kept += self.group.gather_larger(shards)
        return self.group.gather_from_larger(kept)

    def _end_span(self) -> None:
        """Free the parameters, unless they live until backward."""
        span, self._span = self._span, None
        assert span is not None
        if self.state is UnitState.FORWARD:
            self._hide()
            self._reject(span.saved.changed_in_place())
        if span.call.reshards:
            span.saved.release(self._dummy)
        else:
            span.saved.forget()

    def _drop_span(self) -> None:
        """After an exception."""
        self._span = None
        if self.state is UnitState.FORWARD:
            self._hide()

    def _recompute(self, call: Call, part: int, forward: Callable[[], Any]) -> Any:
        """The same forward again, for a checkpoint, inside a backward pass.

        What it gathers stays for the backward that follows, which thus needs no gather of its own.
        """
        shards = call.take_shards()
        if self.state is UnitState.SHARDED:
            self._open(partial(self.group.gather, shards))
        for_backward, versions = self.full, self._shown_versions
        full = self._unshard(call, self._copies)
        saved = SavedParams(full, self._for_backward)
        self._show(full, UnitState.BACKWARD, versions=versions)
        try:
            with saved.hooks() if call.reshards else nullcontext():
                outputs = forward()
        finally:
            self._show(for_backward, UnitState.BACKWARD, idle=True, versions=versions)
            saved.forget()
        return self._exit(call, outputs, [] if call.reshards else full)

    def _exit(self, call: Call, outputs: Any, kept: list[Tensor]) -> Any:
        """Tie the outputs; ``kept`` lives until backward."""
        return through(partial(Exit.apply, call, len(kept), *kept), outputs)

    def _reject(self, changed: list[int]) -> None:
        if changed:
            members = [member for param in self.group.params for member in param.members]
            names = ", ".join(members[index].names[0] for index in changed)
            raise ValueError(
                f"{names} was changed in place in the forward of its FSDP unit. The change would "
                f"be lost: full parameters are freed after the forward and gathered again from "
                f"the shards. Compute with a changed copy instead, or change it outside the "
                f"forward."
            )

    # ------------------------------------------------------------ backward

    def tie(self, tensors: Sequence[Tensor], *, recomputed: bool) -> tuple[list[Tensor], list]:
        """``tensors`` and the shards, each available only once all of them are."""
        config = self.config
        if recomputed:
            before = self._before_backward(tensors)
            return [tensor.clone() for tensor in tensors], _after(before, self.group.shards)
        if not config.optimization_barrier_in_forward:
            _prefetch(self.forward_prefetch, [])
            return [tensor.clone() for tensor in tensors], self.group.shards
        before = self.backward.forward_gate.swap(tensors)
        _prefetch(self.forward_prefetch, before)
        return xla_ops.barrier(tensors), _after(before, self.group.shards)

    def start_backward(
        self, call: Call, kept: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Gather the parameters (unless they are ``kept``) once the gradients of the outputs, and
        all pending work, are there. Returns the gradients, likewise tied."""
        self.backward.watch()
        if call.reshards:
            self.check_unchanged(call.versions)
        call.restart(current_pass())
        if self._span is not None and not self._span.running:  # some of its parts did not run
            self._end_span()
        closed = self.state in (UnitState.SHARDED, UnitState.UNSHARDED)
        if closed and self.group.params and (self.unshard_in_backward or not call.reshards):
            before = self._before_backward(present(grads))
            if kept and not call.reshards:
                self._open_with(list(kept), call.versions)
            else:
                self._open(self._source(before, kept))
            _prefetch(self.backward_prefetch, before, in_backward=True)
        return self._tie_grads(grads)

    @property
    def gathers_in_backward(self) -> bool:
        """Whether backward gathers from the shards."""
        return self.reshards_after_forward and not self.keeps_larger

    def reduce_early(self, call: Call, number: int, grad: Tensor) -> Tensor | None:
        """Reduce the gradient of member ``number`` ahead of the rest, if that makes no collective
        more; if not, returns it."""
        self.backward.watch()
        if not self.sync_gradients or not self.group.reduces_plainly:
            return grad
        found = self.group.scatter_alone(number, grad)
        if found is None:
            return grad
        param, reduced = found
        call.early[param] = reduced
        self.backward.pending.append(reduced.detach())
        return None

    def reduce(
        self, grads: Sequence[Tensor | None], early: Mapping[int, Tensor] | None = None
    ) -> list[Tensor | None]:
        """Gradient shards from full gradients; none while gradients are not synchronized.

        Args:
            grads: by member.
            early: what ``reduce_early`` made of others, by parameter.
        """
        self.backward.watch()
        if not self.sync_gradients:
            self.group.keep(grads)
            if self not in self.backward.keeping:
                self.backward.keeping.append(self)
            return [None] * len(self.group.params)
        reduced = self.group.reduce(grads, early or {})
        if self.group.has_kept and self not in self.backward.keeping:  # replicas do not add yet
            self.backward.keeping.append(self)
        # Aliases: autograd copies a gradient that somebody else holds.
        self.backward.pending.extend(grad.detach() for grad in present(reduced))
        return reduced

    def reduce_kept(self) -> None:
        """Reduce gradients that ``no_sync`` kept, where no backward has done so since."""
        if not self.sync_gradients or self.group.waits_for_replicas:
            return
        self.backward.keeping.remove(self)
        if self.group.has_kept:
            with torch.no_grad():
                self.group.accumulate(self.group.reduce([None] * self.group.num_members))

    def drop_kept(self) -> None:
        """Forget gradients that ``no_sync`` kept."""
        self.group.drop_kept()

    def leave_inputs(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the inputs, on their way to the unit before."""
        self.backward.watch()
        ready = self._tie_grads(grads)
        self.backward.pending.extend(present(ready))
        return ready

    def finish_backward(self, call: Call) -> None:
        """All gradients of one forward call are computed: free the parameters.

        A pass inside the pass (a reentrant checkpoint's) may reach here while the outer one still
        needs them.
        """
        if call.recomputed or self._opened_in == current_pass():
            self.close()

    def _tie_grads(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        if not self.config.optimization_barrier_in_backward:
            return list(grads)
        tied = iter(xla_ops.barrier(present(grads)))
        return [None if grad is None else next(tied) for grad in grads]

    def _before_backward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What a gather has to wait for in backward, for a computation that begins with
        ``tensors``."""
        before = self.backward.gate(tensors)
        return before if self.config.optimization_barrier_in_backward else []

    def _source(
        self, before: Sequence[Tensor], kept: Sequence[Tensor] = ()
    ) -> Callable[[], list[Tensor]]:
        """What full parameters come from in backward."""
        if self.state is UnitState.UNSHARDED and self._shown_versions == self.group.versions:
            return self._copies
        if self._has_ahead():
            return self._take_ahead
        if kept:
            return partial(self.group.gather_from_larger, _after(before, kept))
        return partial(self.group.gather, _after(before, self.group.shards))

    def _for_backward(self) -> list[Tensor]:
        """Full parameters for a saved-tensor reference, which may be asked for before any output's
        gradient has come by (a side channel such as a loss kept on the module)."""
        self.ensure_open()
        return self.full

    def check_unchanged(self, versions: Sequence[int]) -> None:
        """Raise RuntimeError if a forward saw the shards in other versions."""
        if list(versions) != self.group.versions:
            raise RuntimeError(
                "parameters of an FSDP unit were changed between its forward and its backward (by "
                "optimizer.step() or load_state_dict, say). Backward gathers them again and would "
                "mix new parameters with old activations. Change them after backward."
            )

    # ------------------------------------------------------------ full parameters

    def _unshard(self, call: Call, gathered: Callable[[], list[Tensor]]) -> list[Tensor]:
        if not self.group.params:
            return []
        return list(Unshard.apply(call, gathered, *self.group.shards))

    def _copies(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self.full]

    def _has_ahead(self) -> bool:
        if self._ahead is not None and self._ahead.versions != self.group.versions:
            self._ahead = None
        return self._ahead is not None

    def _take_ahead(self) -> list[Tensor]:
        assert self._ahead is not None
        ahead, self._ahead = self._ahead, None
        return ahead.full

    def _open(self, gathered: Callable[[], list[Tensor]]) -> None:
        # With grad mode on: a reentrant checkpoint inside the unit builds a new graph on these.
        with torch.enable_grad():
            call = Call(self, recomputed=False)
            self._open_with(self._unshard(call, gathered), call.versions)

    def _open_with(self, full: list[Tensor], versions: list[int]) -> None:
        self._show(full, UnitState.BACKWARD, idle=True, versions=versions)
        self._opened_in = current_pass()
        self.backward.open(self)

    def _show(
        self,
        full: list[Tensor],
        state: UnitState,
        *,
        idle: bool = False,
        versions: list[int] | None = None,
    ) -> None:
        """Point the modules at ``full``, gathered from shards of ``versions`` (default: now)."""
        if self.state is not UnitState.SHARDED:
            self._hide()
        for param in self.group.params:  # all, before any is changed
            param.check_owners()
        at = 0
        for param in self.group.params:
            param.unshard(full[at : at + len(param.members)], idle=idle)
            at += len(param.members)
        if state is UnitState.UNSHARDED:
            remember_shown(full)
        self.full, self.state = full, state
        self._shown_versions = self.group.versions if versions is None else versions

    def _hide(self) -> None:
        for param in self.group.params:
            param.reshard()
        self.full, self.state = [], UnitState.SHARDED


class UnitRef:
    """A unit that another one names, weakly: units that name each other would be freed some time
    later, with their parameters. Copied and pickled, it names the unit's copy.

    Args:
        unit: to name; None for one that is gone.
    """

    def __init__(self, unit: Unit | None) -> None:
        self._unit = None if unit is None else weakref.ref(unit)

    def __call__(self) -> Unit | None:
        return None if self._unit is None else self._unit()

    def __reduce__(self) -> tuple[Any, ...]:
        return UnitRef, (self(),)


def _after(before: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """``values``, which are not available until ``before`` are."""
    return xla_ops.barrier([*values, *before])[: len(values)] if before else list(values)


def _prefetch(
    units: Sequence[UnitRef], before: Sequence[Tensor], *, in_backward: bool = False
) -> None:
    for reference in units:
        unit = reference()
        if unit is not None and (unit.gathers_in_backward or not in_backward):
            unit.gather_ahead(before)
            unit.backward.linger(unit)


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
