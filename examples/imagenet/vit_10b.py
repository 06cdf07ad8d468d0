"""A vision transformer of 10 billion parameters: the model, its units, and a step for preflight.

    python -m xla_fsdp.preflight examples.imagenet.vit_10b:step --topology v3:8x8 --set scan=on
    python examples/imagenet/vit_10b.py --ranks 128          # host memory of building one rank
    python examples/imagenet/train.py --model vit_10b ...    # training; see README.md

Words: *patches* are the squares that a picture is cut into; a *unit* is what is gathered together.
Always true: the model is built on the meta device, so no process ever holds more of it than its
shards and one unit; every block is a unit and is recomputed in backward.
Sizes are arguments: ``--set depth=2 --set width=256`` is the same program in small.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))  # what the examples share

from large_models import build_one_rank, leave_alone, optimizer_of, training_step
from xla_fsdp import Mesh, Parallelized, Recipe, parallelize


class Stem(nn.Module):
    """Pictures [N, 3, image, image] to patches [N, P, width] that know their places."""

    def __init__(self, width: int, patch: int, image: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch, stride=patch)
        self.places = nn.Parameter(torch.empty((image // patch) ** 2, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Values of the parameter that no layer holds."""
        nn.init.normal_(self.places, std=0.02)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.cut(pictures).flatten(2).transpose(1, 2) + self.places


class Block(nn.Module):
    """Pre-norm attention and MLP; keeps shape and dtype."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self._attend(self.qkv(self.norm1(x))))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def _attend(self, joined: Tensor) -> Tensor:
        """[N, P, 3 * width] to [N, P, width]."""
        rows, patches, _ = joined.shape
        split = joined.view(rows, patches, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        weights = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1)
        return (weights @ value).transpose(1, 2).reshape(rows, patches, -1)


class Head(nn.Module):
    """Patches to the classes of the picture: their mean, normalized, through one layer."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm, self.classify = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.norm(x.mean(1)))


class ViT(nn.Module):
    """Stem, blocks, head."""

    def __init__(
        self, width: int, depth: int, heads: int, patch: int, image: int, classes: int
    ) -> None:
        super().__init__()
        if width % heads or image % patch:
            raise ValueError(
                f"width={width}, heads={heads}, image={image}, patch={patch}: expected "
                "a width that the heads divide and a picture that the patches divide"
            )
        self.stem = Stem(width, patch, image)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.head = Head(width, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.stem(pictures)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model(
    *,
    width: int = 5120,
    depth: int = 32,
    heads: int = 32,
    patch: int = 14,
    image: int = 224,
    classes: int = 1000,
) -> ViT:
    """The model, without memory: the sizes by default are those of 10.1e9 parameters."""
    with torch.device("meta"):
        return ViT(width, depth, heads, patch, image, classes)


def shard_model(
    model: ViT, optimizer: Any = None, recipe: Recipe | str = "plain", **options: Any
) -> Parallelized:
    """Stem, every block, and head each a unit.

    ``options`` are those of the wrapper, which gives each unit memory and values when it makes it.
    """
    recipe = replace(Recipe.of(recipe), units=("Stem", "Block", "Head"))
    return parallelize(model, optimizer, recipe, **{"compute_dtype": torch.bfloat16, **options})


def step(
    batch: int = 8,
    width: int = 5120,
    depth: int = 32,
    heads: int = 32,
    patch: int = 14,
    image: int = 224,
    classes: int = 1000,
    remat: bool = True,
    scan: bool = False,
    flat: bool = False,
    mesh: Mesh | None = None,
    recipe: Recipe | None = None,
) -> Callable[[], None]:
    """One training step on ``batch`` pictures per rank, as preflight wants it; a ``recipe`` stands
    for ``remat`` and ``scan``."""
    import torch_xla

    model = build_model(
        width=width, depth=depth, heads=heads, patch=patch, image=image, classes=classes
    )
    sharded, optimizer, _ = shard_model(
        model,
        optimizer_of,
        recipe or Recipe("plain", scan=scan, remat="full" if remat else "none"),
        flatten_parameters=flat,
        mesh=mesh,
        param_init_fn=leave_alone,
    )
    device = torch_xla.device()
    pictures = torch.zeros(batch, 3, image, image).to(device)
    labels = torch.zeros(batch, dtype=torch.long).to(device)
    return training_step(optimizer, lambda: F.cross_entropy(sharded(pictures).float(), labels))


def main(argv: list[str] | None = None) -> int:
    """Build one rank's shards, with real values, and say what that took."""
    return build_one_rank(
        "Build the shards of one rank of many.",
        128,
        {"width": 5120, "depth": 32, "heads": 32},
        lambda sizes, **options: shard_model(build_model(**sizes), **options).model,
        argv,
    )


if __name__ == "__main__":
    sys.exit(main())
