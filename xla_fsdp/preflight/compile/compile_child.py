"""Compile one program for a TPU topology.

``python -m xla_fsdp.preflight.compile.compile_child FOLDER PARENT`` ends when the process of the
number PARENT does.

The folder holds ``request.json`` and ``program.pb`` (torch_xla's serialized HLO module, or for a
program to be partitioned JAX's StableHLO bytecode). This writes ``optimized.txt`` (the scheduled
module), ``dump`` (with the compiler's buffer assignment) and ``result.json``.

Invariants: torch_xla is never loaded here, as two XLA runtimes in one process clash.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.5

# With these options the compiler dumps a program that is too large before it fails.
_DUMP_TOO_LARGE = {"xla_tpu_no_crash_on_oom": "true", "xla_dump_hlo_as_long_text": True}

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_OVER_CAPACITY = re.compile(r"Exceeded hbm capacity by ([0-9.]+)([KMGT]?)")


def main(argv: Sequence[str]) -> int:
    """Compile the program in the folder ``argv[0]``; return 0, or 1 if the compiler refuses."""
    folder, parent = Path(argv[0]), int(argv[1])
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    request = json.loads((folder / "request.json").read_text())
    program = (folder / "program.pb").read_bytes()
    started, cpu_started = time.monotonic(), time.process_time()
    try:
        text, sizes = _compile(program, request, folder)
    except Exception as error:  # the compiler has many exception types
        _write(folder, {"error": f"{type(error).__name__}: {error}"})
        return 1
    spent = {
        "seconds": time.monotonic() - started,
        "cpu_seconds": time.process_time() - cpu_started,
    }
    (folder / "optimized.txt").write_text(text)
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    _write(folder, {**sizes, "peak_host_bytes": peak_rss, **spent})
    return 0


def _end_with(parent: int, folder: Path) -> None:
    """End this process, and remove its folder, when its parent was killed."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _write(folder: Path, result: dict[str, Any]) -> None:
    (folder / "result.json").write_text(json.dumps(result))


def _compile(program: bytes, request: dict[str, Any], folder: Path) -> tuple[str, dict[str, int]]:
    """Return the scheduled module, and sizes by their names in ``compiler.Compiled``.

    A program that is too large for a chip is compiled a second time, up to its schedule. The size
    of its code is then not known, and given as 0.
    """
    dump = folder / "dump"
    dumping = {"xla_dump_to": str(dump)}
    try:
        executable = _executable(program, request, dumping)
    except Exception as error:  # the compiler has many exception types
        too_large_by = bytes_over_capacity(str(error))
        if not too_large_by:
            raise
        # The second attempt may kill this process; then this is the result.
        _write(folder, {"error": f"{type(error).__name__}: {error}"})
        shutil.rmtree(dump, ignore_errors=True)
        with contextlib.suppress(Exception):  # it cannot be loaded
            _executable(program, request, {**dumping, **_DUMP_TOO_LARGE})
        written = sorted(dump.glob("*after_codegen.txt"))
        if not written:
            raise
        return written[-1].read_text(), {"code": 0, "too_large_by": too_large_by}
    code = executable.get_compiled_memory_stats().generated_code_size_in_bytes
    return executable.hlo_modules()[0].to_string(), {"code": int(code), "too_large_by": 0}


def bytes_over_capacity(error: str) -> int:
    """Return by how many bytes a program is too large for a chip; 0 for any other error."""
    found = _OVER_CAPACITY.search(error)
    return round(float(found.group(1)) * _UNITS[found.group(2)]) if found else 0


def _executable(program: bytes, request: dict[str, Any], flags: dict[str, Any]) -> Any:
    """Compile for all ranks of the topology: as replicas, or partitions of one program."""
    import numpy as np
    from jax._src.lib import xla_client

    devices, order = _devices(request), request["partition_order"]
    assignment = np.array([[devices[rank].id for rank in order or range(len(devices))]])
    options = options_for(assignment if order else assignment.T)
    options.env_option_overrides = list(flags.items())
    code = program if order else stable_hlo(program, partial(_alias, pairs=request["aliases"]))
    return devices[0].client.compile(code, xla_client.DeviceList(tuple(devices)), options)


def _devices(request: dict[str, Any]) -> list[Any]:
    from jax.experimental import topologies

    name, config = request["topology"], request["chip_config"]
    found: list[Any] = topologies.get_topology_desc(
        platform="tpu",
        topology_name=name,
        num_slices=request["slices"],
        **({"chip_config_name": config} if config else {}),
    ).devices
    devices = sorted(found, key=lambda device: device.id)
    coords = [
        [each.core_on_chip, *each.coords, getattr(each, "slice_index", 0)] for each in devices
    ]
    if coords != request["coords"]:
        raise RuntimeError(
            f"the compiler numbers the devices of {name} as {coords}, expected {request['coords']}"
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
    sys.exit(main(sys.argv[1:]))
