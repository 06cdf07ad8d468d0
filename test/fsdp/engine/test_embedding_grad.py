"""Gradients of small embeddings: sums of rows in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common.ranks import run_on_ranks
from test.common.scenarios import make

TYPES, PLACES, LENGTH = 2, 24, 4096


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


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [(1, ["plain", "by_rows"]), (2, list(MODELS)), (3, ["plain", "narrow", "padding", "by_rows"])],
)
def test_models_train_as_without_fsdp(num_ranks: int, names: list[str]) -> None:
    found = run_on_ranks(train_all, num_ranks, names, {})
    for name in names:
        losses, params = reference(num_ranks, name)
        for rank in range(num_ranks):
            assert found[rank][name][0] == pytest.approx(losses[rank], rel=1e-5)
        for key, value in params.items():
            torch.testing.assert_close(found[0][name][1][key], value, rtol=1e-5, atol=3e-6)


# ---------------------------------------------------------------- in bfloat16


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_low_precision_differs_by_rounding_alone(num_ranks: int) -> None:
    names = list(MODELS) if num_ranks == 2 else ["plain", "narrow", "padding", "by_rows"]
    found = run_on_ranks(train_all, num_ranks, names, {"compute_dtype": torch.bfloat16})
    for name in names:
        losses, params = reference(num_ranks, name)
        torch.manual_seed(0)
        initial = dict(MODELS[name]().named_parameters())
        for rank in range(num_ranks):
            assert found[rank][name][0] == pytest.approx(losses[rank], rel=3e-2), name
        for key, value in params.items():
            change = (value - initial[key]).norm()
            assert (found[0][name][1][key] - value).norm() <= 0.1 * change, (name, key)


class Sum(nn.Module):
    """Adds rows; the gradient of each is how often it is looked up."""

    def __init__(self, width: int = 128, rows: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)

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
    from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module, scan_blocks

    def wrap(model: Any) -> Any:
        return XlaFullyShardedDataParallel(model, compute_dtype=torch.bfloat16)

    for name, width, rows in (("tiles", 128, 2), ("narrow", 40, 3), ("large", 1024, 8193)):
        yield name, wrap(make(lambda width=width, rows=rows: Sum(width, rows)))
    yield "recomputed", wrap(checkpoint_module(make(Sum)))
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
    with type(model).summon_full_params(model):
        return {key: value.detach().cpu() for key, value in model.named_parameters()}


def test_sums_do_not_stop_growing() -> None:
    for found in run_on_ranks(counted, 2):
        # Where sums are in bfloat16, as for a table of more than 16 MiB.
        assert found.pop("large") == [256, 256]
        assert list(found) == ["tiles", "narrow", "recomputed", "scanned", "stacked"]
        assert all(counts == [4096, 512] for counts in found.values()), found
