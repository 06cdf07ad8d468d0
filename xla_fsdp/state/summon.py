"""Let modules hold unsharded parameters outside of forward and backward.

Invariants: these are leaf ``nn.Parameter``s in the dtype of the shards, under their original names;
one that several units share is one tensor. Every rank gathers, also with ``rank0_only``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from xla_fsdp.fsdp.engine.autograd import on_device, present
from xla_fsdp.fsdp.engine.inputs import num_changes
from xla_fsdp.fsdp.engine.param import FSDPParam, all_joined
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.engine.thread import current_pass, package_code
from xla_fsdp.xla import ops


@dataclass(frozen=True)
class SummonOptions:
    """The options of ``summon_full_params``, and ``global_params``, which only state dicts use.

    Args:
        global_params: also gather along tensor-parallel axes; no forward can use the result.
    """

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False
    global_params: bool = False

    def __post_init__(self) -> None:
        if self.writeback and self.rank0_only:
            raise ValueError(
                "writeback=True needs every rank's full parameters, but rank0_only=True shows them "
                "to rank 0 only; choose one"
            )


@contextlib.contextmanager
def summoned(units: Sequence[FSDPState], options: SummonOptions) -> Iterator[None]:
    """Let the modules of ``units`` hold unsharded parameters inside the block."""
    if current_pass() != -1:
        raise RuntimeError(
            "full parameters cannot be summoned inside a backward pass, in a hook say: units are "
            "about to gather and free them there. Do it after backward"
        )
    unsharded = _gather(units, options)
    if not is_shown(units, options):
        yield
        return
    with contextlib.ExitStack() as stack:
        for unit, params in zip(units, unsharded, strict=True):
            stack.enter_context(unit.summoned(params))
        before = {leaf: _state(leaf) for params in unsharded for leaf in params}
        yield
        if options.writeback:
            for unit, params in zip(units, unsharded, strict=True):
                _write_back(unit, params, before, with_grads=options.with_grads)


def _state(leaf: Tensor) -> tuple[int, int]:
    """Return what differs once ``leaf`` was changed on the device, also by its ``data``."""
    return ops.memory_of(leaf), num_changes([leaf])[0]


def is_shown(units: Sequence[FSDPState], options: SummonOptions) -> bool:
    """Whether modules hold unsharded parameters on this rank."""
    return not options.rank0_only or all(unit.group.is_first for unit in units)


@torch.no_grad()
@package_code()
def _gather(units: Sequence[FSDPState], options: SummonOptions) -> list[list[nn.Parameter]]:
    """Return the unsharded parameters of each unit; nothing on ranks that ``is_shown`` excludes."""
    # By the shard, which units may share, and the index of the original in it.
    shared: dict[tuple[object, int], nn.Parameter] = {}
    result = []
    for unit in units:
        params = unit.group.params
        values = unit.group.gather.as_stored(params, unit.group.shards)
        if options.global_params:
            values = all_joined(
                values, [original for each in params for original in each.originals]
            )
        grads = _gathered_grads(unit) if options.with_grads else [None] * len(values)
        # Run the program here: one unit at a time bounds memory, and ranks differ in what they do
        # with the result (copy it, slice it, nothing), but must run the same collectives.
        ops.compute([*values, *present(grads)])
        if not is_shown(units, options):
            continue
        originals = [(param, index) for param in params for index in range(len(param.originals))]
        own = []
        for (param, index), value, grad in zip(originals, values, grads, strict=True):
            key = (param.slots, index)
            if key not in shared:
                shared[key] = _leaf(value, grad, param.leaf, options.offload_to_cpu)
            own.append(shared[key])
        result.append(own)
    return result


def _gathered_grads(unit: FSDPState) -> list[Tensor | None]:
    params = unit.group.params
    grads = [param.grad for param in params]
    zeros = [
        torch.zeros_like(p.shard) if g is None else g for p, g in zip(params, grads, strict=True)
    ]
    present = [grad is not None for grad, p in zip(grads, params, strict=True) for _ in p.originals]
    pairs = zip(unit.group.gather.as_stored(params, zeros), present, strict=True)
    return [value if is_there else None for value, is_there in pairs]


def _leaf(value: Tensor, grad: Tensor | None, of: Tensor, on_host: bool) -> nn.Parameter:
    leaf = nn.Parameter(value.cpu() if on_host else value, requires_grad=of.requires_grad)
    if grad is not None:
        leaf.grad = grad.cpu() if on_host else grad
    return leaf


@torch.no_grad()
@package_code()
def _write_back(
    unit: FSDPState,
    unsharded: Sequence[nn.Parameter],
    before: Mapping[nn.Parameter, tuple[int, int]],
    *,
    with_grads: bool,
) -> None:
    """Write what has changed since ``before``: a shard that is written to is no longer what a
    forward before the block has computed with, and its backward would raise."""
    rest = iter(unsharded)
    for param in unit.group.params:
        rank = param.collectives.rank
        originals = list(islice(rest, len(param.originals)))
        _refuse_replaced(param, originals)
        new = param.slice_of(originals, rank)
        if not on_device(new):
            is_changed = not torch.equal(new, param.shard.cpu())
        else:
            is_changed = any(_state(leaf) != before[leaf] for leaf in originals)
        if is_changed:
            param.shard.copy_(new)
        if with_grads:
            param.grad = _grad_slice(param, [leaf.grad for leaf in originals], rank)


def _refuse_replaced(param: FSDPParam, unsharded: Sequence[nn.Parameter]) -> None:
    for original, leaf in zip(param.originals, unsharded, strict=True):
        for owner in original.owners:
            if owner.module._parameters.get(owner.attribute) is not leaf:
                raise ValueError(
                    f"{original.names[0]} was replaced inside summon_full_params, and the new "
                    f"parameter would be lost. Change the values of the old one in place: "
                    f"param.copy_(new) under torch.no_grad()"
                )


def _grad_slice(param: FSDPParam, grads: Sequence[Tensor | None], rank: int) -> Tensor | None:
    present = [grad for grad in grads if grad is not None]
    if not present:
        return None
    unsharded = [
        present[0].new_zeros(original.shape) if grad is None else grad
        for original, grad in zip(param.originals, grads, strict=True)
    ]
    return param.slice_of(unsharded, rank).to(param.leaf.device)
