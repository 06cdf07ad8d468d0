"""Tensors in nested containers."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from xla_fsdp.distributed.pytree import (
    Contents,
    map_tensors,
    replace_entries,
    replaced,
    substitutes,
    tensors_in,
)

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Record:
    value: torch.Tensor
    note: str


TENSORS = st.builds(lambda n: torch.full((2,), n), st.floats(0, 9))
LEAVES = st.one_of(st.integers(), st.none(), st.text(max_size=3), TENSORS)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(lambda a: OrderedDict(a=a), inner),
        st.builds(Record, inner, st.text(max_size=2)),
    ),
    max_leaves=12,
)


@given(TREES)
def test_replacing_by_themselves_changes_nothing(tree: object) -> None:
    found = tensors_in(tree)
    again = map_tensors(lambda tensor: tensor, tree)
    assert type(again) is type(tree)
    assert all(a is b for a, b in zip(tensors_in(again), found, strict=True))
    assert repr(again) == repr(tree)


@given(TREES)
def test_mapping_reaches_every_tensor_in_order(tree: object) -> None:
    doubled = map_tensors(lambda t: t * 2, tree)
    pairs = zip(tensors_in(doubled), tensors_in(tree), strict=True)
    assert all(torch.equal(new, old * 2) for new, old in pairs)


def test_other_leaves_keep_their_identity() -> None:
    note = object()
    result = map_tensors(lambda t: t, {"a": [note, Record(torch.ones(1), "n")]})
    assert result["a"][0] is note


def test_packed_sequences_stay_packed() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    result = map_tensors(lambda t: t, (packed,))[0]
    assert type(result) is PackedSequence
    assert torch.equal(result.data, packed.data)


@given(TREES)
def test_lent_tensors_are_given_back(tree: object) -> None:
    found, before = Contents.of(tree), repr(tree)
    lent = [tensor + 1 for tensor in found.tensors]
    by, back = substitutes(found.tensors, lent), {}
    for container in found.containers:
        back.update(replace_entries(container, by))
    now = replaced(tree, by)
    assert all(a is b for a, b in zip(tensors_in(now), lent, strict=True))
    for container in found.containers:
        replace_entries(container, back)
    assert repr(tree) == before
    assert all(a is b for a, b in zip(tensors_in(tree), found.tensors, strict=True))


def test_what_cannot_change_is_given_back_itself() -> None:
    record = Record(torch.ones(1), "n")
    given: list[object] = [record]
    back = replace_entries(given, substitutes([record.value], [torch.zeros(1)]))
    assert given[0] is not record
    replace_entries(given, back)
    assert given[0] is record


def test_containers_that_hold_themselves() -> None:
    tree: dict[str, object] = {"a": torch.ones(1)}
    tree["b"] = [tree, tree["a"]]
    result = map_tensors(lambda t: t * 2, tree)
    assert result["b"][0] is result
    assert result["b"][1] is result["a"] is not tree["a"]


@dataclass(eq=False)
class Sum(nn.Module):
    values: list[torch.Tensor]

    def __post_init__(self) -> None:
        super().__init__()


def test_modules_are_no_containers() -> None:
    assert tensors_in([Sum([torch.ones(1)])]) == []


def test_containers_that_pytree_copies_are_not_kept_alive() -> None:
    tree = OrderedDict(a=torch.ones(1))
    alive = weakref.ref(tree)
    gc.disable()
    try:
        map_tensors(lambda t: t, tree)
        del tree
        assert alive() is None
    finally:
        gc.enable()
