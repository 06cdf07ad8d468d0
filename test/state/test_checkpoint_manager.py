"""``CheckpointManager``: when it saves, what it keeps, and what it resumes from."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from test.common import save_memory
from test.common.ranks import cached_outcome, run_on_ranks, run_python
from test.common.saving import save_step
from test.common.scenarios import fsdp, make, message
from test.common.warned import recorded_warnings
from xla_fsdp.checkpoint.files.storage import open_storage
from xla_fsdp.checkpoint.steps.save_step import Ranks
from xla_fsdp.checkpoint.steps.step_directory import Attempt

RANKS = 4


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3, 5)
        self.out = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inp(x))


class Counter:
    """An object with a state, such as a data loader."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def new_model(fill: float, **options: Any) -> Any:
    model = fsdp(make(Small), **options)
    set_to(model, fill)
    return model


def set_to(model: Any, value: float) -> None:
    import torch_xla

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    torch_xla.sync()


def exchange(data: bytes) -> list[bytes]:
    from xla_fsdp.xla import host

    return host.exchange(data)


def values(model: Any) -> dict[str, float]:
    """The greatest element of each parameter; the padding of shards is zeros."""
    return {
        key: tensor.cpu().max().item()
        for key, tensor in model.state_dict().items()
        if tensor.numel() and tensor.cpu().max() != 0
    }


def on_ranks(rank: int, folder: str) -> dict[str, Any]:
    cases = [
        intervals,
        kept,
        damaged,
        partly,
        tiers,
        replicas,
        one_copy,
        without_autograd,
        refusals,
        alone,
        different,
    ]
    return {case.__name__: case(rank, Path(folder, case.__name__)) for case in cases}


def intervals(rank: int, folder: Path) -> Any:
    from xla_fsdp import CheckpointManager

    model, counter = new_model(0.0), Counter()
    with CheckpointManager(folder, save_interval_steps=np.int64(3)) as manager:
        nothing = manager.restore(model)
        saved = []
        for step in range(1, 8):
            set_to(model, step)
            counter.at = 10 * step + rank
            saved.append(
                manager.save(
                    np.int64(step), model, metrics={"loss": step / 2}, objects={"data": counter}
                )
            )
        saved += [manager.save(7, model, extra="last", force=True) for _ in range(2)]
    again, counter = new_model(0.0), Counter()
    restored = manager.restore(again)
    sixth = manager.restore(again, step=np.int64(6), objects={"data": counter})
    return {
        "nothing": nothing,
        "saved": saved,
        "steps": manager.steps(),
        "metrics": manager.metrics(3),
        "newest": (restored.step, restored.extra, sixth.metrics),
        "step 6": (repr(sixth.step), values(again), counter.at - rank),
    }


def kept(rank: int, folder: Path) -> Any:
    from xla_fsdp import CheckpointManager
    from xla_fsdp.checkpoint import Best

    model = new_model(0.0)
    losses = [5.0, 1.0, 4.0, 3.0, 2.0, 6.0, 7.0]
    manager = CheckpointManager(folder, keep_last=2, keep_period=4, best=Best("loss", keep=2))
    for step, loss in enumerate(losses, 1):
        set_to(model, step)
        manager.save(step, model, metrics={"loss": loss})
    manager.wait()
    best = manager.restore(model, step="best")
    return manager.steps(), best.step, best.metrics, values(model)


def damaged(rank: int, folder: Path) -> Any:
    from xla_fsdp import CheckpointManager

    model = new_model(0.0)
    with CheckpointManager(folder, keep_last=2) as manager:
        for step in (1, 2, 3):
            set_to(model, step)
            manager.save(step, model)
    if rank == 0:
        path = next(Path(folder, "step_00000003").glob("rank-00002*.safetensors"))
        data = bytearray(path.read_bytes())
        data[-8:] = b"\xff" * 8
        path.write_bytes(data)
    again = CheckpointManager(folder, keep_last=2)
    with recorded_warnings() as texts:
        restored = again.restore(model)
    warned = [text for text in texts if "cannot be loaded" in text]
    found = values(model)
    for step in (3, 4):  # 3 once more
        set_to(model, step)
        again.save(step, model)
    again.wait()
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir())
    return restored.step, found, warned, folders, again.steps()


def partly(rank: int, folder: Path) -> Any:
    from xla_fsdp import CheckpointManager

    model = new_model(7.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    manager = CheckpointManager(folder)
    manager.save(1, model, optimizer)
    other = new_model(1.0)
    stepped = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    manager.restore(other, stepped, only=["inp."])
    first = values(other)
    assert stepped.param_groups[0]["lr"] == 0.5
    swapped = new_model(1.0)
    swap = {"inp.bias": "out.weight"}
    wrong = message(lambda: manager.restore(swapped, key_map=swap))
    manager.restore(swapped, only=lambda name: name == "out.bias")
    unfit = message(lambda: manager.restore(swapped, key_map={"decoder.": "out."}))
    mapped = swapped_names(manager)
    nothing = [
        message(lambda only=only: manager.restore(swapped, only=only))
        for only in (
            ["inp.", "typo."],
            "encoder",
            [],
            lambda name: False,
            lambda name: 1 / (rank - 1),
        )
    ]
    return first, wrong, values(swapped), unfit, mapped, nothing, states_of_a_part(manager)


def states_of_a_part(manager: Any) -> list[set[float]]:
    """Momentum by parameter, of a model in training of which a part is restored."""
    import torch_xla

    from xla_fsdp import optim_state_dict

    def trained(gradient: float) -> Any:
        model = new_model(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
        torch_xla.sync()
        return model, optimizer

    manager.save(2, *trained(4.0))
    model, optimizer = trained(3.0)
    manager.restore(model, optimizer, only=["inp."])
    found = optim_state_dict(model, optimizer)["state"]
    return [set(found[name]["momentum_buffer"].flatten().tolist()) for name in sorted(found)]


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inp(x))


def swapped_names(manager: Any) -> dict[str, float]:
    """The values of a model whose head has another name than in the checkpoint."""
    model = fsdp(make(Renamed))
    manager.restore(model, key_map={"out.": "head."})
    return values(model)


def tiers(rank: int, folder: Path) -> Any:
    from xla_fsdp import CheckpointManager

    def manager() -> Any:
        return CheckpointManager(
            folder / "bucket",
            save_interval_steps=4,
            local_directory=folder / "disk",
            local_interval_steps=1,
        )

    model = new_model(0.0)
    with manager() as first:
        for step in range(1, 7):
            set_to(model, step)
            first.save(step, model)
    exchange(b"")  # rank 0 deletes older steps, and has waited for that
    from xla_fsdp.checkpoint.steps.step_directory import complete_attempts

    places = [
        [each.step for each in complete_attempts(open_storage(folder / name))]
        for name in ("bucket", "disk")
    ]
    newest = manager().restore(model)
    model.state_dict()
    if rank == 0:
        for path in Path(folder, "disk").glob("step_*/*.safetensors"):
            path.write_bytes(path.read_bytes()[:-1])
    exchange(b"")
    again = manager()
    older = again.restore(model)
    set_to(model, 5)
    again.save(5, model)
    again.wait()
    other = CheckpointManager(
        folder / "other", local_directory=folder / "disk", local_interval_steps=1
    )
    told = [
        message(lambda: other.restore(model)).replace(str(folder), "."),
        message(lambda: other.save(9, model)),
        message(lambda: CheckpointManager(folder / "disk").restore(model, step=5)),
    ]
    newest = newest.step, Path(newest.directory).name
    return places, newest, older.step, again.steps(), told


def replicas(rank: int, folder: Path) -> Any:
    from xla_fsdp import CheckpointManager

    groups = {
        "sharding_groups": [[0, 1], [2, 3]],
        "sharding_rank": rank % 2,
        "sharding_world_size": 2,
    }
    model = new_model(3.0, **groups)
    manager = CheckpointManager(folder, async_=False)
    manager.save(1, model)
    writes = manager._pending._save._writes
    again = new_model(0.0, **groups)
    manager.restore(again)
    return writes, values(again)


def one_copy(rank: int, folder: Path) -> Any:
    """Whether slow saves copy the shards to the same memory, and what is then in the files."""
    from xla_fsdp import CheckpointManager
    from xla_fsdp.fsdp.engine import stacked_params
    from xla_fsdp.state import train_checkpoint

    write = train_checkpoint.write_rank_file

    def slow(*args: Any) -> Any:
        time.sleep(0.2)
        return write(*args)

    model, manager = new_model(0.0), CheckpointManager(folder)
    copies: list[list[Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:  # ranks are threads of one process
            patch.setattr(train_checkpoint, "write_rank_file", slow)
            patch.setattr(stacked_params, "AT_ONCE", 32)
        for step in (1, 2, 3):
            set_to(model, step)
            manager.save(step, model)
            copies.append(list(train_checkpoint._pending[model]._host._copies))
        manager.wait()
    first, *later = copies
    same = [all(a is b for a, b in zip(first, each, strict=True)) for each in later]
    found = []
    for step in (1, 2, 3):
        manager.restore(model, step=step)
        found.append(set(values(model).values()))
    return len(first), same, found


def without_autograd(rank: int, folder: Path) -> Any:
    """Saved and loaded as an evaluation does, and trained on."""
    import torch_xla

    from xla_fsdp import CheckpointManager, load_checkpoint

    model = new_model(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter.detach())
        optimizer.step()
        torch_xla.sync()

    step()
    with CheckpointManager(folder) as manager:
        with torch.inference_mode():
            manager.save(1, model, optimizer, extra=torch.ones(2))
        manager.save(2, model, optimizer)
        with torch.inference_mode():
            restored = manager.restore(model, optimizer, step=1)
        restored.extra.add_(1)
    step()
    with torch.inference_mode():
        load_checkpoint(folder, model, optimizer)
    step()
    return restored.extra.tolist(), sorted(set(values(model).values()))


class Odd(nn.Module):
    """With a name that no file can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("a\tb", nn.Parameter(torch.ones(2)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.get_parameter("a\tb")


def refusals(rank: int, folder: Path) -> Any:
    from xla_fsdp import CheckpointManager

    model = new_model(1.0)
    manager = CheckpointManager(folder)
    manager.save(2, model)
    manager.wait()
    return [
        message(lambda: CheckpointManager(folder, keep_last=0)),
        message(lambda: CheckpointManager(folder, local_directory=folder)),
        message(lambda: manager.restore(model, step="best")),
        message(lambda: manager.restore(model, step=1)),
        message(lambda: manager.save(3, model, metrics={"loss": "low"})),
        message(lambda: manager.metrics(1)),
        message(lambda: CheckpointManager(folder, best="loss").restore(model, step="best")),
        message(lambda: manager.restore(model, objects={"data": Counter()})),
        message(lambda: manager.save(3, fsdp(make(Odd)))),
        message(lambda: manager.restore(model, key_map={"a.": None})),  # type: ignore
        message(lambda: manager.restore(model, only=[1])),  # type: ignore
        message(lambda: manager.save(3, model, objects={1: Counter()})),  # type: ignore
    ]


class Failing(Counter):
    """An object whose methods fail, each once."""

    def __init__(self, *methods: str) -> None:
        super().__init__()
        self.methods = set(methods)

    def state_dict(self) -> dict[str, Any]:
        self.fail("state_dict")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fail("load_state_dict")
        super().load_state_dict(state)

    def fail(self, method: str) -> None:
        if method in self.methods:
            self.methods.remove(method)
            raise KeyError(f"no {method}\nnow")


def alone(rank: int, folder: Path) -> Any:
    """What fails on one rank alone, and that all ranks go on together after it."""
    from xla_fsdp import CheckpointManager
    from xla_fsdp.state.train_checkpoint import TrainState

    model, manager = new_model(1.0), CheckpointManager(folder)
    first = rank == 1
    failing = Failing("state_dict", "load_state_dict") if first else Counter()
    told = [
        message(lambda: manager.save(1, model, metrics={"loss": None} if first else None)),
        message(lambda: manager.save(1, model, metrics=3 if first else {})),  # type: ignore
        message(lambda: manager.save(1, model, objects={"data": failing})),
        message(lambda: manager.save(1, model, extra=torch.eye(2).to_sparse() if first else 0)),
    ]
    content, later = TrainState.content, []
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:  # ranks are threads of one process
            patch.setattr(TrainState, "content", lambda *args: _no_room(content, *args))
        exchange(b"")
        later.append(message(lambda: manager.save(1, model)))
        told.append(message(manager.wait))
        exchange(b"")
    manager.save(2, model, objects={"data": failing}, metrics={"high": math.inf, "none": math.nan})
    told.append(message(lambda: manager.restore(model, objects={"data": failing})))
    whole = manager.restore(model, objects={"data": failing})
    return told, later, whole.step, manager.steps(), str(manager.metrics(2))


def different(rank: int, folder: Path) -> Any:
    """What ranks ask for differently; and a run that goes back to an earlier step."""
    from xla_fsdp import CheckpointManager

    def load(**options: Any) -> str:
        return message(lambda: manager.restore(model, **options))

    first = rank == 0
    model, manager = new_model(1.0), CheckpointManager(folder, best="loss")
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in (1, 2):
        manager.save(step, model, sgd, metrics={"loss": step})
    told = [
        load(only=["inp."] if first else None),
        load(only=(lambda name: "bias" in name) if first else ["inp."]),
        load(key_map={"out.": "head."} if first else None),
        load(strict=first),
        load(step="best" if first else None),
        load(optimizer=sgd if first else None),
        message(lambda: manager.save(3, model, sgd if first else None)),
    ]
    manager.restore(model, step=1)
    set_to(model, 7.0)
    told.append(str(manager.save(2, model, metrics={"loss": 2})))
    manager.restore(model, step=2)
    return told, values(model)


def _no_room(content: Any, state: Any, *args: Any) -> Any:
    from xla_fsdp.xla import ops

    if ops.rank() == 1:
        raise MemoryError("no room")
    return content(state, *args)


@cached_outcome
def found() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_on_ranks(on_ranks, RANKS, folder)


def same_on_all(case: str) -> Any:
    first, *others = (each[case] for each in found())
    assert all(other == first for other in others)
    return first


def test_saves_steps_that_are_due() -> None:
    seen = same_on_all("intervals")
    assert seen["nothing"] is None
    assert seen["saved"] == [False, False, True, False, False, True, False, True, False]
    assert seen["steps"] == [3, 6, 7]
    assert seen["metrics"] == {"loss": 1.5}
    assert seen["newest"] == (7, "last", {"loss": 3.0})
    step, at, counted = seen["step 6"]
    assert (step, set(at.values()), counted) == ("6", {6.0}, 60)


def test_keeps_the_last_the_periodic_and_the_best() -> None:
    assert found()[0]["kept"][0] == [2, 4, 5, 6, 7]  # the first rank deletes
    for _, best, metrics, at in (each["kept"] for each in found()):
        assert (best, metrics, set(at.values())) == (2, {"loss": 1.0}, {2.0})


def test_a_damaged_step_is_named_and_left_and_an_older_one_loaded() -> None:
    for step, at, _, _, _ in (each["damaged"] for each in found()):
        assert (step, set(at.values())) == (2, {2.0})
    # The first rank deletes.
    _, _, warned, folders, steps = found()[0]["damaged"]
    assert folders == ["step_00000003", "step_00000003.1", "step_00000004"]
    assert steps == [3, 4]
    (line,) = warned
    assert "step_00000003 cannot be loaded, so an older step is tried: rank 2: " in line
    assert "rank-00002-of-00004.safetensors" in line
    assert "is damaged" in line


def test_a_part_of_a_model_is_restored() -> None:
    first, wrong, bias, unfit, mapped, *_ = found()[0]["partly"]
    assert {key.rpartition(".")[0]: value for key, value in first.items()} == {
        key.rpartition(".")[0]: 7.0 if "inp" in key else 1.0 for key in first
    }
    assert "key_map: 2 names become 'out.weight'" in wrong
    assert "key_map: decoder.=out. fits no name of the model" in unfit
    assert set(mapped.values()) == {7.0}
    assert {value for key, value in bias.items() if "out.bias" in key} <= {7.0}
    assert {value for key, value in bias.items() if "out.bias" not in key} == {1.0}


def test_a_part_that_is_nothing_is_refused() -> None:
    *_, nothing, _ = same_on_all("partly")
    prefix, string, empty, function, alone = nothing
    assert prefix == "CheckpointError: ranks 0, 1, 2, 3: only: 'typo.' fits no name of the model"
    assert "only: 'encoder' fits no name of the model" in string
    assert "only: is empty, so it selects nothing of the model" in empty
    assert "only: selects no parameter or buffer of the model" in function
    assert alone == "CheckpointError: rank 1: ZeroDivisionError: division by zero"


def test_the_optimizers_state_of_the_other_parameters_stays() -> None:
    *_, states = found()[0]["partly"]
    assert states == [{4.0}, {4.0}, {3.0}, {3.0}]  # inp.bias, inp.weight, out.bias, out.weight


def test_two_tiers() -> None:
    places, newest, older, steps, _ = found()[0]["tiers"]
    assert places == [[4], [6]]
    assert newest == (6, "disk")
    assert (older, steps) == (4, [4, 5])


def test_a_disk_with_the_steps_of_another_run_is_refused() -> None:
    *_, (restored, saved, alone) = same_on_all("tiers")
    assert restored == (
        "CheckpointError: ranks 0, 1, 2, 3: ./disk is the local directory of the run in ./bucket, "
        "not of ./other: use another one, or delete it"
    )
    assert (saved, alone) == ("nothing was raised", "nothing was raised")


def test_replicas_share_the_writing() -> None:
    writes = [each["replicas"][0] for each in found()]
    assert writes == [True, False, False, True]  # shard 0 by the first group, 1 by the second
    assert {value for each in found() for value in each["replicas"][1].values()} == {3.0}


def test_saves_reuse_one_copy_in_memory() -> None:
    for count, same, at in (each["one_copy"] for each in found()):
        assert count > 4
        assert same == [True, True]
        assert at == [{1.0}, {2.0}, {3.0}]


def test_inference_mode_leaves_no_trace() -> None:
    extra, found = same_on_all("without_autograd")
    assert extra == [2.0, 2.0]
    assert len(found) == 1
    assert found[0] == pytest.approx(1 - 0.5 - 0.5 * 1.9)


@pytest.mark.parametrize(
    ("number", "part"),
    [
        (0, "keep_last=0; expected a whole number, 1 or more"),
        (1, "pass both or none"),
        (2, 'step="best": pass best= to CheckpointManager'),
        (3, "holds no step 1 that is complete on all ranks; there is 2"),
        (4, "metrics['loss'] is 'low'; expected a number"),
        (5, "holds no step 1"),
        (6, "holds no complete step with the metric 'loss'"),
        (7, "the checkpoint holds no data; load without one"),
        (8, r"'a\tb' is not the name of a tensor of a model that can be saved: such names are"),
        (9, "key_map={'a.': None}; expected a dict of prefixes"),
        (10, "only=[1]; expected a function, or prefixes of names"),
        (11, "objects: the name 1 is a int, expected a string"),
    ],
)
def test_refusals(number: int, part: str) -> None:
    assert all(part in each["refusals"][number] for each in found())


@pytest.mark.parametrize(
    ("number", "part"),
    [
        (0, "CheckpointError: rank 1: metrics['loss'] is None; expected a number"),
        (1, "CheckpointError: rank 1: metrics is 3; expected numbers by name"),
        (2, "CheckpointError: rank 1: data.state_dict(): KeyError: 'no state_dict\\nnow'"),
        (3, "CheckpointError: rank 1: extra is a tensor of layout torch.sparse_coo, not a dense"),
        (4, "CheckpointError: rank 1: MemoryError: no room"),
        (5, "CheckpointError: rank 1: data.load_state_dict(): KeyError: 'no load_state_dict"),
    ],
)
def test_what_fails_on_one_rank_is_raised_by_all(number: int, part: str) -> None:
    told, *_ = same_on_all("alone")
    assert told[number].startswith(part)


def test_ranks_have_to_ask_for_the_same() -> None:
    for told, _ in (each["different"] for each in found()):
        asked = ["only", "only", "key_map", "strict", "step", "optimizer", "optimizer"]
        for what, line in zip(asked, told, strict=False):
            assert line.startswith(f"CheckpointError: ranks disagree about {what}: ")
        assert "optimizer: SGD on rank 0; None on ranks 1, 2, 3. All must pass the same" in told[5]


def test_a_step_that_is_trained_again_is_saved_again() -> None:
    for told, at in (each["different"] for each in found()):
        assert (told[-1], set(at.values())) == ("True", {7.0})


def test_all_ranks_go_on_after_one_has_failed() -> None:
    _, later, *rest = same_on_all("alone")
    assert later == ["nothing was raised"]
    assert rest == [2, [2], "{'high': inf, 'none': nan}"]


# ---------------------------------------------------------------- preemption


def preempted(rank: int, folder: str) -> None:
    """Train until rank 1's process has been asked to end and all ranks know it; saves are slow."""
    import torch_xla

    from xla_fsdp import CheckpointManager, Preemption
    from xla_fsdp.distributed.preemption import was_asked

    model, preemption, saved = new_model(1.0), Preemption(), 0
    manager = CheckpointManager(folder, save_interval_steps=1000)
    try:
        with manager:
            for step in range(1, 100):
                model(torch.ones(2, 3).to(torch_xla.device())).sum().backward()
                model.zero_grad()
                preemption.vote()
                torch_xla.sync()
                stop = preemption.agreed()
                saved += manager.save(step, model, extra=step, force=stop)
                if stop:
                    raise SystemExit(75)
                if (rank, step) == (1, 3):
                    os.kill(os.getpid(), signal.SIGTERM)
                    while not was_asked():  # the main thread takes it
                        time.sleep(0.001)
    finally:
        # One write: if Python does not buffer, print writes the end of a line by itself, and
        # another rank's line can come between.
        os.write(1, f"rank {rank}: {saved} saved, complete {manager.steps()}\n".encode())


def run_preempted(folder: str) -> None:
    """What a child of the test runs."""
    from xla_fsdp import launch
    from xla_fsdp.state import train_checkpoint

    write = train_checkpoint.write_rank_file

    def slow(*args: Any) -> Any:
        time.sleep(1)
        return write(*args)

    train_checkpoint.write_rank_file = slow
    launch(preempted, (folder,), num_ranks=2, stop_signals=[signal.SIGTERM])


def test_a_preempted_job_finishes_the_save_before_it_leaves_the_block(tmp_path: Path) -> None:
    code = f"import {__name__} as here; here.run_preempted({str(tmp_path)!r})"
    done = run_python("-c", code)
    assert done.returncode == 75, done.stderr
    (folder,) = tmp_path.glob("step_*")
    step = int(folder.name.removeprefix("step_"))
    assert step in (5, 6)  # two steps later, or one more
    expected = [f"rank {rank}: 1 saved, complete [{step}]" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        *({"best": 3}, {"best": True}, {"async_": 1}, {"take_over": None}, {"keep_last": "2"}),
        *({"keep_last": True}, {"save_interval_steps": None}, {"local_keep_last": 0}),
    ],
    ids=str,
)
def test_arguments_are_checked_at_once(tmp_path: Path, arguments: dict[str, Any]) -> None:
    from xla_fsdp import CheckpointManager

    with pytest.raises(ValueError, match=f"{next(iter(arguments))}="):
        CheckpointManager(tmp_path, **arguments)


def test_what_is_best_is_checked_at_once() -> None:
    from xla_fsdp.checkpoint.steps.step_directory import Best

    for arguments in ({"metric": 3}, {"metric": "loss", "keep": 1.5}):
        with pytest.raises(ValueError, match="expected"):
            Best(**arguments)


def test_ranks_look_again_where_another_job_saves_and_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was listed is deleted, and what took its place was not there yet."""
    from xla_fsdp import CheckpointManager
    from xla_fsdp.state import checkpoint_manager

    save_step(tmp_path, 6, 2)
    alone, at, looks = Ranks(0, 1, lambda data: [data]), Attempt(6), iter([[], [], [Attempt(6)]])
    monkeypatch.setattr(checkpoint_manager, "complete_attempts", lambda _: iter(next(looks)))
    [candidate], _ = CheckpointManager(tmp_path)._candidates(alone, None, {})
    assert candidate.attempt == at


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("bucket", 3),
        pytest.param("local", 60, marks=pytest.mark.slow),
        pytest.param("bucket", 60, marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_moment_nothing_is_lost(tmp_path: Path, kind: str, count: int) -> None:
    """Of two tiers, the second one on a disk that is lost sometimes."""
    if kind == "bucket":
        pytest.importorskip("gcp_storage_emulator", reason="a bucket on this machine")
    child = run_python(
        "-m", "test.common.manager_kills", str(tmp_path), str(count), "5", kind, timeout=2000
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    print(found)
    assert found["problems"] == []
    assert found["kills"] == count
    assert len(found["went on from"]) >= count - 1


def test_saves_behind_training_where_memory_is_short(tmp_path: Path) -> None:
    """They take one copy, however many there are; where there is no room for it, all are told."""
    for found in run_on_ranks(save_memory.save_often, 2, str(tmp_path)):
        assert found["kept"] < save_memory.BYTES + save_memory.SLACK
        # The transfer of a parameter to the host takes two copies of it, for a moment.
        assert found["most"] < 3 * save_memory.BYTES + save_memory.SLACK
        assert re.match("CheckpointError: ranks 0, 1: .*(RESOURCE_EXHAUSTED|memory)", found["told"])
        assert found["latest"] == 2
