"""Dotted names of parameters, and how a wrapper stays out of them.

Words: a *fully qualified name* is the path of attributes from a root module; a *hidden child* is
the child of a wrapper module that goes by the wrapper's own name.
Always true: state dicts, and what loading reports, show no hidden child; a wrapper knows the names
of its child's parameters as its own.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView
from functools import partial
from typing import Any

from torch import nn


def join_name(prefix: str, name: str) -> str:
    """``name`` below ``prefix``, which is empty for a root."""
    return f"{prefix}.{name}" if prefix else name


class HiddenChild:
    """Takes a child's name out of its parent's state dicts, and puts it in for loading.

    nn.Module's own (de)serialization walks registered children, so the name is in its keys.

    Args:
        child: attribute name of the child.
    """

    def __init__(self, child: str) -> None:
        self._inner = f"{child}."
        self._errors: list[str] = []  # of the load that is going on

    def register_on(self, parent: nn.Module) -> None:
        """Register the hooks that do it."""
        # A partial because torch sets an attribute on this hook, which a method does not take.
        parent.register_state_dict_post_hook(partial(self._take_out))
        parent.register_load_state_dict_pre_hook(self._put_in)
        parent.register_load_state_dict_post_hook(self._take_out_of_report)

    def _take_out(
        self, parent: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        inner = prefix + self._inner
        for key in [key for key in state if key.startswith(inner)]:
            state[prefix + key.removeprefix(inner)] = state.pop(key)

    def _put_in(
        self,
        parent: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        self._errors = errors
        for key in [key for key in state if key.startswith(prefix)]:
            state[prefix + self._inner + key.removeprefix(prefix)] = state.pop(key)

    def _take_out_of_report(self, parent: nn.Module, report: Any) -> None:
        for messages in (report.missing_keys, report.unexpected_keys, self._errors):
            messages[:] = [message.replace(self._inner, "") for message in messages]
        self._errors = []


class ParametersOfChild(dict[str, Any]):
    """The parameter registry of a wrapper: it holds nothing, and knows its child's by name.

    Code that walks a model by ``named_children`` (the weight-decay groups of transformers) asks
    every module's registry for its names. ``items`` and ``values`` are empty, as nn.Module, which
    asks for those, visits the child as well. What is set here is set on the child.

    Args:
        child: the hidden child.
    """

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self._child = child

    def __iter__(self) -> Iterator[str]:
        return iter(self._child._parameters)

    def __len__(self) -> int:
        return len(self._child._parameters)

    def __contains__(self, name: object) -> bool:
        return name in self._child._parameters

    def __getitem__(self, name: str) -> Any:
        return self._child._parameters[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._child._parameters[name] = value

    def __delitem__(self, name: str) -> None:
        del self._child._parameters[name]

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """The child's parameter names."""
        return self._child._parameters.keys()
