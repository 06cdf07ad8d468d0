"""How often a loop of an HLO module runs, where the compiler has not noted it.

Words: the *counter* is the one value of the loop's state that its condition reads; it is compared
with the *bound*, and the body adds the *step*.
Always true: the answer is None unless bound and step are constants that can be found, also inside
fusions. A counter whose start cannot be seen starts at 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xla_fsdp.preflight.hlo import Computation, Instruction

_SAME = ("bitcast", "copy", "reshape", "convert")
Computations = Mapping[str, "Computation"]


def trips(computations: Computations, inside: Computation, loop: Instruction) -> int | None:
    """Iterations of ``loop``, an instruction of ``inside``, that counts up to a constant."""
    condition = computations.get(loop.attribute("condition"))
    body = computations.get(loop.attribute("body"))
    if condition is None or body is None:
        return None
    bound, counter = _bound(computations, condition), _counter(condition)
    if bound is None or counter is None:
        return None
    step = _step(computations, body, counter)
    if not step or step < 0:
        return None
    return max(0, math.ceil((bound - _start(inside, loop, counter)) / step))


def _bound(computations: Computations, condition: Computation) -> int | None:
    """The constant that a condition wants its counter to be less than, in it or what it calls."""
    inner = [computations.get(each.attribute("calls")) for each in condition.instructions]
    lines = [each for part in (condition, *inner) if part for each in part.instructions]
    directions = {each.attribute("direction") for each in lines if each.opcode == "compare"}
    bounds = {value for each in lines if (value := _constant(each)) is not None}
    return bounds.pop() if directions == {"LT"} and len(bounds) == 1 else None


def _counter(condition: Computation) -> int | None:
    """Which value of the state a condition reads, if it is one."""
    read = {
        each.attribute("index")
        for each in condition.instructions
        if each.opcode == "get-tuple-element"
    }
    return int(read.pop()) if len(read) == 1 else None


def _step(computations: Computations, body: Computation, counter: int) -> int | None:
    if body.root.opcode != "tuple" or counter >= len(body.root.operands):
        return None
    added = _behind(body, body.root.operands[counter])
    place = 0
    if added is not None and added.opcode == "get-tuple-element":
        place = int(added.attribute("index"))
        added = _behind(body, added.operands[0])
    if added is None or added.opcode != "fusion":
        return None if added is None else _added(body, added, {})
    fused = computations[added.attribute("calls")]
    given = {str(number): body.by_name.get(name) for number, name in enumerate(added.operands)}
    root = fused.root
    if root.opcode == "tuple":
        root = fused.by_name[root.operands[place]]
    return _added(fused, root, given)


def _added(
    inside: Computation, each: Instruction, given: Mapping[str, Instruction | None]
) -> int | None:
    """The constant that an addition adds, which may be a parameter of a fusion."""
    if each.opcode != "add":
        return None
    terms = [_behind(inside, name) for name in each.operands]
    seen = [
        given.get(term.attributes) if term is not None and term.opcode == "parameter" else term
        for term in terms
    ]
    constants = [value for term in seen if term and (value := _constant(term)) is not None]
    return constants[0] if len(constants) == 1 else None


def _start(inside: Computation, loop: Instruction, counter: int) -> int:
    state = inside.by_name.get(loop.operands[0])
    if state is None or state.opcode != "tuple":
        return 0
    first = _behind(inside, state.operands[counter])
    return (_constant(first) if first else None) or 0


def _behind(inside: Computation, name: str) -> Instruction | None:
    """The instruction that makes a value, copies and the like left out."""
    each = inside.by_name.get(name)
    while each is not None and each.opcode in _SAME:
        each = inside.by_name.get(each.operands[0])
    return each


def _constant(each: Instruction) -> int | None:
    return int(each.attributes) if each.opcode == "constant" and each.attributes.isdigit() else None
