"""Code written for ``torch_xla.distributed.fsdp`` on this package, unchanged: ``install()``.

Invariants: a name that is not in one of these modules cannot be imported; nothing comes from
torch_xla but ``recursive_wrap``, which knows nothing of sharding and which torch_xla's SPMD wrapper
imports.
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

# The modules of this package that hold each of torch_xla's names.
_CLASS = {"XlaFullyShardedDataParallel": "xla_fsdp.fsdp.wrapper"}
_CHECKPOINT = {"checkpoint_module": "xla_fsdp.fsdp.engine.activation_checkpoint"}
_MERGING = {
    "consolidate_sharded_model_checkpoints": "xla_fsdp.compat.merge",
    "consolidate_sharded_state_dicts": "xla_fsdp.checkpoint",
}
_POLICIES = {
    f"{kind}_policy": "xla_fsdp.wrap"
    for kind in ("always_wrap", "lambda_auto_wrap", "size_based_auto_wrap", "transformer_auto_wrap")
}

_HOMES: dict[str, dict[str, str]] = {
    "": {**_CLASS, **_CHECKPOINT, **_MERGING},
    ".xla_fully_sharded_data_parallel": _CLASS,
    ".wrap": {**_POLICIES, "recursive_wrap": __name__},
    ".utils": {**_CHECKPOINT, "apply_xla_patch_to_nn_linear": __name__},
    ".state_dict_utils": _MERGING,
    ".consolidate_sharded_ckpts": {
        **_MERGING,
        "main": "xla_fsdp.consolidate_sharded_ckpts",
    },
}


def install() -> None:
    """Let ``torch_xla.distributed.fsdp`` and the modules in it be this package from now on.

    Call it before what imports them, at the top of the main module, so that processes that
    ``torch_xla.launch`` starts call it, too. Calling it again does nothing. Names that other
    modules have imported before stay torch_xla's; there is a warning then.
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
    importlib.import_module("xla_fsdp.compat.merge")  # it notes when the job began
    importlib.import_module("xla_fsdp.checkpoint.save_numbers").begin()
    parent: Any = importlib.import_module(THEIRS.rpartition(".")[0])
    for suffix, homes in _HOMES.items():
        sys.modules[THEIRS + suffix] = _Alias(THEIRS + suffix, homes)
    for suffix in _HOMES:
        if suffix:
            setattr(sys.modules[THEIRS], suffix[1:], sys.modules[THEIRS + suffix])
    parent.fsdp = sys.modules[THEIRS]


class _Alias(ModuleType):
    """A module of torch_xla's name whose names are looked up when they are asked for.

    Args:
        name: of the module.
        homes: the module of this package that holds each name.
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
    """Return ``module`` as it is: its unsharded parameters are freed without the patch."""
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
