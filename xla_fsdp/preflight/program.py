"""What is known of a program before it is compiled: its HLO, inputs, outputs and their roles.

Words: a *role* is what an input is for: parameter, optimizer state, gradient, data.
Always true: an alias (input, output) is a tensor that the step changed in place, whose memory
torch_xla reuses. All of it is plain data, made by ``tracing``, compiled by ``compiler``.
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
        partition_order: for a program that the compiler is to partition by itself: the rank that
            gets each partition. Then ``hlo`` is what JAX lowers to, StableHLO in MLIR bytecode.
    """

    hlo: bytes
    inputs: tuple[Input, ...]
    aliases: tuple[tuple[int, int], ...]
    operand_sizes: Mapping[str, int] = field(default_factory=dict)
    partition_order: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        """Tells programs apart."""
        rest = json.dumps([self.aliases, self.partition_order]).encode()
        return hashlib.sha256(self.hlo + rest).hexdigest()


@dataclass(frozen=True)
class ParameterTraffic:
    """What one sharded parameter must put on the wire.

    Args:
        name: of the parameter (of the first, where several are flattened).
        numel: elements of the full parameter.
        padded: the same with padding, as it travels.
        gathered_bytes: sent by a rank for its gathers in a step.
        reduced_bytes: sent by a rank for the reduction of its gradient.
        off_torus: the ranks that share it, if they fill no box on the torus in order, so that its
            gradient cannot be reduced axis by axis.
        is_cut: whether it is a part of a tensor-parallel parameter, so activations are sent, too.
    """

    name: str
    numel: int
    padded: int
    gathered_bytes: int
    reduced_bytes: int
    off_torus: tuple[int, ...] = ()
    is_cut: bool = False


@dataclass(frozen=True)
class Traced:
    """One steady-state step.

    Args:
        programs: what it runs, in order.
        model_flops: matrix-product operations of forward and backward, recomputation left out.
        parameters: the sharded parameters, and what they must put on the wire.
    """

    programs: tuple[Program, ...]
    model_flops: int = 0
    parameters: tuple[ParameterTraffic, ...] = ()
