"""The benchmark of compiled steps: both models are the same, and its tables say what was found."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

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
        if (cells := [cell.strip() for cell in line.strip("|").split("|")]) and len(cells) == 16
    }
    programs = ["ours", "scan", "stacked", "streamed", "offloaded", "upstream", "jax", "alone"]
    assert rows[""] == [*programs, *(f"/ {name}" for name in programs[1:])]
    ours, scan, stacked, streamed, offloaded, upstream, jax = map(number, rows["wire, MB"][:7])
    over_upstream, over_jax = map(number, rows["wire, MB"][-3:-1])
    assert ours == pytest.approx(number(rows["minimum on the wire, MB"][0]), rel=0.1)
    assert scan == pytest.approx(ours, rel=0.1)
    assert stacked == pytest.approx(scan, rel=0.01)
    assert scan < streamed < 1.35 * scan  # the head is gathered twice
    assert offloaded == streamed
    assert over_upstream == pytest.approx(ours / upstream, abs=0.02)
    assert over_jax == pytest.approx(ours / jax, abs=0.02)
    for label in ("peak, MiB", "program code, MiB", "collectives", "compile, CPU s"):
        assert all(number(cell) > 0 for cell in rows[label][:7])
    assert rows["collectives"][7] == "0"  # of one chip alone
    traced = [bool(cell) for cell in rows["tracing a step, CPU ms"][: len(programs)]]
    assert traced == [*[True] * 6, False, False]
    assert "python benchmarks/tpu_compile.py --models 128x2" in table.read_text()


# ---------------------------------------------------------------- sections and goals, quick


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import tpu_compile

    return tpu_compile


def test_a_section_takes_the_place_of_its_older_self(benchmark: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    for title, line in (("one", "old"), ("two", "kept"), ("one", "new")):
        benchmark.write_section(path, title, [line, ""])
    intro, *sections = path.read_text().split("\n## ")
    assert intro.startswith("# One training step")
    assert sections == ["one\n\nnew\n", "two\n\nkept\n"]


@dataclass
class Figures:
    """Of a compiled step; times in seconds."""

    code_mib: int = 20
    blocking_bytes: int = 10
    minimum: int | None = 100
    compute: float = 0.004
    cpu_seconds: float = 10.0

    def result(
        self, benchmark: ModuleType, topology: str, name: str = "streamed", text: str = ""
    ) -> Any:
        """A result of the benchmark with these figures, as far as tables read them."""
        blocking, overlapped = 0.001, 0.002
        time = SimpleNamespace(
            total=max(self.compute, overlapped) + blocking, compute=self.compute,
            blocking=blocking, overlapped=overlapped, model_flops=10**12,
        )  # fmt: skip
        report = SimpleNamespace(
            topology=topology, step_time=time, traffic=[], wire_bytes=100,
            blocking_bytes=self.blocking_bytes, minimum_wire_bytes=self.minimum,
        )  # fmt: skip
        compiled = SimpleNamespace(
            peak=0, arguments=0, temporaries=0, code=self.code_mib * 2**20, on_host=0,
            cpu_seconds=self.cpu_seconds, seconds=0, text=text,
        )  # fmt: skip
        program = benchmark.Program(b"", (), ())
        return benchmark.Result(name, report, compiled, program, flags="", tokens=4000)


def test_the_table_of_goals_marks_what_is_missed(benchmark: ModuleType) -> None:
    cases = {
        "v5e:4x4": Figures(),
        "v5e:8x8": Figures(code_mib=31, blocking_bytes=11, minimum=50, compute=0.001,
                           cpu_seconds=16),
        "v6e:8x8": Figures(minimum=None, cpu_seconds=99),
    }  # fmt: skip
    shape = benchmark.gpt.Shape(1024, 24)
    found = [
        (benchmark.Case(shape, benchmark.find_topology(name)), each.result(benchmark, name))
        for name, each in cases.items()
    ]
    heading, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")]
                         for line in benchmark.goals_table(found)]  # fmt: skip
    assert heading[3:5] == ["blocking, % of wire (at most 10)", "wire / minimum (at most 1.05)"]
    assert heading[7:] == ["compile at 64 / at 16 ranks (at most 1.5)", "compile, CPU s",
                           "tokens/s", "MFU, %"]  # fmt: skip
    # 4000 tokens in 5 ms, and 10**12 operations of 197e12 a second; then in 3 ms.
    assert rows == [
        ["v5e:4x4", "1024", "24", "10", "1", "20", "1.25", "", "10", "800,000", "102"],
        ["v5e:8x8", "1024", "24", "**11**", "**2**", "**31**", "1", "**1.6**", "16",
         "1,333,333", "169"],
        ["v6e:8x8", "1024", "24", "10", "", "20", "1.25", "", "99", "800,000", "21.8"],
    ]  # fmt: skip


HLO = """HloModule step, replica_count=1

%product (a: bf16[8,8]) -> f32[8,8] {
  %a = bf16[8,8] parameter(0)
  %p = f32[8,8] convolution(bf16[8,8] %a, bf16[8,8] %a), dim_labels=bf_io->bf
  ROOT %s = f32[8,8] sqrt(f32[8,8] %p)
}

%adam (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  ROOT %s = f32[8] sqrt(f32[8] %a)
}

%index (a: f32[8,8], at: s32[]) -> f32[1,8] {
  %a = f32[8,8] parameter(0)
  %at = s32[] parameter(1)
  %next = s32[] add(s32[] %at, s32[] %at)
  ROOT %s = f32[1,8] dynamic-slice(f32[8,8] %a, s32[] %next, s32[] %next)
}

%cast (a: f32[8]) -> bf16[8] {
  %a = f32[8] parameter(0)
  ROOT %s = bf16[8] convert(f32[8] %a)
}

%sum (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  ROOT %s = f32[8] add(f32[8] %a, f32[8] %a)
}

ENTRY %main (x: f32[8], y: bf16[8,8], n: s32[]) -> f32[8] {
  %x = f32[8] parameter(0)
  %y = bf16[8,8] parameter(1)
  %n = s32[] parameter(2)
  %f1 = f32[8,8] fusion(bf16[8,8] %y), calls=%product, "estimated_cycles":"9400000"
  %f2 = f32[8] fusion(f32[8] %x), calls=%adam, "estimated_cycles":"4700000"
  %f3 = f32[1,8] fusion(f32[8,8] %f1, s32[] %n), calls=%index, "estimated_cycles":"940000"
  %f4 = bf16[8] fusion(f32[8] %x), calls=%cast, "estimated_cycles":"1880000"
  ROOT %f5 = f32[8] fusion(f32[8] %f2), calls=%sum, "estimated_cycles":"2820000"
}
"""


def test_what_a_step_takes_over_one_without_sharding_is_told_by_parts(
    benchmark: ModuleType,
) -> None:
    results = [
        Figures(compute=0.005).result(benchmark, "v5e:4x4", "ours", HLO),
        Figures(compute=0.003).result(benchmark, "v5e:4x4", "alone", HLO),
    ]
    rows = [line.strip("|").split("|") for line in benchmark.table(results)]
    found = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    assert found["step over alone"][:2] == ["1.5", "1"]
    parts = {"products": "10", "optimizer": "5", "copies": "1", "casts": "2", "others": "3"}
    cycles = benchmark.find_topology("v5e:4x4").chip.clock_hz / 940e6
    for name, milliseconds in parts.items():
        assert found[f"{name}, ms"][0] == f"{float(milliseconds) / cycles:.3g}", name


def number(cell: str) -> float:
    return float(re.sub(",", "", cell))


@dataclass(frozen=True)
class Compiled:
    """The times of a compilation."""

    cpu_seconds: float
    seconds: float


def test_compile_times_are_medians_of_compilations_in_turn(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = benchmark.Case(benchmark.gpt.Shape(64, 1), benchmark.find_topology("v5e:4x4"))
    names = ("scan", "jax")
    results = [
        benchmark.Result(n, None, Compiled(99, 99), benchmark.Program(n.encode(), (), ()), n, 1)
        for n in names
    ]
    times = iter([7.0, 20, 5, 40, 6, 30])
    folders, order = set(), []

    def compile_program(program: Any, topology: Any, *, flags: str, **options: Any) -> Compiled:
        assert flags == program.hlo.decode()
        assert not list(options["cache_dir"].iterdir())
        folders.add(options["cache_dir"])
        order.append(flags)
        cpu = next(times)
        return Compiled(cpu, cpu / 2)

    monkeypatch.setattr(benchmark, "compile_program", compile_program)
    options = benchmark._parser().parse_args(["--compilations", "3"])
    benchmark._time_compilations(results, case, options)
    assert order == [*names] * 3
    assert [result.compiled for result in results] == [Compiled(6, 3), Compiled(30, 15)]
    assert not any(folder.exists() for folder in folders)


def test_tables_of_goals_refuse_several_compilations(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["--goals", "--compilations", "2"])
    assert "--goals compiles each once" in capsys.readouterr().err


if __name__ == "__main__":
    print(json.dumps([losses(int(seed)) for seed in sys.argv[1:]]))
