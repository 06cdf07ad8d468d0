"""A Llama in JAX with its splash attention kernel: ``jit``, ``NamedSharding``, a scan over layers.

Sharding and optimizer are those of ``jax_fsdp``; every layer is recomputed in backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import pallas
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec as Spec

from jax_fsdp import AXIS, lower
from xla_fsdp.preflight.topologies import Topology
from xla_fsdp.preflight.trace.program import Traced

HEAD = 128
BLOCK = 512  # of queries and of keys, in the kernel
# Matrix products of queries with keys, or as large ones, in each of the kernels.
PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama, of 8 billion parameters by default, and of one rank's batch."""

    length: int
    blocks: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    vocabulary: int = 128256
    batch: int = 1


def lowered(shape: Shape, topology: Topology) -> Traced:
    """Return the step of all ranks as one program, lowered, which the compiler is to partition."""
    costed = partial(_pallas_call, pallas.pallas_call, shape)
    with mock.patch.object(pallas, "pallas_call", costed):
        return lower(topology, shape, parameter_shapes(shape), partial(Model, shape))


def _pallas_call(original: Any, shape: Shape, *arguments: Any, **options: Any) -> Any:
    """State the operations of a kernel, as ours do: the compiler schedules by them, and preflight
    estimates time."""
    kinds = [n for part, n in PRODUCTS.items() if f"_mha_{part}" in (options.get("name") or "")]
    if not kinds:  # one that states them itself
        return original(*arguments, **options)
    [products] = kinds
    seen = shape.batch * shape.heads * shape.length * (shape.length + BLOCK) // 2
    flops = products * 2 * seen * HEAD
    cost = pallas.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=0)
    return original(*arguments, **options, cost_estimate=cost)


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return shapes by name; those of all blocks are stacked, as "block." and a name."""
    width, ffn = shape.width, shape.ffn
    block = {
        "norm1": (width,), "norm2": (width,),
        "query": (width, shape.heads * HEAD),
        "key": (width, shape.kv_heads * HEAD), "value": (width, shape.kv_heads * HEAD),
        "proj": (shape.heads * HEAD, width),
        "gate": (width, ffn), "up": (width, ffn), "down": (ffn, width),
    }  # fmt: skip
    return {
        "tokens": (shape.vocabulary, width),
        "norm": (width,),
        "head": (width, shape.vocabulary),
        **{f"block.{name}": (shape.blocks, *sizes) for name, sizes in block.items()},
    }


@dataclass(frozen=True)
class Model:
    """The Llama.

    Args:
        shape: sizes of the model.
        by_batch: sharding of activations.
        interpret: whether the kernel runs in an interpreter, on a CPU.
    """

    shape: Shape
    by_batch: Any
    interpret: bool = False

    def loss(self, parameters: dict[str, Any], tokens: Any, targets: Any) -> Any:
        blocks = {
            name.removeprefix("block."): value
            for name, value in parameters.items()
            if name.startswith("block.")
        }
        tables = _rotations(self.shape.length)
        x = self._along_batch(parameters["tokens"].astype(jnp.bfloat16)[tokens])
        block = jax.checkpoint(partial(self._block, tables))
        x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), x, blocks)
        head = parameters["head"].astype(jnp.bfloat16)
        logits = (_norm(x, parameters["norm"]) @ head).astype(jnp.float32)
        logits = self._along_batch(logits)
        wanted = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - wanted).mean()

    def _along_batch(self, x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, self.by_batch)

    def _block(self, tables: Any, x: Any, layer: dict[str, Any]) -> Any:
        layer = {name: value.astype(jnp.bfloat16) for name, value in layer.items()}
        inner = _norm(x, layer["norm1"])
        query, key, value = (
            _heads(inner @ layer[name], n)
            for name, n in [
                ("query", self.shape.heads),
                ("key", self.shape.kv_heads),
                ("value", self.shape.kv_heads),
            ]
        )
        mixed = self._attend(_rotated(query, tables) * HEAD**-0.5, _rotated(key, tables), value)
        mixed = mixed.transpose(0, 2, 1, 3).reshape(*x.shape[:-1], -1)
        x = self._along_batch(x + mixed @ layer["proj"])
        return self._along_batch(x + self._computed(_norm(x, layer["norm2"]), layer))

    def _computed(self, inner: Any, layer: dict[str, Any]) -> Any:
        inner = jax.nn.silu(inner @ layer["gate"]) * (inner @ layer["up"])
        return inner @ layer["down"]

    def _attend(self, query: Any, key: Any, value: Any) -> Any:
        """Attend on each rank by itself, as the compiler cannot partition a kernel."""
        mask = masks.CausalMask((self.shape.length, self.shape.length))
        names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([mask] * self.shape.heads),
            block_sizes=splash.BlockSizes(**{f"block_{name}": BLOCK for name in names}),
            head_shards=1,
            q_seq_shards=1,
            interpret=self.interpret,
        )
        along = Spec(AXIS, None, None, None)
        options = {"mesh": self.by_batch.mesh, "in_specs": (along,) * 3, "out_specs": along}
        return jax.shard_map(jax.vmap(kernel), check_vma=False, **options)(query, key, value)


def _heads(x: Any, count: int) -> Any:
    """Turn [rows, length, count * HEAD] into [rows, count, length, HEAD]."""
    return x.reshape(*x.shape[:-1], count, HEAD).transpose(0, 2, 1, 3)


def _rotations(length: int) -> tuple[Any, Any]:
    """Return cosines and sines of rotary embeddings, [length, HEAD]."""
    rates = 500_000.0 ** -(jnp.arange(0, HEAD, 2) / HEAD)
    angles = jnp.arange(length)[:, None] * rates
    angles = jnp.concatenate([angles, angles], -1)
    return jnp.cos(angles).astype(jnp.bfloat16), jnp.sin(angles).astype(jnp.bfloat16)


def _rotated(x: Any, tables: tuple[Any, Any]) -> Any:
    first, second = jnp.split(x, 2, -1)
    return x * tables[0] + jnp.concatenate([-second, first], -1) * tables[1]


def _norm(x: Any, weight: Any) -> Any:
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
    return scaled.astype(jnp.bfloat16) * weight.astype(jnp.bfloat16)
