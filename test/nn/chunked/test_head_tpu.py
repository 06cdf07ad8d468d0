"""What the real TPU compiler makes of a head that streams its weight and logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from test.common.ranks import run_python
from test.common.tpu_reports import counts, reports

pytest.importorskip("libtpu", reason="the TPU compiler: pip install '.[preflight]'")
pytestmark = pytest.mark.slow

TARGET = "test.common.tpu_steps:build_streamed"
WIDTH, CLASSES, ROWS = 512, 65536, 1024  # those of the target
WEIGHT, LOGITS = 2 * CLASSES * WIDTH, 2 * CLASSES * ROWS  # bytes, in bf16
MIB = 2**20


def streamed(pieces: int) -> dict[str, Any]:
    """With 1 it is gathered whole, with 0 in pieces of the size that is usual."""
    for found in reports(TARGET, "--sweep", "pieces=0,1,32"):
        if found["options"]["pieces"] == pieces:
            return found
    raise AssertionError(f"no report for {pieces} pieces")


def temporaries(pieces: int) -> int:
    memory = streamed(pieces)["memory"]
    return memory["gathered_parameters"] + memory["activations"] + memory["scratch"]


@pytest.mark.parametrize("pieces", [0, 32])
def test_neither_the_weight_nor_the_logits_are_ever_whole(pieces: int) -> None:
    # All buffers together are smaller, so no single one is as large.
    assert temporaries(pieces) < min(WEIGHT, LOGITS)
    assert temporaries(1) > WEIGHT + LOGITS
    assert streamed(pieces)["full_parameters"] < WEIGHT / 2


@pytest.mark.parametrize("pieces", [0, 32])
def test_no_more_is_sent_than_necessary_and_most_of_it_hidden(pieces: int) -> None:
    found = streamed(pieces)
    assert counts(found)["all-reduce"] == 0
    assert {each["dtype"] for each in found["traffic"]} == {"bf16"}
    assert found["wire_bytes"] <= 1.05 * found["minimum_wire_bytes"]
    gathered = {
        overlapped: sum(
            each["wire_bytes"]
            for each in found["traffic"]
            if each["kind"] == "all-gather" and each["overlapped"] is overlapped
        )
        for overlapped in (True, False)
    }
    assert gathered[True] >= 0.9 * 2 * WEIGHT * 15 / 16


def test_the_program_does_not_grow_with_the_number_of_pieces() -> None:
    few, many = streamed(0), streamed(32)
    programs = [len(each["timeline"]["spans"]) for each in (few, many)]
    assert programs[0] == programs[1]
    assert many["memory"]["code"] < few["memory"]["code"] + MIB


def test_no_gathered_piece_is_copied(tmp_path: Path) -> None:
    done = run_python("-m", "test.common.tpu_schedules", str(tmp_path), "head", timeout=900)
    assert done.returncode == 0, done.stderr
    [line] = (each for each in done.stdout.splitlines() if each.startswith("{"))
    assert json.loads(line)["copied"] < WEIGHT / 32
