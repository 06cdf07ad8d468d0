"""Styles that distribute layers: ``ColwiseParallel``, ``RowwiseParallel`` and ``SequenceParallel``.

Names, arguments and defaults are those of ``torch.distributed.tensor.parallel``. Inputs and outputs
are always local tensors in the layouts of the style, as there are no DTensors on XLA, so
``use_local_output`` does not change them.

Sources: column- and row-parallel layers of Megatron-LM (arXiv 1909.08053), its sequence parallelism
(arXiv 2205.05198).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.distributed.placement import placement_in
from xla_fsdp.distributed.random_bits import random_bits
from xla_fsdp.tensor_parallel.mappings import (
    copy_to_parallel,
    own_slice,
    parallel_input,
    redistribute,
    redistribute_problems,
)
from xla_fsdp.tensor_parallel.parallel_module import (
    Forward,
    ParallelModule,
    ParallelStyle,
    ParamCut,
    own_cuts,
    replaced_params,
)

# Options of nn.Embedding that do not work on a slice of the table.
GLOBAL_OPTIONS = ("max_norm", "scale_grad_by_freq", "sparse")


class _LayerStyle(ParallelStyle):
    """Base class of styles for nn.Linear and nn.Embedding."""

    default_layouts: tuple[Placement, Placement]

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = (input_layouts or self.default_layouts[0],)
        self.output_layouts = (output_layouts or self.default_layouts[1],)
        self.use_local_output = use_local_output
        # Input of an nn.Embedding with RowwiseParallel: ids, which are not sharded by default.
        self._ids_layout = input_layouts or Replicate()

    def find_problems(self, module: nn.Module) -> Iterator[str]:
        if not isinstance(module, nn.Linear | nn.Embedding):
            yield (
                f"is a {type(module).__name__}; {type(self).__name__} cuts nn.Linear and "
                f"nn.Embedding"
            )


class ColwiseParallel(_LayerStyle):
    """Shard an nn.Linear by its outputs, or an nn.Embedding by the features of its vectors: each
    rank computes a slice of the last dim.

    Args:
        input_layouts: layout of the input; default: Replicate().
        output_layouts: layout of the output; default: Shard(-1).
        use_local_output: outputs are always local tensors. False together with Shard(-1) tells
            ``loss_parallel`` that the outputs are sharded logits.
    """

    default_layouts = (Replicate(), Shard(-1))

    @property
    def is_for_loss_parallel(self) -> bool:
        """Whether outputs are sharded logits for ``loss_parallel``."""
        return not self.use_local_output and self.output_layouts[0] in (Shard(-1), Shard(2))

    def find_problems(self, module: nn.Module) -> Iterator[str]:
        yield from super().find_problems(module)
        yield from redistribute_problems(self.input_layouts[0], Replicate(), "its input")
        yield from redistribute_problems(Shard(-1), self.output_layouts[0], "its output")
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            yield "is an nn.Embedding with max_norm, which a rank cannot do with its features alone"

    def cuts(self, module: nn.Module) -> Sequence[ParamCut]:
        is_linear = isinstance(module, nn.Linear)
        return own_cuts(module, {"weight": 0, "bias": 0} if is_linear else {"weight": 1})

    def run(
        self, module: nn.Module, forward: Forward, args: Any, kwargs: Any, axis: AxisComm, name: str
    ) -> Tensor:
        x, *rest = _tensor_first(args, name)
        x = parallel_input(x, self.input_layouts[0], axis, f"{name}: its input")
        out = forward(x, *rest, **kwargs)
        return redistribute(out, Shard(-1), self.output_layouts[0], axis, f"{name}: its output")


class RowwiseParallel(_LayerStyle):
    """Shard an nn.Linear by its inputs, or an nn.Embedding by its rows (the vocabulary): each rank
    computes a summand of the output.

    Args:
        input_layouts: layout of the input; default: Shard(-1), for the ids of an nn.Embedding
            Replicate().
        output_layouts: layout of the output; default: Replicate(). Use Shard(1) before sequence
            parallelism.
        use_local_output: has no effect; outputs are always local tensors.
    """

    default_layouts = (Shard(-1), Replicate())

    def find_problems(self, module: nn.Module) -> Iterator[str]:
        yield from super().find_problems(module)
        if isinstance(module, nn.Embedding):
            yield from redistribute_problems(self._ids_layout, Replicate(), "its input")
            yield from _look_up_problems(module)
        else:
            yield from redistribute_problems(self.input_layouts[0], Shard(-1), "its input")
        yield from redistribute_problems(Partial(), self.output_layouts[0], "its output")

    def cuts(self, module: nn.Module) -> Sequence[ParamCut]:
        is_linear = isinstance(module, nn.Linear)
        return own_cuts(module, {"weight": 1, "bias": None} if is_linear else {"weight": 0})

    def run(
        self, module: nn.Module, forward: Forward, args: Any, kwargs: Any, axis: AxisComm, name: str
    ) -> Tensor:
        where, new = f"{name}: its input", self.output_layouts[0]
        if isinstance(module, nn.Embedding):
            ids, *_ = _tensor_first((*args, *kwargs.values()), name)
            ids = redistribute(ids, self._ids_layout, Replicate(), axis, where)
            vectors = _look_up(module, ids, axis)
            return redistribute(vectors, Partial(), new, axis, f"{name}: its output")
        x, *rest = _tensor_first(args, name)
        x = redistribute(x, self.input_layouts[0], Shard(-1), axis, where)
        bias = module._parameters.get("bias")
        with replaced_params(module, {} if bias is None else {"bias": None}):
            summand = forward(x, *rest, **kwargs)
        out = redistribute(summand, Partial(), new, axis, f"{name}: its output")
        return out if bias is None else out + _bias_like(out, bias, new, axis).to(out.dtype)


class SequenceParallel(ParallelStyle):
    """Compute a module on a slice of the sequence: a norm, a dropout, or another module that treats
    positions independently. Parameters are replicated, and their gradients are summed over the
    ranks. Masks of nn.Dropout differ between the ranks.

    Args:
        sequence_dim: dim along which input and output are sharded.
        use_local_output: has no effect; outputs are always local tensors.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def cuts(self, module: nn.Module) -> Sequence[ParamCut]:
        return [
            cut
            for inner in module.modules()
            for cut in own_cuts(inner, dict.fromkeys(inner._parameters))
        ]

    def run(
        self, module: nn.Module, forward: Forward, args: Any, kwargs: Any, axis: AxisComm, name: str
    ) -> Any:
        if axis.size == 1:
            return forward(*args, **kwargs)
        if isinstance(module, nn.Dropout):
            return _dropout(module, forward, args, kwargs, axis)
        with contextlib.ExitStack() as stack:
            for inner in module.modules():
                stack.enter_context(replaced_params(inner, _copies(inner, axis)))
            return forward(*args, **kwargs)

    def __repr__(self) -> str:
        dim = self.sequence_sharding[0].dim
        return f"SequenceParallel(sequence_dim={dim}, use_local_output={self.use_local_output})"


def _bias_like(out: Tensor, bias: Tensor, layout: Placement, axis: AxisComm) -> Tensor:
    """Return the bias in the layout of the output. It is added after the reduction of the output,
    or divided by the number of ranks if the output stays partial."""
    if axis.size == 1 or isinstance(layout, Replicate):
        return bias
    if isinstance(layout, Shard):
        of_features = layout.dim % out.dim() == out.dim() - 1
        return own_slice(bias, axis, 0) if of_features else copy_to_parallel(bias, axis)
    return copy_to_parallel(bias, axis) / axis.size


def _look_up(module: nn.Embedding, ids: Tensor, axis: AxisComm) -> Tensor:
    """Return the vectors of ids in this rank's rows, and zeros for other ids."""
    rows = module.weight.shape[0]
    local_ids = ids if axis.size == 1 else ids - axis.local_rank_on_device * rows
    is_local = ((local_ids >= 0) & (local_ids < rows)).unsqueeze(-1)
    vectors = F.embedding(local_ids.clamp(0, rows - 1), module.weight)
    if module.padding_idx is not None:  # the vector of this id gets no gradient
        is_padding = (ids == module.padding_idx).unsqueeze(-1)
        vectors = torch.where(is_padding, vectors.detach(), vectors)
    return torch.where(is_local, vectors, torch.zeros_like(vectors))


def _copies(module: nn.Module, axis: AxisComm) -> dict[str, Tensor | None]:
    """Return copies of the parameters whose gradients are summed over the ranks."""
    return {
        name: copy_to_parallel(param, axis)
        for name, param in module._parameters.items()
        if param is not None and param.requires_grad and torch.is_grad_enabled()
    }


def _dropout(
    module: nn.Dropout, forward: Forward, args: Any, kwargs: Any, axis: AxisComm
) -> Tensor:
    if not module.training or not 0 < module.p < 1:
        return forward(*args, **kwargs)
    [x] = _tensor_first(args, "nn.Dropout")
    # All ranks draw the same number (one program); hashed with the rank, masks differ.
    drawn = (torch.rand(1, device=x.device) * 2**16).to(torch.int32)
    salt = drawn * 2**14 + axis.local_rank_on_device.to(torch.int32)
    mask = random_bits(x.shape, salt) >= int(module.p * 2**32) - 2**31
    return x * mask.to(x.dtype) / (1 - module.p)


def _tensor_first(args: Any, name: str) -> Any:
    if not args or not isinstance(args[0], Tensor):
        found = type(args[0]).__name__ if args else "nothing"
        raise TypeError(f"{name} takes a tensor as its first argument, by position; got {found}")
    return args


def _look_up_problems(module: nn.Embedding) -> Iterator[str]:
    """Yield why ``_look_up`` cannot replace the forward of an embedding."""
    for option in GLOBAL_OPTIONS:
        if getattr(module, option):
            yield f"is an nn.Embedding with {option}, which a rank cannot do with its rows alone"
    if isinstance(module, ParallelModule):
        if placement_in(module, "weight") is None:
            yield "has another style already; give it RowwiseParallel first"
    elif type(module).forward is not nn.Embedding.forward:
        yield (
            f"is a {type(module).__name__} with a forward of its own, in whose place "
            f"RowwiseParallel looks up the rows that a rank has; take ColwiseParallel"
        )
