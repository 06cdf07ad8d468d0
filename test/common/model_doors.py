"""Families of ``real_models`` through every door: gradients of two batches added up and clipped.

``python -m test.common.model_doors [FAMILY ...]`` tells what each does.
"""

from __future__ import annotations

import functools
import gc
import sys
import traceback
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from test.common.ranks import run_on_ranks
from test.common.real_models import FAMILIES, RealTask
from test.common.training import Batch

RANKS = 2
STEPS = 3
BATCHES = 2  # of a step
NORM = 0.03  # smaller than those of all these models
LEAN = "lean, compiled"
DOORS = ("wrapper", "fully_shard", LEAN)
TOLERANCE = 1e-3  # of the update of all parameters together (its norm), in fp32
# Times what the plain model's own update is off in bf16: CLAP 1.84, most others 1 to 1.3.
IN_BF16 = 2
LOSS_TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 0.01}
NAMES = (
    *("GPT-2", "SmolLM3", "ModernBERT", "DeBERTa", "Mamba2", "Jamba", "Zamba2", "Qwen3-Next"),
    *("GPT-OSS", "GraniteMoeHybrid", "Pegasus", "Whisper", "DINOv2", "SAM", "Qwen2-VL"),
    *("PaliGemma", "CLAP", "ConvNeXt (timm)", "EfficientNet (timm)", "MaxViT (timm)"),
    *("MLP-Mixer (timm)", "U-Net (diffusers)", "DiT (diffusers)", "nn.Transformer"),
)
Run = tuple[str, str, torch.dtype]  # family, door, what it computes in
Trained = tuple[list[float], dict[str, Tensor]]  # losses, parameters
PlainlyTrained = tuple[dict[str, Tensor], list[float], dict[str, Tensor]]


def found(names: Iterable[str]) -> dict[Run, str]:
    """For each family, door and dtype: nothing if it trains as the plain model, or what is wrong.
    All are run in one launch."""
    runs = [(name, door, dtype) for name in names for door in DOORS for dtype in LOSS_TOLERANCES]
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
    before, expected_losses, expected = _train_plain(name)
    for mine, plain in zip(losses, expected_losses, strict=True):
        if not abs(mine - plain) <= LOSS_TOLERANCES[dtype] * abs(plain):
            return f"losses {losses} for {expected_losses}"
    if params.keys() != expected.keys():
        return f"parameters {sorted(params.keys() ^ expected.keys())}"
    error, update = _distance(params, expected), _distance(before, expected)
    limit = TOLERANCE * update
    if dtype != torch.float32:
        limit = IN_BF16 * _distance(_train_plain(name, dtype)[2], expected)
    return "" if error <= limit else f"an update of {update} is off by {error}, not {limit}"


def _distance(params: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    return _norm(params[name].double() - others[name].double() for name in others)


def _norm(tensors: Iterable[Tensor]) -> float:
    return torch.stack([each.norm() for each in tensors]).norm().item()


def _batches(task: RealTask, step: int, rank: int) -> list[Batch]:
    return [task.batch(BATCHES * step + number, rank) for number in range(BATCHES)]


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


@functools.cache
def _train_plain(name: str, dtype: torch.dtype = torch.float32) -> PlainlyTrained:
    """Parameters before, losses, and parameters after the steps, computed in this dtype."""
    task = RealTask(name)
    model = task.build()
    before, optimizer, losses = _parameters(model), task.optimizer(model.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(RANKS):
            for batch in _batches(task, step, rank):
                loss = task.loss(_call(model, batch, dtype)) / (BATCHES * RANKS)
                loss.backward()
                total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), NORM)
        assert norm > NORM, f"{name} has nothing to clip: {norm}"
        optimizer.step()
        losses.append(total)
    return before, losses, _parameters(model)


def _call(model: nn.Module, batch: Batch, dtype: torch.dtype) -> Any:
    """Call the model with copies of its parameters in this dtype."""
    if dtype == torch.float32:
        return model(**batch)
    # torch's BatchNorm of CPUs wants its buffers in the dtype of its inputs.
    statistics = ("running_mean", "running_var")
    copied = dict(model.named_parameters())
    copied.update(each for each in model.named_buffers() if each[0].endswith(statistics))
    low = {key: each.to(dtype) for key, each in copied.items()}
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    return torch.func.functional_call(model, low, kwargs=inputs)


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
    for (family, *rest), verdict in found(sys.argv[1:] or NAMES).items():
        print(family, *rest, verdict or "right", sep=" | ", flush=True)
