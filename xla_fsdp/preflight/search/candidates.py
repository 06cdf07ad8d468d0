"""What a search may try: recipes, meshes and batch sizes. Imports no torch_xla."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xla_fsdp.recipe.options import Recipe

RECIPES = (
    Recipe("lean", offload_activations=False),
    Recipe("lean", offload_activations=False, remat="none"),
    Recipe("lean"),
    Recipe("fast"),
    Recipe("fast", remat="none"),
    Recipe("lean", remat="none"),
    Recipe("plain"),
    Recipe("plain", remat="none"),
)
"""Those tried by default, the most promising first: a budget may end the search."""

MOST_DOUBLINGS = 10
"""Of the first batch size, where no sizes are given."""

LARGEST_TENSOR = 8
"""Ranks along an axis ``tensor``, where no meshes are given."""

_SWITCHED = {"on": True, "True": True, "off": False, "False": False}

SHARING = ("tensor", "context")
"""Axes whose ranks share samples."""

AXES = ("replica", "shard", *SHARING)
"""Those that a search knows."""


@dataclass(frozen=True)
class Way:
    """How to build a step, but for the batch: a recipe, and swept options of ``build_step``."""

    recipe: Recipe
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.options]
        return " ".join([recipe_text(self.recipe), *options])

    def on(self, mesh: Mapping[str, int] | None) -> Way:
        """Return the same on another mesh."""
        return dataclasses.replace(self, recipe=dataclasses.replace(self.recipe, mesh=mesh))


def recipe_text(recipe: Recipe) -> str:
    """Return a recipe in a line: its name, the fields that are set, and the mesh."""
    words: list[str] = [recipe.name]
    for field in dataclasses.fields(Recipe):
        value = getattr(recipe, field.name)
        if field.init and value is not None and field.name not in ("name", "mesh"):
            words.append(f"{field.name}={value}")
    axes = recipe.mesh if isinstance(recipe.mesh, tuple) else ()
    return " ".join([*words, *(f"{axis}={size}" for axis, size in axes)])


def recipe_of(given: Recipe | Mapping[str, Any] | str) -> Recipe:
    """Return a recipe, also of the text that ``recipe_text`` makes of one: a name or a file, fields
    and a mesh, as in "lean remat=none replica=2 shard=8".

    Raises:
        ValueError: for a name, file, field or size that there cannot be.
        TypeError: as ``Recipe.of``.
    """
    words = given.split() if isinstance(given, str) else []
    if not (pairs := dict(each.split("=", 1) for each in words if "=" in each)):
        return Recipe.of(given)
    base = Recipe.of(" ".join(each for each in words if "=" not in each))
    known = {each.name for each in dataclasses.fields(Recipe) if each.init}
    fields: dict[str, Any] = {
        name: _SWITCHED.get(each, each) for name, each in pairs.items() if name in known
    }
    axes = {name: each for name, each in pairs.items() if name not in known}
    are_sizes = {name: name in AXES and size.isdecimal() for name, size in axes.items()}
    if wrong := [f"{name}={axes[name]}" for name, is_size in are_sizes.items() if not is_size]:
        raise ValueError(
            f"{given!r}: {', '.join(wrong)} is neither a field of a recipe ({', '.join(known)}) "
            f"nor an axis of a mesh ({', '.join(AXES)}) and its size"
        )
    if axes:
        fields["mesh"] = {name: int(size) for name, size in axes.items()}
    return dataclasses.replace(base, **fields)


def ways(recipes: Sequence[Recipe], choices: Mapping[str, Sequence[Any]]) -> list[Way]:
    """Return every recipe with every combination of other options."""
    found = itertools.product(recipes, itertools.product(*choices.values()))
    return [Way(recipe, tuple(zip(choices, values, strict=True))) for recipe, values in found]


def meshes(num_ranks: int) -> list[dict[str, int] | None]:
    """Return meshes of so many ranks: none (all of them shard), then those with replicas or tensor
    parallelism."""
    found: list[dict[str, int] | None] = [None]
    for size in itertools.takewhile(lambda each: each < num_ranks, (2**n for n in range(1, 20))):
        if num_ranks % size == 0:
            found.append({"replica": size, "shard": num_ranks // size})
            if size <= LARGEST_TENSOR:
                found.append({"shard": num_ranks // size, "tensor": size})
    return found


def batch_sizes(first: int) -> Iterator[int]:
    """Yield ``first``, doubled again and again, and from the second on the size halfway to the next
    one, which is predicted for nothing."""
    yield first
    for n in range(1, MOST_DOUBLINGS + 1):
        yield from (first * 2**n, first * 3 * 2 ** (n - 1))


def data_ranks(recipe: Recipe, num_ranks: int) -> int:
    """Return how many of the ranks have samples of their own."""
    for axis, size in recipe.mesh if isinstance(recipe.mesh, tuple) else ():
        if axis in SHARING:
            num_ranks //= size
    return num_ranks
