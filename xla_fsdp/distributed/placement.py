"""How tensor parallelism has divided parameters: a *local* one is a rank's part of a *global* one.

Invariants: a module stores the placements of its own parameters by their names, so they survive
``to``, ``to_empty``, copies and FSDP, which replace the tensors. A parameter without placement is
the same on all ranks. All slices have the same size, as every rank runs the same program.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Size, Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from xla_fsdp.distributed.mesh import EXPERT, Mesh

PLACEMENTS = "_tensor_placements"
"""Attribute of a module: a dict of the placements of its own parameters, by name."""

# Weak keys. All threads use it, but ranks share no tensors.
_of_tensor: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

# Local parameter by global parameter, so that modules that share one also share the other, even if
# they are parallelized in different calls.
_local: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class TensorPlacement:
    """How the ranks along one axis share a parameter.

    Args:
        mesh: a mesh of that one axis.
        dim: the dim of the global parameter that is cut into equal slices, in the order of the
            ranks; None if the parameter is replicated.
        shape: shape of the global parameter.
    """

    mesh: Mesh
    dim: int | None
    shape: tuple[int, ...]

    @property
    def axis(self) -> str:
        """Name of the axis."""
        return self.mesh.axis_names[0]

    @property
    def parts(self) -> int:
        """Number of slices of the parameter; 1 if it is replicated."""
        return 1 if self.dim is None else self.mesh.size()

    @property
    def local_shape(self) -> Size:
        """Shape of the local parameter."""
        return local_shape(self.shape, self.dim, self.parts)

    @property
    def is_of_experts(self) -> bool:
        """Whether ranks along an axis of experts hold different parts of the parameter."""
        return self.axis == EXPERT and self.parts > 1

    def is_same_on(self, ranks: Iterable[int]) -> bool:
        """Return whether these ranks hold the same part."""
        return len({self.mesh.local_rank(rank) for rank in ranks}) <= 1

    def slice_of(self, value: Tensor, local_rank: int) -> Tensor:
        """Return the local part of a tensor of the global parameter's shape.

        Args:
            value: the global parameter, its gradient or optimizer state.
            local_rank: index along the axis of the rank that holds the part.
        """
        if self.dim is None:
            return value
        size = self.shape[self.dim] // self.parts
        return value.narrow(self.dim, local_rank * size, size)


def local_shape(shape: Iterable[int], dim: int | None, parts: int) -> Size:
    """Return the shape of one of ``parts`` equal slices along ``dim``; ``shape`` for None."""
    sizes = list(shape)
    if dim is not None:
        sizes[dim] //= parts
    return Size(sizes)


def set_placement(module: nn.Module, attribute: str, placement: TensorPlacement) -> None:
    """Store the placement of the parameter of that name in ``module``."""
    vars(module).setdefault(PLACEMENTS, {})[attribute] = placement
    remember_placements(module)


def placement_in(module: nn.Module, attribute: str) -> TensorPlacement | None:
    """Return the placement of a parameter of ``module``, if it has one."""
    placement: TensorPlacement | None = vars(module).get(PLACEMENTS, {}).get(attribute)
    return placement


def remember_placements(module: nn.Module) -> None:
    """Let ``known_placement`` find the tensors that are now the module's parameters."""
    for attribute, placement in vars(module).get(PLACEMENTS, {}).items():
        param = module._parameters.get(attribute)
        if isinstance(param, nn.Parameter):
            _of_tensor[param] = placement


def known_placement(param: Tensor) -> TensorPlacement | None:
    """Return the placement of a parameter that FSDP has not sharded, None without one."""
    return _of_tensor.get(param)


def remember_local(param: Tensor, local: Tensor) -> None:
    """Let ``local_of`` find the local parameter of a global one."""
    _local[param] = local


def local_of(param: Tensor) -> nn.Parameter | None:
    """Return the local parameter that has replaced a global one, None if none has."""
    return _local.get(param)


def current(param: Tensor) -> Tensor:
    """Return the local parameter that has replaced ``param``, or that itself."""
    return _local.get(param, param)


def placed_params() -> list[Tensor]:
    """Return the parameters that have a placement; also those of other ranks of this process."""
    live = [reference() for reference in list(_of_tensor.data)]
    return [param for param in live if param is not None]
