"""What contributors are told to run exists, and is what CI runs."""

from __future__ import annotations

import re
import subprocess

import pytest

from test.common.ranks import ROOT

yaml = pytest.importorskip("yaml", reason="comes with the extra docs")

GUIDE = (ROOT / "CONTRIBUTING.md").read_text()


def test_ci_runs_what_anyone_can_run() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    commands = [each["run"] for each in workflow["jobs"]["test"]["steps"] if "run" in each]
    assert commands == [".ci/run"]
    script = (ROOT / ".ci/run").read_text()
    made = [each for each in re.findall(r"^make (\S+)", script, re.MULTILINE) if not makes(each)]
    assert made == []


def test_hooks_are_the_tools_of_the_environment() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    entries = {hook["entry"].split()[0] for each in config["repos"] for hook in each["hooks"]}
    assert entries == {".venv/bin/ruff", "make"}
    assert {each["repo"] for each in config["repos"]} == {"local"}


def test_the_guide_names_what_there_is() -> None:
    made = re.findall(r"`?make ([\w-]+)", GUIDE)
    assert {"setup", "lint", "docs", "package", "test"} <= {*made}
    assert [each for each in made if not makes(each)] == []
    places = re.findall(r"\]\(([\w/.]+\.md)", GUIDE) + re.findall(r"(?<![\w/])test/[\w/.]+", GUIDE)
    assert [each for each in places if not (ROOT / each).exists()] == []
    assert len(places) > 5


def makes(target: str) -> bool:
    """Whether the Makefile has a target."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True)
    return done.returncode == 0
