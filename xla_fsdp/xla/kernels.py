"""Functions of JAX in a program that torch_xla traces: Pallas kernels above all.

torch_xla lowers kernels for the device of this process. On a machine without a TPU, ``for_tpu``
lets JAX lower them for the TPU that a program is compiled for.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
import torch_xla
import torch_xla._internal.jax_workarounds as workarounds
import torch_xla.core.xla_builder as xb
from torch import Tensor

JaxFunction = Callable[..., Any]
"""Maps arrays to a tuple of arrays; equal functions (``==``) do the same."""

Spec = tuple[tuple[int, ...], torch.dtype]

Flops = tuple[tuple[str, int], ...]
"""Pairs of how a kernel's name begins, and the floating point operations of one call of it."""


# Ranks may be threads, and two that lower at once get programs that differ in their names.
_LOWERING = threading.Lock()


def has_jax() -> bool:
    """Return whether JAX is installed."""
    return find_spec("jax") is not None


def call_jax(
    function: JaxFunction, tensors: Sequence[Tensor], *, interpret: bool, flops: Flops = ()
) -> list[Tensor]:
    """Return the results of a function of JAX.

    Args:
        function: is lowered once for each set of shapes and dtypes.
        tensors: its arguments, on the XLA device, of dtypes that JAX has without 64-bit types.
        interpret: whether to lower for CPU, where kernels must be traced with ``interpret=True``,
            and not for a TPU.
        flops: of its kernels, by which the compiler schedules them, and preflight estimates time.
    """
    specs = tuple((tuple(each.shape), each.dtype) for each in tensors)
    with _LOWERING:
        computation = _lowered(function, specs, interpret, flops)
    found: list[Tensor] = torch_xla._XLAC._xla_user_computation(
        "xla::jax_function", list(tensors), computation
    )
    return found


@functools.lru_cache(maxsize=256)
@workarounds.requires_jax
def _lowered(function: JaxFunction, specs: tuple[Spec, ...], interpret: bool, flops: Flops) -> Any:
    import jax

    kinds = [
        jax.ShapeDtypeStruct(shape, str(dtype).removeprefix("torch.")) for shape, dtype in specs
    ]
    traced = jax.jit(function, keep_unused=True).trace(*kinds)
    options = {"lowering_platforms": ("cpu",)} if interpret else _options_for_tpu()
    # Not ``traced.lower``, which ``for_tpu`` replaces.
    lowered = _plain_lower()(traced, **options)
    state_flops(lowered.compiler_ir("stablehlo"), flops)
    module = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    return xb.computation_from_module_proto("jax_function", module)


def state_flops(module: Any, flops: Flops) -> None:
    """Write into the calls of kernels, in a StableHLO module, how many operations they have."""
    from jax._src.lib.mlir import ir

    def state(operation: Any) -> Any:
        attributes = operation.attributes
        name = attributes["kernel_name"].value if "kernel_name" in attributes else ""
        found = [count for start, count in flops if name.startswith(start)]
        if found:
            config = json.loads(attributes["backend_config"].value)
            cost = {"flops": found[0], "transcendentals": 0, "bytes_accessed": 0}
            config["custom_call_config"]["cost_estimate"] = cost
            attributes["backend_config"] = ir.StringAttr.get(json.dumps(config))
        return ir.WalkResult.ADVANCE  # type: ignore[attr-defined]

    with module.context:
        module.operation.walk(state)


def _options_for_tpu() -> dict[str, Any]:
    from jax._src.interpreters import mlir

    # As for export, since libtpu may be older than JAX, and then does not take its newest kernels.
    parameters = mlir.LoweringParameters(for_export=True, export_ignore_forward_compatibility=False)
    return {"lowering_platforms": ("tpu",), "_private_parameters": parameters}


@functools.cache
def _plain_lower() -> Callable[..., Any]:
    from jax._src import stages

    lower: Callable[..., Any] = stages.Traced.lower
    return lower


@contextlib.contextmanager
def for_tpu() -> Iterator[None]:
    """Lower every kernel for a TPU inside the block: torch_xla's, and those of its users."""
    # JAX is loaded by those alone who use it: all of torch_xla's ways to it enter this context.
    entered = workarounds.jax_env_context

    @contextlib.contextmanager
    def entered_for_tpu() -> Iterator[None]:
        import jax
        from jax._src import stages

        if getattr(jax.config, "jax_platforms", None) is None:
            jax.config.update("jax_platforms", "cpu")  # else it starts a TPU that it finds
        lower = _plain_lower()

        def lower_for_tpu(traced: Any, **ignored: Any) -> Any:
            return lower(traced, **_options_for_tpu())

        with entered(), mock.patch.object(stages.Traced, "lower", lower_for_tpu):
            yield

    with mock.patch.object(workarounds, "jax_env_context", entered_for_tpu):
        yield
