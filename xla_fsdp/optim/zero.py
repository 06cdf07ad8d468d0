"""ZeRO-1: the optimizer of a replicated model, its state and its work divided among the ranks.

Words: see ``slices`` and ``stand_ins``. Always true: all ranks run the same program, and hold the
same parameters after a step. Gradients on the parameters are left as they were; what is reduced of
them belongs to the slices and goes with the step.
State dicts are ``zero_state``'s.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.clip_grad import Slices as GradSlices
from xla_fsdp.fsdp.clip_grad import clip_grads_by_norm_
from xla_fsdp.fsdp.engine.optimizer_traits import is_elementwise
from xla_fsdp.fsdp.engine.shard_parameter import is_sharded
from xla_fsdp.optim import zero_state
from xla_fsdp.optim.rank_groups import check_groups, collectives_over, find_part_problems, own_group
from xla_fsdp.optim.slices import Slices
from xla_fsdp.optim.stand_ins import StandInOptimizer


class ZeroRedundancyOptimizer(StandInOptimizer):
    """``optimizer_class`` over a slice of every parameter on each rank.

    A step reduce-scatters the gradients, steps this rank's slices, and all-gathers the results, so
    optimizer state takes 1/N of the memory; parameters and gradients are whole on every rank. Call
    it on every rank, after backward, instead of ``xm.optimizer_step``::

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        torch_xla.sync()

    Gradients are averaged over the ranks by the optimizer, unless ``gradients_are_averaged``. (Of
    gradients that are averages already, the average is the same: forgetting to say so costs traffic
    only.)

    Optimizers that need whole parameters (Adafactor, Muon, LBFGS, and any that are not known) get
    averaged gradients and step whole parameters on every rank, with a warning: right, and without
    the saving.

    Args:
        params: parameters on the XLA device, the same on every rank, or groups of them.
        optimizer_class: of ``torch.optim``, ``torch_xla.amp.syncfree``, or any other.
        groups: lists of ranks that hold the same parameters (default: one of all ranks).
        parameters_as_bucket_view: ignored with a warning; small parameters always travel joined.
        overlap_with_ddp: refused. torch runs the step in DDP's hooks; here backward, reduction and
            step are one program, in which the compiler overlaps them.
        gradients_are_averaged: all ranks have the same gradients; each takes its slice of them.
        elementwise: whether ``optimizer_class`` treats every element by itself, so that it can step
            slices (default: what is known of it).
        defaults: options of ``optimizer_class``.

    Raises:
        ValueError: with every parameter that is not on the XLA device, is sharded, or is not a
            floating-point one; for ``overlap_with_ddp``; for groups that do not fit.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        *,
        groups: Sequence[Sequence[int]] | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        gradients_are_averaged: bool = False,
        elementwise: bool | None = None,
        **defaults: Any,
    ) -> None:
        if overlap_with_ddp:
            raise ValueError(
                "overlap_with_ddp=True needs the buckets and hooks of DistributedDataParallel. On "
                "XLA backward, reduction and step are one program, in which the compiler overlaps "
                "them. Leave it out, and call step() after backward"
            )
        if parameters_as_bucket_view:
            warnings.warn(
                "parameters_as_bucket_view=True is ignored: small parameters always travel joined, "
                "and a view of a bucket would be a copy on XLA",
                stacklevel=2,
            )
        known = is_elementwise(optimizer_class, defaults) if elementwise is None else elementwise
        if not known:
            _warn_about_whole(optimizer_class)
        self.is_sliced = known
        self.slices = Slices(collectives_over(groups))
        self._ranks = own_group(check_groups(groups))
        self._averaged = gradients_are_averaged
        self._reduced: _Reduced | None = None
        super().__init__(params, optimizer_class, defaults)
        self.slices.empty()

    def stand_in(self, param: nn.Parameter) -> nn.Parameter:
        """See ``StandInOptimizer``."""
        return self.slices.of(param) if self.is_sliced else param

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, on every rank.

        Raises:
            ValueError: as the constructor, for its parameters.
        """
        given = param_group["params"]
        given = [given] if isinstance(given, Tensor) else list(given)
        problems = [problem for each in given for problem in _problems(each, self._ranks)]
        if problems:
            raise ValueError("\n".join(problems))
        super().add_param_group({**param_group, "params": given})
        if self.is_built:
            self.slices.empty()

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, found_inf: Tensor | None = None
    ) -> Any:
        """Reduce the gradients (unless clipping has done so), step, and share the results.

        Args:
            closure: computes loss and gradients anew; for LBFGS, as often as that wants.
            found_inf: for the optimizers of ``torch_xla.amp.syncfree``: not 0 skips the step; the
                same on every rank, as ``ShardedGradScaler`` has it.

        Returns:
            What the closure returned (for an optimizer of whole parameters, its average).

        Raises:
            RuntimeError: if gradients changed after clipping had reduced them.
            ValueError: if ``found_inf`` is given to an optimizer that does not take it.
        """
        self._check_found_inf(found_inf)
        if closure is not None and not self.is_sliced:
            self._hand_options()
            loss: Any = self.inner.step(lambda: self._averaged_closure(closure))
            self._take_options()
            return loss
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        reduced = self._reduce(strict=True)
        if self.is_sliced:
            self._step_slices(reduced, found_inf)
        else:
            self._step_inner(found_inf)
        self._reduced = None
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; what clipping has reduced is dropped, too."""
        super().zero_grad(set_to_none)
        self._reduced = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Reduce the gradients, and scale the result so that its norm is at most ``max_norm``;
        ``step`` then takes it. Every rank must call it. Gradients on the parameters stay as they
        are (of an optimizer of whole parameters: become the averages, and are scaled).

        Args:
            max_norm: the largest norm allowed.
            norm_type: p of the p-norm, or ``float("inf")``.

        Returns:
            The norm before clipping, a lazy fp32 scalar on the device.

        Raises:
            ValueError: if ``norm_type`` is not positive.
        """
        grads, device = self._reduce().grads, ops.device()
        if self.is_sliced:
            sliced = [GradSlices(grads, [self.slices.collectives])]
            return clip_grads_by_norm_(sliced, [], max_norm, norm_type, device)
        norm = clip_grads_by_norm_([], grads, max_norm, norm_type, device)
        self._reduced = _Reduced(self._with_grad(), grads)  # which are the parameters' own
        return norm

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """This rank's: like that of ``optimizer_class`` over the slices, and under ``zero`` which
        slices they are. For one that any number of ranks can load, ``consolidate_state_dict``."""
        self._hand_options()
        return zero_state.own_state(self.inner, self._slices_or_none())

    def consolidate_state_dict(self, to: int = 0) -> dict[str, Any]:
        """The state dict that the plain optimizer would have, in host memory. Every rank must call
        this.

        Args:
            to: the place, in its group, of the rank that gets it.

        Returns:
            The state dict; on other ranks an empty one.

        Raises:
            ValueError: if ``to`` is no rank of a group.
        """
        self._hand_options()
        return zero_state.plain_state(self.inner, self._slices_or_none(), self.slices, to)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what ``state_dict`` returned on this rank, or a plain optimizer's state dict (what
        ``consolidate_state_dict`` returned on any number of ranks), the same on every rank.

        Raises:
            ValueError: with everything that does not fit; nothing has been changed then.
        """
        slices = self._slices_or_none()
        problems = zero_state.problems(state_dict, self.param_groups, slices)
        if problems:
            raise ValueError("\n".join(problems))
        if slices is None or zero_state.is_own(state_dict):
            self.inner.load_state_dict(zero_state.as_torch_has_it(state_dict))
        else:
            zero_state.load_plain(self.inner, slices, state_dict)
        self._take_options()

    # ------------------------------------------------------------ phases of a step

    def _reduce(self, *, strict: bool = False) -> _Reduced:
        """What the step is made with; computed once for the gradients that there are.

        Raises:
            RuntimeError: if it has been computed for others, and ``strict``.
        """
        params = self._with_grad()
        if self._reduced is not None:
            if self._reduced.is_of(params):
                return self._reduced
            if strict:
                raise RuntimeError(
                    "gradients changed after clip_grad_norm_ had reduced them, and the change "
                    "would be lost. Clip after the last change, or drop what was clipped by this "
                    "optimizer's zero_grad()"
                )
        grads = self._sliced_grads(params) if self.is_sliced else self._whole_grads(params)
        self._reduced = _Reduced(params, grads)
        return self._reduced

    def _sliced_grads(self, params: list[nn.Parameter]) -> list[Tensor]:
        if self._averaged:
            return self.slices.cut(params, [_grad(param) for param in params])
        return self.slices.reduced(params)

    def _whole_grads(self, params: list[nn.Parameter]) -> list[Tensor]:
        """The parameters' own gradients, which become the averages."""
        grads = [_grad(param) for param in params]
        if not self._averaged:
            # Kept for their collectives alone, these slices are no parameters of an optimizer.
            for param in params:
                self.slices.of(param)
            means = self.slices.gathered(params, self.slices.reduced(params))
            for grad, mean in zip(grads, means, strict=True):
                grad.copy_(mean)
        return grads

    def _step_slices(self, reduced: _Reduced, found_inf: Tensor | None) -> None:
        params = reduced.params
        with self.slices.filled(params, reduced.grads):
            self._step_inner(found_inf)
            full = self.slices.gathered(params, [self.slices.of(param) for param in params])
        for param, value in zip(params, full, strict=True):
            param.copy_(value)

    def _averaged_closure(self, closure: Callable[[], Any]) -> Any:
        """The closure as an optimizer of the joined batch would be given it."""
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            self._whole_grads(self._with_grad())
            if not isinstance(loss, Tensor):
                return loss
            ranks = self.slices.collectives
            return ranks.all_reduce("sum", loss.detach()) / ranks.num_shards

    # ------------------------------------------------------------ parameters

    def _with_grad(self) -> list[nn.Parameter]:
        return [param for param in self._trainable() if param.grad is not None]

    def _trainable(self) -> list[nn.Parameter]:
        all_params = (param for group in self.param_groups for param in group["params"])
        return [param for param in all_params if param.requires_grad]

    def _slices_or_none(self) -> Slices | None:
        return self.slices if self.is_sliced else None


class _Reduced:
    """Gradients that a step is made with, and what they were computed from.

    Args:
        params: the parameters that had a gradient.
        grads: slices of the averages, or whole ones.
    """

    def __init__(self, params: list[nn.Parameter], grads: list[Tensor]) -> None:
        self.params, self.grads = params, grads
        self._sources = [(param.grad, _grad(param)._version) for param in params]

    def is_of(self, params: list[nn.Parameter]) -> bool:
        """Whether ``params`` have the gradients of then, unchanged."""
        return len(params) == len(self._sources) and all(
            param.grad is grad and _grad(param)._version == version
            for param, (grad, version) in zip(params, self._sources, strict=True)
        )


def _grad(param: nn.Parameter) -> Tensor:
    assert param.grad is not None  # callers select such parameters
    return param.grad


def _problems(param: Any, ranks: Sequence[int]) -> list[str]:
    """Why a parameter, or a pair of its name and it, cannot be sliced over these ranks."""
    name, tensor = param if isinstance(param, tuple) else ("a parameter", param)
    if not isinstance(tensor, Tensor):
        return []  # for torch to say
    what = f"{name} of shape {tuple(tensor.shape)}"
    found = []
    if is_sharded(tensor):
        found.append(
            f"{what} is sharded by FSDP already, with its optimizer state; use the plain optimizer"
        )
    found += find_part_problems(tensor, ranks, what)
    if tensor.device.type != "xla":
        found.append(f"{what} is on {tensor.device}; move the model to the XLA device first")
    if not tensor.is_floating_point():
        found.append(f"{what} is {tensor.dtype}; only floating-point parameters can be trained")
    return found


def _warn_about_whole(optimizer_class: Any) -> None:
    name = getattr(optimizer_class, "__name__", repr(optimizer_class))
    warnings.warn(
        f"{name} is not known to treat every element of a parameter by itself, so every rank steps "
        f"whole parameters with averaged gradients and keeps its whole state. If it can step "
        f"slices, pass elementwise=True",
        stacklevel=3,
    )
