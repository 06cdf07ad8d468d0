"""What is known of a program before it is compiled: its HLO, inputs, outputs and their roles.

Words: a *role* is what an input is for: parameter, optimizer state, gradient, data.
Always true: an alias (input, output) is a tensor that the step changed in place, whose memory
torch_xla reuses. Made by ``tracing``, compiled by ``compiler``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

PARAMETER, STATE, GRADIENT, DATA = "parameters", "optimizer state", "gradients", "data"


@dataclass(frozen=True)
class Input:
    """One input of a program: its role and its bytes, unpadded."""

    role: str
    nbytes: int


@dataclass(frozen=True)
class Program:
    """One rank's program.

    Args:
        hlo: the serialized HLO module, before optimization.
        inputs: in the order of the module's parameters.
        aliases: pairs (input, output) that share memory.
        operand_sizes: elements that each collective takes, by the name of its instruction.
    """

    hlo: bytes
    inputs: tuple[Input, ...]
    aliases: tuple[tuple[int, int], ...]
    operand_sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Tells programs apart."""
        rest = json.dumps(self.aliases).encode()
        return hashlib.sha256(self.hlo + rest).hexdigest()
