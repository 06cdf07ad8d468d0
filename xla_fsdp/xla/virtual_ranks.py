"""Virtual ranks of a TPU job: programs are traced as for a TPU, and run elsewhere with values.

Each rank is a thread with a CPU device of torch_xla, which holds its values and executes nothing.
Where a rank would execute what it has traced, its program and the values of the program's inputs
are handed over, and the results take the place of the pending tensors.
Invariants: the programs are those of a TPU; one with collectives is handed over by all ranks at
once, one without by each rank alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch_xla
from torch import Tensor

from xla_fsdp.distributed.garbage import only_new_objects_collected
from xla_fsdp.distributed.turns import TurnRun
from xla_fsdp.xla import ops
from xla_fsdp.xla.fake_rank import AbsentTpu
from xla_fsdp.xla.graph import inputs_of, program_key, program_of, tensor_id
from xla_fsdp.xla.host import copies
from xla_fsdp.xla.programs import next_seed

FIRST_SEED = 101
"""torch_xla's seed of a device that has not been given one."""

COLLECTIVES = (
    b"all-gather", b"all-reduce", b"reduce-scatter", b"all-to-all", b"collective-permute"
)  # fmt: skip
"""Opcodes of HLO, as they are in a serialized module."""


@dataclass(frozen=True)
class Request:
    """One rank's program, and values of its inputs in host memory."""

    hlo: bytes
    inputs: list[Tensor]


Execute = Callable[[list[Request]], list[list[Tensor]]]
"""Runs programs of all ranks at once, or of one alone; returns the outputs of each, on the host."""


class VirtualRanks(AbsentTpu):
    """The virtual ranks of one run.

    Args:
        run: whose threads they are.
        coords: coordinates of every rank on the torus.
        execute: runs their programs.
    """

    def __init__(self, run: TurnRun, coords: Sequence[Sequence[int]], execute: Execute) -> None:
        super().__init__(coords)
        self._run = run
        self._execute = execute
        self._root_seeds: dict[int, int] = {}
        self._programs: dict[tuple[int, bytes], bytes] = {}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace torch_xla's functions inside the block, in which ranks can run."""
        self._set_seed = torch_xla._XLAC._xla_set_rng_seed
        internals: dict[str, Any] = {
            "_xla_set_rng_seed": self._seed,
            "_xla_sync_live_tensors": self._sync_live_tensors,
            "_xla_warm_up_cache": self._compile,
            "_run_cached_graph": self._run_compiled,
        }
        with self.in_use(None), mock.patch.multiple(torch_xla._XLAC, **internals):
            level_node_counts(len(self._coords))
            with only_new_objects_collected():  # lists of live tensors are then short, too
                yield

    # ------------------------------------------------------------ a RankRuntime

    def compares_values(self) -> bool:
        return False

    def has_kernels(self) -> bool:
        return False  # its programs run on CPU

    def exchange(self, data: bytes) -> list[bytes]:
        return self._run.exchange(ops.index_of(ops.device()), data)

    def before_read(self, tensors: Sequence[Any]) -> None:
        pending = [each for each in tensors if ops.is_pending(each)]
        if pending:
            self._compute(ops.index_of(pending[0].device), pending)

    def sync(self, on: str, mark: Callable[[bool], None], wait: bool) -> None:
        self._sync_live_tensors(on)
        # As torch_xla does at the end of a step.
        self._seed(next_seed(self._root_seeds[ops.index_of(on)]), on)

    # ------------------------------------------------------------ threads

    def enter(self, rank: int) -> None:
        """Let the calling thread be ``rank``, when it has its first turn."""
        torch_xla._XLAC._xla_set_default_device(f"xla:{rank}")
        ops.let_backward_reach_devices()
        self._run.begin(rank)
        self._seed(FIRST_SEED, f"xla:{rank}")

    def leave(self, rank: int) -> None:
        """Discard what an unfinished step left."""
        ops.discard_unfinished(rank)

    # ------------------------------------------------------------ in place of torch_xla's

    def _sync_live_tensors(
        self, device: str = "", devices: Sequence[str] = (), wait: bool = True
    ) -> None:
        on = device or torch_xla._XLAC._xla_get_default_device()
        own = [each for each in ops.live_tensors() if str(each.device) == on]
        self._compute(ops.index_of(on), [each for each in own if ops.is_pending(each)])

    def _compile(self, tensors: Sequence[Tensor], devices: Sequence[str]) -> None:
        on = torch_xla._XLAC._xla_get_default_device()
        self._program(ops.index_of(on), list(tensors))

    def _run_compiled(self, key: bytes, inputs: Sequence[Tensor]) -> list[Tensor]:
        rank = ops.index_of(torch_xla._XLAC._xla_get_default_device())
        return self._execute_on(rank, self._programs[rank, bytes(key)], inputs)

    def _seed(self, seed: int, device: str = "") -> None:
        on = device or torch_xla._XLAC._xla_get_default_device()
        self._root_seeds[ops.index_of(on)] = seed
        self._set_seed(seed, on)

    # ------------------------------------------------------------ programs

    def _compute(self, rank: int, tensors: Sequence[Tensor]) -> None:
        if not tensors:
            return
        numbers = [tensor_id(each) for each in tensors]  # before some are replaced
        pending = dict(zip(numbers, tensors, strict=True))
        results = [pending[each] for each in sorted(pending)]  # in the order of their making
        inputs = inputs_of(results).values
        outputs = self._execute_on(rank, self._program(rank, results), inputs)
        computed = dict(zip(sorted(pending), outputs, strict=True))
        for number, each in zip(numbers, tensors, strict=True):
            ops.release(each, computed[number])  # of tensors that autograd has saved, too
            # Only this forgets what views and changes in place were traced, for later programs.
            if torch._is_functional_tensor(each):  # not what another one wraps
                each.data = computed[number]

    def _program(self, rank: int, results: list[Tensor]) -> bytes:
        """Lower the graph of ``results``, unless this rank has done so before."""
        key = rank, program_key(results)
        if key not in self._programs:
            self._programs[key] = program_of(results)
        return self._programs[key]

    def _execute_on(self, rank: int, hlo: bytes, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run a program of this rank, together with the others if it has collectives."""
        request = Request(hlo, copies(inputs))
        if any(opcode in hlo for opcode in COLLECTIVES):
            outputs = self._run.meet(rank, "a program with collectives", request, self._execute)
        else:
            [outputs] = self._execute([request])
        on = f"xla:{rank}"
        return list(torch_xla._XLAC._xla_tensors_from_aten(outputs, [on] * len(outputs), None))


def prepare_devices(num_ranks: int) -> None:
    """Start torch_xla's CPU devices, at least ``num_ranks``.

    Raises:
        RuntimeError: if it has started with fewer, or on something else.
    """
    if not ops.runtime_started():
        given = os.environ.get("CPU_NUM_DEVICES", "")
        count = max(int(given) if given.isdecimal() else 0, num_ranks)
        os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(count))
    kind, count = os.environ.get("PJRT_DEVICE"), ops.local_device_count()
    if kind != "CPU" or count < num_ranks:
        raise RuntimeError(
            f"a rehearsal of {num_ranks} ranks wants as many CPU devices, and this process uses "
            f"PJRT_DEVICE={kind} with {count} device(s). Run it in a process of its own, or start "
            f"Python with PJRT_DEVICE=CPU and CPU_NUM_DEVICES={num_ranks}"
        )


def level_node_counts(num_ranks: int) -> None:
    """Let the autograd threads of the ranks' devices have made the same number of nodes.

    They count for as long as the process lives, and autograd orders by these numbers what is
    independent in a second backward: the ranks' programs would otherwise be in different orders.
    """
    most = max(count_nodes(rank, 0) for rank in range(num_ranks))
    for rank in range(num_ranks):
        count_nodes(rank, most)


def count_nodes(rank: int, least: int) -> int:
    """Let the autograd thread of a rank's device make nodes until there have been ``least``; return
    how many there have been."""
    found: list[int] = []
    with torch.enable_grad():
        start = torch.zeros((), device=f"xla:{rank}", requires_grad=True)
        end = _Counting.apply(start, least, found)
    torch.autograd.grad(end, start, torch.zeros_like(end))
    return found[0]


class _Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, least: int, found: list[int]) -> Tensor:
        ctx.least, ctx.found = least, found
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        with torch.enable_grad():
            leaf = torch.zeros((), requires_grad=True)
            while torch.autograd._get_sequence_nr() < ctx.least:
                leaf.view(())
        ctx.found.append(torch.autograd._get_sequence_nr())
        return grad, None, None
