"""Garbage is collected, whatever other threads do."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from test.common.garbage import collecting_elsewhere
from xla_fsdp.distributed.garbage import collect_garbage


class Node:
    """An object that holds itself."""

    def __init__(self) -> None:
        self.own = self


@pytest.mark.parametrize(("collect", "is_freed"), [(gc.collect, False), (collect_garbage, True)])
def test_cycles_are_freed_while_another_thread_collects(collect: Any, is_freed: bool) -> None:
    before = len(gc.callbacks)
    with collecting_elsewhere():
        node = weakref.ref(Node())
        collect()
        assert (node() is None) == is_freed
    assert len(gc.callbacks) == before
