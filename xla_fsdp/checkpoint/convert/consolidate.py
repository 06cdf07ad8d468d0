"""Merge the shard files of all ranks into ordinary model files, without an XLA device.

The two functions with torch_xla's names have its arguments and return a state dict in memory.
``merge_files`` works in bounded memory and also handles optimizer state, other kinds of files,
names and dtypes.

Invariants: everything is checked before anything is written, and one ``CheckpointError`` reports
all problems; an existing file is replaced only on request; no file has its final name before the
checksums of all tensors it was made of are verified.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from xla_fsdp.checkpoint.convert.dcp_files import import_dcp
from xla_fsdp.checkpoint.convert.model_files import (
    Kind,
    Layout,
    Rule,
    dcp_content,
    in_dtype,
    kind_of,
    model_outputs,
    older_files,
    renamed,
    restricted,
)
from xla_fsdp.checkpoint.convert.read_model import open_model
from xla_fsdp.checkpoint.errors import CheckpointError, collecting, deleted_meanwhile, raise_if
from xla_fsdp.checkpoint.files.copying import Verifier, find_damage
from xla_fsdp.checkpoint.files.outputs import (
    BytesOutput,
    FilesJob,
    Output,
    TorchOutput,
    WriteOptions,
    find_output_problems,
    find_shard_files,
    write_outputs,
)
from xla_fsdp.checkpoint.files.storage import Storage, is_url, open_storage, split_path
from xla_fsdp.checkpoint.files.tensor_source import (
    LocalFile,
    TensorSource,
    convert_tensors,
    full_path,
    source_of,
)
from xla_fsdp.checkpoint.format.consistency import check_marker, find_problems
from xla_fsdp.checkpoint.format.plan import FullCheckpoint, full_checkpoint, identify, make_plan
from xla_fsdp.checkpoint.format.records import model_name
from xla_fsdp.checkpoint.format.shard_files import (
    DCP_METADATA,
    SAFETENSORS,
    Shard,
    find_files,
    nothing_found,
    open_remote_torch,
    open_safetensors,
    open_torch,
    verifying_shards,
)
from xla_fsdp.checkpoint.steps.step_directory import (
    MARKER,
    Marker,
    find_marker,
    is_step_file,
    is_step_folder,
)

OUTPUT_MARK = "_consolidated"


@dataclass(frozen=True)
class MergeOptions:
    """Options of ``merge_files``.

    Args:
        optimizer: whether to merge optimizer state too, if the shards hold any.
        dtype: of the merged model's floating-point tensors; None to leave theirs.
        rules: that rename tensors.
        only: prefixes, of new names, of the tensors to merge; () for all.
        kind: of output; None to take the one that ``save_path`` implies.
        layout: of the output in files.
        write: how files are written.
    """

    optimizer: bool = True
    dtype: torch.dtype | None = None
    rules: tuple[Rule, ...] = ()
    only: tuple[str, ...] = ()
    kind: Kind | None = None
    layout: Layout = field(default_factory=Layout)
    write: WriteOptions = field(default_factory=WriteOptions)


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
        Shard(
            f"state_dict_list[{rank}]",
            {model_name(key): v for key, v in convert_tensors(dict(state_dict), source_of).items()},
            {**shard_metadata, "rank": rank},
        )
        for rank, state_dict in enumerate(state_dict_list)
    ]
    raise_if(find_problems(shards, optimizer=False))
    full, _ = merge_shards(shards, optimizer=False)
    return load_model(full)


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
        ckpt_prefix: start of the paths of all shard files, or a directory.
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
    shards = read_shards(
        ckpt_prefix,
        ckpt_suffix,
        output,
        overwrite=overwrite,
        optimizer=False,
        kind=Kind.TORCH,
    )
    full, verifiers = merge_shards(shards, optimizer=False)
    model = load_model(full)
    raise_if(find_damage(verifiers))
    if output is not None:
        content = {"model": convert_tensors(model, source_of)}
        write_outputs([TorchOutput(output, content)], WriteOptions(overwrite=overwrite))
    return model, output


def merge_files(shards: Sequence[Shard], save_path: str, options: MergeOptions) -> None:
    """Merge shards into files, with a bounded amount of memory.

    Args:
        shards: from ``read_shards``.
        save_path: of a file or directory; its name implies the kind of output.
        options: of the merge.

    Raises:
        CheckpointError: with every problem found; nothing has been written then.
    """
    plan_merge(shards, save_path, options).run(options.write)


def output_path(ckpt_prefix: str, save_path: str) -> str:
    """Return the full ``save_path``, or the default path of the merged file if that is empty."""
    if save_path:
        return full_path(save_path)
    start = full_path(ckpt_prefix, "ckpt_prefix")
    if os.path.isdir(start):  # beside it, and beside the run that a step is in
        run, name = os.path.split(os.path.normpath(start))
        start = f"{run}_{name}" if is_step_folder(name) else os.path.join(run, name)
    return f"{start}{OUTPUT_MARK}.pth"


def read_shards(
    ckpt_prefix: str,
    ckpt_suffix: str,
    output: str | None,
    *,
    overwrite: bool,
    optimizer: bool = True,
    kind: Kind | None = None,
) -> list[Shard]:
    """Open and check the shards of all ranks; return one for each rank, in rank order.

    Args:
        ckpt_prefix: as for ``find_files``.
        ckpt_suffix: as for ``find_files``.
        output: path of the merged model; None to save nothing.
        overwrite: whether an existing file at ``output`` may be replaced.
        optimizer: whether to check optimizer state too.
        kind: of output; None to take the one that ``output`` implies.

    Raises:
        CheckpointError: with every problem of the shard files and of the output path.
    """
    shards, problems = look_at_shards(ckpt_prefix, ckpt_suffix, output, optimizer=optimizer)
    if output is not None:
        kind = kind or kind_of(output)
        problems += _find_path_problems(output, shards, kind, overwrite=overwrite)
    raise_if(problems)
    return _one_per_rank(shards)


def look_at_shards(
    ckpt_prefix: str, ckpt_suffix: str, output: str | None, *, optimizer: bool
) -> tuple[list[Shard], list[str]]:
    """Return all shards that can be opened, and one line for every problem of the files."""
    try:
        paths = find_files(ckpt_prefix, ckpt_suffix)
    except CheckpointError as error:
        return [], error.problems
    shards, problems = _open_shards(paths, output or output_path(ckpt_prefix, ""))
    if not shards:
        problems = _whole_model(ckpt_prefix) or problems
        problems = problems or [nothing_found(ckpt_prefix, ckpt_suffix)]
    return shards, problems + find_problems(shards, optimizer=optimizer)


def _whole_model(path: str) -> list[str]:
    """Return a line that says so, if a path is that of a whole model, which people give, too."""
    try:
        found = len(open_model(path))
    except CheckpointError:
        return []
    return [
        f"{path}: holds a whole model of {found} tensors, not one rank's shards, so there is "
        f"nothing to merge. 'inspect {path}' lists them; init_from_checkpoint loads them, and "
        f"from_pretrained a directory"
    ]


def _open_shards(paths: Sequence[str], output: str) -> tuple[list[Shard], list[str]]:
    shards: list[Shard] = []
    problems: list[str] = []
    storages: dict[str, Storage] = {}
    markers: dict[str, Marker | None] = {}
    for path in paths:
        folder, name = split_path(path)
        try:
            if is_url(path) and folder not in storages:
                storages[folder] = open_storage(folder, files_at_once=len(paths))
            shard = open_shard(path, storages.get(folder), shards[0] if shards else None)
        except CheckpointError as error:
            # The pattern of shard files may match earlier outputs too: these are ignored.
            same = os.path.realpath(path) == os.path.realpath(output)
            if not same and OUTPUT_MARK not in os.path.basename(path):
                problems += [deleted_meanwhile(path)] if _is_gone(path) else error.problems
            continue
        with collecting(problems):
            if folder not in markers:
                markers[folder] = find_marker(folder)
            marker = markers[folder]
            if marker and name in marker.files:
                check_marker(shard, marker)
            shards.append(shard)
    return shards, problems


def _is_gone(path: str) -> bool:
    """Whether a local file that was found is not there any more, nor a marker that lists it."""
    left = (path, os.path.join(os.path.dirname(path), MARKER))
    return not (is_url(path) or any(map(os.path.lexists, left)))


def open_shard(path: str, storage: Storage | None = None, like: Shard | None = None) -> Shard:
    """Open one rank's shard; its tensors are read from the file on demand.

    Args:
        path: of a torch file, a safetensors file, or a directory of torch.distributed.checkpoint;
            or a URL of such a file.
        storage: of its folder, if it is a URL; None to open it.
        like: another rank's shard, with which it shares what is equal in both.

    Raises:
        CheckpointError: with lines that name the file: it cannot be read, has another format, would
            run code, or lacks the model or the metadata.
    """
    if is_url(path):
        folder, name = split_path(path)
        storage = storage or open_storage(folder)
        if path.endswith(SAFETENSORS):
            return open_safetensors(storage.source(name), path, like)
        if storage.names(name):
            raise CheckpointError(
                f"{path}: is a directory; copy those of torch.distributed.checkpoint to this "
                f"machine first"
            )
        return open_remote_torch(path)
    path = full_path(path)
    if os.path.exists(os.path.join(path, DCP_METADATA)):
        return import_dcp(path)
    if path.endswith(SAFETENSORS):
        return open_safetensors(LocalFile(path), path, like)
    return open_torch(path, like)


def _one_per_rank(shards: Sequence[Shard]) -> list[Shard]:
    # Sharding groups save replicas of each shard; the first one is taken.
    by_rank: dict[int, Shard] = {}
    for shard in shards:
        by_rank.setdefault(identify(shard.metadata).rank, shard)
    return [by_rank[rank] for rank in sorted(by_rank)]


def merge_shards(
    shards: Sequence[Shard], *, optimizer: bool, rules: Sequence[Rule] = ()
) -> tuple[FullCheckpoint, list[Verifier]]:
    """Return the full checkpoint of checked shards in rank order, and verifiers of its tensors."""
    same, verifiers = verifying_shards(shards)
    plan = make_plan(same[0].metadata, same[0].state_dict, optimizer=optimizer)
    return full_checkpoint(renamed(plan, rules), same), verifiers


def plan_merge(shards: Sequence[Shard], save_path: str, options: MergeOptions) -> FilesJob:
    """Return the job that writes the merged shards."""
    save_path = full_path(save_path)
    full, verifiers = merge_shards(shards, optimizer=options.optimizer, rules=options.rules)
    if options.only:
        full = restricted(full, options.only)
    if options.dtype is not None:
        full = in_dtype(full, options.dtype)
    kind = options.kind or kind_of(save_path)
    outputs: list[Output] = (
        [_dcp_output(save_path, dcp_content(full, options.layout), options.layout)]
        if kind is Kind.DCP
        else model_outputs(full, save_path, kind, options.layout)
    )
    return FilesJob(
        outputs,
        verifiers,
        make_directories=kind is Kind.DIRECTORY,
        sources=[shard.source for shard in shards],
        content=full,
        older=older_files(outputs, save_path, kind),
    )


def _dcp_output(path: str, content: Mapping[str, Any], layout: Layout) -> Output:
    from xla_fsdp.checkpoint.convert.dcp_output import DcpOutput  # imports much of torch

    return DcpOutput(path.rstrip(os.sep), content, layout.max_shard_size)


def load_model(full: FullCheckpoint) -> OrderedDict[str, Any]:
    """Read the full state dict into CPU memory; tied names share one tensor."""
    return OrderedDict(convert_tensors(full.model, TensorSource.load))


def _find_path_problems(
    output: str, shards: Sequence[Shard], kind: Kind, *, overwrite: bool
) -> list[str]:
    # An early check, before the merge is planned: names and sizes of files are not known yet.
    sources = [shard.source for shard in shards]
    if problems := find_shard_files([output], sources):
        return problems
    if kind is Kind.DCP and find_shard_files([output], [split_path(path)[0] for path in sources]):
        return [f"{output}: holds the shard files, and would be replaced; choose another save_path"]
    if is_step_file(split_path(output)[1]):
        return [f"{output}: has the name of a file of a run or a step; choose another save_path"]
    folders = {split_path(split_path(path)[0]) for path in sources}
    for run in {above for above, name in folders if is_step_folder(name)}:
        if f"{os.path.realpath(output)}/".startswith(f"{os.path.realpath(run)}/"):
            return [
                f"{output}: is in the directory of the run, {run}, which holds only "
                f"what save_checkpoint writes; choose a save_path beside it, such as "
                f"{run}{OUTPUT_MARK}.pth"
            ]
    if kind is Kind.DIRECTORY:
        inside = BytesOutput(os.path.join(output, "model.safetensors"), b"")
        return find_output_problems([inside], overwrite=True, make_directories=True)
    is_dcp = kind is Kind.DCP
    file = _dcp_output(output, {}, Layout()) if is_dcp else BytesOutput(output, b"")
    return find_output_problems([file], overwrite=overwrite, make_directories=False)
