"""Run preflight's command line on a step of the tests, and read what it reports."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from test.common.ranks import cached_outcome, run_python

COMPILER_LOG = re.compile(r"^[IWEF]\d{4} |^WARNING: All log messages|libtpu", re.MULTILINE)
"""Lines that the TPU compiler prints on its own account; it misses a TPU, for example."""


@cached_outcome
def reports(target: str, *arguments: str, fits: bool = True) -> list[dict[str, Any]]:
    """Reports of ``target`` (``module:function``), one for each program, from one command; whether
    all fit is expected, and checked."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        where = ("--cache_dir", folder, "--json", str(out))
        run = ("-m", "xla_fsdp.preflight", target, *where, *arguments)
        done = run_python(*run, timeout=900)
        assert done.returncode == (0 if fits else 1), done.stderr
        assert not COMPILER_LOG.search(done.stdout + done.stderr), done.stderr
        return json.loads(out.read_text())


def counts(found: dict[str, Any]) -> Counter[str]:
    """How often collectives of each kind run."""
    times: Counter[str] = Counter()
    for each in found["traffic"]:
        times[each["kind"]] += each["count"]
    return times
