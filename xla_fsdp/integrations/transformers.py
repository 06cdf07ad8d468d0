"""transformers' ``Trainer`` on sharded models: ``install()``, once, before it is used.

Methods of ``Trainer`` are replaced, also for its subclasses. They call the original unless the
trainer has ``fsdp_config={"xla": True, ...}``; ``xla_fsdp_v2`` is refused. Gradients are handled by
``integrations.accelerate``. A checkpoint directory holds the merged model as ``save_pretrained``
writes it, and shards of model, optimizer and scheduler in ``xla_fsdp``.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import trainer as trainer_module
from transformers.training_args import OptimizerNames

from xla_fsdp.distributed.launcher import one_rank_at_a_time
from xla_fsdp.fsdp.wrapper import XlaFullyShardedDataParallel
from xla_fsdp.integrations import require
from xla_fsdp.integrations.accelerate import SHARDS, Accelerator
from xla_fsdp.nn.activation_checkpoint import checkpoint_module
from xla_fsdp.recipe.apply import parallelize
from xla_fsdp.recipe.options import Recipe
from xla_fsdp.state.checkpoint_manager import load_checkpoint
from xla_fsdp.state.model import full_state_dict
from xla_fsdp.state.train_checkpoint import save_checkpoint
from xla_fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from xla_fsdp.xla import ops
from xla_fsdp.xla.host import exchange
from xla_fsdp.xla.ops import surround

require("transformers", "accelerate")

Original = Callable[..., Any]


def install() -> None:
    """Let ``transformers.Trainer`` shard with this package where ``fsdp_config`` says ``xla``.

    Call it once per process, in the main thread (before ``launch``, on CPU). Calling it again does
    nothing.

    Raises:
        UntestedVersionError: on import of this module, for untested versions.
    """
    trainer_module.Accelerator = Accelerator
    for name, replacement in _REPLACEMENTS.items():
        surround((transformers.Trainer, name, replacement))


def is_sharded(trainer: Any) -> bool:
    """Return whether a trainer's model is wrapped: from its first training or evaluation on."""
    return isinstance(trainer.model, XlaFullyShardedDataParallel)


# ---------------------------------------------------------------- wrapping


def _init(original: Original, trainer: Any, *args: Any, **kwargs: Any) -> None:
    given = inspect.signature(original).bind_partial(trainer, *args, **kwargs).arguments.get("args")
    config = getattr(given, "fsdp_config", None)
    if isinstance(config, Mapping) and config.get("xla_fsdp_v2") and not ops.is_spmd():
        raise ValueError(
            'fsdp_config has "xla_fsdp_v2": true, which asks for FSDPv2: SPMD in one process, and '
            "not this package. Take it out, so that xla_fsdp.integrations.transformers shards "
            '(fsdp_config={"xla": true, ...}, one rank for each chip); or call '
            "torch_xla.runtime.use_spmd() and leave install() out"
        )
    original(trainer, *args, **kwargs)


def _wrap_model(original: Original, trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    # The trainer's own model must be the wrapper. The original does not set it, so that the Trainer
    # makes no optimizer (transformers 5), or one that accelerate does not know.
    if not trainer.is_fsdp_xla_v1_enabled:
        return original(trainer, model, *args, **kwargs)
    if not is_sharded(trainer):
        trainer.model = trainer.model_wrapped = shard_as_configured(trainer.model, trainer.args)
        # The Trainer's default is torch's fused kernel, which does not exist for XLA.
        if trainer.args.optim == OptimizerNames.ADAMW_TORCH_FUSED:
            trainer.args.optim = OptimizerNames.ADAMW_TORCH
    return trainer.model


def shard_as_configured(model: nn.Module, args: Any) -> XlaFullyShardedDataParallel:
    """Wrap a model as the ``fsdp_config`` of ``TrainingArguments`` says.

    Args:
        model: the model, not wrapped.
        args: ``TrainingArguments``. Of its ``fsdp_config`` are used: ``min_num_params``, or else
            ``transformer_layer_cls_to_wrap`` (default: the model's ``_no_split_modules``), to
            choose modules to wrap; ``xla_fsdp_grad_ckpt``, to recompute these in backward;
            ``xla_fsdp_settings``, for other options of the wrapper, with dtypes by name, and a
            ``recipe`` for ``parallelize`` (a name, a file or a dict), which then decides what is
            recomputed, and by default what is wrapped.

    Raises:
        ValueError: if options cannot be used; names all of them.
    """
    config: Mapping[str, Any] = args.fsdp_config
    names = _layer_names(model, config)
    if problems := list(_problems(model, args, names)):
        raise ValueError(f"fsdp_config cannot be followed: {'; '.join(problems)}")
    if "recipe" in args.xla_fsdp_config:
        chooses = config["min_num_params"] or config.get("transformer_layer_cls_to_wrap")
        policy = _policy(model, config, names) if chooses else None
        return parallelize(model, None, auto_wrap_policy=policy, **args.xla_fsdp_config).model
    recompute = bool(config["xla_fsdp_grad_ckpt"])
    model_config: Any = getattr(model, "config", None)
    if recompute and model_config is not None:
        model_config.use_cache = False  # recomputed layers would append to the cache again
    policy = _policy(model, config, names)
    wrapper = _recomputing if recompute and policy is not None else None
    return XlaFullyShardedDataParallel(
        model, auto_wrap_policy=policy, auto_wrapper_callable=wrapper, **args.xla_fsdp_config
    )


def _recomputing(module: nn.Module, **options: Any) -> nn.Module:
    return XlaFullyShardedDataParallel(checkpoint_module(module), **options)


def _layer_names(model: nn.Module, config: Mapping[str, Any]) -> list[str]:
    if config["min_num_params"]:
        return []
    given = config.get("transformer_layer_cls_to_wrap")
    if given is None:
        return sorted(_class_names(model) & set(getattr(model, "_no_split_modules", None) or ()))
    return [given] if isinstance(given, str) else list(given)


def _class_names(model: nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules()}


def _policy(
    model: nn.Module, config: Mapping[str, Any], names: list[str]
) -> Callable[..., bool] | None:
    if least := config["min_num_params"]:
        return functools.partial(size_based_auto_wrap_policy, min_num_params=least)
    if not names:
        return None
    classes = {type(module) for module in model.modules() if type(module).__name__ in names}
    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)


def _problems(model: nn.Module, args: Any, names: list[str]) -> Iterator[str]:
    known = set(inspect.signature(XlaFullyShardedDataParallel.__init__).parameters)
    known -= {"self", "module", "auto_wrap_policy", "auto_wrapper_callable"}  # made here
    known.add("recipe")
    if "recipe" in args.xla_fsdp_config:
        yield from _recipe_problems(Recipe.of(args.xla_fsdp_config["recipe"]), args)
    if unknown := sorted(set(args.xla_fsdp_config) - known):
        yield f"xla_fsdp_settings has {', '.join(unknown)}; there are {', '.join(sorted(known))}"
    if args.gradient_checkpointing:
        yield (
            "gradient_checkpointing=True uses torch.utils.checkpoint, which knows no XLA device; "
            "set fsdp_config['xla_fsdp_grad_ckpt']=True instead"
        )
    if args.save_on_each_node:
        yield (
            "save_on_each_node=True would write models without tensors on other hosts, as the "
            "merged tensors are on the main process only; leave it out, and copy the directory"
        )
    if args.torch_compile:
        yield "torch_compile=True would cut the step into many programs; leave it out"
    for name in names:
        if name not in _class_names(model):
            kind = type(model).__name__
            yield f"transformer_layer_cls_to_wrap names {name}, which {kind} does not have"
    config = args.fsdp_config
    if config["xla_fsdp_grad_ckpt"] and not names and not config["min_num_params"]:
        yield "xla_fsdp_grad_ckpt needs transformer_layer_cls_to_wrap or min_num_params"


def _recipe_problems(recipe: Recipe, args: Any) -> Iterator[str]:
    if recipe.compile_step:
        yield (
            "the recipe sets compile_step, and no function of the Trainer makes a whole step; "
            "leave it out"
        )
    if args.fsdp_config["xla_fsdp_grad_ckpt"]:
        yield "the recipe's remat says what is recomputed; leave out xla_fsdp_grad_ckpt"


# ---------------------------------------------------------------- saving


def _save_model(
    original: Original, trainer: Any, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    if not is_sharded(trainer):
        original(trainer, output_dir, _internal_call)
        return
    full = full_state_dict(trainer.model, rank0_only=True)
    if trainer.args.should_save:
        _write_merged(trainer, full, Path(output_dir or trainer.args.output_dir))
    exchange(b"")  # a barrier: all ranks wait until the files are written
    if trainer.args.push_to_hub and not _internal_call:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)


def _write_merged(trainer: Any, full: dict[str, Any], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(directory, state_dict=full)
    else:
        unshared = {name: value.clone() for name, value in full.items()}
        save_file(unshared, directory / "model.safetensors", {"format": "pt"})
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(directory)
    torch.save(trainer.args, directory / "training_args.bin")


def _save_train_state(original: Original, trainer: Any, output_dir: str) -> None:
    if not is_sharded(trainer):
        original(trainer, output_dir)
        return
    optimizer, step = _plain_optimizer(trainer), trainer.state.global_step
    schedulers = trainer.lr_scheduler
    # As Trainer does, whoever has saved there before.
    save_checkpoint(
        _shards(output_dir), trainer.model, optimizer, schedulers, step=step, take_over=True
    )


# ---------------------------------------------------------------- loading


def _load_model(original: Original, trainer: Any, checkpoint: str, *args: Any, **kw: Any) -> None:
    # If there are shards, _load_train_state loads the model with its optimizer.
    if not (trainer.is_fsdp_xla_v1_enabled and _shards(checkpoint).is_dir()):
        original(trainer, checkpoint, *args, **kw)


def _load_train_state(original: Original, trainer: Any, checkpoint: str | None) -> None:
    if checkpoint is None or not is_sharded(trainer):
        original(trainer, checkpoint)
        return
    if _shards(checkpoint).is_dir():
        optimizer = _plain_optimizer(trainer)
        load_checkpoint(_shards(checkpoint), trainer.model, optimizer, trainer.lr_scheduler)
    elif any(Path(checkpoint).glob("rank*-of-*-optimizer.pt")):
        raise ValueError(
            f"{checkpoint} holds the optimizer as torch_xla.distributed.fsdp saved it, in pieces "
            f"that only as many of its ranks can read. Delete its rank*-optimizer.pt files to go "
            f"on with the model it holds and a new optimizer"
        )


def _load_best_model(original: Original, trainer: Any) -> None:
    best = trainer.state.best_model_checkpoint
    if is_sharded(trainer) and _shards(best).is_dir():
        load_checkpoint(_shards(best), trainer.model)
    else:
        original(trainer)


# ---------------------------------------------------------------- random numbers
# A sync advances the device's random number state, and the Trainer syncs more or less often between
# a save and the next step than between a load and that step. So both steps begin with the saved
# state.


def _save_random_state(original: Original, trainer: Any, output_dir: str) -> None:
    original(trainer, output_dir)
    _remember_random_state(trainer)


def _load_random_state(original: Original, trainer: Any, checkpoint: str | None) -> None:
    with one_rank_at_a_time():  # torch's list of types that may be unpickled is global
        original(trainer, checkpoint)
    _remember_random_state(trainer)


def _remember_random_state(trainer: Any) -> None:
    if is_sharded(trainer):
        trainer.xla_fsdp_random_state = ops.get_rng_state(trainer.args.device)


def _training_step(original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    if (state := vars(trainer).pop("xla_fsdp_random_state", None)) is not None:
        ops.set_rng_state(state, trainer.args.device)
    return original(trainer, *args, **kwargs)


def _plain_optimizer(trainer: Any) -> Any:
    """Return the optimizer inside of what accelerate has prepared."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def _shards(directory: str | os.PathLike[str]) -> Path:
    return Path(directory, SHARDS)


# Methods of ``Trainer`` and their replacements, called as ``function(original, trainer, ...)``.
_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "__init__": _init,
    "_wrap_model": _wrap_model,
    "save_model": _save_model,
    "_save_optimizer_and_scheduler": _save_train_state,
    "_load_from_checkpoint": _load_model,
    "_load_optimizer_and_scheduler": _load_train_state,
    "_load_best_model": _load_best_model,
    "_save_rng_state": _save_random_state,
    "_load_rng_state": _load_random_state,
    "training_step": _training_step,
}
