"""What a unit makes of parameters."""

from __future__ import annotations

import warnings

from torch import nn

from test.common.ranks import run_on_ranks
from test.common.scenarios import fsdp


def hooked(rank: int) -> list[str]:
    """Return what is said of hooks on parameters, by name."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.register_hook(lambda grad: grad * 0)
    model[1].bias.register_post_accumulate_grad_hook(lambda param: None)
    model[2].weight.register_hook(lambda grad: grad * 0).remove()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fsdp(model)
    return [str(each.message) for each in caught if "hooks on" in str(each.message)]


def test_hooks_on_parameters_that_are_replaced_warn() -> None:
    [[said]] = run_on_ranks(hooked, 1)  # warnings are the process's, and ranks threads
    assert said.startswith("hooks on gradients of 0.weight, 1.bias are not called: the parameter")
