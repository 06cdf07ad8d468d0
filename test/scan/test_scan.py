"""Blocks that run as one loop: what is refused, randomness, states, programs. Two ranks."""

from __future__ import annotations

import copy
import pickle
import random
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common.garbage import collecting_elsewhere, live_tensors
from test.common.hlo import Instruction, Program
from test.common.scenarios import Scenarios, fsdp, make, message
from xla_fsdp import name_activation, one_rank_at_a_time
from xla_fsdp.scan.placeholder import InnerOutput

scenarios = Scenarios(__name__)
result = scenarios.result

WIDTH = 16


class Block(nn.Module):
    """A layer, with settings that a test can change."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0)
        self.scale = 0.5
        self.factors = {"default": [1.0], "other": [2.0]}
        self.config = SimpleNamespace(power=1, names=["lin"])
        self.register_buffer("shift", torch.zeros(WIDTH))

    def encode(self, x: Tensor) -> Tensor:
        return self.lin(x).square()

    def forward(self, x: Tensor, *others: Any) -> Any:
        hidden = name_activation(torch.tanh(self.lin(self.drop(x))), "hidden")
        factor = self.factors["default"][0] ** self.config.power
        return x + hidden * (self.scale * factor) + self.shift


class Net(nn.Module):
    """Three blocks, and a loop that a test can replace."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(depth)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, loop: Callable[..., Tensor] | None = None) -> Tensor:
        if loop is not None:
            return self.head(loop(self.blocks, x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def wrapped(
    change: Callable[[Any], None] = lambda model: None,
    block: Callable[[], nn.Module] = Block,
    depth: int = 3,
    **options: Any,
) -> Any:
    """A model with each block a unit; ``change`` sees it before."""

    def build() -> nn.Module:
        model = Net(block, depth)
        change(model)
        return model

    model = make(build)
    options = {"execute_sharding_on_init": False, **options}
    for index, each in enumerate(model.blocks):
        model.blocks[index] = fsdp(each, **options)
    return fsdp(model, **options)


def scanned(
    change: Callable[[Any], None] = lambda model: None,
    block: Callable[[], nn.Module] = Block,
    depth: int = 3,
    options: dict[str, Any] | None = None,
    **scan: Any,
) -> Any:
    """The same with its blocks as one loop."""
    from xla_fsdp import scan_blocks

    model = wrapped(change, block, depth, **(options or {}))
    scan_blocks(model.blocks, **scan)
    return model


def batch(seed: int = 1) -> Tensor:
    import torch_xla

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, WIDTH, generator=generator).to(torch_xla.device())


def step(model: Any, optimizer: Any, seed: int = 1, **kwargs: Any) -> Tensor:
    import torch_xla

    optimizer.zero_grad()
    loss = model(batch(seed), **kwargs).square().mean()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    return loss.detach()


class Turning(Block):
    """Of one kind or another."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        y = super().forward(x)
        return y if self.scale > 0.6 else torch.sin(y)


def take_turns(model: Any) -> None:
    for index, block in enumerate(model.blocks):
        block.scale = 0.5 + index % 2 / 4


# ---------------------------------------------------------------- refused when scanned


class WithScalar(Block):
    def __init__(self) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(x) * self.strength


def widen(model: Any) -> None:
    model.blocks[1].lin = nn.Linear(WIDTH, 2 * WIDTH)


def other_class(model: Any) -> None:
    model.blocks[1] = nn.Linear(WIDTH, WIDTH)


def half_buffer(model: Any) -> None:
    model.blocks[1].shift = model.blocks[1].shift.half()


def outside(model: Any) -> Any:
    """Rematerialized around the units, which are wrapped already."""
    from xla_fsdp import checkpoint_module, scan_blocks

    for block in model.blocks:
        checkpoint_module(block)
    return scan_blocks(model.blocks)


@scenarios.add
def refused(rank: int) -> dict[str, str]:
    from xla_fsdp import scan_blocks

    def twice() -> None:
        scan_blocks(scanned().blocks)

    def nested() -> None:
        blocks = [make(Block), make(Block)]
        blocks[1].lin = fsdp(blocks[1].lin)
        scan_blocks([fsdp(block) for block in blocks])

    def ignoring() -> None:
        blocks = [make(WithScalar) for _ in range(2)]
        scan_blocks([fsdp(block, ignored_params=[block.strength]) for block in blocks])

    def same_block() -> None:
        blocks = wrapped().blocks
        scan_blocks([blocks[0], blocks[0]])

    def other_options() -> None:
        blocks = [fsdp(make(Block)), fsdp(make(Block), compute_dtype=torch.bfloat16)]
        scan_blocks(blocks)

    def no_container() -> None:
        fsdp(make(Net), scan_layers="layers")

    return {
        "plain": message(lambda: scan_blocks(make(Net).blocks)),
        "empty": message(lambda: scan_blocks([])),
        "shape": message(partial(scanned, widen)),
        "class": message(partial(scanned, other_class)),
        "nested": message(nested),
        "buffer": message(partial(scanned, half_buffer)),
        "outside": message(lambda: outside(wrapped())),
        "twice": message(twice),
        "same": message(same_block),
        "ignoring": message(ignoring),
        "options": message(other_options),
        "remat": message(partial(scanned, remat="some")),
        "no_container": message(no_container),
    }


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("plain", ["NoLoopError: block 0 (Block) is not sharded", "scan_layers=True"]),
        ("empty", ["NoLoopError: there are no blocks"]),
        ("shape", ["block 1 differs from block 0", "lin.weight [32, 16], not lin.weight [16, 16]"]),
        ("class", ["block 1 differs from block 0: it is of class Linear, not Block"]),
        ("nested", ["block 1 holds units of its own (lin)"]),
        ("buffer", ["block 1 differs", "shift [16] torch.float16, not shift [16] torch.float32"]),
        ("outside", ["block 0 is rematerialized around its unit"]),
        ("twice", ["block 0 is scanned already"]),
        ("same", ["a block appears twice"]),
        ("ignoring", ["block 0 has parameters that its unit ignores (strength)"]),
        ("options", ["block 1 differs from block 0: its options are"]),
        ("remat", ["remat is 'some'", '"full"', '"none"']),
        ("no_container", ["scan_layers found no container layers"]),
    ],
)
def test_blocks_that_cannot_be_scanned_are_refused_at_once(what: str, said: list[str]) -> None:
    assert all(part in result("refused")[what] for part in said), result("refused")[what]


# ---------------------------------------------------------------- refused when they run


class Collecting(Block):
    """Puts its input into a list that it is given."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        others[0].append(x)
        return super().forward(x)


class Normalized(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(self.norm(x))


class InPlace(Block):
    def forward(self, x: Tensor, *others: Any) -> Tensor:
        x += self.lin(x)
        return x


class Pair(Block):
    def forward(self, x: Tensor, *others: Any) -> Any:
        y = super().forward(x)
        return y, y * 2


class Narrow(Block):
    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(x)[:, :4]


class Closing(Block):
    """Holds a tensor where nobody looks for one."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [torch.ones(WIDTH)]

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(x) + self.tables[0].to(x.device)


class Averaging(Block):
    """Changes a buffer by assigning another tensor."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        self.shift = 0.9 * self.shift + 0.1 * x.detach().mean(0)
        return super().forward(x)


class Numbering(Block):
    """Changes a number of its own."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        self.scale += 0.5
        return super().forward(x)


class Unfolding(Block):
    """Computes with a view that torch_xla makes on the CPU."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(x) + self.lin.weight.unfold(0, 2, 2).mean()


class Gamma(Block):
    """Calls an operator that torch_xla computes on the CPU."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(x) + torch.lgamma(self.lin.weight.exp()).mean()


class Distances(Block):
    """Calls an operator whose gradient torch_xla computes on the CPU."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        y = super().forward(x)
        return y + torch.cdist(y, self.lin.weight).mean()


class Bits(Block):
    """Computes with the bits of a parameter."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(x) + self.lin.weight.detach().view(torch.int32).float().mean()


class Leaving(Block):
    """Puts a tensor where its loop cannot see it."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        y = torch.tanh(self.lin(x))
        self.factors["loss"] = [y.mean()]
        return y


SUMS: dict[str, list[Tensor]] = {}  # by device


class SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        SUMS[str(grad.device)][-1].add_(grad.sum())
        return grad


class SummingGradients(Block):
    """Adds to a tensor of somebody else in backward."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return SumOfGradients.apply(torch.tanh(self.lin(x)))


class Summing(Block):
    """Adds to tensors of somebody else, in place: directly, by a view, and unseen by autograd."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        y = torch.tanh(self.lin(x))
        whole, row, hidden = SUMS[str(x.device)]
        whole.add_(y.detach().sum())
        row[1].add_(y.detach().sum(0))
        hidden.data.mul_(y.detach().mean())
        return y


def sums_of_others(block: type[Block]) -> tuple[str, list[Any]]:
    """What is said of blocks that sum, and the sums after an operator of the host computed all that
    is alive."""
    import torch_xla

    device = torch_xla.device()
    sums = SUMS[str(device)] = [torch.ones(n, device=device) for n in ((), (2, WIDTH), (3,))]
    said = message(lambda: scanned(block=block)(batch()).sum().backward())
    torch.lgamma(torch.ones(2, device=device))
    torch_xla.sync()
    return said, [each.cpu().unique().tolist() for each in sums]


class Hooking(Block):
    """Doubles a gradient by a hook."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        y = super().forward(x)
        y.register_hook(lambda grad: grad * 2)
        return y


class Retaining(Block):
    """Asks for the gradient of a tensor."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        y = super().forward(x)
        y.retain_grad()
        return y


class Differentiating(Block):
    """Computes a gradient, if there is one."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        y = super().forward(x)
        return y + torch.autograd.grad(y.sum(), [x], retain_graph=True)[0].detach()


class Noting(Block):
    """Leaves a tensor for whoever asks."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        self.drop.aux_loss = x.square().mean()
        return super().forward(x)


class Branching(Block):
    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(x) if (x > 0).any() else x


class Choosing(Block):
    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(x) + x[x[:, 0] > 0].sum()


class HostRandom(Block):
    def forward(self, x: Tensor, *others: Any) -> Tensor:
        with one_rank_at_a_time():  # not while the other rank is making its model
            factor = torch.rand(()).item()
        return super().forward(x) * factor


class Skipping(Block):
    """Is left out now and then."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(x) if random.random() < 2 else x


class Noisy(Block):
    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(x) if np.random.rand() < 2 else x


class Leaky(Block):
    """Has its number where a loop takes none."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return F.leaky_relu(super().forward(x), self.factors["default"][0])


class Deciding(Block):
    """Computes something else in each block."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        for _ in range(int(self.scale)):
            x = super().forward(x)
        return x


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


class Reversing(Block):
    """Has its number in backward alone."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return _ScaledGradient.apply(torch.tanh(self.lin(x)), self.factors["default"][0])


def set_scales(model: Any) -> None:
    for index, block in enumerate(model.blocks):
        block.scale = index + 1


def set_factors(model: Any) -> None:
    for index, block in enumerate(model.blocks):
        block.factors["default"] = [index / 10]


def add_host_tensor(model: Any) -> None:
    for block in model.blocks:
        block.lin.table = torch.ones(WIDTH)


def add_hook(model: Any) -> None:
    model.blocks[1].lin.register_forward_hook(lambda module, args, output: None)


def more(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x) * 2
    return x


def skipping_one(blocks: Any, x: Tensor) -> Tensor:
    first = blocks[0](x)
    return blocks[2](blocks[1](first, first))


def second_of(blocks: Any, x: Tensor) -> Tensor:
    kept = [x := block(x) for block in blocks]
    return kept[0] + kept[1]


def keeping_one(blocks: Any, x: Tensor) -> Tensor:
    for block in list(blocks)[:2]:
        x = block(x)
    return x + blocks[2](x)


def too_few(blocks: Any, x: Tensor) -> Tensor:
    for block in list(blocks)[:2]:
        x = block(x)
    return x


def skip(blocks: Any, x: Tensor) -> Tensor:
    return blocks[2](blocks[0](x))


def last_first(blocks: Any, x: Tensor) -> Tensor:
    return blocks[2](x)


def other_input(blocks: Any, x: Tensor) -> Tensor:
    blocks[0](x)
    return blocks[1](x)


def other_mask(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x, torch.ones(1, device=x.device))
    return x


def host_mask(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x, torch.ones(1))
    return x


def with_list(blocks: Any, x: Tensor) -> Tensor:
    found: list[Tensor] = []
    for block in blocks:
        x = block(x, found)
    return x


def with_cache(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x, {1, 2})
    return x


@scenarios.add
def refused_in_forward(rank: int) -> dict[str, str]:
    import torch_xla

    loops = (
        more, skipping_one, keeping_one, too_few, skip, last_first, other_input, other_mask,
        host_mask, with_cache,
    )  # fmt: skip
    model = scanned()
    found = {loop.__name__: message(partial(model, batch(), loop)) for loop in loops}
    for change in (add_hook, add_host_tensor):
        found[change.__name__] = message(partial(scanned(change), batch()))
    found["Leaky"] = message(partial(scanned(set_factors, Leaky), batch()))
    found["Deciding"] = message(partial(scanned(set_scales, Deciding), batch()))
    for block in (
        Normalized, InPlace, Pair, Narrow, Closing, Branching, Choosing, HostRandom, Averaging,
        Noting, Numbering, Leaving, Unfolding, Gamma, Bits, Skipping, Noisy, Hooking, Retaining,
        Differentiating,
    ):  # fmt: skip
        misused = scanned(block=block)
        found[block.__name__] = message(partial(misused, batch()))
        left = (misused.blocks[0].shift.sum().item(), hasattr(misused.blocks[0].drop, "aux_loss"))
        found["left by " + block.__name__] = str(left)
    found["Distances"] = message(lambda: scanned(block=Distances)(batch()).sum().backward())
    try:
        scanned(block=Gamma)(batch())
    except ValueError:
        torch_xla.sync()  # while the traceback is kept
    for block in (Summing, SummingGradients):
        found[block.__name__], sums = sums_of_others(block)
        found["left by " + block.__name__] = str(sums)
    reversing = scanned(set_factors, Reversing)
    found["Reversing"] = message(lambda: reversing(batch()).sum().backward())
    found["inner_only"] = message(lambda: model(batch(), second_of).sum().backward())
    found["Collecting"] = message(partial(scanned(block=Collecting), batch(), with_list))
    found["names"] = message(partial(scanned(remat=["lin", "middle"]), batch()))
    found["afterwards"] = str(tuple(model(batch()).shape))  # of the model that was misused
    return found


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("more", ["output of block 0 of 3 was used (by mul) before block 2 was called"]),
        ("skipping_one", ["block 1 was called with Placeholder(output of block 0", "besides"]),
        ("keeping_one", ["output of block 1 of 3 was used (by add) after the last block"]),
        ("too_few", ["output of block 1 of 3 was used (by linear) before"]),
        ("skip", ["block 2 of the scanned blocks was called where block 1 was expected"]),
        ("last_first", ["block 2 of the scanned blocks was called where block 0 was expected"]),
        ("other_input", ["block 1 was called with another tensor", "output of block 0"]),
        ("other_mask", ["block 1 was called with other arguments", "argument 1 is another tensor"]),
        ("host_mask", ["NoLoopError: ", "argument 1 in host memory", "before the loop"]),
        ("with_cache", ["NoLoopError: ", "argument 1 (set)", "use_cache=False"]),
        ("Leaky", ["block 1 differs from block 0", "factors.default.0 is 0.1, not 0.0"]),
        (
            "Deciding",
            ["block 1 differs from block 0", "scale is 2, not 1", "numbers in arithmetic"],
        ),
        ("add_hook", ["lin in a scanned block has hooks"]),
        ("add_host_tensor", ["NoLoopError: lin.table of a scanned block is in host memory"]),
        ("Collecting", ["changes a container", "argument 1[0]", "lost"]),
        ("Normalized", ["changes its buffer norm.running_mean", "BatchNorm"]),
        ("InPlace", ["changes its argument 0 in place", "x = x + y"]),
        ("Pair", ["must return one tensor", "returned"]),
        ("Narrow", ["[4, 16]", "returned [4, 4]"]),
        ("Closing", ["tensors of shapes [16] that are neither its arguments"]),
        ("Branching", ["asks for the values of a tensor (by __bool__)", "torch.where"]),
        ("Choosing", ["asks for the values of a tensor (by __getitem__)"]),
        ("HostRandom", ["draws random numbers on the host (by rand)", "device=x.device"]),
        ("Skipping", ["draws random numbers on the host (by random)"]),
        ("Noisy", ["draws random numbers on the host (by numpy.random)"]),
        ("Averaging", ["assigns a tensor or a number to its shift;", "lost"]),
        ("Noting", ["assigns a tensor or a number to its drop.aux_loss;", "lost"]),
        ("Numbering", ["assigns a tensor or a number to its scale;", "lost"]),
        ("Unfolding", ["calls unfold, which torch_xla computes on the host"]),
        ("Gamma", ["calls lgamma, which torch_xla computes on the host", "by other operators"]),
        ("Bits", ["calls view, which torch_xla computes on the host"]),
        ("Distances", ["by an operator that torch_xla computes on the host"]),
        ("Hooking", ["calls register_hook of a tensor", "torch.autograd.Function"]),
        ("Retaining", ["calls retain_grad of a tensor"]),
        ("Differentiating", ["NoLoopError: ", "calls grad of a tensor", "without gradients"]),
        ("Leaving", ["leaves a tensor of shape [] in a dict, a list or another object"]),
        ("Summing", ["ChangedOutsideError: ", "changes a tensor of shape [] in place that is"]),
        ("SummingGradients", ["ChangedOutsideError: ", "shape [3] in place", "or backward"]),
        ("left by Summing", ["[[1.0], [1.0], [1.0]]"]),
        ("left by SummingGradients", ["[[1.0], [1.0], [1.0]]"]),
        ("left by Averaging", ["(0.0, False)"]),
        ("left by Noting", ["(0.0, False)"]),
        (
            "Reversing",
            ["block 1 differs from block 0: it has other gradients", "autograd.Function"],
        ),
        ("inner_only", ["outputs of inner blocks of a loop, but not that of the last one"]),
        ("names", ["remat names middle", "Submodules of a block: lin, drop"]),
        ("afterwards", ["(4, 16)"]),
    ],
)
def test_forwards_that_a_loop_cannot_run_are_refused(what: str, said: list[str]) -> None:
    found = result("refused_in_forward")[what]
    assert all(part in found for part in said), found


# ---------------------------------------------------------------- gradients alone differ


class Stopping(Block):
    """Every second one lets no gradient through its layer."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        y = torch.tanh(self.lin(x))
        return x + (y.detach() if self.scale % 2 else y)


def _force(create_graph: bool, lin: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        z = x if create_graph and x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(torch.tanh(lin(z)).sum(), z, create_graph=create_graph)[0]


class Forcing(Block):
    """Every second one has no graph of the gradient that it computes."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return x - 0.3 * _force(self.scale % 2 == 0, self.lin, x)


@scenarios.add
def graphs(rank: int) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for block in (Stopping, Forcing):
        models = [build(set_scales, block, 4) for build in (wrapped, scanned)]
        for model in models:
            model(batch()).square().mean().backward()
        found[block.__name__] = [
            {
                name: None if param.grad is None else param.grad.cpu()
                for name, param in model.named_parameters()
            }
            for model in models
        ]
    return found


@pytest.mark.parametrize("block", ["Stopping", "Forcing"])
def test_blocks_whose_gradients_alone_differ_take_turns(block: str) -> None:
    plain, looped = result("graphs")[block]
    missing = [name for name, grad in plain.items() if grad is None]
    assert missing == [name for name, grad in looped.items() if grad is None] != []
    for name, grad in plain.items():
        torch.testing.assert_close(looped[name], grad)


# ---------------------------------------------------------------- numbers of the host


class Dividing(Block):
    """By a number of the host, which autograd saves."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return x + torch.tanh(self.lin(x)) / torch.tensor(2.0)


@scenarios.add
def dividing(rank: int) -> list[Tensor]:
    """A gradient of blocks one by one and of loops."""
    models = [wrapped(block=Dividing)]
    models += [scanned(block=Dividing, remat=remat) for remat in ("full", "none")]
    for model in models:
        model(batch()).square().mean().backward()
    return [model.blocks[0].lin.weight.grad.cpu() for model in models]


def test_a_loop_may_save_numbers_of_the_host() -> None:
    plain, *looped = result("dividing")
    for grad in looped:
        torch.testing.assert_close(grad, plain)


# ---------------------------------------------------------------- random numbers


class Masked(nn.Module):
    """Nothing but dropout of what a weight is multiplied with: gradients show the masks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.drop = nn.Dropout(0.5)
        self.twice = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(x * self.weight)
        return self.drop(y) if self.twice else y


def drop_twice(model: Any) -> None:
    """Every second block is of another kind."""
    for block in model.blocks[1::2]:
        block.twice = True


@scenarios.add
def masks(rank: int) -> dict[str, Any]:
    """The stream after the blocks, and its gradients, without the head."""
    import torch_xla

    found: dict[str, Any] = {}
    models = {
        "full": scanned(block=Masked, depth=2),
        "none": scanned(block=Masked, depth=2, remat="none"),
        "two kinds": scanned(drop_twice, block=Masked, depth=4),
    }
    for name, model in models.items():
        steps = []
        for _ in range(2):
            x = (batch().abs() + 1).repeat(8, 1).requires_grad_()
            y = x
            for block in model.blocks:
                y = block(y)
            y.sum().backward()
            steps.append((y.detach(), x.grad, x.detach()))
            torch_xla.sync()
        found[name] = [[t.cpu() for t in each] for each in steps]
    return found


@pytest.mark.parametrize("name", ["full", "none", "two kinds"])
def test_masks_differ_between_blocks_and_steps_and_are_the_same_in_backward(name: str) -> None:
    steps = result("masks")[name]
    most = 0.1 if name == "two kinds" else 0.45  # six masks, or two
    for output, grad, x in steps:
        torch.testing.assert_close(grad, output / x)  # 0, or what all blocks multiply it with
        assert (output != 0).float().mean() < most  # not the half of equal masks
        assert output.count_nonzero()
    assert not torch.equal(steps[0][0], steps[1][0])


class DropPath(nn.Module):
    """Leaves rows out, as in timm, and then numbers; nothing else changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.rate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        if self.rate == 0.0 or not self.training:
            return x
        kept = x.new_empty(len(x), 1).bernoulli_(1 - self.rate)
        return F.dropout(x * kept.div_(1 - self.rate), self.rate)


@scenarios.add
def drop_paths(rank: int) -> dict[str, Any]:
    """What blocks with rates of 0, 0.2, 0.4 and 0.6 let through, and its gradient."""
    import torch_xla

    from xla_fsdp import scan_blocks

    blocks = [fsdp(make(DropPath)) for _ in range(4)]
    for number, block in enumerate(blocks):
        block.module.rate = number / 5
    scan_blocks(blocks)
    x: Any = torch.ones(4000, WIDTH).to(torch_xla.device()).requires_grad_()
    y, kept = x, []
    for block in blocks:
        kept.append(y := block(y))
    y.sum().backward()
    found = {"kept": [each.detach().cpu() for each in kept], "grad": x.grad.cpu()}
    for block in blocks:
        block.eval()
    for block in blocks:
        y = block(y)
    return {**found, "evaluated": torch.equal(y.cpu(), found["kept"][-1])}


def test_rates_of_blocks_are_inputs_of_the_loop() -> None:
    found = result("drop_paths")
    assert found["evaluated"]
    torch.testing.assert_close(found["grad"], found["kept"][-1])
    through = 1.0
    for number, kept in enumerate(found["kept"]):
        through *= (1 - number / 5) ** 2
        values = kept.unique()
        assert values[-1].item() == pytest.approx(1 / through)
        assert len(values) == (1 if number == 0 else 2)
        assert (kept != 0).float().mean().item() == pytest.approx(through, abs=0.02)


# ---------------------------------------------------------------- what may change from step to step


@scenarios.add
def changes(rank: int) -> dict[str, Any]:
    """Losses of a scanned model and of one that runs block by block, while things change."""
    import torch_xla

    from xla_fsdp import scan_blocks

    found: dict[str, Any] = {}
    models = [wrapped(), wrapped()]
    scan = scan_blocks(models[1].blocks)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def compare(name: str) -> None:
        pairs = zip(models, optimizers, strict=True)
        found[name] = [step(model, optimizer).item() for model, optimizer in pairs]

    def change(act: Callable[[Any, int], None]) -> None:
        for model in models:
            for index, block in enumerate(model.blocks):
                act(block, index)
        torch_xla.sync()

    compare("at first")
    change(lambda block, index: setattr(block.module, "scale", 0.9))
    compare("a number of all blocks")
    change(lambda block, index: block.factors.update(default=[0.6]))
    compare("a number in a list in a dict")
    change(lambda block, index: setattr(block.config, "power", 3))
    compare("a number of a config")
    change(lambda block, index: block.shift.add_(index + 1))
    compare("buffers in place")
    change(lambda block, index: setattr(block.module, "shift", block.shift * 0.5))
    compare("buffers replaced")
    change(lambda block, index: block.lin.bias.requires_grad_(index == 2))
    compare("what is trained")
    for model in models:
        model.eval()
    compare("evaluation")
    with torch.no_grad():
        found["without gradients"] = [model(batch()).sum().item() for model in models]
        found["a cache"] = [model(batch(), with_cache).sum().item() for model in models]
    with torch.inference_mode():
        found["in inference mode"] = [model(batch()).sum().item() for model in models]
    found["gradient of the input"] = [_input_gradient(model) for model in models]
    scan.remove()
    found["removed"] = [model(batch(), more).sum().item() for model in models]
    return found


def _input_gradient(model: Any) -> float:
    x = batch().requires_grad_()
    model(x).square().sum().backward()
    assert x.grad is not None
    return x.grad.abs().sum().item()


def test_what_blocks_hold_may_change_between_steps() -> None:
    found = result("changes")
    assert len(found) == 13
    for name, (plain, looped) in found.items():
        assert looped == pytest.approx(plain, rel=1e-6), name
    losses = [found[name][0] for name in list(found)[:6]]
    assert len(set(losses)) == 6  # the changes matter


@scenarios.add
def methods(rank: int) -> list[dict[str, Tensor]]:
    """What a further method gives, and its gradients, after a forward: block by block and scanned,
    wrapped and in place."""
    import torch_xla

    from xla_fsdp import fully_shard, register_fsdp_forward_method, scan_blocks

    found = []
    for in_place in (False, True):
        for scan in (False, True):
            model = make(Net) if in_place else wrapped()
            if in_place:
                for each in (*model.blocks, model):
                    fully_shard(each)
            for block in model.blocks:
                register_fsdp_forward_method(block, "encode")
            if scan:
                scan_blocks(model.blocks)
            output = model(batch())
            x = model.blocks[1].encode(model.blocks[2].encode(output))
            x.sum().backward()
            grads = {name: param.grad for name, param in model.named_parameters()}
            torch_xla.sync()
            values = {"output": x.detach(), **grads}
            found.append(
                {
                    n: v.full_tensor().cpu() if hasattr(v, "full_tensor") else v.cpu()
                    for n, v in values.items()
                    if v is not None
                }
            )
    return found


def test_other_methods_of_scanned_blocks_run_by_themselves() -> None:
    wrapped_apart, wrapped_looped, apart, looped = result("methods")
    for plain, found in ((wrapped_apart, wrapped_looped), (apart, looped)):
        assert plain.keys() == found.keys()
        for name, value in plain.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def add_comm_hook(model: Any) -> None:
    from xla_fsdp import comm_hooks

    model.register_comm_hook(comm_hooks.DefaultState(), comm_hooks.reduce_scatter_hook)


def under_autocast(model: Any) -> Tensor:
    with torch.autocast("xla", dtype=torch.bfloat16):
        y = model(batch())
    return y.float()


def sharded_no_sync(model: Any) -> Tensor:
    with model.no_sync(sharded=True):
        model(batch(2)).square().mean().backward()
    return model(batch())


def checkpointed_around(model: Any) -> Tensor:
    from xla_fsdp import checkpoint_module

    return checkpoint_module(model)(batch())


def one_by_one_checkpointed(model: Any) -> Tensor:
    from xla_fsdp.scan import blocks_one_by_one

    with blocks_one_by_one():
        return checkpointed_around(model)


KINDS: dict[str, dict[str, Any]] = {
    "bf16 shards": {"before": lambda model: model.bfloat16()},
    "autocast": {"forward": under_autocast},
    "no_sync, sharded": {"forward": sharded_no_sync},
    "a hook instead of the reduction": {"after": add_comm_hook},
    "recomputed around all blocks": {"forward": checkpointed_around},
    "recomputed around blocks that run one by one": {"forward": one_by_one_checkpointed},
    "a larger loss of one rank": {"weight": True},
}


@scenarios.add
def kinds(rank: int) -> dict[str, Any]:
    """Gradients of models that run block by block, and as a loop."""
    import torch_xla

    found: dict[str, Any] = {}
    for name, kind in KINDS.items():
        both = []
        for build in (wrapped, scanned):
            model = build(kind.get("before", lambda model: None))
            kind.get("after", lambda model: None)(model)
            dtype = next(model.parameters()).dtype
            forward = kind.get("forward", lambda model, dtype=dtype: model(batch().to(dtype)))
            loss = forward(model).square().mean() * (rank + 1 if "weight" in kind else 1)
            loss.backward()
            grads = {name: param.grad for name, param in model.named_parameters()}
            torch_xla.sync()
            both.append({name: grad.cpu() for name, grad in grads.items()})
        found[name] = both
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_blocks_that_run_one_by_one(kind: str) -> None:
    plain, looped = result("kinds")[kind]
    assert plain.keys() == looped.keys()
    for name, grad in plain.items():
        torch.testing.assert_close(looped[name], grad, rtol=1e-5, atol=1e-6, msg=name)


# ---------------------------------------------------------------- outputs that are kept


@scenarios.add
def kept(rank: int) -> list[dict[str, Any]]:
    """What a caller, and hooks on blocks, keep of the outputs of blocks, and gradients through
    them: block by block and as a loop."""
    import torch_xla

    found = []
    for build in (wrapped, scanned):
        model, hooked = build(take_turns, Turning, 5), list[Tensor]()
        for block in model.blocks:
            block.module.register_forward_hook(partial(_keep, hooked))
        outputs = [batch()]
        for block in model.blocks:
            outputs.append(block(outputs[-1]))
        sum(each.square().mean() for each in (*outputs[2:], *hooked[:2])).backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.eval()
        with torch.no_grad():
            evaluated = [batch()]
            for block in model.blocks:
                evaluated.append(block(evaluated[-1]))
        torch_xla.sync()
        values = {"outputs": outputs, "hooked": hooked, "evaluated": evaluated}
        found.append(
            {
                **{name: [each.detach().cpu() for each in own] for name, own in values.items()},
                "grads": {name: grad.cpu() for name, grad in grads.items()},
                "types": {type(each) for each in outputs},
            }
        )
    return found


def _keep(kept: list[Tensor], module: nn.Module, args: Any, output: Tensor) -> None:
    kept.append(output)


def test_outputs_of_blocks_can_be_kept() -> None:
    single, looped = result("kept")
    assert looped["types"] <= {Tensor, InnerOutput}  # these refuse hooks
    for name in ("outputs", "hooked", "evaluated"):
        assert len(single[name]) == len(looped[name])
        for plain, found in zip(single[name], looped[name], strict=True):
            torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    assert single["grads"].keys() == looped["grads"].keys()
    for name, grad in looped["grads"].items():
        torch.testing.assert_close(grad, single["grads"][name], rtol=1e-5, atol=1e-6, msg=name)


# ---------------------------------------------------------------- states and copies


@scenarios.add
def states(rank: int) -> dict[str, Any]:
    """Two steps block by block and one as a loop, and the other way round, over a checkpoint."""
    from xla_fsdp import full_state_dict, load_checkpoint, save_checkpoint

    found: dict[str, Any] = {"names": [list(make_kind(kind)[0].state_dict()) for kind in (0, 1)]}
    for first in (0, 1):
        folder = shared_folder(rank)
        model, optimizer = make_kind(first)
        for seed in (1, 2):
            step(model, optimizer, seed)
        save_checkpoint(folder, model, optimizer, step=2)
        model, optimizer = make_kind(1 - first, seed=9)
        load_checkpoint(folder, model, optimizer)
        step(model, optimizer, 3)
        found[str(first)] = full_state_dict(model)
    return found


def make_kind(kind: int, seed: int = 3) -> tuple[Any, Any]:
    """Block by block, or as a loop over two kinds of blocks in stacks."""
    model = (partial(scanned, stacked=True) if kind else wrapped)(take_turns, Turning, 5)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def shared_folder(rank: int) -> str:
    from xla_fsdp.xla.host import exchange

    made = tempfile.mkdtemp() if rank == 0 else ""
    return exchange(made.encode())[0].decode()


def test_checkpoints_move_between_loops_and_single_blocks() -> None:
    found = result("states")
    assert found["names"][0] == found["names"][1]
    assert found["0"].keys() == found["1"].keys()
    for name, value in found["0"].items():
        torch.testing.assert_close(found["1"][name], value, rtol=1e-6, atol=1e-7, msg=name)


@scenarios.add
def copies(rank: int) -> dict[str, Any]:
    model = scanned()
    first = model(batch()).sum().item()
    found = {"copy": copy.deepcopy(model), "pickle": pickle.loads(pickle.dumps(model))}
    with torch.no_grad():
        model.blocks[0].lin.weight.zero_()
    return {
        "first": first,
        "changed": model(batch()).sum().item(),
        **{name: each(batch()).sum().item() for name, each in found.items()},
        "misused": {name: message(partial(each, batch(), more)) for name, each in found.items()},
    }


def test_copies_run_their_own_blocks_as_a_loop() -> None:
    found = result("copies")
    assert found["changed"] != found["first"] == found["copy"] == found["pickle"]
    assert all("before block 2 was called" in each for each in found["misused"].values())


# ---------------------------------------------------------------- programs


@scenarios.add
def programs(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for depth in (3, 6):
        model = scanned(depth=depth, gather_once_below=100)
        found[str(depth)] = operations(model)
    for remat in ("full", "none", ["lin"], ["hidden"]):
        model = scanned(remat=remat)
        found[str(remat)] = operations(model)
    found["one by one"] = operations(wrapped())
    return found


def operations(model: Any) -> dict[str, int]:
    """How often some operations are in the program of a step's gradients."""
    import torch_xla

    from xla_fsdp.xla.graph import lowered_hlo

    torch_xla.sync()  # nothing of what came before
    model(batch()).square().mean().backward()
    text = lowered_hlo([param.grad for param in model.parameters()])
    torch_xla.sync()
    kinds = ("while", "all-gather", "reduce-scatter", "dot", "tanh")
    return {kind: text.count(f" {kind}(") for kind in kinds}


def test_the_program_does_not_grow_with_depth() -> None:
    found = result("programs")
    assert found["3"] == found["6"]
    assert found["3"]["while"] == 2
    assert found["one by one"]["while"] == 0
    # Large: the first gather of each loop and one in its body; small: one. Then the head, twice.
    assert found["3"]["all-gather"] <= 2 * 2 + 1 + 2


@scenarios.add
def casts(rank: int) -> list[int]:
    """How often a forward in bf16 casts, with 3 and 6 blocks whose parameters are all small."""
    import torch_xla

    from xla_fsdp.xla.graph import lowered_hlo

    found = []
    for depth in (3, 6):
        options = {"compute_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16}
        model = scanned(depth=depth, options=options, gather_once_below=10**6)
        torch_xla.sync()  # nothing of what came before
        with torch.no_grad():
            found.append(lowered_hlo([model(batch())]).count(" convert("))
    return found


def test_small_parameters_are_cast_for_all_blocks_at_once() -> None:
    """Else 24 blocks of width 1024 have 0.9 MiB of code more."""
    of_3, of_6 = result("casts")
    assert of_3 == of_6 > 0


@scenarios.add
def gradients_of_blocks(rank: int) -> dict[str, list[str]]:
    """What the gradients of blocks are computed from, looking back until a slice or a barrier."""
    import torch_xla

    from xla_fsdp.xla.graph import lowered_hlo

    found: dict[str, list[str]] = {}
    for name, options in (("small", {}), ("large", {"gather_once_below": 0})):
        model = scanned(**options)
        torch_xla.sync()  # nothing of what came before
        model(batch()).square().mean().backward()
        program = Program(lowered_hlo([param.grad for param in model.blocks.parameters()]))
        torch_xla.sync()
        sources = program.sources(program.all("tuple")[-1], _is_looked_through)
        found[name] = sorted({each.op for each in sources})
    return found


def _is_looked_through(each: Instruction) -> bool:
    return each.op not in ("slice", "opt-barrier") and bool(each.operands)


def test_the_optimizers_operations_have_no_slice_that_differs_between_blocks() -> None:
    """With AdamW for 24 blocks of width 1024, 7 MiB of code more."""
    found = result("gradients_of_blocks")
    for ops in found.values():
        assert "opt-barrier" in ops
        assert "slice" not in ops


def test_named_activations_are_not_computed_again() -> None:
    found = result("programs")
    assert found["one by one"]["tanh"] == 3
    assert {remat: found[remat]["tanh"] for remat in ("full", "none", "['hidden']")} == {
        "full": 2, "none": 1, "['hidden']": 1,
    }  # fmt: skip
    # Products of the head (3) and, in a round, one forward and two backward.
    assert found["full"]["dot"] == found["['lin']"]["dot"] + 1 == found["none"]["dot"] + 1


@scenarios.add
def kept_once(rank: int) -> list[tuple[int, ...]]:
    """What is collected of blocks that begin with a product, which needs their input, too."""
    from xla_fsdp import scan_blocks

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    blocks = [fsdp(make(block)) for _ in range(2)]
    scan = scan_blocks(blocks, remat="none")
    x: Any = torch.ones(3, 4).to("xla").requires_grad_()
    for each in blocks:
        x = each(x)
    [program] = scan._loops.made.values()
    return [like.shape for like in program.loop.ys]


def test_an_input_that_a_policy_keeps_is_kept_once() -> None:
    assert result("kept_once") == [(3, 4), (3, 4)]  # it, and what tanh returned


@scenarios.add
def ordered(rank: int) -> dict[str, bool]:
    """Whether tensors stay what they are once others are computed."""
    from xla_fsdp.xla.ops import with_data_dependency

    tensors = [
        torch.tensor([1.5, -2.0, float("inf")]),
        torch.tensor([0.1, 3.0]).bfloat16(),
        torch.tensor(7.0).half(),
        torch.zeros(0, 4),
        torch.tensor([3, 4]),
    ]
    large, broken = torch.tensor([float("inf"), 1.0]), torch.tensor([float("nan"), 1.0])

    def same(*before: Tensor) -> bool:
        given = [each.to("xla") for each in tensors]
        found = with_data_dependency([each.to("xla") for each in before], given)
        pairs = list(zip(found, tensors, strict=True))
        assert all(a.dtype == b.dtype and a.shape == b.shape for a, b in pairs)
        return all(torch.equal(a.cpu(), b) for a, b in pairs)

    zero = torch.zeros(2).to("xla")
    [hint] = with_data_dependency([broken.to("xla")], [zero])
    return {
        "nothing": same(),
        "numbers": same(large, tensors[1]),
        "no numbers": same(broken, large),
        "integers": same(tensors[4]),
        "no elements": same(tensors[3]),
        "depends": bool((hint != 0).all()),
    }


def test_what_waits_for_others_keeps_its_value() -> None:
    assert all(result("ordered").values()), result("ordered")


@scenarios.add
def in_flight(rank: int) -> tuple[bool, list[float]]:
    """Trace a function that reads a tensor which is computed meanwhile, and ready when the function
    has been lowered."""
    import torch_xla

    from xla_fsdp.xla.loop import TensorSpec, trace_body

    lowering = torch_xla._XLAC.lowering

    class Slow(lowering.LoweringContext):
        def hlo(self) -> bytes:
            torch_xla._XLAC._xla_wait_device_ops()
            return super().hlo()

    torch_xla.sync()  # of what is pending on all ranks
    if rank != 0:  # as the class is replaced for all threads
        return True, []
    is_late = False
    for _ in range(10):  # until this thread is not kept from looking for so long
        x = y = torch.full((800, 800), 1 / 800, device="xla")
        for _ in range(20):
            y = y @ x
        outside = y.sum()
        torch_xla.sync()
        is_late = "Data Handle: None" in torch_xla._XLAC._get_xla_tensor_debug_info(outside)
        if is_late:
            break
    with mock.patch.object(lowering, "LoweringContext", Slow):
        body = trace_body(
            lambda given: [given[0] * outside], [TensorSpec((), torch.float32)], "late"
        )
    return is_late, [value.item() for value in body.captured.values()]


def test_a_body_reads_what_is_still_computed() -> None:
    is_late, captured = result("in_flight")
    assert is_late
    assert captured == pytest.approx([800], rel=1e-3)


@scenarios.add
def held(rank: int) -> dict[str, Any]:
    """Sync while somebody holds what a traced function computed."""
    import torch_xla

    from xla_fsdp.xla.loop import ChangedInPlaceError, TensorSpec, trace_body

    kept: dict[str, Tensor] = {}

    def changes(given: list[Tensor]) -> list[Tensor]:
        [x] = given
        x.add_(1)
        y = x * 2
        own = torch.arange(4, device="xla") + 1
        kept.update(input=x, view=y.view(2, 2), result=y, independent=own)
        return [y]

    def casts(given: list[Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            return [F.linear(given[0], given[1].clone().requires_grad_()).detach()]

    spec = TensorSpec((4, 4), torch.float32)
    found: dict[str, Any] = {}
    try:
        trace_body(changes, [TensorSpec((4,), torch.float32)], "failing")
    except ChangedInPlaceError as error:
        found["traceback"] = error.__traceback__  # held, as a handler does
        torch_xla.sync()
        found["error"] = str(error)
        del found["traceback"]
    for name, tensor in kept.items():
        try:
            found[name] = tensor.tolist()
        except RuntimeError as error:
            found[name] = str(error)
    with torch.autocast("xla", dtype=torch.bfloat16):
        trace_body(casts, [spec, spec], "casting")
        torch_xla.sync()
    return found


def test_a_sync_computes_nothing_that_a_failed_trace_left_behind() -> None:
    found = result("held")
    assert found["error"] == "inputs [0] were changed in place"
    assert found["independent"] == [1, 2, 3, 4]
    for name in ("input", "view", "result"):
        assert "tolist was called with a tensor that was never computed: it was" in found[name]


def _keeping(how: str, kept: list[Tensor], h: Tensor) -> Tensor:
    """Multiply ``h`` by 2, so that ``kept`` gets a tensor by the forward or backward."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            ctx.save_for_backward(h)
            return h * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            if how in KEPT_IN_BACKWARD:
                kept.append(KEPT_IN_BACKWARD[how](grad))
            if how == "alias":
                kept.extend(ctx.saved_tensors)
            if "raises" in how:
                raise ValueError("mine")
            return grad * 2

    if how == "hook":
        h.register_hook(kept.append)
    if how == "hook of a node":
        h.grad_fn.register_prehook(lambda grads: kept.extend(grads))
    if how == "hook inside a function":  # before mv, whose result no Python code sees
        h = torch.matmul(h, torch.ones(2, 4, 4, device="xla")).sum((0, 1)) + 0 * h
        node = h.grad_fn
        for _ in range(3):
            node = node.next_functions[0][0]
        assert node.name() == "MvBackward0"
        node.register_prehook(kept.extend)
    if how == "alias of a view":  # of what a linear layer computes in two dims
        y = F.linear(h.expand(3, 1, 4), torch.ones(5, 4, device="xla")).sin()
        kept.append(y.grad_fn._saved_self)
    if how == "view of views":  # the one between is made unseen
        kept.append(torch.atleast_3d(h))
    if how == "view and its base":
        kept.extend([h.view(2, 2), h])
    if how == "graph":
        kept.append(F.linear(h, h.detach()[None]).softmax(0))
    if how == "inference":
        with torch.inference_mode():
            kept.append(h.detach() + 1)
    return Doubled.apply(h)


KEPT_IN_BACKWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "kept raises": lambda grad: grad,
    "kept": lambda grad: grad,
    "used raises": lambda grad: grad * 3,
    "data raises": lambda grad: grad.data,
    "view raises": lambda grad: grad.view(2, 2),
}


KEPT_OTHERWISE = (
    "hook", "hook of a node", "hook inside a function", "view of views", "view and its base",
    "graph", "inference",
)  # fmt: skip
ALIASES = ("alias", "alias of a view")  # of what autograd has saved


@scenarios.add
def held_in_backward(rank: int) -> dict[str, Any]:
    """Sync while somebody holds what the backward in a traced function computed."""
    import torch_xla

    from xla_fsdp.xla.loop import TensorSpec, trace_body

    def kept_by(how: str) -> list[str]:
        kept: list[Tensor] = []
        held: list[BaseException] = []

        def body(given: list[Tensor]) -> list[Tensor]:
            with torch.enable_grad():
                x = given[0].clone().requires_grad_()
                loss = _keeping(how, kept, x * 3).sum()
                return list(torch.autograd.grad(loss, x, given[1]))

        try:
            trace_body(body, [TensorSpec((4,), torch.float32), TensorSpec((), torch.float32)], how)
        except ValueError as error:
            held.append(error)
        torch_xla.sync()
        return [type(error).__name__ for error in held] + list(map(_value_or_error, kept))

    return {how: kept_by(how) for how in (*KEPT_IN_BACKWARD, *KEPT_OTHERWISE, *ALIASES)}


def _value_or_error(tensor: Tensor) -> str:
    try:
        return str(tensor.tolist())
    except RuntimeError as error:
        return str(error)


def test_a_sync_computes_nothing_that_a_backward_in_a_trace_left_behind() -> None:
    for how, found in result("held_in_backward").items():
        assert ("ValueError" in found) == ("raises" in how), how
        said = "never computed: it was" if how not in ALIASES else "Trying to access XLA data"
        assert len(found) > 0, how
        assert said in found[-1], how


def test_what_only_cycles_hold_is_not_left_while_another_thread_collects() -> None:
    from xla_fsdp.scan.tracing import MadeTensors

    with MadeTensors() as made:
        cycle: list[Any] = [torch.zeros(1) + 1]
    cycle.append(cycle)
    with collecting_elsewhere():
        del cycle
        assert made.problem() is None


def _with_dropout_around(blocks: Any, x: Tensor) -> Tensor:
    x = F.dropout(x)
    for block in blocks:
        x = block(x)
    return F.dropout(x)


@scenarios.add
def steady(rank: int) -> dict[str, Any]:
    """What a step with dropout before, in and after the loop compiles and keeps."""
    import torch_xla.debug.metrics as met

    from xla_fsdp.distributed.garbage import collect_garbage
    from xla_fsdp.xla.host import exchange

    collect_garbage()  # of other scenarios

    def with_dropout(model: Any) -> None:
        for block in model.blocks:
            block.drop.p = 0.5

    model = scanned(with_dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts, alive = [], []
    for seed in range(4):
        step(model, optimizer, seed, loop=_with_dropout_around)
        exchange(b"")  # so that neither rank is inside a step
        counts.append(met.metric_data("CompileTime")[0])
        exchange(b"")
        alive.append(live_tensors())
    return {"compilations": counts, "alive": alive}


def test_later_steps_compile_and_keep_nothing_new() -> None:
    found = result("steady")
    assert found["compilations"][1] == found["compilations"][-1]
    assert found["alive"][1] == found["alive"][-1]


# ---------------------------------------------------------------- loops that come by themselves


def with_mask(blocks: Any, x: Tensor) -> Tensor:
    mask = torch.ones(1, device=x.device)
    for block in blocks:
        x = block(x, mask)
    return x


def changing_mask(blocks: Any, x: Tensor) -> Tensor:
    mask = torch.ones(1, device=x.device)
    for block in blocks:
        x = block(x, mask)
        mask.add_(1)
    return x


def telling(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
        with torch.no_grad():
            block.latest_mean = x.mean()
    return x


def calling_a_function(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = _ScaledGradient.apply(block(x), 2.0)
    return x


def under_other_modes(blocks: Any, x: Tensor) -> Tensor:
    for number, block in enumerate(blocks):
        with torch.autocast("xla", dtype=torch.bfloat16, enabled=number == 1):
            x = block(x)
    return x.float()


def asking_for_graphs(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
        x = x * (2 if x.requires_grad else 3)
    return x


def with_gradients(blocks: Any, x: Tensor) -> Tensor:
    """Of the blocks, with a graph."""
    x = x.detach().requires_grad_()
    y = x
    for block in blocks:
        y = block(y)
    return y + torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]


def failing(blocks: Any, x: Tensor) -> Tensor:
    for block in list(blocks)[:2]:
        x = block(x)
    raise KeyError("of the forward")


def twice_each(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(block(x))
    return x


class Multiplying(Block):
    """Computes with what it is given."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(x) * (others[0] if others else 1)


class Counting(Block):
    """Counts in a container of its own, how often it was called."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        self.factors["calls"] = [*self.factors.get("calls", []), 1.0]
        return super().forward(x)


def recomputed(model: Any) -> None:
    from xla_fsdp import checkpoint_module

    for block in model.blocks:
        checkpoint_module(block)


def freeze_first(model: Any) -> None:
    model.blocks[0].requires_grad_(False)


def share_layer(model: Any) -> None:
    for block in model.blocks[1:]:
        block.lin.weight = model.blocks[0].lin.weight


def other_buffer(model: Any) -> None:
    model.blocks[1].shift += 0.5


def drop_some(model: Any) -> None:
    for block in model.blocks:
        block.drop.p = 0.5


def _hooked(hook: Callable[..., Any]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for block in model.blocks:
            block.register_forward_hook(hook)

    return change


def _keep_first(module: Any, args: Any, output: Tensor) -> None:
    vars(module).setdefault("kept", output)


def _read(module: Any, args: Any, output: Tensor) -> None:
    module.factors["calls"] = [*module.factors.get("calls", []), output.sum().item()]


HOOKS: dict[str, Callable[..., Any]] = {
    "idle_hooks": lambda module, args, output: None,
    "changing_hooks": lambda module, args, output: output * 0.5,
    "other_output_hooks": lambda module, args, output: args[0],
    "keeping_hooks": _keep_first,
    "reading_hooks": _read,
}


BY_THEMSELVES: dict[str, tuple[Any, Any, Any]] = {  # by name: loop, block, change
    **{loop.__name__: (loop, Multiplying, None) for loop in (
        more, skipping_one, second_of, keeping_one, too_few, skip, last_first, other_input,
        other_mask, with_mask, with_cache, changing_mask, telling, calling_a_function,
        under_other_modes, asking_for_graphs, failing, twice_each, with_gradients,
    )},
    **{block.__name__: (None, block, None) for block in (
        Block, Normalized, InPlace, Pair, Averaging, Numbering, Unfolding, Gamma, Distances,
        Leaving, Hooking, Noting, Branching, Skipping, Counting, Closing,
    )},
    **{change.__name__: (None, Block, change) for change in (
        add_hook, freeze_first, share_layer, other_buffer, set_factors, set_scales,
    )},
    **{name: (None, Block, _hooked(hook)) for name, hook in HOOKS.items()},
    "Collecting": (with_list, Collecting, None),
    "Deciding": (None, Deciding, set_scales),
    "Reversing": (None, Reversing, set_factors),
    "Stopping": (None, Stopping, set_scales),
}  # fmt: skip
QUICK_BY_THEMSELVES = {
    "with_mask", "more", "keeping_one", "changing_mask", "telling", "calling_a_function", "Block",
    "Counting", "Distances", "Reversing", "freeze_first", "failing", "with_gradients", *HOOKS,
}  # fmt: skip


SAID = {
    "second_of": "no loop, as the forward keeps the output of block 0",
    "skip": "no loop, as block 1 was left out, or another called twice",
}


def _trained(model: Any, loop: Any) -> tuple[list[Any], str, list[Any]]:
    """Losses and gradients of two steps, or the error; why blocks run one by one; their state."""
    import torch_xla

    from xla_fsdp.fsdp.explain import lines_of

    found: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def trained(seed: int) -> None:
        loss = step(model, optimizer, seed, **({} if loop is None else {"loop": loop}))
        grads = [(name, param.grad) for name, param in model.named_parameters()]
        found.append([loss.item(), *((n, None if g is None else g.cpu()) for n, g in grads)])

    for seed in (1, 2):
        said = message(partial(trained, seed))
        torch_xla.sync()
        if said:
            found.append(said)
    state = [(block.scale, block.factors.get("calls")) for block in model.blocks]
    return found, lines_of(model)[-1], state


def _both_ways(names: set[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        loop, block, change = BY_THEMSELVES[name]

        def build(model: Any, change: Any = change) -> None:
            recomputed(model)
            if change is not None:
                change(model)

        found[name] = [
            _trained(wrapped(build, block, scan_layers=how), loop) for how in (False, "auto")
        ]
    return found


@scenarios.add
def by_themselves(rank: int) -> dict[str, Any]:
    return _both_ways(QUICK_BY_THEMSELVES)


@scenarios.add
def others_by_themselves(rank: int) -> dict[str, Any]:
    return _both_ways(BY_THEMSELVES.keys() - QUICK_BY_THEMSELVES)


def _check_both_ways(plain: Any, found: Any) -> None:
    assert len(found[0]) == len(plain[0])
    for one, other in zip(plain[0], found[0], strict=True):
        if isinstance(one, str) or isinstance(other, str):
            assert one == other
            continue
        torch.testing.assert_close(other[0], one[0], rtol=1e-5, atol=1e-6)
        for (name, grad), (_, its) in zip(one[1:], other[1:], strict=True):
            torch.testing.assert_close(its, grad, rtol=1e-5, atol=1e-6, msg=name)
    assert found[2] == plain[2]


@pytest.mark.parametrize("name", sorted(QUICK_BY_THEMSELVES - {"calling_a_function"}))
def test_what_cannot_be_a_loop_runs_one_by_one(name: str) -> None:
    _check_both_ways(*result("by_themselves")[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BY_THEMSELVES.keys() - QUICK_BY_THEMSELVES))
def test_what_cannot_be_a_loop_runs_one_by_one_in_full(name: str) -> None:
    found = result("others_by_themselves")[name]
    _check_both_ways(*found)
    assert SAID.get(name, "") in found[1][1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Block", "blocks: 3 of 3 run as a loop."),
        ("with_mask", "blocks: 3 of 3 run as a loop."),
        ("idle_hooks", "blocks: 3 of 3 run as a loop."),  # transformers has such
        ("changing_hooks", "no loop, as "),
        ("more", "no loop, as the forward uses the output of block 0"),
        ("keeping_one", "no loop, as the forward uses the output of block 1"),
        ("changing_mask", "no loop, as block 1 was called with other arguments than block 0"),
        ("Counting", "no loop, as a scanned block changes a list, a dict or an object"),
        ("Distances", "no loop, as "),
        ("Reversing", "no loop, as block 1 differs from block 0: it has other gradients"),
        ("freeze_first", "no loop, as other parameters are trained in block 1 than in block 0"),
        ("with_gradients", "no loop, as gradients are differentiated again"),
    ],
)
def test_explain_tells_why_blocks_run_one_by_one(name: str, said: str) -> None:
    assert said in result("by_themselves")[name][1][1]


def test_a_function_that_a_loop_would_hide_from_autograd_is_refused() -> None:
    said = result("by_themselves")["calling_a_function"][1][0][0]
    assert "an autograd.Function was called with the output of block 0" in said
    assert "Give scan_layers=False" in said


@scenarios.add
def unasked(rank: int) -> dict[str, str]:
    """How blocks run by default, and what second gradients through dropout raise."""
    from xla_fsdp.fsdp.explain import lines_of

    def drop_all(model: Any) -> None:
        recomputed(model)
        drop_some(model)

    found = {}
    for name, change, depth, options in (
        ("seven", recomputed, 7, {}),
        ("eight", recomputed, 8, {}),
        ("not wanted", recomputed, 8, {"scan_layers": False}),
        ("not recomputed", lambda model: None, 8, {}),
    ):
        model = wrapped(change, depth=depth, **options)
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found[name] = lines_of(model)[-1]
    model = wrapped(drop_all, scan_layers="auto")
    found["dropout"] = message(lambda: model(batch(), loop=with_gradients).sum().backward())
    inputs: list[Any] = []

    def noting(blocks: Any, x: Tensor) -> Tensor:
        x = x * 2
        inputs.append(weakref.ref(x))
        for block in blocks:
            x = block(x)
        return x

    loss = wrapped(recomputed, scan_layers="auto")(batch(), loop=noting).sum()
    loss.backward()
    found["input"] = "alive" if inputs[0]() is not None else "freed"
    return found


def test_eight_blocks_that_are_recomputed_are_a_loop_by_default() -> None:
    found = result("unasked")
    assert found["eight"] == "blocks: 8 of 8 run as a loop."
    for name in ("seven", "not wanted"):
        assert found[name] == "blocks: may run as a loop (scan_blocks)."
    assert found["not recomputed"].startswith("blocks: no loop, as block 0 is not recomputed")


@scenarios.add
def no_loop_later(rank: int) -> dict[str, Any]:
    """Parameters after steps, of which the fourth ends the loop of the others."""
    from xla_fsdp import compile_step, full_state_dict, scan_blocks

    def trained(end: str, *, compiled: bool) -> Any:
        model = wrapped(recomputed, scan_layers="auto" if end == "by a hook" else False)
        scan = None if end == "by a hook" else scan_blocks(model.blocks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(x: Tensor) -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        replayed = compile_step(train, state=[model, optimizer], check=1)
        for number in range(10):
            hook = None
            if number == 3 and scan is None:
                hook = model.blocks[1].register_forward_pre_hook(_halve)
            elif number == 3:
                scan.remove()
            (replayed if compiled else train)(batch())
            if hook is not None:
                hook.remove()
        values = {key: each.cpu() for key, each in full_state_dict(model).items()}
        return values, replayed.replays if compiled else 0

    ends = ("by a hook", "by hand")
    return {end: [trained(end, compiled=each) for each in (False, True)] for end in ends}


def _halve(module: Any, args: Any) -> Any:
    return (args[0] * 0.5,)


@pytest.mark.parametrize("end", ["by a hook", "by hand"])
def test_a_compiled_step_follows_a_loop_that_ends(end: str) -> None:
    (plain, _), (compiled, replays) = result("no_loop_later")[end]
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)
    assert replays >= 2


def test_a_loss_whose_graph_is_kept_keeps_no_activations_of_a_loop() -> None:
    assert result("unasked")["input"] == "freed"


def test_second_gradients_through_dropout_in_a_loop_say_what_to_do() -> None:
    said = result("unasked")["dropout"]
    assert "a gradient was differentiated again" in said
    assert "scan_layers=False" in said
