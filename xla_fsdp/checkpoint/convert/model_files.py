"""Divide a full checkpoint into files, and rename and cast its tensors.

The kinds of output are one torch file; one safetensors file ``x.safetensors``, with the optimizer
in ``x.optimizer.safetensors``; or a directory that Hugging Face's ``from_pretrained`` reads:
``model.safetensors``, or parts of it and ``model.safetensors.index.json``, and the same for
``optimizer.safetensors``.

Invariants: unless copies are requested, a safetensors file holds a tied tensor once, under its
canonical name, and lists ``alias: canonical`` in its metadata, as the safetensors library does.
Optimizer states have FSDP2's names, ``state.<parameter>.<state>``. Renaming applies to model and
optimizer, and never gives two tensors one name.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from xla_fsdp.checkpoint.errors import CheckpointError, MismatchError, raise_if
from xla_fsdp.checkpoint.files.outputs import (
    BytesOutput,
    Checksums,
    Output,
    SafetensorsOutput,
    TorchOutput,
)
from xla_fsdp.checkpoint.files.storage import exists, open_storage
from xla_fsdp.checkpoint.files.tensor_source import TensorSource, convert_tensors
from xla_fsdp.checkpoint.format.plan import FullCheckpoint, MergePlan
from xla_fsdp.checkpoint.format.records import GroupRecord, OptimizerState, StateKind
from xla_fsdp.checkpoint.format.shard_files import SAFETENSORS

# Keys of a merged file's metadata; their values are JSON.
CHECKSUMS = "xla_fsdp_fingerprints"
OPTIMIZER = "xla_fsdp_optimizer"

DEFAULT_SHARD_SIZE = 5_000_000_000

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

_FILE = re.compile(r"(model|optimizer)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


class Kind(Enum):
    """The kinds of output for a full checkpoint."""

    TORCH = "one torch file"
    SAFETENSORS = "one safetensors file"
    DIRECTORY = "a directory of safetensors files"
    DCP = "a directory of torch.distributed.checkpoint"


@dataclass(frozen=True)
class Layout:
    """How full checkpoints are divided into files.

    Args:
        max_shard_size: in bytes, of each safetensors file in a directory; a larger tensor gets a
            file of its own. Of torch.distributed.checkpoint, after which the next file begins.
        copy_ties: whether every name of a tied tensor gets its own copy in safetensors files.
        torchtitan: whether a directory of torch.distributed.checkpoint has the names of torchtitan,
            where a model's are not under ``model``, and an optimizer's are flat.
    """

    max_shard_size: int = DEFAULT_SHARD_SIZE
    copy_ties: bool = False
    torchtitan: bool = False


def parse_size(text: str) -> int:
    """Return the number of bytes in a text such as ``"5GB"``, ``"200 MiB"`` or ``"1000"``."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,3})?)\s*([a-z]*)", text.strip(), re.IGNORECASE)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or (size := int(float(match[1]) * unit)) < 1:
        raise CheckpointError(f"--max_shard_size {text!r} must be a size such as 5GB or 200MiB")
    return size


def kind_of(path: str) -> Kind:
    """Return the kind of output that a path implies.

    That is a safetensors file for ``x.safetensors``, a directory for one that exists or a path that
    ends in a slash, and a torch file for any other path.
    """
    if path.endswith(SAFETENSORS):
        return Kind.SAFETENSORS
    return Kind.DIRECTORY if path.endswith("/") or os.path.isdir(path) else Kind.TORCH


def model_outputs(full: FullCheckpoint, path: str, kind: Kind, layout: Layout) -> list[Output]:
    """Return the files for ``full`` at ``path``, in the order in which to give them their names."""
    if kind is Kind.TORCH:
        content: dict[str, Any] = {"model": dict(full.model)}
        if full.optimizer is not None:
            content["optimizer"] = full.optimizer.to_dict()
        return [TorchOutput(path, content)]
    raise_if(
        [
            f"{name} is a {type(value).__name__}, no tensor: safetensors cannot hold it. Write a "
            f".pth"
            for name, value in full.model.items()
            if not isinstance(value, TensorSource)
        ]
    )
    if kind is Kind.SAFETENSORS:
        base, unlimited = path.removesuffix(SAFETENSORS), Layout(1 << 62, layout.copy_ties)
        return list(_all_files(full, base, f"{base}.optimizer", unlimited))
    model, optimizer = os.path.join(path, "model"), os.path.join(path, "optimizer")
    return list(_all_files(full, model, optimizer, layout))


def older_files(outputs: Sequence[Output], path: str, kind: Kind) -> list[str]:
    """Return the files of earlier merges at ``path`` that ``outputs`` do not replace: of a model in
    one file or more, or of an optimizer."""
    found: list[str] = []
    if kind is Kind.SAFETENSORS:
        optimizer = f"{path.removesuffix(SAFETENSORS)}.optimizer{SAFETENSORS}"
        found = [optimizer] if exists(optimizer) else []
    if kind is Kind.DIRECTORY:
        names = open_storage(path).names()
        found = [os.path.join(path, name) for name in names if _FILE.fullmatch(name)]
    new = {output.path for output in outputs}
    return [path for path in found if path not in new]


def dcp_content(full: FullCheckpoint, layout: Layout) -> dict[str, Any]:
    """Return what a program of torch saves: ``{"model": ..., "optim": ...}``, or the names of
    torchtitan."""
    optim = {} if full.optimizer is None else full.optimizer.to_dict()
    if not layout.torchtitan:
        return {"model": dict(full.model), **({"optim": optim} if optim else {})}
    flat = {
        f"state.{name}.{what}": value
        for name, state in optim.get("state", {}).items()
        for what, value in state.items()
    }
    for group in optim.get("param_groups", ()):
        options = {key: value for key, value in group.items() if key != "params"}
        flat |= {f"param_groups.{n}.{k}": v for n in group["params"] for k, v in options.items()}
    return {**full.model, **({"optimizer": flat} if optim else {})}


def _all_files(
    full: FullCheckpoint, model: str, optimizer: str, layout: Layout
) -> Iterator[Output]:
    stored = {n: t for n, t in full.model.items() if layout.copy_ties or n not in full.ties}
    # An alias may not overwrite another entry of the header's metadata.
    reserved = full.ties if layout.copy_ties else ("format", CHECKSUMS, OPTIMIZER)
    aliases = {alias: name for alias, name in full.ties.items() if alias not in reserved}
    yield from _files(model, stored, aliases, layout.max_shard_size)
    if full.optimizer is not None:
        tensors = {
            f"state.{name}.{what}": tensor
            for name, tensors in full.optimizer.tensors().items()
            for what, tensor in tensors.items()
        }
        own = {OPTIMIZER: json.dumps(_described(full.optimizer))}
        yield from _files(optimizer, tensors, own, layout.max_shard_size)


def _described(optimizer: OptimizerState) -> dict[str, Any]:
    """Return groups and values as JSON, and the names of the states that are tensors."""
    record = optimizer.record()
    return {
        "param_groups": optimizer.to_dict()["param_groups"],
        "state": {
            name: {
                "tensors": [w for w, e in state.items() if e.kind is not StateKind.VALUE],
                "values": record.states[name].values,
            }
            for name, state in optimizer.states.items()
        },
    }


def _files(
    base: str, tensors: Mapping[str, TensorSource], metadata: Mapping[str, str], limit: int
) -> Iterator[Output]:
    """Yield one file, or several and their index, with the names of ``huggingface_hub``."""
    groups = list(_grouped(tensors, limit))
    paths = [_path(base, i, len(groups)) for i in range(len(groups))]

    def own(checksums: Checksums) -> dict[str, str]:
        return {**metadata, "format": "pt", CHECKSUMS: json.dumps(dict(checksums))}

    for path, group in zip(paths, groups, strict=True):
        yield SafetensorsOutput(path, group, own)
    if len(groups) > 1:
        file_names = {
            name: os.path.basename(path)
            for path, group in zip(paths, groups, strict=True)
            for name in group
        }
        total = sum(source.spec.nbytes for source in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": file_names}
        yield BytesOutput(f"{base}{SAFETENSORS}.index.json", json.dumps(index, indent=1).encode())


def _grouped(tensors: Mapping[str, TensorSource], limit: int) -> Iterator[dict[str, TensorSource]]:
    group: dict[str, TensorSource] = {}
    size = 0
    for name, source in tensors.items():
        if group and size + source.spec.nbytes > limit:
            yield group
            group, size = {}, 0
        group[name] = source
        size += source.spec.nbytes
    yield group


def _path(base: str, index: int, count: int) -> str:
    part = "" if count == 1 else f"-{index + 1:05d}-of-{count:05d}"
    return f"{base}{part}{SAFETENSORS}"


# ---------------------------------------------------------------- renaming and casting


@dataclass(frozen=True)
class Rule:
    """Replaces the prefix ``old`` of names by ``new``."""

    old: str
    new: str


def parse_rule(text: str) -> Rule:
    """Return the rule that is written as ``"OLD=NEW"``; NEW may be empty."""
    old, equals, new = text.partition("=")
    if not equals or not old:
        raise CheckpointError(f"--key_map {text!r} must be OLD=NEW, such as module.= or a.=b.")
    return Rule(old, new)


def renamed(plan: MergePlan, rules: Sequence[Rule]) -> MergePlan:
    """Return the plan with new names; the first rule whose prefix a name has applies.

    Raises:
        MismatchError: if two tensors get one name, or a rule fits none.
    """
    members = [member.name for entry in plan.sharded.values() for member in entry.members]
    names = _new_names([*members, *plan.unsharded.values(), *plan.ties], rules)
    return replace(
        plan,
        sharded={
            key: replace(
                entry, members=tuple(replace(m, name=names[m.name]) for m in entry.members)
            )
            for key, entry in plan.sharded.items()
        },
        unsharded={key: names[name] for key, name in plan.unsharded.items()},
        ties={names[alias]: names[name] for alias, name in plan.ties.items()},
    )


def _new_names(old_names: Iterable[str], rules: Sequence[Rule]) -> dict[str, str]:
    names: dict[str, str] = {}
    for name in old_names:
        fitting = (r.new + name.removeprefix(r.old) for r in rules if name.startswith(r.old))
        names[name] = next(fitting, name)
    problems = [
        f"key_map: {rule.old}={rule.new} fits no name of the model"
        for rule in rules
        if not any(name.startswith(rule.old) for name in names)
    ]
    problems += [
        f"key_map: {count} names become {name!r}" if name else "key_map: a name becomes empty"
        for name, count in Counter(names.values()).items()
        if count > 1 or not name
    ]
    if problems:
        raise MismatchError(problems)
    return names


def restricted(full: FullCheckpoint, prefixes: Sequence[str]) -> FullCheckpoint:
    """Return the checkpoint with only those names that have one of the prefixes.

    Of tied names, the first that is left is the canonical one.
    """
    check_prefixes(prefixes, full.model)
    left = [name for name in full.model if name.startswith(tuple(prefixes))]
    new: dict[str, str] = {}  # by canonical name
    for name in left:
        new.setdefault(full.ties.get(name, name), name)
    canonical = {name: new[full.ties.get(name, name)] for name in left}
    return FullCheckpoint(
        model={name: full.model[name] for name in left},
        ties={name: other for name, other in canonical.items() if name != other},
        optimizer=full.optimizer and _renamed_optimizer(full.optimizer, new),
    )


def check_prefixes(prefixes: Sequence[str], names: Iterable[str]) -> None:
    """Raise ``CheckpointError`` if there are none, or one fits no name."""
    known = list(names)
    problems = [
        f"only: {prefix!r} fits no name of the model"
        for prefix in prefixes
        if not any(name.startswith(prefix) for name in known)
    ]
    raise_if(problems if prefixes else ["only: is empty, so it selects nothing of the model"])


def in_dtype(full: FullCheckpoint, dtype: torch.dtype) -> FullCheckpoint:
    """Return the checkpoint with the model's floating-point tensors cast, but not the optimizer's.

    Tied tensors remain one object.
    """

    def cast(source: TensorSource) -> TensorSource:
        return source.cast(dtype) if source.dtype.is_floating_point else source

    return replace(full, model=convert_tensors(full.model, cast))


def _renamed_optimizer(optimizer: OptimizerState, names: Mapping[str, str]) -> OptimizerState:
    """Return the state of the parameters in ``names``, under their new names."""
    return OptimizerState(
        groups=tuple(
            GroupRecord(tuple(names[n] for n in group.params if n in names), group.options)
            for group in optimizer.groups
            if not group.params or any(name in names for name in group.params)
        ),
        states={names[name]: s for name, s in optimizer.states.items() if name in names},
    )
