"""Accelerate with sharded models on two ranks: what accelerate's own ``Accelerator`` does to the
gradients of shards, and that ours trains, clips, saves and loads as plain torch does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from test.common.accumulation import ACCUMULATE, MAX_NORM, RATE, STEPS, rows, train_plain
from test.common.compare import assert_close
from test.common.models import Block
from test.common.ranks import run_on_ranks
from test.common.scenarios import RANKS, fsdp, make, message
from xla_fsdp.integrations import UntestedVersionError, require

try:
    require("accelerate")
except UntestedVersionError as error:
    pytest.skip(str(error), allow_module_level=True)

import accelerate
from safetensors.torch import load_file

from xla_fsdp import Recipe
from xla_fsdp.integrations.accelerate import Accelerator
from xla_fsdp.wrap import transformer_auto_wrap_policy

MICRO = 4  # rows in all ranks' parts of one micro batch
State = dict[str, Tensor]
blocks = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})


class Job:
    """On a rank: a model that ``prepare`` shards, with an optimizer from before."""

    def __init__(self, num_ranks: int, **how: Any) -> None:
        how = how or {"shard": partial(fsdp, auto_wrap_policy=blocks)}
        self.accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, **how)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        loader = torch.utils.data.DataLoader(rows(MICRO), batch_size=MICRO // num_ranks)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )

    def train(self, first: int, last: int) -> list[float]:
        """Optimizer steps ``first`` to ``last``; returns the norms."""
        norms = []
        batches = self.accelerator.skip_first_batches(self.loader, first * ACCUMULATE)
        for index, (x, y) in enumerate(batches):
            if index == (last - first) * ACCUMULATE:
                break
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(F.cross_entropy(self.model(x), y))
                if self.accelerator.sync_gradients:
                    params = self.model.parameters()
                    norms.append(self.accelerator.clip_grad_norm_(params, MAX_NORM))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return [norm.item() for norm in norms]

    def full(self) -> State:
        """The trained model, whole; on the main process."""
        return dict(self.accelerator.get_state_dict(self.model))


# ---------------------------------------------------------------- on the ranks


def whole(directory: Path) -> dict[str, Any]:
    job = Job(RANKS)
    norms = job.train(0, 1)
    job.accelerator.save_state(str(directory / "state"))
    norms += job.train(1, STEPS)
    job.accelerator.save_model(job.model, str(directory / "model"))
    plain = job.accelerator.unwrap_model(job.model)
    return {
        "norms": norms,
        "full": job.full(),
        "optimizer": type(job.optimizer).__name__,
        "unwrapped": type(plain).__name__,
    }


def by_recipe(directory: Path, clips: bool) -> dict[str, Any]:
    """Sharded by a recipe, and saved in the middle; stepped in backward unless it clips."""
    job = Job(RANKS, recipe=Recipe("lean", step_in_backward=False) if clips else "lean")
    if not clips:
        job.accelerator.clip_grad_norm_ = lambda *_: torch.zeros(())
    norms = job.train(0, 1)
    job.accelerator.save_state(str(directory / "state"))
    norms += job.train(1, STEPS)
    [recipe] = job.accelerator.recipes
    again = Job(RANKS)
    again.accelerator.load_state(str(directory / "state"))
    again.train(1, STEPS)
    return {"norms": norms, "full": job.full(), "recipe": recipe, "again": clips and again.full()}


def resumed(directory: Path, num_ranks: int) -> State:
    job = Job(num_ranks)
    job.accelerator.load_state(str(directory / "state"))
    job.train(1, STEPS)
    return job.full()


def stepped(accelerator: Any, model: Any) -> tuple[State, State]:
    """Gradients of this rank before and after a step."""
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    named = list(model.named_parameters())
    x, y = (each[accelerator.process_index :: 2] for each in rows(MICRO).tensors)
    F.cross_entropy(model(x.to(accelerator.device)), y.to(accelerator.device)).backward()
    before = {name: param.grad.clone().cpu() for name, param in named}
    optimizer.step()
    return before, {name: param.grad.cpu() for name, param in named}


def with_ignored() -> tuple[State, State]:
    model, accelerator = make(), Accelerator()
    model = accelerator.prepare(fsdp(model, ignored_params=[model.head.bias]))
    return stepped(accelerator, model)


def ignored_and_clipped() -> dict[str, tuple[Tensor, Tensor]]:
    """An ignored gradient of this rank, and what it is stepped with: after a step that was clipped
    and then skipped, and after another model was clipped."""
    accelerator, models = Accelerator(), [make(), make()]
    first, second = (
        accelerator.prepare(fsdp(model, ignored_params=[model.head.bias])) for model in models
    )
    optimizers = [
        accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
        for model in (first, second)
    ]
    x, y = (each[accelerator.process_index :: 2] for each in rows(MICRO).tensors)
    x, y = x.to(accelerator.device), y.to(accelerator.device)

    def backward_and_clip(model: Any) -> Tensor:
        F.cross_entropy(model(x), y).backward()
        own = dict(model.named_parameters())["head.bias"].grad.clone().cpu()
        accelerator.clip_grad_norm_(model.parameters(), 1e6)
        return own

    def stepped_with(model: Any, optimizer: Any) -> tuple[Tensor, Tensor]:
        before = backward_and_clip(model)
        optimizer.step()
        return before, dict(model.named_parameters())["head.bias"].grad.cpu()

    backward_and_clip(first)
    optimizers[0].zero_grad()  # without a step
    return {
        "skipped": stepped_with(first, optimizers[0]),
        "other": stepped_with(second, optimizers[1]),
    }


def refused() -> dict[str, str]:
    """What is said about optimizers that cannot follow their model."""
    from xla_fsdp.optim import WholeParameterOptimizer

    with_state, two_groups = make(), make()
    trained = torch.optim.SGD(with_state.parameters(), lr=0.1, momentum=0.9)
    with_state(rows(MICRO).tensors[0]).sum().backward()
    trained.step()
    parts = [{"params": list(two_groups.inp.parameters())}]
    parts += [{"params": [p for n, p in two_groups.named_parameters() if "inp" not in n]}]
    grouped = torch.optim.SGD(parts, lr=0.1)
    wrapping_another = make()
    whole = WholeParameterOptimizer(wrapping_another.parameters(), torch.optim.Adafactor)
    sharding, flattening = (
        Accelerator(shard=partial(fsdp, flatten_parameters=flat)) for flat in (False, True)
    )
    return {
        "state": message(lambda: sharding.prepare(with_state, trained)),
        "groups": message(lambda: flattening.prepare(two_groups, grouped)),
        "around another": message(lambda: sharding.prepare(wrapping_another, whole)),
        "not ours": message(lambda: stepped(accelerate.Accelerator(), fsdp(make()))),
        "inner only": message(
            lambda: Accelerator().get_state_dict(torch.nn.Sequential(fsdp(make())))
        ),
    }


def at_the_end() -> dict[str, list[Any]]:
    """Which batches end an accumulation, and what is gathered of 11 samples in batches of two."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    samples = torch.utils.data.TensorDataset(torch.arange(11.0))
    loader = accelerator.prepare(torch.utils.data.DataLoader(samples, batch_size=2))
    syncs = []
    for _ in (loader, loader):
        for _ in loader:
            with accelerator.accumulate():
                syncs.append(accelerator.sync_gradients)
    for _ in accelerator.skip_first_batches(loader, 2):
        with accelerator.accumulate():
            syncs.append(accelerator.sync_gradients)
    gathered = [accelerator.gather_for_metrics(x) for (x,) in loader]
    return {"syncs": syncs, "gathered": torch.cat(gathered).tolist()}


def overflowing() -> tuple[bool, float]:
    """Whether a step is skipped, and the new scale, if a gradient of rank 0 is infinite."""
    accelerate.state.AcceleratorState._reset_state(True)
    options = accelerate.utils.GradScalerKwargs(init_scale=16.0)
    accelerator = Accelerator(mixed_precision="fp16", shard=fsdp, kwargs_handlers=[options])
    model = make()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(rows(MICRO).tensors[0].to(accelerator.device)).sum())
    if accelerator.process_index == 0:
        next(model.parameters()).grad.fill_(torch.inf)
    optimizer.step()
    return optimizer.step_was_skipped, accelerator.scaler.get_scale()


def two_ranks(rank: int, root: str) -> dict[str, Any]:
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as Theirs

    return {
        "whole": whole(Path(root)),
        "resumed": resumed(Path(root), RANKS),
        "unpatched": stepped(accelerate.Accelerator(), Theirs(make())),
        "ours": stepped(Accelerator(), fsdp(make())),
        "ignored": with_ignored(),
        "clipped": ignored_and_clipped(),
        "refused": refused(),
        "recipe": by_recipe(Path(root, "recipe"), clips=True),
        "in backward": by_recipe(Path(root, "in_backward"), clips=False),
        "end": at_the_end(),
        "overflow": overflowing(),
    }


def one_rank(rank: int, root: str) -> dict[str, State]:
    job = Job(1, recipe="lean")  # stepped in backward
    job.accelerator.clip_grad_norm_ = lambda *_: torch.zeros(())
    job.train(0, STEPS)
    return {"resumed": resumed(Path(root), 1), "in backward": job.full()}


# ---------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accelerate")


@pytest.fixture(scope="module")
def found(root: Path) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return run_on_ranks(two_ranks, RANKS, str(root))


def test_accelerate_by_itself_averages_gradients_of_different_shards(found: Any) -> None:
    (before_0, after_0), (before_1, after_1) = (each["unpatched"] for each in found)
    assert len(before_0) > 10
    for name, grad in before_0.items():
        assert not torch.equal(grad, before_1[name])  # different slices
        torch.testing.assert_close(after_0[name], (grad + before_1[name]) / 2)
        assert torch.equal(after_0[name], after_1[name])


def test_ours_leaves_them_alone(found: Any) -> None:
    for before, after in (each["ours"] for each in found):
        assert len(before) > 10
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_gradients_of_ignored_parameters_are_averaged(found: Any) -> None:
    (before_0, after_0), (before_1, after_1) = (each["ignored"] for each in found)
    mean = (before_0["head.bias"] + before_1["head.bias"]) / 2
    torch.testing.assert_close(after_0["head.bias"], mean)
    torch.testing.assert_close(after_1["head.bias"], mean)
    assert torch.equal(before_1["inp.weight"], after_1["inp.weight"])


@pytest.mark.parametrize("how", ["skipped", "other"])
def test_they_are_averaged_anew_after_clipping(found: Any, how: str) -> None:
    (before_0, after_0), (before_1, after_1) = (each["clipped"][how] for each in found)
    torch.testing.assert_close(after_0, (before_0 + before_1) / 2)
    assert torch.equal(after_0, after_1)


def test_training_is_that_of_plain_torch(found: Any) -> None:
    state, norms = train_plain(STEPS, MICRO)
    assert min(norms) > MAX_NORM
    torch.testing.assert_close(found[0]["whole"]["norms"], norms, atol=1e-6, rtol=1e-5)
    assert_close(found[0]["whole"]["full"], state, atol=2e-6, rtol=1e-5)


def test_what_prepare_returns(found: Any) -> None:
    assert found[0]["whole"]["optimizer"] == "ShardedOptimizer"
    assert found[0]["whole"]["unwrapped"] == "Net"
    assert found[1]["whole"]["full"] == {}  # the main process has it


def test_saved_models_load_in_a_plain_process(found: Any, root: Path) -> None:
    saved = load_file(root / "model" / "model.safetensors")
    expected = dict(found[0]["whole"]["full"])
    if "mid2.weight" not in saved:  # tied, so it is saved once
        expected.pop("mid2.weight")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], value) for name, value in expected.items())


def test_loading_on_as_many_ranks_goes_on_bit_by_bit(found: Any) -> None:
    whole = found[0]["whole"]["full"]
    resumed = found[0]["resumed"]
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


def test_the_last_batch_of_a_loader_ends_an_accumulation(found: Any) -> None:
    assert [each["end"]["syncs"] for each in found] == [[False, True, True] * 2 + [True]] * 2


def test_metrics_are_of_each_sample_once(found: Any) -> None:
    assert [each["end"]["gathered"] for each in found] == [[*map(float, range(11))]] * 2


def test_an_overflow_of_one_rank_skips_the_step_of_all(found: Any) -> None:
    assert [each["overflow"] for each in found] == [(True, 8.0)] * 2


@pytest.fixture(scope="module")
def alone(found: Any, root: Path) -> dict[str, State]:
    """What one rank makes, also of what two have saved."""
    return run_on_ranks(one_rank, 1, str(root))[0]


@pytest.mark.slow
def test_loading_on_another_number_of_ranks(found: Any, alone: dict[str, State]) -> None:
    assert_close(alone["resumed"], found[0]["whole"]["full"], atol=2e-6, rtol=1e-5)


def test_what_cannot_follow_its_model_is_refused(found: Any) -> None:
    said = found[0]["refused"]
    assert said["state"].startswith("ValueError: SGD has made steps before its model was wrapped")
    assert said["groups"].startswith("ValueError: parameter groups of SGD share a flattened unit")
    around = "ValueError: WholeParameterOptimizer was made before its model was wrapped, and the op"
    assert said["around another"].startswith(around)
    assert "Use the Accelerator of xla_fsdp.integrations.accelerate" in said["not ours"]
    assert said["inner only"].startswith("ValueError: 0 of Sequential is wrapped with FSDP")


def test_a_recipe_trains_saves_and_loads(found: dict[str, Any]) -> None:
    state, norms = train_plain(STEPS, MICRO)
    done = found[0]["recipe"]
    assert (done["recipe"].scan, done["recipe"].stacked) == (True, True)
    torch.testing.assert_close(done["norms"], norms, atol=1e-6, rtol=1e-5)
    assert_close(done["full"], state, atol=2e-6, rtol=1e-5)
    assert_close(done["again"], state, atol=2e-6, rtol=1e-5)


def test_a_recipe_that_steps_in_backward(found: dict[str, Any]) -> None:
    done = found[0]["in backward"]
    assert done["recipe"].step_in_backward
    assert_close(done["full"], train_plain(STEPS, MICRO, clips=False)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_one_rank_that_steps_in_backward_accumulates(alone: dict[str, State]) -> None:
    state, _ = train_plain(STEPS, MICRO, clips=False)
    assert_close(alone["in backward"], state, atol=1e-5, rtol=1e-5)


def test_a_recipe_or_a_function_that_shards() -> None:
    with pytest.raises(ValueError, match="shard and recipe both say how models are sharded"):
        Accelerator(shard=fsdp, recipe="lean")
