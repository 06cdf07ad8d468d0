"""Tensors that have no value, and never will: whoever still holds one is told so at its use.

What torch_xla has in place of their values is nothing that a program can read: it ends the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch import Tensor, overrides
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from xla_fsdp.distributed.pytree import tensors_in
from xla_fsdp.xla import ops


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


class TracedTensors(TorchFunctionMode):
    """The tensors of the device that Python code sees in a trace: what functions take and return,
    what autograd saves, and the gradients of all these.

    A sync computes all live tensors of its device, whoever holds them: a frame of an error's
    traceback, a logger, a debugger, a dict of the user. What the trace has made from placeholders,
    and is alive when it ends, becomes a ``TensorOfTrace``. One is not seen: that a backward takes
    from ``ctx.saved_tensors`` and keeps, and calls no function with.
    """

    def __init__(self) -> None:
        super().__init__()
        self._first = _number(xb.create_placeholder_tensor((), torch.float32))
        # By id. Kept until the trace ends: autograd's threads drop others while they are looked at.
        self._made: dict[int, Tensor] = {}
        self._others: dict[int, Tensor] = {}
        self._hooked: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._add(*tensors_in((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        self._add(*tensors_in(result))
        return result

    def save(self, tensor: Tensor) -> Tensor:
        """Return what autograd is to save in place of ``tensor``."""
        saved = tensor.detach()
        self._add(saved)
        return saved

    def _add(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            key = id(tensor)
            if key not in self._made and not _is_since(tensor, self._first):
                self._others[key] = tensor
            if key in self._others:  # also if it has been changed in place
                continue
            self._made[key] = tensor
            if tensor.requires_grad and key not in self._hooked:
                self._hooked.add(key)
                with torch._C.DisableTorchFunction():
                    tensor.register_hook(self._see_gradient)

    def _see_gradient(self, grad: Tensor) -> None:
        self._add(grad)
        if self not in overrides._get_current_function_mode_stack():
            overrides._push_mode(self)  # until the node that takes the gradient has run

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        alive = list(map(weakref.ref, self._made.values()))
        self._made, self._others = {}, {}
        if any(each() is not None for each in alive):
            held = ops.let_backward_end()
            _lose_traced([each for each in map(ops.referent, alive) if each is not None])
            del held


def _lose_traced(tensors: Sequence[Tensor]) -> None:
    """Let those that depend on placeholders, and their gradients, be a ``TensorOfTrace`` each."""
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            grad = tensor.grad if tensor.is_leaf else None
            for each in (tensor,) if grad is None else (tensor, grad):
                if _depends_on_placeholders(each):
                    _lose(each)


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


def _is_since(tensor: Tensor, first: int) -> bool:
    return tensor.device.type == "xla" and _number(tensor) >= first


def _depends_on_placeholders(tensor: Tensor) -> bool:
    if torch_xla._XLAC._is_placecholder(tensor):
        return True
    # Asked of computed ones, too: an alias of a placeholder counts as one, and would be computed.
    _, inputs = torch_xla._XLAC._get_tensors_xla_device_data_node([tensor])
    return any(map(torch_xla._XLAC._is_placecholder, inputs))


def _lose(tensor: Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        ops.let_go(tensor, xb.create_placeholder_tensor(tuple(tensor.shape), tensor.dtype))
    tensor.__class__ = TensorOfTrace
