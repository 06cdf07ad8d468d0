"""Train a small language model on sequences that are cut over a context axis, and plainly with all
scores on whole ones.

``train`` runs on a rank, ``reference`` in the test's own process. Ranks along the axis ``context``
have the same sequences, all others sequences of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common.attention import plain
from test.common.compare import assert_close
from test.common.scenarios import make
from xla_fsdp import attention, init_mesh

ROWS, LENGTH, IGNORED = 2, 48, -100
WIDTH, HEADS, VOCABULARY = 32, 4, 11


@dataclass(frozen=True)
class Case:
    """One way to train.

    Args:
        mesh: size of each axis by name; one is ``context``.
        method: of ``context_parallel``.
        key_heads: of the model.
        options: of ``attention``.
        packed: whether sequences have several segments.
        remat: whether blocks are checkpointed.
        scan: options of ``scan_blocks``.
        in_place: by ``fully_shard``.
        unit: options of every unit.
        replayed: by ``compile_step``.
        lean: whether embedding and head are never whole, and backward steps the optimizer.
        late: whether backward comes after the context; only without buffers that are restored.
        tolerance: largest error allowed, relative to the largest value of a tensor.
    """

    mesh: dict[str, int]
    method: str = "ring"
    key_heads: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    remat: bool = False
    scan: dict[str, Any] | None = None
    in_place: bool = False
    unit: dict[str, Any] = field(default_factory=dict)
    replayed: bool = False
    lean: bool = False
    late: bool = False
    tolerance: float = 2e-5

    @property
    def num_ranks(self) -> int:
        """Of the whole mesh."""
        return math.prod(self.mesh.values())

    @property
    def steps(self) -> int:
        """Of the training; the first ones of a compiled step are traced."""
        return 6 if self.replayed else 3

    @property
    def parts(self) -> int:
        """Of the batch."""
        return self.num_ranks // self.mesh["context"]


class _Block(nn.Module):
    def __init__(self, key_heads: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options
        self.sizes = [HEADS, key_heads, key_heads]
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, sum(self.sizes) * WIDTH // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, segments: Tensor | None = None) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (sum(self.sizes), -1)).transpose(1, 2)
        attend = attention if x.device.type == "xla" else plain
        mixed = attend(
            *heads.split(self.sizes, 1), is_causal=True, segment_ids=segments, **self.options
        )
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class _Net(nn.Module):
    def __init__(self, key_heads: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([_Block(key_heads, options) for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        segments: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Return logits, or the loss by a head that is given labels."""
        x = self.tokens(ids) + self.places(positions)
        for block in self.blocks:
            x = block(x, segments)
        return self.head(x) if labels is None else self.head(x, labels)


def _model(case: Case) -> Any:
    return make(lambda: _Net(case.key_heads, case.options))


def batches(case: Case, part: int) -> Iterator[list[Tensor]]:
    """Yield ids, labels, positions and, if packed, segments, [rows, length] each, of each step."""
    draw = torch.Generator().manual_seed(17 + part)
    for _ in range(case.steps):
        ids, labels = torch.randint(0, VOCABULARY, (2, ROWS, LENGTH), generator=draw)
        # More at the end: ranks have unequal numbers of labels.
        ignored = torch.rand(ROWS, LENGTH, generator=draw) < torch.linspace(0, 1, LENGTH)
        found = [ids, labels.masked_fill(ignored, IGNORED), torch.arange(LENGTH).expand(ROWS, -1)]
        if case.packed:
            found.append(torch.randint(0, 3, (ROWS, LENGTH), generator=draw).sort(-1).values)
        yield [each.clone() for each in found]


def loss_of(model: Any, ids: Tensor, labels: Tensor, *others: Tensor, lean: bool = False) -> Tensor:
    """Return the mean loss of a batch."""
    if lean:
        return model(ids, *others, labels=labels)
    logits = model(ids, *others).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """Return an optimizer with state."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def reference(case: Case) -> dict[str, Any]:
    """Losses, gradients of the last step and the state of the plain model."""
    model = _model(case)
    optimizer = optimizer_of(model)
    losses = []
    for parts in zip(*(batches(case, part) for part in range(case.parts)), strict=True):
        optimizer.zero_grad()
        loss = torch.stack([loss_of(model, *each) for each in parts]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {"losses": torch.stack(losses), "grads": grads, "state": model.state_dict()}


def sharded(case: Case, mesh: Any) -> Any:
    """Return the model in units on this mesh."""
    from test.common.scenarios import fsdp, nested
    from xla_fsdp import (
        LinearCrossEntropy,
        StreamedEmbedding,
        checkpoint_module,
        fully_shard,
        scan_blocks,
    )

    model = _model(case)
    if case.lean:
        tokens = StreamedEmbedding.from_embedding(model.tokens)
        head = LinearCrossEntropy.from_linear(model.head)
        model.tokens, model.head = (fsdp(each, mesh=mesh, **case.unit) for each in (tokens, head))
    if case.remat:
        for at, block in enumerate(model.blocks):
            model.blocks[at] = checkpoint_module(block)
    if case.in_place:
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **case.unit)
        fully_shard(model, mesh=mesh, **case.unit)
    else:
        model = nested(model, mesh=mesh, **case.unit)
    if case.scan is not None:
        scan_blocks(model.blocks, **case.scan)
    return model


def train(rank: int, cases: dict[str, Case]) -> dict[str, Any]:
    """Train in every way; returns what this rank has, whole."""
    return {name: _train(rank, case) for name, case in cases.items()}


def _train(rank: int, case: Case) -> dict[str, Any]:
    import torch_xla

    from test.common.parity import whole
    from xla_fsdp import compile_step, context_parallel, full_state_dict
    from xla_fsdp.optim import step_in_backward

    mesh = init_mesh(tuple(case.mesh.values()), tuple(case.mesh))
    model = sharded(case, mesh)
    optimizer = optimizer_of(model)
    if case.lean:
        step_in_backward(model, optimizer)
    others = [name for name in case.mesh if name != "context"]
    part = mesh.local_rank(rank, *others) if others else 0
    losses = []

    def step(*buffers: Tensor) -> Tensor:
        optimizer.zero_grad()
        context = context_parallel(
            mesh["context"],
            buffers=buffers,
            buffer_seq_dims=[1] * len(buffers),
            no_restore_buffers=buffers if case.late else None,
            method=case.method,
        )
        with context:
            loss = loss_of(model, *buffers, lean=case.lean)
            if not case.late:
                loss.backward()
        if case.late:
            loss.backward()
        optimizer.step()
        return loss.detach()

    run: Any = compile_step(step, state=[model, optimizer]) if case.replayed else step
    for buffers in batches(case, part):
        losses.append(run(*(each.to(torch_xla.device()) for each in buffers)))
        torch_xla.sync()
    if case.replayed and not run.replays:
        raise AssertionError(f"no step was replayed; traced for {run.traces}")
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {
        "part": part,
        "losses": torch.stack(losses).cpu(),
        "grads": {n: t.cpu() for n, t in whole(model, grads).items()} if case.in_place else None,
        "state": {n: t.cpu() for n, t in full_state_dict(model).items()},
    }


def assert_like_plain(case: Case, outcomes: list[dict[str, Any]]) -> None:
    """Compare with the plain model: losses (equal on all ranks of a context), gradients of the last
    step, parameters."""
    expected = reference(case)
    by_part: dict[int, list[Tensor]] = {}
    for each in outcomes:
        by_part.setdefault(each["part"], []).append(each["losses"])
    assert sorted(by_part) == list(range(case.parts))
    for losses in by_part.values():
        assert all(torch.equal(each, losses[0]) for each in losses)
    limits = {"atol": 2e-6, "of_largest": case.tolerance, "smallest": 1e-2}
    mean = torch.stack([losses[0] for losses in by_part.values()]).mean(0)
    assert_close({"losses": mean}, {"losses": expected["losses"]}, **limits)
    for found in outcomes:
        assert_close(found["state"], expected["state"], what="state", **limits)
        if found["grads"] is not None:
            assert_close(found["grads"], expected["grads"], what="gradient", **limits)
