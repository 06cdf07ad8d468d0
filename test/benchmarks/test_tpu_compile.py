"""The benchmark of compiled steps: both models are the same, and its tables say what was found."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from test.common.ranks import ROOT, run_python

BENCHMARKS = ROOT / "benchmarks"
SEEDS = (0, 1, 2)


def losses(seed: int) -> tuple[float, float]:
    """Of the PyTorch and the JAX model with the same values; run in the child."""
    sys.path.insert(0, str(BENCHMARKS))
    import jax
    import jax.numpy as jnp
    import torch
    import torch.nn.functional as F
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import gpt
    from jax_fsdp import Model, parameter_shapes

    torch.manual_seed(seed)
    shape = gpt.Shape(128, 2, length=16, batch=2, vocabulary=96)
    model = gpt.GPT(shape)
    with torch.no_grad():
        for value in model.parameters():  # far from where every model predicts all words alike
            value.copy_(torch.randn_like(value) * (0.15 if value.dim() > 1 else 0.5))
    tokens, targets = torch.randint(0, 96, (2, 2, 16))
    theirs = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item()

    def value_of(name: str) -> torch.Tensor:
        module, _, kind = name.removeprefix("block.").partition(".")
        owners = list(model.blocks) if name.startswith("block.") else [model]
        tables = ("tokens", "places")
        found = [getattr(getattr(each, module), kind or "weight").detach() for each in owners]
        found = [v.t() if v.dim() == 2 and module not in tables else v for v in found]
        return torch.stack(found) if name.startswith("block.") else found[0]

    values = {name: jnp.asarray(value_of(name).numpy()) for name in parameter_shapes(shape)}
    assert {name: value.shape for name, value in values.items()} == parameter_shapes(shape)
    mesh = Mesh(jax.devices()[:1], ("shard",))
    ours = Model(shape, NamedSharding(mesh, PartitionSpec("shard", None, None)))
    return theirs, float(
        ours.loss(values, jnp.asarray(tokens.numpy()), jnp.asarray(targets.numpy()))
    )


@pytest.mark.slow
def test_the_jax_model_is_the_same_as_the_pytorch_model() -> None:
    pytest.importorskip("jax")
    done = run_python("-m", "test.benchmarks.test_tpu_compile", *map(str, SEEDS))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len({round(theirs, 1) for theirs, _ in found}) == len(SEEDS)
    for theirs, ours in found:
        assert ours == pytest.approx(theirs, rel=0.02)  # it computes in bf16


@pytest.mark.slow
def test_the_benchmark_writes_figures_of_all_programs_and_their_ratios(tmp_path: Path) -> None:
    pytest.importorskip("libtpu")
    table = tmp_path / "table.md"
    done = run_python(
        str(BENCHMARKS / "tpu_compile.py"), "--models", "128x2", "--topology", "v5e:2x2",
        "--rounds", "2", "--cache_dir", str(tmp_path), "--write", str(table),
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {
        cells[0]: cells[1:]
        for line in table.read_text().splitlines()
        if (cells := [cell.strip() for cell in line.strip("|").split("|")]) and len(cells) == 14
    }
    programs = ["ours", "scan", "stacked", "streamed", "offloaded", "upstream", "jax"]
    assert rows[""] == [*programs, *(f"/ {name}" for name in programs[1:])]
    ours, scan, stacked, streamed, offloaded, upstream, jax, *ratios = map(number, rows["wire, MB"])
    over_upstream, over_jax = ratios[-2:]
    assert ours == pytest.approx(number(rows["minimum on the wire, MB"][0]), rel=0.1)
    assert scan == pytest.approx(ours, rel=0.1)
    assert stacked == pytest.approx(scan, rel=0.01)
    assert scan < streamed < 1.35 * scan  # the head is gathered twice
    assert offloaded == streamed
    assert over_upstream == pytest.approx(ours / upstream, abs=0.02)
    assert over_jax == pytest.approx(ours / jax, abs=0.02)
    for label in ("peak, MiB", "program code, MiB", "collectives", "compile, CPU s"):
        assert all(number(cell) > 0 for cell in rows[label][: len(programs)])
    traced = [bool(cell) for cell in rows["tracing a step, CPU ms"][: len(programs)]]
    assert traced == [*[True] * 6, False]
    assert "python benchmarks/tpu_compile.py --models 128x2" in table.read_text()


def number(cell: str) -> float:
    return float(re.sub(",", "", cell))


if __name__ == "__main__":
    print(json.dumps([losses(int(seed)) for seed in sys.argv[1:]]))
