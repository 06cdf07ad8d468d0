"""Context parallelism: sequences cut over the ranks of one axis of a mesh.

For n ranks a sequence has 2n chunks. Rank r holds chunks r and 2n - 1 - r, one after the other, so
that under a causal mask all ranks compute as much.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from xla_fsdp.distributed.mesh import as_mesh
from xla_fsdp.distributed.mesh_axis import AxisComm

METHODS = ("auto", "ring", "ulysses")


class ContextAxis(AxisComm):
    """Communication of this rank with those that hold other chunks of its sequences.

    Args:
        mesh: a mesh of one axis, laid out on the ranks of this job.
        method: how ``attention`` gets at the other chunks, see ``context_parallel``.

    Raises:
        ValueError: if the mesh has several axes, or lays out other ranks.
    """

    def __init__(self, mesh: Any, method: str = "auto") -> None:
        super().__init__(mesh)
        self.method = method

    @property
    def key(self) -> Hashable:
        return (super().key, self.method)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's chunks, along ``dim``, of a tensor that is the same on all ranks."""
        chunks = x.unflatten(dim, (2 * self.size, -1))
        on_device = x.device.type == "xla"
        rank = self.local_rank_on_device if on_device else torch.tensor([self.local_rank])
        return chunks.index_select(dim, self._chunks_of(rank)).flatten(dim, dim + 1)

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Gather the chunks of all ranks along ``dim``."""
        return self.in_order(self.all_gather(x, dim), dim)

    def in_order(self, x: Tensor, dim: int) -> Tensor:
        """Put the chunks of all ranks, by rank, in the order of the sequence."""
        by_rank = x.unflatten(dim, (self.size, 2, -1))
        first, second = by_rank.unbind(dim + 1)
        return torch.cat([first, second.flip(dim)], dim).flatten(dim, dim + 1)

    def by_rank(self, x: Tensor, dim: int) -> Tensor:
        """Undo ``in_order``."""
        first, second = x.unflatten(dim, (2, self.size, -1)).unbind(dim)
        return torch.stack([first, second.flip(dim)], dim + 1).flatten(dim, dim + 2)

    def positions(self, length: int, *, before: int = 0) -> Tensor:
        """Return where the tokens of a rank lie in the sequence, [length] int32, on the device.

        Args:
            length: number of tokens of a rank.
            before: 0 for this rank, else how far that rank is before it, around the ring.
        """
        rank = self.local_rank_on_device
        if before:
            rank = (rank + self.size - before) % self.size
        chunk = length // 2
        within = torch.arange(chunk, dtype=torch.int32, device=rank.device)
        starts = self._chunks_of(rank).to(torch.int32) * chunk
        return (starts.unsqueeze(-1) + within).flatten()

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        """Return the mean over all tokens from this rank's sum and count of them."""
        dtype = torch.promote_types(total.dtype, torch.float32)
        both = torch.stack([total.detach().to(dtype), count.detach().to(dtype)])
        of_all, count_of_all = self.all_reduce(both).unbind()
        # The second term is zero; it has the gradient.
        return of_all / count_of_all + (total - total.detach()) * (self.size / count_of_all)

    def _chunks_of(self, rank: Tensor) -> Tensor:
        """Return the numbers of the two chunks of a rank, [2], from its own, [1]."""
        return torch.cat([rank, 2 * self.size - 1 - rank])


def current_context() -> ContextAxis | None:
    """Return the axis of the innermost ``context_parallel`` around the caller, if any cuts."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, _ContextMode):
            return mode.axis
    return None


def context_key() -> Hashable:
    """Return what is equal for equal results of ``current_context``; None for none."""
    axis = current_context()
    return None if axis is None else axis.key


def in_context(axis: ContextAxis | None) -> AbstractContextManager[Any]:
    """Make ``axis`` the result of ``current_context`` inside the block; for what is computed again
    in backward."""
    return nullcontext() if axis is current_context() else _ContextMode(axis)


@contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Iterable[Tensor] | None = None,
    method: str = "auto",
) -> Iterator[None]:
    """Inside, each rank along an axis computes with its part of every sequence, as in
    ``torch.distributed.tensor.experimental.context_parallel``.

        mesh = init_mesh((2, 4), ("shard", "context"))
        with context_parallel(mesh["context"], buffers=[ids, labels], buffer_seq_dims=[1, 1]):
            loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
            loss.backward()

    ``xla_fsdp.attention`` sees the whole sequence. Means of ``F.cross_entropy``, ``F.nll_loss`` and
    ``LinearCrossEntropy`` are those of all tokens on the axis, the same on all its ranks.

    Args:
        mesh: mesh of the axis, ``mesh["context"]``.
        buffers: tensors with a dim of the sequence (ids, labels, positions), equal on all ranks of
            the axis. Inside they are this rank's part; afterwards they are as before.
        buffer_seq_dims: that dim, of each.
        no_restore_buffers: those of them that stay as they are inside.
        method: "ring" (keys and values travel from rank to rank under the products), "ulysses"
            (ranks exchange their tokens of all heads for all tokens of some heads, which needs as
            many key heads as ranks, or a multiple), or "auto": "ulysses" where heads suffice, else
            "ring". ``xla_fsdp.preflight.fastest`` chooses by estimates.

    Raises:
        ValueError: if the mesh has several axes or is not one of this job's ranks; if a sequence
            cannot be cut into two equal chunks for each rank, or the buffers' lengths differ; for
            an unknown method, parameters, or tensors in ``no_restore_buffers`` alone.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; give one of {', '.join(METHODS)}")
    axis = ContextAxis(as_mesh(mesh), method)
    cut, dims = list(() if buffers is None else buffers), list(buffer_seq_dims or ())
    _check_buffers(axis, cut, dims)
    restored = _is_restored(cut, no_restore_buffers or ())
    whole = [each.data for each in cut]
    if axis.size > 1:
        for each, dim in zip(cut, dims, strict=True):
            _replace(each, axis.own(each.data, dim % each.dim()))
    try:
        with _ContextMode(axis if axis.size > 1 else None):
            yield
    finally:
        for each, data, restore in zip(cut, whole, restored, strict=True):
            if restore and axis.size > 1:
                _replace(each, data)


@torch.no_grad()
def context_parallel_unshard(
    mesh: Any, buffers: Sequence[Tensor], seq_dims: Sequence[int]
) -> list[Tensor]:
    """Return whole tensors, in the order of the sequence, from the parts of all ranks.

    Args:
        mesh: mesh of the axis.
        buffers: each rank's part.
        seq_dims: the dim of the sequence, of each.
    """
    axis = ContextAxis(as_mesh(mesh))
    pairs = zip(buffers, seq_dims, strict=True)
    return [axis.whole(each, dim % each.dim()) if axis.size > 1 else each for each, dim in pairs]


def mean_over_context(total: Tensor, count: Tensor) -> Tensor:
    """Return ``total / count``, inside ``context_parallel`` of all ranks of its axis together.

    The result is then equal on these ranks, and its gradient such that their average, which FSDP
    computes, is that of the mean.

    Args:
        total: sum over this rank's tokens, [].
        count: what to divide it by, [].
    """
    axis = current_context()
    return total / count if axis is None else axis.mean(total, count)


class _ContextMode(TorchFunctionMode):
    """Holds the axis, which torch hands on to backward's threads, and replaces means of losses."""

    def __init__(self, axis: ContextAxis | None) -> None:
        super().__init__()
        self.axis = axis

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.axis is not None and func in _OF_ONE_RANK:
            name, instead = _OF_ONE_RANK[func]
            raise ValueError(
                f"{name} inside context_parallel would see only those tokens that this rank has; "
                f"{instead}"
            )
        if self.axis is None or func not in _SIGNATURES:
            return func(*args, **kwargs)
        given = arguments_of_loss(func, args, kwargs)
        if given["reduction"] != "mean":
            return func(**given)
        total = func(**given | {"reduction": "sum"})
        count = _weight_of(given["input"], given["target"], given["weight"], given["ignore_index"])
        return self.axis.mean(total, count).to(total.dtype)


_OF_ONE_RANK = {
    torch._C._nn.scaled_dot_product_attention: (
        "scaled_dot_product_attention",
        "call xla_fsdp.attention, or replace_sdpa() of xla_fsdp.integrations.attention before "
        "launch",
    ),
    # Inside it no function is overridden, so that what it calls would not be seen.
    F.multi_head_attention_forward: (
        "nn.MultiheadAttention",
        "call xla_fsdp.attention on heads that are projected by nn.Linear",
    ),
}
_SIGNATURES = {each: inspect.signature(each) for each in (F.cross_entropy, F.nll_loss)}


def arguments_of_loss(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of ``F.cross_entropy`` or ``F.nll_loss`` by name, with the defaults.

    Raises:
        ValueError: for arguments of old torch.
    """
    bound = _SIGNATURES[func].bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given.pop("size_average") is not None or given.pop("reduce") is not None:
        raise ValueError("size_average and reduce are of old torch; say reduction='mean', or sum")
    return given


def _weight_of(input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return what torch divides the sum of losses by, []."""
    if target.is_floating_point():  # probabilities of classes
        classes = input.shape[min(1, input.dim() - 1)]
        return torch.full((), input.numel() // classes, device=input.device)
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    return torch.where(counts, weight[torch.where(counts, target, 0)], 0.0).sum()


# ---------------------------------------------------------------- buffers


def _check_buffers(axis: ContextAxis, buffers: list[Tensor], dims: list[int]) -> None:
    if len(buffers) != len(dims):
        raise ValueError(f"{len(buffers)} buffers and {len(dims)} buffer_seq_dims; give each one")
    if any(isinstance(each, nn.Parameter) or each.requires_grad for each in buffers):
        raise ValueError("buffers have gradients; give tensors without, such as ids and positions")
    if len(set(map(id, buffers))) < len(buffers):
        raise ValueError("a tensor is among buffers twice, and would be cut twice; give it once")
    for each, dim in zip(buffers, dims, strict=True):
        if not -each.dim() <= dim < each.dim():
            raise ValueError(
                f"a buffer {list(each.shape)} has no dim {dim}; give that of its sequence"
            )
    lengths = sorted({each.shape[dim] for each, dim in zip(buffers, dims, strict=True)})
    if len(lengths) > 1:
        raise ValueError(
            f"buffers have sequences of {' and '.join(map(str, lengths))} tokens; give the dims of "
            f"one length, or cut longer tables before"
        )
    if lengths and lengths[0] % (2 * axis.size):
        raise ValueError(
            f"a sequence of {lengths[0]} tokens has no {2 * axis.size} equal chunks, two for each "
            f"of the {axis.size} ranks along {axis.name!r}; pad it to "
            f"{lengths[0] + -lengths[0] % (2 * axis.size)}, with labels that are ignored"
        )


def _is_restored(buffers: list[Tensor], but: Iterable[Tensor]) -> list[bool]:
    stay = [id(each) for each in but]
    if not set(stay) <= set(map(id, buffers)):
        raise ValueError("no_restore_buffers has tensors that are not among buffers")
    return [id(each) not in stay for each in buffers]


def _replace(buffer: Tensor, data: Tensor) -> None:
    buffer.data = data
    increment_version(buffer)  # so that autograd refuses what it has saved of it
