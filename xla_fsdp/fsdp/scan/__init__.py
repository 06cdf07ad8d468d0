"""FSDP over identical blocks that run as one While loop."""

from __future__ import annotations

from xla_fsdp.fsdp.scan.api import scan_blocks, scan_containers
from xla_fsdp.fsdp.scan.block_scan import BlockScan, blocks_one_by_one
from xla_fsdp.fsdp.scan.remat_policy import checkpoint_name, name_activation

__all__ = [
    "BlockScan",
    "blocks_one_by_one",
    "checkpoint_name",
    "name_activation",
    "scan_blocks",
    "scan_containers",
]
