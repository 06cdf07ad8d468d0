"""How much memory a chip has for a program: our table against what the compiler itself takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from xla_fsdp.preflight.compile.compiler import (
    Buffers,
    Compiled,
    CompileError,
    assigned_buffers,
    bytes_over_capacity,
    compile_program,
)
from xla_fsdp.preflight.topologies import CHIPS, MIB, find_topology
from xla_fsdp.preflight.trace.program import Program

pytest.importorskip("libtpu", reason="the TPU compiler: pip install '.[preflight]'")

SMALLEST = {2: "2x2", 3: "2x2x1"}
WIDTH = 1024


def compiled_with_temporary(generation: str, nbytes: int, cache_dir: Path) -> Compiled:
    """A program with one temporary buffer of about so many bytes: what it sorts."""
    rows = nbytes // (4 * WIDTH) // 1024 * 1024
    large, narrow = f"tensor<{rows}x{WIDTH}xf32>", f"tensor<{rows}x1xf32>"
    text = f"""module @sort {{ func.func public @main(%a: tensor<8x{WIDTH}xf32>) -> {narrow} {{
        %n = stablehlo.iota dim = 0 : tensor<{rows}x8xf32>
        %m = stablehlo.dot_general %n, %a, contracting_dims = [1] x [0]
            : (tensor<{rows}x8xf32>, tensor<8x{WIDTH}xf32>) -> {large}
        %s = "stablehlo.sort"(%m) ({{
            ^bb0(%x: tensor<f32>, %y: tensor<f32>):
            %p = stablehlo.compare LT, %x, %y : (tensor<f32>, tensor<f32>) -> tensor<i1>
            stablehlo.return %p : tensor<i1>
        }}) {{dimension = 1 : i64}} : ({large}) -> {large}
        %r = stablehlo.slice %s [0:{rows}, 7:8] : ({large}) -> {narrow}
        return %r : {narrow} }} }}"""
    chip = CHIPS[generation]
    topology = find_topology(f"{generation}:{SMALLEST[chip.num_axes]}")
    order = tuple(range(topology.num_ranks))
    program = Program(text.encode(), (), (), partition_order=order)
    return compile_program(program, topology, cache_dir=cache_dir)


@pytest.mark.parametrize(
    "generation",
    [pytest.param(each, marks=() if each == "v5e" else pytest.mark.slow) for each in CHIPS],
)
def test_the_compiler_takes_what_the_table_says(generation: str, tmp_path: Path) -> None:
    usable = CHIPS[generation].usable_bytes
    fits = compiled_with_temporary(generation, usable - 4 * MIB, tmp_path)
    assert fits.too_large_by == 0
    assert usable - 12 * MIB < fits.temporaries <= usable
    too_large = compiled_with_temporary(generation, usable + 12 * MIB, tmp_path)
    # The compiler does not count results; it rounds, and our table does, too.
    assert too_large.too_large_by == pytest.approx(too_large.temporaries - usable, abs=2 * MIB)
    assert "sort(" in too_large.text  # all the same there is a program to look at


@pytest.mark.parametrize(
    ("said", "nbytes"),
    [
        ("Used 31.37G of 31.25G hbm. Exceeded hbm capacity by 128.02M.", round(128.02 * MIB)),
        ("Exceeded hbm capacity by 1.5G.", 1536 * MIB),
        ("Exceeded hbm capacity by 512B.", 512),
        ("Ran out of memory in memory space vmem. Exceeded vmem capacity by 1.00M.", 0),
        ("INVALID_ARGUMENT: no such thing", 0),
    ],
)
def test_by_how_much_a_program_is_too_large(said: str, nbytes: int) -> None:
    assert bytes_over_capacity(said) == nbytes


ASSIGNMENT = """BufferAssignment:
allocation 0: size 512, thread-local:
allocation 1: size 4096, parameter 0, shape |f32[1024]| at ShapeIndex {}, maybe-live-out:
 value: <1 p0 @0> (size=4096,offset=0): f32[1024]{0}
allocation 2: size 2048, parameter 1, shape |f32[512]| at ShapeIndex {}:
allocation 3: size 8, output shape is |(f32[1024])|, maybe-live-out:
allocation 4: size 128, constant:
allocation 5: size 9000, preallocated-temp:
allocation 6: size 7000, color 1, preallocated-temp:
allocation 7: size 640, color 5, preallocated-temp:
"""


def test_buffers_of_other_memories_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "module_1.buffer-assignment.txt").write_text("allocation 0: size 3, constant:\n")
    (tmp_path / "module_2.after-buffer-assignment.txt").write_text(ASSIGNMENT)
    expected = Buffers(arguments=6144, outputs=8, temporaries=9128, on_host=640)
    assert assigned_buffers(tmp_path) == expected


def test_a_compiler_that_leaves_no_assignment_is_told(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="no assignment of buffers"):
        assigned_buffers(tmp_path)
