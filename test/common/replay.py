"""Training jobs for ``compile_step``: what they train, how, and what happens between the steps.

``outcome(job, way)`` trains for ``STEPS`` steps: by plain steps with a sync ("traced"), or by a
compiled step ("replayed").
"""

from __future__ import annotations

import copy
import functools
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common.models import CLASSES, FEATURES, AttentionNet, BatchNormNet, Net
from test.common.scan import of_kind
from test.common.scenarios import fsdp, make, nested

STEPS = 30
ROWS = 6


@dataclass
class Job:
    """What is trained, and how.

    Args:
        model: sharded, on this rank's device.
        optimizer: of its parameters.
        step: takes a batch; returns tensors or plain values.
        between: called with the number of the step that comes next.
        batch: makes the batch for a step.
        state: what else the step reads or changes on the device.
    """

    model: Any
    optimizer: Any
    step: Callable[..., Any]
    between: Callable[[int], Any] = lambda number: None
    batch: Callable[[int], tuple[Any, ...]] = field(default_factory=lambda: batch)
    state: tuple[Any, ...] = ()

    def compiled(self, **options: Any) -> Any:
        """Return the compiled step."""
        from xla_fsdp import compile_step

        return compile_step(self.step, state=[self.model, self.optimizer, *self.state], **options)


def batch(number: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Return features [rows, FEATURES] and classes [rows] of this rank for a step."""
    import torch_xla
    import torch_xla.runtime as xr

    draw = torch.Generator().manual_seed(1000 * number + xr.global_ordinal())
    device = torch_xla.device()
    x = torch.randn(rows, FEATURES, generator=draw)
    y = torch.randint(0, CLASSES, (rows,), generator=draw)
    return x.to(device), y.to(device)


def outcome(make_job: Callable[[], Job], way: str) -> dict[str, Any]:
    """Train; return losses, values, counts of traces and replays."""
    import torch_xla

    torch_xla.manual_seed(17)
    job = make_job()
    step: Any = job.step if way == "traced" else job.compiled(check=1)
    torch_xla.sync()
    losses = []
    for number in range(STEPS):
        job.between(number)
        loss = step(*job.batch(number))
        if way == "traced":
            torch_xla.sync()
        losses.append(loss.item() if isinstance(loss, Tensor) else loss)
    values = {name: value.detach().cpu() for name, value in job.model.state_dict().items()}
    params = [param for group in job.optimizer.param_groups for param in group["params"]]
    values |= {
        f"{n}.{name}": value.cpu()
        for n, state in enumerate(map(job.optimizer.state.get, params))  # not as they were made
        if state is not None
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
    counts = (0, {}) if way == "traced" else (step.replays, dict(step.traces))
    return {"losses": losses, "values": values, "replays": counts[0], "traces": counts[1]}


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return what differs, to the bit."""
    found = [
        f"loss {n}: {a!r} {b!r}"
        for n, (a, b) in enumerate(zip(first["losses"], second["losses"], strict=True))
        if repr(a) != repr(b)  # NaN is equal to itself here
    ]
    a, b = first["values"], second["values"]
    return (
        found + [name for name in a if not torch.equal(a[name], b[name])] + [*(a.keys() ^ b.keys())]
    )


# ---------------------------------------------------------------- jobs


def _train(model: Any, optimizer: Any, clip: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if clip:
            model.clip_grad_norm_(clip)
        optimizer.step()
        return loss

    return step


def sgd() -> Job:
    """A learning rate that falls, a momentum that changes, state dicts that are loaded."""
    model = nested(make(Net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    saved: dict[str, Any] = {}

    def between(number: int) -> None:
        if number:
            schedule.step()
        if number == 12:
            optimizer.param_groups[0]["momentum"] = 0.8
        if number == 15:
            saved.update(copy.deepcopy({"m": model.state_dict(), "o": optimizer.state_dict()}))
        if number == 20:
            model.load_state_dict(saved["m"])
            optimizer.load_state_dict(saved["o"])

    return Job(model, optimizer, _train(model, optimizer), between)


def adamw() -> Job:
    """Two groups, a learning rate that changes in every step, clipping."""
    model = nested(make(Net))
    params = list(model.parameters())
    groups = [{"params": params[:3], "weight_decay": 0.0}, {"params": params[3:], "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    def between(number: int) -> None:
        if number:
            schedule.step()
        if number == 15:
            optimizer.param_groups[1]["weight_decay"] = 0.05
        if number == 22:
            with model.summon_full_params(model), torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5)

    return Job(model, optimizer, _train(model, optimizer, clip=0.5), between)


class Dropped(nn.Module):
    """Blocks with dropout, rematerialized."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.4), nn.GELU()) for _ in range(2)
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def dropout() -> Job:
    """Random numbers, also recomputed ones; a seed set between steps."""
    import torch_xla

    from xla_fsdp import checkpoint_module

    model = make(Dropped)
    model.blocks[0] = checkpoint_module(model.blocks[0])
    model = nested(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def between(number: int) -> None:
        if number == 12:
            torch_xla.manual_seed(99)

    return Job(model, optimizer, _train(model, optimizer), between)


def batch_norm() -> Job:
    """Buffers that the step changes; evaluation, a new shape, and a frozen parameter in between."""
    import torch_xla

    model = nested(make(BatchNormNet))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    train = _train(model, optimizer)

    def step(x: Tensor, y: Tensor) -> Tensor:
        if model.training:
            return train(x, y)
        with torch.no_grad():
            return F.cross_entropy(model(x), y)

    def between(number: int) -> None:
        if number in (10, 12):
            model.train(number == 12)
        if number in (16, 20):
            next(model.parameters()).requires_grad_(number == 20)
        if number == 24:
            for param in model.parameters():
                param.data.mul_(0.9)
            torch_xla.sync()

    def batches(number: int) -> tuple[Tensor, Tensor]:
        return batch(number, 4 if number in (13, 14, 25) else ROWS)

    return Job(model, optimizer, step, between, batches)


def accumulation() -> Job:
    """Every third step updates; the others leave their gradients."""
    model = nested(make(Net))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: Tensor, y: Tensor, last: bool) -> Tensor:
        with nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return Job(model, optimizer, step, batch=lambda number: (*batch(number), number % 3 == 2))


def averages() -> Job:
    """Averages of the weights that the step keeps: changed in place, and replaced."""
    model = nested(make(Net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = _train(model, optimizer)
    kept = [p.detach().clone() for p in model.parameters()]
    means = {"first": kept[0] * 0.0}
    model.register_buffer("mean_loss", kept[0].sum() * 0.0)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = inner(x, y)
        with torch.no_grad():
            for average, param in zip(kept, model.parameters(), strict=True):
                average.lerp_(param, 0.1)
            means["first"] = means["first"] * 0.9 + kept[0]
            model.mean_loss = model.mean_loss * 0.5 + loss.detach()
        return loss.detach() + means["first"].sum()

    return Job(model, optimizer, step, state=(kept, means))


def in_backward() -> Job:
    """Parameters are stepped in backward."""
    from xla_fsdp.optim import step_in_backward

    model = nested(make(Net))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    step_in_backward(model, optimizer)
    inner = _train(model, optimizer)
    return Job(model, optimizer, inner, lambda number: number and schedule.step())


def _of_blocks(kind: str, *, steps_in_backward: bool) -> Job:
    return _hidden_job(of_kind(kind), steps_in_backward=steps_in_backward)


def _hidden_job(model: Any, *, steps_in_backward: bool = False) -> Job:
    from test.common.scan import batch as hidden
    from xla_fsdp.optim import step_in_backward

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if steps_in_backward:
        step_in_backward(model, optimizer)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Job(model, optimizer, step, batch=lambda number: (hidden(number),))


def scanned() -> Job:
    """Blocks in a loop."""
    return _of_blocks("scanned", steps_in_backward=False)


def stacked() -> Job:
    """Blocks in a loop over stacked parameters, which are stepped in it."""
    return _of_blocks("stacked", steps_in_backward=True)


def attended() -> Job:
    """Blocks with the package's attention, in a loop that keeps its output."""
    from xla_fsdp import scan_blocks

    model = nested(make(AttentionNet))
    model.scan = scan_blocks(model.blocks, remat=["attention"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Job(model, optimizer, _train(model, optimizer))


def whole() -> Job:
    """``fully_shard``."""
    from xla_fsdp import fully_shard

    model = make(Net)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Job(model, optimizer, _train(model, optimizer))


def zero1() -> Job:
    """ZeRO-1, with clipping."""
    import torch_xla

    from xla_fsdp.optim import ZeroRedundancyOptimizer

    model = make(Net).to(torch_xla.device())
    model.mid2.weight = model.mid.weight
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3
    )

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        return loss

    return Job(model, optimizer, step)


def scaled() -> Job:
    """Scaled losses, some of which overflow; the scale grows and falls."""
    from torch_xla.amp import syncfree

    from xla_fsdp import ShardedGradScaler

    model = nested(make(Net))
    optimizer = syncfree.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = ShardedGradScaler(init_scale=2.0**10, growth_interval=4)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    def batches(number: int) -> tuple[Tensor, Tensor]:
        x, y = batch(number)
        return (x * 1e30, y) if number % 7 == 5 else (x, y)

    return Job(model, optimizer, step, batch=batches, state=(scaler,))


def offloaded() -> Job:
    """Blocks in a loop, whose inputs wait in the host's memory."""
    from xla_fsdp import scan_blocks

    model = of_kind("single")
    scan_blocks(model.blocks, offload_activations=True)
    return _hidden_job(model)


def streamed() -> Job:
    """A head and an embedding that are never whole."""
    import torch_xla

    from xla_fsdp import LinearCrossEntropy, StreamedEmbedding

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            tokens, head = nn.Embedding(48, 16), nn.Linear(16, 48)
            self.tokens = StreamedEmbedding.from_embedding(tokens)
            self.head = LinearCrossEntropy.from_linear(head)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.tokens(ids), ids)

    model = make(Language)
    model.tokens = fsdp(model.tokens, shard_param_on_dim_0=True)
    model.head = fsdp(model.head, shard_param_on_dim_0=True)
    model = fsdp(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(ids)
        loss.backward()
        optimizer.step()
        return loss

    def ids(number: int) -> tuple[Tensor]:
        draw = torch.Generator().manual_seed(number)
        return (torch.randint(0, 48, (2, 8), generator=draw).to(torch_xla.device()),)

    return Job(model, optimizer, step, batch=ids)


def tensor_parallel() -> Job:
    """Each layer cut over all ranks, with sequence and loss parallelism."""
    import torch_xla
    import torch_xla.runtime as xr

    from test.common import tensor_training as tensors
    from xla_fsdp import clip_grad_norm_
    from xla_fsdp.tensor_parallel import loss_parallel

    shape = (("shard", 1), ("tensor", xr.world_size()))
    case = tensors.Case("Gpt", shape, sequence=True, loss=True, shard="wrapped")
    mesh = case.make_mesh()
    model = tensors.sharded(tensors.parallelized(case, mesh), case, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(ids: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        with loss_parallel():
            loss = tensors.loss_of(model(ids), targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    def parts(number: int) -> tuple[Tensor, ...]:
        return tuple(t[number % 3, 0].to(torch_xla.device()) for t in tensors.batches(1))

    return Job(model, optimizer, step, batch=parts)


def changed() -> Job:
    """Hooks, parameters of the optimizer, options, a checkpoint and summoned values, in between."""
    from xla_fsdp import load_checkpoint, save_checkpoint

    model = nested(make(Net))
    first, *others = model.parameters()
    optimizer = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.99))
    folder = _folder()
    handles: list[Any] = []

    def between(number: int) -> None:
        if number == 5:
            handles.append(model.head.register_forward_hook(lambda m, i, out: out * 1.5))
        if number == 8:
            optimizer.add_param_group({"params": [first], "lr": 2e-3})
        if number == 12:
            handles.append(others[0].register_hook(lambda grad: grad * 0.5))
            optimizer.param_groups[0]["betas"] = (0.8, 0.99)
        if number == 15:
            save_checkpoint(folder, model, optimizer, step=15)
        if number == 17:
            handles[0].remove()
        if number == 20:
            load_checkpoint(folder, model, optimizer)
        if number == 25:
            handles[1].remove()

    return Job(model, optimizer, _train(model, optimizer), between)


def accelerated() -> Job:
    """Accelerate's calls, in a function."""
    from xla_fsdp.integrations.accelerate import Accelerator

    accelerator = Accelerator(shard=fsdp)
    model = make(Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, 20)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Job(model, optimizer, step, lambda number: number and schedule.step())


def _folder() -> str:
    """Return a new directory that all ranks know."""
    import tempfile

    from xla_fsdp.xla import host

    return host.exchange(tempfile.mkdtemp().encode())[0].decode()


class CountingSGD(torch.optim.SGD):
    """SGD whose groups hold numbers that its steps compute from others."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.update(count=0, sum_of_rates=0.0)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            group["sum_of_rates"] = group["sum_of_rates"] + group["lr"] / group["count"]
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad, alpha=-group["lr"] / group["sum_of_rates"])


def counting() -> Job:
    """Numbers of groups that the optimizer changes itself."""
    model = nested(make(Net))
    optimizer = CountingSGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    step = _train(model, optimizer)
    return Job(model, optimizer, step, lambda number: number and schedule.step())


def seeded() -> Job:
    """Dropout recomputed around and inside of its unit; seeds of both kinds set between steps."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    from xla_fsdp import checkpoint_module

    model = make(Dropped)
    model.blocks[0] = checkpoint_module(fsdp(model.blocks[0]))
    model.blocks[1] = fsdp(checkpoint_module(model.blocks[1]))
    model = fsdp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def between(number: int) -> None:
        if number in (7, 13, 14):
            torch_xla.manual_seed(number)
        if number == 20:
            xm.set_rng_state(xm.get_rng_state() + 5)

    return Job(model, optimizer, _train(model, optimizer), between)


def optimized(name: str, lr: Any = 1e-3, **options: Any) -> Job:
    """An optimizer of torch, with a learning rate that changes in every step."""
    model = nested(make(Net))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=lr, **options)
    # Not down to zero, by which Adam divides with capturable=True.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20, eta_min=1e-4)
    step = _train(model, optimizer)
    return Job(model, optimizer, step, lambda number: number and schedule.step())


OPTIMIZERS: dict[str, Callable[[], Job]] = {
    "adam_amsgrad": functools.partial(optimized, "Adam", amsgrad=True),
    "adam_on_device": functools.partial(optimized, "Adam", capturable=True),
    "adamax": functools.partial(optimized, "Adamax"),
    "adagrad": functools.partial(optimized, "Adagrad", lr_decay=0.01),
    "adadelta": functools.partial(optimized, "Adadelta"),
    "asgd_on_device": functools.partial(optimized, "ASGD", capturable=True),
    "nadam_on_device": functools.partial(optimized, "NAdam", capturable=True),
    "radam": functools.partial(optimized, "RAdam"),
    "rmsprop": functools.partial(optimized, "RMSprop", momentum=0.5, centered=True),
    "rprop_on_device": functools.partial(optimized, "Rprop", capturable=True),
}
REFUSED_OPTIMIZERS = ("NAdam", "ASGD", "Adafactor")
"""With numbers in their states that a step multiplies, or reads from the device."""

JOBS: dict[str, Callable[[], Job]] = {
    job.__name__: job
    for job in (
        sgd,
        adamw,
        dropout,
        seeded,
        batch_norm,
        accumulation,
        averages,
        in_backward,
        scanned,
        stacked,
        attended,
        offloaded,
        streamed,
        whole,
        tensor_parallel,
        zero1,
        scaled,
        changed,
        counting,
        accelerated,
    )
} | OPTIMIZERS


def run_jobs(rank: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """Return, by job, what differs between traced and replayed steps, and how many were replayed;
    or the error."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            traced, replayed = (outcome(JOBS[name], way) for way in ("traced", "replayed"))
        except Exception as error:
            found[name] = {"error": "".join(traceback.format_exception(error))}
            continue
        found[name] = {
            "error": "",
            "differences": differences(traced, replayed),
            "replays": replayed["replays"],
            "traces": replayed["traces"],
        }
    return found
