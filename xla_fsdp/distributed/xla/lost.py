"""Tensors that have no value, and never will: whoever still holds one is told so at its use.

What torch_xla has in place of their values is nothing that a program can read: it ends the process.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from xla_fsdp.distributed.pytree import tensors_in
from xla_fsdp.distributed.xla import ops


class LostTensor(Tensor):
    """A tensor that was never computed; ``why`` of its class says why, and what to do.

    Any use raises RuntimeError, except for questions that its values do not answer.
    """

    why: ClassVar[str] = ""

    @classmethod
    def error(cls, name: str) -> RuntimeError:
        """Return what to raise where the function ``name`` uses one."""
        return RuntimeError(f"{name} was called with a tensor that was never computed: {cls.why}")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "is_inference"):
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **(kwargs or {}))
            if isinstance(found, LostTensor) or not isinstance(found, Tensor):
                return found
        raise cls.error(name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LostTensor(shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"


class TensorOfTrace(LostTensor):
    """A tensor that a traced function computed from its inputs, which had no values."""

    why = (
        "it was computed while a loop was traced, for all iterations at once, and has no value "
        "outside of the loop. Let the traced function return it; a block that is scanned hands it "
        "from block to block, or is not scanned"
    )


@contextlib.contextmanager
def losing_failed_traces() -> Iterator[None]:
    """If the block raises, let no tensor that it made from placeholders have a graph.

    A sync computes all live tensors of its device, whoever holds them: a frame of the error's
    traceback, a logger, a debugger, a dict of the user. Each of these becomes a ``TensorOfTrace``.
    """
    on, first = ops.device(), _number(xb.create_placeholder_tensor((), torch.float32))
    before = _collections()
    try:
        yield
    except BaseException:
        with ops.no_collection(), torch._C.DisableTorchFunctionSubclass():
            for tensor in _tensors_since(before):
                # Raised for what torch left behind after an error, whose tensor has been freed.
                with contextlib.suppress(RuntimeError):
                    grad = tensor.grad if tensor.is_leaf else None
                    for each in (tensor,) if grad is None else (tensor, grad):
                        if each.device == on and _has_no_value(each, first):
                            _lose(each)
        raise


def _collections() -> list[int]:
    return [generation["collections"] for generation in gc.get_stats()[1:]]


def _tensors_since(before: Sequence[int]) -> list[Tensor]:
    """Return the tensor objects made since ``_collections`` returned ``before``, and others."""
    # To list all objects of a process takes 100 ms. New ones are in the first two generations.
    young = [*gc.get_objects(generation=0), *gc.get_objects(generation=1)]
    if _collections() != list(before):
        return ops.tensor_objects()
    return ops.tensors_among(young)


def _number(tensor: Tensor) -> int:
    """Return a number that grows with each tensor that torch_xla makes."""
    return int(torch_xla._XLAC._xla_get_tensor_id(tensor))


class OutsideTensors(TorchFunctionMode):
    """The tensors of the device that functions are called with inside, and that were there before.

    One that a trace changes in place would be computed from placeholders by the next sync.
    """

    def __init__(self) -> None:
        super().__init__()
        self._first = _number(xb.create_placeholder_tensor((), torch.float32))
        self._seen: dict[int, tuple[Tensor, int, Tensor]] = {}  # with versions and values

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in tensors_in((args, kwargs)):
            for each in (tensor, tensor._base):
                if each is not None and id(each) not in self._seen and self._is_outside(each):
                    with torch.no_grad():
                        self._seen[id(each)] = each, each._version, each.detach().clone()
        return func(*args, **(kwargs or {}))

    def _is_outside(self, tensor: Tensor) -> bool:
        on_device = type(tensor) in (Tensor, Parameter) and tensor.device.type == "xla"
        return on_device and not tensor.is_inference() and _number(tensor) < self._first

    def restore(self) -> list[Tensor]:
        """Give those that were changed in place their values back, and return them."""
        changed = [
            (tensor, value)
            for tensor, version, value in self._seen.values()
            if tensor._version != version or _depends_on_placeholders(tensor)
        ]
        self._seen = {}
        with torch.no_grad():
            for tensor, value in changed:
                tensor.copy_(value)
        return [tensor for tensor, _ in changed]


def _has_no_value(tensor: Tensor, first: int) -> bool:
    return _number(tensor) >= first and _depends_on_placeholders(tensor)


def _depends_on_placeholders(tensor: Tensor) -> bool:
    if torch_xla._XLAC._is_placecholder(tensor):
        return True
    if not ops.is_pending(tensor):
        return False
    _, inputs = torch_xla._XLAC._get_tensors_xla_device_data_node([tensor])
    return any(map(torch_xla._XLAC._is_placecholder, inputs))


def _lose(tensor: Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        ops.let_go(tensor, xb.create_placeholder_tensor(tuple(tensor.shape), tensor.dtype))
    tensor.__class__ = TensorOfTrace
