"""Train the same model sharded on N ranks and unsharded on the joined batch, and compare.

A ``Case`` says what to build and how to train it. ``run_cases`` runs on every rank of one launch,
``reference`` in the test's own process on plain torch. Batch statistics belong to a rank, so the
reference averages the losses of the ranks' parts of the batch, each with that rank's buffers.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common import models
from test.common.compare import assert_close
from test.common.models import CLASSES, FEATURES, Block
from test.common.own_generator import OwnGenerator
from test.common.ranks import cached_outcome, run_on_ranks
from xla_fsdp import init_mesh, wrap
from xla_fsdp.checkpoint import consolidate_sharded_state_dicts
from xla_fsdp.distributed.topology import reduction_steps

STEPS = 3
ROUNDING = 2e-6  # of a sum over a few hundred fp32 products near 1, in another order
ROWS = 5  # of a rank's part of a batch


@dataclass(frozen=True)
class Case:
    """One way to shard and train a model.

    Args:
        model: class name in ``test.common.models``.
        nest: "root" (one unit), "blocks" (each block and the head), "deep" (units in units).
        options: of every unit.
        policy: name of an auto-wrap policy below, instead of ``nest``; ``remat`` then goes inside.
        groups_of: shard over groups of so many neighbouring ranks, and average the gradients
            between the groups by hand.
        mesh: (replicas, shards) to train on.
        torus: reduce along the axes of a torus of these sizes, x first, one after the other.
        remat: "", "inside" or "outside" of the blocks' units.
        optimizer: "sgd" or "adamw".
        micro_batches: backward passes per step, each on a batch of its own.
        no_sync: whether all but the last of them run under ``no_sync``.
        joint_backward: one backward for all micro batches, after all forwards.
        clip: (max_norm, norm_type).
        statistics_count: values per channel and batch that BatchNorm averages over.
        in_place: by ``fully_shard``; ``options`` are then its own.
        together: names of modules that are one unit, for each such unit; by ``fully_shard``.
        dim: along which it cuts what has so many dims.
        ignored: name of a module whose parameters it leaves alone.
        evaluate: run forwards between the steps, with and without grad mode.
        scan: run ``model.blocks`` as one loop, with these options.
        computes_loss: the model takes targets and returns the loss.
        penalty: how the gradient with respect to the inputs enters the loss: "" not at all, "added"
            to it (a gradient penalty), or "alone" (forces).
        in_full: also compare the optimizer's state of each parameter, the buffers of each rank, and
            everything after the first step, too.
        tolerance: largest error allowed, relative to the largest value of a tensor.
    """

    model: str = "Net"
    nest: str = "blocks"
    options: dict[str, Any] = field(default_factory=dict)
    policy: str = ""
    groups_of: int = 0
    mesh: tuple[int, int] | None = None
    torus: tuple[int, ...] = ()
    remat: str = ""
    optimizer: str = "sgd"
    micro_batches: int = 1
    no_sync: bool = False
    joint_backward: bool = False
    clip: tuple[float, float] | None = None
    statistics_count: int = ROWS
    in_place: bool = False
    together: tuple[tuple[str, ...], ...] = ()
    dim: int = 0
    ignored: str = ""
    evaluate: bool = False
    scan: dict[str, Any] | None = None
    computes_loss: bool = False
    penalty: str = ""
    in_full: bool = False
    tolerance: float = 2e-5

    def fits(self, num_ranks: int) -> bool:
        """Whether the case can run on so many ranks."""
        if sizes := self.mesh or self.torus:
            return math.prod(sizes) == num_ranks
        return not self.groups_of or num_ranks in (2 * self.groups_of, 4 * self.groups_of)


@dataclass
class Outcome:
    """What training left behind, unsharded."""

    losses: list[float]
    grads: dict[str, Tensor]  # of the last step, before clipping where the case clips
    norms: list[float]
    state: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # by name of the state
    buffers: list[dict[str, Tensor]] = field(default_factory=list)  # of each rank


def build(case: Case) -> nn.Module:
    """The case's model, with the same values everywhere."""
    with OwnGenerator(5):
        return getattr(models, case.model)()


def batches(case: Case, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Inputs [steps, micro batches, ranks, rows, features] and labels [..., rows]."""
    generator = torch.Generator().manual_seed(7)
    shape = (STEPS, case.micro_batches, num_ranks, ROWS)
    x = torch.randn(*shape, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, shape, generator=generator)


def make_optimizer(case: Case, params: Any) -> torch.optim.Optimizer:
    """The case's optimizer."""
    if case.optimizer == "adamw":
        return torch.optim.AdamW(params, lr=1e-2)
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


# ---------------------------------------------------------------- unsharded


def reference(case: Case, num_ranks: int, steps: int = STEPS) -> Outcome:
    """The same training on plain torch; buffers of the state are those of rank 0."""
    model = build(case)
    buffers = [copy.deepcopy(dict(model.named_buffers())) for _ in range(num_ranks)]
    optimizer = make_optimizer(case, model.parameters())
    x, y = batches(case, num_ranks)
    outcome = Outcome([], {}, [], {})
    for step in range(steps):
        optimizer.zero_grad()
        losses = []
        for micro in range(case.micro_batches):
            parts = [
                loss_of(
                    partial(torch.func.functional_call, model, buffers[r]),
                    case,
                    x[step, micro, r],
                    y[step, micro, r],
                )
                for r in range(num_ranks)
            ]
            losses.append(torch.stack(parts).mean() / case.micro_batches)
        loss = torch.stack(losses).sum()
        loss.backward()
        outcome.losses.append(loss.item())
        outcome.grads = {
            n: p.grad.clone()
            for n, p in model.named_parameters(remove_duplicate=False)
            if p.grad is not None
        }
        if case.clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), *case.clip)
            outcome.norms.append(norm.item())
        optimizer.step()
    outcome.buffers = [_as_torch_xla(each, case, steps) for each in buffers]
    outcome.state = {**model.state_dict(), **outcome.buffers[0]}
    if case.in_full:
        outcome.moments = _moments(model, optimizer, lambda name, _, value: [(name, value)])
    return outcome


def _as_torch_xla(buffers: dict[str, Tensor], case: Case, steps: int) -> dict[str, Tensor]:
    """torch_xla's BatchNorm averages the biased variance of a batch, torch's the unbiased one."""
    left_of_start = 0.9 ** (steps * case.micro_batches)  # running_var starts as 1, momentum is 0.1
    bias = (case.statistics_count - 1) / case.statistics_count
    return {
        name: left_of_start + (value - left_of_start) * bias if "running_var" in name else value
        for name, value in buffers.items()
    }


# ---------------------------------------------------------------- sharded


def run_cases(rank: int, cases: dict[str, Case]) -> dict[str, Any]:
    """Train every case; returns what this rank holds, for ``join``."""
    return {name: _train(rank, case) for name, case in cases.items()}


def _train(rank: int, case: Case) -> dict[str, Any]:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    num_ranks, device = xr.world_size(), torch_xla.device()
    model = shard(build(case), case, num_ranks, rank)
    optimizer = make_optimizer(case, model.parameters())
    x, y = batches(case, num_ranks)
    losses, norms, grads, first = [], [], {}, {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = forward_backward(model, case, x[step, :, rank].to(device), y[step, :, rank])
        if case.groups_of:
            _average_between_groups(model, case.groups_of, num_ranks)
        named = model.named_parameters(remove_duplicate=False)
        grads = {
            n: g
            for name, p in named
            if p.grad is not None
            for n, g in _by_shard(model, name, p, p.grad)
        }
        if case.clip:
            norms.append(model.clip_grad_norm_(*case.clip))
        optimizer.step()
        if case.evaluate:
            _evaluate(model, x[step, 0, rank].to(device))
        losses.append(xm.all_reduce("sum", loss, 1.0 / num_ranks))
        torch_xla.sync()
        if case.in_full and step == 0:
            first = _held(model, case, optimizer, losses, norms, grads)
    return {
        **_held(model, case, optimizer, losses, norms, grads),
        "first": first,
        "names": [n for n, _ in model.named_parameters()],
        "metadata": None if case.dim else model.get_shard_metadata(),
    }


def _held(
    model: Any,
    case: Case,
    optimizer: torch.optim.Optimizer,
    losses: Sequence[Tensor],
    norms: Sequence[Tensor],
    grads: dict[str, Tensor],
) -> dict[str, Any]:
    return {
        "losses": [loss.item() for loss in losses],
        "norms": [norm.item() for norm in norms],
        "grads": _on_host(model, case, grads),
        "moments": _moments_of_shards(model, case, optimizer) if case.in_full else {},
        "state": {n: t.cpu() for n, t in _state(model, case).items()},
    }


def _on_host(model: Any, case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is cut like the parameters, as ``join`` wants it."""
    return {n: t.cpu() for n, t in (whole(model, tensors) if case.dim else tensors).items()}


def _moments_of_shards(
    model: Any, case: Case, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    def by_shard(name: str, param: nn.Parameter, value: Tensor) -> list[tuple[str, Tensor]]:
        return _by_shard(model, name, param, value if case.dim else value.cpu())

    found = _moments(model, optimizer, by_shard)
    return {key: _on_host(model, case, each) for key, each in found.items()}


def _moments(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    by_shard: Callable[[str, nn.Parameter, Tensor], list[tuple[str, Tensor]]],
) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state that has the shapes of parameters, by its name and theirs."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor) and value.shape == param.detach().shape and key != "step":
                found.setdefault(key, {}).update(by_shard(name, param, value))
    return found


def _by_shard(
    model: Any, name: str, param: nn.Parameter, tensor: Tensor
) -> list[tuple[str, Tensor]]:
    """A copy of what is cut like ``param``; of a stack, one for each of its blocks."""
    from xla_fsdp.fsdp.engine.param import known_shard
    from xla_fsdp.fsdp.engine.stacked_params import is_stack

    if not is_stack(param):
        return [(name, tensor.clone())]
    shards = model.get_original_names_and_sharded_parameters()
    named = [(name, known_shard(shard)) for name, shard in shards]
    blocks = [(name, known.shard_shape) for name, known in named if known.leaf is param]
    slices = zip(blocks, tensor.unbind(), strict=True)
    return [(name, each.clone().view(shape)) for (name, shape), each in slices]


def _state(model: nn.Module, case: Case) -> dict[str, Any]:
    from xla_fsdp import full_state_dict

    return full_state_dict(model) if case.dim else model.state_dict()


def whole(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors of what is cut like the model's shards, or not cut at all."""
    from xla_fsdp.fsdp.engine.param import known_group, known_shard

    params = dict(model.named_parameters(remove_duplicate=False))
    params.update(model.get_original_names_and_sharded_parameters())  # not stacks, their slices
    found = {}
    for name, tensor in tensors.items():
        param, group = known_shard(params[name]), known_group(params[name])
        found[name] = group.gather.as_stored([param], [tensor])[0] if group else tensor
    return found


def forward_backward(model: Any, case: Case, x: Tensor, y: Tensor) -> Tensor:
    """One step's passes over this rank's micro batches; returns the loss."""
    losses = []
    for micro in range(case.micro_batches):
        last = micro == case.micro_batches - 1
        no_sync = case.no_sync and not last
        with model.no_sync() if no_sync else contextlib.nullcontext():
            target = y[micro].to(x.device)
            loss = loss_of(lambda given: model(*given), case, x[micro], target)
            losses.append(loss / case.micro_batches)
            if not case.joint_backward:
                losses[-1].backward()
    total = torch.stack(losses).sum()
    if case.joint_backward:
        total.backward()
    return total.detach()


def loss_of(
    call: Callable[[tuple[Tensor, ...]], Tensor], case: Case, x: Tensor, y: Tensor
) -> Tensor:
    """Of one micro batch; ``call`` runs the model's forward on these arguments."""
    if case.computes_loss:
        return call((x, y))
    if case.penalty:
        return _penalized(call, case, x, y)
    return F.cross_entropy(call((x,)).float(), y)


def _penalized(
    call: Callable[[tuple[Tensor, ...]], Tensor], case: Case, x: Tensor, y: Tensor
) -> Tensor:
    x = x.detach().requires_grad_()
    output = call((x,)).float()
    energy = output.logsumexp(-1).sum()
    [force] = torch.autograd.grad(energy, x, create_graph=True)
    if case.penalty == "alone":
        return (force.float() - 1).square().sum(-1).mean()
    return F.cross_entropy(output, y) + (force.float().norm(dim=-1) - 1).square().mean()


def _average_between_groups(model: nn.Module, size: int, num_ranks: int) -> None:
    import torch_xla.core.xla_model as xm

    across = [list(range(position, num_ranks, size)) for position in range(size)]
    for param in model.parameters():
        if param.grad is not None:
            param.grad = xm.all_reduce("sum", param.grad, size / num_ranks, groups=across)


def _evaluate(model: nn.Module, x: Tensor) -> None:
    """Forwards that must leave no trace: without grad, and with grad but without backward."""
    model.eval()
    with torch.no_grad():
        model(x)
    model(x)
    model.train()


def shard(model: nn.Module, case: Case, num_ranks: int, rank: int) -> Any:
    """Wrap the model as the case says."""
    from xla_fsdp import scan_blocks

    sharded = _shard(model, case, num_ranks, rank)
    if case.scan is not None:
        scan_blocks(sharded.blocks, **case.scan)
    return sharded


def _shard(model: nn.Module, case: Case, num_ranks: int, rank: int) -> Any:
    from xla_fsdp import XlaFullyShardedDataParallel

    if case.in_place:
        return _shard_in_place(model, case)
    options = dict(case.options)
    if size := case.groups_of:
        starts = range(0, num_ranks, size)
        options.update(
            sharding_groups=[list(range(start, start + size)) for start in starts],
            sharding_rank=rank % size,
            sharding_world_size=size,
        )
    if case.mesh:
        options["mesh"] = init_mesh(case.mesh, ("replica", "shard"))
    if case.torus:
        options["collectives"] = on_torus(case.torus, rank)
    fsdp = partial(XlaFullyShardedDataParallel, **options)
    if not case.policy:
        return fsdp(_nest(model, case, fsdp))
    wrapper = remat_inside if case.remat else None
    return fsdp(model, auto_wrap_policy=_policies()[case.policy], auto_wrapper_callable=wrapper)


def _shard_in_place(model: nn.Module, case: Case) -> Any:
    import torch_xla
    from torch.distributed.tensor import Shard

    from xla_fsdp import fully_shard, init_mesh

    options = dict(case.options)
    if "mesh" in options:
        options["mesh"] = init_mesh(options["mesh"], ("replica", "shard"))
    if case.dim:
        options["shard_placement_fn"] = lambda p: Shard(case.dim) if p.dim() > case.dim else None
    if case.ignored:
        ignored = model.get_submodule(case.ignored).to(torch_xla.device())
        options["ignored_params"] = set(ignored.parameters())

    def shard(module: Any) -> Any:
        return fully_shard(module, **options)

    for names in case.together:
        shard([model.get_submodule(name) for name in names])
    return shard(model if case.together else _nest(model, case, shard))


def on_torus(sizes: tuple[int, ...], rank: int) -> Any:
    """Collectives that reduce as on a TPU's torus of these sizes."""
    from xla_fsdp.distributed.collectives import XlaCollectives

    slowest_first = [range(size) for size in reversed(sizes)]
    coords = [tuple(reversed(place)) for place in itertools.product(*slowest_first)]
    steps = reduction_steps([list(range(len(coords)))], coords)
    return XlaCollectives(None, rank, len(coords), steps)


def remat_inside(module: nn.Module, **options: Any) -> nn.Module:
    from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module

    return XlaFullyShardedDataParallel(checkpoint_module(module), **options)


def _policies() -> dict[str, Callable[..., bool]]:
    return {
        "always": wrap.always_wrap_policy,
        "size": partial(wrap.size_based_auto_wrap_policy, min_num_params=100),
        "transformer": partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        "lambda": partial(
            wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.LayerNorm)
        ),
    }


def _nest(model: nn.Module, case: Case, fsdp: Callable[[nn.Module], nn.Module]) -> nn.Module:
    from xla_fsdp import checkpoint_module

    if case.nest == "root":
        return model
    if case.nest == "deep":
        for block in model.blocks:
            block.norm, block.up = fsdp(block.norm), fsdp(block.up)
    for index, block in enumerate(getattr(model, "blocks", [])):
        if case.remat == "inside":
            block = checkpoint_module(block)
        wrapped = fsdp(block)
        model.blocks[index] = checkpoint_module(wrapped) if case.remat == "outside" else wrapped
    for name in ("conv1", "fc", "tokens", "head"):
        if hasattr(model, name):
            setattr(model, name, fsdp(getattr(model, name)))
    return model


def join(ranks: list[dict[str, Any]], of: int = 0) -> Outcome:
    """Merge what the ranks hold into one outcome; of groups, what that of rank ``of`` holds."""
    metadata = ranks[0]["metadata"]
    if metadata is None:  # every rank has everything
        keys = ("losses", "grads", "norms", "state", "moments")
        return Outcome(*(ranks[0][key] for key in keys))
    # On a torus a group need not be the first ranks.
    groups = metadata.get("groups") or [range(metadata["world_size"])]
    ranks = [ranks[rank] for rank in next(group for group in groups if of in group)]
    return Outcome(
        losses=ranks[0]["losses"],
        grads=_join_like_params([rank["grads"] for rank in ranks], metadata),
        moments={
            key: _join_like_params([rank["moments"][key] for rank in ranks], metadata)
            for key in ranks[0].get("moments", ())
        },
        norms=ranks[0]["norms"],
        state=consolidate_sharded_state_dicts([rank["state"] for rank in ranks], metadata),
    )


def _join_like_params(
    shards: list[dict[str, Tensor]], metadata: dict[str, Any]
) -> dict[str, Tensor]:
    """Join what is cut like parameters, some of which may have none."""
    params = [record for record in metadata["params"] if record["key"] in shards[0]]
    names = {member["name"] for record in params for member in record["members"]}
    ties = {alias: name for alias, name in metadata["ties"].items() if name in names}
    own = {**metadata, "params": params, "ties": ties, "buffers": {}}
    return consolidate_sharded_state_dicts(shards, own)


# ---------------------------------------------------------------- comparison


class Runs:
    """Cases of a test file, each on a number of ranks; those of one number share a launch."""

    def __init__(self, cases: dict[tuple[int, str], Case]) -> None:
        self.cases = cases
        self.outcomes = cached_outcome(self._launch)

    def _launch(self, num_ranks: int) -> list[dict[str, Any]]:
        cases = {name: case for (n, name), case in self.cases.items() if n == num_ranks}
        return run_on_ranks(run_cases, num_ranks, cases, timeout=1500)

    def check(self, num_ranks: int, name: str) -> list[dict[str, Any]]:
        """Compare a case with the plain model; returns what its ranks hold."""
        ranks = [rank[name] for rank in self.outcomes(num_ranks)]
        assert_parity(self.cases[num_ranks, name], ranks)
        return ranks


def assert_parity(case: Case, ranks: list[dict[str, Any]], of: int = 0) -> None:
    """Compare what the ranks hold after training with the plain model on the joined batch."""
    _assert_parity_after(STEPS, case, ranks, of)
    if case.in_full:
        _assert_parity_after(1, case, [{**rank, **rank["first"]} for rank in ranks], of)


def _assert_parity_after(steps: int, case: Case, ranks: list[dict[str, Any]], of: int) -> None:
    found, expected = join(ranks, of), reference(case, len(ranks), steps)
    if case.options.get("flatten_parameters"):
        for each in (found, expected):  # of flat parameters there is no one for each name
            each.grads, each.moments = {}, {}
    assert_same(found, expected, case.tolerance)
    if case.in_full:
        limits = {"atol": ROUNDING, "of_largest": case.tolerance}
        for rank, buffers in zip(ranks, expected.buffers, strict=True):
            keys = (rank["metadata"] or {}).get("buffers") or {name: name for name in buffers}
            own = {name: rank["state"][key] for key, name in keys.items()}
            assert_close(own, buffers, what="buffer", **limits)


def assert_same(
    found: Outcome, expected: Outcome, tolerance: float, smallest: float = 1e-2
) -> None:
    """Equal losses, norms, gradients (where there are any to compare) and states."""
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.norms == pytest.approx(expected.norms, rel=tolerance)
    limits = {"atol": ROUNDING, "of_largest": tolerance, "smallest": smallest}
    assert_close(found.grads, expected.grads, what="gradient", **limits)
    assert_close(found.state, expected.state, what="state", **limits)
    assert found.moments.keys() == expected.moments.keys()
    for key, moments in expected.moments.items():
        assert_close(found.moments[key], moments, what=key, **limits)
