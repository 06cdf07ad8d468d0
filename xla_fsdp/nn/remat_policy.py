"""Choose which activations of a block the forward loop saves for backward, and where.

A policy traces a block twice: in the forward loop, and in the backward loop, where the saved
activations replace the recomputed ones. XLA removes the recomputation that nobody uses then. The
loop itself always saves the block's input.

Invariant: the recomputation gives the same values as forward, random numbers included.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from xla_fsdp.xla.host import fetch, offload
from xla_fsdp.xla.loop import TensorSpec, depends_on, graph_hash

Run = Callable[[], Tensor]

Replay = Callable[[Run, nn.Module, Sequence[Tensor]], Tensor]
"""Recomputes a block: takes (function to run, the block's module, saved activations)."""


@dataclass(frozen=True)
class Recorded:
    """Output of a block in forward, the activations to save, and how to recompute it."""

    output: Tensor
    kept: list[Tensor]
    replay: Replay


RematPolicy = Callable[[Run, nn.Module, Tensor], Recorded]
"""Runs a block in forward: takes (function to run, the block's module, its input)."""


def policy_of(remat: str | Sequence[str]) -> RematPolicy:
    """Return the policy for the option ``remat`` of ``scan_blocks``.

    Raises:
        ValueError: if it is neither "full", "none" nor a list of names.
    """
    if remat == "full":
        return save_nothing
    if remat == "none":
        return save_everything
    if isinstance(remat, str) or not remat or not all(isinstance(name, str) for name in remat):
        raise ValueError(
            f'remat is {remat!r}; give "full" to compute blocks again in backward, "none" to keep '
            f"all activations, or a list of the names of those to keep"
        )
    return partial(save_named, tuple(remat))


def save_nothing(run: Run, module: nn.Module, x: Tensor) -> Recorded:
    """Recompute everything."""
    with torch.no_grad():
        return Recorded(run(), [], lambda again, module, kept: again())


def save_everything(run: Run, module: nn.Module, x: Tensor) -> Recorded:
    """Save every tensor that autograd saves, unless it is computed from parameters alone."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        saved.append(tensor.detach())
        return len(saved) - 1

    with torch.enable_grad(), saved_tensors_hooks(pack, _refuse_backward):
        output = run().detach()
    numbers = [number for number, tensor in enumerate(saved) if depends_on(tensor, x)]
    return Recorded(output, [saved[n] for n in numbers], partial(_replay_saved, numbers))


def _refuse_backward(_: Any) -> Tensor:
    raise RuntimeError("backward ran through a forward that was traced for a loop alone")


def _replay_saved(
    numbers: Sequence[int], run: Run, module: nn.Module, kept: Sequence[Tensor]
) -> Tensor:
    """Recompute a block; let autograd save those in ``kept`` in place of its tensors with these
    numbers."""
    known, count = dict(zip(numbers, kept, strict=True)), itertools.count()

    def pack(tensor: Tensor) -> Tensor:
        return known.get(next(count), tensor.detach())

    with saved_tensors_hooks(pack, lambda saved: saved):
        return run()


def save_named(names: tuple[str, ...], run: Run, module: nn.Module, x: Tensor) -> Recorded:
    """Save the activations with these names: of submodules, or given by ``checkpoint_name``.

    Raises:
        ValueError: if no activation has one of the names.
    """
    kept: list[tuple[str, Tensor]] = []

    def keep(name: str, value: Tensor) -> Tensor:
        if name in names:
            kept.append((name, value))
        return value

    with torch.no_grad(), _intercept_named(module, names, keep):
        output = run()
    missing = [name for name in names if name not in dict(kept)]
    if missing:
        submodules = ", ".join(name for name, _ in module.named_modules() if name)
        raise ValueError(
            f"remat names {', '.join(missing)}, which is no submodule that ran and returned a "
            f"tensor, nor was given by checkpoint_name. Submodules of a block: {submodules}"
        )
    return Recorded(output, [value for _, value in kept], partial(_replay_named, names))


def _replay_named(
    names: tuple[str, ...], run: Run, module: nn.Module, kept: Sequence[Tensor]
) -> Tensor:
    """Recompute a block, and replace named activations by the saved ones."""
    values = iter(kept)
    known: dict[bytes, Tensor] = {}

    def replace(name: str, value: Tensor) -> Tensor:
        if name not in names:
            return value
        mine = next(values)
        known[graph_hash(value)] = mine
        return _Replaced.apply(value, mine)

    def unpack(saved: Tensor) -> Tensor:
        # The operation that computed the named value may have saved it as well, as tanh does.
        return known.get(graph_hash(saved), saved)

    hooks = saved_tensors_hooks(lambda saved: saved.detach(), unpack)
    with _intercept_named(module, names, replace), hooks:
        return run()


class _Replaced(torch.autograd.Function):
    """Return the saved value; pass the gradient to the computed one."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, kept: Tensor) -> Tensor:
        return kept.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


Intercept = Callable[[str, Tensor], Tensor]

_intercept: ContextVar[Intercept | None] = ContextVar("_intercept", default=None)


def checkpoint_name(tensor: Tensor, name: str) -> Tensor:
    """Name an activation of a block, so that ``scan_blocks(..., remat=[name])`` saves it for
    backward. Outside of scanned blocks this does nothing.

    Args:
        tensor: the activation, of any shape.
        name: its name; several activations may have the same.

    Returns:
        The tensor to compute with from here on.
    """
    intercept = _intercept.get()
    return tensor if intercept is None else intercept(name, tensor)


name_activation = checkpoint_name
"""The earlier name of ``checkpoint_name``."""


@contextlib.contextmanager
def _intercept_named(
    module: nn.Module, names: Sequence[str], intercept: Intercept
) -> Iterator[None]:
    """Inside, replace every named activation by what ``intercept`` returns for it."""

    def hook(name: str) -> Callable[..., Any]:
        return lambda _, args, out: intercept(name, out) if isinstance(out, Tensor) else None

    inner = dict(module.named_modules())
    handles = [inner[name].register_forward_hook(hook(name)) for name in names if name in inner]
    token = _intercept.set(intercept)
    try:
        yield
    finally:
        _intercept.reset(token)
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------- device or host memory


@dataclass(frozen=True)
class ActivationStore:
    """Stores the ys of the forward loop until backward needs them."""

    # In host memory. Backward then fetches slices one iteration early and carries them; otherwise
    # each iteration would wait for its copy.
    on_host: bool

    def put(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the ys of a forward iteration that saves these values."""
        return [offload(each) for each in values] if self.on_host else list(values)

    def get(self, stack: Tensor) -> Tensor:
        """Return one of these ys, in the device's memory."""
        return fetch(stack) if self.on_host else stack

    def carry_specs(self, ys: Sequence[Tensor]) -> list[TensorSpec]:
        """Return the specs of the fetched slices that the backward loop carries."""
        return [TensorSpec.slice_of(each) for each in ys] if self.on_host else []

    def first_carry(self, ys: Sequence[Tensor]) -> list[Tensor]:
        """Fetch the slices for the first iteration of backward, which runs the last block."""
        return [fetch(each[-1]) for each in ys] if self.on_host else []

    def take(
        self, carry: Sequence[Tensor], slices: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the values for this backward iteration, and the carry for the next one."""
        if self.on_host:
            return list(carry), [fetch(each) for each in slices]
        return list(slices), []
