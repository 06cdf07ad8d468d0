"""Saving and resuming real training: 2 ranks, then 8, then 3, each going on where the last ended.

Every rank sees the same rows, so the number of ranks changes nothing but rounding, and one
uninterrupted run on 2 ranks says what the others must come to.
"""

from __future__ import annotations

import re
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.models import FEATURES, WIDTH, Net, TiedNet
from test.common.ranks import cached_outcome, run_on_ranks, run_warm
from test.common.saving import same_bits
from test.common.scenarios import fsdp, make, message, nested, rows
from xla_fsdp.checkpoint import find_problems, open_shard

ROUNDING = 1e-5
JOBS = ("adamw", "momentum")


class Everything(nn.Module):
    """A tied weight, a scalar, statistics, and a parameter that stays whole; small, as most of the
    time goes into compiling it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.tied = nn.Linear(FEATURES, WIDTH, bias=False)
        self.tied.weight = self.inp.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.codes = nn.Parameter(torch.arange(7), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.blocks[0](torch.tanh(self.inp(x))) * self.scale + self.tied(x)


class Job:
    """A model in training, wrapped in the way of ``ranks`` ranks."""

    def __init__(self, rank: int, ranks: int, kind: str) -> None:
        self.model = wrapped(rank, ranks, kind)
        if kind == "adamw":
            self.optimizer: Any = torch.optim.AdamW(parts(self.model), lr=0.01)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 3, 4], 0.5)

    def train(self, steps: int) -> list[float]:
        import torch_xla

        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(rows()).square().sum()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            torch_xla.sync()
            losses.append(loss.item())
        return losses

    def save(self, directory: Path, step: int, **options: Any) -> Any:
        from xla_fsdp import save_checkpoint

        extra = {"seen": step, "order": (1, 2), "noise": torch.arange(3)}
        return save_checkpoint(
            directory, self.model, self.optimizer, self.scheduler, extra, step, **options
        )

    def load(self, directory: Path, **options: Any) -> dict[str, Any]:
        from xla_fsdp import load_checkpoint

        return load_checkpoint(directory, self.model, self.optimizer, self.scheduler, **options)


def wrapped(rank: int, ranks: int, kind: str) -> Any:
    """Nested on 2 ranks; on 8 flattened, or in groups of 2 ranks; by rows on 3."""
    if ranks == 2:
        return nested(make(Everything))
    if ranks == 3:
        return fsdp(make(Everything), shard_param_on_dim_0=True)
    if kind == "momentum":
        return nested(make(Everything), flatten_parameters=True)
    pairs = [[first, first + 1] for first in range(0, ranks, 2)]
    return nested(
        make(Everything), sharding_groups=pairs, sharding_rank=rank % 2, sharding_world_size=2
    )


def parts(model: Any) -> list[dict[str, Any]]:
    """Two groups of parameters."""
    named = dict(model.named_parameters())
    biases = [p for name, p in named.items() if name.endswith("bias")]
    rest = [p for name, p in named.items() if not name.endswith("bias") and p.requires_grad]
    return [{"params": rest}, {"params": biases, "weight_decay": 0.0, "lr": 0.03}]


# ---------------------------------------------------------------- what runs on ranks


def on_2_ranks(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in JOBS:
        job, directory = Job(rank, 2, kind), Path(folder, kind)
        first = job.train(1)
        job.save(directory, 1, asynchronous=True)
        second = job.train(1)  # while the bytes go to disk
        job.save(directory, 2)
        found[kind] = {"losses": first + second + job.train(4), "state": host_state(job)}
        again = Job(rank, 2, kind)
        found[kind]["loaded"] = again.load(directory, step=1)
        found[kind]["from 1"] = again.train(1)
    save_ties(Path(folder, "ties"))
    found["errors"] = errors(rank, Path(folder))
    found["random"] = random_numbers(Path(folder, "random"))
    found["asynchronous"] = asynchronous(Path(folder, "asynchronous"))
    found["disagree"] = disagree(rank, Path(folder, "disagree"))
    found["hosts"] = hosts(rank, Path(folder, "hosts"))
    found["remote"] = remote()
    found["dtypes"] = dtypes(Path(folder, "dtypes"))
    found["empty groups"] = [empty_group(Path(folder, f"empty{at}"), at) for at in range(3)]
    return found


def on_8_ranks(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in JOBS:
        job, directory = Job(rank, 8, kind), Path(folder, kind)
        loaded = job.load(directory)
        job.save(directory, 3, file_format="pth" if kind == "momentum" else "safetensors")
        losses = job.train(2)
        job.save(directory, 4, keep_last=3)
        found[kind] = {"loaded": loaded, "losses": losses}
    return found


def on_3_ranks(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in JOBS:
        job = Job(rank, 3, kind)
        from_pth = Job(rank, 3, kind)
        from_pth.load(Path(folder, kind), step=3)
        found[kind] = {"loaded": job.load(Path(folder, kind)), "losses": job.train(2)}
        found[kind]["from step 3"] = from_pth.train(1)
        found[kind]["state"] = host_state(job)
    found["ties"] = load_ties(Path(folder, "ties"))
    found["wrong"] = message(lambda: Job(rank, 3, "adamw").load(Path(folder, "momentum")))
    return found


def host_state(job: Job) -> dict[str, Tensor]:
    """Full parameters, and what is whole."""
    from xla_fsdp import XlaFullyShardedDataParallel

    with XlaFullyShardedDataParallel.summon_full_params(job.model, writeback=False):
        return {name: value.detach().cpu() for name, value in job.model.state_dict().items()}


def ties(options: dict[str, Any]) -> Any:
    model = make(TiedNet)
    model.first, model.second = fsdp(model.first, **options), fsdp(model.second, **options)
    return fsdp(model, **options)


def save_ties(directory: Path) -> None:
    from xla_fsdp import save_checkpoint

    save_checkpoint(directory, ties({}), step=0)


def load_ties(directory: Path) -> dict[str, Any]:
    """Of two units into two units, and into one that is flat."""
    from xla_fsdp import XlaFullyShardedDataParallel, load_checkpoint

    found = {}
    plain = make(TiedNet)
    for name, model in (
        ("units", ties({})),
        ("flat", fsdp(make(TiedNet), flatten_parameters=True)),
    ):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        load_checkpoint(directory, model)
        with XlaFullyShardedDataParallel.summon_full_params(model, writeback=False):
            values = {n: p.detach().cpu() for n, p in model.named_parameters()}
        found[name] = all(same_bits(values[n], p) for n, p in plain.named_parameters())
    return found


def errors(rank: int, folder: Path) -> dict[str, str]:
    from xla_fsdp import (
        XlaFullyShardedDataParallel,
        load_checkpoint,
        optim_state_dict,
        save_checkpoint,
    )

    model = fsdp(make(Everything))
    other = torch.optim.SGD(make(Net).parameters(), lr=0.1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    before = host_bits(model)
    extra = {"fine": 1, "lambda": print} if rank == 1 else None
    found = {
        "wrapped": message(lambda: save_checkpoint(folder, nn.Linear(1, 1), step=1)),  # type: ignore
        "step": message(lambda: save_checkpoint(folder, model, step=-1)),
        "no number": message(lambda: save_checkpoint(folder, model)),
        "keep": message(lambda: save_checkpoint(folder, model, step=1, keep_last=0)),
        "format": message(lambda: save_checkpoint(folder, model, step=1, file_format="zip")),
        "extra": message(lambda: save_checkpoint(folder / "x", model, extra=extra, step=1)),
        "foreign": message(lambda: save_checkpoint(folder / "x", model, other, step=1)),
        "nothing": message(lambda: load_checkpoint(folder / "x", model)),
        "missing ok": str(load_checkpoint(folder / "x", model, missing_ok=True)),
        "no step": message(lambda: load_checkpoint(folder / "adamw", model, step=7)),
        "step's kind": message(lambda: load_checkpoint(folder / "adamw", model, step=True)),
        "class": message(lambda: load_checkpoint(folder / "adamw", model, sgd)),
        "scheduler": message(lambda: load_without_scheduler(folder / "ties")),
    }
    with XlaFullyShardedDataParallel.summon_full_params(model, writeback=False):
        found["summoned"] = message(lambda: save_checkpoint(folder / "y", model, step=1))
        found["summoned load"] = message(lambda: load_checkpoint(folder / "adamw", model))
        found["summoned optimizer"] = message(lambda: optim_state_dict(model, sgd))
    found["nothing written"] = message(lambda: load_checkpoint(folder / "y", model))
    found["unchanged"] = str(before == host_bits(model) and not sgd.state)
    return found


def load_without_scheduler(directory: Path) -> None:
    from xla_fsdp import load_checkpoint

    model = ties({})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with_optimizer = message(lambda: load_checkpoint(directory, model, optimizer))
    if "the checkpoint holds no optimizer state; load without one" in with_optimizer:
        load_checkpoint(directory, model, lr_scheduler=scheduler)


def host_bits(model: Any) -> list[bytes]:
    return [param.detach().cpu().numpy().tobytes() for param in model.parameters()]


def random_numbers(directory: Path) -> dict[str, bool]:
    """Draws on the device after loading are those after saving, and those without either."""
    import torch_xla

    from xla_fsdp import load_checkpoint, save_checkpoint
    from xla_fsdp.xla.host import exchange

    def draw() -> list[float]:
        return torch.rand(3, device=torch_xla.device()).tolist()

    def start() -> None:
        torch_xla.manual_seed(7)
        torch_xla.sync()

    model = fsdp(make(TiedNet))
    start()
    expected = draw()
    start()
    save_checkpoint(directory, model, step=5)
    saved = draw() == expected
    load_checkpoint(directory, model)
    loaded = draw() == expected
    exchange(b"")  # all ranks have set the random states of their process, before one seeds it anew
    return {"saved": saved, "loaded": loaded}


may_write = threading.Event()


def make_steps_fail() -> None:
    """From now on, writing steps 102 and 104 fails, and 105 waits, on all ranks: they share the
    module."""
    from xla_fsdp import one_rank_at_a_time
    from xla_fsdp.checkpoint import CheckpointError
    from xla_fsdp.state import train_checkpoint as save_load

    with one_rank_at_a_time():
        original = save_load.write_rank_file
        if original.__name__ == "failing":
            return

        def failing(sink: Any, name: str, content: Any) -> Any:
            if name.startswith(("step_00000102", "step_00000104")):
                raise CheckpointError("no room")
            if name.startswith("step_00000105"):
                may_write.wait(60)
            return original(sink, name, content)

        save_load.write_rank_file = failing


def asynchronous(directory: Path) -> dict[str, Any]:
    """A save that fails says so at the next one, or when it is waited for."""
    from xla_fsdp import latest_step, load_checkpoint, save_checkpoint
    from xla_fsdp.xla.host import exchange

    make_steps_fail()
    model = fsdp(make(TiedNet))

    def save(step: int, **options: Any) -> Any:
        return save_checkpoint(directory, model, step=step, **options)

    save(101)
    save(102, asynchronous=True)
    at_next = message(lambda: save(103))
    pending = save(104, asynchronous=True)
    at_wait = message(pending.wait)
    again = message(pending.wait)
    after_errors = latest_step(directory)
    pending = save(105, asynchronous=True)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()  # what is saved has been copied
    meanwhile = model(rows()).abs().sum().item()
    unfinished = latest_step(directory)
    exchange(b"")  # until all have looked
    may_write.set()
    pending.wait()
    load = message(lambda: load_checkpoint(directory, model))
    changed = all(not param.any().item() for param in model.parameters())
    return {
        "at next": at_next,
        "at wait": at_wait,
        "again": again,
        "latest": (after_errors, latest_step(directory)),
        "load": load,
        "zero": changed,
        "meanwhile": (meanwhile, unfinished),
    }


def disagree(rank: int, directory: Path) -> dict[str, Any]:
    """Ranks with different steps; and what another job owns."""
    from xla_fsdp import latest_step, load_checkpoint, save_checkpoint
    from xla_fsdp.checkpoint.steps.step_directory import JobRecord
    from xla_fsdp.xla.host import exchange

    model = fsdp(make(TiedNet))
    save_checkpoint(directory, model, step=1)
    found: dict[str, Any] = {
        "save": message(lambda: save_checkpoint(directory, model, step=2 + rank, keep_last=1)),
        "load": message(lambda: load_checkpoint(directory, model, step=1 + rank)),
    }
    exchange(b"")
    if rank == 0:
        (directory / "job.json").write_bytes(JobRecord("other", 1, 2, 0).to_bytes())
    exchange(b"")
    found["other"] = message(lambda: save_checkpoint(directory, model, step=2))
    load_checkpoint(directory, model)
    save_checkpoint(directory, model, step=3)
    again = fsdp(make(TiedNet))
    save_checkpoint(directory, again, step=4)
    if rank == 0:
        (directory / "job.json").write_bytes(JobRecord("third", 1, 2, 0).to_bytes())
    exchange(b"")
    found["third"] = message(lambda: save_checkpoint(directory, again, step=5))
    save_checkpoint(directory, again, step=6, take_over=True)
    other = fsdp(make(TiedNet))
    found["same step"] = message(lambda: save_checkpoint(directory, other, step=6))
    load_checkpoint(directory, other)
    save_checkpoint(directory, other, step=6)
    return {**found, "latest": latest_step(directory)}


def hosts(rank: int, folder: Path) -> dict[str, Any]:
    """Two ranks that share no file system."""
    from xla_fsdp import load_checkpoint, save_checkpoint

    model, own = fsdp(make(TiedNet)), folder / str(rank)
    save_checkpoint(own, model, step=1, extra=rank)
    save_checkpoint(own, model, step=2, extra=rank)
    if rank == 1:
        (own / "step_00000002" / "complete.json").unlink()  # as if it had been killed before
    files = sorted(path.name for path in (own / "step_00000001").iterdir())
    return {"loaded": load_checkpoint(own, model), "files": files}


def remote() -> dict[str, bool]:
    """An object store, which all ranks see."""
    from xla_fsdp import load_checkpoint, save_checkpoint

    model = fsdp(make(TiedNet))
    before = host_bits(model)
    for step in (1, 2):
        save_checkpoint("memory://bucket/run", model, step=step, asynchronous=True, keep_last=1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.ones_like(param))
    changed = before != host_bits(model)
    found = load_checkpoint("memory://bucket/run", model)  # waits for step 2
    return {"changed": changed, "back": before == host_bits(model), "latest": found["step"] == 2}


def empty_group(directory: Path, at: int) -> list[float]:
    """The learning rates that are loaded, one of them of a group without parameters."""
    from xla_fsdp import load_checkpoint, save_checkpoint

    model = fsdp(make(lambda: nn.Linear(FEATURES, 2)))

    def optimizer(rate: float) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": [p]} for p in model.parameters()]
        groups.insert(at, {"params": [], "lr": 0.07 + rate})
        return torch.optim.SGD(groups, lr=0.1 + rate)

    save_checkpoint(directory, model, optimizer(0.0), step=1)
    other = optimizer(0.5)
    load_checkpoint(directory, model, other)
    return [group["lr"] for group in other.param_groups]


def dtypes(directory: Path) -> dict[str, Any]:
    """State that is loaded for parameters of another dtype than it was saved for, and a step."""
    from xla_fsdp import load_checkpoint, save_checkpoint
    from xla_fsdp.optim import HighPrecisionOptimizer
    from xla_fsdp.state import optim_api as api

    def adamw(params: Any) -> Any:
        return torch.optim.AdamW(params, lr=0.01)

    def momentum(params: Any) -> Any:
        return torch.optim.SGD(params, lr=0.02, momentum=0.9)

    def high(params: Any) -> Any:
        return HighPrecisionOptimizer(params, torch.optim.AdamW, lr=0.01)

    def job(make_optimizer: Any, dtype: torch.dtype) -> tuple[Any, Any]:
        model = fsdp(make(lambda: nn.Linear(FEATURES, 2)).to(dtype))
        return model, make_optimizer(model.parameters())

    def step(model: Any, optimizer: Any, dtype: torch.dtype) -> set[str]:
        model(rows().to(dtype)).square().sum().backward()
        optimizer.step()
        states = [state.items() for state in optimizer.state.values()]
        return {str(v.dtype) for each in states for name, v in each if name != "step"}

    found = {}
    pairs = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
    for make_optimizer in (adamw, momentum, high):
        for old, new in pairs[: 1 if make_optimizer is high else 2]:
            model, optimizer = job(make_optimizer, old)
            step(model, optimizer, old)
            where = directory / f"{make_optimizer.__name__}{old}"
            save_checkpoint(where, model, optimizer, step=1)
            full = api.optim_state_dict(model, optimizer)
            shards = api.sharded_optim_state_dict(model, optimizer)
            loads = {
                "step": lambda *own, where=where: load_checkpoint(where, *own),
                "full": lambda *own, full=full: api.load_optim_state_dict(*own, full),
                "shards": lambda *own, s=shards: api.load_sharded_optim_state_dict(*own, s),
            }
            for how, load in loads.items():
                if make_optimizer is high and how != "step":
                    continue  # an fp32 parameter has no master weights to load
                other = job(make_optimizer, new)
                load(*other)
                found[f"{make_optimizer.__name__} {new} {how}"] = step(*other, new)
    return found


# ---------------------------------------------------------------- tests


@cached_outcome
def outcomes() -> dict[int, list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        results = {
            ranks: run_on_ranks(fn, ranks, folder)
            for ranks, fn in ((2, on_2_ranks), (8, on_8_ranks), (3, on_3_ranks))
        }
        for kind in JOBS:
            results[0] = [
                {**each, kind: files(Path(folder, kind))} for each in results.get(0, [{}])
            ]
        return results


def files(directory: Path) -> dict[str, Any]:
    """What is left of a run at its end, and the merged step 3."""
    from xla_fsdp import consolidate_sharded_model_checkpoints

    steps = sorted(path.name for path in directory.glob("step_*"))
    merged = {
        step: consolidate_sharded_model_checkpoints(
            f"{directory}/{step}/rank", "-*[sh]", save_model=False
        )[0]
        for step in steps
        if step != "step_00000001"
    }
    names = {step: sorted(p.name for p in (directory / step).glob("rank*[sh]")) for step in steps}
    return {"steps": steps, "merged": merged, "names": names}


def close(found: list[float], expected: list[float]) -> bool:
    return found == pytest.approx(expected, rel=ROUNDING)


@pytest.fixture(params=JOBS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_an_uninterrupted_run_is_equal_on_the_same_ranks(kind: str) -> None:
    for rank in range(2):
        found = outcomes()[2][rank][kind]
        assert found["from 1"] == found["losses"][1:2]
        assert found["loaded"]["step"] == 1
        extra = found["loaded"]["extra"]
        assert (extra["seen"], extra["order"], extra["noise"].tolist()) == (1, (1, 2), [0, 1, 2])


def test_training_goes_on_on_8_and_then_on_3_ranks(kind: str) -> None:
    expected = outcomes()[2][0][kind]
    for rank in range(8):
        found = outcomes()[8][rank][kind]
        assert found["loaded"]["step"] == 2
        assert close(found["losses"], expected["losses"][2:4])
    for rank in range(3):
        found = outcomes()[3][rank][kind]
        assert found["loaded"]["step"] == 4
        assert found["loaded"]["extra"]["seen"] == 4
        assert close(found["losses"], expected["losses"][4:6])
        assert close(found["from step 3"], expected["losses"][2:3])
        assert found["state"].keys() == expected["state"].keys()
        for name, value in found["state"].items():
            assert torch.allclose(value, expected["state"][name], rtol=1e-3, atol=1e-5), name


def test_resharding_changes_no_bit(kind: str) -> None:
    """Step 3 is step 2, loaded on 8 ranks and saved again at once."""
    merged = outcomes()[0][0][kind]["merged"]
    assert merged["step_00000002"].keys() == merged["step_00000003"].keys()
    for name, value in merged["step_00000002"].items():
        assert same_bits(value, merged["step_00000003"][name]), name


def test_what_lies_in_the_directory(kind: str) -> None:
    found = outcomes()[0][0][kind]
    assert found["steps"] == ["step_00000002", "step_00000003", "step_00000004"]
    shards = {"adamw": 2, "momentum": 8}[kind]  # of replicas only one is saved
    assert len(found["names"]["step_00000004"]) == shards
    suffix = {"adamw": "safetensors", "momentum": "pth"}[kind]
    assert found["names"]["step_00000003"][0] == f"rank-00000-of-{shards:05d}.{suffix}"


def test_tied_weights_of_units() -> None:
    assert outcomes()[3][0]["ties"] == {"units": True, "flat": True}


def test_errors_are_the_same_on_all_ranks_and_leave_everything_alone() -> None:
    found = outcomes()[2][0]["errors"]
    assert found == outcomes()[2][1]["errors"]
    assert found["wrapped"].startswith("TypeError: model is a Linear; expected the outermost")
    assert found["step"] == "ValueError: step=-1; expected a whole number, 0 or more"
    assert found["no number"] == "ValueError: step=None; expected a whole number, 0 or more"
    assert found["keep"] == "ValueError: keep_last=0; expected a whole number, 1 or more"
    assert found["format"] == "ValueError: file_format='zip'; expected one of safetensors, pth"
    assert "rank 1: extra.lambda is a builtin_function_or_method, which" in found["extra"]
    assert "ranks 0, 1: group 0 of SGD has a parameter of shape (11, 5)" in found["foreign"]
    assert "/x holds no complete step that all ranks see" in found["nothing"]
    assert found["missing ok"] == "{'step': None, 'extra': None}"
    assert "/adamw holds no step 7 that is complete on all ranks; there is 1, 2" in found["no step"]
    assert found["step's kind"] == "ValueError: step=True; expected a whole number, 0 or more"
    assert "group 0 of the optimizer joins parameters of several groups" in found["class"]
    assert re.search(r"step_0+\d+: the checkpoint holds no lr_scheduler; load", found["scheduler"])
    for name in ("summoned", "summoned load", "summoned optimizer"):
        assert "the model holds full parameters, not shards (a unit is in state" in found[name]
    assert "/y holds no complete step" in found["nothing written"]
    assert found["unchanged"] == "True"
    wrong = outcomes()[3][0]["wrong"]
    assert "is of another kind of optimizer: it has dampening, momentum" in wrong


def test_random_numbers_go_on() -> None:
    for rank in range(2):
        assert outcomes()[2][rank]["random"] == {"saved": True, "loaded": True}


def test_errors_of_asynchronous_saves_surface() -> None:
    for rank in range(2):
        found = outcomes()[2][rank]["asynchronous"]
        assert found["at next"] == "CheckpointError: ranks 0, 1: no room"
        assert found["at wait"] == "CheckpointError: ranks 0, 1: no room"
        assert found["again"] == "nothing was raised"
        assert found["latest"] == (101, 105)
        assert found["meanwhile"] == (0.0, 101)
        assert found["load"] == "nothing was raised"
        assert found["zero"] == (rank == 1)  # which holds nothing but padding


def test_a_job_that_ends_without_waiting_has_saved(tmp_path: Path) -> None:
    from xla_fsdp import latest_step

    done = run_warm("-m", "test.common.exit_without_wait", str(tmp_path), "works")
    assert (done.returncode, latest_step(tmp_path)) == (0, 1), done.stderr
    assert find_problems([open_shard(str(path)) for path in tmp_path.glob("*/*.safetensors")]) == []


def test_a_job_that_ends_without_waiting_says_what_it_has_not_saved(tmp_path: Path) -> None:
    from xla_fsdp import latest_step

    done = run_warm("-m", "test.common.exit_without_wait", str(tmp_path), "fails")
    assert (done.returncode, latest_step(tmp_path)) == (1, None)
    assert done.stderr.splitlines()[-1] == (
        f"xla_fsdp: step 1 was not saved in {tmp_path}: no room"
    )


def test_ranks_agree_first_and_jobs_do_not_mix() -> None:
    found = outcomes()[2][0]["disagree"]
    assert found == outcomes()[2][1]["disagree"]
    assert "ranks disagree about step: 2 on rank 0; 3 on rank 1" in found["save"]
    assert "ranks disagree about step: 1 on rank 0; 2 on rank 1" in found["load"]
    for name in ("other", "third"):
        assert f"/disagree belongs to job {name}, which began to save step 1 there" in found[name]
        assert "pass take_over=True; if not, save to another directory" in found[name]
    assert found["latest"] == 6
    assert (
        "step 6 was saved there by another model, whose files this one would" in found["same step"]
    )


def test_hosts_agree_on_the_step_that_all_have() -> None:
    for rank in range(2):
        found = outcomes()[2][rank]["hosts"]
        assert found["loaded"] == {"step": 1, "extra": rank}
        own = f"rank-{rank:05d}-of-00002"
        assert found["files"] == ["complete.json", "job.json", f"{own}.json", f"{own}.safetensors"]


def test_an_object_store() -> None:
    for rank in range(2):
        assert outcomes()[2][rank]["remote"] == {"changed": True, "back": True, "latest": True}


def test_state_fits_the_dtype_of_the_parameters() -> None:
    """What an optimizer keeps in fp32 for 16-bit parameters stays so."""
    found = outcomes()[2][0]["dtypes"]
    assert len(found) == 13
    for what, dtypes in found.items():
        name, dtype, _ = what.split()
        assert dtypes == {"torch.float32" if name == "high" else dtype}, what


def test_groups_without_parameters_keep_their_options() -> None:
    found = outcomes()[2][0]["empty groups"]
    assert found == [[0.07, 0.1, 0.1], [0.1, 0.07, 0.1], [0.1, 0.1, 0.07]]
