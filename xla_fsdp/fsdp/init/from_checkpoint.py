"""Initialize a model on the meta device from a checkpoint.

Invariants: a module's tensors are read when it is wrapped; only tied tensors are read twice.
No code in a pickle is run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from xla_fsdp.checkpoint.errors import CheckpointError, raise_if, shown
from xla_fsdp.checkpoint.tensor_source import TensorSource, full_path
from xla_fsdp.checkpoint.torch_file import read_torch_file
from xla_fsdp.distributed.placement import placement_in
from xla_fsdp.distributed.shard_layout import join_name

SAFETENSORS = ".safetensors"
INDEX_SUFFIX = ".index.json"

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
        path: a ``.safetensors`` file; a directory with one, or with several and an index as
            Hugging Face saves them; or a ``torch.save`` file of a state dict, or of
            ``{"model": state_dict}`` as consolidation writes it.
        otherwise: initializes a module of which the checkpoint lacks tensors; called before the
            other tensors are read. Needed for buffers that are not saved, as of rotary embeddings.
        strict: raise if the checkpoint has names that the model does not have. A checkpoint without
            any name of the model always raises.

    Returns:
        A function to pass as ``param_init_fn``: it initializes one module of ``model``, which must
        have memory.

    Raises:
        CheckpointError: with all problems, one on each line: the file cannot be read, names are
            missing (without ``otherwise``) or unexpected, shapes differ, or a module for which the
            file has values is not on the meta device.
    """
    source = _open(Path(full_path(path)))
    names = _names(model)
    problems = [
        *_problems(model, source, may_lack=otherwise is not None),
        *_not_on_meta(model, source, names),
        *_unexpected(source, names, strict=strict),
    ]
    if problems:
        raise CheckpointError(problems)

    @torch.no_grad()
    def initialize(module: nn.Module) -> None:
        tensors = names.get(module)
        if tensors is None:
            raise ValueError(
                f"{type(module).__name__} was not in the model when init_from_checkpoint(model, "
                f"...) was called; call it after the model is complete, and before wrapping"
            )
        if otherwise is not None and any(not source.found(own) for own in tensors.values()):
            otherwise(module)
        for attribute, aliases in tensors.items():
            for name in source.found(aliases)[:1]:
                getattr(module, attribute).copy_(source.read(name))

    return initialize


@dataclass(frozen=True)
class _Source:
    """Named tensors in one or more files.

    Args:
        shapes: of every tensor, by name.
        read: returns the tensor of a name.
        label: path, for error messages.
    """

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    label: str

    def found(self, names: Iterable[str]) -> list[str]:
        """Return those of ``names`` that are in the files."""
        return [name for name in names if name in self.shapes]


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
        found, expected = source.shapes.get(name), global_shapes.get(name, tuple(tensor.shape))
        if found is not None and found != expected:
            yield f"{source.label}: {name} has shape {found}, the model's {expected}"
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
    others = [name for name in source.shapes if name not in known]
    if strict or len(others) == len(source.shapes):
        yield from (f"{source.label}: has {name}, which the model has not" for name in others)


# ---------------------------------------------------------------- files


def _open(path: Path) -> _Source:
    if path.is_dir():
        return _open_directory(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file or directory")
    if path.name.endswith(INDEX_SUFFIX):
        return _open_safetensors(_indexed_files(path), str(path))
    if path.suffix == SAFETENSORS:
        return _open_safetensors([path], str(path))
    return _open_torch(path)


def _open_directory(path: Path) -> _Source:
    indexes = sorted(path.glob(f"*{SAFETENSORS}{INDEX_SUFFIX}"))
    files = sorted(path.glob(f"*{SAFETENSORS}"))
    if len(indexes) == 1:
        return _open_safetensors(_indexed_files(indexes[0]), str(path))
    if not indexes and len(files) == 1:
        return _open_safetensors(files, str(path))
    raise CheckpointError(
        f"{path}: holds {len(files)} {SAFETENSORS} files and {len(indexes)} indexes; expected one "
        f"file, or several and one *{SAFETENSORS}{INDEX_SUFFIX}. Name the file"
    )


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: is no index of {SAFETENSORS} files") from error
    files = sorted(map(str, names))
    strange = [name for name in files if Path(name).name != name or name in ("", "..")]
    problems = [f"{index}: lists {shown(name)}, which is no name of a file" for name in strange]
    problems += [
        f"{index}: lists {name}, which is missing"
        for name in files
        if name not in strange and not (index.parent / name).exists()
    ]
    raise_if(problems)
    return [index.parent / name for name in files]


def _open_safetensors(files: list[Path], label: str) -> _Source:
    opened: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    with ExitStack() as on_error:
        for path in files:
            try:
                file = on_error.enter_context(safe_open(path, "pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: cannot be read: {error}") from error
            for name in file.keys():  # noqa: SIM118  (a file is no dict)
                opened[name] = file
                shapes[name] = tuple(file.get_slice(name).get_shape())
        on_error.pop_all()  # the files stay open for reading
    return _Source(shapes, lambda name: opened[name].get_tensor(name), label)


def _open_torch(path: Path) -> _Source:
    content = read_torch_file(str(path))
    state = content.get("model", content) if isinstance(content, dict) else content
    values = state if isinstance(state, dict) else {}
    tensors = {name: value for name, value in values.items() if isinstance(value, TensorSource)}
    if not tensors:
        raise CheckpointError(f"{path}: holds no state dict")
    shapes = {name: value.shape for name, value in tensors.items()}
    return _Source(shapes, lambda name: tensors[name].load(), str(path))
