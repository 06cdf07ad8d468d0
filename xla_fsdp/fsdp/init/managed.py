"""Which modules and parameters a new unit manages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from xla_fsdp.distributed.shard_layout import join_name
from xla_fsdp.fsdp.engine.module_state import is_unit
from xla_fsdp.wrap import Ignored, has_forward


def check_wrappable(module: nn.Module) -> None:
    """Raise TypeError or ValueError unless ``module`` can become a unit."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"FSDP wraps an nn.Module, got {type(module).__name__}")
    if is_unit(module):
        raise ValueError(
            "this module is sharded with FSDP already. For nested units, shard the inner modules "
            "first and then the module that holds them"
        )
    if not has_forward(module):
        raise ValueError(
            f"{type(module).__name__} has no forward, so FSDP cannot know when its parameters are "
            f"needed. Wrap the modules that it holds, or the module that calls them"
        )


class ManagedModules:
    """The modules of a new unit and those below them, except for units and ignored modules.

    Args:
        roots: usually one; several are gathered and freed together.
        ignored: modules and parameters to leave out.

    Raises:
        ValueError: for layers that cannot run on XLA.
    """

    def __init__(self, roots: Sequence[nn.Module], ignored: Ignored) -> None:
        self.roots = tuple(roots)
        self.ignored = ignored
        for name, layer in self.modules():
            if isinstance(layer, nn.SyncBatchNorm):
                raise ValueError(
                    f"{name or 'the module'} is torch.nn.SyncBatchNorm, which only runs on CUDA. "
                    f"Convert the model before wrapping it: "
                    f"xla_fsdp.SyncBatchNorm.convert_sync_batchnorm(model)"
                )

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield dotted names and modules, each root (``""``) before what is in it; each once."""
        seen: set[int] = set()
        for root in self.roots:
            for name, module in self._below(root, ""):
                if id(module) not in seen:
                    seen.add(id(module))
                    yield name, module

    def parameters(self) -> Iterator[tuple[int, str, nn.Module, str, nn.Parameter]]:
        """Yield the number of the root, the name in it, the module, the attribute and the parameter
        for every name of a parameter: a module with several names gives its parameters several."""
        for number, root in enumerate(self.roots):
            for prefix, owner in self._below(root, ""):
                for attribute, param in owner._parameters.items():
                    if param is not None and not self.ignored.has_param(param):
                        yield number, join_name(prefix, attribute), owner, attribute, param

    def tensors(self) -> list[Tensor]:
        """Return parameters and buffers, each once."""
        params = [param for *_, param in self.parameters()]
        buffers = [each for _, module in self.modules() for each in module._buffers.values()]
        return list({id(t): t for t in (*params, *buffers) if t is not None}.values())

    def _below(self, module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if is_unit(module) or self.ignored.has_module(module):
            return
        yield name, module
        for child_name, child in module._modules.items():
            if child is not None:
                yield from self._below(child, join_name(name, child_name))
