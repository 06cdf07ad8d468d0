"""The all-gather with gradients: losses over the rows of all ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common.ranks import run_on_ranks
from test.common.scenarios import fsdp, make, message

ROWS, WIDTH = 3, 6
TEMPERATURE = 0.5


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, 4)
        self.right = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.left(x), dim=-1), F.normalize(self.right(x.flip(-1)), dim=-1)


def batch(ranks: int) -> Tensor:
    return torch.randn(ranks * ROWS, WIDTH, generator=torch.Generator().manual_seed(5))


def contrastive(own: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor], first: int) -> Tensor:
    """Return the loss of rows ``own``, whose number in ``others`` begins at ``first``."""
    labels = first + torch.arange(len(own[0]), device=own[0].device)
    both = zip(own, reversed(others), strict=True)
    losses = [F.cross_entropy(a @ b.t() / TEMPERATURE, labels) for a, b in both]
    return sum(losses) / 2


def plain_gradients(ranks: int) -> dict[str, Tensor]:
    model = make(Towers)
    features = model(batch(ranks))
    contrastive(features, features, 0).backward()
    return {name: param.grad for name, param in model.named_parameters()}


def gradients(rank: int, ranks: int, dim: int, by_mesh: bool) -> Any:
    import torch_xla

    from xla_fsdp import init_mesh
    from xla_fsdp.distributed import all_gather

    mesh = init_mesh((ranks,), ("shard",)) if by_mesh else None
    model = fsdp(make(Towers), reshard_after_forward=True)
    rows = batch(ranks)[rank * ROWS :][:ROWS].to(torch_xla.device())
    own = model(rows)
    moved = (each.transpose(0, dim) for each in own)
    left, right = (all_gather(each, dim, mesh).transpose(0, dim) for each in moved)
    contrastive(own, (left, right), rank * ROWS).backward()
    with type(model).summon_full_params(model, with_grads=True, writeback=False):
        return {name: param.grad.cpu() for name, param in model.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "dim", "by_mesh"), [(1, 0, False), (2, 0, False), (2, -1, True), (3, 1, False)]
)
def test_a_contrastive_loss_is_that_of_the_joined_batch(
    ranks: int, dim: int, by_mesh: bool
) -> None:
    expected = plain_gradients(ranks)
    for found in run_on_ranks(gradients, ranks, ranks, dim, by_mesh):
        torch.testing.assert_close(
            {name.removeprefix("_fsdp_wrapped_module."): each for name, each in found.items()},
            expected,
            rtol=1e-4,
            atol=1e-6,
        )


def other_uses(rank: int) -> dict[str, Any]:
    import torch_xla
    import torch_xla.core.functions as functions

    from xla_fsdp.distributed import all_gather

    fsdp(make(Towers))
    x = torch.tensor([float(rank + 1)], device=torch_xla.device(), requires_grad=True)
    [once] = torch.autograd.grad((all_gather(x) ** 3).sum(), x, create_graph=True)
    [twice] = torch.autograd.grad(once.sum(), x)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        functions.all_gather(x.detach())
        functions.all_gather(x)
    torch_xla.sync()
    return {
        "once": once.tolist(),
        "twice": twice.tolist(),
        "no such dim": message(lambda: all_gather(x, 1)),
        "told": [(str(each.message), each.filename == __file__) for each in told],
    }


def test_it_is_differentiated_twice_and_torch_xlas_is_told() -> None:
    of_ranks = run_on_ranks(other_uses, 2)
    # Two ranks with the same loss, x0 ** 3 + x1 ** 3.
    assert [each["once"] for each in of_ranks] == [[6.0], [24.0]]
    # Each rank differentiates 2 * 3 * x ** 2 of its own x, once for each rank's gathered copy.
    assert [each["twice"] for each in of_ranks] == [[12.0], [24.0]]
    assert of_ranks[0]["no such dim"] == "IndexError: x has 1 dims, and no dim 1"
    told = [each for rank in of_ranks for each in rank["told"]]  # warnings are the process's
    assert told
    assert all("Write xla_fsdp.distributed.all_gather(x, dim)" in text for text, _ in told)
    assert all(here for _, here in told)
    assert len(told) <= 4  # not of tensors without a gradient
