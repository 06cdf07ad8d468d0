"""Which modules and parameters are a unit's own.

Always true: what a unit inside has taken, and what the user asked to ignore, is in no other unit's
scope.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from xla_fsdp.ignored import Ignored
from xla_fsdp.names import join_name
from xla_fsdp.unit_module import is_unit


class Scope:
    """A module and what is below it, except for units and ignored modules.

    Args:
        root: the module of a new unit.
        ignored: what to leave out.
    """

    def __init__(self, root: nn.Module, ignored: Ignored) -> None:
        self.root = root
        self.ignored = ignored

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Dotted names and modules, the root (``""``) first; each module once."""
        seen: set[int] = set()
        for name, module in self._below(self.root, ""):
            if id(module) not in seen:
                seen.add(id(module))
                yield name, module

    def parameters(self) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
        """Every name of a parameter, with its module, its attribute and itself. A module that has
        several names gives its parameters several, too."""
        for prefix, owner in self._below(self.root, ""):
            for attribute, param in owner._parameters.items():
                if param is not None and not self.ignored.has_param(param):
                    yield join_name(prefix, attribute), owner, attribute, param

    def _below(self, module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if is_unit(module) or self.ignored.has_module(module):
            return
        yield name, module
        for child_name, child in module._modules.items():
            if child is not None:
                yield from self._below(child, join_name(name, child_name))
