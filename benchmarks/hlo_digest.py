"""A digest of an HLO program that depends only on what it computes.

It ignores names, the order of instructions, parameters and results, and metadata; it depends on
opcodes, types, attributes, operands, constants and uses. Each instruction gets a *color*, a hash.
Those of parameters are refined by their uses, as in the Weisfeiler-Leman test of isomorphism.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

ROUNDS = 4
"""Number of refinements of the parameters' colors."""

_HEADER = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) .*\{$")
_LINE = re.compile(r"^\s+(?P<root>ROOT )?%(?P<name>[\w.\-]+) = (?P<body>.*)$")
_METADATA = re.compile(r", metadata=\{(?:[^}\"]|\"(?:[^\"\\]|\\.)*\")*\}")
_COMMENT = re.compile(r"/\*index=\d+\*/")
_NAME = re.compile(r"%([\w.\-]+)")
_PARAMETER = re.compile(r" parameter\((\d+)\)")
_TUPLE = re.compile(r"^\(.*?\) tuple\(")


@dataclass(frozen=True)
class _Instruction:
    name: str
    body: str  # the line without the name
    operands: tuple[str, ...]  # all names in the body
    is_root: bool

    @property
    def parameter(self) -> int | None:
        """Its number, if it is a parameter."""
        found = _PARAMETER.search(self.body)
        return int(found.group(1)) if found else None


def text_of(program: bytes) -> str:
    """Return the text of a serialized HLO module; not in a process that has loaded torch_xla."""
    from jaxlib import xla_client

    options = xla_client._xla.HloPrintOptions()
    options.print_large_constants, options.print_metadata = True, False
    return xla_client._xla.HloModule.from_serialized_hlo_module_proto(program).to_string(options)


def digest(
    text: str,
    labels: Mapping[int, str] | None = None,
    aliases: Sequence[tuple[int, int]] = (),
) -> str:
    """Return the digest of a module.

    Args:
        text: text of the module, as returned by ``text_of``.
        labels: further facts about parameters, by number.
        aliases: pairs (parameter, result), by number, that share memory.
    """
    computations = _computations(text)
    [entry] = [name for name in computations if name.startswith("ENTRY ")]
    known: dict[str, str] = {}
    for name, instructions in computations.items():
        if name != entry:
            known[name] = _digest_of_called(instructions, known)
    return _digest_of_entry(computations[entry], known, labels or {}, aliases)


def _computations(text: str) -> dict[str, list[_Instruction]]:
    """Return instructions by computation, callees first; the entry's name begins with ENTRY."""
    found: dict[str, list[_Instruction]] = {}
    current: list[_Instruction] = []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = found[(header["entry"] or "") + header["name"]] = []
        elif match := _LINE.match(line):
            body = _COMMENT.sub("", _METADATA.sub("", match["body"]))
            names = tuple(_NAME.findall(body))
            current.append(_Instruction(match["name"], body, names, bool(match["root"])))
    return found


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _colors(
    instructions: Sequence[_Instruction],
    called: Mapping[str, str],
    of_parameter: Callable[[_Instruction], str],
) -> dict[str, str]:
    """Return the color of each instruction, made of its body and its operands' colors."""
    colors: dict[str, str] = {}
    for each in instructions:
        if each.parameter is not None:
            colors[each.name] = of_parameter(each)
        elif each.is_root and _TUPLE.match(each.body):
            colors[each.name] = _hash("results", *sorted(colors[name] for name in each.operands))
        else:
            known = {name: colors.get(name) or called[name] for name in each.operands}
            colors[each.name] = _hash(_NAME.sub(lambda m, known=known: known[m[1]], each.body))
    return colors


def _digest_of_called(instructions: Sequence[_Instruction], called: Mapping[str, str]) -> str:
    # Here the order of results counts, so the root is not treated as such.
    ordered = [
        _Instruction(each.name, each.body, each.operands, is_root=False) for each in instructions
    ]
    colors = _colors(ordered, called, lambda each: _hash(each.body))
    [root] = [each.name for each in instructions if each.is_root]
    return _hash(colors[root], *sorted(colors.values()))


def _digest_of_entry(
    instructions: Sequence[_Instruction],
    called: Mapping[str, str],
    labels: Mapping[int, str],
    aliases: Sequence[tuple[int, int]],
) -> str:
    parameters = {each.parameter: each.name for each in instructions if each.parameter is not None}
    [root] = [each for each in instructions if each.is_root]
    results = root.operands if _TUPLE.match(root.body) else (root.name,)
    seen = {
        name: _hash(labels.get(number, ""), str(number in {p for p, _ in aliases}))
        for number, name in parameters.items()
    }
    for _ in range(ROUNDS):
        down = _colors(
            instructions,
            called,
            lambda each, seen=seen: _hash(_PARAMETER.sub(" parameter", each.body), seen[each.name]),
        )
        both = _colors_with_uses(instructions, down)
        seen = {name: both[name] for name in parameters.values()}
    pairs = sorted(_hash(both[parameters[p]], both[results[r]]) for p, r in aliases)
    return _hash(*sorted(both.values()), "aliases", *pairs)


def _colors_with_uses(
    instructions: Sequence[_Instruction], down: Mapping[str, str]
) -> dict[str, str]:
    """Return colors that also depend on the uses of each instruction."""
    uses: dict[str, list[str]] = {each.name: [] for each in instructions}
    colors: dict[str, str] = {}
    for each in reversed(instructions):
        colors[each.name] = color = _hash(down[each.name], *sorted(uses[each.name]))
        unordered = each.is_root and _TUPLE.match(each.body)
        for index, name in enumerate(each.operands):
            if name in uses:  # not a called computation
                uses[name].append(_hash(color, "" if unordered else str(index)))
    return colors
