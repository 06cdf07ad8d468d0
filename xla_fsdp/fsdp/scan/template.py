"""The block that is traced for all, and the same by itself, to be compared with others.

Words: see ``arguments`` and ``state``. Always true: while a block is traced it holds what stands
for its parameters and tensors, and holds its own again afterwards; modules that rematerialize
themselves do not, since the loop does; a block returns one tensor of its input's shape and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from xla_fsdp.distributed.xla.loop import Body, ChangedInPlaceError, Like, trace_body
from xla_fsdp.fsdp.engine.activation_checkpoint import regions_run_once
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.scan.arguments import Arguments
from xla_fsdp.fsdp.scan.guard import TraceGuard
from xla_fsdp.fsdp.scan.state import BlockState


@dataclass(frozen=True)
class Template:
    """A block that is traced, with what stands for its parameters and tensors.

    Args:
        unit: its unit.
        module: it, for its submodules' names.
        forward: its forward.
        state: its tensors.
        shared: numbers of the tensors that all blocks share.
        arguments: what it is called with, without the tensors.
        likes: of the tensors.
        trained: which of its parameters need gradients, in some block.
    """

    unit: FSDPState
    module: nn.Module
    forward: Callable[..., Any]
    state: BlockState
    shared: frozenset[int]
    arguments: Arguments
    likes: tuple[Like, ...]
    trained: tuple[bool, ...]

    def run(
        self, full: list[Tensor], tensors: Sequence[Tensor], given: Sequence[Tensor]
    ) -> Arguments:
        """What the block returns, taken apart.

        Args:
            full: parameters.
            tensors: in the place of its own.
            given: the stream and the others.
        """
        args, kwargs = self.arguments.put_together(given)
        with (
            regions_run_once(),
            TraceGuard(),
            self.unit.computing_with(full),
            self.state.replaced(tensors),
        ):
            return Arguments.of(self.forward(*args, **kwargs))


@dataclass(frozen=True)
class Alone:
    """A block traced by itself, to be compared with others.

    Args:
        body: of (stream, others, parameters, tensors) to what it returns.
        returned: that, taken apart, without the tensor.
    """

    body: Body
    returned: Arguments


def trace_alone(template: Template) -> Alone:
    """Trace a block by itself.

    Raises:
        ValueError: if it changes something in place, or does not return one tensor like its input.
    """
    group = template.unit.group
    params = [(param, member) for param in group.params for member in param.members]
    likes = [
        *template.likes,
        *(Like(tuple(m.shape), p.compute_dtype or p.leaf.dtype) for p, m in params),
        *map(Like.of, template.state.tensors),
    ]
    names = [
        *template.arguments.places,
        *(f"parameter {member.names[0]}" for _, member in params),
        *(f"buffer {name}" for name in template.state.names),
    ]
    count = len(template.likes)
    result: list[Arguments] = []

    def body(values: list[Tensor]) -> list[Tensor]:
        given, full = values[:count], values[count : count + len(params)]
        returned = template.run(full, values[count + len(params) :], given)
        result.append(returned.with_tensors([]))
        return [only_tensor(returned, given[0])]

    try:
        return Alone(trace_body(body, likes, "fsdp_block"), result[-1])
    except ChangedInPlaceError as error:
        changed = ", ".join(names[number] for number in error.numbers)
        raise ValueError(
            f"a scanned block changes its {changed} in place; the change would be lost, as blocks "
            f"run as one loop. Compute a new tensor instead (x = x + y, not x += y), or do not "
            f"scan these blocks (layers with running statistics, such as BatchNorm, cannot be)"
        ) from None


def only_tensor(returned: Arguments, stream: Tensor) -> Tensor:
    """The tensor that a block returned for ``stream``.

    Raises:
        ValueError: if there is not one, or it has another shape or dtype.
    """
    if len(returned.tensors) != 1 or returned.opaque:
        what = [*(place or "a tensor" for place in returned.places), *returned.opaque]
        raise ValueError(
            f"a scanned block must return one tensor (and plain values), which is the next one's "
            f"input; this one returned {', '.join(what) or 'no tensor'}"
        )
    [y] = returned.tensors
    if Like.of(y) != Like.of(stream):
        raise ValueError(
            f"a scanned block must return what it is given, {list(stream.shape)} {stream.dtype}; "
            f"this one returned {list(y.shape)} {y.dtype}. Convert the input before the loop, or "
            f"do not scan these blocks"
        )
    return y
