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
from contextlib import contextmanager
from importlib import metadata

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
FIRST_LINE = 1.5  # seconds after which a command says what it is doing, if that has changed
LINE_EVERY = 30.0  # and if it has not
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
  %(prog)s convert run --to dcp
      the newest step for torch's own FSDP, at any number of ranks -> run_dcp/
  %(prog)s inspect --ckpt_prefix run --verify
      write nothing: list ranks, names and shapes, and verify all checksums

The exit code is 0, 2 if there are problems (one line each on stderr, and nothing is written), or
128 and the number of the signal that ended it.
"""

COMMANDS = ("merge", "convert", "inspect", "list")
TARGETS = ("dcp", "hf", "torch")
FORMATS = ("pth", "safetensors", "dcp")
DTYPES = ("fp32", "bf16", "fp16", "fp64")
PROGRAM = "consolidate_sharded_ckpts"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (default: ``sys.argv[1:]``); return the exit code."""
    parser = _parser()
    plain = _plain_arguments(sys.argv[1:] if argv is None else argv, parser)
    args = parser.parse_intermixed_args(plain)  # the path may come after options
    if args.version:
        print(_version())
        parser.exit()
    if problem := _name_prefix(args):
        parser.error(problem)
    if (args.command == "convert") != (args.to is not None):
        parser.error("convert and --to belong together: convert run --to dcp")
    try:
        with _ended_by_signals(), Status() as status:
            from xla_fsdp.checkpoint.command import run  # imports torch, which takes seconds

            problems = run(args, status)
    except KeyboardInterrupt as interrupt:  # Ctrl-C, or one of SIGNALS
        number = interrupt.args[0] if interrupt.args else signal.SIGINT
        what = "" if args.command == "inspect" else ": what it had written is removed"
        _write_lines([f"interrupted by {signal.Signals(number).name}{what}"])
        return 128 + number
    except BrokenPipeError:  # who read the output has enough, as ``head`` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is not written
        return 128 + signal.SIGPIPE
    _write_lines(problems)
    return 2 if problems else 0


class Status:
    """Says on stderr what the command is doing, where that takes long. ``doing`` is anything with a
    text, which may change at any time; "" is silent."""

    def __init__(self) -> None:
        self.doing: object = "reading the shard files"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def __enter__(self) -> Status:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        said, at = None, 0.0
        while not self._ended.wait(FIRST_LINE):
            doing, now = self.doing, time.monotonic()
            if (text := str(doing)) and (doing is not said or now - at >= LINE_EVERY):
                _write_lines([text])
                said, at = doing, now


def _plain_arguments(argv: Sequence[str], parser: ArgumentParser) -> list[str]:
    """Return arguments as argparse takes them: options with underscores, and their values joined to
    them, as these may begin with a dash (``--ckpt_suffix -rank*.pth``)."""
    takes_value = {name for a in parser._actions if a.nargs is None for name in a.option_strings}
    plain: list[str] = []
    for text in argv:
        if text.startswith("--"):
            name, equals, value = text.partition("=")
            plain.append(f"{name[:2]}{name[2:].replace('-', '_')}{equals}{value}")
        elif plain and plain[-1] in takes_value:
            plain[-1] += f"={text}"
        else:
            plain.append(text)
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
    from xla_fsdp.checkpoint.format.records import READABLE_VERSIONS, VERSION  # imports torch

    readable = ", ".join(map(str, READABLE_VERSIONS))
    return f"xla_fsdp {own}; writes shard files of version {VERSION}, reads {readable}"


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog=PROGRAM,
        description="Merge, convert, reshard or inspect the shard files of all ranks.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the versions")
    parser.add_argument(
        "command",
        nargs="*",
        metavar="COMMAND",
        help="merge (default); convert: merge for another program (--to); inspect: list ranks, "
        "names, shapes and problems, write nothing; or list: print a table of the steps of a run. "
        "A path after it is the ckpt_prefix",
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
    parser.add_argument(
        "--to",
        choices=TARGETS,
        help="with convert: for torch.distributed.checkpoint (torch's fully_shard, on TorchTPU or "
        "GPUs), for from_pretrained of Hugging Face, or one file for torch.load",
    )
    parser.add_argument(
        "--torchtitan", action="store_true", help="with --to dcp: under the names of torchtitan"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    parser.add_argument(
        "--max_shard_size", default="5GB", help="of files in a directory (default: 5GB)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the model in the merged file")
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


def _write_lines(lines: Sequence[str]) -> None:
    # Not print(), which writes the end of a line by itself: other threads may write, too.
    for line in lines:
        sys.stderr.write(f"{PROGRAM}: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
