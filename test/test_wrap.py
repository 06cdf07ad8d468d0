"""Policies decide, the walker wraps; neither needs a device."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap

from xla_fsdp.wrap import (
    Ignored,
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


def test_names_are_no_classes() -> None:
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={"Block"})
    with pytest.raises(TypeError, match="holds 'Block'; give classes of layers"):
        wrap_children(tree(), policy, Unit)


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


BLOCKS = {"blocks.0", "blocks.1"}
EITHER = [
    torch_wrap.ModuleWrapPolicy({Block}),
    partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear)),
    partial(size_based_auto_wrap_policy, min_num_params=10**9),
    partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
]
"""Of torch and of this package, joined by torch's policy."""
LINEARS = {"blocks.0.first", "blocks.0.second", "blocks.1.first", "blocks.1.second", "head"}
OF_TORCH = {
    "module": (torch_wrap.ModuleWrapPolicy({Block}), BLOCKS),
    "custom": (torch_wrap.CustomPolicy(lambda module: isinstance(module, Block)), BLOCKS),
    "transformer": (
        partial(torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        BLOCKS,
    ),
    "lambda": (
        partial(torch_wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Block)),
        BLOCKS,
    ),
    "size": (
        partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=80),
        {"blocks.0.attention", "blocks.1.attention"},
    ),
    "or": (partial(torch_wrap._or_policy, policies=EITHER), BLOCKS | LINEARS),
    "always": (
        torch_wrap.always_wrap_policy,
        BLOCKS | LINEARS | {"blocks.0.attention", "blocks.1.attention"},
    ),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_policies_of_torch(name: str) -> None:
    policy, expected = OF_TORCH[name]
    model = tree()
    wrap_children(model, policy, Unit)
    assert wrapped(model) == expected


def test_policies_of_torch_skip_what_is_ignored_and_have_options_for_single_modules() -> None:
    model = tree()
    taken = []

    def wrap(module: nn.Module, **options: object) -> nn.Module:
        taken.append((type(module).__name__, options))
        return Unit(module)

    policy = torch_wrap.CustomPolicy(
        lambda module: {"width": 3} if module is model.head else isinstance(module, Block)
    )
    wrap_children(model, policy, wrap, Ignored([model.blocks[0]]))
    assert wrapped(model) == {"blocks.1", "head"}
    assert taken == [("Block", {}), ("Linear", {"width": 3})]
