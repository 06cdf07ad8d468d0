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
    """One rank's program."""

    hlo: bytes  # the serialized HLO module, before optimization
    inputs: tuple[Input, ...]  # in the order of the module's parameters
    aliases: tuple[tuple[int, int], ...]  # (input, output) of tensors that are changed in place
    # Elements that each collective takes, by the name of its instruction.
    operand_sizes: Mapping[str, int] = field(default_factory=dict)
    # For a program that the compiler is to partition by itself: the rank that gets each partition.
    # Then ``hlo`` is what JAX lowers to, StableHLO in MLIR bytecode.
    partition_order: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        """A digest of all that the compiler is given."""
        rest = json.dumps([self.aliases, self.partition_order]).encode()
        return hashlib.sha256(self.hlo + rest).hexdigest()


@dataclass(frozen=True)
class ParameterTraffic:
    """What one sharded parameter must put on the wire in a step."""

    name: str  # of the first parameter, where several are flattened
    numel: int  # of the unsharded parameter
    padded: int  # the same with padding, as it travels
    gathered_bytes: int  # that a rank sends for its gathers
    reduced_bytes: int  # that a rank sends for the reduction of its gradient
    # The ranks that share it, if they fill no box on the torus in order: then its gradient cannot
    # be reduced axis by axis.
    off_torus: tuple[int, ...] = ()
    is_tensor_parallel: bool = False  # then activations are sent, too


@dataclass(frozen=True)
class Traced:
    """One step in the steady state, in which the optimizer's state is there already."""

    programs: tuple[Program, ...]  # in the order in which they run
    model_flops: int = 0  # of the products of forward and backward, recomputation left out
    parameters: tuple[ParameterTraffic, ...] = ()

    @property
    def minimum_wire_bytes(self) -> int:
        """Bytes that a rank must send for the parameters."""
        return sum(each.gathered_bytes + each.reduced_bytes for each in self.parameters)
