"""FSDP over identical blocks that run as one While loop."""

from __future__ import annotations

from xla_fsdp.nn.remat_policy import checkpoint_name, name_activation
from xla_fsdp.scan.api import scan_blocks, scan_containers
from xla_fsdp.scan.block_scan import BlockScan, blocks_one_by_one

__all__ = [
    "BlockScan",
    "blocks_one_by_one",
    "checkpoint_name",
    "name_activation",
    "scan_blocks",
    "scan_containers",
]
