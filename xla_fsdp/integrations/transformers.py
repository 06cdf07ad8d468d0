"""transformers' ``Trainer`` on sharded models: ``install()``, once, before it is used.

Words: a *sharded* trainer was given ``fsdp_config={"xla": True, ...}`` (and not ``xla_fsdp_v2``).
Always true: methods of ``Trainer`` are replaced by ones that do the original for any other trainer,
and its subclasses have them, too. Gradients are ``accelerate``'s business here (as in Trainer);
what a unit is, ``trainer_wrapping``'s; checkpoints, ``save_load``'s. A checkpoint directory holds
the merged model as ``save_pretrained`` writes it, and everything in shards in ``xla_fsdp``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from safetensors.torch import save_file
from transformers import trainer as trainer_module
from transformers.training_args import OptimizerNames

from xla_fsdp.distributed.launcher import one_rank_at_a_time
from xla_fsdp.distributed.xla import ops
from xla_fsdp.distributed.xla.host import exchange
from xla_fsdp.fsdp.state_dict.model import full_state_dict
from xla_fsdp.fsdp.train_checkpoint import load_checkpoint, save_checkpoint
from xla_fsdp.fsdp.wrapper import XlaFullyShardedDataParallel
from xla_fsdp.integrations.accelerate import SHARDS, Accelerator
from xla_fsdp.integrations.trainer_wrapping import shard_as_configured
from xla_fsdp.integrations.versions import require

require("transformers", "accelerate")

Original = Callable[..., Any]

# Random state of the device with which a trainer's next step begins. Keys are each rank's own.
_next_random_state: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

_replacements: dict[str, Callable[..., Any]] = {}


def install() -> None:
    """Let ``transformers.Trainer`` shard with this package where ``fsdp_config`` says ``xla``.

    Call it once per process, in the main thread (before ``launch``, on CPU). Calling it again does
    nothing.

    Raises:
        UntestedVersionError: on import of this module, if transformers or accelerate do not fit.
    """
    trainer_module.Accelerator = Accelerator
    for name, replacement in _replacements.items():
        original = getattr(transformers.Trainer, name)
        if not getattr(original, "is_of_xla_fsdp", False):
            setattr(transformers.Trainer, name, _with_original(original, replacement))


def is_sharded(trainer: Any) -> bool:
    """Whether the trainer's model is wrapped, which it is from its first training or evaluation."""
    return isinstance(trainer.model, XlaFullyShardedDataParallel)


def _with_original(original: Original, replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(functools.partial(original, trainer), trainer, *args, **kwargs)

    method.is_of_xla_fsdp = True  # type: ignore[attr-defined]
    return method


def _replaces(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The method of this name becomes ``function(original, trainer, ...)``."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _replacements[name] = function
        return function

    return register


# ---------------------------------------------------------------- wrapping


@_replaces("_wrap_model")
def _wrap_model(original: Original, trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap at the first training or evaluation.

    The trainer's model is the wrapper from then on. The original wraps without saying so, and the
    Trainer then makes no optimizer at all (transformers 5), or one that accelerate does not know.
    """
    if not trainer.is_fsdp_xla_v1_enabled:
        return original(model, *args, **kwargs)
    if not is_sharded(trainer):
        trainer.model = trainer.model_wrapped = shard_as_configured(trainer.model, trainer.args)
        _leave_fusing_to_xla(trainer.args)
    return trainer.model


def _leave_fusing_to_xla(args: Any) -> None:
    """The Trainer's default asks for torch's fused kernel, which there is none of for XLA."""
    if args.optim == OptimizerNames.ADAMW_TORCH_FUSED:
        args.optim = OptimizerNames.ADAMW_TORCH


# ---------------------------------------------------------------- saving


@_replaces("save_model")
def _save_model(
    original: Original, trainer: Any, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    """The merged model, as ``save_pretrained`` of the plain one writes it."""
    if not is_sharded(trainer):
        original(output_dir, _internal_call)
        return
    full = full_state_dict(trainer.model, rank0_only=True)
    if trainer.args.should_save:
        _write_merged(trainer, full, Path(output_dir or trainer.args.output_dir))
    exchange(b"")  # nobody goes on before the files are there
    if trainer.args.push_to_hub and not _internal_call:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)


def _write_merged(trainer: Any, full: dict[str, Any], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    plain = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(plain, "save_pretrained"):
        plain.save_pretrained(directory, state_dict=full)
    else:
        unshared = {name: value.clone() for name, value in full.items()}
        save_file(unshared, directory / "model.safetensors", {"format": "pt"})
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(directory)
    torch.save(trainer.args, directory / "training_args.bin")


@_replaces("_save_optimizer_and_scheduler")
def _save_job(original: Original, trainer: Any, output_dir: str) -> None:
    if not is_sharded(trainer):
        original(output_dir)
        return
    optimizer, step = _inner(trainer.optimizer), trainer.state.global_step
    save_checkpoint(_shards(output_dir), trainer.model, optimizer, trainer.lr_scheduler, step=step)


# ---------------------------------------------------------------- loading


@_replaces("_load_from_checkpoint")
def _load_model(original: Original, trainer: Any, checkpoint: str, *args: Any, **kw: Any) -> None:
    """Nothing, where the model's shards come with its optimizer's."""
    if not (trainer.is_fsdp_xla_v1_enabled and _shards(checkpoint).is_dir()):
        original(checkpoint, *args, **kw)


@_replaces("_load_optimizer_and_scheduler")
def _load_job(original: Original, trainer: Any, checkpoint: str | None) -> None:
    if checkpoint is None or not is_sharded(trainer):
        original(checkpoint)
        return
    if _shards(checkpoint).is_dir():
        optimizer = _inner(trainer.optimizer)
        load_checkpoint(_shards(checkpoint), trainer.model, optimizer, trainer.lr_scheduler)
    elif any(Path(checkpoint).glob("rank*-of-*-optimizer.pt")):
        raise ValueError(
            f"{checkpoint} holds the optimizer as torch_xla.distributed.fsdp saved it, in pieces "
            f"that only as many of its ranks can read. Delete its rank*-optimizer.pt files to go "
            f"on with the model it holds and a new optimizer"
        )


@_replaces("_load_best_model")
def _load_best_model(original: Original, trainer: Any) -> None:
    best = trainer.state.best_model_checkpoint
    if is_sharded(trainer) and _shards(best).is_dir():
        load_checkpoint(_shards(best), trainer.model)
    else:
        original()


# ---------------------------------------------------------------- random numbers
# A sync moves the device's random numbers on, and the Trainer syncs a different number of times
# between a save and the next step than between a load and that step. So both steps begin with what
# was saved.


@_replaces("_save_rng_state")
def _save_random_state(original: Original, trainer: Any, output_dir: str) -> None:
    original(output_dir)
    _keep_random_state(trainer)


@_replaces("_load_rng_state")
def _load_random_state(original: Original, trainer: Any, checkpoint: str | None) -> None:
    with one_rank_at_a_time():  # torch's list of what may be unpickled is the process's
        original(checkpoint)
    _keep_random_state(trainer)


def _keep_random_state(trainer: Any) -> None:
    if is_sharded(trainer):
        _next_random_state[trainer] = ops.get_rng_state(trainer.args.device)


@_replaces("training_step")
def _training_step(original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    if (state := _next_random_state.pop(trainer, None)) is not None:
        ops.set_rng_state(state, trainer.args.device)
    return original(*args, **kwargs)


# ---------------------------------------------------------------- files


def _shards(directory: str | os.PathLike[str]) -> Path:
    return Path(directory, SHARDS)


def _inner(optimizer: Any) -> Any:
    """What accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
