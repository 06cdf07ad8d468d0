"""One rank of a job that uses FSDP2 on CPU: loads a DCP directory, checks it, saves it again.

python fsdp2_user.py RANK WORLD_SIZE RENDEZVOUS_FILE DCP_DIRECTORY MERGED_PTH NEW_DIRECTORY
"""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that FSDP2 has sharded, and its optimizer with state."""
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def main(load: str, merged: str, save: str) -> None:
    """Load, compare, save."""
    model, optimizer = build()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    for group in optimizer_state["param_groups"]:  # the shards in the test know no others
        for key in group.keys() - {"params", "lr", "betas"}:
            del group[key]
    content = {"model": model_state, "optim": optimizer_state}
    dcp.load(content, checkpoint_id=load)
    set_state_dict(
        model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optim"]
    )
    expected = torch.load(merged, weights_only=True)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    for name, value in model_state.items():
        assert torch.equal(value.full_tensor(), expected["model"][name]), name
    for name, state in expected["optimizer"]["state"].items():
        for what in ("exp_avg", "exp_avg_sq"):
            found = optimizer_state["state"][name][what]
            assert torch.equal(found.full_tensor(), state[what]), (name, what)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=save)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[3]}",
        rank=int(sys.argv[1]),
        world_size=int(sys.argv[2]),
    )
    main(*sys.argv[4:])
    dist.destroy_process_group()
