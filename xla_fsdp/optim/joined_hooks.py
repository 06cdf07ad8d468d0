"""Hooks of an optimizer that hands its work to others.

Always true: hooks lie with the optimizers that do the work, as if registered there; they get these
as their first argument, and run once for each of them. What is handed on is left to subclasses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

Hook = Callable[..., Any]


class JoinedHandles:
    """Removes one hook from all optimizers.

    Args:
        handles: what they returned for it.
    """

    def __init__(self, handles: Sequence[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Undo the registration."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> JoinedHandles:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class HooksOfOthers(Optimizer, ABC):
    """Base of optimizers without hooks of their own."""

    @property
    @abstractmethod
    def hooked(self) -> list[Optimizer]:
        """The optimizers that do the work."""

    def register_step_pre_hook(self, hook: Hook) -> Any:
        """Before a step of each of ``hooked``."""
        return JoinedHandles([each.register_step_pre_hook(hook) for each in self.hooked])

    def register_step_post_hook(self, hook: Hook) -> Any:
        """After a step of each of ``hooked``."""
        return JoinedHandles([each.register_step_post_hook(hook) for each in self.hooked])

    def register_state_dict_pre_hook(self, hook: Hook, prepend: bool = False) -> Any:
        """Before each of ``hooked`` makes its state dict."""
        return JoinedHandles(
            [each.register_state_dict_pre_hook(hook, prepend) for each in self.hooked]
        )

    def register_state_dict_post_hook(self, hook: Hook, prepend: bool = False) -> Any:
        """After each of ``hooked`` has made its state dict."""
        return JoinedHandles(
            [each.register_state_dict_post_hook(hook, prepend) for each in self.hooked]
        )

    def register_load_state_dict_pre_hook(self, hook: Hook, prepend: bool = False) -> Any:
        """Before each of ``hooked`` loads its state dict."""
        return JoinedHandles(
            [each.register_load_state_dict_pre_hook(hook, prepend) for each in self.hooked]
        )

    def register_load_state_dict_post_hook(self, hook: Hook, prepend: bool = False) -> Any:
        """After each of ``hooked`` has loaded its state dict."""
        return JoinedHandles(
            [each.register_load_state_dict_post_hook(hook, prepend) for each in self.hooked]
        )
