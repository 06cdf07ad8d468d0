"""Models of transformers and torchvision, in small: training, generating, grouping parameters.

They are wrapped the way users do it, with a policy, and compared with the plain model on the joined
batch. Sizes are odd, so that no number of ranks divides them; dropout is off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.parity import assert_same, join, remat_inside
from test.common.ranks import cached_outcome, run_on_ranks
from test.common.scenarios import fsdp, make
from test.common.training import Batch, train_plain, train_sharded
from xla_fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

ROWS = 3  # of a rank's part of a batch
VOCABULARY = 37
LABELS = 7
NEW_TOKENS = 2
BF16 = {"compute_dtype": torch.bfloat16}
SCAN = {"scan_layers": True}


# ---------------------------------------------------------------- the models


def gpt2() -> nn.Module:
    """Its head is tied to its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    ids = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(n_positions=13, n_embd=22, n_layer=2, n_head=2, **no_dropout, **ids)
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 6}
    sizes = {"hidden_size": 25, "intermediate_size": 27, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, pad_token_id=0, **heads, **sizes))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 21, "intermediate_size": 23, "image_size": 10, "patch_size": 5}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(
        ViTConfig(
            num_hidden_layers=2, num_attention_heads=3, num_labels=LABELS, **sizes, **no_dropout
        )
    )


def t5() -> nn.Module:
    """Encoder, decoder and head share one embedding."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 14, "d_kv": 5, "d_ff": 19, "num_layers": 2, "num_heads": 3}
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            **sizes,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,  # a cache would grow when a layer is recomputed
        )
    )


def resnet18() -> nn.Module:
    """Without the two widest stages, which hold 95% of its parameters. In fp64, as BatchNorm over a
    few small images makes of rounding errors what cannot be compared."""
    from torchvision.models import resnet18

    model = resnet18(num_classes=LABELS)
    model.layer3 = model.layer4 = nn.Identity()
    model.fc = nn.Linear(128, LABELS)
    return model.double()


def _layer(module: str, name: str) -> type[nn.Module]:
    import importlib

    return getattr(importlib.import_module(module), name)


LAYERS = {  # what users give to transformer_auto_wrap_policy
    gpt2: ("transformers.models.gpt2.modeling_gpt2", "GPT2Block"),
    llama: ("transformers.models.llama.modeling_llama", "LlamaDecoderLayer"),
    vit: ("transformers.models.vit.modeling_vit", "ViTLayer"),
    t5: ("transformers.models.t5.modeling_t5", "T5Block"),
    resnet18: ("torchvision.models.resnet", "BasicBlock"),
}


def text(generator: torch.Generator) -> Batch:
    """The model shifts the labels itself."""
    ids = torch.randint(3, VOCABULARY, (ROWS, 9), generator=generator)
    return {"input_ids": ids, "labels": ids}


def translation(generator: torch.Generator) -> Batch:
    """Of other lengths, and with padding."""
    source = torch.randint(3, VOCABULARY, (ROWS, 9), generator=generator)
    mask = torch.ones_like(source)
    mask[0, 6:] = 0
    labels = torch.randint(3, VOCABULARY, (ROWS, 5), generator=generator)
    return {"input_ids": source, "attention_mask": mask, "labels": labels}


def images(generator: torch.Generator) -> Batch:
    pixels = torch.randn(ROWS, 3, 10, 10, generator=generator)
    return {"pixel_values": pixels, "labels": _labels(generator)}


def bare_images(generator: torch.Generator) -> Batch:
    return {"x": torch.randn(ROWS, 3, 17, 17, generator=generator).double()}


def _labels(generator: torch.Generator) -> Tensor:
    return torch.randint(0, LABELS, (ROWS,), generator=generator)


# ---------------------------------------------------------------- training


@dataclass(frozen=True)
class RealTask:
    """See ``test.common.training.Task``.

    Args:
        model: builds it.
        inputs: makes a rank's part of a batch.
        size: wrap by size, from so many elements on, instead of layer by layer.
        remat: rematerialize what the policy selects.
        options: of every unit.
        tolerance: largest error allowed, relative to the largest value of a tensor.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Batch]
    size: int = 0
    remat: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-4
    steps: int = 3

    def build(self) -> nn.Module:
        model: Any = make(self.model)
        if self.remat and hasattr(model, "config"):
            model.config.use_cache = False  # as transformers does for gradient checkpointing
        return model

    def shard(self, model: nn.Module) -> Any:
        policy: Callable[..., bool] = partial(size_based_auto_wrap_policy, min_num_params=self.size)
        if not self.size:
            layer = _layer(*LAYERS[self.model])
            policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={layer})
        wrapper = remat_inside if self.remat else None
        return fsdp(model, auto_wrap_policy=policy, auto_wrapper_callable=wrapper, **self.options)

    def batch(self, step: int, rank: int) -> Batch:
        return self.inputs(torch.Generator().manual_seed(100 * step + rank))

    def loss(self, output: Any) -> Tensor:
        if isinstance(output, Tensor):
            target = torch.arange(ROWS, device=output.device) % LABELS
            return nn.functional.cross_entropy(output, target)
        return output.loss

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        # Where a gradient is zero but for rounding (a bias of attention's keys), the usual eps
        # would make steps of full size out of nothing.
        return torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1, eps=1e-3)


TASKS = {
    "gpt2": RealTask(gpt2, text),
    "gpt2_by_size": RealTask(gpt2, text, size=600),
    "gpt2_remat_bf16": RealTask(gpt2, text, remat=True, options=BF16, tolerance=0.05),
    "llama": RealTask(llama, text, remat=True),
    "llama_flat": RealTask(llama, text, options={"flatten_parameters": True}),
    "llama_bf16": RealTask(llama, text, options=BF16, tolerance=0.05),
    "gpt2_scan": RealTask(gpt2, text, remat=True, options=SCAN),
    "llama_scan": RealTask(llama, text, remat=True, options=SCAN),
    "vit_scan": RealTask(vit, images, options=SCAN),
    "vit": RealTask(vit, images, size=1000),
    "vit_rows": RealTask(vit, images, options={"shard_param_on_dim_0": True}),
    "t5": RealTask(t5, translation),
    "t5_remat": RealTask(t5, translation, remat=True),
    "t5_by_size": RealTask(t5, translation, size=200),
    "resnet18": RealTask(resnet18, bare_images),
    "resnet18_by_size": RealTask(resnet18, bare_images, size=100_000, remat=True),
}

# Each model runs on 3 ranks; other numbers of ranks, and all ways to wrap on 2, take long.
EVERY_MODEL = ("gpt2", "llama", "vit", "t5_remat", "resnet18")
SLOW = {2: tuple(TASKS), 1: EVERY_MODEL, 4: EVERY_MODEL, 8: ("gpt2", "llama", "t5_remat")}


@cached_outcome
def trained(num_ranks: int, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """What every rank holds after these tasks, out of one launch."""
    return run_on_ranks(_train_all, num_ranks, names, timeout=900)


def _train_all(rank: int, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: train_sharded(TASKS[name], rank) for name in names}


def _compare(num_ranks: int, name: str, names: tuple[str, ...]) -> None:
    task = TASKS[name]
    found = join([rank[name] for rank in trained(num_ranks, names)])
    expected = train_plain(task, num_ranks)
    if task.options.get("flatten_parameters"):
        found.grads, expected.grads = {}, {}  # of flat parameters there is no one for each name
    assert_same(found, expected, task.tolerance)


@pytest.mark.parametrize("name", EVERY_MODEL)
def test_parity(name: str) -> None:
    _compare(3, name, EVERY_MODEL)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "name"), [(n, name) for n in SLOW for name in SLOW[n]])
def test_parity_in_full(num_ranks: int, name: str) -> None:
    _compare(num_ranks, name, SLOW[num_ranks])


@pytest.mark.parametrize("name", ["gpt2", "t5_remat"])
def test_names_are_those_of_the_plain_model(name: str) -> None:
    plain = [key for key, _ in TASKS[name].build().named_parameters()]
    assert trained(3, EVERY_MODEL)[0][name]["names"] == plain


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
