"""ZeRO-1: shard the optimizer state of a replicated model, and the work of its steps.

Invariants: all ranks run the same program, as the rank that selects a slice is an input of it and
not a constant, and hold the same parameters after a step. Gradients on the parameters do not
change, unless the optimizer needs unsharded parameters.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xla_fsdp.distributed.collectives import Collectives, over
from xla_fsdp.distributed.packing import packing_of
from xla_fsdp.distributed.pytree import map_tensors
from xla_fsdp.distributed.shard_layout import LANES, ShardLayout, shard_multiple
from xla_fsdp.fsdp.engine.autograd import present
from xla_fsdp.fsdp.engine.config import FSDPConfig
from xla_fsdp.fsdp.engine.param import FSDPParam, OriginalParam
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup, NamedShard
from xla_fsdp.fsdp.engine.shard_tensor import ShardParameter, is_sharded
from xla_fsdp.optim.clip_grad import Slices, clip_grads_by_norm_
from xla_fsdp.optim.optimizers import is_elementwise, make_state, params_of
from xla_fsdp.optim.rank_groups import (
    average_,
    check_groups,
    find_slice_problems,
    own_group,
)
from xla_fsdp.optim.surrogate_optimizer import OwnParts, SurrogateOptimizer, free
from xla_fsdp.state.optim import read_optimizer
from xla_fsdp.state.optim_api import ShardNames, load_full, to_full
from xla_fsdp.xla import ops
from xla_fsdp.xla.host import execute_pending

# Key of a rank's state dict that tells which slices it holds; an unsharded one has no such key.
SLICE_INFO = "zero"

# Slices of fewer elements are not padded to whole lanes: they share one bucket, which is.
UNPADDED_BELOW = 8 * LANES


class ZeroRedundancyOptimizer(SurrogateOptimizer):
    """Step a slice of every parameter on each rank by an ``optimizer_class``.

    A step reduce-scatters the gradients, steps this rank's slices, and all-gathers the results, so
    optimizer state takes 1/N of the memory; parameters and gradients are unsharded on every rank.
    Call it on every rank, after backward, in place of ``xm.optimizer_step``::

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        torch_xla.sync()

    The optimizer averages gradients over the ranks, unless ``gradients_are_averaged``. Averaging
    them twice gives the same values, and costs only traffic.

    Optimizers that need unsharded parameters (Adafactor, Muon, LBFGS, and unknown ones) step these
    on every rank with averaged gradients, which is correct but saves no memory, and warns.

    Args:
        params: parameters on the XLA device, the same on every rank, or groups of them.
        optimizer_class: a class of ``torch.optim``, ``torch_xla.amp.syncfree``, or any other.
        groups: lists of ranks that hold the same parameters (default: one of all ranks).
        parameters_as_bucket_view: ignored with a warning; small parameters always share buckets.
        overlap_with_ddp: refused: the compiler overlaps backward, reduction and step.
        gradients_are_averaged: all ranks have the same gradients; each slices them.
        elementwise: whether ``optimizer_class`` treats every element by itself, so that it can step
            slices (default: True for those of torch and torch_xla that are known to do so).
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
        self._groups = check_groups(groups)
        self._ranks = own_group(self._groups)
        own = None if groups is None else self._groups
        self.slices = ParamSlices(over(own, self._ranks.index(ops.rank()), len(self._ranks)))
        self._averaged = gradients_are_averaged
        self._reduced: _Reduced | None = None
        super().__init__(params, optimizer_class, defaults)

    def surrogates(self, param: nn.Parameter) -> list[nn.Parameter]:
        """Return the slice of ``param``; ``param`` if the optimizer needs it unsharded."""
        return [self.slices.of(param) if self.is_sliced else param]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, on every rank.

        Raises:
            ValueError: as the constructor, for its parameters.
        """
        given = param_group["params"]
        given = [given] if isinstance(given, Tensor) else list(given)
        problems = [problem for each in given for problem in _param_problems(each, self._ranks)]
        if problems:
            raise ValueError("\n".join(problems))
        super().add_param_group({**param_group, "params": given})

    def _take_initial_state(self) -> None:
        self.slices.free()

    @torch.no_grad()
    def make_state(self) -> None:
        """Make the state of the slices now, so that the first step is the program of all later
        ones; ``compile_step`` calls it."""
        if self.is_sliced:
            with self.slices.filled(self.slices.params):
                make_state(self.inner)

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        found_inf: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Reduce the gradients (unless clipping has done so), step, and all-gather the results.

        Args:
            closure: computes loss and gradients again; LBFGS calls it several times.
            found_inf: for the optimizers of ``torch_xla.amp.syncfree``: a scalar, not 0 skips the
                step; the same on every rank, as ``ShardedGradScaler`` makes it.
            others: given to the ``step`` of ``optimizer_class``.

        Returns:
            The closure's result (its average, if the optimizer needs unsharded parameters).

        Raises:
            RuntimeError: if gradients changed after clipping had reduced them.
            ValueError: if ``found_inf`` is given to an optimizer that does not take it.
        """
        if not closure or self.is_sliced:
            return super().step(closure, found_inf=found_inf, **others)
        self._check_found_inf(found_inf)
        self._options_to_inner()
        loss: Any = self.inner.step(lambda: self._averaged_closure(closure), **others)
        self._options_from_inner()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and those that clipping has reduced."""
        super().zero_grad(set_to_none)
        self._reduced = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Reduce the gradients, and scale the result so that its norm is at most ``max_norm``.

        ``step`` then uses the result. Every rank must call it. Gradients on the parameters do not
        change (if the optimizer needs unsharded parameters, they become the scaled averages).

        Args:
            max_norm: the largest norm allowed.
            norm_type: p of the p-norm, or ``float("inf")``.

        Returns:
            The norm before clipping, a lazy fp32 scalar on the device.

        Raises:
            ValueError: if ``norm_type`` is not positive.
        """
        grads = self._reduce().grads
        by = [self.slices.collectives] if self.is_sliced else []
        norm = clip_grads_by_norm_([Slices(grads, by)], max_norm, norm_type)
        if not self.is_sliced:  # the parameters' own gradients have changed
            self._reduced = _Reduced(self._with_grad(), grads)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's slices, and under ``zero`` a description of the slices.
        ``consolidate_state_dict`` returns a state dict for any number of ranks."""
        self._options_to_inner()
        state = self.inner.state_dict()
        return {**state, SLICE_INFO: _slice_info(self.slices)} if self.is_sliced else state

    def consolidate_state_dict(self, to: int = 0) -> dict[str, Any]:
        """Return the unsharded state dict, that of ``optimizer_class`` by itself, in host memory.
        Every rank must call this.

        Args:
            to: the rank within its group that gets the state dict; others get an empty one.

        Raises:
            ValueError: if ``to`` is no rank of a group.
        """
        self._options_to_inner()
        ranks = self.slices.collectives
        if not 0 <= to < ranks.num_shards:
            raise ValueError(f"to={to} is not one of the {ranks.num_shards} ranks of a group")
        if self.is_sliced:
            return _unsliced_state(self.inner, self.slices, to)
        state = _on_host(self.inner.state_dict())
        return state if ranks.rank == to else {}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of ``state_dict`` on this rank, or an unsharded state dict (a result of
        ``consolidate_state_dict``, on any number of ranks), the same on every rank.

        Raises:
            ValueError: with everything that does not fit; nothing has been changed then.
        """
        info = _slice_info(self.slices) if self.is_sliced else None
        problems = list(_state_problems(state_dict, self.param_groups, info))
        if problems:
            raise ValueError("\n".join(problems))
        if self.is_sliced and SLICE_INFO not in state_dict:
            with self.slices.filled(self.slices.params):
                names, full = _shard_names(self.slices), _numbered_in_order(state_dict)
                load_full(self.inner, self.slices.keys(), names, full)
        else:
            # Copied, as torch's optimizers use the tensors that they load.
            own = map_tensors(lambda tensor: tensor.detach().clone(), dict(state_dict))
            own.pop(SLICE_INFO, None)
            self.inner.load_state_dict(own)
        self._options_from_inner()

    def _reduce(self, *, strict: bool = False) -> _Reduced:
        """Average the gradients over the ranks, or return the averages if that has been done."""
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
        grads = [_grad(param) for param in params]
        if not self.is_sliced:
            self._average(grads)
        elif self._averaged:
            grads = self.slices.cut(params, grads)
        else:
            grads = self.slices.reduce_scatter_grads(params)
        self._reduced = _Reduced(params, grads)
        return self._reduced

    def _average(self, grads: list[Tensor]) -> None:
        if not self._averaged:
            average_(grads, self._groups)

    def _step_surrogates(self, options: dict[str, Any]) -> None:
        reduced = self._reduce(strict=True)
        if self.is_sliced:
            self._step_slices(reduced, options)
        else:
            self._step_inner(options)
        self._reduced = None

    def _step_slices(self, reduced: _Reduced, options: dict[str, Any]) -> None:
        params = reduced.params
        with self.slices.filled(params, reduced.grads):
            self._step_inner(options)
            values = self.slices.all_gather(params, [self.slices.of(param) for param in params])
        for param, value in zip(params, values, strict=True):
            param.copy_(value)

    def _averaged_closure(self, closure: Callable[[], Any]) -> Any:
        """Call the closure; return the global batch's loss, and set its gradients."""
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            self._average([_grad(param) for param in self._with_grad()])
            if not isinstance(loss, Tensor):
                return loss
            ranks = self.slices.collectives
            return ranks.all_reduce("sum", loss.detach()) / ranks.num_shards

    def _with_grad(self) -> list[nn.Parameter]:
        return [
            param for param in params_of(self) if param.requires_grad and param.grad is not None
        ]


class _Reduced:
    """Averaged gradients (or slices of them), and the gradients that they were computed from."""

    def __init__(self, params: list[nn.Parameter], grads: list[Tensor]) -> None:
        self.params, self.grads = params, grads
        self._sources = [(param.grad, _grad(param)._version) for param in params]

    def is_of(self, params: list[nn.Parameter]) -> bool:
        """Return whether ``params`` have the same gradients, unchanged."""
        return len(params) == len(self._sources) and all(
            param.grad is grad and _grad(param)._version == version
            for param, (grad, version) in zip(params, self._sources, strict=True)
        )


def _grad(param: nn.Parameter) -> Tensor:
    assert param.grad is not None  # callers select such parameters
    return param.grad


def _param_problems(param: Any, ranks: Sequence[int]) -> list[str]:
    """Return the reasons why a parameter, or a pair of name and parameter, cannot be sliced."""
    name, tensor = param if isinstance(param, tuple) else ("a parameter", param)
    if not isinstance(tensor, Tensor):
        return []  # torch refuses it
    what = f"{name} of shape {tuple(tensor.shape)}"
    found = []
    if is_sharded(tensor):
        found.append(
            f"{what} is sharded by FSDP already, with its optimizer state; use the plain optimizer"
        )
    found += find_slice_problems(tensor, ranks, what)
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


class ParamSlices:
    """This rank's slices of replicated parameters: FSDP shards that no module owns. They have no
    memory between steps, as the parameters hold the values."""

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self._sharded: dict[nn.Parameter, FSDPParam] = {}
        self._groups: dict[tuple[FSDPParam, ...], FSDPParamGroup] = {}
        self._own = OwnParts()

    def of(self, param: nn.Parameter) -> nn.Parameter:
        """Return the slice of ``param``; make it at the first call."""
        if param not in self._sharded:
            self._sharded[param] = self._make(param, str(len(self._sharded)))
        return self._sharded[param].leaf

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters, in the order in which they were sliced."""
        return list(self._sharded)

    def keys(self) -> dict[str, Tensor]:
        """Return the slices by key: "0", "1", ..."""
        return {each.key: each.leaf for each in self._sharded.values()}

    def reduce_scatter_grads(self, params: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return slices of the gradients of ``params``, averaged over the ranks."""
        with self.filled(params):  # mean() reads shapes and dtypes of the shards
            return present(self.group_of(params).mean([param.grad for param in params]))

    def all_gather(self, params: Sequence[nn.Parameter], slices: Sequence[Tensor]) -> list[Tensor]:
        """Gather all ranks' ``slices`` into tensors of the shapes of ``params``."""
        group = self.group_of(params)
        return group.gather.as_stored(group.params, slices)

    def cut(self, params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's slices of ``values``, each of the shape of its parameter."""
        return [
            self._cut(self._sharded[param], value)
            for param, value in zip(params, values, strict=True)
        ]

    @contextlib.contextmanager
    def filled(
        self, params: Sequence[nn.Parameter], grads: Sequence[Tensor | None] | None = None
    ) -> Iterator[None]:
        """Give the slices of ``params`` their values and ``grads`` inside the block."""
        values = self.cut(params, params)
        for param, value, grad in zip(params, values, grads or [None] * len(params), strict=True):
            self.of(param).data = value
            self.of(param).grad = grad
        try:
            yield
        finally:
            for param in params:
                free(self.of(param))

    def free(self) -> None:
        """Free the values of all slices."""
        for each in self._sharded.values():
            free(each.leaf)

    def group_of(self, params: Sequence[nn.Parameter]) -> FSDPParamGroup:
        sharded = tuple(self._sharded[param] for param in params)
        if sharded not in self._groups:  # kept, as its parameters reference it weakly
            self._groups[sharded] = FSDPParamGroup(sharded, self.collectives, FSDPConfig())
        return self._groups[sharded]

    def _make(self, param: nn.Parameter, key: str) -> FSDPParam:
        layout = slice_layout(param.shape, self.collectives.num_shards)
        packing = packing_of((param.shape,), layout)
        original = OriginalParam((key,), param.shape, ())
        shard = ShardParameter(param.new_empty(0), requires_grad=param.requires_grad)
        shard.shard_rank = self.collectives.rank
        everywhere = self.collectives.num_shards == ops.world_size()
        made = FSDPParam(key, [original], shard, packing, None, everywhere=everywhere)
        shard.data = self._cut(made, param)
        return made

    def _cut(self, sharded: FSDPParam, value: Tensor) -> Tensor:
        packing = sharded.packing
        stack = packing.pack([value.detach()])
        stack = stack.reshape(self.collectives.num_shards, *packing.sent_shape)
        return self._own.of_shards(stack, self.collectives).reshape(packing.sent_shape)


def slice_layout(shape: Sequence[int], num_slices: int) -> ShardLayout:
    """Return the layout of a parameter's slices: that of its shards, or not padded if it is
    small."""
    numel = math.prod(shape)
    is_small = -(-numel // num_slices) < UNPADDED_BELOW
    return ShardLayout((numel,), num_slices, 1 if is_small else shard_multiple(shape, num_slices))


def _slice_info(slices: ParamSlices) -> dict[str, Any]:
    return {
        "version": 1,
        "rank": slices.collectives.rank,
        "num_ranks": slices.collectives.num_shards,
        "shapes": [list(param.shape) for param in slices.params],
    }


def _state_problems(
    state: Any, groups: Sequence[Mapping[str, Any]], info: Mapping[str, Any] | None
) -> Iterator[str]:
    """Yield the reasons why an optimizer of these groups and slices cannot load ``state``."""
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        yield (
            "expected an optimizer state dict with 'state' and 'param_groups' (an empty one is "
            "what consolidate_state_dict returns on ranks other than `to`)"
        )
        return
    if SLICE_INFO in state and state[SLICE_INFO] != info:
        wanted = f"expected {info}" if info else "this optimizer steps whole parameters"
        yield (
            f"the state is of {state[SLICE_INFO]}, {wanted}. Load it on the rank that saved it, on "
            f"as many ranks, or load what consolidate_state_dict returned"
        )
    given = [len(group["params"]) for group in state["param_groups"]]
    own = [len(group["params"]) for group in groups]
    if given != own:
        yield f"groups of the state have {given} parameters, those of the optimizer {own}"


def _unsliced_state(inner: Optimizer, slices: ParamSlices, to: int) -> dict[str, Any]:
    with slices.filled(slices.params):  # state with the shape of its slice is gathered
        state = read_optimizer(inner, slices.keys())
    execute_pending()  # on all ranks, before ``to`` alone reads what is replicated
    groups = _on_host(inner.state_dict()["param_groups"])
    full = to_full(state, _shard_names(slices), only=to)
    if not full:
        return {}
    entries = {int(name): values for name, values in full["state"].items()}
    return {"state": entries, "param_groups": groups}


def _shard_names(slices: ParamSlices) -> ShardNames:
    group = slices.group_of(slices.params)
    shards = {param.key: NamedShard((("",),), param) for param in group.params}
    return ShardNames(shards, {key: [key] for key in shards}, {})


def _numbered_in_order(state: Mapping[str, Any]) -> dict[str, Any]:
    """Name parameters "0", "1", ... in the order of the groups; numbers in a state dict may have
    gaps."""
    order = [number for group in state["param_groups"] for number in group["params"]]
    names = {number: str(index) for index, number in enumerate(order)}
    groups = [
        {
            **{name: value for name, value in group.items() if name != "param_names"},
            "params": [names[number] for number in group["params"]],
        }
        for group in state["param_groups"]
    ]
    entries = {names[n]: values for n, values in state["state"].items() if n in names}
    return {"state": entries, "param_groups": groups}


def _on_host(value: Any) -> Any:
    return map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), value)
