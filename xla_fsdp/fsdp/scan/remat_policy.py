"""Which activations of a block a loop keeps for backward; the others are computed again there.

Words: a *policy* runs a block twice: ``record`` in the forward loop also returns what to keep, and
how to run the block again in backward with these at hand (a *replay*). A *name* is that of a
submodule, whose output it then means, or one given by ``name_activation``.
Always true: a replay gives the value that the forward gave, random numbers included, and what
follows from nothing but kept values is not computed again (nothing computes what nobody uses).
The block's input is kept by the loop in any case.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from xla_fsdp.distributed.xla.loop import depends_on, identity

Run = Callable[[], Tensor]

Replay = Callable[[Run, nn.Module, Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Recorded:
    """What a block returned in forward, what to keep of it, and how to run it again."""

    output: Tensor
    kept: list[Tensor]
    replay: Replay


class Policy(Protocol):
    """See the module's docstring."""

    def record(self, run: Run, module: nn.Module, stream: Tensor) -> Recorded:
        """Run the block, whose submodules ``module`` has, on ``stream``."""
        ...


class KeepNothing:
    """Compute everything again."""

    def record(self, run: Run, module: nn.Module, stream: Tensor) -> Recorded:
        """See ``Policy``."""
        with torch.no_grad():
            return Recorded(run(), [], lambda again, module, kept: again())


class KeepAll:
    """Keep what autograd keeps, but for what follows from the parameters alone."""

    def record(self, run: Run, module: nn.Module, stream: Tensor) -> Recorded:
        """See ``Policy``."""
        saved: list[Tensor] = []

        def note(tensor: Tensor) -> int:
            saved.append(tensor.detach())
            return len(saved) - 1

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, _never):
            output = run().detach()
        kept: list[Tensor] = []
        places: dict[int, int] = {}
        for number, tensor in enumerate(saved):
            if not depends_on(tensor, stream):
                continue
            same = (at for at, each in enumerate(kept) if _same(each, tensor))
            places[number] = next(same, len(kept))
            if places[number] == len(kept):
                kept.append(tensor)
        return Recorded(output, kept, _FromSaved(places))


class _FromSaved:
    """Runs a block again, with kept values for what autograd would save."""

    def __init__(self, places: dict[int, int]) -> None:
        self._places = places

    def __call__(self, run: Run, module: nn.Module, kept: Sequence[Tensor]) -> Tensor:
        count = 0

        def pack(tensor: Tensor) -> tuple[int, Tensor]:
            nonlocal count
            count += 1
            return count - 1, tensor.detach()

        def unpack(packed: tuple[int, Tensor]) -> Tensor:
            number, tensor = packed
            return kept[self._places[number]] if number in self._places else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return run()


class KeepNamed:
    """Keep the activations of these names.

    Args:
        names: of submodules of a block, or given by ``name_activation``.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def record(self, run: Run, module: nn.Module, stream: Tensor) -> Recorded:
        """See ``Policy``.

        Raises:
            ValueError: for a name that did not occur.
        """
        kept: dict[str, Tensor] = {}

        def keep(name: str, value: Tensor) -> Tensor:
            if name in self._names:
                kept[f"{name}/{len(kept)}"] = value
            return value

        with torch.no_grad(), _named_values(module, self._names, keep):
            output = run()
        missing = [name for name in self._names if not any(_is(name, key) for key in kept)]
        if missing:
            names = ", ".join(name for name, _ in module.named_modules() if name)
            raise ValueError(
                f"remat names {', '.join(missing)}, which is no submodule that ran and returned a "
                f"tensor, nor was given by name_activation. Submodules of a block: {names}"
            )
        return Recorded(output, list(kept.values()), _FromNamed(self._names))


class _FromNamed:
    """Runs a block again, with kept values in the place of named ones."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __call__(self, run: Run, module: nn.Module, kept: Sequence[Tensor]) -> Tensor:
        values = iter(kept)
        known: dict[bytes, Tensor] = {}

        def replace(name: str, value: Tensor) -> Tensor:
            if name not in self._names:
                return value
            mine = next(values)
            known[identity(value)] = mine
            return _Replaced.apply(value, mine)

        def unpack(saved: Tensor) -> Tensor:
            # What made the named value may have saved it, too, as tanh does.
            return known.get(identity(saved), saved)

        hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach(), unpack)
        with _named_values(module, self._names, replace), hooks:
            return run()


class _Replaced(torch.autograd.Function):
    """A kept value for the one that leads to it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, kept: Tensor) -> Tensor:
        return kept.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


Named = Callable[[str, Tensor], Tensor]


class _Current(threading.local):
    """What the calling thread does with named activations."""

    def __init__(self) -> None:
        self.named: Named | None = None


_current = _Current()


def name_activation(tensor: Tensor, name: str) -> Tensor:
    """Give an activation of a block a name, by which ``scan_blocks(..., remat=[name])`` keeps it
    for backward. Elsewhere this does nothing.

    Args:
        tensor: the activation, of any shape.
        name: may be given to several.

    Returns:
        The tensor to go on with.
    """
    return tensor if _current.named is None else _current.named(name, tensor)


@contextlib.contextmanager
def _named_values(module: nn.Module, names: Sequence[str], named: Named) -> Iterator[None]:
    """Inside, ``named`` is called with every named activation, and returns what to go on with."""

    def hook(name: str) -> Callable[..., Any]:
        return lambda _, args, out: named(name, out) if isinstance(out, Tensor) else None

    inner = dict(module.named_modules())
    handles = [inner[name].register_forward_hook(hook(name)) for name in names if name in inner]
    before, _current.named = _current.named, named
    try:
        yield
    finally:
        _current.named = before
        for handle in handles:
            handle.remove()


def policy_of(remat: str | Sequence[str]) -> Policy:
    """The policy that a user calls ``remat``.

    Raises:
        ValueError: if it is neither "full", "none" nor names.
    """
    if remat == "full":
        return KeepNothing()
    if remat == "none":
        return KeepAll()
    if isinstance(remat, str) or not remat or not all(isinstance(name, str) for name in remat):
        raise ValueError(
            f'remat is {remat!r}; give "full" to compute blocks again in backward, "none" to keep '
            f"all activations, or a list of the names of those to keep"
        )
    return KeepNamed(remat)


def _is(name: str, key: str) -> bool:
    return key.rpartition("/")[0] == name


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and identity(a) == identity(b)


def _never(_: Any) -> Tensor:
    raise RuntimeError("backward ran through a forward that was traced for a loop alone")
