"""A traced training step before it is compiled: its programs, and the traffic that it asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

# Roles of a program's inputs.
PARAMETER, STATE, GRADIENT, DATA = "parameters", "optimizer state", "gradients", "data"


@dataclass(frozen=True)
class Input:
    """One input of a program."""

    role: str
    nbytes: int  # without padding


@dataclass(frozen=True)
class Program:
    """One rank's program.

    Args:
        hlo: the serialized HLO module, before optimization.
        inputs: in the order of the module's parameters.
        aliases: pairs (input, output) that share memory: tensors that the step changes in place.
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
        """A digest of all that the compiler is given."""
        rest = json.dumps([self.aliases, self.partition_order]).encode()
        return hashlib.sha256(self.hlo + rest).hexdigest()


@dataclass(frozen=True)
class ParameterTraffic:
    """What one sharded parameter must put on the wire in a step.

    Args:
        name: of the parameter (of the first, where several are flattened).
        numel: elements of the unsharded parameter.
        padded: the same with padding, as it travels.
        gathered_bytes: sent by a rank for its gathers.
        reduced_bytes: sent by a rank for the reduction of its gradient.
        off_torus: the ranks that share it, if they fill no box on the torus in order, so that its
            gradient cannot be reduced axis by axis.
        is_tensor_parallel: whether it is the local part of a tensor-parallel parameter, so that
            activations are sent, too.
    """

    name: str
    numel: int
    padded: int
    gathered_bytes: int
    reduced_bytes: int
    off_torus: tuple[int, ...] = ()
    is_tensor_parallel: bool = False


@dataclass(frozen=True)
class Traced:
    """One step in the steady state, in which the optimizer's state is there already.

    Args:
        programs: what it runs, in order.
        model_flops: matrix-product operations of forward and backward, recomputation left out.
        parameters: the sharded parameters, and what they must put on the wire.
    """

    programs: tuple[Program, ...]
    model_flops: int = 0
    parameters: tuple[ParameterTraffic, ...] = ()

    @property
    def minimum_wire_bytes(self) -> int:
        """Bytes that a rank must send for the parameters."""
        return sum(each.gathered_bytes + each.reduced_bytes for each in self.parameters)
