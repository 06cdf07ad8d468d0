"""Styles that cut layers: ``ColwiseParallel``, ``RowwiseParallel`` and ``SequenceParallel``.

Words: see ``layouts`` and ``style``; names, arguments and defaults are those of
``torch.distributed.tensor.parallel``.
Always true: inputs and outputs are ordinary tensors with this rank's part, in the layouts that the
style says; ``use_local_output`` changes nothing about them, as there are no DTensors on XLA.
Sources: column- and row-parallel layers of Megatron-LM (arXiv 1909.08053), its sequence parallelism
(arXiv 2205.05198).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.distributed.placement import placement_in
from xla_fsdp.distributed.random_bits import random_bits
from xla_fsdp.tensor_parallel.layouts import change_problems, changed, for_use
from xla_fsdp.tensor_parallel.loss_parallel import remember_head
from xla_fsdp.tensor_parallel.mappings import copied, cut
from xla_fsdp.tensor_parallel.parallel_module import Forward, ParallelModule, Step, computing_with
from xla_fsdp.tensor_parallel.style import ParallelStyle, ParamCut, own_cuts

LAYERS = (nn.Linear, nn.Embedding)

IN_PLACE_OPTIONS = ("max_norm", "scale_grad_by_freq", "sparse")

"""Of nn.Embedding: they look at whole tables or at all ids."""


class ColwiseParallel(ParallelStyle):
    """Cut an nn.Linear by its outputs, or an nn.Embedding by the features of its vectors: each rank
    computes a slice of the last dim.

    Args:
        input_layouts: of the input; default: Replicate().
        output_layouts: of the output; default: Shard(-1).
        use_local_output: accepted; outputs are local tensors in any case. False together with
            Shard(-1) tells ``loss_parallel`` that these are its logits.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = (input_layouts or Replicate(),)
        self.output_layouts = (output_layouts or Shard(-1),)
        self.use_local_output = use_local_output

    def find_problems(self, module: nn.Module) -> Iterator[str]:
        """See ``ParallelStyle``."""
        yield from _layer_problems(self, module)
        yield from change_problems(self.input_layouts[0], Replicate(), "its input")
        yield from change_problems(Shard(-1), self.output_layouts[0], "its output")
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            yield "is an nn.Embedding with max_norm, which a rank cannot do with its features alone"

    def cuts(self, module: nn.Module) -> Sequence[ParamCut]:
        """See ``ParallelStyle``."""
        is_linear = isinstance(module, nn.Linear)
        return own_cuts(module, {"weight": 0, "bias": 0} if is_linear else {"weight": 1})

    def steps(self, name: str, module: nn.Module, axis: AxisComm) -> Sequence[Step]:
        """See ``ParallelStyle``."""
        if not self.use_local_output and self.output_layouts[0] in (Shard(-1), Shard(2)):
            remember_head(module, axis)
        return [_Colwise(name, axis, self.input_layouts[0], self.output_layouts[0])]

    def __repr__(self) -> str:
        return _shown(self)


class RowwiseParallel(ParallelStyle):
    """Cut an nn.Linear by its inputs, or an nn.Embedding by its rows (the vocabulary): each rank
    computes a summand of the output.

    Args:
        input_layouts: of the input; default: Shard(-1), and Replicate() of the ids that embeddings
            take.
        output_layouts: of the output; default: Replicate(). Shard(1) is what sequence parallelism
            take.
        use_local_output: accepted; outputs are local tensors in any case.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = (input_layouts or Shard(-1),)
        self.output_layouts = (output_layouts or Replicate(),)
        self.use_local_output = use_local_output
        self._ids_layout = input_layouts or Replicate()

    def find_problems(self, module: nn.Module) -> Iterator[str]:
        """See ``ParallelStyle``."""
        yield from _layer_problems(self, module)
        wanted = Replicate() if isinstance(module, nn.Embedding) else Shard(-1)
        yield from change_problems(self._input_layout(module), wanted, "its input")
        yield from change_problems(Partial(), self.output_layouts[0], "its output")
        if isinstance(module, nn.Embedding):
            yield from (
                f"is an nn.Embedding with {option}, which a rank cannot do with its rows alone"
                for option in IN_PLACE_OPTIONS
                if getattr(module, option)
            )
            yield from _look_up_problems(module)

    def cuts(self, module: nn.Module) -> Sequence[ParamCut]:
        """See ``ParallelStyle``."""
        is_linear = isinstance(module, nn.Linear)
        return own_cuts(module, {"weight": 1, "bias": None} if is_linear else {"weight": 0})

    def steps(self, name: str, module: nn.Module, axis: AxisComm) -> Sequence[Step]:
        """See ``ParallelStyle``."""
        step = _RowwiseLinear if isinstance(module, nn.Linear) else _RowwiseEmbedding
        return [step(name, axis, self._input_layout(module), self.output_layouts[0])]

    def _input_layout(self, module: nn.Module) -> Placement:
        return self._ids_layout if isinstance(module, nn.Embedding) else self.input_layouts[0]

    def __repr__(self) -> str:
        return _shown(self)


class SequenceParallel(ParallelStyle):
    """Compute a module on a slice of the sequence: a norm, a dropout, or anything else that treats
    every position by itself. Parameters are whole on every rank, their gradients summed over the
    ranks. Masks of nn.Dropout differ between the ranks.

    Args:
        sequence_dim: along which input and output are cut.
        use_local_output: accepted; outputs are local tensors in any case.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def cuts(self, module: nn.Module) -> Sequence[ParamCut]:
        """See ``ParallelStyle``."""
        return [
            cut
            for inner in module.modules()
            for cut in own_cuts(inner, dict.fromkeys(inner._parameters))
        ]

    def steps(self, name: str, module: nn.Module, axis: AxisComm) -> Sequence[Step]:
        """See ``ParallelStyle``."""
        if isinstance(module, nn.Dropout):
            return [_SequenceDropout(axis)]
        return [_SequenceParallel(axis)]

    def __repr__(self) -> str:
        dim = self.sequence_sharding[0].dim
        return f"SequenceParallel(sequence_dim={dim}, use_local_output={self.use_local_output})"


# ---------------------------------------------------------------- steps


@dataclass(frozen=True)
class _Colwise:
    name: str
    axis: AxisComm
    old: Placement
    new: Placement

    def __call__(self, module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Tensor:
        x, *rest = _inputs(self.name, args)
        x = for_use(x, self.old, self.axis, f"{self.name}: its input")
        out = forward(x, *rest, **kwargs)
        return changed(out, Shard(-1), self.new, self.axis, f"{self.name}: its output")


@dataclass(frozen=True)
class _RowwiseLinear:
    name: str
    axis: AxisComm
    old: Placement
    new: Placement

    def __call__(self, module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Tensor:
        x, *rest = _inputs(self.name, args)
        x = changed(x, self.old, Shard(-1), self.axis, f"{self.name}: its input")
        bias = module._parameters.get("bias")
        with computing_with(module, {} if bias is None else {"bias": None}):
            part = forward(x, *rest, **kwargs)
        out = changed(part, Partial(), self.new, self.axis, f"{self.name}: its output")
        return out if bias is None else out + self._bias_like(out, bias).to(out.dtype)

    def _bias_like(self, out: Tensor, bias: Tensor) -> Tensor:
        """The bias in the layout of the output. It is added once, so after the sum."""
        if self.axis.size == 1 or isinstance(self.new, Replicate):
            return bias
        if isinstance(self.new, Shard):
            of_features = self.new.dim % out.dim() == out.dim() - 1
            return cut(bias, self.axis, 0) if of_features else copied(bias, self.axis)
        return copied(bias, self.axis) / self.axis.size


@dataclass(frozen=True)
class _RowwiseEmbedding:
    name: str
    axis: AxisComm
    old: Placement
    new: Placement

    def __call__(self, module: Any, forward: Forward, args: Any, kwargs: Any) -> Tensor:
        ids, *_ = _inputs(self.name, (*args, *kwargs.values()))
        ids = changed(ids, self.old, Replicate(), self.axis, f"{self.name}: its input")
        part = self._looked_up(module, ids)
        return changed(part, Partial(), self.new, self.axis, f"{self.name}: its output")

    def _looked_up(self, module: Any, ids: Tensor) -> Tensor:
        """Vectors of the ids that are in this rank's rows; zeros for the others."""
        rows = module.weight.shape[0]
        own = ids if self.axis.size == 1 else ids - self.axis.local_rank_on_device * rows
        held = ((own >= 0) & (own < rows)).unsqueeze(-1)
        vectors = F.embedding(own.clamp(0, rows - 1), module.weight)
        if module.padding_idx is not None:  # whose vector gets no gradient
            is_padding = (ids == module.padding_idx).unsqueeze(-1)
            vectors = torch.where(is_padding, vectors.detach(), vectors)
        return torch.where(held, vectors, torch.zeros_like(vectors))


@dataclass(frozen=True)
class _SequenceParallel:
    axis: AxisComm

    def __call__(self, module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for inner in module.modules() if self.axis.size > 1 else ():
                stack.enter_context(computing_with(inner, self._copies(inner)))
            return forward(*args, **kwargs)

    def _copies(self, module: nn.Module) -> dict[str, Tensor | None]:
        """Parameters whose gradients, each of this rank's positions, are summed over the ranks."""
        return {
            name: copied(param, self.axis)
            for name, param in module._parameters.items()
            if param is not None and param.requires_grad and torch.is_grad_enabled()
        }


@dataclass(frozen=True)
class _SequenceDropout:
    axis: AxisComm

    def __call__(self, module: Any, forward: Forward, args: Any, kwargs: Any) -> Tensor:
        if self.axis.size == 1 or not module.training or not 0 < module.p < 1:
            return forward(*args, **kwargs)
        [x] = _inputs("nn.Dropout", args)
        # The ranks' random numbers are the same; with the place, each makes others of them.
        drawn = (torch.rand(1, device=x.device) * 2**16).to(torch.int32)
        salt = drawn * 2**14 + self.axis.local_rank_on_device.to(torch.int32)
        kept = random_bits(x.shape, salt) >= int(module.p * 2**32) - 2**31
        return x * kept.to(x.dtype) / (1 - module.p)


# ---------------------------------------------------------------- shared


def _layer_problems(style: ParallelStyle, module: nn.Module) -> Iterator[str]:
    if not isinstance(module, LAYERS):
        yield (
            f"is a {type(module).__name__}; {type(style).__name__} cuts nn.Linear and nn.Embedding"
        )


def _look_up_problems(module: nn.Embedding) -> Iterator[str]:
    """A look-up in a rank's rows takes the place of the forward, and of what is around it."""
    if isinstance(module, ParallelModule):
        if placement_in(module, "weight") is None:
            yield "has another style already; give it RowwiseParallel first"
    elif type(module).forward is not nn.Embedding.forward:
        yield (
            f"is a {type(module).__name__} with a forward of its own, in whose place "
            f"RowwiseParallel looks up the rows that a rank has; take ColwiseParallel"
        )


def _inputs(name: str, args: Any) -> Any:
    if not args or not isinstance(args[0], Tensor):
        found = type(args[0]).__name__ if args else "nothing"
        raise TypeError(f"{name} takes a tensor as its first argument, by position; got {found}")
    return args


def _shown(style: Any) -> str:
    return (
        f"{type(style).__name__}(input_layouts={style.input_layouts}, "
        f"output_layouts={style.output_layouts}, use_local_output={style.use_local_output})"
    )
