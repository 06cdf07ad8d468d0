"""Compile one program for a TPU topology, in a process of its own (``child``).

The compiler dumps its buffer assignment to ``DUMP`` in the process's folder.
"""

from __future__ import annotations

import contextlib
import resource
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from xla_fsdp.preflight.compile.child import DUMP, serve
from xla_fsdp.preflight.topologies import Topology
from xla_fsdp.preflight.trace.program import Program

# With these options the compiler dumps a program that is too large before it fails.
_DUMP_TOO_LARGE = {"xla_tpu_no_crash_on_oom": "true", "xla_dump_hlo_as_long_text": True}


def compiled(program: Program, topology: Topology) -> dict[str, Any]:
    """Return the scheduled module, and figures, by their names in ``compiler.Compiled``."""
    executable = _executable(program, topology, {})
    code = executable.get_compiled_memory_stats().generated_code_size_in_bytes
    return {"text": executable.hlo_modules()[0].to_string(), "code": int(code), **_spent()}


def scheduled(program: Program, topology: Topology) -> dict[str, Any]:
    """Compile a program that is too large for a chip a second time, up to its schedule; the size of
    its code is then not known."""
    shutil.rmtree(_dump(), ignore_errors=True)
    with contextlib.suppress(Exception):  # it cannot be loaded
        _executable(program, topology, _DUMP_TOO_LARGE)
    written = sorted(_dump().glob("*after_codegen.txt"))
    return {"text": written[-1].read_text(), "code": 0, **_spent()}


def _dump() -> Path:
    return Path(sys.argv[2], DUMP)


def _spent() -> dict[str, Any]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"cpu_seconds": time.process_time(), "peak_host_bytes": peak}


def _executable(program: Program, topology: Topology, flags: dict[str, Any]) -> Any:
    """Compile for all ranks of the topology: as replicas, or partitions of one program."""
    import numpy as np
    from jax._src.lib import xla_client

    devices, order = _devices(topology), program.partition_order
    assignment = np.array([[devices[rank].id for rank in order or range(len(devices))]])
    options = options_for(assignment if order else assignment.T)
    options.env_option_overrides = [("xla_dump_to", str(_dump())), *flags.items()]
    alias = partial(_alias, pairs=program.aliases)
    code = program.hlo if order else stable_hlo(program.hlo, alias)
    return devices[0].client.compile(code, xla_client.DeviceList(tuple(devices)), options)


def _devices(topology: Topology) -> list[Any]:
    from jax.experimental import topologies

    config = topology.chip.config
    found: list[Any] = topologies.get_topology_desc(
        platform="tpu",
        topology_name=topology.slice_name,
        num_slices=topology.slices,
        **({"chip_config_name": config} if config else {}),
    ).devices
    devices = sorted(found, key=lambda device: device.id)
    coords = [
        (each.core_on_chip, *each.coords, getattr(each, "slice_index", 0)) for each in devices
    ]
    if coords != topology.coords:
        raise RuntimeError(
            f"the compiler numbers the devices of {topology.name} as {coords}, expected "
            f"{topology.coords}"
        )
    return devices


def options_for(assignment: Any) -> Any:
    """Return compile options for an array of device ids, [replica, partition]."""
    from jax._src.lib import xla_client

    options = xla_client.CompileOptions()
    build = options.executable_build_options
    for target in (options, build):
        target.num_replicas, target.num_partitions = assignment.shape
    build.use_spmd_partitioning = build.use_shardy_partitioner = assignment.shape[1] > 1
    options.device_assignment = xla_client.DeviceAssignment.create(assignment)
    return options


def stable_hlo(program: bytes, change: Callable[[Any], None]) -> bytes:
    """Return a serialized HLO module, changed in place by ``change``, as StableHLO bytecode."""
    from jax._src.interpreters import mlir as jax_mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    text = xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(program))
    with jax_mlir.make_ir_context():
        module = ir.Module.parse(text)
        change(module)
        return jax_mlir.module_to_bytecode(module)


def _alias(module: Any, pairs: Sequence[Sequence[int]]) -> None:
    """Let output k reuse the memory of input i, for each pair (i, k)."""
    from jax._src.lib.mlir import ir

    main = next(each for each in module.body.operations if each.name.value == "main")
    known: list[Any] = (
        list(main.arg_attrs)
        if "arg_attrs" in main.attributes
        else [ir.DictAttr.get({})] * len(main.type.inputs)
    )
    number = ir.IntegerType.get_signless(32)
    for source, output in pairs:
        attributes = {each.name: each.attr for each in known[source]}
        attributes["tf.aliasing_output"] = ir.IntegerAttr.get(number, output)
        known[source] = ir.DictAttr.get(attributes)
    main.arg_attrs = ir.ArrayAttr.get(known)


if __name__ == "__main__":
    serve({"compile": compiled, "schedule": scheduled})
