"""Small models of transformers, timm and torchvision: training, generating, grouping parameters.

They are wrapped the way users do it, with a policy, and compared with the plain model on the joined
batch. ``docs/models.md`` says which can be sharded in which ways, and is held to what is found.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from test.common import model_doors
from test.common.model_table import PAGE, found, page, reasons_of, row
from test.common.parity import assert_same, join
from test.common.ranks import cached_outcome, run_on_ranks
from test.common.real_models import EXPERTS, FAMILIES, RealTask
from test.common.training import train_plain, train_sharded

NEW_TOKENS = 2
BF16 = {"compute_dtype": torch.bfloat16}
SCAN = {"scan_layers": True}

# ---------------------------------------------------------------- the table


@pytest.mark.slow
def test_table_of_models() -> None:
    results = found(FAMILIES)
    text = PAGE.read_text()
    for name in FAMILIES:
        for line in (row(name, results), *reasons_of(name, results)):
            assert line in text, f"python -m test.common.model_table makes it anew: {results}"
    assert text == page(results)


@pytest.mark.slow
@pytest.mark.parametrize("name", model_doors.NAMES)
def test_batches_added_up_and_clipped(name: str) -> None:
    results = model_doors.found([name])
    assert {run: verdict for run, verdict in results.items() if verdict} == {}


@pytest.mark.skipif(
    transformers.__version__ < "5", reason="these experts are modules of their own, each"
)
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE", "DeepSeek-V3"])
def test_some_experts_have_no_tokens_on_some_ranks(name: str) -> None:
    """So that the table tells something about them."""
    task = RealTask(name)
    model: Any = task.build()
    chosen: list[set[int]] = []
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(
                lambda module, args: chosen.append(set(args[1].flatten().tolist()))
            )
    for rank in (0, 1):
        model(**task.batch(0, rank))
    first, second = chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]
    assert any(own ^ other for own, other in zip(first, second, strict=True))
    assert all(len(own) < EXPERTS for own in chosen)


# ---------------------------------------------------------------- other ways to train


TASKS = {
    "gpt2": RealTask("GPT-2"),
    "gpt2_by_size": RealTask("GPT-2", size=600),
    "gpt2_remat_bf16": RealTask("GPT-2", remat=True, options=BF16, tolerance=0.05),
    "llama": RealTask("Llama", remat=True),
    "llama_flat": RealTask("Llama", options={"flatten_parameters": True}),
    "llama_bf16": RealTask("Llama", options=BF16, tolerance=0.05),
    "gpt2_scan": RealTask("GPT-2", remat=True, options=SCAN),
    "llama_scan": RealTask("Llama", remat=True, options=SCAN),
    "vit_scan": RealTask("ViT", options=SCAN),
    "vit": RealTask("ViT", size=1000),
    "vit_rows": RealTask("ViT", options={"shard_param_on_dim_0": True}),
    "t5": RealTask("T5"),
    "t5_remat": RealTask("T5", remat=True),
    "t5_by_size": RealTask("T5", size=200),
    "resnet18": RealTask("ResNet (torchvision)"),
    "resnet18_by_size": RealTask("ResNet (torchvision)", size=100_000, remat=True),
}

# On 3 ranks; other models, other numbers of ranks, and all ways to wrap on 2, take long.
QUICK = ("gpt2", "t5_remat")
EVERY_MODEL = (*QUICK, "vit", "resnet18")
SLOW = {
    1: EVERY_MODEL,
    2: tuple(TASKS),
    3: ("vit", "resnet18"),
    4: EVERY_MODEL,
    8: ("gpt2", "llama", "t5_remat"),
}


@cached_outcome
def trained(num_ranks: int, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """What every rank holds after these tasks, out of one launch."""
    return run_on_ranks(_train_all, num_ranks, names, timeout=900)


def _train_all(rank: int, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: train_sharded(TASKS[name], rank) for name in names}


def _compare(num_ranks: int, name: str, names: tuple[str, ...]) -> None:
    task = TASKS[name]
    own = join([rank[name] for rank in trained(num_ranks, names)])
    expected = train_plain(task, num_ranks)
    if task.options.get("flatten_parameters"):
        own.grads, expected.grads = {}, {}  # of flat parameters there is no one for each name
    assert_same(own, expected, task.tolerance)


@pytest.mark.parametrize("name", QUICK)
def test_parity(name: str) -> None:
    _compare(3, name, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "name"), [(n, name) for n in SLOW for name in SLOW[n]])
def test_parity_in_full(num_ranks: int, name: str) -> None:
    _compare(num_ranks, name, SLOW[num_ranks])


@pytest.mark.parametrize("name", QUICK)
def test_names_are_those_of_the_plain_model(name: str) -> None:
    plain = [key for key, _ in TASKS[name].build().named_parameters()]
    assert trained(3, QUICK)[0][name]["names"] == plain


# ---------------------------------------------------------------- using

GENERATED = {
    "gpt2": "gpt2",
    "llama_scan": "llama_scan",
    "llama_flat": "llama_flat",
    "t5 registered": "t5",
}
GROUPED = ("gpt2_by_size", "vit", "t5")


@cached_outcome
def used() -> dict[str, Any]:
    """What two ranks generate, and how they group parameters."""
    first, second = run_on_ranks(_use, 2)
    assert first == second
    return first


def _use(rank: int) -> dict[str, Any]:
    from test.common.scenarios import states
    from xla_fsdp import register_fsdp_forward_method

    found: dict[str, Any] = {}
    for name, task in GENERATED.items():
        model = TASKS[task].shard(TASKS[task].build())
        if "registered" in name:
            register_fsdp_forward_method(model, "generate")
        found[name] = generate(model, model.xla_device)
        found[f"{name}: states"] = states(model)
    for name in GROUPED:
        found[f"{name}: decay"] = decayed(TASKS[name].shard(TASKS[name].build()))
    return found


def generate(model: Any, device: str | torch.device = "cpu") -> list[list[int]]:
    """Tokens by greedy search, with a cache of keys and values."""
    model.eval()
    ids = torch.arange(3, 11).reshape(2, 4).to(device)
    mask = torch.ones_like(ids)
    lengths = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    return model.generate(ids, attention_mask=mask, do_sample=False, **lengths).tolist()


def decayed(model: nn.Module) -> list[str]:
    """Names of the parameters that decay, found like transformers' Trainer does."""
    from transformers.trainer_pt_utils import get_parameter_names

    patterns = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    return get_parameter_names(model, [nn.LayerNorm], patterns)


@pytest.mark.parametrize("name", GENERATED)
def test_generate(name: str) -> None:
    assert used()[name] == generate(TASKS[GENERATED[name]].build())
    assert used()[f"{name}: states"] == {"SHARDED"}


@pytest.mark.parametrize("name", GROUPED)
def test_weight_decay_groups(name: str) -> None:
    plain = decayed(TASKS[name].build())
    assert len(plain) < len(list(TASKS[name].build().named_parameters()))
    assert used()[f"{name}: decay"] == plain
