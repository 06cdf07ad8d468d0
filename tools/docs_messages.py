"""Write every message of the package into the page docs/messages.md, where the site is built.

mkdocs calls ``on_page_markdown`` (``hooks`` in mkdocs.yml). A message is a string of several words
that the package raises, warns of, or makes a part of such a string from; "…" stands for what is
filled in.
"""

from __future__ import annotations

import ast
import html
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "xla_fsdp"
PAGE, MARK = "messages.md", "<!-- messages -->"
ANY = "…"
FEWEST_WORDS = 4

SUBJECTS = (
    ("launch.py", "Ranks on a CPU", "cpu_ranks.md"),
    ("distributed/mesh.py", "Meshes and hybrid sharding", "meshes.md"),
    ("distributed/topology.py", "Meshes and hybrid sharding", "meshes.md"),
    ("distributed/context_parallel.py", "Attention without all scores", "attention.md"),
    ("distributed/", "Starting ranks, and what they do together", "cpu_ranks.md"),
    ("compat/", "Moving over", "moving.md"),
    ("fsdp/fsdp1", "FSDP1's options", "fsdp1.md"),
    ("fsdp/fully_shard.py", "fully_shard", "fully_shard.md"),
    ("fsdp/fsdp_module.py", "fully_shard", "fully_shard.md"),
    ("comm_hooks.py", "fully_shard", "fully_shard.md"),
    ("fsdp/init/from_checkpoint.py", "Models that are never whole", "meta.md"),
    ("fsdp/init/meta", "Models that are never whole", "meta.md"),
    ("state/train_checkpoint.py", "Checkpoints", "checkpoints.md"),
    ("state/checkpoint_manager.py", "Keeping checkpoints", "checkpoint_manager.md"),
    ("state/fsdp1", "FSDP1's options", "fsdp1.md"),
    ("state/", "State dicts", "state_dicts.md"),
    ("scan/", "One program for any depth", "scan.md"),
    ("nn/chunked/", "A head that is never whole", "chunked.md"),
    ("nn/attention/", "Attention without all scores", "attention.md"),
    ("integrations/attention.py", "Attention without all scores", "attention.md"),
    ("recipe/attention.py", "Attention without all scores", "attention.md"),
    ("compile/", "The whole step as one call", "compile_step.md"),
    ("fsdp/engine/", "Training", "training.md"),
    ("nn/", "Training", "training.md"),
    ("fsdp/", "The wrapper", "wrapper.md"),
    ("wrap.py", "The wrapper", "wrapper.md"),
    ("tensor_parallel/", "Tensor parallelism", "tensor_parallel.md"),
    ("optim/", "Optimizers", "optimizers.md"),
    ("integrations/", "Hugging Face and Lightning", "hugging_face.md"),
    ("recipe/", "One call", "parallelize.md"),
    ("preflight/", "Preflight and rehearsal", "preflight.md"),
    ("checkpoint/", "Checkpoint files", "checkpoint_files.md"),
    ("consolidate_sharded_ckpts.py", "Checkpoint files", "checkpoint_files.md"),
    ("", "Other messages", "troubleshooting.md"),
)
"""Beginning of a module's path, and title and page of its subject."""

# What these write are reports and pages.
_NO_MESSAGES = ("preflight/read/html.py", "preflight/read/report.py")

# Strings in these, and in the keywords of these names, are no messages.
_SKIPPED = (ast.Subscript, ast.Compare, ast.Assert)
_KEYWORDS = ("help", "description", "epilog", "usage", "metavar", "format")


@dataclass(frozen=True)
class Message:
    """A message, or a part of one.

    Attributes:
        kind: name of the exception's type; "" if it is put together elsewhere.
    """

    text: str
    kind: str
    module: str


def on_page_markdown(markdown: str, *, page: Any, **given: Any) -> str:
    """Put the messages into their page; mkdocs calls this for each page."""
    return markdown.replace(MARK, listing()) if page.file.src_uri == PAGE else markdown


def listing() -> str:
    """Return the messages as Markdown with HTML, by subject."""
    by_subject: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for each in messages():
        by_subject[_subject(each.module)].setdefault(each.text, each.kind)
    parts = []
    for subject in dict.fromkeys((title, page) for _, title, page in SUBJECTS):
        rows = "".join(
            f"<li><code>{html.escape(text)}</code>{f' ({kind})' if kind else ''}</li>\n"
            for text, kind in sorted(by_subject[subject].items())
        )
        if rows:
            title, page = subject
            parts.append(f"## {title}\n\nGuide: [{title}]({page}).\n\n<ul>\n{rows}</ul>\n")
    return "\n".join(parts)


def _subject(module: str) -> tuple[str, str]:
    return next((title, page) for begin, title, page in SUBJECTS if module.startswith(begin))


def messages() -> Iterator[Message]:
    """Yield all messages of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).as_posix()
        if module not in _NO_MESSAGES:
            for text, kind in _strings(ast.parse(path.read_text()), ""):
                if len(text.split()) >= FEWEST_WORDS:
                    yield Message(" ".join(text.split()), kind, module)


def _strings(node: ast.AST, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the strings in a piece of code, but for docstrings, with what is raised with them."""
    if isinstance(node, _SKIPPED) or (isinstance(node, ast.keyword) and node.arg in _KEYWORDS):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        kind = ast.unparse(node.exc.func).rpartition(".")[2]
    text = text_of(node)
    if text:
        yield text, kind
    if isinstance(node, ast.JoinedStr):  # what is filled in may hold strings of its own
        children: Iterable[ast.AST] = [each for each in node.values if not text_of(each)]
    else:
        children = () if text else ast.iter_child_nodes(node)
    for child in children:
        yield from _strings(child, kind)


def text_of(node: ast.AST) -> str:
    """Return the text of a string, with "…" for what is filled in; "" for anything else."""
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else ANY for part in node.values)
        return "".join(map(str, parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return left + right if left and right else ""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
