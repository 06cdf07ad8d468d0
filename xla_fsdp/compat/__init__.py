"""Replace ``torch_xla.distributed.fsdp`` by this package, for scripts written for torch_xla.

Invariants: importing a name that this package lacks fails. Only ``recursive_wrap`` comes from
torch_xla: it is independent of sharding, and torch_xla's SPMD wrapper imports it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

THEIRS = "torch_xla.distributed.fsdp"

_Module = TypeVar("_Module")

# Each of torch_xla's names, and the module of this package that defines it.
_CLASS = {"XlaFullyShardedDataParallel": "xla_fsdp.fsdp.torch_xla_wrapper"}
_CHECKPOINT = {"checkpoint_module": "xla_fsdp.nn.activation_checkpoint"}
_MERGING = {
    "consolidate_sharded_model_checkpoints": "xla_fsdp.compat.merge",
    "consolidate_sharded_state_dicts": "xla_fsdp.checkpoint",
}
_POLICIES = {
    f"{kind}_policy": "xla_fsdp.wrap"
    for kind in ("always_wrap", "lambda_auto_wrap", "size_based_auto_wrap", "transformer_auto_wrap")
}

# By suffix of the module's name after ``THEIRS``.
_HOMES: dict[str, dict[str, str]] = {
    "": {**_CLASS, **_CHECKPOINT, **_MERGING},
    ".xla_fully_sharded_data_parallel": _CLASS,
    ".wrap": {**_POLICIES, "recursive_wrap": __name__},
    ".utils": {**_CHECKPOINT, "apply_xla_patch_to_nn_linear": __name__},
    ".state_dict_utils": _MERGING,
    ".consolidate_sharded_ckpts": {**_MERGING, "main": "xla_fsdp.consolidate_sharded_ckpts"},
}


def install() -> None:
    """Replace ``torch_xla.distributed.fsdp`` and its submodules by this package.

    Call it at the top of the main module, before anything imports them; processes that
    ``torch_xla.launch`` starts then call it too. Further calls do nothing. If they were imported
    before, it warns, as modules that imported names from them still use torch_xla's.
    """
    if isinstance(sys.modules.get(THEIRS), _Alias):
        return
    if THEIRS in sys.modules:
        warnings.warn(
            f"{THEIRS} was imported before xla_fsdp.compat.install(); modules that took names from "
            f"it still have torch_xla's. Call install() first",
            stacklevel=2,
        )
    for name in [name for name in sys.modules if name.startswith(f"{THEIRS}.")]:
        del sys.modules[name]
    importlib.import_module("xla_fsdp.compat.merge")  # records the time when the job began
    importlib.import_module("xla_fsdp.checkpoint.format.save_numbers").begin()
    parent: Any = importlib.import_module(THEIRS.rpartition(".")[0])
    for suffix, homes in _HOMES.items():
        sys.modules[THEIRS + suffix] = _Alias(THEIRS + suffix, homes)
    for suffix in _HOMES:
        if suffix:
            setattr(sys.modules[THEIRS], suffix[1:], sys.modules[THEIRS + suffix])
    parent.fsdp = sys.modules[THEIRS]


class _Alias(ModuleType):
    """A module under torch_xla's name that imports its attributes on access.

    Args:
        name: of the module.
        homes: attribute name to the module of this package that defines it.
    """

    def __init__(self, name: str, homes: dict[str, str]) -> None:
        super().__init__(name, __doc__)
        self.__path__: list[str] = []
        self.__all__ = sorted(homes)
        self._homes = homes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._homes:
            raise AttributeError(
                f"module {self.__name__!r}, which xla_fsdp.compat replaces, has no attribute "
                f"{name!r}; it has {', '.join(self.__all__)}"
            )
        return getattr(importlib.import_module(self._homes[name]), name)


def apply_xla_patch_to_nn_linear(module: _Module, *_: Any) -> _Module:
    """Return ``module`` unchanged: this package frees unsharded parameters without the patch."""
    return module


def __getattr__(name: str) -> Any:
    if name == "recursive_wrap":
        return _their_recursive_wrap()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _their_recursive_wrap() -> Any:
    folder = Path(str(importlib.import_module("torch_xla.distributed").__file__)).parent
    spec = importlib.util.spec_from_file_location("_their_wrap", folder / "fsdp" / "wrap.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"torch_xla has no file {folder / 'fsdp' / 'wrap.py'}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.recursive_wrap
