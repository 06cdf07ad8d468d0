"""A module that runs as a unit and does not show in names. Base class of the wrappers.

Words: the *wrapped* module is the one that the user gave. Always true: ``named_modules``,
``named_children``, ``named_parameters``, ``state_dict`` and messages use the names that modules had
before they were wrapped, at any depth; attributes that the wrapper lacks are the wrapped module's.
How the unit is made, and what users do with it, is left to ``fully_sharded``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from xla_fsdp.names import HiddenChild, ParametersOfChild
from xla_fsdp.state_loading import NamedShard, StateLoading, mark_shards
from xla_fsdp.unit import Unit, UnitState

_INNER = "_fsdp_wrapped_module"
# Of transformers models; it calls the model itself, not its wrapper.
_KNOWN_FORWARD_METHODS = ("generate",)


class UnitModule(nn.Module):
    """``module`` with its forward run by ``unit``.

    Args:
        module: the wrapped module.
        unit: holds the module's parameters; the root of the units inside the module from now on.
        cast_buffers: original dtype, by name, of the buffers that were cast.
    """

    def __init__(self, module: nn.Module, unit: Unit, cast_buffers: dict[str, torch.dtype]) -> None:
        super().__init__()
        self._cast_buffers = cast_buffers
        self._forward_methods = {
            name for name in _KNOWN_FORWARD_METHODS if callable(getattr(module, name, None))
        }
        self._unit = unit
        self._fsdp_wrapped_module = module
        self._parameters = ParametersOfChild(module)
        for _, inner in named_units(module):
            inner._unit.join(unit)
        for register in (self.register_state_dict_pre_hook, self.register_load_state_dict_pre_hook):
            register(_close_failed_passes)
        self._state_loading = StateLoading()
        # Before names get their hidden child, which only nn.Module's own loading wants.
        self.register_load_state_dict_pre_hook(_translate)
        self.register_load_state_dict_post_hook(_finish_loading)
        HiddenChild(_INNER).register_on(self)
        # A partial because torch sets an attribute on this hook.
        self.register_state_dict_post_hook(partial(_mark_shards))

    @torch.compiler.disable(recursive=False)  # so that a call from dynamo arrives here
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, with its parameters gathered.

        Raises:
            RuntimeError: under ``torch.compile``.
        """
        _refuse_dynamo()
        return self._unit.run(self._fsdp_wrapped_module, args, kwargs)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As in ``nn.Module``; wrapper and wrapped module go by the same name."""
        _close_failed_passes(self)
        memo = set() if memo is None else memo
        if remove_duplicate and self in memo:
            return
        memo.add(self)
        yield prefix, self
        yield from self._fsdp_wrapped_module.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The wrapped module's children, by their own names."""
        return self._fsdp_wrapped_module.named_children()

    def children(self) -> Iterator[nn.Module]:
        """The wrapped module, which ``apply``, ``train`` and ``to`` must not miss."""
        yield self._fsdp_wrapped_module

    def __getattr__(self, name: str) -> Any:
        """Attributes that the wrapper lacks are the wrapped module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == _INNER:
                raise
            if name in self.__dict__["_forward_methods"]:
                return partial(self._run_method, name)
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        """Indexing goes to the wrapped module (``nn.Sequential``)."""
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    def __len__(self) -> int:
        """Length of the wrapped module (``nn.Sequential``)."""
        return len(self._fsdp_wrapped_module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        """True, as for any module; ``__len__`` would otherwise decide, and fail for most."""
        return True

    def _named_shards(self) -> Iterator[NamedShard]:
        for name, inner in named_units(self, remove_duplicate=False):
            for param in inner._unit.group.params:
                yield NamedShard(name, param, inner._unit.group)

    def _loading_inside(self) -> Iterator[StateLoading]:
        for _, inner in named_units(self, remove_duplicate=False):
            if inner is not self:
                yield inner._state_loading

    @torch.compiler.disable(recursive=False)
    def _run_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        _refuse_dynamo()
        return self._unit.run(getattr(self._fsdp_wrapped_module, name), args, kwargs)


def is_unit(module: nn.Module) -> TypeGuard[UnitModule]:
    """Whether ``module`` is wrapped."""
    return isinstance(module, UnitModule)


def named_units(
    module: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, UnitModule]]:
    """The units in ``module``, itself included, outer ones first, by their original names."""
    for name, inner in module.named_modules(remove_duplicate=remove_duplicate):
        if is_unit(inner):
            yield name, inner


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.method_name(...)`` run like the module's forward: with its parameters gathered,
    and with gradients. For modules that are used by other methods than ``forward`` (``encode``);
    ``generate`` is registered from the start. Does nothing if ``module`` is not wrapped, as in
    torch.

    Raises:
        ValueError: if the wrapped module has no such method.
    """
    if not is_unit(module):
        return
    if not callable(getattr(module.module, method_name, None)):
        raise ValueError(
            f"{type(module.module).__name__} has no method {method_name!r} to register; give the "
            f"name of a method of the wrapped module"
        )
    module._forward_methods.add(method_name)


def _refuse_dynamo() -> None:
    if get_eval_frame_callback() is not None:
        raise RuntimeError(
            "torch.compile was used on a model with FSDP units. It would cut the step into many "
            "programs, one between each two units, while XLA compiles the whole step anyway. Leave "
            "it out, or compile the function of one step: torch_xla.compile(step)"
        )


def _translate(wrapper: UnitModule, *load: Any) -> None:
    if wrapper._unit.state is UnitState.SHARDED:  # else it holds full parameters, by full names
        shards = list(wrapper._named_shards())
        wrapper._state_loading.translate(shards, wrapper._loading_inside(), *load)


def _finish_loading(wrapper: UnitModule, report: Any) -> None:
    for loading in (wrapper._state_loading, *wrapper._loading_inside()):
        loading.finish()


def _mark_shards(wrapper: UnitModule, state: Any, prefix: str, local_metadata: Any) -> None:
    if wrapper._unit.state is UnitState.SHARDED:
        mark_shards(local_metadata)


def _close_failed_passes(wrapper: UnitModule, *_: Any) -> None:
    """Whoever looks at parameters must see shards, also after a backward pass that raised."""
    wrapper._unit.backward.abandon()
