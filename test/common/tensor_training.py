"""Train a transformer in tensor parallel, perhaps sharded as well, and plainly on the joined batch.

``train`` runs on a rank, ``reference`` in the test's own process. Ranks along the axis ``tensor``
have the same part of the batch, those along ``context`` cut its sequences, all others have parts of
their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common import tensor_models
from test.common.compare import assert_close
from test.common.scenarios import make
from test.common.tensor_models import LENGTH, VOCABULARY, plan_of
from xla_fsdp import init_mesh

STEPS, ROWS, CLIP, IGNORED = 3, 2, 0.5, -100
TOLERANCE = 2e-5  # relative to the largest value of a tensor: fp32 sums in another order


@dataclass(frozen=True)
class Case:
    """One way to lay a model out.

    Args:
        model: class name in ``test.common.tensor_models``.
        mesh: size of each axis by name, ``tensor`` the last.
        sequence: sequence parallel, too.
        loss: loss parallel, too.
        shard: how the model is sharded over the other axes: "" (not), "wrapped" or "in_place".
        options: of the wrapper.
        scan: its blocks run as a loop; they are units.
        stacked: and their parameters are stacked.
    """

    model: str
    mesh: tuple[tuple[str, int], ...]
    sequence: bool = False
    loss: bool = False
    shard: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    scan: bool = False
    stacked: bool = False

    @property
    def num_ranks(self) -> int:
        """Of the whole mesh."""
        return math.prod(size for _, size in self.mesh)

    @property
    def parts(self) -> int:
        """Of the batch."""
        sizes = dict(self.mesh)
        return self.num_ranks // sizes["tensor"] // sizes.get("context", 1)

    def make_mesh(self) -> Any:
        """The mesh of a running job."""
        return init_mesh([size for _, size in self.mesh], [name for name, _ in self.mesh])


def batches(parts: int) -> tuple[Tensor, Tensor]:
    """Ids and targets, [steps, parts, rows, length]; some targets count for nothing."""
    generator = torch.Generator().manual_seed(11)
    shape = (STEPS, parts, ROWS, LENGTH)
    ids, targets = (torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(2))
    return ids, targets.masked_fill(torch.rand(shape, generator=generator) < 0.2, IGNORED)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Smoothed cross-entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    """Of every case."""
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)  # of a zero gradient, only rounding is left


def reference(case: Case) -> dict[str, Any]:
    """Losses, norms, gradients of the last step, and the state, of the plain model."""
    model = make(getattr(tensor_models, case.model))
    optimizer = make_optimizer(model.parameters())
    ids, targets = batches(case.parts)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [loss_of(model(ids[step, p]), targets[step, p]) for p in range(case.parts)]
        loss = torch.stack(parts).mean()
        loss.backward()
        found["losses"].append(loss.item())
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    names = {id(param): name for name, param in model.named_parameters()}
    state = {names[id(p)]: s for p, s in optimizer.state.items()}
    return {**found, "state": model.state_dict(), "optimizer": state}


def parallelized(case: Case, mesh: Any, seed: int = 3) -> Any:
    """The model, cut."""
    from xla_fsdp.tensor_parallel import parallelize_module

    model = make(getattr(tensor_models, case.model), seed)
    plan = plan_of(case.model, sequence=case.sequence, loss=case.loss)
    return parallelize_module(model, mesh["tensor"], plan)


def sharded(model: Any, case: Case, mesh: Any) -> Any:
    """The model sharded over the axes other than ``tensor``, or on its device as it is."""
    import torch_xla

    from test.common.scenarios import nested
    from xla_fsdp import fully_shard

    if not case.shard:
        tied = getattr(model, "positions", None) is not None
        model = model.to(torch_xla.device())
        if tied:  # which `to` undoes on XLA
            model.head.weight = model.tokens.weight
        return model
    others = mesh[tuple(name for name, _ in case.mesh if name != "tensor")]
    if case.shard == "wrapped":
        return nested(model, mesh=others, **dict(case.options))
    for block in model.blocks:
        fully_shard(block, mesh=others)
    return fully_shard(model, mesh=others)


def train(
    rank: int, case: Case, made: Callable[[], Any] | None = None, in_full: bool = False
) -> dict[str, Any]:
    """The same on a rank; the state is whole. ``made`` gives a mesh and a model of its own;
    ``in_full``: with the optimizer's state also of what no unit shards."""
    from xla_fsdp import full_state_dict, optim_state_dict
    from xla_fsdp.scan import scan_blocks

    mesh, model = (case.make_mesh(), None) if made is None else made()
    if model is None:
        model = sharded(parallelized(case, mesh), case, mesh)
    if case.scan:
        scan_blocks(model.blocks, stacked=case.stacked)
    optimizer = make_optimizer(model.parameters())
    found = train_steps(model, optimizer, case, mesh)
    state = full_state_dict(model)
    optim = optim_state_dict(model, optimizer)["state"] if case.shard else None
    if in_full and not case.shard:
        optim = _whole_states(model, optimizer)
    return {**found, "state": state, "optimizer": optim}


def _whole_states(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The state of whole parameters, by name, of which ranks hold what they hold of the parameters,
    which take its values."""
    from xla_fsdp import full_state_dict

    states = [optimizer.state[param] for param in model.parameters()]
    found: dict[str, dict[str, Tensor]] = {name: {} for name, _ in model.named_parameters()}
    for key in ("exp_avg", "exp_avg_sq"):
        with torch.no_grad():
            for param, state in zip(model.parameters(), states, strict=True):
                param.copy_(state[key])
        whole = full_state_dict(model)
        for name, each in found.items():
            each[key] = whole[name].cpu()
    for each in found.values():
        each["step"] = states[0]["step"].cpu()
    return found


def train_steps(
    model: Any, optimizer: Any, case: Case, mesh: Any, steps: int = STEPS
) -> dict[str, Any]:
    """Train on this rank's part of the batches; losses, norms, and which part it is."""
    import torch_xla

    from xla_fsdp import clip_grad_norm_
    from xla_fsdp.tensor_parallel import loss_parallel
    from xla_fsdp.xla import ops

    rank, device = ops.rank(), torch_xla.device()
    others = [name for name, _ in case.mesh if name not in ("tensor", "context")]
    part = mesh.local_rank(rank, *others) if case.parts > 1 else 0
    ids, targets = (t[:, part] for t in batches(case.parts))
    losses, norms, totals = [], [], []
    for step in range(steps):
        optimizer.zero_grad()
        x, y = ids[step].to(device), targets[step].to(device)
        with _cut(model, mesh, x, y):
            with loss_parallel() if case.loss else nullcontext():
                loss = loss_of(model(x), y)
            loss.backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        totals.append(nn.utils.get_total_norm(grads))
        norms.append(clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
        losses.append(loss.detach())
        torch_xla.sync()
    found = {"losses": losses, "norms": norms, "totals": totals}
    return {**{name: [t.item() for t in each] for name, each in found.items()}, "part": part}


def _cut(model: Any, mesh: Any, *batch: Tensor) -> AbstractContextManager[None]:
    """Cut sequences, and what the model turns their tokens by, where the mesh has a context."""
    from xla_fsdp import context_parallel

    if "context" not in mesh.axis_names:
        return nullcontext()
    [rotation] = model.buffers()
    dims = [1] * len(batch)
    return context_parallel(mesh["context"], buffers=[*batch, rotation], buffer_seq_dims=[*dims, 0])


def assert_like_plain(case: Case, outcomes: list[dict[str, Any]]) -> None:
    """Compare with the plain model: losses, norms before clipping, parameters, and the optimizer's
    state."""
    expected = reference(case)
    parts = {each["part"]: torch.tensor(each["losses"]) for each in outcomes}
    assert set(parts) == set(range(case.parts))
    mean = torch.stack(list(parts.values())).mean(0)
    limits = {"atol": 0, "of_largest": TOLERANCE, "smallest": 1e-3}
    assert_close({"losses": mean}, {"losses": torch.tensor(expected["losses"])}, **limits)
    for found in outcomes:
        norms = {name: torch.tensor(found[name]) for name in ("norms", "totals")}
        assert_close(norms, dict.fromkeys(norms, torch.tensor(expected["norms"])), **limits)
        assert_close(found["state"], expected["state"], what="state", **limits)
        for key, states in expected["optimizer"].items() if found.get("optimizer") else ():
            assert_close(
                found["optimizer"][key], states, what=f"optimizer state of {key}", **limits
            )
