"""Say in files which rank's shards they hold, and refuse those of another rank.

A *place* is [rank, number of ranks] among the ranks that share a parameter, and then the same along
its tensor-parallel axis. Equal shards of replicas have one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from xla_fsdp.distributed.collectives import Collectives
from xla_fsdp.fsdp.engine.param import FSDPParam
from xla_fsdp.xla import ops

PLACES = "xla_fsdp_places"
"""Key of the places in the metadata of a model's state dict, and in an optimizer's state dict."""

Places = list[list[int]]


def places_of(shards: Iterable[tuple[FSDPParam, Collectives]]) -> Places:
    """Return the places of parameters and who shares them, each once; none of what is whole."""
    found = {tuple(_place(param, by)) for param, by in shards}
    return sorted(list(each) for each in found if each[1] * each[3] > 1)


def _place(param: FSDPParam, by: Collectives) -> tuple[int, int, int, int]:
    cut = next(
        (o.placement for o in param.originals if o.placement and o.placement.parts > 1), None
    )
    part = (0, 1) if cut is None else (cut.mesh.local_rank(ops.rank()), cut.parts)
    return (by.rank, by.num_shards, *part)


def refuse_other_places(saved: Any, own: Places, what: str) -> None:
    """Raise ValueError if ``what`` says that it holds other shards than those that are loaded.

    Args:
        saved: the places in a state dict; None if it tells none.
        own: of the parameters that are loaded.
        what: names the state dict.
    """
    if saved is not None and saved != own:
        raise ValueError(
            f"{what} holds {_told(saved)}, and this rank loads {_told(own)}. Each rank loads the "
            f"file that it has saved, on as many ranks. For other ranks, or a file of one rank "
            f"alone, save by xla_fsdp.save_checkpoint on all ranks, or save "
            f"xla_fsdp.full_state_dict(model) and xla_fsdp.optim_state_dict(model, optimizer), "
            f"which all ranks call"
        )


def _told(places: Sequence[Sequence[int]]) -> str:
    if not places:
        return "parameters that are not sharded"
    rank, ranks, part, parts = places[0]
    tensor_parallel = f" (tensor-parallel part {part} of {parts})" if parts > 1 else ""
    return f"the shards of rank {rank} of {ranks}{tensor_parallel}"
