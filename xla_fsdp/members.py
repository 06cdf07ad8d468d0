"""The original parameters of a unit: their names and shapes, and the attributes that hold them.

Words: a *member* is one original parameter; an *owner* is a module attribute that holds it, and a
tied member has several.
Always true: no module is kept alive by what is said of it here.
What an owner is to hold at which time is decided by ``places``.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp.tensor_placement import TensorPlacement


class Owner:
    """One place in a module tree that holds a parameter.

    The module is not kept alive: it may itself be what holds the unit that owns this.

    Args:
        module: holds it.
        attribute: its name there.
    """

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self._module = weakref.ref(module)
        self.attribute = attribute

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Owner) and self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled with the module."""
        return Owner, (self._module(), self.attribute)

    @property
    def _key(self) -> tuple[int, str]:
        return id(self._module()), self.attribute

    @property
    def module(self) -> nn.Module:
        """The module; an empty one once it is gone, when only a backward pass is left to do."""
        return self._module() or nn.Module()

    def point_at(self, tensor: Tensor) -> None:
        """Make the module's attribute this tensor.

        nn.Module.__setattr__ refuses tensors that are not leaf parameters, hence the registry.
        """
        module = self.module
        module._parameters[self.attribute] = tensor  # type: ignore[assignment]
        _refresh_rnn_weights(module)

    def remove(self) -> None:
        """Take the attribute off the module."""
        module = self.module
        module._parameters.pop(self.attribute, None)
        _refresh_rnn_weights(module)

    def holds(self, tensor: Tensor | None) -> bool:
        """Whether the attribute is this tensor; so it is where the module is gone."""
        module = self._module()
        return module is None or module._parameters.get(self.attribute) is tensor


@dataclass(frozen=True)
class Member:
    """An original parameter: its names (first the canonical one, then ties) in the unit.

    ``parts`` are the numbers of the unit's modules in which the names are; none means the first.
    Where tensor parallelism has cut the plain model's parameter, ``placement`` says how; the shape
    is that of the local one.
    """

    names: tuple[str, ...]
    shape: torch.Size
    owners: tuple[Owner, ...]
    parts: tuple[int, ...] = ()
    placement: TensorPlacement | None = None

    @property
    def whole_shape(self) -> torch.Size:
        """Shape of the plain model's parameter."""
        return self.shape if self.placement is None else torch.Size(self.placement.shape)

    @property
    def is_cut(self) -> bool:
        """Whether ranks along a tensor-parallel axis hold different parts."""
        return self.placement is not None and self.placement.dim is not None


def _refresh_rnn_weights(module: nn.Module) -> None:
    """nn.RNN and its kin compute with a list of their parameters that they keep on the side."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [module._parameters.get(name) for name in module._flat_weights_names]
