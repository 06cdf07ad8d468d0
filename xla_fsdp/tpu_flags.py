"""Flags of the TPU compiler with which a sharded step needs less memory and waits less.

Invariants: the user's own flags win. A compiler of another version gets no flags, as one that does
not know a flag ends the process.
"""

from __future__ import annotations

import importlib.metadata

# A sharded optimizer step works on many small tensors. The compiler prefetches each of them in
# slices, and every such prefetch has a table of 16 KiB in HBM: for 24 transformer blocks of width
# 1024 on 16 ranks, 42 MiB of temporaries and 4 of code. With fewer prefetches at a time, and none
# in slices, the estimated time of a step is the same.
LOW_MEMORY = (
    "--xla_tpu_sliced_prefetch_max_slices=0",  # for v5p the compiler aborts with 1
    "--xla_vf_vmem_max_outstanding_prefetches=4",  # v5e, v5p
    "--xla_gf_vmem_max_outstanding_prefetches=4",  # v6e
)

# Without these, every all-gather is blocking on v4; on later chips they are asynchronous anyway.
EARLY_GATHERS = (
    "--xla_enable_async_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
)

# Code lies in HBM, too, and equal blocks can share it: that of 24 blocks takes 55 MiB, not 281.
# With LOW_MEMORY a step needed 617 MiB, not 889.
SHARED_CODE = ("--xla_tpu_enable_deduplicated_calls=true",)

ADDED = (*LOW_MEMORY, *SHARED_CODE, *EARLY_GATHERS)

KNOWN_TO = "0.0.21"
"""The version of libtpu that torch_xla 2.9 uses, whose flags these are."""


def compiler_flags(given: str = "") -> str:
    """Return the value for ``LIBTPU_INIT_ARGS``, which is read when a process first uses a TPU.

    Args:
        given: the variable's present value; its flags win over ``ADDED``.
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
