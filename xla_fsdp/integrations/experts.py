"""Mixtures of transformers with grouped products, by a name; ``parallelize`` needs no call.

Call ``register()`` once per process and name, in the main thread (before ``launch``, on CPU).
"""

from __future__ import annotations

from importlib.metadata import version

from xla_fsdp.integrations import UntestedVersionError, require
from xla_fsdp.nn.experts.routes import check_capacity
from xla_fsdp.recipe import experts
from xla_fsdp.recipe.experts import NAME


def register(name: str = NAME, capacity: float | None = None) -> None:
    """Let transformers' mixtures take ``experts_implementation=name``.

    Args:
        name: in transformers; each capacity has one of its own.
        capacity: how many times its even share of tokens an expert computes at most; tokens beyond,
            in their order, get nothing from it. None for no limit.

    Raises:
        UntestedVersionError: for untested versions of transformers.
        ValueError: if ``capacity`` is not above 0, or ``name`` is one of transformers' own.
    """
    require("transformers")
    if (found := version("transformers")).startswith("4."):
        raise UntestedVersionError(
            f'transformers {found} is installed, and experts_implementation="{name}" needs 5 (and '
            f"Python 3.11); in this one experts are modules of their own, which read the device"
        )
    check_capacity(capacity)
    if not name or experts.is_of_transformers(name):
        raise ValueError(f"name is {name!r}, which transformers has or cannot have; give another")
    experts.register(name, capacity)
