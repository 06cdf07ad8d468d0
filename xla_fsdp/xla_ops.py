"""The only file that touches torch_xla's internals; every workaround names its reason.

Words: an *optimization barrier* is an XLA op that nothing is moved across or merged through; to
*release* a tensor is to point its handle at a small dummy, so that the graph no longer needs its
value. Always true: nothing here knows about modules, parameters or sharding.
Which tensors are gathered and when is decided by ``param_group`` and ``unit``; how ranks are
started on CPU by ``launcher`` and ``cpu_ranks``.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast
from unittest import mock

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor

from .cpu_ranks import Run, RunSlot, current_rank_thread

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


def torus_coords() -> list[list[int]]:
    """Place of every rank on the TPU's torus, by rank: [core, x, y, z, slice]; empty off a TPU.

    Devices are asked for their places; a rank is the device of that number.
    """
    if (pretended := getattr(torus_coords, "pretended", None)) is not None:
        return pretended
    if xr.device_type() != "TPU":
        return []
    attributes: list[dict[str, Any]] = xr.global_runtime_device_attributes()
    if not all("coords" in each for each in attributes):
        return []
    by_number = sorted(attributes, key=lambda each: _index(each["name"]))
    return [
        [each.get("core_on_chip", 0), *each["coords"], each.get("slice_index", 0)]
        for each in by_number
    ]


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


# torch's view_copy and narrow_copy go through Python, and a reshape to the same shape is an
# operation like any other; without them the host traces a step in a tenth less time.


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


def lowered_hlo(tensors: Sequence[Tensor]) -> str:
    """HLO text, before optimization, of the program that computes ``tensors``."""
    return torch_xla._XLAC._get_xla_tensors_hlo(list(tensors))


# ---------------------------------------------------------------- collectives
# pin_layout=False throughout: pinned, torch_xla turns an all-gather into a padded all-reduce
# (github.com/pytorch/xla pull 3511), twice the traffic.


def _begin_free() -> None:
    """Do not make the next collective wait for the last one, as torch_xla does by adding a zero
    that is computed from its result. Ranks that run one program need no such order, and it keeps
    the compiler from moving gathers under compute. CPU ranks may run different programs.
    """
    slot = getattr(torch_xla._XLAC._xla_step_marker, "run_slot", None)
    if slot is None or slot.run is None:
        forget_token()


def all_gather(value: Tensor, groups: Groups, dim: int = 0) -> Tensor:
    """Join ``value`` ([rows, ...]) of every rank of the group along ``dim``, in rank order."""
    _begin_free()
    return xm.all_gather(value, dim=dim, groups=groups, pin_layout=False)


def reduce_scatter(value: Tensor, shard_count: int, groups: Groups, dim: int = 0) -> Tensor:
    """Sum ``value`` ([shard_count * rows, ...]) over the group; each rank gets its [rows, ...] of
    ``dim``."""
    _begin_free()
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
    _begin_free()
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
    _begin_free()
    kind = {"sum": xm.REDUCE_SUM, "max": xm.REDUCE_MAX}[op]
    return cast(Tensor, xm.all_reduce(kind, value, groups=groups, pin_layout=False))


# ---------------------------------------------------------------- host values

EXCHANGE_MULTIPLE = 4096


def settle() -> None:
    """As ``sync``, and the device's random numbers stay where they are."""
    with _same_random_numbers():
        sync()


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in host memory, of any tensors; what is traced is computed first, all at once."""
    settle()
    lazy = [t.detach() for t in tensors if t.device.type == "xla"]
    copies = iter(torch_xla._XLAC._xla_get_cpu_tensors(lazy) if lazy else [])
    return [next(copies) if t.device.type == "xla" else t.detach().clone() for t in tensors]


def exchange(data: bytes) -> list[bytes]:
    """The ``data`` of every rank of the job, in order. All ranks must call it; what is traced is
    computed first."""
    slot = getattr(torch_xla._XLAC._xla_step_marker, "run_slot", None)
    with _same_random_numbers():
        sync()
        if slot is not None and slot.run is not None:
            return slot.run.exchange(_index(device()), data)
        if world_size() == 1:
            return [data]
        # Few lengths, as every other one is compiled anew.
        length = len(data).to_bytes(8, "little")
        padding = bytes(-(len(length) + len(data)) % EXCHANGE_MULTIPLE)
        said = xm.rendezvous("xla_fsdp.exchange", length + data + padding)
        return [each[8 : 8 + int.from_bytes(each[:8], "little")] for each in said]


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """A sync moves the device's random number chain on; a job that is saved now and then would not
    draw the numbers of one that is not."""
    before = get_rng_state(device())
    try:
        yield
    finally:
        set_rng_state(before, device())


# ---------------------------------------------------------------- random numbers


def get_rng_state(on: torch.device) -> int:
    """The state of a device's random number chain; known on the host, nothing is executed."""
    return xm.get_rng_state(str(on))


def set_rng_state(state: int, on: torch.device) -> None:
    """Continue a device's random number chain from ``state``."""
    xm.set_rng_state(state, str(on))


# ---------------------------------------------------------------- guards


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


# ---------------------------------------------------------------- pretended ranks
# What one rank of many would run, found out on a machine that has none of them.


@contextlib.contextmanager
def pretended_rank(
    rank: int, coords: Sequence[Sequence[int]], instead_of_running: Callable[[], None]
) -> Iterator[None]:
    """Inside, the caller is ``rank`` of as many as there are ``coords``, and nothing is executed:
    wherever a sync or a read would run the traced program, ``instead_of_running()`` is called
    first. It must leave nothing pending."""

    def first(original: Callable[..., Any], runs: Callable[..., bool]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(value: Any = None, *args: Any, **kwargs: Any) -> Any:
            if runs(*args, **kwargs) and (not isinstance(value, Tensor) or is_pending(value)):
                instead_of_running()
            return original(value, *args, **kwargs)

        return call

    def step_marker(*args: Any, **kwargs: Any) -> None:
        instead_of_running()

    with contextlib.ExitStack() as stack:
        replace = stack.enter_context
        replace(mock.patch.multiple(xr, _WORLD_SIZE=len(coords), _ORDINAL=rank))
        places = [list(place) for place in coords]
        replace(mock.patch.object(torus_coords, "pretended", places, create=True))
        replace(mock.patch.object(torch_xla._XLAC, "_xla_step_marker", step_marker))
        for name in ("_xla_sync_multi", "_xla_get_cpu_tensors"):
            original = getattr(torch_xla._XLAC, name)
            replace(mock.patch.object(torch_xla._XLAC, name, first(original, _always)))
        for name in READS:
            runs = _moves_to_host if name == "to" else _always
            replace(mock.patch.object(Tensor, name, first(getattr(Tensor, name), runs)))
        yield


def forget_token() -> None:
    """Begin a new program: what ties collectives to each other's order would lead back into the
    last one."""
    torch_xla._XLAC._set_all_reduce_token(str(device()), None)


def program_of(tensors: Sequence[Tensor]) -> bytes:
    """The serialized HLO module, before optimization, of the program that computes ``tensors``."""
    return torch_xla._XLAC._get_xla_tensors_hlo_proto(list(tensors))


def upload(tensor: Tensor) -> Tensor:
    """A host tensor in a device buffer of its own, at once: ``to`` makes constants of scalars."""
    return torch_xla._XLAC._xla_tensors_from_aten([tensor], [str(device())], None)[0]


def input_buffers(tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """The device buffers that ``program_of(tensors)`` takes, in the order of its parameters: an
    identity, and a tensor of the same shape and dtype."""
    _, values = torch_xla._XLAC._get_tensors_xla_device_data_node(list(tensors))
    return list(zip(torch_xla._XLAC._get_tensors_handle(values), values, strict=True))


def buffer_id(tensor: Tensor) -> int | None:
    """Identity of a tensor's device buffer; None if it has none yet, as values that have only been
    announced for the device."""
    try:
        return torch_xla._XLAC._get_tensors_handle([tensor])[0]
    except RuntimeError:
        return None


def tensor_id(tensor: Tensor) -> int:
    """The same for Python objects that stand for one XLA tensor."""
    return torch_xla._XLAC._xla_get_tensor_id(tensor)


# ---------------------------------------------------------------- CPU ranks
# torch_xla's own recipe for several CPU devices in one process hangs or aborts as soon as ranks
# compile apart or meet late. While a run (see cpu_ranks) is in progress the functions below stand
# in for torch_xla's; otherwise they pass every call on unchanged.

CHANNEL = 1
"""With a channel id the meeting point of a collective no longer depends on the compiled module, so
ranks whose graphs differ elsewhere still find each other."""


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


def prepare_cpu_ranks() -> None:
    """Make all devices of this process replicas of one job, before any rank or backward runs."""
    import torch_xla._internal.pjrt as pjrt

    pjrt.initialize_multiprocess(0, 1)
    # A world size asked for before this point was cached as 1.
    xr._WORLD_SIZE = None


def enter_cpu_rank(rank: int) -> None:
    """Make the calling thread the one that traces on device number ``rank``."""
    torch_xla._XLAC._xla_set_default_device(f"xla:{rank}")
    xr._init_world_size_ordinal()


def leave_cpu_rank(rank: int) -> None:
    """Let the device finish, and forget what an unfinished step left for a later sync to run."""
    # An execution that still runs when the interpreter exits makes the C++ runtime abort.
    _wait_for(rank)
    torch_xla._XLAC._set_all_reduce_token(f"xla:{rank}", None)
    context = vars(xm._get_device_context(f"xla:{rank}"))
    context.pop("step_closures", None)
    context.pop("async_step_closures", None)


def run_slot() -> RunSlot:
    """Where to announce a run; the first call puts the stand-ins in place."""
    slot = getattr(torch_xla._XLAC._xla_step_marker, "run_slot", None)
    if slot is None:
        slot = RunSlot()
        _CpuCollectives(slot).install()
        _install_step_marker(slot)
        _install_reads(slot)
        _install_seeding(slot)
        _install_spawn(slot)
    return slot


def tell_peers(fact: str) -> None:
    """Where ranks are threads: have ``fact`` compared with what the others say at this point, when
    they next meet. Elsewhere this does nothing."""
    slot = getattr(torch_xla._XLAC._xla_step_marker, "run_slot", None)
    if slot is not None and slot.run is not None:
        slot.run.record(_index(device()), fact)


@contextlib.contextmanager
def own_random_numbers() -> Iterator[None]:
    """Where ranks are threads: a rank that has seeded finds the host's random numbers after the
    block, in which ranks may meet, where it left them. Elsewhere they are its own anyway."""
    slot = getattr(torch_xla._XLAC._xla_step_marker, "run_slot", None)
    run, thread = None if slot is None else slot.run, current_rank_thread()
    if run is None or thread is None or not run.is_seeding(thread.rank):
        yield
        return
    yield
    run.resume_seeding(thread.rank)


def _install_step_marker(slot: RunSlot) -> None:
    original = torch_xla._XLAC._xla_step_marker

    def step_marker(
        device: str = "", devices: Sequence[str] = (), wait: bool = True, reset_scope: bool = True
    ) -> None:
        if slot.run is None:
            original(device, list(devices), wait=wait, reset_scope=reset_scope)
            return
        # By device, not by thread: a sync in a backward hook comes from autograd's own thread.
        on = device or torch_xla._XLAC._xla_get_default_device()
        rank = _index(on)
        _meet(slot.run, rank)
        with slot.run.execution:
            original(on, list(devices), wait=False, reset_scope=reset_scope)
        if wait:  # not under the lock: what we wait for may need peers that have yet to get it
            _wait_for(rank)

    step_marker.run_slot = slot  # type: ignore[attr-defined]
    torch_xla._XLAC._xla_step_marker = step_marker


READS = ("item", "tolist", "numpy", "cpu", "to", "__repr__", "__bool__", "__int__", "__float__")
"""Methods of a tensor that compute it and hand its value to the host (``to`` sometimes)."""
COLLECTIVE_NODES = re.compile(
    r"xla::(all_gather|all_reduce|cross_replica_sum|reduce_scatter|all_to_all|collective_permute)"
)


def _install_reads(slot: RunSlot) -> None:
    """Make ranks meet before a value is read that collectives have yet to compute.

    torch_xla's C++ executes them at once. Ranks that did not make the same ones would then get each
    other's memory, or wait until XLA aborts the process.
    """

    def meets(original: Callable[..., Any], for_host: Callable[..., bool]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(value: Any, *args: Any, **kwargs: Any) -> Any:
            run = slot.run
            if run is not None and for_host(*args, **kwargs):
                _compute_together(run, [value] if isinstance(value, Tensor) else value)
            return original(value, *args, **kwargs)

        return read

    for name in READS:
        for_host = _moves_to_host if name == "to" else _always
        setattr(Tensor, name, meets(getattr(Tensor, name), for_host))
    for name in ("_xla_sync_multi", "_xla_get_cpu_tensors"):  # of xm.save and xm.mesh_reduce
        setattr(torch_xla._XLAC, name, meets(getattr(torch_xla._XLAC, name), _always))


def _install_seeding(slot: RunSlot) -> None:
    """A script that seeds and then builds its model does so without another rank in between: the
    ranks share one host random number generator."""
    original = torch.manual_seed

    @functools.wraps(original)
    def manual_seed(seed: int) -> torch.Generator:
        thread = current_rank_thread()
        if slot.run is not None and thread is not None:
            slot.run.begin_seeding(thread.rank)
        return original(seed)

    torch.manual_seed = manual_seed


def _compute_together(run: Run, tensors: Sequence[Tensor]) -> None:
    lazy = [t for t in tensors if t.device.type == "xla"]
    if not lazy or not run.needs_gate(_index(lazy[0].device)):
        return
    # What is local to this rank may be read by this rank alone.
    if COLLECTIVE_NODES.search(torch_xla._XLAC._get_xla_tensors_text(lazy)):
        on = str(lazy[0].device)
        torch_xla._XLAC._xla_step_marker(on, [], wait=True)
        # As torch_xla.sync() does. A token left over leads back to parameters whose buffers the
        # program has reused, and the next one would fail on them. Step closures wait for the sync.
        torch_xla._XLAC._set_all_reduce_token(on, None)


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _moves_to_host(*args: Any, **kwargs: Any) -> bool:
    """Whether arguments of ``Tensor.to`` name the CPU."""
    targets = [*args[:1], kwargs.get("device"), kwargs.get("other")]
    return any(
        str(target.device if isinstance(target, Tensor) else target).startswith("cpu")
        for target in targets
        if target is not None
    )


def _meet(run: Run, rank: int) -> None:
    """Wait until it is safe to take the execution lock.

    The holder of the lock waits for the previous execution on its device. So that this never needs
    a peer that wants the lock, either all ranks have scheduled all they had (the gate), or that
    execution is over.
    """
    if run.needs_gate(rank):
        run.pass_gate(rank)
    else:
        _wait_for(rank)


def _wait_for(rank: int) -> None:
    """Wait until the device of ``rank`` has executed what was scheduled on it."""
    # This call wants the runtime's name of the device; "xla:0" raises an IndexError.
    torch_xla._XLAC._xla_wait_device_ops(devices=[f"CPU:{rank}"])


def _index(on: torch.device | str) -> int:
    return int(str(on).rpartition(":")[2])


def _install_spawn(slot: RunSlot) -> None:
    import torch_xla._internal.pjrt as pjrt

    original = pjrt.spawn

    def spawn(fn: Any, nprocs: Any = None, start_method: str = "spawn", args: Any = ()) -> Any:
        if slot.run is None and slot.start_ranks is not None:
            return slot.start_ranks(fn, args)
        if slot.run is None:
            return original(fn, nprocs, start_method, args)
        return fn(xr.global_ordinal(), *args)

    pjrt.spawn = spawn


class _CpuCollectives:
    """xm.all_gather, reduce_scatter and all_reduce with channel ids, and a record of each call."""

    def __init__(self, slot: RunSlot) -> None:
        self._slot = slot
        self._all_gather = xm.all_gather
        self._reduce_scatter = xm.reduce_scatter
        self._all_reduce = xm.all_reduce

    def install(self) -> None:
        """Put the methods in the place of torch_xla's functions."""
        xm.all_gather = self.all_gather
        xm.reduce_scatter = self.reduce_scatter
        xm.all_reduce = self.all_reduce
        for name in ("all_to_all", "collective_permute"):
            setattr(xm, name, self._recorded(name, getattr(xm, name)))

    def all_gather(
        self,
        value: Any,
        dim: int = 0,
        groups: Groups = None,
        output: Any = None,
        pin_layout: bool = True,
        channel_id: int | None = None,
        use_global_device_ids: bool | None = None,
    ) -> Any:
        """Stands in for xm.all_gather."""
        if self._idle() or (pin_layout and not isinstance(value, Tensor)):
            return self._all_gather(
                value, dim, groups, output, pin_layout, channel_id, use_global_device_ids
            )
        full_groups = _all_groups(groups)

        def gather(part: Tensor) -> Tensor:
            self._record("all_gather", part, f"dim {dim}", full_groups)
            return self._gather(part, dim, full_groups)

        return _each(gather, value, output)

    def reduce_scatter(
        self,
        reduce_type: str,
        input: Any,
        scale: float,
        scatter_dim: int,
        shard_count: int,
        groups: Groups = None,
        output: Any = None,
        pin_layout: bool = True,
        channel_id: int | None = None,
        use_global_device_ids: bool | None = None,
    ) -> Any:
        """Stands in for xm.reduce_scatter."""
        if self._idle():
            return self._reduce_scatter(
                reduce_type,
                input,
                scale,
                scatter_dim,
                shard_count,
                groups,
                output,
                pin_layout,
                channel_id,
                use_global_device_ids,
            )
        full_groups = _all_groups(groups)

        def scatter(part: Tensor) -> Tensor:
            how = f"{reduce_type}, scale {scale:g}, dim {scatter_dim}"
            self._record("reduce_scatter", part, how, full_groups)
            return self._scatter(part, reduce_type, scale, scatter_dim, shard_count, full_groups)

        return _each(scatter, input, output)

    def all_reduce(
        self,
        reduce_type: str,
        inputs: Any,
        scale: float = 1.0,
        groups: Groups = None,
        pin_layout: bool = True,
    ) -> Any:
        """Stands in for xm.all_reduce."""
        if self._idle() or xr.world_size() == 1:  # of one rank torch_xla returns the input
            return self._all_reduce(reduce_type, inputs, scale, groups, pin_layout)
        full_groups = _all_groups(groups)

        def reduce(part: Tensor) -> Tensor:
            self._record("all_reduce", part, f"{reduce_type}, scale {scale:g}", full_groups)
            return self._reduce(part, reduce_type, scale, full_groups)

        if isinstance(inputs, Tensor):
            return reduce(inputs)
        _each(reduce, list(inputs), list(inputs))
        return inputs

    def _idle(self) -> bool:
        return self._slot.run is None

    def _record(self, kind: str, value: Tensor, how: str, groups: list[list[int]]) -> None:
        run = self._slot.run
        if run is not None and value.device.type == "xla":
            dtype = str(value.dtype).removeprefix("torch.")
            what = f"{kind}({dtype}{list(value.shape)}, {how}, groups {groups})"
            run.record(_index(value.device), what)

    def _recorded(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def collective(value: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._idle():
                self._record(kind, value, f"{args} {kwargs}", [])
            return original(value, *args, **kwargs)

        return collective

    def _gather(self, value: Tensor, dim: int, groups: list[list[int]]) -> Tensor:
        return self._all_gather(value, dim, groups, None, False, CHANNEL, True)

    def _scatter(
        self,
        value: Tensor,
        reduce_type: str,
        scale: float,
        dim: int,
        shard_count: int,
        groups: list[list[int]],
    ) -> Tensor:
        return self._reduce_scatter(
            reduce_type, value, scale, dim, shard_count, groups, None, False, CHANNEL, True
        )

    def _reduce(
        self, value: Tensor, reduce_type: str, scale: float, groups: list[list[int]]
    ) -> Tensor:
        """All-reduce takes no channel id; a reduce-scatter and an all-gather do, and share a token
        that keeps them in program order where the graphs of the ranks differ."""
        if not value.numel():
            return value.clone()
        size, parts = value.numel(), len(groups[0])
        flat = torch.nn.functional.pad(value.detach().reshape(-1), (0, -size % parts))
        shard = self._scatter(flat, reduce_type, scale, 0, parts, groups)
        return self._gather(shard, 0, groups)[:size].reshape(value.shape)


def _all_groups(groups: Groups) -> list[list[int]]:
    """The groups spelled out; they must be of one size."""
    if not groups:
        return [list(range(xr.world_size()))]
    if len({len(group) for group in groups}) > 1:
        raise ValueError(f"groups={groups} differ in size; give every group as many ranks")
    return [list(group) for group in groups]


def _each(collective: Callable[[Tensor], Tensor], value: Any, output: Any) -> Any:
    """Apply to a tensor or to each tensor of a list; into ``output`` if there is one."""
    if isinstance(value, Tensor):
        result = collective(value)
        return result if output is None else _overwrite(output, result)
    if output is not None and len(output) != len(value):
        raise ValueError(f"output holds {len(output)} tensors, the input {len(value)}")
    results = [collective(part) for part in value]
    if output is None:
        return results
    for old, new in zip(output, results, strict=True):
        _overwrite(old, new)
    return output


def _overwrite(old: Tensor, new: Tensor) -> Tensor:
    """Give ``old`` the value of ``new``, unseen by autograd like torch_xla's own in-place forms."""
    if old.shape != new.shape:
        raise ValueError(f"output has shape {tuple(old.shape)}, the result {tuple(new.shape)}")
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(old):
        old.copy_(new)
    return old
