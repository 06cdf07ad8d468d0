"""A traced training step, not yet compiled: its programs, and the traffic of its parameters."""

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
    # Unit and phase of each collective, such as "blocks.3: all-gather", by its instruction's name;
    # "" where they are not known.
    labels: Mapping[str, str] = field(default_factory=dict)
    # For a program that the compiler is to partition: the rank of each partition. Then ``hlo`` is
    # StableHLO, as MLIR bytecode, lowered by JAX.
    partition_order: tuple[int, ...] = ()
    # Bytes that lie in memory while it runs and are none of its inputs, by role.
    others: Mapping[str, int] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """A digest of everything that the compiler is given."""
        rest = json.dumps([self.aliases, self.partition_order]).encode()
        return hashlib.sha256(self.hlo + rest).hexdigest()


@dataclass(frozen=True)
class ParameterTraffic:
    """The bytes that must be sent in a step for one sharded parameter."""

    name: str  # name of the parameter, or of the first of several that are flattened together
    numel: int  # elements of the unsharded parameter
    gathered_bytes: int  # bytes that a rank sends for its gathers
    reduced_bytes: int  # bytes that a rank sends for the reduction of its gradient
    # The ranks that share it, if they fill no box on the torus in order, so that its gradient
    # cannot be reduced axis by axis; else empty.
    off_torus: tuple[int, ...] = ()
    is_tensor_parallel: bool = False


@dataclass(frozen=True)
class Traced:
    """One step in the steady state, in which the optimizer's state exists already."""

    programs: tuple[Program, ...]  # in the order in which they run
    model_flops: int = 0  # of matrix products in forward and backward, without recomputation
    parameters: tuple[ParameterTraffic, ...] = ()
    seconds: float = 0.0  # that tracing and lowering it took

    @property
    def minimum_wire_bytes(self) -> int:
        """Bytes that a rank must send for the parameters."""
        return sum(each.gathered_bytes + each.reduced_bytes for each in self.parameters)
