"""``parallelize`` on two ranks: what it says, what it refuses, and what it does not change."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.compare import assert_close
from test.common.recipes import (
    MODELS,
    WIDTH,
    Block,
    Transformer,
    language_model,
    loss_of,
    optimizer_of,
)
from test.common.scenarios import Scenarios, make, message, one_step
from xla_fsdp.fsdp.wrapper import models_of_transformers
from xla_fsdp.recipe.causal_lm import why_not_streamed

scenarios = Scenarios(__name__)


def shard(
    kind: Any = Transformer, optimizer: Any = None, recipe: Any = "lean", **options: Any
) -> Any:
    """``parallelize`` a new model."""
    from xla_fsdp import parallelize

    return parallelize(make(MODELS.get(kind, kind)), optimizer, recipe, **options)


def ids() -> Tensor:
    import torch_xla

    return torch.arange(1, 13).reshape(2, 6).to(torch_xla.device())


class OwnTable(Transformer):
    """Its head is its table, without being a module."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.tokens.weight)


# ---------------------------------------------------------------- what it says


@scenarios.add
def explained(rank: int) -> dict[str, Any]:
    from xla_fsdp import Recipe

    model = make(Transformer)
    recipe = Recipe("lean", streamed_embedding=True, mesh={"replica": 1, "shard": 2})
    with records() as logged:
        done = shard_of(model, recipe)
    shown = io.StringIO()
    if rank == 0:  # ranks are threads, and share sys.stdout
        with contextlib.redirect_stdout(shown):
            done.explain()
    return {"shown": shown.getvalue(), "logged": logged}


@contextlib.contextmanager
def records() -> Iterator[list[str]]:
    """What the caller's thread logs inside the block, from INFO on."""
    log, handler, lines = logging.getLogger("xla_fsdp"), logging.Handler(), []
    caller = threading.get_ident()
    handler.emit = lambda each: lines.append(  # type: ignore[method-assign]
        f"{each.levelname} {each.getMessage()}"
    )
    handler.addFilter(lambda each: each.thread == caller)
    log.addHandler(handler)
    log.setLevel(logging.INFO)  # for good, as the ranks are threads
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def shard_of(model: nn.Module, recipe: Any) -> Any:
    from xla_fsdp import parallelize

    return parallelize(model, optimizer_of(model), recipe).recipe


def test_explain_tells_what_was_done_and_what_was_left_out() -> None:
    shown = scenarios.result("explained")["shown"].splitlines()
    assert shown == [
        "recipe 'lean' for Transformer: 5 units on 2 shards",
        "  streamed_embedding: tokens",
        "  remat: full",
        "  scan: blocks",
        "  stacked: blocks",
        "  offload_activations: blocks",
        "  step_in_backward: AdamW",
        "  compile_step: by compile(step)",
        "streamed_head: left out for Transformer: only causal language models of transformers have "
        "a loss that is known; let the forward compute it by a LinearCrossEntropy",
    ]
    # Each omission once, by one rank.
    assert scenarios.result("explained")["logged"] == [f"INFO parallelize: {shown[-1]}"]
    assert scenarios.result("explained", rank=1)["logged"] == []


@scenarios.add
def resolved(rank: int) -> Any:
    return shard(recipe="fast").recipe


def test_the_recipe_has_what_was_chosen() -> None:
    found = scenarios.result("resolved")
    assert (found.name, found.remat, found.scan, found.stacked) == ("fast", "full", True, True)
    assert (found.streamed_head, found.step_in_backward) == (False, False)
    assert found.wants("compile_step")


@scenarios.add
def cut_over_tensor(rank: int) -> dict[str, Any]:
    import torch_xla

    from xla_fsdp import Recipe, parallelize
    from xla_fsdp.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    found: dict[str, Any] = {}
    for name in ("lean", "plain"):
        recipe = Recipe(name, mesh={"shard": 1, "tensor": 2}, compile_step=False)
        model = make(Transformer)
        found[f"{name} not cut"] = message(partial(parallelize, make(Transformer), None, recipe))
        expected = model(ids().cpu())
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        mesh = recipe.init_mesh()
        assert mesh is not None
        parallelize_module(model, mesh["tensor"], plan)
        output = parallelize(model, None, recipe).model(ids())
        torch_xla.sync()
        found[name] = (output.cpu() - expected).abs().max().item()
    return found


def test_an_axis_tensor_of_the_mesh_is_left_to_the_layers_that_are_cut() -> None:
    found = scenarios.result("cut_over_tensor")
    for name in ("lean", "plain"):
        assert found[name] < 1e-5
        assert (
            "no layer of the model is cut over it; call parallelize_module"
            in (found[f"{name} not cut"])
        )


class OwnSgd(torch.optim.Optimizer):
    """Of another package, which says nothing of itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * param.grad)


class Listed(OwnSgd):
    """Steps a list of its own, as LBFGS does, and keeps parameters in other places, too."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.listed = list(self.param_groups[0]["params"])
        self.mask = {self.listed[1]: (self.listed[1], 0.5)}
        self.inner_one = OwnSgd([self.listed[0]])

    @staticmethod
    def is_elementwise(options: Any) -> bool:
        return True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param, factor in self.mask.values():
            if param.grad is not None:
                self.mask[param][0].grad.mul_(factor)
        self.inner_one.step()
        for param in self.listed[1:]:
            if param.grad is not None:
                param.sub_(0.1 * param.grad)


class Slow(OwnSgd):
    """Keeps copies of parameters, as Lookahead does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.slow = [[each.detach().clone() for each in g["params"]] for g in self.param_groups]


class Numbered(OwnSgd):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.index = {id(each): at for at, each in enumerate(self.param_groups[0]["params"])}


# ---------------------------------------------------------------- what it refuses


@scenarios.add
def refusals(rank: int) -> dict[str, str]:
    from xla_fsdp import Recipe
    from xla_fsdp.wrap import always_wrap_policy

    def stepped() -> Any:
        model = make(Transformer)
        optimizer = optimizer_of(model)
        loss_of(model, torch.ones(1, 2, dtype=torch.long)).backward()
        optimizer.step()
        from xla_fsdp import parallelize

        return parallelize(model, optimizer)

    def twice() -> Any:
        from xla_fsdp import parallelize

        return parallelize(shard().model)

    def foreign() -> Any:
        return shard(optimizer=torch.optim.SGD(make(Transformer).parameters()), recipe="fast")

    def fused() -> Any:
        from xla_fsdp import parallelize

        model = make(Transformer)
        return parallelize(model, torch.optim.Adam(model.parameters(), fused=True), "plain")

    def closure() -> Any:
        from xla_fsdp import parallelize

        model = make(Transformer)
        return parallelize(model, torch.optim.LBFGS(model.parameters()), "plain")

    def holding(kind: Any, **options: Any) -> Any:
        from xla_fsdp import parallelize

        model = make(Transformer)
        return parallelize(model, kind(model.parameters()), "plain", **options)

    def inside() -> Any:
        from xla_fsdp import parallelize

        model = make(partial(nn.Linear, 4, 4))
        done = parallelize(model, None, "plain")
        return done, parallelize(model, None, "plain")

    cases = {
        "foreign": foreign,
        "inside": inside,
        "maker": lambda: shard(optimizer=lambda params: None),
        "scan": lambda: shard("cnn", recipe=Recipe(scan=True)),
        "unequal": lambda: shard("mlp", recipe=Recipe(scan=True)),
        "head": lambda: shard(recipe=Recipe(streamed_head=True)),
        "backward": lambda: shard(recipe=Recipe(step_in_backward=True)),
        "stacked": lambda: shard(recipe=Recipe(stacked=True, scan=False)),
        "remat": lambda: shard("cnn", recipe=Recipe(remat=("attention",))),
        "units": lambda: shard(recipe=Recipe(units=("Bloc",))),
        "both": lambda: shard(recipe=Recipe(units=("Block",)), auto_wrap_policy=always_wrap_policy),
        "owned": lambda: shard(scan_layers=True),
        "dtype": lambda: shard(recipe=Recipe(compute_dtype="bfloat16"), compute_dtype=torch.half),
        "optimizer": lambda: shard(optimizer=3),
        "name": lambda: shard(recipe="leanest"),
        "stepped": stepped,
        "twice": twice,
        "fused": fused,
        "fused maker": lambda: shard(optimizer=partial(torch.optim.AdamW, fused=True)),
        "closure": closure,
        "closure maker": lambda: shard(optimizer=torch.optim.LBFGS),
        "copies": partial(holding, Slow),
        "numbers": partial(holding, Numbered),
        "joined": partial(holding, Listed, flatten_parameters=True),
    }
    return {name: message(call) for name, call in cases.items()}


REFUSED = {
    "foreign": "SGD holds no parameter of Transformer; make it of model.parameters() of this model",
    "inside": "weight is sharded already; give the plain model",
    "maker": "was called with the sharded parameters and returned None; let it return",
    "scan": "the recipe sets scan, which Cnn does not allow. scan: left out for Cnn: no list holds",
    "unequal": "the recipe sets scan, which Mlp does not allow. scan: left out for blocks: block 1",
    "head": "the recipe sets streamed_head, which Transformer does not allow",
    "backward": "step_in_backward: left out for Transformer: parallelize was given no optimizer",
    "stacked": "stacked: left out for Transformer: nothing runs as a loop",
    "remat": "the recipe's remat names activations to keep, which only loops do",
    "units": "the recipe's units names Bloc, which Transformer does not have",
    "both": "auto_wrap_policy and the recipe's units both choose units; give one",
    "owned": "scan_layers is what a recipe decides; set its fields instead",
    "dtype": "compute_dtype is given, and the recipe has one; give one",
    "optimizer": "optimizer is a int; give an optimizer of the model's parameters",
    "name": "there is no recipe 'leanest'",
    "stepped": "AdamW has made steps before; parallelize first",
    "twice": "the model is sharded already; give the plain model",
    "fused": "parallelize: Adam has fused=True, for which torch has kernels on other devices only",
    "fused maker": "parallelize: AdamW has fused=True, for which torch has kernels on other",
    "closure": "LBFGS calls its closure as often as products of whole parameters",
    "closure maker": "step it by xla_fsdp.optim.ZeroRedundancyOptimizer(params, LBFGS, ...)",
    "copies": "in self.slow[0][0] (a tensor of a parameter's shape), self.slow[0][1]",
    "numbers": "in self.index (the id of a parameter)",
    "joined": "in self.listed[0], self.listed[1], self.listed[2], self.listed[3], of which several",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name: str) -> None:
    found = scenarios.result("refusals")[name]
    assert found.startswith("TypeError" if name in ("optimizer", "maker") else "ValueError")
    assert REFUSED[name] in found


# ---------------------------------------------------------------- caches of transformers


def test_models_are_known_while_another_rank_imports_transformers(monkeypatch: Any) -> None:
    model = make(MODELS["llama_untied"])
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    assert models_of_transformers(nn.Sequential(nn.Linear(2, 2))) == []
    assert models_of_transformers(nn.Sequential(model)) == [model, model.model]


PACKED = torch.tensor([[0, 1, 2, 0, 1, 2]]).expand(2, 6)
"""Positions of two texts in each row."""


@scenarios.add
def without_caches(rank: int) -> dict[str, Any]:
    from xla_fsdp import Recipe

    found: dict[str, Any] = {}
    for recipe in (Recipe("plain"), Recipe("plain", remat="none")):
        model, _, done = shard("llama_untied", recipe=recipe)
        loss = model(ids(), labels=ids(), position_ids=PACKED.to(ids().device)).loss
        found[f"packed {recipe.remat}"] = loss.item()
        found["explained"] = done._report
    model = shard("t5").model
    loss = model(ids(), labels=ids()).loss
    loss.backward()
    return found | {"t5": loss.item()}


def plain_loss(name: str, **options: Any) -> float:
    model, tokens = make(MODELS[name]), torch.arange(1, 13).reshape(2, 6)
    model.config.use_cache = False
    return float(model(tokens, labels=tokens, **options).loss.detach())


def test_packed_texts_are_kept_apart_in_every_recipe() -> None:
    found = scenarios.result("without_caches")
    expected = plain_loss("llama_untied", position_ids=PACKED)
    assert found["packed None"] == found["packed none"] == pytest.approx(expected, abs=1e-6)
    # The texts' tokens see one another where nobody asks for the positions.
    assert expected != pytest.approx(plain_loss("llama_untied"), abs=1e-6)
    assert any(each.startswith("  use_cache: False in the config") for each in found["explained"])


@scenarios.add
def recomputing(rank: int) -> dict[str, Any]:
    from xla_fsdp import parallelize

    found = {}
    for name in ("fast", "plain"):
        model = make(MODELS["llama_untied"])
        model.gradient_checkpointing_enable()
        model, _, done = parallelize(model, None, name)
        loss = model(ids(), labels=ids()).loss
        loss.backward()
        found[name] = loss.item(), done._report
    return found


def test_units_recompute_in_place_of_models_of_transformers() -> None:
    for loss, report in scenarios.result("recomputing").values():
        assert loss == pytest.approx(plain_loss("llama_untied"), abs=1e-6)
        assert (
            "  gradient_checkpointing: False in the model; remat says what is recomputed" in report
        )


def test_a_decoder_with_a_config_of_its_own_makes_no_cache() -> None:
    assert scenarios.result("without_caches")["t5"] == pytest.approx(plain_loss("t5"), abs=1e-5)


@scenarios.add
def hidden_states(rank: int) -> dict[str, Any]:
    found = {}
    for name in ("fast", "plain"):
        model, _, done = shard("llama_untied", recipe=name)
        output = model(ids(), labels=ids(), output_hidden_states=True)
        output.loss.backward()
        loops = "  scan: model.layers" in done._report
        found[name] = [each.detach().cpu() for each in output.hidden_states], loops
    return found


def test_hidden_states_are_collected_from_units() -> None:
    tokens = torch.arange(1, 13).reshape(2, 6)
    expected = make(MODELS["llama_untied"])(tokens, output_hidden_states=True).hidden_states
    found = scenarios.result("hidden_states")
    assert found["fast"][1]
    for states, _ in found.values():
        torch.testing.assert_close(states, list(expected), atol=1e-5, rtol=1e-5)


@scenarios.add
def mixed(rank: int) -> tuple[float, list[str]]:
    model, _, done = shard(mixture, recipe="plain")
    return model(ids(), labels=ids()).loss.item(), done._report


def mixture() -> Any:
    return language_model("Mixtral", True, num_local_experts=4)


def test_mixtures_compute_their_experts_in_a_way_that_xla_knows() -> None:
    model, tokens = make(mixture), torch.arange(1, 13).reshape(2, 6)
    loss, report = scenarios.result("mixed")
    assert loss == pytest.approx(model(tokens, labels=tokens).loss.item(), abs=1e-5)
    assert "  experts: grouped products, as grouped_mm reads the device" in report


@scenarios.add
def masked(rank: int) -> tuple[float, int]:
    model, _, done = shard(bert, recipe="fast")
    mask = (ids() % 6 > 2).long()
    step = done.compile(lambda ids: model(ids, attention_mask=mask, labels=ids).loss, [mask])
    return [step(ids()) for _ in range(4)][-1].item(), step.replays


def bert() -> Any:
    import transformers

    none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 40, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=20, num_hidden_layers=1, **sizes, **none)
    return transformers.BertForMaskedLM(config)


def test_steps_of_models_that_see_both_ways_are_replayed() -> None:
    model, tokens = make(bert), torch.arange(1, 13).reshape(2, 6)
    loss, replays = scenarios.result("masked")
    expected = model(tokens, attention_mask=(tokens % 6 > 2).long(), labels=tokens).loss.item()
    assert (loss, replays) == (pytest.approx(expected, abs=1e-5), 2)


class InTurns(nn.Module):
    """Each list would be a loop, if the other were not between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.ModuleList([Block(), Block()]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for first, second in zip(self.second, self.first, strict=True):
            x = second(first(x))
        return x


def in_turns(model: Any, optimizer: Any, x: Tensor, wrap: Any = lambda step: step) -> list[float]:
    wrapped = wrap(one_step(model, optimizer))
    return [wrapped(x).item() for _ in range(5)]


@scenarios.add
def loops_given_up(rank: int) -> list[float]:
    import torch_xla

    model = make(InTurns)
    model, optimizer, recipe = shard(lambda: model, optimizer_of(model), "fast")
    return in_turns(model, optimizer, torch.ones(3, WIDTH).to(torch_xla.device()), recipe.compile)


def test_loops_that_are_given_up_leave_nothing_to_compiled_steps() -> None:
    model = make(InTurns)
    expected = in_turns(model, optimizer_of(model), torch.ones(3, WIDTH))
    assert scenarios.result("loops_given_up") == pytest.approx(expected, rel=1e-4)


class OwnError(Exception):
    """Of a user's code, with a constructor of its own."""

    def __init__(self, *, step: int) -> None:
        super().__init__(f"no data for step {step}")


class Failing(Transformer):
    """Fails once: before its blocks, in one of them, or behind them."""

    place = -1
    forwards = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.forwards += 1
        self.fail_at(0)
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        self.fail_at(2)
        return self.head(x)

    def fail_at(self, place: int) -> None:
        if place == self.place:
            self.place = -1
            raise OwnError(step=place)


class FailingBlock(Block):
    model: Any = None  # not a submodule

    def forward(self, x: Tensor) -> Tensor:
        self.model[0].fail_at(1)
        return super().forward(x)


def failing() -> Failing:
    model = Failing()
    model.blocks = nn.ModuleList([FailingBlock() for _ in range(3)])
    for block in model.blocks:
        block.model = (model,)
    return model


@scenarios.add
def errors_of_the_model(rank: int) -> dict[int, Any]:
    found = {}
    for place in range(3):
        model, _, done = shard(failing)
        model.module.place, tokens = place, ids()
        with pytest.raises(OwnError, match=f"no data for step {place}") as caught:
            model(tokens)
        raised = caught.value.__cause__, caught.value.__context__, model.module.forwards
        loss = loss_of(model, tokens).item()
        found[place] = (raised, loss, "  scan: blocks" in done._report)
    return found


@pytest.mark.parametrize("place", ["before blocks", "in a block", "behind blocks"])
def test_errors_of_the_model_are_no_reason_to_give_loops_up(place: str) -> None:
    number = ["before blocks", "in a block", "behind blocks"].index(place)
    raised, loss, has_loops = scenarios.result("errors_of_the_model")[number]
    assert raised == (None, None, 1)
    tokens = torch.arange(1, 13).reshape(2, 6)
    assert loss == pytest.approx(loss_of(make(failing), tokens).item(), rel=1e-4)
    assert has_loops


class PowerIteration(Block):
    """Changes what its parametrization keeps, by an operator that torch_xla computes on the host:
    everything that is alive is computed then."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(self.up, n_power_iterations=2)


class Handling(Transformer):
    """Its blocks cannot be a loop; notes whether an error is handled while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([PowerIteration() for _ in range(3)])
        self.handled: list[Any] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.handled.append(sys.exc_info()[0])
        return super().forward(ids)


@scenarios.add
def forwards_without_loops(rank: int) -> Any:
    model, _, done = shard(Handling)
    loss = loss_of(model, ids()).item()
    return loss, model.module.handled, done._report


def test_a_refused_loop_is_forgotten_before_the_forward_runs_without_it() -> None:
    loss, handled, report = scenarios.result("forwards_without_loops")
    assert handled == [None, None]
    assert any("scan: left out for blocks: a scanned block calls vdot" in line for line in report)
    tokens = torch.arange(1, 13).reshape(2, 6)
    assert loss == pytest.approx(loss_of(make(Handling), tokens).item(), rel=1e-4)


@scenarios.add
def without_backward(rank: int) -> int:
    model, _, done = shard("llama_untied", recipe="fast")
    step, tokens = done.compile(lambda ids: model(ids, labels=ids).loss), ids()
    for _ in range(4):
        step(tokens)
    return step.replays


def test_steps_without_backward_are_replayed() -> None:
    assert scenarios.result("without_backward") == 2


@scenarios.add
def holds_others(rank: int) -> str:
    model = make(Transformer)
    temperature = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    done = shard(lambda: model, optimizer, "fast").recipe
    return next(line for line in done._report if line.startswith("optimizer"))


def test_parameters_that_the_model_has_not_are_told() -> None:
    assert scenarios.result("holds_others") == (
        "optimizer: SGD holds 1 parameters that the model has not, of which each rank has "
        "gradients of its own: make them a part of the model, or average these over the ranks"
    )


@scenarios.add
def table_of_its_own(rank: int) -> dict[str, str]:
    from xla_fsdp import Recipe

    def forward(streamed: bool | None) -> Any:
        return shard(OwnTable, recipe=Recipe(streamed_embedding=streamed)).model(ids())

    return {str(each): message(lambda: forward(each)) for each in (None, True)}  # noqa: B023


def test_a_table_that_the_forward_uses_itself() -> None:
    found = scenarios.result("table_of_its_own")
    assert found["None"] == "nothing was raised"
    assert "the shard of weight was used (by linear) in a forward" in found["True"]


# ---------------------------------------------------------------- the optimizer


@scenarios.add
def groups(rank: int) -> dict[str, Any]:
    from xla_fsdp import parallelize

    model = make(Transformer)
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    sharded, same, _ = parallelize(model, optimizer, "fast")
    held = {
        id(param): at for at, group in enumerate(same.param_groups) for param in group["params"]
    }
    made = shard(optimizer=partial(torch.optim.SGD, lr=0.1)).optimizer
    named = make(Transformer)
    by_name = parallelize(named, torch.optim.SGD(named.named_parameters(), lr=0.1)).optimizer
    return {
        "same": same is optimizer and scheduler.optimizer is same,
        "decay": [group["weight_decay"] for group in same.param_groups],
        "group": {name: held[id(param)] for name, param in sharded.named_parameters()},
        "made": (type(made).__name__, len(made.param_groups[0]["params"])),
        "names": by_name.param_groups[0]["param_names"],
    }


def test_groups_and_schedulers_of_the_optimizer_stay() -> None:
    found = scenarios.result("groups")
    assert found["same"]
    assert found["decay"] == [0.3, 0.0]
    # Twelve parameters of three blocks are six stacks.
    assert len(found["group"]) == 9
    for name, group in found["group"].items():
        assert group == int(name.endswith("bias") or "norm" in name)


def test_an_optimizer_is_made_of_the_shards() -> None:
    assert scenarios.result("groups")["made"] == ("SGD", 9)
    assert scenarios.result("groups")["names"][:2] == ["tokens.weight", "blocks.0.norm.weight"]
    assert len(scenarios.result("groups")["names"]) == 9


@scenarios.add
def layerwise(rank: int) -> list[str]:
    from xla_fsdp import parallelize

    model = make(Transformer)
    rest = [*model.tokens.parameters(), *model.head.parameters()]
    rates = [{"params": block.parameters(), "lr": 0.1**at} for at, block in enumerate(model.blocks)]
    optimizer = torch.optim.AdamW([{"params": rest, "lr": 1.0}, *rates])
    done = parallelize(model, optimizer, "lean")
    assert [len(group["params"]) for group in done.optimizer.param_groups] == [3, 6, 6, 6]
    return list(done.recipe._report)


@scenarios.add
def listed(rank: int) -> dict[str, Any]:
    import torch_xla

    from xla_fsdp import full_state_dict, parallelize

    found = {}
    for recipe in ("plain", "fast", "lean"):
        model = make(Transformer)
        model, optimizer, done = parallelize(model, Listed(model.parameters()), recipe)
        for _ in range(2):
            loss_of(model, ids()).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch_xla.sync()
        state = {name: value.cpu() for name, value in full_state_dict(model).items()}
        found[recipe] = (state, list(done._report))
    return found


def test_parameters_that_an_optimizer_holds_elsewhere_are_replaced() -> None:
    model = make(Transformer)
    optimizer = Listed(model.parameters())
    for _ in range(2):
        loss_of(model, torch.arange(1, 13).reshape(2, 6)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state, report in scenarios.result("listed").values():
        assert_close(state, model.state_dict(), atol=1e-5)
        stacks = [each for each in report if each.startswith("stacked")]
        assert all("Listed holds parameters in self.listed[0]" in each for each in stacks)


def test_blocks_in_several_groups_are_not_stacked() -> None:
    lines = scenarios.result("layerwise")
    assert "  scan: blocks" in lines
    assert [each for each in lines if each.startswith("stacked")] == [
        "stacked: left out for blocks: norm.weight is not in the same parameter group of AdamW in "
        "all blocks"
    ]


@scenarios.add
def of_all_kinds(rank: int) -> dict[str, list[str]]:
    from xla_fsdp import Recipe, parallelize

    def report(build: Any, new_optimizer: Any, recipe: Any = "lean") -> list[str]:
        model = make(build)
        return list(parallelize(model, new_optimizer(model.parameters()), recipe).recipe._report)

    def hooked(params: Any) -> Any:
        optimizer = torch.optim.SGD(params, lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    def of_another_model(params: Any) -> Any:
        optimizer = torch.optim.SGD(params, lr=0.1)
        other = make(partial(nn.Linear, 4, 4))
        optimizer.add_param_group({"params": list(other.parameters())})
        parallelize(other, optimizer)
        return optimizer

    return {
        "muon": report(bare_layers, torch.optim.Muon),
        "own": report(Transformer, OwnSgd),
        "hooked": report(Transformer, hooked),
        "of another": report(Transformer, of_another_model),
        "remat none": report(Transformer, torch.optim.SGD, Recipe(remat="none")),
        "remat up": report(Transformer, torch.optim.SGD, Recipe(remat=("up", "norm"))),
    }


def bare_layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])


class Headed(nn.Module):
    """With three heads, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[1](self.body(x))


@scenarios.add
def headed(rank: int) -> dict[str, Tensor]:
    import torch_xla

    from xla_fsdp import Recipe, full_state_dict, parallelize

    model = make(Headed)
    decaying = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    recipe = Recipe("lean", step_in_backward=False, compile_step=False)
    model, optimizer, _ = parallelize(model, decaying, recipe)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH, device="xla")).square().mean().backward()
        optimizer.step()
        torch_xla.sync()
    return {name: value.cpu() for name, value in full_state_dict(model).items()}


def test_what_no_forward_uses_does_not_decay() -> None:
    found, before = scenarios.result("headed"), make(Headed).state_dict()
    for name, value in before.items():
        assert torch.equal(found[name], value) == name.startswith(("heads.0", "heads.2")), name


@scenarios.add
def joined(rank: int) -> list[str]:
    return [each for each in shard(flatten_parameters=True).recipe._report if "joins" in each]


def test_what_is_left_out_of_all_blocks_is_told_once() -> None:
    assert scenarios.result("joined") == [
        "stacked: left out for blocks: every block: flat_param_0 joins several parameters "
        "(flatten_parameters=True), and stacks are of one parameter each; shard the blocks with "
        "flatten_parameters=False"
    ]


def test_optimizers_that_look_at_whole_parameters_get_no_stacks() -> None:
    lines = scenarios.result("of_all_kinds")["muon"]
    assert "  scan: Sequential" in lines
    assert (
        "stacked: left out for Sequential: Muon does not treat every element of a parameter by "
        "itself"
    ) in lines


def test_what_steps_in_backward() -> None:
    found = scenarios.result("of_all_kinds")
    assert "  stacked: blocks" in found["own"]  # tried out
    left_out = "step_in_backward: left out for Transformer: "
    assert any(
        each.startswith(f"{left_out}OwnSgd is not known to treat every element by itself")
        for each in found["own"]
    )
    assert f"{left_out}SGD has hooks on its steps, which would run by parameter" in found["hooked"]
    assert f"{left_out}SGD was given to step_in_backward before" in found["of another"]


def test_explain_tells_what_is_recomputed() -> None:
    found = scenarios.result("of_all_kinds")
    assert "  remat: none" in found["remat none"]
    assert "  remat: all but up, norm" in found["remat up"]


@scenarios.add
def names_of_nothing(rank: int) -> str:
    from xla_fsdp import Recipe

    model = shard(recipe=Recipe(remat=("nothing",))).model
    return message(lambda: model(ids()))


def test_names_of_activations_that_are_none() -> None:
    found = scenarios.result("names_of_nothing")
    assert "ValueError: remat names nothing, which is no submodule that ran" in found


# ---------------------------------------------------------------- units


class Nested(nn.Module):
    """A list of blocks inside of a Sequential, and a small one in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Block(), Block()))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@scenarios.add
def units(rank: int) -> dict[str, list[str]]:
    from xla_fsdp import Recipe
    from xla_fsdp.wrap import lambda_auto_wrap_policy

    def of(kind: Any, **how: Any) -> list[str]:
        from xla_fsdp.fsdp.engine.module_state import named_fsdp_modules

        return [name for name, _ in named_fsdp_modules(shard(kind, **how).model)]

    heads = partial(lambda_auto_wrap_policy, lambda_fn=lambda each: isinstance(each, nn.Linear))
    return {
        "nested": of(Nested),
        "named": of(Transformer, recipe=Recipe("plain", units=("Embedding", "Block"))),
        "none": of(Transformer, recipe=Recipe("plain", units=())),
        "policy": of(Nested, recipe="plain", auto_wrap_policy=heads),
    }


def test_what_becomes_a_unit() -> None:
    found = scenarios.result("units")
    assert found["nested"] == ["", "body.1.0", "body.1.1"]
    assert found["named"] == ["", "tokens", "blocks.0", "blocks.1", "blocks.2"]
    assert found["none"] == [""]
    inner = [f"body.1.{at}.{name}" for at in range(2) for name in ("up", "down")]
    assert found["policy"] == ["", "body.0", *inner]


def test_a_head_of_another_class_is_told_with_its_module() -> None:
    class Linear(nn.Linear):
        """As PEFT's."""

    model = make(MODELS["llama_untied"])
    model.lm_head = Linear(4, 4)
    assert why_not_streamed(model) == f"it is a {__name__}.Linear, not an nn.Linear"
