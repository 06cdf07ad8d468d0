"""The calling rank, and the operations that it traces.

Files named ``*xla_ops.py`` are the only ones that touch torch_xla's internals, and every workaround
there names its reason: ``host_xla_ops`` for values on the host, ``program_xla_ops`` for reading
what has been traced, ``gradient_xla_ops`` for torch_xla's own reductions, ``cpu_rank_xla_ops`` for
ranks that are threads, ``pretended_xla_ops`` for ranks that do not exist, ``scan_xla_ops`` and
``loop_xla_ops`` for loops, ``offload_xla_ops`` for the host's memory.
Words: an *optimization barrier* is an XLA op that nothing is moved across or merged through; to
*release* a tensor is to point its handle at a small dummy, so that the graph no longer needs its
value. Always true: nothing here knows about modules, parameters or sharding.
Which tensors are gathered and when is decided by ``shard_gather`` and ``unit``.

Refuse torch_xla's own reduction of gradients where it is given shards.

Always true: it is refused in the whole process once asked for, and goes on for other optimizers,
and between replicas of the same slices.
Which parameters are shards is said by ``guards``, which installs this.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor

from xla_fsdp.distributed.cpu_ranks import Run, RunSlot

Groups = list[list[int]] | None

"""Replica groups of a collective: lists of ranks, or None for one group of all ranks."""


# ---------------------------------------------------------------- this rank


def device() -> torch.device:
    """The XLA device of the calling rank."""
    return torch_xla.device()


def rank() -> int:
    """Global rank of the caller, from 0."""
    return xr.global_ordinal()


def world_size() -> int:
    """Number of ranks in the job."""
    return xr.world_size()


def runtime_started() -> bool:
    """Whether torch_xla has created its devices already; the environment is fixed from then on."""
    return torch_xla._XLAC._xla_runtime_is_initialized()


def local_device_count() -> int:
    """Number of XLA devices of this process; creates them if need be."""
    return len(xm.get_xla_supported_devices())


def expected_device_count() -> int:
    """Number of TPU devices of the whole job, without starting the runtime."""
    import torch_xla._internal.tpu as tpu

    return tpu.num_expected_global_devices()


def run_in_progress() -> Run | None:
    """The run whose ranks are threads of this process, if there is one."""
    slot: RunSlot | None = getattr(torch_xla._XLAC._xla_step_marker, "run_slot", None)
    return None if slot is None else slot.run


def index_of(on: torch.device | str) -> int:
    """Number of a device: 3 of ``xla:3``."""
    return int(str(on).rpartition(":")[2])


def torus_coords() -> list[list[int]]:
    """Place of every rank on the TPU's torus, by rank: [core, x, y, z, slice]; empty off a TPU.

    Devices are asked for their places; a rank is the device of that number.
    """
    if (pretended := _pretended_coords()) is not None:
        return pretended
    if xr.device_type() != "TPU":
        return []
    attributes: list[dict[str, Any]] = xr.global_runtime_device_attributes()
    if not all("coords" in each for each in attributes):
        return []
    by_number = sorted(attributes, key=lambda each: index_of(each["name"]))
    return [
        [each.get("core_on_chip", 0), *each["coords"], each.get("slice_index", 0)]
        for each in by_number
    ]


def runs_on_cpu() -> bool:
    """Whether what is traced is for the CPU; what a pretended rank traces is for a TPU."""
    return xr.device_type() == "CPU" and _pretended_coords() is None


def _pretended_coords() -> list[list[int]] | None:
    """What ``pretended_xla_ops`` has put in the place of the TPU's own."""
    return getattr(torus_coords, "pretended", None)


def sync() -> None:
    """Compile and run what has been traced so far on the caller's device."""
    torch_xla.sync()


# ---------------------------------------------------------------- graph building


def barrier(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same values as new tensors that become available only when all of them are computed.

    The inputs stay as they are: torch_xla's own call works in place, and an in-place barrier on a
    parameter would turn it from a program input into a program output. Integers are not held back:
    torch_xla aborts the process when an index (of ``index_select``, say) comes out of a barrier,
    and nothing that takes memory or time computes them.
    """
    with torch.no_grad():
        fresh = [t.clone() for t in tensors]
    held = [t for t in fresh if t.is_floating_point() or t.is_complex()]
    if held:
        torch_xla._XLAC._xla_optimization_barrier_(held)
    return fresh


def after_(before: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """``tensors``, which nobody else holds, not available until ``before`` are; in place."""
    if before and tensors:
        with torch.no_grad():
            fresh = [t.clone() for t in before if t.is_floating_point() or t.is_complex()]
        torch_xla._XLAC._xla_optimization_barrier_([*tensors, *fresh])
    return list(tensors)


def once_computed(before: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """``tensors``, in whatever schedule the TPU compiler makes, once ``before`` are computed.

    Barriers have no say there: they are gone by then, and what two of them kept apart is one again.
    So something is added that is known only then, and is zero, or next to it (1e-30, where the
    dtype has that) if a value is not a number.
    """
    # Of all of it: what is cut from a result of a reduce-scatter turns that into an all-reduce. Not
    # a multiple of a value, which may be infinite, nor zero times a flag: the compiler knows that.
    flags = [(each.detach() != each.detach()).any() for each in before if each.is_floating_point()]
    if not flags or not tensors:
        return list(tensors)
    added = (torch.stack(flags).any() if flags[1:] else flags[0]).float() * 1e-30
    return [each + added.to(each.dtype) for each in tensors]


# A reshape to the same shape is an operation like any other; without it, and where a copy and a
# reshape are one, the host traces a step in less time.


def cut(tensor: Tensor, dim: int, start: int, length: int) -> Tensor:
    """``tensor.narrow(...)``, also of length 0, which XLA refuses."""
    if length == 0:
        shape = list(tensor.shape)
        shape[dim] = 0
        return tensor.new_zeros(shape)
    return tensor if length == tensor.shape[dim] else tensor.narrow(dim, start, length)


def shaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """``tensor.reshape(shape)``; the tensor itself, if that is its shape."""
    return tensor if tensor.shape == tuple(shape) else tensor.reshape(shape)


def copied(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """``tensor.reshape(shape)`` as a tensor of its own: what is made of it in place is not made of
    ``tensor``, whose value is not kept alive."""
    if tensor.shape == tuple(shape):
        return tensor.clone()
    return torch.view_copy(tensor, shape)


def pieces(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """What ``tensor`` is made of along its last dim, as tensors of their own, in one operation."""
    split: Any = torch.split_with_sizes_copy
    return list(split(tensor, list(sizes), -1))


def copied_slice(tensor: Tensor, start: int, length: int) -> Tensor:
    """``tensor[start:start + length]`` as a tensor of its own."""
    return torch.slice_copy(tensor, 0, start, start + length) if length else tensor.new_zeros(0)


def release(tensor: Tensor, dummy: Tensor) -> None:
    """Point ``tensor`` at ``dummy``'s value: whoever still holds the handle no longer keeps the
    full value alive. Shapes may differ; autograd's version check still passes."""
    if tensor.is_inference():  # has no version
        torch_xla._XLAC._replace_xla_tensor(tensor, dummy)
        return
    with torch.autograd._unsafe_preserve_version_counter(tensor):
        torch_xla._XLAC._replace_xla_tensor(tensor, dummy)


def is_pending(tensor: Tensor) -> bool:
    """Whether ``tensor`` is an XLA tensor whose value has been traced but not yet computed."""
    if tensor.device.type != "xla":
        return False
    return torch_xla._XLAC._check_tensor_need_materialization([tensor])[0]


def compute(tensors: Sequence[Tensor]) -> None:
    """Run now what computes ``tensors``, and wait for it."""
    lazy = [tensor for tensor in tensors if tensor.device.type == "xla"]
    if lazy:
        torch_xla._XLAC._xla_sync_multi(lazy, [], True, True)


def upload(tensor: Tensor) -> Tensor:
    """A host tensor in a device buffer of its own, at once: ``to`` makes constants of scalars."""
    return torch_xla._XLAC._xla_tensors_from_aten([tensor], [str(device())], None)[0]


def forget_token() -> None:
    """Begin a new program: what ties collectives to each other's order would lead back into the
    last one."""
    torch_xla._XLAC._set_all_reduce_token(str(device()), None)


# ---------------------------------------------------------------- collectives
# pin_layout=False throughout: pinned, torch_xla turns an all-gather into a padded all-reduce
# (github.com/pytorch/xla pull 3511), twice the traffic.


def _begin_free(value: Tensor) -> None:
    """Do not make a collective of ``value`` wait for the last one, as torch_xla does by adding a
    zero that is computed from its result. Ranks that run one program need no such order, and it
    keeps the compiler from moving gathers under compute. CPU ranks may run different programs.
    """
    if run_in_progress() is None:
        on = str(value.device)
        torch_xla._XLAC._set_all_reduce_token(on, _free_token(on))


@functools.cache
def _free_token(on: str) -> Any:
    """A token that no collective has given: a constant, which all programs may use."""
    torch_xla._XLAC._set_all_reduce_token(on, None)
    return torch_xla._XLAC._get_all_reduce_token(on)


def all_gather(value: Tensor, groups: Groups, dim: int = 0) -> Tensor:
    """Join ``value`` ([rows, ...]) of every rank of the group along ``dim``, in rank order."""
    _begin_free(value)
    return xm.all_gather(value, dim=dim, groups=groups, pin_layout=False)


def reduce_scatter(value: Tensor, shard_count: int, groups: Groups, dim: int = 0) -> Tensor:
    """Sum ``value`` ([shard_count * rows, ...]) over the group; each rank gets its [rows, ...] of
    ``dim``."""
    _begin_free(value)
    return xm.reduce_scatter(
        xm.REDUCE_SUM,
        value,
        scale=1.0,
        scatter_dim=dim,
        shard_count=shard_count,
        groups=groups,
        pin_layout=False,
    )


def all_to_all(
    value: Tensor, split_dim: int, concat_dim: int, split_count: int, groups: Groups
) -> Tensor:
    """Send part i of ``value`` along ``split_dim`` to the group's rank i, and join what arrives
    along ``concat_dim``."""
    _begin_free(value)
    return xm.all_to_all(
        value,
        split_dimension=split_dim,
        concat_dimension=concat_dim,
        split_count=split_count,
        groups=groups,
        pin_layout=False,
    )


def all_reduce(op: str, value: Tensor, groups: Groups) -> Tensor:
    """Combine ``value`` over the group by ``op``, "sum" or "max"; every rank gets the result."""
    _begin_free(value)
    kind = {"sum": xm.REDUCE_SUM, "max": xm.REDUCE_MAX}[op]
    return cast(Tensor, xm.all_reduce(kind, value, groups=groups, pin_layout=False))


def collective_permute(value: Tensor, sends: Sequence[tuple[int, int]]) -> Tensor:
    """``value`` of the rank that sends to this one; ``sends`` are pairs (from, to)."""
    _begin_free(value)
    return xm.collective_permute(value, [list(pair) for pair in sends])


# ---------------------------------------------------------------- random numbers


def get_rng_state(on: torch.device) -> int:
    """The state of a device's random number chain; known on the host, nothing is executed."""
    return xm.get_rng_state(str(on))


def set_rng_state(state: int, on: torch.device) -> None:
    """Continue a device's random number chain from ``state``."""
    xm.set_rng_state(state, str(on))


def refuse_reduce_gradients_of(is_part: Any) -> None:
    """Make ``xm.reduce_gradients`` (called by ``xm.optimizer_step``) raise for sharded parameters,
    and what accelerate does in its place.

    Each rank holds a different slice, so averaging them over all ranks destroys the gradients
    silently. Wrapping torch_xla's functions is the only place where this can be seen: accelerate
    fetches an optimizer's gradients by the same function, and only to average them. Who gives
    ``groups`` averages between replicas of the same slices.
    """
    reduce, fetch = xm.reduce_gradients, xm._fetch_gradients
    if getattr(reduce, "refuses_shards", False):
        return
    between_replicas: set[int] = set()  # ids of optimizers, each of one rank

    def holds_part(optimizer: torch.optim.Optimizer) -> bool:
        return any(is_part(p) for group in optimizer.param_groups for p in group["params"])

    def reduce_gradients(
        optimizer: torch.optim.Optimizer, groups: Groups = None, *args: Any, **kwargs: Any
    ) -> None:
        if groups is None and holds_part(optimizer):
            raise RuntimeError(
                f"xm.optimizer_step / xm.reduce_gradients was called with {_WOULD_MIX}. Call "
                f"optimizer.step() instead."
            )
        between_replicas.add(id(optimizer))
        try:
            reduce(optimizer, groups, *args, **kwargs)
        finally:
            between_replicas.discard(id(optimizer))

    def fetch_gradients(optimizer: torch.optim.Optimizer) -> Any:
        if id(optimizer) not in between_replicas and holds_part(optimizer):
            raise RuntimeError(
                f"an optimizer of accelerate was called with {_WOULD_MIX}. Use the Accelerator of "
                f"xla_fsdp.integrations.accelerate; for transformers' Trainer, call install() of "
                f"xla_fsdp.integrations.transformers first."
            )
        return fetch(optimizer)

    reduce_gradients.refuses_shards = True  # type: ignore[attr-defined]
    xm.reduce_gradients, xm._fetch_gradients = reduce_gradients, fetch_gradients


_WOULD_MIX = (
    "parameters sharded by xla_fsdp. Their gradients are already reduced, and each rank holds "
    "different slices: averaging them would mix unrelated values"
)
