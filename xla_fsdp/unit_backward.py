"""What a unit does in backward: gather, reduce, free; and what its autograd nodes ask for.

The nodes by which backward comes here are in ``unit_nodes``.
Words: see ``backward``; a unit *opens* when its modules get full parameters for backward.
Always true: a unit gathers once the gradients of its outputs, and all pending work, are there, and
closes when the last node of its forward call has run. Barriers tie every gather to what comes
before it; without them XLA is free to merge the second gather into the first.
The forward is left to ``unit``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from xla_fsdp import xla_ops
from xla_fsdp.backward import current_pass
from xla_fsdp.config import FSDPConfig
from xla_fsdp.full_params import FullParams, UnitState
from xla_fsdp.grad_reduction import Sums
from xla_fsdp.graph_nodes import present
from xla_fsdp.param_group import ParamGroup
from xla_fsdp.prefetch import prefetch
from xla_fsdp.unit_nodes import Call, unshard
from xla_fsdp.unit_settings import UnitSettings
from xla_fsdp.unit_span import Spans


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
        group: ParamGroup,
        config: FSDPConfig,
        settings: UnitSettings,
        params: FullParams,
        spans: Spans,
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
        if self._params.state is UnitState.SHARDED:
            self.open(self._params.for_backward(self._before([])))

    def open(self, gathered: Callable[[], list[Tensor]]) -> None:
        """Let the modules hold what ``gathered`` returns, until the backward pass is over."""
        # With grad mode on: a reentrant checkpoint inside the unit builds a new graph on these.
        with torch.enable_grad():
            call = Call(self, recomputed=False)
            self._open_with(unshard(call, gathered), call.versions)

    def close(self) -> None:
        """Free what was gathered for backward."""
        if self._params.state is not UnitState.BACKWARD:
            return
        if self.settings.reshard_after_backward:
            self._params.hide()
        else:
            full = [tensor.detach() for tensor in self._params.full]
            self._params.show(full, UnitState.UNSHARDED, versions=self._params.versions)

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
        self._params.show(full, UnitState.BACKWARD, idle=True, versions=versions)
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
        return xla_ops.barrier(tensors), before

    def _tie_grads(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        if not self.config.optimization_barrier_in_backward:
            return list(grads)
        tied = iter(xla_ops.barrier(present(grads)))
        return [None if grad is None else next(tied) for grad in grads]

    def _before(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What a gather has to wait for in backward, for a computation that begins with
        ``tensors``."""
        before = self.settings.backward.gate(tensors)
        return before if self.config.optimization_barrier_in_backward else []

    # ------------------------------------------------------------ at the nodes

    def start(
        self, call: Call, kept: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Gather the parameters (unless they are ``kept``) once the gradients of the outputs, and
        all pending work, are there. Returns the gradients, likewise tied."""
        settings = self.settings
        settings.backward.watch()
        if call.reshards:
            refuse_changed(call.versions, self.group.versions)
        call.restart(current_pass())
        self._spans.end_idle()  # where some parts did not run
        closed = self._params.state in (UnitState.SHARDED, UnitState.UNSHARDED)
        if closed and self.group.params and (settings.unshard_in_backward or not call.reshards):
            before = self._before(present(grads))
            if kept and not call.reshards:
                self._open_with(list(kept), call.versions)
            else:
                self.open(self._params.for_backward(before, kept))
            prefetch(settings.backward_prefetch, before, in_backward=True)
        return self._tie_grads(grads)

    def reduce_early(self, call: Call, number: int, grad: Tensor) -> Tensor | None:
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
        self, grads: Sequence[Tensor | None], early: Sums | None = None
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

    def finish(self, call: Call) -> None:
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
