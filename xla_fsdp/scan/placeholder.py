"""What blocks of a loop return before it has run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from xla_fsdp.scan.errors import NoLoopError

_METADATA = frozenset(
    {
        "shape.__get__", "dtype.__get__", "device.__get__", "ndim.__get__", "requires_grad.__get__",
        "is_leaf.__get__", "grad_fn.__get__", "layout.__get__", "size", "dim", "numel", "nelement",
        "ndimension", "is_floating_point", "is_complex", "element_size", "is_inference",
        "get_device", "_base.__get__", "is_meta.__get__", "is_cuda.__get__", "is_sparse.__get__",
        "is_quantized.__get__", "is_nested.__get__", "names.__get__", "itemsize.__get__",
        "is_xla.__get__", "is_cpu.__get__",
    }
)  # fmt: skip


class Placeholder(Tensor):
    """The output of block ``block`` of ``length``, before it is computed.

    It has a shape, a dtype and other metadata. Any other use raises, as a forward may only pass it
    to the next block, and keep it until ``become`` makes it the output. If there is a function
    ``compute``, that is called first, and may make it the output.
    """

    block: int
    length: int
    # If the loop has run without returning this output: the pass, if that tells how to compute it.
    late: Any
    trains: bool  # whether gradients will flow back from the output
    compute: Callable[[Placeholder], None] | None

    @classmethod
    def after(
        cls,
        block: int,
        length: int,
        like: Tensor,
        dtype: torch.dtype,
        *,
        trains: bool,
        compute: Callable[[Placeholder], None] | None,
    ) -> Placeholder:
        # Without requires_grad: torch's module hooks would pass it through an autograd node.
        made = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=dtype, device=like.device)
        made.block, made.length, made.trains = block, length, trains
        made.late, made.compute = None, compute
        return made

    def become(self, output: Tensor, kind: type[Tensor] = Tensor) -> None:
        """Turn this object into the output, a tensor of that ``kind``."""
        own = output.view(output.shape)  # a tensor of which nothing else holds the implementation
        vars(self).clear()
        self.__class__ = kind  # type: ignore[assignment]
        torch._C._swap_tensor_impl(self, own)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placeholder(output of block {self.block} of {self.length})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _name(func)
        used = _placeholders_in(args, kwargs)
        waits = [each for each in used if each.compute is not None]
        if name in _OF_GRAPH and not waits and name != "grad_fn.__get__":
            return used[0].trains == (name == "requires_grad.__get__")
        if name in _METADATA and not (name in _OF_GRAPH and (waits or used[0].trains)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for each in waits:
            if isinstance(each, Placeholder) and each.compute is not None:
                each.compute(each)
        if used := [each for each in used if isinstance(each, Placeholder)]:
            raise _misused(used[0], name)
        return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Too late for ``compute``: autograd has seen a tensor without a graph.
        raise _misused(_placeholders_in(args, kwargs)[0], str(func))


class InnerOutput(Tensor):
    """The output of a block that has run in a loop, with others after it: gradients of those do not
    pass through this tensor, so what would see or change them raises."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _name(func)
        with_respect_to = args[1] if func is torch.autograd.grad else ()
        asked = any(isinstance(each, InnerOutput) for each in pytree.tree_leaves(with_respect_to))
        if asked or name in ("register_hook", "retain_grad"):
            raise NoLoopError(
                f"{name} was called with the output of a scanned block that is not the last one. "
                f"The blocks after it have run in the same loop, so it would not see their "
                f"gradients. Do not scan these blocks"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_OF_GRAPH = frozenset({"requires_grad.__get__", "is_leaf.__get__", "grad_fn.__get__"})
"""Of the metadata, what only the output itself knows."""


def _placeholders_in(args: Any, kwargs: Any) -> list[Any]:
    flat, _ = pytree.tree_flatten((args, kwargs))
    return [each for each in flat if isinstance(each, Placeholder)]


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)  # the descriptor, if func reads a property
    return f"{owner.__name__}.{name}" if name == "__get__" and owner is not None else name


def _misused(used: Placeholder, name: str) -> NoLoopError:
    if used.late is not None:
        return NoLoopError(
            f"the output of block {used.block} of {used.length} was used (by {name}) after the "
            f"last block, and is the only one that was kept, which a loop cannot know in time. "
            f"Keep the outputs of all blocks (in a list), or do not scan these"
        )
    return NoLoopError(
        f"the output of block {used.block} of {used.length} was used (by {name}) before block "
        f"{used.length - 1} was called. Scanned blocks run as one loop: between them a forward may "
        f"do nothing but hand each block's output to the next, as in `for block in blocks: x = "
        f"block(x, ...)`, for all of them, and keep outputs for later. Move the rest into the "
        f"blocks, or do not scan these"
    )
