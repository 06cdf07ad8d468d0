"""Fully Sharded Data Parallel for PyTorch/XLA.

Public names are listed in ``__init__.pyi`` and loaded when they are first used, so that importing
the package, merging checkpoints or reading help texts needs no torch_xla. Wrap policies are in
``xla_fsdp.wrap``, everything about files in ``xla_fsdp.checkpoint``, optimizers over the ranks in
``xla_fsdp.optim``.
"""

import logging
from typing import Any

import lazy_loader

__version__ = "0.1.0"

# torch_xla says so whenever it is imported on a machine without a TPU, if it is imported later.
logging.getLogger().addFilter(lambda record: record.msg != "Defaulting to PJRT_DEVICE=CPU")

_attribute, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _attribute(name)
    except ModuleNotFoundError as error:
        if error.name != "torch_xla":
            raise
        raise ModuleNotFoundError(f"xla_fsdp.{name}: {error}", name=error.name) from error
