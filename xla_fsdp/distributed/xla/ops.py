"""The calling rank, and the operations that it traces.

Workarounds for torch_xla stand next to their reasons. Nothing here knows of modules or sharding.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor

Groups = list[list[int]] | None
"""Replica groups of a collective: lists of ranks, or None for one group of all ranks."""

EXCHANGE_MULTIPLE = 4096


# ---------------------------------------------------------------- this rank


class RankRuntime:
    """How ranks run and meet. This one is for TPU, where every rank runs the same program.

    ``cpu_rank_patches`` and ``fake_rank`` subclass it for ranks that are threads, or do not exist.
    """

    def device_type(self) -> str:
        """Return the kind of device that is traced for: "TPU" or "CPU"."""
        return xr.device_type() or ""

    def torus_coords(self) -> list[list[int]]:
        """Return the coordinates of every rank, by rank: [core, x, y, z, slice]; empty off a TPU.

        A rank is the device of that number.
        """
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

    def begin_collective(self, value: Tensor) -> None:
        """Let a collective of ``value`` start before the last one has ended.

        torch_xla orders them by adding a zero that is computed from the last one's result. Ranks
        that run one program need no order, and it keeps gathers from being moved under compute.
        """
        on = str(value.device)
        torch_xla._XLAC._set_all_reduce_token(on, _constant_token(on))

    def exchange(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of every rank; nothing traced is pending."""
        if world_size() == 1:
            return [data]
        # Padded to few lengths, as every other one is compiled anew.
        length = len(data).to_bytes(8, "little")
        padding = bytes(-(len(length) + len(data)) % EXCHANGE_MULTIPLE)
        found = xm.rendezvous("xla_fsdp.exchange", length + data + padding)
        return [each[8 : 8 + int.from_bytes(each[:8], "little")] for each in found]

    def expect_on_all_ranks(self, fact: str) -> None:
        """Fail the run if the other ranks do not come by with the same ``fact``, where ranks can
        tell without communication."""

    def keep_host_rng(self) -> contextlib.AbstractContextManager[None]:
        """Leave the host's random numbers after the block where they were before other ranks drew
        some of them."""
        return contextlib.nullcontext()


# All ranks of a process run in the same way, so there is one for all threads.
_runtime = RankRuntime()


@contextlib.contextmanager
def using_runtime(given: RankRuntime) -> Iterator[None]:
    """Let the ranks of this process run by ``given`` inside the block."""
    global _runtime
    before, _runtime = _runtime, given
    try:
        yield
    finally:
        _runtime = before


def runtime() -> RankRuntime:
    """Return how the ranks of this process run."""
    return _runtime


def device() -> torch.device:
    """Return the XLA device of the calling rank."""
    return torch_xla.device()


def rank() -> int:
    """Return the global rank of the caller, from 0."""
    return xr.global_ordinal()


def world_size() -> int:
    """Return the number of ranks in the job."""
    return xr.world_size()


def runtime_started() -> bool:
    """Return whether torch_xla has created its devices; the environment is fixed from then on."""
    return torch_xla._XLAC._xla_runtime_is_initialized()


def local_device_count() -> int:
    """Return the number of XLA devices of this process; create them if need be."""
    return len(xm.get_xla_supported_devices())


def expected_device_count() -> int:
    """Return the number of TPU devices of the whole job without starting the runtime."""
    import torch_xla._internal.tpu as tpu

    return tpu.num_expected_global_devices()


def index_of(on: torch.device | str) -> int:
    """Return the number of a device: 3 for ``xla:3``."""
    return int(str(on).rpartition(":")[2])


def torus_coords() -> list[list[int]]:
    """Return the coordinates of every rank, by rank: [core, x, y, z, slice]; empty off a TPU."""
    return _runtime.torus_coords()


def sync() -> None:
    """Compile and run what has been traced so far on the caller's device."""
    torch_xla.sync()


# ---------------------------------------------------------------- graph building


def barrier(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the same values as new tensors, none of them available until all are computed.

    An optimization barrier: XLA moves and merges nothing across it.
    """
    # The inputs stay as they are: torch_xla's own call works in place, and that would turn a
    # parameter from a program input into a program output.
    with torch.no_grad():
        fresh = [t.clone() for t in tensors]
    # Integers are not held back: torch_xla aborts the process when an index (of index_select, say)
    # comes out of a barrier, and nothing that takes memory or time computes them.
    held = [t for t in fresh if t.is_floating_point() or t.is_complex()]
    if held:
        torch_xla._XLAC._xla_optimization_barrier_(held)
    return fresh


def after_(before: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Make ``tensors``, which nobody else holds, available only after ``before``; in place."""
    if before and tensors:
        with torch.no_grad():
            fresh = [t.clone() for t in before if t.is_floating_point() or t.is_complex()]
        torch_xla._XLAC._xla_optimization_barrier_([*tensors, *fresh])
    return list(tensors)


def once_computed(before: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return ``tensors`` so that they are computed after ``before`` in any schedule.

    The TPU compiler drops barriers before it schedules, and merges what two of them kept apart. So
    this adds a value that is known only then: zero, or 1e-30 if one of ``before`` is NaN.
    """
    # The flag is taken of all elements: a slice of a reduce-scatter's result turns that into an
    # all-reduce. It is not 0 * value, as that may be infinite, nor 0 * flag, which is folded away.
    flags = [(each.detach() != each.detach()).any() for each in before if each.is_floating_point()]
    if not flags or not tensors:
        return list(tensors)
    added = (torch.stack(flags).any() if flags[1:] else flags[0]).float() * 1e-30
    return [each + added.to(each.dtype) for each in tensors]


# The functions below trace no operation that changes nothing, such as a reshape to the same shape,
# and one operation in place of a copy and a reshape: the host then traces a step in less time.


def cut(tensor: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Return ``tensor.narrow(...)``, also of length 0, which XLA refuses."""
    if length == 0:
        shape = list(tensor.shape)
        shape[dim] = 0
        return tensor.new_zeros(shape)
    return tensor if length == tensor.shape[dim] else tensor.narrow(dim, start, length)


def shaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``tensor.reshape(shape)``; the tensor itself, if that is its shape."""
    return tensor if tensor.shape == tuple(shape) else tensor.reshape(shape)


def copied(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a copy of ``tensor`` in ``shape``, which does not keep ``tensor`` alive."""
    if tensor.shape == tuple(shape):
        return tensor.clone()
    return torch.view_copy(tensor, shape)


def pieces(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return copies of consecutive slices of the last dim, made in one operation."""
    split: Any = torch.split_with_sizes_copy
    return list(split(tensor, list(sizes), -1))


def copied_slice(tensor: Tensor, start: int, length: int) -> Tensor:
    """Return a copy of ``tensor[start:start + length]``."""
    return torch.slice_copy(tensor, 0, start, start + length) if length else tensor.new_zeros(0)


def release(tensor: Tensor, dummy: Tensor) -> None:
    """Point ``tensor`` at ``dummy``'s value, so that its own is not kept alive by the handle.

    Shapes may differ; autograd's version check still passes.
    """
    if tensor.is_inference():  # has no version
        torch_xla._XLAC._replace_xla_tensor(tensor, dummy)
        return
    with torch.autograd._unsafe_preserve_version_counter(tensor):
        torch_xla._XLAC._replace_xla_tensor(tensor, dummy)


def is_pending(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is an XLA tensor that has been traced but not yet computed."""
    if tensor.device.type != "xla":
        return False
    return torch_xla._XLAC._check_tensor_need_materialization([tensor])[0]


def compute(tensors: Sequence[Tensor]) -> None:
    """Run now what computes ``tensors``, and wait for it."""
    lazy = [tensor for tensor in tensors if tensor.device.type == "xla"]
    if lazy:
        torch_xla._XLAC._xla_sync_multi(lazy, [], True, True)


def upload(tensor: Tensor) -> Tensor:
    """Copy a host tensor to a device buffer of its own, now: ``to`` makes constants of scalars."""
    return torch_xla._XLAC._xla_tensors_from_aten([tensor], [str(device())], None)[0]


def forget_token() -> None:
    """Drop the token that orders collectives; in a new program it would lead back to the last."""
    torch_xla._XLAC._set_all_reduce_token(str(device()), None)


# ---------------------------------------------------------------- collectives
# pin_layout=False throughout: pinned, torch_xla turns an all-gather into a padded all-reduce
# (github.com/pytorch/xla pull 3511), twice the traffic.


@functools.cache
def _constant_token(on: str) -> Any:
    """A token that no collective has given; being a constant, all programs may use it."""
    torch_xla._XLAC._set_all_reduce_token(on, None)
    return torch_xla._XLAC._get_all_reduce_token(on)


def all_gather(value: Tensor, groups: Groups, dim: int = 0) -> Tensor:
    """Concatenate ``value`` ([rows, ...]) of every rank of the group along ``dim``."""
    _runtime.begin_collective(value)
    return xm.all_gather(value, dim=dim, groups=groups, pin_layout=False)


def reduce_scatter(value: Tensor, shard_count: int, groups: Groups, dim: int = 0) -> Tensor:
    """Sum ``value`` ([shard_count * rows, ...]) over the group; each rank gets its [rows, ...] of
    ``dim``."""
    _runtime.begin_collective(value)
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
    """Send part i of ``value`` along ``split_dim`` to the group's rank i; concatenate what arrives
    along ``concat_dim``."""
    _runtime.begin_collective(value)
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
    _runtime.begin_collective(value)
    kind = {"sum": xm.REDUCE_SUM, "max": xm.REDUCE_MAX}[op]
    return cast(Tensor, xm.all_reduce(kind, value, groups=groups, pin_layout=False))


def collective_permute(value: Tensor, sends: Sequence[tuple[int, int]]) -> Tensor:
    """Return ``value`` of the rank that sends to this one; ``sends`` are pairs (from, to)."""
    _runtime.begin_collective(value)
    return xm.collective_permute(value, [list(pair) for pair in sends])


# ---------------------------------------------------------------- random numbers


def get_rng_state(on: torch.device) -> int:
    """Return the state of a device's random number chain; nothing is executed for it."""
    return xm.get_rng_state(str(on))


def set_rng_state(state: int, on: torch.device) -> None:
    """Continue a device's random number chain from ``state``."""
    xm.set_rng_state(state, str(on))


# ---------------------------------------------------------------- torch_xla's own reduction


@functools.cache  # so that the functions are replaced once, and in every thread
def refuse_reduce_gradients_of(is_sharded: Callable[[Any], bool]) -> None:
    """Make ``xm.reduce_gradients`` (called by ``xm.optimizer_step``) raise for sharded parameters.

    Each rank holds a different slice, so averaging them over all ranks destroys the gradients
    silently. accelerate averages by ``xm._fetch_gradients`` and is refused there. Who gives
    ``groups`` averages between replicas of the same slices, which is right.
    """
    reduce, fetch = xm.reduce_gradients, xm._fetch_gradients
    between_replicas: set[torch.optim.Optimizer] = set()

    def has_shards(optimizer: torch.optim.Optimizer) -> bool:
        return any(is_sharded(p) for group in optimizer.param_groups for p in group["params"])

    def reduce_gradients(
        optimizer: torch.optim.Optimizer, groups: Groups = None, *args: Any, **kwargs: Any
    ) -> None:
        if groups is None and has_shards(optimizer):
            raise RuntimeError(
                f"xm.optimizer_step / xm.reduce_gradients was called with {_WOULD_MIX}. Call "
                f"optimizer.step() instead."
            )
        between_replicas.add(optimizer)
        try:
            reduce(optimizer, groups, *args, **kwargs)
        finally:
            between_replicas.discard(optimizer)

    def fetch_gradients(optimizer: torch.optim.Optimizer) -> Any:
        if optimizer not in between_replicas and has_shards(optimizer):
            raise RuntimeError(
                f"an optimizer of accelerate was called with {_WOULD_MIX}. Use the Accelerator of "
                f"xla_fsdp.integrations.accelerate; for transformers' Trainer, call install() of "
                f"xla_fsdp.integrations.transformers first."
            )
        return fetch(optimizer)

    xm.reduce_gradients, xm._fetch_gradients = reduce_gradients, fetch_gradients


_WOULD_MIX = (
    "parameters sharded by xla_fsdp. Their gradients are already reduced, and each rank holds "
    "different slices: averaging them would mix unrelated values"
)
