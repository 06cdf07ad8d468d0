"""Stops a block, while it is traced for a loop, from what has a meaning in a single run only.

Always true: tensors have no values while a block is traced (torch_xla ends the process where one is
asked for), and numbers that the host draws would be the same in every round and step; both raise an
error that says what to do instead.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

T = TypeVar("T")

_READS = frozenset(
    {
        "item", "tolist", "numpy", "cpu", "equal", "allclose", "is_nonzero", "__bool__", "__int__",
        "__float__", "__complex__", "__index__", "__repr__", "__format__", "__contains__",
    }
)  # fmt: skip

_SHAPES = frozenset(
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"}
)  # whose results are as large as values say

_INDEXES = frozenset({"__getitem__", "__setitem__"})

_DRAWS = frozenset(
    {
        "rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "rand_like",
        "randn_like", "randint_like", "bernoulli_", "uniform_", "normal_", "random_",
        "exponential_",
    }
)  # fmt: skip


class TraceGuard(TorchFunctionMode):
    """Inside, what a trace cannot follow raises ValueError."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if _wants_values(name, args, kwargs):
            raise ValueError(
                f"a scanned block asks for the values of a tensor (by {name}), and has none while "
                f"its loop is traced: one program runs for all values. Decide with torch.where, or "
                f"before the loop, and hand the result to the blocks"
            )
        result = func(*args, **kwargs)
        if name in _DRAWS and isinstance(result, Tensor) and result.device.type == "cpu":
            raise _draws(name)
        return result


def refusing_host_draws(trace: Callable[[], T]) -> T:
    """What ``trace`` returns. Where random numbers of Python or numpy were drawn meanwhile, which
    other threads may have done (one that loads data, say), it is called once more to find out.

    Raises:
        ValueError: if it draws such numbers.
    """
    before, before_numpy = random.getstate(), _numpy_state()
    result = trace()
    if random.getstate() != before and _draws_in_python(trace):
        raise _draws("random")
    if _numpy_state() != before_numpy and _draws_in_numpy(trace):
        raise _draws("numpy.random")
    return result


def _draws_in_python(trace: Callable[[], Any]) -> bool:
    """Whether this thread draws from a generator of the module ``random``."""
    found = False
    profile = sys.getprofile()

    def note(frame: FrameType, event: str, called: Any) -> None:
        nonlocal found
        found |= event == "c_call" and isinstance(getattr(called, "__self__", None), random.Random)

    sys.setprofile(note)
    try:
        trace()
    finally:
        sys.setprofile(profile)
    return found


def _draws_in_numpy(trace: Callable[[], Any]) -> bool:
    """Whether this thread draws from numpy's global generator. The others wait meanwhile, where the
    generator's lock lets a thread in again."""
    lock = np.random.mtrand.get_bit_generator().lock
    with lock if isinstance(lock, type(threading.RLock())) else contextlib.nullcontext():
        before = _numpy_state()
        trace()
        return _numpy_state() != before


def _numpy_state() -> bytes:
    return pickle.dumps(np.random.mtrand.get_bit_generator().state)


def _draws(name: str) -> ValueError:
    return ValueError(
        f"a scanned block draws random numbers on the host (by {name}); they would be the "
        f"same in every block and step, as its loop is traced once. Draw them on the "
        f"device: device=x.device"
    )


def _wants_values(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    on_device = [each for each in args[:1] if _on_device(each)]
    if name in _INDEXES and on_device:
        index = args[1] if isinstance(args[1], tuple) else args[1:2]
        masks = (torch.bool, torch.uint8)
        return any(_on_device(each) and each.dtype in masks for each in index)
    if name == "where":
        return len(args) == 1 and not kwargs
    if name == "to" and on_device:
        named = (*args[1:2], kwargs.get("device"))
        return any(isinstance(each, str | torch.device) and "cpu" in str(each) for each in named)
    return bool(on_device) and name in _READS | _SHAPES


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "xla"
