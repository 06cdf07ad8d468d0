"""Experts computed one after the other in plain torch, and by grouped products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xla_fsdp.nn.experts.api import grouped_linear
from xla_fsdp.nn.experts.routes import Routes

WIDTH, INNER = 12, 10


@dataclass(frozen=True)
class Case:
    """Tokens, their experts and the experts' layers.

    Args:
        experts: how many.
        tokens: how many.
        choices: experts of a token.
        chosen: the only experts that are chosen; all by default.
        transposed: whether weights are those of a linear layer.
        bias: whether experts have biases.
        capacity: see ``Routes.of``.
        dtype: of all but the weights of routes.
        width: of tokens and outputs.
        inner: of the experts.
    """

    experts: int = 6
    tokens: int = 11
    choices: int = 2
    chosen: tuple[int, ...] = ()
    transposed: bool = True
    bias: bool = False
    capacity: float | None = None
    dtype: torch.dtype = torch.float32
    width: int = WIDTH
    inner: int = INNER

    def routes(self) -> Tensor:
        draw = torch.Generator().manual_seed(1)
        among = torch.tensor(self.chosen or range(self.experts))
        rows = [torch.randperm(len(among), generator=draw) for _ in range(self.tokens)]
        return torch.stack([among[row[: self.choices]] for row in rows])

    def tensors(self) -> dict[str, Tensor]:
        """Tokens, weights of routes, and each layer's weight and bias."""
        draw = torch.Generator().manual_seed(2)
        up, down = (self.inner, self.width), (self.width, self.inner)
        shapes = {
            "tokens": (self.tokens, self.width),
            "up": (self.experts, *(up if self.transposed else up[::-1])),
            "down": (self.experts, *(down if self.transposed else down[::-1])),
        }
        if self.bias:
            shapes |= {"up bias": (self.experts, up[0]), "down bias": (self.experts, down[0])}
        found = {
            name: torch.randn(*shape, generator=draw).to(self.dtype)
            for name, shape in shapes.items()
        }
        found["weights"] = torch.rand(self.tokens, self.choices, generator=draw)
        return found


CASES = {
    "plain": Case(),
    "transposed": Case(transposed=False),
    "bias": Case(bias=True),
    "transposed_bias": Case(transposed=False, bias=True),
    "one_choice": Case(choices=1),
    "all_to_one": Case(choices=1, chosen=(4,)),
    "all_to_two": Case(chosen=(0, 5)),
    "one_expert": Case(experts=1, choices=1),
    "more_experts_than_rows": Case(experts=40, tokens=3),
    "every_expert": Case(experts=4, choices=4),
    "capacity": Case(capacity=0.7, bias=True),
    "small_capacity": Case(capacity=0.1),
    "bf16": Case(dtype=torch.bfloat16),
    "bf16_bias": Case(dtype=torch.bfloat16, bias=True, transposed=False),
}


def by_loop(case: Case) -> dict[str, Tensor]:
    """The output and all gradients, with each pair of a token and an expert by itself."""
    given = _leaves(case, "cpu")
    taken = dict.fromkeys(range(case.experts), 0)
    limit = case.tokens * case.choices
    if case.capacity is not None:
        limit = -(-case.capacity * limit // case.experts)
    rows = [torch.zeros(case.width) for _ in range(case.tokens)]
    for choice, experts in enumerate(case.routes().t().tolist()):
        for token, expert in enumerate(experts):
            taken[expert] += 1
            if taken[expert] <= limit:
                inner = _layer(case, given, "up", expert, given["tokens"][token]).relu()
                result = _layer(case, given, "down", expert, inner)
                rows[token] = rows[token] + result * given["weights"][token, choice]
    return _with_grads(torch.stack(rows), given)


def _layer(case: Case, given: dict[str, Tensor], name: str, expert: int, row: Tensor) -> Tensor:
    weight = given[name][expert]
    result = (weight if case.transposed else weight.t()) @ row
    return result + given[f"{name} bias"][expert] if case.bias else result


def by_routes(case: Case, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The same by grouped products."""
    given = _leaves(case, device)
    routes = Routes.of(case.routes().to(device), case.experts, case.capacity)
    rows = routes.spread(given["tokens"])
    for name in ("up", "down"):
        bias = given.get(f"{name} bias")
        rows = grouped_linear(rows, given[name], routes, bias, transposed=case.transposed)
        rows = rows.relu() if name == "up" else rows
    rows = rows * routes.weights_of_rows(given["weights"])
    return _with_grads(routes.combine(rows), given)


def _leaves(case: Case, device: torch.device | str) -> dict[str, Tensor]:
    return {name: each.to(device).requires_grad_() for name, each in case.tensors().items()}


def _with_grads(output: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
    share = torch.linspace(-1, 1, output.numel()).view(output.shape)
    (output * share.to(output.device)).sum().backward()
    grads = {name: each.grad for name, each in given.items()}
    found = {"output": output, **{name: each for name, each in grads.items() if each is not None}}
    return {name: each.detach().cpu() for name, each in found.items()}
