"""Torch functions called with shards, in code of the user that means the full parameter.

A function that computes with a shard's values in a forward raises; outside of forwards only one
that mixes elements, as shards may be stepped and averaged.

Invariants: in optimizers and backward passes, torch functions called with shards run no code of
this file but one look-up.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

# ---------------------------------------------------------------- what functions read


class Reads(Enum):
    """What a torch function reads of a parameter."""

    OBJECT = auto()  # dtype, device, autograd graph
    SHAPE = auto()
    VALUES = auto()


COUNTS = frozenset({"numel", "nelement", "nbytes"})

_SHAPE = COUNTS | frozenset(
    {
        "shape", "ndim", "size", "dim", "ndimension", "stride", "is_contiguous", "__len__",
    }
)  # fmt: skip

_OBJECT = frozenset(
    {
        "is_floating_point", "is_complex", "is_signed", "is_inference", "element_size",
        "get_device", "result_type", "new", "new_empty", "new_zeros", "new_ones", "new_full",
        "new_tensor", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
        "retain_grad", "grad", "_is_view", "__hash__", "__dir__",
    }
)  # fmt: skip

_OBJECT_OF_SECOND = frozenset({"to", "type_as"})

_VALUE_ATTRIBUTES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})


def read_by(func: Any, args: Sequence[Any], kind: type) -> Reads:
    """Return what ``func(*args)`` reads of those arguments that are instances of ``kind``."""
    name = name_of(func)
    if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__"):
        if name in _SHAPE:
            return Reads.SHAPE
        is_value = func.__name__ == "__get__" and name in _VALUE_ATTRIBUTES
        return Reads.VALUES if is_value else Reads.OBJECT
    if name in _OBJECT_OF_SECOND and not isinstance(args[0], kind):
        return Reads.OBJECT
    if name in _SHAPE:
        return Reads.SHAPE
    return Reads.OBJECT if name in _OBJECT else Reads.VALUES


def name_of(func: Any) -> str:
    """Return the name of a torch function, or of the attribute that it reads or sets."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(func.__self__, "__name__", name)
    return name


def without_values(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor that has a shape and no memory."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


# ---------------------------------------------------------------- functions that mix elements

_MIXING = frozenset(
    {
        # norms and statistics
        "norm", "renorm", "norm_except_dim", "dist", "cdist", "normalize", "cosine_similarity",
        "mean", "nanmean", "var", "std", "var_mean", "std_mean", "amax", "amin", "aminmax",
        "median", "nanmedian", "mode", "quantile", "nanquantile", "kthvalue", "topk", "sort",
        "argsort", "argmax", "argmin", "prod", "logsumexp", "softmax", "log_softmax", "cumsum",
        "cumprod", "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm",
        # products
        "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot", "inner", "einsum",
        "tensordot", "kron", "addmm", "addmv", "addbmm", "baddbmm", "linear", "bilinear", "conv1d",
        "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "embedding",
        "embedding_bag", "trace", "det", "logdet", "slogdet", "inverse", "pinverse", "svd", "qr",
        "cholesky", "matrix_exp", "matrix_power",
        # initialization and writes by index
        "uniform_", "normal_", "bernoulli_", "random_", "exponential_", "cauchy_", "geometric_",
        "log_normal_", "kaiming_uniform_", "eye", "view_as", "__setitem__", "fill_diagonal_",
        "tril_", "triu_", "index_fill_", "index_copy_", "index_add_", "index_put_", "scatter_",
    }
)  # fmt: skip

_MIXING_ALONE = frozenset({"max", "min"})  # of two tensors they are elementwise


def mixes_elements(func: Any, args: Sequence[Any]) -> str:
    """Return the name of ``func`` if ``func(*args)`` computes an element from several elements of a
    parameter, or depends on where they are; else ""."""
    name = _mixing_name(func)
    elementwise = name in _MIXING_ALONE and any(isinstance(each, Tensor) for each in args[1:])
    return "" if elementwise else name


@functools.cache
def _mixing_name(func: Any) -> str:
    name = name_of(func)
    mixes = name in _MIXING or name in _MIXING_ALONE or name.startswith("linalg_")
    return name if mixes else ""


# ---------------------------------------------------------------- shards in the user's code


class Code(Enum):
    """What code a thread runs."""

    OUTSIDE = auto()  # of forwards: the user's, or backward
    FORWARD = auto()  # of a user's module
    PACKAGE = auto()  # this package's, or an optimizer's step


class Thread(threading.local):
    """What the calling thread does.

    Attributes:
        runs: what code.
        units: those whose forward runs, outermost first.
        before_steps: ``runs`` before each optimizer step.
    """

    def __init__(self) -> None:
        self.runs = Code.OUTSIDE
        self.units: list[Any] = []
        self.before_steps: list[Code] = []


this_thread = Thread()


@contextmanager
def _running(code: Code) -> Iterator[None]:
    before, this_thread.runs = this_thread.runs, code
    try:
        yield
    finally:
        this_thread.runs = before


package_code = functools.partial(_running, Code.PACKAGE)
"""``with package_code():`` runs this package's code, which may compute with shards."""
forward_code = functools.partial(_running, Code.FORWARD)
"""``with forward_code():`` runs the forward of a user's module."""


@contextmanager
def running(unit: Any) -> Iterator[None]:
    """Run the forward of a user's module, of which ``unit`` has the parameters."""
    before, this_thread.runs = this_thread.runs, Code.FORWARD
    this_thread.units.append(unit)
    try:
        yield
    finally:
        this_thread.runs = before
        this_thread.units.remove(unit)


@contextmanager
def with_shards() -> Iterator[None]:
    """Let the block compute with shards, except in the forward of a user's module."""
    with _running(Code.FORWARD if this_thread.runs is Code.FORWARD else Code.PACKAGE):
        yield


def begin_step() -> None:
    """Let an optimizer compute with shards, also one that steps in a forward (of a module whose
    forward is a training step)."""
    this_thread.before_steps.append(this_thread.runs)
    this_thread.runs = Code.PACKAGE


def end_step() -> None:
    """Undo the latest ``begin_step``. After a step that raised, leaving the forward does so."""
    this_thread.runs = this_thread.before_steps.pop()


class GuardedShard:
    """The ``__torch_function__`` of a class of shards: in the forward of a user's module its
    ``_fsdp_in_forward``, outside its ``_fsdp_outside``, and elsewhere torch's own."""

    def __get__(self, shard: Any, kind: Any) -> Any:
        if this_thread.runs is Code.FORWARD:
            return kind._fsdp_in_forward
        if this_thread.runs is Code.OUTSIDE and torch._C._current_graph_task_id() == -1:
            return kind._fsdp_outside
        return torch._C._disabled_torch_function_impl
