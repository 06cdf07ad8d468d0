"""Hugging Face Accelerate with sharded models: an ``Accelerator`` that knows them.

accelerate's own, on XLA, averages the gradients of different shards as if they were replicas. The
words are those of accelerate and ``sharded_param``; a *sharded* optimizer holds at least one shard.
Always true: a sharded optimizer's gradients are left as the units have reduced them, only those of
parameters that FSDP ignores are averaged, once per step; what has no shards is left to accelerate.
How state is saved is ``save_load``'s business, how norms are computed ``grad_clip``'s.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import accelerate
from accelerate.data_loader import MpDeviceLoaderWrapper
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from xla_fsdp.distributed.launcher import one_rank_at_a_time
from xla_fsdp.distributed.xla import ops
from xla_fsdp.fsdp.clip_grad import clip_grad_norm_
from xla_fsdp.fsdp.engine.module_state import is_unit, named_hosts
from xla_fsdp.fsdp.engine.registry import known_shard
from xla_fsdp.fsdp.engine.shard_parameter import is_sharded
from xla_fsdp.fsdp.state_dict.model import full_state_dict
from xla_fsdp.fsdp.train_checkpoint import load_checkpoint, save_checkpoint
from xla_fsdp.fsdp.wrapper import XlaFullyShardedDataParallel
from xla_fsdp.integrations.versions import require

require("accelerate")

SHARDS = "xla_fsdp"

"""Directory that ``save_state`` adds for the first sharded model; ``xla_fsdp_1`` for the next."""


class ShardedOptimizer(AcceleratedOptimizer):
    """An optimizer of shards, as ``Accelerator.prepare`` returns it."""

    _whole_are_reduced = False

    def holds_any(self, params: Iterable[Tensor]) -> bool:
        """Whether this steps at least one of ``params``."""
        given = {id(param) for param in params}
        return any(id(param) in given for param in self._params())

    def reduce_whole(self) -> None:
        """Average the gradients of parameters that FSDP ignores over the ranks, once per step."""
        if not self._whole_are_reduced:
            for param in self._params():
                if param.grad is not None and not is_sharded(param):
                    grad = param.grad.to(ops.device())  # it may be left in host memory
                    param.grad.copy_(ops.all_reduce("sum", grad, None) / ops.world_size())
            self._whole_are_reduced = True

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """As in accelerate, without averaging shards."""
        if not self.gradient_state.sync_gradients:
            return
        self.reduce_whole()
        self._whole_are_reduced = False
        before = self.gradient_state.is_xla_gradients_synced
        # What accelerate asks before it averages; other optimizers must find it as they left it.
        self.gradient_state.is_xla_gradients_synced = True
        try:
            super().step(closure)
        finally:
            self.gradient_state.is_xla_gradients_synced = before

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As in accelerate. Gradients that come after are new ones, whether there was a step or
        not."""
        if self.gradient_state.sync_gradients:
            self._whole_are_reduced = False
        super().zero_grad(set_to_none)

    def _params(self) -> Iterator[Tensor]:
        return (param for group in self.param_groups for param in group["params"])


class Accelerator(accelerate.Accelerator):
    """accelerate's, for models sharded by ``XlaFullyShardedDataParallel`` as well.

    Models may be wrapped before ``prepare``, or by it, with ``shard``. An optimizer that comes with
    its model in one call of ``prepare`` may be made before.

    Args:
        args: as accelerate's.
        shard: called with every model that ``prepare`` is given and that is not wrapped; returns it
            wrapped: ``shard=partial(XlaFullyShardedDataParallel, compute_dtype=torch.bfloat16)``.
        kwargs: as accelerate's.
    """

    _models: list[Any]
    _optimizers: list[Any]
    _dataloaders: list[Any]

    def __init__(
        self, *args: Any, shard: Callable[[nn.Module], nn.Module] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._shard = shard

    # ------------------------------------------------------------ preparing

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As in accelerate; optimizers made before their model was wrapped follow it.

        Raises:
            ValueError: if an optimizer has state, or groups that flattened parameters cross.
        """
        given = [self._sharded(each) if isinstance(each, nn.Module) else each for each in args]
        for each in given:
            if isinstance(each, Optimizer) and not isinstance(each, AcceleratedOptimizer):
                _follow(each)
        return super().prepare(*given, device_placement=device_placement)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As in accelerate."""
        return super().prepare_model(self._sharded(model), *args, **kwargs)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """As in accelerate; a ``ShardedOptimizer`` for shards."""
        prepared = getattr(optimizer, "_is_accelerate_prepared", False)
        if prepared or not _holds_shards(optimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        place = self.device_placement if device_placement is None else device_placement
        sharded = ShardedOptimizer(optimizer, device_placement=place, scaler=self.scaler)
        self._optimizers.append(sharded)
        return sharded

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """As in accelerate; of a sharded model, the module that was wrapped (with its shards)."""
        model = super().unwrap_model(model, *args, **kwargs)
        return model.module if isinstance(model, XlaFullyShardedDataParallel) else model

    def _sharded(self, model: nn.Module) -> nn.Module:
        if self._shard is None or is_unit(model) or model in self._models:
            return model
        return self._shard(model)

    # ------------------------------------------------------------ gradients

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Any:
        """As in accelerate; the norm is that of the full gradients, over all ranks.

        Raises:
            RuntimeError: if ``no_sync`` kept gradients that no backward has reduced since.
        """
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not any(is_sharded(param) for param in params):
            with self._without_sharded():
                return super().clip_grad_norm_(params, max_norm, norm_type)
        for optimizer in self._optimizers:
            if isinstance(optimizer, ShardedOptimizer) and optimizer.holds_any(params):
                optimizer.reduce_whole()
        self.unscale_gradients()
        return clip_grad_norm_(params, max_norm, norm_type)

    # ------------------------------------------------------------ state

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """As in accelerate; of a sharded model, the full tensors on the main process and nothing on
        the others. Every rank must call it."""
        if _sharded_root(model) is None:
            return super().get_state_dict(model, unwrap)
        return full_state_dict(model, rank0_only=True)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in accelerate. Sharded models and their optimizers go, in shards, into directories of
        their own (see ``save_checkpoint``); hooks get the other models. Every rank must call it.

        Raises:
            ValueError: if a sharded model has several optimizers, or an optimizer several models.
        """
        jobs = self._jobs()
        with self._without_sharded():
            where = super().save_state(output_dir, *args, **kwargs)
        for directory, model, optimizer in _directories(where, jobs):
            save_checkpoint(directory, model, optimizer, step=0)
        return where

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """As in accelerate; onto any number of ranks. Every rank must call it.

        Raises:
            CheckpointError: if the shards are incomplete or do not fit.
        """
        jobs = self._jobs()
        found: list[Any] = []
        handle = self.register_load_state_pre_hook(lambda _, where: found.append(where))
        try:
            # One at a time: torch's list of what may be unpickled is the process's.
            with self._without_sharded(), one_rank_at_a_time():
                super().load_state(input_dir, *args, **kwargs)
        finally:
            handle.remove()
        for directory, model, optimizer in _directories(found[0], jobs):
            load_checkpoint(directory, model, optimizer)

    @contextlib.contextmanager
    def _without_sharded(self) -> Iterator[None]:
        """Inside, accelerate's own methods see what has no shards only, and data loaders that its
        ``save_state`` can look into."""
        before = self._models, self._optimizers, self._dataloaders
        self._models = [model for model in self._models if _sharded_root(model) is None]
        self._optimizers = [o for o in self._optimizers if not isinstance(o, ShardedOptimizer)]
        self._dataloaders = [
            each.dataloader if isinstance(each, MpDeviceLoaderWrapper) else each
            for each in self._dataloaders
        ]
        try:
            yield
        finally:
            self._models, self._optimizers, self._dataloaders = before

    def _jobs(self) -> list[tuple[XlaFullyShardedDataParallel, Optimizer | None]]:
        """Every sharded model with its optimizer."""
        roots = [root for model in self._models if (root := _sharded_root(model)) is not None]
        sharded = [
            each.optimizer for each in self._optimizers if isinstance(each, ShardedOptimizer)
        ]
        jobs = [(root, _only(sharded, root)) for root in roots]
        if len({id(optimizer) for _, optimizer in jobs if optimizer}) < len(sharded):
            raise ValueError(
                f"{len(sharded)} optimizers of shards for {len(roots)} sharded models: each must "
                f"hold parameters of one model that was prepared, too. Prepare the models first"
            )
        return jobs


def _sharded_root(model: nn.Module) -> XlaFullyShardedDataParallel | None:
    """The outermost wrapper, if ``model`` is one.

    Raises:
        ValueError: if only modules inside are wrapped, or the model is sharded in place.
    """
    if isinstance(model, XlaFullyShardedDataParallel):
        return model
    inner = next((name for name, _ in named_hosts(model)), None)
    if inner == "":
        raise ValueError(
            f"{type(model).__name__} is sharded in place by fully_shard, which Accelerate cannot "
            f"save or load here. Wrap it with XlaFullyShardedDataParallel instead"
        )
    if inner is not None:
        raise ValueError(
            f"{inner} of {type(model).__name__} is wrapped with FSDP, the model itself is not. "
            f"Wrap the whole model last, and prepare that"
        )
    return None


def _only(optimizers: list[Any], model: nn.Module) -> Optimizer | None:
    """The optimizer of the model's parameters."""
    params = {id(param) for param in model.parameters()}
    own = [
        optimizer
        for optimizer in optimizers
        if any(id(param) in params for group in optimizer.param_groups for param in group["params"])
    ]
    if len(own) > 1:
        raise ValueError(
            f"{len(own)} optimizers share the parameters of one sharded model, and its checkpoints "
            f"hold one. Make one optimizer with several parameter groups"
        )
    return own[0] if own else None


def _directories(
    where: Any, jobs: list[tuple[XlaFullyShardedDataParallel, Optimizer | None]]
) -> Iterator[tuple[Path, XlaFullyShardedDataParallel, Optimizer | None]]:
    for index, (model, optimizer) in enumerate(jobs):
        yield Path(os.fspath(where), f"{SHARDS}_{index}" if index else SHARDS), model, optimizer


def _holds_shards(optimizer: Optimizer) -> bool:
    return any(is_sharded(param) for group in optimizer.param_groups for param in group["params"])


def _follow(optimizer: Optimizer) -> None:
    """Let an optimizer that was made before wrapping hold the shards instead."""
    groups = [[_current(param) for param in group["params"]] for group in optimizer.param_groups]
    unique = [list(dict.fromkeys(group)) for group in groups]
    if all(
        new is old
        for group, params in zip(optimizer.param_groups, groups, strict=True)
        for new, old in zip(params, group["params"], strict=True)
    ):
        return
    _check_can_follow(optimizer, unique)
    for group, params in zip(optimizer.param_groups, unique, strict=True):
        group["params"] = params


def _current(param: Tensor) -> Tensor:
    known = known_shard(param)
    return param if known is None else known.leaf


def _check_can_follow(optimizer: Optimizer, groups: list[list[Tensor]]) -> None:
    name = type(optimizer).__name__
    if optimizer.state:
        raise ValueError(
            f"{name} has made steps before its model was wrapped, so its state is that of whole "
            f"parameters. Wrap first, then load_optim_state_dict"
        )
    every = [param for group in groups for param in group]
    if len({id(param) for param in every}) < len(every):
        raise ValueError(
            f"parameter groups of {name} share a flattened unit or a stack of scanned blocks, "
            f"which has one optimizer state. Shard with flatten_parameters=False, scan without "
            f"stacked, or make one group"
        )
