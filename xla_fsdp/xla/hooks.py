"""Syncs and reads of this process, of which who traces is told, and then the runtime of its ranks.

torch_xla's functions are replaced once, and stay so: modules may import them by name.
Invariants: with nobody who traces and the runtime of a TPU's ranks, calls do what they do in
torch_xla.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
import torch_xla
from torch import Tensor

from xla_fsdp.xla import ops

READS = (
    *((Tensor, name) for name in ("item", "tolist", "numpy", "cpu", "to", "__repr__")),
    *((Tensor, name) for name in ("__bool__", "__int__", "__float__")),
    # These take lists of tensors; xm.save and xm.mesh_reduce call them.
    (torch_xla._XLAC, "_xla_sync_multi"),
    (torch_xla._XLAC, "_xla_get_cpu_tensors"),
)
"""The functions that copy values to the host."""


_readers: dict[str, Any] = {}  # by device: backward hooks run in another thread than the step
_installing = Lock()


@contextmanager
def reading_by(reader: Any) -> Iterator[None]:
    """Tell ``reader`` of the reads of the caller's device inside the block.

    Args:
        reader: its ``before_read(value)`` is called before a tensor, or list of tensors, is read,
            or everything pending is run (None); its ``item(tensor)`` returns what
            ``tensor.item()`` of a host tensor returns, None to let torch read it.
    """
    install()
    on = str(ops.device())
    _readers[on] = reader
    try:
        yield
    finally:
        del _readers[on]


def current_reader() -> Any:
    """Return the reader of the caller's device, None outside of a ``reading_by``."""
    return _readers.get(torch_xla._XLAC._xla_get_default_device()) if _readers else None


def install() -> None:
    """Replace the functions, unless that has been done."""
    with _installing:
        _install()


@functools.cache
def _install() -> torch.library.Library:
    ops.surround(
        *((owner, name, functools.partial(_read, name)) for owner, name in READS),
        (torch_xla._XLAC, "_xla_step_marker", _step_marker),
    )
    return _fallbacks_as_reads()


def _step_marker(
    original: Callable[..., None],
    device: str = "",
    devices: Sequence[str] = (),
    wait: bool = True,
    reset_scope: bool = True,
) -> None:
    if (reader := current_reader()) is not None:
        reader.before_read(None)
    on = device or torch_xla._XLAC._xla_get_default_device()
    mark = functools.partial(original, on, list(devices), reset_scope=reset_scope)
    ops.runtime().sync(on, lambda wait: mark(wait=wait), wait)


def _read(
    name: str, original: Callable[..., Any], value: Any = None, *args: Any, **kwargs: Any
) -> Any:
    reader = current_reader()
    if name == "item" and reader is not None and not value.is_xla:
        known = reader.item(value)
        if known is not None:
            return known
    if name != "to" or _names_cpu(*args, **kwargs):
        if reader is not None:
            reader.before_read(value)
        ops.runtime().before_read([value] if isinstance(value, Tensor) else value)
    return original(value, *args, **kwargs)


def _names_cpu(*args: Any, **kwargs: Any) -> bool:
    targets = [*args[:1], kwargs.get("device"), kwargs.get("other")]
    return any(
        str(target.device if isinstance(target, Tensor) else target).startswith("cpu")
        for target in targets
        if target is not None
    )


def _fallbacks_as_reads() -> torch.library.Library:
    """Let operators that torch_xla computes on the host read their inputs as Python code does.

    While the result exists, they call ``torch_xla._XLAC._xla_get_cpu_tensors``. C++ alone would
    execute the collectives that the inputs need without the other ranks, and while autograd replays
    a view, it would wait for them with the GIL held.
    """

    def to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
        lazy = [tensor for tensor in tensors if tensor.device.type == "xla"]
        if lazy and not ops.runtime().has_values(ops.index_of(lazy[0].device)):
            raise ops.NoValueError(
                "values were asked for, while the blocks of a loop are traced without any, by an "
                "operator that torch_xla computes on the host, or by the gradient of one"
            )
        copies = iter(torch_xla._XLAC._xla_get_cpu_tensors(lazy))
        return [next(copies) if each.device.type == "xla" else each for each in tensors]

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it replaces torch_xla's
        library.impl("_to_cpu", to_cpu, "XLA", allow_override=True)
    return library
