"""Step whole parameters of a sharded model, for optimizers that are not elementwise.

Invariants: every rank steps the same tensors, so all ranks run the same program. Between steps
there are no whole parameters: values, and state of their shapes, are shards. State of other shapes
is the same on every rank, and its names begin with ``UNSHARDED``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xla_fsdp.checkpoint.format.records import UNSHARDED
from xla_fsdp.distributed.placement import known_placement
from xla_fsdp.fsdp.engine.param import (
    FSDPParam,
    all_joined,
    held_shape,
    joined,
    known_shard,
)
from xla_fsdp.fsdp.engine.stacked_params import is_stack
from xla_fsdp.optim.optimizers import needs_closure, params_of
from xla_fsdp.optim.surrogate_optimizer import OwnParts, SurrogateOptimizer, free
from xla_fsdp.state.optim import same_value
from xla_fsdp.xla import ops


class WholeParameterOptimizer(SurrogateOptimizer):
    """Step whole parameters of a sharded model by an ``optimizer_class`` that steps shards wrong.

    For Adafactor, LAMB, LARS, Muon, Shampoo, and all others that compute norms, means or products
    of a parameter, of a model that is sharded by FSDP, cut by tensor parallelism, or both::

        WholeParameterOptimizer(model.parameters(), torch.optim.Adafactor, lr=1e-2)

    A step gathers parameters, gradients and the state of their shapes, steps them on every rank,
    and keeps this rank's shards of the results. Steps, options and full state dicts are those of
    ``optimizer_class`` on the unsharded model. State that has a parameter's shape is sharded
    between steps; other state is whole on every rank.

    Args:
        params: parameters, or groups of them, sharded or not.
        optimizer_class: any optimizer whose ``step`` needs no closure. It sees the parameters in
            the shapes that they had before sharding.
        defaults: options of ``optimizer_class``.

    Raises:
        ValueError: for an optimizer that needs a closure, or parameters on the meta device.
    """

    steps_whole_parameters = True

    def __init__(
        self, params: Iterable[Any], optimizer_class: Callable[..., Optimizer], **defaults: Any
    ) -> None:
        self._whole: dict[nn.Parameter, _WholeParams] = {}
        self._own = OwnParts()
        super().__init__(params, optimizer_class, defaults)
        _refuse_needed_closure(self.inner)

    def surrogates(self, param: nn.Parameter) -> list[nn.Parameter]:
        """Return the whole parameters of a shard or stack; ``param`` if it is whole."""
        return self._whole_params(param).params

    def _step_surrogates(self, options: dict[str, Any]) -> None:
        stepped = [each for each in self._all() if each.leaf.grad is not None]
        try:
            self._to_inner(stepped)
            with ops.ScaledProducts():
                self._step_inner(options)
            self._from_inner(stepped)
        finally:
            for each in stepped:
                each.free()
                for param in each.params:
                    self.inner.state.pop(param, None)

    def _whole_params(self, leaf: nn.Parameter) -> _WholeParams:
        if leaf not in self._whole:
            self._whole[leaf] = _WholeParams(leaf, self._own)
        return self._whole[leaf]

    def _all(self) -> list[_WholeParams]:
        return [self._whole_params(param) for param in params_of(self)]

    def _to_inner(self, stepped: Sequence[_WholeParams]) -> None:
        """Give the whole parameters their values, gradients and state."""
        states = [self.state.get(each.leaf, {}) for each in stepped]
        requests = [
            (each, tensor)
            for each, state in zip(stepped, states, strict=True)
            for tensor in (each.leaf, each.leaf.grad, *each.sharded_state(state).values())
            if tensor is not None
        ]
        found = iter(_all_gather(requests))
        for each, state in zip(stepped, states, strict=True):
            each.fill(values=next(found), grads=next(found))
            sharded = {name: next(found) for name in each.sharded_state(state)}
            for param, own in zip(each.params, each.split_state(state, sharded), strict=True):
                if own:  # an optimizer creates its state only if there is no entry at all
                    self.inner.state[param] = own

    def _from_inner(self, stepped: Sequence[_WholeParams]) -> None:
        """Keep this rank's shards of values and state; of all shards, or of none if an error is
        raised."""
        taken = [[self.inner.state.pop(param, {}) for param in each.params] for each in stepped]
        joined = [each.join_state(own) for each, own in zip(stepped, taken, strict=True)]
        for each, state in zip(stepped, joined, strict=True):
            each.write_back()
            if state:
                # The dict stays, by which compiled steps know where state is.
                own = self.state[each.leaf]
                own.clear()
                own.update(state)

    def _take_initial_state(self) -> None:
        for each in self._all():
            if any(param in self.inner.state for param in each.params):
                taken = [self.inner.state.pop(param, {}) for param in each.params]
                self.state[each.leaf] = each.join_state(taken)
            each.free()


class _WholeParams:
    """The whole parameters of one leaf: of a shard or a tensor-parallel part one, of flattened ones
    or a stack several. They have values and gradients during a step only."""

    def __init__(self, leaf: nn.Parameter, own: OwnParts) -> None:
        self.leaf, self._own = leaf, own
        self.unit = _known(leaf)
        self.placement = known_placement(leaf) if self.unit is None else None
        self.is_stack = is_stack(leaf)
        # Whether every rank holds the whole parameter.
        self.is_whole = self.unit is None and (self.placement is None or self.placement.parts == 1)
        self.params = [leaf]
        if not self.is_whole:
            [values] = _all_gather([(self, leaf.detach())])
            self.params = [nn.Parameter(v, requires_grad=leaf.requires_grad) for v in values]

    def slices(self, value: Tensor) -> Sequence[Tensor]:
        """Return the shards that are stacked in ``value``."""
        return value.unbind() if self.is_stack else [value]

    def cut(self, values: Sequence[Tensor]) -> Tensor:
        """Return this rank's part of whole tensors, one for each whole parameter."""
        if self.unit is None:
            return self._own.of_global(values[0], self.placement)
        each = len(self.unit.originals)
        shards = [
            self._shard(self.unit, values[at : at + each]) for at in range(0, len(values), each)
        ]
        return torch.stack(shards) if self.is_stack else shards[0]

    def _shard(self, param: FSDPParam, values: Sequence[Tensor]) -> Tensor:
        pairs = zip(values, param.originals, strict=True)
        local = [self._own.of_global(value, original.placement) for value, original in pairs]
        packing = param.packing
        shards = packing.pack(local).reshape(packing.layout.num_shards, *packing.sent_shape)
        return param.as_shard(self._own.of_shards(shards, param.collectives))

    def fill(self, *, values: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        if self.is_whole:
            return
        for param, value, grad in zip(self.params, values, grads, strict=True):
            param.data, param.grad = value, grad

    def write_back(self) -> None:
        if not self.is_whole:
            self.leaf.copy_(self.cut([param.detach() for param in self.params]))

    def free(self) -> None:
        for param in () if self.is_whole else self.params:
            free(param)

    # ------------------------------------------------------------ state

    def sharded_state(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the entries of the leaf's ``state`` that are sharded as the leaf is."""
        if self.is_whole:
            return {}
        return {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and value.dim() and not name.startswith(UNSHARDED)
        }

    def split_state(
        self, state: Mapping[str, Any], gathered: Mapping[str, Sequence[Tensor]]
    ) -> list[dict[str, Any]]:
        """Return the state of each whole parameter, with ``gathered`` in the place of shards."""
        if self.is_whole:
            return [dict(state)]
        values = {
            name.removeprefix(UNSHARDED): gathered[name]
            if name in gathered
            else self._for_each(name, value)
            for name, value in state.items()
        }
        return [{name: each[at] for name, each in values.items()} for at in range(len(self.params))]

    def join_state(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Undo ``split_state``, with this rank's shards of the state that has a parameter's shape;
        raise ValueError if flattened parameters have other state."""
        if self.is_whole:
            return dict(states[0])
        names = dict.fromkeys(name for state in states for name in state)
        return dict(self._joined(name, [state.get(name) for state in states]) for name in names)

    def _for_each(self, name: str, value: Any) -> Sequence[Any]:
        """Return unsharded state ``value`` of the leaf, for each whole parameter."""
        if name.startswith(UNSHARDED):
            return [each.clone() for each in value] if self.is_stack else [value]
        return [value.clone() if isinstance(value, Tensor) else value for _ in self.params]

    def _joined(self, name: str, values: Sequence[Any]) -> tuple[str, Any]:
        """Return name and value of the leaf's state, from those of each whole parameter."""
        if all(map(_is_like, values, self.params)):
            return name, self.cut(values)
        if any(map(self._is_computed, values)):
            if self.is_stack and all(map(self._is_computed, values)):
                return UNSHARDED + name, torch.stack(list(values))
            if len(values) == 1:
                return UNSHARDED + name, values[0]
        elif all(same_value(values[0], value) for value in values):
            return name, values[0]
        raise ValueError(
            f"the optimizer keeps {name!r} of another shape than its parameter's, or of several "
            f"values, for parameters that are joined in one shard, which has no place for it. "
            f"Shard with flatten_parameters=False, or scan without stacked"
        )

    def _is_computed(self, value: Any) -> bool:
        # Not a number in host memory, such as a count of steps.
        return isinstance(value, Tensor) and (value.dim() > 0 or value.device == self.leaf.device)


def _is_like(value: Any, param: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.device != param.device:
        return False
    return value.shape == held_shape(param)


def _known(leaf: nn.Parameter) -> FSDPParam | None:
    """Return the parameter whose leaf this is; None for a leaf that no unit has, or
    that a unit has replaced, which the guard of optimizers refuses."""
    param = known_shard(leaf)
    if param is None or param.group() is None or param.leaf is not leaf:
        return None
    if leaf.is_meta:
        raise ValueError(
            f"{param.key} is on the meta device; give the model memory (to_empty) and values "
            f"before making the optimizer"
        )
    return param


def _all_gather(requests: Sequence[tuple[_WholeParams, Tensor]]) -> list[list[Tensor]]:
    """Return the whole tensors that these are this rank's parts of, several for one of flattened
    parameters or a stack. Those of one unit share collectives."""
    found: list[list[Tensor]] = [[] for _ in requests]
    slices: dict[int, list[tuple[int, FSDPParam, Tensor]]] = defaultdict(list)
    groups: dict[int, Any] = {}
    for at, (leaf, tensor) in enumerate(requests):
        if leaf.unit is None:
            found[at] = [joined(tensor, leaf.placement)]
            continue
        param, group = leaf.unit, leaf.unit.group()
        groups[id(group)] = group
        slices[id(group)] += [(at, param, shard) for shard in leaf.slices(tensor)]
    for key, group in groups.items():
        params = [param for _, param, _ in slices[key]]
        local = iter(group.gather.as_stored(params, [shard for *_, shard in slices[key]]))
        for at, param, _ in slices[key]:
            found[at] += all_joined([next(local) for _ in param.originals], param.originals)
    return found


def _refuse_needed_closure(optimizer: Optimizer) -> None:
    if needs_closure(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} needs a closure, which it calls several times in a step "
            f"with other whole parameters; they exist within a step only. Leave the model "
            f"unsharded, and step it by xla_fsdp.optim.ZeroRedundancyOptimizer"
        )
