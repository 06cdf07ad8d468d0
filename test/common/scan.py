"""Models and cases for tests of blocks that run as one loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from test.common.parity import Case
from test.common.scenarios import fsdp, make

WIDTH, HIDDEN, DEPTH = 18, 23, 3  # which no number of ranks divides

BF16 = {"compute_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16}
NO_BARRIERS = {"optimization_barrier_in_forward": False, "optimization_barrier_in_backward": False}
ALL_LARGE: dict[str, Any] = {"gather_once_below": 1}

CASES: dict[str, Case] = {
    "plain": Case("ScanNet", scan={}),
    "two_blocks": Case("Net", scan=ALL_LARGE),
    "one_block": Case("ScanNetOfOne", scan={}),
    "all_large": Case("ScanNet", scan=ALL_LARGE),
    "all_small": Case("ScanNet", scan={"gather_once_below": 10**9}),
    "no_remat": Case("ScanNet", scan={"remat": "none"}),
    "named": Case("ScanNet", scan={"remat": ["qkv", "up"]}),
    "remat_inside": Case("ScanNet", remat="inside", scan={}),
    "offload": Case("ScanNet", scan={"offload_activations": True}),
    "offload_named": Case("ScanNet", scan={"remat": ["qkv"], "offload_activations": True}),
    "offload_one_block": Case("ScanNetOfOne", scan={"offload_activations": True}),
    "offload_adapters": Case("AdapterNet", scan={"remat": "none", "offload_activations": True}),
    "holding": Case("HoldingNet", scan={}),
    "holding_no_remat": Case("HoldingNet", scan={**ALL_LARGE, "remat": "none"}),
    "bf16": Case("ScanNet", scan={}, options=BF16, tolerance=0.05),
    "bf16_fp32_reduce": Case(
        "ScanNet", scan={}, options={**BF16, "fp32_reduce_scatter": True}, tolerance=0.05
    ),
    "fp16": Case("ScanNet", scan={}, options={"compute_dtype": torch.float16}, tolerance=0.02),
    "flat": Case("ScanNet", scan={}, options={"flatten_parameters": True}),
    "rows": Case("ScanNet", scan={}, options={"shard_param_on_dim_0": True}),
    "in_place": Case("ScanNet", scan={}, in_place=True),
    "in_place_dim_1": Case("ScanNet", scan=ALL_LARGE, in_place=True, dim=1),
    "in_place_dim_1_small": Case("ScanNet", scan={}, in_place=True, dim=1),
    "no_barriers": Case("ScanNet", scan={}, options=NO_BARRIERS),
    "one_gather_each": Case("ScanNet", scan={}, options={"coalesce_all_gather_ops": False}),
    "one_reduce_each": Case("ScanNet", scan={}, options={"reduce_scatter_bucket_size_mb": 0}),
    "adapters": Case("AdapterNet", scan={}),
    "adapters_no_remat": Case("AdapterNet", scan={"remat": "none"}),
    "clip": Case("ScanNet", scan={}, clip=(0.3, 2.0)),
    "adamw": Case("Net", scan=ALL_LARGE, optimizer="adamw", tolerance=1e-3),
    "accumulate": Case("ScanNet", scan={}, micro_batches=2),
    "no_sync": Case("ScanNet", scan={}, micro_batches=3, no_sync=True),
    "joint_backward": Case("ScanNet", scan={}, micro_batches=2, joint_backward=True),
    "evaluate": Case("ScanNet", scan={}, evaluate=True),
    "auto": Case(policy="transformer", options={"scan_layers": True}),
    "auto_by_name": Case(policy="transformer", options={"scan_layers": "blocks"}, remat="inside"),
    "groups_of_two": Case("ScanNet", scan={}, groups_of=2, clip=(0.3, 2.0)),
    "numbers": Case("NumbersNet", scan={}, evaluate=True),
    "vmap": Case("VmapNet", scan={}),
    "two_kinds": Case("TwoKindsNet", scan=ALL_LARGE, evaluate=True),
    "pattern": Case("PatternNet", scan={}, evaluate=True),
    "pattern_no_remat": Case("PatternNet", scan={"remat": "none"}),
    "pattern_named": Case("PatternNet", scan={"remat": ["qkv"], "offload_activations": True}),
    "pattern_bf16": Case("PatternNet", scan={}, options=BF16, tolerance=0.15),
    "pattern_in_place": Case("PatternNet", scan={}, in_place=True),
    "pattern_no_sync": Case("PatternNet", scan={}, micro_batches=2, no_sync=True),
    "pattern_hybrid": Case("PatternNet", scan={}, mesh=(2, 2), clip=(0.3, 2.0)),
    "torus_2x2": Case("ScanNet", scan=ALL_LARGE, torus=(2, 2)),
    "hybrid_2x2": Case("ScanNet", scan={}, mesh=(2, 2), clip=(0.3, 2.0)),
    "hybrid_2x2_no_sync": Case("ScanNet", scan={}, mesh=(2, 2), micro_batches=2, no_sync=True),
    "hybrid_2x4_bf16": Case("ScanNet", scan={}, mesh=(2, 4), options=BF16, tolerance=0.05),
}  # fmt: skip


class Block(nn.Module):
    """A norm and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("shift", torch.full((WIDTH,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        return x + self.drop(self.down(hidden)) + self.shift


class Net(nn.Module):
    """Blocks and a head."""

    def __init__(self, depth: int = DEPTH, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(depth)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def wrapped(
    change: Callable[[Any], None] = lambda model: None,
    depth: int = DEPTH,
    seed: int = 3,
    **options: Any,
) -> Any:
    """Build a model and wrap each block; ``change`` gets the model before."""

    def build() -> nn.Module:
        model = Net(depth)
        change(model)
        return model

    model = make(build, seed)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = fsdp(block, **options)
    return fsdp(model, **options)


def of_kind(kind: str, seed: int = 3, **options: Any) -> Any:
    """Build a model that runs block by block ("single"), or as a loop ("scanned", "stacked")."""
    from xla_fsdp import scan_blocks

    model = wrapped(seed=seed, **options)
    if kind != "single":
        model.scan = scan_blocks(model.blocks, stacked=kind == "stacked")
    return model


def batch(seed: int = 1) -> Tensor:
    """Return inputs [4, WIDTH] of this rank, on its device."""
    import torch_xla

    from xla_fsdp.xla import ops

    generator = torch.Generator().manual_seed(10 * seed + ops.rank())
    return torch.randn(4, WIDTH, generator=generator).to(torch_xla.device())


def whole(model: Any) -> dict[str, Tensor]:
    """Return the full state dict, whose names are those of the single blocks."""
    from xla_fsdp import full_state_dict

    return dict(full_state_dict(model))
