"""FSDP of the same GPT in JAX: ``jit``, ``NamedSharding``, a scan over layers, remat.

fp32 parameters and AdamW moments are sharded over all devices along one dim of each, activations
along the batch; XLA's partitioner does the rest. Compute is in bf16. Import this in a process
without torch_xla, with the variables of ``compiler_environment``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.interpreters import mlir
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from gpt import HEAD, Shape
from xla_fsdp.preflight.topologies import Topology
from xla_fsdp.preflight.trace.program import Program, Traced

AXIS = "shard"
RATE, BETA1, BETA2, EPSILON, DECAY = 1e-4, 0.9, 0.999, 1e-8, 1e-2


def lowered(shape: Shape, topology: Topology) -> Traced:
    """Return the step of all ranks as one program, lowered, which the compiler is to partition."""
    return lower(topology, shape, parameter_shapes(shape), partial(Model, shape))


def lower(
    topology: Topology,
    shape: Any,
    parameters: Mapping[str, tuple[int, ...]],
    model: Callable[[NamedSharding], Any],
) -> Traced:
    """Lower one step of AdamW.

    Args:
        topology: to compile for.
        shape: has ``batch`` and ``length`` of one rank.
        parameters: shapes by name, see ``parameter_shapes``.
        model: returns one with a ``loss``, given the sharding of activations.
    """
    config = {"chip_config_name": topology.chip.config} if topology.chip.config else {}
    devices = topologies.get_topology_desc(
        platform="tpu",
        topology_name=topology.slice_name,
        num_slices=topology.slices,
        **config,
    ).devices
    ring = mesh_utils.create_device_mesh((len(devices),), devices=devices)
    rank = {each: number for number, each in enumerate(sorted(device.id for device in devices))}
    lowering = _lowered(Mesh(ring, (AXIS,)), shape, parameters, model)
    code = mlir.module_to_bytecode(lowering.compiler_ir("stablehlo"))
    order = tuple(rank[device.id] for device in ring)
    return Traced((Program(code, (), (), partition_order=order),))


def _lowered(
    mesh: Any,
    shape: Any,
    shapes: Mapping[str, tuple[int, ...]],
    model: Callable[[NamedSharding], Any],
) -> Any:
    replicated, rows = NamedSharding(mesh, Spec()), NamedSharding(mesh, Spec(AXIS, None))
    shardings = {
        name: NamedSharding(mesh, Spec(*_sharded_dims(name, sizes)))
        for name, sizes in shapes.items()
    }
    parameters = {name: jax.ShapeDtypeStruct(sizes, "float32") for name, sizes in shapes.items()}
    tokens = jax.ShapeDtypeStruct((mesh.size * shape.batch, shape.length), "int32")
    state = (shardings, shardings, shardings, replicated)
    step = jax.jit(
        _Step(model(NamedSharding(mesh, Spec(AXIS, None, None))), shardings),
        in_shardings=(*state, rows, rows),
        out_shardings=(*state, replicated),
        donate_argnums=(0, 1, 2, 3),
    )
    count = jax.ShapeDtypeStruct((), "float32")
    traced = step.trace(parameters, parameters, parameters, count, tokens, tokens)
    # As for export: libtpu may be older than JAX, and then does not take its newest kernels.
    options = mlir.LoweringParameters(for_export=True, export_ignore_forward_compatibility=False)
    return traced.lower(lowering_platforms=("tpu",), _private_parameters=options)


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return shapes by name; those of all blocks are stacked, as "block." and a name."""
    width = shape.width
    block = {
        "norm1": (width,), "norm1.bias": (width,), "norm2": (width,), "norm2.bias": (width,),
        "qkv": (width, 3 * width), "qkv.bias": (3 * width,),
        "proj": (width, width), "proj.bias": (width,),
        "up": (width, 4 * width), "up.bias": (4 * width,),
        "down": (4 * width, width), "down.bias": (width,),
    }  # fmt: skip
    return {
        "tokens": (shape.vocabulary, width),
        "places": (shape.length, width),
        "norm": (width,),
        "norm.bias": (width,),
        "head": (width, shape.vocabulary),
        **{f"block.{name}": (shape.blocks, *sizes) for name, sizes in block.items()},
    }


def _sharded_dims(name: str, sizes: tuple[int, ...]) -> tuple[str | None, ...]:
    """Return the axis for each dim: width for ``tokens``, else the first dim of a layer."""
    if name in ("tokens", "places"):
        return (None, AXIS) if name == "tokens" else (AXIS, None)
    layer = (AXIS, *(None,) * (len(sizes) - 1))
    return (None, *layer[: len(sizes) - 1]) if name.startswith("block.") else layer


@dataclass(frozen=True)
class Model:
    """The GPT of ``gpt``.

    Args:
        shape: sizes of the model.
        by_batch: sharding of activations.
    """

    shape: Shape
    by_batch: Any

    def loss(self, parameters: dict[str, Any], tokens: Any, targets: Any) -> Any:
        outer = {
            name: value.astype(jnp.bfloat16)
            for name, value in parameters.items()
            if not name.startswith("block.")
        }
        blocks = {
            name.removeprefix("block."): value
            for name, value in parameters.items()
            if name.startswith("block.")
        }
        x = self._along_batch(outer["tokens"][tokens] + outer["places"][None])
        block = jax.checkpoint(self._block)
        x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), x, blocks)
        logits = (_norm(x, outer, "norm") @ outer["head"]).astype(jnp.float32)
        logits = self._along_batch(logits)
        wanted = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - wanted).mean()

    def _along_batch(self, x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, self.by_batch)

    def _block(self, x: Any, layer: dict[str, Any]) -> Any:
        layer = {name: value.astype(jnp.bfloat16) for name, value in layer.items()}
        linear = partial(_linear, layer)
        mixed = self._attend(linear(_norm(x, layer, "norm1"), "qkv"))
        x = self._along_batch(x + linear(mixed, "proj"))
        inner = jax.nn.gelu(linear(_norm(x, layer, "norm2"), "up"), approximate=False)
        return self._along_batch(x + linear(inner, "down"))

    def _attend(self, qkv: Any) -> Any:
        rows, length, _ = qkv.shape
        query, key, value = (
            each.reshape(rows, length, self.shape.heads, HEAD).transpose(0, 2, 1, 3)
            for each in jnp.split(qkv, 3, -1)
        )
        scores = jnp.einsum("rhqd,rhkd->rhqk", query, key) * HEAD**-0.5
        seen = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1).astype(jnp.bfloat16)
        mixed = jnp.einsum("rhqk,rhkd->rhqd", weights, value)
        return mixed.transpose(0, 2, 1, 3).reshape(rows, length, -1)


@dataclass(frozen=True, eq=False)
class _Step:
    """One step of AdamW."""

    model: Any
    shardings: dict[str, Any]

    def __call__(
        self, parameters: Any, first: Any, second: Any, count: Any, tokens: Any, targets: Any
    ) -> Any:
        loss, grads = jax.value_and_grad(self.model.loss)(parameters, tokens, targets)
        grads = {
            name: jax.lax.with_sharding_constraint(grad, self.shardings[name])
            for name, grad in grads.items()
        }
        count = count + 1
        first = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, first, grads)
        second = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, second, grads)
        scale1, scale2 = 1 - BETA1**count, 1 - BETA2**count

        def updated(p: Any, m: Any, v: Any) -> Any:
            step = m / scale1 / (jnp.sqrt(v / scale2) + EPSILON)
            return p * (1 - RATE * DECAY) - RATE * step

        parameters = jax.tree.map(updated, parameters, first, second)
        return parameters, first, second, count, loss


def _linear(layer: dict[str, Any], x: Any, name: str) -> Any:
    return x @ layer[name] + layer[f"{name}.bias"]


def _norm(x: Any, layer: dict[str, Any], name: str) -> Any:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    scaled = ((wide - mean) * jax.lax.rsqrt(variance + 1e-5)).astype(jnp.bfloat16)
    return scaled * layer[name] + layer[f"{name}.bias"]
