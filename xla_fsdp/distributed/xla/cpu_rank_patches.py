"""Changes to torch_xla while ranks are threads of one process.

torch_xla's own recipe for several CPU devices in one process hangs or aborts as soon as ranks
compile apart or meet late. Here collectives get a channel id and are recorded, and syncs and reads
wait for the other ranks (``cpu_ranks.Run``).
Invariants: outside of a run every call goes to torch_xla unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch_xla
import torch_xla._internal.pjrt as pjrt
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor

from xla_fsdp.distributed.cpu_ranks import Run, current_rank_thread
from xla_fsdp.distributed.xla import ops
from xla_fsdp.distributed.xla.ops import Groups, index_of

CHANNEL = 1
"""With a channel id the meeting point of a collective no longer depends on the compiled module, so
ranks whose graphs differ elsewhere still find each other."""

COLLECTIVE_NODES = re.compile(
    r"xla::(all_gather|all_reduce|cross_replica_sum|reduce_scatter|all_to_all|collective_permute"
    r"|fsdp_scan)"  # loops of distributed/xla/loop.py
)


@dataclass
class RunSlot:
    """Where the replaced functions of torch_xla look up the run in progress; one per process.

    ``start_ranks(fn, args)`` is called where a program asks torch_xla for ranks outside of a run.
    """

    run: Run | None = None
    start_ranks: Callable[[Any, Any], Any] | None = None


@functools.cache
def run_slot() -> RunSlot:
    """Return this process's slot; the first call replaces torch_xla's functions."""
    # For good: modules that are imported during a run may take the functions by name.
    slot = RunSlot()
    _CpuCollectives(slot).install()
    _replace_step_marker(slot)
    _replace_reads(slot)
    _replace_seeding(slot)
    _replace_spawn(slot)
    return slot


@contextlib.contextmanager
def running(run: Run) -> Iterator[None]:
    """Let the ranks of ``run`` be those of this process inside the block.

    Raises:
        RuntimeError: if there is a run already.
    """
    slot = run_slot()
    if slot.run is not None:
        raise RuntimeError("a launch is running in another thread of this process; wait for it")
    slot.run = run
    try:
        with ops.using_runtime(_CpuRanks(run)):
            yield
    finally:
        slot.run = None


class _CpuRanks(ops.RankRuntime):
    def __init__(self, run: Run) -> None:
        self._run = run

    def begin_collective(self, value: Tensor) -> None:
        pass  # CPU ranks may run different programs, in which the order has to be the same

    def exchange(self, data: bytes) -> list[bytes]:
        return self._run.exchange(index_of(ops.device()), data)

    def expect_on_all_ranks(self, fact: str) -> None:
        self._run.record(index_of(ops.device()), fact)

    @contextlib.contextmanager
    def keep_host_rng(self) -> Iterator[None]:
        thread = current_rank_thread()
        seeding = thread is not None and self._run.is_seeding(thread.rank)
        yield
        if thread is not None and seeding:
            self._run.resume_seeding(thread.rank)


# ---------------------------------------------------------------- a rank's thread


def prepare_cpu_ranks() -> None:
    """Make all devices of this process replicas of one job, before any rank or backward runs."""
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


def _wait_for(rank: int) -> None:
    """Wait until the device of ``rank`` has executed what was scheduled on it."""
    # This call wants the runtime's name of the device; "xla:0" raises an IndexError.
    torch_xla._XLAC._xla_wait_device_ops(devices=[f"CPU:{rank}"])


# ---------------------------------------------------------------- syncs, reads, seeding, spawning


def _replace_step_marker(slot: RunSlot) -> None:
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
        # The holder of the lock waits for the previous execution on its device, which must never
        # need a peer that wants the lock. So either all ranks have scheduled what they had (the
        # gate), or that execution is over.
        if slot.run.needs_gate(rank):
            slot.run.pass_gate(rank)
        else:
            _wait_for(rank)
        with slot.run.execution:
            original(on, list(devices), wait=False, reset_scope=reset_scope)
        if wait:  # not under the lock: what we wait for may need peers that have yet to get it
            _wait_for(rank)

    torch_xla._XLAC._xla_step_marker = step_marker


def host_reads(before: Callable[[Any], None]) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return functions that compute tensors for the host, changed to call ``before`` first.

    Args:
        before: called with the tensor, or with the first argument of a function of several.

    Returns:
        Owner, name and changed function of each.
    """
    functions = [
        *((Tensor, name) for name in ("item", "tolist", "numpy", "cpu", "to", "__repr__")),
        *((Tensor, name) for name in ("__bool__", "__int__", "__float__")),
        # Of several tensors; xm.save and xm.mesh_reduce call them.
        (torch_xla._XLAC, "_xla_sync_multi"),
        (torch_xla._XLAC, "_xla_get_cpu_tensors"),
    ]

    def changed(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(value: Any = None, *args: Any, **kwargs: Any) -> Any:
            if name != "to" or _names_cpu(*args, **kwargs):
                before(value)
            return original(value, *args, **kwargs)

        return read

    return [(owner, name, changed(getattr(owner, name), name)) for owner, name in functions]


def _names_cpu(*args: Any, **kwargs: Any) -> bool:
    """Return whether arguments of ``Tensor.to`` name the CPU."""
    targets = [*args[:1], kwargs.get("device"), kwargs.get("other")]
    return any(
        str(target.device if isinstance(target, Tensor) else target).startswith("cpu")
        for target in targets
        if target is not None
    )


def _replace_reads(slot: RunSlot) -> None:
    """Make ranks meet before a value is read that collectives have yet to compute.

    torch_xla's C++ executes them at once. Ranks that did not make the same ones would then get each
    other's memory, or wait until XLA aborts the process.
    """

    def before(value: Any) -> None:
        if slot.run is not None:
            _compute_together(slot.run, [value] if isinstance(value, Tensor) else value)

    for owner, name, read in host_reads(before):
        setattr(owner, name, read)


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


def _replace_seeding(slot: RunSlot) -> None:
    """Let no other rank draw random numbers while one seeds and builds its model: the ranks share
    one host random number generator."""
    original = torch.manual_seed

    @functools.wraps(original)
    def manual_seed(seed: int) -> torch.Generator:
        thread = current_rank_thread()
        if slot.run is not None and thread is not None:
            slot.run.begin_seeding(thread.rank)
        return original(seed)

    torch.manual_seed = manual_seed


def _replace_spawn(slot: RunSlot) -> None:
    original = pjrt.spawn

    def spawn(fn: Any, nprocs: Any = None, start_method: str = "spawn", args: Any = ()) -> Any:
        if slot.run is not None:
            return fn(xr.global_ordinal(), *args)
        if slot.start_ranks is not None:
            return slot.start_ranks(fn, args)
        return original(fn, nprocs, start_method, args)

    pjrt.spawn = spawn


# ---------------------------------------------------------------- collectives


class _CpuCollectives:
    """xm.all_gather, reduce_scatter and all_reduce with channel ids, and a record of each call."""

    def __init__(self, slot: RunSlot) -> None:
        self._slot = slot
        how: dict[str, Any] = {
            "pin_layout": False,
            "channel_id": CHANNEL,
            "use_global_device_ids": True,
        }
        self._gather: Callable[..., Tensor] = functools.partial(xm.all_gather, **how)
        self._scatter: Callable[..., Tensor] = functools.partial(xm.reduce_scatter, **how)

    def install(self) -> None:
        """Replace torch_xla's functions."""
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            setattr(xm, name, self._replaced(getattr(xm, name), getattr(self, name)))
        for name in ("all_to_all", "collective_permute"):
            setattr(xm, name, self._recorded(name, getattr(xm, name)))

    def _replaced(
        self, original: Callable[..., Any], collective: Callable[[SimpleNamespace], Any]
    ) -> Callable[..., Any]:
        """Return ``original`` that calls ``collective`` with its arguments by name in a run."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = NotImplemented
            if self._slot.run is not None:
                given = signature.bind(*args, **kwargs)
                given.apply_defaults()
                result = collective(SimpleNamespace(**given.arguments))
            return original(*args, **kwargs) if result is NotImplemented else result

        return call

    def _recorded(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def collective(value: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._record(kind, value, f"{args} {kwargs}", [])
            return original(value, *args, **kwargs)

        return collective

    def _record(self, kind: str, value: Tensor, how: str, groups: list[list[int]]) -> None:
        run = self._slot.run
        if run is not None and value.device.type == "xla":
            dtype = str(value.dtype).removeprefix("torch.")
            what = f"{kind}({dtype}{list(value.shape)}, {how}, groups {groups})"
            run.record(index_of(value.device), what)

    def all_gather(self, given: SimpleNamespace) -> Any:
        """Gather with a channel id."""
        if given.pin_layout and not isinstance(given.value, Tensor):
            return NotImplemented
        groups = _all_groups(given.groups)

        def gather(value: Tensor) -> Tensor:
            self._record("all_gather", value, f"dim {given.dim}", groups)
            return self._gather(value, given.dim, groups)

        return _each(gather, given.value, given.output)

    def reduce_scatter(self, given: SimpleNamespace) -> Any:
        """Scatter with a channel id."""
        groups = _all_groups(given.groups)
        reduction, scale, dim = given.reduce_type, given.scale, given.scatter_dim

        def scatter(value: Tensor) -> Tensor:
            how = f"{reduction}, scale {scale:g}, dim {dim}"
            self._record("reduce_scatter", value, how, groups)
            return self._scatter(reduction, value, scale, dim, given.shard_count, groups)

        return _each(scatter, given.input, given.output)

    def all_reduce(self, given: SimpleNamespace) -> Any:
        """Reduce by a reduce-scatter and an all-gather.

        An all-reduce takes no channel id. These do, and share a token that keeps them in program
        order where the graphs of the ranks differ.
        """
        if xr.world_size() == 1:  # torch_xla returns the input
            return NotImplemented
        groups = _all_groups(given.groups)
        reduction, scale = given.reduce_type, given.scale

        def reduce(value: Tensor) -> Tensor:
            self._record("all_reduce", value, f"{reduction}, scale {scale:g}", groups)
            if not value.numel():
                return value.clone()
            size, ranks = value.numel(), len(groups[0])
            flat = torch.nn.functional.pad(value.detach().reshape(-1), (0, -size % ranks))
            shard = self._scatter(reduction, flat, scale, 0, ranks, groups)
            return self._gather(shard, 0, groups)[:size].reshape(value.shape)

        if isinstance(given.inputs, Tensor):
            return reduce(given.inputs)
        _each(reduce, list(given.inputs), list(given.inputs))
        return given.inputs


def _all_groups(groups: Groups) -> list[list[int]]:
    """Return the groups spelled out; they must be of one size."""
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
    results = [collective(each) for each in value]
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
