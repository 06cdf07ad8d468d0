"""Where a tensor-parallel parameter is in the whole one. Pure data; what hangs it on modules.

Words: a *whole* parameter is the plain model's; a *local* one is what a rank computes with: a slice
of the whole along one dim, or (*replicated*) all of it. FSDP calls the local parameter full.
Always true: a module knows the placements of its own parameters by their names, whatever tensors
hold their values, so placements survive ``to``, ``to_empty``, copies and FSDP; a parameter without
placement is the same on all ranks of the axis. Slices are equal: every rank runs the same program.
What is cut is decided by ``tensor_parallel``; FSDP's units, clipping, state dicts and checkpoints
read it here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Size, Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from xla_fsdp.distributed.mesh import Mesh

_ATTRIBUTE = "_tensor_placements"

_of_tensor: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class TensorPlacement:
    """How the ranks along one axis share a parameter.

    Args:
        mesh: of that one axis.
        dim: which dim of the whole parameter is cut into equal slices, in the order of the ranks;
            None if every rank has all of it.
        shape: of the whole parameter.
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
        """Into how many slices the parameter is cut."""
        return 1 if self.dim is None else self.mesh.size()

    @property
    def local_shape(self) -> Size:
        """Shape of the local parameter."""
        return local_shape(self.shape, self.dim, self.parts)

    def is_same_on(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks hold the same part."""
        return len({self.mesh.place(rank) for rank in ranks}) <= 1

    def slice_of(self, whole: Tensor, place: int) -> Tensor:
        """The local parameter of the rank in a place of the axis, or what is cut like it."""
        if self.dim is None:
            return whole
        size = self.shape[self.dim] // self.parts
        return whole.narrow(self.dim, place * size, size)


def local_shape(shape: Iterable[int], dim: int | None, parts: int) -> Size:
    """Of what is cut along ``dim`` into equal parts; ``dim`` may be None."""
    sizes = list(shape)
    if dim is not None:
        sizes[dim] //= parts
    return Size(sizes)


def place(module: nn.Module, attribute: str, placement: TensorPlacement) -> None:
    """From now on the parameter of that name in ``module`` is placed so."""
    vars(module).setdefault(_ATTRIBUTE, {})[attribute] = placement
    remember_placements(module)


def placement_in(module: nn.Module, attribute: str) -> TensorPlacement | None:
    """Of one parameter of a module."""
    return vars(module).get(_ATTRIBUTE, {}).get(attribute)


def remember_placements(module: nn.Module) -> None:
    """Let ``known_placement`` know the tensors that are the module's parameters now."""
    for attribute, placement in vars(module).get(_ATTRIBUTE, {}).items():
        param = module._parameters.get(attribute)
        if isinstance(param, nn.Parameter):
            _of_tensor[param] = placement


def known_placement(param: Tensor) -> TensorPlacement | None:
    """Of a parameter that no unit has taken, by itself."""
    return _of_tensor.get(param)
