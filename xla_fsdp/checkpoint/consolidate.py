"""Merges the shard files of all ranks into one ordinary model file.

Words: to *consolidate* is to check, merge and save. The two public functions have upstream's names,
arguments and results; three phases (``read_shards``, ``merge_shards``, ``save_model``) serve
callers who want to report in between.
Always true: everything is checked before anything is merged, and everything found is reported at
once, as one ``CheckpointError``; an existing file is replaced only on request.
Runs anywhere: no XLA device and no torch_xla is needed.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from xla_fsdp.checkpoint.atomic import EXISTS, save_atomically
from xla_fsdp.checkpoint.checks import find_problems
from xla_fsdp.checkpoint.merge import merge
from xla_fsdp.checkpoint.plan import identify, make_plan
from xla_fsdp.checkpoint.shard_files import OUTPUT_MARK, Shard, matching_files, open_shards
from xla_fsdp.checkpoint.validate import CheckpointError


def consolidate_sharded_state_dicts(
    state_dict_list: Sequence[Mapping[str, Any]], shard_metadata: dict[str, Any]
) -> OrderedDict[str, Any]:
    """Merge the state dicts of all ranks.

    Args:
        state_dict_list: ``model.state_dict()`` of every rank, in rank order.
        shard_metadata: ``model.get_shard_metadata()`` of any rank; xla_fsdp's or torch_xla's.

    Returns:
        The full state dict, on the CPU, under the names of the unwrapped model. Tied names share
        memory. Buffers are rank 0's, in their original dtype.

    Raises:
        CheckpointError: with every problem found.
    """
    world_size = identify(shard_metadata).world_size
    if len(state_dict_list) != world_size:
        raise CheckpointError(
            f"state_dict_list holds {len(state_dict_list)} state dicts, but shard_metadata says "
            f"world_size {world_size}; pass one for every rank, in rank order"
        )
    shards = [
        Shard(f"state_dict_list[{rank}]", state_dict, {**shard_metadata, "rank": rank})
        for rank, state_dict in enumerate(state_dict_list)
    ]
    _raise_if(find_problems(shards))
    return merge_shards(shards)


def consolidate_sharded_model_checkpoints(
    ckpt_prefix: str,
    ckpt_suffix: str = "*.pth",
    save_path: str = "",
    save_model: bool = True,
    *,
    overwrite: bool = False,
) -> tuple[OrderedDict[str, Any], str | None]:
    """Merge the shard files of all ranks, and save the result as ``{"model": state_dict}``.

    Args:
        ckpt_prefix: what the paths of all shard files start with.
        ckpt_suffix: pattern for the rest of their paths.
        save_path: of the merged file; ``ckpt_prefix + "_consolidated.pth"`` if empty.
        save_model: whether to save at all.
        overwrite: whether an existing file at ``save_path`` may be replaced.

    Returns:
        The full state dict, and the path it was saved to (None if it was not).

    Raises:
        CheckpointError: with every problem found; nothing has been written then.
    """
    output = output_path(ckpt_prefix, save_path) if save_model else None
    shards = read_shards(ckpt_prefix, ckpt_suffix, output, overwrite=overwrite)
    full_state_dict = merge_shards(shards)
    if output is not None:
        save_model_file(full_state_dict, output, overwrite=overwrite)
    return full_state_dict, output


# ---------------------------------------------------------------- phases


def output_path(ckpt_prefix: str, save_path: str) -> str:
    """Where the merged model goes."""
    return save_path or f"{ckpt_prefix}{OUTPUT_MARK}.pth"


def read_shards(
    ckpt_prefix: str, ckpt_suffix: str, output: str | None, *, overwrite: bool
) -> list[Shard]:
    """The shards of all ranks, in rank order, checked. ``output`` is None to save nothing.

    Raises:
        CheckpointError: with every problem of the files and of the output.
    """
    paths = matching_files(ckpt_prefix, ckpt_suffix)
    shards, problems = open_shards(paths, output or output_path(ckpt_prefix, ""))
    if not shards and not problems:
        problems = [f"no shard file matches {ckpt_prefix}{ckpt_suffix}"]
    problems += find_problems(shards)
    if output is not None:
        problems += _output_problems(output, shards, overwrite)
    _raise_if(problems)
    return sorted(shards, key=lambda shard: identify(shard.metadata).rank)


def merge_shards(shards: Sequence[Shard]) -> OrderedDict[str, Any]:
    """The full state dict of shards that are checked and in rank order."""
    plan = make_plan(shards[0].metadata, shards[0].state_dict)
    return merge(plan, [shard.state_dict for shard in shards])


def save_model_file(state_dict: Mapping[str, Any], output: str, *, overwrite: bool) -> None:
    """Save ``{"model": state_dict}`` completely or not at all; ``CheckpointError`` if it fails."""
    save_atomically({"model": state_dict}, output, overwrite=overwrite)


def _output_problems(output: str, shards: Sequence[Shard], overwrite: bool) -> list[str]:
    directory = os.path.dirname(output) or "."
    if os.path.realpath(output) in {os.path.realpath(shard.source) for shard in shards}:
        return [f"{output}: is one of the shard files; choose another save_path"]
    if os.path.isdir(output):
        return [f"{output}: is a directory; save_path must name a file"]
    if os.path.lexists(output) and not overwrite:
        return [f"{output}: {EXISTS}"]
    if not os.path.isdir(directory):
        return [f"{output}: cannot be written, there is no directory {directory}"]
    return []


def _raise_if(problems: list[str]) -> None:
    if problems:
        raise CheckpointError(problems)
