"""What shards hold, in lines for people; and whether shards are as they were saved.

Words: see ``full_tensors``. A line begins with what it is about: ``sharded``, ``whole``, ``tied``,
``group`` or ``state``.
Always true: nothing but headers is read, unless fingerprints are to be computed again; shards that
do not make sense are passed over here, since ``checks`` says what is wrong with them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from xla_fsdp.checkpoint.copying import Progress, checksums
from xla_fsdp.checkpoint.errors import CheckpointError, dtype_name
from xla_fsdp.checkpoint.fingerprint import written
from xla_fsdp.checkpoint.full_tensors import Plan
from xla_fsdp.checkpoint.plan import identify, make_plan
from xla_fsdp.checkpoint.shard_files import Shard
from xla_fsdp.checkpoint.tensor_source import TensorSource


def size_line(shard: Shard, *, optimizer: bool) -> str:
    """How much there is in full, according to one rank's shard; tied tensors count once."""
    plan = make_plan(shard.metadata, shard.state_dict, optimizer=optimizer)
    sizes: dict[Hashable, list[int]] = {}
    for key, piece in plan.pieces.items():
        identity = shard.state_dict[key].identity or key
        sizes.setdefault(identity, [member.numel for member in piece.members])
    for key in plan.whole:
        if isinstance(value := shard.state_dict[key], TensorSource):
            sizes.setdefault(value.identity or key, [value.spec.nbytes // value.dtype.itemsize])
    numels = [numel for each in sizes.values() for numel in each]
    text = f"{len(numels)} parameters and buffers, {sum(numels):,} elements"
    if plan.optimizer is None:
        return text
    states = sum(len(plan.names_of(key)) for key in plan.optimizer.states)
    return f"{text}, optimizer state of {states}"


def describe_shards(shards: Sequence[Shard]) -> Iterator[str]:
    """Ranks, names, shapes, optimizer state; of shards that may have problems."""
    readable = []
    for shard in shards:
        try:
            identity = identify(shard.metadata)
        except CheckpointError:
            continue  # find_problems says why
        readable.append(shard)
        size = sum(tensor.spec.nbytes for _, tensor in shard.tensors())
        yield (
            f"rank {identity.rank} of {identity.world_size}: {shard.source} "
            f"({identity.format}, {size:,} bytes of tensors)"
        )
    if readable:
        yield from _contents(readable[0])


def verify_shards(
    shards: Sequence[Shard], threads: int, progress: Progress
) -> tuple[list[str], int, int]:
    """Compute all fingerprints again.

    Returns:
        One line for each tensor that is damaged; how many have a fingerprint, and how many none.
    """
    known = [
        (f"{shard.source}: {name}", tensor)
        for shard in shards
        for name, tensor in shard.tensors()
        if tensor.fingerprint is not None
    ]
    found = checksums([t.data for _, t in known], threads=threads, progress=progress)
    problems = [
        f"{name} is damaged: its fingerprint is {written(checksum)}, but was {tensor.fingerprint} "
        f"when it was saved. Take this file from another copy."
        for (name, tensor), checksum in zip(known, found, strict=True)
        if written(checksum) != tensor.fingerprint
    ]
    total = sum(1 for shard in shards for _ in shard.tensors())
    return problems, len(known), total - len(known)


def _contents(shard: Shard) -> Iterator[str]:
    try:
        plan = make_plan(shard.metadata, shard.state_dict)
    except CheckpointError:
        return
    for key, piece in plan.pieces.items():
        for member in piece.members:
            where = f" in {key}" if member.name != key else ""
            yield f"sharded  {member.name}  {dtype_name(piece.dtype)} {_shape(member.shape)}{where}"
    for key, name in plan.whole.items():
        value = shard.state_dict[key]
        if isinstance(value, TensorSource):
            yield f"whole    {name}  {dtype_name(value.dtype)} {_shape(value.shape)}"
        else:
            yield f"whole    {name}  a {type(value).__name__}"
    for alias, canonical in plan.ties.items():
        yield f"tied     {alias} = {canonical}"
    yield from _optimizer(plan)


def _optimizer(plan: Plan) -> Iterator[str]:
    if plan.optimizer is None:
        return
    for i, group in enumerate(plan.optimizer.groups):
        yield f"group    {i}: {len(group.params)} parameters, {group.options}"
    for key, state in plan.optimizer.states.items():
        names = [*state.sharded, *(f"{name} (whole)" for name in state.whole), *state.values]
        yield f"state    {key}: {', '.join(names)}"


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"
