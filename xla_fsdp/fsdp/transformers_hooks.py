"""Hooks of models of transformers that collect hidden states, on models with units inside."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from xla_fsdp.fsdp.engine.module_state import is_wrapper


def models_of_transformers(model: nn.Module) -> list[Any]:
    """Return the models of transformers that ``model`` is or contains."""
    # By name, as another rank, a thread of this process, may be about to import transformers.
    base = ("transformers.modeling_utils", "PreTrainedModel")
    return [
        each
        for each in model.modules()
        if any((of.__module__, of.__qualname__) == base for of in type(each).__mro__)
    ]


def install_captures(model: nn.Module) -> None:
    """Let models of transformers register now the hooks that collect hidden states.

    They look for layers by class when they are first asked for them, and would find units in their
    places, whose children are those of the layers.
    """
    models = models_of_transformers(model)
    # Versions that have it load it with any model.
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    if not models or capturing is None:
        return
    units: list[tuple[dict[str, Any], str, Any]] = [
        (parent._modules, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and is_wrapper(child)
    ]
    for places, name, unit in units:
        places[name] = unit.module
    try:
        for each in models:
            capturing.maybe_install_capturing_hooks(each)
    finally:
        for places, name, unit in units:
            places[name] = unit
