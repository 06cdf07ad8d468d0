"""Initialize a model on the meta device from a checkpoint.

Invariants: a module's tensors are read when it is wrapped; only tied tensors are read twice.
No code in a pickle is run. What carries checksums is verified as it is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from xla_fsdp.checkpoint.convert.read_model import open_model
from xla_fsdp.checkpoint.errors import CheckpointError
from xla_fsdp.checkpoint.files.tensor_source import TensorSource, full_path
from xla_fsdp.distributed.placement import placement_in
from xla_fsdp.distributed.shard_layout import join_name

Names = Mapping[nn.Module, Mapping[str, list[str]]]


def init_from_checkpoint(
    model: nn.Module,
    path: str | Path,
    *,
    otherwise: Callable[[nn.Module], None] | None = None,
    strict: bool = True,
) -> Callable[[nn.Module], None]:
    """Return a ``param_init_fn`` that initializes each module from a file of full tensors.

        with torch.device("meta"):
            model = build_model()
        init = init_from_checkpoint(model, "model.safetensors")
        model = FSDP(model, auto_wrap_policy=policy, param_init_fn=init)

    Args:
        model: built on the meta device, not wrapped yet.
        path: a ``.safetensors`` file, or one of ``torch.save`` of a state dict or of
            ``{"model": state_dict}``; or a directory with one, or with several and an index: what
            consolidation or Hugging Face write.
        otherwise: initializes a module of which the checkpoint lacks tensors; called before the
            other tensors are read. Needed for buffers that are not saved, as of rotary embeddings.
        strict: raise if the checkpoint has names that the model does not have. A checkpoint without
            any name of the model always raises.

    Returns:
        A function to pass as ``param_init_fn``: it initializes one module of ``model``, which must
        have memory. It raises ``CheckpointError`` if what it reads is not what its checksum in the
        file says; consolidation writes checksums, and so does ``torch.save``.

    Raises:
        CheckpointError: with all problems, one on each line: the file cannot be read, names are
            missing (without ``otherwise``) or unexpected, shapes differ, or a module for which the
            file has values is not on the meta device.
    """
    source = _Source(open_model(path), full_path(path))
    names = _names(model)
    problems = [
        *_problems(model, source, may_lack=otherwise is not None),
        *_not_on_meta(model, source, names),
        *_unexpected(source, names, strict=strict),
    ]
    if problems:
        raise CheckpointError(problems)
    places = {prefix: names[module] for prefix, module in model.named_modules()}

    @torch.no_grad()
    def initialize(module: nn.Module) -> None:
        tensors = names[module] if module in names else _of_place(module, model, places)
        if tensors is None:
            raise ValueError(
                f"{type(module).__name__} was not in the model when init_from_checkpoint(model, "
                f"...) was called; call it after the model is complete, and before wrapping"
            )
        if otherwise is not None and any(not source.found(own) for own in tensors.values()):
            otherwise(module)
        for attribute, aliases in tensors.items():
            for name in source.found(aliases)[:1]:
                getattr(module, attribute).copy_(source.tensors[name].load())

    return initialize


@dataclass(frozen=True)
class _Source:
    """Named tensors in one or more files."""

    tensors: Mapping[str, TensorSource]
    label: str  # path, for error messages

    def found(self, names: Iterable[str]) -> list[str]:
        """Return those of ``names`` that are in the files."""
        return [name for name in names if name in self.tensors]


def _names(model: nn.Module) -> Names:
    """Return all names of each tensor by module and attribute; names of ties come last."""
    names: dict[nn.Module, dict[str, list[str]]] = {module: {} for module in model.modules()}
    aliases: dict[int, list[str]] = defaultdict(list)
    for prefix, module in model.named_modules():
        for attribute, tensor in _tensors(module):
            name = join_name(prefix, attribute)
            aliases[id(tensor)].append(name)
            names[module][attribute] = [name]
    for module in model.modules():
        for attribute, tensor in _tensors(module):
            own = names[module][attribute]
            own += [alias for alias in aliases[id(tensor)] if alias not in own]
    return names


def _of_place(
    module: nn.Module, model: nn.Module, places: Mapping[str, Mapping[str, list[str]]]
) -> Mapping[str, list[str]] | None:
    """Return the names of a module that has taken the place of another with tensors of the same
    names, as streamed embeddings and heads do."""
    for prefix, each in model.named_modules():
        found = places.get(prefix)
        if each is module and found and found.keys() == dict(_tensors(module)).keys():
            return found
    return None


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the tensors of a module without those of its children."""
    named = (*module._parameters.items(), *module._buffers.items())
    return [(attribute, tensor) for attribute, tensor in named if tensor is not None]


def _problems(model: nn.Module, source: _Source, *, may_lack: bool) -> Iterator[str]:
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    present = {id(tensors[name]) for name in source.found(tensors)}
    global_shapes = dict(_global_shapes(model))
    for name, tensor in tensors.items():
        found, expected = source.tensors.get(name), global_shapes.get(name, tuple(tensor.shape))
        if found is not None and found.shape != expected:
            yield f"{source.label}: {name} has shape {found.shape}, the model's {expected}"
        if id(tensor) not in present and tensor.is_meta and not may_lack:
            yield (
                f"{source.label}: has no {name}, which the model needs. Give its value by "
                f"otherwise=, a function of the module that holds it"
            )


def _global_shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and global shapes of tensor-parallel parameters, in which they are read."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute in module._parameters:
            if placement := placement_in(module, attribute):
                yield join_name(prefix, attribute), placement.shape


def _not_on_meta(model: nn.Module, source: _Source, names: Names) -> Iterator[str]:
    """Report modules with values in the file that ``param_init_fn`` would not be called with."""
    for prefix, module in model.named_modules():
        wanted = [name for own in names[module].values() for name in source.found(own)[:1]]
        if wanted and not any(tensor.is_meta for _, tensor in _tensors(module)):
            yield (
                f"{source.label}: has {wanted[0]}, but {prefix or 'the model'} is not on the meta "
                f"device and would keep its values. Build it under torch.device('meta'), or load "
                f"the file by load_state_dict"
            )


def _unexpected(source: _Source, names: Names, *, strict: bool) -> Iterator[str]:
    known = {name for tensors in names.values() for own in tensors.values() for name in own}
    others = [name for name in source.tensors if name not in known]
    if strict or len(others) == len(source.tensors):
        yield from (f"{source.label}: has {name}, which the model has not" for name in others)
