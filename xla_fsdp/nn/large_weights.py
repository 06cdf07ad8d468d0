"""Compute with large weights of a root from their shards: ``F.linear``, a head, piece by piece, and
``F.embedding`` by sending rows of its table, or with the table as it was gathered.

Gathered whole, the head's weight and the logits are most of what a training step needs. So forward
and backward are loops: each iteration gathers the same few rows of every rank's shard, computes
their logits or their part of the gradients, and reduces that of the weight. Each piece is gathered
twice: in forward under the product of the one before it, in backward under those of its own
gradient, which do not need it.

Invariants: the unsharded weight is there for all other code that reads it; nothing gathers it in a
program that does not use it. Where a piecewise gradient would not be what autograd or the user
expects, backward computes the whole one from the whole weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xla_fsdp.distributed.higher_order import in_transform
from xla_fsdp.fsdp.engine.autograd import ForwardCall, SavedParams, on_device
from xla_fsdp.fsdp.engine.inputs import version_of
from xla_fsdp.fsdp.engine.param_group import FSDPParamGroup
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.engine.thread import package_code
from xla_fsdp.fsdp.engine.unit_collectives import expect_on_all_ranks
from xla_fsdp.nn.chunked.chunks import TILE, Chunks
from xla_fsdp.nn.chunked.lookup_strategies import ExchangeRows, exchange_of
from xla_fsdp.nn.chunked.weights import WEIGHT, ChunkedWeights
from xla_fsdp.nn.embedding_grad import embedding_by
from xla_fsdp.nn.forward_weight import compute_by, weights_are_whole
from xla_fsdp.xla import ops
from xla_fsdp.xla.loop import TensorSpec, read_slice, traced_loop, write_slice

LEAST_BYTES = 2**25
"""Size of the smallest weight, gathered, that is computed with in pieces."""

PIECE_BYTES = 2**23
"""Approximate size of a piece, gathered."""


def large_weights(group: FSDPParamGroup) -> dict[int, int]:
    """Return the parameters that ``LinearInPieces`` can use in pieces: the number of each by the
    number of its original."""
    found, original = {}, 0
    for number, param in enumerate(group.params):
        packing = param.packing
        rows = packing.sent_shape
        matrix = len(param.originals) == 1 and len(packing.shapes[0]) == 2 and not packing.dim
        if matrix and len(rows) == 2 and rows[1] == packing.shapes[0][1]:
            dtype = param.compute_dtype or param.leaf.dtype
            if packing.layout.numel * dtype.itemsize >= LEAST_BYTES:
                found[original] = number
        original += len(param.originals)
    return found


def compute_from_shards(unit: FSDPState, call: ForwardCall, saved: SavedParams) -> None:
    """Let ``F.linear`` use large weights of a root piece by piece, and ``F.embedding`` with their
    padding, in a forward that begins. Inside of other units, the loops would keep gathers of other
    parameters from being hidden."""
    settings = unit.settings
    of_root = settings.is_root and unit.has_units
    # A root keeps its parameters for backward, which comes next; at the user's request all.
    if of_root and settings.reshard_after_forward and not settings.keeps_larger:
        for original, number in large_weights(unit.group).items():
            linear = LinearInPieces(unit, call, saved, original, number)
            compute_by(saved.unsharded[original], F.linear, linear.compute)
            table = Table(unit, call, saved, original, number)
            compute_by(saved.unsharded[original], F.embedding, embedding_by(table.look_up))


@dataclass(frozen=True)
class Pieces(Chunks):
    """Pieces of a weight [num_classes, width], of which every rank has ``shard_rows`` rows.

    Piece i is ``rows`` rows of every shard; the last one begins earlier, where these would be too
    many.
    """

    width: int

    @property
    def overlap(self) -> int:
        """Rows of the last piece that are in the one before it, too."""
        return self.padded_rows - self.shard_rows

    def start(self, number: Tensor) -> Tensor:
        """Return the first row of piece ``number``, both [1] int32."""
        return torch.clamp(number * self.rows, max=self.shard_rows - self.rows)

    def cut(self, shard: Tensor, *, once: bool = False) -> Tensor:
        """Return the pieces of a shard: [shard_rows, width] to [count, rows, width].

        With ``once``, rows of the last piece that are in the one before it, too, are zeros: for a
        sum over all pieces.
        """
        *others, rest = shard.split(self.rows)
        last = shard[self.shard_rows - self.rows :]
        return torch.stack([*others, F.pad(rest, (0, 0, self.overlap, 0)) if once else last])

    def joined(self, pieces: Tensor) -> Tensor:
        """Undo ``cut``."""
        whole = pieces[:-1].reshape(-1, self.width)
        return torch.cat([whole, pieces[-1][self.overlap :]])


def pieces_for(
    num_classes: int, width: int, num_ranks: int, shard_rows: int, itemsize: int
) -> Pieces:
    """Return pieces of at most ``PIECE_BYTES``, but at least one tile; of the sizes from two thirds
    of that on, choose the one that computes the fewest rows twice.

    Args:
        num_classes, width, num_ranks, shard_rows: see ``Pieces``.
        itemsize: bytes of an element.
    """
    row_bytes = width * itemsize  # not of the logits: batches of ranks may differ in length
    most = max(1, min(PIECE_BYTES // (TILE * num_ranks * row_bytes), shard_rows // TILE))
    sizes = [tiles * TILE for tiles in range(most, most * 2 // 3, -1)]
    cuts = [
        Pieces(num_classes, num_ranks, shard_rows, min(size, shard_rows), width) for size in sizes
    ]
    return min(cuts, key=lambda cut: cut.overlap)  # the largest of equal ones


# ---------------------------------------------------------------- in the forward of the unit


class LargeWeight:
    """A weight that a function of torch uses from its shards, in one forward of a unit.

    Args:
        unit: the unit.
        call: the forward.
        saved: its saved-tensor hooks.
        original: number of the weight among the original parameters.
        number: number of the weight among the parameters.
    """

    def __init__(
        self, unit: FSDPState, call: ForwardCall, saved: SavedParams, original: int, number: int
    ) -> None:
        self.unit = unit
        self.call = call
        self.saved = saved
        self.number = number
        self.weights = ChunkedWeights(unit.group, rings=False, numbers={WEIGHT: number})
        self._original = original
        self._version = version_of(saved.unsharded[original])

    @property
    def group(self) -> FSDPParamGroup:
        return self.unit.group

    def is_expected(self, input: Any, weight: Tensor) -> bool:
        """Return whether the unit's backward will find what it expects where the weight is used
        from its shards, with an input on the device."""
        return (
            type(input) in (Tensor, Parameter)
            and on_device(input)
            and not weights_are_whole()
            and torch.is_grad_enabled()
            and not torch.is_autocast_enabled("xla")
            and not in_transform()
            and torch._C._current_graph_task_id() == -1
            and self.saved.no_other_saved_tensor_hooks(active=self.call.reshards)
            and version_of(weight) == self._version
            and self._original not in self.saved.changed_in_place()
        )

    def sent(self) -> Tensor:
        """Return the weight's shard as it is gathered, [shard rows, width]."""
        return self.weights.sent_rows(self.group.shards)

    def may_reduce(self, used: Tensor, node: Any, *, needs_weight: bool) -> bool:
        """Return whether backward may compute with the shards, and reduce the weight's gradient
        itself if it ``needs_weight``.

        Args:
            used: the unsharded weight.
            node: its ``EarlyReduce`` node.
            needs_weight: whether this pass computes that gradient.
        """
        if torch.is_grad_enabled() or self.call.versions != self.group.versions:
            return False
        plainly = self.unit.reduces_plainly and not self.unit.in_use  # a backward in the forward
        return not needs_weight or (plainly and _is_only_summed(used, node))

    def hand_over(self, of_shard: Tensor) -> None:
        """Give the unit the weight's gradient, summed over the ranks, [shard rows, width]."""
        self.call.add_reduced_early(self.group.reduction.as_bucket(self.number, of_shard))
        self.unit.schedule.finish_first([of_shard])


class LinearInPieces(LargeWeight):
    """``F.linear`` without bias, with a weight in pieces."""

    def can_compute(self, input: Any, weight: Tensor, bias: Tensor | None) -> bool:
        """Return whether ``F.linear(input, weight)`` may be computed in pieces: where it is what
        the unit's backward expects, on tensors of one dtype."""
        return (
            self.is_expected(input, weight)
            and input.numel() > 0
            and input.dim() > 1
            and input.shape[-1] == weight.shape[-1]
            and all(each.dtype == weight.dtype for each in (input, bias) if each is not None)
        )

    def compute(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``F.linear``."""
        if not self.can_compute(input, weight, bias):
            return F.linear(input, weight, bias)
        result = _Linear.apply(self, input, weight)
        return result if bias is None else result + bias

    # ------------------------------------------------------------ loops

    def pieces(self, rows: Tensor) -> Pieces:
        """Return how to cut the weight for an input [n, width]."""
        weights = self.weights
        sizes = (weights.num_classes, weights.width, weights.num_ranks, weights.shard_rows)
        return pieces_for(*sizes, rows.dtype.itemsize)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the product of an input [n, width], [n, classes]."""
        pieces = self.pieces(rows)
        expect_on_all_ranks(f"use in {pieces.count} pieces", [self.group.params[self.number]])
        rows, sent = ops.barrier([rows, pieces.cut(self.sent())])

        def body(values: list[Tensor]) -> list[Tensor]:
            piece, logits, sent, number, rows = values
            following = self.weights.gather(sent)
            found = (piece @ rows.t()).reshape(pieces.num_ranks, pieces.rows, -1)
            return [following, write_slice(logits, found, 1, pieces.start(number))]

        # By class: each iteration writes whole rows.
        shape, name = (pieces.num_ranks, pieces.shard_rows, len(rows)), "fsdp_linear_forward"
        carry = [self.weights.gather(sent[0]), ops.uninitialized(shape, rows.dtype, rows)]
        xs, length = [sent, pieces.numbers(rows.device)], pieces.count
        loop = self.unit.loops.get(
            ("forward", self.number, pieces, TensorSpec.of(rows)),
            lambda: traced_loop(body, name, length, carry, xs, [rows], prefetched=[0]),
        )
        _, logits = loop.run([*carry, *xs, rows], None)
        return logits.reshape(-1, len(rows))[: pieces.num_classes].t()

    def backward(
        self, rows: Tensor, grad: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return gradients: of the input, [n, width] float32, and of the weight's shard, summed
        over the ranks, [shard rows, width].

        Args:
            rows: the input, [n, width].
            grad: of the product, [n, classes].
            needs: which of the two are needed.
        """
        pieces = self.pieces(rows)
        expect_on_all_ranks(f"backward in {pieces.count} pieces", [self.group.params[self.number]])
        grad, sent = ops.barrier([grad, pieces.cut(self.sent(), once=True)])
        padding = pieces.num_ranks * pieces.shard_rows - pieces.num_classes
        by_class = F.pad(grad.t(), (0, 0, 0, padding)) if padding else grad.t()
        by_class = by_class.reshape(pieces.num_ranks, pieces.shard_rows, -1)
        reduction, by = self.group.reduction, self.group.collectives.in_rings()

        def body(values: list[Tensor]) -> list[Tensor]:
            sent, number, by_class, rows = values[-4:]
            grad = read_slice(by_class, 1, pieces.start(number), pieces.rows)
            flat = grad.reshape(-1, len(rows)).t()
            found = [total + flat @ self.weights.gather(sent) for total in values[:-4]]
            if needs[1]:
                found.append(by.reduce_scatter_product(flat, rows, reduction.to_sum))
            return found

        carry = [torch.zeros_like(rows, dtype=torch.float32)] if needs[0] else []
        xs, constants = [sent, pieces.numbers(rows.device)], [by_class, rows]
        how = (*needs, reduction.predivide, reduction.dtype)
        length, name = pieces.count, "fsdp_linear_backward"
        loop = self.unit.loops.get(
            ("backward", self.number, pieces, TensorSpec.of(rows), *how),
            lambda: traced_loop(body, name, length, carry, xs, constants, reverse=True),
        )
        results = iter(loop.run([*carry, *xs, *constants], None))
        of_rows = next(results) if needs[0] else None
        return of_rows, pieces.joined(next(results)) if needs[1] else None


class _Linear(torch.autograd.Function):
    """Map (input, weight) to their product; backward hands the weight's gradient, reduced, to the
    unit, and returns none, unless it has to be whole."""

    @staticmethod
    @package_code()
    def forward(ctx: Any, linear: LinearInPieces, input: Tensor, weight: Tensor) -> Tensor:
        # An attribute lives as long as the user holds the loss: not the weight, if the forward does
        # not free its values. Then no hooks pack what is saved, and that is the same object.
        ctx.linear, ctx.weight = linear, weight if linear.call.reshards else None
        ctx.node = weight.grad_fn
        rows = input.detach().reshape(-1, input.shape[-1])
        product = linear.forward(rows)
        ctx.save_for_backward(input, weight)
        ctx.set_materialize_grads(False)
        # No view, which could not be changed in place. The clone is no operation of the program.
        return product.reshape(*input.shape[:-1], -1).clone()

    @staticmethod
    @package_code()
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None
        linear, needs = ctx.linear, list(ctx.needs_input_grad[1:])
        input, weight = ctx.saved_tensors
        used = weight if ctx.weight is None else ctx.weight
        # A pass that was asked for other gradients would leave this one for the next.
        needs[1] = needs[1] and torch._C._will_engine_execute_node(ctx.node)
        rows, flat = input.reshape(-1, input.shape[-1]), grad.reshape(-1, grad.shape[-1])
        if not linear.may_reduce(used, ctx.node, needs_weight=needs[1]):
            return None, grad @ weight if needs[0] else None, flat.t() @ rows if needs[1] else None
        of_rows, of_shard = linear.backward(rows, flat, needs)
        if of_shard is not None:
            linear.hand_over(of_shard)
        of_input = None if of_rows is None else of_rows.to(input.dtype).reshape(input.shape)
        return None, of_input, None


class Table(LargeWeight):
    """``F.embedding`` by sending rows and their gradients, where all ranks run one program and this
    sends less than the table.

    Else a table whose shards are padded is looked up where it was gathered, and its gradient summed
    where it is sent. The unsharded weight is cut from the former, and its gradient padded to the
    latter: two more copies of all rows.
    """

    def look_up(
        self, input: Tensor, weight: Tensor, padding_idx: int | None, by_frequency: bool
    ) -> Tensor | None:
        """Return the rows of ``input``, as a ``LookUp``."""
        if by_frequency or not weight.requires_grad or not self.is_expected(input, weight):
            return None
        if self.exchange(input) is None and not self.group.params[self.number].packing.padding:
            return None
        return cast(Tensor, _Embedding.apply(self, input, weight, padding_idx))

    def exchange(self, input: Tensor) -> ExchangeRows | None:
        """Return how rows are sent for row numbers [...]; None where the table is gathered."""
        # Other ranks than those of a torus may run other programs, which look up fewer rows.
        if not self.group.collectives.follows_torus or not input.numel():
            return None
        return exchange_of(self.weights, self.unit.loops, input.numel())

    def rows(self, input: Tensor) -> Tensor:
        """Return the rows [..., width] of row numbers [...]; where rows are sent, NaN for numbers
        out of range."""
        expect_on_all_ranks("lookup in", [self.group.params[self.number]])
        exchange = self.exchange(input)
        if exchange is None:
            return F.embedding(input, self.weights.gather(self.sent()))
        is_row = ((input >= 0) & (input < self.weights.num_classes)).reshape(-1)
        numbers = torch.where(is_row, input.reshape(-1), -1).to(torch.int32)
        rows = exchange.rows(self.group.shards, numbers)
        return torch.where(is_row[:, None], rows, float("nan")).reshape(*input.shape, -1)

    def reduced(self, input: Tensor, grad: Tensor, skipped: int) -> Tensor:
        """Return the gradient of the table's shard, summed over the ranks, [shard rows, width].

        Args:
            input: row numbers, [...].
            grad: of their rows, [..., width].
            skipped: number of the row that gets none, or -1.
        """
        expect_on_all_ranks("reduce-scatter of the gradient", [self.group.params[self.number]])
        weights, reduction = self.weights, self.group.reduction
        exchange = self.exchange(input)
        if exchange is not None:
            numbers = torch.where(input == skipped, -1, input).reshape(-1).to(torch.int32)
            return exchange.sums(numbers, grad.reshape(len(numbers), -1))[: weights.shard_rows]
        divided = reduction.to_reduce_dtype(grad) / reduction.predivide  # few rows, not all sums
        sums = torch.ops.aten.embedding_dense_backward(
            divided, input, weights.num_ranks * weights.shard_rows, skipped, False
        )
        reduction.log.sends_one("reduce-scatter of a table", sums)
        return self.group.collectives.reduce_scatter(sums)


class _Embedding(torch.autograd.Function):
    """Map (input, weight) to ``F.embedding(input, weight, padding_idx)``; backward hands the
    weight's gradient, reduced, to the unit, and returns none, unless it has to be whole."""

    @staticmethod
    @package_code()
    def forward(
        ctx: Any, table: Table, input: Tensor, weight: Tensor, padding_idx: int | None
    ) -> Tensor:
        # As in ``_Linear``.
        ctx.table, ctx.weight = table, weight if table.call.reshards else None
        ctx.node = weight.grad_fn
        ctx.num_rows = len(weight)
        ctx.skipped = -1 if padding_idx is None else padding_idx % len(weight)
        ctx.save_for_backward(input, weight)
        ctx.set_materialize_grads(False)
        return table.rows(input)

    @staticmethod
    @package_code()
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        # A pass that was asked for other gradients would leave this one for the next.
        if grad is None or not torch._C._will_engine_execute_node(ctx.node):
            return None, None, None, None
        table = ctx.table
        input, weight = ctx.saved_tensors
        used = weight if ctx.weight is None else ctx.weight
        if table.may_reduce(used, ctx.node, needs_weight=True):
            table.hand_over(table.reduced(input, grad, ctx.skipped))
            return None, None, None, None
        whole = torch.ops.aten.embedding_dense_backward(
            grad, input, ctx.num_rows, ctx.skipped, False
        )
        return None, None, whole, None


def _is_only_summed(weight: Tensor, node: Any) -> bool:
    """Return whether nobody but its unit sees the gradient of an unsharded weight in this pass.

    Args:
        weight: the weight.
        node: its ``EarlyReduce`` node.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if weight._backward_hooks or weight.retains_grad:
            return False
    [(unshard, _)] = node.next_functions  # not run by ``torch.autograd.grad`` of the weight alone
    return torch._C._will_engine_execute_node(unshard)
