"""Run programs on virtual chips, in a process of its own (``compile.child``)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from xla_fsdp.preflight.compile.child import serve
from xla_fsdp.preflight.compile.compile_child import options_for, stable_hlo

WITHOUT_EFFECT = ("annotate_device_placement",)
"""Custom calls that a CPU does not know, and that return their operand: where a value lies."""

UNINITIALIZED = "AllocateBuffer"
"""Custom call that a CPU does not know, for memory of any values, which has to be written first."""

PALLAS = "tpu_custom_call"


class _Chips:
    """The devices, and programs compiled for them."""

    def __init__(self) -> None:
        import jax

        jax.config.update("jax_enable_x64", True)
        self._devices = sorted(jax.devices(), key=lambda device: device.id)
        self._client = self._devices[0].client
        self._executables: list[Any] = []

    def compile(self, hlo: bytes, num_ranks: int) -> None:
        """Compile for the first ``num_ranks`` devices; programs are numbered from 0."""
        from jax._src.lib import xla_client

        devices = self._devices[:num_ranks]
        options = options_for(np.array([[device.id] for device in devices]))
        chosen = xla_client.DeviceList(tuple(devices))
        code = stable_hlo(hlo, _leave_out_calls)
        self._executables.append((self._client.compile_and_load(code, chosen, options), devices))

    def run(self, number: int, arguments: list[list[Any]]) -> list[list[Any]]:
        """Run a program with the arguments of each rank; return the outputs of each rank."""
        import jax

        compiled, devices = self._executables[number]
        by_rank = [
            [jax.device_put(value, device) for value in values]
            for values, device in zip(arguments, devices, strict=True)
        ]
        results = compiled.execute_sharded([list(each) for each in zip(*by_rank, strict=True)])
        outputs = results.disassemble_into_single_device_arrays()
        return [[np.asarray(each[rank]) for each in outputs] for rank in range(len(devices))]

    def memory(self, number: int) -> int:
        """Return the bytes that a run of a program takes on all its devices."""
        compiled, devices = self._executables[number]
        found = compiled.get_compiled_memory_stats()
        each = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
        return len(devices) * int(each)


# ---------------------------------------------------------------- programs


def _leave_out_calls(module: Any) -> None:
    """Leave out calls in ``WITHOUT_EFFECT``, and put NaN in the place of ``UNINITIALIZED``, so that
    reading it shows."""
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import hlo as stablehlo

    for call in list(_custom_calls(module.operation)):
        name = ir.StringAttr(call.attributes["call_target_name"]).value
        if name == PALLAS:
            raise ValueError("it calls a Pallas kernel, which only a TPU can run")
        if name not in (UNINITIALIZED, *WITHOUT_EFFECT):
            continue
        [result] = call.results
        if name == UNINITIALIZED:
            with ir.InsertionPoint(call), call.location:
                element = ir.FloatAttr.get(result.type.element_type, math.nan)
                value = stablehlo.constant(ir.DenseElementsAttr.get_splat(result.type, element))
        else:
            [value] = call.operands
        result.replace_all_uses_with(value)
        call.erase()


def _custom_calls(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for each in block.operations:
                if each.operation.name == "stablehlo.custom_call":
                    yield each.operation
                yield from _custom_calls(each.operation)


if __name__ == "__main__":
    chips = _Chips()
    serve({"compile": chips.compile, "run": chips.run, "memory": chips.memory})
