"""What a style is: which parameters it cuts, and what it puts around a module's forward.

Words: a *site* is a module that a plan gives a style; a *cut* says what becomes of one parameter.
Always true: a style is a plain description, which may be given to any number of modules; it changes
nothing itself. ``parallelize`` checks all sites of a plan, then distributes the parameters and puts
the steps in place. The styles are in ``styles`` and ``prepare``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.tensor_parallel.parallel_module import Step


@dataclass(frozen=True)
class ParamCut:
    """What becomes of one parameter.

    Args:
        owner: the module that holds it.
        attribute: its name there.
        dim: along which it is cut; None to give all of it to every rank.
    """

    owner: nn.Module
    attribute: str
    dim: int | None

    @property
    def param(self) -> nn.Parameter:
        """What is cut; ValueError if there is no such parameter."""
        found = self.owner._parameters.get(self.attribute)
        if found is None:
            raise ValueError(
                f"a style cuts {self.attribute!r} of {type(self.owner).__name__}, which has no "
                f"such parameter; leave it out of what the style's cuts() returns"
            )
        return found


class ParallelStyle(ABC):
    """How a module is parallelized; base class of all styles."""

    def find_problems(self, module: nn.Module) -> Iterator[str]:
        """Why ``module`` cannot have this style, one line each; sizes apart."""
        yield from ()

    def cuts(self, module: nn.Module) -> Sequence[ParamCut]:
        """What becomes of the parameters of ``module``; those that are not named stay as they
        are."""
        return ()

    @abstractmethod
    def steps(self, name: str, module: nn.Module, axis: AxisComm) -> Sequence[Step]:
        """What to put around the forward, innermost first.

        Args:
            name: of the module, for messages.
            module: it.
            axis: the ranks that share it.
        """


def own_cuts(module: nn.Module, dims: dict[str, int | None]) -> list[ParamCut]:
    """Cuts of those parameters of a module that are not None."""
    present = {name for name, param in module._parameters.items() if param is not None}
    return [ParamCut(module, name, dim) for name, dim in dims.items() if name in present]
