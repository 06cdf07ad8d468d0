"""Steps of the benchmark's GPT, for tests that ask the TPU compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from test.common.ranks import ROOT


def build(program: str, blocks: int = 24, width: int = 1024) -> Callable[[], Any]:
    """A step of the GPT as ``benchmarks/gpt.py`` wraps it.

    Args:
        program: name of a function there.
        blocks: number of blocks.
        width: of the model.
    """
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import gpt

    return getattr(gpt, program)(gpt.Shape(width, blocks))
