"""Experts cut over an axis of a mesh: tokens go to the ranks that have their experts, and back.

Shapes do not depend on the routes. Without a capacity any rank may get all tokens, so each gets
those of all ranks along the axis, a round at a time, which bounds what it holds of them; what it
computes are the rows of its own experts. With a capacity ranks send each other as many rows of each
expert as it may take.
Invariants: no other rank's loss is lost or counted twice: the gradient of an expert is the sum over
the tokens of all ranks along the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp.distributed.mesh import EXPERT
from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.nn.experts.routes import Routes
from xla_fsdp.tensor_parallel import mappings
from xla_fsdp.tensor_parallel.parallel_module import Forward, ParallelStyle, ParamCut, own_cuts

Compute = Callable[[Tensor, Routes, Tensor], Tensor]
"""Takes rows sorted by expert, [rows, width], their routes and their weights, [rows, 1]; returns
[rows, outputs], times these weights.

Best is to multiply by them before the last product: their gradients then need none of its results,
so that layers that are recomputed neither compute these again nor send them back again.
"""


_EXCHANGED = "_fsdp_exchanged"  # whether a running forward has exchanged tokens


class ExpertParallel(ParallelStyle):
    """Cut a mixture's experts over the axis ``expert`` of a mesh.

        parallelize_module(model, mesh["expert"], {"layers.*.mlp.experts": ExpertParallel()})
        fully_shard(model, mesh=mesh["shard", "expert"])

    The module has ``num_experts``, and parameters [experts, ...]; its forward computes by
    ``exchanged`` or is that of transformers' experts.

    Args:
        rounds: in how many rounds tokens without a capacity are exchanged (default: as many as
            there are ranks along the axis).

    Raises:
        ValueError: if ``rounds`` is below 1.
    """

    def __init__(self, *, rounds: int | None = None) -> None:
        if rounds is not None and rounds < 1:
            raise ValueError(f"rounds is {rounds}; give 1 or more")
        self.rounds = rounds

    def find_problems(self, module: nn.Module) -> Iterator[str]:
        experts = getattr(module, "num_experts", None)
        if not isinstance(experts, int):
            yield f"is a {type(module).__name__} without num_experts, the number of its experts"
            return
        if others := [n for n, each in module.named_parameters() if each.shape[:1] != (experts,)]:
            yield f"has {', '.join(others)}, not [experts, ...] of its {experts} experts"

    def cuts(self, module: nn.Module) -> Sequence[ParamCut]:
        return own_cuts(module, dict.fromkeys(module._parameters, 0))

    def run(
        self, module: nn.Module, forward: Forward, args: Any, kwargs: Any, axis: AxisComm, name: str
    ) -> Any:
        if axis.name != EXPERT:
            raise ValueError(
                f"{name} is cut over axis {axis.name!r}, but FSDP knows experts by an axis called "
                f"{EXPERT!r}; name it so in init_mesh"
            )
        own = vars(module)
        own[_EXCHANGED] = axis.size == 1
        result = forward(*args, **kwargs)
        if not own.pop(_EXCHANGED):
            raise ValueError(
                f"{name} has a part of its experts on each of {axis.size} ranks, and its forward "
                f"has exchanged no tokens; compute by exchanged(), or use transformers' experts "
                f'with experts_implementation="xla_fsdp"'
            )
        return result


def axis_of(module: nn.Module) -> tuple[AxisComm, int] | None:
    """Return the axis over which the experts of a module are cut, if over several ranks, and the
    number of rounds."""
    for applied in vars(module).get("_tensor_parallel", ()):
        if isinstance(applied.style, ExpertParallel) and applied.axis.size > 1:
            return applied.axis, applied.style.rounds or applied.axis.size
    return None


def exchanged(
    module: nn.Module,
    tokens: Tensor,
    experts: Tensor,
    weights: Tensor,
    compute: Compute,
    capacity: float | None = None,
) -> Tensor:
    """Return the sum of what its experts compute of each token.

    Args:
        module: whose experts may be cut by ``ExpertParallel``.
        tokens: [tokens, width], as many on every rank.
        experts: [tokens, choices], numbers of experts.
        weights: [tokens, choices].
        compute: computes rows, of this rank's experts, and multiplies by weights.
        capacity: see ``Routes.of``; of the tokens of each rank.

    Returns:
        [tokens, width] in the dtype of ``tokens``.
    """
    cut = axis_of(module)
    vars(module)[_EXCHANGED] = True
    total: int = module.num_experts  # type: ignore[assignment]
    if cut is None:
        routes = Routes.of(experts, total, capacity)
        rows = compute(routes.spread(tokens), routes, routes.weights_of_rows(weights))
        return routes.combine(rows).to(tokens.dtype)
    axis, rounds = cut
    if capacity is not None:
        return _to_experts(axis, tokens, experts, weights, compute, capacity, total)
    size = max(1, -(-len(tokens) // rounds))
    parts = zip(tokens.split(size), experts.split(size), weights.split(size), strict=True)
    return torch.cat([_to_all(axis, *part, compute, total) for part in parts])


def _to_all(
    axis: AxisComm, tokens: Tensor, experts: Tensor, weights: Tensor, compute: Compute, total: int
) -> Tensor:
    """Let each rank compute with its experts what tokens of all ranks give them."""
    own = total // axis.size
    numbers = axis.all_gather(experts.to(torch.int32), 0)
    numbers = numbers - axis.local_rank_on_device.to(torch.int32) * own
    is_own = (numbers >= 0) & (numbers < own)
    routes = Routes.kept_of(numbers, own, is_own, total)
    all_weights = routes.weights_of_rows(mappings.gather_to_parallel(weights, axis, 0))
    all_tokens = mappings.gather_to_parallel(tokens, axis, 0)
    summands = routes.combine(compute(routes.spread(all_tokens), routes, all_weights))
    return mappings.reduce_scatter(summands.to(tokens.dtype), axis, 0)


def _to_experts(
    axis: AxisComm,
    tokens: Tensor,
    experts: Tensor,
    weights: Tensor,
    compute: Compute,
    capacity: float,
    total: int,
) -> Tensor:
    """Send each expert's rows, at most as many as it takes of a rank, to the rank that has it.

    In a round for each rank: the compiler hides sends from rank to rank under the products of other
    rounds, and leaves an all-to-all blocking.
    """
    own = total // axis.size
    # Numbered from this rank's own on, so that the rows of a round are the same on every rank.
    ahead = (experts - axis.local_rank_on_device * own) % total
    routes = Routes.of(ahead, total, capacity)
    rounds = routes.spread(tokens).chunk(axis.size)
    received = [mappings.send(rows, axis, number) for number, rows in enumerate(rounds)]
    shares = _sent(axis, routes.weights_of_rows(weights))
    # Weights' gradients of all rounds are one product: each would be as large as the weight.
    even = Routes.even(own, len(rounds[0]) // own, tokens.device)._replace(joined={})
    computed = [compute(*each) for each in zip(received, [even] * axis.size, shares, strict=True)]
    found = torch.cat([mappings.send(rows, axis, -at) for at, rows in enumerate(computed)])
    return routes.combine(found).to(tokens.dtype)


def _sent(axis: AxisComm, weights: Tensor) -> Sequence[Tensor]:
    """Return the weights that come with the rows of each round, [rows, 1].

    By one small all-to-all: with sends of their own the compiler leaves larger collectives
    blocking that it hides otherwise.
    """
    rank, ranks = axis.local_rank_on_device, torch.arange(axis.size, device=weights.device)
    to_ranks = weights.view(axis.size, -1).index_select(0, (ranks - rank) % axis.size)
    of_ranks = mappings.all_to_all(to_ranks, axis, 0, 0)
    return of_ranks.index_select(0, (rank - ranks) % axis.size).unsqueeze(2).unbind()
