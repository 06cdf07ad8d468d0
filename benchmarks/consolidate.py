"""Time and peak memory of merging shard files: ours against torch_xla's, on the same files.

    python benchmarks/consolidate.py --gigabytes 2.4 10 --ranks 16 --rounds 3
    python benchmarks/consolidate.py --parameters 3000 --ranks 64 --rounds 3

For every size it writes the files of all ranks (fp32 weights and two AdamW states each; a third of
the bytes is the model) in the format of ``torch_xla.distributed.fsdp`` and in ours; with
``--parameters``, those of so many small ones without AdamW states. Then it merges them in these
ways, each in a child process and with cold caches:

    upstream        torch_xla's files into one .pth, by torch_xla          (model)
    same files      torch_xla's files into one .pth, by xla_fsdp           (model)
    with optimizer  our safetensors files into a Hugging Face directory    (model and optimizer)
    load            our files by one rank of 8, small ones by the only one (model)
    copy            our files, copied: an upper bound of the disk's speed

The ways take turns, and medians are shown; "start-up" is what a child takes beside its merge, most
of it imports, whose memory is not counted either (torch's alone is 500 MiB). The merged files are
compared tensor by tensor. A child that needs more than ``--memory_limit`` bytes is told.
Temporary files, about five times the largest size, go to ``--directory`` and are removed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from xla_fsdp.checkpoint.convert.consolidate import (
    MergeOptions,
    merge_files,
    open_shard,
    read_shards,
)
from xla_fsdp.checkpoint.convert.reshard import LoadTarget
from xla_fsdp.checkpoint.files.copying import default_threads, read_crcs
from xla_fsdp.checkpoint.files.outputs import (
    Checksums,
    SafetensorsOutput,
    WriteOptions,
    write_outputs,
)
from xla_fsdp.checkpoint.files.safetensors_file import shard_file_metadata
from xla_fsdp.checkpoint.files.storage import open_storage
from xla_fsdp.checkpoint.files.tensor_source import TensorSource, source_of
from xla_fsdp.checkpoint.files.torch_file import read_torch_file
from xla_fsdp.checkpoint.format.records import (
    GroupRecord,
    MemberRecord,
    OptimizerRecord,
    ParamRecord,
    ShardMetadata,
    StateRecord,
    model_name,
    state_name,
)
from xla_fsdp.checkpoint.steps.load_step import load_step
from xla_fsdp.checkpoint.steps.step_directory import MARKER, Attempt, FileRecord, Marker
from xla_fsdp.distributed.shard_layout import ShardLayout

STATES = ("exp_avg", "exp_avg_sq")
JOB = "benchmark"
WIDTH = 4096
SMALL = (90, 90)
LOADING_RANKS = 8
MIB = 1 << 20
DOES_NOT_FIT = 3
"""Exit code of a child that ran out of the memory it may use."""


@dataclass(frozen=True)
class Case:
    """The files of one size.

    Args:
        directory: folder of the files.
        gigabytes: size of all ranks' files together, in units of 10^9 bytes.
        ranks: number of files.
        parameters: number of small ones; 0 for as many large ones as have that size.
    """

    directory: Path
    gigabytes: float
    ranks: int
    parameters: int = 0

    @property
    def states(self) -> tuple[str, ...]:
        """Names of optimizer states."""
        return () if self.parameters else STATES

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name: square layers, with biases of odd lengths."""
        if self.parameters:
            sizes = [SMALL if i % 2 == 0 else (SMALL[0] + 3,) for i in range(self.parameters)]
            return {f"layers.{i // 2}.{['weight', 'bias'][i % 2]}": s for i, s in enumerate(sizes)}
        per_layer = 4 * (WIDTH * WIDTH + WIDTH + 3) * (1 + len(STATES))
        layers = max(1, round(self.gigabytes * 1e9 / per_layer))
        shapes: dict[str, tuple[int, ...]] = {}
        for i in range(layers):
            shapes[f"layers.{i}.weight"] = (WIDTH, WIDTH)
            shapes[f"layers.{i}.bias"] = (WIDTH + 3,)
        return shapes

    def path(self, rank: int, ending: str) -> Path:
        return self.directory / f"rank-{rank:05d}-of-{self.ranks:05d}.{ending}"

    def paths(self, ending: str) -> list[Path]:
        return [self.path(rank, ending) for rank in range(self.ranks)]


# ---------------------------------------------------------------- files to merge


def write_files(case: Case) -> None:
    """Write both kinds of files of all ranks, with one rank in memory at a time."""
    noise = torch.randn(ShardLayout((WIDTH * WIDTH,), case.ranks).shard_numel)
    for rank in range(case.ranks):
        model = {name: _shard(case, name, rank, 0, noise) for name in case.shapes}
        states = {
            name: {
                what: _shard(case, name, rank, i + 1, noise) for i, what in enumerate(case.states)
            }
            for name in case.shapes
        }
        _write_upstream(case, rank, model, states)
        _write_own(case, rank, model, states)


def _shard(case: Case, name: str, rank: int, salt: int, noise: torch.Tensor) -> torch.Tensor:
    """Return a shard with different values for every tensor and rank, to detect mix-ups."""
    length = ShardLayout((_numel(case.shapes[name]),), case.ranks).shard_numel
    shard = noise[:length].clone()
    shard[0], shard[length // 2] = rank + salt * 1000, hash(name) % 1000
    return shard


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _write_upstream(case: Case, rank: int, model: dict, states: dict) -> None:
    keys = {name: ".".join(_upstream_key(name)) for name in model}
    shard_info: dict[str, dict] = {}
    for name, shape in case.shapes.items():
        prefix, suffix = _upstream_key(name)
        entry = {"_orig_name": name.rpartition(".")[2], "_orig_size": torch.Size(shape)}
        shard_info.setdefault(prefix, {})[suffix] = entry
    content = {
        "model": {keys[name]: shard for name, shard in model.items()},
        "shard_metadata": {
            "shard_info": shard_info,
            "flatten_info": {},
            "buffer_info": {},
            "rank": rank,
            "world_size": case.ranks,
        },
        "optimizer": {"state": dict(enumerate(states.values())), "param_groups": []},
    }
    with open(case.path(rank, "pth"), "wb") as file:
        torch.save(content, file)
        os.fsync(file.fileno())


def _upstream_key(name: str) -> tuple[str, str]:
    module, _, parameter = name.rpartition(".")
    return f"_fsdp_wrapped_module.{module}", f"_fsdp_shard.{parameter}"


def _write_own(case: Case, rank: int, model: dict, states: dict) -> None:
    metadata = ShardMetadata(
        rank,
        case.ranks,
        tuple(
            ParamRecord(name, "float32", 128, (MemberRecord(name, shape),))
            for name, shape in case.shapes.items()
        ),
        step=0,
        job=JOB,
        optimizer=OptimizerRecord(
            (GroupRecord(tuple(model), {"lr": 0.1}),),
            dict.fromkeys(model, StateRecord(case.states)) if case.states else {},
        ),
    )
    tensors = {model_name(name): source_of(shard) for name, shard in model.items()}
    for name, by_state in states.items():
        tensors |= {state_name(name, what): source_of(s) for what, s in by_state.items()}
    path = str(case.path(rank, "safetensors"))
    write_outputs([SafetensorsOutput(path, tensors, partial(_header, metadata))], WriteOptions())


def _header(metadata: ShardMetadata, checksums: Checksums) -> dict[str, str]:
    known = ShardMetadata(**{**vars(metadata), "fingerprints": dict(checksums)})
    return shard_file_metadata(known, {})


# ---------------------------------------------------------------- ways to merge (in children)


def merge_upstream(case: Case) -> None:
    from torch_xla.distributed.fsdp import consolidate_sharded_model_checkpoints

    out = str(case.directory / "upstream.pth")
    consolidate_sharded_model_checkpoints(f"{case.directory}/rank-", "*.pth", out)


def merge_same_files(case: Case) -> None:
    _merge(case, "*.pth", str(case.directory / "ours.pth"))


def merge_with_optimizer(case: Case) -> None:
    _merge(case, "*.safetensors", f"{case.directory}/merged/")


def make_step(case: Case) -> None:
    """Make a folder that ``load_step`` reads, of links to our files."""
    paths = case.paths("safetensors")
    step = case.directory / "run" / Attempt(0).folder
    step.mkdir(parents=True)
    files = {}
    first = open_shard(str(paths[0]))
    for path in paths:
        os.link(path, step / path.name)
        digest = open_shard(str(path), like=first).digest
        files[path.name] = FileRecord(path.stat().st_size, digest)
    (step / MARKER).write_bytes(Marker(0, case.ranks, files, JOB).to_bytes())


def load_as_one_rank(case: Case) -> None:
    """Read what a rank of another number of ranks needs."""
    own = ShardMetadata.from_dict(open_shard(str(case.path(0, "safetensors"))).metadata)
    ranks = 1 if case.parameters else LOADING_RANKS
    target = replace(own, rank=0, world_size=ranks, fingerprints={}, optimizer=None)
    load_step(open_storage(str(case.directory / "run")), Attempt(0), LoadTarget(target, {}))


def copy_files(case: Case) -> None:
    target = case.directory / "copy"
    target.mkdir()
    for path in case.paths("safetensors"):
        shutil.copyfile(path, target / path.name)
        with open(target / path.name, "rb") as file:
            os.fsync(file.fileno())


def _merge(case: Case, suffix: str, output: str) -> None:
    shards = read_shards(f"{case.directory}/rank-", suffix, output, overwrite=False)
    merge_files(shards, output, MergeOptions())


WAYS = {
    "upstream": merge_upstream,
    "same files": merge_same_files,
    "with optimizer": merge_with_optimizer,
    "load": load_as_one_rank,
    "copy": copy_files,
}


def run_child(way: str, case: Case, memory_limit: int) -> int:
    """Merge in one way in this process, and print its figures; return the exit code."""
    if way == "upstream":
        import torch_xla.distributed.fsdp  # noqa: F401 (its import is not to be measured)
    if way == "load":
        make_step(case)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_limit, memory_limit))
    start, cpu, before = time.perf_counter(), time.process_time(), _peak()
    try:
        WAYS[way](case)
    except (MemoryError, RuntimeError) as error:
        if "memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        return DOES_NOT_FIT
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": _peak() - before}))
    return 0


def _peak() -> int:
    # Not getrusage, which starts from the peak of the parent process.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


# ---------------------------------------------------------------- the benchmark


@dataclass(frozen=True)
class Result:
    """Seconds, seconds of CPU time, bytes of memory beyond the imports', and seconds before and
    after."""

    seconds: float
    cpu: float
    peak: int
    startup: float = 0.0


def measure(way: str, case: Case, memory_limit: int) -> Result | None:
    """Run one way in a child; None if it does not fit into the limit."""
    _drop_from_cache([*case.paths("pth"), *case.paths("safetensors")])
    command = [sys.executable, __file__, "--child", way, "--directory", str(case.directory)]
    command += ["--gigabytes", str(case.gigabytes), "--ranks", str(case.ranks)]
    command += ["--memory_limit", str(memory_limit), "--parameters", str(case.parameters)]
    start = time.perf_counter()
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    total = time.perf_counter() - start
    if child.returncode == DOES_NOT_FIT:
        return None
    if child.returncode:
        raise RuntimeError(f"{way} failed:\n{child.stderr}")
    found = json.loads(child.stdout.splitlines()[-1])
    return Result(**found, startup=total - found["seconds"])


def _drop_from_cache(paths: Sequence[Path]) -> None:
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def check_equal(case: Case) -> None:
    """Raise RuntimeError unless both merged files hold the same tensors."""
    theirs = read_torch_file(str(case.directory / "upstream.pth"))["model"]
    ours = read_torch_file(str(case.directory / "ours.pth"))["model"]
    if theirs.keys() != ours.keys():
        raise RuntimeError("the merged files have different names")
    if [_bits(theirs, name) for name in ours] != [_bits(ours, name) for name in ours]:
        raise RuntimeError("the merged files have different tensors")


def _bits(model: dict[str, TensorSource], name: str) -> tuple[object, list[int]]:
    (crcs,) = read_crcs([model[name].data], threads=default_threads())
    return model[name].spec, crcs


def run_case(case: Case, memory_limit: int, rounds: int) -> Iterator[str]:
    """Measure all ways in turns; yield the lines of a table."""
    write_files(case)
    size = sum(path.stat().st_size for path in case.paths("safetensors"))
    yield f"\n{case.ranks} files, {size / 1e9:.2f} GB in all"
    columns = {"seconds": 9, "cpu": 7, "more MiB": 10, "start-up": 10, "of a copy": 11}
    yield " " * 16 + "".join(f"{name:>{width}}" for name, width in columns.items())
    results: dict[str, list[Result | None]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            results[way].append(measure(way, case, memory_limit))
            if way == "same files" and results["upstream"][-1] is not None:
                check_equal(case)
            _remove_outputs(case, except_for="upstream.pth" if way == "upstream" else "")
    copied = _median(results["copy"])
    for way in WAYS:
        yield _line(way, _median(results[way]), copied, memory_limit)


def _median(results: Sequence[Result | None]) -> Result | None:
    known = [each for each in results if each is not None]
    if len(known) < len(results):
        return None
    fields = ("seconds", "cpu", "peak", "startup")
    return Result(*(statistics.median(getattr(each, name) for each in known) for name in fields))


def _line(way: str, result: Result | None, copied: Result | None, memory_limit: int) -> str:
    if result is None:
        return f"{way:16}does not fit into {memory_limit // MIB:,} MiB"
    text = f"{way:16}{result.seconds:9.2f}{result.cpu:7.2f}{result.peak / MIB:10.0f}"
    text += f"{result.startup:10.2f}"
    return text if copied is None else f"{text}{result.seconds / copied.seconds:11.2f}"


def _remove_outputs(case: Case, except_for: str) -> None:
    for path in case.directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif not path.name.startswith("rank-") and path.name != except_for:
            path.unlink()


def main() -> int:
    """Run the benchmark, or one child of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 4, 10])
    parser.add_argument("--parameters", type=int, default=0, help="small ones, in place of a size")
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3, help="of all ways, in turns")
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--memory_limit", type=int, default=12 << 30, help="bytes for each child")
    parser.add_argument("--child", choices=tuple(WAYS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        case = Case(Path(args.directory), args.gigabytes[0], args.ranks, args.parameters)
        return run_child(args.child, case, args.memory_limit)
    for gigabytes in args.gigabytes if not args.parameters else [0]:
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            case = Case(Path(directory), gigabytes, args.ranks, args.parameters)
            for line in run_case(case, args.memory_limit, args.rounds):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
