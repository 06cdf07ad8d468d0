"""Which modules and parameters are a unit's own.

Always true: what a unit inside has taken, and what the user asked to ignore, is in no other unit's
scope.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from xla_fsdp.distributed.shard_layout import join_name
from xla_fsdp.fsdp.engine.module_state import is_unit
from xla_fsdp.wrap import Ignored


class ManagedModules:
    """A module and what is below it, except for units and ignored modules.

    Args:
        parts: the modules of a new unit; usually one.
        ignored: what to leave out.
    """

    def __init__(self, parts: Sequence[nn.Module], ignored: Ignored) -> None:
        self.parts = tuple(parts)
        self.ignored = ignored

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Dotted names and modules, each part (``""``) before what is in it; each module once."""
        seen: set[int] = set()
        for part in self.parts:
            for name, module in self._below(part, ""):
                if id(module) not in seen:
                    seen.add(id(module))
                    yield name, module

    def parameters(self) -> Iterator[tuple[int, str, nn.Module, str, nn.Parameter]]:
        """Every name of a parameter: the number of the part and the name in it, its module, its
        attribute and itself. A module that has several names gives its parameters several, too."""
        for number, part in enumerate(self.parts):
            for prefix, owner in self._below(part, ""):
                for attribute, param in owner._parameters.items():
                    if param is not None and not self.ignored.has_param(param):
                        yield number, join_name(prefix, attribute), owner, attribute, param

    def _below(self, module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if is_unit(module) or self.ignored.has_module(module):
            return
        yield name, module
        for child_name, child in module._modules.items():
            if child is not None:
                yield from self._below(child, join_name(name, child_name))
