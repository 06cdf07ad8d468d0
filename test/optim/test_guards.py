"""What is silently wrong with shards is refused. Two ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from test.common.models import FEATURES, WIDTH
from test.common.ranks import run_on_ranks
from test.common.scenarios import Scenarios, fsdp, make, message, nested, rows

scenarios = Scenarios(__name__)
scenario, result = scenarios.add, scenarios.result


@scenario
def optimizers(rank: int) -> dict[str, str]:
    early_model = make()
    early = torch.optim.SGD(early_model.parameters(), lr=0.1)
    early_model = nested(early_model)
    early_model(rows()).sum().backward()

    flat = nested(make(), flatten_parameters=True)
    biases = [p for n, p in flat.named_parameters() if n.endswith("bias")]
    others = [p for n, p in flat.named_parameters() if not n.endswith("bias")]
    groups = [{"params": others}, {"params": biases, "weight_decay": 0.0}]
    grouped = torch.optim.AdamW(groups, lr=0.1)
    flat(rows()).sum().backward()
    one_group = torch.optim.AdamW(flat.parameters(), lr=0.1)

    by_name = nested(make())
    named = dict(by_name.named_parameters())
    fine = torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if n.endswith("bias")], "weight_decay": 0.0},
            {"params": [p for n, p in named.items() if not n.endswith("bias")]},
        ]
    )
    by_name(rows()).sum().backward()
    plain = make(lambda: nn.Linear(2, 2))
    plain(torch.ones(1, 2)).sum().backward()
    stepped_model = make()
    stepped_model(rows().cpu()).sum().backward()
    stepped = torch.optim.SGD(stepped_model.parameters(), lr=0.1)
    stepped.step()
    nested(stepped_model)(rows()).sum().backward()
    flat_early = make()
    flat_optimizer = torch.optim.SGD(flat_early.head.parameters(), lr=0.1)
    flat_early = nested(flat_early, flatten_parameters=True)
    return {
        "early": message(early.step),
        "stepped before": message(stepped.step),
        "flat early": message(flat_optimizer.step),
        "flat": message(grouped.step),
        "flat, one group": message(one_group.step),
        "by name": message(fine.step),
        "plain": message(torch.optim.SGD(plain.parameters(), lr=0.1).step),
    }


def test_an_optimizer_must_hold_what_is_trained() -> None:
    found = result("optimizers")
    assert found["early"].startswith("ValueError: SGD holds scale as it was before wrapping; FSDP")
    assert "Create the optimizer after wrapping, from model.parameters()" in found["early"]
    assert found["stepped before"].startswith("ValueError: SGD holds norm.weight as it was")
    assert found["flat early"].startswith("ValueError: SGD holds one of scale, inp.weight, inp.bi")
    assert "ValueError: group 1 of AdamW is empty, and flat_param_0 joins scale" in found["flat"]
    assert "Set flatten_parameters=False to have groups by parameter" in found["flat"]
    for case in ("flat, one group", "by name", "plain"):
        assert found[case] == "nothing was raised"


@scenario
def functions(rank: int) -> dict[str, Any]:
    import torch_xla.core.xla_model as xm

    from xla_fsdp import LocalCollectives

    model, alone = nested(make()), fsdp(make(), collectives=LocalCollectives())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for each in (model, alone):
        each(rows()).sum().backward()
    plain = make(lambda: nn.Linear(2, 2))
    plain(torch.ones(1, 2)).sum().backward()
    clip: Any = torch.nn.utils.clip_grad_norm_
    copied, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for each in (copied, unpickled):
        each(rows()).sum().backward()
    groups = [[each] for each in range(2)]
    return {
        "clip copy": message(lambda: clip(copied.parameters(), 1.0)),
        "clip unpickled": message(lambda: clip(unpickled.parameters(), 1.0)),
        "norms": [m.clip_grad_norm_(9.0).item() for m in (model, copied, unpickled)],
        "step over replicas": message(lambda: xm.reduce_gradients(optimizer, groups=groups)),
        "clip": message(lambda: clip(model.parameters(), 1.0)),
        "clip one": message(lambda: clip(next(model.parameters()), 1.0)),
        "clip whole": message(lambda: clip(alone.parameters(), 1.0)),
        "clip plain": message(lambda: clip(plain.parameters(), 1.0)),
        "step": message(lambda: xm.optimizer_step(optimizer)),
    }


def test_functions_that_know_nothing_of_shards() -> None:
    found = result("functions")
    for case in ("clip", "clip one", "clip copy", "clip unpickled"):
        assert found[case].startswith("RuntimeError: torch.nn.utils.clip_grad_norm_ was given")
        assert "Call xla_fsdp.clip_grad_norm_ with the same arguments" in found[case]
    assert found["clip whole"] == found["clip plain"] == "nothing was raised"
    assert found["step over replicas"] == "nothing was raised"
    assert len(set(found["norms"])) == 1
    assert found["step"].startswith("RuntimeError: xm.optimizer_step / xm.reduce_gradients was")


@scenario
def total_norms(rank: int) -> dict[str, Any]:
    """Norm and factor of torch's two functions, of shards, stacks, whole and ignored parameters."""
    import torch_xla

    from xla_fsdp import scan_blocks

    def after_backward(model: Any) -> Any:
        model(rows()).square().sum().backward()
        return model

    def stacked(model: Any) -> Any:
        scan_blocks(model.blocks, stacked=True)
        return model

    def ignoring(model: Any) -> Any:
        model.head.to(torch_xla.device())
        return fsdp(model, ignored_modules=[model.head])

    utils, found = torch.nn.utils, {}
    ways = {
        "nested": nested,
        "flat": lambda model: nested(model, flatten_parameters=True),
        "stacked": lambda model: stacked(nested(model)),
        "ignored": ignoring,
    }
    for name, way in ways.items():
        for order in (2.0, float("inf")):
            model, expected = after_backward(way(make())), after_backward(way(make()))
            params = list(model.parameters())
            norm = utils.get_total_norm([p.grad for p in params if p.grad is not None], order)
            utils.clip_grads_with_norm_(params, 0.5, norm)
            found[f"{name} {order}"] = [norm.item(), expected.clip_grad_norm_(0.5, order).item()]
            pairs = zip(params, expected.parameters(), strict=True)
            found[f"{name} {order}, gradients"] = all(
                torch.allclose(own.grad.cpu(), other.grad.cpu(), rtol=1e-5) for own, other in pairs
            )
    kept = nested(make())
    with kept.no_sync():
        after_backward(kept)
    grad = kept.parameters()
    found["kept"] = message(lambda: utils.clip_grads_with_norm_(grad, 1.0, torch.tensor(2.0)))
    bad = after_backward(nested(make()))
    bad.scale.grad.fill_(float("nan"))
    grads = [param.grad for param in bad.parameters()]
    found["not finite"] = message(lambda: utils.get_total_norm(grads, error_if_nonfinite=True))
    found["parameters"] = utils.get_total_norm(bad.parameters()).item()
    plain = make().to(torch_xla.device())
    plain.mid2.weight = plain.mid.weight  # which `to` unties on XLA
    after_backward(plain)
    found["plain"] = utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    return found


def test_norms_count_all_ranks() -> None:
    model = make()
    x = torch.linspace(-1, 1, 2 * FEATURES).reshape(2, FEATURES)
    model(x).square().sum().backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    for rank in range(2):
        found = result("total_norms", rank)
        for name in ("nested", "flat", "stacked", "ignored"):
            for order in (2.0, float("inf")):
                norm = torch.nn.utils.get_total_norm(grads, order).item()
                assert found[f"{name} {order}"] == pytest.approx([norm, norm], rel=1e-5)
                assert found[f"{name} {order}, gradients"], name
        norm = torch.nn.utils.get_total_norm(list(model.parameters())).item()
        assert found["parameters"] == pytest.approx(norm, rel=1e-5)
        assert found["plain"] == pytest.approx(
            torch.nn.utils.get_total_norm(grads).item(), rel=1e-5
        )
        assert "clip_grads_with_norm_ was called while gradients kept by no_sync()" in found["kept"]
        assert found["not finite"].startswith("RuntimeError: the gradients' norm of order 2.0 is")


class Lion(torch.optim.Optimizer):
    """X. Chen et al., Symbolic Discovery of Optimization Algorithms (2023): elementwise, but of a
    class that nobody knows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                param.sub_(0.01 * (0.9 * mean + 0.1 * param.grad).sign())
                mean.lerp_(param.grad, 0.01)


class Trusted(Lion):
    """With a ratio of norms that is at most 1, as LAMB's and LARS's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            ratio = (param.norm() / param.grad.norm()).clamp(max=1)
            param.sub_(0.01 * ratio * param.grad)


class Declared(Trusted):
    @staticmethod
    def is_elementwise(options: Any) -> bool:
        return True


def warned(rank: int) -> dict[str, list[str]]:
    import warnings

    from xla_fsdp import LocalCollectives
    from xla_fsdp.optim import HighPrecisionOptimizer, WholeParameterOptimizer

    sharded = nested(make(), collectives=LocalCollectives(0, 2))
    alone = nested(make(), collectives=LocalCollectives())
    matrix = make(lambda: nn.Linear(FEATURES, WIDTH, bias=False))
    rows_alone = fsdp(matrix, collectives=LocalCollectives(), shard_param_on_dim_0=True)
    plain = make()
    optim = torch.optim
    cases = {
        "Adafactor": (sharded, optim.Adafactor, {}),
        "Trusted": (sharded, Trusted, {}),
        "one rank, but flat": (alone, Trusted, {}),
        "16 bits": (sharded, HighPrecisionOptimizer, {"inner_class": Trusted}),
        "closure": (sharded, optim.LBFGS, {}),
        "Lion": (sharded, Lion, {}),
        "Declared": (sharded, Declared, {}),
        "whole": (sharded, WholeParameterOptimizer, {"optimizer_class": Trusted}),
        "one rank": (rows_alone, Trusted, {}),
        "plain": (plain, Trusted, {}),
        "AdamW": (sharded, optim.AdamW, {}),
        "Adagrad": (sharded, optim.Adagrad, {}),
    }
    found = {}
    for name, (model, make_one, options) in cases.items():
        optimizer = make_one(model.parameters(), **options)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            message(optimizer.step)
        found[name] = [str(each.message) for each in caught]
    return found


def test_only_optimizers_that_shards_mislead_are_warned_about() -> None:
    # On one rank, as below, with shards of two.
    [found] = run_on_ranks(warned, 1)
    assert {name for name, said in found.items() if said} == {
        "Adafactor", "Trusted", "one rank, but flat", "16 bits", "closure"
    }  # fmt: skip
    [said] = found["Trusted"]
    assert said.startswith("Trusted is not known to treat every element of a parameter by itself")
    assert "Step these by xla_fsdp.optim.WholeParameterOptimizer(params, Trusted, ...)" in said
    assert "xla_fsdp.optim.ZeroRedundancyOptimizer(params, LBFGS, ...)" in found["closure"][0]


def ignored_option(rank: int) -> list[str]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fsdp(make(lambda: nn.Linear(FEATURES, WIDTH)), auto_wrapper_callable=fsdp)
        whole = make(lambda: nn.Linear(FEATURES, WIDTH))
        fsdp(whole, ignored_modules=[whole])
    return [str(warning.message) for warning in caught]


def test_an_option_that_is_ignored_is_a_warning() -> None:
    # On one rank: what warnings are shown is global to the process, and ranks are threads.
    assert run_on_ranks(ignored_option, 1) == [
        [
            "auto_wrapper_callable is ignored without auto_wrap_policy",
            "ignored_modules holds the module that is wrapped: all of it is ignored, and nothing "
            "is sharded",
        ]
    ]


# ---------------------------------------------------------------- conversions


@scenario
def converted_by_swaps(rank: int) -> dict[str, Any]:
    """Dtypes after a conversion, for which torch was told to swap tensors."""
    from torch.__future__ import (
        get_swap_module_params_on_conversion,
        set_swap_module_params_on_conversion,
    )

    from xla_fsdp import fully_shard

    found: dict[str, Any] = {}
    set_swap_module_params_on_conversion(True)
    ways = {"wrapper": fsdp, "in place": fully_shard, "nested": nested}
    for name, shard in ways.items():
        model = shard(make())
        before = [id(param) for param in model.parameters()]
        model.to(torch.float64)
        x = rows().to(torch.float64).requires_grad_()
        model(x).sum().backward()
        same = before == [id(param) for param in model.parameters()]
        dtypes = {each.dtype for param in model.parameters() for each in (param, param.grad)}
        found[name] = (same, dtypes)
    plain = nn.Linear(2, 2)
    plain.to(torch.float64)
    found["plain"] = (get_swap_module_params_on_conversion(), {plain.weight.dtype})
    return found


def test_conversions_that_swap_tensors_keep_shards() -> None:
    for rank in range(2):
        found = result("converted_by_swaps", rank)
        assert found == dict.fromkeys(
            ("wrapper", "in place", "nested", "plain"), (True, {torch.float64})
        )
