"""Run the snippets of a chapter of the README, in their order, in the directory given.

    python -m test.common.readme_snippets directory moving|hugging_face

Those that wrap a model run on two CPU ranks, the others in the main thread. They share no names but
those below. Says in the end that all ran.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common.models import CLASSES, FEATURES, LinearNet, TwoLayers
from test.common.ranks import ROOT
from test.common.scenarios import RANKS, make
from xla_fsdp import launch


def snippets(chapter: str) -> list[str]:
    """The Python of a chapter of the README."""
    text = (ROOT / "README.md").read_text()
    body = text.split(f"\n## {chapter}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", body, flags=re.DOTALL)


def names() -> dict[str, Any]:
    """What the snippets take for given."""
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel, load_checkpoint

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        rows = torch.linspace(-1, 1, 3 * FEATURES).reshape(3, FEATURES)
        yield rows.to(torch_xla.device()), (torch.arange(3) % CLASSES).to(torch_xla.device())

    return {
        "torch": torch,
        "torch_xla": torch_xla,
        "Block": TwoLayers,
        "build_model": lambda: make(LinearNet),
        "batches": batches,
        "loss_fn": F.cross_entropy,
        "FSDP": XlaFullyShardedDataParallel,
        "load_checkpoint": load_checkpoint,
    }


def on_rank(rank: int, code: str) -> Any:
    """The snippet's model, whole, and the optimizer's state."""
    from xla_fsdp import full_state_dict, optim_state_dict

    space = names()
    exec(code, space)
    model, optimizer = space["model"], space["optimizer"]
    state = optim_state_dict(model, optimizer)["state"]
    return {"model": dict(full_state_dict(model)), "optim": state}


def save_by_torch(directory: str) -> dict[str, Any]:
    """A job of plain torch, as FSDP2's are saved."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model: nn.Module = make(LinearNet, seed=11)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, FEATURES)).sum().backward()
    optimizer.step()
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=directory)
    return {"model": model_state, "optim": optim_state["state"]}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Weights and moments."""
    for name, value in expected["model"].items():
        assert torch.equal(found["model"][name], value), name
    assert found["optim"]
    for name, state in found["optim"].items():
        for what in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[what], expected["optim"][name][what]), (name, what)


def hugging_face() -> None:
    """The Trainer's and Accelerate's."""
    import transformers  # noqa: F401  (before launch, as the README says)

    trainer, accelerator = snippets("Hugging Face and Lightning")
    launch(train_llama, (trainer,), num_ranks=RANKS)
    assert Path("merged", "model.safetensors").is_file()
    launch(accelerate_net, (accelerator,), num_ranks=RANKS)
    assert Path("state", "xla_fsdp").is_dir()
    assert Path("model", "model.safetensors").is_file()


def train_llama(rank: int, code: str) -> None:
    """The Trainer's snippet, with a model and data."""
    from test.common.hf_jobs import Sentences, build_llama

    exec(code, {"model": make(build_llama), "data": Sentences()})


def accelerate_net(rank: int, code: str) -> None:
    """Accelerate's, with all that it prepares."""
    from xla_fsdp.wrap import always_wrap_policy

    model = make(LinearNet)
    rows = torch.utils.data.TensorDataset(torch.ones(8, FEATURES), torch.arange(8) % CLASSES)
    space = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loader": torch.utils.data.DataLoader(rows, batch_size=2),
        "policy": always_wrap_policy,
    }
    exec(code, {**names(), **space})


def moving() -> None:
    """Those on moving over; what was saved is compared with what was loaded."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    compat, training, from_dcp, go_on, to_dcp = snippets("Moving over")
    space = names()
    exec(compat, space)
    assert space["XlaFullyShardedDataParallel"] is names()["FSDP"]
    trained = launch(on_rank, (training,), num_ranks=RANKS)[0]
    assert Path("run").is_dir()

    saved = save_by_torch("dcp")
    exec(from_dcp, names())
    same(launch(on_rank, (go_on,), num_ranks=RANKS)[0], saved)

    space = names()
    exec(to_dcp, space)
    model_state, optim_state = get_state_dict(space["model"], space["optimizer"])
    same({"model": model_state, "optim": optim_state["state"]}, trained)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.chdir(sys.argv[1])
    {"moving": moving, "hugging_face": hugging_face}[sys.argv[2]]()
    print("all ran")
