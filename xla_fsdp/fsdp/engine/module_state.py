"""FSDP modules: the state attached to each, functions that find them, and state-dict hooks.

An FSDP module runs as a unit, or as one of several modules that share a unit. It is a wrapper, or a
user's own module whose class ``fully_shard`` has changed.

Invariants: ``load_state_dict`` of FSDP modules takes shards as well as unsharded tensors. State
dicts hold shards, also after a backward pass that raised.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from xla_fsdp.distributed.collectives import Communication
from xla_fsdp.distributed.higher_order import in_transform
from xla_fsdp.fsdp.engine.deferred import take_memory
from xla_fsdp.fsdp.engine.load_hooks import MARK, PLACES, Form, places_of, translate
from xla_fsdp.fsdp.engine.param import drop_names
from xla_fsdp.fsdp.engine.param_group import NamedShard
from xla_fsdp.fsdp.engine.stacked_params import put_stacked_shards
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.engine.thread import package_code
from xla_fsdp.fsdp.engine.transitions import UnitState


class ForwardOverride(Protocol):
    """Replaces a module's forward: by one loop over several blocks, by chunks of a head."""

    def run(self, unit: FSDPState, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the result of ``forward``; called in place of ``unit.run``."""
        ...


@dataclass
class ModuleState:
    """The state attached to an FSDP module."""

    unit: FSDPState  # runs the module's forward
    communication: Communication  # among the ranks that share the unit's parameters
    part: int = 0  # number of the module among those of the unit
    # Original dtype, by name, of the buffers that were cast for good.
    cast_buffers: Mapping[str, torch.dtype] = field(default_factory=dict)
    # The error list, which torch passes to all modules of a load, of that for which an outer module
    # has converted the state dict.
    loaded_in: list[str] | None = None
    forward_override: ForwardOverride | None = None  # runs the forward in place of the unit
    forward_buffers: CastBuffers | None = None

    def with_buffers(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward`` as it runs in the unit: with buffers in the buffer dtype."""
        buffers = self.forward_buffers
        return forward if buffers is None else partial(buffers.run, forward)


class FSDPModuleBase(nn.Module):
    """Base class of FSDP modules, mixed into a module's class."""

    _fsdp_module_state: ModuleState
    _fsdp_is_wrapper = False  # True for a module around the user's

    @property
    def _fsdp_unit(self) -> FSDPState:
        return self._fsdp_module_state.unit

    def _fsdp_run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        forward_override = self._fsdp_module_state.forward_override
        if forward_override is not None and not in_transform():  # they know no loops
            refuse_dynamo()
            with package_code():
                forward = self._fsdp_module_state.with_buffers(forward)
                return forward_override.run(self._fsdp_unit, forward, args, kwargs)
        return self._fsdp_run_alone(forward, args, kwargs)

    def _fsdp_run_alone(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``method`` without the ``ForwardOverride``, which only replaces ``forward``."""
        refuse_dynamo()
        state = self._fsdp_module_state
        return state.unit.run(state.with_buffers(method), args, kwargs, part=state.part)

    def _fsdp_units(self) -> list[FSDPState]:
        return units_in(self)

    def _fsdp_named_shards(self, *, remove_duplicate: bool = True) -> Iterator[NamedShard]:
        return named_shards(self, remove_duplicate=remove_duplicate)

    def _fsdp_register_method(self, name: str) -> None:
        raise NotImplementedError


def attach(module: Any, attachment: ModuleState) -> None:
    """Attach the state to ``module``, an ``FSDPModuleBase``; units inside join its context.

    Register hooks that change names in state dicts after this call.
    """
    module._fsdp_module_state = attachment
    for name, inner in named_fsdp_modules(module):
        if inner._fsdp_unit is not attachment.unit:
            inner._fsdp_unit.join(attachment.unit)
            if not inner._fsdp_module_state.part:  # the first of several modules
                inner._fsdp_unit.log.unit = name
    module.register_state_dict_pre_hook(_show_shards)
    module.register_load_state_dict_pre_hook(_translate)
    module.register_load_state_dict_post_hook(_finish_loading)


def mark_state_dicts(module: nn.Module) -> None:
    """Let state dicts of ``module`` hold shards, and mark them so. Call this after registering
    hooks that change names."""
    # A partial because torch sets an attribute on this hook.
    module.register_state_dict_post_hook(partial(_mark_shards))


def is_fsdp_module(module: nn.Module) -> TypeGuard[FSDPModuleBase]:
    """Return whether ``module`` runs as a unit, or as a part of one."""
    return isinstance(module, FSDPModuleBase)


def is_wrapper(module: nn.Module) -> bool:
    """Return whether ``module`` is an FSDP wrapper, not a module of the user."""
    return isinstance(module, FSDPModuleBase) and module._fsdp_is_wrapper


def named_fsdp_modules(
    module: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, FSDPModuleBase]]:
    """Yield the FSDP modules in ``module``, itself included, outer ones first, with their names."""
    for name, inner in list(module.named_modules(remove_duplicate=remove_duplicate)):
        if isinstance(inner, FSDPModuleBase):
            yield name, inner


def units_in(module: nn.Module) -> list[FSDPState]:
    """Return the units in ``module``, each once, outer ones first."""
    return list(dict.fromkeys(inner._fsdp_unit for _, inner in named_fsdp_modules(module)))


def outermost_units(module: nn.Module) -> list[FSDPState]:
    """Return the units in ``module`` that are inside no other unit, each once."""
    if is_fsdp_module(module):
        return [module._fsdp_unit]
    inside = (unit for child in module.children() for unit in outermost_units(child))
    return list(dict.fromkeys(inside))


def reshard_units(module: nn.Module) -> None:
    """Reshard all units in ``module`` that hold unsharded parameters after ``unshard``, or after
    backward without ``reshard_after_backward``; raise RuntimeError if others are in use."""
    for unit in units_in(module):
        unit.require_shards()


def named_shards(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[NamedShard]:
    """Yield the sharded parameters in ``module``, those of outer units first. Unless
    ``remove_duplicate``, names include every name of a module that has several."""
    for unit, prefixes in _units_with_names(module, remove_duplicate=remove_duplicate):
        for param in unit.group.params:
            shard = NamedShard(prefixes, param)
            if all(map(shard.names_of, param.originals)):  # each has a name in the model
                yield shard


def _units_with_names(
    module: nn.Module, *, remove_duplicate: bool
) -> list[tuple[FSDPState, tuple[list[str], ...]]]:
    """Return every unit with the names of its modules in ``module``, by part."""
    found: list[tuple[FSDPState, tuple[list[str], ...]]] = []
    several: dict[FSDPState, tuple[list[str], ...]] = {}
    for name, inner in named_fsdp_modules(module, remove_duplicate=remove_duplicate):
        unit = inner._fsdp_unit
        if unit.parts == 1:
            found.append((unit, ([name],)))
            continue
        if unit not in several:
            several[unit] = tuple([] for _ in range(unit.parts))
            found.append((unit, several[unit]))
        several[unit][inner._fsdp_module_state.part].append(name)
    return found


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.method_name(...)`` run like the module's forward: with unsharded parameters, and
    with gradients. For methods such as ``encode`` that compute without ``forward``; ``generate``
    needs no registration. Does nothing if ``module`` is not sharded, as in torch.

    Raises:
        ValueError: if the module has no such method.
    """
    if not is_fsdp_module(module):
        return
    if not callable(getattr(module, method_name, None)):
        own: Any = module
        kind = type(own.module) if is_wrapper(module) else own._fsdp_original
        raise ValueError(
            f"{kind.__name__} has no method {method_name!r} to register; give the name of a method "
            f"of the sharded module"
        )
    module._fsdp_register_method(method_name)


def refuse_dynamo() -> None:
    """Raise RuntimeError under ``torch.compile``."""
    if get_eval_frame_callback() is not None:
        raise RuntimeError(
            "torch.compile was used on a model with FSDP units. It would cut the step into many "
            "programs, one between each two units, while XLA compiles the whole step anyway. Leave "
            "it out, or compile the function of one step: torch_xla.compile(step)"
        )


# ---------------------------------------------------------------- state dicts


def _show_shards(module: Any, *_: Any) -> None:
    unit = module._fsdp_unit
    unit.schedule.cleanup_failed_passes()
    unit.reshard()
    for param in unit.group.params:
        param.finalize()


def _translate(module: Any, *load: Any) -> None:
    _show_shards(module)
    attached = module._fsdp_module_state
    # While it is not sharded the module loads unsharded tensors.
    if attached.unit.state is UnitState.SHARDED and attached.loaded_in is not load[-1]:
        translate(list(named_shards(module, remove_duplicate=False)), *load)
        for inner in _inside(module):
            inner._fsdp_module_state.loaded_in = load[-1]


def _inside(module: nn.Module) -> list[FSDPModuleBase]:
    found = dict.fromkeys(inner for _, inner in named_fsdp_modules(module))
    return [inner for inner in found if inner is not module]


def _finish_loading(module: nn.Module, report: Any) -> None:
    for inner in _inside(module):
        inner._fsdp_module_state.loaded_in = None
    for unit in units_in(module):
        for param in unit.group.params:
            # On the meta device before load_state_dict(assign=True).
            if not param.is_flat and param.slots.shard.is_meta:
                take_memory(param, has_values=True)


@package_code()
def _mark_shards(module: Any, state: Any, prefix: str, local_metadata: Any) -> None:
    unit = module._fsdp_unit
    drop_names(state, prefix)
    if unit.state is UnitState.SHARDED:
        put_stacked_shards(unit.group.params, state, prefix)
        places = places_of(shard.param for shard in named_shards(module))
        local_metadata.update({MARK: Form.SHARDS.value, PLACES: places})


# ---------------------------------------------------------------- buffers in another dtype


class CastBuffers:
    """Casts the floating-point buffers of ``modules`` for a forward. Outside of it modules hold
    buffers of their own dtype and, unless a forward changes them, value."""

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._dtype = dtype

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``forward(*args, **kwargs)``, which sees the buffers in ``dtype``. One that it
        changes or assigns is stored afterwards, in its own dtype."""
        shown = self._show()
        try:
            return forward(*args, **kwargs)
        finally:
            _put_back(shown)

    def _show(self) -> list[tuple[nn.Module, str, Tensor, Tensor, int]]:
        """Cast; return module, name, own buffer, and cast one with its version."""
        shown = []
        casts: dict[int, Tensor] = {}  # a buffer of two modules is one in the forward, too
        for module in [module for each in self._modules if (module := each()) is not None]:
            for name, own in list(module._buffers.items()):
                # Empty ones of a unit that calls itself: it has cast them already.
                if own is None or not own.is_floating_point() or own.dtype == self._dtype:
                    continue
                if id(own) not in casts:
                    with torch.inference_mode(False):  # such a tensor counts no changes
                        casts[id(own)] = own.to(self._dtype)
                lent = casts[id(own)]
                module._buffers[name] = lent
                shown.append((module, name, own, lent, lent._version))
        return shown


@torch.no_grad()
def _put_back(shown: Iterable[tuple[nn.Module, str, Tensor, Tensor, int]]) -> None:
    for module, name, own, lent, version in shown:
        now = module._buffers.get(name)
        if now is lent:
            if lent._version != version:
                own.copy_(lent)
            module._buffers[name] = own
        elif now is not None:  # assigned in the forward
            module._buffers[name] = now.to(own.dtype)
