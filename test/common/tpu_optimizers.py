"""Training steps whose optimizer is what matters, for tests that ask the TPU compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common.tpu_steps import LENGTH, Transformer


def zero(kind: str = "ours", low: bool = False, depth: int = 4) -> Callable[[], Any]:
    """A step of a replicated transformer with AdamW, its state divided among the ranks.

    Args:
        kind: "ours"; or "upstream", that of torch_xla with the settings that serve it best; or
            "upstream_default", as it comes.
        low: parameters in bf16, stepped in fp32 with master weights.
        depth: number of blocks.
    """
    import torch_xla

    device = torch_xla.device()
    model = Transformer(depth).to(device=device, dtype=torch.bfloat16 if low else torch.float32)
    optimizer = _zero_optimizer(kind, low, model)
    tokens = torch.zeros(2, LENGTH, dtype=torch.long).to(device)

    def step() -> Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch_xla.sync()
        return loss

    return step


def _zero_optimizer(kind: str, low: bool, model: nn.Module) -> Any:
    import torch_xla.runtime as xr
    from torch_xla.distributed import zero_redundancy_optimizer as upstream

    from xla_fsdp.optim import HighPrecisionOptimizer, ZeroRedundancyOptimizer

    params = model.parameters()
    if kind != "ours":
        return upstream.ZeroRedundancyOptimizer(
            params,
            torch.optim.AdamW,
            grad_clipping=False,
            pin_layout=kind == "upstream_default",
            sharding_groups=[list(range(xr.world_size()))],
        )
    if low:
        return ZeroRedundancyOptimizer(
            params, HighPrecisionOptimizer, inner_class=torch.optim.AdamW
        )
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW)


class Deep(nn.Module):
    """Many equal layers, few activations: what takes memory are parameters and gradients."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def deep(
    in_backward: bool = True, sync_between: bool = False, depth: int = 10, width: int = 4096
) -> Callable[[], Any]:
    """A step with momentum of a sharded model, each layer a unit.

    Args:
        in_backward: whether it is made inside backward.
        sync_between: run what is traced when backward ends, as a program of its own.
        depth: number of layers.
        width: of a layer.
    """
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel
    from xla_fsdp.optim import step_in_backward

    with torch.device("meta"):
        model: Any = Deep(depth, width)
    options: dict[str, Any] = {"sync_on_finalization": sync_between}
    for index, layer in enumerate(model.layers):
        model.layers[index] = XlaFullyShardedDataParallel(layer, **options)
    model = XlaFullyShardedDataParallel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if in_backward:
        step_in_backward(model, optimizer)
    x = torch.zeros(8, width).to(torch_xla.device())

    def step() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        return loss

    return step
