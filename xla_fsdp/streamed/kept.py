"""What a module that streams makes once and needs in every step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class Kept:
    """Traced loops and the like, of one module."""

    _kept: dict[Hashable, Any] = field(default_factory=dict)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What is kept under ``key``, made if need be."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies make their own."""
        return Kept, ()
