"""From a shard's metadata and state dict to a merge plan, whichever format they are in.

Words: the *format* is ours (``format``) or upstream's (``upstream_format``); a shard's *identity*
is its format, rank and world size.
Always true: this is the only place where the two formats are told apart; metadata that is neither,
or contradicts its state dict, raises ``CheckpointError``.
Whether shards of several ranks fit together is judged by ``checks``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from xla_fsdp.checkpoint.errors import CheckpointError, dtype_named, refuse_bad_names, typed
from xla_fsdp.checkpoint.format import FORMAT, ParamRecord, ShardMetadata
from xla_fsdp.checkpoint.full_tensors import Piece, Plan
from xla_fsdp.checkpoint.torch_xla_format import is_upstream, upstream_identity, upstream_plan
from xla_fsdp.distributed.shard_layout import ShardLayout

OWN_KEYS = ("version", "params", "ties", "buffers", "groups", "optimizer", "tensor_parts")

UPSTREAM_KEYS = ("shard_info", "flatten_info", "buffer_info")


class Identity(NamedTuple):
    """Which shard of how many, in which format."""

    format: str
    rank: int
    world_size: int


def identify(metadata: Any) -> Identity:
    """Who wrote a shard.

    Raises:
        CheckpointError: if the metadata is of neither format or is broken.
    """
    if is_upstream(typed(metadata, dict, "shard_metadata")):
        return Identity("torch_xla", *upstream_identity(metadata))
    if metadata.get("format") == FORMAT:
        own = ShardMetadata.from_dict(metadata)
        return Identity(FORMAT, own.rank, own.world_size)
    raise CheckpointError(
        "shard_metadata is of neither xla_fsdp nor torch_xla; expected what "
        "model.get_shard_metadata() returns"
    )


def shared_part(metadata: dict[str, Any]) -> dict[str, Any]:
    """What the metadata of all ranks of one model have in common: all we read but the rank."""
    keys = UPSTREAM_KEYS if is_upstream(metadata) else OWN_KEYS
    return {key: metadata[key] for key in keys if key in metadata}


def make_plan(
    metadata: dict[str, Any], state_dict: Mapping[str, Any], *, optimizer: bool = True
) -> Plan:
    """How to merge this shard with those of the other ranks.

    Args:
        metadata: what ``model.get_shard_metadata()`` returned, of either format.
        state_dict: of the same rank. Upstream's metadata leaves lengths and dtypes to it.
        optimizer: whether to merge optimizer state, too.

    Raises:
        CheckpointError: if a key is missing or names collide; every problem is listed.
    """
    identify(metadata)
    plan = (
        upstream_plan(metadata, state_dict)
        if is_upstream(metadata)
        else _own_plan(ShardMetadata.from_dict(metadata), state_dict)
    )
    if not optimizer:
        plan = replace(plan, optimizer=None)
    problems = _name_problems(plan)
    if problems:
        raise CheckpointError(problems)
    return plan


def _own_plan(metadata: ShardMetadata, state_dict: Mapping[str, Any]) -> Plan:
    size, parts = metadata.world_size, metadata.tensor_parts
    pieces = {record.key: _own_piece(record, size, parts) for record in metadata.params}
    missing = [key for key in pieces if key not in state_dict]
    if missing:
        raise CheckpointError(
            [f"model has no {key}, which shard_metadata lists" for key in missing]
        )
    whole = {key: key for key in state_dict if key not in pieces and key not in metadata.ties}
    dtypes = {key: dtype_named(name) for key, name in metadata.buffers.items() if key in whole}
    return Plan(size, pieces, whole, dtypes, metadata.ties, metadata.optimizer)


def _own_piece(record: ParamRecord, world_size: int, parts: int) -> Piece:
    dtype = dtype_named(record.dtype)
    if not record.by_rows:
        return Piece(record.members, record.layout(world_size, parts), (), dtype, parts)
    size, *row_shape = record.members[0].local_shape(parts)
    rows = ShardLayout((size,), world_size // parts, multiple=1)
    return Piece(record.members, rows, tuple(row_shape), dtype, parts)


def _name_problems(plan: Plan) -> list[str]:
    names = [member.name for piece in plan.pieces.values() for member in piece.members]
    names += plan.whole.values()
    known = Counter(names)
    return [
        *refuse_bad_names([*plan.pieces, *known, *plan.ties]),
        *(f"{name} would be in the merged model twice" for name in known if known[name] > 1),
        *(
            f"ties: {alias} is tied to {canonical}, which is not in the model"
            for alias, canonical in plan.ties.items()
            if canonical not in known
        ),
        *(
            f"optimizer: {key} is not in the model"
            for key in _optimizer_keys(plan)
            if key not in plan.pieces and key not in plan.whole
        ),
    ]


def _optimizer_keys(plan: Plan) -> list[str]:
    if plan.optimizer is None:
        return []
    in_groups = [key for group in plan.optimizer.groups for key in group.params]
    return list(dict.fromkeys([*in_groups, *plan.optimizer.states]))
