"""Hugging Face Accelerate with sharded models: a subclass of its ``Accelerator``.

On XLA, accelerate itself averages the gradients of different shards as if they were replicas.

Invariants: gradients of shards stay as FSDP has reduced them; those of parameters that FSDP ignores
are averaged once per step. Models and optimizers without shards are handled by accelerate. A loader
ends when its last batch is used, and one scaler's overflow stops the step of all ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import accelerate
from accelerate import data_loader
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import GradientState
from torch import Tensor, nn
from torch.optim import Optimizer

from xla_fsdp.distributed.launcher import one_rank_at_a_time
from xla_fsdp.fsdp.engine.module_state import is_fsdp_module, named_fsdp_modules
from xla_fsdp.fsdp.engine.shard_tensor import is_sharded
from xla_fsdp.fsdp.wrapper import XlaFullyShardedDataParallel
from xla_fsdp.integrations import require
from xla_fsdp.optim.clip_grad import clip_grad_norm_
from xla_fsdp.optim.grad_scaler import ShardedGradScaler
from xla_fsdp.optim.optimizers import params_of
from xla_fsdp.optim.rebind import hold_shards
from xla_fsdp.recipe.apply import parallelize
from xla_fsdp.recipe.options import Recipe
from xla_fsdp.state.checkpoint_manager import load_checkpoint
from xla_fsdp.state.model import full_state_dict
from xla_fsdp.state.train_checkpoint import save_checkpoint
from xla_fsdp.xla import ops

require("accelerate")

# Directory that ``save_state`` adds for the first sharded model; ``xla_fsdp_1`` for the next.
SHARDS = "xla_fsdp"


class ShardedOptimizer(AcceleratedOptimizer):
    """An optimizer that holds at least one shard, as ``Accelerator.prepare`` returns it."""

    _ignored_are_reduced = False

    def reduce_ignored(self) -> None:
        """Average the gradients of parameters that FSDP ignores over the ranks, once per step."""
        if self._ignored_are_reduced:
            return
        for param in params_of(self):
            if param.grad is not None and not is_sharded(param):
                grad = param.grad.to(ops.device())  # an ignored parameter may be on the host
                param.grad.copy_(ops.all_reduce("sum", grad, None) / ops.world_size())
        self._ignored_are_reduced = True

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step as accelerate does, without averaging shards."""
        if not self.gradient_state.sync_gradients:
            return
        self.reduce_ignored()
        self._ignored_are_reduced = False
        before = self.gradient_state.is_xla_gradients_synced
        # accelerate averages unless this is set. Restored, as it is shared with other optimizers.
        self.gradient_state.is_xla_gradients_synced = True
        try:
            super().step(closure)
        finally:
            self.gradient_state.is_xla_gradients_synced = before

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients as accelerate does."""
        if self.gradient_state.sync_gradients:  # the next gradients are new, also without a step
            self._ignored_are_reduced = False
        super().zero_grad(set_to_none)


class Loader(data_loader.MpDeviceLoaderWrapper):
    """A data loader on XLA as accelerate prepares it, which ends when its last batch is used.

    A thread loads batches ahead. For accelerate itself the loader ends when that thread has come to
    the end, so that ``accumulate`` and ``gather_for_metrics`` take no batch for the last one.
    """

    end_of_dataloader = False

    def __init__(self, loader: data_loader.MpDeviceLoaderWrapper) -> None:
        self.__dict__.update(vars(loader))
        self.dataloader.gradient_state = _OfNobody()

    @property
    def remainder(self) -> int:
        """Number of samples in the last batch of all ranks that are no copies; -1 if unknown."""
        remainder: int = self.dataloader.remainder
        return remainder

    def __iter__(self) -> Iterator[Any]:
        state = GradientState()
        self.end_of_dataloader = False
        state._add_dataloader(self)
        try:
            waiting: list[Any] = []
            for batch in super().__iter__():
                yield from waiting
                waiting = [batch]
            self.end_of_dataloader = True
            yield from waiting
            ops.sync()  # as torch_xla's loader does behind its last batch
        finally:
            state._remove_dataloader(self)


class _OfNobody:
    """A ``GradientState`` for the thread that loads."""

    def _add_dataloader(self, loader: Any) -> None: ...

    def _remove_dataloader(self, loader: Any) -> None: ...


class Accelerator(accelerate.Accelerator):
    """accelerate's ``Accelerator``, also for models wrapped by ``XlaFullyShardedDataParallel``.

    Models may be wrapped before ``prepare``, or by it, with ``shard``. An optimizer that is
    prepared together with its model may be made before the model is wrapped.

    Args:
        args: passed to accelerate.
        shard: wraps each model given to ``prepare`` that is not wrapped yet:
            ``shard=partial(XlaFullyShardedDataParallel, compute_dtype=torch.bfloat16)``.
        recipe: shards each of these by ``parallelize`` instead, together with the optimizer given
            to the same ``prepare`` that holds its parameters. ``recipes`` then has what was done,
            in the order of the models.
        kwargs: passed to accelerate.

    Raises:
        ValueError: if both are given.
    """

    scaler: Any
    _models: list[Any]
    _optimizers: list[Any]
    _dataloaders: list[Any]

    def __init__(
        self,
        *args: Any,
        shard: Callable[[nn.Module], nn.Module] | None = None,
        recipe: Recipe | str | None = None,
        **kwargs: Any,
    ) -> None:
        if shard is not None and recipe is not None:
            raise ValueError("shard and recipe both say how models are sharded; give one")
        super().__init__(*args, **kwargs)
        if self.scaler is not None:  # by itself each rank would skip steps for its own shards
            options = self.scaler_handler.to_kwargs() if self.scaler_handler else {}
            self.scaler = ShardedGradScaler(**options)
        self._shard = shard
        self._recipe = recipe
        self.recipes: list[Recipe] = []

    # ------------------------------------------------------------ preparing

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepare as accelerate does; let optimizers made before wrapping hold the shards.

        Raises:
            ValueError: if an optimizer has state, or groups that flattened parameters cross.
        """
        optimizers = [each for each in args if isinstance(each, Optimizer)]
        given = [
            self._sharded(each, optimizers) if isinstance(each, nn.Module) else each
            for each in args
        ]
        for each in given:
            if isinstance(each, Optimizer) and not isinstance(each, AcceleratedOptimizer):
                hold_shards(each)
        return super().prepare(*given, device_placement=device_placement)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Prepare as accelerate does, after ``shard``."""
        return super().prepare_model(self._sharded(model), *args, **kwargs)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare as accelerate does; return a ``ShardedOptimizer`` for shards."""
        prepared = getattr(optimizer, "_is_accelerate_prepared", False)
        if prepared or not any(is_sharded(param) for param in params_of(optimizer)):
            return super().prepare_optimizer(optimizer, device_placement)
        if device_placement is None:
            device_placement = self.device_placement
        sharded = ShardedOptimizer(optimizer, device_placement, self.scaler)
        self._optimizers.append(sharded)
        return sharded

    def prepare_data_loader(self, loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare as accelerate does; a loader on XLA is a ``Loader``."""
        prepared = super().prepare_data_loader(loader, *args, **kwargs)
        if prepared is not loader:
            prepared = self._dataloaders[-1] = _as_ours(prepared)
        return prepared

    def skip_first_batches(self, loader: Any, num_batches: int = 0) -> Any:
        """Return a loader without these batches, as accelerate does."""
        return _as_ours(super().skip_first_batches(loader, num_batches))

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Unwrap as accelerate does; for a sharded model, return the module, still sharded."""
        model = super().unwrap_model(model, *args, **kwargs)
        return model.module if isinstance(model, XlaFullyShardedDataParallel) else model

    def _sharded(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        if is_fsdp_module(model) or model in self._models:
            return model
        if self._recipe is not None:
            own = next((each for each in optimizers if _holds_any(each, model.parameters())), None)
            sharded = parallelize(model, own, Recipe.of(self._recipe))
            self.recipes.append(sharded.recipe)
            return sharded.model
        return model if self._shard is None else self._shard(model)

    # ------------------------------------------------------------ gradients

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Let gradients accumulate as accelerate does, which ``accumulate`` calls; of a sharded
        model also on one rank, where it might step in every backward."""
        wrapper = model if isinstance(model, XlaFullyShardedDataParallel) else None
        with super().no_sync(model) if wrapper is None else wrapper.no_sync():
            yield

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Any:
        """Clip as accelerate does; the norm is that of the unsharded gradients, over all ranks.

        Raises:
            RuntimeError: if gradients of ``no_sync`` have not been reduced by a later backward.
        """
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not any(is_sharded(param) for param in params):
            with self._without_sharded():
                return super().clip_grad_norm_(params, max_norm, norm_type)
        for optimizer in self._optimizers:
            if isinstance(optimizer, ShardedOptimizer) and _holds_any(optimizer, params):
                optimizer.reduce_ignored()
        self.unscale_gradients()
        return clip_grad_norm_(params, max_norm, norm_type)

    # ------------------------------------------------------------ state

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the state dict as accelerate does; every rank must call it.

        For a sharded model, the main process gets unsharded tensors, the others an empty dict.
        """
        if _sharded_root(model) is None:
            return super().get_state_dict(model, unwrap)
        return full_state_dict(model, rank0_only=True)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Save as accelerate does; every rank must call it.

        Sharded models and their optimizers are saved by ``save_checkpoint`` in directories of their
        own; hooks get the other models only.

        Raises:
            ValueError: if a sharded model has several optimizers, or an optimizer several models.
        """
        sharded = self._sharded_models()
        with self._without_sharded():
            where = super().save_state(output_dir, *args, **kwargs)
        for index, (model, optimizer) in enumerate(sharded):
            # As accelerate does, whoever has saved there before.
            save_checkpoint(_directory(where, index), model, optimizer, step=0, take_over=True)
        return where

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Load as accelerate does; onto any number of ranks. Every rank must call it.

        Raises:
            CheckpointError: if the shards are incomplete or do not fit.
        """
        sharded = self._sharded_models()
        found: list[Any] = []
        handle = self.register_load_state_pre_hook(lambda _, where: found.append(where))
        try:
            # One at a time: torch's list of types that may be unpickled is global.
            with self._without_sharded(), one_rank_at_a_time():
                super().load_state(input_dir, *args, **kwargs)
        finally:
            handle.remove()
        for index, (model, optimizer) in enumerate(sharded):
            load_checkpoint(_directory(found[0], index), model, optimizer)

    @contextlib.contextmanager
    def _without_sharded(self) -> Iterator[None]:
        """Hide sharded models and optimizers from accelerate's own methods in the block, and unwrap
        data loaders, so that ``save_state`` can look into them."""
        before = self._models, self._optimizers, self._dataloaders
        self._models = [model for model in self._models if _sharded_root(model) is None]
        self._optimizers = [o for o in self._optimizers if not isinstance(o, ShardedOptimizer)]
        self._dataloaders = [
            each.dataloader if isinstance(each, data_loader.MpDeviceLoaderWrapper) else each
            for each in self._dataloaders
        ]
        try:
            yield
        finally:
            self._models, self._optimizers, self._dataloaders = before

    def _sharded_models(self) -> list[tuple[XlaFullyShardedDataParallel, Optimizer | None]]:
        roots = [root for model in self._models if (root := _sharded_root(model)) is not None]
        optimizers = [
            each.optimizer for each in self._optimizers if isinstance(each, ShardedOptimizer)
        ]
        found = [(root, _optimizer_of(root, optimizers)) for root in roots]
        if len({id(optimizer) for _, optimizer in found if optimizer}) < len(optimizers):
            raise ValueError(
                f"{len(optimizers)} optimizers of shards for {len(roots)} sharded models: each "
                f"must hold parameters of one model that was prepared, too. Prepare the models "
                f"first"
            )
        return found


def _as_ours(loader: Any) -> Any:
    wrapper = data_loader.MpDeviceLoaderWrapper
    return Loader(loader) if type(loader) is wrapper else loader


def _directory(where: Any, index: int) -> Path:
    return Path(os.fspath(where), f"{SHARDS}_{index}" if index else SHARDS)


def _sharded_root(model: nn.Module) -> XlaFullyShardedDataParallel | None:
    """Return ``model`` if it is wrapped, None if nothing in it is sharded.

    Raises:
        ValueError: if only modules inside are wrapped, or the model is sharded in place.
    """
    if isinstance(model, XlaFullyShardedDataParallel):
        return model
    inner = next((name for name, _ in named_fsdp_modules(model)), None)
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


def _holds_any(optimizer: Optimizer, params: Iterable[Tensor]) -> bool:
    given = set(map(id, params))
    return any(id(param) in given for param in params_of(optimizer))


def _optimizer_of(model: nn.Module, optimizers: list[Any]) -> Optimizer | None:
    own = [each for each in optimizers if _holds_any(each, model.parameters())]
    if len(own) > 1:
        raise ValueError(
            f"{len(own)} optimizers share the parameters of one sharded model, and its checkpoints "
            f"hold one. Make one optimizer with several parameter groups"
        )
    return own[0] if own else None
