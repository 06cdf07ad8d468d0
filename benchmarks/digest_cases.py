"""The programs that ``program_digests`` compares: GPTs on fake ranks, small models on CPU ranks.

A program is that of a later step, with the optimizer's state among its inputs. Sizes of the small
models are odd, so that the number of ranks does not divide them (except where it must).
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpt
from xla_fsdp import (
    LinearCrossEntropy,
    MixedPrecisionPolicy,
    StreamedEmbedding,
    SyncBatchNorm,
    XlaFullyShardedDataParallel,
    checkpoint_module,
    clip_grad_norm_,
    fully_shard,
    init_mesh,
    launch,
    one_rank_at_a_time,
    scan_blocks,
)
from xla_fsdp.optim import HighPrecisionOptimizer, ZeroRedundancyOptimizer, step_in_backward
from xla_fsdp.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# isort: split
# The only imports from this package that are not public.
from xla_fsdp.preflight.topologies import find_topology
from xla_fsdp.preflight.trace.tracing import trace_step

SHAPE, TOPOLOGY = gpt.Shape(width=256, blocks=4), "v5e:4x4"

WIDTH, CLASSES, FEATURES, ROWS = 11, 7, 5, 5
STEPS = 3


@dataclass(frozen=True)
class Program:
    """One rank's program."""

    hlo: bytes  # serialized HLO module
    labels: tuple[str, ...]  # of each parameter: facts that the HLO does not show
    aliases: tuple[tuple[int, int], ...] = ()  # pairs (parameter, result) that share memory


# ---------------------------------------------------------------- fake ranks


def gpt_programs(name: str) -> list[Program]:
    """Return the programs of a step of a GPT of module ``gpt``; call in a new process."""
    with _noted_inputs() as noted:
        traced = trace_step(lambda: getattr(gpt, name)(SHAPE), find_topology(TOPOLOGY).coords)
    programs = []
    for each, inputs in zip(traced.programs, noted, strict=True):
        roles = [given.role for given in each.inputs]
        labels = tuple(map(" ".join, zip(roles, _labels(inputs), strict=True)))
        programs.append(Program(each.hlo, labels, tuple(each.aliases)))
    return programs


@contextlib.contextmanager
def _noted_inputs() -> Iterator[list[list[Tensor]]]:
    import torch_xla

    ask = torch_xla._XLAC._get_tensors_xla_device_data_node
    noted: list[list[Tensor]] = []

    def note(tensors: list[Tensor]) -> tuple[list[int], list[Tensor]]:
        found = ask(tensors)
        if len(tensors) > 1:  # not for the hash of one tensor's graph
            noted.append(found[1])
        return found

    torch_xla._XLAC._get_tensors_xla_device_data_node = note
    try:
        yield noted
    finally:
        torch_xla._XLAC._get_tensors_xla_device_data_node = ask


def _labels(inputs: list[Tensor]) -> tuple[str, ...]:
    return tuple(map(_label, inputs))


def _label(tensor: Tensor) -> str:
    if not tensor.is_floating_point():
        return hashlib.sha256(str(tensor.tolist()).encode()).hexdigest()
    return f"{tensor.item():.5g}" if tensor.dim() == 0 else ""  # rounded, as some are computed


# ---------------------------------------------------------------- small models


class Block(nn.Module):
    """Pre-norm residual MLP."""

    def __init__(self, width: int, hidden: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm = norm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, a pair of layers that share one weight, a scalar, a frozen layer and a head."""

    def __init__(
        self,
        width: int = WIDTH,
        hidden: int = 17,
        depth: int = 2,
        norm: type[nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList([Block(width, hidden, norm) for _ in range(depth)])
        self.mid, self.mid2 = nn.Linear(width, width), nn.Linear(width, width)
        self.mid2.weight = self.mid.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        x = self.mid2(torch.tanh(self.mid(x))) * self.scale
        return F.cross_entropy(self.head(self.frozen(x)).float(), target)


class StreamedNet(nn.Module):
    """Looks up rows by the signs of the features; embedding and head are chunked."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = StreamedEmbedding(37, 128, pieces=3)
        self.blocks = nn.ModuleList([Block(128, 255, nn.LayerNorm) for _ in range(3)])
        self.head = LinearCrossEntropy(128, 29, pieces=3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        columns = torch.arange(FEATURES, device=x.device)
        x = self.tokens((((x > 0) * 2**columns).sum(1, keepdim=True) + columns) % 37).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x, target)


# ---------------------------------------------------------------- CPU ranks


@dataclass(frozen=True)
class Case:
    """One way to shard and train a model.

    Args:
        build: makes the unsharded model.
        shard: shards it.
        optimizer: makes an optimizer of its parameters.
        micro_batches: passes per step; all but the last run under ``no_sync``.
        clip: whether to clip gradients by norm.
        in_backward: whether the optimizer steps in backward.
        num_ranks: the numbers of ranks that it runs on.
    """

    build: Callable[[], nn.Module]
    shard: Callable[[Any], Any]
    optimizer: Callable[..., Any] = torch.optim.AdamW
    micro_batches: int = 1
    clip: bool = False
    in_backward: bool = False
    num_ranks: tuple[int, ...] = (3,)


def wrapped(model: Any, *, deep: bool = False, remat: bool = False, **options: Any) -> Any:
    """Wrap each block, embedding, head and the model; with ``deep``, also layers of blocks."""
    for index, block in enumerate(model.blocks):
        if deep:
            block.norm, block.up = (
                XlaFullyShardedDataParallel(each, **options) for each in (block.norm, block.up)
            )
        inner = checkpoint_module(block) if remat else block
        model.blocks[index] = XlaFullyShardedDataParallel(inner, **options)
    for name in ("tokens", "head"):
        if hasattr(model, name):
            part = XlaFullyShardedDataParallel(getattr(model, name), **options)
            setattr(model, name, part)
    return XlaFullyShardedDataParallel(model, **options)


def in_place(model: Any, **options: Any) -> Any:
    """Apply ``fully_shard``, to the layers that share a weight together."""
    fully_shard([model.mid, model.mid2], **options)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def scanned(model: Any, *, stacked: bool = False, **options: Any) -> Any:
    """Wrap, with the blocks as one loop."""
    model = wrapped(model, **options)
    scan_blocks(model.blocks, stacked=stacked)
    return model


def replicated(model: nn.Module) -> nn.Module:
    import torch_xla

    model = model.to(torch_xla.device())
    model.mid2.weight = model.mid.weight  # untied by the line above
    return model


def tensor_parallel(model: Any) -> Any:
    """Parallelize blocks over two ranks, and shard over the two others."""
    mesh = init_mesh((2, 2), ("shard", "tensor"))
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return wrapped(parallelize_module(model, mesh["tensor"], plan), mesh=mesh["shard"])


def hybrid(model: Any) -> Any:
    return wrapped(model, mesh=init_mesh((2, 2), ("replica", "shard")))


def wide() -> nn.Module:
    """Make a model with shards that are sent in rows."""
    return Net(128, 255, depth=3)


def even() -> nn.Module:
    """Make a model whose sizes two ranks divide."""
    return Net(12, 18)


def with_statistics() -> nn.Module:
    return SyncBatchNorm.convert_sync_batchnorm(Net(norm=nn.BatchNorm1d))


def _zero(params: Any, **options: Any) -> Any:
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, **options)


def _high_precision(params: Any, **options: Any) -> Any:
    return HighPrecisionOptimizer(params, torch.optim.AdamW, **options)


def _half(model: nn.Module) -> Any:
    return wrapped(model.bfloat16(), compute_dtype=torch.bfloat16)


def _bf16(model: Any) -> Any:
    return wrapped(model, compute_dtype=torch.bfloat16, fp32_reduce_scatter=True)


def _in_place_bf16(model: Any) -> Any:
    return in_place(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


CASES = {
    "blocks": Case(Net, wrapped, num_ranks=(1, 3)),
    "root": Case(Net, XlaFullyShardedDataParallel),
    "deep": Case(Net, lambda model: wrapped(model, deep=True)),
    "flat": Case(Net, lambda model: wrapped(model, flatten_parameters=True), num_ranks=(1, 3)),
    "rows": Case(wide, lambda model: wrapped(model, shard_param_on_dim_0=True)),
    "bf16": Case(Net, _bf16, num_ranks=(1, 3)),
    "bf16_parameters": Case(even, _half, optimizer=_high_precision),
    "remat": Case(Net, lambda model: wrapped(model, remat=True), num_ranks=(1, 3)),
    "batch_norm": Case(with_statistics, wrapped),
    "in_place": Case(Net, in_place, num_ranks=(1, 3)),
    "in_place_bf16": Case(Net, _in_place_bf16),
    "scan": Case(wide, scanned, num_ranks=(1, 3)),
    "stacked": Case(wide, lambda model: scanned(model, stacked=True)),
    "streamed": Case(
        StreamedNet,
        lambda model: scanned(model, stacked=True, shard_param_on_dim_0=True),
        in_backward=True,
        num_ranks=(1, 3),
    ),
    "no_sync": Case(Net, wrapped, micro_batches=3, num_ranks=(1, 3)),
    "clip": Case(Net, wrapped, clip=True),
    "zero": Case(Net, replicated, optimizer=_zero),
    "hybrid": Case(Net, hybrid, num_ranks=(4,)),
    "hybrid_no_sync": Case(Net, hybrid, micro_batches=2, clip=True, num_ranks=(4,)),
    "tensor_parallel": Case(even, tensor_parallel, clip=True, num_ranks=(4,)),
}


def rank_programs(num_ranks: int) -> list[dict[str, Program]]:
    """Return, by rank, the programs of all cases with so many ranks; call in a new process."""
    alone = Alone(num_ranks)
    return launch(_programs, (num_ranks, alone), num_ranks=num_ranks) or []


def _programs(rank: int, num_ranks: int, alone: Alone) -> dict[str, Program]:
    cases = {name: case for name, case in CASES.items() if num_ranks in case.num_ranks}
    return {name: _program(rank, case, alone) for name, case in cases.items()}


class Alone:
    """Lets the ranks, which are threads, do something one after the other while the others wait."""

    def __init__(self, num_ranks: int) -> None:
        self._all = threading.Barrier(num_ranks, timeout=300)
        self._turn = threading.Lock()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for all ranks; let one at a time into the block."""
        self._all.wait()
        with self._turn:
            yield
        self._all.wait()


def _program(rank: int, case: Case, alone: Alone) -> Program:
    import torch_xla

    with one_rank_at_a_time(), torch.random.fork_rng():
        torch.manual_seed(5)
        model = case.build()
    model = case.shard(model)
    optimizer = case.optimizer(model.parameters(), lr=1e-2)
    if case.in_backward:
        step_in_backward(model, optimizer)
    for index in range(STEPS):
        torch_xla.sync()
        optimizer.zero_grad()
        for batch in range(case.micro_batches):
            last = batch == case.micro_batches - 1
            with contextlib.nullcontext() if last else model.no_sync():
                model(*_data(rank, index, batch)).backward()
        if case.clip:
            clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with alone.turn():
        pending = _pending()
        program = torch_xla._XLAC._get_xla_tensors_hlo_proto(pending)
        _, inputs = torch_xla._XLAC._get_tensors_xla_device_data_node(pending)
        labels = _labels(inputs)
    torch_xla.sync()
    return Program(program, labels)


def _data(rank: int, step: int, batch: int) -> tuple[Tensor, Tensor]:
    import torch_xla

    generator = torch.Generator().manual_seed(100 * rank + 10 * step + batch)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    return x.to(torch_xla.device()), y.to(torch_xla.device())


def _pending() -> list[Tensor]:
    import torch_xla

    xla = torch_xla._XLAC
    gc.collect()
    found = {xla._xla_get_tensor_id(tensor): tensor for tensor in _tensors_on(torch_xla.device())}
    pending = [
        number for number in found if xla._check_tensor_need_materialization([found[number]])[0]
    ]
    return [found[number] for number in sorted(pending)]


def _tensors_on(device: torch.device) -> Iterator[Tensor]:
    for tensor in [each for each in gc.get_objects() if issubclass(type(each), Tensor)]:
        for each in (tensor, tensor.grad if tensor.is_leaf else None):
            if each is not None and each.device == device:
                yield each
