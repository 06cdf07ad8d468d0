"""Random modules for parity tests: a plan describes a tree of modules, a recipe how it is sharded.

``recipes`` is the hypothesis strategy. Every node takes and returns [ROWS, width], and every plan
is allowed, so an error or a difference from the plain model is a bug of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from test.common.scenarios import fsdp, make
from test.common.training import Batch

ROWS = 5
FEATURES = 3
LOW = ("bfloat16", "float16")


@dataclass(frozen=True)
class Plan:
    """One node.

    Args:
        kind: a key of ``LEAVES`` or ``BRANCHES``.
        children: plans of what a branch holds.
        number: a size, or which of the modules made before is meant.
        dtype: of a leaf's parameters, where the leaf does not care; "" is the tree's own.
        frozen: "", "all" or "first" (parameter of the leaf).
        unit: whether the node is an FSDP unit.
        remat: "", "inside" or "outside" of the unit.
    """

    kind: str
    children: tuple[Plan, ...] = ()
    number: int = 0
    dtype: str = ""
    frozen: str = ""
    unit: bool = False
    remat: str = ""


@dataclass(frozen=True)
class Recipe:
    """A tree and how it is wrapped; see ``test.common.training.Task``."""

    plan: Plan
    width: int = 5
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 2

    @property
    def tolerance(self) -> float:
        """Largest error allowed, relative to the largest value of a tensor."""
        low = {p.dtype for p in self.plans()} | {str(self.options.get("compute_dtype"))[6:]}
        return 0.2 if "bfloat16" in low else 0.05 if "float16" in low else 1e-4

    def plans(self) -> Iterable[Plan]:
        """All nodes."""
        waiting = [self.plan]
        while waiting:
            plan = waiting.pop()
            waiting.extend(plan.children)
            yield plan

    @property
    def dtype(self) -> torch.dtype:
        """BatchNorm over a few rows makes of rounding errors what cannot be compared."""
        return torch.float64 if any(p.kind == "batch_norm" for p in self.plans()) else torch.float32

    def build(self) -> nn.Module:
        return make(lambda: Tree(self))

    def shard(self, model: Any) -> Any:
        return _Wrapping(self.options).root(model)

    def batch(self, step: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(100 * step + rank)
        return {"x": torch.randn(ROWS, FEATURES, generator=generator).to(self.dtype)}

    def loss(self, output: Tensor) -> Tensor:
        target = torch.tensor([-1.0, 1.0], dtype=self.dtype, device=output.device)
        return (output.to(self.dtype) - target).square().mean()

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.02, momentum=0.9)


# ---------------------------------------------------------------- leaves


class Leaf(nn.Module):
    """Something with parameters."""

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
        shift = self.odd.sum() + self.empty.sum()
        return x * self.scalar.to(x.dtype) + torch.tanh(shift).to(x.dtype)


class Views(Leaf):
    """Saves views of its parameters for backward."""

    def fill(self) -> None:
        self.pair = nn.Parameter(torch.randn(2 * self.width, self.width) / 3)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.pair.to(x.dtype).chunk(2)
        return torch.sigmoid(F.linear(x, first)) * (x @ second.t()) + x * self.pair[0].to(x.dtype)


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


# ---------------------------------------------------------------- branches


class Branch(nn.Module):
    """Something that calls other nodes."""

    def __init__(self, children: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)

    def encode(self, x: Tensor) -> Tensor:
        """The forward by another name."""
        return self(x)


class Chain(Branch):
    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


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


LEAVES: dict[str, type[Leaf]] = {
    "linear": Linear,
    "up_down": UpDown,
    "layer_norm": LayerNorm,
    "batch_norm": BatchNorm,
    "conv": Conv,
    "embedding": Embedding,
    "shapes": Shapes,
    "views": Views,
    "integers": Integers,
    "buffers": Buffers,
    "lists": Lists,
    "attention": Attention,
    "encoder": Encoder,
    "in_place": InPlace,
    "parametrized": Parametrized,
    "reaching": Reaching,
}
ANY_DTYPE = (
    "linear", "up_down", "embedding", "shapes", "views", "integers", "lists", "in_place",
    "reaching",
)  # fmt: skip
BRANCHES: dict[str, type[Branch]] = {
    "chain": Chain,
    "residual": Residual,
    "parallel": Parallel,
    "twice": Twice,
    "no_grad": NoGrad,
    "detached": Detached,
    "unused": Unused,
    "dropped": Dropped,
    "method": Method,
}
# A linear layer or embedding with the weight of one made before; a module made before.
REPEATS = ("tied", "tied_embedding", "shared")


# ---------------------------------------------------------------- building and wrapping


class Tree(nn.Module):
    """The root: what a recipe describes, between two linear layers."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, recipe.width).to(recipe.dtype)
        self.body = _Builder(recipe).node(recipe.plan)
        self.head = nn.Linear(recipe.width, 2).to(recipe.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.inp(x)))


class _Builder:
    """Makes modules of plans; each module keeps its plan as ``plan``."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._made: list[nn.Module] = []
        self._squares: list[nn.Parameter] = []  # what a layer can be tied to

    def node(self, plan: Plan) -> nn.Module:
        if plan.kind == "shared" and self._made:
            return self._made[plan.number % len(self._made)]
        module: Any = self._branch(plan) if plan.kind in BRANCHES else self._leaf(plan)
        module.plan = plan
        self._made.append(module)
        return module

    def _branch(self, plan: Plan) -> nn.Module:
        return BRANCHES[plan.kind]([self.node(child) for child in plan.children])

    def _leaf(self, plan: Plan) -> nn.Module:
        kind = {"tied": "linear", "shared": "linear", "tied_embedding": "embedding"}.get(plan.kind)
        leaf = LEAVES[kind or plan.kind](self._recipe.width, plan.number)
        leaf.to(getattr(torch, plan.dtype) if plan.dtype else self._recipe.dtype)
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
        if plan.kind.startswith("tied") and others:
            layer.weight = others[plan.number % len(others)]
        self._squares.append(layer.weight)


class _Wrapping:
    """Wraps a tree from the leaves up, as its plans say."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._done: dict[int, nn.Module] = {}

    def root(self, model: Tree) -> Any:
        model.body = self.node(model.body)
        return fsdp(model, **self._options)

    def node(self, module: Any) -> nn.Module:
        if id(module) not in self._done:
            for index, part in enumerate(getattr(module, "parts", ())):
                module.parts[index] = self.node(part)
            self._done[id(module)] = self._wrapped(module, module.plan)
        return self._done[id(module)]

    def _wrapped(self, module: nn.Module, plan: Plan) -> nn.Module:
        from xla_fsdp import checkpoint_module, register_fsdp_forward_method

        if plan.remat == "inside":
            checkpoint_module(module)
        if plan.unit:
            module = fsdp(module, **self._options)
            register_fsdp_forward_method(module, "encode")
        return checkpoint_module(module) if plan.remat == "outside" else module


# ---------------------------------------------------------------- the strategy

OPTIONS: dict[str, tuple[Any, ...]] = {
    "reshard_after_forward": (True, True, False),
    "flatten_parameters": (False, False, True),
    "disable_reshard_on_root": (True, False),
    "compute_dtype": (None, None, None, torch.bfloat16, torch.float16, torch.float32),
    "fp32_reduce_scatter": (False, True),
    "shard_param_on_dim_0": (False, False, True),
    "coalesce_all_gather_ops": (True, True, False),
    "reduce_scatter_bucket_size_mb": (None, None, 0, 0.0001),
    "optimization_barrier_in_forward": (True, True, False),
    "optimization_barrier_in_backward": (True, True, False),
}


@st.composite
def _leaf(draw: Callable[..., Any]) -> Plan:
    kind = draw(st.sampled_from([*LEAVES, *REPEATS]))
    dtype = draw(st.sampled_from(["", "", "", *LOW])) if kind in (*ANY_DTYPE, *REPEATS) else ""
    return Plan(
        kind,
        number=draw(st.integers(0, 5)),
        dtype=dtype,
        frozen=draw(st.sampled_from(["", "", "", "all", "first"])),
        unit=draw(st.booleans()),
        remat=draw(st.sampled_from(["", "", "inside", "outside"])),
    )


@st.composite
def _branch(draw: Callable[..., Any], children: st.SearchStrategy[Plan], fewest: int) -> Plan:
    return Plan(
        draw(st.sampled_from(list(BRANCHES))),
        tuple(draw(st.lists(children, min_size=fewest, max_size=3))),
        unit=draw(st.booleans()),
        remat=draw(st.sampled_from(["", "", "", "inside", "outside"])),
    )


_SMALL = _branch(_leaf(), 1)
_TREE = _branch(st.one_of(_leaf(), _SMALL, _branch(st.one_of(_leaf(), _SMALL), 1)), 2)


@st.composite
def recipes(draw: Callable[..., Any]) -> Recipe:
    """Any tree with any options."""
    plan = draw(_TREE)
    options = {name: draw(st.sampled_from(values)) for name, values in OPTIONS.items()}
    recipe = Recipe(plan, draw(st.integers(4, 9)), options)
    if options["flatten_parameters"]:
        # Which is refused for parameters that units share.
        options["flatten_parameters"] = not any(p.kind in REPEATS for p in recipe.plans())
        options["shard_param_on_dim_0"] &= not options["flatten_parameters"]
    if recipe.dtype is torch.float64:
        return replace(
            recipe, plan=_in_full_precision(plan), options={**options, "compute_dtype": None}
        )
    return recipe


def _in_full_precision(plan: Plan) -> Plan:
    return replace(plan, dtype="", children=tuple(map(_in_full_precision, plan.children)))
