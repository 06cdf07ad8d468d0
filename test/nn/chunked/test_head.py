"""A head that computes the loss piece by piece: against the plain one, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from test.common.docs_snippets import snippets
from test.common.garbage import live_tensors
from test.common.models import FEATURES, HeadNet, TiedHeadNet
from test.common.parity import Case, Runs, assert_parity, run_cases, whole
from test.common.ranks import run_on_ranks
from test.common.scenarios import RANKS, Scenarios, fsdp, make, message
from test.common.warned import recorded_warnings
from xla_fsdp import LinearCrossEntropy, StreamedEmbedding
from xla_fsdp.nn.chunked.chunks import CHUNK_BYTES, NO_CLASS, TILE, cut_by_size, cut_into
from xla_fsdp.nn.chunked.softmax import OnlineCrossEntropy, logits_of

scenarios = Scenarios(__name__)
result = scenarios.result

CLASSES, WIDTH = 37, 11
ROWS = {"shard_param_on_dim_0": True}
TOLERANCE = 2e-6

# ---------------------------------------------------------------- without ranks


def data(rows: int = 7, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs [rows, WIDTH] and classes [rows]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, torch.randint(0, CLASSES, (rows,), generator=generator)


def head_of(bias: bool = True, **options: Any) -> LinearCrossEntropy:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return LinearCrossEntropy(WIDTH, CLASSES, bias, **options)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 3])
def test_the_loss_is_that_of_torch(smoothing: float, reduction: str, ignored: int) -> None:
    head = head_of(label_smoothing=smoothing, reduction=reduction, ignore_index=ignored)
    x, y = data()
    y[2:4] = ignored
    expected = F.cross_entropy(
        F.linear(x, head.weight, head.bias), y,
        label_smoothing=smoothing, reduction=reduction, ignore_index=ignored,
    )  # fmt: skip
    torch.testing.assert_close(head(x, y), expected)
    in_rows = expected[None] if reduction == "none" else expected
    torch.testing.assert_close(head(x[None], y[None]), in_rows)
    assert torch.equal(head(x), F.linear(x, head.weight, head.bias))


def test_low_precision_logits_are_compared_in_fp32() -> None:
    head = head_of().to(torch.bfloat16)
    x, y = data()
    loss = head(x.bfloat16(), y)
    assert loss.dtype == torch.float32
    logits = F.linear(x.bfloat16(), head.weight, head.bias)
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), y))


def test_nothing_to_count_is_nan_and_has_no_gradient() -> None:
    head = head_of()
    x, y = data()
    loss = head(x, torch.full_like(y, -100))
    loss.backward()
    assert loss.isnan()
    assert head.weight.grad is not None
    assert not head.weight.grad.any()


def test_a_target_that_is_no_class_makes_the_loss_nan() -> None:
    x, y = data()
    for wrong in (CLASSES, -1):
        y[1] = wrong
        assert head_of()(x, y).isnan()
        losses = head_of(reduction="none")(x, y)
        assert losses.isnan().tolist() == [at == 1 for at in range(len(y))]


def test_state_dicts_are_those_of_a_linear_layer() -> None:
    linear = nn.Linear(WIDTH, CLASSES)
    head = head_of()
    head.load_state_dict(linear.state_dict())
    other = nn.Linear(WIDTH, CLASSES)
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.weight, linear.weight)
    assert torch.equal(other.bias, linear.bias)


class Doubled(nn.Linear):
    """With a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_from_linear_takes_over_the_parameters_themselves() -> None:
    linear = nn.Linear(WIDTH, CLASSES, bias=False, dtype=torch.bfloat16).eval()
    head = LinearCrossEntropy.from_linear(linear, label_smoothing=0.1, pieces=4)
    assert head.weight is linear.weight
    assert head.bias is None
    assert (head.label_smoothing, head.pieces, head.training) == (0.1, 4, False)
    assert "label_smoothing=0.1" in repr(head)
    with pytest.raises(TypeError, match=r"takes an nn\.Linear, got Embedding"):
        LinearCrossEntropy.from_linear(nn.Embedding(2, 3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Doubled has a forward of its own"):
        LinearCrossEntropy.from_linear(Doubled(WIDTH, CLASSES))
    linear.weight = nn.Parameter(linear.weight.detach()[:8])
    with pytest.raises(ValueError, match=r"has shape \(8, 11\), not \(37, 11\): it is sharded"):
        LinearCrossEntropy.from_linear(linear)


def test_options_out_of_range_are_all_told_at_once() -> None:
    with pytest.raises(
        ValueError, match=r"label_smoothing is 2; .*reduction is 'avg'; .*pieces is 0"
    ):
        LinearCrossEntropy(3, 4, label_smoothing=2, reduction="avg", pieces=0)


def test_inputs_that_do_not_fit_are_refused() -> None:
    x, y = data()
    with pytest.raises(ValueError, match=r"input has shape \(7, 10\).*in_features, which is 11"):
        head_of()(x[:, :10], y)
    with pytest.raises(ValueError, match=r"targets have shape \(6,\).*one target per row: \(7,\)"):
        head_of()(x, y[:6])
    for wrong in (torch.float32, torch.bool):
        with pytest.raises(TypeError, match="give classes, as integers"):
            head_of()(x, y.to(wrong))


@given(st.integers(1, 70), st.integers(1, 9), st.integers(1, 20), st.sampled_from([0, 1, 5]))
def test_pieces_hold_every_class_once_and_in_the_order_of_shards(
    classes: int, ranks: int, count: int, extra: int
) -> None:
    shard_rows = -(-classes // ranks) + extra
    pieces = cut_into(classes, ranks, shard_rows, count)
    assert 1 <= pieces.count <= count
    assert pieces.padded_rows >= shard_rows
    numbers = torch.arange(pieces.count, dtype=torch.int32)
    stack = torch.stack([pieces.classes(number[None]) for number in numbers])
    by_rank = stack.reshape(pieces.count, ranks, pieces.rows).transpose(0, 1).reshape(ranks, -1)
    expected = torch.arange(ranks * shard_rows).reshape(ranks, shard_rows)
    expected = torch.where(expected < classes, expected, NO_CLASS)
    assert torch.equal(by_rank[:, :shard_rows], expected.int())
    assert (by_rank[:, shard_rows:] == NO_CLASS).all()


@pytest.mark.parametrize(("classes", "ranks", "width", "rows"), [
    (50304, 16, 1024, 1024), (50257, 16, 1024, 1024), (128256, 16, 4096, 8192),
    (128256, 256, 4096, 2048), (32000, 8, 4096, 4096), (128256, 64, 4096, 32768),
])  # fmt: skip
def test_automatic_pieces_are_tiles_of_about_one_size_with_little_padding(
    classes: int, ranks: int, width: int, rows: int
) -> None:
    shard_rows = -(-classes // ranks)
    per_class = (width + rows) * 2
    pieces = cut_by_size(classes, ranks, shard_rows, width, rows, 2)
    assert pieces.rows % TILE == 0
    assert pieces.padded_rows <= 1.02 * shard_rows + TILE
    size, tile = pieces.rows * ranks * per_class, TILE * ranks * per_class
    most = max(CHUNK_BYTES, 2 * classes * width / 8, width * per_class)
    assert size == tile or most / 2 <= size <= most


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sums_and_gradients_of_pieces_are_those_of_the_whole(smoothing: float) -> None:
    x, y = data()
    weight = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(2))
    logits = logits_of(x, weight, None).requires_grad_()
    losses = F.cross_entropy(logits, y, reduction="none", label_smoothing=smoothing)
    share = torch.linspace(0, 2, len(y))
    (expected,) = torch.autograd.grad(losses, logits, share)
    goal = OnlineCrossEntropy(y.int(), CLASSES, smoothing)
    sums = goal.no_sums()
    # The first piece is padding alone, and every piece ends with some, which is worth a lot.
    parts = [torch.empty(0, dtype=torch.int64), *torch.arange(CLASSES).split(10)]
    padded = []
    for part in parts:
        classes = torch.cat([part.int(), torch.full((2,), NO_CLASS, dtype=torch.int32)])
        padded.append((F.pad(logits.detach()[:, part], (0, 2), value=50.0), classes))
        sums = goal.sums(sums, *padded[-1])
    found, norm = goal.losses(sums)
    torch.testing.assert_close(found, losses.detach())
    gradients = [goal.gradient(piece, classes, norm, share) for piece, classes in padded]
    assert not any(each[:, -2:].any() for each in gradients)
    torch.testing.assert_close(torch.cat([each[:, :-2] for each in gradients], 1), expected)


# ---------------------------------------------------------------- one step against the plain model


def net(**options: Any) -> Callable[[], nn.Module]:
    return partial(HeadNet, **options)


def batch(rank: int) -> tuple[Tensor, Tensor]:
    """This rank's: [2, 3, FEATURES] and [2, 3], of which some do not count."""
    generator = torch.Generator().manual_seed(20 + rank)
    x = torch.randn(2, 3, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (2, 3), generator=generator)
    y[0, rank] = -100
    return x, y


def streamed(
    build: Callable[[], nn.Module], change: Callable[[Any], None] = lambda model: None, **more: Any
) -> Any:
    """The model with a head that is a unit of its own."""
    model = make(build)
    change(model)
    options = {**ROWS, "execute_sharding_on_init": False, **more}
    model.blocks[0] = fsdp(model.blocks[0], **options)
    model.head = fsdp(model.head, **options)
    return fsdp(model, **options)


def streams(model: Any) -> bool:
    return model.head._fsdp_module_state.forward_override is not None


def to_device(*tensors: Tensor) -> list[Tensor]:
    import torch_xla

    return [tensor.to(torch_xla.device()) for tensor in tensors]


def whole_grads(model: Any) -> dict[str, Tensor]:
    grads = {name: param.grad for name, param in model.named_parameters()}
    present = {name: grad for name, grad in grads.items() if grad is not None}
    return {name: grad.cpu() for name, grad in whole(model, present).items()}


def plain_step(
    model: Any, loss: Callable[[Any, Tensor, Tensor], Tensor] = lambda model, x, y: model(x, y)
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of all ranks' batches, and the gradients of their mean."""
    losses = torch.stack([loss(model, *batch(rank)) for rank in range(RANKS)])
    losses.mean().backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    return losses.tolist(), {name: grad for name, grad in grads.items() if grad is not None}


def differences(
    rank: int,
    build: Callable[[], nn.Module],
    change: Callable[[Any], None] = lambda model: None,
    loss: Callable[[Any, Tensor, Tensor], Tensor] = lambda model, x, y: model(x, y),
    **options: Any,
) -> dict[str, float]:
    """How far one step's loss and gradients are from those of the plain model."""
    plain = make(build)
    change(plain)
    return distances(rank, streamed(build, change, **options), plain, loss)


def distances(
    rank: int,
    model: Any,
    plain: Any,
    loss: Callable[[Any, Tensor, Tensor], Tensor] = lambda model, x, y: model(x, y),
) -> dict[str, float]:
    """The same for a model that is sharded already, whose head streams."""
    assert streams(model)
    found = loss(model, *to_device(*batch(rank)))
    found.backward()
    losses, expected = plain_step(plain, loss)
    return {"loss": abs(found.item() - losses[rank]), **furthest(whole_grads(model), expected)}


def furthest(grads: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """By name: the largest difference."""
    assert set(grads) == set(expected)
    return {name: (grad - expected[name]).abs().max().item() for name, grad in grads.items()}


VARIANTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "one_piece_is_enough": {"pieces": None},
    "two_pieces": {"pieces": 2, "bias": False},
    "an_odd_number_of_pieces": {"pieces": 5},
    "more_pieces_than_rows": {"pieces": 1000, "label_smoothing": 0.1},
    "sum": {"reduction": "sum", "pieces": 4},
}


@scenarios.add
def variants(rank: int) -> dict[str, dict[str, float]]:
    found = {name: differences(rank, net(**options)) for name, options in VARIANTS.items()}
    weights = torch.linspace(0.5, 2, 6).reshape(2, 3)
    found["ignored_class"] = differences(
        rank,
        net(ignore_index=3),
        loss=lambda model, x, y: model(x, torch.where(y < 20, 3, y)),
    )
    found["each_row"] = differences(
        rank,
        net(reduction="none", pieces=3, label_smoothing=0.2),
        loss=lambda model, x, y: (model(x, y) * weights.to(x.device)).sum(),
    )
    found["in_place"] = distances(rank, in_place(net()), make(net()))
    found["kept_pieces"] = differences(rank, net(), reshard_after_forward=False)
    return found


def in_place(build: Callable[[], nn.Module]) -> Any:
    from xla_fsdp import fully_shard

    model: Any = make(build)
    for module in (model.blocks[0], model.head, model):
        fully_shard(module)
    return model


@pytest.mark.parametrize(
    "name", [*VARIANTS, "ignored_class", "each_row", "in_place", "kept_pieces"]
)
def test_a_step_is_that_of_the_plain_model(name: str) -> None:
    for rank in range(RANKS):
        found = result("variants", rank)[name]
        assert max(found.values()) < TOLERANCE, found
    assert "head.weight" in found


@scenarios.add
def frozen(rank: int) -> dict[str, Any]:
    def but(*names: str) -> Callable[[Any], None]:
        def freeze(model: Any) -> None:
            for name, param in model.named_parameters():
                param.requires_grad_(name in names)

        return freeze

    trained = {
        "bias": but("head.bias"),
        "weight": but("head.weight"),
        "inputs": but("inp.weight", "inp.bias"),
    }
    return {name: differences(rank, net(), change) for name, change in trained.items()}


def test_what_is_frozen_has_no_gradient_and_the_rest_the_right_one() -> None:
    found = result("frozen")
    assert all(max(each.values()) < TOLERANCE for each in found.values()), found
    assert set(found["bias"]) == {"loss", "head.bias"}
    assert set(found["weight"]) == {"loss", "head.weight"}
    assert set(found["inputs"]) == {"loss", "inp.weight", "inp.bias"}


@scenarios.add
def nothing_counts(rank: int) -> tuple[bool, float, float]:
    model = streamed(net())
    x, y = to_device(*batch(rank))
    loss = model(x, torch.full_like(y, -100))
    loss.backward()
    largest = max(grad.abs().max().item() for grad in whole_grads(model).values())
    return loss.isnan().item(), largest, model(x, y + 1000).item()


def test_nothing_to_count_and_no_class_under_fsdp() -> None:
    is_nan, largest, of_no_class = result("nothing_counts")
    assert is_nan
    assert largest == 0
    assert of_no_class != of_no_class


# ---------------------------------------------------------------- what a step is made of


@scenarios.add
def programs(rank: int) -> dict[Any, tuple[int, int, bool]]:
    """By number of pieces: collectives, loops, and whether anything is as large as the head or the
    logits. "kept" are 8 that backward does not gather."""
    from xla_fsdp.xla.graph import lowered_hlo
    from xla_fsdp.xla.host import execute_pending

    found = {}
    for pieces in (1, 2, 8, 16, "kept"):
        kept = pieces == "kept"
        options = {"width": 128, "classes": 512, "bias": False, "pieces": 8 if kept else pieces}
        model = streamed(net(**options), reshard_after_forward=not kept)
        execute_pending()  # collectives wait for those before them, here
        model(*to_device(*batch(rank))).backward()
        text = lowered_hlo([param.grad for param in model.parameters()])
        moved = text.count(" all-gather(") + text.count(" reduce-scatter(")
        whole = any(shape in text for shape in ("[512,128]", "[2,256,128]", "[6,512]"))
        found[pieces] = moved, text.count(" while("), whole
    return found


def test_neither_the_weight_nor_the_logits_are_ever_whole() -> None:
    found = result("programs")
    assert [whole for _, _, whole in found.values()] == [True, False, False, False, False]
    assert [loops for _, loops, _ in found.values()] == [0, 2, 2, 2, 2]
    assert found[8][0] == found[16][0] == found[2][0] + 1  # forward takes pairs of more than two
    # The block's weight and bias are not gathered again either.
    assert found["kept"][0] == found[8][0] - 1 - 2


@scenarios.add
def left_alive(rank: int) -> list[int]:
    """Device tensors after each of some steps."""
    import torch_xla

    model = streamed(net())
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = to_device(*batch(rank))
    alive = []
    for _ in range(4):
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        alive.append(live_tensors())
    return alive


def test_nothing_of_a_step_stays_alive() -> None:
    alive = result("left_alive")
    assert alive[2] == alive[1]
    assert alive[3] == alive[1]


# ---------------------------------------------------------------- ways to call it


@scenarios.add
def calls(rank: int) -> dict[str, Any]:
    from xla_fsdp.xla.host import execute_pending
    from xla_fsdp.xla.ops import is_pending

    model, plain = streamed(net()), make(net())
    x, y = to_device(*batch(rank))
    execute_pending()
    held = model(x, y)
    pending = [name for name, param in model.named_parameters() if is_pending(param)]
    seen: list[str] = []
    model.head.register_forward_hook(lambda *_: seen.append("wrapper"))
    model.head.module.register_forward_hook(lambda *_: seen.append("head"))
    with torch.no_grad():
        logits, loss = model(x).cpu(), model(x, y).item()
        by_keyword = model.head(input=torch.ones(2, WIDTH, device=x.device), target=y[0, :2])
    model(x, target=y).backward()  # after forwards that had none
    return {
        "pending": pending if held.requires_grad else ["no forward"],
        "logits": (logits - plain(batch(rank)[0])).abs().max().item(),
        "loss": abs(loss - plain(*batch(rank)).item()),
        "by_keyword": by_keyword.item() == by_keyword.item(),
        "hooks": seen,
        "state": model.head._fsdp_unit.state.name,
    }


def test_it_is_called_like_any_module() -> None:
    found = result("calls")
    assert found["logits"] < TOLERANCE
    assert found["loss"] < TOLERANCE
    assert found["by_keyword"]
    assert found["hooks"] == ["head", "wrapper"] * 4
    assert found["pending"] == []  # a forward alone leaves shards as they are
    assert found["state"] == "SHARDED"


@scenarios.add
def rematerialized(rank: int) -> dict[str, Any]:
    from xla_fsdp import checkpoint_module

    def inside(model: Any) -> None:
        checkpoint_module(model.head)

    def outside(model: Any) -> None:
        checkpoint_module(model)

    return {
        "inside": differences(rank, net(), inside),
        "outside": differences(rank, net(), outside),
    }


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_checkpointed_head_streams(where: str) -> None:
    found = result("rematerialized")[where]
    assert max(found.values()) < TOLERANCE, found


@scenarios.add
def autocast(rank: int) -> tuple[float, float, list[str]]:
    model, plain = streamed(net()), make(net())
    x, y = to_device(*batch(rank))
    with torch.autocast("xla", dtype=torch.bfloat16):
        loss = model(x, y)
    loss.backward()
    grads = whole_grads(model)
    _, expected = plain_step(plain)
    return (
        abs(loss.item() - make(net())(*batch(rank)).item()),
        (grads["head.weight"] - expected["head.weight"]).abs().max().item(),
        [str(grads["head.weight"].dtype), str(loss.dtype)],
    )


def test_products_follow_autocast() -> None:
    loss, weight, dtypes = result("autocast")
    assert 1e-6 < loss < 0.02
    assert 1e-6 < weight < 0.01
    assert dtypes == ["torch.float32", "torch.float32"]


@scenarios.add
def hooked(rank: int) -> dict[str, float]:
    """A hook of the user's replaces the reduction."""
    from xla_fsdp import comm_hooks

    model = in_place(net())
    model.head.register_comm_hook(comm_hooks.DefaultState(), comm_hooks.reduce_scatter_hook)
    return distances(rank, model, make(net()))


def test_gradients_go_through_a_users_hook() -> None:
    assert max(result("hooked").values()) < TOLERANCE


@scenarios.add
def copies(rank: int) -> list[float]:
    model = streamed(net())
    x, y = to_device(*batch(rank))
    model(x, y).backward()
    model.zero_grad()
    losses = []
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert streams(each)
        losses.append(each(x, y).item())
    return losses


def test_copies_stream_by_themselves() -> None:
    first, *others = result("copies")
    assert others == [first, first]


# ---------------------------------------------------------------- what cannot stream


@scenarios.add
def not_streamed(rank: int) -> dict[str, Any]:
    """Warnings of heads that run as any unit, and their differences from the plain model."""

    class Scaled(LinearCrossEntropy):
        def forward(self, input: Tensor, target: Tensor | None = None) -> Tensor:
            return super().forward(input * 1.0, target)

    def scaled() -> nn.Module:
        model = HeadNet()
        model.head.__class__ = Scaled
        return model

    found: dict[str, Any] = {}
    builds: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
        "flat": (net(), {"flatten_parameters": True, "shard_param_on_dim_0": False}),
        "cut_rows": (net(), {"shard_param_on_dim_0": False}),
        "one_piece": (net(pieces=1), {}),
        "subclass": (scaled, {}),
        "larger": (net(), {}),
    }
    models = {name: streamed(build, **options) for name, (build, options) in builds.items()}
    losses, _ = plain_step(make(net()))
    for name, model in models.items():
        loss = model(*to_device(*batch(rank)))
        loss.backward()
        found[name] = [streams(model), abs(loss.item() - losses[rank])]
    models["larger"].head._fsdp_unit.settings.keeps_larger = True  # as in groups of fewer ranks
    for name, model in models.items():
        with recorded_warnings() as texts:
            model.head.module._fsdp_forward_override(model.head._fsdp_unit)
        found[name].append(texts)
    return found


def test_what_cannot_stream_says_so_and_runs_as_any_unit() -> None:
    found = result("not_streamed")
    assert all(difference < TOLERANCE for _, difference, _ in found.values()), found
    streams_and_says = {
        "flat": (False, "no whole rows of the weight"),
        "cut_rows": (False, "no whole rows of the weight"),
        "subclass": (False, "Scaled has a forward of its own"),
        "larger": (True, "a number for reshard_after_forward is ignored"),
    }
    for name, (does, words) in streams_and_says.items():
        does_stream, _, [said] = found[name]
        assert does_stream is does, name
        assert words in said, (name, said)
    assert found["one_piece"][::2] == [False, []]


@scenarios.add
def together(rank: int) -> dict[str, float]:
    """Head and table in one unit, which is gathered whole."""
    from xla_fsdp import fully_shard

    model: Any = make(TiedHeadNet)
    fully_shard([model.blocks[0], model.head])
    fully_shard(model)
    assert not streams(model)
    x, y = batch(rank)
    model(*to_device(x, y % WIDTH)).backward()
    _, expected = plain_step(make(TiedHeadNet), lambda model, x, y: model(x, y % WIDTH))
    return furthest(whole_grads(model), expected)


def test_parts_of_one_unit_are_gathered_whole() -> None:
    found = result("together")
    assert max(found.values()) < TOLERANCE, found


@scenarios.add
def refused(rank: int) -> dict[str, str]:
    from xla_fsdp import XlaFullyShardedDataParallel

    model = streamed(net())
    x, y = batch(rank)
    hidden = torch.ones(2, 3, WIDTH)
    on_device, targets = to_device(hidden, y)
    loss = model.head(on_device, targets)
    with torch.no_grad():
        model.head.weight.add_(1.0)
    found = {
        "host": message(lambda: model.head(hidden, y)),
        "dtype": message(lambda: model.head(on_device.bfloat16(), targets)),
        "width": message(lambda: model.head(on_device[..., :4], targets)),
        "targets": message(lambda: model.head(on_device, targets[:1])),
        "changed": message(loss.backward),
    }
    with XlaFullyShardedDataParallel.summon_full_params(model):
        found["summoned"] = message(lambda: model(*to_device(x, y)))
    return found


def test_what_would_go_wrong_is_refused() -> None:
    found = result("refused")
    assert found["host"] == "nothing was raised"  # an outermost unit moves its inputs
    assert (
        "the input is torch.bfloat16, and the weight is gathered as torch.float32" in found["dtype"]
    )
    assert "in_features, which is 11" in found["width"]
    assert "one target per row: (2, 3)" in found["targets"]
    assert "changed between its forward and its backward" in found["changed"]
    assert "inside summon_full_params" in found["summoned"]


# ---------------------------------------------------------------- training

BF16 = {"compute_dtype": torch.bfloat16}
IN_PLACE: dict[str, Any] = {"in_place": True, "computes_loss": True}
BY_ROWS: dict[str, Any] = {"options": ROWS, "computes_loss": True}
CASES = {
    "adamw": Case("HeadNet", **IN_PLACE, optimizer="adamw", tolerance=1e-3),
    "smooth": Case("SmoothHeadNet", **BY_ROWS),
    "rows": Case("HeadNet", **BY_ROWS, clip=(0.3, 2.0)),
    "wide": Case("WideHeadNet", computes_loss=True),
    "wide_torus_2x2": Case("WideHeadNet", computes_loss=True, torus=(2, 2)),
    "tied": Case("TiedHeadNet", **BY_ROWS),
    "frozen": Case("FrozenHeadNet", **BY_ROWS),
    "bf16": Case("HeadNet", computes_loss=True, options={**ROWS, **BF16}, tolerance=0.05),
    "bf16_fp32_reduce": Case(
        "SmoothHeadNet",
        computes_loss=True,
        options={**ROWS, **BF16, "fp32_reduce_scatter": True},
        tolerance=0.05,
    ),
    "fp16": Case(
        "HeadNet",
        computes_loss=True,
        options={**ROWS, "compute_dtype": torch.float16},
        tolerance=0.02,
    ),
    "no_barriers": Case(
        "SmoothHeadNet",
        computes_loss=True,
        options={
            **ROWS,
            "optimization_barrier_in_forward": False,
            "optimization_barrier_in_backward": False,
        },
    ),
    "kept": Case(
        "SmoothHeadNet",
        computes_loss=True,
        options={**ROWS, "reshard_after_forward": False},
        micro_batches=2,
    ),
    "accumulate": Case("SmoothHeadNet", **BY_ROWS, micro_batches=2),
    "no_sync": Case("SmoothHeadNet", **BY_ROWS, micro_batches=3, no_sync=True),
    "joint_backward": Case("SmoothHeadNet", **BY_ROWS, micro_batches=2, joint_backward=True),
    "evaluate": Case("SmoothHeadNet", **BY_ROWS, evaluate=True),
    "groups_of_two": Case("SmoothHeadNet", **BY_ROWS, groups_of=2),
    "hybrid_2x2": Case("SmoothHeadNet", **BY_ROWS, mesh=(2, 2)),
    "hybrid_2x2_no_sync": Case(
        "SmoothHeadNet", **BY_ROWS, mesh=(2, 2), micro_batches=2, no_sync=True
    ),
    "hybrid_2x4_bf16": Case(
        "WideHeadNet", computes_loss=True, options=BF16, mesh=(2, 4), tolerance=0.05
    ),
}
QUICK = ("adamw", "no_sync", "tied")
FULL = Runs({(n, name): c for n in (1, 3, 4, 8) for name, c in CASES.items() if c.fits(n)})


@scenarios.add
def trained(rank: int) -> dict[str, Any]:
    return run_cases(rank, {name: CASES[name] for name in QUICK})


@pytest.mark.parametrize("name", QUICK)
def test_parity(name: str) -> None:
    assert_parity(CASES[name], [result("trained", rank)[name] for rank in range(RANKS)])


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "name"), FULL.cases)
def test_parity_in_full(num_ranks: int, name: str) -> None:
    FULL.check(num_ranks, name)


# ---------------------------------------------------------------- state


@scenarios.add
def states(rank: int) -> dict[str, float]:
    """State dicts go from and to a model whose head is an nn.Linear."""
    from xla_fsdp import full_state_dict

    def linear() -> nn.Module:
        model: Any = HeadNet()
        model.head = nn.Linear(WIDTH, CLASSES)
        return model

    plain, model = make(linear, seed=9), streamed(net())
    model.load_state_dict(plain.state_dict())
    full = full_state_dict(model)
    plain.load_state_dict(full)
    x, y = batch(rank)
    expected = F.cross_entropy(plain(x).flatten(0, 1), y.flatten())
    return {
        "names": set(full) == set(plain.state_dict()),
        "loss": abs(model(*to_device(x, y)).item() - expected.item()),
    }


def test_state_dicts_of_shards_are_those_of_a_linear_layer() -> None:
    found = result("states")
    assert found["names"]
    assert found["loss"] < TOLERANCE


# ---------------------------------------------------------------- a model of transformers

VOCABULARY = 37
RECIPE = "from transformers import LlamaForCausalLM"


def llama(*, tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 27, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=tied, **sizes, **heads)
    return LlamaForCausalLM(config)


def sentences(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, VOCABULARY, (2, 9), generator=generator)


def recipe(rank: int, code: str, directory: str) -> dict[str, Any]:
    """The README's snippet, from its model to its loss, and a backward."""
    from xla_fsdp import XlaFullyShardedDataParallel, one_rank_at_a_time
    from xla_fsdp.nn.chunked import chunks as pieces
    from xla_fsdp.wrap import transformer_auto_wrap_policy

    pieces.CHUNK_BYTES = 1  # of the whole process, which does nothing else
    [tokens] = to_device(sentences(rank))
    space: dict[str, Any] = {
        "torch": torch,
        "partial": partial,
        "tokens": tokens,
        "FSDP": XlaFullyShardedDataParallel,
        "LinearCrossEntropy": LinearCrossEntropy,
        "StreamedEmbedding": StreamedEmbedding,
        "transformer_auto_wrap_policy": transformer_auto_wrap_policy,
    }
    building, wrapping = code.replace("meta-llama/Llama-3.1-8B", directory).split("model.lm_head =")
    with one_rank_at_a_time():  # transformers imports and loads with settings of the whole process
        exec(building, space)
    exec(f"model.lm_head ={wrapping}", space)
    for part in (space["model"].lm_head, space["model"].model.embed_tokens):
        assert part._fsdp_module_state.forward_override is not None
    space["loss"].backward()
    return {"loss": space["loss"].item(), "grads": whole_grads(space["model"])}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_the_recipe_for_transformers_trains_a_llama(tmp_path: Path, tied: bool) -> None:
    pytest.importorskip("transformers")
    [code] = [each.code for each in snippets() if RECIPE in each.code]
    plain = llama(tied=tied)
    plain.save_pretrained(tmp_path)
    found = run_on_ranks(recipe, RANKS, code, str(tmp_path))
    losses = [plain(input_ids=ids, labels=ids).loss for ids in map(sentences, range(RANKS))]
    torch.stack(losses).mean().backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    for rank in range(RANKS):
        assert found[rank]["loss"] == pytest.approx(losses[rank].item(), rel=1e-5)
        assert max(furthest(found[rank]["grads"], expected).values()) < 2e-6
