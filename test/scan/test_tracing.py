"""What a block leaves behind when it is traced."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from xla_fsdp.scan import tracing
from xla_fsdp.scan.tracing import MadeTensors


def made_and_dropped_after(seconds: float) -> MadeTensors:
    """Of a function whose result another thread drops so much later."""
    made = MadeTensors()
    with made:
        kept = [torch.ones(2) * 2]

    def drop() -> None:
        time.sleep(seconds)
        kept.clear()

    threading.Thread(target=drop).start()
    return made


def test_what_a_thread_of_autograd_drops_a_moment_later_is_not_left_behind() -> None:
    assert made_and_dropped_after(2.5).problem() is None


def test_what_stays_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "PATIENCE", 0.1)
    made = MadeTensors()
    with made:
        kept = torch.ones(2, 3) * 2
    assert "a tensor of shape [2, 3]" in (made.problem() or "")
    assert kept.sum() == 12
