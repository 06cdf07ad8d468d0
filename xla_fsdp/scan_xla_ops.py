"""Functions of tensors traced apart from the program around them, for loops to run.

Words: a *body* is such a function as one XLA computation.
Always true: a body shares no chain of collectives or random numbers with the program around it; all
its random numbers come from a seed that is one of its inputs.
Loops of bodies are ``loop_xla_ops``'; what they compute is decided in ``scan``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch import Tensor

from xla_fsdp import xla_ops


@dataclass(frozen=True)
class Like:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        """Those of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @classmethod
    def slice_of(cls, stack: Tensor) -> Like:
        """Those of a slice of ``stack``."""
        return cls(tuple(stack.shape[1:]), stack.dtype)


@dataclass(frozen=True)
class Body:
    """A traced function.

    Args:
        computation: takes the inputs that are used, the seed and what is captured, in the order of
            their parameter numbers.
        text: serialized; equal for functions that compute the same.
        numbers: parameter number of each input; -1 for one that is not used.
        seed: parameter number of the seed, or -1.
        captured: other device values that the function used, by parameter number.
        outputs: what it returns.
    """

    computation: Any
    text: bytes
    numbers: tuple[int, ...]
    seed: int
    captured: dict[int, Tensor]
    outputs: tuple[Like, ...]

    @property
    def draws_random_numbers(self) -> bool:
        """Whether a seed is needed."""
        return self.seed != -1


class ChangedInPlaceError(Exception):
    """A traced function changed inputs; ``numbers`` says which."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(f"inputs {list(numbers)} were changed in place")
        self.numbers = list(numbers)


def trace_body(
    function: Callable[[list[Tensor]], Sequence[Tensor]], inputs: Sequence[Like], name: str
) -> Body:
    """Trace ``function``, called with tensors that have no values.

    Raises:
        ChangedInPlaceError: if it changes them.
    """
    given = [xb.create_placeholder_tensor(each.shape, each.dtype) for each in inputs]
    before = [identity(tensor) for tensor in given]
    with _apart() as seed, torch.no_grad():
        results = list(function(list(given)))
        changed = [at for at, each in enumerate(given) if identity(each) != before[at]]
        if changed:
            raise ChangedInPlaceError(changed)
        context = torch_xla._XLAC.lowering.LoweringContext(name)
        context.set_name_string(name)
        context.build(results)
        module = context.hlo()
        captured = dict(context.device_parameter_id_tensor_mapping())
        numbers = tuple(context.tensor_parameter_id(each) for each in given)
        seed_number = context.tensor_parameter_id(seed)
        for number in (*numbers, seed_number):
            captured.pop(number, None)
        return Body(
            xb.computation_from_module_proto(name, module),
            bytes(module),
            numbers,
            seed_number,
            captured,
            tuple(Like.of(each) for each in results),
        )


def cast_here(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, computed where it stands, in every round of a loop.

    Of a float32 slice the TPU compiler would cast the whole stack before the loop, also from behind
    a barrier: what is only used in bf16 it turns into bf16 as far back as it can. What it takes
    for integers it leaves alone.
    """
    if tensor.dtype != torch.float32 or dtype == tensor.dtype:
        return tensor.to(dtype)
    bits = _as_type(tensor, xb.Type.S32)
    torch_xla._XLAC._xla_optimization_barrier_([bits])
    return _as_type(bits, xb.Type.F32).to(dtype)


def _as_type(tensor: Tensor, kind: Any) -> Tensor:
    """The same bits."""
    builder = xb.create_builder("bits")
    param = xb.mkparam(builder, 0, xb.tensor_shape(tensor))
    computation = xb.Op.tuple([param.bitcast(kind)]).build("bits")
    [found] = torch_xla._XLAC._xla_user_computation("xla::bits", [tensor], computation)
    return found


def depends_on(tensor: Tensor, given: Tensor) -> bool:
    """Whether ``tensor`` is computed from ``given``, one of a traced function's inputs."""
    context = torch_xla._XLAC.lowering.LoweringContext("depends")
    context.build([tensor])
    return context.tensor_parameter_id(given) != -1


def identity(tensor: Tensor) -> bytes:
    """Equal for traced tensors that are computed alike."""
    return bytes(torch_xla._XLAC._get_graph_hash([tensor]))


def new_seeds(length: int, device: torch.device) -> Tensor:
    """Seeds, [length], from the device's random numbers."""
    return torch.randint(2**31 - 1, (length,), dtype=torch.int64, device=device)


def reroot_random_numbers(device: torch.device) -> None:
    """Continue the device's random numbers from a value known on the host. Tracing a body apart
    does so, too: a step makes one program whether it traces bodies or not."""
    xla_ops.set_rng_state(xla_ops.get_rng_state(device), device)


@contextlib.contextmanager
def _apart() -> Iterator[Tensor]:
    """Inside, collectives wait for nothing outside, and random numbers come from the tensor that
    this yields."""
    device = xla_ops.device()
    token = torch_xla._XLAC._get_all_reduce_token(str(device))
    state = xla_ops.get_rng_state(device)
    xla_ops.forget_token()
    try:
        xla_ops.set_rng_state(state, device)
        yield torch_xla._XLAC._get_base_seed_as_tensor(str(device))
    finally:
        torch_xla._XLAC._set_all_reduce_token(str(device), token)
        xla_ops.set_rng_state(state, device)
