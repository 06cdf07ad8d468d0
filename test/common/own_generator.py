"""Random values that do not depend on what other ranks draw meanwhile."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_DRAWS = frozenset(
    {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial"}
    | {"uniform_", "normal_", "random_", "bernoulli_", "exponential_"}
    | {"kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_", "trunc_normal_"}
)


class OwnGenerator(TorchFunctionMode):
    """Inside, this thread draws what ``torch.manual_seed(seed)`` would give it, were it alone.

    CPU ranks are threads and share torch's own generator. ``one_rank_at_a_time()`` keeps out only
    ranks that ask for it, too.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") in _DRAWS and kwargs.get("generator") is None:
            kwargs["generator"] = self._generator
        return func(*args, **kwargs)
