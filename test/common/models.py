"""Small modules for parity tests. Sizes are odd on purpose: no number of ranks divides them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xla_fsdp import LinearCrossEntropy, StreamedEmbedding, attention

WIDTH = 11
CLASSES = 7
FEATURES = 5


class Block(nn.Module):
    """Pre-norm residual MLP."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.up = nn.Linear(WIDTH, 17)
        self.down = nn.Linear(17, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks, a pair of layers that share one weight, a scalar parameter and a head."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([Block(norm) for _ in range(2)])
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.mid2 = nn.Linear(WIDTH, WIDTH)
        self.mid2.weight = self.mid.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        x = self.mid2(torch.tanh(self.mid(x))) * self.scale
        return self.head(x)


class BatchNormNet(Net):
    """As ``Net``, with running statistics."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d)


class FrozenNet(Net):
    """As ``Net``, with one block and a bias frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.head.bias.requires_grad_(False)


class TwoLayers(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 17)
        self.down = nn.Linear(17, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.tanh(self.up(x))))


class LinearNet(nn.Module):
    """Nothing but linear layers, so that products and gathers are easy to count."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([TwoLayers(), TwoLayers()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class FunctionalNet(nn.Module):
    """Uses its weights in ways that save views of them for backward, and one not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Parameter(torch.randn(2 * WIDTH, FEATURES) / 4)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.unused = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.pair.chunk(2)
        gated = F.linear(x, first) * torch.sigmoid(F.linear(x, second))
        mixed = gated @ self.mix.t() + gated @ self.mix.view(WIDTH, WIDTH)
        return self.head(mixed)


class _Scale(torch.autograd.Function):
    """Multiplies by a vector that it does not save but keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        [grad], [x] = grads, ctx.saved_tensors
        return grad * ctx.weight, (grad * x).sum(0)


class _Product(torch.autograd.Function):
    """Multiplies by a matrix that it does not save but keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        [grad], [x] = grads, ctx.saved_tensors
        return grad @ ctx.weight.t(), x.t() @ grad


class HoldingNorm(nn.Module):
    """Keeps its scale in an autograd function."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return _Scale.apply(x * x.square().mean(-1, keepdim=True).add(1e-3).rsqrt(), self.scale)


class HoldingBlock(nn.Module):
    """Holds its parameters, and views of them, in autograd functions and in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = HoldingNorm(), nn.Linear(WIDTH, WIDTH)
        self.mats = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 4 for _ in range(3)])
        self.pair = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 4)
        self.gates = nn.ParameterList([torch.linspace(-1, 1, WIDTH), torch.ones(WIDTH) / 2])

    def forward(self, x: Tensor) -> Tensor:
        first, turned, gate = self.mats[0], self.mats[1].t(), self.gates[0]
        y = _Product.apply(self.norm(x), first)
        y = torch.tanh(_Product.apply(y, turned) + F.linear(y, turned))
        if y.requires_grad:
            y.register_hook(lambda grad: grad * gate)
        y = _Product.apply(y, self.pair[WIDTH:]) + F.linear(self.up(y), self.mats[2])
        if y.requires_grad:
            y.register_hook(lambda grad: grad * self.gates[1] * (turned @ first).sum(0))
        return x + torch.tanh(y)


class HoldingNet(nn.Module):
    """Blocks that hold their parameters, as the net itself does."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([HoldingBlock() for _ in range(2)])
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = _Scale.apply(self.inp(x), self.scale)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _RememberingBlock(nn.Module):
    """Computes with the weights that it has remembered of its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.first: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.first:
            weight, scale = self.lin.weight, self.lin.bias
            self.first = [lambda x: torch.tanh(F.linear(x, weight)), lambda x: x * scale]
        return sum((each(x) for each in self.first), torch.tanh(self.lin(x)))


class RememberingNet(nn.Module):
    """Blocks that remember their weights from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([_RememberingBlock() for _ in range(2)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class WideNet(nn.Module):
    """Matrices so large that their shards travel in rows, one of them padded with a row."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, 128)
        self.blocks = nn.ModuleList([nn.Linear(128, 255), nn.Linear(255, 128)])
        self.mid = nn.Linear(128, 256, bias=False)
        self.head = nn.Linear(256, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(torch.tanh(self.mid(x)))


class ScanBlock(nn.Module):
    """Attention of the rows among each other, and an MLP; takes more than what it changes."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 255), nn.Linear(255, width, bias=False)

    def forward(self, x: Tensor, gain: Tensor, *, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(self.norm(x * gain)).chunk(3, dim=-1)
        scores = query @ key.t() * 128**-0.5
        x = x + (scores if mask is None else scores + mask).softmax(-1) @ value
        return x + self.down(F.gelu(self.up(x))) * gain


class ScanNet(nn.Module):
    """Blocks that can run as one loop, with large and small matrices and other arguments, one of
    which is trained."""

    def __init__(self, depth: int = 3, block: type[nn.Module] = ScanBlock) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, 128)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 128))
        self.blocks = nn.ModuleList([block() for _ in range(depth)])
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        mask = torch.full((rows, rows), -1e4, device=x.device).triu(1)
        x = self.inp(x)
        for block in self.blocks:
            x = block(x, self.gain, mask=mask)
        return self.head(x)


class _AttentionBlock(ScanBlock):
    """Attention inside of each row, by the package's function on XLA and by torch's elsewhere."""

    def forward(self, x: Tensor, gain: Tensor, *, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(self.norm(x * gain)).chunk(3, dim=-1)
        query, key, value = (
            each[:, : 8 * heads * 4].unflatten(-1, (8, heads, 4)).transpose(1, 2)
            for each, heads in ((query, 4), (key, 2), (value, 2))
        )
        mixed = self._attended(query, key, value).transpose(1, 2).flatten(1)
        x = x + mixed
        return x + self.down(F.gelu(self.up(x))) * gain

    def _attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.device.type == "xla":
            return attention(query, key, value, is_causal=True, window=5)
        i = torch.arange(8)
        seen = (i[:, None] >= i) & (i[:, None] - i < 5)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)


class AttentionNet(ScanNet):
    """Blocks with attention of several heads."""

    def __init__(self) -> None:
        super().__init__(block=_AttentionBlock)


class _VmapBlock(ScanBlock):
    """Its MLP is written for one row."""

    def forward(self, x: Tensor, gain: Tensor, *, mask: Tensor | None = None) -> Tensor:
        mapped = torch.vmap(lambda row: self.down(F.gelu(self.up(row))) * gain)
        return x + mapped(self.norm(x))


class VmapNet(ScanNet):
    """Blocks that compute by ``torch.vmap``."""

    def __init__(self) -> None:
        super().__init__(block=_VmapBlock)


class ScanNetOfOne(ScanNet):
    """With a single block."""

    def __init__(self) -> None:
        super().__init__(depth=1)


class _Adapted(ScanBlock):
    """With a frozen matrix and a small trained addition to it (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.inner, self.outer = nn.Linear(128, 4, bias=False), nn.Linear(4, 128, bias=False)

    def forward(self, x: Tensor, gain: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, gain, mask=mask) + self.outer(self.inner(x))


class _Stacked(ScanBlock):
    """With a stack of matrices that are whole tiles of a TPU, as experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(4, 128, 128) / 16)

    def forward(self, x: Tensor, gain: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, gain, mask=mask) + torch.tanh(x @ self.stack).sum(0)


class MatricesNet(ScanNet):
    """Blocks with a stack of matrices each."""

    def __init__(self) -> None:
        super().__init__(block=_Stacked)


class AdapterNet(ScanNet):
    """Adapters in all blocks but the first, which is frozen altogether."""

    def __init__(self) -> None:
        super().__init__(block=_Adapted)
        self.blocks[0].requires_grad_(False)
        self.gain.requires_grad_(False)


class AllAdaptersNet(ScanNet):
    """Adapters in all blocks."""

    def __init__(self) -> None:
        super().__init__(block=_Adapted)
        self.gain.requires_grad_(False)


class _PatternBlock(ScanBlock):
    """Computes with numbers of its own; every other block with another mask and function."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.even = index, index % 2 == 0
        self.rate = [0.0, 0.25, 0.5, 2, 1.25, 1.5][index]

    def forward(self, x: Tensor, gain: Tensor, *, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, gain, mask=mask) - x
        y = torch.tanh(y) if self.even else torch.sin(y)
        if self.rate == 0:
            return x + y
        return x + (1 - self.rate) * y / math.sqrt(self.index + 1)


class NumbersNet(ScanNet):
    """Blocks that only differ in numbers, which let the first one compute something else."""

    def __init__(self) -> None:
        super().__init__(depth=0)
        self.blocks = nn.ModuleList([_PatternBlock(index) for index in range(4)])
        for block in self.blocks:
            block.even = True


class PatternNet(ScanNet):
    """Two kinds of blocks in turns, with numbers and masks of their own; the outputs of all blocks
    are used. A block of a third kind begins, another one ends."""

    def __init__(self, *, ends: bool = True) -> None:
        super().__init__(depth=0)
        inner = [_PatternBlock(index) for index in range(1, 5)]
        self.blocks = nn.ModuleList([_FirstBlock(), *inner, _LastBlock()] if ends else inner)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        whole = torch.full((rows, rows), -1e4, device=x.device).triu(1)
        near = whole + torch.full((rows, rows), -1e4, device=x.device).tril(-2)
        kept, gain = [x := self.inp(x)], self.gain
        for index, block in enumerate(self.blocks):
            x = block(x, gain, mask=near if index % 2 else whole)
            if isinstance(x, tuple):  # what blocks share, as the first one has computed it
                x, gain = x
            kept.append(x)
        return self.head(sum(each.tanh() for each in kept))


class TwoKindsNet(PatternNet):
    """Without ends."""

    def __init__(self) -> None:
        super().__init__(ends=False)


class _FirstBlock(_PatternBlock):
    """With a table for all blocks, which it computes the other argument of the others from."""

    def __init__(self) -> None:
        super().__init__(0)
        self.table = nn.Parameter(torch.linspace(0.5, 1, 128))

    def forward(self, x: Tensor, gain: Tensor, *, mask: Tensor | None = None) -> Any:
        gain = gain * self.table
        return super().forward(x, gain, mask=mask), gain


class _LastBlock(_PatternBlock):
    """With parameters like the others', but another function."""

    def __init__(self) -> None:
        super().__init__(5)

    def forward(self, x: Tensor, gain: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return torch.sigmoid(ScanBlock.forward(self, x, gain, mask=mask))


class HeadNet(nn.Module):
    """With a head that computes the loss, in pieces; it has more classes than the labels of
    ``parity``."""

    def __init__(
        self, width: int = WIDTH, classes: int = 37, bias: bool = True, **options: Any
    ) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width)])
        self.head = LinearCrossEntropy(width, classes, bias, **{"pieces": 3, **options})

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        x = torch.tanh(self.inp(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x) if target is None else self.head(x, target)


class SmoothHeadNet(HeadNet):
    """With smoothed labels, and pieces of which some are padding."""

    def __init__(self) -> None:
        super().__init__(label_smoothing=0.2, pieces=5)


class WideHeadNet(HeadNet):
    """With shards that travel in rows, cut into tiles."""

    def __init__(self) -> None:
        super().__init__(128, 700, bias=False)


class TiedHeadNet(HeadNet):
    """Whose head is tied to a block."""

    def __init__(self) -> None:
        super().__init__(classes=WIDTH, pieces=2)
        self.head.weight = self.blocks[0].weight


class FrozenHeadNet(HeadNet):
    """Of whose head the bias alone is trained."""

    def __init__(self) -> None:
        super().__init__(pieces=2)
        self.head.weight.requires_grad_(False)


class EmbeddingNet(nn.Module):
    """Of row numbers, whose embedding comes in pieces."""

    def __init__(self, width: int = WIDTH, rows: int = 37, **options: Any) -> None:
        super().__init__()
        self.tokens = StreamedEmbedding(rows, width, **{"pieces": 3, **options})
        self.blocks = nn.ModuleList([nn.Linear(width, width)])
        self.head = nn.Linear(width, CLASSES)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.tokens(numbers)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def numbers_of(x: Tensor, rows: int) -> Tensor:
    """Row numbers [n, FEATURES] that the signs of ``x`` [n, FEATURES] stand for; any dtype has the
    same. They are spread over all rows, and some come twice."""
    places = torch.arange(FEATURES, device=x.device)
    signs = ((x > 0) * 2**places).sum(1, keepdim=True)
    return (signs * 97 + places // 2 * 131) % rows


class SignsNet(EmbeddingNet):
    """Whose row numbers are made of the features of ``parity``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(numbers_of(x, self.tokens.num_embeddings)).mean(1)


class PaddedSignsNet(SignsNet):
    """With a row for padding, and pieces of which some are padding."""

    def __init__(self) -> None:
        super().__init__(padding_idx=20, pieces=5)


class WideSignsNet(SignsNet):
    """With shards that travel in rows, cut into tiles."""

    def __init__(self) -> None:
        super().__init__(128, 700)


class LargeSignsNet(SignsNet):
    """With a table so large that ranks send the few rows they ask for instead."""

    def __init__(self) -> None:
        super().__init__(64, 70_001, pieces=None, padding_idx=35_000)


class FrozenSignsNet(SignsNet):
    """Whose table is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens.requires_grad_(False)


class SharedSignsNet(SignsNet):
    """Whose table is looked up twice in a forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * super().forward(x.flip(1))


class SignsToLossNet(SignsNet):
    """With a head that streams, too."""

    def __init__(self, classes: int = 29) -> None:
        super().__init__()
        self.head = LinearCrossEntropy(WIDTH, classes, pieces=3)  # more classes than labels

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        x = self.tokens(numbers_of(x, self.tokens.num_embeddings)).mean(1)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x) if target is None else self.head(x, target)


class TiedSignsNet(SignsToLossNet):
    """With a table that is the head's weight, too."""

    def __init__(self) -> None:
        super().__init__(classes=37)
        self.head.weight = self.tokens.weight


class TwiceNet(nn.Module):
    """Runs one block twice in a forward, and has a block that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        return self.head(self.blocks[0](self.blocks[0](x)))


class _Part(nn.Module):
    """Takes keywords and nested containers, returns a nested container."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: dict[str, Any], *, scale: float, extra: tuple[Tensor, str]) -> Any:
        x = self.lin(inputs["x"]) * scale + extra[0]
        return {"out": [x, (x.detach(), "note")], "none": None, "ids": inputs["ids"]}


class ContainerNet(nn.Module):
    """Passes containers between its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([_Part(), _Part()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        ids = torch.arange(x.shape[0], device=x.device)
        for part in self.blocks:
            result = part({"x": x, "ids": ids}, scale=0.5, extra=(x, "text"))
            x = result["out"][0]
            ids = result["ids"]
        return self.head(x) + ids.to(x.dtype).unsqueeze(1) * 0


class ConvNet(nn.Module):
    """The MNIST model in small: convolutions, BatchNorm, linear layers. Takes the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 3, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(3)
        self.fc = nn.Linear(3 * 2 * FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        image = torch.stack([x, x * x], dim=1).unsqueeze(1)
        return self.fc(torch.relu(self.bn1(self.conv1(image))).flatten(1))


class TiedNet(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))
