"""Reads what ``torch_xla.distributed.fsdp`` saves. Nothing writes it, and torch_xla is not needed.

Words: upstream's *wrappers* put their attribute names into every key: ``_fsdp_wrapped_module.``
for a unit, ``_fpw_module.`` for the flattening below it; a *flat* parameter is one of
``flatten_info``.
Always true: names in a plan are those of the model before it was wrapped, also of buffers (the
names in ``buffer_info`` differ from the state dict's by a wrapper, so upstream itself never finds
them and leaves such buffers in the wrong dtype).
Upstream does not write how shards are padded, nor their dtype: both are taken from the shard. It
does not write aliases of weights tied inside one unit either: they are absent from the result and
have to be tied again by the model that loads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from xla_fsdp.checkpoint.errors import CheckpointError, check_rank, item, typed
from xla_fsdp.checkpoint.format import MemberRecord
from xla_fsdp.checkpoint.full_tensors import Piece, Plan
from xla_fsdp.checkpoint.tensor_source import TensorSource
from xla_fsdp.distributed.shard_layout import ShardLayout, join_name

WRAPPERS = ("_fsdp_wrapped_module.", "_fpw_module.")

SHARD_PREFIX = "_fsdp_shard"


def is_upstream(metadata: dict[str, Any]) -> bool:
    """Whether this is upstream's kind of metadata."""
    return "format" not in metadata and "shard_info" in metadata


def upstream_identity(metadata: dict[str, Any]) -> tuple[int, int]:
    """Rank and world size; ``CheckpointError`` if they are missing or impossible."""
    rank = item(metadata, "rank", int, "")
    world_size = item(metadata, "world_size", int, "")
    check_rank(rank, world_size)
    return rank, world_size


def upstream_plan(metadata: dict[str, Any], state_dict: Mapping[str, Any]) -> Plan:
    """How to merge this shard with those of the other ranks; see ``plan.make_plan``.

    Raises:
        CheckpointError: listing every key that is missing or that the metadata does not explain.
    """
    _, world_size = upstream_identity(metadata)
    members = dict(_members_of_keys(metadata))
    problems = [
        f"model has no tensor {key}, which shard_metadata lists"
        for key in members
        if not isinstance(state_dict.get(key), TensorSource)
    ] + [
        f"model has {key}, which shard_metadata does not list"
        for key in state_dict
        if key not in members and _names_a_shard(key)
    ]
    if problems:
        raise CheckpointError(problems)
    whole = {key: original_name(key) for key in state_dict if key not in members}
    dtypes = _buffer_dtypes(metadata)
    return Plan(
        world_size=world_size,
        pieces={key: _piece(m, state_dict[key], world_size) for key, m in members.items()},
        whole=whole,
        dtypes={key: dtypes[name] for key, name in whole.items() if name in dtypes},
    )


def original_name(name: str) -> str:
    """A name without the wrappers' parts."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


# ---------------------------------------------------------------- what the metadata says


def _members_of_keys(metadata: dict[str, Any]) -> Iterator[tuple[str, tuple[MemberRecord, ...]]]:
    """State dict key and the parameters in it, for every entry of ``shard_info``."""
    flatten_info = metadata.get("flatten_info", {})
    typed(flatten_info, dict, "flatten_info")
    for unit, infos in item(metadata, "shard_info", dict, "").items():
        for suffix, info in typed(infos, dict, f"shard_info.{unit}").items():
            key = join_name(unit, suffix)
            where = f"shard_info.{key}"
            name = join_name(unit, item(typed(info, dict, where), "_orig_name", str, where))
            shape = _shape(info.get("_orig_size"), f"{where}._orig_size")
            flat = flatten_info.get(name)
            own = (MemberRecord(original_name(name), shape),)
            yield key, own if flat is None else _flat_members(flat, name)


def _flat_members(info: Any, flat_name: str) -> tuple[MemberRecord, ...]:
    where = f"flatten_info.{flat_name}"
    if not (isinstance(info, Sequence) and len(info) == 3):
        raise CheckpointError(f"{where} is {info!r}, expected (names, shapes, sizes)")
    names, shapes = typed(info[0], list, f"{where}.0"), typed(info[1], list, f"{where}.1")
    if len(names) != len(shapes):
        raise CheckpointError(f"{where} has {len(names)} names and {len(shapes)} shapes")
    unit = flat_name.rpartition(".")[0]
    return tuple(
        MemberRecord(original_name(join_name(unit, typed(name, str, where))), _shape(shape, where))
        for name, shape in zip(names, shapes, strict=True)
    )


def _buffer_dtypes(metadata: dict[str, Any]) -> dict[str, torch.dtype]:
    """Original dtype by original buffer name."""
    infos = typed(metadata.get("buffer_info", {}), dict, "buffer_info")
    return {
        original_name(name): item(
            typed(info, dict, f"buffer_info.{name}"),
            "_orig_dtype",
            torch.dtype,
            f"buffer_info.{name}",
        )
        for name, info in infos.items()
    }


def _shape(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise CheckpointError(f"{where} is {type(value).__name__}, expected a shape")
    return tuple(typed(size, int, where) for size in value)


def _names_a_shard(key: str) -> bool:
    return any(part.startswith(SHARD_PREFIX) for part in key.split("."))


# ---------------------------------------------------------------- what the shard says


def _piece(members: tuple[MemberRecord, ...], shard: TensorSource, world_size: int) -> Piece:
    """The shard's own length serves as the multiple: it gives the same slices as the unknown one.

    A shard of more than one dim was made with ``shard_param_on_dim_0``.
    """
    by_rows = len(shard.shape) > 1 and len(members) == 1
    size = members[0].shape[0] if by_rows and members[0].shape else sum(m.numel for m in members)
    multiple = max(shard.shape[0] if shard.shape else 1, 1)
    return Piece(
        members=members,
        layout=ShardLayout((size,), world_size, multiple),
        row_shape=members[0].shape[1:] if by_rows else (),
        dtype=shard.dtype,
    )
