"""Layers with running statistics, such as BatchNorm, in a unit that computes in another dtype.

Always true: such a layer computes in the dtype of its statistics, parameters included; what goes in
is cast to it, what comes out is cast back. The statistics keep their own dtype unless the user
gives a ``buffer_dtype``: an average over thousands of steps is beyond 16 bits. (A mixture is no
way out: XLA's verifier refuses torch_xla's BatchNorm with inputs of two dtypes.)
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from xla_fsdp.config import FSDPConfig
from xla_fsdp.tree import map_tensors


def statistics_dtype(module: nn.Module, config: FSDPConfig) -> torch.dtype | None:
    """What ``module`` computes in if it has running statistics, else None."""
    if isinstance(module, _NormBase) and module.running_mean is not None:
        return config.buffer_dtype or module.running_mean.dtype
    return None


def compute_in(dtype: torch.dtype, outside: torch.dtype, module: nn.Module) -> None:
    """Cast the input of ``module`` to ``dtype``, and its output to ``outside``."""
    module.register_forward_pre_hook(partial(_cast_input, dtype), with_kwargs=True)
    module.register_forward_hook(partial(_cast_output, outside))


def _cast_input(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return map_tensors(lambda tensor: tensor.to(dtype), (args, kwargs))


def _cast_output(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], output: Tensor
) -> Tensor:
    return output.to(dtype)
