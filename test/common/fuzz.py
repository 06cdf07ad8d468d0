"""Feed changed and made-up files to the readers of checkpoints, in a process with limits.

``python -m test.common.fuzz FORMAT FIRST COUNT FOLDER`` makes the inputs with the numbers from
FIRST on, each of which follows from its number alone, and reads each of them with ``CPU_SECONDS``
of time and ``MEMORY`` bytes. The first ones are attacks by hand. A reader may return a value that
can be used, or raise a CheckpointError of which every line names the file; anything else ends the
process. It prints how many were read and refused.
"""

from __future__ import annotations

import io
import itertools
import json
import pickle
import random
import shutil
import signal
import sys
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from test.common.memory import peak, reset_peak
from test.common.saving import picture, save_step
from test.common.shard_maker import FullModel
from xla_fsdp.checkpoint import CheckpointError, find_problems, open_shard
from xla_fsdp.checkpoint.convert.consolidate import load_model, look_at_shards, merge_shards
from xla_fsdp.checkpoint.errors import one_line
from xla_fsdp.checkpoint.files.checksum import digest
from xla_fsdp.checkpoint.files.storage import open_storage
from xla_fsdp.checkpoint.format.consistency import describe_shards
from xla_fsdp.checkpoint.format.shard_files import values_of
from xla_fsdp.checkpoint.steps.load_step import load_step
from xla_fsdp.checkpoint.steps.step_directory import Attempt

CPU_SECONDS = 2.0
MEMORY = 48 << 20
SEED = 5

# ---------------------------------------------------------------- values


def shared(value: Any, depth: int, kind: type = tuple) -> Any:
    """Containers of two references to the next: 2^depth values in a few bytes."""
    for _ in range(depth):
        value = kind((value, value))
    return value


def nested(depth: int) -> Any:
    """Lists in lists."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def circle() -> Any:
    """A list that contains itself."""
    value: list[Any] = []
    value.append(value)
    return value


PLAIN: list[Callable[[], Any]] = [  # what JSON has, too
    lambda: 10**11,
    lambda: 2**63,
    lambda: 10**4000,
    lambda: -1,
    lambda: 0,
    lambda: 1e308,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: True,
    lambda: None,
    lambda: "",
    lambda: "../../etc/passwd",
    lambda: "a" * 5000,
    lambda: "\ud800\n\x00",
    list,
    dict,
    lambda: {"": {}},
    lambda: [2**62, 2**62],
    lambda: [0, 2**62, 2**62],
    lambda: [1] * 500,
    lambda: nested(150),
    lambda: nested(600),
    lambda: "float32",
    lambda: "torch",
]
OBJECTS: list[Callable[[], Any]] = [
    *PLAIN,
    lambda: shared(("a",), 60),
    lambda: shared([1], 60, list),
    lambda: {1: shared([{"x": 1}], 20, list)},
    circle,
    lambda: 1 << 20_000,
    lambda: torch.Size([2**40]),
    lambda: torch.float32,
    lambda: torch.empty(0),
    lambda: torch.ones(1).expand(10**9),
    lambda: torch.ones(3, 4).t(),
    lambda: b"x" * 100,
    lambda: bytearray(10),
    lambda: {1, 2},
    lambda: complex(1, 2),
    lambda: range(10**9),
]


def places(value: Any, path: tuple[Any, ...] = (), depth: int = 6) -> Iterator[tuple[Any, ...]]:
    """Paths to everything in nested containers."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        yield (*path, key)
        if isinstance(each, dict | list) and depth:
            yield from places(each, (*path, key), depth - 1)


def change(value: Any, chance: random.Random, hostile: list[Callable[[], Any]]) -> None:
    """Replace, remove, rename, repeat or move something in nested dicts and lists."""
    *path, last = chance.choice(list(places(value)))
    for key in path:
        value = value[key]
    how = chance.randrange(8)
    if how < 5:
        value[last] = chance.choice(hostile)()
    elif how == 5:
        del value[last]
    elif how == 6 and isinstance(value, dict):
        value[chance.choice(["", "x", f"{last}.", "../x"])] = value.pop(last)
    elif isinstance(value[last], int) and not isinstance(value[last], bool):
        value[last] += chance.choice([-1, 1, 128, 2**40, -(2**31)])
    else:
        other = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value[last] = value[other]


def changed_bytes(data: bytes, chance: random.Random, end: int | None = None) -> bytes:
    """Overwrite, insert, remove and cut."""
    content = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(min(end or len(content), len(content)) or 1)
        new = chance.choice(
            [
                chance.randbytes(chance.randint(1, 9)),
                b"\xff" * 8,
                (1 << chance.randrange(64)).to_bytes(8, "little"),
                content[at : at + 40] * chance.randint(2, 50),
            ]
        )
        how = chance.randrange(5)
        if how == 0:
            content[at] ^= 1 << chance.randrange(8)
        elif how < 3:
            content[at : at + len(new)] = new
        elif how == 3:
            content[at:at] = new
        else:
            del content[at : at + chance.randint(1, 30)]
    return bytes(
        content[: chance.randrange(len(content) + 1)] if not chance.randrange(6) else content
    )


# ---------------------------------------------------------------- pickles

MARK, STOP = pickle.MARK, pickle.STOP
GLOBALS = [
    b"ctorch\nSize\n",
    b"c__builtin__\nbytearray\n",
    b"c_codecs\nencode\n",
    b"c__builtin__\nset\n",
    b"ccollections\nOrderedDict\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch._utils\n_rebuild_parameter\n",
    b"ctorch._tensor\n_rebuild_from_type_v2\n",
    b"ctorch\nFloatStorage\n",
    b"ctorch\nfloat32\n",
    b"cos\nsystem\n",
    b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
    b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n",
    b"ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n",
    b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n",
]
CODES = b"(.0123FIJKMNRSTUVXabcdeghjlopqrstuQ}]\x81\x82\x85\x86\x87\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f"
CODES += b"\x90\x91\x92\x93\x94\x95\x96\x97\x98"


def made_up(chance: random.Random) -> bytes:
    """A pickle of instructions in a random order, which mostly fit what is on the stack."""
    out = [b"\x80\x02"]
    for _ in range(chance.randint(1, 200)):
        out.append(
            chance.choice(
                [
                    lambda: bytes([chance.choice(CODES)]) + chance.randbytes(chance.randrange(9)),
                    lambda: chance.choice([b"]", b"}", b")", b"N", b"K\x02", b"(", b"\x8f"]),
                    lambda: chance.choice(
                        [b"\x85", b"\x86", b"\x87", b"2", b"l", b"t", b"d", b"R"]
                    ),
                    lambda: chance.choice([b"a", b"s", b"e", b"u", b"\x90", b"b", b"\x81", b"Q"]),
                    lambda: b"q%c" % chance.randrange(4) + b"h%c" % chance.randrange(4),
                    lambda: b"X\x03\x00\x00\x00abc",
                    lambda: b"J\xff\xff\xff\x7f",
                    lambda: b"\x8b\x10\x27\x00\x00" + b"\x7f" * 10_000,
                    lambda: chance.choice(GLOBALS),
                ]
            )()
        )
    return b"".join(out) + b"."


def archive(records: dict[str, bytes]) -> bytes:
    """A zip archive as torch.save makes it, with right CRC-32s."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as file:
        for name, data in records.items():
            file.writestr(zipfile.ZipInfo(f"archive/{name}"), data)
    return made.getvalue()


def with_pickle(data: bytes) -> bytes:
    """An archive with this pickle and one storage."""
    return archive({"data.pkl": data, "byteorder": b"little", "data/0": bytes(64)})


def saved(content: Any) -> bytes:
    """The bytes of ``torch.save``."""
    made = io.BytesIO()
    torch.save(content, made)
    return made.getvalue()


BIG_BYTEARRAY = b"\x80\x02c__builtin__\nbytearray\nJ\x00\x5e\xd0\x7f\x85R."
BIG_BYTES = b"\x80\x05\x96" + (3 << 30).to_bytes(8, "little") + b"."
MANY_DUPLICATES = b"\x80\x02" + b"]" + b"2\x86" * 2000 + b"."
DEEP_KEY = b"\x80\x02})" + b"2\x86" * 60 + b"Ns."
DEEP_MEMBER = b"\x80\x04\x8f()" + b"2\x86" * 60 + b"\x90."


# ---------------------------------------------------------------- formats


def small_model() -> FullModel:
    """One parameter of each kind."""
    params = {"a.w": torch.arange(6.0).reshape(2, 3), "a.b": torch.ones(2), "r": torch.ones(4, 2)}
    return FullModel(
        params,
        flat={"a.flat_param_0": ["a.w", "a.b"]},
        ties={"t": "r"},
        whole={"count": torch.tensor(5), "mean": torch.ones(2)},
        casts={"mean": torch.bfloat16},
        rows=frozenset({"r"}),
        states={name: {"m": torch.ones_like(value)} for name, value in params.items()},
        steps={"r": torch.tensor(3.0)},
    )


@dataclass(frozen=True)
class Format:
    """Inputs of one kind.

    Args:
        attacks: by hand: each writes its files into a folder.
        write: writes an input by chance.
        read: reads it, in any way that users do.
    """

    attacks: list[Callable[[Path], Any]]
    write: Callable[[Path, random.Random], Any]
    read: Callable[[Path], None]


def use_shard(path: Path) -> None:
    """Open, check, describe and merge a file."""
    shard = open_shard(str(path))
    if problems := find_problems([shard]):
        raise CheckpointError(problems)
    for line in describe_shards([shard]):
        one_line(line)
    full, _ = merge_shards([shard], optimizer=True)
    load_model(full)
    values_of(shard)


def torch_files() -> Format:
    sound = small_model().shard(0, 1)
    base = saved(sound)
    data = saved({"model": {"w": torch.ones(3)}, "shard_metadata": 1})

    def put(path: Path, content: bytes) -> None:
        (path / "f.pth").write_bytes(content)

    def write(path: Path, chance: random.Random) -> None:
        how = chance.randrange(4)
        if how == 0:
            put(path, changed_bytes(chance.choice([base, data]), chance))
        elif how == 1:
            content = pickle.loads(pickle.dumps(with_optimizer_metadata(sound)))
            for _ in range(chance.randint(1, 2)):
                change(content, chance, OBJECTS)
            with suppress(Exception):  # what cannot be pickled is no input
                content["model"] = {**sound["model"], **content.get("model", {})}
                content.setdefault("optimizer", sound["optimizer"])
                put(path, saved(content))
        else:
            put(path, with_pickle(made_up(chance)))

    def of(content: Any) -> Callable[[Path], None]:
        return lambda path: put(path, saved({**sound, **content}))

    attacks = [
        of({"model": {"w": shared(("a",), 60)}}),
        of({"shard_metadata": shared([1], 60, list)}),
        of({"shard_metadata": {**sound["shard_metadata"], "ties": shared([{}], 40, list)}}),
        of({"shard_metadata": {**sound["shard_metadata"], "world_size": 10**11}}),
        of({"other": nested(400)}),
        lambda path: put(path, with_pickle(BIG_BYTEARRAY)),
        lambda path: put(path, with_pickle(BIG_BYTES)),
        lambda path: put(path, with_pickle(MANY_DUPLICATES)),
        lambda path: put(path, with_pickle(DEEP_KEY)),
        lambda path: put(path, with_pickle(DEEP_MEMBER)),
        lambda path: put(path, overlapping_records()),
    ]
    return Format(attacks, write, lambda path: use_shard(path / "f.pth"))


def with_optimizer_metadata(content: dict[str, Any]) -> dict[str, Any]:
    """All of a shard file but its tensors."""
    return {"shard_metadata": content["shard_metadata"], "model": {}, "other": [1, {"x": "y"}]}


def overlapping_records() -> bytes:
    """An archive in which a thousand names have the same 20 kB."""
    content = bytearray(with_pickle(b"\x80\x02N." + bytes(20_000)))
    start = int.from_bytes(content[-6:-2], "little")
    entries, end = bytes(content[start:-22]), content[-22:]
    entry = entries[: 46 + len("archive/data.pkl")]
    end[8:12] = (1000).to_bytes(2, "little") * 2
    end[12:16] = (1000 * len(entry)).to_bytes(4, "little")
    return bytes(content[:start]) + entry * 1000 + bytes(end)


def torch_xla_files() -> Format:
    name = "a._fsdp_shard._fpw_module.flat_param_0"
    model = {name: torch.ones(128), "a.count": torch.tensor(3)}
    base = {
        "shard_info": {
            "a": {
                "_fsdp_shard._fpw_module.flat_param_0": {
                    "_orig_name": "_fpw_module.flat_param_0",
                    "_orig_size": torch.Size([10]),
                }
            }
        },
        "flatten_info": {"a._fpw_module.flat_param_0": [["w", "b"], [[2, 4], [2]], [8, 2]]},
        "buffer_info": {"a.count": {"_orig_dtype": torch.int64}},
        "rank": 0,
        "world_size": 1,
    }

    def put(path: Path, metadata: Any) -> None:
        (path / "f.pth").write_bytes(saved({"model": model, "shard_metadata": metadata}))

    def write(path: Path, chance: random.Random) -> None:
        metadata = pickle.loads(pickle.dumps(base))
        for _ in range(chance.randint(1, 3)):
            change(metadata, chance, OBJECTS)
        with suppress(Exception):
            put(path, metadata)

    def flat(info: Any) -> Callable[[Path], None]:
        return lambda path: put(
            path, {**base, "flatten_info": {"a._fpw_module.flat_param_0": info}}
        )

    attacks = [
        flat(shared([1], 60, list)),
        flat([["w"], [shared([2], 60, list)], [8]]),
        flat([["w"], [[2**62] * 60], [8]]),
        lambda path: put(path, {**base, "shard_info": shared([1], 60, list)}),
        lambda path: put(path, {**base, "world_size": 10**11}),
    ]
    return Format(attacks, write, lambda path: use_shard(path / "f.pth"))


def safetensors_files(folder: Path) -> Format:
    base = small_model().save_safetensors(folder, 1)[0].read_bytes()
    length = 8 + int.from_bytes(base[:8], "little")
    header, data = json.loads(base[8:length]), base[length:]

    def put(path: Path, header: Any) -> None:
        with suppress(ValueError, RecursionError):
            text = json.dumps(header).encode()
            (path / "f.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)

    def write(path: Path, chance: random.Random) -> None:
        how = chance.randrange(4)
        if how == 0:
            content = changed_bytes(base, chance, length)
            (path / "f.safetensors").write_bytes(content)
            return
        lines = json.loads(json.dumps(header))
        notes = lines["__metadata__"]
        if how == 1:
            change(lines, chance, PLAIN)
        elif how == 2:
            metadata = json.loads(notes["xla_fsdp"])
            for _ in range(chance.randint(1, 2)):
                change(metadata, chance, PLAIN)
            with suppress(ValueError, RecursionError):
                notes["xla_fsdp"] = json.dumps(metadata)
        else:
            values: Any = {
                "a": {"!": "tuple", "of": [{"!": "set", "of": [1]}, {"!": "tensor", "at": 0}]}
            }
            change(values, chance, PLAIN)
            with suppress(ValueError, RecursionError):
                notes["xla_fsdp.values"] = json.dumps(values)
        put(path, lines)

    def metadata_with(**more: Any) -> Callable[[Path], None]:
        notes = json.loads(header["__metadata__"]["xla_fsdp"])
        text = json.dumps({**notes, **more})
        return lambda path: put(path, {**header, "__metadata__": {"xla_fsdp": text}})

    attacks = [
        metadata_with(world_size=10**11),
        metadata_with(ties={f"t{i}": "r" for i in range(5_000)}),
        metadata_with(tensor_parts=2**60, world_size=2**60),
        lambda path: put(
            path, {**header, "w": {"dtype": "F32", "shape": [0, 2**62, 4], "data_offsets": [0, 0]}}
        ),
        lambda path: (path / "f.safetensors").write_bytes(bytes(7) + b"\x40" + bytes(90)),
    ]
    return Format(attacks, write, lambda path: use_shard(path / "f.safetensors"))


def dcp_directories(folder: Path) -> Format:
    base = folder / "dcp"
    content = {
        "model": {"a.w": torch.arange(12.0).reshape(3, 4), "a.b": torch.ones(2)},
        "optim": {
            "state": {"a.w": {"exp_avg": torch.ones(3, 4), "step": torch.tensor(1.0), "k": 3}},
            "param_groups": [{"params": ["a.w"], "lr": 0.1}],
        },
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=base, no_dist=True)
    metadata = (base / ".metadata").read_bytes()
    (data,) = base.glob("*.distcp")

    def put(path: Path, metadata: bytes, items: bytes | None = None) -> None:
        (path / "d").mkdir()
        (path / "d" / ".metadata").write_bytes(metadata)
        if items is None:
            (path / "d" / data.name).symlink_to(data)
        else:
            (path / "d" / data.name).write_bytes(items)

    def write(path: Path, chance: random.Random) -> None:
        how = chance.randrange(4)
        if how == 0:
            put(path, changed_bytes(metadata, chance))
        elif how == 1:
            put(path, metadata, changed_bytes(data.read_bytes(), chance))
        elif how == 2:
            put(path, made_up(chance))
        else:
            made = pickle.loads(metadata)
            fields = {name: vars(made)[name] for name in ("state_dict_metadata", "planner_data")}
            fields["storage_data"] = {i: vars(info) for i, info in made.storage_data.items()}
            for _ in range(chance.randint(1, 2)):
                change(fields, chance, OBJECTS)
            storage = fields.pop("storage_data", None)
            for key, info in made.storage_data.items():
                if isinstance(storage, dict) and key in storage and isinstance(storage[key], dict):
                    info.__dict__.update({str(k): v for k, v in storage[key].items()})
            made.__dict__.update(fields)
            with suppress(Exception):
                put(path, pickle.dumps(made))

    def edited(change: Callable[[Any], Any]) -> Callable[[Path], None]:
        made = pickle.loads(metadata)
        change(made)
        return lambda path: put(path, pickle.dumps(made))

    def many_chunks(made: Any) -> None:
        entry = made.state_dict_metadata["model.a.w"]
        entry.chunks = entry.chunks * 3000
        for i in range(50):
            made.state_dict_metadata[f"model.x{i}"] = entry

    attacks = [
        edited(lambda m: m.planner_data.update({"model.a.w": shared(("a",), 60)})),
        edited(lambda m: m.planner_data.update({"model.a.w": shared([1], 60, list)})),
        edited(lambda m: m.planner_data.update({"model.a.w": ("model", ("a",) * 5000)})),
        edited(lambda m: setattr(m, "planner_data", {"model.a.w": ("a" * 10_000,) * 60})),
        edited(many_chunks),
        edited(
            lambda m: m.state_dict_metadata["model.a.b"].__setattr__("size", torch.Size([2**40]))
        ),
        lambda path: put(path, BIG_BYTES),
        lambda path: put(path, DEEP_KEY),
        lambda path: put(path, metadata, overlapping_records()),
    ]
    return Format(attacks, write, lambda path: use_shard(path / "d"))


def steps(folder: Path) -> Format:
    """Directories of save_checkpoint whose markers fit the files, whatever is in these."""
    base = folder / "run"
    assert save_step(base, 3, 2) == [None, None]
    step = "step_00000003"
    small = ("complete.json", "job.json", "rank-00001-of-00002.json")

    def copy(path: Path) -> Path:
        (path / "run" / step).mkdir(parents=True)
        for file in (base / step).iterdir():
            (path / "run" / step / file.name).symlink_to(file)
        return path / "run" / step

    def replace(path: Path, content: bytes) -> None:
        path.unlink()
        path.write_bytes(content)

    def write(path: Path, chance: random.Random) -> None:
        own = copy(path)
        if chance.randrange(2):
            name = small[0] if chance.randrange(4) else chance.choice(small)
            content = json.loads((own / name).read_text())
            change(content, chance, PLAIN)
            text = changed_bytes((own / name).read_bytes(), chance)
            if chance.randrange(3):
                with suppress(ValueError, RecursionError):
                    text = json.dumps(content).encode()
            replace(own / name, text)
            return
        name = f"rank-0000{chance.randrange(2)}-of-00002.safetensors"
        data = (own / name).read_bytes()
        length = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:length])
        key = chance.choice(["xla_fsdp", "xla_fsdp", "xla_fsdp.values"])
        part = json.loads(header["__metadata__"][key])
        change(part, chance, PLAIN)
        with suppress(ValueError, RecursionError):
            header["__metadata__"][key] = json.dumps(part)
        text = json.dumps(header).encode()
        head = len(text).to_bytes(8, "little") + text
        replace(own / name, head + data[length:])
        marker = json.loads((own / small[0]).read_text())
        marker["files"][name] = {"bytes": len(head) + len(data) - length, "digest": digest(head)}
        replace(own / small[0], json.dumps(marker).encode())

    def marker_with(**more: Any) -> Callable[[Path], None]:
        def put(path: Path) -> None:
            own = copy(path) / small[0]
            replace(own, json.dumps({**json.loads(own.read_text()), **more}).encode())

        return put

    targets = [picture(3).target(rank, size) for rank, size in ((0, 2), (1, 2), (2, 3))]
    turns = itertools.cycle([*targets, None])

    def use(path: Path) -> None:
        target = next(turns)
        if target is not None:
            load_step(open_storage(path / "run"), Attempt(3), target)
        elif problems := look_at_shards(str(path / "run"), "*.pth", None, optimizer=True)[1]:
            raise CheckpointError(problems)

    attacks = [
        marker_with(world_size=10**11),
        marker_with(files={f"rank-{i:05d}-of-05000.pth": {} for i in range(5_000)}),
        marker_with(job=nested(900)),
    ]
    return Format(attacks, write, use)


FORMATS: dict[str, Callable[[Path], Format]] = {
    "pth": lambda folder: torch_files(),
    "torch_xla": lambda folder: torch_xla_files(),
    "safetensors": safetensors_files,
    "dcp": dcp_directories,
    "step": steps,
}

# ---------------------------------------------------------------- running


def write_input(kind: Format, name: str, number: int, path: Path) -> None:
    """Write the input with this number into a new folder."""
    path.mkdir()
    if number < len(kind.attacks):
        kind.attacks[number](path)
    else:
        kind.write(path, random.Random(f"{SEED} {name} {number}"))


def outcome(kind: Format, path: Path) -> str:
    """Read an input; whether it was read or refused. Raises for anything else."""
    try:
        kind.read(path)
    except CheckpointError as error:
        strange = [line for line in error.problems if str(path) not in line or "\n" in line]
        assert not strange, f"no file is named by {[one_line(line) for line in strange]}"
        return "refused"
    return "read"


def main(name: str, first: int, count: int, folder: Path) -> None:
    kind = FORMATS[name](folder)
    found = {"read": 0, "refused": 0}
    slowest = largest = 0.0
    with suppress(CheckpointError):  # what the first input imports is not its own affair
        write_input(kind, name, 10**6, folder / "warm")
        kind.read(folder / "warm")
    for number in range(first, first + count):
        path = folder / "input"
        write_input(kind, name, number, path)
        if not any(path.iterdir()):
            shutil.rmtree(path)
            continue
        (folder / "number").write_text(f"input {number} of {name}")
        before = reset_peak()
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # ends the process, even inside of C
        try:
            found[outcome(kind, path)] += 1
        except BaseException:
            print(f"input {number} of {name}:", file=sys.stderr)
            traceback.print_exc()
            sys.exit(1)
        left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        grown = peak() - before
        slowest, largest = max(slowest, CPU_SECONDS - left), max(largest, grown)
        if grown > MEMORY:
            sys.exit(f"input {number} of {name} took {grown:,} bytes of memory")
        shutil.rmtree(path)
    print(json.dumps({**found, "slowest": round(slowest, 3), "largest": largest}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
