"""A module that runs as a unit and does not show in names. Base class of the wrappers.

Words: the *wrapped* module is the one that the user gave. Always true: ``named_modules``,
``named_children``, ``named_parameters``, ``state_dict`` and messages use the names that modules had
before they were wrapped, at any depth; attributes that the wrapper lacks are the wrapped module's.
How the unit is made, and what users do with it, is left to ``fully_sharded``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from xla_fsdp.names import HiddenChild, ParametersOfChild
from xla_fsdp.unit_host import (
    Attachment,
    UnitHost,
    attach,
    close_failed_passes,
    mark_state_dicts,
)

_INNER = "_fsdp_wrapped_module"
# Of transformers models; it calls the model itself, not its wrapper.
_KNOWN_FORWARD_METHODS = ("generate",)


class UnitModule(UnitHost, nn.Module):
    """``module`` with its forward run by ``unit``.

    Args:
        module: the wrapped module.
        attachment: with the unit that holds the module's parameters; it is the root of the units
            inside the module from now on.
    """

    def __init__(self, module: nn.Module, attachment: Attachment) -> None:
        super().__init__()
        self._forward_methods = {
            name for name in _KNOWN_FORWARD_METHODS if callable(getattr(module, name, None))
        }
        self._fsdp_wrapped_module = module
        self._parameters = ParametersOfChild(module)
        # Before names get their hidden child, which only nn.Module's own loading wants.
        attach(self, attachment)
        HiddenChild(_INNER).register_on(self)
        mark_state_dicts(self)

    @torch.compiler.disable(recursive=False)  # so that a call from dynamo arrives here
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, with its parameters gathered.

        Raises:
            RuntimeError: under ``torch.compile``.
        """
        return self._fsdp_run(self._fsdp_wrapped_module, args, kwargs)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As in ``nn.Module``; wrapper and wrapped module go by the same name."""
        close_failed_passes(self)
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

    @torch.compiler.disable(recursive=False)
    def _run_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._fsdp_run_alone(getattr(self._fsdp_wrapped_module, name), args, kwargs)

    def _fsdp_register_method(self, name: str) -> None:
        if not callable(getattr(self.module, name, None)):
            raise ValueError(
                f"{type(self.module).__name__} has no method {name!r} to register; give the name "
                f"of a method of the wrapped module"
            )
        self._forward_methods.add(name)
