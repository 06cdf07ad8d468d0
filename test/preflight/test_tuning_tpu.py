"""``tune`` with the TPU compiler: what it predicts is what the compiler says of the whole step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from test.common.tpu_steps import LENGTH, VOCABULARY, Transformer
from xla_fsdp import Recipe, parallelize
from xla_fsdp.preflight import compiler, preflight, tune

pytest.importorskip("libtpu", reason="the TPU compiler: pip install 'xla_fsdp[preflight]'")
pytestmark = pytest.mark.slow

SLICE = "v5e:2x2"
DEPTH = 16


def build_step(recipe: Recipe, batch: int = 1, depth: int = DEPTH) -> Callable[[], None]:
    """A step of a small transformer."""
    import torch_xla

    with torch.device("meta"):
        model = Transformer(depth)

    def make_optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-3)

    sharded, optimizer, _ = parallelize(
        model, make_optimizer, recipe, param_init_fn=lambda module: None
    )
    tokens = torch.zeros(batch, LENGTH, dtype=torch.long, device=torch_xla.device())

    def step() -> None:
        logits = sharded(tokens).view(-1, VOCABULARY)
        F.cross_entropy(logits, tokens.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()

    return step


def test_predictions_hold_and_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {
        "topology": SLICE,
        "choices": {"recipe": [Recipe("fast"), Recipe("plain")], "batch": [8, 16, 32]},
        "tried_meshes": [{"shard": 4}, {"replica": 2, "shard": 2}, {"shard": 2, "tensor": 2}],
        "cache_dir": tmp_path,
        "jobs": 1,
    }
    tuned = tune(build_step, **options)
    best = tuned.best
    assert best is not None
    assert best.rate == max(each.rate for each in tuned.candidates if each.fits(tuned.capacity))
    refused = [each.failed for each in tuned.candidates if "tensor" in dict(each.way.recipe.mesh)]
    assert refused
    assert all("no layer of the model is cut over it" in each for each in refused)

    plain = Recipe("plain", mesh={"shard": 4})
    [predicted] = [
        each for each in tuned.candidates if (each.way.recipe, each.batch) == (plain, 32)
    ]
    exact = preflight(build_step, topology=SLICE, cache_dir=tmp_path, recipe=plain, batch=32)
    assert predicted.figures is not None
    assert predicted.figures.needed == pytest.approx(exact.memory.peak, rel=0.05)
    assert predicted.figures.seconds == pytest.approx(exact.step_time.total, rel=0.1)

    def never(*args: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "_run_child", never)
    again = tune(build_step, **options)
    assert again.best == best
    tuned.save(tmp_path / "best.json")
    assert Recipe.load(tmp_path / "best.json") == tuned.recipe
