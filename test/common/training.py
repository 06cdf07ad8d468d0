"""Train any ``Task`` for a few steps, sharded on N ranks and unsharded, for ``parity.assert_same``.

``train_sharded`` runs on a rank, ``train_plain`` in the test's own process on plain torch, where
the loss is the mean over the ranks' parts of a batch. ``parity`` has a loop of its own, for cases
that differ in how they train and not in what.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from test.common.parity import Outcome

Batch = dict[str, Tensor]


class Task(Protocol):
    """What to train."""

    @property
    def steps(self) -> int:
        """How many optimizer steps."""
        ...

    def build(self) -> nn.Module:
        """The plain model, equal wherever it is built."""
        ...

    def shard(self, model: nn.Module) -> Any:
        """``model`` wrapped; called on every rank."""
        ...

    def batch(self, step: int, rank: int) -> Batch:
        """Keyword arguments of the model's forward: this rank's part of a batch."""
        ...

    def loss(self, output: Any) -> Tensor:
        """A scalar."""
        ...

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """For what requires a gradient and what does not."""
        ...


def train_plain(task: Task, num_ranks: int) -> Outcome:
    """The task without sharding; buffers are those of rank 0."""
    model = task.build()
    _average_biased_variance(model)
    buffers = [copy.deepcopy(dict(model.named_buffers())) for _ in range(num_ranks)]
    optimizer = task.optimizer(model.parameters())
    outcome = Outcome([], {}, [], {})
    for step in range(task.steps):
        optimizer.zero_grad()
        parts = [
            task.loss(torch.func.functional_call(model, buffers[r], (), task.batch(step, r)))
            for r in range(num_ranks)
        ]
        loss = torch.stack(parts).mean()
        loss.backward()
        outcome.losses.append(loss.item())
        outcome.grads = _grads(model)
        optimizer.step()
    outcome.state = {**model.state_dict(), **_under_all_names(model, buffers[0])}
    return outcome


def train_sharded(task: Task, rank: int) -> dict[str, Any]:
    """The task on this rank; what it holds in the end, for ``parity.join``."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    model = task.shard(task.build())
    optimizer = task.optimizer(model.parameters())
    losses, grads = [], {}
    for step in range(task.steps):
        optimizer.zero_grad()
        batch = {k: v.to(torch_xla.device()) for k, v in task.batch(step, rank).items()}
        loss = task.loss(model(**batch))
        loss.backward()
        grads = _grads(model)
        optimizer.step()
        losses.append(xm.all_reduce("sum", loss.detach(), 1.0 / xr.world_size()))
        torch_xla.sync()
    return {
        "losses": [loss.item() for loss in losses],
        "norms": [],
        "grads": {name: grad.cpu() for name, grad in grads.items()},
        "state": {name: value.cpu() for name, value in model.state_dict().items()},
        "names": [name for name, _ in model.named_parameters()],
        "metadata": model.get_shard_metadata(),
    }


def _under_all_names(model: nn.Module, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """``buffers`` for all that a state dict calls them: a module may have several names."""
    first = {id(buffer): name for name, buffer in model.named_buffers()}
    named = model.named_buffers(remove_duplicate=False)
    persistent = model.state_dict().keys()
    return {name: buffers[first[id(buffer)]] for name, buffer in named if name in persistent}


def _grads(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def _average_biased_variance(model: nn.Module) -> None:
    """Let BatchNorm average the biased variance of a batch, as torch_xla's does."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            module.register_forward_pre_hook(_note_variance)
            module.register_forward_hook(_correct_variance)


def _note_variance(module: Any, args: tuple[Tensor, ...]) -> None:
    module.variance_before = module.running_var.clone()


def _correct_variance(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
    if module.training:
        count = args[0].numel() / args[0].shape[1]
        kept = module.variance_before * (1 - module.momentum)
        # Past the version counter: backward is given the running variance, and does not use it.
        module.running_var.data.copy_(kept + (module.running_var - kept) * (count - 1) / count)
