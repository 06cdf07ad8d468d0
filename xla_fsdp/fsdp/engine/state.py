"""One FSDP unit: all-gather before its forward and backward, reduce-scatter after its backward.

``FSDPState.run`` computes the forward and adds autograd nodes to the graph; these nodes call the
methods under "backward", in the order of the file. ``transitions`` says what the modules hold after
what happens, and the ``Schedule`` that all units of one model share, what waits for what.

Invariants: outside of forward and backward a unit holds unsharded parameters only if the user asked
for them; optimizers, state dicts and the next forward read the shards. A backward pass frees what
it gathered when it ends. After a pass that raised, ``Schedule.cleanup_failed_passes`` does so,
which every forward and every access to the parameters calls first.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp.distributed.higher_order import (
    explain_hooks,
    in_forward_mode,
    in_transform,
    outside_transforms,
)
from xla_fsdp.distributed.pytree import map_tensors
from xla_fsdp.fsdp.engine.autograd import (
    ForwardCall,
    PostBackward,
    SavedParams,
    before_backward,
    connect,
    gather_again,
    reduce_early,
    refuse_changed,
)
from xla_fsdp.fsdp.engine.config import FSDPConfig, FSDPSettings
from xla_fsdp.fsdp.engine.inputs import Inputs, Outputs
from xla_fsdp.fsdp.engine.param import register_unsharded_views
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup, Reshard
from xla_fsdp.fsdp.engine.schedule import Schedule
from xla_fsdp.fsdp.engine.shard_tensor import ShardView, refuse_shard
from xla_fsdp.fsdp.engine.thread import (
    backward_scopes,
    current_pass,
    forward_code,
    in_phase,
    running,
    this_thread,
)
from xla_fsdp.fsdp.engine.transitions import (
    NEEDS_GATHER,
    REVOKED,
    TRANSITIONS,
    Action,
    Event,
    UnitState,
)
from xla_fsdp.fsdp.engine.unit_collectives import ReducedBuckets
from xla_fsdp.xla import ops
from xla_fsdp.xla.loop import LoopCache


class FSDPState:
    """Runs the forward and backward of one unit with unsharded parameters.

    Args:
        group: the unit's parameters; it may have none.
        config: the unit's options.
        device: this rank's XLA device.
        parts: number of modules that share the unit.

    Attributes:
        log: tells what the unit gathers, frees and reduces; has its name.
        state: what the modules hold.
        has_units: whether there are units inside of this one.
        settings: options that may change between steps.
        schedule: shared with the other units of the model after ``join``.
        at_forward: called with the unit, the call and its saved parameters when a forward begins.
        loops: traced for the unit.
    """

    def __init__(
        self, group: FSDPParamGroup, config: FSDPConfig, device: torch.device, parts: int = 1
    ) -> None:
        self.group = group
        self.log = group.log
        self.config = config
        self.device = device
        self.parts = parts
        self.settings = FSDPSettings(
            # 1: in groups of one rank a shard is the unsharded parameter.
            reshard_after_forward=config.reshard_after_forward is True
            or config.reshard_after_forward > 1,
            keeps_larger=group.smaller is not None,
            keeps_on_root=config.disable_reshard_on_root,
        )
        self.schedule = Schedule(device, sync_on_end=config.sync_on_finalization)
        self.state = UnitState.SHARDED
        self.has_units = False
        self._forward: ForwardCall | None = None  # from the gather until the parameters are freed
        self._recomputing: set[int] = set()  # numbers of modules whose forward is recomputed
        self._history: deque[str] = deque(maxlen=20)  # of events, where they are checked
        self.at_forward: list[Callable[[FSDPState, ForwardCall, SavedParams], None]] = []
        self.loops = LoopCache()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.log.unit}: {self.state.name}, {self.group!r})"

    def join(self, root: FSDPState) -> None:
        """Share the schedule of ``root``, a unit around this one."""
        self.settings.is_root = False
        self.schedule = root.schedule
        root.has_units = True

    def replay_facts(self) -> tuple[Any, ...]:
        """Return what a traced step depends on besides tensors. Who adds a field that changes what
        is traced adds it here, or to what the group and the schedule return."""
        settings = [[*v] if isinstance(v, list) else v for v in vars(self.settings).values()]
        return settings, self.state, *self.schedule.replay_facts(), *self.group.replay_facts()

    @property
    def in_use(self) -> Sequence[Tensor]:
        """The unsharded parameters with which a forward now computes, which must not change."""
        return () if self._forward is None else self._forward.saved.unsharded

    # ------------------------------------------------------------ what the modules hold

    def _on(
        self, event: Event, unsharded: Sequence[Tensor] = (), versions: Sequence[int] | None = None
    ) -> None:
        """Do what ``TRANSITIONS`` says. If the modules are then to hold parameters, these are
        ``unsharded``, gathered from shards of these ``versions`` (default: the current ones)."""
        found = TRANSITIONS.get((self.state, event))
        if found is None:
            raise RuntimeError(f"a unit in state {self.state.name} cannot take {event.name}")
        action, state = found
        if self.schedule.to_check is not None:
            self._history.append(f"{self.state.name} -{event.name}-> {state.name}")
            self.schedule.to_check[weakref.ref(self)] = None
        if action is Action.KEEP:
            with torch._C.DisableTorchFunctionSubclass():  # plain tensors, of whatever class
                unsharded = [tensor.detach() for tensor in self.group.unsharded]
            versions = self.group.unsharded_versions
        if action in (Action.HOLD, Action.KEEP):
            idle, revokes = state is UnitState.BACKWARD, state in REVOKED
            self.group.to_unsharded(unsharded, versions=versions, idle=idle, revokes=revokes)
        elif action is Action.FREE:
            self.group.to_sharded()
        elif action is Action.END_FORWARD:
            self._free_forward()
        elif action is Action.DROP:
            self.group.take_prefetched()
        if state is UnitState.UNSHARDED:
            register_unsharded_views(self.group.unsharded)
        self.state = state

    def end_pass(self) -> None:
        """Free what the unit holds for a pass that is over, or has raised."""
        self._end_backward()
        self._on(Event.PASS_DONE)

    def _end_backward(self) -> None:
        frees = self.settings.reshard_after_backward
        self._on(Event.BACKWARD_DONE if frees else Event.BACKWARD_DONE_KEPT)

    def _free_forward(self) -> None:
        call, self._forward = self._forward, None
        if call is None:  # of a program of its own
            self.group.to_sharded()
            return
        # The graph keeps the call.
        saved, call.saved, call.for_backward = call.saved, None, ()
        self.group.to_sharded(kept=not call.reshards)
        saved.reshard(self.group, call.versions, self.schedule.dummies if call.reshards else None)

    def problems(self) -> list[str]:
        """Return what is wrong with the unit between two backward passes."""
        holds, group, state = bool(self.group.unsharded), self.group, self.state
        runs = state in (UnitState.FORWARD, UnitState.WAITING)
        found = {
            "is still in backward": state is UnitState.BACKWARD,
            "holds other parameters than its state says": (state is UnitState.SHARDED) == holds
            and bool(group.params),
            "has no forward, or two": self._forward is not None and not runs,
            "is recomputing": bool(self._recomputing),
            "keeps gradients that nobody will reduce": group.has_unreduced
            and self not in self.schedule.unreduced,
        }
        history = "; ".join(self._history)
        return [f"{self} {what} ({history})" for what, is_so in found.items() if is_so]

    # ------------------------------------------------------------ at the user's request

    def prefetch(self, before: Sequence[Tensor] = ()) -> None:
        """Gather the parameters for the next forward or backward, once ``before`` are computed."""
        self.group.prefetch(before, larger=self.settings.keeps_larger_shards)

    def unshard(self) -> None:
        """Let the modules hold unsharded parameters until the next forward, backward or
        ``reshard``. Gradients of results computed with them reach the shards."""
        self.schedule.cleanup_failed_passes()
        if self.state is UnitState.SHARDED and self.group.params:
            with torch.no_grad():
                found = self.group.unshard([], larger=self.settings.keeps_larger_shards)
            self._on(Event.UNSHARD, connect(ForwardCall(self), found.params))

    def reshard(self) -> None:
        """Undo ``unshard`` and ``prefetch``."""
        self._on(Event.RESHARD)

    def require_shards(self) -> None:
        """Undo ``unshard`` and ``prefetch``; raise RuntimeError if the parameters are in use."""
        self.schedule.cleanup_failed_passes()
        self.reshard()
        if self.state is not UnitState.SHARDED:
            raise RuntimeError(
                f"the model holds full parameters, not shards (a unit is in state "
                f"{self.state.name}): do this outside of forward, backward and summon_full_params"
            )

    @contextlib.contextmanager
    def summoned(self, unsharded: Sequence[nn.Parameter]) -> Iterator[None]:
        """Let the modules hold these leaf parameters inside the block, in place of shards."""
        self.require_shards()
        with contextlib.ExitStack() as stack:
            self._on(Event.SUMMON, unsharded)
            stack.callback(self._on, Event.RELEASE)
            for param in self.group.params:
                stack.enter_context(param.without_shard())
            yield

    @contextlib.contextmanager
    def computing_with(self, unsharded: list[Tensor]) -> Iterator[None]:
        """Let the modules hold these parameters inside the block, for a forward or backward that is
        traced as a program of its own (the body of a loop)."""
        self.refuse_run()
        self.reshard()
        self._on(Event.LOOP_BODY, unsharded)
        try:
            with forward_code():
                yield
        finally:
            self._on(Event.FORWARD_DONE)
            # Outside of its program a traced tensor has no value, and torch_xla aborts.
            Reshard(self.group, self.group.versions, freed=True).take(unsharded)

    # ------------------------------------------------------------ forward

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any, part: int = 0) -> Any:
        """Return ``forward(*args, **kwargs)`` of the unit's module number ``part``, computed with
        unsharded parameters."""
        running_forward = () if self._forward is None else self._forward.running
        if part in self._recomputing or part in running_forward:  # the module calls itself
            with forward_code():
                return forward(*args, **kwargs)
        self.refuse_run()
        if in_transform():
            return self._run_in_transform(forward, args, kwargs)
        call = self._begin_call(part)
        inputs = Inputs(args, kwargs)
        if self.group.stepper is not None and not call.recomputed:
            self.group.stepper.refuse_losses_of_others(self, inputs.sources)
        tied, before = self._tie_inputs(call, [self.cast_input(t) for t in inputs.sources])
        compute = self._recompute if call.recomputed else self._compute
        result = compute(call, part, before, partial(inputs.call, forward, tied))
        if self._forward is not None:
            self.schedule.hold_for_next(self)
        self.schedule.end_forward(of_root=self.settings.is_root and self._forward is None)
        return result

    def refuse_run(self) -> None:
        """Raise RuntimeError inside ``summoned``, or if a parameter is on the meta device."""
        if self.state is UnitState.SUMMONED:
            raise RuntimeError(
                "an FSDP unit was called inside summon_full_params, where its parameters are not "
                "connected to the shards that are trained. Call it outside of the block"
            )
        with torch._C.DisableTorchFunctionSubclass():
            on_meta = [param.key for param in self.group.params if param.slots.shard.is_meta]
        if on_meta:
            raise RuntimeError(
                f"{', '.join(on_meta)}: on the meta device, without values. Give them memory by "
                f"model.to_empty(device=torch_xla.device()), then values by your own "
                f"initialization or load_state_dict"
            )

    def cast_input(self, tensor: Tensor) -> Tensor:
        """Return an input in the dtype that the unit computes with. An outermost unit moves inputs
        from host memory to its device. Raises RuntimeError for a shard."""
        if isinstance(tensor, ShardView):
            refuse_shard(tensor, "passing it to a unit")
        if tensor.device.type == "cpu" and not this_thread.units:
            tensor = tensor.to(self.device)
        config, is_root = self.config, self.settings.is_root
        casts = config.cast_root_forward_inputs if is_root else config.cast_forward_inputs
        return _cast(tensor, config.compute_dtype if casts else None)

    def cast_output(self, tensor: Tensor) -> Tensor:
        """Return an output in the dtype that the unit returns."""
        return _cast(tensor, self.config.output_dtype)

    def _begin_call(self, part: int) -> ForwardCall:
        """Continue the forward pass if another of the unit's modules has begun it, or begin one."""
        if self._forward is not None and part in self._forward.done:
            self._on(Event.FORWARD_DONE)
        self.schedule.use(self)
        if self._forward is None:
            self.schedule.cleanup_failed_passes()
        recomputed = current_pass() != -1
        if self._forward is not None and not recomputed:
            return self._forward
        return ForwardCall(self, recomputed=recomputed)

    def _tie_inputs(
        self, call: ForwardCall, inputs: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the inputs, those on the device as outputs of a ``PostBackward`` node, each
        available only once all are, and the tensors that the next gather must wait for."""
        lazy = [tensor for tensor in inputs if tensor.device.type == "xla"]
        ties = self.config.optimization_barrier_in_forward and not call.recomputed
        with torch.no_grad():
            if call.recomputed:
                before = self._before(lazy)
            else:
                before = self.schedule.before_gather(lazy) if ties else []
                self._prefetch_others(before)
            ready = ops.barrier(lazy) if ties else [tensor.clone() for tensor in lazy]
        tied = dict(zip(map(id, lazy), PostBackward.apply(call, ready, *lazy), strict=True))
        return [tied.get(id(tensor), tensor) for tensor in inputs], before

    def _run_in_transform(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the forward inside a transform of ``torch.func``, on parameters that were gathered
        outside of it: constants for it, and for autograd around it connected to the shards.
        Autograd saves them whole, as transforms allow no hooks on what it saves."""
        if in_forward_mode() and ops.runtime().device_type() == "CPU" and ops.world_size() > 1:
            raise RuntimeError(
                "an FSDP unit was called inside jvp, jacfwd or hessian of torch.func, which keep "
                "their state per process, and CPU ranks are threads of one: they would mix their "
                "tangents. Use jacrev, jacrev(jacrev(f)), one CPU rank, or TPU"
            )
        self.schedule.cleanup_failed_passes()
        gathers = self.state in NEEDS_GATHER
        if gathers:
            with outside_transforms():
                call = ForwardCall(self)
                gathered = self.group.unshard([], larger=self.settings.keeps_larger_shards)
                self._on(Event.FORWARD, connect(call, gathered.params), call.versions)
        try:
            args, kwargs = map_tensors(self.cast_input, (args, kwargs))
            with running(self):
                outputs = forward(*args, **kwargs)
        finally:
            if gathers:
                self._on(Event.FORWARD_DONE)
        return map_tensors(self.cast_output, outputs)

    @in_phase("forward")
    def _compute(
        self, call: ForwardCall, part: int, before: list[Tensor], forward: Callable[[], Outputs]
    ) -> Any:
        """Run the original forward, as opposed to ``_recompute``."""
        if self._forward is None:
            self._begin_forward(call, before)
        else:
            self._on(Event.FORWARD)
        saved, for_backward = call.saved, call.for_backward
        call.running.add(part)
        try:
            with running(self), saved.hooks() if call.reshards else nullcontext():
                outputs = forward()
                self.schedule.end_deferred()
            result = self._connect_outputs(call, outputs, saved, for_backward)
            if changed := saved.changed_in_place():
                names = ", ".join(self.group.originals[index].names[0] for index in changed)
                raise ValueError(
                    f"{names} was changed in place in the forward of its FSDP unit. The change "
                    f"would be lost: full parameters are freed after the forward and gathered "
                    f"again from the shards. Compute with a changed copy instead, or change it "
                    f"outside the forward."
                )
        except BaseException as error:
            self.schedule.end_deferred(has_raised=True)
            if self._forward is call:
                self._on(Event.FORWARD_DONE)
            explain_hooks(error)
            raise
        call.running.discard(part)
        call.done.add(part)
        if self._forward is call and len(call.done) == self.parts:
            self._on(Event.FORWARD_DONE)
        elif self._forward is call and not call.running:
            self._on(Event.MODULE_DONE)
        return result

    def _begin_forward(self, call: ForwardCall, before: list[Tensor]) -> None:
        keeps_larger = call.reshards and self.settings.keeps_larger
        gathered = self.group.unshard(before, larger=keeps_larger)
        unsharded = connect(call, gathered.params)
        if self.settings.is_root and self.has_units:  # else ``Unshard`` runs at once
            for number in self.group.reduction.alone:
                unsharded[number] = reduce_early(call, number, unsharded[number])
        call.saved = SavedParams(unsharded, partial(self.unsharded_for_saved, call))
        self._on(Event.FORWARD, unsharded, call.versions)
        for begin in self.at_forward:
            begin(self, call, call.saved)
        call.for_backward = gathered.post_forward_shards if call.reshards else unsharded
        self._forward = call

    def _connect_outputs(
        self, call: ForwardCall, outputs: Outputs, saved: SavedParams, kept: Sequence[Tensor]
    ) -> Any:
        """Return the result with the outputs in the output dtype, each on the device available only
        once all are. Backward begins at them, with what is ``kept`` for it."""
        for shard in [each for each in outputs.tensors if isinstance(each, ShardView)]:
            refuse_shard(shard, "returning it")
        found = [saved.own(tensor) for tensor in outputs.tensors]
        if self.config.optimization_barrier_in_forward:
            ops.barrier_([each for each in found if ops.is_pending(each)])
        before_backward(partial(gather_again, call, list(kept)), found)
        return outputs.replaced(found, self.cast_output)

    @in_phase("recompute")
    def _recompute(
        self, call: ForwardCall, part: int, before: list[Tensor], forward: Callable[[], Outputs]
    ) -> Any:
        """Recompute the forward for a checkpoint, inside a backward pass. The modules hold what is
        gathered until the pass ends, so that the unit's backward needs no other gather."""
        group = self.group
        if self.state in NEEDS_GATHER:
            self._gather_for_backward(before)
        held, versions = group.unsharded, group.unsharded_versions
        unsharded = connect(call, [tensor.detach().clone() for tensor in held])
        saved = SavedParams(unsharded, partial(self.unsharded_for_saved, call))
        group.to_unsharded(unsharded, versions=versions)
        self._recomputing.add(part)
        try:
            with forward_code(), saved.hooks() if call.reshards else nullcontext():
                outputs = forward()
        finally:
            self._recomputing.discard(part)
            revokes = self.state in REVOKED
            group.to_unsharded(held, versions=versions, idle=True, revokes=revokes)
            saved.reshard(group, versions, None)
        return self._connect_outputs(call, outputs, saved, [] if call.reshards else unsharded)

    # ------------------------------------------------------------ backward

    def pre_backward(
        self, call: ForwardCall, saved: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Gather the parameters once the gradients of the outputs, and what is unfinished, are
        computed; return these gradients, each available only once all are.

        Args:
            call: the forward call. Raises RuntimeError if shards were changed since.
            saved: for backward: unsharded parameters, larger shards, or none.
            grads: of the outputs.
        """
        if call.reshards:
            refuse_changed(call.versions, self.group.versions)
        if self.state is UnitState.WAITING:
            self._on(Event.FORWARD_DONE)
        unshards = self.settings.unshard_in_backward or not call.reshards
        if self.state in NEEDS_GATHER and self.group.params and unshards:
            before = self._before([grad for grad in grads if grad is not None])
            if saved and not call.reshards:
                self._hold_until_end_of_pass(list(saved), call.versions)
            else:
                self._gather_for_backward(before, saved)
            self._prefetch_others(before, in_backward=True)
        ready = self._tie_grads(grads)
        backward_scopes.enter(self, self.log.unit)
        return ready

    def unsharded_for_saved(self, call: ForwardCall) -> Sequence[Tensor]:
        """Return the unsharded parameters in backward, if the shards are those of ``call``. Gathers
        them if ``pre_backward`` has not run yet: backward may begin at a tensor inside the module,
        such as a loss stored on it."""
        self.ensure_unsharded()
        refuse_changed(call.versions, self.group.unsharded_versions)
        return self.group.unsharded

    def ensure_unsharded(self) -> None:
        """Gather the parameters for backward, unless the modules hold unsharded ones already."""
        if self.state is UnitState.SHARDED:
            with torch.no_grad():
                self._gather_for_backward(self._before([]))

    def reduce_early(self, call: ForwardCall, number: int, grad: Tensor) -> Tensor | None:
        """Reduce the gradient of original parameter ``number`` before those of the others, and
        return None; return ``grad`` if more is needed for it, such as later passes."""
        if not self.reduces_plainly:
            return grad
        reduction = self.group.reduction
        found = reduction.scatter({number: grad}, [reduction.alone[number]])
        call.add_reduced_early(found)
        self.schedule.finish_first(found.values())
        return None

    @property
    def reduces_plainly(self) -> bool:
        """Whether backward reduces gradients at once: there are no later passes, and no hooks of
        the user."""
        return self.settings.sync_gradients and self.group.reduces_plainly

    def refuse_unreduced(self) -> None:
        """Raise RuntimeError if backward does not reduce gradients now, as those that are reduced
        later have no graph."""
        if not self.settings.sync_gradients or self.group.waits_for_replicas:
            raise RuntimeError(
                "gradients of parameters were to have a graph (create_graph=True) in a backward "
                "that does not reduce them over the ranks. Call it outside of no_sync, with "
                "set_requires_gradient_sync and set_requires_all_reduce on; or, if only gradients "
                "of inputs are needed, ask for these alone: "
                "torch.autograd.grad(outputs, inputs, create_graph=True)"
            )

    def reduce_grads(
        self, grads: Sequence[Tensor | None], early: ReducedBuckets | None = None
    ) -> list[Tensor | None]:
        """Return the gradient of each shard, from that of each original parameter and those that
        ``reduce_early`` has reduced; None for each while gradients are not synchronized."""
        schedule = self.schedule
        if not self.settings.sync_gradients:
            self.group.leave_unreduced(grads)
        elif reduced := self.group.reduce(grads, early):
            schedule.finish_first(reduced.sums)
            return reduced.grads
        schedule.ensure_end_of_pass_callback()
        if self not in schedule.unreduced:
            schedule.unreduced.append(self)
        return [None] * len(self.group.params)

    def post_backward_inputs(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs, each available only once all are."""
        ready = self._tie_grads(grads)
        self.schedule.finish_first(grad for grad in ready if grad is not None)
        return ready

    def post_backward(self, call: ForwardCall) -> None:
        """Free the parameters, as all gradients of ``call`` are computed."""
        backward_scopes.leave(self)
        # Not in the inner pass of a reentrant checkpoint: the outer pass still needs them.
        if self.schedule.end_hold(self) or call.recomputed:
            self._end_backward()

    def reduce_unreduced(self) -> None:
        """Reduce gradients left by ``no_sync``, if no backward has done so since."""
        if not self.settings.sync_gradients or self.group.waits_for_replicas:
            return
        self.schedule.unreduced.remove(self)
        if self.group.has_unreduced:
            with torch.no_grad():
                if reduced := self.group.reduce([]):
                    self.group.accumulate(reduced.grads)

    def _gather_for_backward(self, before: list[Tensor], larger: Sequence[Tensor] = ()) -> None:
        """Gather the parameters, from ``larger`` shards if there are some, and let the modules hold
        them until the backward pass ends."""
        gathered = self.group.unshard(before, from_larger=larger)
        # With grad mode on: a reentrant checkpoint inside the unit builds a new graph on these.
        with torch.enable_grad():
            call = ForwardCall(self)
            self._hold_until_end_of_pass(connect(call, gathered.params), call.versions)

    def _hold_until_end_of_pass(self, unsharded: list[Tensor], versions: list[int]) -> None:
        self._on(Event.BACKWARD, unsharded, versions)
        self.schedule.hold_for_pass(self)

    def _prefetch_others(self, before: Sequence[Tensor], *, in_backward: bool = False) -> None:
        """Gather the parameters of the units to prefetch once ``before`` are computed; in backward
        only of units that reshard after forward."""
        settings = self.settings
        for reference in settings.backward_prefetch if in_backward else settings.forward_prefetch:
            unit = reference()
            if unit is not None and (unit.settings.gathers_in_backward or not in_backward):
                unit.prefetch(before)
                unit.schedule.hold_for_next(unit)

    def _tie_grads(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        if not self.config.optimization_barrier_in_backward:
            return list(grads)
        tied = iter(ops.barrier([grad for grad in grads if grad is not None]))
        return [None if grad is None else next(tied) for grad in grads]

    def _before(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return ``Schedule.before_gather(tensors)``, or nothing without barriers in backward."""
        before = self.schedule.before_gather(tensors)
        return before if self.config.optimization_barrier_in_backward else []


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
