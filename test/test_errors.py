"""Which code of the package takes every error, whatever it is."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.common.ranks import ROOT

PACKAGE = ROOT / "xla_fsdp"
ALL = ("Exception", "BaseException")

# They put something back, or tell it, and raise the error again.
RAISE_AGAIN = {
    "checkpoint/files/remote_storage.py _write",
    "checkpoint/files/remote_storage.py write",
    "checkpoint/files/tensor_source.py get",
    "xla/cpu_rank_patches.py running",
    "xla/loop.py _without_values",
    "nn/activation_checkpoint.py _run_again",
    "fsdp/engine/inputs.py call",
    "fsdp/engine/state.py _compute",
    "compile/trace.py run",
    "preflight/search/trials.py run",
}
# The error ends there, or becomes another one; a comment at each says why it can be any.
TAKE_ALL = {
    "checkpoint/convert/dcp_files.py _checked_metadata": 1,
    "checkpoint/convert/dcp_files.py _item": 1,
    "checkpoint/files/remote_storage.py _write": 2,
    "checkpoint/files/remote_storage.py _write_parts": 1,
    "checkpoint/files/remote_storage.py repeat": 1,
    "checkpoint/files/remote_storage.py write": 1,
    "checkpoint/steps/save_step.py _work": 1,
    "checkpoint/steps/save_step.py _tidy": 1,
    "checkpoint/steps/save_step.py failing_together": 1,
    "checkpoint/files/torch_file.py read_torch": 1,
    "distributed/cpu_ranks.py _attempt": 1,
    "xla/cpu_rank_patches.py __iter__": 1,
    "xla/worker.py _answer": 1,
    "xla/worker.py call": 1,
    "optim/optimizers.py acts_elementwise": 1,
    "state/train_checkpoint.py _naming": 1,
    "state/train_checkpoint.py read_state": 1,
    "state/train_checkpoint.py start_save": 1,
    "launch.py _run_once": 1,
    "preflight/__main__.py _attempt": 1,
    "preflight/api.py fastest": 1,
    "preflight/compile/child.py serve": 1,
    "preflight/compile/compile_child.py scheduled": 1,
    "preflight/rehearse/rehearsal.py _plain_steps": 1,
    "preflight/search/trials.py _compile": 1,
    "preflight/search/trials.py trace": 1,
    "recipe/causal_lm.py why_all_scores": 1,
    "recipe/causal_lm.py why_not_streamed": 1,
    "scan/automatic.py run": 1,
}


def takes_all(kind: ast.expr | None) -> bool:
    """Return whether an error class, or one of several, is that of all errors."""
    if isinstance(kind, ast.Tuple):
        return any(map(takes_all, kind.elts))
    return kind is None or (isinstance(kind, ast.Name) and kind.id in ALL)


def raises_again(handler: ast.ExceptHandler) -> bool:
    """Return whether nothing but ``raise`` ends a handler."""
    ends = [each for each in ast.walk(handler) if isinstance(each, ast.Return)]
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None and not ends


def places(tree: ast.AST, function: str = "") -> Iterator[tuple[str, int, bool]]:
    """Yield function, line, and whether the error is raised again, of everything that takes all
    errors."""
    for node in ast.iter_child_nodes(tree):
        inner = node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else function
        if isinstance(node, ast.ExceptHandler) and takes_all(node.type):
            yield function, node.lineno, raises_again(node)
        called = node.func if isinstance(node, ast.Call) else None
        name = getattr(called, "attr", getattr(called, "id", None))
        if name == "suppress" and any(map(takes_all, node.args)):
            yield function, node.lineno, False
        yield from places(node, inner)


def found(*, again: bool) -> Iterator[tuple[Path, str, int]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for function, line, raises in places(ast.parse(path.read_text())):
            if raises == again:
                yield path, f"{path.relative_to(PACKAGE).as_posix()} {function}", line


def test_who_raises_every_error_again() -> None:
    assert {place for _, place, _ in found(again=True)} == RAISE_AGAIN


def test_who_takes_every_error() -> None:
    assert Counter(place for _, place, _ in found(again=False)) == TAKE_ALL


def test_who_takes_every_error_says_why() -> None:
    for path, place, line in found(again=False):
        lines = path.read_text().splitlines()
        above, here, below = lines[line - 2 : line + 1]
        says = "  # " in here or any(each.lstrip().startswith("#") for each in (above, below))
        assert says, f"{place} (line {line}) has no comment that says why it takes every error"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("except ValueError: pass", []),
        ("except: pass", [("f", 3, False)]),
        ("except (OSError, Exception): raise", [("f", 3, True)]),
        ("except Exception as error: raise RuntimeError from error", [("f", 3, False)]),
        ("except BaseException:\n  if f: return\n  raise", [("f", 3, False)]),
        ("except OSError:\n  with contextlib.suppress(Exception): pass", [("f", 4, False)]),
    ],
)
def test_what_takes_every_error(code: str, expected: list[tuple[str, int, bool]]) -> None:
    lines = code.replace("\n", "\n ")
    assert list(places(ast.parse(f"def f():\n try: pass\n {lines}"))) == expected
