"""Options are checked before anything is built."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch

from xla_fsdp.fsdp.engine.config import FSDPConfig, _warn_once


def test_defaults_are_valid_and_frozen() -> None:
    config = FSDPConfig()
    with pytest.raises(AttributeError):
        config.flatten_parameters = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"compute_dtype": torch.int32}, TypeError, "compute_dtype must be one of"),
        ({"buffer_dtype": "bf16"}, TypeError, "buffer_dtype must be one of .* got 'bf16'"),
        ({"reduce_scatter_bucket_size_mb": -1}, ValueError, "is -1; give 0 for one"),
        ({"sharding_rank": 0}, ValueError, "only have a meaning together"),
        ({"sharding_groups": [[0, 1]]}, ValueError, "pass all of them, or none"),
        (
            {"sharding_groups": [[0, 1], [2]], "sharding_rank": 0, "sharding_world_size": 2},
            ValueError,
            "must have sharding_world_size=2 ranks",
        ),
        (
            {"sharding_groups": [[0, 1], [1, 2]], "sharding_rank": 0, "sharding_world_size": 2},
            ValueError,
            "a rank appears twice",
        ),
        (
            {"sharding_groups": [[0, 1]], "sharding_rank": 2, "sharding_world_size": 2},
            ValueError,
            "sharding_rank 2 is not in range",
        ),
    ],
)
def test_contradictions(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        FSDPConfig(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pin_layout_in_collective_ops": True}, "twice the traffic"),
        ({"shard_param_on_dim_0": True, "flatten_parameters": True}, "is ignored because"),
    ],
)
def test_ignored_options_are_said(options: dict[str, Any], text: str) -> None:
    _warn_once.cache_clear()
    with pytest.warns(UserWarning, match=text):
        FSDPConfig(**options).warn_about_ignored()


def test_ignored_options_are_said_once() -> None:
    _warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        for wrap in ("first", "second"):
            warnings.simplefilter("default")  # after which Python shows everything again
            code = "options.warn_about_ignored()"
            options = FSDPConfig(pin_layout_in_collective_ops=True)
            exec(compile(code, wrap, "exec"), {"options": options, "__name__": wrap})
    assert len(seen) == 1


def test_options_travel_as_constructor_keywords() -> None:
    from xla_fsdp import XlaFullyShardedDataParallel

    accepted = inspect.signature(XlaFullyShardedDataParallel).parameters
    config = FSDPConfig(compute_dtype=torch.bfloat16)
    assert set(config.as_keywords()) <= set(accepted)
    assert FSDPConfig(**config.as_keywords()) == config


def test_constructor_has_upstreams_arguments_in_upstreams_order() -> None:
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as Upstream

    from xla_fsdp import XlaFullyShardedDataParallel

    def public(of: type) -> list[str]:
        parameters = inspect.signature(of.__init__).parameters.values()
        positional = (p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD)
        return [name for name in positional if not name.startswith("_")]

    assert public(XlaFullyShardedDataParallel) == public(Upstream)
