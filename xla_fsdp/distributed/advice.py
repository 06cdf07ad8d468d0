"""What to do about errors of torch_xla and torch that do not say it. Imports no torch_xla."""

from __future__ import annotations

import re

_MOVE = (
    "A tensor on the CPU met one of the device: a target, a mask, or a tensor that a module makes "
    "in its forward or holds without register_buffer. Move it, target.to(torch_xla.device()), or "
    "make it there, torch.zeros(n, device=x.device); MpDeviceLoader moves whole batches"
)
_BY_TEXT = (
    (re.compile(r"Expected XLA tensor|Input tensor is not an XLA tensor"), _MOVE),
    (
        re.compile(r"'NoneType' object has no attribute 'param_groups'"),
        "accelerate finds no optimizer that it knows on XLA; call "
        "xla_fsdp.integrations.transformers.install() on top of the script",
    ),
    (
        re.compile(r"Please enable SPMD"),
        "SPMD and FSDPv2 (mark_sharding, xla_fsdp_v2) are another way to shard, in one process; "
        "take them out of the script and its configuration",
    ),
)


def advice(error: BaseException) -> str:
    """Return what to do about ``error``, "" if there is nothing to add to its text."""
    text = str(error)
    return next((what for pattern, what in _BY_TEXT if pattern.search(text)), "")
