"""Replace functions of other packages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def surround(owner: Any, name: str, by: Callable[..., Any]) -> None:
    """Let ``owner.name(...)`` call ``by(original, ...)``, unless it calls a ``by`` already."""
    original = getattr(owner, name)
    if getattr(original, "is_of_xla_fsdp", False):
        return

    @functools.wraps(original)
    def surrounded(*args: Any, **kwargs: Any) -> Any:
        return by(original, *args, **kwargs)

    surrounded.is_of_xla_fsdp = True  # type: ignore[attr-defined]
    setattr(owner, name, surrounded)
