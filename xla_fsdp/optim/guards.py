"""Mend or refuse torch functions that would compute something wrong from shards without an error.

The first unit or tensor-parallel module of a process replaces functions of torch and torch_xla by
ones that are right for shards, or raise. A function that a script imported by name before that is
not guarded. What is saved is searched for shards: state dicts of models and optimizers, by their
marks, which files keep; values of ``fully_shard``'s, and copies of them; models and optimizers as
objects.
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
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from xla_fsdp.distributed.cpu_ranks import current_rank_thread
from xla_fsdp.fsdp.engine.load_hooks import MARK, PLACES, Form
from xla_fsdp.fsdp.engine.module_state import units_in
from xla_fsdp.fsdp.engine.param import (
    FSDPParam,
    held_shape,
    known_group,
    known_shard,
    owners_of_grads,
    refuse_shown,
    slices_without_grads,
)
from xla_fsdp.fsdp.engine.shard_tensor import SavedShard, ShardView, is_part, is_sharded
from xla_fsdp.fsdp.engine.thread import begin_step, end_step, package_code
from xla_fsdp.optim.clip_grad import check_gradients, get_total_norm
from xla_fsdp.optim.optimizers import (
    StepWatch,
    acts_elementwise,
    forget_order,
    guard_state_dicts,
    make_missing_states,
    needs_closure,
    params_of,
    steps_elementwise,
)
from xla_fsdp.xla import ops

# Process-wide, not by rank, as are the functions that are replaced.
_installing = threading.Lock()
_num_checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""How many parameters of an optimizer were checked before its first step, or after a change."""


def install() -> None:
    """Install the guards once; check optimizers again, as a new unit may have replaced their
    parameters."""
    with _installing:
        _num_checked.clear()
        _install_once()


@functools.cache
def _install_once() -> None:
    ops.refuse_reduce_gradients_of(is_part)
    ops.before_gather_with_gradient(_warn_of_gather)
    ops.before_master_saves(_refuse_master_save)
    make_missing_states()
    register_optimizer_step_pre_hook(StepWatch(_before_step))
    register_optimizer_step_post_hook(StepWatch(lambda optimizer: end_step()))
    guard_state_dicts()
    _guard("clip_grad_norm_", _refuse_shards)
    _guard("get_total_norm", _count_all_ranks)
    _guard("clip_grads_with_norm_", _need_gradients_of_shards)
    _guard_saves()
    _guard_conversions()
    parametrize.register_parametrization = _of_full_parameters(parametrize.register_parametrization)
    parametrize.remove_parametrizations = _to_parameters(parametrize.remove_parametrizations)


def _before_step(optimizer: Optimizer) -> None:
    params = params_of(optimizer)
    if _num_checked.get(optimizer) != len(params):
        _refuse_replaced(optimizer, params)
        _refuse_empty_groups(optimizer, params)
        _warn_unless_elementwise(optimizer, params)
        _num_checked[optimizer] = len(params)
    _refuse_partial_stacks(optimizer, params)
    forget_order(params)
    begin_step()


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


def _refuse_replaced(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    pairs = [(param, known_shard(param)) for param in params]
    for known in [known for param, known in pairs if known and known.leaf is not param]:
        now = "shard" if known.slots.part is None else "stack of shards of scanned blocks"
        raise ValueError(
            f"{type(optimizer).__name__} holds {_names(known)} as it was before wrapping; FSDP "
            f"trains the {now} that replaced it, which this optimizer would never change. Create "
            f"the optimizer after wrapping, from model.parameters()"
        )


def _refuse_partial_stacks(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    """Raise RuntimeError if some blocks of a stack have no gradient, and others have."""
    for stack in params:
        if not getattr(stack, "is_stack", False) or stack.grad is None:
            continue
        if missing := slices_without_grads(stack, held_shape(stack)[0]):
            known = known_shard(stack)
            name = "a stack" if known is None else f"the stack of {_names(known)}"
            raise RuntimeError(
                f"blocks {', '.join(map(str, missing))} have no gradient in {name}, and others "
                f"have: backward has not used them (layers that are dropped, detached, run "
                f"without gradients, or never called). A stack is stepped as one, so "
                f"{type(optimizer).__name__} would decay and move these, too. Give each block "
                f'parameters of its own: parallelize(..., "plain"), Recipe(stacked=False), or '
                f"scan_layers without stacked"
            )


def _refuse_empty_groups(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    # A group chosen by name, as for weight decay, finds no parameter among flat shards.
    empty = [i for i, group in enumerate(optimizer.param_groups) if not group["params"]]
    known = map(known_shard, params if empty else ())
    flat = next((param for param in known if param is not None and param.is_flat), None)
    if flat is not None:
        names = ", ".join(original.names[0] for original in flat.originals)
        raise ValueError(
            f"group {empty[0]} of {type(optimizer).__name__} is empty, and {flat.key} joins "
            f"{names}: with flatten_parameters=True an optimizer only sees whole units, so its "
            f"groups cannot tell their parameters apart. Set flatten_parameters=False to have "
            f"groups by parameter, or make one group"
        )


def _warn_unless_elementwise(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    # An elementwise optimizer steps a shard, or a stack, as it would step the whole parameter.
    if getattr(optimizer, "steps_whole_parameters", False) or steps_elementwise(optimizer):
        return
    parts = [param for param in params if not _is_whole(param)]
    if parts and not acts_elementwise(optimizer):
        name = type(optimizer).__name__
        stacks = [param for param in parts if getattr(param, "is_stack", False)]
        blocks = held_shape(stacks[0])[0] if stacks else 0
        given = f"stacks, each of one parameter of {blocks} blocks" if stacks else "shards"
        by = (
            f"Leave the model unsharded, and step it by xla_fsdp.optim.ZeroRedundancyOptimizer("
            f"params, {name}, ...), which takes a closure,"
            if needs_closure(optimizer)
            else f"Step these by xla_fsdp.optim.WholeParameterOptimizer(params, {name}, ...),"
        )
        warnings.warn(
            f"{name} is not known to treat every element of a parameter by itself, and was given "
            f"{given}: its steps may differ from those of whole parameters. {by} or say by a "
            f"static method is_elementwise(options) of its class that they do not",
            stacklevel=5,
        )


def _is_whole(param: Tensor) -> bool:
    """Return whether ``param`` is a parameter of the original model, as it was there."""
    if getattr(param, "is_stack", False) or is_part(param):
        return False
    known = known_shard(param)
    return known is None or [held_shape(param)] == [each.whole_shape for each in known.originals]


def _names(param: FSDPParam) -> str:
    # For a flat shard it is not known which of its originals the optimizer holds.
    names = [original.names[0] for original in param.originals]
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


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
