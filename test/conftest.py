"""Collects files that start processes first, so that two workers that share out files end together.

Within a file, and among files of one kind, tests keep their order.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

STARTERS = {"run_on_ranks", "run_python", "run_warm", "scenarios", "Runs"}

# An example takes as long as a busy machine needs for it, also to be made.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    """The tests' own tensors are small, and threads of several processes that wait for one another
    on few cores, spinning, take up to a hundred times as long. Children have threads as usual."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _nothing_takes_long() -> None:
    """What a merge says of how far it is depends on how busy the machine is."""
    from xla_fsdp import consolidate_sharded_ckpts

    consolidate_sharded_ckpts.FIRST_LINE = 1e6


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take a minute before those that take seconds; at the end there is little left to
    wait for."""
    items.sort(key=lambda item: not STARTERS & vars(getattr(item, "module", None) or item).keys())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Ranks run the scenarios of the tests that are left by ``-k`` and ``-m``."""
    for item in session.items:
        scenarios = getattr(getattr(item, "module", None), "scenarios", None)
        if hasattr(scenarios, "choose"):  # not by its class, whose module needs torch_xla
            scenarios.choose(item)
