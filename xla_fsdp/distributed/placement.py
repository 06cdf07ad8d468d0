"""How tensor parallelism has divided parameters: a *local* one is a rank's part of a *global* one.

Invariants: a module knows the placements of its own parameters by their names, whatever tensors
hold their values, so placements survive ``to``, ``to_empty``, copies and FSDP; a parameter without
placement is the same on all ranks. Slices are equal: every rank runs the same program.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Size, Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from xla_fsdp.distributed.mesh import Mesh

_ATTRIBUTE = "_tensor_placements"

# Keyed by tensor, weakly; the same for all threads, as tensors are not shared by ranks.
_of_tensor: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class TensorPlacement:
    """How the ranks along one axis share a parameter.

    Args:
        mesh: of that one axis.
        dim: which dim of the global parameter is cut into equal slices, in the order of the ranks;
            None if it is replicated.
        shape: of the global parameter.
    """

    mesh: Mesh
    dim: int | None
    shape: tuple[int, ...]

    @property
    def axis(self) -> str:
        """The axis's name."""
        return self.mesh.axis_names[0]

    @property
    def parts(self) -> int:
        """Number of slices that the parameter is cut into."""
        return 1 if self.dim is None else self.mesh.size()

    @property
    def local_shape(self) -> Size:
        """Shape of the local parameter."""
        return local_shape(self.shape, self.dim, self.parts)

    def is_same_on(self, ranks: Iterable[int]) -> bool:
        """Return whether these ranks hold the same part."""
        return len({self.mesh.local_rank(rank) for rank in ranks}) <= 1

    def slice_of(self, value: Tensor, local_rank: int) -> Tensor:
        """Return the local part of a tensor of the global parameter's shape.

        Args:
            value: the global parameter, its gradient or the like.
            local_rank: of the rank whose part it is, along the axis.
        """
        if self.dim is None:
            return value
        size = self.shape[self.dim] // self.parts
        return value.narrow(self.dim, local_rank * size, size)


def local_shape(shape: Iterable[int], dim: int | None, parts: int) -> Size:
    """Return the shape of one of ``parts`` equal slices along ``dim``; all of it for None."""
    sizes = list(shape)
    if dim is not None:
        sizes[dim] //= parts
    return Size(sizes)


def set_placement(module: nn.Module, attribute: str, placement: TensorPlacement) -> None:
    """Note the placement of the parameter of that name in ``module``."""
    vars(module).setdefault(_ATTRIBUTE, {})[attribute] = placement
    remember_placements(module)


def placement_in(module: nn.Module, attribute: str) -> TensorPlacement | None:
    """Return the placement of a parameter of ``module``, if it has one."""
    return vars(module).get(_ATTRIBUTE, {}).get(attribute)


def remember_placements(module: nn.Module) -> None:
    """Note for ``known_placement`` the tensors that are the module's parameters now."""
    for attribute, placement in vars(module).get(_ATTRIBUTE, {}).items():
        param = module._parameters.get(attribute)
        if isinstance(param, nn.Parameter):
            _of_tensor[param] = placement


def known_placement(param: Tensor) -> TensorPlacement | None:
    """Return the placement of a parameter that no FSDP unit has taken."""
    return _of_tensor.get(param)
