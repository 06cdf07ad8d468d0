"""Command lines in documents and at the head of scripts are accepted by the scripts' own parsers.

A child imports each script and runs it until its command line has been parsed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from test.common.ranks import ROOT, run_warm

_COMMAND = re.compile(
    r"python ((?:-m xla_fsdp[\w.]*|(?:examples|tools|benchmarks)/\S+py) [^\n&;`]*)"
)
_QUOTED = re.compile(r"--command[= ]\"([^\"]*)\"")  # for another machine
ELLIPSIS = "..."
SCRIPTS = ("examples/imagenet/train.py", "examples/mnist/train.py", "examples/llm/train.py")


def commands() -> list[tuple[str, str]]:
    """Every command and the file that it is in."""
    documents = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    documents += [*ROOT.glob("examples/*/*.md"), *ROOT.glob("examples/*/*.py")]
    found: dict[str, str] = {}
    for path in sorted(documents):
        text = re.sub(r"\s*\\\n\s*", " ", path.read_text())
        text = _QUOTED.sub(r"\n\1\n", text)
        for match in _COMMAND.finditer(text):
            found.setdefault(match[1].strip(), str(path.relative_to(ROOT)))
    return list(found.items())


class _ParsedError(Exception):
    """The command line was taken."""


def complaint(command: str) -> str:
    """What a script says against a command, "" for nothing; run in the child."""
    words = [each for each in shlex.split(command, comments=True) if each != ELLIPSIS]
    parser = argparse.ArgumentParser

    def and_leave(parse: Any) -> Any:
        def parse_and_leave(*args: Any, **kwargs: Any) -> Any:
            parse(*args, **kwargs)
            raise _ParsedError

        return parse_and_leave

    said, run = io.StringIO(), runpy.run_path
    if words[0] == "-m":
        words, run = words[1:], runpy.run_module
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(said),
        mock.patch.object(parser, "parse_args", and_leave(parser.parse_args)),
        mock.patch.object(parser, "parse_intermixed_args", and_leave(parser.parse_intermixed_args)),
        mock.patch.object(sys, "argv", words),
        mock.patch.object(sys, "path", [str(Path(words[0]).parent), *sys.path]),
    ):
        try:
            run(words[0], run_name="__main__")
        except _ParsedError:
            return ""
        except SystemExit as ended:
            return said.getvalue() if ended.code else ""
        finally:
            _forget_examples()
    return "parsed nothing"


def _forget_examples() -> None:
    """Names like ``job`` are those of modules of several examples."""
    for name, module in list(sys.modules.items()):
        if str(ROOT / "examples") in str(getattr(module, "__file__", "")):
            del sys.modules[name]


def test_documents_show_commands_that_exist() -> None:
    found = commands()
    assert {name for name in SCRIPTS if any(name in each for each, _ in found)} == set(SCRIPTS)
    done = run_warm("-m", "test.test_commands")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}


if __name__ == "__main__":
    wrong = {}
    for each, place in commands():
        if said := complaint(each):
            wrong[f"{place}: python {each}"] = said
    print(json.dumps(wrong))
