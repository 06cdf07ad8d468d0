"""Tensors that have no value, and never will: whoever still holds one is told so at its use.

What torch_xla has in place of their values is nothing that a program can read: it ends the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch import Tensor, overrides
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from xla_fsdp.distributed.pytree import tensors_in
from xla_fsdp.xla import ops
from xla_fsdp.xla.graph import tensor_id


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
        "from block to block, or is not scanned (scan_layers=False)"
    )


class ChangedOutsideError(ValueError, RuntimeError):
    """A traced function changed a tensor in place that is none of its inputs."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(
            f"a block that runs in a loop changes a tensor of shape {list(tensor.shape)} in place "
            f"that is none of its arguments, parameters and buffers, in its forward or backward. "
            f"The loop, which is traced once, would not change it. Return what it is computed "
            f"from, or do not scan these blocks"
        )


class _Outside(NamedTuple):
    """A tensor of the device that was there before a trace."""

    tensor: Tensor
    version: int
    values: Tensor  # a copy


def has_hooks(tensor: Tensor) -> bool:
    """Return whether somebody's hooks wait for the gradient of ``tensor``, besides those by which
    ``TracedTensors`` looks at it."""
    hooks = (tensor._backward_hooks or {}).values()
    return any(getattr(each, "__func__", None) is not TracedTensors._see for each in hooks)


class TracedTensors(TorchFunctionMode):
    """Lets nothing depend on placeholders once a trace has ended.

    A sync computes all live tensors of its device, whoever holds them: a frame of an error's
    traceback, a logger, a debugger, a dict of the user. What the trace has made from placeholders,
    and is alive when it ends, becomes a ``TensorOfTrace``; what was there before, and was changed
    in place, gets its values back.

    Python gets tensors from functions, from nodes of autograd's graph and from what these saved, so
    all three are looked at: functions by the mode, nodes by hooks, which are there before Python
    code sees the node, and what was saved by ``save`` and ``unpack``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changed: list[Tensor] = []  # from outside; once the trace has ended
        self._first = tensor_id(xb.create_placeholder_tensor((), torch.float32))
        # By id. Kept until the trace ends: autograd's threads drop others while they are looked at.
        self._made: dict[int, Tensor] = {}
        self._unpacked: list[Tensor] = []
        self._outside: dict[int, _Outside] = {}
        self._nodes: set[Any] = set()
        self._hooked: set[int] = set()
        self._hooks: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._add(tensors_in((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        self._add(tensors_in(result))
        return result

    def save(self, tensor: Tensor) -> Tensor:
        """Return what autograd is to save in place of ``tensor``."""
        saved = tensor.detach()
        self._add([saved])
        return saved

    def unpack(self, saved: Tensor) -> Tensor:
        """Return what autograd is to hand out, of which it makes an alias that nobody can list."""
        own = _with_memory_of_its_own(saved)
        if own.device.type == "xla":  # not a number of the host
            self._unpacked.append(own)
        return own

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            key = id(tensor)
            # Of transforms of torch.func, which no other code sees: what they wrap is seen.
            wraps = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            if wraps or key in self._outside:  # also if it has been changed in place
                continue
            is_since = tensor.device.type == "xla" and tensor_id(tensor) >= self._first
            if key in self._made or is_since:
                self._made[key] = tensor
                self._hook(tensor)
            else:
                self._add_outside(tensor)

    def _add_outside(self, tensor: Tensor) -> None:
        for each in (tensor, tensor._base):
            if each is not None and id(each) not in self._outside and _can_be_changed(each):
                with torch.no_grad(), torch._C.DisableTorchFunction():
                    values = each.detach().clone()
                self._outside[id(each)] = _Outside(each, each._version, values)

    def _hook(self, tensor: Tensor) -> None:
        if not tensor.requires_grad or id(tensor) in self._hooked:
            return
        self._hooked.add(id(tensor))
        with torch._C.DisableTorchFunction():
            self._hooks.append(tensor.register_hook(self._see))
            waiting = [tensor.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in self._nodes:
                continue
            self._nodes.add(node)
            self._hooks += [node.register_prehook(self._see), node.register_hook(self._see)]
            waiting += [following for following, _ in node.next_functions]

    def _see(self, *grads: Any) -> None:
        """Look at gradients, and at what is computed from here on in this thread of autograd."""
        self._add(tensors_in(grads))
        if self not in overrides._get_current_function_mode_stack():
            overrides._push_mode(self)  # until the node that takes the gradients has run

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        for hook in self._hooks:
            hook.remove()
        self.changed = _restore(self._outside.values())
        _lose_aliases(self._unpacked)
        alive = list(map(weakref.ref, self._made.values()))
        self._made, self._outside = {}, {}
        self._nodes, self._hooks, self._unpacked = set(), [], []
        if any(each() is not None for each in alive):
            held = ops.let_backward_end()
            _lose_traced([each for each in map(ops.referent, alive) if each is not None])
            del held


def _can_be_changed(tensor: Tensor) -> bool:
    on_device = type(tensor) in (Tensor, Parameter) and tensor.device.type == "xla"
    return on_device and not tensor.is_inference()


def _restore(outside: Iterable[_Outside]) -> list[Tensor]:
    """Give those that were changed in place their values back, and return them."""
    changed = [
        each
        for each in outside
        if each.tensor._version != each.version or _depends_on_placeholders(each.tensor)
    ]
    with torch.no_grad():
        for each in changed:
            each.tensor.copy_(each.values)
    return [each.tensor for each in changed]


def _with_memory_of_its_own(tensor: Tensor) -> Tensor:
    """Return the value of ``tensor`` without the tensor that it is a view of."""
    with torch._C.DisableTorchFunction():
        if not torch._is_functional_tensor(tensor):  # made under a dispatch mode
            return tensor.detach()
        torch._sync(tensor)
        return torch._to_functional_tensor(torch._from_functional_tensor(tensor))


def _lose_aliases(tensors: Iterable[Tensor]) -> None:
    """Let all that share the memories of these depend on no placeholders."""
    with torch._C.DisableTorchFunction():
        for tensor in filter(_depends_on_placeholders, tensors):
            dummy = xb.create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)
            torch_xla._XLAC._replace_xla_tensor(tensor, dummy)


def _lose_traced(tensors: Sequence[Tensor]) -> None:
    """Let those that depend on placeholders, and their gradients, be a ``TensorOfTrace`` each."""
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in reversed(tensors):  # views before what they are views of, which they hold
            grad = tensor.grad if tensor.is_leaf else None
            for each in (tensor,) if grad is None else (tensor, grad):
                if _depends_on_placeholders(each):
                    _lose(each)


def _depends_on_placeholders(tensor: Tensor) -> bool:
    if torch_xla._XLAC._is_placecholder(tensor):
        return True
    # Asked of computed ones, too: an alias of a placeholder counts as one, and would be computed.
    _, inputs = torch_xla._XLAC._get_tensors_xla_device_data_node([tensor])
    return any(map(torch_xla._XLAC._is_placecholder, inputs))


def _lose(tensor: Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        dummy = xb.create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)
        if tensor._use_count() == 1:  # type: ignore[attr-defined]  # only Python holds it
            # A view holds what it was made from, and so on, which Python may never have seen.
            torch._C._swap_tensor_impl(tensor, dummy)
        else:
            ops.free_keeping_aliases(tensor, dummy)
    tensor.__class__ = TensorOfTrace
