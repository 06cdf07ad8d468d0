"""examples/llm: a small Llama on 2 CPU ranks, with replayed and with traced steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from test.common.ranks import run_python

SMALL = ("--num_ranks=2", "--width=16", "--blocks=2", "--heads=2", "--kv_heads=1", "--ffn=32")
SHORT = ("--length=16", "--batch_size=2", "--steps=8", "--log_steps=1", "--generate=3")


def losses(text: Path, *more: str) -> list[float]:
    """Train; return the losses that are printed."""
    job = ("examples/llm/train.py", f"--text={text}", *SMALL, *SHORT, *more)
    done = run_python(*job, timeout=600)
    assert done.returncode == 0, done.stderr
    return [float(each) for each in re.findall(r"loss ([\d.]+)", done.stdout)]


@pytest.mark.slow
def test_replayed_steps_have_the_losses_of_traced_ones(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"a rank gathers what it needs, and scatters what it has. " * 20)
    found = losses(text)
    assert len(found) == 8
    assert found[-1] < found[0]
    assert found == losses(text, "--no_compile_step")
