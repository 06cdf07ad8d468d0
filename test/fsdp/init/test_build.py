"""What a unit makes of parameters."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from test.common.ranks import run_on_ranks


def warned(rank: int, **options: Any) -> list[tuple[str, bool]]:
    """Return what is said of a model with hooks on gradients, and gradients, and whether the
    warnings name this file."""
    from xla_fsdp import XlaFullyShardedDataParallel

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    model[1:].zero_grad()
    model[0].weight.register_hook(lambda grad: grad * 0)
    model[1].bias.register_post_accumulate_grad_hook(lambda param: None)
    model[2].weight.register_hook(lambda grad: grad * 0).remove()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        XlaFullyShardedDataParallel(model, **options)
    found = [each for each in caught if "gradients of" in str(each.message)]
    return [(str(each.message), each.filename == __file__) for each in found]


def test_hooks_and_gradients_of_parameters_that_are_replaced_warn() -> None:
    [[hooks, grads]] = run_on_ranks(warned, 1)  # warnings are the process's, and ranks threads
    assert hooks[0].startswith("hooks on gradients of 0.weight, 1.bias are not called: the param")
    assert grads[0].startswith("gradients of 0.weight, 0.bias are dropped: the parameter was")
    assert (hooks[1], grads[1]) == (True, True)


def units_of_a_policy(rank: int) -> list[tuple[str, bool]]:
    from xla_fsdp.wrap import always_wrap_policy

    return warned(rank, auto_wrap_policy=always_wrap_policy)


def test_warnings_of_units_of_a_policy_name_the_callers_line() -> None:
    [found] = run_on_ranks(units_of_a_policy, 1)
    assert [is_here for _, is_here in found] == [True] * 3
