"""How much of a chip's memory a program's buffers take: the compiler's own assignment of them.

Words: an *allocation* is one range of addresses, which holds buffers that are not alive together;
its *color* is the memory it lies in, which the text leaves out for HBM.
Why: what a compiled program says of itself cannot be used for this. It counts what is lost to
fragmentation twice among its temporaries, which is much where there are loops, and memory on the
chip with what is alive at most. The assignment is what is set aside, and adds up to what the
compiler states where it refuses a program.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*)$", re.MULTILINE)

_ELSEWHERE = re.compile(r", color [1-9]|, thread-local")

_ON_HOST = ", color 5,"


@dataclass(frozen=True)
class Buffers:
    """Bytes of HBM, but for the last.

    Args:
        arguments: inputs, their padding included; results may take their place.
        outputs: results that take no input's place.
        temporaries: all else, constants too.
        on_host: bytes of the host's memory, for what waits there.
    """

    arguments: int
    outputs: int
    temporaries: int
    on_host: int


def assigned_buffers(dump: Path) -> Buffers:
    """Those of the program whose assignment the compiler wrote into a folder.

    Raises:
        FileNotFoundError: if there is none.
    """
    found = [_read(path.read_text()) for path in dump.glob("*buffer-assignment.txt")]
    if not found:
        raise FileNotFoundError(f"the compiler left no assignment of buffers in {dump}")
    return max(found, key=lambda each: each.arguments + each.outputs + each.temporaries)


def _read(text: str) -> Buffers:
    sizes: Counter[str] = Counter()
    for size, what in _ALLOCATION.findall(text):
        if _ON_HOST in what:
            sizes["host"] += int(size)
        if not _ELSEWHERE.search(what):
            sizes[_use(what)] += int(size)
    return Buffers(sizes["argument"], sizes["output"], sizes["temporary"], sizes["host"])


def _use(what: str) -> str:
    if ", parameter " in what:
        return "argument"
    return "output" if "live-out" in what else "temporary"
