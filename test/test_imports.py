"""What importing loads, and what the catalogue offers."""

from __future__ import annotations

import pytest

from test.common.ranks import run_python

LIGHT = [
    "xla_fsdp",
    "xla_fsdp.checkpoint, xla_fsdp.checkpoint.save_protocol, xla_fsdp.checkpoint.load_step",
    "xla_fsdp.distributed.launcher",
    "xla_fsdp.wrap, xla_fsdp.compat, xla_fsdp.integrations.versions",
    "xla_fsdp.fsdp.engine.config, xla_fsdp.distributed.mesh",
    "xla_fsdp.preflight",
]


@pytest.mark.parametrize("module", LIGHT)
def test_torch_xla_is_not_loaded_by(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch_xla', 'jax'}} & set(sys.modules)))"
    done = run_python("-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_every_public_name_is_there() -> None:
    absent = "[n for n in x.__all__ if getattr(x, n) is None or n not in dir(x)]"
    code = f"import xla_fsdp as x; print({absent})"
    done = run_python("-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_launch_is_a_function_even_after_importing_its_command() -> None:
    code = "import xla_fsdp.launch, xla_fsdp; print(xla_fsdp.launch(int, num_ranks=1))"
    done = run_python("-c", code)
    assert done.stdout.strip() == "[0]", done.stderr


def test_unknown_names_are_said() -> None:
    done = run_python("-c", "import xla_fsdp; xla_fsdp.nothing")
    assert "AttributeError: module 'xla_fsdp' has no attribute 'nothing'" in done.stderr
