"""Deep copies of models that ``parallelize`` has made run by their own weights. Two ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from test.common.readers import Reader, rows
from test.common.recipes import LENGTH, VOCABULARY, Transformer, language_model
from test.common.scenarios import Scenarios, make

scenarios = Scenarios(__name__)


def ids(rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(rank)
    return torch.randint(1, VOCABULARY, (2, LENGTH), generator=draw)


def loss_of_logits(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def loss_of_tokens(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x, labels=x).loss
    return loss


Loss = Callable[[Any, Tensor], Tensor]
KINDS: dict[str, tuple[Callable[[], Any], Callable[[int], Tensor], Loss]] = {
    "loop": (Transformer, ids, loss_of_logits),
    "streamed loss": (partial(language_model, "Llama", False), ids, loss_of_tokens),
    "units that are read": (Reader, partial(rows, step=0), loss_of_logits),
}


@scenarios.add
def copied(rank: int) -> dict[str, Any]:
    return {f"{kind} {recipe}": compare(rank, kind, recipe) for kind in KINDS for recipe in RECIPES}


RECIPES = ("plain", "fast", "lean")


def compare(rank: int, kind: str, recipe: Any) -> dict[str, Any]:
    """Losses of a model and of its copy before and after a step of each, which the other must not
    see."""
    import torch_xla

    from xla_fsdp import full_state_dict, parallelize

    build, batch, loss_of = KINDS[kind]
    model = make(build)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, _ = parallelize(model, optimizer, recipe)
    x = batch(rank).to(torch_xla.device())
    loss_of(model, x).backward()  # shows what no loop can run, and which units are read
    optimizer.step()
    optimizer.zero_grad()
    copied = copy.deepcopy(model)
    before = [loss_of(each, x).item() for each in (model, copied)]
    loss_of(model, x).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    after = [loss_of(each, x).item() for each in (model, copied)]
    own = torch.optim.SGD(copied.parameters(), lr=0.1)
    loss_of(copied, x).backward()
    own.step()
    states = [full_state_dict(each) for each in (model, copied)]
    worst = max(float((states[0][n] - states[1][n]).abs().max()) for n in states[0])
    return {"before": before, "after": after, "worst": worst}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_computes_with_weights_of_its_own(kind: str, recipe: str) -> None:
    found = scenarios.result("copied")[f"{kind} {recipe}"]
    (first, same), (stepped, copied) = found["before"], found["after"]
    assert copied == pytest.approx(first, rel=1e-5) == pytest.approx(same, rel=1e-5)
    assert abs(stepped - first) > 1e-4 * abs(first)
    assert found["worst"] < 1e-5  # each has made the same two steps
