"""Programs as users of torch's FSDP2 write them; only imports and the device differ.

``tutorial`` follows PyTorch's FSDP2 tutorial (a transformer on the meta device, a unit for each
layer, mixed precision, explicit prefetching, state dicts in two ways), ``apply_fsdp`` torchtitan.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch_xla
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from xla_fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    StateDictOptions,
    clip_grad_norm_,
    distribute_tensor,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


@dataclass(frozen=True)
class ModelArgs:
    """Sizes of the transformer."""

    layers: int = 3
    width: int = 12
    heads: int = 2
    vocabulary: int = 10
    length: int = 6


class Attention(nn.Module):
    """Self-attention."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.heads = args.heads
        self.wq = nn.Linear(args.width, args.width, bias=False)
        self.wk = nn.Linear(args.width, args.width, bias=False)
        self.wv = nn.Linear(args.width, args.width, bias=False)
        self.wo = nn.Linear(args.width, args.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        shape = (rows, length, self.heads, width // self.heads)
        q, k, v = (w(x).view(shape).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        scores = (q @ k.transpose(2, 3)) * (width // self.heads) ** -0.5
        mixed = scores.softmax(-1) @ v
        return self.wo(mixed.transpose(1, 2).reshape(rows, length, width))

    def reset_parameters(self) -> None:
        for layer in (self.wq, self.wk, self.wv, self.wo):
            layer.reset_parameters()

    def init_weights(self, std: float) -> None:
        for layer in (self.wq, self.wk, self.wv):
            nn.init.trunc_normal_(layer.weight, mean=0.0, std=0.02)
        nn.init.trunc_normal_(self.wo.weight, mean=0.0, std=std)


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.attention = Attention(args)
        self.w1 = nn.Linear(args.width, 3 * args.width)
        self.w2 = nn.Linear(3 * args.width, args.width)
        self.std = 0.02 / (2 * args.layers) ** 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.w2(F.gelu(self.w1(self.ffn_norm(x))))

    def reset_parameters(self) -> None:
        for part in (self.attention_norm, self.attention, self.ffn_norm, self.w1, self.w2):
            part.reset_parameters()

    def init_weights(self) -> None:
        for norm in (self.attention_norm, self.ffn_norm):
            norm.reset_parameters()
        self.attention.init_weights(self.std)
        for layer in (self.w1, self.w2):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)


class Transformer(nn.Module):
    """Embeddings, layers, norm, output."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocabulary, args.width)
        self.pos_embeddings = nn.Embedding(args.length, args.width)
        self.register_buffer("positions", torch.arange(args.length), persistent=False)
        self.layers = nn.ModuleDict({str(n): TransformerBlock(args) for n in range(args.layers)})
        self.norm = nn.LayerNorm(args.width)
        self.output = nn.Linear(args.width, args.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens) + self.pos_embeddings(self.positions[: tokens.shape[1]])
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))

    def reset_parameters(self) -> None:
        self.positions = torch.arange(len(self.positions), device=self.positions.device)
        for part in (self.tok_embeddings, self.pos_embeddings, self.norm, self.output):
            part.reset_parameters()
        for layer in self.layers.values():
            layer.reset_parameters()

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        self.positions = torch.arange(len(self.positions), device=buffer_device)
        nn.init.normal_(self.tok_embeddings.weight)
        nn.init.normal_(self.pos_embeddings.weight)
        for layer in self.layers.values():
            layer.init_weights()
        self.norm.reset_parameters()
        std = self.output.in_features**-0.5
        nn.init.trunc_normal_(self.output.weight, mean=0.0, std=std, a=-3 * std, b=3 * std)


# ---------------------------------------------------------------- the tutorial's shape


def set_forward_prefetch(model: Transformer, ahead: int) -> None:
    layers = list(model.layers.values())
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + ahead])


def set_backward_prefetch(model: Transformer, ahead: int) -> None:
    layers = list(model.layers.values())
    for index, layer in enumerate(layers):
        layer.set_modules_to_backward_prefetch(layers[max(index - ahead, 0) : index][::-1])


def inspect(model: Any) -> None:
    assert isinstance(model, Transformer)
    assert isinstance(model, FSDPModule)
    for param in model.parameters():
        assert param.placements == (Shard(0),)
        assert param.dtype == torch.float32
    model.unshard()
    for param in model.parameters(recurse=False):
        assert param.dtype == torch.bfloat16
    model.reshard()


def save_by_shards(model: nn.Module, rank: int, path: Path) -> None:
    full = {}
    for name, shard in model.state_dict().items():
        whole = shard.full_tensor()
        if rank == 0:
            full[name] = whole.cpu()
    if rank == 0:
        torch.save(full, path)


def load_by_shards(model: nn.Module, path: Path) -> None:
    full = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    on_meta, shards = model.state_dict(), {}
    for name, whole in full.items():
        param = on_meta[name]
        shards[name] = nn.Parameter(distribute_tensor(whole, param.device_mesh, param.placements))
    model.load_state_dict(shards, strict=False, assign=True)


def sharded_on_meta(args: ModelArgs, prefetch: bool) -> Any:
    with torch.device("meta"):
        model = Transformer(args)
    kwargs = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    }
    for layer in model.layers.values():
        fully_shard(layer, **kwargs)
    fully_shard(model, **kwargs)
    if prefetch:
        set_forward_prefetch(model, 2)
        set_backward_prefetch(model, 2)
    return model


def train(model: Any, optim: torch.optim.Optimizer, args: ModelArgs, steps: int) -> list[float]:
    device, losses = torch_xla.device(), []
    tokens = torch.arange(3 * args.length).reshape(3, -1) % args.vocabulary
    for _ in range(steps):
        model.unshard()
        x = tokens.to(device)
        loss = F.cross_entropy(model(x).flatten(0, 1).float(), x.roll(-1, 1).flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        optim.step()
        optim.zero_grad()
        torch_xla.sync()
        losses.append(loss.item())
    return losses


def tutorial(rank: int, folder: Path) -> dict[str, Any]:
    """Trains, saves in both ways, and goes on from both."""
    args, device = ModelArgs(), torch_xla.device()
    torch.manual_seed(0)
    model = sharded_on_meta(args, prefetch=True)
    model.to_empty(device=device)
    model.reset_parameters()
    inspect(model)
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    found: dict[str, Any] = {"losses": train(model, optim, args, 4)}

    save_by_shards(model, rank, folder / "shards.pt")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = get_model_state_dict(model=model, options=options)
    saved_optim = get_optimizer_state_dict(model=model, optimizers=optim, options=options)
    found["names"] = sorted(saved)
    found["next"] = train(model, optim, args, 2)
    found["final"] = {
        name: t.cpu()
        for name, t in get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True)
        ).items()
    }

    by_rank0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    again = sharded_on_meta(args, prefetch=False)
    set_model_state_dict(model=again, model_state_dict=saved, options=by_rank0)
    again.positions = torch.arange(args.length, device=device)
    optim = torch.optim.Adam(again.parameters(), lr=1e-2)
    set_optimizer_state_dict(
        model=again, optimizers=optim, optim_state_dict=saved_optim, options=by_rank0
    )
    found["resumed"] = train(again, optim, args, 2)

    torch_xla.sync()
    third = sharded_on_meta(args, prefetch=False)
    load_by_shards(third, folder / "shards.pt")
    third.positions = torch.arange(args.length, device=device)
    found["shards"] = train(third, torch.optim.SGD(third.parameters(), lr=0.0), args, 1)
    return found


# ---------------------------------------------------------------- torchtitan's calls


def apply_fsdp(
    model: Transformer,
    dp_mesh: Any,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    pp_enabled: bool,
    cpu_offload: bool = False,
    reshard_after_forward_policy: str = "default",
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    config: dict[str, Any] = {"mesh": dp_mesh, "mp_policy": policy}
    if cpu_offload:
        config["offload_policy"] = CPUOffloadPolicy()
    reshard = {"always": True, "never": False, "default": not pp_enabled}[
        reshard_after_forward_policy
    ]
    if model.tok_embeddings is not None:
        fully_shard(model.tok_embeddings, **config, reshard_after_forward=reshard)
    for layer in model.layers.values():
        fully_shard(layer, **config, reshard_after_forward=reshard)
    if model.norm is not None and model.output is not None:
        # Not resharded after forward by default: backward needs them at once.
        fully_shard(
            [model.norm, model.output],
            **config,
            reshard_after_forward=reshard_after_forward_policy == "always",
        )
    fully_shard(model, **config)
    layers: list[Any] = list(model.layers.values())
    model.tok_embeddings.set_modules_to_forward_prefetch([layers[0]])  # type: ignore[operator]
    for layer, following in itertools.pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
    layers[-1].set_modules_to_forward_prefetch([model.norm, model.output])
    model.output.set_modules_to_backward_prefetch([layers[-1]])  # type: ignore[operator]
    for layer, before in itertools.pairwise(layers[::-1]):
        layer.set_modules_to_backward_prefetch([before])


def titan(rank: int, reshard: str, mesh: tuple[int, int] | None) -> dict[str, Any]:
    """Meta init, ``apply_fsdp``, ``to_empty``, ``init_weights``, a few steps with accumulation."""
    from xla_fsdp import full_state_dict, init_mesh
    from xla_fsdp.xla.graph import lowered_hlo

    args, device = ModelArgs(layers=2), torch_xla.device()
    with torch.device("meta"):
        model: Any = Transformer(args)
    dp_mesh = init_mesh(mesh, ("dp_replicate", "dp_shard")) if mesh else None
    apply_fsdp(model, dp_mesh, torch.float32, torch.float32, False, False, reshard)
    torch.manual_seed(0)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=device)
    model.train()
    start = full_state_dict(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.arange(4 * args.length).reshape(2, 2, -1) % args.vocabulary
    losses, gathers = [], []
    for _ in range(2):
        optimizer.zero_grad()
        step_loss = torch.zeros((), device=device)
        for number, tokens in enumerate(batches):
            model.set_requires_gradient_sync(number == 1)
            x = tokens.to(device)
            loss = F.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten()) / 2
            loss.backward()
            step_loss += loss.detach()
        clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizer.step()
        gathers.append(lowered_hlo(list(model.parameters())).count(" all-gather("))
        torch_xla.sync()
        losses.append(step_loss.item())
    return {"start": start, "losses": losses, "gathers": gathers[0], "end": full_state_dict(model)}
