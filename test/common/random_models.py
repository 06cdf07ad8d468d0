"""Random modules: a plan describes a tree of modules, a recipe how it is sharded and trained.

Every node of a tree takes and returns [ROWS, width]. ``test.common.random_recipes`` draws recipes;
each trains as the plain model does, or is refused by a message of the package, and anything else is
a bug. It writes a recipe that fails as a script, from the definitions here that it needs: so this
file imports torch and the package alone, and nodes are found by the names of their classes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from test.common.own_generator import OwnGenerator

ROWS = 4
FEATURES = 3


@dataclass(frozen=True)
class Plan:
    """One node.

    Args:
        kind: name of a class below, or one of ``REPEATS``.
        children: plans of what a branch holds.
        number: a size, which variant of the class, or which of the modules made before is meant.
        dtype: of a leaf's parameters, where the leaf does not care; "" is the tree's own.
        frozen: "", "all" or "first" (parameter of the leaf).
        unit: whether the node is an FSDP unit.
        remat: "", "inside" or "outside" of the unit.
        scan: of ``Blocks``: "", or "full", "none" (remat) or "stacked".
    """

    kind: str
    children: tuple[Plan, ...] = ()
    number: int = 0
    dtype: str = ""
    frozen: str = ""
    unit: bool = False
    remat: str = ""
    scan: str = ""


@dataclass(frozen=True)
class Recipe:
    """A tree, how it is sharded and how it is trained.

    Args:
        plan: of the node between the two linear layers of the root.
        width: of the nodes.
        ranks: number of ranks.
        door: "wrapper" or "fully_shard".
        options: of all units.
        penalty: add the squared gradient of the outputs by the inputs to the loss.
        forwards: forward passes before each backward.
        steps: of the optimizer.
    """

    plan: Plan
    width: int = 5
    ranks: int = 2
    door: str = "wrapper"
    options: dict[str, Any] = field(default_factory=dict)
    penalty: bool = False
    forwards: int = 1
    steps: int = 2

    def plans(self) -> Iterator[Plan]:
        """All nodes."""
        waiting = [self.plan]
        while waiting:
            plan = waiting.pop()
            waiting.extend(plan.children)
            yield plan

    @property
    def dtype(self) -> torch.dtype:
        """BatchNorm over a few rows makes of rounding errors what cannot be compared."""
        return torch.float64 if any(p.kind == "BatchNorm" for p in self.plans()) else torch.float32

    @property
    def tolerance(self) -> float:
        """Largest error allowed, relative to the largest value of a tensor."""
        return {"bfloat16": 0.2, "float16": 0.05, "float32": 5e-5}[self.lowest_dtype]

    @property
    def rounded_off(self) -> float:
        """What a number loses by rounding, relative to it."""
        return {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 2.0**-24}[self.lowest_dtype]

    @property
    def lowest_dtype(self) -> str:
        """The dtype of the fewest digits that the model computes in."""
        low = {p.dtype for p in self.plans()} | {str(self.options.get("compute_dtype"))[6:]}
        return next((each for each in ("bfloat16", "float16") if each in low), "float32")


# ---------------------------------------------------------------- leaves


class Leaf(nn.Module):
    """Something with parameters."""

    side: dict[Any, Any]  # which all modules of a tree share

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.width = width
        self.number = number
        self.fill()

    def fill(self) -> None:
        """Make the parameters."""
        raise NotImplementedError

    def encode(self, x: Tensor) -> Tensor:
        """The forward by another name."""
        return self(x)


class Linear(Leaf):
    def fill(self) -> None:
        self.lin = nn.Linear(self.width, self.width, bias=self.number % 2 == 0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x.to(self.lin.weight.dtype))).to(x.dtype)


class UpDown(Leaf):
    def fill(self) -> None:
        self.up = nn.Linear(self.width, 2 * self.number + 1)
        self.down = nn.Linear(2 * self.number + 1, self.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x.to(self.up.weight.dtype)))).to(x.dtype)


class LayerNorm(Leaf):
    def fill(self) -> None:
        self.norm = nn.LayerNorm(self.width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x)


class BatchNorm(Leaf):
    def fill(self) -> None:
        self.norm = nn.BatchNorm1d(self.width, affine=self.number % 3 != 0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x)


class Conv(Leaf):
    def fill(self) -> None:
        self.conv = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x.unsqueeze(1)).sum(1))


class Embedding(Leaf):
    def fill(self) -> None:
        self.table = nn.Embedding(self.width, self.width)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[0], device=x.device) % self.width
        return x + self.table(ids).to(x.dtype)


class Shapes(Leaf):
    """A scalar, an empty one, an odd one with many dims, an unused one."""

    def fill(self) -> None:
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.odd = nn.Parameter(torch.randn(self.number + 1, 1, 3) / 2)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        # The mean: the tests' compiler computes a saturated tanh with few digits.
        shift = self.odd.mean() + self.empty.sum()
        return x * self.scalar.to(x.dtype) + torch.tanh(shift).to(x.dtype)


class Integers(Leaf):
    def fill(self) -> None:
        self.order = nn.Parameter(torch.randperm(self.width), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(self.width))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.order] * self.scale.to(x.dtype)


class Buffers(Leaf):
    """Counts and averages in its forward."""

    def fill(self) -> None:
        self.shift = nn.Parameter(torch.randn(self.width) / 4)
        self.register_buffer("mean", torch.zeros(self.width))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("table", torch.linspace(-1, 1, self.width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return x + torch.tanh(self.shift + self.table * self.mean).to(x.dtype)


class Lists(Leaf):
    """Parameters in containers that are modules without a forward."""

    def fill(self) -> None:
        self.list = nn.ParameterList([torch.rand(self.width) for _ in range(self.number % 3)])
        self.dict = nn.ParameterDict({"a": nn.Parameter(torch.rand(1)), "b": torch.rand(())})

    def forward(self, x: Tensor) -> Tensor:
        for each in (*self.list, self.dict["a"], self.dict["b"]):
            x = x * torch.cos(each).to(x.dtype)
        return x


class Attention(Leaf):
    def fill(self) -> None:
        self.attention = nn.MultiheadAttention(self.width, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, need_weights=self.number % 2 == 0)
        return x + mixed


class Encoder(Leaf):
    def fill(self) -> None:
        self.layer = nn.TransformerEncoderLayer(self.width, 1, 7, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.unsqueeze(0)).squeeze(0)


class InPlace(Leaf):
    def fill(self) -> None:
        self.scale = nn.Parameter(torch.rand(self.width))
        self.shift = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        y = x + 0
        y.mul_(self.scale.to(x.dtype))
        y += self.shift.to(x.dtype)
        return y


class Parametrized(Leaf):
    def fill(self) -> None:
        self.lin = parametrizations.weight_norm(nn.Linear(self.width, self.width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x))


class Reaching(Leaf):
    """Computes with a child's parameters, without calling the child."""

    def fill(self) -> None:
        self.lin = nn.Linear(self.width, self.width)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.lin.weight.t().to(x.dtype)) * self.lin.bias.exp().to(x.dtype)


class Numbered(Leaf):
    """Computes with a Python number that no other layer has."""

    layer = 0

    def fill(self) -> None:
        self.lin = nn.Linear(self.width, self.width)

    def forward(self, x: Tensor) -> Tensor:
        rate = 0.1 * (self.layer + 1)
        return x + rate * torch.tanh(self.lin(x.to(self.lin.weight.dtype))).to(x.dtype)


# Views of a weight [4, 6]; each number of a ``View`` leaf is one of them. Without as_strided, whose
# gradient torch_xla computes wrongly, also without shards.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "T": lambda w: w.T,
    "H": lambda w: w.H,
    "adjoint": lambda w: w.adjoint(),
    "atleast_3d": lambda w: torch.atleast_3d(w),
    "broadcast_to": lambda w: w[:1].broadcast_to(3, 6),
    "chunk": lambda w: w.chunk(2)[1],
    "detach": lambda w: w.detach(),
    "diagonal": lambda w: w.diagonal(1),
    "dsplit": lambda w: w.view(2, 2, 6).dsplit(3)[1],
    "expand": lambda w: w[:, None].expand(4, 2, 6),
    "expand_as": lambda w: w[0].expand_as(w),
    "flatten": lambda w: w.flatten(),
    "hsplit": lambda w: w.hsplit(2)[0],
    "index_ellipsis": lambda w: w[..., None, 2],
    "mT": lambda w: w.mT,
    "mH": lambda w: w.mH,
    "moveaxis": lambda w: w.moveaxis(0, 1),
    "movedim": lambda w: w.view(2, 2, 6).movedim(2, 0),
    "narrow": lambda w: w.narrow(1, 2, 3),
    "numpy_T": lambda w: w.view(2, 2, 6).permute(2, 1, 0),
    "permute": lambda w: w.permute(1, 0),
    "ravel": lambda w: w.ravel(),
    "real": lambda w: w.real,
    "reshape": lambda w: w.reshape(3, 8),
    "reshape_as": lambda w: w.reshape_as(w.t()),
    "select": lambda w: w.select(1, 2),
    "slice": lambda w: w[1:3],
    "slice_step": lambda w: w[:, ::2],
    "split": lambda w: w.split(3)[1],
    "split_sizes": lambda w: w.split([1, 3])[1],
    "squeeze": lambda w: w[:1].squeeze(),
    "squeeze_dim": lambda w: w[:, :1].squeeze(1),
    "swapaxes": lambda w: w.swapaxes(0, 1),
    "swapdims": lambda w: w.swapdims(0, 1),
    "t": lambda w: w.t(),
    "tensor_split": lambda w: w.tensor_split(3)[1],
    "transpose": lambda w: w.transpose(0, 1),
    "unbind": lambda w: w.unbind(1)[2],
    "unflatten": lambda w: w.unflatten(1, (2, 3)),
    "unfold": lambda w: w.unfold(1, 3, 2),
    "unfold_of_view": lambda w: w.t().unfold(0, 3, 2)[1:].transpose(0, 1),
    "unsqueeze": lambda w: w.unsqueeze(1),
    "view": lambda w: w.view(2, 12),
    "view_as": lambda w: w.view_as(w),
    "view_dtype": lambda w: w.view(torch.int8).view(w.dtype),
    "neg_view": lambda w: torch._neg_view(w),
    "vsplit": lambda w: w.vsplit(2)[1],
    "view_of_view": lambda w: w.t()[1:4].unsqueeze(0).transpose(1, 2)[:, 1:],
    "unbind_of_view": lambda w: w.view(2, 2, 6).unbind(1)[1].t(),
}  # fmt: skip


class View(Leaf):
    """Saves a view of its parameter for backward."""

    def fill(self) -> None:
        self.weight = nn.Parameter(torch.randn(4, 6) / 3)

    def forward(self, x: Tensor) -> Tensor:
        view = list(VIEWS.values())[self.number % len(VIEWS)](self.weight)
        scaled = (x.to(view.dtype).mean() + 0.5) * view
        return x + torch.sin(scaled + 0.5).mean().to(x.dtype)


class Products(Leaf):
    """Saves views of its parameter for products of matrices."""

    def fill(self) -> None:
        self.pair = nn.Parameter(torch.randn(2 * self.width, self.width) / 3)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.pair.to(x.dtype).chunk(2)
        return torch.sigmoid(F.linear(x, first)) * (x @ second.t()) + x * self.pair[0].to(x.dtype)


class KeptByFunction(torch.autograd.Function):
    """``x @ weight.t()``, which keeps the weight for backward in one of several ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, way: int) -> Tensor:
        ctx.way = way % 5
        if ctx.way == 0:
            ctx.x, ctx.weight = x, weight
        elif ctx.way == 1:
            ctx.save_for_backward(x, weight)
        elif ctx.way == 2:
            ctx.x, ctx.kept = x, {"view": weight.t()}
        elif ctx.way == 3:
            ctx.x, ctx.times = x, lambda grad: grad @ weight
        else:
            ctx.save_for_backward(x, weight.t())
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        if ctx.way == 0:
            return grad @ ctx.weight, grad.t() @ ctx.x, None
        if ctx.way == 1:
            x, weight = ctx.saved_tensors
            return grad @ weight, grad.t() @ x, None
        if ctx.way == 2:
            return grad @ ctx.kept["view"].t(), grad.t() @ ctx.x, None
        if ctx.way == 3:
            return ctx.times(grad), grad.t() @ ctx.x, None
        x, turned = ctx.saved_tensors
        return grad @ turned.t(), grad.t() @ x, None


class ScaledByFunction(torch.autograd.Function):
    """``x * scale``, which keeps the scale as an attribute; zeros would broadcast into it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.x, ctx.scale = x, scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad * ctx.scale, (grad * ctx.x).sum(0)


class Keeps(Leaf):
    """Calls custom functions that keep its parameters."""

    def fill(self) -> None:
        self.weight = nn.Parameter(torch.randn(self.width, self.width) / 3)
        self.scale = nn.Parameter(torch.rand(self.width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.scale.dtype)
        if self.number % 6 == 5:
            return ScaledByFunction.apply(x, self.scale) + (x @ self.weight).tanh()
        return x * self.scale + KeptByFunction.apply(x, self.weight, self.number).tanh()


class TensorHook(Leaf):
    """A hook on an activation multiplies its gradient by a parameter."""

    def fill(self) -> None:
        self.lin = nn.Linear(self.width, self.width)
        self.scale = nn.Parameter(torch.rand(self.width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.lin(x.to(self.scale.dtype)))
        scale, weight, row = self.scale, self.lin.weight, self.lin.weight[0]
        # Linear ones: the gradients of a rank are N times those of the joined batch.
        hooks: list[Callable[[Tensor], Tensor]] = [
            lambda grad: grad * self.scale,
            lambda grad: grad * scale,
            lambda grad: grad @ weight,
            lambda grad: grad * row,
            lambda grad: grad @ self.lin.weight.t(),
        ]
        if y.requires_grad:
            y.register_hook(hooks[self.number % len(hooks)])
        return (x + y * scale).to(x.dtype)


class ModuleHooks(Leaf):
    """Hooks on a layer, or on the leaf itself, which may be a unit."""

    def fill(self) -> None:
        self.lin = nn.Linear(self.width, self.width)
        module = self if self.number % 2 else self.lin
        way = self.number // 2 % 4
        if way == 0:
            module.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        elif way == 1:
            module.register_forward_hook(self._scale)
        elif way == 2:
            module.register_full_backward_hook(
                lambda module, inputs, outputs: tuple(g if g is None else 2 * g for g in inputs)
            )
        else:
            module.register_full_backward_pre_hook(
                lambda module, outputs: tuple(g if g is None else 2 * g for g in outputs)
            )

    def _scale(self, module: Any, args: Any, output: Tensor) -> Tensor:
        if module is self:
            return output * 1.5
        return output * (1 + module.weight.mean())

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(x.to(self.lin.weight.dtype))).to(x.dtype)


class SideLoss(Leaf):
    """Leaves a loss beside what it returns."""

    def fill(self) -> None:
        self.lin = nn.Linear(self.width, self.width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.lin(x.to(self.lin.weight.dtype)))
        self.side["loss", id(self)] = y.square().mean()
        return x + y.to(x.dtype)


class Leaves(Leaf):
    """Leaves an activation, or a parameter, for whoever takes it."""

    def fill(self) -> None:
        self.weight = nn.Parameter(torch.rand(self.width, self.width) / 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight.to(x.dtype))
        left = [y, self.weight, self.weight[0], self.weight.t()][self.number % 4]
        if self.number % 5 == 4:
            self.side.setdefault("of the first step", left.detach() if left is y else left)
        else:
            self.side["left"] = left
        return y


class Takes(Leaf):
    """Computes with what was left."""

    def fill(self) -> None:
        self.scale = nn.Parameter(torch.rand(self.width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale.to(x.dtype)
        for key in ("left", "of the first step"):
            if (taken := self.side.get(key)) is not None:
                y = y + y.mean() * taken.to(x.dtype).sum().tanh()
                y = y * taken[..., :1].to(x.dtype).mean(0).exp()
        return y


class Force(Leaf):
    """Computes a gradient in its forward."""

    def fill(self) -> None:
        self.lin = nn.Linear(self.width, self.width)

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(self.lin.weight.dtype)
        return x - 0.3 * self.force(z).to(x.dtype)

    def energy(self, z: Tensor) -> Tensor:
        return torch.tanh(self.lin(z)).square().sum()

    def force(self, x: Tensor) -> Tensor:
        way = self.number % 4
        if way == 2:
            return torch.func.grad(self.energy)(x)
        if way == 3:
            return torch.func.vmap(lambda row: torch.tanh(self.lin(row)))(x)
        with torch.enable_grad():
            z = x if way == 0 and x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(z), z, create_graph=way == 0)
        return force


class Functional(Leaf):
    """Calls a layer with other parameters, computed from its own."""

    def fill(self) -> None:
        self.lin = nn.Linear(self.width, self.width)

    def forward(self, x: Tensor) -> Tensor:
        other = {"weight": self.lin.weight.cos(), "bias": self.lin.bias + self.lin.weight.mean()}
        z = x.to(self.lin.weight.dtype)
        # Not tanh, which these weights saturate; a norm after it would show its last digits alone.
        return torch.sin(torch.func.functional_call(self.lin, other, (z,))).to(x.dtype)


# ---------------------------------------------------------------- branches


class Branch(nn.Module):
    """Something that calls other nodes."""

    def __init__(self, children: Iterable[nn.Module], number: int = 0) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.number = number

    def encode(self, x: Tensor) -> Tensor:
        """The forward by another name."""
        return self(x)

    def in_turn(self, x: Tensor) -> Tensor:
        """What all parts make of ``x``, one after the other."""
        for part in self.parts:
            x = part(x)
        return x


class Chain(Branch):
    def forward(self, x: Tensor) -> Tensor:
        return self.in_turn(x)


class Residual(Branch):
    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + 0.5 * part(x)
        return x


class Parallel(Branch):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self.parts]).mean(0)


class Twice(Branch):
    """Runs what it holds twice, the first part also without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.parts[0](x)
        for part in self.parts:
            x = part(part(x))
        return x


class NoGrad(Branch):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = self.parts[0](x)
        return x + fixed


class Detached(Branch):
    """The gradient ends at the inputs of the parts."""

    def forward(self, x: Tensor) -> Tensor:
        return sum((part(x.detach()) for part in self.parts), start=x)


class Unused(Branch):
    """Runs the first part only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[0](x)


class Dropped(Branch):
    """Runs the last part, and drops the result."""

    def forward(self, x: Tensor) -> Tensor:
        self.parts[-1](x)
        return self.parts[0](x) if len(self.parts) > 1 else x


class Method(Branch):
    """Calls another method than forward."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part.encode(x)
        return x


class Peeks(Branch):
    """Computes with parameters of its parts, outside of their forward."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            before = self._peek(part) if self.number % 2 else 1
            x = part(x) * before
            x = x if self.number % 2 else x * self._peek(part).to(x.dtype)
        return x

    def _peek(self, part: nn.Module) -> Tensor:
        own = next(p for p in part.parameters() if p.is_floating_point())
        return 1 + torch.tanh(own.float().sum()).to(own.dtype)


class Blocks(Branch):
    """A loop over blocks of one structure; ``Plan.scan`` runs it as one loop of the program.

    ``number`` says how many, whether two structures alternate or the first block differs, and
    whether all blocks' inputs are collected.
    """

    @staticmethod
    def repeat(plan: Plan) -> list[Plan]:
        """The plans of the blocks."""
        length = 2 + plan.number % 3
        if plan.number // 3 % 2:
            return [plan.children[0]] + [plan.children[-1]] * length
        return [plan.children[at % len(plan.children)] for at in range(length * len(plan.children))]

    def forward(self, x: Tensor) -> Tensor:
        collected = []
        for part in self.parts:
            if self.number // 6 % 2:
                collected.append(x)
            x = part(x)
        return sum((0.1 * each for each in collected), start=x)


# ---------------------------------------------------------------- arguments of several kinds


@dataclass
class State:
    """A container of tensors."""

    x: Any
    total: Any


def get(box: Any, name: str) -> Any:
    """Entry ``name`` of a dict, a list or a ``State``."""
    if isinstance(box, State):
        return getattr(box, name)
    return box[("x", "total").index(name)] if isinstance(box, list) else box[name]


def put(box: Any, name: str, value: Any) -> None:
    """Set it."""
    if isinstance(box, State):
        setattr(box, name, value)
    else:
        box[("x", "total").index(name) if isinstance(box, list) else name] = value


def tensors_of(box: Any) -> list[Tensor]:
    """All floating-point tensors in it."""
    if isinstance(box, Tensor):
        return [box] if box.is_floating_point() else []
    if isinstance(box, State):
        box = vars(box)
    values = box.values() if isinstance(box, dict) else box if isinstance(box, list | tuple) else ()
    return [tensor for value in values for tensor in tensors_of(value)]


class Boxes(Branch):
    """Hands its parts, which are ``FromBox``, one container, and adds up what is then in it."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros((), device=x.device)
        boxes: list[Callable[[], Any]] = [
            lambda: {"x": x + 0, "total": total},
            lambda: [x + 0, total],
            lambda: State(x + 0, total),
            lambda: {"x": x + 0, "total": total, "ids": [torch.arange(3, device=x.device), None]},
        ]
        box = first = boxes[self.number % len(boxes)]()
        for part in self.parts:
            returned = part(box)
            box = box if returned is None else returned
        found = tensors_of([box, first] if box is not first else box)
        return sum((each.to(x.dtype).reshape(-1, self.sizes(each)).mean(0) for each in found), x)

    @staticmethod
    def sizes(each: Tensor) -> int:
        return each.shape[-1] if each.dim() else 1


class FromBox(Branch):
    """Takes a container, and changes what is in it."""

    def forward(self, box: Any) -> Any:
        x = get(box, "x")
        ways = (
            self.replace, self.add, self.remove, self.change, self.sum, self.copied, self.tied
        )  # fmt: skip
        return ways[self.number % len(ways)](box, x)

    def replace(self, box: Any, x: Tensor) -> Any:
        put(box, "x", torch.relu_(x + 0.1) + self.in_turn(x))

    def add(self, box: Any, x: Tensor) -> Any:
        y = self.in_turn(x)
        if isinstance(box, list):
            box.append(y)
        elif isinstance(box, State):
            put(box, "added", y)
        else:
            box["added"] = y
        return box

    def remove(self, box: Any, x: Tensor) -> Any:
        put(box, "x", self.in_turn(x))
        if isinstance(box, dict):
            box.pop("ids", None)
        elif isinstance(box, list):
            del box[2:]
        return box

    def change(self, box: Any, x: Tensor) -> Any:
        x.add_(self.in_turn(x.clone()).to(x.dtype))

    def sum(self, box: Any, x: Tensor) -> Any:
        y = self.in_turn(x)
        get(box, "total").add_(y.float().square().mean())
        put(box, "x", y)
        return box

    def copied(self, box: Any, x: Tensor) -> Any:
        new = copy.copy(box)
        put(new, "x", self.in_turn(x))
        return new

    def tied(self, box: Any, x: Tensor) -> Any:
        y = self.in_turn(x)
        put(box, "x", y)
        return {"x": y, "total": get(box, "total"), "again": [y, x]}


class Pairs(Branch):
    """Calls its parts, which are ``OfPair``, with ``x`` and a second argument."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = self.call(part, x)
        return x

    def call(self, part: nn.Module, x: Tensor) -> Tensor:
        y = x * 1.5
        number = torch.arange(y.shape[0], device=y.device)
        others: list[Callable[[], Any]] = [
            lambda: y,
            lambda: y.view(-1),
            lambda: y.t(),
            lambda: y[1:],
            lambda: torch.zeros((), device=y.device),
            lambda: number.flip(0),
            lambda: (number % 2 == 0)[:, None],
            lambda: None,
            lambda: y.detach(),
            lambda: torch.linspace(0, 1, 3, dtype=torch.float64, device=y.device),
            lambda: torch.tensor([0.5, -1.25], dtype=torch.bfloat16, device=y.device),
            lambda: [y, y[0]],
        ]
        other = others[self.number % len(others)]()
        out = part(y, other) if self.number % 3 else part(y, other=other, scale=2.0)
        found = tensors_of([out, y, other])
        return sum(mixed(x, each) for each in found) / len(found)


class OfPair(Branch):
    """Computes with two arguments that may share memory, and may change them in place."""

    def forward(self, x: Tensor, other: Any = None, *, scale: float = 1.0) -> Any:
        way = self.number % 6
        if way == 0:
            x.add_(self.in_turn(x.clone()).to(x.dtype))
            return mixed(x, other)
        if way == 1:
            y = self.in_turn(mixed(x, other))
            for each in tensors_of(other):
                # The constant of 16 bits takes a mean of its own: another one, rounded otherwise by
                # the ranks, would be another value.
                each.add_((each if each.dim() == 1 else y).mean().to(each.dtype))
            return y
        if way == 2:
            x.mul_(scale + 1)
            return x
        if way == 3:
            return self.in_turn(mixed(x, other)), other
        if way == 4:
            y = self.in_turn(mixed(x, other)) * scale
            return {"once": y, "twice": (y, [y.t()]), "number": 3, "none": None}
        return mixed(self.in_turn(x), other)


def mixed(x: Tensor, other: Any) -> Tensor:
    """``x`` changed by the other argument, of any kind."""
    if isinstance(other, list):
        for each in other:
            x = mixed(x, each)
        return x
    if other is None:
        return x
    if other.dtype == torch.bool:
        return x.masked_fill(~other, 0.5)
    if not other.is_floating_point():
        return x[other]
    if other.shape == x.shape:
        return x + other.to(x.dtype)
    # Of the mean: the tests' compiler computes a saturated tanh with few digits.
    return x + torch.tanh(other.to(x.dtype).mean())


# A linear layer or embedding with the weight of one made before; a module made before.
REPEATS = ("Tied", "TiedEmbedding", "Shared")


# ---------------------------------------------------------------- building and sharding


class Tree(nn.Module):
    """The root: what a recipe describes, between two linear layers."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.side: dict[Any, Any] = {}
        self.inp = nn.Linear(FEATURES, recipe.width).to(recipe.dtype)
        self.body = Builder(recipe, self.side).node(recipe.plan)
        self.head = nn.Linear(recipe.width, 2).to(recipe.dtype)

    def forward(self, x: Tensor) -> Tensor:
        for key in [key for key in self.side if key != "of the first step"]:
            del self.side[key]
        y = self.head(self.body(self.inp(x)))
        losses = [each for key, each in self.side.items() if key[0] == "loss"]
        return sum((each.to(y.dtype) for each in losses), start=y)


class Builder:
    """Makes modules of plans; each module keeps its plan as ``plan``."""

    def __init__(self, recipe: Recipe, side: dict[Any, Any]) -> None:
        self._recipe = recipe
        self._side = side
        self._made: list[nn.Module] = []
        self._squares: list[nn.Parameter] = []  # what a layer can be tied to

    def node(self, plan: Plan) -> nn.Module:
        if plan.kind == "Shared" and self._made:
            return self._made[plan.number % len(self._made)]
        module: Any = self._branch(plan) if plan.children else self._leaf(plan)
        module.plan = plan
        if plan.kind not in ("FromBox", "OfPair"):  # which want other arguments
            self._made.append(module)
        return module

    def _branch(self, plan: Plan) -> nn.Module:
        plans = Blocks.repeat(plan) if plan.kind == "Blocks" else plan.children
        return globals()[plan.kind]([self.node(child) for child in plans], plan.number)

    def _leaf(self, plan: Plan) -> nn.Module:
        kind = {"Tied": "Linear", "Shared": "Linear", "TiedEmbedding": "Embedding"}.get(plan.kind)
        leaf = globals()[kind or plan.kind](self._recipe.width, plan.number)
        leaf.to(getattr(torch, plan.dtype) if plan.dtype else self._recipe.dtype)
        if plan.kind in ("SideLoss", "Leaves", "Takes"):
            leaf.side = self._side
        if plan.kind == "Numbered":
            leaf.layer = len(self._made)
        params = list(leaf.parameters())
        for param in params[:1] if plan.frozen == "first" else params if plan.frozen else []:
            param.requires_grad_(False)
        if square := next(
            (m for m in leaf.children() if type(m) in (nn.Linear, nn.Embedding)), None
        ):
            self._tie(square, plan)
        return leaf

    def _tie(self, layer: Any, plan: Plan) -> None:
        others = [
            p
            for p in self._squares
            if (p.shape, p.dtype) == (layer.weight.shape, layer.weight.dtype)
        ]
        if plan.kind.startswith("Tied") and others:
            layer.weight = others[plan.number % len(others)]
        self._squares.append(layer.weight)


class Sharding:
    """Shards a tree from the leaves up, as its plans say."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._done: dict[int, nn.Module] = {}

    def root(self, model: Tree) -> Any:
        model.body = self._node(model.body)
        return self._unit(model)

    def _node(self, module: Any) -> nn.Module:
        if id(module) not in self._done:
            for index, part in enumerate(getattr(module, "parts", ())):
                module.parts[index] = self._node(part)
            self._scan(module)
            self._done[id(module)] = self._wrapped(module, module.plan)
        return self._done[id(module)]

    def _scan(self, module: Any) -> None:
        from xla_fsdp import scan_blocks

        if how := module.plan.scan:
            stacked = how == "stacked"
            scan_blocks(module.parts, remat="full" if stacked else how, stacked=stacked)

    def _wrapped(self, module: nn.Module, plan: Plan) -> nn.Module:
        from xla_fsdp import checkpoint_module, register_fsdp_forward_method

        if plan.remat == "inside":
            checkpoint_module(module)
        if plan.unit:
            module = self._unit(module)
            register_fsdp_forward_method(module, "encode")
        return checkpoint_module(module) if plan.remat == "outside" else module

    def _unit(self, module: nn.Module) -> Any:
        from xla_fsdp import MixedPrecisionPolicy, XlaFullyShardedDataParallel, fully_shard

        options = dict(self._recipe.options)
        if self._recipe.door == "wrapper":
            return XlaFullyShardedDataParallel(module, **options)
        policy = MixedPrecisionPolicy(
            param_dtype=options.pop("compute_dtype", None),
            reduce_dtype=options.pop("reduce_dtype", None),
        )
        return fully_shard(module, mp_policy=policy, **options)


# ---------------------------------------------------------------- training


def build(recipe: Recipe) -> nn.Module:
    """The plain model, with the same values on every rank."""
    with OwnGenerator(3):
        return Tree(recipe)


def inputs(recipe: Recipe, step: int, rank: int) -> list[Tensor]:
    """A rank's part of a batch, for each forward of a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    shape = (recipe.forwards, ROWS, FEATURES)
    return list(torch.randn(shape, generator=generator).to(recipe.dtype).unbind())


def passes(recipe: Recipe, call: Callable[[Tensor], Tensor], xs: list[Tensor]) -> list[Tensor]:
    """The loss of a step, and the outputs."""
    for x in xs:
        x.requires_grad_()
    outputs = [call(x) for x in xs]
    target = torch.tensor([-1.0, 1.0], dtype=recipe.dtype, device=xs[0].device)
    losses = [(each.to(recipe.dtype) - target).square().mean() for each in outputs]
    if recipe.penalty:
        total = sum(each.to(recipe.dtype).square().sum() for each in outputs)
        grads = torch.autograd.grad(total, xs, create_graph=True)
        losses += [0.1 * grad.square().sum() for grad in grads]
    return [torch.stack(losses).sum(), *outputs]


def train_sharded(rank: int, recipe: Recipe) -> dict[str, Any]:
    """Train on this rank; what it saw, and the shards that it holds."""
    import torch_xla

    model = Sharding(recipe).root(build(recipe))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    seen, grads = [], {}
    for step in range(recipe.steps):
        optimizer.zero_grad()
        xs = [x.to(torch_xla.device()) for x in inputs(recipe, step, rank)]
        loss, *outputs = passes(recipe, model, xs)
        loss.backward()
        named = model.named_parameters(remove_duplicate=False)
        grads = {name: p.grad.clone() for name, p in named if p.grad is not None}
        seen.append([loss.detach(), *[y.detach() for y in outputs], *[x.grad for x in xs]])
        optimizer.step()
        torch_xla.sync()
    return {
        "seen": [[tensor.cpu() for tensor in of_step] for of_step in seen],
        "grads": {name: grad.cpu() for name, grad in grads.items()},
        "state": {name: value.cpu() for name, value in model.state_dict().items()},
        "metadata": model.get_shard_metadata(),
    }


def train_plain(recipe: Recipe, noise: float = 0.0, seed: int = 0) -> dict[str, Any]:
    """Train the plain model on the joined batch, where the loss is the mean over the ranks' parts;
    buffers are those of rank 0, and what each rank sees comes first.

    With ``noise``, parameters and what leaves return are multiplied by random numbers that differ
    from 1 by so much.
    """
    model = build(recipe)
    if noise:
        add_noise(model, noise, torch.Generator().manual_seed(seed))
    sides: list[dict[Any, Any]] = [{} for _ in range(recipe.ranks)]
    buffers = [copy.deepcopy(dict(model.named_buffers())) for _ in range(recipe.ranks)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    seen: list[list[list[Tensor]]] = [[] for _ in range(recipe.ranks)]
    grads: dict[str, Tensor] = {}
    for step in range(recipe.steps):
        optimizer.zero_grad()
        for rank in range(recipe.ranks):
            xs = inputs(recipe, step, rank)
            own = buffers[rank]
            model.side.clear()
            model.side.update(sides[rank])
            call = lambda x: torch.func.functional_call(model, own, (x,))  # noqa: B023, E731
            loss, *outputs = passes(recipe, call, xs)
            (loss / recipe.ranks).backward()
            x_grads = [x.grad * recipe.ranks for x in xs if x.grad is not None]
            seen[rank].append([loss.detach(), *[y.detach() for y in outputs], *x_grads])
            sides[rank] = dict(model.side)
        named = model.named_parameters(remove_duplicate=False)
        grads = {name: p.grad.clone() for name, p in named if p.grad is not None}
        optimizer.step()
    first = {id(buffer): name for name, buffer in model.named_buffers()}
    state = model.state_dict()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in state:
            state[name] = buffers[0][first[id(buffer)]]
    return {"seen": seen, "grads": grads, "state": state}


def add_noise(model: nn.Module, noise: float, generator: torch.Generator) -> None:
    """Multiply parameters, and from now on the tensors that leaves return, by random numbers."""

    def noisy(value: Tensor) -> Tensor:
        factor = 1 + noise * torch.randn(value.shape, generator=generator)
        return (value * factor.to(torch.float64)).to(value.dtype)

    def hook(leaf: nn.Module, args: Any, output: Any) -> Any:
        is_new = isinstance(output, Tensor) and output._base is None and output is not args[0]
        return noisy(output) if is_new and output.is_floating_point() else None

    with torch.no_grad():
        for param in model.parameters():
            param.copy_(noisy(param))
    for module in model.modules():
        if isinstance(module, Leaf):
            module.register_forward_hook(hook)


def difference(
    recipe: Recipe, ranks: list[dict[str, Any]], rounding: Mapping[str, float] | None = None
) -> str:
    """How what the ranks hold differs from the plain model's, by more than ``tolerance`` and what
    ``rounding`` allows; "" if it does not."""
    from xla_fsdp.checkpoint import consolidate_sharded_state_dicts

    metadata = ranks[0]["metadata"]
    state = consolidate_sharded_state_dicts([rank["state"] for rank in ranks], metadata)
    grads = {}
    if has_gradients_by_name(recipe):
        grads = joined_grads([rank["grads"] for rank in ranks], metadata)
    found = {"state": state, "grads": grads, "seen": [rank["seen"] for rank in ranks]}
    wanted = _named(recipe, train_plain(recipe))
    return first_difference(recipe, _named(recipe, found), wanted, rounding or {})


def _named(recipe: Recipe, found: dict[str, Any]) -> dict[str, Tensor]:
    """What training has left, by a name of each tensor."""
    named = {f"state of {name}": value for name, value in found["state"].items()}
    if has_gradients_by_name(recipe):
        named.update({f"gradient of {name}": value for name, value in found["grads"].items()})
    for rank, of_rank in enumerate(found["seen"]):
        for step, of_step in enumerate(of_rank):
            for at, value in enumerate(of_step):
                what = "loss" if at == 0 else "output" if at <= recipe.forwards else "x.grad"
                named[f"{what} {at} of step {step} on rank {rank}"] = value
    return named


def effect_of_rounding(recipe: Recipe) -> dict[str, float]:
    """By how much each tensor of the plain model changes at most if its parameters change by what
    the dtype rounds off: models may multiply it by a thousand."""
    exact = _named(recipe, train_plain(recipe))
    changed = [_named(recipe, train_plain(recipe, recipe.rounded_off, seed)) for seed in range(4)]
    return {
        name: max(_distance(each[name], value) for each in changed)
        for name, value in exact.items()
        if value.numel()
    }


def _distance(first: Tensor, second: Tensor) -> float:
    return (first.double() - second.double()).abs().max().item()


def has_gradients_by_name(recipe: Recipe) -> bool:
    """Flat parameters and stacks have no gradient for each name."""
    stacked = any(plan.scan == "stacked" for plan in recipe.plans())
    return not (stacked or recipe.options.get("flatten_parameters"))


def joined_grads(grads: list[dict[str, Tensor]], metadata: dict[str, Any]) -> dict[str, Tensor]:
    """Full gradients; they are cut like their parameters."""
    from xla_fsdp.checkpoint import consolidate_sharded_state_dicts

    params = [record for record in metadata["params"] if record["key"] in grads[0]]
    names = {member["name"] for record in params for member in record["members"]}
    ties = {alias: name for alias, name in metadata["ties"].items() if name in names}
    own = {**metadata, "params": params, "ties": ties, "buffers": {}}
    return consolidate_sharded_state_dicts(grads, own)


def first_difference(
    recipe: Recipe,
    found: dict[str, Tensor],
    wanted: dict[str, Tensor],
    rounding: Mapping[str, float],
) -> str:
    """A line about the first tensor that differs, by more than rounding explains."""
    if found.keys() != wanted.keys():
        missing, more = wanted.keys() - found.keys(), found.keys() - wanted.keys()
        return f"missing: {sorted(missing)}, not in the plain model: {sorted(more)}"
    # A small sum of large 16-bit terms is as wrong as the terms are.
    largest = max(value.abs().max().item() for value in wanted.values() if value.numel())
    smallest = max(0.2, 0.01 * largest) if recipe.tolerance > 0.01 else 0.01
    order = sorted(wanted, key=lambda name: ("step 0" not in name, name))
    for name in order:
        own, value = found[name].double(), wanted[name].double()
        if "running_var" in name or not value.numel():  # torch_xla's is of the biased variance
            continue
        if own.shape != value.shape:
            return f"{name} has shape {list(own.shape)}, plain {list(value.shape)}"
        error = _distance(own, value)
        allowed = 2e-6 + recipe.tolerance * max(value.abs().max().item(), smallest)
        allowed += 16 * rounding.get(name, 0.0)  # as functions like tanh are right to several units
        if not error <= allowed:
            at = (own - value).abs().argmax()
            return f"{name}: {own.flatten()[at]:.6g}, plain {value.flatten()[at]:.6g}"
    return ""


def check(recipe: Recipe) -> str:
    """Train on CPU ranks; how that differs from the plain model, "" if it does not."""
    from xla_fsdp import launch

    ranks = launch(train_sharded, (recipe,), num_ranks=recipe.ranks)
    assert ranks is not None
    return difference(recipe, ranks)
