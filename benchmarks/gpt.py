"""The GPT that ``tpu_compile`` compiles, for PyTorch/XLA, and ways to make a training step of it.

Blocks are wrapped and rematerialized, AdamW has fp32 state, compute is in bf16. The same model for
JAX is in ``jax_fsdp``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD = 64


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of one rank's batch."""

    width: int
    blocks: int
    length: int = 1024
    batch: int = 1
    vocabulary: int = 50304

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self.width // HEAD


class Block(nn.Module):
    """Pre-norm causal attention and MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self.attend(self.qkv(self.norm1(x))))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, qkv: Tensor) -> Tensor:
        """Attend from [rows, length, 3 * width] to [rows, length, width]."""
        rows, length, _ = qkv.shape
        split = qkv.view(rows, length, 3, self.heads, HEAD)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        scores = query @ key.transpose(-1, -2) * HEAD**-0.5
        seen = torch.ones(length, length, dtype=torch.bool, device=qkv.device).tril()
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return (weights @ value).transpose(1, 2).reshape(rows, length, -1)


class GPT(nn.Module):
    """Embeddings, blocks, norm, head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.blocks)])
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, *targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x), *targets)


def ours(shape: Shape) -> Callable[[], None]:
    """Return a step of the model wrapped by ``xla_fsdp``."""
    from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module

    return _step(_wrapped(shape, XlaFullyShardedDataParallel, checkpoint_module, {}), shape)


def scan(shape: Shape) -> Callable[[], None]:
    """Return ``ours`` with all blocks as one loop, and the embedding wrapped, so that it is not
    unsharded while the loop runs."""
    return _scanned(shape, stacked=False)


def stacked(shape: Shape) -> Callable[[], None]:
    """Return ``scan`` with the parameters of all blocks stacked."""
    return _scanned(shape, stacked=True)


def streamed(shape: Shape) -> Callable[[], None]:
    """Return ``stacked`` with a head that computes the loss in chunks, an embedding that sends
    rows, not its table, and an optimizer that steps inside backward."""
    return _scanned(shape, stacked=True, streamed=True)


def offloaded(shape: Shape) -> Callable[[], None]:
    """Return ``streamed`` with the blocks' inputs offloaded to the host until backward."""
    return _scanned(shape, stacked=True, streamed=True, offload=True)


def _scanned(
    shape: Shape, *, stacked: bool, streamed: bool = False, offload: bool = False
) -> Callable[[], None]:
    from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module, scan_blocks

    ends: dict[str, dict[str, Any]] = {"tokens": {}}
    if streamed:  # else it belongs to the root, which uses it in pieces
        ends["head"] = {}
    rows = {"shard_param_on_dim_0": True}
    model: Any = _wrapped(
        shape, XlaFullyShardedDataParallel, checkpoint_module, rows, ends, streamed=streamed
    )
    scan_blocks(model.blocks, stacked=stacked, offload_activations=offload)
    return _step(model, shape, model if streamed else None)


def upstream(shape: Shape) -> Callable[[], None]:
    """Return a step of the model wrapped by ``torch_xla.distributed.fsdp`` at its best settings:
    pinned layouts would turn all-gathers into all-reduces."""
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel, checkpoint_module

    options = {"pin_layout_in_collective_ops": False}
    return _step(_wrapped(shape, XlaFullyShardedDataParallel, checkpoint_module, options), shape)


def alone(shape: Shape) -> Callable[[], None]:
    """Return a step of the model that nobody shards: whole weights and gradients in the compute
    dtype and no collective, and the optimizer steps 1/N of the parameters, as on one of N ranks."""
    import torch_xla

    from xla_fsdp import checkpoint_module

    with torch.device("meta"):
        model = GPT(shape).to(torch.bfloat16)
    model.to_empty(device=torch_xla.device())
    for block in model.blocks:
        checkpoint_module(block)
    shards, hand_over = part_of(model)
    return _training_step(model, shards, shape, after_backward=hand_over)


def part_of(model: nn.Module) -> tuple[list[nn.Parameter], Callable[[], None]]:
    """Return 1/N of each parameter of a model that nobody shards, in float32, for one of N ranks to
    step; and what hands it its gradients after a backward, which then are nobody else's."""
    from xla_fsdp.xla import ops

    whole, ranks = list(model.parameters()), ops.world_size()
    shards = [
        nn.Parameter(torch.empty(-(-len(each) // ranks), *each.shape[1:], device=each.device))
        for each in whole
    ]

    def hand_over() -> None:
        # Behind a barrier, or the compiler would compute no more of a gradient than is stepped.
        grads = ops.barrier([each.grad for each in whole])
        for each, shard, grad in zip(whole, shards, grads, strict=True):
            each.grad, shard.grad = None, grad[: len(shard)].float()

    return shards, hand_over


def _wrapped(
    shape: Shape,
    wrap: Any,
    rematerialize: Any,
    options: dict[str, Any],
    ends: Mapping[str, dict[str, Any]] = MappingProxyType({}),
    *,
    streamed: bool = False,
) -> nn.Module:
    with torch.device("meta"):  # no values: memory that is never written to takes none
        model: Any = GPT(shape)
    if streamed:
        from xla_fsdp import LinearCrossEntropy, StreamedEmbedding

        model.tokens = StreamedEmbedding.from_embedding(model.tokens)
        model.head = LinearCrossEntropy.from_linear(model.head)
    model.to_empty(device="cpu")
    options = {"compute_dtype": torch.bfloat16, **options}
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(rematerialize(block), **options)
    for name, others in ends.items():
        setattr(model, name, wrap(getattr(model, name), **options, **others))
    return wrap(model, **options)


def _step(
    model: nn.Module, shape: Shape, loss: Callable[[Tensor, Tensor], Tensor] | None = None
) -> Callable[[], None]:
    """Return a step; with ``loss`` (of tokens and targets, if the model does not return logits),
    the optimizer steps inside backward."""
    return _training_step(model, list(model.parameters()), shape, loss)


def _training_step(
    model: nn.Module,
    stepped: Sequence[nn.Parameter],
    shape: Shape,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    after_backward: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    import torch_xla

    from xla_fsdp.optim import step_in_backward

    def of_logits(tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())

    optimizer = torch.optim.AdamW(stepped, lr=1e-4)
    if loss is not None:
        step_in_backward(model, optimizer)
    size = (shape.batch, shape.length)
    tokens, targets = (torch.zeros(size, dtype=torch.long).to(torch_xla.device()) for _ in range(2))

    def step() -> None:
        # Logits in a variable that lives until the sync would be a result of the program.
        (loss or of_logits)(tokens, targets).backward()
        after_backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()

    return step
