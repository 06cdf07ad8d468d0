"""Stepping 16-bit parameters in fp32: masters, stochastic rounding, and the noise that it takes.

What does not need ranks runs in this process on the host, where the same code runs as on a device.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.replicas import assert_same_state, batch, largest_error, loss_of, on_device
from test.common.scenarios import Scenarios, fsdp, make, message

scenarios = Scenarios(__name__)
scenario, result = scenarios.add, scenarios.result

COUNT = 20_000
SIGMAS = 5.0
BF16 = torch.bfloat16


def high(params: Any, inner_class: Any = torch.optim.SGD, **options: Any) -> Any:
    from xla_fsdp.optim import HighPrecisionOptimizer

    return HighPrecisionOptimizer(params, inner_class, **options)


def bits(salt: int, count: int = COUNT) -> Tensor:
    from xla_fsdp.distributed.random_bits import random_bits

    return random_bits(torch.Size([count]), torch.tensor([salt], dtype=torch.int32))


def rounded(value: Tensor, salt: int) -> Tensor:
    from xla_fsdp.optim.high_precision import stochastic_round

    return stochastic_round(value, bits(salt, value.numel()).reshape(value.shape))


# ---------------------------------------------------------------- noise and rounding


@pytest.mark.parametrize("salt", [0, 1, -1, 123456789])
def test_every_bit_is_set_half_of_the_time(salt: int) -> None:
    drawn = bits(salt)
    for place in range(32):
        share = ((drawn >> place) & 1).double().mean().item()
        assert abs(share - 0.5) <= SIGMAS * 0.5 / math.sqrt(COUNT)


@pytest.mark.parametrize(
    "other", [("next step", 1), ("next element", None), ("other bit", 1 << 20)]
)
def test_uses_that_differ_a_little_have_nothing_in_common(other: tuple[str, int | None]) -> None:
    _, change = other
    first = bits(7)
    second = first.roll(1) if change is None else bits(7 + change)
    for place in range(0, 32, 3):
        agree = (((first ^ second) >> place) & 1).double().mean().item()
        assert abs(agree - 0.5) <= SIGMAS * 0.5 / math.sqrt(COUNT)


def test_salts_of_seeds_steps_parameters_and_ranks_differ() -> None:
    from itertools import product

    from xla_fsdp.distributed.random_bits import salt_of

    salts = {salt_of(*each) for each in product(range(5), range(20), range(20), range(8))}
    assert len(salts) >= 5 * 20 * 20 * 8 - 1  # one chance meeting among 2**32 is likely enough
    assert all(-(2**31) <= salt < 2**31 for salt in salts)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("share", [1 / 256, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**100])
def test_rounding_is_right_on_average(sign: float, share: float, scale: float) -> None:
    low, high_end = 1.0, 1.0 + 2.0**-7  # neighbours in bf16
    value = torch.full((COUNT,), sign * scale * (low + share * (high_end - low)))
    up = rounded(value, 3).double().abs() / scale
    assert set(up.tolist()) <= {low, high_end}
    found = (up == high_end).double().mean().item()
    assert abs(found - share) <= SIGMAS * math.sqrt(share * (1 - share) / COUNT) + 2**-16


def test_rounding_leaves_what_bf16_has() -> None:
    special = torch.tensor([0.0, -0.0, 1.5, -3.0e38, float("inf"), -float("inf"), float("nan")])
    exact = special.to(BF16).float()
    for salt in range(20):
        assert torch.equal(rounded(exact, salt).nan_to_num(7.0), exact.to(BF16).nan_to_num(7.0))


# ---------------------------------------------------------------- steps


def weight(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.to(BF16))


def step_all(optimizer: Any, param: nn.Parameter, grads: list[Tensor]) -> None:
    for grad in grads:
        param.grad = grad.to(param.dtype)
        optimizer.step()


GRADS = [torch.linspace(-1, 1, 64).roll(step).to(BF16).float() for step in range(6)]


def test_rounding_may_begin_after_a_state_was_saved_without() -> None:
    param = weight(torch.linspace(-1, 1, 64))
    plain = high([param], lr=0.1, momentum=0.9)
    step_all(plain, param, GRADS[:2])
    rounding = high([param], lr=0.1, momentum=0.9, stochastic_rounding=True)
    rounding.load_state_dict(plain.state_dict())
    step_all(rounding, param, GRADS[2:3])
    assert rounding.param_groups[0]["rounded_steps"] == 1


@pytest.mark.parametrize(
    ("inner_class", "options"),
    [
        (torch.optim.AdamW, {"lr": 1e-2}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adagrad, {"lr": 0.1}),
    ],
)
@pytest.mark.parametrize("rounds", [False, True])
def test_masters_train_as_in_fp32(inner_class: Any, options: dict[str, Any], rounds: bool) -> None:
    start = torch.linspace(-2, 2, 64).to(BF16).float()
    param, reference = weight(start), nn.Parameter(start.clone())
    optimizer = high([param], inner_class, stochastic_rounding=rounds, **options)
    plain = inner_class([reference], **options)
    step_all(optimizer, param, GRADS)
    step_all(plain, reference, GRADS)
    state = optimizer.state[param]
    assert torch.equal(state["master"], reference.detach())
    assert all(torch.equal(state[name], value) for name, value in plain.state[reference].items())
    if rounds:
        assert largest_error([param.detach().float()], [reference.detach()]) <= 2.0 * 2**-7
    else:
        assert torch.equal(param.detach(), reference.detach().to(BF16))


def test_small_updates_add_up_only_in_high_precision() -> None:
    grad = torch.ones(COUNT)
    found = {}
    for name, options in (
        ("masters", {}),
        ("rounding", {"master_weights": False, "stochastic_rounding": True}),
    ):
        param = weight(torch.ones(COUNT))
        step_all(high([param], lr=2.0**-10, **options), param, [grad] * 16)
        found[name] = param.detach().double()
    plain = weight(torch.ones(COUNT))
    step_all(torch.optim.SGD([plain], lr=2.0**-10), plain, [grad] * 16)
    expected = 1.0 - 16 * 2.0**-10
    assert torch.equal(plain.detach(), torch.ones(COUNT, dtype=BF16))  # all of it is lost
    assert torch.equal(found["masters"], torch.full((COUNT,), expected, dtype=torch.float64))
    # Each step moves by one bit of 2**-8 with the probability 2**-2.
    deviation = 2.0**-8 * math.sqrt(16 * 2**-2 * (1 - 2**-2))
    assert abs(found["rounding"].mean().item() - expected) <= SIGMAS * deviation / math.sqrt(COUNT)
    assert found["rounding"].std().item() == pytest.approx(deviation, rel=0.05)


def test_without_masters_nothing_wide_is_kept() -> None:
    param = weight(torch.ones(64))
    optimizer = high([param], lr=0.1, master_weights=False, stochastic_rounding=True)
    step_all(optimizer, param, GRADS)
    assert "master" not in optimizer.state[param]
    assert [part.numel() for part in optimizer.inner.param_groups[0]["params"]] == [0]


def test_other_dtypes_are_stepped_as_they_are() -> None:
    low, single, half = (
        weight(torch.ones(3)),
        nn.Parameter(torch.ones(3)),
        nn.Parameter(torch.ones(3).half()),
    )
    optimizer = high([low, single, half], lr=0.25)
    for param in (low, single, half):
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert [("master" in optimizer.state[p]) for p in (low, single, half)] == [True, False, True]
    assert all(torch.equal(p.detach().float(), torch.full((3,), 0.75)) for p in (low, single, half))


def test_random_number_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    param = weight(torch.ones(64))
    optimizer = high([param], lr=0.1, master_weights=False, stochastic_rounding=True)
    step_all(optimizer, param, GRADS)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("options", [{}, {"master_weights": False}])
def test_a_saved_job_goes_on_with_the_same_bits(options: dict[str, Any]) -> None:
    make_optimizer = partial(
        high, inner_class=torch.optim.AdamW, lr=1e-2, stochastic_rounding=True, **options
    )
    param = weight(torch.linspace(-2, 2, 64))
    optimizer = make_optimizer([param])
    step_all(optimizer, param, GRADS[:3])
    again = weight(param.detach().clone())
    loaded = make_optimizer([again])
    loaded.load_state_dict(_copied(optimizer.state_dict()))
    step_all(optimizer, param, GRADS[3:])
    step_all(loaded, again, GRADS[3:])
    assert torch.equal(param.detach(), again.detach())
    assert loaded.param_groups[0]["rounded_steps"] == len(GRADS)
    assert_same_state(loaded.state_dict(), optimizer.state_dict(), 0)


def _copied(state: Any) -> Any:
    import copy

    return copy.deepcopy(state)


def test_groups_and_schedulers() -> None:
    first, second = weight(torch.ones(4)), weight(torch.ones(4))
    optimizer = high([{"params": [first], "lr": 0.5}], lr=0.25)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step_all(optimizer, first, [torch.ones(4)])
    scheduler.step()
    optimizer.add_param_group({"params": [second]})
    first.grad, second.grad = torch.ones(4, dtype=BF16), torch.ones(4, dtype=BF16)
    assert optimizer.step(lambda: 3.5) == 3.5
    assert first.tolist() == [0.25] * 4  # 1 - 0.5 - 0.25
    assert second.tolist() == [0.75] * 4
    optimizer.zero_grad()
    assert first.grad is None


def test_mistakes_are_told() -> None:
    neither = message(lambda: high([weight(torch.ones(1))], lr=0.1, master_weights=False))
    assert "Set one of them" in neither
    half = nn.Parameter(torch.ones(2).half())
    assert "Use master_weights alone" in message(
        lambda: high([half], lr=0.1, stochastic_rounding=True)
    )
    found_inf = torch.zeros(())
    assert "cannot skip a step" in message(lambda: high([half], lr=0.1).step(found_inf=found_inf))


# ---------------------------------------------------------------- on ranks


class Low(nn.Module):
    """A layer in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 64, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        return self.inp(x.to(BF16)).float()


ROUNDING: dict[str, Any] = {"lr": 0.01, "master_weights": False, "stochastic_rounding": True}


REPLICAS = ("whole", "grouped")


@scenario
def on_ranks(rank: int) -> dict[str, Any]:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as metrics

    from xla_fsdp import optim_state_dict
    from xla_fsdp.optim import ZeroRedundancyOptimizer
    from xla_fsdp.xla.host import exchange

    found: dict[str, Any] = {}
    whole, sharded, sliced = on_device(Low), fsdp(make(Low)), on_device(Low)
    mastered = fsdp(make(Low))
    apart = {"sharding_groups": [[0], [1]], "sharding_rank": 0, "sharding_world_size": 1}
    grouped = fsdp(make(Low), **apart)
    jobs = {
        "whole": (whole, high(whole.parameters(), **ROUNDING)),
        "grouped": (grouped, high(grouped.parameters(), **ROUNDING)),
        "sharded": (sharded, high(sharded.parameters(), **ROUNDING)),
        "mastered": (mastered, high(mastered.parameters(), torch.optim.AdamW, lr=0.01)),
        "sliced": (
            sliced,
            ZeroRedundancyOptimizer(
                sliced.parameters(),
                type(high(whole.parameters(), lr=0.1)),
                inner_class=torch.optim.AdamW,
                lr=0.01,
            ),
        ),
    }
    for name, (model, optimizer) in jobs.items():
        for step in range(4):
            # Replicas are stepped with equal gradients.
            x = batch(step, 0 if name in REPLICAS else rank).to(torch_xla.device())
            optimizer.zero_grad()
            loss_of(model, x).backward()
            before = xm.get_rng_state()
            optimizer.step()
            found[f"{name} rng"] = xm.get_rng_state() == before
            torch_xla.sync()
            if step == 2:
                exchange(b"")
                compiled = metrics.counter_value("UncachedCompile")
        exchange(b"")
        found[f"{name} compiled"] = metrics.counter_value("UncachedCompile") - compiled
        exchange(b"")
        found[name] = [param.detach().cpu() for param in model.parameters()]
    found["sharded state"] = optim_state_dict(mastered, jobs["mastered"][1])
    found["sliced state"] = jobs["sliced"][1].consolidate_state_dict()
    return found


def test_replicas_round_alike_and_shards_do_not() -> None:
    first, second = result("on_ranks", 0), result("on_ranks", 1)
    for name in (*REPLICAS, "sliced"):
        assert all(torch.equal(a, b) for a, b in zip(first[name], second[name], strict=True))
    assert not torch.equal(first["sharded"][0], second["sharded"][0])


def test_ranks_do_not_round_with_each_others_bits() -> None:
    from xla_fsdp.distributed.random_bits import salt_of

    first, second = (bits(salt_of(0, 0, 0, rank)) for rank in range(2))
    agree = ((first & 0xFFFF) == (second & 0xFFFF)).double().mean().item()
    assert agree <= 2**-16 + SIGMAS * math.sqrt(2**-16 / COUNT)


def test_the_devices_random_numbers_are_left_alone_and_programs_are_compiled_once() -> None:
    for name in (*REPLICAS, "sharded", "mastered", "sliced"):
        assert result("on_ranks")[f"{name} rng"]
        assert result("on_ranks")[f"{name} compiled"] == 0


def test_masters_are_state_like_any_other() -> None:
    sharded, sliced = result("on_ranks")["sharded state"], result("on_ranks")["sliced state"]
    for entries, shape in ((sharded["state"]["inp.weight"], (64, 5)), (sliced["state"][1], (64,))):
        assert set(entries) == {"step", "exp_avg", "exp_avg_sq", "master"}
        assert (entries["master"].shape, entries["master"].dtype) == (shape, torch.float32)
    # The same training, once sharded and once sliced.
    for number, name in enumerate(("inp.weight", "inp.bias")):
        own, other = sharded["state"][name]["master"], sliced["state"][number]["master"]
        assert largest_error([own], [other]) <= 1e-3
        value = result("on_ranks")["sliced"][number]
        assert torch.equal(other.to(BF16), value)
