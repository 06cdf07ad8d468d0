"""Shard a model as the ``fsdp_config`` of transformers' ``TrainingArguments`` says.

Words: a *setting* is an entry of ``xla_fsdp_settings``, a keyword of
``XlaFullyShardedDataParallel``. Always true: everything is checked before anything is wrapped, and
all problems are reported at once. When the Trainer wraps is left to ``transformers``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from xla_fsdp.fsdp.engine.activation_checkpoint import checkpoint_module
from xla_fsdp.fsdp.wrapper import XlaFullyShardedDataParallel
from xla_fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

_MADE_HERE = {"self", "module", "auto_wrap_policy", "auto_wrapper_callable"}


def shard_as_configured(model: nn.Module, args: Any) -> XlaFullyShardedDataParallel:
    """``model`` wrapped.

    Args:
        model: a plain model.
        args: ``TrainingArguments``. Of its ``fsdp_config`` these count: ``min_num_params``, else
            ``transformer_layer_cls_to_wrap`` (default: the model's ``_no_split_modules``) say what
            becomes a unit; ``xla_fsdp_grad_ckpt``, whether units are recomputed in backward;
            ``xla_fsdp_settings``, all other options, with dtypes by name.

    Raises:
        ValueError: with all that does not fit.
    """
    config: Mapping[str, Any] = args.fsdp_config
    settings: Mapping[str, Any] = args.xla_fsdp_config
    names = _layer_names(model, config)
    recompute = bool(config["xla_fsdp_grad_ckpt"])
    problems = [*_setting_problems(settings), *_args_problems(args), *_name_problems(model, names)]
    if recompute and not names and not config["min_num_params"]:
        problems.append("xla_fsdp_grad_ckpt needs transformer_layer_cls_to_wrap or min_num_params")
    if problems:
        raise ValueError(f"fsdp_config cannot be followed: {'; '.join(problems)}")
    model_config: Any = getattr(model, "config", None)
    if recompute and model_config is not None:
        model_config.use_cache = False  # a cache that grows when a unit is recomputed
    policy = _policy(model, config, names)
    wrapper = _recomputing if recompute and policy is not None else None
    return XlaFullyShardedDataParallel(
        model, auto_wrap_policy=policy, auto_wrapper_callable=wrapper, **settings
    )


def _recomputing(module: nn.Module, **options: Any) -> nn.Module:
    return XlaFullyShardedDataParallel(checkpoint_module(module), **options)


def _layer_names(model: nn.Module, config: Mapping[str, Any]) -> list[str]:
    if config["min_num_params"]:
        return []
    given = config.get("transformer_layer_cls_to_wrap")
    if given is None:
        present = {type(module).__name__ for module in model.modules()}
        return sorted(present & set(getattr(model, "_no_split_modules", None) or ()))
    return [given] if isinstance(given, str) else list(given)


def _policy(
    model: nn.Module, config: Mapping[str, Any], names: list[str]
) -> Callable[..., bool] | None:
    if config["min_num_params"]:
        return partial(size_based_auto_wrap_policy, min_num_params=config["min_num_params"])
    if not names:
        return None
    classes = {type(module) for module in model.modules() if type(module).__name__ in names}
    return partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)


def _setting_problems(settings: Mapping[str, Any]) -> list[str]:
    known = set(inspect.signature(XlaFullyShardedDataParallel.__init__).parameters) - _MADE_HERE
    unknown = sorted(set(settings) - known)
    if not unknown:
        return []
    return [f"xla_fsdp_settings has {', '.join(unknown)}; there are {', '.join(sorted(known))}"]


def _args_problems(args: Any) -> list[str]:
    problems = []
    if args.gradient_checkpointing:
        problems.append(
            "gradient_checkpointing=True uses torch.utils.checkpoint, which knows no XLA device; "
            "set fsdp_config['xla_fsdp_grad_ckpt']=True instead"
        )
    if args.save_on_each_node:
        problems.append(
            "save_on_each_node=True would write models without tensors on other hosts, as the "
            "merged tensors are on the main process only; leave it out, and copy the directory"
        )
    if args.torch_compile:
        problems.append("torch_compile=True would cut the step into many programs; leave it out")
    return problems


def _name_problems(model: nn.Module, names: list[str]) -> list[str]:
    present = {type(module).__name__ for module in model.modules()}
    return [
        f"transformer_layer_cls_to_wrap names {name}, which {type(model).__name__} does not have"
        for name in names
        if name not in present
    ]
