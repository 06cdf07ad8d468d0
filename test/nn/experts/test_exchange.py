"""Experts that are cut over an axis of a mesh train, are clipped and saved as those of the plain
model on all ranks' tokens together, whatever the routes are."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.chips import Done, Job, run_jobs
from test.common.compare import assert_close, same
from test.common.ranks import cached_outcome, run_on_ranks
from test.common.scenarios import make, message
from xla_fsdp.checkpoint import MergeOptions, merge_files, read_shards
from xla_fsdp.nn.experts.api import grouped_linear
from xla_fsdp.nn.experts.exchange import ExpertParallel, exchanged
from xla_fsdp.nn.experts.load import imbalance, tokens_per_expert
from xla_fsdp.nn.experts.routes import Routes

RANKS, TOKENS, WIDTH, INNER, EXPERTS, STEPS = 4, 5, 8, 12, 8, 3
MESHES = {"2x2": (2, 2), "1x4": (1, 4), "2x1x2": (2, 1, 2)}
AXES = ("replica", "shard", "expert")
CASES = (("2x2", "any"), ("2x1x2", "any"), ("1x4", "one rank"))  # meshes and routes
CAPACITIES = ((0.5, 2), (0.5, 1), (8.0, 2))  # and ranks along the axis
STEP = "step_00000001"
LIMIT = 0.05  # of gradients' norms, below what they are


class Experts(nn.Module):
    """Own experts: two layers each, with a bias in the first one."""

    def __init__(self, capacity: float | None = None, count: int = EXPERTS) -> None:
        super().__init__()
        self.num_experts, self.capacity = count, capacity
        self.up = nn.Parameter(torch.randn(count, INNER, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(count, INNER))
        self.down = nn.Parameter(torch.randn(count, WIDTH, INNER) / 4)

    def forward(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        def compute(rows: Tensor, routes: Routes, weights: Tensor) -> Tensor:
            inner = torch.tanh(grouped_linear(rows, self.up, routes, self.bias))
            return grouped_linear(inner * weights, self.down, routes)

        return exchanged(self, tokens, experts, weights, compute, self.capacity)


class Mixture(nn.Module):
    def __init__(self, capacity: float | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(capacity)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        weights = self.router(x).softmax(-1).gather(1, experts)
        return x + self.experts(x, experts, weights)


def batch(rank: int, step: int, routes: str) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(TOKENS, WIDTH, generator=draw)
    scores = torch.rand(TOKENS, EXPERTS, generator=draw)
    if routes == "one rank":
        scores[:, :2] += 1
    return x, scores.topk(2).indices


def loss_of(model: Any, rank: int, step: int, routes: str, device: Any = "cpu") -> Tensor:
    x, experts = (each.to(device) for each in batch(rank, step, routes))
    loss: Tensor = model(x, experts).square().mean()
    return loss


def plain(routes: str, num_ranks: int = RANKS) -> dict[str, Any]:
    model = make(Mixture)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [loss_of(model, rank, step, routes) for rank in range(num_ranks)]
        torch.stack(losses).mean().backward()
        if not step:
            grads = {name: each.grad.clone() for name, each in model.named_parameters()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
        optimizer.step()
    return {"grads": grads, "norms": norms, "state": dict(model.state_dict())}


# ---------------------------------------------------------------- on ranks


def cut(mesh: Any, capacity: float | None = None, seed: int = 3) -> tuple[Any, Any]:
    from xla_fsdp import fully_shard
    from xla_fsdp.tensor_parallel import parallelize_module

    model = make(partial(Mixture, capacity), seed)
    plan = {"experts": ExpertParallel()}
    parallelize_module(model, mesh["expert"], plan, src_data_rank=None)
    model = fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def everything(model: Any, optimizer: Any) -> dict[str, Tensor]:
    from xla_fsdp import full_state_dict, optim_state_dict

    state = optim_state_dict(model, optimizer)["state"]
    states = {f"{name}/{what}": t for name, own in state.items() for what, t in own.items()}
    return {name: each.cpu() for name, each in {**full_state_dict(model), **states}.items()}


def trained(rank: int, model: Any, optimizer: Any, routes: str) -> dict[str, Any]:
    import torch_xla

    from xla_fsdp import clip_grad_norm_
    from xla_fsdp.fsdp.engine.shard_tensor import gather_like

    lazy = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rank, step, routes, torch_xla.device()).backward()
        if not step:
            lazy_grads = {n: gather_like(p, p.grad) for n, p in model.named_parameters()}
        lazy.append(clip_grad_norm_(model.parameters(), LIMIT))
        optimizer.step()
        torch_xla.sync()
    grads = {n: each.cpu() for n, each in lazy_grads.items()}
    norms, state = [float(each) for each in lazy], everything(model, optimizer)
    return {"grads": grads, "norms": norms, "state": state}


def on_chips(rank: int, shape: tuple[int, int], capacity: float | None) -> dict[str, Any]:
    from xla_fsdp import init_mesh

    return trained(rank, *cut(init_mesh(shape, ("shard", "expert")), capacity), "any")


def run(rank: int, folder: str) -> dict[str, Any]:
    import torch_xla

    from xla_fsdp import fully_shard, init_mesh, load_checkpoint, save_checkpoint
    from xla_fsdp.fsdp.engine.shard_tensor import gather_like

    device = torch_xla.device()
    found: dict[str, Any] = {}
    meshes = {name: init_mesh(shape, AXES[-len(shape) :]) for name, shape in MESHES.items()}
    for name, routes in CASES:
        model, optimizer = cut(meshes[name])
        found[f"{name} {routes}"] = trained(rank, model, optimizer, routes)
    save_checkpoint(f"{folder}/1x4", model, optimizer, step=1)
    alone = fully_shard(make(Mixture, 4))
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    load_checkpoint(f"{folder}/1x4", alone, optimizer)
    found["alone"] = everything(alone, optimizer)
    save_checkpoint(f"{folder}/alone", alone, optimizer, step=1)
    for source in ("1x4", "alone"):
        other, optimizer = cut(meshes["2x2"], seed=4)
        load_checkpoint(f"{folder}/{source}", other, optimizer)
        found[f"from {source}"] = everything(other, optimizer)
    for capacity, axis in CAPACITIES:
        model, _ = cut(init_mesh((RANKS // axis, axis), ("shard", "expert")), capacity)
        loss_of(model, rank, 0, "any", device).backward()
        lazy_grads = {n: gather_like(p, p.grad) for n, p in model.named_parameters()}
        torch_xla.sync()  # as one program
        found[f"capacity {capacity} {axis}"] = {n: each.cpu() for n, each in lazy_grads.items()}
    found["chosen"] = chosen_twice(rank)
    counts = tokens_per_expert(batch(rank, 0, "one rank")[1].to(device), EXPERTS)
    found["load"] = counts.tolist(), imbalance(counts).item()
    found["refusals"] = refusals(meshes["2x2"])
    return found


def chosen_twice(rank: int) -> list[Tensor]:
    """What a router of equal scores has chosen in a forward, and as it was recomputed."""
    import torch_xla

    from xla_fsdp import fully_shard, init_mesh
    from xla_fsdp.nn.activation_checkpoint import checkpoint_module
    from xla_fsdp.tensor_parallel import parallelize_module

    chosen = []

    class Routed(Mixture):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            experts = self.router(torch.tanh(self.first(x))).topk(2).indices
            chosen.append(experts.detach().clone())
            return super().forward(x, experts)

    mesh, model = init_mesh((2, 2), ("shard", "expert")), make(Routed)
    torch.nn.init.zeros_(model.router.weight)
    torch.nn.init.zeros_(model.router.bias)
    parallelize_module(model, mesh["expert"], {"experts": ExpertParallel()}, src_data_rank=None)
    model = fully_shard(checkpoint_module(model), mesh=mesh)
    model(batch(rank, 0, "any")[0].to(torch_xla.device())).square().mean().backward()
    torch_xla.sync()
    return [each.cpu() for each in chosen]


def refusals(mesh: Any) -> dict[str, str]:
    from xla_fsdp import fully_shard, parallelize
    from xla_fsdp.tensor_parallel import parallelize_module

    class Alone(Experts):
        def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
            return tokens @ self.up.sum(0).t() @ self.down.sum(0).t()

    def cut_model(model: Any = None, style: Any = None) -> Any:
        model = make(Mixture) if model is None else model
        plan = {"experts": style or ExpertParallel()}
        return parallelize_module(model, mesh["expert"], plan, src_data_rank=None)

    def with_experts(experts: nn.Module) -> nn.Module:
        model = make(Mixture)
        model.experts = experts
        return model

    def other_number() -> None:
        experts = Experts()
        experts.num_experts = 7
        cut_model(with_experts(experts))

    def hook() -> None:
        fully_shard(cut_model(), mesh=mesh).register_comm_hook(None, lambda *_: None)

    cases: dict[str, Any] = {
        "seven": lambda: cut_model(with_experts(Experts(count=7))),
        "other number": other_number,
        "rounds": lambda: ExpertParallel(rounds=0),
        "one axis": lambda: fully_shard(cut_model(), mesh=mesh["shard"]),
        "no mesh": lambda: fully_shard(cut_model()),
        "groups": lambda: fully_shard(cut_model(), mesh=mesh, reshard_after_forward=2),
        "hook": hook,
        "no exchange": lambda: cut_model(with_experts(Alone())).experts(torch.ones(2, WIDTH)),
        "dense": lambda: parallelize(nn.Linear(2, 2), mesh=mesh),
    }
    return {name: message(call) for name, call in cases.items()}


# ---------------------------------------------------------------- here


@cached_outcome
def outcome() -> tuple[dict[str, Any], dict[str, Tensor]]:
    with tempfile.TemporaryDirectory() as folder:
        found = run_on_ranks(run, RANKS, folder)[0]
        place = f"{folder}/merged.pth"
        shards = read_shards(f"{folder}/1x4/{STEP}", "*.pth", None, overwrite=False)
        merge_files(shards, place, MergeOptions())
        merged = torch.load(place, weights_only=True)
    return found, merged["model"]


def assert_trained(own: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_close(own["grads"], expected["grads"], atol=1e-7, of_largest=1e-5)
    assert own["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    params = {name: own["state"][name] for name in expected["state"]}
    assert_close(params, expected["state"], atol=1e-5, of_largest=1e-5)


@pytest.mark.parametrize(("mesh", "routes"), CASES)
def test_training_is_that_of_the_plain_model(mesh: str, routes: str) -> None:
    assert_trained(outcome()[0][f"{mesh} {routes}"], plain(routes))


@cached_outcome
def chips() -> dict[str, Done]:
    jobs = [(shape, capacity) for shape in ((4, 2), (2, 4)) for capacity in (None, EXPERTS)]
    return run_jobs({f"{job}": Job("v5e:2x4", on_chips, job) for job in jobs}, timeout=1800)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 2), (2, 4)])
@pytest.mark.parametrize("capacity", [None, EXPERTS])
def test_programs_for_a_slice_train_as_the_plain_model(
    shape: tuple[int, int], capacity: float | None
) -> None:
    """With that capacity an expert takes all tokens of every rank: nothing is dropped."""
    done = chips()[f"{(shape, capacity)}"]
    assert not done.error, done.error
    expected = plain("any", 8)
    for rank in done.ranks:
        assert_trained(rank, expected)


def test_any_mesh_loads_what_another_has_saved() -> None:
    found, merged = outcome()
    saved = found["1x4 one rank"]["state"]
    for loaded in ("alone", "from 1x4", "from alone"):
        assert same(found[loaded], saved), loaded
    assert same(merged, {name: saved[name] for name in merged})
    assert merged["experts.up"].shape == (EXPERTS, INNER, WIDTH)


def test_a_capacity_is_of_the_tokens_of_each_rank() -> None:
    """A small one drops the same with and without an axis, a large one nothing."""
    found = outcome()[0]
    whole = found["2x2 any"]["grads"]
    own, alone, wide = (found[f"capacity {capacity} {axis}"] for capacity, axis in CAPACITIES)
    assert_close(own, alone, atol=1e-7, of_largest=1e-5)
    assert_close(wide, whole, atol=1e-7, of_largest=1e-5)
    assert not all(torch.allclose(own[name], whole[name], atol=1e-6) for name in whole)


def test_recomputing_chooses_the_same_experts() -> None:
    first, again = outcome()[0]["chosen"]
    assert torch.equal(first, again)


def test_load_is_of_all_ranks() -> None:
    each = RANKS * TOKENS
    assert outcome()[0]["load"] == ([each, each, *[0] * (EXPERTS - 2)], EXPERTS / 2)


REFUSED = {
    "seven": "the 2 ranks of axis 'expert' cannot share the 7 of dim 0 equally",
    "other number": "has up, bias, down, not [experts, ...] of its 7 experts",
    "rounds": "rounds is 0; give 1 or more",
    "one axis": "give it both axes, as in mesh=mesh['shard', 'expert']",
    "no mesh": "give it both axes, as in mesh=mesh['shard', 'expert']",
    "groups": "experts are cut over axis 'expert'; give True or False",
    "hook": "those of experts are of others",
    "no exchange": "its forward has exchanged no tokens; compute by exchanged()",
    "dense": "the mesh has an axis expert, and Linear has no experts of transformers 5",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused(case: str) -> None:
    found = outcome()[0]["refusals"][case]
    assert REFUSED[case] in found
