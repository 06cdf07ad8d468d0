"""``jax_llama`` with a mixture of experts in every layer: JAX's megablox kernels on each rank's own
tokens, of weights that the partitioner gathers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import pallas
from jax.experimental.pallas.ops.tpu.megablox.ops import gmm
from jax.sharding import PartitionSpec as Spec

import jax_llama
from jax_fsdp import AXIS, lower
from xla_fsdp.preflight.topologies import Topology
from xla_fsdp.preflight.trace.program import Traced

TILING = (512, 1024, 1024)


@dataclass(frozen=True)
class Shape(jax_llama.Shape):
    """Sizes of a mixture, and of one rank's batch; ``ffn`` is that of an expert."""

    experts: int = 8
    choices: int = 2


def lowered(shape: Shape, topology: Topology) -> Traced:
    """Return the step of all ranks as one program, lowered, which the compiler is to partition."""
    costed = partial(jax_llama._pallas_call, pallas.pallas_call, shape)
    with mock.patch.object(pallas, "pallas_call", costed):
        return lower(topology, shape, parameter_shapes(shape), partial(Model, shape))


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return shapes by name; experts' matrices are joined along their rows, which are sharded."""
    found = jax_llama.parameter_shapes(shape)
    rows = {"gate": shape.width, "up": shape.width, "down": shape.ffn}
    for name, each in rows.items():
        blocks, _, outputs = found[f"block.{name}"]
        found[f"block.{name}"] = (blocks, shape.experts * each, outputs)
    return found | {"block.router": (shape.blocks, shape.width, shape.experts)}


@dataclass(frozen=True)
class Model(jax_llama.Model):
    """The mixture."""

    shape: Shape

    def _computed(self, inner: Any, layer: dict[str, Any]) -> Any:
        along, whole = Spec(AXIS, None, None), Spec(None, None)
        weights = [layer[name] for name in ("router", "gate", "up", "down")]
        options = {"mesh": self.by_batch.mesh, "in_specs": (along, *(whole,) * 4)}
        compute = jax.shard_map(self._experts, check_vma=False, out_specs=along, **options)
        return compute(inner, *weights)

    def _experts(self, inner: Any, router: Any, gate: Any, up: Any, down: Any) -> Any:
        shape = self.shape
        tokens = inner.reshape(-1, shape.width)
        scores = jax.nn.softmax((tokens @ router).astype(jnp.float32))
        weights, chosen = jax.lax.top_k(scores, shape.choices)
        weights = weights / weights.sum(-1, keepdims=True)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=shape.experts).astype(jnp.int32)

        def product(rows: Any, weight: Any) -> Any:
            weight = weight.reshape(shape.experts, rows.shape[1], -1)
            tiling = tuple(map(min, TILING, (len(rows), *weight.shape[1:])))
            return gmm(rows, weight, sizes, jnp.bfloat16, tiling, interpret=self.interpret)

        rows = jnp.take(tokens, order // shape.choices, 0)
        rows = product(jax.nn.silu(product(rows, gate)) * product(rows, up), down)
        rows = jnp.take(rows, jnp.argsort(order), 0).reshape(len(tokens), shape.choices, -1)
        return (rows * weights[..., None].astype(rows.dtype)).sum(1).reshape(inner.shape)
