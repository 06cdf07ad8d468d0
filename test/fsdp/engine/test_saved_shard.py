"""What was computed from a shard is a plain tensor, but for what saves it."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from xla_fsdp.fsdp.engine.shard_tensor import SavedShard, is_part


def test_what_has_the_shape_of_a_shard_stays_one() -> None:
    shard = torch.arange(6.0).reshape(2, 3).as_subclass(SavedShard)
    for made in (shard.half(), 0.9 * shard + 0.1, shard.clone().mul_(2), copy.deepcopy(shard)):
        assert type(made) is SavedShard
        assert is_part(made)
    for made in (shard.sum(), shard[0], shard @ torch.ones(3, 4), torch.stack([shard, shard])):
        assert type(made) is torch.Tensor


def test_a_file_needs_torch_alone() -> None:
    shard = torch.arange(6.0).as_subclass(SavedShard)
    loaded = pickle.loads(pickle.dumps(shard))
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, torch.arange(6.0))


def test_a_parameter_made_of_one_can_be_copied() -> None:
    made = nn.Parameter(torch.arange(6.0).as_subclass(SavedShard))
    copied = copy.deepcopy(made)
    assert isinstance(copied, nn.Parameter)
    assert (copied.requires_grad, copied.is_leaf) == (True, True)
    (copied * 2).sum().backward()
    assert torch.equal(copied.grad, torch.full((6,), 2.0))
    assert made.grad is None
