"""Refuse, or warn of, saves and loads that take one rank's shards for a whole model.

``guards.install`` calls ``install`` once for a process. What is saved is searched for shards: state
dicts of models and optimizers, by their marks, which files keep; values of ``fully_shard``'s, and
copies of them; models and optimizers as objects.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from xla_fsdp.distributed.cpu_ranks import current_rank_thread
from xla_fsdp.fsdp.engine.load_hooks import MARK, Form
from xla_fsdp.fsdp.engine.module_state import units_in
from xla_fsdp.fsdp.engine.param_guards import package_code
from xla_fsdp.fsdp.engine.registry import known_group
from xla_fsdp.fsdp.engine.shard_place import PLACES
from xla_fsdp.fsdp.engine.shard_tensor import SavedShard, ShardView, is_part, is_sharded
from xla_fsdp.xla import ops

METADATA = "shard_metadata"
DEPTH, MOST = 4, 1000
"""How deep, and how far, what is saved is searched for shards: longer lists are data."""

_INSTEAD = (
    "Save on all ranks by xla_fsdp.save_checkpoint(folder, model, optimizer, step=step), or take "
    "the whole model by state = xla_fsdp.full_state_dict(model), which all ranks call, and save "
    "that on rank 0"
)


def install() -> None:
    """Put the guards around functions that write state dicts, and around torch's that load them."""
    torch.save = _warned("torch.save", torch.save)
    for name in ("dump", "dumps"):
        setattr(pickle, name, _warned(f"pickle.{name}", getattr(pickle, name)))
    _warn_in_safetensors()
    ops.before_master_saves(_refuse_master_save)
    nn.Module.load_state_dict = _explained(nn.Module.load_state_dict)  # type: ignore[method-assign]
    _refuse_ddp()


def _warned(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``original``, which writes its first argument, warn of shards, and refuse to write those
    of several ranks to one path."""

    @functools.wraps(original)
    def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
        if holds_shards(obj) and ops.world_size() > 1:
            file = args[0] if args else kwargs.get("f")
            if isinstance(file, str | os.PathLike):
                _refuse_shared_file(os.path.abspath(file))
            _warn(name, obj)
        return original(obj, *args, **kwargs)

    return save


def _warn_in_safetensors() -> None:
    # Not around save_file and save, which scripts have imported by name before. Which of these
    # they call depends on the version.
    with contextlib.suppress(ModuleNotFoundError):
        module = importlib.import_module("safetensors.torch")
        for name in {"_flatten", "_flatten_as_ptr"} & set(vars(module)):
            setattr(module, name, _warned("safetensors.torch", getattr(module, name)))


def _warn(name: str, obj: Any) -> None:
    if not (isinstance(obj, Mapping) and METADATA in obj):
        warnings.warn(
            f"{name} was given rank {ops.rank()}'s shards, which are not the model: files like it, "
            f"one of each rank, can be loaded on as many ranks, and not be merged. "
            f"{_INSTEAD}. To merge files of shards later, save model.get_shard_metadata() with "
            f"them by torch.save, as {METADATA!r}",
            stacklevel=3,
        )


def _refuse_shared_file(path: str) -> None:
    thread = current_rank_thread()
    if thread is None:
        return
    writer = thread.rank_run.files.setdefault(path, thread.rank)
    if writer != thread.rank:
        raise RuntimeError(
            f"rank {thread.rank} saves its shards to {path}, to which rank {writer} has saved its "
            f"own: one would be lost. {_INSTEAD}. Or give each rank a file, f'...-{{rank}}.pth'"
        )


def _refuse_master_save(obj: Any) -> None:
    if holds_shards(obj) and ops.world_size() > 1:
        raise ValueError(
            "torch_xla's save was given shards. It writes those of the first rank only, as if "
            f"they were the model, and the others' shards are lost. {_INSTEAD}. For a "
            "file of each rank pass master_only=False and a path with the rank in it"
        )


def holds_shards(obj: Any, depth: int = 0) -> bool:
    """Return whether ``obj`` is or holds what is of one rank's shards alone."""
    if isinstance(obj, nn.Module):
        return any(map(is_part, obj.parameters()))
    if isinstance(obj, Optimizer):
        return any(is_part(param) for group in obj.param_groups for param in group["params"])
    if isinstance(obj, Mapping) and (PLACES in obj or any(_marks(obj, PLACES))):
        return True
    if isinstance(obj, Mapping | list | tuple) and depth < DEPTH:
        inside = obj.values() if isinstance(obj, Mapping) else obj
        return any(holds_shards(each, depth + 1) for each in islice(inside, MOST))
    is_shard = isinstance(obj, SavedShard | ShardView)
    return is_shard and is_part(obj)


def _marks(state: Any, key: str) -> list[Any]:
    """Return what the metadata of a model's state dict has under ``key`` for each module."""
    metadata = getattr(state, "_metadata", None)
    modules = metadata.values() if isinstance(metadata, Mapping) else ()
    return [each.get(key) for each in modules if isinstance(each, Mapping)]


def _explained(original: Callable[..., Any]) -> Callable[..., Any]:
    """Say in the error of a load why shapes differ, where it is this package's doing."""

    @functools.wraps(original)
    def load_state_dict(module: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with package_code():  # torch compares shapes, of shards here
                return original(module, state_dict, *args, **kwargs)
        except RuntimeError as error:
            why = _why(module, state_dict) if "size mismatch" in str(error) else ""
            if not why:
                raise
            raise RuntimeError(f"{error}\n{why}") from None

    return load_state_dict


def _why(module: nn.Module, state: Any) -> str:
    if _is_inside_of_a_wrapper(module):
        return (
            f"The {type(module).__name__} is inside of a wrapper, which turns full tensors into "
            f"shards: call load_state_dict of the wrapper, model.load_state_dict(state), not "
            f"model.module.load_state_dict(state)"
        )
    if any(map(is_sharded, module.parameters())):
        return ""
    if Form.SHARDS.value in _marks(state, MARK) or holds_shards(state):
        found = "The state dict holds one rank's shards, and the model is not sharded"
    elif _has_fewer_rows(module, state):
        found = "Each is of another size in its first dim alone, or a vector, as one rank's shards"
    else:
        return ""
    return (
        f"{found}. Take the whole model by xla_fsdp.full_state_dict(model) on all ranks, or merge "
        f"saved files by python -m xla_fsdp.consolidate_sharded_ckpts"
    )


def _has_fewer_rows(module: nn.Module, state: Mapping[str, Any]) -> bool:
    """Return whether tensors that do not fit ``module`` may be shards: their marks may be lost."""
    own = module.state_dict()
    pairs = [(own[k].shape, v.shape) for k, v in state.items() if k in own and hasattr(v, "shape")]
    return all(a == b or len(b) == 1 or a[1:] == b[1:] for a, b in pairs)


def _is_inside_of_a_wrapper(module: nn.Module) -> bool:
    """Return whether ``module`` has shards that no unit in it has made."""
    groups = [unit.group for unit in units_in(module)]
    return any(is_sharded(p) and known_group(p) not in groups for p in module.parameters())


def _refuse_ddp() -> None:
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if any(map(is_sharded, module.parameters())):
            raise ValueError(
                f"DistributedDataParallel was put around a {type(module).__name__} that is "
                "sharded: it would average shards, which are different parts of the parameters. "
                "Leave it out, gradients are averaged already; for replicas of a sharded model "
                "give it a mesh, init_mesh((2, 4), ('replica', 'shard'))"
            )
        original(self, module, *args, **kwargs)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
