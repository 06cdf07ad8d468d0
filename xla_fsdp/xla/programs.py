"""Compile what was traced to a program, and run it again with other inputs.

A program takes device buffers and returns device buffers. ``torch_xla.sync()`` finds both by itself
in every step; here the caller names them once.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch_xla
from torch import Tensor

from xla_fsdp.xla import ops
from xla_fsdp.xla.graph import buffer_id, inputs_of, tensor_id
from xla_fsdp.xla.host import copies

# How the random number state changes in torch_xla: when a sync ends a step, and for each drawing of
# random numbers. Both modulo 2^64.
STEP_FACTOR, STEP_ADDED = 7012063, 1012031
DRAW_FACTOR, DRAW_ADDED = 214013, 2531011
MOST_DRAWS = 1 << 16

_ADDRESS = operator.attrgetter("_cdata")
_USES_OF_ONE = 2  # of a storage that one tensor has, by that and by the object that is asked

CACHE_SIZE = 2048  # of torch_xla, unless XLA_COMPILATION_CACHE_SIZE says another


def holders_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return new tensors with the buffers of some computed ones; nothing is traced with them."""
    if not tensors:
        return []
    inputs = inputs_of(tensors)
    holders = dict(zip(inputs.buffers, inputs.values, strict=True))
    return [holders[buffer] for buffer in buffers_of(tensors)]  # type: ignore[index]


def find_pending(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return those of some XLA tensors that were traced but not computed."""
    pending = torch_xla._XLAC._check_tensor_need_materialization(list(tensors))
    return [each for each, is_pending in zip(tensors, pending, strict=True) if is_pending]


def buffers_of(tensors: Sequence[Tensor]) -> list[int | None]:
    """Return ``graph.buffer_id`` of each tensor."""
    try:
        return list(torch_xla._XLAC._get_tensors_handle(list(tensors)))
    except RuntimeError:  # one of them has no buffer
        return [buffer_id(each) for each in tensors]


def identify(outputs: Sequence[Tensor], values: Sequence[Tensor], donated: Sequence[int]) -> bytes:
    """Return the program that ``run_traced`` would run, which is not run; arguments as there."""
    try:
        return _hash(outputs, values, donated)
    finally:
        for position in donated:
            torch_xla._XLAC._set_buffer_donation(values[position], False)


def _hash(outputs: Sequence[Tensor], values: Sequence[Tensor], donated: Sequence[int]) -> bytes:
    for position in donated:
        torch_xla._XLAC._set_buffer_donation(values[position], True)
    with _donating():
        return torch_xla._XLAC._get_graph_hash(list(outputs))


def run_traced(
    outputs: Sequence[Tensor],
    values: Sequence[Tensor],
    donated: Sequence[int],
    copied: Mapping[int, Tensor] = MappingProxyType({}),
) -> tuple[bytes, list[Tensor]]:
    """Compile and run the program that computes ``outputs``, together with the other ranks.

    Args:
        outputs: traced tensors.
        values: the program's inputs, ``inputs_of(outputs).values``.
        donated: positions of inputs whose buffers the outputs may use, and that are gone then.
        copied: what the program takes instead of some inputs, as others have their buffers.

    Returns:
        The program, and new tensors with the values of ``outputs``.
    """
    program = b""

    def compile_it() -> None:
        nonlocal program
        program = _hash(outputs, values, donated)
        with _donating():
            torch_xla._XLAC._xla_warm_up_cache(list(outputs), [])
        for position in copied:
            torch_xla._XLAC._set_buffer_donation(values[position], False)

    def run_it() -> list[Tensor]:
        taken = [copied.get(position, value) for position, value in enumerate(values)]
        return torch_xla._XLAC._run_cached_graph(program, taken)

    results = ops.runtime().run_together(run_it, compile_it)
    return program, results


def run_again(program: bytes, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run a result of ``run_traced`` with other inputs, together with the other ranks."""
    run = partial(torch_xla._XLAC._run_cached_graph, program, list(inputs))
    return ops.runtime().run_together(run)


def compiled() -> int:
    """Return how many programs this process has compiled, or read from a persistent cache."""
    names = ("UncachedCompile", "PersistentCacheHit")
    return sum(torch_xla._XLAC._xla_counter_value(name) or 0 for name in names)


def may_be_gone(since: int) -> bool:
    """Return whether torch_xla may have dropped a program that ran when ``compiled()`` was
    ``since``.

    A rank must know before it meets the others, who would wait in the program's collectives.
    """
    size = int(os.environ.get("XLA_COMPILATION_CACHE_SIZE", CACHE_SIZE))
    return torch_xla._XLAC._xla_get_num_cached_compilation_graph() >= size and compiled() > since


@contextmanager
def _donating() -> Iterator[None]:
    before = torch_xla._XLAC._xla_get_enable_alias_with_buffer_donor_config()
    torch_xla._XLAC._xla_set_enable_alias_with_buffer_donor_config(True)
    try:
        yield
    finally:
        torch_xla._XLAC._xla_set_enable_alias_with_buffer_donor_config(before)


def put(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give each tensor the buffer of a value of its shape, as an in-place change would."""
    # Not _replace_xla_tensor, after which views of the tensor still have the old value.
    for tensor, value in zip(tensors, values, strict=True):
        # Its ``data`` is another object than that of ``value``, which ``put_alone`` may change.
        torch._functionalize_replace(tensor, torch._from_functional_tensor(value).data)
        torch._functionalize_commit_update(tensor)
        torch._functionalize_sync(tensor)
    if views := [tensor for tensor in tensors if views_of(tensor)]:
        ops.compute(views)  # which are made anew of what they are views of


def put_apart(tensors: Sequence[Tensor], value: Tensor) -> None:
    """Give tensors the buffer of a value of their shape; what they are views of stays as it is."""
    for tensor in tensors:
        if not (_view_of(tensor) and _becomes_root(tensor, value)):
            put([tensor], [value])


def put_alone(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Do the same as ``put``, right after ``separate``, in half the time for tensors that have no
    views. ``num_changes`` does not count it."""
    storages = [*map(Tensor.untyped_storage, tensors)]
    uses = [*map(torch._C._storage_Use_Count, map(_ADDRESS, storages))]
    del storages
    for tensor, value, count in zip(tensors, values, uses, strict=True):
        alone = count == _USES_OF_ONE
        if alone and not _view_of(tensor):
            torch_xla._XLAC._replace_xla_tensor(tensor, value)
        elif not (alone and _becomes_root(tensor, value)):  # as parameters: their base is gone
            put([tensor], [value])
    own_buffers(tensors)


def _becomes_root(tensor: Tensor, value: Tensor) -> bool:
    """Give a value to a view, so that it is none any more; return False if torch refuses that,
    between inference tensors and others."""
    own = torch._to_functional_tensor(torch._from_functional_tensor(value).data)
    if not torch._has_compatible_shallow_copy_type(tensor, own):
        return False
    tensor.data = own
    return True


def unshare(tensors: Sequence[Tensor]) -> None:
    """Give each of some computed tensors a buffer that no other one of them has.

    torch_xla keeps one buffer for all equal scalars that come from the host: copies of tensors, and
    numbers in operations. The target of ``copy_`` has that of its source. Programs could not tell
    such inputs apart, or donate them.
    """
    different = list({tensor_id(each): each for each in tensors}.values())
    with torch._C.DisableTorchFunctionSubclass():  # a shard answers for the whole parameter
        scalars = [each for each in different if not each.dim()]
    put(scalars, ops.upload_all(copies(scalars)))
    first: dict[int | None, int] = {}
    same = []
    for tensor, buffer in zip(different, buffers_of(different), strict=True):
        at = ops.memory_of(tensor)
        if first.setdefault(buffer, at) != at:  # views of one tensor stay so
            same.append(tensor)
    put(same, copies_of(same))


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return computed copies of device tensors, with buffers of their own.

    torch_xla lets a clone share the memory of what it was made from, until one of them is changed
    in place by a program: that gives the memory away, and the other's value is gone.
    """
    found = ops.barrier([each.detach() for each in tensors]) if tensors else []
    ops.compute(found)
    return found


def run_pending() -> None:
    """Execute what is pending on the caller's device, without collectives; the random number state
    stays."""
    on = str(ops.device())
    # Most often nothing is, which is found in a quarter of the time.
    if any(torch_xla._XLAC._check_device_tensor_need_materialization(on)):
        torch_xla._XLAC._xla_sync_live_tensors(on, [], False)
        ops.forget_token()  # as torch_xla.sync() does


def separate(tensors: Sequence[Tensor]) -> None:
    """Give tensors buffers of their own, if others may have them, and execute what is pending,
    without collectives; the random number state stays."""
    shared = find_shared(tensors)
    if find_pending(shared):
        run_pending()
        shared = find_shared(shared)
    own = ops.barrier([tensor.detach() for tensor in shared]) if shared else []
    run_pending()  # not with the other ranks, who may have read nothing
    put(shared, own)
    own_buffers(shared)


def find_shared(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return those of some computed tensors whose buffers others may have.

    Two tensors get one buffer when one of them is read as a whole (``clone``, ``detach`` in most
    cases, the source of ``copy_``), which it remembers until it is changed, and the other one is
    made or changed by that. So a buffer is a tensor's own if nothing has read the tensor, and
    nothing has changed it since ``own_buffers``.
    """
    numbers = map(torch_xla._XLAC._unique_id_for_ir_and_data, tensors)
    # "node, 0" of a tensor that a traced operation has read, else the number of its buffer.
    return [
        tensor
        for tensor, number in zip(tensors, numbers, strict=True)
        if "," in number or not _has_own_buffer(tensor)
    ]


def own_buffers(tensors: Sequence[Tensor]) -> None:
    """Remember that no other tensors have the buffers of these."""
    for tensor in tensors:
        while not _has_own_buffer(tensor):
            torch._functionalize_mark_mutation_hidden_from_autograd(tensor)


# A storage counts its changes, and those that were marked; torch marks none of XLA tensors. A
# registry of storages would need weak references, which keep a storage's device memory.
_has_own_buffer = torch._functionalize_are_all_mutations_hidden_from_autograd


def _view_of(tensor: Tensor) -> Any:
    """Return how a tensor is made from the one that it is a view of, [] of others."""
    return torch._C._functionalization.get_view_meta_sequence(tensor)


def views_of(tensor: Tensor) -> tuple[str, ...]:
    """Return what makes a tensor from the one that it is a view of; an operation that changes it in
    place computes that one, too, by their inverses."""
    if not torch._is_functional_tensor(tensor):
        return ()
    names = [type(each).__name__.removesuffix("_ViewMeta") for each in _view_of(tensor)]
    return tuple(each for each in names if each != "detach")  # which computes nothing


def drop_pending() -> None:
    """Forget what was traced but not computed on the caller's device.

    A view's tensor keeps the one that it was a view of, which nobody can read any more.
    """
    ops.forget_token()
    torch_xla._XLAC._clear_pending_irs(str(ops.device()))


def count_change(tensors: Sequence[Tensor]) -> None:
    """Raise the versions of tensors, which ``put`` leaves alone."""
    # Inference tensors have none.
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


# ---------------------------------------------------------------- random numbers


def seed_after(seed: int, draws: int) -> int:
    """Return the random number state after so many drawings."""
    for _ in range(draws):
        seed = (DRAW_ADDED + DRAW_FACTOR * seed) % 2**64
    return seed


def next_seed(seed: int) -> int:
    """Return the random number state after the ``torch_xla.sync()`` of a step."""
    return (STEP_ADDED + STEP_FACTOR * seed) % 2**64


def draws_until(seed: int, wanted: int, change: Callable[[int], int] = int) -> int | None:
    """Return after how many drawings ``change(state)`` is ``wanted``; None if it never is."""
    for draws in range(MOST_DRAWS):
        if change(seed) == wanted:
            return draws
        seed = (DRAW_ADDED + DRAW_FACTOR * seed) % 2**64
    return None


def seed_value(seed: int) -> Tensor:
    """Return a random number state as programs take it, int64 [], on the device."""
    return ops.upload(torch.tensor(seed - (2**64 if seed >= 2**63 else 0)))
