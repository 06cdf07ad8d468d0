"""Mend or refuse torch functions that would compute something wrong from shards without an error.

The first unit or tensor-parallel module of a process replaces functions of torch and torch_xla by
ones that are right for shards, or raise. A function that a script imported by name before that is
not guarded. What is saved is searched for shards: state dicts of models and optimizers, by their
marks, which files keep; values of ``fully_shard``'s, and copies of them; models and optimizers as
objects.

State dicts of optimizers know parameters by position. torch_xla's FSDP lists the parameters of an
outer unit before those of inner ones; here they come in the order of the model, and state dicts
have a mark. What has none is taken to be in the order of the model's file, which is noted when that
is loaded. Nothing has changed when an error is raised.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import islice
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad as torch_clip_grad
from torch.nn.utils import parametrize
from torch.optim.optimizer import Optimizer

from xla_fsdp.distributed.cpu_ranks import current_rank_thread
from xla_fsdp.distributed.shard_layout import join_name
from xla_fsdp.fsdp.engine.load_hooks import (
    MARK,
    PLACES,
    Form,
    Places,
    places_of,
    refuse_other_places,
    upstream_order,
)
from xla_fsdp.fsdp.engine.module_state import units_in
from xla_fsdp.fsdp.engine.param import (
    FSDPParam,
    held_shape,
    known_group,
    known_shard,
    owners_of_grads,
    refuse_shown,
)
from xla_fsdp.fsdp.engine.shard_tensor import SavedShard, ShardView, is_part, is_sharded
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.engine.thread import package_code
from xla_fsdp.optim.clip_grad import check_gradients, get_total_norm
from xla_fsdp.optim.optimizers import check_steps, params_of, steps_elementwise
from xla_fsdp.xla import ops, torch_xla
from xla_fsdp.xla.ops import surround

xm: Any = torch_xla.core.xla_model

# Process-wide, not by rank, as are the functions that are replaced.
_installing = threading.Lock()


def install() -> None:
    """Install the guards once; check optimizers again, as a new unit may have replaced their
    parameters."""
    with _installing:
        _install_once()
        check_steps()


@functools.cache
def _install_once() -> None:
    surround(
        (xm, "reduce_gradients", _reduce_gradients),
        (xm, "_fetch_gradients", _fetch_gradients),
        (xm, "save", _save_of_master),
        (torch_xla.utils.serialization, "save", _save_of_master),
        (torch_xla.core.functions.AllGather, "forward", _warn_of_gather),
        *_guarded("clip_grad_norm_", _refuse_shards),
        *_guarded("get_total_norm", _count_all_ranks),
        *_guarded("clip_grads_with_norm_", _need_gradients_of_shards),
        # Not hooks, which each optimizer would need: torch has none for all of them.
        (Optimizer, "state_dict", _optimizer_state_dict),
        (Optimizer, "load_state_dict", _load_optimizer_state_dict),
        (torch, "save", partial(_save, "torch.save")),
        *((pickle, name, partial(_save, f"pickle.{name}")) for name in ("dump", "dumps")),
        # Not around save_file and save, which scripts have imported by name before. Which of these
        # they call depends on the version.
        *(
            (safetensors.torch, name, partial(_save, "safetensors.torch"))
            for name in {"_flatten", "_flatten_as_ptr"} & set(vars(safetensors.torch))
        ),
        (nn.Module, "load_state_dict", _load_state_dict),
        (DistributedDataParallel, "__init__", _refuse_ddp),
        (parametrize, "register_parametrization", _register_parametrization),
        (parametrize, "remove_parametrizations", _remove_parametrizations),
        (
            torch.__future__,
            "get_swap_module_params_on_conversion",
            lambda original: original() and not _without_swaps.get(),
        ),
    )


def _warn_of_gather(original: Callable[..., Tensor], ctx: Any, *args: Any) -> Tensor:
    if ctx.needs_input_grad[0] and ops.world_size() > 1:
        warnings.warn(
            "torch_xla.core.functions.all_gather is differentiated: its backward returns this "
            "rank's slice of this rank's gradient, and leaves out those of the other ranks' "
            "losses. Write xla_fsdp.distributed.all_gather(x, dim), whose backward sums them",
            stacklevel=5,  # the caller of all_gather, which calls an autograd function
        )
    return original(ctx, *args)


# Optimizers whose gradients are averaged between replicas of the same slices: by groups.
_between_replicas: set[Optimizer] = set()


def _reduce_gradients(
    original: Callable[..., None], optimizer: Optimizer, groups: Any = None, *args: Any, **kw: Any
) -> None:
    if groups is None:
        _refuse_average(
            optimizer,
            "xm.optimizer_step / xm.reduce_gradients was called",
            "Call optimizer.step() instead",
        )
    _between_replicas.add(optimizer)
    try:
        original(optimizer, groups, *args, **kw)
    finally:
        _between_replicas.discard(optimizer)


def _fetch_gradients(original: Callable[..., Any], optimizer: Optimizer) -> Any:
    if optimizer not in _between_replicas:
        _refuse_average(
            optimizer,
            "an optimizer of accelerate was called",
            "Use the Accelerator of xla_fsdp.integrations.accelerate; for transformers' Trainer, "
            "call install() of xla_fsdp.integrations.transformers first",
        )
    return original(optimizer)


def _refuse_average(optimizer: Optimizer, what: str, instead: str) -> None:
    if any(map(is_part, params_of(optimizer))):
        raise RuntimeError(
            f"{what} with parameters sharded by xla_fsdp. Their gradients are already reduced, and "
            f"each rank holds different slices: averaging them would mix unrelated values. "
            f"{instead}."
        )


def _guarded(
    name: str, instead: Callable[[list[Tensor]], Callable[..., Any] | None]
) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return for ``surround`` both places of a function of ``torch.nn.utils``, which is first to
    show ``instead`` its tensors; that may return what is to be called in its place."""

    def guarded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs)
        first, tensors = next(iter(bound.arguments.items()))
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        refuse_shown(given, f"torch.nn.utils.{name}")
        bound.arguments[first] = given
        return (instead(given) or original)(*bound.args, **bound.kwargs)

    inner = name if hasattr(torch_clip_grad, name) else f"_{name}"
    return [(torch.nn.utils, name, guarded), (torch_clip_grad, inner, guarded)]


def _count_all_ranks(given: list[Tensor]) -> Callable[..., Tensor] | None:
    return get_total_norm if any(map(is_part, owners_of_grads(given))) else None


def _need_gradients_of_shards(given: list[Tensor]) -> None:
    check_gradients([known_group(param) for param in given], "clip_grads_with_norm_")


def _refuse_shards(given: list[Tensor]) -> None:
    if any(map(is_part, given)):
        raise RuntimeError(
            "torch.nn.utils.clip_grad_norm_ was given parameters sharded by xla_fsdp. Each "
            "rank would compute the norm of its own slices and scale by another factor. Call "
            "xla_fsdp.clip_grad_norm_ with the same arguments, or "
            "model.clip_grad_norm_(max_norm) on the outermost sharded module"
        )
    check_gradients([known_group(param) for param in given], "clip_grad_norm_")


def _register_parametrization(
    original: Callable[..., Any], module: Any, tensor_name: str, *args: Any, **kwargs: Any
) -> Any:
    given = getattr(module, tensor_name, None)
    if isinstance(given, Tensor) and is_sharded(given):
        raise RuntimeError(
            f"a parametrization of {tensor_name} was registered, which is a shard by now. It "
            f"would compute with this rank's part. Register parametrizations before sharding: "
            f"the unit then shards what they compute from"
        )
    was_parameter = tensor_name in module._parameters
    result = original(module, tensor_name, *args, **kwargs)
    if was_parameter:
        module.parametrizations[tensor_name].of_parameter = True
    return result


def _remove_parametrizations(
    original: Callable[..., Any], module: Any, tensor_name: str, *args: Any, **kwargs: Any
) -> Any:
    """PEFT puts parametrizations on in a forward and takes them off; torch then makes an unsharded
    tensor a buffer, as it is no nn.Parameter. It is to be the parameter that it was."""
    known = getattr(module, "parametrizations", {})
    was_parameter = tensor_name in known and hasattr(known[tensor_name], "of_parameter")
    result = original(module, tensor_name, *args, **kwargs)
    if was_parameter and tensor_name in result._buffers:
        result._parameters[tensor_name] = result._buffers.pop(tensor_name)
    return result


# ---------------------------------------------------------------- saves and loads

METADATA = "shard_metadata"
DEPTH, MOST = 4, 1000
"""How deep, and how far, what is saved is searched for shards: longer lists are data."""

_INSTEAD = (
    "Save on all ranks by xla_fsdp.save_checkpoint(folder, model, optimizer, step=step), or take "
    "the whole model by state = xla_fsdp.full_state_dict(model), which all ranks call, and save "
    "that on rank 0"
)


def _save(name: str, original: Callable[..., Any], obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Warn of shards, and refuse to write those of several ranks to one path."""
    if holds_shards(obj) and ops.world_size() > 1:
        file = args[0] if args else kwargs.get("f")
        if isinstance(file, str | os.PathLike):
            _refuse_shared_file(os.path.abspath(file))
        _warn(name, obj)
    return original(obj, *args, **kwargs)


def _warn(name: str, obj: Any) -> None:
    if not (isinstance(obj, Mapping) and METADATA in obj):
        warnings.warn(
            f"{name} was given rank {ops.rank()}'s shards, which are not the model: files like it, "
            f"one of each rank, can be loaded on as many ranks, and not be merged. "
            f"{_INSTEAD}. To merge files of shards later, save model.get_shard_metadata() with "
            f"them by torch.save, as {METADATA!r}",
            stacklevel=4,
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


def _save_of_master(original: Callable[..., None], obj: Any, *args: Any, **kwargs: Any) -> None:
    is_of_one = kwargs.get("master_only", args[1] if args[1:] else True)
    if is_of_one and holds_shards(obj) and ops.world_size() > 1:
        raise ValueError(
            "torch_xla's save was given shards. It writes those of the first rank only, as if "
            f"they were the model, and the others' shards are lost. {_INSTEAD}. For a "
            "file of each rank pass master_only=False and a path with the rank in it"
        )
    original(obj, *args, **kwargs)


def holds_shards(obj: Any, depth: int = 0) -> bool:
    """Return whether ``obj`` is or holds what is of one rank's shards alone."""
    if isinstance(obj, nn.Module):
        return any(map(is_part, obj.parameters()))
    if isinstance(obj, Optimizer):
        return any(map(is_part, params_of(obj)))
    if isinstance(obj, Mapping) and (obj.get(PLACES) or any(_marks(obj, PLACES))):
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


def _load_state_dict(
    original: Callable[..., Any], module: nn.Module, state_dict: Any, *args: Any, **kwargs: Any
) -> Any:
    """Say in the error of a load why shapes differ, where it is this package's doing."""
    try:
        with package_code():  # torch compares shapes, of shards here
            return original(module, state_dict, *args, **kwargs)
    except RuntimeError as error:
        why = _why(module, state_dict) if "size mismatch" in str(error) else ""
        if not why:
            raise
        raise RuntimeError(f"{error}\n{why}") from None


def _why(module: nn.Module, state: Any) -> str:
    if shards_of_others(module):
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


def owned_by(units: Iterable[FSDPState]) -> set[tuple[int, str]]:
    """Return where the units' parameters are, by module and attribute: inside summon_full_params
    these hold tensors that are no shards."""
    return {
        (id(owner.module), owner.attribute)
        for unit in units
        for param in unit.group.params
        for owner in param.owners
    }


def shards_of_others(module: nn.Module) -> list[str]:
    """Return the names of shards in ``module`` that no unit in it has made."""
    units = units_in(module)
    groups, owned = {id(unit.group) for unit in units}, owned_by(units)
    return [
        join_name(prefix, attribute)
        for prefix, each in module.named_modules(remove_duplicate=False)
        for attribute, param in each._parameters.items()
        if param is not None and (id(each), attribute) not in owned
        if is_sharded(param) and id(known_group(param)) not in groups
    ]


def _refuse_ddp(
    original: Callable[..., None], self: Any, module: nn.Module, *args: Any, **kwargs: Any
) -> None:
    if any(map(is_sharded, module.parameters())):
        raise ValueError(
            f"DistributedDataParallel was put around a {type(module).__name__} that is "
            "sharded: it would average shards, which are different parts of the parameters. "
            "Leave it out, gradients are averaged already; for replicas of a sharded model "
            "give it a mesh, init_mesh((2, 4), ('replica', 'shard'))"
        )
    original(self, module, *args, **kwargs)


# ---------------------------------------------------------------- state dicts of optimizers


def _optimizer_state_dict(
    original: Callable[..., dict[str, Any]], optimizer: Optimizer
) -> dict[str, Any]:
    return marked(optimizer, original(optimizer))


def _load_optimizer_state_dict(
    original: Callable[..., None], optimizer: Optimizer, state_dict: dict[str, Any]
) -> None:
    original(optimizer, fitting(optimizer, state_dict))


def marked(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Let a state dict in the optimizer's order tell that, and which shards it is of."""
    if all(known_group(param) is None for param in params_of(optimizer)):
        return state_dict
    return {**state_dict, PLACES: _places_in(optimizer)}


def _places_in(optimizer: Optimizer) -> Places:
    known = [known_shard(each) for each in params_of(optimizer) if known_group(each) is not None]
    return places_of(each for each in known if each is not None)


def fitting(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict by position in the order of the optimizer's parameters."""
    groups = state_dict.get("param_groups", ())
    known = [[known_shard(p) for p in group["params"]] for group in optimizer.param_groups]
    if [len(own) for own in known] != [len(group["params"]) for group in groups]:
        return state_dict  # torch tells
    refuse_other_places(state_dict.get(PLACES), _places_in(optimizer), "the optimizer's state dict")
    if not any(each is not None for own in known for each in own):
        return state_dict
    if PLACES not in state_dict:
        orders = [_order(own) for own in known]
        if None in orders:
            raise ValueError(_UNKNOWN_ORDER)
        pairs = zip(groups, orders, strict=True)
        groups = [{**each, "params": [each["params"][i] for i in o or ()]} for each, o in pairs]
    state_dict = {**state_dict, "param_groups": groups}
    if problems := list(_misfits(optimizer, state_dict)):
        raise ValueError("\n".join([*problems, _OTHER_ORDER]))
    return marked(optimizer, state_dict)


def _order(params: Sequence[FSDPParam | None]) -> list[int] | None:
    """Return the place in the file's order of each parameter of a group; None if it differs from
    the group's, but is not known of all."""
    known = [each for each in params if each is not None]
    places = [upstream_order[each] for each in known if each in upstream_order]
    if places == sorted(places):
        return list(range(len(params)))
    if len(places) < len(params):
        return None
    ranked = {place: i for i, place in enumerate(sorted(places))}
    return [ranked[place] for place in places]


def _misfits(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Iterator[str]:
    if not steps_elementwise(optimizer):  # whose state may have any shape
        return
    pairs = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    for index, (own, group) in enumerate(pairs):
        for place, (param, number) in enumerate(zip(own["params"], group["params"], strict=True)):
            for name, value in state_dict["state"].get(number, {}).items():
                is_wide = isinstance(value, Tensor) and value.shape not in ((), (0,), (1,))
                if is_wide and known_shard(param) is not None and value.shape != held_shape(param):
                    yield (
                        f"{name} of parameter {place} in group {index} has shape "
                        f"{tuple(value.shape)}, but the parameter {tuple(held_shape(param))}"
                    )


_OTHER_ORDER = (
    "The state dict is of other shards, or of parameters in another order (torch's optimizers know "
    "them by position). State of a job of torch_xla's FSDP is translated if the model's state dict "
    "of the same file is loaded just before; other state is loaded by names: by load_checkpoint, "
    "or load_optim_state_dict of what optim_state_dict has returned"
)
_UNKNOWN_ORDER = (
    "The order of the parameters in this state dict cannot be told: torch_xla's FSDP, from whose "
    "file the model was loaded, lists those of an outer unit first. Create the optimizer from "
    "model.parameters(), load the model's state dict and then the optimizer's"
)


# ---------------------------------------------------------------- conversions

# Ranks on CPU are threads, each of which has a context of its own.
_without_swaps: ContextVar[bool] = ContextVar("without_swaps", default=False)


@contextlib.contextmanager
def without_swaps() -> Iterator[None]:
    """Let conversions inside the block change the data of parameters, as torch does by default.

    ``torch.__future__.set_swap_module_params_on_conversion(True)`` asks for swaps of tensors
    instead, so that parameters stay the same objects. Shards do so anyway, and torch refuses to
    swap tensors to which there are weak references, as there are to every shard.
    """
    token = _without_swaps.set(True)
    try:
        yield
    finally:
        _without_swaps.reset(token)
