"""Families of ``real_models`` through every door: gradients of two batches added up and clipped.

``python -m test.common.model_doors [FAMILY ...]`` tells what each does.
"""

from __future__ import annotations

import copy
import gc
import sys
import traceback
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from test.common.ranks import run_on_ranks
from test.common.real_models import FAMILIES, RealTask
from test.common.training import Batch

RANKS = 2
STEPS = 3
BATCHES = 2  # of a step
NORM = 0.05  # smaller than those of all these models
LEAN = "lean, compiled"
DOORS = ("wrapper", "fully_shard", LEAN)
# Of the update of all parameters together (its norm), and of a loss.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.15}
LOSS_TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 0.01}
Run = tuple[str, str, torch.dtype]  # family, door, what it computes in
Trained = tuple[list[float], dict[str, Tensor]]  # losses, parameters


def found(names: Iterable[str], doors: Iterable[str] = DOORS) -> dict[Run, str]:
    """For each family, door and dtype: nothing if it trains as the plain model, or what is wrong.
    All are run in one launch."""
    runs = [(name, door, dtype) for name in names for door in doors for dtype in TOLERANCES]
    results = run_on_ranks(TRAIN_ALL, RANKS, runs, timeout=3000)[0]
    return {run: _verdict(run, results[run]) for run in runs}


TRAIN_ALL = "test.common.model_doors:_train_all"  # this module may be __main__


def _train_all(rank: int, runs: list[Run]) -> dict[Run, Trained | str]:
    return {run: _attempt(rank, *run) for run in runs}


def _attempt(rank: int, *run: Any) -> Trained | str:
    """What fails on one rank fails on all, so that the next model can run."""
    try:
        return _train(rank, *run)
    except Exception as error:
        return f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
    finally:
        gc.collect()


def _verdict(run: Run, result: Trained | str) -> str:
    if isinstance(result, str):
        return result
    name, _, dtype = run
    losses, params = result
    expected_losses, expected = _train_plain(name)
    for mine, plain in zip(losses, expected_losses, strict=True):
        if not abs(mine - plain) <= LOSS_TOLERANCES[dtype] * abs(plain):
            return f"losses {losses} for {expected_losses}"
    if params.keys() != expected.keys():
        return f"parameters {sorted(params.keys() ^ expected.keys())}"
    error, update = (
        _distance(params, expected),
        _distance(_parameters(RealTask(name).build()), expected),
    )
    if error <= TOLERANCES[dtype] * update:
        return ""
    # Some models are rounded more than others: then as much as without FSDP.
    plainly = 0.0 if dtype == torch.float32 else _distance(_train_plain(name, dtype)[1], expected)
    if error <= 1.25 * plainly:
        return ""
    return f"an update of {update} is off by {error}, that of plain torch by {plainly}"


def _distance(params: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    found = [(params[name].double() - others[name].double()).norm() for name in params]
    return torch.stack(found).norm().item()


def _batches(task: RealTask, step: int, rank: int) -> list[Batch]:
    return [task.batch(BATCHES * step + number, rank) for number in range(BATCHES)]


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


@cache
def _train_plain(name: str, dtype: torch.dtype = torch.float32) -> Trained:
    """Losses, and parameters after the steps, computed in ``dtype``."""
    task = RealTask(name)
    model = task.build()
    computing = copy.deepcopy(model).to(dtype)
    pairs = list(zip(model.parameters(), computing.parameters(), strict=True))
    optimizer, losses = task.optimizer(model.parameters()), []
    for step in range(STEPS):
        computing.zero_grad()
        total = 0.0
        for rank in range(RANKS):
            for batch in _batches(task, step, rank):
                given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
                loss = task.loss(computing(**given)) / (BATCHES * RANKS)
                loss.backward()
                total += loss.item()
        for param, own in pairs:
            param.grad = None if own.grad is None else own.grad.to(param.dtype)
        norm = nn.utils.clip_grad_norm_(model.parameters(), NORM)
        assert norm > NORM, f"{name} has nothing to clip: {norm}"
        optimizer.step()
        with torch.no_grad():
            for param, own in pairs:
                own.copy_(param)
        losses.append(total)
    return losses, _parameters(model)


def _shard(name: str, door: str, dtype: torch.dtype) -> tuple[Any, torch.optim.Optimizer, Any]:
    """The model, its optimizer, and what compiles a step."""
    from xla_fsdp import MixedPrecisionPolicy, Recipe, fully_shard, parallelize

    options: Any = {"compute_dtype": dtype} if dtype == torch.bfloat16 else {}
    task = RealTask(name, options=options)
    model: Any = task.build()
    if door == LEAN:
        recipe = Recipe("lean", step_in_backward=False)  # else there is nothing to clip
        optimizer = task.optimizer(model.parameters())
        model, optimizer, recipe = parallelize(model, optimizer, recipe, **options)
        return model, optimizer, recipe.compile
    if door == "wrapper":
        model = task.shard(model)
    else:
        policy = MixedPrecisionPolicy(param_dtype=options.get("compute_dtype"))
        layers = FAMILIES[name].layers
        for each in [each for each in model.modules() if type(each).__name__ in layers]:
            fully_shard(each, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    return model, task.optimizer(model.parameters()), lambda step: step


def _train(rank: int, name: str, door: str, dtype: torch.dtype) -> Trained:
    import torch_xla.core.xla_model as xm

    from xla_fsdp import clip_grad_norm_, full_state_dict

    task = RealTask(name)
    model, optimizer, compiled = _shard(name, door, dtype)

    @compiled
    def run(batches: list[Batch]) -> Tensor:
        optimizer.zero_grad()
        total: Any = 0.0
        for number, batch in enumerate(batches):
            last = number + 1 == BATCHES
            if door == "fully_shard":
                model.set_requires_gradient_sync(last)
            with nullcontext() if last or door == "fully_shard" else model.no_sync():
                loss = task.loss(model(**batch)) / BATCHES
                loss.backward()
            total = total + loss.detach()
        clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        return total

    losses = []
    for step in range(STEPS):
        batches = _batches(task, step, rank)
        total = run([{k: v.to("xla") for k, v in each.items()} for each in batches])
        mean: Any = xm.all_reduce("sum", total.detach().double(), 1.0 / RANKS)
        losses.append(mean.item())
    whole = full_state_dict(model)
    names = [key for key, _ in task.build().named_parameters()]
    return losses, {key: whole[key] for key in names if key in whole}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for (family, *rest), verdict in found(sys.argv[1:] or FAMILIES).items():
        print(family, *rest, verdict or "right", sep=" | ", flush=True)
