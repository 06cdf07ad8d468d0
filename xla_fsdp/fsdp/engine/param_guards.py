"""Torch functions called with a parameter whose full value is not there.

Such a tensor is a shard in code of the user, which means the full parameter; or a
``ReshardedParam``, an unsharded parameter that somebody still holds (an autograd function in its
``ctx``, a hook, an object of the user) after the modules hold shards again. A function that
computes with a shard's values raises; outside of forwards only one that mixes elements, as shards
may be stepped and averaged. With a ``ReshardedParam`` it computes with the parameter that the
modules hold by then, such as the one gathered for backward, or raises.

Invariants: nothing here references an unsharded parameter strongly, so that its memory is freed,
unless the user holds its ``data`` or ``detach()``, which keep the value.
In optimizers and backward passes, torch functions called with shards run no code of this file but
one look-up.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import Tensor

from xla_fsdp.distributed.pytree import map_tensors
from xla_fsdp.xla import ops

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


def held_shape(param: Tensor) -> torch.Size:
    """Return the shape of what this rank holds of a parameter: that of its data, not that of the
    whole parameter, which shards answer outside of optimizers' steps."""
    with torch._C.DisableTorchFunctionSubclass():
        return param.shape


def held_bytes(param: Tensor) -> int:
    """Return the bytes of what this rank holds of a parameter."""
    return held_shape(param).numel() * param.dtype.itemsize


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


class _Thread(threading.local):
    def __init__(self) -> None:
        self.runs = Code.OUTSIDE
        self.before_steps: list[Code] = []  # ``runs`` before each optimizer step


_thread = _Thread()


@contextmanager
def _running(code: Code) -> Iterator[None]:
    before, _thread.runs = _thread.runs, code
    try:
        yield
    finally:
        _thread.runs = before


package_code = functools.partial(_running, Code.PACKAGE)
"""``with package_code():`` runs this package's code, which may compute with shards."""
forward_code = functools.partial(_running, Code.FORWARD)
"""``with forward_code():`` runs the forward of a user's module."""


@contextmanager
def with_shards() -> Iterator[None]:
    """Let the block compute with shards, except in the forward of a user's module."""
    with _running(Code.FORWARD if _thread.runs is Code.FORWARD else Code.PACKAGE):
        yield


def begin_step() -> None:
    """Let an optimizer compute with shards, also one that steps in a forward (of a module whose
    forward is a training step)."""
    _thread.before_steps.append(_thread.runs)
    _thread.runs = Code.PACKAGE


def end_step() -> None:
    """Undo the latest ``begin_step``. After a step that raised, leaving the forward does so."""
    _thread.runs = _thread.before_steps.pop()


class GuardedShard:
    """The ``__torch_function__`` of a class of shards: in the forward of a user's module its
    ``_fsdp_in_forward``, outside its ``_fsdp_outside``, and elsewhere torch's own."""

    def __get__(self, shard: Any, kind: Any) -> Any:
        if _thread.runs is Code.FORWARD:
            return kind._fsdp_in_forward
        if _thread.runs is Code.OUTSIDE and torch._C._current_graph_task_id() == -1:
            return kind._fsdp_outside
        return torch._C._disabled_torch_function_impl


# ---------------------------------------------------------------- unsharded, after reshard


class Group(Protocol):
    """The part of ``FSDPParamGroup`` used here."""

    unsharded: Sequence[Tensor]

    @property
    def versions(self) -> list[int]: ...
    @property
    def originals(self) -> list[Any]: ...


class Dummies:
    """The data of freed parameters, by dtype.

    Code below torch functions could still read it: its shape hardly broadcasts, and NaN is seen in
    any result.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[torch.dtype, Tensor] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """Return the data for ``tensor``."""
        if tensor.is_inference():  # not kept, as code that replaces live tensors expects none
            with torch.inference_mode():
                return self._made(tensor.dtype, self._device)
        if tensor.dtype not in self._tensors:
            # Not computed by a program: that of the first step would return it, and so be another
            # one than that of the second.
            self._tensors[tensor.dtype] = ops.upload(self._made(tensor.dtype, "cpu"), self._device)
        return self._tensors[tensor.dtype]

    def _made(self, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
        return torch.full((3, 5, 7, 11), value, dtype=dtype, device=device)


class Reshard:
    """One time at which the modules of a unit let go of unsharded parameters.

    Args:
        group: their group; referenced weakly.
        versions: of the shards that the parameters were gathered from.
        freed: whether the parameters have lost their values.
    """

    def __init__(self, group: Group, versions: Sequence[int], *, freed: bool) -> None:
        self._group = weakref.ref(group)
        self._versions = versions
        self._freed = freed

    def take(self, tensor: Tensor, index: int, *, is_view: bool = False) -> None:
        """Turn original parameter ``index``, or a view of it, into a ``ReshardedParam``."""
        handle: Any = tensor
        handle._reshard, handle._index, handle._views = self, index, is_view
        handle.__class__ = ReshardedParam

    def take_all(self, unsharded: Sequence[Tensor]) -> None:
        """Turn all original parameters of the group into ``ReshardedParam``s."""
        for index, tensor in enumerate(unsharded):
            self.take(tensor, index)

    def base_of(self, handle: ReshardedParam, func: Any) -> Tensor | None:
        """Return the parameter that the modules hold now in the place of ``handle``; None if they
        hold shards, and the values of ``handle`` are still those of the shards.

        Raises:
            RuntimeError: if these values are gone.
        """
        group = self._group()
        if group is not None and group.unsharded:
            return group.unsharded[handle._index]
        if group is not None and not self._freed and group.versions == self._versions:
            return None
        raise RuntimeError(
            f"{self.name(handle._index)} was used (by {name_of(func)}) while its FSDP unit is "
            f"sharded, so its full values are not there: they are in the unit's own forward and "
            f"in its backward. Use them there, also in a method that "
            f"register_fsdp_forward_method knows; or return them, or what is computed from them, "
            f"as an output of the unit's forward; or set reshard_after_forward=False for the unit; "
            f"or call it inside summon_full_params"
        )

    def shape_of(self, handle: ReshardedParam) -> Tensor:
        """Return a tensor without values that has the shape that ``handle`` had."""
        group = self._group()
        if group is None or not self._freed:
            return handle
        shape = group.originals[handle._index].shape
        return handle._like(without_values(shape, handle.dtype))

    def name(self, index: int) -> str:
        """Return the name of original parameter ``index``."""
        group = self._group()
        return "a parameter of a freed model" if group is None else group.originals[index].names[0]


class ReshardedParam(Tensor):
    """An unsharded parameter, or a view of one, after its unit has resharded."""

    _reshard: Reshard
    _index: int  # of the original parameter
    _views: bool  # whether it is a view of the parameter

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if name_of(func) == "__repr__":
            return f"ReshardedParam({args[0]._reshard.name(args[0]._index)})"
        reads = read_by(func, args, cls)
        with torch._C.DisableTorchFunctionSubclass():
            if reads is Reads.VALUES:
                found = _replaced(args, kwargs, lambda each: each._current(func))
            elif reads is Reads.SHAPE:
                found = _replaced(args, kwargs, lambda each: each._reshard.shape_of(each))
            else:
                found = args, kwargs or {}
            return func(*found[0], **found[1])

    def _current(self, func: Any) -> Tensor:
        base = self._reshard.base_of(self, func)
        return self if base is None else self._like(base)

    def _like(self, base: Tensor) -> Tensor:
        # The strides of an XLA tensor do not describe its views; the recorded view ops do.
        return self._view_func_unsafe(base) if self._views else base


def reopen(tensors: Sequence[Tensor]) -> None:
    """Make tensors common ones again that modules hold once more."""
    for tensor in tensors:
        if type(tensor) is ReshardedParam:
            tensor.__class__ = Tensor  # type: ignore[assignment]


def _replaced(args: Any, kwargs: Any, fn: Callable[[ReshardedParam], Tensor]) -> tuple[Any, Any]:
    return map_tensors(
        lambda each: fn(each) if isinstance(each, ReshardedParam) else each, (args, kwargs or {})
    )
