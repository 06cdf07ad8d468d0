"""What blocks of a loop return before the loop has run: a tensor without a value.

Always true: it goes from one block to the next and tells its shape and dtype; whatever else is done
with it raises, so that a user's loop that does more than hand it on is noticed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_TELLS = frozenset(
    {
        "shape.__get__", "dtype.__get__", "device.__get__", "ndim.__get__", "requires_grad.__get__",
        "is_leaf.__get__", "grad_fn.__get__", "layout.__get__", "size", "dim", "numel", "nelement",
        "ndimension",
        "is_floating_point", "is_complex", "element_size", "is_inference", "get_device",
        "is_meta.__get__", "is_cuda.__get__", "is_sparse.__get__", "is_quantized.__get__",
        "is_nested.__get__", "names.__get__", "itemsize.__get__", "is_xla.__get__",
        "is_cpu.__get__",
    }
)  # fmt: skip


class Placeholder(Tensor):
    """The output of block ``block`` of ``length``, before it is computed."""

    block: int
    length: int

    @classmethod
    def after(
        cls,
        block: int,
        length: int,
        like: Tensor,
        dtype: torch.dtype,
    ) -> Placeholder:
        """With the shape of ``like``. It takes no part in autograd, which torch's own module hooks
        would make of a tensor that does."""
        made = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=dtype, device=like.device)
        made.block, made.length = block, length
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placeholder(output of block {self.block} of {self.length})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _name(func)
        if name in _TELLS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise _misused(args, kwargs, name)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise _misused(args, kwargs, str(func))


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)  # of a property, its descriptor
    return f"{owner.__name__}.{name}" if name == "__get__" and owner is not None else name


def _misused(args: Any, kwargs: Any, name: str) -> RuntimeError:
    flat, _ = torch.utils._pytree.tree_flatten((args, kwargs))
    held = next(each for each in flat if isinstance(each, Placeholder))
    return RuntimeError(
        f"the output of block {held.block} of {held.length} was used (by {name}) before block "
        f"{held.length - 1} was called. Scanned blocks run as one loop: between them a forward may "
        f"do nothing but hand each block's output to the next, as in `for block in blocks: x = "
        f"block(x, ...)`, for all of them. Move the rest into the blocks, or do not scan these"
    )
