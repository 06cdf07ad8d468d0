"""Check that shards are complete and belong together, verify checksums, and list their contents.

Invariants: bad shards raise nothing; each problem is one line that names its source; shards without
problems can be merged. Only headers are read, but tied tensors and unsharded optimizer state are
compared byte for byte.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from xla_fsdp.checkpoint.errors import (
    CheckpointError,
    collecting,
    dtype_name,
    listed,
    naming,
    one_line,
    shown,
)
from xla_fsdp.checkpoint.files.checksum import whole
from xla_fsdp.checkpoint.files.copying import Progress, damage, read_crcs
from xla_fsdp.checkpoint.files.tensor_source import TensorSource, TensorSpec, same_bytes
from xla_fsdp.checkpoint.format.plan import Identity, MergePlan, identify, make_plan, shared_part
from xla_fsdp.checkpoint.format.records import model_name, state_name
from xla_fsdp.checkpoint.format.shard_files import (
    MODEL_PREFIX,
    Shard,
    are_alike,
    is_of_model,
    is_state,
)
from xla_fsdp.checkpoint.steps.step_directory import MARKER, Marker, rank_file_name

MIXED = {"formats": "format", "world sizes": "world_size", "steps": "step", "jobs": "job"}


def find_problems(shards: Sequence[Shard], *, optimizer: bool = True) -> list[str]:
    """Return everything that is wrong with these shards, one line each.

    Args:
        shards: of all ranks of one model, in any order.
        optimizer: whether to check optimizer state too.
    """
    problems: list[str] = []
    known: list[tuple[Shard, Identity]] = []
    for shard in shards:
        with collecting(problems), naming(shard.source):
            known.append((shard, identify(shard.metadata)))
    mixed = _mixed_problems(known)
    if mixed or not known:  # further checks would compare shards of different checkpoints
        return problems + mixed
    return problems + _rank_problems(known) + _content_problems(known, optimizer)


def check_marker(shard: Shard, marker: Marker) -> None:
    """Raise ``CheckpointError`` if a shard is not from the file that a step's marker lists under
    its name."""
    name = os.path.basename(shard.source)
    with naming(shard.source):
        found = identify(shard.metadata)
    own = rank_file_name(found.rank, found.world_size, name.rpartition(".")[2])
    save = f"step {marker.step} of job {marker.job}"
    if own != name or found.world_size != marker.world_size:
        problem = f"holds the shard of rank {found.rank} of {found.world_size}"
    elif marker.job is not None and (found.step, found.job) != (marker.step, marker.job):
        problem = f"belongs to step {found.step} of job {found.job}, but {MARKER} to {save}"
    elif marker.files[name].digest not in (None, shard.digest):
        problem = f"is not the file that was written for {save}, by its digest in {MARKER}"
    else:
        return
    raise CheckpointError(
        f"{shard.source}: {one_line(problem)}. Take it from another copy of this step, or use "
        f"another step"
    )


def _mixed_problems(known: Sequence[tuple[Shard, Identity]]) -> list[str]:
    problems = []
    for what, field in MIXED.items():
        sources: dict[Hashable, list[str]] = defaultdict(list)
        for shard, identity in known:
            sources[getattr(identity, field)].append(shard.source)
        if len(sources) > 1:
            groups = "; ".join(
                f"{v} in {listed(names, len(names))}" for v, names in sources.items()
            )
            problems.append(
                f"mixed {what}: {groups}. Narrow ckpt_prefix or ckpt_suffix to one run's files."
            )
    return problems


def _rank_problems(known: Sequence[tuple[Shard, Identity]]) -> list[str]:
    world_size = known[0][1].world_size
    holders: dict[int, list[str]] = defaultdict(list)
    for shard, identity in known:
        holders[identity.rank].append(shard.source)
    copies = len(known[0][0].metadata.get("groups") or [None])
    problems = [
        f"rank {rank} of {world_size} is there {len(sources)} times: "
        f"{listed(sources, len(sources))}. Keep "
        + ("one." if copies == 1 else f"at most {copies}, one for each sharding group.")
        for rank, sources in sorted(holders.items())
        if len(sources) > copies
    ]
    absent = (str(rank) for rank in range(world_size) if rank not in holders)
    if len(holders) < world_size:
        ranks = listed(absent, world_size - len(holders))
        problems.append(
            f"missing ranks: {ranks} of {world_size}; {known[0][0].source} says that "
            f"{world_size} ranks were saved, and {len(holders)} are readable"
        )
    return problems


def _content_problems(known: Sequence[tuple[Shard, Identity]], optimizer: bool) -> list[str]:
    shards = [shard for shard, _ in known]
    reference = shards[0]
    problems: list[str] = []
    with collecting(problems), naming(reference.source):
        plan = make_plan(reference.metadata, reference.state_dict, optimizer=optimizer)
        for shard in shards:
            found = _shard_problems(plan, shard, reference)
            problems += [f"{shard.source}: {problem}" for problem in found]
        problems += _replica_problems(known)
    return problems


def _replica_problems(known: Sequence[tuple[Shard, Identity]]) -> Iterator[str]:
    """Compare the checksums of shards of the same rank in different sharding groups."""
    if known[0][0].metadata.get("groups") is None:
        return
    first: dict[int, Shard] = {}
    for shard, identity in known:
        other = first.setdefault(identity.rank, shard)
        expected = {name: tensor.checksum for name, tensor in other.tensors()}
        for name, tensor in shard.tensors() if other is not shard else ():
            both = (tensor.checksum, expected.get(name))
            if None not in both and both[0] != both[1]:
                yield f"{shard.source}: {name} differs from that in its replica {other.source}"


def _shard_problems(plan: MergePlan, shard: Shard, reference: Shard) -> Iterator[str]:
    different = _first_difference(shared_part(reference.metadata), shared_part(shard.metadata))
    if different:
        yield f"shard_metadata differs from that of {reference.source} at {different}"
        return  # the plan does not fit its tensors
    if shard is reference or not are_alike([shard, reference]):  # or only their bytes can differ
        yield from find_misfits(plan, shard, reference)
    yield from _tie_problems(plan, shard.content)
    yield from _whole_state_problems(plan, shard, reference)


def find_misfits(plan: MergePlan, shard: Shard, reference: Shard) -> Iterator[str]:
    """Yield a line for each tensor or value of a shard that is not what the plan has or, where this
    leaves it open, the reference (which may be the same shard)."""
    as_there = "" if shard is reference else f", as in {reference.source}"
    expected: dict[str, tuple[str, str, str]] = {}  # by name in a file: its name in a line; kind
    for key, value in reference.state_dict.items():
        entry = plan.sharded.get(key)
        if entry is None:
            expected[model_name(key)] = key, _kind(value), as_there
        else:
            kind = _kind(TensorSpec(entry.dtype, entry.shard_shape))
            expected[model_name(key)] = f"the shard of {key}", kind, ""
    found = {
        name: _kind(value)
        for name, value in shard.content.items()
        if is_of_model(name) or (plan.optimizer is not None and is_state(name))
    }
    for key, states in (plan.optimizer.states if plan.optimizer else {}).items():
        for state in states.sharded + states.whole:
            name = state_name(key, state)
            known = reference.content.get(name) or shard.content.get(name)
            kind = "a tensor" if known is None else _kind(known)
            if known is not None and state in states.sharded:
                kind = _kind(TensorSpec(known.dtype, plan.sharded[key].shard_shape))
            expected[name] = f"optimizer state {state} of {key}", kind, as_there
    for name in {**expected, **found}:
        nothing = name.removeprefix(MODEL_PREFIX), "nothing of this name", as_there
        called, kind, where = expected.get(name, nothing)
        if found.get(name) != kind:
            yield f"{called} is {found.get(name, 'missing')}, expected {kind}{where}"


def _tie_problems(plan: MergePlan, content: Mapping[str, Any]) -> Iterator[str]:
    for alias, canonical in plan.ties.items():
        first, second = content.get(model_name(canonical)), content.get(model_name(alias))
        both = first is not None and second is not None
        if both and (_kind(first) != _kind(second) or not _same_bits(first, second)):
            yield f"{alias} and {canonical} are tied, but their shards differ"


def _whole_state_problems(plan: MergePlan, shard: Shard, reference: Shard) -> Iterator[str]:
    # A merged parameter gets such a state unchanged, so it must be equal on all ranks, and fit each
    # of the parameters that were flattened together.
    hint = "Leave optimizer state out (--model_only)."
    own, other = shard.metadata.get("fingerprints", {}), reference.metadata.get("fingerprints", {})
    for key, states in (plan.optimizer.states if plan.optimizer else {}).items():
        members = len(plan.names_of(key))
        for name, where in ((state_name(key, s), f"{s} of {key}") for s in states.whole):
            if shard is not reference and own.get(name) and own[name] == other.get(name):
                continue
            found, model = shard.content.get(name), reference.content.get(name)
            if found is None or model is None or found.spec != model.spec:
                continue  # told already
            if not _same_bits(found, model):
                yield (
                    f"optimizer state {where} differs from that in {reference.source}, so there is "
                    f"no full one. {hint}"
                )
            if members > 1 and found.shape not in ((), (1,)):
                yield (
                    f"optimizer state {where} has shape {found.shape} for {members} parameters in "
                    f"one. {hint}"
                )


def _same_bits(first: Any, second: Any) -> bool:
    """Return whether two tensors have equal bytes, so that a NaN equals itself."""
    if not isinstance(first, TensorSource):
        return True
    if first.identity is not None and first.identity == second.identity:
        return True
    return same_bytes(first.data, second.data)


def _kind(value: Any) -> str:
    if isinstance(value, TensorSource | TensorSpec):
        return f"{dtype_name(value.dtype)} of shape {value.shape}"
    return f"a {type(value).__name__}"


def _first_difference(expected: Any, found: Any, path: str = "") -> str | None:
    """Return where two nested values differ first, and how; None if they are equal."""
    if expected == found:
        return None
    pairs: Iterable[tuple[Any, Any, Any]]
    if isinstance(expected, dict) and isinstance(found, dict):
        absent = object()
        keys = dict.fromkeys([*expected, *found])
        pairs = ((key, expected.get(key, absent), found.get(key, absent)) for key in keys)
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        pairs = ((i, *pair) for i, pair in enumerate(zip(expected, found, strict=False)))
    else:
        return f"{path}: {shown(found)}, expected {shown(expected)}"
    inner = (_first_difference(a, b, f"{path}.{key}".lstrip(".")) for key, a, b in pairs)
    return next((text for text in inner if text), f"{path}: the number of entries")


# ---------------------------------------------------------------- descriptions


def describe_shards(shards: Sequence[Shard]) -> Iterator[str]:
    """Yield lines with ranks, names, shapes and optimizer state; unreadable shards are skipped."""
    readable = []
    for shard in shards:
        with suppress(CheckpointError):
            identity = identify(shard.metadata)
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
    """Verify all tensors that have a checksum, or are verified as they are read. Return one line
    for each that is damaged; the number of tensors with a checksum, and without."""
    known = [
        (f"{shard.source}: {name}", tensor)
        for shard in shards
        for name, tensor in shard.tensors()
        if tensor.checksum is not None
    ]
    crcs = read_crcs([t.data for _, t in known], threads=threads, progress=progress)
    wholes = (whole(own, t.spec.nbytes) for (_, t), own in zip(known, crcs, strict=True))
    found = (damage(*tensor, crc) for tensor, crc in zip(known, wholes, strict=True))
    problems = [problem for problem in found if problem]
    others = [(s.verified, t) for s in shards for _, t in s.tensors() if t.checksum is None]
    verified = [tensor for is_verified, tensor in others if is_verified]
    for tensor in verified:
        with collecting(problems):
            read_crcs([tensor.data], threads=1, progress=progress)
    return problems, len(known) + len(verified), len(others) - len(verified)


def _contents(shard: Shard) -> Iterator[str]:
    try:
        plan = make_plan(shard.metadata, shard.state_dict)
    except CheckpointError:
        return
    for key, entry in plan.sharded.items():
        for member in entry.members:
            where = f" in {key}" if member.name != key else ""
            shape = list(member.shape)
            yield f"sharded  {member.name}  {dtype_name(entry.dtype)} {shape}{where}"
    for key, name in plan.unsharded.items():
        value = shard.state_dict[key]
        if isinstance(value, TensorSource):
            yield f"whole    {name}  {dtype_name(value.dtype)} {list(value.shape)}"
        else:
            yield f"whole    {name}  a {type(value).__name__}"
    for alias, canonical in plan.ties.items():
        yield f"tied     {alias} = {canonical}"
    if plan.optimizer is None:
        return
    for i, group in enumerate(plan.optimizer.groups):
        yield f"group    {i}: {len(group.params)} parameters, {group.options}"
    for key, state in plan.optimizer.states.items():
        names = [*state.sharded, *(f"{name} (whole)" for name in state.whole), *state.values]
        yield f"state    {key}: {', '.join(names)}"
