"""Blocks that do something to their arguments, and callers that look at these afterwards.

A case is a pair of functions: ``inside(block, ...)`` is the forward of a block with one linear
layer, ``outside(block, h)`` calls it for ``h`` [ROWS, WIDTH], which needs a gradient, and returns
tensors and facts (comparable values) that must be the same with and without FSDP.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

ROWS = 4
WIDTH = 6

Seen = tuple[list[Tensor], list[Any]]


@dataclass(frozen=True)
class Case:
    inside: Callable[..., Any]
    outside: Callable[[nn.Module, Tensor], Seen]


CASES: dict[str, Case] = {}


def _inside_of(outside: Callable[[nn.Module, Tensor], Seen]) -> Callable[..., Any]:
    """Decorate the ``inside`` of a case, which gets the name of that function."""

    def add(inside: Callable[..., Any]) -> Callable[..., Any]:
        CASES[outside.__name__.strip("_")] = Case(inside, outside)
        return inside

    return add


class Block(nn.Module):
    """Runs the ``inside`` of a case."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return CASES[self.name].inside(self, *args, **kwargs)


class Around(nn.Module):
    """A block in a block, with the same arguments."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Model(nn.Module):
    """Runs the ``outside`` of all cases, or of those named."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.first = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names or CASES})
        self.blocks = nn.ModuleDict({name: Block(name) for name in names or CASES})

    def forward(self, x: Tensor) -> dict[str, Seen]:
        return {
            name: CASES[name].outside(block, torch.tanh(self.first[name](x)))
            for name, block in self.blocks.items()
        }


def loss_of(seen: dict[str, Seen]) -> Tensor:
    """Return the sum of the squares of all tensors, each with a weight of its own."""
    tensors = [tensor for tensors, _ in seen.values() for tensor in tensors]
    return torch.stack(
        [(1 + at % 5) * each.float().square().mean() for at, each in enumerate(tensors)]
    ).sum()


# ---------------------------------------------------------------- containers


def _replaced_in_dict(block: nn.Module, h: Tensor) -> Seen:
    other = h * 2
    given = {"x": h, "other": other}
    y = block(given)
    return [y, *given.values(), h], [list(given), given["other"] is other, given["x"] is h]


@_inside_of(_replaced_in_dict)
def _(block: Any, given: dict[str, Tensor]) -> Tensor:
    given["x"] = torch.relu_(block.lin(given["x"]))
    return given["x"] + given["other"]


def _added_and_removed(block: nn.Module, h: Tensor) -> Seen:
    given = {"a": h, "b": h + 1, "c": h - 1}
    y = block(h, given=given)
    return [y, *given.values()], [list(given), given["b"] is h]


@_inside_of(_added_and_removed)
def _(block: Any, x: Tensor, given: dict[str, Tensor]) -> Tensor:
    a, b = given.pop("a"), given["b"]
    del given["b"]
    given["new"] = block.lin(a)
    given["b"] = x
    return given["new"] * b


def _list_changed_in_many_ways(block: nn.Module, h: Tensor) -> Seen:
    given = [h, h * 2, h * 3]
    last = given[2]
    y = block(given, h)
    return [y, *given], [len(given), given[0] is last, given[1] is h, given[3] is h]


@_inside_of(_list_changed_in_many_ways)
def _(block: Any, given: list[Tensor], x: Tensor) -> Tensor:
    given.reverse()
    given.insert(1, x)
    given[2] = block.lin(given[2])
    return given[0] + given[2]


def _state_in_and_out(block: nn.Module, h: Tensor) -> Seen:
    state = {"h": h * 0.5, "kept": h * 0.25}
    kept = state["kept"]
    x, found = block(h, state)
    x, found = block(x, found)
    found["h"] = found["h"] * 2
    return [x, state["h"], state["kept"]], [found is state, state["kept"] is kept]


@_inside_of(_state_in_and_out)
def _(block: Any, x: Tensor, state: dict[str, Tensor]) -> Any:
    state["h"] = torch.tanh(block.lin(x) + state["h"])
    return x + state["h"] * state["kept"], state


@dataclass
class State:
    h: Tensor
    more: Tensor | None = None
    nested: list[Any] = field(default_factory=list)


def _dataclass_changed(block: nn.Module, h: Tensor) -> Seen:
    state = State(h, nested=[State(h * 2)])
    inner = state.nested[0]
    y = block(state)
    more: Any = state.more
    facts = [state.nested[0] is inner, state.h is h, inner.h is h, len(state.nested)]
    return [y, more, inner.h, *state.nested[1:]], facts


@_inside_of(_dataclass_changed)
def _(block: Any, state: State) -> Tensor:
    state.more = block.lin(state.h)
    state.nested.append(state.more * 2)
    state.nested[0].h, state.h = state.h, state.nested[0].h
    return state.more + state.h


def _other_kinds(block: nn.Module, h: Tensor) -> Seen:
    kinds = OrderedDict(a=h, b=h * 2), defaultdict(list, {1: [h]}), deque([h, h * 2], maxlen=2)
    y = block(*kinds)
    ordered, by_default, queue = kinds
    facts = [list(ordered), list(by_default), ordered["b"] is h, by_default[2][0] is h]
    return [y, *ordered.values(), *by_default[1], *by_default[2], *queue], facts


@_inside_of(_other_kinds)
def _(block: Any, ordered: Any, by_default: Any, queue: deque[Tensor]) -> Tensor:
    ordered["b"] = ordered["a"]
    ordered.move_to_end("a")
    ordered["a"] = block.lin(ordered["a"])
    by_default[2].append(by_default[1][0])
    by_default[1][0] = queue[1]
    queue.append(ordered["a"] * 2)
    return ordered["a"] * queue[0]


Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Frozen:
    h: Tensor
    found: list[Tensor]


def _lists_in_what_cannot_change(block: nn.Module, h: Tensor) -> Seen:
    pair, frozen = Pair(h, [h * 2]), Frozen(h, [])
    given = [pair, frozen, (h, {"h": h})]
    y = block(given, pair)
    facts = [given[0] is pair, given[1] is frozen, frozen.found[0] is h, given[2][0] is h]
    return [y, *pair.right, *frozen.found, given[2][1]["h"]], facts


@_inside_of(_lists_in_what_cannot_change)
def _(block: Any, given: list[Any], pair: Pair) -> Tensor:
    y = block.lin(pair.left)
    pair.right[0] = y * 2
    given[1].found.extend([given[1].h, y])
    given[2][1]["h"] = y * 3
    return y if given[0].left is pair.left and given[0].right is pair.right else y * 0


class Registered:
    """A container of its own kind that pytree knows."""

    def __init__(self, h: Tensor) -> None:
        self.h = h
        self.log: list[Tensor] = []


pytree.register_pytree_node(
    Registered, lambda each: ([each.h], None), lambda parts, _: Registered(*parts)
)


class Unknown:
    """An object that nobody looks into."""

    def __init__(self, h: Tensor) -> None:
        self.h = self.y = h


def _instances(block: nn.Module, h: Tensor) -> Seen:
    registered, unknown, tensors = Registered(h), Unknown(h), {h}
    y = block(registered, unknown, tensors, (each for each in [h, h]))
    facts = [registered.log[0] is h, len(tensors), unknown.h is h]
    return [y, registered.h, *registered.log, unknown.y], facts


@_inside_of(_instances)
def _(block: Any, registered: Registered, unknown: Unknown, tensors: Any, given: Any) -> Tensor:
    registered.log.append(registered.h)
    weight = block.lin.weight
    registered.h = block.lin(registered.h)
    unknown.y = torch.tanh(unknown.h.to(weight.dtype) @ weight)
    tensors.add(unknown.y)
    return registered.h + sum(given)


def _holds_itself(block: nn.Module, h: Tensor) -> Seen:
    given: dict[str, Any] = {"h": h}
    given["self"] = [given]
    y = block(given)
    return [y, given["h"], given["y"]], [given["self"][0] is given]


@_inside_of(_holds_itself)
def _(block: Any, given: dict[str, Any]) -> Tensor:
    given["self"][0]["y"] = block.lin(given["h"])
    return given["y"] * given["h"]


def _collected(block: nn.Module, h: Tensor) -> Seen:
    found: list[Tensor] = []
    x = h
    for _ in range(3):
        x = block(x, found)
    return [x, *found], [len(found), found[0] is h]


@_inside_of(_collected)
def _(block: Any, x: Tensor, found: list[Tensor]) -> Tensor:
    found.append(x)
    found.append(block.lin(x))
    return torch.tanh(found[-1])


def _raised(block: nn.Module, h: Tensor) -> Seen:
    given, changed = {"h": h}, h * 2
    with contextlib.suppress(StopIteration):
        block(given, changed)
    return [*given.values(), changed], [list(given), given["h"] is h]


@_inside_of(_raised)
def _(block: Any, given: dict[str, Tensor], changed: Tensor) -> Tensor:
    given["y"] = given["h"] + 1
    changed.mul_(3)
    raise StopIteration


# ---------------------------------------------------------------- changed in place


def _accumulator(block: nn.Module, h: Tensor) -> Seen:
    total = torch.zeros((), device=h.device)
    y = block(h, total)
    y = block(y, total)
    return [y, total], []


@_inside_of(_accumulator)
def _(block: Any, x: Tensor, total: Tensor) -> Tensor:
    y = torch.tanh(block.lin(x))
    total.add_(y.square().mean())
    return y


def _without_gradient(block: nn.Module, h: Tensor) -> Seen:
    count = torch.arange(ROWS, device=h.device)
    mask = torch.zeros(ROWS, 1, dtype=torch.bool, device=h.device)
    statistics, on_host = torch.zeros(WIDTH, device=h.device), torch.zeros(3)
    y = block(h, count, mask, {"statistics": statistics, "on host": on_host})
    return [y, count, mask, statistics, on_host.to(h.device)], []


@_inside_of(_without_gradient)
def _(block: Any, x: Tensor, count: Tensor, mask: Tensor, given: Any) -> Tensor:
    y = block.lin(x)
    count += 2
    mask.logical_not_()
    given["on host"][1] = 5
    with torch.no_grad():
        given["statistics"].copy_(y.mean(0))
    given["statistics"].data.mul_(2)
    return y * mask * count[:, None]


def _without_grad_mode(block: nn.Module, h: Tensor) -> Seen:
    leaf = torch.ones(WIDTH, device=h.device, requires_grad=True)
    other = h * 2
    y = block(h, leaf, other)
    return [y, leaf * h, other], [leaf.is_leaf]


@_inside_of(_without_grad_mode)
def _(block: Any, x: Tensor, leaf: Tensor, other: Tensor) -> Tensor:
    with torch.no_grad():
        leaf.mul_(3)
        other.add_(1)
    return block.lin(x) + leaf + other


def _part_of_a_tensor(block: nn.Module, h: Tensor) -> Seen:
    whole = h * 2
    y = block(whole[1:3])
    return [y, whole], []


@_inside_of(_part_of_a_tensor)
def _(block: Any, x: Tensor) -> Tensor:
    x[0] = block.lin(x[1].clone())
    return x * 2


def _overwritten(block: nn.Module, h: Tensor) -> Seen:
    x = h * 2
    y = block(x)
    return [y, x], []


@_inside_of(_overwritten)
def _(block: Any, x: Tensor) -> Tensor:
    y = block.lin(torch.tanh(x))
    x.copy_(y)
    return y * x


# ---------------------------------------------------------------- shared memory


def _twice_the_same(block: nn.Module, h: Tensor) -> Seen:
    x = h * 2
    y = block(x, x, x=x)
    return [y, x], []


@_inside_of(_twice_the_same)
def _(block: Any, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    a.add_(block.lin(x.clone()))
    return b * x if a is b and b is x else b * 0


def _tensor_and_view(block: nn.Module, h: Tensor) -> Seen:
    x = h * 2
    y = block(x, {"view": x.view(-1)})
    return [y, x], []


@_inside_of(_tensor_and_view)
def _(block: Any, x: Tensor, given: dict[str, Tensor]) -> Tensor:
    y = block.lin(x.clone())
    given["view"][2:7].mul_(3)
    x += y
    return given["view"].view_as(x) * y


def _two_views(block: nn.Module, h: Tensor) -> Seen:
    x = h * 2
    y = block(x.t(), x.view(2, -1)[:, 1:])
    return [y, x], []


@_inside_of(_two_views)
def _(block: Any, a: Tensor, b: Tensor) -> Tensor:
    b.mul_(2)
    y = block.lin(a.t().clone())
    a[1:] += y.t()[1:]
    return torch.tanh(b)


def _separate_parts(block: nn.Module, h: Tensor) -> Seen:
    x, count = h * 2, torch.zeros(2, ROWS, device=h.device)
    y = block(*x.split(3, 1), count[0], count[1])
    return [y, x, count], []


@_inside_of(_separate_parts)
def _(block: Any, left: Tensor, right: Tensor, one: Tensor, two: Tensor) -> Tensor:
    y = block.lin(torch.cat([right, left], 1))
    one.add_(1)
    two.copy_(y.mean(1))
    return y * one[:, None]


def _view_without_gradient(block: nn.Module, h: Tensor) -> Seen:
    x = h * 2
    with torch.no_grad():
        view = x[1:]
    y = block(x, view, total := torch.zeros(3, device=h.device), total[:2])
    return [y, x, total], []


@_inside_of(_view_without_gradient)
def _(block: Any, x: Tensor, view: Tensor, total: Tensor, part: Tensor) -> Tensor:
    y = block.lin(x) * total.sum()
    part += x.mean()
    return y + view.sum() + total.mean()


def _view_with_a_hook(block: nn.Module, h: Tensor) -> Seen:
    x = h * 2
    view = x.t()
    if view.requires_grad:
        view.register_hook(lambda grad: grad * 3)
    return [block(x, view)], []


@_inside_of(_view_with_a_hook)
def _(block: Any, x: Tensor, view: Tensor) -> Tensor:
    return block.lin(x) * view.t()


class Reverse(torch.autograd.Function):
    """Identity whose backward changes the sign; autograd makes a view of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


def _view_with_another_gradient(block: nn.Module, h: Tensor) -> Seen:
    x = h * 2
    y, reversed_y, reversed_x, also = block(x, Reverse.apply(x)[:2])
    return [each * 0.2 for each in (y, reversed_y * 2, reversed_x * 3, also, x)], []


@_inside_of(_view_with_another_gradient)
def _(block: Any, x: Tensor, reversed_x: Tensor) -> Any:
    y = block.lin(x)
    return y, Reverse.apply(y)[1:], Reverse.apply(x), reversed_x


# ---------------------------------------------------------------- outputs that share memory


def _skipped(block: nn.Module, h: Tensor) -> Seen:
    before = h = block(h * 2, False)
    h = block(h, True)
    h += 1
    return [h * before], [h is before]


@_inside_of(_skipped)
def _(block: Any, x: Tensor, skip: bool) -> Tensor:
    return x if skip else block.lin(x)


def _argument_returned(block: nn.Module, h: Tensor) -> Seen:
    x, whole = h * 2, h * 3
    y, (same, view), part, flat = block(x, whole[1:])
    same.mul_(2)
    view.add_(1)
    part.mul_(3)
    flat[2:4].sub_(1)
    return [each * 0.2 for each in (y, x, view, whole, flat * 2)], [same is x]


@_inside_of(_argument_returned)
def _(block: Any, x: Tensor, part: Tensor) -> Any:
    return block.lin(x.clone()), [x, x.t()[:2]], part[1:], part.view(-1)


def _changed_and_returned(block: nn.Module, h: Tensor) -> Seen:
    x, whole = h * 2, h * 3
    total = torch.zeros(3, device=h.device, dtype=h.dtype)
    out, view, rows, part, count = block(x, whole[1:], total, h)
    facts = [out is x, count is total]
    out.add_(1)
    view.mul_(2)
    part.sub_(1)
    count.mul_(2)
    return [each * 0.2 for each in (x, view * 3, whole, rows, total * h.mean(), h)], facts


@_inside_of(_changed_and_returned)
def _(block: Any, x: Tensor, part: Tensor, total: Tensor, h: Tensor) -> Any:
    early = x[1:]
    x += block.lin(x.clone())
    part[1:].mul_(2)
    total += 1
    return x, early[:2], part.clone().chunk(2)[0], part, total


def _residual_stream(block: nn.Module, h: Tensor) -> Seen:
    x = first = h * 2
    for _ in range(3):
        x = block(x)
    return [first, x * 2], [x is first]


@_inside_of(_residual_stream)
def _(block: Any, x: Tensor) -> Tensor:
    x += torch.tanh(block.lin(x.clone()))
    return x


def _argument_and_part_put_into_dict(block: nn.Module, h: Tensor) -> Seen:
    x, other, found = h * 2, h * 3, State(h)
    given: dict[str, Any] = {"state": found}
    y = block(x, other, given)
    given["x"].mul_(2)
    given["part"].add_(1)
    other.mul_(3)
    more: Any = found.more
    seen = y, x, given["part"] * 2, more, other
    return [each * 0.2 for each in seen], [given["x"] is x]


@_inside_of(_argument_and_part_put_into_dict)
def _(block: Any, x: Tensor, other: Tensor, given: dict[str, Any]) -> Tensor:
    given["x"], given["part"] = x, x[:2]
    given["state"].more = other.view(-1)
    return block.lin(x.clone())


def _output_and_views(block: nn.Module, h: Tensor) -> Seen:
    given: dict[str, Any] = {}
    (y, view), state, parts = block(h, given)
    view.add_(1)
    state.h.mul_(2)
    y[1].sub_(3)
    parts[0].mul_(2)
    given["flat"][3:9].mul_(0.5)
    given["again"].add_(1)
    tensors = [y, view * 1, state.h, *state.nested, *parts, *given.values()]
    return [each * 0.2 for each in tensors], [given["again"] is y]


@_inside_of(_output_and_views)
def _(block: Any, x: Tensor, given: dict[str, Any]) -> Any:
    y, z = block.lin(x), block.lin(x * 2) * 2
    given["flat"], given["again"] = y.view(-1), y
    return (y, y[:2]), State(y.t(), nested=[y.view(2, -1)]), [z[0, :2], z[:2].t(), z[3]]
