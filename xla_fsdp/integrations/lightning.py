"""Lightning Fabric's ``XLAFSDPStrategy`` on this package, also on CPU ranks: ``install()``.

Fabric's code is not changed: ``compat`` redirects its imports of ``torch_xla.distributed.fsdp``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

from xla_fsdp import compat
from xla_fsdp.distributed.launcher import launch
from xla_fsdp.integrations import require
from xla_fsdp.recipe.apply import parallelize
from xla_fsdp.xla.cpu_rank_patches import run_slot
from xla_fsdp.xla.ops import surround

require("lightning-fabric" if find_spec("lightning_fabric") else "lightning")


def install(cpu_ranks: int | None = None) -> None:
    """Let ``XLAFSDPStrategy`` shard with this package.

    Call it in the main module, before ``Fabric`` is made. The strategy then also takes a
    ``recipe`` for ``parallelize``: ``XLAFSDPStrategy(recipe="lean")``.

    Args:
        cpu_ranks: without a TPU, the number of ranks, 2 or more, that ``fabric.launch(fn)`` runs as
            threads of this process, as if they were TPU cores:
            ``Fabric(accelerator="tpu", devices=cpu_ranks, ...)``.

    Raises:
        ValueError: if ``cpu_ranks`` is less than 2, which the strategy does not support, or
            ``PJRT_DEVICE`` is not CPU.
        UntestedVersionError: on import of this module, for an untested version of Lightning.
    """
    compat.install()
    for strategies in _modules("strategies"):
        surround((strategies.XLAFSDPStrategy, "setup_module", _setup_module))
        surround((strategies.XLAFSDPStrategy, "_save_checkpoint_shard", _save_shard))
    if cpu_ranks is None:
        return
    device = os.environ.setdefault("PJRT_DEVICE", "CPU")
    if cpu_ranks < 2 or device != "CPU":
        raise ValueError(
            f"cpu_ranks={cpu_ranks} with PJRT_DEVICE={device}; XLAFSDPStrategy runs on 2 ranks or "
            f"more, and ranks are threads on CPU only. Leave cpu_ranks out on a TPU"
        )
    run_slot().start_ranks = partial(launch, num_ranks=cpu_ranks)
    for accelerators in _modules("accelerators"):
        accelerators.XLAAccelerator.auto_device_count = staticmethod(lambda: cpu_ranks)
        accelerators.XLAAccelerator.is_available = staticmethod(lambda: True)


def _modules(name: str) -> Iterator[Any]:
    """Yield the module of each copy of Fabric that is installed."""
    for package in ("lightning_fabric", "lightning.fabric"):
        with contextlib.suppress(ImportError):
            yield importlib.import_module(f"{package}.{name}")


def _setup_module(original: Callable[..., Any], strategy: Any, module: Any) -> Any:
    """Parallelize the module if the strategy was given a ``recipe``."""
    if "recipe" not in strategy._fsdp_kwargs:
        return original(strategy, module)
    # Fabric makes optimizers afterwards.
    return parallelize(module, None, **strategy._parse_fsdp_kwargs()).model


def _save_shard(original: Callable[..., None], strategy: Any, *args: Any, **kwargs: Any) -> None:
    """Write shards once all ranks have seen that the directory is empty. One that looked later
    found the file of another, and took it for an old checkpoint."""
    if not strategy._sequential_save:  # else ranks come here one after the other
        strategy.barrier("all-have-looked")
    original(strategy, *args, **kwargs)
