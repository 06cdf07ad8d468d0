"""One unit's forward and backward: gather, compute, free; gather again, compute, reduce, free.

The nodes of the autograd graph by which this happens are in ``unit_nodes``.
Always true: outside its forward and an open backward a unit holds no full parameter, so shards are
the only truth for optimizers, state dicts and the next forward. Barriers tie every gather to what
comes before it; without them XLA is free to merge the second gather into the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
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
from xla_fsdp.tree import map_tensors, tensors_in
from xla_fsdp.unit_nodes import Call, Enter, Exit, Unshard


class UnitState(Enum):
    """What the attributes of a unit's modules hold."""

    SHARDED = auto()
    FORWARD = auto()  # full parameters, while the unit's forward runs
    BACKWARD = auto()  # full parameters, gathered for backward
    SUMMONED = auto()  # full leaf parameters, for the user to look at or change


class Unit:
    """Runs a module's forward with gathered parameters, and its backward likewise.

    Args:
        group: the unit's parameters; it may have none.
        config: the unit's options.
        device: this rank's XLA device.
    """

    def __init__(self, group: ParamGroup, config: FSDPConfig, device: torch.device) -> None:
        self.group = group
        self.config = config
        self.device = device
        self.state = UnitState.SHARDED
        self.is_root = True
        self.sync_gradients = True
        self.is_last_backward = True  # no further pass adds to the gradients before the step
        self.steps_in_backward = False
        self.backward = BackwardPass(sync_on_end=config.sync_on_finalization)
        self.full: list[Tensor] = []  # what the attributes hold while not SHARDED
        self._opened_in = -1  # the backward pass that gathered _full
        self._dummy = torch.zeros(1, device=device)

    def join(self, root: Unit) -> None:
        """Become a part of the tree of units under ``root``."""
        self.is_root = False
        self.backward = root.backward

    @property
    def reshards_after_forward(self) -> bool:
        """Whether full parameters are freed between forward and backward."""
        if self.is_root and self.config.disable_reshard_on_root:
            return False
        return self.config.reshard_after_forward

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``forward(*args, **kwargs)`` with this unit's parameters gathered.

        Raises:
            ValueError: if the forward changed a parameter in place.
        """
        if self.state is UnitState.FORWARD:  # the module calls itself
            return forward(*args, **kwargs)
        if self.state is UnitState.SUMMONED:
            raise RuntimeError(
                "an FSDP unit was called inside summon_full_params, where its parameters are not "
                "connected to the shards that are trained. Call it outside of the block"
            )
        self.backward.abandon()
        recomputed = current_pass() != -1
        call = Call(self, recomputed)
        given = map_tensors(self._cast, (args, kwargs))
        inputs = through(partial(Enter.apply, call), given)
        versions = [_version(tensor) for tensor in tensors_in(inputs)]
        compute = self._recompute if recomputed else self._compute
        result = compute(call, lambda: forward(*inputs[0], **inputs[1]))
        _write_back(given, inputs, versions)
        if not running_units():
            self.backward.forward_gate.clear()
        return result

    @contextlib.contextmanager
    def showing(self, full: list[nn.Parameter]) -> Iterator[None]:
        """Let the modules hold these leaf parameters inside the block, in place of shards.

        Raises:
            RuntimeError: if they hold other full parameters at the time.
        """
        self.backward.abandon()
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

    def ensure_open(self) -> None:
        """Gather the parameters for backward, unless the modules hold full ones already."""
        if self.state is UnitState.SHARDED:
            self._open(self._tied_shards([]))

    def close(self) -> None:
        """Free what was gathered for backward."""
        if self.state is UnitState.BACKWARD:
            self._hide()

    # ------------------------------------------------------------ forward

    def _cast(self, tensor: Tensor) -> Tensor:
        dtype = self.config.compute_dtype
        return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)

    def _compute(self, call: Call, forward: Callable[[], Any]) -> Any:
        """The original forward."""
        full = self._unshard(call, call.take_shards())
        saved = SavedParams(full, self._for_backward)
        self._show(full, UnitState.FORWARD)
        try:
            hooks = saved.hooks() if self.reshards_after_forward else nullcontext()
            with running(self), hooks:
                outputs = forward()
        finally:
            self._hide()
        self._reject(saved.changed_in_place())
        if not self.reshards_after_forward:
            return self._exit(call, outputs, kept=full)
        outputs = self._exit(call, outputs)
        saved.release(self._dummy)
        return outputs

    def _recompute(self, call: Call, forward: Callable[[], Any]) -> Any:
        """The same forward again, for a checkpoint, inside a backward pass.

        What it gathers stays for the backward that follows, which thus needs no gather of its own.
        """
        shards = call.take_shards()
        if self.state is UnitState.SHARDED:
            self._open(shards)
        for_backward = self.full
        full = self._unshard(call, None)
        saved = SavedParams(full, self._for_backward)
        self._show(full, UnitState.BACKWARD)
        try:
            with saved.hooks() if self.reshards_after_forward else nullcontext():
                outputs = forward()
        finally:
            self._show(for_backward, UnitState.BACKWARD, idle=True)
            saved.forget()
        return self._exit(call, outputs, kept=None if self.reshards_after_forward else full)

    def _exit(self, call: Call, outputs: Any, kept: list[Tensor] | None = None) -> Any:
        """Tie the outputs; ``kept`` are full parameters that live until backward."""
        kept = kept or []
        node = partial(Exit.apply, call, len(kept), *kept)
        return through(node, outputs)

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
            return [tensor.clone() for tensor in tensors], self._tied_shards(tensors)
        if not config.optimization_barrier_in_forward:
            return [tensor.clone() for tensor in tensors], self.group.shards
        before = self.backward.forward_gate.swap(tensors)
        shards = self.group.shards
        return xla_ops.barrier(tensors), xla_ops.barrier([*shards, *before])[: len(shards)]

    def start_backward(
        self, call: Call, kept: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Gather the parameters (unless ``kept``) once the gradients of the outputs, and all
        pending work, are there. Returns the gradients, likewise tied."""
        self.backward.watch()
        self._check_unchanged(call)
        call.restart()
        if self.state is not UnitState.SHARDED or not self.group.params:
            return self._tie_grads(grads)
        if kept:
            self.backward.gate(present(grads))
            self._open_with(list(kept))
            return self._tie_grads(grads)
        self._open(self._tied_shards(present(grads)))
        return self._tie_grads(grads)

    def reduce(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradient shards from full gradients; none while gradients are not synchronized."""
        self.backward.watch()
        if not self.sync_gradients:
            self.group.keep(grads)
            if self not in self.backward.keeping:
                self.backward.keeping.append(self)
            return [None] * len(self.group.params)
        reduced = self.group.reduce(grads)
        self.backward.pending.extend(present(reduced))
        return reduced

    def reduce_kept(self) -> None:
        """Reduce gradients that ``no_sync`` kept, where no backward has done so since."""
        if not self.sync_gradients:
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

    def _tied_shards(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The shards to gather in backward, for a computation that begins with ``tensors``."""
        shards, before = self.group.shards, self.backward.gate(tensors)
        if not self.config.optimization_barrier_in_backward:
            return shards
        return xla_ops.barrier([*shards, *before])[: len(shards)]

    def _for_backward(self) -> list[Tensor]:
        """Full parameters for a saved-tensor reference, which may be asked for before any output's
        gradient has come by (a side channel such as a loss kept on the module)."""
        self.ensure_open()
        return self.full

    def _check_unchanged(self, call: Call) -> None:
        if self.reshards_after_forward and call.versions != self.group.versions:
            raise RuntimeError(
                "parameters of an FSDP unit were changed between its forward and its backward (by "
                "optimizer.step() or load_state_dict, say). Backward gathers them again and would "
                "mix new parameters with old activations. Change them after backward."
            )

    # ------------------------------------------------------------ full parameters

    def _unshard(self, call: Call, shards: Sequence[Tensor] | None) -> list[Tensor]:
        if not self.group.params:
            return []
        return list(Unshard.apply(call, shards, *self.group.shards))

    def _open(self, shards: Sequence[Tensor]) -> None:
        # With grad mode on: a reentrant checkpoint inside the unit builds a new graph on these.
        with torch.enable_grad():
            self._open_with(self._unshard(Call(self, recomputed=False), shards))

    def _open_with(self, full: list[Tensor]) -> None:
        self._show(full, UnitState.BACKWARD, idle=True)
        self._opened_in = current_pass()
        self.backward.open(self)

    def _show(self, full: list[Tensor], state: UnitState, *, idle: bool = False) -> None:
        if self.state is not UnitState.SHARDED:
            self._hide()
        for param in self.group.params:  # all, before any is changed
            param.check_owners()
        at = 0
        for param in self.group.params:
            param.unshard(full[at : at + len(param.members)], idle=idle)
            at += len(param.members)
        self.full, self.state = full, state

    def _hide(self) -> None:
        for param in self.group.params:
            param.reshard()
        self.full, self.state = [], UnitState.SHARDED


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _write_back(given: Any, inputs: Any, versions: Sequence[int]) -> None:
    """A forward that changes an input in place changes the caller's tensor, as without FSDP."""
    pairs = zip(tensors_in(given), tensors_in(inputs), versions, strict=True)
    for original, moved, version in pairs:
        if moved is not original and _version(moved) > version:
            original.copy_(moved)
