"""What the README shows runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from test.common.ranks import run_warm
from xla_fsdp.integrations import UntestedVersionError, require


def test_the_snippets_on_moving_over_run(tmp_path: Path) -> None:
    done = run_warm("-m", "test.common.readme_snippets", str(tmp_path), "moving")
    assert done.stdout.strip().endswith("all ran"), done.stderr


@pytest.mark.slow
def test_the_snippets_for_hugging_face_run(tmp_path: Path) -> None:
    try:
        require("transformers", "accelerate")
    except UntestedVersionError as error:
        pytest.skip(str(error))
    done = run_warm("-m", "test.common.readme_snippets", str(tmp_path), "hugging_face")
    assert done.stdout.strip().endswith("all ran"), done.stderr
