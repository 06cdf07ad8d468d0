"""Programs in the shape of FSDP2's tutorial and of torchtitan run as they are, and train right."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from test.common.ranks import cached_outcome, run_on_ranks


def run_all(rank: int, folder: str, quick: bool) -> dict[str, Any]:
    import torch_xla.runtime as xr

    from test.common import fsdp2_scripts

    if quick:
        return {
            "tutorial": fsdp2_scripts.tutorial(rank, Path(folder)),
            "default": fsdp2_scripts.titan(rank, "default", None),
        }
    found = {policy: fsdp2_scripts.titan(rank, policy, None) for policy in ("always", "never")}
    found["replicas"] = fsdp2_scripts.titan(rank, "default", (xr.world_size(), 1))
    return found


@cached_outcome
def outcomes(*, quick: bool) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_on_ranks(run_all, 2, folder, quick)


def test_the_tutorial_trains_and_goes_on_from_both_kinds_of_state_dict() -> None:
    from test.common.fsdp2_scripts import ModelArgs, Transformer

    found = outcomes(quick=True)[0]["tutorial"]
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["names"] == sorted(Transformer(ModelArgs()).state_dict())
    assert found["resumed"] == pytest.approx(found["next"], rel=1e-3)
    assert found["shards"] == pytest.approx(found["next"][:1], rel=1e-3)
    assert all(torch.isfinite(value).all() for value in found["final"].values())


def test_torchtitans_calls_train_like_the_plain_model() -> None:
    _compare(outcomes(quick=True)[0]["default"])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["always", "never", "replicas"])
def test_torchtitans_other_policies_too(policy: str) -> None:
    _compare(outcomes(quick=False)[0][policy])


def _compare(found: dict[str, Any]) -> None:
    from test.common.fsdp2_scripts import ModelArgs, Transformer

    args = ModelArgs(layers=2)
    model = Transformer(args)
    model.load_state_dict(found["start"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.arange(4 * args.length).reshape(2, 2, -1) % args.vocabulary
    for expected in found["losses"]:
        optimizer.zero_grad()
        losses = [
            F.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten()) / 2 for x in batches
        ]
        torch.stack(losses).sum().backward()
        assert sum(loss.item() for loss in losses) == pytest.approx(expected, rel=1e-4)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.allclose(found["end"][name], value, atol=2e-4), name


def test_whole_parameters_are_initialized() -> None:
    """As the modules' own initialization would have it, and no two ranks the same slice."""
    start = outcomes(quick=True)[0]["default"]["start"]
    assert torch.equal(start["layers.0.w1.bias"], torch.zeros(36))
    assert torch.equal(start["norm.weight"], torch.ones(12))
    assert start["tok_embeddings.weight"].std() == pytest.approx(1.0, abs=0.3)
    first, second = start["layers.1.w1.weight"].chunk(2)
    assert not torch.equal(first, second)
    bound = (6 / (12 + 36)) ** 0.5  # xavier: of the whole matrix
    largest = start["layers.1.w1.weight"].abs().max().item()
    assert 0.9 * bound < largest <= bound


@pytest.mark.slow
def test_the_policy_decides_how_often_is_gathered() -> None:
    found = {**outcomes(quick=True)[0], **outcomes(quick=False)[0]}
    gathers = {policy: found[policy]["gathers"] for policy in ("default", "always", "never")}
    # In each of two passes: embedding, two layers, [norm, output], and the root's positions; and
    # the norm of the gradients, which CPU ranks gather.
    assert gathers["never"] == 2 * 5 + 1
    # Backward needs no embedding, and a TPU's program does not gather it; CPU ranks meet after each
    # gather, which keeps it.
    assert gathers["default"] == gathers["never"] + 2 * 3
    assert gathers["always"] == gathers["default"] + 2
