"""FSDP over a loop of identical blocks: the catalogue of what other modules use."""

from xla_fsdp.scan.activations import name_activation
from xla_fsdp.scan.blocks import BlockScan, blocks_one_by_one
from xla_fsdp.scan.surface import scan_blocks, scan_containers

__all__ = ["BlockScan", "blocks_one_by_one", "name_activation", "scan_blocks", "scan_containers"]
