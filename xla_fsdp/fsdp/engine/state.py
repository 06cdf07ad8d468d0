"""One FSDP unit: all-gather before its forward and backward, reduce-scatter after its backward.

``FSDPState.run`` computes the forward and adds autograd nodes to the graph; these nodes call the
methods under "backward", in the order of the file. ``FSDPContext`` is shared by all units of one
model: it orders their all-gathers and frees parameters when a backward pass ends.

Invariants: outside of forward and backward a unit holds unsharded parameters only if the user asked
for them; optimizers, state dicts and the next forward read the shards. A backward pass frees what
it gathered when it ends. After a pass that raised, ``FSDPContext.abandon`` does so, which every
forward and every access to the parameters calls first. Every gather waits at an optimization
barrier; without barriers XLA may merge the backward's gather with the forward's and hold the
unsharded parameters in between.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from xla_fsdp.distributed.collectives import Collectives, Meanwhile, RingCollectives
from xla_fsdp.distributed.higher_order import (
    explain_hooks,
    in_forward_mode,
    in_transform,
    outside_transforms,
)
from xla_fsdp.distributed.pytree import map_tensors
from xla_fsdp.fsdp.engine.all_gather import InTurn
from xla_fsdp.fsdp.engine.autograd import (
    ForwardCall,
    PostBackward,
    PreBackward,
    SavedParams,
    connect,
    on_device,
    reduce_early,
    through,
)
from xla_fsdp.fsdp.engine.config import FSDPConfig
from xla_fsdp.fsdp.engine.forward_weight import detached
from xla_fsdp.fsdp.engine.inputs import Inputs, Outputs
from xla_fsdp.fsdp.engine.large_linear import LinearInPieces, large_weights
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup, ShardedState
from xla_fsdp.fsdp.engine.param_guards import Dummies, Reshard, in_forward
from xla_fsdp.fsdp.engine.reduce_scatter import ReducedBuckets
from xla_fsdp.fsdp.engine.shard_tensor import refuse_shards
from xla_fsdp.xla import ops
from xla_fsdp.xla.loop import LoopCache


def current_pass() -> int:
    """Return the number of the backward pass that the calling thread runs, or -1 outside of one."""
    return torch._C._current_graph_task_id()


class _Running(threading.local):
    def __init__(self) -> None:
        self.units: list[FSDPState] = []  # outermost first


_running = _Running()


@contextlib.contextmanager
def running(unit: FSDPState) -> Iterator[None]:
    """Add ``unit`` to ``running_units()`` inside the block, which runs its forward."""
    _running.units.append(unit)
    try:
        with in_forward(True):
            yield
    finally:
        _running.units.remove(unit)


def running_units() -> list[FSDPState]:
    """Return the units whose forward the calling thread is in, outermost first."""
    return list(_running.units)


class PrefetchGate:
    """Delays each gather until the inputs of the previous unit are computed.

    A gather then overlaps with the computation of the previous unit, and at most two units'
    parameters are in memory at once.
    """

    def __init__(self) -> None:
        self._last: Sequence[Tensor] = ()

    def swap(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Store ``tensors``; return those of the previous call, or ``tensors`` at the first."""
        last, self._last = self._last, tuple(tensors)
        return list(last or self._last)

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Let the next gather wait for ``tensors``, the results of a loop: XLA overlaps no
        collective with a loop."""
        self._last = tuple(tensors)

    def clear(self) -> None:
        """Drop the stored tensors; as live tensors they would become outputs of the program."""
        self._last = ()


class RingGate:
    """Sends large gradients around rings, those of one unit while the next one computes.

    The TPU compiler leaves reduce-scatters blocking, but hides rings under compute. It ends them as
    late as it may, and they hold unsharded gradients meanwhile. So the backward of a unit waits for
    all rings but those of the unit before it. Where there are no rings, nothing waits.

    Attributes:
        beside_loop: whether blocks of the model run as a loop; units around it then use no rings,
            which would only take memory, as XLA overlaps no collective with a loop.
    """

    def __init__(self) -> None:
        self.beside_loop = False
        # One for all units among the same ranks, as each has inputs of the program.
        self._rings: dict[tuple[Hashable, Meanwhile], Collectives] = {}
        self._last: list[Tensor] = []
        self._before: list[Tensor] = []
        self._reduced_in = -1  # number of the backward pass in which a unit last reduced

    def of(self, group: FSDPParamGroup, meanwhile: Meanwhile) -> Collectives:
        """Return the collectives that reduce the gradients of a unit."""
        own = group.collectives
        if self.beside_loop:
            return own
        key = own.key, meanwhile
        if key not in self._rings:
            self._rings[key] = own.in_rings(meanwhile)
        return self._rings[key]

    def unit_reduces(self) -> None:
        """Record that a unit reduces its gradients in the current backward pass."""
        self._reduced_in = current_pass()

    @property
    def has_reduced(self) -> bool:
        """Whether a unit has reduced its gradients in the current backward pass."""
        return self._reduced_in == current_pass()

    def sent(self, sums: Sequence[Tensor], by: Collectives) -> None:
        """Let the backward of the unit after the next one wait for those ``sums`` of one unit that
        come from rings."""
        if isinstance(by, RingCollectives):
            self._before += self._last
            self._last = [each for each in sums if by.went_around(each)]

    def wait(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return gradients that enter a unit, not available before rings that should have ended."""
        before, self._before = self._before, []
        # Not by a barrier, which the compiler drops before it schedules.
        ready = iter(ops.once_computed(before, [grad for grad in grads if grad is not None]))
        return [None if grad is None else next(ready) for grad in grads]

    def clear(self) -> None:
        """Drop the stored tensors; as live tensors they would become outputs of the program."""
        self._last, self._before = [], []


class FSDPContext:
    """State shared by all units of one model; the root unit creates it.

    Args:
        device: this rank's XLA device.
        sync_on_end: run the traced program when a backward pass ends.

    Attributes:
        dummies: the data of parameters that units have freed.
        pending: tensors to compute before the next gather starts (reduced gradients, gradients of
            inputs, stepped shards); else their units' parameters would still be in memory.
        forward_gate: orders the gathers in forward.
        backward_gate: orders the gathers in backward.
        rings: orders the reductions that are hidden under compute.
        has_units: whether there are units inside of the root.
        is_last: False if more backward passes follow before the optimizer step; the first gather
            of the next pass then waits for what is pending at the end of this one.
        unreduced: units with gradients left by ``no_sync``.
    """

    def __init__(self, device: torch.device, *, sync_on_end: bool = False) -> None:
        self.pending: list[Tensor] = []
        self.dummies = Dummies(device)
        self.forward_gate, self.backward_gate = PrefetchGate(), PrefetchGate()
        self.rings = RingGate()
        self.has_units = False
        self.is_last = True
        # A list, not a set: all ranks must reduce in the same order.
        self.unreduced: list[FSDPState] = []
        self._sync_on_end = sync_on_end
        # Units that hold parameters for a forward or backward that may never run.
        self._unused: list[FSDPState] = []
        # By number of the backward pass: reentrant checkpoints run passes inside passes.
        self._unsharded_in: dict[int, list[FSDPState]] = {}

    def replay_facts(self) -> tuple[Any, ...]:
        """Return what a traced step depends on besides tensors."""
        return self.is_last, [*map(id, self.unreduced)]

    # ------------------------------------------------------------ order of gathers

    def gate(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that a gather in backward must wait for. The caller puts both behind
        a barrier.

        Args:
            tensors: inputs of the computation that uses the gathered parameters.
        """
        pending, self.pending = self.pending, []
        return self.backward_gate.swap([*tensors, *pending])

    def fence(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return ``tensors``, the inputs of a loop, and the pending tensors: the loop must wait for
        all of them, so that pending work needs no memory while it runs."""
        pending, self.pending = self.pending, []
        self.backward_gate.clear()
        return [*tensors, *pending]

    def end_loop_in_forward(self, results: Sequence[Tensor]) -> None:
        """Let the next gather in forward wait for ``results`` of a loop, and for no gather before
        it."""
        self.forward_gate.hold(results)
        for unit in running_units()[-1:]:
            unit.start_turns()

    def wait_for(self, tensor: Tensor) -> None:
        """Add ``tensor`` to ``pending`` if a unit of this model takes part in the current backward
        pass; the end of the pass clears it."""
        if current_pass() in self._unsharded_in:
            self.pending.append(tensor)

    # ------------------------------------------------------------ clean-up

    def reshard_at_end(self, unit: FSDPState) -> None:
        """Free the gathered parameters of ``unit`` when the current backward pass ends."""
        self.watch()
        self._unsharded_in[current_pass()].append(unit)

    def watch(self) -> None:
        """Run the clean-up when the current backward pass ends."""
        number = current_pass()
        if number not in self._unsharded_in:
            self._unsharded_in[number] = []
            Variable._execution_engine.queue_callback(partial(self._end, number))

    def mark_unused(self, unit: FSDPState) -> None:
        """Free the parameters of ``unit`` when the root's forward or the backward pass ends, unless
        ``mark_used`` comes first."""
        if unit not in self._unused:
            self._unused.append(unit)

    def mark_used(self, unit: FSDPState) -> None:
        """Undo ``mark_unused``, because the unit runs now."""
        if unit in self._unused:
            self._unused.remove(unit)

    def free_unused(self) -> None:
        """Free the parameters of all units that are marked as unused."""
        units, self._unused = self._unused, []
        for unit in units:
            unit.free_unused()

    def abandon(self) -> None:
        """Clean up after passes that raised. Does nothing inside a backward pass."""
        if current_pass() != -1:
            return
        if not running_units():
            self.free_unused()
            self.forward_gate.clear()
        if not self._unsharded_in:
            return
        raised, self._unsharded_in = self._unsharded_in, {}
        self._clear_pending()
        for units in raised.values():
            for unit in units:
                unit.reshard_after_pass()

    def _end(self, number: int) -> None:
        for unit in self._unsharded_in.pop(number, []):
            unit.reshard_after_pass()
        if self._unsharded_in:
            return
        # Gradients that earlier passes under no_sync left in units that this pass did not reach.
        for unit in list(self.unreduced):
            unit.reduce_unreduced()
        self.free_unused()
        if not self.is_last:
            return
        self._clear_pending()
        if self._sync_on_end:
            ops.sync()

    def _clear_pending(self) -> None:
        self.pending.clear()
        self.backward_gate.clear()
        self.rings.clear()


class StateRef:
    """A weak reference from one state to another; pickling and deep copies follow it.

    Strong references would make cycles, so that parameters are freed only at the next garbage
    collection.
    """

    def __init__(self, unit: FSDPState | None) -> None:
        self._unit = None if unit is None else weakref.ref(unit)

    def __call__(self) -> FSDPState | None:
        return None if self._unit is None else self._unit()

    def __reduce__(self) -> tuple[Any, ...]:
        return StateRef, (self(),)


@dataclass
class FSDPSettings:
    """Options that may change between steps; ``FSDPConfig`` has the initial ones.

    Args:
        reshard_after_forward: free unsharded parameters between forward and backward.
        keeps_larger: between them, hold shards over smaller groups of ranks.
        keeps_on_root: do not reshard after forward if the unit is a root.
        reshard_after_backward: free unsharded parameters after backward.
        unshard_in_backward: gather the parameters before backward.
        sync_gradients: reduce gradients in backward.
        is_last_backward: False if more backward passes follow before the optimizer step.
        forward_prefetch: units to gather together with this one in forward.
        backward_prefetch: units to gather together with this one in backward.
        is_root: whether the unit is inside no other unit.
    """

    reshard_after_forward: bool
    keeps_larger: bool
    keeps_on_root: bool
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    sync_gradients: bool = True
    is_last_backward: bool = True
    forward_prefetch: Sequence[StateRef] = ()
    backward_prefetch: Sequence[StateRef] = ()
    is_root: bool = True

    @property
    def reshards_after_forward(self) -> bool:
        """Whether unsharded parameters are freed between forward and backward."""
        return self.reshard_after_forward and not (self.is_root and self.keeps_on_root)

    @property
    def keeps_larger_shards(self) -> bool:
        """Whether backward gathers from larger shards."""
        return self.keeps_larger and self.reshards_after_forward

    @property
    def gathers_in_backward(self) -> bool:
        """Whether backward gathers from the shards."""
        return self.reshards_after_forward and not self.keeps_larger


@dataclass
class ForwardPass:
    """One forward of all modules of a unit, from the gather until the parameters are freed.

    Args:
        call: shared by the autograd nodes of the forward.
        for_backward: tensors to save for backward: larger shards, unsharded parameters, or none.
        saved: saved-tensor hooks of the forward.
        running: numbers of the modules whose forward runs.
        done: numbers of the modules whose forward has returned.
        in_turn: orders the gathers of the units directly inside. Not of the unit itself, whose
            parameters may be needed last, such as a head's.
    """

    call: ForwardCall
    for_backward: list[Tensor]
    saved: SavedParams
    running: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    in_turn: InTurn = field(default_factory=InTurn)


class FSDPState:
    """Runs the forward and backward of one unit with unsharded parameters.

    Args:
        group: the unit's parameters; it may have none.
        config: the unit's options.
        device: this rank's XLA device.
        parts: number of modules whose parameters are gathered and freed together.

    Attributes:
        settings: options that may change between steps.
        context: shared with the other units of the model after ``join``.
    """

    def __init__(
        self, group: FSDPParamGroup, config: FSDPConfig, device: torch.device, parts: int = 1
    ) -> None:
        self.group = group
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
        self.context = FSDPContext(device, sync_on_end=config.sync_on_finalization)
        self._forward: ForwardPass | None = None
        self._recomputing: set[int] = set()  # numbers of modules whose forward is recomputed
        self._unsharded_in = -1  # number of the backward pass that gathered the parameters
        self._loops = LoopCache()  # of large weights

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.group.log.unit}: {self.state.name}, {self.group!r})"

    def join(self, root: FSDPState) -> None:
        """Share the context of ``root``, a unit around this one."""
        self.settings.is_root = False
        self.context = root.context
        self.context.has_units = True

    @property
    def state(self) -> ShardedState:
        """What the modules hold."""
        return self.group.sharded_state

    def replay_facts(self) -> tuple[Any, ...]:
        """Return what a traced step depends on besides tensors. Who adds a field that changes what
        is traced adds it here, or to what the group and the context return."""
        settings = [[*v] if isinstance(v, list) else v for v in vars(self.settings).values()]
        return settings, *self.context.replay_facts(), *self.group.replay_facts()

    @property
    def in_use(self) -> Sequence[Tensor]:
        """The unsharded parameters with which a forward now computes, which must not change."""
        return () if self._forward is None else self._forward.saved.unsharded

    # ------------------------------------------------------------ at the user's request

    @in_forward(False)
    def prefetch(self, before: Sequence[Tensor] = ()) -> None:
        """Gather the parameters for the next forward or backward, once ``before`` are computed."""
        self.group.prefetch(
            before, again=current_pass() != -1, larger=self.settings.keeps_larger_shards
        )

    @in_forward(False)
    def unshard(self) -> None:
        """Let the modules hold unsharded parameters until the next forward, backward or
        ``reshard``. Gradients of results computed with them reach the shards."""
        self.context.abandon()
        if self.state is ShardedState.SHARDED and self.group.params:
            self.prefetch()
            found = self.group.take_prefetched()
            call = self._new_call(recomputed=False)
            unsharded = connect(call, [] if found is None else found.params)
            self.group.to_unsharded(unsharded, ShardedState.UNSHARDED)

    def reshard(self) -> None:
        """Undo ``unshard`` and ``prefetch``."""
        self.group.reshard()

    @contextlib.contextmanager
    def summoned(self, unsharded: list[nn.Parameter]) -> Iterator[None]:
        """Let the modules hold these leaf parameters inside the block, as
        ``FSDPParamGroup.summoned`` does, after a clean-up of backward passes that raised."""
        self.context.abandon()
        with self.group.summoned(unsharded):
            yield

    @contextlib.contextmanager
    def computing_with(self, unsharded: list[Tensor]) -> Iterator[None]:
        """Let the modules hold these parameters inside the block, for a forward or backward that is
        traced as a program of its own (the body of a loop)."""
        self.refuse_run()
        self.reshard()
        self.group.to_unsharded(unsharded, ShardedState.FORWARD)
        try:
            with in_forward(True):
                yield
        finally:
            self.group.to_sharded()
            # Outside of its program a traced tensor has no value, and torch_xla aborts.
            Reshard(self.group, self.group.versions, freed=True).take_all(unsharded)

    # ------------------------------------------------------------ forward

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any, part: int = 0) -> Any:
        """Return ``forward(*args, **kwargs)``, computed with unsharded parameters.

        Args:
            forward: of one of the unit's modules.
            args: its arguments.
            kwargs: its keyword arguments.
            part: number of the module in the unit.

        Raises:
            ValueError: if the forward changed a parameter in place, or arguments as
                ``Inputs.call`` refuses it.
            RuntimeError: inside ``summoned``, or if a parameter is on the meta device.
        """
        if self._is_running(part):  # the module calls itself
            with in_forward(True):
                return forward(*args, **kwargs)
        self.refuse_run()
        if in_transform():
            return self._run_in_transform(forward, args, kwargs)
        call = self._begin_call(part)
        inputs = Inputs(args, kwargs)
        self._refuse_losses_of_others(call, inputs.sources)
        tied, before = self._tie_inputs(call, [self.cast_input(t) for t in inputs.sources])
        compute = self._recompute if call.recomputed else self._compute
        result = compute(call, part, before, partial(inputs.call, forward, tied))
        self._end_call()
        return result

    def start_turns(self) -> None:
        """Let the next unit inside of this one gather without waiting for those before it."""
        if self._forward is not None:
            self._forward.in_turn = InTurn()

    def _is_running(self, part: int) -> bool:
        if part in self._recomputing:
            return True
        return self._forward is not None and part in self._forward.running

    def refuse_run(self) -> None:
        """Raise RuntimeError inside ``summoned``, or if a parameter is on the meta device."""
        if self.state is ShardedState.SUMMONED:
            raise RuntimeError(
                "an FSDP unit was called inside summon_full_params, where its parameters are not "
                "connected to the shards that are trained. Call it outside of the block"
            )
        on_meta = [param.key for param in self.group.params if param.slots.shard.is_meta]
        if on_meta:
            raise RuntimeError(
                f"{', '.join(on_meta)}: on the meta device, without values. Give them memory by "
                f"model.to_empty(device=torch_xla.device()), then values by your own "
                f"initialization or load_state_dict"
            )

    def _refuse_losses_of_others(self, call: ForwardCall, inputs: Sequence[Tensor]) -> None:
        stepper, settings = self.group.stepper, self.settings
        if stepper is None or not (settings.is_root and settings.is_last_backward):
            return
        if torch.is_grad_enabled() and not call.recomputed:
            stepper.refuse_losses_of_others(inputs)

    def cast_input(self, tensor: Tensor) -> Tensor:
        """Return an input in the dtype that the unit computes with. An outermost unit moves inputs
        from host memory to its device.

        Raises:
            RuntimeError: if it is a shard.
        """
        refuse_shards([tensor], "passing it to a unit")
        if tensor.device.type == "cpu" and not _running.units:
            tensor = tensor.to(self.device)
        return _cast(tensor, self.config.input_dtype(of_root=self.settings.is_root))

    def cast_output(self, tensor: Tensor) -> Tensor:
        """Return an output in the dtype that the unit returns."""
        return _cast(tensor, self.config.output_dtype)

    def _new_call(self, *, recomputed: bool) -> ForwardCall:
        reshards = self.settings.reshards_after_forward
        return ForwardCall(self, recomputed=recomputed, reshards=reshards)

    def _begin_call(self, part: int) -> ForwardCall:
        """Continue the forward pass if another of the unit's modules has begun it, or begin one."""
        self.context.mark_used(self)
        if self._forward is not None and part in self._forward.done:
            self._end_forward()
        if self._forward is None:
            self.context.abandon()
        recomputed = current_pass() != -1
        if self._forward is not None and not recomputed:
            return self._forward.call
        return self._new_call(recomputed=recomputed)

    def _end_call(self) -> None:
        if self._forward is not None:
            self.context.mark_unused(self)
        if not running_units():
            self.context.forward_gate.clear()
            if self.settings.is_root and self._forward is None and current_pass() == -1:
                self.context.free_unused()

    def _tie_inputs(
        self, call: ForwardCall, inputs: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the inputs, those on the device as outputs of a ``PostBackward`` node, and the
        tensors that the next gather must wait for."""
        lazy = [tensor for tensor in inputs if on_device(tensor)]
        with torch.no_grad():
            ready, before = self._ordered(lazy, recomputed=call.recomputed)
        return through(partial(PostBackward.apply, call, ready), inputs), before

    def _ordered(
        self, inputs: list[Tensor], *, recomputed: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return new tensors equal to the inputs, each available only once all inputs are, and the
        tensors that the next gather must wait for."""
        if recomputed:
            return [tensor.clone() for tensor in inputs], self._before(inputs)
        if not self.config.optimization_barrier_in_forward:
            _prefetch(self.settings.forward_prefetch, [])
            return [tensor.clone() for tensor in inputs], []
        before = self.context.forward_gate.swap(inputs)
        _prefetch(self.settings.forward_prefetch, before)
        return ops.barrier(inputs), before

    def _run_in_transform(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the forward inside a transform of ``torch.func``.

        The transform sees the operations of the module only, on parameters that were gathered
        outside of it: they are constants for it, and for autograd around it connected to the
        shards. Autograd saves them whole, as transforms allow no hooks on what it saves.

        Raises:
            RuntimeError: in forward mode, on several CPU ranks.
        """
        if in_forward_mode() and ops.runtime().device_type() == "CPU" and ops.world_size() > 1:
            raise RuntimeError(
                "an FSDP unit was called inside jvp, jacfwd or hessian of torch.func, which keep "
                "their state per process, and CPU ranks are threads of one: they would mix their "
                "tangents. Use jacrev, jacrev(jacrev(f)), one CPU rank, or TPU"
            )
        self.context.abandon()
        gathers = self.state in (ShardedState.SHARDED, ShardedState.UNSHARDED)
        if gathers:
            with outside_transforms():
                call = self._new_call(recomputed=False)
                unsharded = connect(call, self._unshard_for_forward([])[0])
                self.group.to_unsharded(unsharded, ShardedState.FORWARD, versions=call.versions)
        try:
            args, kwargs = map_tensors(self.cast_input, (args, kwargs))
            with running(self):
                outputs = forward(*args, **kwargs)
        finally:
            if gathers:
                self.group.to_sharded()
        return map_tensors(self.cast_output, outputs)

    def _compute(
        self, call: ForwardCall, part: int, before: list[Tensor], forward: Callable[[], Outputs]
    ) -> Any:
        """Run the original forward, as opposed to ``_recompute``."""
        current = self._forward or self._begin_forward(call, before)
        current.running.add(part)
        try:
            hooks = current.saved.hooks() if current.call.reshards else nullcontext()
            with running(self), hooks:
                outputs = forward()
            result = self._tie_outputs(call, outputs, current.for_backward)
        except BaseException as error:
            self._forward = None
            if self.state is ShardedState.FORWARD:
                self._reshard_after(current)
            explain_hooks(error)
            raise
        current.running.discard(part)
        current.done.add(part)
        if len(current.done) == self.parts:
            self._end_forward()
        return result

    def _begin_forward(self, call: ForwardCall, before: list[Tensor]) -> ForwardPass:
        unsharded, larger = self._unshard_for_forward(before)
        unsharded = connect(call, unsharded)
        if self.settings.is_root:
            unsharded = [reduce_early(call, at, each) for at, each in enumerate(unsharded)]
        saved = SavedParams(unsharded, partial(self.unsharded_for_saved, call))
        self.group.to_unsharded(unsharded, ShardedState.FORWARD, versions=call.versions)
        self._compute_in_pieces(call, saved)
        for_backward = larger if call.reshards else unsharded
        self._forward = ForwardPass(call, for_backward, saved)
        return self._forward

    def _compute_in_pieces(self, call: ForwardCall, saved: SavedParams) -> None:
        """Let ``F.linear`` use large weights of a root piece by piece. Inside of other units, the
        loops would keep gathers of other parameters from being hidden."""
        settings = self.settings
        of_root = settings.is_root and self.context.has_units
        # A root keeps its parameters for backward, which comes next; at the user's request all.
        gathers = self.group.collectives.num_shards > 1
        if of_root and gathers and settings.reshard_after_forward and not settings.keeps_larger:
            for original, number in large_weights(self.group).items():
                LinearInPieces(call, saved, original, number, self._loops).mark()

    def _unshard_for_forward(self, before: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return unsharded parameters, and the larger shards that backward gathers from, if any."""
        group = self.group
        again, larger = current_pass() != -1, self.settings.keeps_larger_shards
        if group.holds_current:
            return group.copies(), []
        if found := group.take_prefetched():
            return found.params, found.post_forward_shards
        group.reshard()
        in_turn = None if again else self._in_turn()
        gathered = group.unshard(
            before, again=again, to_post_forward_shards=larger, in_turn=in_turn
        )
        return gathered.params, gathered.post_forward_shards

    def _in_turn(self) -> InTurn | None:
        """Return the order in which the gathers of this unit and of others beside it start, if they
        are in the forward of one around them."""
        around = [unit._forward for unit in running_units()[-1:] if unit._forward is not None]
        if not around or not self.config.optimization_barrier_in_forward:
            return None
        return around[0].in_turn

    def _tie_outputs(self, call: ForwardCall, outputs: Outputs, for_backward: list[Tensor]) -> Any:
        """Return the result with the outputs in the output dtype, those on the device as outputs of
        a ``PreBackward`` node, which saves ``for_backward``."""
        refuse_shards(outputs.tensors, "returning it")
        lazy = [tensor for tensor in outputs.tensors if on_device(tensor)]
        with torch.no_grad():
            tie = self.config.optimization_barrier_in_forward
            ready = ops.barrier(lazy) if tie else [tensor.clone() for tensor in lazy]
        node = partial(PreBackward.apply, call, ready, len(for_backward), *for_backward)
        found = through(node, outputs.tensors)
        return outputs.replaced(found, self.cast_output)

    def _recompute(
        self, call: ForwardCall, part: int, before: list[Tensor], forward: Callable[[], Outputs]
    ) -> Any:
        """Recompute the forward for a checkpoint, inside a backward pass.

        The modules hold the gathered parameters until the pass ends, so that the backward of the
        unit needs no other gather.
        """
        group = self.group
        if group.sharded_state is ShardedState.SHARDED:
            self._unshard_until_end_of_pass(group.unshard_again(before, []))
        for_backward, versions = group.unsharded, group.unsharded_versions
        unsharded = connect(call, group.copies())
        saved = SavedParams(unsharded, partial(self.unsharded_for_saved, call))
        group.to_unsharded(unsharded, ShardedState.BACKWARD, versions=versions)
        self._recomputing.add(part)
        try:
            with in_forward(True), saved.hooks() if call.reshards else nullcontext():
                outputs = forward()
        finally:
            self._recomputing.discard(part)
            group.to_unsharded(for_backward, ShardedState.BACKWARD, idle=True, versions=versions)
            saved.reshard(Reshard(group, versions, freed=False), None)
        return self._tie_outputs(call, outputs, [] if call.reshards else unsharded)

    # ------------------------------------------------------------ end of a forward

    def _end_forward(self) -> None:
        """Let the modules hold shards again; free the parameters, unless backward is to use them
        again.

        Raises:
            ValueError: if the forward has changed a parameter in place.
        """
        current, self._forward = self._forward, None
        if current is None:
            return
        changed = current.saved.changed_in_place()
        self._reshard_after(current)
        if changed:
            raise self._changed_in_place(changed)

    def _reshard_after(self, current: ForwardPass) -> None:
        call = current.call
        if self.state is ShardedState.FORWARD:
            self.group.to_sharded(kept=not call.reshards)
        reshard = Reshard(self.group, call.versions, freed=call.reshards)
        current.saved.reshard(reshard, self.context.dummies if call.reshards else None)

    def _end_idle_forward(self) -> None:
        """End a forward in which some of the unit's modules were not called."""
        if self._forward is not None and not self._forward.running:
            self._end_forward()

    def free_unused(self) -> None:
        """Free prefetched parameters and those of a forward that some modules did not join."""
        self.group.drop_prefetched()
        self._end_idle_forward()

    def _changed_in_place(self, changed: list[int]) -> ValueError:
        names = ", ".join(self.group.originals[index].names[0] for index in changed)
        return ValueError(
            f"{names} was changed in place in the forward of its FSDP unit. The change would be "
            f"lost: full parameters are freed after the forward and gathered again from the "
            f"shards. Compute with a changed copy instead, or change it outside the forward."
        )

    # ------------------------------------------------------------ backward

    def pre_backward(
        self, call: ForwardCall, saved: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Gather the parameters once the gradients of the outputs and all pending tensors are
        computed.

        Args:
            call: the forward call.
            saved: the tensors that the forward saved for backward: unsharded parameters, larger
                shards, or none.
            grads: of the outputs.

        Returns:
            The gradients behind a barrier: each is available only once all are.

        Raises:
            RuntimeError: if shards were changed since the forward.
        """
        settings = self.settings
        self.context.watch()
        if call.reshards:
            refuse_changed(call.versions, self.group.versions)
        call.restart(current_pass())
        self._end_idle_forward()
        needs_params = self.state in (ShardedState.SHARDED, ShardedState.UNSHARDED)
        unshards = settings.unshard_in_backward or not call.reshards
        if needs_params and self.group.params and unshards:
            before = self._before([grad for grad in grads if grad is not None])
            if saved and not call.reshards:
                self._hold_until_end_of_pass(list(saved), call.versions)
            else:
                self._unshard_until_end_of_pass(self._unshard_for_backward(before, saved))
            _prefetch(settings.backward_prefetch, before, in_backward=True)
        return self._tie_grads(self.context.rings.wait(grads))

    def unsharded_for_saved(self, call: ForwardCall) -> list[Tensor]:
        """Return the unsharded parameters in backward. Gathers them if no ``PreBackward`` node has
        run yet: backward may begin at a tensor inside the module, such as a loss stored on it.

        Raises:
            RuntimeError: if shards were changed since the forward ``call``.
        """
        self.ensure_unsharded()
        refuse_changed(call.versions, self.group.unsharded_versions)
        return self.group.unsharded

    def ensure_unsharded(self) -> None:
        """Gather the parameters for backward, unless the modules hold unsharded ones already."""
        if self.state is ShardedState.SHARDED:
            with torch.no_grad():
                before = self._before([])
                self._unshard_until_end_of_pass(self._unshard_for_backward(before, []))

    def reduce_early(self, call: ForwardCall, number: int, grad: Tensor) -> Tensor | None:
        """Reduce the gradient of original parameter ``number`` before those of the others, and
        return None; return ``grad`` if that would need one more collective."""
        self.context.watch()
        if not self.settings.sync_gradients or not self.group.reduces_plainly:
            return grad
        rings, by = self.context.rings, self.group.collectives
        if self.context.has_units:
            # A head is followed by all units, which can hide rings, an embedding by none.
            by = rings.of(self.group, "step" if rings.has_reduced else "units")
        found = self.group.reduction.scatter_alone(number, grad, by)
        if found is None:
            return grad
        call.add_reduced_early(found)
        self.context.pending.extend(found.values())
        rings.sent(list(found.values()), by)
        return None

    @property
    def reduces_now(self) -> bool:
        """Whether a gradient that is reduced in parts is what backward expects: no later passes, no
        hooks of the user, no backward inside the forward."""
        plainly = self.settings.sync_gradients and self.group.reduces_plainly
        return plainly and self._forward is None

    def take_reduced(self, call: ForwardCall, number: int, total: Tensor) -> None:
        """Take the gradient of parameter ``number``, summed over the ranks, [rows, width]."""
        self.context.watch()
        call.add_reduced_early(self.group.reduction.as_bucket(number, total))
        self.context.pending.append(total)

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
        """Return the gradient of each shard; None for each while gradients are not synchronized.

        Args:
            grads: unsharded gradients, one for each original parameter.
            early: gradients that ``reduce_early`` has reduced.
        """
        self.context.watch()
        if not self.settings.sync_gradients:
            self.group.leave_unreduced(grads)
            self._remember_unreduced()
            return [None] * len(self.group.params)
        rings, by = self.context.rings, self.group.collectives
        if not (self.settings.is_root or self.group.reduction.has_hooks):
            by = rings.of(self.group, "units")
            rings.unit_reduces()
        reduced = self.group.reduce(grads, early, by)
        if self.group.has_unreduced:  # the all-reduce over replicas is still to come
            self._remember_unreduced()
        self.context.pending.extend(reduced.sums)
        rings.sent(reduced.sums, by)
        return reduced.grads

    def post_backward_inputs(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs, each available only once all are."""
        self.context.watch()
        ready = self._tie_grads(grads)
        self.context.pending.extend(grad for grad in ready if grad is not None)
        return ready

    def post_backward(self, call: ForwardCall) -> None:
        """Free the parameters, as all gradients of ``call`` are computed."""
        # Not in the inner pass of a reentrant checkpoint: the outer pass still needs them.
        if call.recomputed or self._unsharded_in == current_pass():
            self.reshard_after_pass()

    def reshard_after_pass(self) -> None:
        """Free the parameters gathered for backward; without ``reshard_after_backward``, detach
        them instead."""
        if self.state is not ShardedState.BACKWARD:
            return
        if self.settings.reshard_after_backward:
            self.group.to_sharded()
        else:
            unsharded = [detached(tensor) for tensor in self.group.unsharded]
            versions = self.group.unsharded_versions
            self.group.to_unsharded(unsharded, ShardedState.UNSHARDED, versions=versions)

    def reduce_unreduced(self) -> None:
        """Reduce gradients left by ``no_sync``, if no backward has done so since."""
        if not self.settings.sync_gradients or self.group.waits_for_replicas:
            return
        self.context.unreduced.remove(self)
        if self.group.has_unreduced:
            with torch.no_grad():
                self.group.accumulate(self.group.reduce([]).grads)

    def _remember_unreduced(self) -> None:
        if self not in self.context.unreduced:
            self.context.unreduced.append(self)

    def _unshard_for_backward(
        self, before: list[Tensor], post_forward_shards: Sequence[Tensor]
    ) -> list[Tensor]:
        group = self.group
        if group.holds_current:
            return group.copies()
        if found := group.take_prefetched():
            return found.params
        return group.unshard_again(before, post_forward_shards)

    def _unshard_until_end_of_pass(self, unsharded: list[Tensor]) -> None:
        """Connect the gathered parameters to the shards, and let the modules hold them until the
        backward pass ends."""
        # With grad mode on: a reentrant checkpoint inside the unit builds a new graph on these.
        with torch.enable_grad():
            call = self._new_call(recomputed=False)
            self._hold_until_end_of_pass(connect(call, unsharded), call.versions)

    def _hold_until_end_of_pass(self, unsharded: list[Tensor], versions: list[int]) -> None:
        self.group.to_unsharded(unsharded, ShardedState.BACKWARD, idle=True, versions=versions)
        self._unsharded_in = current_pass()
        self.context.reshard_at_end(self)

    def _tie_grads(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        if not self.config.optimization_barrier_in_backward:
            return list(grads)
        tied = iter(ops.barrier([grad for grad in grads if grad is not None]))
        return [None if grad is None else next(tied) for grad in grads]

    def _before(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return ``FSDPContext.gate(tensors)``, or nothing without barriers in backward."""
        before = self.context.gate(tensors)
        return before if self.config.optimization_barrier_in_backward else []


def refuse_changed(seen: Sequence[int], now: Sequence[int]) -> None:
    """Raise RuntimeError if shards have other versions ``now`` than in the forward (``seen``)."""
    if list(seen) != list(now):
        raise RuntimeError(
            "parameters of an FSDP unit were changed between its forward and its backward (by "
            "optimizer.step() or load_state_dict, say). Backward gathers them again and would "
            "mix new parameters with old activations. Change them after backward."
        )


def _prefetch(
    units: Sequence[StateRef], before: Sequence[Tensor], *, in_backward: bool = False
) -> None:
    """Gather the parameters of ``units`` once ``before`` are computed; in backward only of units
    that reshard after forward."""
    for reference in units:
        unit = reference()
        if unit is not None and (unit.settings.gathers_in_backward or not in_backward):
            unit.prefetch(before)
            unit.context.mark_unused(unit)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
