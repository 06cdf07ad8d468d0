"""The programs of training steps are those in the tree, which change for a reason only."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from test.common.ranks import ROOT, run_python, skip_without_torch_xla

SCRIPT = ROOT / "benchmarks" / "program_digests.py"


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("program_digests")


# Of the GPTs on a TPU's torus each takes a process of its own.
@pytest.mark.parametrize("parts", ["1,3,4", pytest.param("gpt", marks=pytest.mark.slow)])
def test_programs_are_those_in_the_tree(parts: str) -> None:
    skip_without_torch_xla()
    pytest.importorskip("jaxlib", reason="comes with the extra preflight; it reads programs")
    done = run_python(str(SCRIPT), "--only", parts)
    assert done.returncode == 0, (
        f"{done.stdout}{done.stderr}\nIf the change is meant, store it with its reason: "
        f'python benchmarks/program_digests.py --only {parts} --write --why "..."'
    )


def test_the_last_change_has_a_reason(digests: ModuleType) -> None:
    stored = json.loads(digests.STORED.read_text())
    assert stored["why"][-1].partition(" ")[0] == digests.seal(stored)
    stored["3 ranks"]["clip"] = "of another program"
    assert stored["why"][-1].partition(" ")[0] != digests.seal(stored)


def test_a_change_is_not_stored_without_one(
    digests: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = json.loads(digests.STORED.read_text())
    copy = tmp_path / "digests.json"
    copy.write_text(json.dumps(before))
    monkeypatch.setattr(digests, "STORED", copy)
    monkeypatch.setattr(
        digests, "_on_ranks", lambda count: {**before[f"{count} ranks"], "clip": "x"}
    )
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("XLA_FLAGS", "")
    write = ["--only", "3", "--write"]
    assert digests.main(write) == 1
    assert json.loads(copy.read_text()) == before
    assert digests.main([*write, "--why", "norms are summed first"]) == 0
    after = json.loads(copy.read_text())
    assert after["why"][-1] == f"{digests.seal(after)} norms are summed first (3 ranks: clip)"
    assert after["3 ranks"]["clip"] == "x"
    assert digests.main(write) == 0  # nothing differs any more, and nothing is to be told
