"""``Recipe``: how ``parallelize`` is to shard a model, and what it did. Imports no torch_xla."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, ParamSpec, TypeVar, cast, get_args

if TYPE_CHECKING:
    import torch

    from xla_fsdp.distributed.mesh import Mesh

P = ParamSpec("P")
T = TypeVar("T")

Name = Literal["lean", "fast", "plain"]
NAMES = get_args(Name)
DTYPES = ("float32", "bfloat16", "float16")
VERSION = 1

SWITCHES = (
    "scan",
    "stacked",
    "offload_activations",
    "streamed_head",
    "streamed_embedding",
    "attention",
    "step_in_backward",
    "compile_step",
)
_OFF: dict[str, tuple[str, ...]] = {
    "lean": (),
    "fast": ("offload_activations", "step_in_backward"),
    "plain": SWITCHES,
}
"""By name of a recipe: the switches that are off unless they are set."""


@dataclass(frozen=True)
class Recipe:
    """How ``parallelize`` shards a model. A field that is None is chosen by ``name`` and by what
    the model allows; what is set and not possible is a ValueError.

    Args:
        name: what the choice is for. "lean" takes the least memory and hides the most traffic;
            "fast" copies nothing to the host, and steps after backward, so that gradients can be
            clipped; "plain" is ordinary nesting: recomputed units, and nothing else.
        units: names of classes whose modules are units, () for none inside of the model (default:
            the elements of every list of modules of one class).
        remat: "full" (default) recomputes units in backward, "none" keeps all activations; names
            of activations to keep are for units that run as a loop.
        scan: run lists of units as one loop each.
        stacked: store the parameters of a loop's units in stacks.
        offload_activations: let what a loop keeps for backward wait in host memory. Forward and
            backward must be in one program.
        streamed_head: let the head of a causal language model of transformers compute its loss,
            and a ``LinearCrossEntropy`` of the model run, without the whole weight and logits.
        streamed_embedding: look tokens up without the whole table.
        attention: let a causal language model of transformers 5 that computes attention by "sdpa"
            do so without all scores where a text has 512 tokens or more; on a TPU with JAX.
        step_in_backward: step each parameter as soon as its gradient is reduced. Gradients are
            gone after backward, and cannot be clipped.
        compile_step: let ``compile`` trace a step a few times, and then replay it.
        compute_dtype: the dtype in which parameters are gathered and used, or its name
            ("bfloat16"), which is what the field holds then.
        mesh: sizes of the mesh's axes by name, as {"replica": 2, "shard": 4}. Over an axis
            ``tensor`` the model is cut before, with the mesh that ``init_mesh`` returns.

    Raises:
        ValueError: for a value that a field cannot have.
    """

    name: Name = "lean"
    units: tuple[str, ...] | None = None
    remat: str | tuple[str, ...] | None = None
    scan: bool | None = None
    stacked: bool | None = None
    offload_activations: bool | None = None
    streamed_head: bool | None = None
    streamed_embedding: bool | None = None
    attention: bool | None = None
    step_in_backward: bool | None = None
    compile_step: bool | None = None
    compute_dtype: str | torch.dtype | None = None
    mesh: Mapping[str, int] | tuple[tuple[str, int], ...] | None = None
    # What parallelize did. A list, as the first forward may show that blocks cannot be a loop.
    _report: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    # Model and optimizer to which it was applied. No field: copies were applied to none.
    _state: ClassVar[tuple[Any, ...] | None] = None

    def __post_init__(self) -> None:
        if isinstance(self.mesh, Mapping):
            self._set("mesh", tuple(self.mesh.items()))
        if str(self.compute_dtype).startswith("torch."):
            self._set("compute_dtype", str(self.compute_dtype).removeprefix("torch."))
        for each in ("units", "remat"):
            if isinstance(given := getattr(self, each), list):
                self._set(each, tuple(given))
        if problems := list(_problems(self)):
            raise ValueError("Recipe: " + "; ".join(problems))

    def __getstate__(self) -> dict[str, Any]:
        return {name: each for name, each in vars(self).items() if name != "_state"}

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def wants(self, switch: str) -> bool:
        """Return whether a field of True, False or None asks for its feature."""
        given = getattr(self, switch)
        return switch not in _OFF[self.name] if given is None else given

    def init_mesh(self) -> Mesh | None:
        """Lay the ranks of the job out as ``mesh`` says; return None if it says nothing."""
        from xla_fsdp.distributed.mesh import init_mesh

        if self.mesh is None:
            return None
        sizes = dict(self.mesh)
        return init_mesh(tuple(sizes.values()), tuple(sizes))

    def applied(self, state: Sequence[Any], report: list[str], **values: Any) -> Recipe:
        """Return the recipe with the values that were chosen, what there is to tell of them, and
        the model and the optimizer to which it was applied."""
        done = dataclasses.replace(self, **values)
        done._set("_report", report)
        done._set("_state", tuple(each for each in state if each is not None))
        return done

    def explain(self) -> None:
        """Print what was done and what was left out; before ``parallelize``, what is asked for."""
        lines = self._report or [
            f"recipe {self.name!r}, not applied to a model yet",
            *self._asked(),
        ]
        # With its end in one write: several ranks may print.
        print("\n".join(lines) + "\n", end="", flush=True)

    def _asked(self) -> list[str]:
        values = dataclasses.asdict(self).items()
        return [f"  {name}: {_shown(self, name, each)}" for name, each in values if name[0] != "_"]

    def compile(self, step: Callable[P, T], state: Sequence[Any] = ()) -> Callable[P, T]:
        """Return the training step to call: ``compile_step(step)``, or else ``step`` followed by
        ``torch_xla.sync()``. Unless ``compile_step`` is True, a step that cannot be replayed is
        traced every time, with a warning that says why.

        Args:
            step: makes a whole step: forward, backward, the optimizer's step and ``zero_grad``.
            state: what the step reads or changes on the device besides its arguments and the model
                and optimizer of ``parallelize``; an optimizer made afterwards belongs here.

        Raises:
            TypeError: if ``step`` is no function.
        """
        if not callable(step):
            raise TypeError(
                f"Recipe.compile got {step!r}, which cannot be called; give it the function that "
                f"makes a training step"
            )
        import torch_xla

        from xla_fsdp.compile import compile_step

        if self.wants("compile_step"):
            known = None if self._state is None and not state else [*(self._state or ()), *state]
            return compile_step(
                step, state=known, unknown="raise" if self.compile_step else "trace"
            )

        @wraps(step)
        def traced(*args: P.args, **kwargs: P.kwargs) -> T:
            result = step(*args, **kwargs)
            torch_xla.sync()
            return result

        return traced

    def save(self, path: str | Path) -> None:
        """Write the fields that are set to a file, as JSON."""
        values = dataclasses.asdict(self)
        known = {name: each for name, each in values.items() if name[0] != "_" and each is not None}
        if self.mesh is not None:
            known["mesh"] = dict(self.mesh)
        text = json.dumps({"version": VERSION, **known}, indent=2) + "\n"
        try:
            # Every rank may write, and another one read already.
            with tempfile.TemporaryDirectory(dir=Path(path).parent) as folder:
                whole = Path(folder, "recipe.json")
                whole.write_text(text)
                whole.replace(path)
        except OSError as error:  # which names the temporary folder
            raise type(error)(error.errno, error.strerror, str(path)) from None

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a recipe that ``save``, or preflight, has written.

        Raises:
            ValueError: if the file holds something else.
        """
        try:
            values = json.loads(Path(path).read_text())
        except (ValueError, RecursionError, IsADirectoryError) as error:
            raise ValueError(f"{path} is no recipe: it is not JSON ({error})") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path} is no recipe: it holds a {type(values).__name__}")
        if "version" not in values:  # a file of something else, perhaps
            raise ValueError(
                f'{path} is no recipe: it has no "version"; write it by Recipe.save, or add '
                f'"version": {VERSION}'
            )
        return cls._made_of(values, str(path))

    @classmethod
    def _made_of(cls, values: dict[str, Any], source: str) -> Recipe:
        version = values.pop("version", VERSION)
        if type(version) is not int or version != VERSION:
            raise ValueError(
                f"{source} is a recipe of version {version!r}; this xla_fsdp reads {VERSION}. "
                f"Upgrade it, or write the recipe again by Recipe.save"
            )
        if unknown := sorted(set(values) - set(_fields())):
            raise ValueError(
                f"{source} is no recipe: it has {', '.join(unknown)}; there are "
                f"{', '.join(_fields())}"
            )
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    @classmethod
    def of(cls, given: Recipe | Mapping[str, Any] | str | PathLike[str]) -> Recipe:
        """Return a recipe by name, from a file or of a dict of its fields; a recipe as it is.

        Raises:
            ValueError: if there is neither such a name nor such a file.
            TypeError: for anything else.
        """
        if isinstance(given, Recipe):
            return given
        if isinstance(given, Mapping):
            return cls._made_of(dict(given), "the dict")
        if not isinstance(given, str | Path):
            raise TypeError(f"a recipe is a Recipe, a name, a file or a dict, not {given!r}")
        if given in NAMES:
            return cls(cast(Name, given))
        if Path(given).is_file():
            return cls.load(Path(given))
        raise ValueError(f"there is no recipe {str(given)!r}: give {_choices()}, or a file")


def _fields() -> list[str]:
    return [each.name for each in dataclasses.fields(Recipe) if each.init]


def _choices() -> str:
    return ", ".join(map(repr, NAMES))


def _shown(recipe: Recipe, name: str, value: Any) -> str:
    if value is not None:
        return str(value)
    if name in SWITCHES:
        return "if the model allows" if recipe.wants(name) else "False"
    return "chosen by the model"


def _problems(recipe: Recipe) -> Iterator[str]:
    if recipe.name not in NAMES:
        yield f"name is {recipe.name!r}; give {_choices()}"
    for name in SWITCHES:
        if not isinstance(given := getattr(recipe, name), bool | None):
            yield f"{name} is {given!r}; give True, False or None"
    if not (recipe.units is None or _are_names(recipe.units)):
        yield f"units is {recipe.units!r}; give a tuple of names of classes"
    if not (recipe.remat in (None, "full", "none") or (recipe.remat and _are_names(recipe.remat))):
        yield f"remat is {recipe.remat!r}; give 'full', 'none' or a tuple of names"
    if recipe.compute_dtype not in (None, *DTYPES):
        yield (
            f"compute_dtype is {recipe.compute_dtype!r}, which is no floating-point dtype that "
            f"units compute in; give {', '.join(map(repr, DTYPES))}"
        )
    if recipe.mesh is None:
        return
    if not _is_mesh(recipe.mesh):
        yield (
            f"mesh is {recipe.mesh!r}; give whole sizes from 1 by name of the axis, as "
            f"{{'replica': 2, 'shard': 4}}"
        )
    elif (names := [*dict(recipe.mesh)]) in (["tensor"], ["replica"]):
        where = "before" if names == ["tensor"] else "after"
        yield f"mesh has an axis {names[0]} alone; give shard=1 {where} it"


def _are_names(given: Any) -> bool:
    return isinstance(given, tuple) and all(isinstance(each, str) for each in given)


def _is_mesh(mesh: Any) -> bool:
    """Return whether these are pairs of a name of its own and a size."""
    pairs = mesh if isinstance(mesh, tuple) else ()
    if not pairs or not all(isinstance(each, tuple) and len(each) == 2 for each in pairs):
        return False
    names, sizes = zip(*pairs, strict=True)
    are_sizes = all(type(size) is int and size > 0 for size in sizes)
    return are_sizes and _are_names(names) and len(set(names)) == len(names)
