"""What the README and the pages of docs/ say holds: code runs, messages and names exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from test.common.ranks import ROOT, run_warm
from tools.docs_messages import messages, text_of
from xla_fsdp.integrations import UntestedVersionError, require

PACKAGE = ROOT / "xla_fsdp"
ANY = "…"
MESSAGES = re.compile(r"^### `(.*)`$", re.MULTILINE)
OBJECTS = re.compile(r"^::: (\S+)$", re.MULTILINE)
PUBLIC = ("", "optim", "tensor_parallel", "checkpoint", "preflight")
LONGEST_README = 200
SHORT = 3
"""Messages of so few words are names alone."""

TORCHS = frozenset(dir(nn.Module)) | frozenset(dir(torch.optim.Optimizer))
"""Methods of these names do what torch's own documentation says."""


@pytest.mark.parametrize("ranks", ["2", "4"])
def test_the_code_on_the_pages_runs(ranks: str, tmp_path: Path) -> None:
    done = run_warm("-m", "test.common.docs_snippets", str(tmp_path), ranks)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(" 0 failed")


@pytest.mark.slow
def test_the_code_for_hugging_face_runs(tmp_path: Path) -> None:
    try:
        require("transformers", "accelerate")
    except UntestedVersionError as error:
        pytest.skip(str(error))
    done = run_warm("-m", "test.common.docs_snippets", str(tmp_path), "slow")
    assert done.returncode == 0, done.stderr
    assert Path(tmp_path, "merged", "model.safetensors").is_file()
    assert Path(tmp_path, "state", "xla_fsdp").is_dir()
    assert Path(tmp_path, "model", "model.safetensors").is_file()


@pytest.mark.slow
def test_the_code_for_four_ranks_and_hugging_face_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    done = run_warm("-m", "test.common.docs_snippets", str(tmp_path), "slow4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("1 ran, 0 failed")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LONGEST_README


def test_pages_and_messages_say_what_can_be_installed_today() -> None:
    """Nothing is on a package index; the page index.md says what will do once it is."""
    published = re.compile(r"pip install ['\"]?xla_fsdp")
    places = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *PACKAGE.rglob("*.py")]
    found = {path.name for path in places if published.search(path.read_text())}
    assert found == {"index.md"}


def test_messages_under_troubleshooting_are_those_of_the_package() -> None:
    shown = MESSAGES.findall((ROOT / "docs" / "troubleshooting.md").read_text())
    assert len(shown) > 50
    known = "\n".join(texts())
    assert [each for each in shown if each not in known] == []


def test_every_message_has_an_entry() -> None:
    listed = {each.text for each in messages()}
    raised = [
        " ".join(text_of(argument).split())
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        for argument in node.exc.args
    ]
    sentences = {each for each in raised if len(each.split()) > SHORT}
    assert len(sentences) > 300
    assert sentences - listed == set()


def texts() -> Iterator[str]:
    """Every string of the package, with "…" for what is filled in."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    part.value if isinstance(part, ast.Constant) else ANY for part in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join(path.read_text() for path in ROOT.glob("docs/reference/*.md"))
    there = {name.rpartition(".")[2] for name in OBJECTS.findall(text)}
    there |= set(re.findall(r"`(\w+)`", text))  # torch's own classes
    assert {name for part in PUBLIC for name in public_names(part)} - there == set()


def test_every_public_name_has_a_docstring() -> None:
    griffe = pytest.importorskip("griffe", reason="comes with the extra docs")
    package = griffe.load("xla_fsdp", search_paths=[str(ROOT)], resolve_aliases=True)
    names = [
        name.removeprefix("xla_fsdp.")
        for path in ROOT.glob("docs/reference/*.md")
        for name in OBJECTS.findall(path.read_text())
    ]
    assert [each for name in names for each in undocumented(package[name])] == []


def undocumented(found: Any) -> Iterator[str]:
    """Names of an object, and of what can be called in it, that have no docstring."""
    each = found.final_target if found.is_alias else found
    if not each.docstring:
        yield each.path
    own = each.members.values() if each.is_class else ()
    for member in own:
        if member.name.startswith("_") or member.is_alias or member.name in TORCHS:
            continue
        of_bases = (base.members.get(member.name) for base in each.mro())
        called = member.is_function or "property" in member.labels
        if called and not any(at and at.docstring for at in (member, *of_bases)):
            yield member.path


def public_names(part: str) -> Iterator[str]:
    """Names that a package exports: in its stub, or in ``__all__``."""
    folder = PACKAGE / part
    stub = folder / "__init__.pyi"
    tree = ast.parse((stub if stub.exists() else folder / "__init__.py").read_text())
    for node in tree.body:
        if stub.exists() and isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            yield from ast.literal_eval(node.value)
