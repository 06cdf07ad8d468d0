"""What the real TPU compiler makes of blocks that run as one loop: the same for any depth."""

from __future__ import annotations

from typing import Any

import pytest

from test.test_graph_tpu import BLOCK, ROOT, TARGET, counts
from test.tpu_reports import reports

pytest.importorskip("libtpu", reason="the TPU compiler: pip install 'xla_fsdp[preflight]'")
pytestmark = pytest.mark.slow

DEPTHS = (4, 24, 48)
MIB = 2**20


def at_depths() -> dict[int, dict[str, Any]]:
    found = reports(TARGET, "--set", "scan=on", "--sweep", f"depth={','.join(map(str, DEPTHS))}")
    return {each["options"]["depth"]: each for each in found}


def test_code_and_collectives_do_not_grow_with_depth() -> None:
    found = at_depths()
    code = [found[depth]["memory"]["code"] for depth in DEPTHS]
    assert max(code) <= 1.1 * min(code) + MIB
    programs = {depth: len(found[depth]["timeline"]["spans"]) for depth in DEPTHS}
    assert len(set(programs.values())) == 1, programs


def test_a_loop_sends_what_single_blocks_send() -> None:
    for found in at_depths().values():
        assert counts(found)["all-reduce"] == 0
        assert found["wire_bytes"] <= 1.1 * found["minimum_wire_bytes"]
        # The root's, and those of the block that computes and the one that is gathered ahead.
        assert found["full_parameters"] <= 1.2 * (ROOT + 2 * BLOCK)
