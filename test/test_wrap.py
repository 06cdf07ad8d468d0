"""Policies decide, the walker wraps; neither needs a device."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn

from xla_fsdp.wrap import (
    always_wrap_policy,
    has_forward,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap_children,
)


class Unit(nn.Module):
    """What the walker puts around a module here."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: object) -> object:
        return self.inner(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 4)
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: object) -> object:
        return self.second(self.first(x))


def tree() -> nn.Module:
    model = nn.Module()
    model.blocks = nn.ModuleList([Block(), Block()])
    model.head = nn.Linear(4, 3)
    return model


def wrapped(model: nn.Module) -> set[str]:
    names = [name for name, module in model.named_modules() if isinstance(module, Unit)]
    return {name.replace("inner.", "") for name in names}


def test_classes() -> None:
    model = tree()
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    taken = wrap_children(model, policy, Unit)
    assert wrapped(model) == {"blocks.0", "blocks.1"}
    assert taken == sum(p.numel() for p in model.blocks.parameters())


def test_predicate() -> None:
    model = tree()
    wrap_children(
        model, partial(lambda_auto_wrap_policy, lambda_fn=lambda m: m is model.head), Unit
    )
    assert wrapped(model) == {"head"}


def test_always_wraps_all_that_compute() -> None:
    model = tree()
    wrap_children(model, always_wrap_policy, Unit)
    assert {"blocks.0", "blocks.0.first", "head"} <= wrapped(model)
    assert "blocks" not in wrapped(model)


def test_size_counts_what_is_not_wrapped_yet() -> None:
    model = tree()
    # A block has 25 + 24 + 80 elements: its attention is taken alone, the rest is too small.
    policy = partial(size_based_auto_wrap_policy, min_num_params=80)
    wrap_children(model, policy, Unit)
    assert wrapped(model) == {"blocks.0.attention", "blocks.1.attention"}


def test_size_does_not_look_into_attention_or_wrap_lists() -> None:
    model = tree()
    wrap_children(model, partial(size_based_auto_wrap_policy, min_num_params=16), Unit)
    assert wrapped(model) == {
        f"blocks.{i}.{name}" for i in (0, 1) for name in ("first", "second", "attention")
    }


def test_a_module_in_two_places_is_wrapped_once() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Module()
    model.a, model.b = shared, shared
    model.list = nn.ModuleList([shared])
    taken = wrap_children(model, always_wrap_policy, Unit)
    assert model.a is model.b
    assert model.list[0] is model.a
    assert taken == 20


@pytest.mark.parametrize(
    ("module", "expected"), [(nn.ModuleList(), False), (nn.Linear(1, 1), True), (Block(), True)]
)
def test_has_forward(module: nn.Module, expected: bool) -> None:
    assert has_forward(module) is expected
