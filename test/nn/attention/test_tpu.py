"""What the TPU compiler makes of attention kernels."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from test.common.ranks import run_python
from test.common.tpu_reports import counts, reports

pytest.importorskip("libtpu", reason="the TPU compiler: pip install '.[preflight]'")
pytestmark = pytest.mark.slow

CHIPS = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2")
BUILD = "test.common.tpu_attention:build"


def by_option(option: str, values: tuple[str, ...], *arguments: str) -> dict[str, dict[str, Any]]:
    found = reports(BUILD, "--sweep", f"{option}={','.join(values)}", *arguments)
    return {str(each["options"][option]): each for each in found}


@pytest.mark.parametrize("chip", CHIPS)
def test_every_kind_compiles_for_every_chip(chip: str) -> None:
    kinds = ("every", "loop", "flash", "splash")
    assert set(by_option("kind", kinds, "--topology", chip)) == set(kinds)


def test_memory_is_linear_in_the_length() -> None:
    at = ("--topology", "v5e:2x2", "--set", "kind=loop")
    peak = {
        length: each["peak_bytes"]
        for length, each in by_option("length", ("8192", "16384", "32768", "65536"), *at).items()
    }
    # Of shorter sequences up to 128 MiB are in the chip's vector memory, and not in the peak.
    first, second = peak["32768"] - peak["16384"], peak["65536"] - peak["32768"]
    assert second < 2.2 * first
    [plain] = reports(BUILD, "--topology", "v5e:2x2", "--set", "kind=plain", "--set", "length=8192")
    assert peak["8192"] < 0.2 * plain["peak_bytes"]


def test_products_in_the_kernel_are_counted() -> None:
    at = ("--topology", "v5e:2x2", "--set", "length=2048")
    found = {
        kind: each["step_time"]["model_flops"]
        for kind, each in by_option("kind", ("loop", "plain"), *at).items()
    }
    # Of a causal mask only the half that is not masked, and the blocks on the diagonal.
    layers, heads, length, size = 2, 8, 2048, 128
    scores = 3 * layers * 2 * (2 * heads * size * length**2)
    projections = found["plain"] - scores
    assert found["loop"] - projections == pytest.approx(0.625 * scores, rel=0.01)


def choices(cache_dir: str) -> dict[str, Any]:
    """What ``preflight`` says of the ways over a context, and ``fastest``; run in a child."""
    from functools import partial

    from test.common.tpu_attention import build
    from xla_fsdp.preflight import fastest, preflight

    where: dict[str, Any] = {"topology": "v5e:2x2", "cache_dir": cache_dir}
    ways, four = ["ring", "ulysses"], {"context": 4}
    say = partial(preflight, build, kind="wide", mesh=four, **where)
    choose = partial(fastest, build, {"method": ways}, mesh=four, **where)
    found = {way: say(method=way) for way in ways}
    found |= {kind: choose(kind=kind) for kind in ("wide", "loop")}
    return {name: json.loads(each.to_json()) for name, each in found.items()}


def test_the_fastest_way_over_a_context_is_chosen(tmp_path: Path) -> None:
    done = run_python("-m", "test.nn.attention.test_tpu", str(tmp_path), timeout=1500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    sends = {way: counts(found[way]) for way in ("ring", "ulysses")}
    assert sends["ring"]["collective-permute"] > sends["ulysses"]["collective-permute"]
    assert sends["ulysses"]["all-to-all"] > sends["ring"]["all-to-all"] == 0
    best = min(sends, key=lambda way: found[way]["estimated_step_seconds"])
    assert found["wide"]["options"]["method"] == best
    # Two key heads are too few for four ranks.
    assert found["loop"]["options"]["method"] == "ring"
    assert "gives each of the 4 ranks along 'context' as many key heads" in done.stderr


if __name__ == "__main__":
    print(json.dumps(choices(sys.argv[1])))
