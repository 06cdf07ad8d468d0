"""Mixtures of transformers train as with transformers' own eager experts, in every recipe."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import SGD

from test.common.compare import assert_close, same
from test.common.mixtures import (
    ADAPTED,
    KINDS,
    STEPS,
    WIDE,
    Mix,
    Trained,
    mixture,
    tokens,
    train,
    train_in_pieces,
    train_on_ranks,
    train_plain,
)
from test.common.ranks import cached_outcome, run_on_ranks
from test.common.recipes import language_model
from test.common.scenarios import make, message
from xla_fsdp.consolidate_sharded_ckpts import main
from xla_fsdp.integrations.experts import register
from xla_fsdp.recipe.experts import compute
from xla_fsdp.recipe.options import NAMES

pytestmark = pytest.mark.skipif(
    transformers.__version__ < "5", reason="experts of transformers 4 are modules of their own"
)

TOLERANCE = 1e-5
BF16 = {"compute_dtype": "bfloat16"}
CUTS: tuple[dict[str, Any], ...] = ({}, {"mesh": {"shard": 1, "expert": 2}})
QUICK = Mix("gpt_oss_alike")  # with transposed weights and biases
QUICK_ADAPTED = Mix(f"mixtral{ADAPTED}", "fast")
SLOW = (
    *(Mix(model, recipe) for model in KINDS for recipe in NAMES),
    Mix("qwen2_moe", "fast", {"remat": "none"}),
    Mix("olmoe", "fast", {"remat": ["mlp"]}),
    *(Mix(f"gpt_oss_alike{ADAPTED}", recipe) for recipe in NAMES),
    Mix("mixtral", "lean", {"streamed_head": False, "stacked": False}),
)


def name_of(mix: Mix) -> str:
    return " ".join(
        [mix.model, mix.recipe, *(f"{key}={each}" for key, each in mix.changes.items())]
    )


AXES = {"2x2": {"shard": 2, "expert": 2}, "1x4": {"shard": 1, "expert": 4}}
ON_AXES = (
    *(Mix("deepseek_v3", recipe, {"mesh": AXES["1x4"]}) for recipe in NAMES),
    *(Mix(model, "lean", {"mesh": AXES["2x2"]}) for model in KINDS),
    Mix("mixtral", "fast", {"mesh": AXES["2x2"], "remat": "none"}),
)
"""With experts cut over an axis of four ranks."""

BY_NAME = {name_of(each): each for each in SLOW}


@pytest.mark.parametrize("model", KINDS)
def test_numbers_are_those_of_eager_experts(model: str) -> None:
    """Without ranks, in the modules of transformers."""
    register()
    own, expected = (one_step(model, experts) for experts in ("xla_fsdp", "eager"))
    assert_close(own, expected, atol=1e-7, of_largest=TOLERANCE, smallest=0.0)


def one_step(model: str, experts: str) -> dict[str, Tensor]:
    """The loss and all gradients."""
    plain: Any = make(partial(mixture, model, experts))
    loss = plain(tokens(0, 0), labels=tokens(0, 0)).loss
    loss.backward()
    grads = {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}
    return {"loss": loss.detach(), **grads}


def test_gradients_need_no_results_of_the_last_product() -> None:
    """So a layer that is recomputed leaves that out; with an axis, their way back as well."""
    plain: Any = make(partial(mixture, "mixtral"))
    module = next(each for each in plain.modules() if hasattr(each, "down_proj"))
    hidden, inner = module.down_proj.shape[1:]
    rows = torch.randn(6, hidden, requires_grad=True)
    chosen, weights = torch.randn(6, module.num_experts, requires_grad=True).topk(2)[::-1]
    saved: list[torch.Size] = []
    with saved_tensors_hooks(lambda each: saved.append(each.shape) or each, lambda each: each):
        compute(module, rows, chosen, weights)
    assert hidden != inner
    assert saved.count(torch.Size([12, hidden])) == 1  # what the first product takes


def test_a_capacity_has_a_name_of_its_own() -> None:
    """Nothing is dropped below it; otherwise later tokens are."""
    register()
    register("xla_fsdp_wide", capacity=6.0)
    register("xla_fsdp_narrow", capacity=0.5)
    whole, wide, narrow = (
        one_step("mixtral", f"xla_fsdp{name}") for name in ("", "_wide", "_narrow")
    )
    assert_close(wide, whole, atol=1e-7, of_largest=TOLERANCE, smallest=0.0)
    assert abs(narrow["loss"] - whole["loss"]) > 1e-3


def test_experts_that_transformers_has_cut_are_refused() -> None:
    register()
    plain: Any = make(partial(mixture, "mixtral", "xla_fsdp"))
    for each in plain.modules():
        if hasattr(each, "_is_expert_parallel"):
            each._is_expert_parallel = True
    with pytest.raises(ValueError, match="MixtralExperts is cut over ranks by transformers' own"):
        plain(tokens(0, 0))


class Quick(NamedTuple):
    trained: Trained
    adapted: Trained
    refusals: dict[str, str]  # of an axis of two ranks
    is_unchanged: bool  # the models that were refused
    is_first: bool  # whether all values are those of the first rank, of models that differ


def train_and_refuse(rank: int) -> Quick:
    from xla_fsdp import full_state_dict, init_mesh, parallelize

    trained, adapted = train(rank, QUICK), train(rank, QUICK_ADAPTED)
    mesh = init_mesh((1, 2), ("shard", "expert"))
    unfit = {
        "five experts": language_model("Mixtral", False, num_local_experts=5),
        "batched_mm": mixture("mixtral", "batched_mm"),
        "adapted": mixture(f"mixtral{ADAPTED}"),
    }
    before = [f"{each} {each.config}" for each in unfit.values()]
    refusals = {
        name: message(partial(parallelize, each, mesh=mesh)) for name, each in unfit.items()
    }
    first, other = (make(partial(mixture, "mixtral"), seed) for seed in (3, 3 + rank))
    synced, _, _ = parallelize(other, None, "plain", mesh=mesh, sync_module_states=True)
    state = {name: each.cpu() for name, each in full_state_dict(synced).items()}
    is_unchanged = [f"{each} {each.config}" for each in unfit.values()] == before
    return Quick(trained, adapted, refusals, is_unchanged, same(state, first.state_dict()))


@cached_outcome
def quick() -> list[Quick]:
    return run_on_ranks(train_and_refuse, 2)


def test_the_leanest_program_trains_as_with_eager_experts() -> None:
    check(QUICK, [each.trained for each in quick()])


def test_adapters_of_experts_train_as_with_eager_experts() -> None:
    check(QUICK_ADAPTED, [each.adapted for each in quick()])
    lines = [each.strip() for each in quick()[0].adapted.lines]
    loops = [each for each in lines if each.startswith("scan:")]
    assert loops == ["scan: base_model.model.model.layers"], lines


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("five experts", "axis 'expert' cannot share experts equally: model.layers.0.mlp.experts "),
        ("batched_mm", "experts computes by experts_implementation='batched_mm' of transformers"),
        ("adapted", "base_layer is adapted by PEFT's ParamWrapper, whose matrices are of all"),
    ],
)
def test_experts_that_cannot_be_cut_are_refused_before_anything_changes(
    model: str, expected: str
) -> None:
    found = quick()[0]
    assert expected in found.refusals[model]
    assert found.is_unchanged


def test_the_first_rank_has_the_values_of_all_experts() -> None:
    """With ``sync_module_states``, where each rank has made a model of its own."""
    assert all(each.is_first for each in quick())


@cached_outcome
def in_full(num_ranks: int) -> dict[str, list[Trained]]:
    found = train_on_ranks(SLOW, num_ranks, timeout=1700)
    return dict(zip(BY_NAME, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
@pytest.mark.parametrize("name", BY_NAME)
def test_every_recipe_trains_as_with_eager_experts(name: str, num_ranks: int) -> None:
    check(BY_NAME[name], in_full(num_ranks)[name])


IN_PIECES = (
    *(Mix(model) for model in WIDE),
    Mix("mixtral_wide", "fast", {"remat": "none"}),
    Mix("mixtral_padded", "lean", {"streamed_head": False, "stacked": False}),
)


@cached_outcome
def in_pieces(num_ranks: int) -> dict[str, list[Trained]]:
    found = run_on_ranks(train_in_pieces, num_ranks, list(IN_PIECES), timeout=1700)
    by_mix = [list(each) for each in zip(*found, strict=True)]
    return dict(zip(map(name_of, IN_PIECES), by_mix, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
@pytest.mark.parametrize("mix", IN_PIECES, ids=name_of)
def test_gradients_of_experts_in_pieces_are_those_of_eager_ones(mix: Mix, num_ranks: int) -> None:
    check(mix, in_pieces(num_ranks)[name_of(mix)])


@cached_outcome
def on_axes() -> dict[str, list[Trained]]:
    found = train_on_ranks(ON_AXES, 4, timeout=1700)
    return dict(zip(map(name_of, ON_AXES), found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("mix", ON_AXES, ids=name_of)
def test_experts_cut_over_an_axis_train_as_eager_ones(mix: Mix) -> None:
    check(mix, on_axes()[name_of(mix)])


def save(rank: int, folder: str) -> dict[str, Tensor]:
    from xla_fsdp import Recipe, full_state_dict, parallelize, save_checkpoint

    model = make(partial(mixture, "mixtral"))
    model, optimizer, _ = parallelize(
        model, SGD(model.parameters(), lr=0.1), Recipe("lean", mesh=AXES["2x2"])
    )
    save_checkpoint(f"{folder}/run", model, optimizer, step=1)
    return {name: each.cpu() for name, each in full_state_dict(model).items()}


@pytest.mark.slow
def test_what_ranks_of_an_axis_save_is_exported_for_transformers(tmp_path: Path) -> None:
    state = run_on_ranks(save, 4, str(tmp_path))[0]
    place = f"{tmp_path}/exported/"
    assert main(["--ckpt_prefix", f"{tmp_path}/run", "--save_path", place]) == 0
    plain: Any = make(partial(mixture, "mixtral"))
    plain.config.save_pretrained(place)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(place)
    assert same(loaded.state_dict(), state)
    logits = [each.eval()(tokens(0, 0)).logits for each in (loaded, plain)]
    assert_close({"logits": logits[0]}, {"logits": logits[1]}, atol=1e-6, of_largest=1e-5)


IN_BF16 = {f"{kind} {cut}": Mix(kind, "lean", {**BF16, **cut}) for kind in KINDS for cut in CUTS}


@cached_outcome
def in_bf16() -> dict[str, list[Trained]]:
    found = train_on_ranks([*IN_BF16.values()], 2, timeout=1700)
    return dict(zip(IN_BF16, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_BF16)
def test_losses_in_bf16_are_near(name: str) -> None:
    plain, found = train_plain(IN_BF16[name].model, 2), in_bf16()[name][0]
    assert found.losses == pytest.approx(plain.losses, rel=0.05)


def check(mix: Mix, found: list[Trained]) -> None:
    """Losses, all gradients and the state after the steps are those of the plain model."""
    plain, first = train_plain(mix.model, len(found)), found[0]
    lines = "\n".join(first.lines)
    assert "experts: grouped products, as eager reads the device" in lines
    cut = f"a part of them on each of {dict(mix.changes.get('mesh', {})).get('expert', 0)} ranks"
    assert (cut in lines) is ("mesh" in mix.changes), lines
    assert first.losses == pytest.approx(plain.losses, rel=TOLERANCE), lines
    for step in range(STEPS):
        # Of later steps those of other parameters, by rounding, than the plain model has.
        smallest = 1.0 if step else 0.0
        limits: Any = {"atol": 1e-6, "of_largest": TOLERANCE, "smallest": smallest}
        own, expected = first.gradients(step), plain.gradients(step)
        assert_close(own, expected, what=f"gradient {step}", **limits)
    assert_close(first.states[-1], plain.states[-1], atol=1e-6, of_largest=TOLERANCE)
    if mix.recipe != "plain":
        assert first.replays, lines


@pytest.mark.parametrize("capacity", [0, -1.0])
def test_a_capacity_is_above_zero(capacity: float) -> None:
    with pytest.raises(ValueError, match=f"capacity is {capacity!r}; give a number above 0"):
        register("xla_fsdp_none", capacity=capacity)


@pytest.mark.parametrize("name", ["", "eager", "grouped_mm", "batched_mm"])
def test_names_of_transformers_are_not_taken(name: str) -> None:
    with pytest.raises(ValueError, match=f"name is '{name}', which transformers has or cannot"):
        register(name, capacity=1.0)
