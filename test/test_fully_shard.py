"""``fully_shard`` on two ranks: what it makes of a module, and what its methods do."""

from __future__ import annotations

from typing import Any

from torch import nn

from test.models import WIDTH, Net
from test.scenarios import Scenarios, make, rows, states

scenarios = Scenarios(__name__)
result = scenarios.result


def in_place(model: Any, **options: Any) -> Any:
    """``model`` with each block a unit, and the rest the root."""
    from xla_fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


@scenarios.add
def what_it_makes(rank: int) -> dict[str, Any]:
    from xla_fsdp import FSDPModule, fully_shard

    plain, model = make(), make()
    before = model.blocks[0]
    returned = in_place(model)
    sequence = fully_shard(make(lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))))
    return {
        "same": returned is model and model.blocks[0] is before,
        "classes": [type(model).__name__, type(model.blocks[1]).__name__],
        "instance": isinstance(model, FSDPModule) and isinstance(model, Net),
        "names": [n for n, _ in model.named_parameters()]
        == [n for n, _ in plain.named_parameters()],
        "keys": list(model.state_dict()) == list(plain.state_dict()),
        "shape": tuple(model.blocks[0].up.weight.shape),
        "slice": type(sequence[:1]).__name__,
        "equal": (plain(rows().cpu()) - model(rows()).cpu()).abs().max().item() < 1e-5,
        "states": states(model),
    }


def test_a_module_is_sharded_in_place() -> None:
    assert result("what_it_makes") == {
        "same": True,
        "classes": ["FSDPNet", "FSDPBlock"],
        "instance": True,
        "names": True,
        "keys": True,
        "shape": (9, WIDTH),  # of 17 rows
        "slice": "Sequential",
        "equal": True,
        "states": {"SHARDED"},
    }
