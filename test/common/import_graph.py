"""Which modules of a package import which, read from their source and without importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

Graph = dict[str, set[str]]


def import_graph(package: Path) -> Graph:
    """Return what each module of ``package`` imports of it, wherever the import statement is.

    Imports inside functions and under ``TYPE_CHECKING`` count. ``from a import b`` is an import of
    ``a.b`` if that is a module, else of ``a``.
    """
    modules = {module_name(path, package): path for path in package.rglob("*.py")}
    return {
        name: {
            target
            for base, member in _imports(name, path)
            for target in [member if member in modules else base]
            if target in modules and target != name
        }
        for name, path in modules.items()
    }


def module_name(path: Path, package: Path) -> str:
    """Return the dotted name of a file in ``package``."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(graph: Graph) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    reached = {name: _reachable(graph, name) for name in graph}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in graph
        if name in reached[name]
    }
    return [list(group) for group in sorted(groups)]


def _reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for target in graph[waiting.pop()] - found:
            found.add(target)
            waiting.append(target)
    return found


def _imports(module: str, path: Path) -> Iterator[tuple[str, str]]:
    """Yield the module of each import statement, and the module joined with the imported name."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((base, f"{base}.{alias.name}") for alias in node.names)
