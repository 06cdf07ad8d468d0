"""Programs of users who know nothing but the page on ``parallelize``, on two ranks."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.recipes import (
    LENGTH,
    MODELS,
    VOCABULARY,
    WIDTH,
    Block,
    Mlp,
    Transformer,
    language_model,
    loss_of,
    optimizer_of,
)
from test.common.scenarios import Scenarios, make, message

pytestmark = pytest.mark.slow
scenarios = Scenarios(__name__)
STEPS = 3


def tokens(step: int = 0) -> Tensor:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1, VOCABULARY, (3, LENGTH), generator=generator)


def train_plain(
    build: Callable[[], nn.Module],
    loss: Any = loss_of,
    new_optimizer: Any = optimizer_of,
    schedule: Any = None,
) -> list[float]:
    model = make(build)
    optimizer, losses = new_optimizer(model), []
    scheduler = schedule and torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    for step in range(STEPS):
        each = loss(model, tokens(step))
        each.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler and scheduler.step()
        losses.append(each.item())
    return losses


def train(
    build: Callable[[], nn.Module],
    recipe: Any = "lean",
    loss: Any = loss_of,
    new_optimizer: Any = optimizer_of,
    schedule: Any = None,
    **options: Any,
) -> tuple[list[float], list[str], Any]:
    """The same by a recipe; returns losses, the lines of ``explain``, and model and optimizer."""
    import torch_xla

    from xla_fsdp import parallelize

    model = make(build)
    optimizer = new_optimizer(model)
    scheduler = schedule and torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    model, optimizer, done = parallelize(model, optimizer, recipe, **options)

    @done.compile
    def step(ids: Tensor) -> Tensor:
        each = loss(model, ids)
        each.backward()
        optimizer.step()
        optimizer.zero_grad()
        return each.detach()

    losses = []
    for number in range(STEPS):
        losses.append(step(tokens(number).to(torch_xla.device())).item())
        scheduler and scheduler.step()
    return losses, list(done._report), (model, optimizer)


# ---------------------------------------------------------------- models


class Pairs(Block):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), x


class PairsNet(Mlp):
    """Blocks that return two tensors, one of which the forward drops."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Pairs() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x.float() / VOCABULARY)
        for block in self.blocks:
            x = block(x)[0] * 0.9
        return self.head(x)


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class CountingNet(Mlp):
    """Blocks that count, and a list of them that is called backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Counting() for _ in range(3)])


class Backwards(Transformer):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


class Frozen(Transformer):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.requires_grad_(False)
        self.tokens.requires_grad_(False)


class TiedBlock(Transformer):
    """The head has the weight of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(inner=VOCABULARY) for _ in range(3)])
        self.head.weight = self.blocks[1].up.weight


class LeavingOut(Transformer):
    """Calls only some of its blocks, if it is told to."""

    left_out: tuple[int, ...] = ()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for number, block in enumerate(self.blocks):
            x = x if number in self.left_out else block(x)
        return self.head(x)


def gemma() -> Any:
    return language_model(
        "Gemma2",
        True,
        head_dim=4,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=4,
        attn_implementation="eager",
    )


def bert() -> Any:
    import transformers

    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 3}
    more = {"num_attention_heads": 2, "intermediate_size": 40, "max_position_embeddings": 16}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**sizes, **more, **none, attn_implementation="eager")
    return transformers.BertForMaskedLM(config)


class StreamedNet(Transformer):
    """A plain model that asks its head for the loss."""

    def __init__(self) -> None:
        super().__init__()
        from xla_fsdp import LinearCrossEntropy

        self.head = LinearCrossEntropy.from_linear(self.head)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x, targets)


def asked(model: Any, ids: Tensor) -> Tensor:
    return model(ids, ids)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], tuple[str, ...]]] = {
    "pairs": (PairsNet, {}, ("scan: left out for blocks: ",)),
    "counting": (
        CountingNet,
        {},
        ("scan: left out for blocks: a scanned block changes",),
    ),
    "backwards": (Backwards, {}, ("scan: left out for blocks: block 2 of the scanned blocks was",)),
    "frozen": (Frozen, {}, ("  stacked: blocks",)),
    "tied block": (
        TiedBlock,
        {},
        ("  scan: blocks", "stacked: left out for blocks: up.weight is tied to head.weight, which"),
    ),
    "gemma": (
        gemma,
        {},
        ("streamed_head: left out for lm_head: the forward of",),
    ),
    "bert": (bert, {}, ("streamed_head: left out for BertForMaskedLM: only causal",)),
    "asked": (StreamedNet, {"loss": asked}, ("  streamed_head: head",)),
    "schedule": (
        partial(language_model, "Llama", True),
        {"schedule": lambda step: 0.5**step},
        ("  step_in_backward: AdamW",),
    ),
    "fast": (partial(language_model, "Qwen2", True), {}, ("  streamed_embedding: model.embed",)),
}


@scenarios.add
def trained(rank: int) -> dict[str, Any]:
    found = {}
    for name, (build, how, _) in CASES.items():
        recipe = "fast" if name == "fast" else "lean"
        try:
            found[name] = train(build, recipe, **how)[:2]
        except Exception:
            found[name] = [], traceback.format_exc().splitlines()
    return found


@pytest.mark.parametrize("name", CASES)
def test_models_of_users(name: str) -> None:
    build, how, lines = CASES[name]
    losses, found = scenarios.result("trained")[name]
    shown = "\n".join(found)
    assert losses == pytest.approx(train_plain(build, **how), rel=3e-4), shown
    for line in lines:
        assert any(line in each for each in found), shown


# ---------------------------------------------------------------- later forwards


def train_leaving_out(model: Any, device: Any, sync: Callable[[], None]) -> list[float]:
    """Steps and an evaluation that leaves a block out, and then steps that do so, too."""
    inner = getattr(model, "module", model)
    optimizer = getattr(model, "optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number, (trains, left_out) in enumerate(LEFT_OUT):
        inner.left_out = left_out
        with torch.set_grad_enabled(trains):
            loss = loss_of(model, tokens(number).to(device))
        if trains:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        sync()
        losses.append(loss.item())
    return losses


LEFT_OUT = [(True, ()), (False, (1,)), (True, ()), (True, (1,)), (True, ()), (False, ())]


@scenarios.add
def leaving_out(rank: int) -> dict[str, Any]:
    import torch_xla

    from xla_fsdp import Recipe, parallelize

    device, found = torch_xla.device(), {}
    for name in ("lean", "fast"):
        # A step of a stack would decay a block that backward has not used; that is refused.
        model, _, done = parallelize(make(LeavingOut), None, Recipe(name, stacked=False))
        wrong = message(lambda: loss_of(model, tokens()[0].to(device)))  # noqa: B023
        sync = partial(_append_loops, lines := [], done, torch_xla.sync)
        found[name] = train_leaving_out(model, device, sync), lines, done._report, wrong
    return found


def _append_loops(lines: list[bool], done: Any, sync: Callable[[], None]) -> None:
    sync()
    lines.append("  scan: blocks" in done._report)


@pytest.mark.parametrize("name", ["lean", "fast"])
def test_later_forwards_may_leave_blocks_out(name: str) -> None:
    losses, loops, report, _ = scenarios.result("leaving_out")[name]
    plain = train_leaving_out(make(LeavingOut), "cpu", lambda: None)
    assert losses == pytest.approx(plain, rel=1e-4)
    # An evaluation does so for itself.
    assert loops == [True, True, True, False, False, False]
    assert any("scan: left out for blocks: block 2 of the scanned blocks was" in x for x in report)


def test_a_forward_that_fails_anyway_leaves_the_loops_as_they_are() -> None:
    for _, loops, _, wrong in scenarios.result("leaving_out").values():
        assert "nothing was raised" not in wrong
        assert loops[0]


# ---------------------------------------------------------------- what is around training


@scenarios.add
def evaluated(rank: int) -> dict[str, Any]:
    import torch_xla

    build = partial(language_model, "Llama", True)
    _, _, (model, _) = train(build)
    ids = tokens().to(torch_xla.device())
    from xla_fsdp import full_state_dict

    trained = model(ids, labels=ids)
    model.eval()
    with torch.no_grad():
        output = model(ids, labels=ids)
        logits = model(ids).logits
        written = model.generate(ids[:, :3], max_new_tokens=2, do_sample=False)
    return {
        "keys": (sorted(trained.keys()), sorted(output.keys())),
        "losses": (trained.loss.item(), output.loss.item()),
        "logits": (output.logits.cpu(), logits.cpu()),
        "written": written.cpu(),
        "state": {name: each.cpu() for name, each in full_state_dict(model).items()},
    }


def test_logits_are_there_but_while_training() -> None:
    found = scenarios.result("evaluated")
    assert found["keys"] == (["loss"], ["logits", "loss"])
    model = language_model("Llama", True)
    model.load_state_dict(found["state"])
    model.eval()
    with torch.no_grad():
        plain = model(tokens(), labels=tokens())
        written = model.generate(tokens()[:, :3], max_new_tokens=2, do_sample=False)
    assert found["losses"] == pytest.approx([plain.loss.item()] * 2, rel=1e-4)
    for logits in found["logits"]:
        torch.testing.assert_close(logits, plain.logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(found["written"], written)


@scenarios.add
def losses_of_all_kinds(rank: int) -> Any:
    import torch_xla

    from xla_fsdp import parallelize

    build = partial(language_model, "Llama", True)
    model = parallelize(make(build), None, "fast").model
    return [model(**each).loss.item() for each in kinds(torch_xla.device())]


def kinds(device: Any) -> list[dict[str, Any]]:
    """Ways to ask a causal language model for its loss."""
    ids = tokens().to(device)
    some = ids.masked_fill(ids % 3 == 0, -100)
    mask = torch.ones_like(ids)
    mask[:, :2] = 0
    return [
        {"input_ids": ids, "labels": some},
        {"input_ids": ids, "labels": some, "num_items_in_batch": torch.tensor(5)},
        {"input_ids": ids, "labels": ids, "shift_labels": some},
        {"input_ids": ids, "labels": ids, "attention_mask": mask},
    ]


def test_every_kind_of_loss_is_that_of_the_plain_model() -> None:
    model = make(partial(language_model, "Llama", True))
    plain = [model(**each).loss.item() for each in kinds("cpu")]
    assert scenarios.result("losses_of_all_kinds") == pytest.approx(plain, rel=1e-4)


@scenarios.add
def moved(rank: int) -> dict[str, Any]:
    """Save by one recipe, go on by another."""
    from xla_fsdp import load_checkpoint, save_checkpoint
    from xla_fsdp.xla.host import exchange

    build = partial(language_model, "Llama", False)
    _, _, lean = train(build)
    folder = exchange(tempfile.mkdtemp().encode() if rank == 0 else b"")[0].decode()
    save_checkpoint(folder, *lean, step=STEPS)
    after = {"lean": went_on(*lean)}
    for name in ("plain", "fast"):
        from xla_fsdp import parallelize

        fresh = make(build)
        other = parallelize(fresh, optimizer_of(fresh), name)
        load_checkpoint(folder, other.model, other.optimizer)
        after[name] = went_on(other.model, other.optimizer)
    return after


def went_on(model: Any, optimizer: Any) -> list[float]:
    import torch_xla

    losses = []
    for step in range(STEPS, STEPS + 2):
        loss = loss_of(model, tokens(step).to(torch_xla.device()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        losses.append(loss.item())
    return losses


def test_checkpoints_move_between_recipes() -> None:
    found = scenarios.result("moved")
    assert found["plain"] == pytest.approx(found["lean"], rel=1e-4)
    assert found["fast"] == pytest.approx(found["lean"], rel=1e-4)


@scenarios.add
def never_whole(rank: int) -> Any:
    from xla_fsdp import parallelize

    def fill(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 0.01)

    with torch.device("meta"):
        model = Transformer()
    optimizer = optimizer_of(model)
    done = parallelize(model, optimizer, "lean", param_init_fn=fill)
    import torch_xla

    loss = loss_of(done.model, tokens().to(torch_xla.device()))
    loss.backward()
    done.optimizer.step()
    torch_xla.sync()
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    return loss.item(), all(id(each) in held for each in done.model.parameters())


def test_a_model_that_is_never_whole() -> None:
    loss, held = scenarios.result("never_whole")
    assert held
    model = Transformer()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.01)
    assert loss == pytest.approx(loss_of(model, tokens()).item(), rel=1e-4)


@scenarios.add
def clipped(rank: int) -> list[str]:
    import torch_xla

    from xla_fsdp import parallelize

    model = make(Transformer)
    sharded, optimizer, _ = parallelize(model, optimizer_of(model))
    loss_of(sharded, tokens().to(torch_xla.device())).backward()
    norms = (sharded.clip_grad_norm_, partial(nn.utils.clip_grad_norm_, sharded.parameters()))
    optimizer.step()
    return [message(partial(clip, 1.0)) for clip in norms]


def test_clipping_what_is_stepped_in_backward_raises() -> None:
    first, second = scenarios.result("clipped")
    assert "stepped in backward" in first
    assert second.startswith("RuntimeError")


@scenarios.add
def dropped(rank: int) -> Any:
    import torch_xla

    from xla_fsdp import full_state_dict

    losses, lines, (model, _) = train(MODELS["dropout"])
    ids = tokens().to(torch_xla.device())
    model.train()
    twice = [loss_of(model, ids).item() for _ in range(2)]
    model.eval()
    state = {name: each.cpu() for name, each in full_state_dict(model).items()}
    return losses, lines, twice, loss_of(model, ids).item(), state


def test_dropout_draws_anew_in_every_step() -> None:
    losses, lines, twice, evaluated, state = scenarios.result("dropped")
    assert "  scan: blocks" in lines
    assert len(losses) == STEPS
    assert twice[0] != twice[1]
    model = MODELS["dropout"]()
    model.load_state_dict(state)
    assert evaluated == pytest.approx(loss_of(model.eval(), tokens()).item(), rel=1e-4)


@scenarios.add
def factory(rank: int) -> list[float]:
    from xla_fsdp.optim import HighPrecisionOptimizer

    wanted = partial(HighPrecisionOptimizer, inner_class=torch.optim.SGD, lr=0.1)
    return train(Transformer, new_optimizer=lambda _: wanted)[0]


def test_an_optimizer_that_wraps_another() -> None:
    plain = train_plain(
        Transformer, new_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    )
    assert scenarios.result("factory") == pytest.approx(plain, rel=1e-4)


@scenarios.add
def only_forward(rank: int) -> list[float]:
    """Losses of steps without backward, compiled, and then of the model itself."""
    import torch_xla

    from xla_fsdp import parallelize

    model, _, recipe = parallelize(make(partial(language_model, "Llama", tied=False)), None, "fast")
    ids = tokens().to(torch_xla.device())
    step = recipe.compile(lambda ids: model(ids, labels=ids).loss)
    return [each(ids).item() for each in (step, step, step, lambda ids: loss_of(model, ids))]


def test_steps_without_backward() -> None:
    *compiled, last = scenarios.result("only_forward")
    assert compiled == pytest.approx([last] * 3)
