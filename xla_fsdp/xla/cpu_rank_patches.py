"""Patches of torch_xla for ranks that are threads of one process.

Without them, several CPU devices in one process hang or abort when ranks compile different programs
or reach a collective at different times. The patches give collectives a channel id and record them,
and let syncs and reads wait for the other ranks (``cpu_ranks.Run``).
Invariants: outside of a run every call goes to torch_xla unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import re
import resource
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla._internal.pjrt as pjrt
import torch_xla.core.xla_model as xm
import torch_xla.experimental.scan as scan
import torch_xla.runtime as xr
from torch import Tensor
from torch.nn.utils import parametrize
from torch_xla.distributed.parallel_loader import ParallelLoader

from xla_fsdp.distributed.cpu_ranks import Run, current_rank_thread
from xla_fsdp.distributed.forks import QuietForks
from xla_fsdp.distributed.pytree import tensors_in
from xla_fsdp.xla import hooks, ops
from xla_fsdp.xla.lost import LostTensor
from xla_fsdp.xla.ops import Groups, index_of

CHANNEL = 1
"""Ranks that execute a collective find each other by its channel id. Without one they do by the
compiled module, which may differ between ranks."""

COLLECTIVE_NODES = re.compile(
    r"xla::(all_gather|all_reduce|cross_replica_sum|reduce_scatter|all_to_all|collective_permute"
    r"|fsdp_scan)"  # loops of xla/loop.py
)


@dataclass
class RunSlot:
    """The run in progress, for the replaced functions of torch_xla; one slot per process.

    If there is none, ``start_ranks(fn, args)`` is called in place of ``torch_xla.launch``.
    """

    run: Run | None = None
    start_ranks: Callable[[Any, Any], Any] | None = None


@functools.cache
def run_slot() -> RunSlot:
    """Return this process's slot; the first call replaces torch_xla's functions."""
    # They stay replaced: modules imported during a run may have imported them by name.
    slot = RunSlot()
    ops.surround(
        *(
            (owner, name, functools.partial(_call, slot, instead))
            for owner, name, instead in IN_RUNS
        ),
        (pjrt, "spawn", functools.partial(_spawn, slot)),
    )
    hooks.install()
    _prepare_forks(slot)
    return slot


def _call(
    slot: RunSlot, instead: Callable[..., Any], original: Any, *args: Any, **kwargs: Any
) -> Any:
    if (run := slot.run) is None:
        return original(*args, **kwargs)
    return instead(run, original, *args, **kwargs)


@contextlib.contextmanager
def running(run: Run) -> Iterator[None]:
    """Make ``run`` the run of this process inside the block.

    If the block raises, all ranks must have ended: what they left uncomputed is dropped.

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
    except BaseException:
        drop_pending(run.num_ranks)
        raise
    finally:
        slot.run = None


class _CpuRanks(ops.RankRuntime):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def begin_collective(self, value: Tensor) -> None:
        pass  # keep torch_xla's order: programs of CPU ranks may differ, their order must not

    def exchange(self, data: bytes) -> list[bytes]:
        return self._run.exchange(index_of(ops.device()), data)

    def expect_on_all_ranks(self, fact: Callable[[], str]) -> None:
        self._run.expect(index_of(ops.device()), fact())

    def compares_facts(self) -> bool:
        return True

    def run_together(
        self, run: Callable[[], list[Tensor]], prepare: Callable[[], None] | None = None
    ) -> list[Tensor]:
        rank = index_of(ops.device())
        _wait_for(rank)  # the call below would, and hold the interpreter's lock meanwhile
        if prepare is not None:
            with self._run.execution:
                prepare()
        # After the last rank has compiled: in a collective, XLA lets ranks wait for 15 s only.
        if self._run.traced(rank):
            self._run.pass_gate(rank)
            outputs = run()
            self._run.begin_execution(rank)
            return outputs
        return run()

    def traced_collectives(self) -> tuple[str, ...]:
        return self._run.traced(index_of(ops.device()))

    def forget_collectives(self) -> None:
        self._run.forget(index_of(ops.device()))

    def repeat_collectives(self, collectives: Sequence[str]) -> None:
        self._run.repeat(index_of(ops.device()), collectives)

    def before_read(self, tensors: Sequence[Any]) -> None:
        # torch_xla's C++ executes pending collectives at once. Ranks that traced different ones
        # would then read each other's memory, or wait until XLA aborts the process.
        _compute_together(self._run, tensors)

    def sync(self, on: str, mark: Callable[[bool], None], wait: bool) -> None:
        # Not current_rank_thread(): a sync in a backward hook runs in autograd's own thread.
        rank = index_of(on)
        # The call below waits for the previous execution on its device, and holds the lock and the
        # interpreter's lock meanwhile. That execution may need either, and a rank that waits in a
        # collective needs this one: so it is over before.
        _wait_for(rank)
        last = None
        together = bool(self._run.traced(rank))
        if together:
            if rank in self._run.in_collectives:
                # A sync computes what is alive. The results of a collective may be so on one rank
                # only, until the garbage collector or a thread of autograd drops them there, too.
                last = _after_token(torch.zeros(1, device=on))
            self._run.pass_gate(rank)
        with self._run.execution:
            mark(False)
        if together:
            self._run.begin_execution(rank)
        del last
        if wait:  # not under the lock: the execution may need ranks that have yet to take it
            _wait_for(rank)

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
    # Starts autograd's threads while there are no others. Where several ranks made the first
    # backward of a process at once, it ended with a segmentation fault in 4 of 1,767 runs.
    ops.let_backward_reach_devices()
    # Likewise where they compiled their first programs at once: 13 of 1,473, and 2 of 950 since.
    ops.compute([ops.upload(torch.zeros(())) + 1])


def enter_cpu_rank(rank: int) -> None:
    """Let the calling thread trace on device number ``rank``."""
    torch_xla._XLAC._xla_set_default_device(f"xla:{rank}")
    xr._init_world_size_ordinal()
    ops.let_backward_reach_devices()


def leave_cpu_rank(rank: int) -> None:
    """Compute what the rank returns, wait for the device, and discard what an unfinished step left
    for a later sync."""
    run = run_slot().run
    if run is not None:  # afterwards no rank is there to take part in collectives
        _compute_together(run, tensors_in(run.results.get(rank)))
    # The C++ runtime aborts if something is still executed when the interpreter exits.
    _wait_for(rank)
    ops.discard_unfinished(rank)


def _wait_for(rank: int) -> None:
    torch_xla._XLAC._xla_wait_device_ops(devices=[_runtime_name(rank)])


def _runtime_name(rank: int) -> str:
    # What the call above expects; "xla:0" raises an IndexError.
    return f"CPU:{rank}"


# ---------------------------------------------------------------- what a failed run leaves behind


class TensorOfFailedRun(LostTensor):
    """A tensor that was never computed, as the run that traced it failed."""

    why = (
        "launch failed while it was pending, and its collectives cannot run any more. Make it "
        "again in the new run, or restore it from a checkpoint; a gradient is set to None by "
        "optimizer.zero_grad()."
    )


def drop_pending(num_ranks: int) -> None:
    """Let no live tensor need anything that is still to be computed.

    A sync computes all live tensors of its device. Of those of a failed run each rank holds others,
    in tracebacks, reference cycles or global variables, so that the next run's ranks would execute
    different collectives.
    """
    with ops.no_collection(), torch._C.DisableTorchFunctionSubclass():
        for tensor in ops.tensor_objects():
            # Raised for what torch left behind after an error, whose tensor has been freed, and
            # for subclasses around other tensors, which are found by themselves.
            with contextlib.suppress(RuntimeError):
                if ops.is_pending(tensor):
                    tensor.__class__ = TensorOfFailedRun
                if tensor.is_leaf and tensor.grad is not None and ops.is_pending(tensor.grad):
                    _lose_gradient(tensor)
    # What these have in place of a value ends the process when a program reads it.
    for rank in range(num_ranks):
        torch_xla._XLAC._clear_pending_irs(f"xla:{rank}")


def _lose_gradient(leaf: Tensor) -> None:
    """Make the gradient of ``leaf`` a LostTensor, which autograd, in C++, would add the next to."""
    own = weakref.ref(leaf)

    def refuse(_: Tensor) -> None:
        current = own()
        if current is not None and isinstance(current.grad, LostTensor):
            raise TensorOfFailedRun.error("backward")
        handle.remove()

    leaf.grad.__class__ = TensorOfFailedRun
    handle = leaf.register_hook(refuse)


# ---------------------------------------------------------------- waiting, spawning, forking


def _compute_together(run: Run, tensors: Sequence[Tensor]) -> None:
    # Fake tensors, say, of a tracer have no values, and are no tensors of torch_xla.
    real = [t for t in tensors if type(t).__torch_dispatch__ is Tensor.__torch_dispatch__]
    lazy = [t for t in real if t.device.type == "xla"]
    if not lazy or index_of(lazy[0].device) not in run.in_collectives:
        return
    # A value that needs no collective can be read by one rank alone.
    if COLLECTIVE_NODES.search(torch_xla._XLAC._get_xla_tensors_text(lazy)):
        on = str(lazy[0].device)
        random_state = xm.get_rng_state(on)
        torch_xla._XLAC._xla_step_marker(on, [], wait=True, reset_scope=False)
        xm.set_rng_state(random_state, on)  # which a sync changes, and a read does not
        # As torch_xla.sync() does: the old token depends on parameters whose buffers the program
        # has reused, so the next program would fail. Step closures still wait for the sync.
        torch_xla._XLAC._set_all_reduce_token(on, None)


def _spawn(
    slot: RunSlot,
    original: Any,
    fn: Any,
    nprocs: Any = None,
    start_method: str = "spawn",
    args: Any = (),
) -> Any:
    if slot.run is not None:
        return fn(xr.global_ordinal(), *args)
    if slot.start_ranks is not None:
        return slot.start_ranks(fn, args)
    return original(fn, nprocs, start_method, args)


def _prepare_forks(slot: RunSlot) -> None:
    """Let ranks fork, as for workers of a DataLoader, while the others rest; in a child there is no
    run, whose other ranks its copy of a rank's thread would wait for."""
    forks = QuietForks()

    def before() -> None:
        if slot.run is not None:
            forks.begin(slot.run.execution.locked)

    def in_child() -> None:
        slot.run = None
        forks.end()

    os.register_at_fork(before=before, after_in_parent=forks.end, after_in_child=in_child)


# ---------------------------------------------------------------- what is called in a run
# in place of functions of torch and torch_xla: with the run, the original and its arguments


def _wait_device_ops(run: Run, original: Any, devices: Sequence[str] = ()) -> None:
    """Wait for the caller's device only.

    torch_xla waits for all devices of the process, and takes the locks of all. A rank whose program
    the awaited execution needs could not start it.
    """
    original(devices=list(devices) or [_runtime_name(index_of(ops.device()))])


def _manual_seed(run: Run, original: Any, seed: int) -> torch.Generator:
    """Let no other rank seed while one seeds and builds its model: they share one generator."""
    thread = current_rank_thread()
    if thread is not None:
        run.begin_seeding(thread.rank)
    return original(seed)


def _init_process_group(run: Run, original: Any, *args: Any, **kwargs: Any) -> None:
    if run.num_ranks > 1:
        raise RuntimeError(
            "torch.distributed.init_process_group was called on one of several CPU ranks. They are "
            "threads of one process, which has one process group and would be rank 0 of it on all "
            "of them. Leave the call out here (if torch.distributed.is_torchelastic_launched() is "
            "false, say), and ask torch_xla.runtime for global_ordinal() and world_size()."
        )
    original(*args, **kwargs)


def _loader_worker(run: Run, original: Any, loader: ParallelLoader) -> None:
    """Let ranks raise what the data loaders raise from which torch_xla's threads feed them.

    Else such a thread prints it, and the rank's epoch ends early, or waits for ever.
    """
    loader._cpu_loader = _Told(loader._cpu_loader, loader._exception_queue)
    original(loader)


@dataclass
class _Told:
    """A data loader that ends where ``loader`` raises, and tells the error to the rank it is for,
    which raises it after the batches before."""

    loader: Any
    errors: queue.Queue[Exception]

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.loader
        except Exception as error:  # the end of a thread that loads; the rank raises it
            self.errors.put(error)

    def __len__(self) -> int:
        return len(self.loader)


_tracing = threading.RLock()


def _traced_alone(run: Run, original: Any, *args: Any, **kwargs: Any) -> Any:
    with _tracing:  # what torch_xla keeps of a trace once for all threads; nn.GRU is made of this
        return original(*args, **kwargs)


def _set_allow_execution(run: Run, original: Any, allowed: bool) -> None:
    # Without the check of torch_xla.compile(full_graph=True) other ranks may execute meanwhile.
    if allowed:
        original(allowed)


def _cached(run: Run, original: Any) -> contextlib.AbstractContextManager[None]:
    # One cache, emptied when the last rank leaves it: others find what earlier forwards made.
    return contextlib.nullcontext()


def _memory_info(run: Run, original: Any, on: str) -> dict[str, int]:
    """Return the memory of the process, which all ranks share, and of the machine."""
    page = os.sysconf("SC_PAGE_SIZE")
    used = int(Path("/proc/self/statm").read_text().split()[1]) * page
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "bytes_used": used,
        "bytes_limit": os.sysconf("SC_PHYS_PAGES") * page,
        "peak_bytes_used": max(used, peak),  # the kernel counts the two apart
    }


# ---------------------------------------------------------------- collectives, with channel ids

_HOW: dict[str, Any] = {"pin_layout": False, "channel_id": CHANNEL, "use_global_device_ids": True}
_GATHER = functools.partial(xm.all_gather, **_HOW)
_SCATTER = functools.partial(xm.reduce_scatter, **_HOW)


def _all_gather(
    run: Run,
    original: Any,
    value: Any,
    dim: int = 0,
    groups: Groups = None,
    output: Any = None,
    pin_layout: bool = True,
    **ignored: Any,
) -> Any:
    if pin_layout and not isinstance(value, Tensor):
        return original(value, dim, groups, output, pin_layout)
    all_groups = _all_groups(groups)

    def gather(value: Tensor) -> Tensor:
        _record(run, "all_gather", value, f"dim {dim}", all_groups)
        return _ordered(_GATHER, value, dim, all_groups)

    return _each(gather, value, output)


def _reduce_scatter(
    run: Run,
    original: Any,
    reduce_type: str,
    input: Any,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: Any = None,
    **ignored: Any,
) -> Any:
    all_groups = _all_groups(groups)

    def scatter(value: Tensor) -> Tensor:
        how = f"{reduce_type}, scale {scale:g}, dim {scatter_dim}"
        _record(run, "reduce_scatter", value, how, all_groups)
        return _ordered(_SCATTER, reduce_type, value, scale, scatter_dim, shard_count, all_groups)

    return _each(scatter, input, output)


def _all_reduce(
    run: Run,
    original: Any,
    reduce_type: str,
    inputs: Any,
    scale: float = 1.0,
    groups: Groups = None,
    pin_layout: bool = True,
) -> Any:
    """Reduce by a reduce-scatter and an all-gather.

    torch_xla's all-reduce takes no channel id. These two do, and a token orders them in the same
    way on all ranks even if their programs differ.
    """
    if run.num_ranks == 1:  # torch_xla returns the input
        return original(reduce_type, inputs, scale, groups, pin_layout)
    all_groups = _all_groups(groups)

    def reduce(value: Tensor) -> Tensor:
        _record(run, "all_reduce", value, f"{reduce_type}, scale {scale:g}", all_groups)
        if not value.numel():
            return value.clone()
        size, ranks = value.numel(), len(all_groups[0])
        flat = torch.nn.functional.pad(value.detach().reshape(-1), (0, -size % ranks))
        shard = _ordered(_SCATTER, reduce_type, flat, scale, 0, ranks, all_groups)
        return _ordered(_GATHER, shard, 0, all_groups)[:size].reshape(value.shape)

    if isinstance(inputs, Tensor):
        return reduce(inputs)
    _each(reduce, list(inputs), list(inputs))
    return inputs


def _all_to_all(
    run: Run,
    original: Any,
    value: Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups = None,
    pin_layout: bool = True,
) -> Tensor:
    how = f"dims {split_dimension} {concat_dimension}"
    _record(run, "all_to_all", value, how, _all_groups(groups))
    return _ordered(
        original, value, split_dimension, concat_dimension, split_count, groups, pin_layout
    )


def _collective_permute(run: Run, original: Any, value: Tensor, pairs: list[list[int]]) -> Tensor:
    """Send by an all-gather; torch_xla's collective-permute takes no channel id."""
    groups = _all_groups(None)
    _record(run, "collective_permute", value, f"pairs {pairs}", groups)
    senders = [source for source, target in pairs if target == xr.global_ordinal()]
    gathered = _ordered(_GATHER, value.unsqueeze(0), 0, groups)
    if not senders:
        return torch.zeros_like(value)
    # An input of the program, so that every rank has the same one.
    return gathered.index_select(0, ops.upload(torch.tensor(senders)))[0]


IN_RUNS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (torch, "manual_seed", _manual_seed),
    (torch.distributed, "init_process_group", _init_process_group),
    (parametrize, "cached", _cached),
    (torch_xla._XLAC, "_xla_wait_device_ops", _wait_device_ops),
    (torch_xla._XLAC, "_xla_memory_info", _memory_info),
    (torch_xla._XLAC, "_set_allow_execution", _set_allow_execution),
    (scan, "value_and_grad_partitioned", _traced_alone),
    (ParallelLoader, "_loader_worker", _loader_worker),
    (xm, "all_gather", _all_gather),
    (xm, "reduce_scatter", _reduce_scatter),
    (xm, "all_reduce", _all_reduce),
    (xm, "all_to_all", _all_to_all),
    (xm, "collective_permute", _collective_permute),
)
"""The functions that are replaced, and what is called in a run in their place."""


def _record(run: Run, kind: str, value: Tensor, how: str, groups: list[list[int]]) -> None:
    if value.device.type == "xla":
        dtype = str(value.dtype).removeprefix("torch.")
        what = f"{kind}({dtype}{list(value.shape)}, {how}, groups {groups})"
        run.record(index_of(value.device), what)
        run.in_collectives.add(index_of(value.device))


def _ordered(collective: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return ``collective(*args)``; the next one waits for it, whatever its result holds.

    torch_xla multiplies its token, a zero that it adds to the input of each collective, by the
    first element of the result: from the first NaN or infinity on, all inputs would be NaN.
    """
    on = torch_xla._XLAC._xla_get_default_device()
    token = torch_xla._XLAC._get_all_reduce_token(on)
    result = collective(*args)
    if result.is_floating_point() and result.numel():
        torch_xla._XLAC._set_all_reduce_token(on, token)
        _make_token(result)
    return result


@torch.no_grad()
def _make_token(result: Tensor) -> None:
    """Make the next token from the present one and ``result``, as torch_xla does after a collective
    with this result, but always zero."""
    first = torch.slice_copy(result.flatten(), 0, 0, 1).float()
    # Not isfinite(): its constant would be an input of the program. XLA does not see that the
    # result, multiplied by the token, is zero.
    _after_token(torch.where(first.abs() <= 1, first, 1.0))


def _after_token(value: Tensor) -> Tensor:
    """Return ``value``, of one element, plus the token, which depends on all collectives since the
    last sync; the next token depends on it."""
    # Only collectives make tokens. In this one every rank is alone: it moves nothing.
    alone = [[rank] for rank in range(xr.world_size())]
    return torch_xla._XLAC._xla_all_reduce("sum", value, 1.0, alone, False)


def _all_groups(groups: Groups) -> list[list[int]]:
    """Return ``groups``, or one of all ranks; raise ValueError if they differ in size."""
    if not groups:
        return [list(range(xr.world_size()))]
    if len({len(group) for group in groups}) > 1:
        raise ValueError(f"groups={groups} differ in size; give every group as many ranks")
    return [list(group) for group in groups]


def _each(collective: Callable[[Tensor], Tensor], value: Any, output: Any) -> Any:
    """Apply to a tensor or to each of a list of tensors; write into ``output`` if given."""
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
    """Give ``old`` the value and shape of ``new``, unseen by autograd, as torch_xla's own
    collectives do."""
    if old.shape != new.shape:
        ops.free_keeping_aliases(old, new)
        return old
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(old):
        old.copy_(new)
    return old
