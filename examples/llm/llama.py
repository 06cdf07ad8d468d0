"""A Llama of transformers in units, of any size: the model, its sharding, and a step for preflight.

    python -m xla_fsdp.preflight examples.llm.llama:step --topology v5p:4x4x4 --set scan=on
    python -m xla_fsdp.preflight examples.llm.llama:step --topology v4:4x8x8 --set lean=on ...
    python examples/llm/llama.py --ranks 64                # host memory of building one rank
    python examples/llm/train.py --help                    # training a small one

Words: *sizes* are all that the model's parameters depend on; the default ones are Llama 3's with 70
billion parameters. A *unit* is what is gathered together: a layer, the embedding, or the head.
Always true: the model is built on the meta device, so no process ever holds more of it than its
shards and one unit; layers are recomputed in backward unless asked not to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))  # what the examples share

from large_models import build_one_rank, leave_alone, training_step, wrap_blocks
from xla_fsdp import LinearCrossEntropy, Mesh, StreamedEmbedding
from xla_fsdp import XlaFullyShardedDataParallel as FSDP  # noqa: N814


@dataclass(frozen=True)
class Sizes:
    """What parameters depend on: ``width`` of the residual stream, ``blocks``, query ``heads``,
    ``kv_heads``, ``ffn`` width, size of the ``vocabulary``."""

    width: int = 8192
    blocks: int = 80
    heads: int = 64
    kv_heads: int = 8
    ffn: int = 28672
    vocabulary: int = 128256

    def config(self) -> LlamaConfig:
        """The same for transformers."""
        return LlamaConfig(
            hidden_size=self.width,
            num_hidden_layers=self.blocks,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.ffn,
            vocab_size=self.vocabulary,
            rope_theta=500_000.0,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="eager",  # plain operations, which XLA fuses itself
        )


class StreamedLlama(LlamaForCausalLM):
    """One whose head computes the loss; neither it nor the embedding is ever whole."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.embed_tokens = StreamedEmbedding.from_embedding(self.model.embed_tokens)
        self.lm_head = LinearCrossEntropy.from_linear(self.lm_head)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
        hidden = self.model(tokens, use_cache=False, **options).last_hidden_state
        return self.lm_head(hidden, targets)


def build_model(sizes: Sizes, *, streamed: bool = False) -> LlamaForCausalLM:
    """The model, without memory but for its table of rotary frequencies, which has no values of
    its own to load or to draw."""
    config = sizes.config()
    with torch.device("meta"):
        model = (StreamedLlama if streamed else LlamaForCausalLM)(config)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model


def shard_model(
    model: LlamaForCausalLM,
    *,
    remat: bool = True,
    scan: bool = False,
    stacked: bool = False,
    offload: bool = False,
    **options: Any,
) -> FSDP:
    """Embedding, every layer, and head each a unit; the last norm is left to the outermost one.
    With ``scan`` the layers run as one loop, their parameters ``stacked`` or each its own, and what
    they keep for backward in the host's memory with ``offload``.

    ``options`` are those of the wrapper, which gives each unit memory and values when it makes it.
    """
    # Shards that are rows need not be laid out anew when a loop stacks them.
    own = {"compute_dtype": torch.bfloat16, "param_init_fn": initialize}
    options = {**own, "shard_param_on_dim_0": scan, **options}
    inner = model.model
    inner.embed_tokens = FSDP(inner.embed_tokens, **options)
    how = {"remat": remat, "scan": scan, "stacked": stacked, "offload": offload}
    wrap_blocks(inner.layers, **how, **options)
    model.lm_head = FSDP(model.lm_head, **options)
    return FSDP(model, **options)


def initialize(module: nn.Module) -> None:
    """Values of one layer's own parameters: matrices normal, norms one."""
    for param in module.parameters(recurse=False):
        with torch.no_grad():
            param.normal_(std=0.02) if param.dim() > 1 else param.fill_(1.0)


def step(
    batch: int = 1,
    length: int = 2048,
    width: int = 8192,
    blocks: int = 80,
    heads: int = 64,
    kv_heads: int = 8,
    ffn: int = 28672,
    vocabulary: int = 128256,
    remat: bool = True,
    scan: bool = False,
    lean: bool = False,
    offload: bool = False,
    flat: bool = False,
    mesh: Mesh | None = None,
) -> Callable[[], None]:
    """One training step on ``batch`` texts of ``length`` tokens per rank, as preflight wants it;
    ``lean`` needs the least memory: layers as a loop over stacked parameters, which AdamW steps in
    backward, and an embedding and a head that are never whole; ``offload`` for what layers that run
    as a loop keep for backward."""
    import torch_xla

    sizes = Sizes(width, blocks, heads, kv_heads, ffn, vocabulary)
    model = shard_model(
        build_model(sizes, streamed=lean),
        remat=remat,
        scan=scan or lean,
        stacked=lean,
        offload=offload,
        flatten_parameters=flat,
        mesh=mesh,
        param_init_fn=leave_alone,
    )
    device = torch_xla.device()
    tokens, targets = (torch.zeros(batch, length, dtype=torch.long).to(device) for _ in range(2))
    loss = streamed_loss if lean else next_token_loss
    return training_step(model, lambda: loss(model, tokens, targets), within=lean)


def streamed_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """``next_token_loss`` of a ``StreamedLlama``."""
    return model(tokens, targets, attention_mask=causal_mask(tokens))


def next_token_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next tokens; tokens and targets are [N, length].

    The mask is given: of one that it makes itself, transformers reads values in every step.
    """
    logits = model(tokens, attention_mask=causal_mask(tokens)).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def causal_mask(tokens: torch.Tensor) -> torch.Tensor:
    """What is added to scores of attention for tokens [N, length]: [1, 1, length, length]."""
    length, device = tokens.shape[1], tokens.device
    unseen = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    return torch.where(unseen, -1e30, 0.0)[None, None]


def main(argv: list[str] | None = None) -> int:
    """Build one rank's shards, with real values, and say what that took."""
    return build_one_rank(
        "Build the shards of one rank of many.",
        64,
        vars(Sizes()),
        lambda sizes, **options: shard_model(build_model(Sizes(**sizes)), **options),
        argv,
    )


if __name__ == "__main__":
    sys.exit(main())
