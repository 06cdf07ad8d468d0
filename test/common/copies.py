"""Copies of parameters that are made between steps: averages, snapshots, weights that are swapped.

Each way is a generator: it is advanced after every step, and yields the tensors that it keeps.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from test.common.replay import JOBS, Job

STEPS = 8
Kept = Iterator[list[Tensor]]


def _snapshots(make: Callable[[Tensor], Tensor], job: Job) -> Kept:
    found: list[Tensor] = []
    while True:
        found += [make(param) for param in job.model.parameters()]
        yield found


def _followed(update: Callable[[list[Tensor], list[Tensor]], Any], job: Job) -> Kept:
    params = list(job.model.parameters())
    targets = [torch.zeros_like(param) for param in params]
    while True:
        update(targets, [param.detach() for param in params])
        yield targets


def _copy(targets: list[Tensor], params: list[Tensor]) -> None:
    for target, param in zip(targets, params, strict=True):
        target.copy_(param)


def _copy_and_sync(targets: list[Tensor], params: list[Tensor]) -> None:
    import torch_xla

    _copy(targets, params)
    torch_xla.sync()


def _lerp(targets: list[Tensor], params: list[Tensor]) -> None:
    for target, param in zip(targets, params, strict=True):
        target.lerp_(param, 0.25)


def _foreach(targets: list[Tensor], params: list[Tensor]) -> None:
    torch._foreach_mul_(targets, 0.9)
    torch._foreach_add_(targets, params, alpha=0.1)


def _lookahead(targets: list[Tensor], params: list[Tensor]) -> None:
    _lerp(targets, params)
    _copy(params, targets)


def _exchange(targets: list[Tensor], params: list[Tensor]) -> None:
    for target, param in zip(targets, params, strict=True):
        held = target.clone()
        target.copy_(param)
        param.copy_(held)


def _averaged(job: Job, **options: Any) -> Kept:
    average = AveragedModel(job.model, **options)
    while True:
        average.update_parameters(job.model)
        yield list(average.parameters())


def _swapped(job: Job, *, by_data: bool) -> Kept:
    """An average that takes the place of the weights for an evaluation."""
    params = list(job.model.parameters())
    average = [param.detach().clone() for param in params]
    found: list[Tensor] = []
    for number in range(STEPS):
        _lerp(average, [param.detach() for param in params])
        if number in (3, 5):
            held = [param.data if by_data else param.detach().clone() for param in params]
            _put(params, average, by_data=by_data)
            found.append(sum(param.detach().square().sum() for param in params))
            _put(params, held, by_data=by_data)
        yield [*average, *found]


def _put(params: list[Tensor], values: list[Tensor], *, by_data: bool) -> None:
    for param, value in zip(params, values, strict=True):
        if by_data:
            param.data = value
        else:
            param.detach().copy_(value)


def _best(job: Job) -> Kept:
    """The best state dict, which is loaded again, twice."""
    best: dict[str, Tensor] = {}
    for number in range(STEPS):
        if number == 2:
            best = copy.deepcopy(dict(job.model.state_dict()))
        if number in (4, 6):
            job.model.load_state_dict(best)
        yield list(best.values())


def _states(job: Job) -> Kept:
    found: list[Tensor] = []
    while True:
        params = [p for group in job.optimizer.param_groups for p in group["params"]]
        for state in map(job.optimizer.state.__getitem__, params):  # made in another order, else
            found += [torch.empty_like(v).copy_(v) for v in state.values() if v.is_xla]
        yield found


def _chain(job: Job) -> Kept:
    """Clones of clones."""
    found = [[param.detach().clone() for param in job.model.parameters()]]
    while True:
        found.append([each.clone() for each in found[-1]])
        yield [each for some in found for each in some]


WAYS: dict[str, Callable[[Job], Kept]] = {
    "clone": functools.partial(_snapshots, lambda p: p.detach().clone()),
    "to": functools.partial(_snapshots, lambda p: p.detach().to(p.dtype, copy=True)),
    "empty_like": functools.partial(_snapshots, lambda p: torch.empty_like(p).copy_(p.detach())),
    "_to_copy": functools.partial(_snapshots, lambda p: torch.ops.aten._to_copy(p.detach())),
    "alias_copy": functools.partial(_snapshots, lambda p: torch.ops.aten.alias_copy(p.detach())),
    "deepcopy": functools.partial(_snapshots, lambda p: copy.deepcopy(p.detach())),
    "norm": functools.partial(_snapshots, lambda p: p.detach().norm()),
    "copy_": functools.partial(_followed, _copy),
    "copy_, sync": functools.partial(_followed, _copy_and_sync),
    "lerp_": functools.partial(_followed, _lerp),
    "foreach": functools.partial(_followed, _foreach),
    "lookahead": functools.partial(_followed, _lookahead),
    "exchange": functools.partial(_followed, _exchange),
    "AveragedModel": _averaged,
    "AveragedModel, all at once": functools.partial(
        _averaged, multi_avg_fn=get_ema_multi_avg_fn(0.8)
    ),
    "swap": functools.partial(_swapped, by_data=False),
    "swap data": functools.partial(_swapped, by_data=True),
    "best": _best,
    "states": _states,
    "chain": _chain,
}


def outcome(name: str, way: str, check: int | None) -> list[Any]:
    """Return losses, what a way keeps, and parameters, of a job's steps: plain ones with a sync if
    ``check`` is -1, else compiled; and the replays."""
    import torch_xla

    torch_xla.manual_seed(17)
    job = JOBS[name]()
    compiled = check != -1
    step: Any = job.compiled(check=check) if compiled else job.step
    losses, kept, ways = [], [], WAYS[way](job)
    for number in range(STEPS):
        losses.append(step(*job.batch(number)))
        if not compiled:
            torch_xla.sync()
        with torch.no_grad():
            kept = next(ways)
    found = [each.detach().cpu() for each in (*losses, *kept, *job.model.parameters())]
    return [found, step.replays if compiled else 0]


def differing(rank: int, names: list[str], ways: list[str], checks: list[int | None]) -> list[str]:
    """Return what differs between traced and replayed steps, or is not replayed."""
    found = []
    for name in names:
        for way in ways:
            traced, _ = outcome(name, way, -1)
            for check in checks:
                replayed, replays = outcome(name, way, check)
                same = len(traced) == len(replayed) and all(map(torch.equal, traced, replayed))
                if not same or replays < STEPS - 4:
                    found.append(f"{name}, {way}, check={check}: {same}, {replays} replays")
    return found
