"""What importing loads, what is public, and which package may import which."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from test.common.import_graph import circles, import_graph, module_name
from test.common.ranks import ROOT, cached_outcome, run_python

PACKAGE = ROOT / "xla_fsdp"
IGNORED = ("__pycache__", "py.typed")
MOST_ENTRIES = 21
"""Of the package's folder, so that a listing shows its parts."""

LAYERS = (
    ("integrations", "preflight", "launch", "consolidate_sharded_ckpts", "checkpoint"),
    ("recipe",),
    ("optim", "compile"),
    ("state.train_checkpoint", "state.checkpoint_manager"),
    ("fsdp",),  # the wrapper, fully_shard and what stands beside them
    ("state",),
    ("fsdp.init",),
    ("scan",),
    ("nn", "tensor_parallel"),
    ("optim.guards",),
    ("optim.clip_grad", "optim.optimizers"),
    ("fsdp.engine",),
    ("compat", "comm_hooks"),
    (
        "checkpoint.files",
        "checkpoint.format",
        "checkpoint.steps",
        "checkpoint.convert",
        "checkpoint.errors",
    ),
    ("distributed",),
    ("xla",),
    (
        "distributed.topology",
        "distributed.shard_layout",
        "distributed.pytree",
        "distributed.advice",
        "distributed.cpu_ranks",
        "distributed.forks",
        "distributed.garbage",
        "distributed.process_state",
        "distributed.tracebacks",
        "distributed.turns",
        "distributed.whole_lines",
        "tpu_flags",
        "wrap",
    ),
)
"""From the top down. A module belongs to the layer that has the longest prefix of its name."""

INTERNALS = ("_XLAC", "torch_xla._internal")

LIGHT = [
    "xla_fsdp",
    "xla_fsdp.checkpoint, xla_fsdp.checkpoint.steps.save_step, xla_fsdp.checkpoint.steps.load_step",
    "xla_fsdp.distributed.launcher",
    "xla_fsdp.wrap, xla_fsdp.compat, xla_fsdp.integrations",
    "xla_fsdp.fsdp.engine.config, xla_fsdp.distributed.mesh",
    "xla_fsdp.preflight",
]

PUBLIC = {
    "xla_fsdp": """
        BackwardPrefetch BlockScan CPUOffload CPUOffloadPolicy CheckpointError
        CheckpointManager FSDPModule
        FullOptimStateDictConfig FullStateDictConfig LinearCrossEntropy LocalCollectives
        LocalOptimStateDictConfig LocalStateDictConfig Mesh MixedPrecision MixedPrecisionPolicy
        OffloadPolicy PendingSave Preemption RankError ShardedGradScaler
        ShardedOptimStateDictConfig ShardedStateDictConfig ShardingStrategy StateDictOptions
        StateDictSettings StateDictType StreamedEmbedding SyncBatchNorm UnshardHandle
        CompileStepError CompiledStep XlaFullyShardedDataParallel attention checkpoint_module
        checkpoint_name checkpoint_wrapper clip_grad_norm_ compile_step
        consolidate_sharded_model_checkpoints consolidate_sharded_state_dicts
        distribute_tensor explain full_state_dict fully_shard get_model_state_dict
        get_optimizer_state_dict get_state_dict init_from_checkpoint init_mesh latest_step launch
        load_checkpoint load_full_state_dict load_optim_state_dict load_sharded_state_dict
        name_activation one_rank_at_a_time optim_state_dict parallelize Parallelized Recipe
        register_fsdp_forward_method
        save_checkpoint scan_blocks set_model_state_dict set_optimizer_state_dict set_state_dict
    """,
    "xla_fsdp.distributed": "all_gather",
    "xla_fsdp.wrap": """
        Policy always_wrap_policy lambda_auto_wrap_policy size_based_auto_wrap_policy
        transformer_auto_wrap_policy
    """,
    "xla_fsdp.launch": "main",
    "xla_fsdp.consolidate_sharded_ckpts": "main",
    "xla_fsdp.comm_hooks": "DefaultState bf16_compress_hook fp16_compress_hook reduce_scatter_hook",
    "xla_fsdp.tpu_flags": "compiler_flags",
    "xla_fsdp.compat": "apply_xla_patch_to_nn_linear install recursive_wrap",
    "xla_fsdp.checkpoint": """
        Best CheckpointError CheckpointManager GroupRecord Kind Layout MemberRecord
        MergeOptions OptimizerRecord ParamRecord Shard ShardMetadata StateRecord WriteOptions
        consolidate_sharded_model_checkpoints consolidate_sharded_state_dicts find_problems
        merge_files open_shard plan_reshard read_shards
    """,
    "xla_fsdp.optim": """
        HierarchicalModelAverager HighPrecisionOptimizer ModelAverager PeriodicModelAverager
        PostLocalSGDOptimizer StepInBackward WholeParameterOptimizer ZeroRedundancyOptimizer
        masters_of step_in_backward
    """,
    "xla_fsdp.tensor_parallel": """
        ColwiseParallel ParallelStyle Partial PrepareModuleInput PrepareModuleInputOutput
        PrepareModuleOutput Replicate RowwiseParallel SequenceParallel Shard TensorPlacement
        loss_parallel parallel_cross_entropy parallelize_module
    """,
    "xla_fsdp.preflight": """
        CompileError PreflightWarning Rehearsal RehearsalError Report preflight rehearse
    """,
    "xla_fsdp.integrations.accelerate": "Accelerator",
    "xla_fsdp.integrations.lightning": "install",
    "xla_fsdp.integrations.transformers": "install",
}

NAMES = """
import importlib, json, sys
import xla_fsdp.launch, xla_fsdp
names = xla_fsdp.__all__
found = {
    "names": names,
    "absent from dir": sorted({*names} - {*dir(xla_fsdp)}),
    "without a value": [name for name in names if getattr(xla_fsdp, name) is None],
    "absent": [
        f"{module}.{name}"
        for module, names in json.loads(sys.argv[1]).items()
        for name in names
        if getattr(importlib.import_module(module), name, None) is None
    ],
    "launched": xla_fsdp.launch(int, num_ranks=1),
}
try:
    xla_fsdp.nothing
except AttributeError as error:
    found["said"] = str(error)
print(json.dumps(found))
"""


@cached_outcome
def names() -> dict[str, Any]:
    """What a new process finds in the package, which no other import has prepared."""
    public = {module: names.split() for module, names in PUBLIC.items()}
    done = run_python("-c", NAMES, json.dumps(public))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", LIGHT)
def test_torch_xla_is_not_loaded_by(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch_xla', 'jax'}} & set(sys.modules)))"
    done = run_python("-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_every_public_name_is_there() -> None:
    assert names()["without a value"] == names()["absent from dir"] == []
    assert set(names()["names"]) >= set(PUBLIC["xla_fsdp"].split())


def test_public_modules_have_their_names() -> None:
    assert names()["absent"] == []


@pytest.mark.parametrize("place", ["first", pytest.param("last", marks=pytest.mark.slow)])
def test_torch_xla_does_not_remark_that_there_is_no_tpu(place: str) -> None:
    # Without a device in the environment it says which one it takes.
    code = (
        "import os; del os.environ['PJRT_DEVICE']; import {}, {}; print(os.environ['PJRT_DEVICE'])"
    )
    names = ("xla_fsdp", "torch_xla") if place == "first" else ("torch_xla", "xla_fsdp")
    done = run_python("-c", code.format(*names))
    assert done.stdout.strip() == "CPU"
    assert ("Defaulting to" in done.stderr) == (place == "last")


def test_launch_is_a_function_even_after_importing_its_command() -> None:
    assert names()["launched"] == [0]


def test_unknown_names_are_said() -> None:
    assert names()["said"] == "No xla_fsdp attribute nothing"


# ---------------------------------------------------------------- the order of the packages


def layer(module: str) -> int:
    """Return the index in LAYERS of a module of the package; 0 is the top."""
    name = module.removeprefix("xla_fsdp").removeprefix(".")
    prefixes = {
        prefix: index
        for index, layer in enumerate(LAYERS)
        for prefix in layer
        if name == prefix or name.startswith(f"{prefix}.")
    }
    return prefixes[max(prefixes, key=len)] if prefixes else -1  # the package itself is above all


def test_imports_run_one_way() -> None:
    graph = import_graph(PACKAGE)
    upwards = [
        f"{module} imports {target}, which is above it"
        for module, targets in sorted(graph.items())
        for target in sorted(targets)
        if layer(target) < layer(module)
    ]
    rounds = [f"these import each other: {', '.join(names)}" for names in circles(graph)]
    found = "\n".join(upwards + rounds)
    assert not found, f"\n{found}\n\nMove what is imported down, or hand it over as an argument"


def test_every_module_has_a_layer() -> None:
    graph = import_graph(PACKAGE)
    assert [name for name in graph if layer(name) < 0] == ["xla_fsdp"]


def test_internals_of_torch_xla_are_used_in_one_folder() -> None:
    users = [
        module_name(path, PACKAGE)
        for path in sorted(PACKAGE.rglob("*.py"))
        if any(word in path.read_text() for word in INTERNALS)
    ]
    outside = [name for name in users if not name.startswith("xla_fsdp.xla.")]
    assert outside == []


def test_the_package_shows_its_parts() -> None:
    entries = sorted(path.name for path in PACKAGE.iterdir() if path.name not in IGNORED)
    assert len(entries) <= MOST_ENTRIES, entries


def test_module_docstrings_have_no_boilerplate() -> None:
    heads = [
        f"{module_name(path, PACKAGE)}: {head}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for head in ("Always true:", "Words:")
        if head in docstring(path)
    ]
    assert not heads, "\n".join(heads)


def docstring(path: Path) -> str:
    """Return the docstring of a module, "" if it has none."""
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def test_no_test_module_imports_another() -> None:
    graph = import_graph(ROOT / "test")
    found = [
        f"{module} imports {target}"
        for module, targets in sorted(graph.items())
        for target in sorted(targets)
        if target.rpartition(".")[2].startswith("test_")
    ]
    assert not found, "\n".join([*found, "What several tests share belongs in test/common"])


WITHOUT_TORCH_XLA = """
import importlib, json, pkgutil, sys
sys.modules["torch_xla"] = None  # as where it is not installed
import xla_fsdp
found = {}
for each in pkgutil.walk_packages(xla_fsdp.__path__, "xla_fsdp.", onerror=lambda name: None):
    try:
        importlib.import_module(each.name)
    except ImportError as error:
        found[each.name] = str(error)
for name in xla_fsdp.__all__:
    try:
        getattr(xla_fsdp, name)
    except ImportError as error:
        found["xla_fsdp:" + name] = str(error)
print(json.dumps(found))
"""
PORTABLE = ("checkpoint.", "consolidate_sharded_ckpts.", "wrap.", "distributed.mesh.", "launch.")


def test_what_needs_torch_xla_says_so_by_name() -> None:
    done = run_python("-c", WITHOUT_TORCH_XLA)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"xla_fsdp.fsdp.wrapper", "xla_fsdp.optim.zero", "xla_fsdp:fully_shard"} <= found.keys()
    assert {name: said for name, said in found.items() if "pip install '.[xla]'" not in said} == {}
    for name, said in found.items():
        module, _, attribute = name.partition(":")
        assert not f"{module.removeprefix('xla_fsdp.')}.".startswith(PORTABLE), name
        assert not attribute or said.startswith(f"xla_fsdp.{attribute}: ")
    assert not {"xla_fsdp:consolidate_sharded_state_dicts", "xla_fsdp:CheckpointError"} & {*found}
