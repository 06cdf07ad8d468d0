"""Views of parameters that autograd saves, over the whole list of view operators.

torch_xla computes some of them (``unfold``) on the CPU. Each view has a parameter of its own in one
unit, so that a difference names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from test.common.compare import assert_close
from test.common.parity import whole
from test.common.ranks import run_on_ranks

RANKS = 2
SHAPE = (4, 6)


def pairs(w: Tensor) -> Tensor:
    return torch.view_as_complex(w.view(2, 6, 2))


ON_HOST: dict[str, Callable[[Tensor], Tensor]] = {  # computed on the CPU by torch_xla
    "_neg_view": lambda w: torch.ops.aten._neg_view(w),
    "_reshape_alias": lambda w: torch.ops.aten._reshape_alias(w, (3, 8), (8, 1)),
    "unfold": lambda w: w.unfold(0, 2, 1),
    "unfold, views of it": lambda w: w.t().unfold(0, 3, 2)[1:].transpose(0, 1).flatten(1),
    "view of another dtype": lambda w: w.view(torch.complex64).real + w[:, :3],
    "view of another dtype, detached": lambda w: w.detach().view(torch.int32).float() * 1e-10 + w,
}

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    **ON_HOST,
    "adjoint": lambda w: w.adjoint(),
    "alias": lambda w: torch.ops.aten.alias(w),
    "as_strided": lambda w: w.as_strided((3, 4), (4, 2), 1),
    "as_strided, overlapping": lambda w: w.as_strided((3, 3), (2, 1), 1),
    "atleast_3d": torch.atleast_3d,
    "broadcast_to": lambda w: w.broadcast_to(2, 4, 6),
    "chunk": lambda w: w.chunk(2, 1)[1],
    "conj": torch.conj,
    "detach": lambda w: w.detach() + w,
    "diagonal": lambda w: w.diagonal(1, 1, 0),
    "dsplit": lambda w: w.view(2, 2, 6).dsplit(2)[1],
    "expand": lambda w: w.expand(3, 4, 6),
    "expand_as": lambda w: w.expand_as(w.new_empty(2, 4, 6)),
    "flatten": lambda w: w.flatten(),
    "hsplit": lambda w: w.hsplit(2)[1],
    "imag": lambda w: pairs(w).imag,
    "imag of conj": lambda w: pairs(w).conj().imag,
    "index": lambda w: w[None, ..., 1],
    "mT": lambda w: w.mT,
    "movedim": lambda w: w.movedim(0, 1),
    "narrow": lambda w: w.narrow(0, 1, 2),
    "permute": lambda w: w.permute(1, 0),
    "positive": torch.positive,
    "ravel": lambda w: w.ravel(),
    "real": lambda w: pairs(w).real,
    "reshape": lambda w: w.reshape(3, 8),
    "select": lambda w: w.select(0, 1),
    "slice": lambda w: w[1:, ::2],
    "split": lambda w: w.split(2)[1],
    "split_with_sizes": lambda w: w.split_with_sizes([1, 3])[1],
    "squeeze": lambda w: w.view(4, 1, 6).squeeze(1),
    "swapaxes": lambda w: w.swapaxes(0, 1),
    "t": lambda w: w.t(),
    "tensor_split": lambda w: w.tensor_split(3)[1],
    "transpose": lambda w: w.transpose(0, 1),
    "unbind": lambda w: w.unbind(0)[2],
    "unflatten": lambda w: w.unflatten(1, (2, 3)),
    "unsqueeze": lambda w: w.unsqueeze(1),
    "view": lambda w: w.view(3, 8),
    "view_as_complex": lambda w: (pairs(w) * pairs(w)).real,
    "view_as_real": lambda w: torch.view_as_real(pairs(w) * 1.5),
    "vsplit": lambda w: w.vsplit(2)[1],
}


REMATERIALIZED = ["select", "diagonal", "view_as_real", *ON_HOST]


class Viewing(nn.Module):
    """Computes with a view of each parameter, so that autograd saves it."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        values = torch.linspace(-1, 1, 24).view(SHAPE) ** 3
        self.weights = nn.ParameterDict({name: nn.Parameter(values.clone()) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        views = [VIEWS[name](weight) for name, weight in self.weights.items()]
        return torch.stack([(v * x).sin().mean() + (v.cos() * x).mean() for v in views])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(1, 1)
        self.kept, self.rematerialized = Viewing(list(VIEWS)), Viewing(REMATERIALIZED)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        return torch.cat([self.kept(x), self.rematerialized(x)])


def batch(rank: int) -> Tensor:
    return torch.tensor([0.3 * (rank + 1)])


def train(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    import torch_xla

    from test.common.scenarios import fsdp, make
    from xla_fsdp import checkpoint_module

    net = make(Net)
    net.kept = fsdp(net.kept)
    net.rematerialized = fsdp(checkpoint_module(net.rematerialized))
    net = fsdp(net)
    output = net(batch(rank).to(torch_xla.device()))
    output.sum().backward()
    grads = whole(net, {n: p.grad for n, p in net.named_parameters() if p.grad is not None})
    torch_xla.sync()
    return output.detach().cpu(), {name: grad.cpu() for name, grad in grads.items()}


def test_views_that_autograd_saves_have_the_values_of_the_plain_module() -> None:
    torch.manual_seed(3)
    net = Net()
    expected = [net(batch(rank)) for rank in range(RANKS)]
    (sum(expected) / RANKS).sum().backward()
    grads = {name: param.grad for name, param in net.named_parameters()}
    for (output, own), each in zip(run_on_ranks(train, RANKS), expected, strict=True):
        assert_close(_by_view(output), _by_view(each.detach()), atol=1e-5)
        assert_close(own, grads, rtol=1e-6, atol=1e-6)


def _by_view(values: Tensor) -> dict[str, Tensor]:
    names = [*VIEWS, *(f"{name}, rematerialized" for name in REMATERIALIZED)]
    return dict(zip(names, values, strict=True))
