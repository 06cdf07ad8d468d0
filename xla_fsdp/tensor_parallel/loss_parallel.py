"""Which modules hand out logits that are cut along their classes.

Words: a *head* is an nn.Linear cut by its outputs, of which the plan says that they stay cut and
are not for general use (``use_local_output=False``), as logits for ``loss_parallel`` are.
Always true: heads are known to the thread that made them, and no longer than they live. Ranks may
be threads of one process.

``loss_parallel``: inside, ``F.cross_entropy`` of cut logits is computed without joining them.

Words: see ``vocabulary`` and ``cross_entropy``. Always true: other functions, and cross-entropies
of other logits, are torch's own.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from xla_fsdp.distributed.mesh import as_mesh
from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.tensor_parallel.cross_entropy import parallel_cross_entropy


class _Heads(threading.local):
    """Of this rank: the modules, and the axis that each is cut along."""

    def __init__(self) -> None:
        self.known: list[tuple[weakref.ref[Any], AxisComm]] = []


_heads = _Heads()


def remember_head(module: nn.Module, axis: AxisComm) -> None:
    """``module`` is a head."""
    if isinstance(module, nn.Linear):
        _heads.known.append((weakref.ref(module), axis))


def known_heads() -> list[tuple[int, AxisComm]]:
    """Of all heads that are alive: the number of classes on a rank, and the axis."""
    _heads.known = [each for each in _heads.known if each[0]() is not None]
    alive: list[tuple[Any, AxisComm]] = [(head(), axis) for head, axis in _heads.known]
    return [(head.out_features // axis.size, axis) for head, axis in alive]


_signature = inspect.signature(F.cross_entropy)


@contextmanager
def loss_parallel(mesh: Any = None) -> Iterator[None]:
    """Inside, ``F.cross_entropy`` and ``nn.CrossEntropyLoss`` take logits of which each rank holds
    a slice of the classes, and targets that are the same on all ranks. The full logits are never
    built, forward or backward; ``backward()`` may be called inside or outside.

        plan["output"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        ...
        with loss_parallel():
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    Args:
        mesh: of the axis along which classes are cut: all cross-entropies inside are taken to be
            of such logits. By default those whose number of classes is that of a slice of a module
            that the plan says to hand out such logits, as in the example.

    Raises:
        ValueError: if no mesh is given, and there is no such module.
    """
    heads = known_heads()
    if mesh is None and not heads:
        raise ValueError(
            "loss_parallel knows no logits that are cut over their classes: give the module that "
            "makes them ColwiseParallel(output_layouts=Shard(-1), use_local_output=False), or call "
            "loss_parallel(mesh['tensor'])"
        )
    axis = None if mesh is None else AxisComm(as_mesh(mesh))
    with _CrossEntropies(axis, heads):
        yield


class _CrossEntropies(TorchFunctionMode):
    """Stands in for ``F.cross_entropy``.

    Args:
        axis: along which all logits are cut; None to know them by their number of classes.
        heads: number of classes and axis of modules that hand out such logits.
    """

    def __init__(self, axis: AxisComm | None, heads: list[tuple[int, AxisComm]]) -> None:
        super().__init__()
        self._axis, self._heads = axis, heads

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.cross_entropy:
            return func(*args, **kwargs)
        given = _signature.bind(*args, **kwargs)
        given.apply_defaults()
        axis = self._axis or self._axis_of(given.arguments["input"])
        return func(*args, **kwargs) if axis is None else _computed(axis, given.arguments)

    def _axis_of(self, logits: Tensor) -> AxisComm | None:
        classes = logits.shape[1] if logits.dim() > 1 else logits.shape[0]
        return next((axis for own, axis in self._heads if own == classes), None)


def _computed(axis: AxisComm, arguments: dict[str, Any]) -> Tensor:
    if arguments["size_average"] is not None or arguments["reduce"] is not None:
        raise ValueError("size_average and reduce are of old torch; say reduction='mean', or sum")
    return parallel_cross_entropy(
        arguments["input"],
        arguments["target"],
        axis,
        weight=arguments["weight"],
        ignore_index=arguments["ignore_index"],
        reduction=arguments["reduction"],
        label_smoothing=arguments["label_smoothing"],
    )
