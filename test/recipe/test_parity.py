"""Every recipe trains as the plain model does: the same losses and parameters, and names."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from test.common.compare import assert_close
from test.common.ranks import cached_outcome
from test.common.recipes import MODELS, Job, Outcome, train_on_ranks, train_plain
from xla_fsdp.recipe.options import NAMES

TOLERANCE = {"atol": 3e-5, "rtol": 3e-4}
IN_STEPS = (("step_in_backward", False),)  # for clipping
QUICK: Mapping[str, Job] = {
    "transformer": Job("transformer", changes=(("streamed_embedding", True),)),
    # Gate and up projections are alike but for their weights, as keys and values are.
    "llama": Job("llama_untied", changes=(("remat", "none"),), micro_batches=2),
    "gpt2": Job("gpt2_tied", changes=IN_STEPS, clip=True),
    "mlp": Job("mlp"),
    "cnn": Job("cnn"),
    "normed": Job("normed"),
}


@cached_outcome
def quick() -> dict[str, list[Outcome]]:
    return train_on_ranks(QUICK, 3)


@pytest.mark.parametrize("name", QUICK)
def test_the_leanest_program_trains_as_the_plain_model(name: str) -> None:
    check(QUICK[name], quick()[name])


def matrix() -> dict[str, Job]:
    """Every model by every recipe, with clipping and accumulation in turns."""
    found = {}
    for number, model in enumerate(each for each in MODELS if each != "dropout"):
        for recipe in NAMES:
            clip = bool((number + len(found)) % 2)
            changes = IN_STEPS if clip else ()
            found[f"{model} {recipe}"] = Job(model, recipe, changes, clip, 1 + number % 2)
    return found


@cached_outcome
def outcomes(num_ranks: int) -> dict[str, list[Outcome]]:
    return train_on_ranks(matrix(), num_ranks, timeout=1700)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3, 8])
@pytest.mark.parametrize("name", matrix())
def test_every_recipe_trains_as_the_plain_model(name: str, num_ranks: int) -> None:
    check(matrix()[name], outcomes(num_ranks)[name])


def check(job: Job, found: list[Outcome]) -> None:
    plain, first = train_plain(job, len(found)), found[0]
    print("\n".join(first.lines))
    assert first.losses == pytest.approx(plain.losses, rel=1e-4), "\n".join(first.lines)
    assert set(first.names) <= set(plain.names)  # a stack has that of its first block
    assert first.state.keys() == plain.state.keys()
    # Buffers are those of a rank, and the plain model has seen the batches of all.
    trained = {name: first.state[name] for name in plain.names}
    assert_close(trained, {name: plain.state[name] for name in plain.names}, **TOLERANCE)
