"""Attention and training on sequences that are cut over the ranks of a context axis."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common import attention as attention_cases
from test.common import context
from test.common.chips import Done, Job, run_jobs
from test.common.context import Case
from test.common.ranks import cached_outcome, run_on_ranks
from test.common.scan import BF16
from test.common.scenarios import Scenarios, message
from xla_fsdp import attention, context_parallel, context_parallel_unshard, init_mesh
from xla_fsdp.nn.attention import api, splash
from xla_fsdp.nn.attention.chunked import CHUNKED
from xla_fsdp.nn.attention.context import over_context
from xla_fsdp.nn.attention.options import Options

scenarios = Scenarios(__name__)
LENGTH = 48  # two chunks for each of 2, 3 or 4 ranks
NAMES = [
    name
    for name, options in attention_cases.CASES.items()
    if not {"queries", "keys"} & options.keys()
]

# ---------------------------------------------------------------- training

NAMED = {"remat": ["attention"]}
EXCHANGED = Case({"context": 2}, method="ulysses", remat=True)
QUICK = {
    "one rank": Case({"context": 1}),
    "windows": Case({"context": 3}, options={"window": 9, "soft_cap": 2.0}, late=True, remat=True),
    "loop": Case({"shard": 2, "context": 2}, packed=True, scan=NAMED, in_place=True),
}
# As the programs of examples/llm/llama_long.md.
LEAN = {**NAMED, "stacked": True, "offload_activations": True}
HYBRID = {"replica": 2, "shard": 2, "context": 2}
WINDOW = {"window": 9, "soft_cap": 2.0}
SLOW = {
    f"{n}: {name}": Case(mesh, **options)
    for n, mesh in {
        2: {"context": 2},
        3: {"context": 3},
        4: {"shard": 2, "context": 2},
        8: {"shard": 2, "context": 4},
        "8, hybrid": HYBRID,
    }.items()
    for name, options in {
        "units": {},
        "in place": {"in_place": True},
        "exchanged": {"method": "ulysses", "key_heads": 4, "packed": True},
        "exchanged windows": {"method": "ulysses", "key_heads": 4, "options": WINDOW},
        "checkpoint": {"remat": True},
        "loop": {"scan": {}},
        "loop, named, late": {"scan": NAMED, "late": True},
        "loop, windows": {"scan": NAMED, "options": WINDOW, "packed": True},
        "loop, exchanged": {"scan": NAMED, "method": "ulysses", "key_heads": 4},
        "loop, offloaded": {"scan": {**NAMED, "offload_activations": True}},
        "loop, stacked": {"scan": {**NAMED, "stacked": True}},
        "replayed": {"replayed": True},
        "loop, replayed": {"scan": NAMED, "packed": True, "replayed": True},
        "lean": {"scan": LEAN, "lean": True, "replayed": True},
        "bf16": {"unit": BF16, "tolerance": 0.05},
        "loop, bf16": {"scan": NAMED, "unit": BF16, "tolerance": 0.05},
    }.items()
    if not (n == 3 and "exchanged" in name)  # of four heads
} | {
    # Ranks with whole sequences.
    "whole, replayed": Case({"shard": 3, "context": 1}, packed=True, replayed=True),
    "whole, loop, replayed": Case({"shard": 3, "context": 1}, scan=NAMED, replayed=True),
}


def on_ranks(rank: int, cases: dict[str, Case], ways: list[tuple[str, str]]) -> dict[str, Any]:
    return {"trained": context.train(rank, cases), "attended": attend(rank, ways)}


@cached_outcome
def outcomes(num_ranks: int, *, slow: bool) -> list[dict[str, Any]]:
    cases = {
        n: each for n, each in (SLOW if slow else QUICK).items() if each.num_ranks == num_ranks
    }
    ways = [way for n, *way in (SLOW_WAYS if slow else QUICK_WAYS) if n == num_ranks]
    return run_on_ranks(on_ranks, num_ranks, cases, ways, timeout=1500)


@pytest.mark.parametrize("name", QUICK)
def test_training_is_that_of_the_plain_model(name: str) -> None:
    ranks = outcomes(QUICK[name].num_ranks, slow=False)
    context.assert_like_plain(QUICK[name], [each["trained"][name] for each in ranks])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_training_is_that_of_the_plain_model_in_every_way(name: str) -> None:
    ranks = outcomes(SLOW[name].num_ranks, slow=True)
    context.assert_like_plain(SLOW[name], [each["trained"][name] for each in ranks])


def moved(rank: int, folder: str) -> dict[str, Any]:
    """``context.train`` of three steps: one on a context, then, from its checkpoint, on ranks with
    whole sequences, which all have the same batch."""
    import torch_xla

    from xla_fsdp import full_state_dict, load_checkpoint, save_checkpoint

    model: Any = None
    losses = []
    for number, buffers in enumerate(context.batches(MOVED, 0)):
        if number < 2:
            sizes = (1, 4) if number == 0 else (4, 1)
            mesh = init_mesh(sizes, ("shard", "context"))
            model = context.sharded(MOVED, mesh)
            optimizer = context.optimizer_of(model)
        if number == 1:
            load_checkpoint(folder, model, optimizer)
        placed = [each.to(torch_xla.device()) for each in buffers]
        optimizer.zero_grad()
        with context_parallel(mesh["context"], buffers=placed, buffer_seq_dims=[1] * len(placed)):
            loss = context.loss_of(model, *placed)
            loss.backward()
            optimizer.step()
            if number == 0:
                save_checkpoint(folder, model, optimizer, step=1)
        losses.append(loss.detach())
        torch_xla.sync()
    state = {name: each.cpu() for name, each in full_state_dict(model).items()}
    return {"part": 0, "losses": torch.stack(losses).cpu(), "grads": None, "state": state}


MOVED = Case({"shard": 1, "context": 4}, scan=NAMED, packed=True)


@pytest.mark.slow
def test_training_goes_on_without_the_context(tmp_path: Path) -> None:
    context.assert_like_plain(MOVED, run_on_ranks(moved, 4, str(tmp_path / "step"), timeout=900))


# ---------------------------------------------------------------- as on a TPU

CHIPS = {
    "loop": ("v5e:2x2", Case({"shard": 2, "context": 2}, packed=True, scan=NAMED)),
    "windows": ("v5e:2x2", Case({"context": 4}, options=WINDOW, remat=True)),
    "exchanged": ("v5e:2x2", Case({"context": 4}, method="ulysses", key_heads=4)),
    "hybrid": (
        "v5e:2x4",
        Case({"replica": 2, "shard": 2, "context": 2}, unit=BF16, tolerance=0.05),
    ),
    "lean": ("v5e:2x4", Case({"shard": 2, "context": 4}, scan=LEAN, lean=True)),
    "line": ("v5e:2x4", Case({"context": 8}, key_heads=4)),
}


@cached_outcome
def on_chips() -> dict[str, Done]:
    jobs = {
        name: Job(topology, context.train, ({"it": case},))
        for name, (topology, case) in CHIPS.items()
    }
    broken = dataclasses.replace(jobs["line"], fault="ring")
    return run_jobs({**jobs, "broken": broken}, timeout=1500)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHIPS)
def test_program_of_a_tpu_trains_as_the_plain_model(name: str) -> None:
    done, case = on_chips()[name], CHIPS[name][1]
    assert not done.error
    sends = "all-to-all" if case.method == "ulysses" else "collective-permute"
    assert any(sends in text for text in done.programs)
    context.assert_like_plain(case, [each["it"] for each in done.ranks])


@pytest.mark.slow
def test_a_send_to_the_wrong_rank_is_seen() -> None:
    done = on_chips()["broken"]
    assert not done.error
    with pytest.raises(AssertionError):
        context.assert_like_plain(CHIPS["line"][1], [each["it"] for each in done.ranks])


# ---------------------------------------------------------------- attention alone


def inputs(name: str, method: str) -> tuple[list[Tensor], dict[str, Any]]:
    sizes, options = attention_cases.case(name, queries=LENGTH, keys=LENGTH)
    if method == "ulysses":
        sizes["key_heads"] = attention_cases.HEADS
    return attention_cases.tensors(**sizes), options


QUICK_WAYS = [(3, "ring", "all"), (3, "ring", "causal_segments"), (3, "ring", "window_both_sides")]
SLOW_WAYS = [
    (n, method, name)
    for n, method in [(3, "ring"), (4, "ring"), (8, "ring"), (2, "ulysses"), (4, "ulysses")]
    for name in NAMES
    if (n, method, name) not in QUICK_WAYS
]


def attend(rank: int, ways: list[tuple[str, str]]) -> dict[tuple[str, str], list[Tensor]]:
    """Output and gradients by method and name of the case, whole."""
    import torch_xla
    import torch_xla.runtime as xr

    mesh = init_mesh((xr.world_size(),), ("context",))
    found = {}
    for method, name in ways:
        given, options = inputs(name, method)
        given = [each.to(torch_xla.device()) for each in given]
        placed = {
            key: value.to(torch_xla.device()) if isinstance(value, Tensor) else value
            for key, value in options.items()
        }
        ids = [placed["segment_ids"]] if "segment_ids" in placed else []
        buffers, dims = [*given, *ids], [2] * len(given) + [1] * len(ids)
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, method=method):
            *leaves, grad = [each.detach().clone() for each in given]
            leaves = [each.requires_grad_() for each in leaves]
            output = attention(*leaves, **placed)
            output.backward(grad)
        parts = [output.detach(), *(each.grad for each in leaves)]
        found[method, name] = context_parallel_unshard(mesh, parts, [2] * len(parts))
    torch_xla.sync()
    return {way: [each.cpu() for each in parts] for way, parts in found.items()}


@pytest.mark.parametrize(("num_ranks", "method", "name"), QUICK_WAYS)
def test_attention_sees_the_whole_sequence(num_ranks: int, method: str, name: str) -> None:
    check_attention(outcomes(num_ranks, slow=False), method, name)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "method", "name"), SLOW_WAYS)
def test_attention_sees_the_whole_sequence_in_every_way(
    num_ranks: int, method: str, name: str
) -> None:
    check_attention(outcomes(num_ranks, slow=True), method, name)


def check_attention(ranks: list[dict[str, Any]], method: str, name: str) -> None:
    given, options = inputs(name, method)
    for found in ranks:
        attended = found["attended"][method, name]
        attention_cases.assert_like_plain(attended, given, options, 5e-6)


@pytest.mark.parametrize(("ranks", "expected"), [(2, "_HeadExchange"), (3, "_Ring")])
def test_heads_are_exchanged_where_they_suffice(ranks: int, expected: str) -> None:
    axis: Any = SimpleNamespace(size=ranks, method="auto", name="context")
    query, key = torch.empty(1, 4, 6, 8), torch.empty(1, 2, 6, 8)
    chosen = over_context(axis, CHUNKED, Options(True, 1.0), query, key)
    assert type(chosen).__name__ == expected


KERNEL_WAYS = [("ring", "causal_segments"), ("ring", "soft_cap_of_all"), ("ulysses", "all")]


def by_the_kernel(rank: int) -> dict[tuple[str, str], list[Tensor]]:
    """``attend`` by an interpreter of the TPU's kernel."""
    kernel = splash.Splash(interpret=True)
    api._implementation = lambda *_: kernel  # the process is this test's own
    return attend(rank, KERNEL_WAYS)


@cached_outcome
def by_the_kernel_on_ranks() -> list[dict[tuple[str, str], list[Tensor]]]:
    return run_on_ranks(by_the_kernel, 2, timeout=900, env={"JAX_PLATFORMS": "cpu"})


@pytest.mark.slow
@pytest.mark.parametrize(("method", "name"), KERNEL_WAYS)
def test_results_of_the_kernel_are_joined(method: str, name: str) -> None:
    pytest.importorskip("jax")
    check_attention([{"attended": each} for each in by_the_kernel_on_ranks()], method, name)


# ---------------------------------------------------------------- losses, buffers, errors


def losses_of(logits: Tensor, labels: Tensor) -> list[Tensor]:
    weight = torch.linspace(0.1, 2, logits.shape[-1], device=logits.device)
    return [
        F.cross_entropy(logits, labels),
        F.cross_entropy(logits, labels, weight=weight, label_smoothing=0.1),
        F.cross_entropy(logits, logits.detach().softmax(-1)),
        F.nll_loss(logits.log_softmax(-1), labels, weight),
        F.cross_entropy(logits, labels, reduction="sum"),
    ]


def logits_and_labels() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    labels = torch.randint(0, 5, (16,), generator=draw)
    return torch.randn(16, 5, generator=draw), labels.masked_fill(torch.arange(16) < 5, -100)


@scenarios.add
def exchanged(rank: int) -> dict[str, Any]:
    return context.train(rank, {"exchanged": EXCHANGED})["exchanged"]


def test_training_that_exchanges_heads() -> None:
    context.assert_like_plain(EXCHANGED, [scenarios.result("exchanged", rank) for rank in range(2)])


@scenarios.add
def losses(rank: int) -> dict[str, Any]:
    import torch_xla

    mesh = init_mesh((2,), ("context",))
    logits, labels = (each.to(torch_xla.device()) for each in logits_and_labels())
    with context_parallel(mesh, buffers=[logits, labels], buffer_seq_dims=[0, 0]):
        leaf = logits.detach().clone().requires_grad_()
        found = losses_of(leaf, labels)
        grads = [torch.autograd.grad(each, leaf, retain_graph=True)[0] for each in found]
    whole = context_parallel_unshard(mesh, grads, [0] * len(grads))
    torch_xla.sync()
    return {"losses": [each.item() for each in found], "grads": [each.cpu() for each in whole]}


def test_means_are_those_of_all_tokens() -> None:
    logits, labels = logits_and_labels()
    leaf = logits.requires_grad_()
    ranks = [scenarios.result("losses", rank) for rank in range(2)]
    *means, of_sum = losses_of(leaf, labels)
    for at, loss in enumerate(means):
        for found in ranks:
            assert found["losses"][at] == pytest.approx(loss.item(), rel=1e-5)
            [grad] = torch.autograd.grad(loss, leaf, retain_graph=True)
            # Of two ranks, whose average FSDP computes.
            torch.testing.assert_close(found["grads"][at] / 2, grad)
    assert sum(found["losses"][-1] for found in ranks) == pytest.approx(of_sum.item(), rel=1e-5)
    [grad] = torch.autograd.grad(of_sum, leaf)
    torch.testing.assert_close(ranks[0]["grads"][-1], grad)


@scenarios.add
def buffers(rank: int) -> dict[str, Any]:
    import torch_xla

    mesh = init_mesh((1, 2), ("shard", "context"))
    on_host, table = torch.arange(8).reshape(1, 8), torch.arange(16.0).reshape(8, 2)
    on_device, stays = (torch.arange(8).to(torch_xla.device()) for _ in range(2))
    cut = {
        "buffers": [on_host, table, on_device, stays],
        "buffer_seq_dims": [1, 0, -1, 0],
        "no_restore_buffers": {stays},
    }
    with context_parallel(mesh["context"], **cut):
        inside = [each.tolist() for each in (on_host, table[:, 0], on_device)]
        joined = context_parallel_unshard(mesh["context"], [on_device], [0])[0].tolist()
    after = [each.tolist() for each in (on_host, table[:, 0], on_device, stays)]

    def parallel(
        *tensors: Tensor, dim: int = 0, method: str = "ring", axes: Any = "context"
    ) -> Any:
        dims = [dim] * len(tensors)
        return context_parallel(mesh[axes], buffers=tensors, buffer_seq_dims=dims, method=method)

    def attend(heads: int, length: int, method: str) -> None:
        x = torch.ones(1, heads, length, 4, device=torch_xla.device())
        with parallel(method=method):
            attention(x, x, x)

    def sdpa() -> None:
        x = torch.ones(1, 2, 8, 4)
        with parallel():
            F.scaled_dot_product_attention(x, x, x)

    def encoder() -> None:
        layer = nn.TransformerEncoderLayer(4, 2, batch_first=True).eval()
        with parallel(), torch.no_grad():
            layer(torch.ones(1, 8, 4))

    def late() -> None:
        weight = torch.ones(8, requires_grad=True)
        x = torch.arange(8.0)
        with parallel(x):
            loss = (weight[:4] * x).sum()
        loss.backward()

    def enter(context: Any) -> None:
        with context:
            pass

    errors = {
        "lengths": lambda: enter(parallel(torch.zeros(6))),
        "several": lambda: enter(parallel(torch.zeros(8), torch.zeros(12))),
        "twice": lambda: enter(parallel(*[torch.zeros(8)] * 2)),
        "dim": lambda: enter(parallel(torch.zeros(8), dim=1)),
        "axes": lambda: enter(parallel(torch.zeros(8), axes=("shard", "context"))),
        "method": lambda: enter(parallel(method="rings")),
        "gradients": lambda: enter(parallel(torch.zeros(8, requires_grad=True))),
        "heads": lambda: attend(3, 8, "ulysses"),
        "odd": lambda: attend(2, 7, "ring"),
        "sdpa": sdpa,
        "encoder": encoder,
        "late": late,
    }
    return {
        "inside": inside,
        "joined": joined,
        "after": after,
        "errors": {name: message(call) for name, call in errors.items()},
    }


def test_buffers_are_cut_and_restored() -> None:
    for rank, own in enumerate([[0, 1, 6, 7], [2, 3, 4, 5]]):
        found = scenarios.result("buffers", rank)
        assert found["inside"] == [[own], [2.0 * each for each in own], own]
        assert found["joined"] == list(range(8))
        whole = list(range(8))
        assert found["after"] == [[whole], [2.0 * each for each in whole], whole, own]


ERRORS = {
    "lengths": "ValueError: a sequence of 6 tokens has no 4 equal chunks",
    "several": "ValueError: buffers have sequences of 8 and 12 tokens",
    "twice": "ValueError: a tensor is among buffers twice",
    "dim": "ValueError: a buffer [8] has no dim 1",
    "axes": "ValueError: the mesh has the axes shard, context; give one of them",
    "method": "ValueError: method is 'rings'; give one of auto, ring, ulysses",
    "gradients": "ValueError: buffers have gradients",
    "heads": "ValueError: context_parallel(method='ulysses') gives each of the 2 ranks",
    "odd": "ValueError: in context_parallel attention is between the tokens of one sequence",
    "sdpa": "ValueError: scaled_dot_product_attention inside context_parallel would see only",
    "encoder": "ValueError: nn.MultiheadAttention inside context_parallel would see only",
    "late": "RuntimeError: one of the variables needed for gradient computation has been modified",
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_does_not_fit_is_refused(name: str) -> None:
    assert scenarios.result("buffers")["errors"][name].startswith(ERRORS[name])
