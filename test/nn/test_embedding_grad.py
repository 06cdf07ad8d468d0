"""Gradients of small embeddings: sums of rows in float32."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common.ranks import run_on_ranks
from test.common.scenarios import make
from xla_fsdp.nn.embedding_grad import _Embedding, embedding_by, sum_rows

TYPES, PLACES = 2, 24


class Model(nn.Module):
    """Two small tables, one of rows that are whole tiles, in a unit or in the root."""

    def __init__(self, width: int = 128, **options: Any) -> None:
        super().__init__()
        self.types = nn.Embedding(TYPES, width)
        self.places = nn.Embedding(PLACES, width, **options)
        self.body = nn.Linear(width, width)

    def embed(self, types: Tensor) -> Tensor:
        places = torch.arange(types.shape[1], device=types.device) % PLACES
        return self.types(types) + self.places(places)

    def forward(self, types: Tensor) -> Tensor:
        return torch.tanh(self.body(self.embed(types))).square()


class Penalized(Model):
    """Its loss has the norm of a gradient, which has a graph."""

    def forward(self, types: Tensor) -> Tensor:
        rows = self.types(types)
        [grad] = torch.autograd.grad(rows.tanh().mean(), self.types.weight, create_graph=True)
        return super().forward(types) + grad.square().mean()


class Tied(Model):
    """Uses one table also as a matrix, and reads it."""

    def forward(self, types: Tensor) -> Tensor:
        x = super().forward(types)
        return F.linear(x, self.places.weight) + self.places.weight.mean()


class Functional(Model):
    """Calls the function by keywords, with numbers in int32, and with a table that it computes."""

    def embed(self, types: Tensor) -> Tensor:
        numbers = types.int()
        rows = F.embedding(input=numbers, weight=self.types.weight, padding_idx=-1)
        return rows + F.embedding(numbers, self.types.weight * 2)


class OfParameter(Model):
    """Makes a parameter, and a module, of the unsharded weight."""

    def embed(self, types: Tensor) -> Tensor:
        again = nn.Embedding.from_pretrained(self.types.weight)
        return super().embed(types) + again(types) * nn.Parameter(self.types.weight).mean()


class Empty(Model):
    """Has a table without columns."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Embedding(TYPES, 0)

    def embed(self, types: Tensor) -> Tensor:
        return torch.cat([super().embed(types), self.none(types)], dim=-1)


class Recomputed(Model):
    """Recomputes its forward."""

    def __init__(self) -> None:
        super().__init__()
        from xla_fsdp import checkpoint_module

        self.body = checkpoint_module(self.body)
        self.types = checkpoint_module(self.types)


class InTransform(Model):
    """Looks up rows inside of a transform."""

    def embed(self, types: Tensor) -> Tensor:
        return torch.func.vmap(self.types)(types)


class ByRows(nn.Module):
    """A model whose blocks look up rows."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.types, self.body = nn.Embedding(TYPES, 128), nn.Linear(128, 128)

        def forward(self, x: Tensor, types: Tensor) -> Tensor:
            return x + torch.tanh(self.body(x + self.types(types)))

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Embedding(TYPES, 128)
        self.blocks = nn.ModuleList([self.Block() for _ in range(3)])

    def forward(self, types: Tensor) -> Tensor:
        x = self.start(types)
        for block in self.blocks:
            x = block(x, types)
        return x


def frozen() -> Model:
    model = Model()
    model.types.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Model,
    "narrow": lambda: Model(40),
    "padding": lambda: Model(padding_idx=3),
    "last_is_padding": lambda: Model(padding_idx=-1),
    "by_frequency": lambda: Model(scale_grad_by_freq=True),
    "penalized": Penalized,
    "tied": Tied,
    "functional": Functional,
    "of_parameter": OfParameter,
    "empty": Empty,
    "double": lambda: Model().double(),
    "recomputed": Recomputed,
    "in_transform": InTransform,
    "frozen": frozen,
    "by_rows": ByRows,
}


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, TYPES, (3, 50), generator=generator)


def loss_of(model: Any, types: Tensor) -> Tensor:
    return model(types).float().mean()


def wrap(name: str, model: Any, **options: Any) -> Any:
    """Wrap a model, or a unit inside of it and then the model, or its blocks, scanned."""
    from xla_fsdp import XlaFullyShardedDataParallel, scan_blocks

    if name == "plain":
        model.types = XlaFullyShardedDataParallel(model.types, **options)
    if name == "by_rows":
        for at, block in enumerate(model.blocks):
            model.blocks[at] = XlaFullyShardedDataParallel(block, **options)
        model = XlaFullyShardedDataParallel(model, **options)
        scan_blocks(model.blocks)
        return model
    return XlaFullyShardedDataParallel(model, **options)


def train_all(rank: int, names: list[str], options: dict[str, Any]) -> dict[str, Any]:
    return {name: train(rank, name, options) for name in names}


def train(rank: int, name: str, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps; losses and parameters."""
    import torch_xla

    model = wrap(name, make(MODELS[name], seed=0), **options)
    optimizer = sgd(model)
    losses = []
    for step in range(3):
        loss = loss_of(model, batch(rank, step).to(torch_xla.device()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with type(model).summon_full_params(model):
        params = {key: value.detach().cpu() for key, value in model.named_parameters()}
    return losses, params


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9)


def reference(num_ranks: int, name: str) -> tuple[list[list[float]], dict[str, Tensor]]:
    """The same on the joined batch, with losses by rank."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = sgd(model)
    losses: list[list[float]] = [[] for _ in range(num_ranks)]
    for step in range(3):
        for rank in range(num_ranks):
            loss = loss_of(model, batch(rank, step))
            (loss / num_ranks).backward()
            losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {key: value.detach() for key, value in model.named_parameters()}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_models_train_as_without_fsdp(num_ranks: int) -> None:
    names = list(MODELS) if num_ranks == 2 else ["plain", "narrow", "padding", "by_rows"]
    found = run_on_ranks(train_all, num_ranks, names, {"compute_dtype": torch.bfloat16})
    for name in names:
        losses, params = reference(num_ranks, name)
        torch.manual_seed(0)
        initial = dict(MODELS[name]().named_parameters())
        for rank in range(num_ranks):
            assert found[rank][name][0] == pytest.approx(losses[rank], rel=3e-2), name
        for key, value in params.items():  # what differs is rounding
            change = (value - initial[key]).norm()
            assert (found[0][name][1][key] - value).norm() <= 0.1 * change, (name, key)


@pytest.mark.parametrize("width", [2, 128])
@pytest.mark.parametrize("padding", [None, 0, -1, 3])
@pytest.mark.parametrize("numbers", [torch.tensor([[3, 0, 3], [1, 3, 4]]), torch.tensor(3)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_derivatives_are_those_of_torch(
    width: int, padding: int | None, numbers: Tensor, dtype: torch.dtype
) -> None:
    def derivatives(look_up: Callable[..., Tensor]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(5, width, generator=generator, dtype=torch.float64).requires_grad_()
        rows = look_up(numbers.to(dtype), table, padding)
        [first] = torch.autograd.grad(rows.pow(3).sum(), table, create_graph=True)
        [second] = torch.autograd.grad(first.pow(2).sum(), table)
        return [rows, first, second]

    expected = derivatives(lambda *args: F.embedding(*args))
    torch.testing.assert_close(
        derivatives(embedding_by(_Embedding.apply)), expected, rtol=1e-12, atol=1e-12
    )


def test_gradients_by_frequency_are_those_of_torch() -> None:
    numbers = torch.tensor([[3, 0, 3], [1, 3, 4]])

    def gradient(look_up: Callable[..., Tensor]) -> Tensor:
        table = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4).requires_grad_()
        rows = look_up(numbers, table, 4, scale_grad_by_freq=True)
        return torch.autograd.grad(rows.pow(3).sum(), table)[0]

    expected = gradient(lambda *args, **options: F.embedding(*args, **options))
    torch.testing.assert_close(
        gradient(embedding_by(_Embedding.apply)), expected, rtol=1e-12, atol=1e-12
    )


def test_wide_sums_stay_wide() -> None:
    rows, counted = torch.tensor([1, 1, 0]), torch.tensor([True, True, False])
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        summed = sum_rows(2, rows, counted, torch.ones(3, 4, dtype=dtype))
        assert torch.equal(summed, torch.tensor([[0.0] * 4, [2.0] * 4], dtype=wide))


# ---------------------------------------------------------------- long sums


class Sum(nn.Module):
    """Adds rows; the gradient of each is how often it is looked up."""

    def __init__(self, width: int = 128, rows: int = 2, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width, **options)

    def forward(self, x: Tensor | float, numbers: Tensor) -> Tensor:
        return x + self.table(numbers)


class SumOfBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(1, 128))
        self.blocks = nn.ModuleList([Sum() for _ in range(3)])

    def forward(self, x: float, numbers: Tensor) -> Tensor:
        found = x + self.start.expand(numbers.numel(), -1)
        numbers = numbers.flatten()  # one tensor for all blocks, as a loop wants it
        for block in self.blocks:
            found = block(found, numbers)
        return found


def wrapped_sums() -> Iterator[tuple[str, Any]]:
    from xla_fsdp import (
        MixedPrecisionPolicy,
        XlaFullyShardedDataParallel,
        checkpoint_module,
        fully_shard,
        scan_blocks,
    )

    def wrap(model: Any, **options: Any) -> Any:
        return XlaFullyShardedDataParallel(model, compute_dtype=torch.bfloat16, **options)

    for name, width, rows in (("tiles", 128, 2), ("narrow", 40, 3), ("large", 1024, 8193)):
        yield name, wrap(make(lambda width=width, rows=rows: Sum(width, rows)))
    yield "by_frequency", wrap(make(lambda: Sum(scale_grad_by_freq=True)))
    yield "recomputed", wrap(checkpoint_module(make(Sum)))
    yield "kept", wrap(make(Sum), reshard_after_forward=False)
    yield "flat", wrap(make(Sum), flatten_parameters=True)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    yield "fully_sharded", fully_shard(make(Sum), mp_policy=bf16)
    unsharded = fully_shard(make(Sum), mp_policy=bf16)
    unsharded.unshard()
    yield "unsharded", unsharded
    for name, kinds in (("scanned", {"stacked": False}), ("stacked", {"stacked": True})):
        model = make(SumOfBlocks)
        for at, block in enumerate(model.blocks):
            model.blocks[at] = wrap(block)
        model = wrap(model)
        scan_blocks(model.blocks, **kinds)
        yield name, model


def counted(rank: int) -> dict[str, list[float]]:
    """The gradients of the rows of tables, to which 4,096 and 512 are added."""
    import torch_xla

    numbers = torch.zeros(9, 512, dtype=torch.long)
    numbers[8] = 1
    found = {}
    for name, model in wrapped_sums():
        model(0.0, numbers.to(torch_xla.device())).float().sum().backward()
        grads = full_grads(model)
        found[name] = next(grad[:2, -1].tolist() for key, grad in grads.items() if "table" in key)
    return found


def full_grads(model: Any) -> dict[str, Tensor]:
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.grad)
    return {key: value.cpu() for key, value in whole_state(model).items()}


def whole_state(model: Any) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    from xla_fsdp import get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def test_sums_do_not_stop_growing() -> None:
    for found in run_on_ranks(counted, 2):
        # Where sums are in bfloat16, as for a table of more than 16 MiB.
        assert found.pop("large") == [256, 256]
        assert found.pop("by_frequency") == [1, 1]
        assert len(found) == 9
        assert all(counts == [4096, 512] for counts in found.values()), found


# ---------------------------------------------------------------- what is made of a weight


class Copying(Model):
    """Copies and stores what it makes of its unsharded weight."""

    copies: dict[str, Tensor]

    def embed(self, types: Tensor) -> Tensor:
        weight = self.types.weight
        parameter = nn.Parameter(weight)
        file = io.BytesIO()
        torch.save(parameter, file)
        file.seek(0)
        self.copies = {
            "parameter": parameter,
            "copied": copy.deepcopy(parameter),
            "detached": copy.deepcopy(weight.detach()),
            "module": copy.deepcopy(nn.Embedding.from_pretrained(weight)).weight,
            "read": torch.load(file, map_location="cpu"),
        }
        return super().embed(types)


def copied(rank: int) -> dict[str, tuple[str, Tensor]]:
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel

    model = XlaFullyShardedDataParallel(make(Copying), compute_dtype=torch.bfloat16)
    loss_of(model, batch(rank, 0).to(torch_xla.device())).backward()
    weight = whole_state(model)["types.weight"].bfloat16()
    found = {key: (type(each).__name__, each.detach().cpu()) for key, each in model.copies.items()}
    return {"expected": ("Tensor", weight), **found}


def test_what_is_made_of_a_weight_can_be_copied_and_stored() -> None:
    [found] = run_on_ranks(copied, 1)
    _, weight = found.pop("expected")
    kinds = {key: kind for key, (kind, _) in found.items()}
    assert kinds == {
        "parameter": "Parameter", "copied": "Parameter", "detached": "Tensor",
        "module": "Parameter", "read": "Parameter",
    }  # fmt: skip
    for _, value in found.values():
        assert torch.equal(value, weight)


def copied_unsharded(rank: int) -> list[Tensor]:
    import torch_xla

    from xla_fsdp import MixedPrecisionPolicy, fully_shard

    model = fully_shard(make(Model), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.set_reshard_after_backward(False)
    types = batch(rank, 0).to(torch_xla.device())
    loss_of(model, types).backward()
    assert type(model.types.weight) is Tensor
    return [loss_of(each, types).detach().cpu() for each in (copy.deepcopy(model), model)]


def test_a_model_that_stays_unsharded_can_be_copied() -> None:
    for first, second in run_on_ranks(copied_unsharded, 2):
        assert torch.equal(first, second)
