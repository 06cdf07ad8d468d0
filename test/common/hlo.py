"""A small reader of HLO text: instructions of the entry computation, their operands and users."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_LINE = re.compile(r"^\s*(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\(")
_GROUPS = re.compile(r"replica_groups=(?P<groups>\{\{.*?\}\})")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True)
class Instruction:
    """One line of HLO: ``dtype`` and ``shape`` are those of an array, ("", ()) of a tuple;
    ``groups`` are a collective's, as written there."""

    name: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    operands: tuple[str, ...]
    groups: str = ""


class Program:
    """The instructions of a module's entry computation, by name."""

    def __init__(self, text: str) -> None:
        entry = text[text.index("\nENTRY") :]
        found = (_parse(line) for line in entry.splitlines())
        self.instructions = {found.name: found for found in found if found is not None}

    def all(self, *ops: str) -> list[Instruction]:
        """Instructions of these kinds, in program order; without collectives in which every rank is
        alone, by which CPU ranks order others."""
        found = (i for i in self.instructions.values() if i.op in ops)
        return [i for i in found if not i.groups or "," in re.sub(r"\},\s*\{", "", i.groups)]

    def sources(
        self, start: Instruction, passes: Callable[[Instruction], bool]
    ) -> Iterator[Instruction]:
        """Where the operands of ``start`` come from, looking back through what ``passes``."""
        for name in start.operands:
            operand = self.instructions[name]
            if passes(operand):
                yield from self.sources(operand, passes)
            else:
                yield operand


def _parse(line: str) -> Instruction | None:
    match = _LINE.match(line)
    if match is None:
        return None
    dtype, _, sizes = match["type"].partition("[")
    shape = tuple(int(size) for size in sizes.partition("]")[0].split(",") if size)
    if match["type"].startswith("("):
        dtype, shape = "", ()
    operands = line[match.end() :].partition("), ")[0]
    names, groups = tuple(_NAME.findall(operands)), _GROUPS.search(line)
    return Instruction(
        match["name"], match["op"], dtype, shape, names, groups["groups"] if groups else ""
    )
