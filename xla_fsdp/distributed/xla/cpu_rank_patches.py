"""Stand-ins for torch_xla's functions while ranks are threads of one process.

torch_xla's own recipe for several CPU devices in one process hangs or aborts as soon as ranks
compile apart or meet late. While a run is in progress (see ``cpu_ranks``) the functions installed
here stand in for torch_xla's: collectives carry a channel id and are recorded, syncs and reads meet
at the gate. Always true: outside of a run every call is passed on unchanged; what ranks do to each
other is decided by ``cpu_ranks``, which knows nothing of torch_xla.
``launcher`` starts runs.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor

from xla_fsdp.distributed.cpu_ranks import Run, RunSlot, current_rank_thread
from xla_fsdp.distributed.xla import ops
from xla_fsdp.distributed.xla.host import HOST_COPIES, READS
from xla_fsdp.distributed.xla.ops import Groups, index_of

CHANNEL = 1

"""With a channel id the meeting point of a collective no longer depends on the compiled module, so
ranks whose graphs differ elsewhere still find each other."""


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
    if (run := ops.run_in_progress()) is not None:
        run.record(index_of(ops.device()), fact)


@contextlib.contextmanager
def own_random_numbers() -> Iterator[None]:
    """Where ranks are threads: a rank that has seeded finds the host's random numbers after the
    block, in which ranks may meet, where it left them. Elsewhere they are its own anyway."""
    run, thread = ops.run_in_progress(), current_rank_thread()
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
        rank = index_of(on)
        _meet(slot.run, rank)
        with slot.run.execution:
            original(on, list(devices), wait=False, reset_scope=reset_scope)
        if wait:  # not under the lock: what we wait for may need peers that have yet to get it
            _wait_for(rank)

    step_marker.run_slot = slot  # type: ignore[attr-defined]
    torch_xla._XLAC._xla_step_marker = step_marker


COLLECTIVE_NODES = re.compile(
    r"xla::(all_gather|all_reduce|cross_replica_sum|reduce_scatter|all_to_all|collective_permute"
    r"|fsdp_scan)"  # loops of loop_xla_ops
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

    for name, for_host in READS.items():
        setattr(Tensor, name, meets(getattr(Tensor, name), for_host))
    for name in HOST_COPIES:
        original = getattr(torch_xla._XLAC, name)
        setattr(torch_xla._XLAC, name, meets(original, lambda *args, **kwargs: True))


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
    if not lazy or not run.needs_gate(index_of(lazy[0].device)):
        return
    # What is local to this rank may be read by this rank alone.
    if COLLECTIVE_NODES.search(torch_xla._XLAC._get_xla_tensors_text(lazy)):
        on = str(lazy[0].device)
        torch_xla._XLAC._xla_step_marker(on, [], wait=True)
        # As torch_xla.sync() does. A token left over leads back to parameters whose buffers the
        # program has reused, and the next one would fail on them. Step closures wait for the sync.
        torch_xla._XLAC._set_all_reduce_token(on, None)


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
            run.record(index_of(value.device), what)

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
