"""Flags of the TPU compiler under which a sharded step needs less memory, and waits less.

Words: ``LIBTPU_INIT_ARGS`` is the environment variable that the TPU compiler reads its flags from
when a process first uses a TPU.
Why: a sharded optimizer step works on many small tensors. The compiler fetches each of them ahead,
in slices, and every such fetch keeps a table of 16 KiB in HBM: at 24 transformer blocks of width
1024 over 16 ranks 42 MiB of temporaries and 4 of code. With fewer fetches at a time and none in
slices the estimated time of a step stays the same. Code lies in HBM, too, and blocks that compute
the same can share theirs: that of 24 takes 55 MiB instead of 281. Together a step needs 617 MiB
instead of 889. And for v4 the compiler leaves every all-gather blocking unless it is told to start
them early, as it does by itself for later chips.
Always true: a flag that the user has set stays, and a compiler of another version, which might not
know these names and would end the process, gets none.
``launch`` sets them on TPU and ``preflight`` compiles with them.
"""

from __future__ import annotations

import importlib.metadata

LOW_MEMORY = (
    "--xla_tpu_sliced_prefetch_max_slices=0",  # for v5p the compiler aborts with 1
    "--xla_vf_vmem_max_outstanding_prefetches=4",  # v5e, v5p
    "--xla_gf_vmem_max_outstanding_prefetches=4",  # v6e
)

EARLY_GATHERS = (
    "--xla_enable_async_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
)

SHARED_CODE = ("--xla_tpu_enable_deduplicated_calls=true",)

ADDED = (*LOW_MEMORY, *SHARED_CODE, *EARLY_GATHERS)

"""What this module adds."""

KNOWN_TO = "0.0.21"

"""The version of libtpu that torch_xla 2.9 uses, whose flags these are."""


def compiler_flags(given: str = "") -> str:
    """``LIBTPU_INIT_ARGS`` for sharded steps.

    Args:
        given: the variable's value so far; flags in it win.

    Returns:
        ``given`` with the missing flags of ``ADDED``, if the installed compiler knows them.
    """
    if _installed_version() != KNOWN_TO:
        return given
    names = {_name(flag) for flag in given.split()}
    return " ".join([*given.split(), *(f for f in ADDED if _name(f) not in names)])


def _name(flag: str) -> str:
    return flag.lstrip("-").partition("=")[0]


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None
