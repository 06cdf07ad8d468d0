"""Garbage is collected, and objects keep their tensors, whatever other threads do."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from test.common.garbage import collecting_elsewhere
from xla_fsdp.distributed.garbage import collect_garbage, only_new_objects_collected
from xla_fsdp.xla import ops


class Node:
    """An object that holds itself."""

    def __init__(self) -> None:
        self.own = self


@pytest.mark.parametrize(
    ("collect", "is_freed", "seconds"), [(gc.collect, False, 60.0), (collect_garbage, True, 0.2)]
)
def test_cycles_are_freed_while_another_thread_collects(
    collect: Any, is_freed: bool, seconds: float
) -> None:
    before = len(gc.callbacks)
    with collecting_elsewhere(seconds):
        node = weakref.ref(Node())
        collect()
        assert (node() is None) == is_freed
    assert len(gc.callbacks) == before


def saved_by_autograd_alone() -> tuple[Tensor, weakref.ref[Tensor]]:
    """A result, and a reference to the tensor [7, 3] that its gradient needs."""
    saved = torch.ones(7, 3, requires_grad=True) * 2
    return saved * torch.ones(7, 1, requires_grad=True), weakref.ref(saved)


def found(reference: weakref.ref[Tensor]) -> Tensor:
    return next(each for each in ops.tensor_objects() if each is reference())


@pytest.mark.parametrize("find", [ops.referent, found])
def test_a_tensor_that_was_found_outlives_the_graph_that_saved_it(find: Any) -> None:
    """A thread of autograd may drop the graph at any time."""
    result, reference = saved_by_autograd_alone()
    tensor = find(reference)
    del result
    assert tensor.tolist() == [[2.0] * 3] * 7


def test_inside_the_block_only_new_objects_are_collected() -> None:
    before = Node()
    with only_new_objects_collected():
        old, new = weakref.ref(before), weakref.ref(Node())
        del before
        gc.collect()
        assert old() is not None
        assert new() is None
    gc.collect()
    assert old() is None
