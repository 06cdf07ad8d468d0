"""Draw recipes of ``test.common.random_models``, run many of them, shrink one that fails, and write
it as a script.

A recipe has to be right, or to be refused by one of ``REFUSALS``.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import gc
import inspect
import pickle
import random
import re
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from test.common import random_models
from test.common.random_models import (
    REPEATS,
    VIEWS,
    Plan,
    Recipe,
    difference,
    effect_of_rounding,
    train_plain,
    train_sharded,
)
from test.common.ranks import ChildError, run_on_ranks

LOW = ("bfloat16", "float16")


@dataclass(frozen=True)
class Refusal:
    """What the package may refuse.

    Args:
        why: in a few words.
        pattern: of the message, the last line of the error.
        features: a recipe has one of these, see ``features``.
    """

    why: str
    pattern: str
    features: tuple[str, ...]


REFUSALS = (
    Refusal(
        "a full parameter used where its unit is sharded",
        r"was used \(by .*\) while its FSDP unit is sharded",
        ("Leaves", "TensorHook", "Keeps"),
    ),
    Refusal(
        "a shard used in a forward", r"the shard of .* was used \(by .*\) in a forward", ("Peeks",)
    ),
    Refusal(
        "a view and its detached twin, one changed",
        r"shares memory with it in a way that the unit",
        ("Pairs",),
    ),
    Refusal(
        "a transform where saved tensors need hooks",
        r"a transform of torch.func .* was called in",
        ("Force",),
    ),
    Refusal(
        "a gradient of a gradient through a loop",
        r"a gradient was differentiated again\.",
        ("scan",),
    ),
    Refusal(
        "an input changed where it is recomputed",
        r"checkpointed forward of .* was recomputed, in",
        ("Boxes", "Pairs"),
    ),
    Refusal(
        "another state where it is recomputed",
        r"saved \d+ tensors for backward, and \d+ \(or others\) when",
        ("Takes",),
    ),
    Refusal(
        "a gradient through a traced block",
        "ran through a forward that was traced for a loop",
        ("Force",),
    ),
    Refusal("frozen in one block of a stack", "but is (frozen|trained) in block", ("scan",)),
    Refusal("blocks of a loop that differ", r"differs? from block 0", ("scan",)),
    Refusal("the forward of a loop does more", r"was used \(by .*\) (before|after) ", ("scan",)),
    Refusal("a block called elsewhere", r"was called where .* was expected", ("scan",)),
    Refusal("blocks rematerialized around their units", "leave that to the loop", ("scan",)),
    Refusal(
        "a layer tied to a slice of a stack",
        "of a stacked block, and no other unit can hold a slice of a stack",
        ("scan",),
    ),
    Refusal("blocks with other parameters", "parameters that its unit ignores", ("scan",)),
    Refusal(
        "a block changes what a loop cannot",
        "a scanned block (changes|assigns|leaves|must return)",
        ("scan",),
    ),
    Refusal("hooks in a loop", "in a scanned block has hooks|hook of a scanned block", ("scan",)),
    Refusal("values read in a loop", "a scanned block asks for the values", ("scan",)),
    Refusal(
        "computed on the host in a loop",
        "a scanned block calls .*, which torch_xla computes on the host",
        ("View", "Parametrized"),
    ),
    Refusal(
        "a loop that computes with what it was not given",
        "a scanned block computes with tensors of shapes",
        ("Takes", "Pairs"),
    ),
    Refusal("blocks given other arguments", "was called with other arguments", ("scan",)),
    Refusal("a loop that does not reach its end", "reaches outputs of inner blocks", ("scan",)),
)


def features(recipe: Recipe) -> set[str]:
    """Kinds of nodes, and "scan"."""
    found = {plan.kind for plan in recipe.plans()}
    return found | ({"scan"} if any(plan.scan for plan in recipe.plans()) else set())


# ---------------------------------------------------------------- drawing

ANY_DTYPE = (
    "Linear", "UpDown", "Embedding", "Shapes", "Products", "View", "Integers", "Lists", "InPlace",
    "Reaching", "Numbered", "Keeps", "TensorHook",
)  # fmt: skip
SLOW_TO_COMPILE = ("Attention", "Encoder", "Conv")
SIMPLE = ("Linear", "UpDown", "LayerNorm")
OLD = (
    "BatchNorm", "Conv", "Embedding", "Shapes", "Integers", "Buffers", "Lists", "Attention",
    "Encoder", "InPlace", "Parametrized", "Products", "Reaching",
)  # fmt: skip
AWKWARD = (
    "View", "View", "Keeps", "Keeps", "TensorHook", "TensorHook", "ModuleHooks", "SideLoss",
    "Leaves", "Takes", "Force", "Functional", "Numbered",
)  # fmt: skip
PLAIN_BRANCHES = (
    "Chain", "Chain", "Residual", "Parallel", "Twice", "NoGrad", "Detached", "Unused", "Dropped",
    "Method",
)  # fmt: skip
WRAPPER_OPTIONS: dict[str, tuple[Any, ...]] = {
    "reshard_after_forward": (True, True, False),
    "flatten_parameters": (False, False, False, True),
    "disable_reshard_on_root": (True, False),
    "compute_dtype": (None, None, None, None, torch.bfloat16, torch.float16, torch.float32),
    "fp32_reduce_scatter": (False, True),
    "shard_param_on_dim_0": (False, False, True),
    "coalesce_all_gather_ops": (True, True, False),
    "reduce_scatter_bucket_size_mb": (None, None, 0, 0.0001),
    "optimization_barrier_in_forward": (True, True, False),
    "optimization_barrier_in_backward": (True, True, False),
}
FULLY_SHARD_OPTIONS: dict[str, tuple[Any, ...]] = {
    "reshard_after_forward": (None, None, True, False),
    "compute_dtype": (None, None, None, torch.bfloat16),
    "reduce_dtype": (None, torch.float32),
}


def draw(seed: int) -> Recipe:
    """The first recipe of this seed that plain torch can train."""
    rng = random.Random(seed)
    while True:
        recipe = Drawing(rng).recipe()
        if is_trainable(recipe):
            return recipe


def is_trainable(recipe: Recipe) -> bool:
    """Whether the plain model runs, and every value is finite."""
    try:
        outcome = train_plain(recipe)
    except Exception:
        return False
    seen = [tensor for rank in outcome["seen"] for step in rank for tensor in step]
    found = [*seen, *outcome["grads"].values(), *outcome["state"].values()]
    return all(bool(torch.isfinite(tensor).all()) for tensor in found) and all(
        tensor.abs().max() < 1e4 for tensor in found if tensor.numel()
    )


class Drawing:
    """Draws one recipe."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._in_blocks = False

    def recipe(self) -> Recipe:
        rng = self._rng
        plan = self.branch(depth=2)
        door = rng.choice(("wrapper", "wrapper", "fully_shard"))
        of_door = WRAPPER_OPTIONS if door == "wrapper" else FULLY_SHARD_OPTIONS
        # Few at a time: most failures need one, and the defaults are what people use.
        options = {
            name: value
            for name, values in of_door.items()
            if rng.random() < 0.5 and (value := rng.choice(values)) != values[0]
        }
        recipe = Recipe(
            plan,
            width=rng.randint(4, 8),
            ranks=2,
            door=door,
            options=options,
            penalty=rng.random() < 0.12,
            forwards=2 if rng.random() < 0.15 else 1,
            steps=rng.choice((1, 2)),
        )
        return _allowed(recipe)

    def node(self, depth: int) -> Plan:
        return self.branch(depth - 1) if depth and self._rng.random() < 0.4 else self.leaf()

    def leaf(self) -> Plan:
        rng = self._rng
        kinds = rng.choice((SIMPLE, OLD, AWKWARD, AWKWARD, AWKWARD, REPEATS))
        kind = rng.choice(kinds)
        if kind in SLOW_TO_COMPILE and rng.random() < 0.5:
            kind = "Linear"
        if self._in_blocks and kind in REPEATS:
            kind = "Linear"
        low = kind in (*ANY_DTYPE, *REPEATS) and rng.random() < 0.15
        return Plan(
            kind,
            number=rng.randrange(len(VIEWS) if kind == "View" else 60),
            dtype=rng.choice(LOW) if low else "",
            frozen=rng.choice(("", "", "", "", "all", "first")),
            **self._placing(),
        )

    def branch(self, depth: int) -> Plan:
        rng = self._rng
        kind = rng.choice(
            (*PLAIN_BRANCHES, "Peeks", "Boxes", "Boxes", "Pairs", "Pairs", "Blocks", "Blocks")
        )
        if self._in_blocks and kind == "Blocks":
            kind = "Chain"
        if kind == "Blocks":
            return self._blocks(depth)
        body = {"Boxes": "FromBox", "Pairs": "OfPair"}.get(kind)
        children = [
            self._body(body, depth) if body else self.node(depth)
            for _ in range(rng.choice((1, 1, 2) if body else (1, 2, 2, 3)))
        ]
        return Plan(kind, tuple(children), number=rng.randrange(60), **self._placing(0.4))

    def _body(self, kind: str, depth: int) -> Plan:
        child = self.node(depth - 1 if depth else 0)
        return Plan(kind, (child,), number=self._rng.randrange(60), **self._placing(0.8))

    def _blocks(self, depth: int) -> Plan:
        rng, self._in_blocks = self._rng, True
        children = [
            replace(self.node(depth - 1 if depth else 0), unit=True)
            for _ in range(rng.choice((1, 1, 2)))
        ]
        self._in_blocks = False
        return Plan(
            "Blocks",
            tuple(children),
            number=rng.randrange(12),
            scan=rng.choice(("", "full", "full", "none", "stacked")),
            **self._placing(0.2),
        )

    def _placing(self, unit: float = 0.6) -> dict[str, Any]:
        rng = self._rng
        return {
            "unit": rng.random() < unit and not self._in_blocks,
            "remat": rng.choice(("", "", "", "inside", "outside")),
        }


def _allowed(recipe: Recipe) -> Recipe:
    """Without what the options of a recipe exclude."""
    options = dict(recipe.options)
    kinds = {plan.kind for plan in recipe.plans()}
    if options.get("flatten_parameters"):
        options.pop("shard_param_on_dim_0", None)
        if kinds & {*REPEATS} or any(plan.scan for plan in recipe.plans()):
            del options["flatten_parameters"]  # which is refused for parameters that units share
    if recipe.dtype is torch.float64:
        options.pop("compute_dtype", None)
        recipe = replace(recipe, plan=_in_full_precision(recipe.plan))
    return replace(recipe, options=options)


def _in_full_precision(plan: Plan) -> Plan:
    return replace(plan, dtype="", children=tuple(map(_in_full_precision, plan.children)))


# ---------------------------------------------------------------- running

ABORTED = "aborts: "


def outcomes(
    recipes: Sequence[Recipe], timeout: float = 900, env: Mapping[str, str] | None = None
) -> list[Any]:
    """What each recipe's ranks hold, or the text of what ended it; all recipes of one number of
    ranks share a launch; where one ends the process, another launch goes on."""
    found: dict[int, Any] = {}
    for num_ranks in sorted({recipe.ranks for recipe in recipes}):
        numbers = [at for at, recipe in enumerate(recipes) if recipe.ranks == num_ranks]
        while numbers:
            done = _launch(num_ranks, {at: recipes[at] for at in numbers}, timeout, env)
            last = list(done)[-1]
            if str(done[last]).startswith(ABORTED) and len(done) > 1:
                del done[last]  # perhaps by what another left: it comes first in the next launch
            found.update(done)
            numbers = [at for at in numbers if at not in done]
    return [found[at] for at in range(len(recipes))]


def _launch(
    num_ranks: int, recipes: dict[int, Recipe], timeout: float, env: Mapping[str, str] | None
) -> dict[int, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ended = ""
        try:
            run_on_ranks(_run_all, num_ranks, recipes, folder, timeout=timeout, env=env)
        except ChildError as error:
            ended = f"{ABORTED}{error}"
        done: dict[int, Any] = {}
        for at in recipes:
            files = [Path(folder, f"{at}-{rank}") for rank in range(num_ranks)]
            if not all(file.exists() for file in files):
                return {**done, at: ended or f"{ABORTED}without a word"}
            done[at] = _joined([pickle.loads(file.read_bytes()) for file in files])
        return done


def _joined(ranks: list[Any]) -> Any:
    errors = [rank for rank in ranks if isinstance(rank, str)]
    return errors[0] if errors else ranks


@functools.cache
def _meeting(folder: str, num_ranks: int) -> threading.Barrier:
    """Where the ranks of a launch, threads of one process, wait for each other; what a recipe that
    failed has left is then gone on all of them."""
    return threading.Barrier(num_ranks, action=gc.collect)


def _run_all(rank: int, recipes: dict[int, Recipe], folder: str) -> None:
    for at, recipe in recipes.items():
        _meeting(folder, recipe.ranks).wait()
        outcome = attempt(rank, recipe)
        path = Path(folder, f"{at}-{rank}")
        path.with_suffix(".part").write_bytes(pickle.dumps(outcome))
        path.with_suffix(".part").rename(path)


def attempt(rank: int, recipe: Recipe) -> Any:
    """What this rank holds, or a traceback; what fails on one rank fails on all, so that the next
    recipe can run."""
    try:
        return train_sharded(rank, recipe)
    except Exception:
        return f"raises: {traceback.format_exc()}"


@dataclass(frozen=True)
class Verdict:
    """What became of a recipe.

    Args:
        kind: "right", "refused", "wrong", "raises" or "aborts".
        what: the difference, or the error.
    """

    kind: str
    what: str = ""

    @property
    def is_failure(self) -> bool:
        return self.kind not in ("right", "refused")

    @property
    def sort(self) -> str:
        """Equal for failures that probably have one cause."""
        if self.kind != "raises":
            return self.kind
        return re.sub(r"\d+", "0", self.what.strip().splitlines()[-1])[:50]


def judge(recipe: Recipe, outcome: Any, rounding: Mapping[str, float] | None = None) -> Verdict:
    """Compare with the plain model, or look at the error."""
    if not isinstance(outcome, str):
        different = difference(recipe, outcome, rounding)
        return Verdict("wrong", different) if different else Verdict("right")
    kind, _, text = outcome.partition(": ")
    if kind == "raises" and (reason := refusal(recipe, text)):
        return Verdict("refused", reason)
    return Verdict(kind, text)


def refusal(recipe: Recipe, error: str) -> str:
    """Why the package refused, if this traceback ends in one of ``REFUSALS``; else ""."""
    last = error.strip().splitlines()[-1]
    own = features(recipe)
    known = (each for each in REFUSALS if own & {*each.features})
    return next((each.why for each in known if re.search(each.pattern, last)), "")


def verdicts(recipes: Sequence[Recipe], timeout: float = 900) -> list[Verdict]:
    """Run all, and judge all; what is wrong is judged again, by what rounding does to the model and
    by a program that was compiled as usual, as the options of the tests' compiler cost digits."""
    found = list(map(judge, recipes, outcomes(recipes, timeout)))
    wrong = [at for at, verdict in enumerate(found) if verdict.kind == "wrong"]
    again = [recipes[at] for at in wrong]
    for at, outcome in zip(wrong, outcomes(again, timeout, {"XLA_FLAGS": ""}), strict=True):
        found[at] = judge(recipes[at], outcome, effect_of_rounding(recipes[at]))
    return found


# ---------------------------------------------------------------- shrinking

SIMPLEST = Plan("Linear")
TRIES = 40


def smaller(recipe: Recipe) -> Iterator[Recipe]:
    """Recipes with one part less, the largest parts first."""
    for plan in _smaller_plans(recipe.plan):
        yield replace(recipe, plan=plan)
    for name in recipe.options:
        yield replace(recipe, options={k: v for k, v in recipe.options.items() if k != name})
    for name in ("penalty", "forwards", "door", "ranks", "width", "steps"):
        default = {"steps": 1, "width": 4}.get(name, _default(Recipe, name))
        if getattr(recipe, name) != default and (name != "door" or not recipe.options):
            yield replace(recipe, **{name: default})


def _smaller_plans(plan: Plan) -> Iterator[Plan]:
    whole = plan.kind not in ("FromBox", "OfPair")
    if whole:
        yield from (child for child in plan.children if child.kind not in ("FromBox", "OfPair"))
        yield from (each for child in plan.children for each in child.children)
    if plan.children and whole and plan != SIMPLEST:
        yield SIMPLEST
    for at in range(len(plan.children)):
        if len(plan.children) > 1:
            yield replace(plan, children=plan.children[:at] + plan.children[at + 1 :])
    for at, child in enumerate(plan.children):
        for each in _smaller_plans(child):
            yield replace(plan, children=(*plan.children[:at], each, *plan.children[at + 1 :]))
    for name in ("scan", "remat", "frozen", "dtype", "unit"):
        if getattr(plan, name):
            yield replace(plan, **{name: _default(Plan, name)})
    if plan.number >= 60 or (plan.number and not plan.children and plan.kind in SIMPLE):
        yield replace(plan, number=0)


def _default(cls: Any, name: str) -> Any:
    return next(each.default for each in dataclasses.fields(cls) if each.name == name)


def shrink(
    failures: Sequence[tuple[Recipe, Verdict]],
    judge_all: Callable[[Sequence[Recipe]], list[Verdict]] = verdicts,
    rounds: int = 12,
) -> list[tuple[Recipe, Verdict]]:
    """The smallest recipes found that still fail in the same way. A round tries what is one part
    smaller, ``TRIES`` of each, in one launch."""
    found = dict(enumerate(failures))
    waiting = list(found)
    for _ in range(rounds):
        tried = [
            (at, each)
            for at in waiting
            for each in islice(filter(is_trainable, smaller(found[at][0])), TRIES)
        ]
        judged = judge_all([recipe for _, recipe in tried])
        failing: dict[int, tuple[Recipe, Verdict]] = {}
        for (at, recipe), verdict in zip(tried, judged, strict=True):
            if verdict.sort == found[at][1].sort:
                failing.setdefault(at, (recipe, verdict))  # the first lacks the largest part
        if not failing:
            break
        found.update(failing)
        waiting = list(failing)
    return list(found.values())


# ---------------------------------------------------------------- as a script


def source(value: Any) -> str:
    """A Python expression, without what is as by default."""
    if isinstance(value, tuple):
        inner = ", ".join(map(source, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if not isinstance(value, Plan | Recipe):
        return repr(value)
    given = [
        f"{each.name}={source(getattr(value, each.name))}"
        for each in dataclasses.fields(value)
        if getattr(value, each.name) != each.default and getattr(value, each.name) != {}
    ]
    return f"{type(value).__name__}({', '.join(given)})"


def script(recipe: Recipe, verdict: Verdict) -> str:
    """A program that trains the recipe on CPU ranks and prints how it differs from the plain model;
    of ``random_models`` it has what it needs."""
    kinds = {{"Tied": "Linear", "TiedEmbedding": "Embedding", "Shared": "Linear"}.get(k, k) for k in
             (plan.kind for plan in recipe.plans())}  # fmt: skip
    needed = _definitions({*kinds, "check"})
    report = "\n".join(f"# {line}" for line in f"{verdict.kind}: {verdict.what}".splitlines()[-12:])
    return (
        f"{needed}\n\n{report}\nRECIPE = {source(recipe)}\n\n"
        f'if __name__ == "__main__":\n    print(check(RECIPE) or "as the plain model")\n'
    )


def _definitions(names: set[str]) -> str:
    """The statements of ``random_models`` that these names need, in their order."""
    text = inspect.getsource(random_models)
    statements = ast.parse(text).body
    needed: set[ast.stmt] = set()
    waiting = set(names)
    while waiting:
        found = [each for each in statements if each not in needed and _defined(each) & waiting]
        needed.update(found)
        waiting = {name for each in found for name in _used(each)}
    imports = [each for each in statements if isinstance(each, ast.Import | ast.ImportFrom)]
    wanted = sorted({*imports, *needed}, key=lambda each: each.lineno)
    return "\n\n".join(_text(text, each) for each in wanted)


def _text(text: str, statement: ast.stmt) -> str:
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *[each.lineno for each in decorators]])
    return "\n".join(text.splitlines()[first - 1 : statement.end_lineno])


def _defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        return {statement.name}
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    return {each.id for each in targets if isinstance(each, ast.Name)}


def _used(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
