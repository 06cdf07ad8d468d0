"""Parameters that somebody holds or reads while their full values are not there. Two ranks.

That they are right in backward, ``test_parity`` shows with the models ``HoldingNet`` and
``RememberingNet``.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common.in_place import in_place
from test.common.models import FEATURES, HoldingNet
from test.common.scenarios import Scenarios, make, message, nested, rows

scenarios = Scenarios(__name__)
result = scenarios.result

HIDDEN_SHAPE = (FEATURES, FEATURES)


class Inner(nn.Module):
    """Leaves its parameters, and a view that autograd saves, in a side object."""

    def __init__(self, side: dict[str, Any]) -> None:
        super().__init__()
        self.lin = nn.Linear(FEATURES, FEATURES)
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        turned = self.lin.weight.t()
        self.side.update(weight=self.lin.weight, turned=turned, bias=self.lin.bias)
        return x @ turned + self.lin.bias

    def encode(self, x: Tensor) -> Tensor:
        return x * self.lin.bias


class Outer(nn.Module):
    """Runs ``read`` in the forward of its second block, or in its own."""

    def __init__(self) -> None:
        super().__init__()
        self.side: dict[str, Any] = {}
        self.blocks = nn.ModuleList([Inner(self.side), nn.Linear(FEATURES, FEATURES)])
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.read: Callable[..., Any] = lambda model, x: x

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x * self.scale)
        x = self.read(self, x)
        return self.blocks[1](x)

    def encode(self, x: Tensor) -> Tensor:
        return self(x)


def models() -> dict[str, Any]:
    """Return the model, sharded in the ways that there are."""
    return {
        "wrapper": nested(make(Outer)),
        "flat": nested(make(Outer), flatten_parameters=True),
        "rows": nested(make(Outer), shard_param_on_dim_0=True),
        "in place": in_place(make(Outer)),
    }


def inner_of(model: Any) -> Any:
    """Return the first block, without a wrapper."""
    return getattr(model.blocks[0], "module", model.blocks[0])


# ---------------------------------------------------------------- shards outside of forwards

MIXING: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda weight: weight.norm(),
    "linalg_vector_norm": lambda weight: torch.linalg.vector_norm(weight),
    "max": lambda weight: weight.max(),
    "matmul": lambda weight: weight @ weight.t(),
    "var": lambda weight: torch.var(weight),
    "normalize": lambda weight: F.normalize(weight, dim=0),
    "uniform_": lambda weight: nn.init.xavier_uniform_(weight),
    "normal_": lambda weight: nn.init.normal_(weight),
    "eye": lambda weight: nn.init.eye_(weight),
    "__setitem__": lambda weight: weight.__setitem__(0, 1.0),
    "mean of squares": lambda weight: weight.square().mean(),
    "norm of a vector": lambda weight: torch.nn.utils.parameters_to_vector([weight, weight]).norm(),
    "loss": lambda weight: F.mse_loss(weight, torch.zeros_like(weight)),
    "row": lambda weight: weight[0],
    "parts": lambda weight: weight.chunk(2),
    "sums of columns": lambda weight: weight.square().sum(0),
    "norms": lambda weight: torch._foreach_norm([weight]),
}
ELEMENTWISE: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda weight: weight.square().sum().backward(),
    "loss": lambda weight: F.l1_loss(weight, torch.zeros_like(weight), reduction="sum"),
    "vector": lambda weight: torch.cat([weight.flatten(), weight.view(-1)]).abs().sum(),
    "several": lambda weight: torch._foreach_mul([weight, weight], 2.0),
    "max": lambda weight: torch.max(weight, weight),
    "zeros_": lambda weight: nn.init.zeros_(weight),
    "average": lambda weight: weight.data.lerp_(weight.data, 0.5),
    "local": lambda weight: weight.to_local().norm(),
    "known": lambda weight: (weight.numel(), weight.shape, weight.grad, repr(weight)),
}


@scenarios.add
def outside(rank: int) -> dict[str, dict[str, str]]:
    import torch_xla

    found: dict[str, dict[str, str]] = {}
    sharded = models()
    for name in ("rows", "in place"):
        weight = sharded[name].blocks[1].weight
        uses = {**MIXING, **{f"{each} elementwise": use for each, use in ELEMENTWISE.items()}}
        found[name] = {each: message(partial(use, weight)) for each, use in uses.items()}
        torch_xla.sync()
    return found


@pytest.mark.parametrize("name", MIXING)
def test_a_shard_is_not_used_as_if_it_were_the_full_parameter(name: str) -> None:
    for found in result("outside").values():
        assert re.match(r"RuntimeError: the shard of weight was used \(by \w+\)", found[name])
        assert "Each rank holds another part" in found[name]
        assert "summon_full_params" in found[name]


def test_shards_may_be_computed_with_element_by_element() -> None:
    for found in result("outside").values():
        assert {found[f"{name} elementwise"] for name in ELEMENTWISE} == {"nothing was raised"}


@scenarios.add
def parametrized(rank: int) -> list[str]:
    weight_norm = torch.nn.utils.parametrizations.weight_norm
    found, sharded = [], models()
    for name in ("wrapper", "rows", "in place"):
        block = sharded[name].blocks[1]
        found.append(message(partial(weight_norm, getattr(block, "module", block))))
    return found


def test_a_parametrization_of_a_shard_is_refused() -> None:
    for each in result("parametrized"):
        assert each.startswith("RuntimeError: a parametrization of weight was registered")


# ---------------------------------------------------------------- changed in a forward


def _clamp(weight: Tensor) -> None:
    weight.data.clamp_(-0.1, 0.1)


def _fill_view(weight: Tensor) -> None:
    weight.detach().view(-1)[:1].zero_()


def _give_data(weight: Tensor) -> None:
    weight.data = weight.data * 0.5


@scenarios.add
def changed(rank: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for change in (_clamp, _fill_view, _give_data):
        # By the unit that has it; the wrapped module is ``model``.
        read = partial(lambda change, model, x: change(model.scale) or x, change)
        found[change.__name__] = []
        for model in models().values():
            getattr(model, "module", model).read = read
            for grads in (torch.enable_grad, torch.inference_mode):
                with grads():
                    found[change.__name__].append(message(partial(model, rows())))
    return found


def test_a_parameter_whose_data_a_forward_changes_is_refused_by_name() -> None:
    for found in result("changed").values():
        assert len(found) == 8
        for each in found:
            assert each.startswith("ValueError: scale was changed in place in the forward"), each


# ---------------------------------------------------------------- held after reshard

USES: dict[str, Callable[[dict[str, Any], Tensor], Tensor]] = {
    "scaled": lambda side, x: x * side["bias"],
    "matrix": lambda side, x: x @ side["weight"],
    "view": lambda side, x: x @ side["turned"],
    "keyword": lambda side, x: torch.lerp(x, x, weight=side["bias"]),
    "list": lambda side, x: torch.stack([side["bias"], side["bias"]]),
    "operator": lambda side, x: torch.ops.aten.mul.Tensor(x, side["bias"]),
    "in place": lambda side, x: x.mul_(side["bias"]),
    "copied": lambda side, x: copy.deepcopy(side["bias"].detach()),
}


@scenarios.add
def held(rank: int) -> dict[str, dict[str, Any]]:
    return {name: _held(model) for name, model in models().items()}


def _held(model: Any) -> dict[str, Any]:
    whole, side = getattr(model, "module", model), inner_of(model).side
    model(rows()).sum().backward()
    uses = [partial(use, side) for use in USES.values()]
    found: dict[str, Any] = {"after backward": [message(partial(use, rows())) for use in uses]}
    found["in forward"] = []
    for use in uses:
        whole.read = lambda model, x, use=use: use(x)
        found["in forward"].append(message(lambda: model(rows())))
    whole.read = lambda model, x: x
    y = model(rows()).tanh()
    weight, turned = side["weight"], side["turned"]
    found["known"] = [tuple(weight.shape), turned.size(0), len(weight), str(weight.dtype)]
    found["shown"] = repr(side["bias"])
    with torch._C.DisableTorchFunctionSubclass():
        found["data"] = {tuple(each.shape) for each in side.values()}
    y.register_hook(lambda grad: grad * side["bias"].sum())
    found["in backward"] = [message(y.sum().backward)]
    with torch.no_grad():
        model(rows())
        found["without gradients"] = [message(lambda: rows() * side["bias"])]
    found["pickled"] = [message(lambda: pickle.dumps(side["bias"]))]
    return found


def test_a_held_parameter_raises_while_its_unit_is_sharded() -> None:
    for found in result("held").values():
        known, shown, data = (found.pop(key) for key in ("known", "shown", "data"))
        assert known == [HIDDEN_SHAPE, FEATURES, FEATURES, "torch.float32"]
        assert shown == "ReshardedParam(lin.bias)"
        assert len(data) == 1  # that of a dummy, so the memory is freed
        for each in itertools.chain(*found.values()):
            assert re.match(r"RuntimeError: lin\.(bias|weight) was used", each)
            assert "while its FSDP unit is sharded" in each
            assert "register_fsdp_forward_method" in each
            assert "reshard_after_forward=False" in each


@scenarios.add
def held_and_not_freed(rank: int) -> dict[str, Any]:
    model = nested(make(Outer), reshard_after_forward=False)
    whole, side = model.module, inner_of(model).side
    whole.read = lambda model, x: x * side["bias"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(rows()).sum().backward()
    plain = make(Outer)
    plain.read = lambda model, x: x * model.side["bias"]
    plain(rows().cpu()).sum().backward()
    full = inner_of(model).lin.bias.full_tensor()
    found = {
        "value": torch.equal((side["bias"] * 1).cpu(), full.cpu()),
        "reads": model.scale.grad.cpu()[:1].item() if rank == 0 else None,
        "plain": plain.scale.grad.item(),
    }
    optimizer.step()
    found["after the step"] = message(lambda: side["bias"] * 1)
    return found


def test_a_held_parameter_that_is_not_freed_is_there_until_its_shards_change() -> None:
    found = result("held_and_not_freed")
    assert found["value"]
    torch.testing.assert_close(found["reads"], found["plain"])
    assert "lin.bias was used (by mul)" in found["after the step"]


class _TimesData(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.data = weight.data
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.data.T, None


class DataNet(nn.Module):
    """Its blocks compute with ``weight.data``, and keep it for their backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_DataBlock(), _DataBlock()])
        self.returned: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, *self.returned = block(x)
        return x


class _DataBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.lin(x)
        bias, part = self.lin.bias.data, self.lin.weight.data.T[1:]
        if h.requires_grad:
            h.register_hook(lambda grad: grad * (1 + bias.sum() + part.sum()))
        h = _TimesData.apply(h, self.lin.weight) + h @ self.lin.weight.data
        return h, self.lin.weight.data, self.lin.bias.data * 2


@scenarios.add
def data(rank: int) -> dict[str, Any]:
    import torch_xla

    from xla_fsdp import FSDPModule
    from xla_fsdp.fsdp.engine.shard_tensor import gather_like

    def trained(model: Any, x: Tensor) -> tuple[list[Tensor], list[Any]]:
        model(x).square().sum().backward()
        return getattr(model, "module", model).returned, list(model.parameters())

    def inferred(model: Any, x: Tensor) -> list[Tensor]:
        with torch.inference_mode(not isinstance(model, FSDPModule)), torch.no_grad():
            y = model(x)
        return [y, *getattr(model, "module", model).returned]

    plain, low = make(DataNet), nested(make(DataNet), compute_dtype=torch.bfloat16)
    returned, params = trained(plain, rows().cpu())
    found: dict[str, Any] = {"plain": [*returned, *(param.grad for param in params)]}
    found["plain, inferred"] = inferred(plain, rows().cpu())
    for name, model in (("wrapper", nested(make(DataNet))), ("in place", in_place(make(DataNet)))):
        returned, params = trained(model, rows())
        found[name] = [*returned, *(gather_like(param, param.grad) for param in params)]
        found[f"{name}, inferred"] = inferred(model, rows())
    returned, params = trained(low, rows())
    held = [returned[0], gather_like(params[-2], params[-2].detach()).to(torch.bfloat16)]
    torch_xla.sync()
    found["low"] = [tensor.cpu() for tensor in held]
    return {name: [tensor.cpu() for tensor in each] for name, each in found.items()}


def test_data_of_a_parameter_that_somebody_holds_keeps_its_value() -> None:
    found = result("data")
    for name in ("wrapper", "in place"):
        torch.testing.assert_close(found[name], found["plain"])
        torch.testing.assert_close(found[f"{name}, inferred"], found["plain, inferred"])
    assert torch.equal(*found["low"])


@scenarios.add
def two_passes(rank: int) -> dict[str, list[Tensor]]:
    from xla_fsdp.fsdp.engine.shard_tensor import gather_like

    def grads(model: Any, x: Tensor) -> list[tuple[Any, Tensor]]:
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [(p, p.grad) for p in model.blocks[0].parameters() if p.grad is not None]

    found = {"plain": [grad for _, grad in grads(make(HoldingNet), rows().cpu())]}
    for name, options in (("frees", {}), ("keeps", {"reshard_after_forward": False})):
        model = nested(make(HoldingNet), **options)
        found[name] = [gather_like(param, grad).cpu() for param, grad in grads(model, rows())]
    return found


def test_a_graph_that_runs_backward_twice_reads_the_parameters_twice() -> None:
    found = result("two_passes")
    torch.testing.assert_close(found["frees"], found["plain"])
    torch.testing.assert_close(found["keeps"], found["plain"])


# ---------------------------------------------------------------- shards in a forward

READS: dict[str, Callable[[Any, Tensor], Any]] = {
    "sum": lambda lin, x: x * lin.weight.sum(),
    "product": lambda lin, x: x @ lin.weight,
    "broadcast": lambda lin, x: x + lin.bias,
    "detached": lambda lin, x: x + lin.bias.detach(),
    "data": lambda lin, x: x + lin.bias.data * 2,
    "turned": lambda lin, x: x @ lin.weight.T,
    "list": lambda lin, x: torch.cat([lin.bias, lin.bias]),
    "argument": lambda lin, x: lin.bias,
    "in_place": lambda lin, x: lin.weight.data.add_(x.sum()),
    "norm": lambda lin, x: torch.nn.utils.get_total_norm([lin.weight]),
}


@scenarios.add
def read_by_parents(rank: int) -> list[str]:
    sharded = models()
    del sharded["flat"]  # the module has no such attribute
    found = [each for model in sharded.values() for each in _read_by_parent(model)]
    return [*found, _read_by_parent_that_calls_itself()]


def _read_by_parent_that_calls_itself() -> str:
    from xla_fsdp import register_fsdp_forward_method

    model = in_place(make(Outer))
    register_fsdp_forward_method(model, "encode")
    model.read = lambda model, x: x + inner_of(model).lin.bias
    return message(lambda: model.encode(rows()))


def _read_by_parent(model: Any) -> list[str]:
    whole, lin, found = getattr(model, "module", model), inner_of(model).lin, []
    for read in READS.values():
        whole.read = lambda model, x, read=read: read(lin, x)
        found.append(message(lambda: model(rows())))
    with torch.no_grad():
        found.append(message(lambda: model(rows())))
    whole.read = lambda model, x: x
    model(rows()).sum().backward()  # as if nothing had been
    return found


def test_a_shard_raises_in_the_forward_of_another_unit() -> None:
    for each in result("read_by_parents"):
        assert each.startswith("ShardUsedError: the shard of lin.")
        for advice in ("register_fsdp_forward_method", "summon_full_params", "the outer unit"):
            assert advice in each


@scenarios.add
def harmless(rank: int) -> dict[str, Any]:
    from xla_fsdp import register_fsdp_forward_method

    found: dict[str, Any] = {}
    plain = make(Outer)

    def look(model: Any, x: Tensor) -> Tensor:
        inner = getattr(model.blocks[0], "module", model.blocks[0])
        weight = inner.lin.weight
        found["shape"] = (tuple(weight.shape), weight.size(1), weight.numel(), weight.ndim)
        found["kinds"] = {str(param.dtype) for param in model.parameters()}
        found["device"] = {param.device.type for param in model.parameters()}
        found["flags"] = [weight.requires_grad, weight.is_leaf, weight.is_floating_point()]
        found["grad"] = weight.grad is None
        found["state"] = sorted(model.state_dict())
        x = x.to(weight).type_as(weight) + weight.new_zeros(FEATURES)
        return model.blocks[0].encode(x)

    def summon(model: Any, x: Tensor) -> Tensor:
        with model.summon_full_params(model.blocks[0], writeback=False):
            return x + inner_of(model).lin.bias.detach()

    def unshard(model: Any, x: Tensor) -> Tensor:
        model.blocks[0].unshard()
        return x + inner_of(model).lin.bias

    plain.read = lambda model, x: model.blocks[0].encode(x)
    found["plain encoded"] = plain(rows().cpu())
    plain.read = lambda model, x: x + inner_of(model).lin.bias
    found["plain added"] = plain(rows().cpu())
    model = in_place(make(Outer))
    register_fsdp_forward_method(model.blocks[0], "encode")
    for name, read in (("encoded", look), ("summoned", summon), ("unsharded", unshard)):
        model.read = read
        found[name] = model(rows()).cpu()
    return found


def test_what_does_not_compute_with_a_shard_works_in_a_forward() -> None:
    found = result("harmless")
    assert found["shape"] == (HIDDEN_SHAPE, FEATURES, FEATURES * FEATURES, 2)
    assert found["kinds"] == {"torch.float32"}
    assert found["device"] == {"xla"}
    assert found["flags"] == [True, True, True]
    assert "blocks.0.lin.weight" in found["state"]
    torch.testing.assert_close(found["encoded"], found["plain encoded"])
    torch.testing.assert_close(found["summoned"], found["plain added"])
    torch.testing.assert_close(found["unsharded"], found["plain added"])


class Averaging(nn.Module):
    """Averages one block's parameters into another's, in its forward (momentum encoders do)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(2)])

    @torch.no_grad()
    def average(self) -> None:
        pairs = zip(self.blocks[0].parameters(), self.blocks[1].parameters(), strict=True)
        for number, (param, mean) in enumerate(pairs):
            if number:
                mean.data = mean.data * 0.9 + param.data * (1 - 0.9)
            else:
                mean.lerp_(param, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.average()
        return self.blocks[1](self.blocks[0](x))


@scenarios.add
def averaged(rank: int) -> list[list[Tensor]]:
    plain, model = make(Averaging), nested(make(Averaging))
    plain(rows().cpu())
    model(rows())
    return [
        [param.detach() for param in plain.blocks[1].parameters()],
        [param.full_tensor().cpu() for param in model.blocks[1].parameters()],
    ]


def test_shards_may_be_averaged_in_a_forward() -> None:
    plain, found = result("averaged")
    torch.testing.assert_close(found, plain)


class Stepping(nn.Module):
    """Whose forward is a training step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(2)])
        self.returned: list[Any] = []

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        optimizer = torch.optim.AdamW(self.blocks[0].parameters(), lr=0.1, weight_decay=0.1)
        loss = self.blocks[1](self.blocks[0](x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), *self.returned


@scenarios.add
def stepped(rank: int) -> dict[str, Any]:
    plain, model = make(Stepping), nested(make(Stepping))
    plain(rows().cpu())
    model(rows())
    found: dict[str, Any] = {
        "plain": [param.detach() for param in plain.blocks[0].parameters()],
        "found": [param.full_tensor().cpu() for param in model.blocks[0].parameters()],
    }
    model.module.returned.append(model.blocks[0].weight)
    return {**found, "output": message(lambda: model(rows()))}


def test_an_optimizer_may_step_in_a_forward() -> None:
    found = result("stepped")
    torch.testing.assert_close(found["found"], found["plain"])


def test_a_shard_is_no_output() -> None:
    assert "the shard of weight was used (by returning it)" in result("stepped")["output"]


@scenarios.add
def copies(rank: int) -> list[bool]:
    """Copy and pickle a model while somebody holds its parameters."""
    model = in_place(make(Outer))
    held = model.side.copy()
    model(rows()).sum().backward()
    held.update(model.side)
    model.side.clear()
    again = [copy.deepcopy(model), pickle.loads(pickle.dumps(model.state_dict()))]
    found = [torch.equal(again[0](rows()).cpu(), model(rows()).cpu())]
    return [*found, sorted(again[1]) == sorted(model.state_dict()), len(held) > 0]


def test_a_model_is_copied_while_its_parameters_are_held() -> None:
    assert result("copies") == [True, True, True]


# ---------------------------------------------------------------- outside of forwards


class Scaled(nn.Module):
    """A block, and a scale that a loss function reads."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(FEATURES, FEATURES)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


AMONG_ACTIVATIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "scale": lambda model, out: out * model.scale,
    "of a result": lambda model, out: model.scale.exp() * out,
    "of a view": lambda model, out: out + model.scale.view(1, -1),
    "loss": lambda model, out: out.sum() * model.scale,
    "no gradients": lambda model, out: out.detach() - model.scale,
    "lookup": lambda model, out: model.lin.weight[torch.tensor([0], device=out.device)],
}

ALONE: dict[str, Callable[[Any, Tensor], Any]] = {
    "penalty": lambda model, out: out.sum() + 0.1 * model.lin.weight.square().sum(),
    "of several": lambda model, out: sum(p.abs().sum() for p in model.parameters()),
    "from a start": lambda model, out: (model.lin.weight - model.lin.weight.detach()).abs().sum(),
    "number": lambda model, out: (model.scale * torch.tensor(2.0, device=out.device)).sum(),
    "averages": lambda model, out: torch._foreach_lerp(
        [p.detach().clone() for p in model.parameters()], list(model.parameters()), 0.5
    ),
}


@scenarios.add
def among_activations(rank: int) -> dict[str, Any]:
    from xla_fsdp import XlaFullyShardedDataParallel, fully_shard

    found: dict[str, Any] = {}
    for how, shard in {
        "wrapper": XlaFullyShardedDataParallel,
        "rows": partial(XlaFullyShardedDataParallel, shard_param_on_dim_0=True),
        "in place": fully_shard,
    }.items():
        model = shard(make(Scaled))
        out = model(rows())
        for name, use in (AMONG_ACTIVATIONS | ALONE).items():
            found[f"{how}, {name}"] = message(partial(use, model, out))
    return found


def test_outside_of_forwards_a_shard_computes_with_shards_and_numbers_only() -> None:
    found = result("among_activations")
    for how in ("wrapper", "rows", "in place"):
        for name in AMONG_ACTIVATIONS:
            assert "outside of the forward of its FSDP unit" in found[f"{how}, {name}"], name
            shard = "lin.weight" if name == "lookup" else "scale"
            assert f"the shard of {shard} was used" in found[f"{how}, {name}"]
        for name in ALONE:
            assert found[f"{how}, {name}"] == "nothing was raised", name
