"""A Llama of transformers in units, of any size: the model, its sharding, and a step for preflight.

    python -m xla_fsdp.preflight examples.llm.llama:step --topology v5p:4x4x4 --set scan=on
    python examples/llm/llama.py --ranks 64                # host memory of building one rank
    python examples/llm/train.py --help                    # training a small one

Words: *sizes* are all that the model's parameters depend on; the default ones are Llama 3's with 70
billion parameters. A *unit* is what is gathered together: a layer, the embedding, or the head.
Always true: the model is built on the meta device, so no process ever holds more of it than its
shards and one unit; layers are recomputed in backward unless asked not to.
"""

from __future__ import annotations

import argparse
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

from xla_fsdp import Mesh, checkpoint_module, scan_blocks
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


def build_model(sizes: Sizes) -> LlamaForCausalLM:
    """The model, without memory but for its table of rotary frequencies, which has no values of
    its own to load or to draw."""
    config = sizes.config()
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model


def shard_model(
    model: LlamaForCausalLM, *, remat: bool = True, scan: bool = False, **options: Any
) -> FSDP:
    """Embedding, every layer, and head each a unit; the last norm is left to the outermost one.
    With ``scan`` the layers run as one loop.

    ``options`` are those of the wrapper, which gives each unit memory and values when it makes it.
    """
    # Shards that are rows need not be laid out anew when a loop stacks them.
    own = {"compute_dtype": torch.bfloat16, "param_init_fn": initialize}
    options = {**own, "shard_param_on_dim_0": scan, **options}
    inner = model.model
    inner.embed_tokens = FSDP(inner.embed_tokens, **options)
    for index, layer in enumerate(inner.layers):
        inner.layers[index] = FSDP(checkpoint_module(layer) if remat else layer, **options)
    if scan:
        scan_blocks(inner.layers, remat="full" if remat else "none")
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
    flat: bool = False,
    mesh: Mesh | None = None,
) -> Callable[[], None]:
    """One training step on ``batch`` texts of ``length`` tokens per rank, as preflight wants it.

    Parameters get no values: they do not matter, and memory that nobody wrote to takes none.
    """
    import torch_xla

    sizes = Sizes(width, blocks, heads, kv_heads, ffn, vocabulary)
    model = shard_model(
        build_model(sizes),
        remat=remat,
        scan=scan,
        flatten_parameters=flat,
        mesh=mesh,
        param_init_fn=_leave_alone,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    device = torch_xla.device()
    tokens, targets = (torch.zeros(batch, length, dtype=torch.long).to(device) for _ in range(2))

    def train_step() -> None:
        next_token_loss(model, tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()  # before the sync: else gradients are results of the program
        torch_xla.sync()

    return train_step


def next_token_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next tokens; tokens and targets are [N, length]."""
    return F.cross_entropy(model(tokens).logits.flatten(0, 1).float(), targets.flatten())


def _leave_alone(module: nn.Module) -> None:
    """No values."""


def main(argv: list[str] | None = None) -> int:
    """Build one rank's shards, with real values, and say what that took."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
    from one_rank import report_building

    parser = argparse.ArgumentParser(description="Build the shards of one rank of many.")
    parser.add_argument("--ranks", type=int, default=64)
    for name, size in vars(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=size)
    options = vars(parser.parse_args(argv))
    ranks, sizes = options.pop("ranks"), Sizes(**options)
    print(report_building(lambda **pretended: shard_model(build_model(sizes), **pretended), ranks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
