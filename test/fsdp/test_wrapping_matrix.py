"""Every way to wrap a model, on every number of ranks, saves what all others load, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from test.common.matrix import WRAPPINGS, fits, load_all, merged, pairs, save_all
from test.common.ranks import run_on_ranks

pytest.importorskip("peft", reason="adapters are one of the ways")


@pytest.mark.parametrize(
    ("kinds", "sizes"),
    [
        (("nested", "scan", "adapters"), (2, 3)),
        pytest.param(WRAPPINGS, (1, 2, 3, 4), marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_every_pair_of_save_and_load(
    kinds: tuple[str, ...], sizes: tuple[int, ...], tmp_path: Path
) -> None:
    for ranks in sizes:
        run_on_ranks(save_all, ranks, str(tmp_path), kinds, ranks)
    wrong = {
        f"{saved}-{size} merged": found
        for size in sizes
        for saved in kinds
        if fits(saved, size) and (found := merged(tmp_path, saved, size))
    }
    seen = []
    for ranks in sizes:
        for *pair, differs in run_on_ranks(load_all, ranks, str(tmp_path), kinds, sizes, ranks)[0]:
            seen.append(tuple(pair))
            if differs:
                wrong[str(pair)] = differs
    assert not wrong
    assert sorted(seen) == sorted(pairs(kinds, sizes))
