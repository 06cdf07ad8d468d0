"""What the command ``consolidate_sharded_ckpts`` does, once its arguments are read."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from xla_fsdp.checkpoint.convert.consolidate import (
    OUTPUT_MARK,
    MergeOptions,
    look_at_shards,
    open_shard,
    output_path,
    plan_merge,
    read_shards,
)
from xla_fsdp.checkpoint.convert.model_files import (
    DTYPES,
    Kind,
    Layout,
    kind_of,
    parse_rule,
    parse_size,
)
from xla_fsdp.checkpoint.convert.read_model import INDEX, open_model
from xla_fsdp.checkpoint.convert.reshard_files import plan_reshard, step_of
from xla_fsdp.checkpoint.errors import (
    CheckpointError,
    collecting,
    dtype_name,
    listed,
    one_line,
    printable,
    raise_if,
)
from xla_fsdp.checkpoint.files.copying import Progress, default_threads
from xla_fsdp.checkpoint.files.outputs import FilesJob, WriteOptions
from xla_fsdp.checkpoint.files.storage import Storage, open_storage
from xla_fsdp.checkpoint.format.consistency import describe_shards, verify_shards
from xla_fsdp.checkpoint.format.plan import absent_names
from xla_fsdp.checkpoint.format.shard_files import DEFAULT_SUFFIX, Shard, describe_found
from xla_fsdp.checkpoint.steps.step_directory import (
    MARKER,
    Attempt,
    all_attempts,
    read_marker,
    read_metrics,
)

PROGRAM = "consolidate_sharded_ckpts"
TARGETS = {"dcp": Kind.DCP, "hf": Kind.DIRECTORY, "torch": Kind.TORCH, "pth": Kind.TORCH}
HEAD = ("step", "folder", "state", "ranks", "files", "bytes", "job", "metrics")
LONGEST_JOB = 80  # characters: a file may hold any name
_TO_THE_RIGHT = {"step", "ranks", "files", "bytes"}


def run(args: Namespace, status: Any) -> list[str]:
    """Do what the arguments ask for; return one line for each problem, [] if all went well.

    What takes long is told by ``status.doing``, anything with a text; "" for nothing.
    """
    problems: list[str] = []
    with collecting(problems):
        _refuse_impossible(args)
        {"list": _list, "inspect": _inspect}.get(args.command, _consolidate)(args, status)
    return [one_line(problem) for problem in problems]


def _inspect(args: Namespace, status: Any) -> None:
    if args.ckpt_suffix == DEFAULT_SUFFIX and _is_model(os.path.expanduser(args.ckpt_prefix)):
        _inspect_model(args)
        return
    shards, problems = look_at_shards(
        args.ckpt_prefix, args.ckpt_suffix, None, optimizer=not args.model_only
    )
    if shards:
        print(f"found {_found(args, shards)}")
    for line in describe_shards(shards):
        print(one_line(line))
    if args.verify:
        size = sum(tensor.spec.nbytes for shard in shards for _, tensor in shard.tensors())
        with _progress(status, "verifying", size) as progress:
            damage, known, unknown = verify_shards(
                shards, args.threads or default_threads(), progress
            )
        problems += damage
        print(f"verified {known} tensors; {unknown} have no checksum")
    raise_if(problems)


def _is_model(path: str) -> bool:
    """Whether this is one file, or a directory as ``--save_path hf/`` makes it."""
    return os.path.isfile(path) or any(
        os.path.isfile(os.path.join(path, f"model.safetensors{end}")) for end in ("", INDEX)
    )


def _inspect_model(args: Namespace) -> None:
    """Describe what is no prefix of shards' files: one shard, or a full model."""
    with suppress(CheckpointError):
        shard = open_shard(args.ckpt_prefix)
        for line in describe_shards([shard]):
            print(one_line(line))
        return
    tensors = open_model(args.ckpt_prefix)
    for name, tensor in tensors.items():
        print(one_line(f"whole    {name}  {dtype_name(tensor.dtype)} {list(tensor.shape)}"))
        if args.verify:
            tensor.load()
    known = sum(tensor.checksum is not None for tensor in tensors.values())
    if args.verify:
        print(f"verified {known} tensors; {len(tensors) - known} have no checksum")


def _list(args: Namespace, _: Any) -> None:
    def verify(folder: str) -> list[str]:
        shards, problems = look_at_shards(folder, DEFAULT_SUFFIX, None, optimizer=True)
        damage, _, _ = verify_shards(shards, args.threads or default_threads(), lambda _: None)
        return problems + damage

    for line in describe_steps(open_storage(args.ckpt_prefix), verify if args.verify else None):
        print(line)


def describe_steps(
    storage: Storage, verify: Callable[[str], Sequence[str]] | None
) -> Iterator[str]:
    """Yield the lines of a table with every attempt in a run's directory, and raise its problems
    then. ``verify`` returns what is wrong with a complete attempt's folder."""
    if not storage.names():
        raise CheckpointError(f"{storage.where}: there is no such directory, or nothing is in it")
    attempts, tree, problems = all_attempts(storage), storage.tree(), list[str]()
    if not attempts and storage.find(MARKER) is not None:
        raise CheckpointError(
            f"{storage.where}: is one step; list {os.path.dirname(storage.where.rstrip('/'))}, or "
            f"inspect this"
        )
    if not attempts:
        raise CheckpointError(f"{storage.where}: holds no step that save_checkpoint wrote")
    rows: list[tuple[str, ...]] = [HEAD]
    for attempt in attempts:
        sizes = tree.get(attempt.folder, {})
        row, found = _row(storage, attempt, sizes)
        if verify is not None and not found and MARKER in sizes:
            found = list(verify(f"{storage.where.rstrip('/')}/{attempt.folder}"))
            row = (*row[:2], "damaged" if found else "verified", *row[3:])
        rows.append(row)
        problems += found
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    for row in rows:
        cells = (
            cell.rjust(width) if name in _TO_THE_RIGHT else cell.ljust(width)
            for cell, width, name in zip(row, widths, HEAD, strict=True)
        )
        yield "  ".join(cells).rstrip()
    if problems:
        raise CheckpointError(problems)


def _row(
    storage: Storage, attempt: Attempt, sizes: dict[str, int]
) -> tuple[tuple[str, ...], list[str]]:
    """Return the cells of a row, and what is wrong with the marker."""
    start = (str(attempt.step), attempt.folder)
    if MARKER not in sizes:
        return (*start, "incomplete", "", str(len(sizes)), f"{sum(sizes.values()):,}", "", ""), []
    try:
        marker = read_marker(storage, attempt.folder)
    except CheckpointError as error:
        return (*start, "damaged", "", "", "", "", ""), error.problems
    nbytes = sum(sizes.get(name, 0) for name in marker.files)
    metrics = read_metrics(storage, attempt).items()
    shown = one_line(", ".join(f"{name}={value}" for name, value in metrics))
    size, count = str(marker.world_size), str(len(marker.files))
    job = printable(marker.job or "")[:LONGEST_JOB]
    folder = f"{storage.where.rstrip('/')}/{attempt.folder}"
    problems = [
        f"{folder}/{name}: {record.nbytes:,} bytes were written, but "
        f"{f'{sizes[name]:,}' if name in sizes else 'none'} are here"
        for name, record in marker.files.items()
        if sizes.get(name) != record.nbytes
    ]
    state = "lacks files" if problems else "complete"
    return (*start, state, size, count, f"{nbytes:,}", job, shown), problems


def _consolidate(args: Namespace, status: Any) -> None:
    output = output_path(args.ckpt_prefix, args.save_path or _default_path(args))
    kind = _kind(args, output)
    options = _options(args, kind)
    shards = read_shards(
        args.ckpt_prefix,
        args.ckpt_suffix,
        output,
        overwrite=args.overwrite,
        optimizer=options.optimizer,
        kind=kind,
    )
    print(f"found {_found(args, shards)}", flush=True)
    _tell_what_is_left(args, shards)
    status.doing = "laying out the files to write"
    job = _job(args, shards, output, options)
    raise_if(job.find_problems(overwrite=args.overwrite))
    if args.dry_run:
        for line in job.describe():
            print(line)
        return
    with _progress(status, "copying", job.nbytes) as progress:
        job.write(replace(options.write, progress=progress))
    what = "shards" if args.to_world_size else "consolidated model"
    print(one_line(f"saved {what} to {output} ({job.content})"))


def _tell_what_is_left(args: Namespace, shards: Sequence[Shard]) -> None:
    absent = absent_names(shards[0].metadata, shards[0].state_dict)
    if absent and args.strict:
        raise_if([f"{name} is in no shard, though shard_metadata lists it" for name in absent])
    if absent:
        print(one_line(f"not merged, as no shard has it: {listed(absent, len(absent))}"))
    if left := shards[0].left_behind:
        print(one_line(f"left behind, as it is neither model nor optimizer: {', '.join(left)}"))


def _found(args: Namespace, shards: Sequence[Shard]) -> str:
    sources = [shard.source for shard in shards]
    return one_line(describe_found(sources, args.ckpt_prefix, args.ckpt_suffix))


def _job(args: Namespace, shards: Sequence[Shard], output: str, options: MergeOptions) -> FilesJob:
    if args.to_world_size is None:
        return plan_merge(shards, output, options)
    return plan_reshard(
        shards,
        output,
        args.to_world_size,
        optimizer=options.optimizer,
        step=step_of(shards[0]) if args.step is None else args.step,
    )


def _refuse_impossible(args: Namespace) -> None:
    problems = []
    name = os.path.basename(args.save_path)
    plain = name and "." not in name and not os.path.isdir(args.save_path)
    if plain and args.format is None and args.to_world_size is None and args.command == "merge":
        problems.append(
            f"--save_path {args.save_path}: a file or a directory? Write {args.save_path}/ for a "
            f"directory that from_pretrained loads, {args.save_path}.pth for a torch file, or "
            f"{args.save_path}.safetensors"
        )
    if args.format == "pth" and kind_of(args.save_path) is Kind.SAFETENSORS:
        problems.append(f"--format pth, but --save_path {args.save_path}: name it .pth")
    if args.threads is not None and args.threads < 1:
        problems.append(f"--threads {args.threads} must be at least 1")
    if args.to_world_size is None and args.step is not None:
        problems.append("--step has a meaning only together with --to_world_size")
    if args.to is not None and (args.format is not None or args.to_world_size is not None):
        problems.append("--to cannot be combined with --format or --to_world_size; leave these out")
    if args.torchtitan and args.to != "dcp":
        problems.append("--torchtitan has a meaning only together with --to dcp")
    if args.to_world_size is not None:
        problems += [
            f"--{name} cannot be combined with --to_world_size: merge first, or leave it out"
            for name in ("dtype", "key_map", "only", "format", "copy_ties")
            if getattr(args, name)
        ]
    raise_if(problems)


def _options(args: Namespace, kind: Kind) -> MergeOptions:
    return MergeOptions(
        optimizer=not args.model_only,
        dtype=DTYPES[args.dtype] if args.dtype else None,
        rules=tuple(parse_rule(text) for text in args.key_map),
        only=tuple(args.only),
        kind=kind,
        layout=Layout(parse_size(args.max_shard_size), args.copy_ties, args.torchtitan),
        write=WriteOptions(args.overwrite, args.verify, args.threads),
    )


def _default_path(args: Namespace) -> str:
    """Return where to write what is not the one torch file of a merge; "" for that."""
    merged = output_path(args.ckpt_prefix, "").removesuffix(".pth")
    start = merged.removesuffix(OUTPUT_MARK)
    if args.to_world_size is not None:
        return f"{start}_{args.to_world_size}_ranks"
    if args.to is not None:
        return f"{start}{'.pth' if args.to == 'torch' else f'_{args.to}'}"
    return {"dcp": f"{start}_dcp", "safetensors": f"{merged}.safetensors"}.get(args.format, "")


def _kind(args: Namespace, output: str) -> Kind:
    if args.to_world_size is not None:
        return Kind.DIRECTORY
    implied = kind_of(output)
    if args.format == "safetensors":
        return implied if implied is Kind.SAFETENSORS else Kind.DIRECTORY
    return TARGETS.get(args.to or args.format, implied)


@contextmanager
def _progress(status: Any, what: str, size: int) -> Iterator[Progress]:
    """Draw a progress bar if stderr is a terminal; else the status shows it every so often."""
    shows = sys.stderr.isatty()
    with (
        open(os.devnull, "w") as nowhere,
        tqdm(
            total=size,
            desc=what,
            unit="B",
            unit_scale=True,
            file=sys.stderr if shows else nowhere,
        ) as bar,
    ):
        status.doing = "" if shows else bar
        yield bar.update
        status.doing = ""
