"""Mend or refuse torch functions that would compute something wrong from shards without an error.

The first unit or tensor-parallel module of a process replaces functions of torch and torch_xla by
ones that are right for shards, or raise. A function that a script imported by name before that is
not guarded. What is saved is searched for shards: state dicts of models and optimizers, by their
marks, which files keep; values of ``fully_shard``'s, and copies of them; models and optimizers as
objects.

State dicts of optimizers know parameters by position. torch_xla's FSDP lists the parameters of an
outer unit before those of inner ones; here they come in the order of the model. So the state of a
job of torch_xla belongs to other parameters, unless the order is that of the model's file, which is
noted when that is loaded, until the first step. Nothing has changed when an error is raised.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad as torch_clip_grad
from torch.nn.utils import parametrize
from torch.optim.optimizer import Optimizer

from xla_fsdp.distributed.cpu_ranks import current_rank_thread
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
from xla_fsdp.fsdp.engine.thread import package_code
from xla_fsdp.optim.clip_grad import check_gradients, get_total_norm
from xla_fsdp.optim.optimizers import check_steps, steps_elementwise
from xla_fsdp.xla import ops

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
    ops.refuse_reduce_gradients_of(is_part)
    ops.before_gather_with_gradient(_warn_of_gather)
    ops.before_master_saves(_refuse_master_save)
    _guard_optimizer_state_dicts()
    _guard("clip_grad_norm_", _refuse_shards)
    _guard("get_total_norm", _count_all_ranks)
    _guard("clip_grads_with_norm_", _need_gradients_of_shards)
    _guard_saves()
    _guard_conversions()
    parametrize.register_parametrization = _of_full_parameters(parametrize.register_parametrization)
    parametrize.remove_parametrizations = _to_parameters(parametrize.remove_parametrizations)


def _warn_of_gather() -> None:
    warnings.warn(
        "torch_xla.core.functions.all_gather is differentiated: its backward returns this rank's "
        "slice of this rank's gradient, and leaves out those of the other ranks' losses. Write "
        "xla_fsdp.distributed.all_gather(x, dim), whose backward sums them",
        stacklevel=5,  # the caller of all_gather, which calls an autograd function
    )


def _guard(name: str, instead: Callable[[list[Tensor]], Callable[..., Any] | None]) -> None:
    """Let a function of ``torch.nn.utils``, under both names that it may have, first show
    ``instead`` its tensors; that may return what is to be called in its place."""
    original = getattr(torch.nn.utils, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        first, tensors = next(iter(bound.arguments.items()))
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        refuse_shown(given, f"torch.nn.utils.{name}")
        bound.arguments[first] = given
        return (instead(given) or original)(*bound.args, **bound.kwargs)

    setattr(torch.nn.utils, name, guarded)
    setattr(torch_clip_grad, name if hasattr(torch_clip_grad, name) else f"_{name}", guarded)


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


def _of_full_parameters(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(module: Any, tensor_name: str, *args: Any, **kwargs: Any) -> Any:
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

    return guarded


def _to_parameters(original: Callable[..., Any]) -> Callable[..., Any]:
    """PEFT puts parametrizations on in a forward and takes them off; torch then makes an unsharded
    tensor a buffer, as it is no nn.Parameter. It is to be the parameter that it was."""

    @functools.wraps(original)
    def removed(module: Any, tensor_name: str, *args: Any, **kwargs: Any) -> Any:
        known = getattr(module, "parametrizations", {})
        was_parameter = tensor_name in known and hasattr(known[tensor_name], "of_parameter")
        result = original(module, tensor_name, *args, **kwargs)
        if was_parameter and tensor_name in result._buffers:
            result._parameters[tensor_name] = result._buffers.pop(tensor_name)
        return result

    return removed


# ---------------------------------------------------------------- saves and loads

METADATA = "shard_metadata"
DEPTH, MOST = 4, 1000
"""How deep, and how far, what is saved is searched for shards: longer lists are data."""

_INSTEAD = (
    "Save on all ranks by xla_fsdp.save_checkpoint(folder, model, optimizer, step=step), or take "
    "the whole model by state = xla_fsdp.full_state_dict(model), which all ranks call, and save "
    "that on rank 0"
)


def _guard_saves() -> None:
    """Put the guards around functions that write state dicts, and around torch's that load them."""
    torch.save = _warned("torch.save", torch.save)
    for name in ("dump", "dumps"):
        setattr(pickle, name, _warned(f"pickle.{name}", getattr(pickle, name)))
    _warn_in_safetensors()
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


# ---------------------------------------------------------------- state dicts of optimizers

_translated: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""The last place of the order in which an optimizer has loaded state."""


class _Own(threading.local):
    order = False


_own = _Own()


@contextlib.contextmanager
def in_own_order() -> Iterator[None]:
    """State dicts that this rank loads in the block are in this package's order, and checked."""
    before, _own.order = _own.order, True
    try:
        yield
    finally:
        _own.order = before


def _guard_optimizer_state_dicts() -> None:
    """Let every optimizer's state dict tell which shards it is of from now on, and its
    ``load_state_dict`` check and translate."""
    read: Callable[..., dict[str, Any]] = Optimizer.state_dict
    load: Callable[..., None] = Optimizer.load_state_dict

    @functools.wraps(read)
    def state_dict(optimizer: Optimizer) -> dict[str, Any]:
        state, places = read(optimizer), _places_in(optimizer)
        return {**state, PLACES: places} if places else state

    @functools.wraps(load)
    def load_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        return load(optimizer, fitting(optimizer, state_dict))

    # Not hooks, which each optimizer would need: torch has none for all of them.
    Optimizer.state_dict = state_dict  # type: ignore[method-assign, assignment]
    Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign, assignment]


def _places_in(optimizer: Optimizer) -> Places:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    known = [known_shard(param) for param in params if known_group(param) is not None]
    return places_of(each for each in known if each is not None)


def fitting(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict by position in the order of the optimizer's parameters.

    Raises:
        ValueError: if it is of another rank's shards, the order cannot be told, or a tensor has
            another shape than its parameter.
    """
    live = [group["params"] for group in optimizer.param_groups]
    groups = state_dict.get("param_groups", ())
    if _own.order or [len(own) for own in live] != [len(g["params"]) for g in groups]:
        return state_dict  # of another number, torch tells
    refuse_other_places(state_dict.get(PLACES), _places_in(optimizer), "the optimizer's state dict")
    numbers = [list(group["params"]) for group in groups]
    known = [[known_shard(param) for param in own] for own in live]
    if not any(each is not None for own in known for each in own):
        return state_dict
    orders = [_order(own) for own in known]
    moved = any(order is None or order != sorted(order) for order in orders)
    if moved and not _is_own(optimizer, state_dict["state"]):
        last = max(upstream_order.get(each, 0) for own in known for each in own if each is not None)
        if _translated.get(optimizer) == last or None in orders:
            raise ValueError(_UNKNOWN_ORDER)
        numbers = [[own[i] for i in o or ()] for own, o in zip(numbers, orders, strict=True)]
        pairs = zip(groups, numbers, strict=True)
        state_dict = {**state_dict, "param_groups": [{**g, "params": n} for g, n in pairs]}
        _translated[optimizer] = last
    if problems := list(_misfits(optimizer, live, numbers, state_dict["state"])):
        raise ValueError("\n".join([*problems, _OTHER_ORDER]))
    return state_dict


def _order(params: Sequence[FSDPParam | None]) -> list[int] | None:
    """Return the place in the file's order of each parameter of a group.

    None if it differs from the group's, but is not known of all.
    """
    known = [each for each in params if each is not None]
    places = [upstream_order[each] for each in known if each in upstream_order]
    if places == sorted(places):
        return list(range(len(params)))
    if len(places) < len(params):
        return None
    ranked = {place: i for i, place in enumerate(sorted(places))}
    return [ranked[place] for place in places]


def _is_own(optimizer: Optimizer, state: Mapping[Any, Any]) -> bool:
    """Return whether a state dict holds the very tensors of the optimizer."""
    own = {id(v) for each in optimizer.state.values() for v in each.values()}
    return bool(own) and all(
        id(value) in own
        for each in state.values()
        for value in each.values()
        if isinstance(value, Tensor)
    )


def _misfits(
    optimizer: Optimizer,
    live: Sequence[Sequence[Tensor]],
    numbers: Sequence[Sequence[Any]],
    state: Mapping[Any, Mapping[str, Any]],
) -> Iterator[str]:
    if not steps_elementwise(optimizer):  # whose state may have any shape
        return
    for index, (own, group) in enumerate(zip(live, numbers, strict=True)):
        for place, (param, number) in enumerate(zip(own, group, strict=True)):
            for name, value in state.get(number, {}).items():
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
    "model.parameters(), load the model's state dict and then, once, the optimizer's"
)


# ---------------------------------------------------------------- conversions


class _Inside(threading.local):  # CPU ranks are threads, and the setting is the process's
    count = 0


_inside = _Inside()


@contextlib.contextmanager
def without_swaps() -> Iterator[None]:
    """Let conversions inside the block change the data of parameters, as torch does by default.

    ``torch.__future__.set_swap_module_params_on_conversion(True)`` asks for swaps of tensors
    instead, so that parameters stay the same objects. Shards do so anyway, and torch refuses to
    swap tensors to which there are weak references, as there are to every shard.
    """
    _inside.count += 1
    try:
        yield
    finally:
        _inside.count -= 1


def _guard_conversions() -> None:
    """Make torch's setting answer False inside of ``without_swaps``."""
    future = torch.__future__
    future.get_swap_module_params_on_conversion = _unless_inside(
        future.get_swap_module_params_on_conversion
    )


def _unless_inside(original: Callable[[], bool]) -> Callable[[], bool]:
    def get() -> bool:
        return original() and not _inside.count

    return get
