"""Small mixtures of transformers, and some steps of each by ``parallelize`` and by plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from test.common.ranks import run_on_ranks
from test.common.recipes import VOCABULARY, language_model
from test.common.scenarios import make

ROWS, LENGTH = 2, 7  # of a rank's batch
STEPS = 4  # so that a step is replayed also where the first one gives a loop up
RATE = 0.25

OF_SIX = {"num_experts": 6, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 10, "kv_lora_rank": 9, "qk_rope_head_dim": 4, "num_key_value_heads": 4}
HEADS = {"v_head_dim": 6, "qk_nope_head_dim": 6}
GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": 4,
    "attn_implementation": "eager",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
FACTORS = {"attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 2.0}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}

KINDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 6}),
    "mixtral_balanced": ("Mixtral", {"num_local_experts": 6, **BALANCED}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**OF_SIX, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20},
    ),
    "qwen3_moe": ("Qwen3Moe", {**OF_SIX, "moe_intermediate_size": 12, "head_dim": 4}),
    "olmoe": ("Olmoe", OF_SIX),
    # Its first layer has no experts, the others a shared one.
    "deepseek_v3": (
        "DeepseekV3",
        {**LATENT, **HEADS, **GROUPS, "first_k_dense_replace": 1, "moe_intermediate_size": 12},
    ),
    # Weights are transposed and have biases.
    "gpt_oss": ("GptOss", {**OSS, "num_hidden_layers": 4, "sliding_window": 4}),
    "gpt_oss_alike": (
        "GptOss",
        {**OSS, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
    ),
    "granite_moe": ("GraniteMoe", {"num_local_experts": 6, **FACTORS}),
}

OF_WIDTH = {"hidden_size": 256, "intermediate_size": 384}
WIDE: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mixtral_wide": ("Mixtral", {"num_local_experts": 6, **OF_WIDTH}),
    "mixtral_padded": ("Mixtral", {"num_local_experts": 5, **OF_WIDTH}),  # on 3 ranks
}
"""Whose experts' gradients can be made in pieces."""

ADAPTED = "_adapted"


def mixture(name: str, experts: str = "eager") -> Any:
    """A model of ``KINDS`` or ``WIDE`` whose experts and routers matter to its loss; with
    ``ADAPTED`` behind its name PEFT adapts its experts, and nothing else is trained."""
    kind, changes = {**KINDS, **WIDE}[name.removesuffix(ADAPTED)]
    model = language_model(kind, False, experts_implementation=experts, **changes)
    if name.endswith(ADAPTED):
        both = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = get_peft_model(
            model, LoraConfig(r=2, lora_alpha=1, target_modules=[], target_parameters=both)
        )
    with torch.no_grad():
        for param in model.parameters():
            param.add_((0.02 if name in WIDE else 0.2) * torch.randn(param.shape))
    return model


@dataclass(frozen=True)
class Mix:
    """How to train a mixture.

    Args:
        model: name in KINDS.
        recipe: its name.
        changes: of the recipe.
    """

    model: str
    recipe: str = "lean"
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trained:
    losses: list[float]
    states: list[dict[str, Tensor]]  # before each step, and in the end
    lines: list[str]
    replays: int = 0

    def gradients(self, step: int) -> dict[str, Tensor]:
        """By which SGD has changed the parameters."""
        before, after = self.states[step : step + 2]
        return {name: (before[name] - each) / RATE for name, each in after.items()}


def tokens(step: int, rank: int) -> Tensor:
    """A rank's batch: so few that some experts have none of them."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=draw)


def train_plain(name: str, num_ranks: int) -> Trained:
    """Train with transformers' eager experts, on the batches of all ranks."""
    model: Any = make(partial(mixture, name))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    trained = Trained([], [_copy(model)], [])
    for step in range(STEPS):
        parts = [tokens(step, rank) for rank in range(num_ranks)]
        loss = torch.stack([model(part, labels=part).loss for part in parts]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained.losses.append(loss.item())
        trained.states.append(_copy(model))
    return trained


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def train_on_ranks(mixes: Sequence[Mix], num_ranks: int, **options: Any) -> list[list[Trained]]:
    """Train all of them; return what each rank has of each."""
    found = run_on_ranks(_train_all, num_ranks, list(mixes), **options)
    return [list(each) for each in zip(*found, strict=True)]


def _train_all(rank: int, mixes: list[Mix]) -> list[Trained]:
    return [train(rank, each) for each in mixes]


def train_in_pieces(rank: int, mixes: list[Mix]) -> list[Trained]:
    """Train all of them as if their experts were large."""
    from xla_fsdp.scan import weights

    weights.IN_PIECES = 1  # of this child process
    return _train_all(rank, mixes)


def train(rank: int, mix: Mix) -> Trained:
    """Train on this rank by ``parallelize``, in a compiled step if the recipe has one."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    from xla_fsdp import Recipe, full_state_dict, parallelize

    plain = make(partial(mixture, mix.model))
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    model, optimizer, done = parallelize(plain, optimizer, Recipe(mix.recipe, **mix.changes))

    def step(ids: Tensor) -> Tensor:
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return xm.all_reduce("sum", loss.detach(), 1.0 / xr.world_size())

    def state() -> dict[str, Tensor]:
        return {name: each.cpu() for name, each in full_state_dict(model).items()}

    compiled: Any = done.compile(step)
    trained = Trained([], [state()], list(done._report))
    for number in range(STEPS):
        ids = tokens(number, rank).to(torch_xla.device())
        trained.losses.append(compiled(ids).item())
        trained.states.append(state())
    trained.lines = list(done._report)  # the first forward may show more
    trained.replays = getattr(compiled, "replays", 0)
    return trained
