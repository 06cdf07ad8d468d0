"""What the real TPU compiler makes of a tensor-parallel transformer's step: memory and traffic."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from test.tpu_reports import reports
from test.tpu_tensor_steps import LENGTH, ROWS, VOCABULARY, WIDTH

pytest.importorskip("libtpu", reason="the TPU compiler: pip install 'xla_fsdp[preflight]'")
pytestmark = pytest.mark.slow

DEGREE, DEPTH = 4, 4
MESH = ("--topology", "v5e:2x4", "--mesh", f"shard=2,tensor={DEGREE}")
LOGITS = 2 * ROWS * LENGTH * VOCABULARY  # bytes of all of them, in bf16
STREAM = 2 * ROWS * LENGTH * WIDTH  # of what goes from block to block


def report(*, depth: int = 1, sequence: bool = True, loss: bool = True) -> dict[str, Any]:
    chosen = {"depth": depth, "sequence": sequence, "loss": loss}
    texts = {True: "on", False: "off"}
    words = [f"{name}={texts.get(value, value)}" for name, value in chosen.items()]
    [found] = reports(
        "test.tpu_tensor_steps:build", *MESH, *(w for word in words for w in ("--set", word))
    )
    return found


def held(found: dict[str, Any]) -> int:
    """Bytes beside parameters."""
    return found["memory"]["activations"] + found["memory"]["scratch"]


def test_loss_parallel_never_holds_all_logits() -> None:
    """Nobody has a tensor of that size; forward and backward hold slices of logits in fp32 and
    bf16, as without it wholes."""
    parallel, whole = report(), report(loss=False)
    assert held(parallel) < LOGITS
    assert held(whole) > LOGITS
    largest = max(each["nbytes"] for each in parallel["largest"])
    assert largest <= 2 * LOGITS / DEGREE  # a slice, in fp32
    assert max(each["nbytes"] for each in whole["largest"]) >= LOGITS


@pytest.mark.parametrize("sequence", [False, True])
def test_activations_between_blocks_shrink_by_the_degree(sequence: bool) -> None:
    """Of a rematerialized block, its input is kept."""
    few, many = (report(depth=depth, sequence=sequence) for depth in (1, DEPTH))
    kept = (held(many) - held(few)) / (DEPTH - 1)
    assert kept == pytest.approx(STREAM / (DEGREE if sequence else 1), rel=0.25)


def test_what_travels_along_the_sequence_is_gathered_and_reduce_scattered() -> None:
    """No all-reduce but those of norms and of the loss; overlapped as far as the compiler does."""
    sent: Counter[str] = Counter()
    for each in report()["traffic"]:
        if each["group_size"] == DEGREE:
            sent[each["kind"]] += each["wire_bytes"]
    assert set(sent) == {"all-gather", "reduce-scatter", "all-reduce"}
    assert sent["all-reduce"] < 0.01 * (sent["all-gather"] + sent["reduce-scatter"])
    assert any(each["overlapped"] for each in report()["traffic"] if each["group_size"] == DEGREE)
    assert any("the rest is activations" in finding for finding in report()["findings"])
