"""What is silently wrong with shards is refused. Two ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

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


def ignored_option(rank: int) -> list[str]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fsdp(make(lambda: nn.Linear(FEATURES, WIDTH)), auto_wrapper_callable=fsdp)
    return [str(warning.message) for warning in caught]


def test_an_option_that_is_ignored_is_a_warning() -> None:
    # On one rank: what warnings are shown is global to the process, and ranks are threads.
    assert run_on_ranks(ignored_option, 1) == [
        ["auto_wrapper_callable is ignored without auto_wrap_policy"]
    ]
