"""Find the modules and parameters that a new unit manages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from xla_fsdp.fsdp.engine.module_state import is_fsdp_module
from xla_fsdp.wrap import Ignored, has_forward


def check_wrappable(module: nn.Module) -> None:
    """Raise TypeError or ValueError unless ``module`` can become a unit."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"FSDP wraps an nn.Module, got {type(module).__name__}")
    if is_fsdp_module(module):
        raise ValueError(
            "this module is sharded with FSDP already. For nested units, shard the inner modules "
            "first and then the module that holds them"
        )
    if not has_forward(module):
        raise ValueError(
            f"{type(module).__name__} has no forward, so FSDP cannot know when its parameters are "
            f"needed. Wrap the modules that it holds, or the module that calls them"
        )


def subclass_problems(module: nn.Module, ignored: Ignored) -> Iterator[str]:
    """Yield what cannot be sharded: parameters that are tensors of a class with parts of its own,
    as quantized ones of torchao, and ``DTensor``."""
    for name, param in module.named_parameters():
        if is_traceable_wrapper_subclass(param) and param not in ignored.params:
            yield (
                f"{name} is a {type(param).__name__}, a tensor subclass, whose parts (or own "
                f"all-gather) sharding does not know: make it a plain parameter before sharding, "
                f"or leave it as it is by ignored_params"
            )


def refuse_subclasses(modules: Sequence[nn.Module], ignored: Ignored) -> None:
    """Raise ValueError with all ``subclass_problems``."""
    if problems := [each for module in modules for each in subclass_problems(module, ignored)]:
        raise ValueError("\n".join(problems))


class ManagedModules:
    """The modules of a new unit and those below them, except for units and ignored modules.

    Args:
        roots: the modules of the unit, usually one; several are gathered and freed together.
        ignored: modules and parameters to leave out.

    Raises:
        ValueError: for layers that cannot run on XLA.
    """

    def __init__(self, roots: Sequence[nn.Module], ignored: Ignored) -> None:
        self.roots = tuple(roots)
        self.ignored = ignored
        # Number of the root, name in it with a dot appended, and module.
        self._named = [
            (number, prefix, module)
            for number, root in enumerate(self.roots)
            for prefix, module in self._walk(root, "")
        ]
        for _, prefix, layer in self._named:
            if isinstance(layer, nn.SyncBatchNorm):
                raise ValueError(
                    f"{prefix[:-1] or 'the module'} is torch.nn.SyncBatchNorm, which only runs on "
                    f"CUDA. Convert the model before wrapping it: "
                    f"xla_fsdp.SyncBatchNorm.convert_sync_batchnorm(model)"
                )

    def modules(self) -> list[tuple[str, nn.Module]]:
        """Return all modules, each once, with their dotted names; a root is named ``""``."""
        found: dict[nn.Module, str] = {}
        for _, prefix, module in self._named:
            found.setdefault(module, prefix[:-1])
        return [(name, module) for module, name in found.items()]

    def parameters(self) -> list[tuple[int, str, nn.Module, str, nn.Parameter]]:
        """Return (number of the root, name in it, module, attribute, parameter) for every name of
        every parameter."""
        ignored = self.ignored.params
        return [
            (number, prefix + attribute, module, attribute, param)
            for number, prefix, module in self._named
            for attribute, param in module._parameters.items()
            if param is not None and not (ignored and param in ignored)
        ]

    @property
    def on_meta(self) -> bool:
        """Whether a parameter or buffer is on the meta device, ignored parameters included."""
        return any(
            tensor is not None and tensor.is_meta
            for _, _, module in self._named
            for tensor in (*module._parameters.values(), *module._buffers.values())
        )

    def tensors(self) -> list[Tensor]:
        """Return the parameters, except ignored ones, and buffers, each once."""
        params = [param for *_, param in self.parameters()]
        buffers = [each for _, module in self.modules() for each in module._buffers.values()]
        return list({id(t): t for t in (*params, *buffers) if t is not None}.values())

    def _walk(self, module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        if is_fsdp_module(module) or module in self.ignored.modules:
            return
        yield prefix, module
        for name, child in module._modules.items():
            if child is not None:
                yield from self._walk(child, f"{prefix}{name}.")
