"""Check that the programs that this package makes have not changed.

    python benchmarks/program_digests.py  # compare with program_digests.json
    python benchmarks/program_digests.py --write --why "reason"  # or store, and say why
    python benchmarks/program_digests.py --mnist  # the losses of the MNIST job, too
    python benchmarks/program_digests.py --only gpt  # some of it

A refactoring leaves all digests as they are. Stored are digests (``hlo_digest``) of the programs of
one training step, with the values of integer and scalar inputs: of the GPTs of ``gpt`` as one of 16
fake ranks of v5e:4x4, and of the small models of ``digest_cases`` on CPU ranks, one for all ranks.
Losses are those of ``examples/mnist/train.py`` with seed 0 on 8 CPU ranks, exactly as printed.
Prints what differs; then the exit code is 1. The file's last line of ``why`` begins with the seal
of all that is stored, so that nothing changes there without another line.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import hlo_digest

STORED = Path(__file__).with_suffix(".json")
ROOT = Path(__file__).resolve().parents[1]
GPTS = ("ours", "scan", "stacked", "streamed", "offloaded")
NUM_RANKS = (1, 3, 4)
MNIST = "--seed 0 --num_ranks 8 --num_epochs 1 --max_steps 30 --log_interval 1 --compare_steps 0"


def main(argv: Sequence[str] | None = None) -> int:
    """Store or compare; return the exit code."""
    options = _parser().parse_args(argv)
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiles faster
    wanted = options.only.split(",") + ["mnist"] * options.mnist
    parts = {
        "gpt": _of_gpts,
        **{f"{count} ranks": partial(_on_ranks, count) for count in NUM_RANKS},
        "mnist": partial(_losses, options.data_dir),
    }
    found = {name: part() for name, part in parts.items() if name.split()[0] in wanted}
    stored = json.loads(STORED.read_text())
    names = _different(found, stored)
    for name in names:
        print(f"differs: {name}")
    print(f"{sum(map(len, found.values()))} compared, {len(names)} differ")
    if not options.write:
        return 1 if names else 0
    if names:
        if not options.why:
            print("not written: say what changed the programs, by --why")
            return 1
        new = {**stored, **found}
        new["why"] = [*stored["why"], f"{seal(new)} {options.why} ({', '.join(names)})"]
        STORED.write_text(json.dumps(new, indent=1) + "\n")
    return 0


def seal(stored: Mapping[str, Any]) -> str:
    """Return a digest of all that is stored, but for the reasons."""
    kept = {part: values for part, values in stored.items() if part != "why"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="store instead of comparing")
    parser.add_argument("--why", metavar="REASON", help="of a change that is stored")
    parser.add_argument("--mnist", action="store_true", help="the losses of the MNIST job, too")
    parser.add_argument(
        "--only",
        default=",".join(("gpt", *map(str, NUM_RANKS))),
        metavar="PART,...",
        help="of gpt, a number of ranks, mnist (default: %(default)s)",
    )
    parser.add_argument("--data_dir", type=Path, help="of that job (default: its own)")
    return parser


def _different(found: Mapping[str, Mapping[str, Any]], stored: Mapping[str, Any]) -> list[str]:
    return [
        f"{part}: {name}"
        for part, values in found.items()
        for name in sorted({*values, *stored.get(part, {})})
        if values.get(name) != stored.get(part, {}).get(name)
    ]


# ---------------------------------------------------------------- digests and losses


def _of_gpts() -> dict[str, str]:
    return {name: _digest(_in_child("digest_cases:gpt_programs", name)) for name in GPTS}


def _on_ranks(count: int) -> dict[str, str]:
    ranks = _in_child("digest_cases:rank_programs", count)
    return {name: _digest([rank[name] for rank in ranks]) for name in ranks[0]}


def _digest(programs: Sequence[Any]) -> str:
    each = [
        hlo_digest.digest(
            hlo_digest.text_of(program.hlo), dict(enumerate(program.labels)), program.aliases
        )
        for program in programs
    ]
    return hashlib.sha256(" ".join(each).encode()).hexdigest()


def _losses(data_dir: Path | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "losses")
        job = [sys.executable, str(ROOT / "examples/mnist/train.py"), *MNIST.split()]
        job += ["--ckpt_dir", folder, "--loss_log", str(log)]
        job += ["--data_dir", str(data_dir)] if data_dir else []
        subprocess.run(job, check=True, cwd=ROOT)
        reports = map(json.loads, log.read_text().splitlines())
        return {f"step {report['step']}": report["loss"] for report in reports}


def _in_child(function: str, *arguments: Any) -> Any:
    """Call ``module:function`` in a process of its own: torch_xla can start only once in a process,
    and not in one with jaxlib. It is forked where all is imported, and nothing has started."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch_xla", "xla_fsdp.fsdp.wrapper"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_call, function, *arguments).result()


def _call(function: str, *arguments: Any) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)


if __name__ == "__main__":
    sys.exit(main())
