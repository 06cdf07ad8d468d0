"""Files are read and written on macOS as on Linux: nothing is called that only Linux has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.common.ranks import ROOT

COMMANDS = [
    *(ROOT / "xla_fsdp/checkpoint").glob("*.py"),
    ROOT / "xla_fsdp/consolidate_sharded_ckpts.py",
]
MODULES = ("os", "fcntl", "signal", "shutil", "socket", "resource", "mmap", "select", "time")


def holds(test: ast.expr, platform: str) -> bool:
    """Whether a condition of a stub holds; versions of Python are new enough."""
    if isinstance(test, ast.BoolOp):
        each = [holds(value, platform) for value in test.values]
        return all(each) if isinstance(test.op, ast.And) else any(each)
    text = ast.unparse(test).replace("sys.platform", repr(platform))
    return "version_info" in text or bool(eval(text, {"sys": None}))


def names_in(body: list[ast.stmt], platform: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.If):
            yield from names_in(node.body if holds(node.test, platform) else node.orelse, platform)
        elif isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (each.asname or each.name for each in node.names)


def only_on_linux(module: str) -> set[str]:
    """Names of a module of the standard library that macOS lacks, as mypy's stubs have them."""
    mypy = pytest.importorskip("mypy", reason="its stubs say what each platform has")
    stubs = Path(mypy.__file__).parent / "typeshed" / "stdlib"
    found = [stubs / module / "__init__.pyi", stubs / f"{module}.pyi"]
    body = ast.parse(next(path for path in found if path.exists()).read_text()).body
    return set(names_in(body, "linux")) - set(names_in(body, "darwin"))


def unguarded(node: ast.AST) -> Iterator[str]:
    """``module.name`` wherever it is used, but under an ``if hasattr(module, ...)``."""
    if isinstance(node, ast.Attribute):
        yield ast.unparse(node)
    guard = isinstance(node, ast.If) and ast.unparse(node.test).startswith("hasattr(")
    for child in node.orelse if guard else ast.iter_child_nodes(node):
        yield from unguarded(child)


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_used_that_only_linux_has(module: str) -> None:
    absent = {f"{module}.{name}" for name in only_on_linux(module)}
    for path in COMMANDS:
        tree = ast.parse(path.read_text())
        assert not absent & set(unguarded(tree)), path


def test_no_file_is_asked_for_that_only_linux_has() -> None:
    for path in COMMANDS:
        strings = [
            n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)
        ]
        assert not [s for s in strings if str(s).startswith(("/proc/", "/sys/", "/dev/shm"))], path


def test_the_stubs_tell() -> None:
    assert {"posix_fadvise", "sched_setaffinity", "O_DIRECT"} <= only_on_linux("os")
    assert not {"fsync", "replace", "pwrite"} & only_on_linux("os")
    assert set(unguarded(ast.parse("if hasattr(os, 'x'):\n    os.x\nos.y"))) == {"os.y"}
