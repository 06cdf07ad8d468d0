"""Saving and loading steps without torch_xla: ranks are threads that meet at a barrier.

The values of a ``Picture`` follow from the step, so a reader can tell whether a step is complete.
Expected shards are cut here by slicing padded vectors, without the code under test.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.checkpoint import MemberRecord, ParamRecord, ShardMetadata
from xla_fsdp.checkpoint.convert.reshard import LoadTarget
from xla_fsdp.checkpoint.files.json_values import pack
from xla_fsdp.checkpoint.files.storage import Storage, open_storage
from xla_fsdp.checkpoint.format.records import (
    VALUE_PREFIX,
    GroupRecord,
    OptimizerRecord,
    StateRecord,
    model_name,
    state_name,
)
from xla_fsdp.checkpoint.steps.load_step import LoadedStep, load_step
from xla_fsdp.checkpoint.steps.save_step import Job, RankContent, Ranks, Save, ShardFile
from xla_fsdp.checkpoint.steps.step_directory import Keep, complete_attempts

States = dict[str, dict[str, Tensor]]

TIMEOUT = 300
JOB = Job("one")


class Meeting:
    """Where threads exchange bytes."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._said: list[list[bytes]] = [[] for _ in range(count)]
        self._ended = False

    def exchange(self, rank: int, data: bytes) -> list[bytes]:
        with self._changed:
            number = len(self._said[rank])
            self._said[rank].append(data)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended or self._complete(number), TIMEOUT)
            if not self._complete(number):
                raise RuntimeError(f"rank {rank} waits for ranks that do not come")
            return [said[number] for said in self._said]

    def end(self) -> None:
        """Somebody is not coming any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def ranks(self, rank: int) -> Ranks:
        return Ranks(rank, self._count, lambda data: self.exchange(rank, data))

    def _complete(self, number: int) -> bool:
        return all(len(said) > number for said in self._said)


def on_threads(count: int, fn: Callable[[Ranks], Any]) -> list[Any]:
    """What ``fn`` returned or raised on every rank."""
    meeting, results = Meeting(count), [None] * count

    def work(rank: int) -> None:
        try:
            results[rank] = fn(meeting.ranks(rank))
        except Exception as error:
            results[rank] = error
        finally:
            meeting.end()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# ---------------------------------------------------------------- pictures


@dataclass(frozen=True)
class Picture:
    """How a model is wrapped: which parameters are joined, and which are cut by rows.

    Args:
        params: full tensors by name.
        flat: key to the names joined in it.
        rows: names that are cut by rows.
        whole: tensors that every rank has in full.
        multiple: of the length of a shard that is not cut by rows.
        groups: of the optimizer: keys and learning rate; all in one if empty.
    """

    params: Mapping[str, Tensor]
    flat: Mapping[str, Sequence[str]] = field(default_factory=dict)
    rows: Sequence[str] = ()
    whole: Mapping[str, Tensor] = field(default_factory=dict)
    multiple: int = 128
    groups: Sequence[tuple[Sequence[str], float]] = ()

    def keys(self) -> dict[str, Sequence[str]]:
        joined = {name for names in self.flat.values() for name in names}
        return {**{name: [name] for name in self.params if name not in joined}, **self.flat}

    def metadata(self, rank: int, world_size: int, optimizer: bool = True) -> ShardMetadata:
        records = tuple(self._record(key, names) for key, names in self.keys().items())
        groups = self.groups or [(tuple(self.keys()), 0.1)]
        record = OptimizerRecord(
            tuple(GroupRecord(tuple(keys), {"lr": lr}) for keys, lr in groups),
            {key: StateRecord(("exp_avg",), ("step",), {}, ("step",)) for key in self.keys()},
        )
        return ShardMetadata(rank, world_size, records, optimizer=record if optimizer else None)

    def content(self, step: int, rank: int, world_size: int) -> RankContent:
        """What a rank saves: parameters, twice their values as state, and the step."""
        shards = {key: self.shard(key, rank, world_size) for key in self.keys()}
        extra = {"step": step, "rank": rank, "data": torch.full((3,), step)}
        values = pack({"extra": extra}, "values")
        tensors = {model_name(key): tensor for key, tensor in {**shards, **self.whole}.items()}
        for key, states in self.states(step, rank, shards).items():
            tensors |= {state_name(key, name): state for name, state in states.items()}
        tensors |= {f"{VALUE_PREFIX}{i}": tensor for i, tensor in enumerate(values.tensors)}
        return RankContent(self.metadata(rank, world_size), tensors, values.json)

    def states(self, step: int, rank: int, shards: Mapping[str, Tensor]) -> States:
        """The optimizer's tensors of a rank by key, given its shards."""
        counter = torch.tensor(float(step))
        return {key: {"exp_avg": shard * 2, "step": counter} for key, shard in shards.items()}

    def shard(self, key: str, rank: int, world_size: int) -> Tensor:
        """A rank's shard in its shape, padded with zeros."""
        joined = torch.cat([self.params[name].reshape(-1) for name in self.flat.get(key, [key])])
        row = self._multiple(key)
        length = math.ceil(math.ceil(joined.numel() / world_size) / row) * row
        padded = torch.zeros(length * world_size, dtype=joined.dtype)
        padded[: joined.numel()] = joined
        cut = padded[rank * length : (rank + 1) * length]
        return cut.reshape(-1, *self.params[key].shape[1:]) if key in self.rows else cut

    def target(self, rank: int, world_size: int) -> LoadTarget:
        whole = {name: tuple(tensor.shape) for name, tensor in self.whole.items()}
        groups = [tuple(keys) for keys, _ in self.groups] or [tuple(self.keys())]
        return LoadTarget(self.metadata(rank, world_size, optimizer=False), whole, groups)

    def _multiple(self, key: str) -> int:
        return self.params[key][0].numel() if key in self.rows else self.multiple

    def _record(self, key: str, names: Sequence[str]) -> ParamRecord:
        members = tuple(MemberRecord(name, tuple(self.params[name].shape)) for name in names)
        dtype = str(self.params[names[0]].dtype).removeprefix("torch.")
        return ParamRecord(key, dtype, self._multiple(key), members, key in self.rows)


def picture(step: int, **how: Any) -> Picture:
    """A small model of step ``step``."""
    params = {
        "embed.weight": torch.arange(300.0).reshape(60, 5) + step,
        "norm.weight": torch.full((7,), float(step)),
        "scale": torch.tensor(step / 2),
        "head.weight": torch.arange(40.0).reshape(8, 5) * step,
    }
    return Picture(params, whole={"count": torch.tensor(step)}, **how)


# ---------------------------------------------------------------- saving and reading


def save_step(
    directory: str | Path | Sequence[str | Path],
    step: int,
    world_size: int,
    *,
    keep_last: int | None = None,
    suffix: str = "safetensors",
    shown: Picture | None = None,
    job: Job = JOB,
    behind: float = 0.0,
) -> list[Any]:
    """All ranks save a picture; what each of them raised, or None. With a list of directories,
    neighbouring ranks share one. An asynchronous save has ``behind`` seconds before it is waited
    for."""

    def work(ranks: Ranks) -> None:
        storage = open_storage(place_of(directory, ranks.rank, world_size))
        file = ShardFile(ranks.rank, world_size, suffix)
        save = Save(storage, ranks, file, step, Keep(keep_last), job)
        save.begin()
        save.start((shown or picture(step)).content(step, ranks.rank, world_size))
        time.sleep(behind)
        save.wait()
        save.finish()

    return on_threads(world_size, work)


def place_of(
    directory: str | Path | Sequence[str | Path], rank: int, world_size: int
) -> str | Path:
    """The directory that a rank sees."""
    if isinstance(directory, str | Path):
        return directory
    return directory[rank * len(directory) // world_size]


def read(
    storage: Storage, shown: Picture, rank: int, world_size: int, **options: Any
) -> LoadedStep:
    """What a rank of a job wrapped like ``shown`` gets from the latest step."""
    attempt = complete_attempts(storage)[-1]
    return load_step(storage, attempt, shown.target(rank, world_size), **options)


def differences(loaded: LoadedStep, shown: Picture, rank: int, world_size: int, step: int) -> list:
    """What in a loaded step is not as it should be."""
    wrong = []
    for key in shown.keys():  # noqa: SIM118 (not a dict)
        expected = shown.shard(key, rank, world_size).reshape(-1)
        states = loaded.optimizer.states[key]
        if not same_bits(loaded.model[key].reshape(-1), expected):
            wrong.append(key)
        if not same_bits(states["exp_avg"].value.reshape(-1), expected * 2):
            wrong.append(f"exp_avg of {key}")
        if states["step"].value.item() != step:
            wrong.append(f"step of {key}")
    wrong += [n for n, t in shown.whole.items() if not same_bits(loaded.model[n], t)]
    if (
        loaded.values["extra"]["step"] != step
        or loaded.values["extra"]["data"].tolist() != [step] * 3
    ):
        wrong.append("extra")
    return wrong


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are equal down to their signs of zero."""
    return (first.dtype, first.shape) == (second.dtype, second.shape) and torch.equal(
        first.contiguous().view(-1).view(torch.uint8),
        second.contiguous().view(-1).view(torch.uint8),
    )


def damage_of(directory: str | Path, step: int) -> list[str]:
    """What is wrong with the latest step, which should be ``step``, read by 3 ranks."""
    storage = open_storage(directory)
    return [
        f"rank {rank}: {what}"
        for rank in range(3)
        for what in differences(read(storage, picture(step), rank, 3), picture(step), rank, 3, step)
    ]
