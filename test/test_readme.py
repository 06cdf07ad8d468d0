"""What the README shows runs."""

from __future__ import annotations

from pathlib import Path

from test.ranks import run_python


def test_the_snippets_on_moving_over_run(tmp_path: Path) -> None:
    done = run_python("-m", "test.readme_snippets", str(tmp_path))
    assert done.stdout.strip().endswith("all ran"), done.stderr
