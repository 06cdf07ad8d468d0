"""Read what a program sends between slices: a collective that the compiler made a ``send`` of.

Words: the *data-center network* joins slices, which have no torus in common; the chips' hosts send
over it, and the chip hands its part over by ``send`` and gets the result by ``recv``.
Always true: one ``send`` is one collective; the ``recv`` with the same rendezvous ends it.
"""

from __future__ import annotations

import re

from xla_fsdp.preflight.hlo import Computation, Instruction

SUFFIX = " between slices"


def kind_of(each: Instruction) -> str:
    """ "all-reduce between slices", say; "" if this is no such transfer."""
    if each.opcode != "send":
        return ""
    found = re.search(r'_xla_megascale_transfer_type="(\w+)"', each.attributes)
    return found.group(1).lower().replace("_", "-") + SUFFIX if found else ""


def num_slices(each: Instruction) -> int:
    """How many slices take part."""
    found = re.search(r'_xla_megascale_target="\{([\d,:]+)\}', each.attributes)
    count = 0
    for part in found.group(1).split(",") if found else ():
        first, _, last = part.partition(":")
        count += int(last or first) - int(first) + 1
    return count or 1


def end_of(inside: Computation, each: Instruction) -> int:
    """Index of the instruction that has the result."""
    meeting = _rendezvous(each)
    order = inside.instructions
    for recv in order:
        if recv.opcode == "recv" and _rendezvous(recv) == meeting:
            for user in inside.users[recv.name]:
                if user.opcode == "recv-done":
                    return order.index(user)
    return order.index(each)


def _rendezvous(each: Instruction) -> str:
    found = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', each.attributes)
    return found.group(1) if found else ""
