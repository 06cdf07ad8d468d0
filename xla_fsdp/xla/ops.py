"""The calling rank, and the operations that it traces; nothing here knows of modules."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch_xla
import torch_xla.core.functions
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
import torch_xla.utils.serialization
from torch import Tensor
from torch.overrides import TorchFunctionMode

import xla_fsdp.xla.lowerings  # noqa: F401

Groups = list[list[int]] | None
"""Replica groups of a collective: lists of ranks, or None for one group of all ranks."""

EXCHANGE_MULTIPLE = 4096


# ---------------------------------------------------------------- this rank


class NoValueError(RuntimeError):
    """A value was asked for where tensors have none."""


class RankRuntime:
    """How ranks run and communicate; this one is for TPU, where all ranks run the same program.

    Subclasses are for CPU ranks (``cpu_rank_patches``), and for ranks of a TPU that is not there
    (``fake_rank``, ``virtual_ranks``).
    """

    def __init__(self) -> None:
        self._without_values: list[int] = []

    def device_type(self) -> str:
        """Return the type of the device that programs are traced for: "TPU" or "CPU"."""
        return xr.device_type() or ""

    def torus_coords(self) -> list[list[int]]:
        """Return the coordinates of every rank, by rank: [core, x, y, z, slice]; empty off a TPU.

        Rank r is the device with number r.
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
        """Let a collective of ``value`` be scheduled independently of the last one.

        torch_xla orders collectives by a token, a zero computed from the last one's result. Ranks
        that run one program need no such order, and it prevents gathers from overlapping compute.
        """
        # torch_xla then begins with a constant. Not with one kept here: its buffer is that of all
        # zeros, and says which tensor had it last.
        torch_xla._XLAC._set_all_reduce_token(str(value.device), None)

    def exchange(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of every rank, in order; no operation may be pending."""
        if world_size() == 1:
            return [data]
        # Padded, as a program is compiled for each length.
        length = len(data).to_bytes(8, "little")
        padding = bytes(-(len(length) + len(data)) % EXCHANGE_MULTIPLE)
        found = xm.rendezvous("xla_fsdp.exchange", length + data + padding)
        return [each[8 : 8 + int.from_bytes(each[:8], "little")] for each in found]

    def expect_on_all_ranks(self, fact: Callable[[], str]) -> None:
        """Fail the run unless ``fact`` returns the same on all ranks; only CPU ranks check it."""

    def compares_facts(self) -> bool:
        """Return whether ``expect_on_all_ranks`` does anything."""
        return False

    def compares_values(self) -> bool:
        """Return whether ranks compare the parameters that they wrap; those of a rehearsal, which
        build one after the other, do not."""
        return self.executes()

    def executes(self) -> bool:
        """Return whether programs are executed; those of fake ranks are not."""
        return True

    def has_kernels(self) -> bool:
        """Return whether programs may call Pallas kernels, which only a TPU runs."""
        return self.device_type() == "TPU"

    def run_together(
        self, run: Callable[[], list[Tensor]], prepare: Callable[[], None] | None = None
    ) -> list[Tensor]:
        """Return the results of ``run``, which executes a program, after ``prepare``, which
        compiles it; CPU ranks wait for each other in between."""
        if prepare is not None:
            prepare()
        return run()

    def traced_collectives(self) -> tuple[str, ...]:
        """Return the collectives that the caller has traced but not executed; CPU ranks only."""
        return ()

    def forget_collectives(self) -> None:
        """Drop the collectives that the caller has traced; they are not executed."""

    def repeat_collectives(self, collectives: Sequence[str]) -> None:
        """Note that the program about to run executes the given results of
        ``traced_collectives``."""

    def keep_host_rng(self) -> contextlib.AbstractContextManager[None]:
        """Protect the host's random number state from other ranks that draw during the block."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def without_values(self) -> Iterator[None]:
        """Raise NoValueError during the block where the host would compute from values of the
        caller's device, if ``hooks`` are installed; without them reading a placeholder ends the
        process."""
        rank = index_of(device())
        self._without_values.append(rank)
        try:
            yield
        finally:
            self._without_values.remove(rank)

    def has_values(self, rank: int) -> bool:
        """Return whether ``rank`` is outside of the blocks of ``without_values``."""
        return rank not in self._without_values

    def before_read(self, tensors: Sequence[Any]) -> None:
        """Called by ``hooks`` before values of ``tensors``, of any device, are copied to the
        host."""

    def sync(self, on: str, mark: Callable[[bool], None], wait: bool) -> None:
        """Called by ``hooks`` in place of torch_xla's step marker of device ``on``, which is
        ``mark(wait)``: it executes what is pending, and may wait for that."""
        mark(wait)


# All ranks of a process run in the same way, so there is one for all threads.
_runtime = RankRuntime()


@contextlib.contextmanager
def using_runtime(given: RankRuntime) -> Iterator[None]:
    """Make ``given`` the runtime of this process inside the block."""
    global _runtime
    before, _runtime = _runtime, given
    try:
        yield
    finally:
        _runtime = before


def runtime() -> RankRuntime:
    """Return the runtime of this process."""
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


def is_spmd() -> bool:
    """Return whether the process has turned to SPMD: one program on all devices."""
    return bool(xr.is_spmd())


def runtime_started() -> bool:
    """Return whether torch_xla has created its devices; the environment is fixed from then on."""
    return torch_xla._XLAC._xla_runtime_is_initialized()


def local_device_count() -> int:
    """Return the number of XLA devices of this process; create them if need be."""
    return len(xm.get_xla_supported_devices())


def let_backward_reach_devices() -> None:
    """Let backward passes that the calling thread begins compute on all XLA devices.

    Autograd starts its threads in the first backward pass of the process: one for each device that
    exists by then. If that was on CPU, before torch_xla had made its devices, none would take their
    gradients; then the calling thread computes them itself, from here on.
    """
    if not _autograd_has_threads():
        torch.autograd.set_multithreading_enabled(False)


@functools.cache
def _autograd_has_threads() -> bool:
    """Return whether autograd has a thread for each XLA device; start them if it has none yet, and
    wait until each has computed: torch itself does not wait until a thread is known to Python."""
    for number in range(local_device_count()):
        leaf = torch.ones((), device=f"xla:{number}", requires_grad=True)
        try:
            torch.autograd.grad(leaf.clone(), leaf)
        except RuntimeError:  # an internal assertion of torch's
            return False
    return True


def expected_device_count() -> int:
    """Return the number of TPU devices of the whole job without starting the runtime."""
    import torch_xla._internal.tpu as tpu

    return tpu.num_expected_global_devices()


def index_of(on: torch.device | str) -> int:
    """Return the number of a device: 3 for ``xla:3``."""
    return int(str(on).rpartition(":")[2])


def sync() -> None:
    """Compile and execute all pending operations of the caller's device."""
    torch_xla.sync()


# ---------------------------------------------------------------- graph building


def barrier(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the tensors, none of them available until all are computed.

    An optimization barrier: XLA moves and merges nothing across it.
    """
    # Copies, as torch_xla's call works in place: it would make a parameter an output of the
    # program.
    with torch.no_grad():
        fresh = [t.clone() for t in tensors]
    barrier_(fresh)
    return fresh


def barrier_(tensors: Sequence[Tensor]) -> None:
    """Make none of the tensors, not yet computed, available until all are. They go on sharing
    memory with others, which are available as before."""
    # Not for integers: torch_xla aborts the process when an index (as of index_select) comes out of
    # a barrier. Integers are cheap to compute anyway.
    floats = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    if floats:
        torch_xla._XLAC._xla_optimization_barrier_(floats)


def barrier_after_(before: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Make ``tensors`` available only after ``before``; in place, so none may be shared."""
    if before and tensors:
        with torch.no_grad():
            fresh = [t.clone() for t in before if t.is_floating_point() or t.is_complex()]
        torch_xla._XLAC._xla_optimization_barrier_([*tensors, *fresh])
    return list(tensors)


def with_data_dependency(before: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return ``tensors`` so that they are computed after ``before`` in any schedule.

    The TPU compiler drops barriers before it schedules. So this adds a value that depends on
    ``before``: zero, or 1e-30 if an element of ``before`` is NaN.
    """
    # The flag depends on all elements: reading a slice of a reduce-scatter's result would turn that
    # into an all-reduce. Not 0 * value, which is NaN for infinite values, nor 0 * flag, which XLA
    # folds to a constant.
    flags = [(each.detach() != each.detach()).any() for each in before if each.is_floating_point()]
    if not flags or not tensors:
        return list(tensors)
    added = (torch.stack(flags).any() if flags[1:] else flags[0]).float() * 1e-30
    return [each + added.to(each.dtype) for each in tensors]


def uninitialized(shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return a tensor of any values, on the device of ``like``, for a loop that writes all of it.
    Zeros would be written, too, as the TPU compiler does not see that.

    On CPU its floating-point numbers are NaN, so that reading one shows.
    """
    if runtime().device_type() == "CPU":
        value = math.nan if dtype.is_floating_point else 0
        return torch.full(tuple(shape), value, dtype=dtype, device=like.device)
    # With an operand, only for torch_xla to know the device.
    [made] = torch_xla._XLAC._xla_custom_call(
        [like], "AllocateBuffer", [tuple(shape)], [dtype], False, "", 0, {}
    )
    return cast(Tensor, made)


def bitcast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bits of ``tensor`` (float32 or int32) as ``dtype`` (int32 or float32).

    torch_xla computes ``tensor.view(dtype)`` on the host, as soon as it is called.
    """
    if tensor.device.type != "xla":
        return tensor.view(dtype)
    builder = xb.create_builder("bits")
    param = xb.mkparam(builder, 0, xb.tensor_shape(tensor))
    kind = {torch.int32: xb.Type.S32, torch.float32: xb.Type.F32}[dtype]
    computation = xb.Op.tuple([param.bitcast(kind)]).build("bits")
    [found] = torch_xla._XLAC._xla_user_computation("xla::bits", [tensor], computation)
    return found


def release(tensor: Tensor, dummy: Tensor) -> None:
    """Give ``tensor`` the value of ``dummy``, of any shape, so that its own can be freed.

    Autograd's version check still passes.
    """
    if tensor.is_inference():  # inference tensors have no version
        torch_xla._XLAC._replace_xla_tensor(tensor, dummy)
        return
    with torch.autograd._unsafe_preserve_version_counter(tensor):
        torch_xla._XLAC._replace_xla_tensor(tensor, dummy)


def free_keeping_aliases(tensor: Tensor, dummy: Tensor) -> None:
    """Give ``tensor`` the memory of ``dummy``, as ``release`` does, but leave its own to others
    that share it unknown to autograd, such as ``tensor.data``; without such it is freed.

    ``dummy`` has its dtype, and is an inference tensor if it is one.
    """
    with torch._C.DisableTorchFunction():
        # Tensors made under a dispatch mode (by preflight, say) are of another kind.
        if torch._has_compatible_shallow_copy_type(tensor, dummy):
            tensor.data = dummy
        else:
            release(tensor, dummy)


def tensor_objects() -> list[Tensor]:
    """Return all tensors of the process that have a Python object."""
    with no_collection():
        return [_owned(each) for each in gc.get_objects() if issubclass(type(each), Tensor)]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Let the garbage collector free nothing inside the block: it frees tensors that autograd alone
    holds, even if ``gc.get_objects`` has returned them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Handed(torch.autograd.Function):
    """Hands a gradient on, without an operation."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def let_backward_end() -> list[Tensor]:
    """Wait until autograd's thread holds no tensor of a backward pass that has ended: the object of
    one that it drops while ``tensor_objects`` lists it would be left without a tensor.

    Returns:
        Tensors to keep until then, which the thread holds now.
    """
    leaf, grad = upload_all([torch.zeros(()), torch.zeros(())])
    with torch.enable_grad():
        output = _Handed.apply(leaf.requires_grad_())
        torch.autograd.grad(output, leaf, grad)  # by the same thread, after what it drops
    return [leaf, grad, output]


def referent(reference: weakref.ref[Tensor]) -> Tensor | None:
    """Return the tensor of a weak reference, or None if it is gone."""
    tensor = reference()
    return None if tensor is None else _owned(tensor)


def _owned(tensor: Tensor) -> Tensor:
    # The object of a tensor that only autograd still holds belongs to that tensor. A thread of
    # autograd may drop it at any time, and the object would be left without a tensor.
    tensor._fix_weakref()  # type: ignore[attr-defined]
    return tensor


def memory_of(tensor: Tensor) -> int:
    """Return a number that a tensor, while it lives, shares with all that share its memory."""
    if tensor.device.type == "xla" and not torch._is_functional_tensor(tensor):
        return id(tensor)  # made under a dispatch mode: shares none
    # Not an object of Python, which torch would have to keep.
    return torch._C._storage_id(tensor)  # type: ignore[attr-defined]


def is_pending(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is an XLA tensor that has been traced but not yet computed."""
    if tensor.device.type != "xla":
        return False
    return torch_xla._XLAC._check_tensor_need_materialization([tensor])[0]


def compute(tensors: Sequence[Tensor]) -> None:
    """Execute now the operations that compute ``tensors``, and wait for them."""
    lazy = [tensor for tensor in tensors if tensor.device.type == "xla"]
    if lazy:
        torch_xla._XLAC._xla_sync_multi(lazy, [], True, True)


class ScaledProducts(TorchFunctionMode):
    """Trace ``torch.addmm`` with factors inside the block.

    torch_xla computes it on the host, as soon as it is called, unless both factors are 1. Muon's
    products would leave the device ten times for each matrix.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.addmm and not kwargs.keys() - {"beta", "alpha"}:
            added, left, right = args
            return kwargs.get("beta", 1) * added + kwargs.get("alpha", 1) * (left @ right)
        return func(*args, **kwargs)


def upload(tensor: Tensor, on: torch.device | None = None) -> Tensor:
    """Copy a host tensor to a new device buffer; ``to`` would make a scalar a constant."""
    return upload_all([tensor], on)[0]


def upload_all(tensors: Sequence[Tensor], on: torch.device | None = None) -> list[Tensor]:
    """Copy host tensors to new buffers of a device (default: the caller's) at once."""
    devices = [str(on or device())] * len(tensors)
    return torch_xla._XLAC._xla_tensors_from_aten(list(tensors), devices, None)


def copied_to(tensor: Tensor, on: torch.device) -> Tensor:
    """Return a copy of ``tensor`` on an XLA device; a meta tensor itself."""
    if tensor.is_meta:
        return tensor
    if tensor.device.type == "cpu":
        return upload(tensor, on)  # now: ``to`` leaves it to the next program
    # A copy also on the device, where a leaf that is a view of another tensor keeps that alive.
    return tensor.to(on, copy=True)


def forget_token() -> None:
    """Drop torch_xla's token, which would make the next program depend on the last one."""
    torch_xla._XLAC._set_all_reduce_token(str(device()), None)


def discard_unfinished(rank: int) -> None:
    """Discard what an unfinished step left on device number ``rank`` for a later sync."""
    torch_xla._XLAC._set_all_reduce_token(f"xla:{rank}", None)
    context = vars(xm._get_device_context(f"xla:{rank}"))
    context.pop("step_closures", None)
    context.pop("async_step_closures", None)


def live_tensors() -> list[Tensor]:
    """Return all Python objects of XLA tensors; several may be of one XLA tensor."""
    found: dict[int, Tensor] = {}
    for tensor in tensor_objects():
        for each in (tensor, tensor.grad if tensor.is_leaf else None):
            if each is not None and each.device.type == "xla":
                found[id(each)] = each
    return list(found.values())


# ---------------------------------------------------------------- collectives
# pin_layout=False throughout: pinned, torch_xla turns an all-gather into a padded all-reduce
# (github.com/pytorch/xla pull 3511), twice the traffic.


def all_gather(value: Tensor, groups: Groups, dim: int = 0) -> Tensor:
    """Concatenate ``value`` ([rows, ...]) of every rank of the group along ``dim``."""
    _runtime.begin_collective(value)
    return xm.all_gather(value, dim=dim, groups=groups, pin_layout=False)


def reduce_scatter(value: Tensor, shard_count: int, groups: Groups, dim: int = 0) -> Tensor:
    """Sum ``value`` ([shard_count * rows, ...]) over the group; return this rank's [rows, ...].

    Rows are those of ``dim``.
    """
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
    """Send slice i of ``value`` along ``split_dim`` to rank i of the group; concatenate the
    received slices along ``concat_dim``."""
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
    """Send ``value`` by pairs of ranks (from, to); return what this rank receives."""
    _runtime.begin_collective(value)
    return xm.collective_permute(value, [list(pair) for pair in sends])


# ---------------------------------------------------------------- random numbers


def get_rng_state(on: torch.device) -> int:
    """Return the state of a device's random number generator, without executing anything."""
    return xm.get_rng_state(str(on))


def set_rng_state(state: int, on: torch.device) -> None:
    """Set the state of a device's random number generator."""
    xm.set_rng_state(state, str(on))


# ---------------------------------------------------------------- functions in the place of others


def surround(*replaced: tuple[Any, str, Callable[..., Any]]) -> None:
    """For each (owner, name, by), let ``owner.name(...)`` call ``by(original, ...)``, unless it
    calls a ``by`` already."""
    for owner, name, by in replaced:
        original = getattr(owner, name)
        if not getattr(original, "is_of_xla_fsdp", False):
            setattr(owner, name, _surrounded(original, by))


def _surrounded(original: Callable[..., Any], by: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def surrounded(*args: Any, **kwargs: Any) -> Any:
        return by(original, *args, **kwargs)

    surrounded.is_of_xla_fsdp = True  # type: ignore[attr-defined]
    return surrounded
