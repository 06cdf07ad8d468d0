"""What torch functions read and compute of a shard, where the user means the full parameter.

One that computes with a shard's values in a forward raises; outside of forwards only one that mixes
elements, as shards may be stepped and averaged.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
        "tensordot", "kron", "outer", "ger", "addmm", "addmv", "addbmm", "baddbmm", "linear",
        "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
        "conv_transpose3d", "embedding", "embedding_bag", "trace", "det", "logdet", "slogdet",
        "inverse", "pinverse", "svd", "qr", "cholesky", "matrix_exp", "matrix_power",
        # initialization and writes by index
        "uniform_", "normal_", "bernoulli_", "random_", "exponential_", "cauchy_", "geometric_",
        "log_normal_", "kaiming_uniform_", "eye", "view_as", "__setitem__", "fill_diagonal_",
        "tril_", "triu_", "index_fill_", "index_copy_", "index_add_", "index_put_", "scatter_",
    }
)  # fmt: skip

SUMS = frozenset({"sum", "nansum"})

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
