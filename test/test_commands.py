"""Command lines in documents and at the head of scripts are accepted by the scripts' own parsers; a
shell runs those of README, docs/ and the examples' READMEs, page by page.

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

import pytest
import torch
from torch import nn

from test.common.documented import page_names, run_script, script_of
from test.common.ranks import ROOT, run_on_ranks, run_warm

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


# ---------------------------------------------------------------- pages, run by a shell


@pytest.mark.parametrize("page", page_names())
def test_every_command_of_a_page_is_known(page: str, tmp_path: Path) -> None:
    code, log, said = run_script(script_of(ROOT / page), tmp_path, run=False)
    assert [line for line in log if not line.startswith("0 ")] == [], said
    assert (code, bool(log)) == (0, True), said


SAVED = {f"docs/{name}.md" for name in ("checkpoint_files", "checkpoint_manager", "object_stores")}
SAVED |= {"docs/moving.md"}
"""Pages whose commands read a run."""


def save_runs(rank: int, folder: str) -> None:
    """Save into ``run`` there, in its own format and in torch_xla's, and into a bucket; and as DCP
    does into ``dcp``."""
    from test.common.scenarios import fsdp
    from xla_fsdp import one_rank_at_a_time, save_checkpoint
    from xla_fsdp.consolidate_sharded_ckpts import main as consolidate

    torch.manual_seed(0)
    model: Any = fsdp(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    optimizer = torch.optim.AdamW(model.parameters())
    for place in (f"{folder}/run", "gs://bucket/run"):
        save_checkpoint(place, model, optimizer, step=1)
    content = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
    torch.save(content, f"{folder}/run/model_rank-{rank}-of-2.pth")
    with one_rank_at_a_time():
        if rank == 0:
            consolidate(["convert", f"{folder}/run", "--to", "dcp", "--save_path", f"{folder}/dcp"])


TRAIN = """
import torch
import torch_xla
from torch import nn

from xla_fsdp import launch, parallelize


def build_step(recipe="plain", batch=1, depth=2, length=16, remat=True, mesh=None):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(depth)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    adamw = lambda params: torch.optim.AdamW(params)
    torch.manual_seed(0)
    model, optimizer, _ = parallelize(Model(), adamw, recipe, mesh=mesh)
    x = torch.ones(batch, length, 64).to(torch_xla.device())

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()

    return step


if __name__ == "__main__":
    launch(lambda rank: build_step()(), num_ranks=2)
"""
SCRIPT = """
import torch_xla

if __name__ == "__main__":
    torch_xla.launch(lambda rank: print(rank, torch_xla.device()))
"""


def write_given_files(folder: Path, script: str) -> None:
    """The programs that pages take for given, and that which ``first_model.md`` shows."""
    if re.search(r"[ \"]train(\.py|:)", script):  # else it hides those of examples
        (folder / "train.py").write_text(TRAIN)
    (folder / "script.py").write_text(SCRIPT)
    shown = (ROOT / "docs" / "first_model.md").read_text()
    first = re.search(r"```python\n(.*?)```", shown, re.DOTALL)
    assert first is not None
    (folder / "first.py").write_text(first[1])


@pytest.mark.slow
@pytest.mark.parametrize("page", page_names())
def test_the_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    pytest.importorskip("gcp_storage_emulator", reason="comes with the extra dev")
    from test.common.buckets import known_bucket

    script = script_of(ROOT / page)
    write_given_files(tmp_path, script)
    with known_bucket():
        if page in SAVED:
            run_on_ranks(save_runs, 2, str(tmp_path))
        code, log, said = run_script(script, tmp_path, run=True)
    assert [line for line in log if not line.startswith("0 ")] == [], said
    assert code == 0, said


if __name__ == "__main__":
    wrong = {}
    for each, place in commands():
        if said := complaint(each):
            wrong[f"{place}: python {each}"] = said
    print(json.dumps(wrong))
