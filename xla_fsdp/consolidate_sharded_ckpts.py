"""Command line: merge, convert, inspect or reshard the shard files of all ranks.

    python -m xla_fsdp.consolidate_sharded_ckpts --ckpt_prefix run/mnist --ckpt_suffix "_rank-*"
    python -m xla_fsdp.consolidate_sharded_ckpts --ckpt_prefix run --save_path hf/ --dtype bf16
    python -m xla_fsdp.consolidate_sharded_ckpts inspect --ckpt_prefix run --verify
    python -m xla_fsdp.consolidate_sharded_ckpts list --ckpt_prefix gs://bucket/run

Also installed as ``consolidate_sharded_ckpts``, and in a checkout ``tools/consolidate_ckpts.py``.
``--ckpt_prefix``, ``--ckpt_suffix`` and ``--save_path`` are those of torch_xla's command of the
same name. The exit code is 0, or 2 if there are problems: then nothing is written, and stderr has
one line for each. What is interrupted (Ctrl-C, SIGTERM, SIGHUP) removes its temporary files.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import metadata
from typing import Any

from xla_fsdp.checkpoint.consistency import describe_shards, size_line, verify_shards
from xla_fsdp.checkpoint.consolidate import (
    OUTPUT_MARK,
    MergeOptions,
    look_at_shards,
    open_shard,
    output_path,
    plan_merge,
    read_shards,
)
from xla_fsdp.checkpoint.copying import Progress, default_threads
from xla_fsdp.checkpoint.errors import CheckpointError, dtype_name, listed, one_line, raise_if
from xla_fsdp.checkpoint.format import READABLE_VERSIONS, VERSION
from xla_fsdp.checkpoint.model_files import DTYPES, Kind, Layout, kind_of, parse_rule, parse_size
from xla_fsdp.checkpoint.outputs import Job, WriteOptions
from xla_fsdp.checkpoint.plan import absent_names
from xla_fsdp.checkpoint.read_model import open_model
from xla_fsdp.checkpoint.reshard_files import plan_reshard, step_of
from xla_fsdp.checkpoint.shard_files import DEFAULT_SUFFIX, Shard, describe_found
from xla_fsdp.checkpoint.step_table import describe_steps
from xla_fsdp.checkpoint.storage import open_storage

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
LINE_EVERY = 30.0  # seconds between lines about progress, where there is no terminal
EXAMPLES = """\
examples:
  %(prog)s --ckpt_prefix run
      merge the newest complete step that save_checkpoint wrote into run/ -> run_consolidated.pth
  %(prog)s --ckpt_prefix run/step_00000100 --save_path full.safetensors --dtype bf16
      merge a certain step into one safetensors file
  %(prog)s --ckpt_prefix run/model --ckpt_suffix "_rank-*.pth" --save_path hf/
      merge files by prefix and pattern into a directory for from_pretrained
  %(prog)s --ckpt_prefix gs://bucket/run --save_path gs://bucket/full.safetensors
      the same in an object store: every URL that fsspec knows is read and written
  %(prog)s --ckpt_prefix run --save_path new --to_world_size 8
      shards for another number of ranks
  %(prog)s inspect --ckpt_prefix run --verify
      write nothing: list ranks, names and shapes, and verify all checksums

The exit code is 0, 2 if there are problems (one line each on stderr, and nothing is written), or
128 and the number of the signal that ended it.
"""

COMMANDS = ("merge", "inspect", "list")
FORMATS = ("pth", "safetensors", "dcp")
PROGRAM = "consolidate_sharded_ckpts"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (default: ``sys.argv[1:]``); return the exit code."""
    parser = _parser()
    args = parser.parse_args(_plain_arguments(sys.argv[1:] if argv is None else argv, parser))
    if problem := _name_prefix(args):
        parser.error(problem)
    try:
        with _ended_by_signals():
            _refuse_impossible(args)
            if args.command == "list":
                return _list(args)
            if args.command == "inspect":
                return _inspect(args)
            _consolidate(args)
    except CheckpointError as error:
        _complain(error.problems)
        return 2
    except KeyboardInterrupt as interrupt:  # Ctrl-C, or one of SIGNALS
        number = interrupt.args[0] if interrupt.args else signal.SIGINT
        what = "" if args.command == "inspect" else ": what it had written is removed"
        _complain([f"interrupted by {signal.Signals(number).name}{what}"])
        return 128 + number
    return 0


def _plain_arguments(argv: Sequence[str], parser: ArgumentParser) -> list[str]:
    """Return arguments as argparse takes them: options with underscores, and values that begin with
    a dash (``--ckpt_suffix -rank*.pth``) joined to their option."""
    known = {name for action in parser._actions for name in action.option_strings}
    takes_value = {name for a in parser._actions if a.nargs is None for name in a.option_strings}

    def option(text: str) -> str | None:
        name, equals, value = text.partition("=")
        plain = f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name
        return f"{plain}{equals}{value}" if plain in known else None

    plain: list[str] = []
    for text in argv:
        found = option(text)
        if found is None and text.startswith("-") and plain and plain[-1] in takes_value:
            plain[-1] += f"={text}"
        else:
            plain.append(found or text)
    return plain


def _name_prefix(args: Namespace) -> str | None:
    """Take the command and the prefix from the arguments without option; return what is wrong."""
    given = list(args.command)
    args.command = given.pop(0) if given and given[0] in COMMANDS else "merge"
    if args.ckpt_prefix is None and given:
        args.ckpt_prefix = given.pop(0)
    if given:
        return f"unexpected {' '.join(given)}; expected one of {', '.join(COMMANDS)}, and one path"
    if args.ckpt_prefix is None:
        return "which files? Give --ckpt_prefix, or the directory of a run"
    return None


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turn signals that would end the process at once into exceptions, so that files are removed.

    A signal that is ignored, as by nohup, stays ignored.
    """

    def interrupt(number: int, _: object) -> None:
        raise KeyboardInterrupt(number)

    changed = []
    if threading.current_thread() is threading.main_thread():
        changed = [each for each in SIGNALS if signal.getsignal(each) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def _version() -> str:
    try:
        own = metadata.version("xla_fsdp")
    except metadata.PackageNotFoundError:
        own = "(not installed)"
    readable = ", ".join(map(str, READABLE_VERSIONS))
    return f"xla_fsdp {own}; writes shard files of version {VERSION}, reads {readable}"


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog=PROGRAM,
        description="Merge, convert, reshard or inspect the shard files of all ranks.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    parser.add_argument(
        "command",
        nargs="*",
        metavar="COMMAND",
        help="merge (default); inspect: list ranks, names, shapes and problems, write nothing; or "
        "list: print a table of the steps of a run. A path after it is the ckpt_prefix",
    )
    _add_inputs(parser)
    _add_outputs(parser)
    parser.add_argument(
        "--verify",
        action="store_true",
        help="verify the checksums of all tensors in the shard files, and read the written files "
        "again to compare",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse shards without some parameters that their metadata lists, rather than merge "
        "the others",
    )
    parser.add_argument("--threads", type=int, help="number of threads that copy")
    return parser


def _add_inputs(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--ckpt_prefix",
        help="start of the paths of all shard files, or a directory: of save_checkpoint (its "
        "newest complete step is read), of one of its steps, or of torch.distributed.checkpoint; "
        "or a URL of such a directory (gs://bucket/run)",
    )
    parser.add_argument(
        "--ckpt_suffix",
        default="*.pth",
        help="pattern for the rest of their paths; quote it (default: '*.pth')",
    )
    parser.add_argument("--model_only", action="store_true", help="leave optimizer state out")


def _add_outputs(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--save_path",
        default="",
        help="path or URL of the merged file (default: ckpt_prefix + '_consolidated.pth'); a name "
        "that ends in .safetensors makes a safetensors file, a directory one that Hugging Face "
        "loads",
    )
    parser.add_argument(
        "--format", choices=FORMATS, help="of the output (default: as save_path implies)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    parser.add_argument(
        "--max_shard_size", default="5GB", help="of files in a directory (default: 5GB)"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the model in the merged file")
    parser.add_argument(
        "--key_map",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="replace the prefix OLD of names by NEW, which may be empty; repeatable",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PREFIX",
        help="write only tensors whose names, after --key_map, begin with this; repeatable",
    )
    parser.add_argument(
        "--copy_ties",
        action="store_true",
        help="give every name of a tied tensor a copy in safetensors files",
    )
    parser.add_argument(
        "--to_world_size",
        type=int,
        help="do not merge, but write shard files for this many ranks into a directory",
    )
    parser.add_argument("--step", type=int, help="number for that step (default: the old one)")
    parser.add_argument("--dry_run", action="store_true", help="only list the files to write")


def _inspect(args: Namespace) -> int:
    if args.ckpt_suffix == DEFAULT_SUFFIX and os.path.isfile(os.path.expanduser(args.ckpt_prefix)):
        return _inspect_model(args)
    shards, problems = look_at_shards(
        args.ckpt_prefix, args.ckpt_suffix, None, optimizer=not args.model_only
    )
    if shards:
        print(f"found {_found(args, shards)}")
    for line in describe_shards(shards):
        print(one_line(line))
    if args.verify:
        size = sum(tensor.spec.nbytes for shard in shards for _, tensor in shard.tensors())
        with _progress("verifying", size) as progress:
            damage, known, unknown = verify_shards(
                shards, args.threads or default_threads(), progress
            )
        problems += damage
        print(f"verified {known} tensors; {unknown} have no checksum")
    _complain(problems)
    return 2 if problems else 0


def _inspect_model(args: Namespace) -> int:
    """Describe one file that is no prefix of shards' files: a shard, or a full model."""
    with suppress(CheckpointError):
        shard = open_shard(args.ckpt_prefix)
        for line in describe_shards([shard]):
            print(one_line(line))
        return 0
    tensors = open_model(args.ckpt_prefix)
    for name, tensor in tensors.items():
        print(one_line(f"whole    {name}  {dtype_name(tensor.dtype)} {list(tensor.shape)}"))
        if args.verify:
            tensor.load()
    known = sum(tensor.checksum is not None for tensor in tensors.values())
    if args.verify:
        print(f"verified {known} tensors; {len(tensors) - known} have no checksum")
    return 0


def _list(args: Namespace) -> int:
    def verify(folder: str) -> list[str]:
        shards, problems = look_at_shards(folder, DEFAULT_SUFFIX, None, optimizer=True)
        damage, _, _ = verify_shards(shards, args.threads or default_threads(), lambda _: None)
        return problems + damage

    for line in describe_steps(open_storage(args.ckpt_prefix), verify if args.verify else None):
        print(line)
    return 0


def _consolidate(args: Namespace) -> None:
    output = output_path(args.ckpt_prefix, args.save_path)
    if args.to_world_size is not None and not args.save_path:
        output = f"{output.removesuffix(f'{OUTPUT_MARK}.pth')}_{args.to_world_size}_ranks"
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
    job = _job(args, shards, output, options)
    raise_if(job.find_problems(overwrite=args.overwrite))
    if args.dry_run:
        for line in job.describe():
            print(line)
        return
    with _progress("copying", job.nbytes) as progress:
        job.write(replace(options.write, progress=progress))
    print(_summary(args, shards, output))


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


def _job(args: Namespace, shards: Sequence[Shard], output: str, options: MergeOptions) -> Job:
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
    if args.threads is not None and args.threads < 1:
        problems.append(f"--threads {args.threads} must be at least 1")
    if args.to_world_size is None and args.step is not None:
        problems.append("--step has a meaning only together with --to_world_size")
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
        layout=Layout(parse_size(args.max_shard_size), args.copy_ties),
        write=WriteOptions(args.overwrite, args.verify, args.threads),
    )


def _kind(args: Namespace, output: str) -> Kind:
    if args.to_world_size is not None:
        return Kind.DIRECTORY
    if args.format is None:
        return kind_of(output)
    if args.format in ("pth", "dcp"):
        return Kind.TORCH if args.format == "pth" else Kind.DCP
    return Kind.SAFETENSORS if kind_of(output) is Kind.SAFETENSORS else Kind.DIRECTORY


def _summary(args: Namespace, shards: Sequence[Shard], output: str) -> str:
    if args.to_world_size is not None:
        return f"saved shards of {args.to_world_size} ranks to {output}"
    size = size_line(shards[0], optimizer=not args.model_only)
    return f"saved consolidated model to {output} ({size})"


@contextmanager
def _progress(what: str, size: int) -> Iterator[Progress]:
    """Draw a progress bar if stderr is a terminal and tqdm is installed; else print lines."""
    tqdm = _tqdm() if sys.stderr.isatty() else None
    if tqdm is None:
        yield _ProgressLines(what, size)
        return
    with tqdm(total=size, desc=what, unit="B", unit_scale=True, file=sys.stderr) as bar:
        yield bar.update


class _ProgressLines:
    """Prints how much is done, every ``LINE_EVERY`` seconds; for a log."""

    def __init__(self, what: str, size: int) -> None:
        self._what, self._size, self._done = what, size, 0
        self._began = self._last = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._last < LINE_EVERY:
                return
            self._last = now
            rate = self._done / (now - self._began)
            left = max(0, self._size - self._done) / rate
            # Not print(), which writes the end of a line by itself: other threads may copy, too.
            sys.stderr.write(
                f"{PROGRAM}: {self._what}: {self._done / 1e9:.2f} of {self._size / 1e9:.2f} GB, "
                f"{rate / 1e6:.0f} MB/s, {left:.0f} s left\n"
            )
            sys.stderr.flush()


def _tqdm() -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm


def _complain(problems: Sequence[str]) -> None:
    for problem in problems:
        print(f"{PROGRAM}: {one_line(problem)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
