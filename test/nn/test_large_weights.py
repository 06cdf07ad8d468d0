"""Large weights of a root, with which ``F.linear`` computes piece by piece, and ``F.embedding`` by
rows that are sent, or as they are gathered."""

from __future__ import annotations

import copy
import gc
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from test.common.chips import skip_without_chips
from test.common.large_head import WIDTH, Model, batch, build_step, loss_of
from test.common.parity import on_torus
from test.common.ranks import ChildError, run_on_ranks
from test.common.scenarios import make


class Twice(Model):
    """Uses its head twice, and reads the weight itself."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        again = self.head(self.norm(self.tokens(tokens)))
        return logits + again + self.head.weight.square().mean()


class Hooked(Model):
    """Changes the gradient of its unsharded weight by a hook."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.hook: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        if self.hook is not None:
            self.hook.remove()
        self.hook = self.head.weight.register_hook(lambda grad: grad / 2)
        return super().forward(tokens)


class Penalized(Model):
    """Adds the gradient of its logits with respect to its hidden states, which has a graph."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.tokens(tokens))
        logits = self.head(hidden)
        [grad] = torch.autograd.grad(logits.tanh().mean(), hidden, create_graph=True)
        return logits * (1 + grad.norm())


class Weighty(Model):
    """Returns the norm of the gradient of its unsharded weight, too."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        [grad] = torch.autograd.grad(logits.square().mean(), self.head.weight, retain_graph=True)
        return logits * (1 + grad.norm().detach())


class InPlace(Model):
    """Scales its logits in place."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).mul_(0.5)


class Checkpointed(Model):
    """Recomputes its head."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        from xla_fsdp import checkpoint_module

        self.head = checkpoint_module(self.head)


class Looked(Model):
    """Its tokens are looked up with these arguments of ``nn.Embedding``."""

    def __init__(self, classes: int, **arguments: Any) -> None:
        super().__init__(classes)
        self.tokens = nn.Embedding(classes, WIDTH, **arguments)


class PenalizedTable(Model):
    """Adds the norm of what its loss would change in the rows of its tokens, with a graph."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        table = self.tokens.weight
        [grad] = torch.autograd.grad(logits.tanh().mean(), table, create_graph=True)
        return logits * (1 + grad.norm())


class Tied(Model):
    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.head.weight = self.tokens.weight


def frozen(model: Model) -> Model:
    model.head.requires_grad_(False)
    return model


def only_head(model: Model) -> Model:
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    return model


MODELS: dict[str, Callable[[], Model]] = {
    "plain": lambda: Model(3072),
    "odd": lambda: Model(3071, bias=True),  # padded on 2, 3 and 8 ranks
    "flat": lambda: Model(1000, width=100),  # its rows are no whole lanes
    "frozen": lambda: frozen(Model(3072, bias=True)),
    "only_head": lambda: only_head(Model(3071)),
    "twice": lambda: Twice(3072),
    "hooked": lambda: Hooked(3072),
    "penalized": lambda: Penalized(3072),
    "weighty": lambda: Weighty(3072),
    "in_place": lambda: InPlace(3072),
    "checkpointed": lambda: Checkpointed(3072),
    "tied": lambda: Tied(3072),
    "odd_tied": lambda: Tied(3071),
    "odd_twice": lambda: Twice(3071),
    "skipped": lambda: Looked(3071, padding_idx=3),
    "by_frequency": lambda: Looked(3071, scale_grad_by_freq=True),
    "penalized_table": lambda: PenalizedTable(3071),
}
# Loops that each model traces: of forward, and of backward where nothing asks for whole gradients.
LOOPS = {
    "plain": 2, "odd": 2, "flat": 0, "frozen": 2, "only_head": 2, "twice": 2, "hooked": 1,
    "penalized": 2, "weighty": 2, "in_place": 2, "checkpointed": 0, "tied": 2, "odd_tied": 2,
    "odd_twice": 2, "skipped": 2, "by_frequency": 2, "penalized_table": 2,
}  # fmt: skip
# Gradients that a step of one micro-batch reduces before its root's others: of the head, and of the
# table where that is padded.
EARLY = {"plain": 1, "odd": 2, "odd_tied": 2, "odd_twice": 4, "skipped": 2}


def train_all(
    rank: int,
    names: list[str],
    options: dict[str, Any],
    micro_batches: int,
    torus: tuple[int, ...] = (),
) -> dict[str, dict[str, Any]]:
    if torus:
        options = {**options, "collectives": on_torus(torus, rank)}
    return {name: train(rank, name, options, micro_batches) for name in names}


def train(rank: int, name: str, options: dict[str, Any], micro_batches: int) -> dict[str, Any]:
    """Three steps; losses, parameters, and the number of loops that were traced."""
    import torch_xla
    import torch_xla.runtime as xr

    from xla_fsdp import XlaFullyShardedDataParallel
    from xla_fsdp.nn import large_weights

    large_weights.LEAST_BYTES, large_weights.PIECE_BYTES = 2**16, 2**15 * xr.world_size()
    model: Any = make(MODELS[name], seed=0)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = XlaFullyShardedDataParallel(
            block, shard_param_on_dim_0=True, **options
        )
    model = XlaFullyShardedDataParallel(model, shard_param_on_dim_0=True, **options)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    losses = []
    early = mock.Mock(wraps=model._fsdp_unit.group.reduction.as_bucket)
    model._fsdp_unit.group.reduction.as_bucket = early
    for step in range(3):
        for micro in range(micro_batches):
            tokens, targets = (
                each.to(torch_xla.device()) for each in batch(rank, 10 * step + micro)
            )
            last = micro == micro_batches - 1
            with torch.enable_grad() if last else model.no_sync():
                loss = loss_of(model(tokens), targets) / micro_batches
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
    with XlaFullyShardedDataParallel.summon_full_params(model):
        full = {key: value.detach().cpu().clone() for key, value in model.named_parameters()}
    return {
        "losses": [each.item() for each in losses],
        "params": full,
        "loops": len(model._fsdp_unit.loops.made),
        "early": early.call_count,
    }


def reference(num_ranks: int, name: str, micro_batches: int) -> tuple[list[list[float]], Any]:
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = [list[float]() for _ in range(num_ranks)]
    for step in range(3):
        for micro in range(micro_batches):
            for rank in range(num_ranks):
                tokens, targets = batch(rank, 10 * step + micro)
                loss = loss_of(model(tokens), targets) / micro_batches
                (loss / num_ranks).backward()
                losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {key: value.detach() for key, value in model.named_parameters()}


@pytest.mark.parametrize(
    ("num_ranks", "micro_batches", "names"),
    [
        (1, 1, ["plain", "odd"]),
        (2, 1, list(MODELS)),
        (2, 2, ["plain", "odd", "twice", "weighty"]),  # with no_sync
        pytest.param(3, 1, ["plain", "odd", "twice"], marks=pytest.mark.slow),
        pytest.param(8, 1, ["plain", "odd", "frozen"], marks=pytest.mark.slow),
    ],
)
def test_models_train_as_without_fsdp(num_ranks: int, micro_batches: int, names: list[str]) -> None:
    found = run_on_ranks(train_all, num_ranks, names, {}, micro_batches)
    for name in names:
        losses, params = reference(num_ranks, name, micro_batches)
        for rank in range(num_ranks):
            assert found[rank][name]["losses"] == pytest.approx(losses[rank], rel=1e-5)
        for key, value in params.items():
            torch.testing.assert_close(found[0][name]["params"][key], value, rtol=1e-5, atol=1e-5)
        traced = 0 if num_ranks == 1 else min(LOOPS[name], 3 - micro_batches)
        # Not reduced in parts: a gradient that earlier micro-batches have left a part of.
        assert found[0][name]["loops"] == traced
        if num_ranks > 1 and name in EARLY:
            assert found[0][name]["early"] == (3 * EARLY[name] if micro_batches == 1 else 0)


@pytest.mark.parametrize(
    ("micro_batches", "names"),
    [
        (1, ["plain", "odd", "tied", "odd_twice", "skipped", "by_frequency", "penalized_table"]),
        (2, ["plain", "odd"]),
    ],
)
def test_on_a_torus_rows_of_a_table_are_sent(micro_batches: int, names: list[str]) -> None:
    found = run_on_ranks(train_all, 4, names, {}, micro_batches, (2, 2))
    for name in names:
        losses, params = reference(4, name, micro_batches)
        for rank in range(4):
            assert found[rank][name]["losses"] == pytest.approx(losses[rank], rel=1e-5)
        for key, value in params.items():
            torch.testing.assert_close(found[0][name]["params"][key], value, rtol=1e-5, atol=1e-5)
        # By frequency its gradient is whole; a later micro-batch adds to one.
        tables = {"odd_twice": 2, "by_frequency": 0}.get(name, 1)
        heads = 2 if name == "odd_twice" else 1
        assert found[0][name]["early"] == (3 * (heads + tables) if micro_batches == 1 else 0)


@pytest.mark.parametrize(
    "options",
    [
        {"compute_dtype": torch.bfloat16},
        {"fp32_reduce_scatter": True, "compute_dtype": torch.bfloat16},
    ],
)
def test_low_precision_differs_by_rounding_alone(options: dict[str, Any]) -> None:
    found = run_on_ranks(train_all, 2, ["plain", "odd"], options, 1)
    for name in ("plain", "odd"):
        losses, params = reference(2, name, 1)
        for rank in range(2):
            assert found[rank][name]["losses"] == pytest.approx(losses[rank], rel=2e-2)
        change = {key: value - initial(name)[key] for key, value in params.items()}
        for key in ("head.weight", "tokens.weight"):
            error = found[0][name]["params"][key] - params[key]
            assert error.norm() <= 0.05 * change[key].norm()
        assert found[0][name]["loops"] == 2


def initial(name: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {key: value.detach() for key, value in MODELS[name]().named_parameters()}


@pytest.mark.parametrize("shard_rows", [16, 30, 48, 61])
def test_pieces_have_each_row_of_a_shard_once(shard_rows: int) -> None:
    from xla_fsdp.nn.large_weights import Pieces

    pieces = Pieces(num_classes=shard_rows, width=3, num_ranks=1, shard_rows=shard_rows, rows=16)
    shard = torch.randn(shard_rows, 3)
    cut, once = pieces.cut(shard), pieces.cut(shard, once=True)
    starts = [int(pieces.start(torch.tensor([at]))) for at in range(pieces.count)]
    for start, piece in zip(starts, cut, strict=True):
        assert torch.equal(piece, shard[start : start + 16])
    total = torch.zeros_like(shard)
    for start, piece in zip(starts, once, strict=True):
        total[start : start + 16] += piece
    assert torch.equal(total, shard)
    assert torch.equal(pieces.joined(cut), shard)


# ---------------------------------------------------------------- as with the whole weight


def wrapped(options: dict[str, Any] | None = None) -> Any:
    from xla_fsdp import XlaFullyShardedDataParallel

    model: Any = make(lambda: Model(3071, bias=True))  # padded on 2 ranks
    for index, block in enumerate(model.blocks):
        model.blocks[index] = XlaFullyShardedDataParallel(block, shard_param_on_dim_0=True)
    return XlaFullyShardedDataParallel(model, shard_param_on_dim_0=True, **(options or {}))


def loss_in(model: Any, rank: int, step: int = 0) -> Tensor:
    import torch_xla

    tokens, targets = (each.to(torch_xla.device()) for each in batch(rank, step))
    return loss_of(model(tokens), targets)


def changed_before_backward(model: Any, rank: int) -> None:
    loss = loss_in(model, rank)
    with torch.no_grad():
        for each in model._fsdp_unit.group.shards:
            each.mul_(1.5)
    loss.backward()


def backward_twice(model: Any, rank: int) -> None:
    loss = loss_in(model, rank)
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards(model: Any, rank: int) -> None:
    first, second = loss_in(model, rank), loss_in(model, rank, 1)
    (first + second).backward()


def synced_before_backward(model: Any, rank: int) -> None:
    import torch_xla

    loss = loss_in(model, rank)
    torch_xla.sync()
    loss.backward()


def without_grad(model: Any, rank: int) -> None:
    with torch.no_grad():
        logits = loss_in(model, rank)
    loss = logits.item() * sum(each.sum() for each in model.parameters())
    loss.backward()


def autocast(model: Any, rank: int) -> None:
    with torch.autocast("xla", torch.bfloat16):
        loss = loss_in(model, rank)
    loss.backward()


def offloaded(model: Any, rank: int) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = loss_in(model, rank)
    loss.backward()


def copied(model: Any, rank: int) -> None:
    loss_in(model, rank).backward()
    other = copy.deepcopy(model)
    model.zero_grad()
    loss_in(other, rank).backward()
    for own, each in zip(model.parameters(), other.parameters(), strict=True):
        own.grad = each.grad


def raised(model: Any, rank: int) -> None:
    handle = model.head.register_forward_hook(stop)
    with pytest.raises(RuntimeError, match="stop"):
        loss_in(model, rank)
    handle.remove()
    loss_in(model, rank).backward()


def stop(*_: Any) -> None:
    raise RuntimeError("stop")


def other_gradients_first(model: Any, rank: int) -> None:
    loss = loss_in(model, rank)
    loss.backward(inputs=list(model.blocks.parameters()), retain_graph=True)
    loss.backward()


def gradient_of_a_kept_weight(model: Any, rank: int) -> None:
    kept: list[Tensor] = []
    handle = model.head.register_forward_hook(lambda head, *_: kept.append(head.weight))
    loss = loss_in(model, rank)
    handle.remove()
    [grad] = torch.autograd.grad(loss, kept, retain_graph=True)
    (loss * grad.norm().item()).backward()


def other_lengths(model: Any, rank: int) -> None:
    """Works on CPU ranks, whose programs may differ."""
    import torch_xla

    tokens = torch.arange(2 * (8 + 40 * rank)).reshape(2, -1).to(torch_xla.device())
    loss_of(model(tokens), tokens).backward()


def nothing_to_look_up(model: Any, rank: int) -> None:
    """On one rank alone."""
    import torch_xla

    handle = model.tokens.register_forward_hook(lambda *given: given[-1].sum(1, keepdim=True))
    tokens, targets = (each.to(torch_xla.device()) for each in batch(rank, 0))
    loss_of(model(tokens[:, : 8 - 8 * rank]), targets[:, :1]).backward()
    handle.remove()


def keeps_all(model: Any, rank: int) -> None:
    model._fsdp_unit.settings.reshard_after_forward = False
    loss_in(model, rank).backward()


def frees_all(model: Any, rank: int) -> None:
    model._fsdp_unit.settings.keeps_on_root = False
    loss_in(model, rank).backward()


SCENARIOS = {
    changed_before_backward: 1, backward_twice: 2, two_forwards: 2, synced_before_backward: 2,
    without_grad: 0, autocast: 0, offloaded: 0, copied: 2, raised: 2, keeps_all: 0, frees_all: 2,
    other_gradients_first: 3, gradient_of_a_kept_weight: 2, other_lengths: 2,
    nothing_to_look_up: 2,
}  # fmt: skip


def compared(rank: int) -> dict[str, tuple[float, int]]:
    """How far gradients are from those with the whole weight, and the number of loops."""
    import torch_xla

    from xla_fsdp.nn import large_weights

    found = {}
    for scenario in SCENARIOS:
        grads = []
        for least in (2**16, 2**40):
            large_weights.LEAST_BYTES, large_weights.PIECE_BYTES = least, 2**16
            model = wrapped()
            scenario(model, rank)
            torch_xla.sync()
            # Read, so that the ranks meet before one of them changes the sizes for the other.
            grads.append([each.grad.cpu() for each in model.parameters()])
            if least < 2**40:
                loops = len(model._fsdp_unit.loops.made)
        errors = [
            ((own - whole).norm() / whole.norm().clamp(min=1e-9)).item()
            for own, whole in zip(*grads, strict=True)
        ]
        found[scenario.__name__] = max(errors), loops
    return found


def test_gradients_are_those_with_the_whole_weight() -> None:
    for found in run_on_ranks(compared, 2):
        for scenario, loops in SCENARIOS.items():
            error, traced = found[scenario.__name__]
            assert error <= 1e-5, scenario.__name__
            assert traced == loops, scenario.__name__


def weights_alive(rank: int) -> int:
    """How many whole weights there are after a step, while its loss is held."""
    import torch_xla

    from xla_fsdp.nn import large_weights

    large_weights.LEAST_BYTES, large_weights.PIECE_BYTES = 2**16, 2**16
    model = wrapped()
    loss = loss_in(model, rank)
    loss.backward()
    model.zero_grad()
    torch_xla.sync()
    assert loss.isfinite()
    with torch._C.DisableTorchFunctionSubclass():
        tensors = [each for each in gc.get_objects() if isinstance(each, Tensor)]
        return sum(tuple(each.shape) in ((3071, 128), (3072, 128)) for each in tensors)


def test_a_held_loss_keeps_no_whole_weight() -> None:
    assert run_on_ranks(weights_alive, 2) == [0, 0]


class TwoHeads(Model):
    def __init__(self) -> None:
        super().__init__(3072)
        self.other = nn.Linear(WIDTH, 3072, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        from xla_fsdp.xla import ops

        x = self.norm(self.tokens(tokens) + self.blocks[0](self.tokens(tokens)))
        return (self.other if ops.rank() else self.head)(x)


def use_other_heads(rank: int) -> None:
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel
    from xla_fsdp.nn import large_weights

    large_weights.LEAST_BYTES, large_weights.PIECE_BYTES = 2**16, 2**16
    model: Any = make(TwoHeads)
    model.blocks[0] = XlaFullyShardedDataParallel(model.blocks[0])
    loss_in(XlaFullyShardedDataParallel(model), rank).backward()
    torch_xla.sync()


def test_ranks_that_use_other_heads_are_told() -> None:
    with pytest.raises(ChildError, match=r"use in \d+ pieces of head.weight .* on ranks \[0\]"):
        run_on_ranks(use_other_heads, 2)


def losses_of_steps(rank: int, torus: tuple[int, ...]) -> list[list[float]]:
    """Losses of steps that are traced, and of steps that are replayed."""
    import torch_xla

    from xla_fsdp import compile_step
    from xla_fsdp.nn import large_weights

    large_weights.LEAST_BYTES, large_weights.PIECE_BYTES = 2**16, 2**16
    found = []
    for is_compiled in (False, True):
        model = wrapped({"collectives": on_torus(torus, rank)} if torus else {})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def one(
            tokens: Tensor, targets: Tensor, model: Any = model, optimizer: Any = optimizer
        ) -> Tensor:
            loss = loss_of(model(tokens), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step: Any = compile_step(one, state=[model, optimizer]) if is_compiled else one
        losses = []
        for number in range(6):
            tokens, targets = (each.to(torch_xla.device()) for each in batch(rank, number))
            losses.append(step(tokens, targets).item())
        found.append(losses)
        # Loops over the head; and where rows of the table are sent, the first one of the rank's.
        assert len(model._fsdp_unit.loops.made) == (3 if torus else 2)
    return found


@pytest.mark.parametrize(("num_ranks", "torus"), [(2, ()), (4, (2, 2))])
def test_steps_are_replayed(num_ranks: int, torus: tuple[int, ...]) -> None:
    for traced, replayed in run_on_ranks(losses_of_steps, num_ranks, torus):
        assert replayed == pytest.approx(traced, rel=1e-6)
        assert traced[-1] < traced[0]


def on_chips() -> list[Any]:
    from xla_fsdp.preflight import rehearse

    return list(rehearse(build_step, topology="v5e:2x4", steps=3).steps)


@pytest.mark.slow
def test_rings_compute_the_same_on_chips() -> None:
    """Reductions along two axes of a torus; the last piece has rows of the one before it."""
    skip_without_chips()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = pool.submit(on_chips).result()  # as it wants as many devices as ranks
    for result in results:
        assert result.loss == pytest.approx(result.plain_loss, rel=1e-6)
        assert result.grad_norm == pytest.approx(result.plain_grad_norm, rel=1e-5)
