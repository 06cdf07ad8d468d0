"""Virtual chips: devices of JAX's CPU client in a child process, which run programs for a TPU."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xla_fsdp.distributed.cpu_ranks import ranks_by_name
from xla_fsdp.preflight.compile.child import Child
from xla_fsdp.preflight.compile.compiler import check_installed, child_environment

if TYPE_CHECKING:
    from torch import Tensor

    from xla_fsdp.xla.virtual_ranks import Request

QUICK_COMPILE = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)
"""Flags with which programs compile in a tenth of the time; matrix products are not slower, as they
are calls of a library."""


class VirtualChips:
    """A child process with as many devices as a slice has chips.

    Args:
        num_chips: number of devices.

    Attributes:
        programs: the serialized HLO of each program that ran, in order of first use.
        runs: for each run of a program, its index in ``programs``.

    Raises:
        CompileError: if JAX is not installed.
    """

    def __init__(self, num_chips: int) -> None:
        check_installed()
        self.num_chips = num_chips
        self.programs: list[bytes] = []
        self.runs: list[int] = []
        self._known: dict[str, int] = {}
        self._ranks_of: list[int] = []
        flags = f"--xla_force_host_platform_device_count={num_chips} {QUICK_COMPILE}"
        environment = child_environment(XLA_FLAGS=flags)
        name = "the process with the virtual chips"
        self._child = Child(name, f"{__package__}.run_child", environment)

    def execute(self, requests: Sequence[Request]) -> list[list[Tensor]]:
        """Run the program of all ranks, or of one of them; return the outputs of each.

        Raises:
            RuntimeError: if the ranks' programs differ, or the child refuses or has ended.
        """
        hlo = same_program([each.hlo for each in requests])
        number = self._compiled(hlo, len(requests))
        self.runs.append(number)
        arguments = [[*map(to_array, each.inputs)] for each in requests]
        return [[*map(to_tensor, outputs)] for outputs in self._ask("run", number, arguments)]

    def is_joint(self, number: int) -> bool:
        """Return whether program ``number`` is one of all ranks together."""
        return self._ranks_of[number] > 1

    def memory(self, hlo: bytes, num_ranks: int) -> int:
        """Compile a program; return the bytes that a run of it takes for all ranks together."""
        return int(self._ask("memory", self._compiled(hlo, num_ranks)))

    def __enter__(self) -> VirtualChips:
        return self

    def __exit__(self, *error: object) -> None:
        self._child.close()

    def _compiled(self, hlo: bytes, num_ranks: int) -> int:
        key = f"{hashlib.sha256(hlo).hexdigest()} {num_ranks}"
        if key not in self._known:
            self._ask("compile", hlo, num_ranks)
            self._known[key] = len(self.programs)
            self.programs.append(hlo)
            self._ranks_of.append(num_ranks)
        return self._known[key]

    def _ask(self, *request: Any) -> Any:
        error, answer = self._child.ask(*request)
        if error:
            raise RuntimeError(f"the virtual chips cannot run the program: {error}")
        return answer


def same_program(programs: Sequence[bytes]) -> bytes:
    """Return the program that all ranks have.

    Raises:
        RuntimeError: if they differ.
    """
    ranks = ranks_by_name(programs)
    if len(ranks) > 1:
        groups = "; ".join(f"ranks {which}" for which in ranks.values())
        raise RuntimeError(
            f"the ranks have traced {len(ranks)} different programs: {groups}. On a TPU ranks that "
            f"communicate run one program; look for code that depends on the rank, as shapes, "
            f"numbers that are not tensors, or results that only one rank keeps."
        )
    return programs[0]


# ---------------------------------------------------------------- values on their way

Array = np.ndarray[Any, Any]


def to_array(tensor: Tensor) -> Array:
    """Return a host tensor as it is sent, of a dtype of ``ml_dtypes`` if numpy has none."""
    import ml_dtypes
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return data.view(getattr(ml_dtypes, name, None) or name).reshape(tensor.shape)


def to_tensor(array: Array) -> Tensor:
    """Return what ``to_array`` was given."""
    import torch

    dtype = getattr(torch, array.dtype.name)
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    writable = array if array.flags.writeable else array.copy()
    return torch.from_numpy(writable.reshape(-1).view(np.uint8)).view(dtype).reshape(array.shape)
