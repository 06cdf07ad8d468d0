"""Command line: merge the shard files of all ranks into one model file.

    python -m xla_fsdp.consolidate_sharded_ckpts --ckpt_prefix run/mnist --ckpt_suffix "_rank-*"

Also installed as ``consolidate_sharded_ckpts`` and reachable from a checkout as
``python tools/consolidate_ckpts.py``. Flags are those of torch_xla's command of the same name, plus
``--overwrite``. Exit code 0 if the file was saved; 2 if anything is wrong, with one line for each
problem on stderr and nothing written.
Only talks: the work is done by ``checkpoint.consolidate``.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from xla_fsdp.checkpoint.consolidate import (
    merge_shards,
    output_path,
    read_shards,
    save_model_file,
)
from xla_fsdp.checkpoint.validate import CheckpointError

PROGRAM = "consolidate_sharded_ckpts"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (default: the process's) and return its exit code."""
    args = _parser().parse_args(argv)
    try:
        _consolidate(args)
    except CheckpointError as error:
        for problem in error.problems:
            print(f"{PROGRAM}: {problem}", file=sys.stderr)
        return 2
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog=PROGRAM, description="Merge the shard files of all ranks.")
    parser.add_argument(
        "--ckpt_prefix",
        required=True,
        help="what the paths of all shard files start with",
    )
    parser.add_argument(
        "--ckpt_suffix",
        default="*.pth",
        help="pattern for the rest of their paths; quote it (default: '*.pth')",
    )
    parser.add_argument(
        "--save_path",
        default="",
        help="path of the merged file (default: ckpt_prefix + '_consolidated.pth')",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the merged file if it exists",
    )
    return parser


def _consolidate(args: Namespace) -> None:
    output = output_path(args.ckpt_prefix, args.save_path)
    shards = read_shards(args.ckpt_prefix, args.ckpt_suffix, output, overwrite=args.overwrite)
    print(f"found {len(shards)} checkpoint files in {args.ckpt_prefix}{args.ckpt_suffix}")
    model = merge_shards(shards)
    save_model_file(model, output, overwrite=args.overwrite)
    print(f"saved consolidated model to {output} ({_size(model)})")


def _size(model: Mapping[str, Any]) -> str:
    """Tensors and their elements, those of tied names once."""
    tensors = {id(value): value for value in model.values() if isinstance(value, Tensor)}
    elements = sum(tensor.numel() for tensor in tensors.values())
    return f"{len(tensors)} parameters and buffers, {elements:,} elements"


if __name__ == "__main__":
    sys.exit(main())
