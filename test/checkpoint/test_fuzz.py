"""Whatever is in a file: it can be used, or an error names it; time and memory stay small."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.common import fuzz
from test.common.ranks import run_warm

QUICK, SLOW = 1000, 10_000
KILLED = "-27"  # by SIGPROF: it took more time than the limit


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory in memory, if there is one: the inputs are many small files."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.path.isdir(memory) else None) as path:
        yield Path(path)


def read_inputs(name: str, first: int, count: int, folder: Path) -> dict[str, float]:
    """Read inputs of a format in a process with limits; return what it counted."""
    arguments = ("-m", "test.common.fuzz", name, str(first), str(count), str(folder))
    done = run_warm(*arguments, timeout=3000)
    number = folder / "number"
    last = number.read_text() if number.exists() else f"the first input of {name}"
    if done.returncode == int(KILLED):
        pytest.fail(f"{last} took more than {fuzz.CPU_SECONDS} s")
    assert done.returncode == 0, f"{last}: {done.stderr[-3000:]}"
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(name, found)
    return found


@pytest.mark.parametrize("name", fuzz.FORMATS)
def test_hostile_files(name: str, folder: Path) -> None:
    """Among them are files by hand of under 10 kB which once took hours, or gigabytes."""
    found = read_inputs(name, 0, QUICK, folder)
    assert found["read"] + found["refused"] > QUICK * 0.9
    assert min(found["read"], found["refused"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz.FORMATS)
def test_many_hostile_files(name: str, folder: Path) -> None:
    found = read_inputs(name, QUICK, SLOW + SLOW // 10, folder)
    assert found["read"] + found["refused"] >= SLOW
