"""transformers' Trainer with ``fsdp_config={"xla": True}`` on this package, on two ranks: the same
training as plain torch; files that plain transformers loads; resuming, also on other ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from test.ranks import run_on_ranks
from test.scenarios import RANKS, make
from xla_fsdp.integrations.versions import UntestedVersionError, require

try:
    require("transformers", "accelerate")
except UntestedVersionError as error:
    pytest.skip(str(error), allow_module_level=True)

import transformers

try:
    import peft
except ImportError:
    peft = None

from test.hf_jobs import (
    LAYER,
    MAX_NORM,
    STEPS,
    InOrder,
    Sentences,
    arguments,
    build_llama,
    logged,
    plain_loss,
    train_plain,
)
from xla_fsdp.integrations.transformers import install
from xla_fsdp.layout import LANES

install()

HALFWAY = STEPS // 2
NEW_TOKENS = 2
State = dict[str, Tensor]


def make_trainer(
    directory: Path, num_ranks: int, model: dict[str, Any] | None = None, **options: Any
) -> Any:
    """On a rank: a Trainer of a Llama."""
    return InOrder(
        model=make(partial(build_llama, **(model or {}))),
        args=arguments(directory, num_ranks, **options),
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
    )


def full(trainer: Any) -> State:
    """The trained model's full state dict."""
    from xla_fsdp import full_state_dict

    return dict(full_state_dict(trainer.model))


def assert_close(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=2e-4, rtol=2e-3, msg=name)


def assert_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


# ---------------------------------------------------------------- one launch of two ranks


@dataclass
class Whole:
    """What the job that ran from begin to end found."""

    losses: list[float]
    norms: list[float]
    state: State
    sharded: dict[str, int]
    evaluated: float
    generated: list[list[int]]


def whole_job(directory: Path, num_ranks: int) -> Whole:
    """Accumulate twice per step, clip every step, save in the middle, evaluate and generate."""
    trainer = make_trainer(
        directory, num_ranks, accumulate=2, save_strategy="steps", save_steps=HALFWAY
    )
    trainer.train()
    prompt = Sentences().ids[:2].to(trainer.args.device)
    generated = trainer.model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    return Whole(
        losses=logged(trainer, "loss"),
        norms=logged(trainer, "grad_norm"),
        state=full(trainer),
        sharded={name: param.numel() for name, param in trainer.model.named_parameters()},
        evaluated=trainer.evaluate()["eval_loss"],
        generated=generated.cpu().tolist(),
    )


def resume(directory: Path, num_ranks: int, **options: Any) -> State:
    """Go on from the middle of the whole job, and return the final weights."""
    trainer = make_trainer(directory / "resumed", num_ranks, **options)
    trainer.train(resume_from_checkpoint=str(directory / f"checkpoint-{HALFWAY}"))
    return full(trainer)


def with_random_numbers(directory: Path) -> tuple[State, State]:
    """Final weights of a job with dropout, and of one that was resumed in the middle of it."""
    options = {
        "model": {"attention_dropout": 0.3},
        "settings": {"compute_dtype": "bfloat16"},
        "config": {"transformer_layer_cls_to_wrap": LAYER, "xla_fsdp_grad_ckpt": True},
    }
    saving = {"save_strategy": "steps", "save_steps": HALFWAY}
    whole = make_trainer(directory, RANKS, **options, **saving)
    whole.train()
    return full(whole), resume(directory, RANKS, **options)


def build_lora() -> Any:
    """A Llama with adapters on its attention."""
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(build_llama(), adapters)


@dataclass
class Lora:
    """What a job that trained adapters found."""

    losses: list[float]
    trained: list[str]
    logits: Tensor


def lora_job(directory: Path) -> Lora:
    """Train adapters, save them in the middle and at the end."""
    args = arguments(directory, RANKS, save_strategy="steps", save_steps=HALFWAY, learning_rate=0.1)
    trainer = InOrder(model=make(build_lora), args=args, train_dataset=Sentences())
    trainer.train()
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.model(input_ids=Sentences().ids[:2].to(args.device)).logits
    trained = [name for name, param in trainer.model.named_parameters() if param.requires_grad]
    return Lora(logged(trainer, "loss"), trained, logits.cpu())


def two_ranks(rank: int, root: str) -> dict[str, Any]:
    return {
        "whole": whole_job(Path(root, "whole"), RANKS),
        "random": with_random_numbers(Path(root, "random")),
        "lora": peft and lora_job(Path(root, "lora")),
    }


def one_rank(rank: int, root: str) -> State:
    return resume(Path(root, "whole"), 1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def found(root: Path) -> dict[str, Any]:
    """What rank 0 of two found."""
    return run_on_ranks(two_ranks, RANKS, str(root))[0]


@pytest.fixture(scope="module")
def plain() -> tuple[Any, list[float], list[float]]:
    """The model trained in plain torch, its losses and norms."""
    torch.manual_seed(3)  # as make does
    model = build_llama()
    return model, *train_plain(model)


def test_training_is_that_of_plain_torch(found: dict[str, Any], plain: Any) -> None:
    model, losses, norms = plain
    assert min(norms) > MAX_NORM
    torch.testing.assert_close(found["whole"].losses, losses, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found["whole"].norms, norms, atol=1e-4, rtol=1e-3)
    assert_close(found["whole"].state, model.state_dict())


def test_every_rank_trains_a_half(found: dict[str, Any], plain: Any) -> None:
    padded = {
        name: math.ceil(param.numel() / RANKS / LANES) * LANES
        for name, param in plain[0].named_parameters()
    }
    assert found["whole"].sharded == padded


def test_evaluating_and_generating_with_shards(found: dict[str, Any], plain: Any) -> None:
    model = plain[0].eval()
    prompt = Sentences().ids[:2]
    with torch.no_grad():
        expected = plain_loss(model, Sentences().ids).item()
    assert found["whole"].evaluated == pytest.approx(expected, abs=1e-3)
    generated = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS,
        do_sample=False,
    )  # fmt: skip
    assert found["whole"].generated == generated.tolist()


def test_saved_models_load_in_a_plain_process(found: dict[str, Any], root: Path) -> None:
    loaded, report = transformers.LlamaForCausalLM.from_pretrained(
        root / "whole" / f"checkpoint-{STEPS}", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_equal(dict(loaded.state_dict()), found["whole"].state)


def test_resuming_on_as_many_ranks_goes_on_bit_by_bit(found: dict[str, Any]) -> None:
    whole, resumed = found["random"]
    assert_equal(resumed, whole)


def test_resuming_on_another_number_of_ranks(found: dict[str, Any], root: Path) -> None:
    resumed = run_on_ranks(one_rank, 1, str(root))[0]
    assert_close(resumed, found["whole"].state)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.skipif(peft is None, reason="peft is not installed")
def test_adapters_load_in_a_plain_process(found: dict[str, Any], root: Path) -> None:
    lora = found["lora"]
    assert all("lora_" in name for name in lora.trained)
    assert lora.losses[-1] < lora.losses[0]
    saved = root / "lora" / f"checkpoint-{STEPS}"
    assert (saved / "adapter_model.safetensors").stat().st_size < 10_000
    assert not (saved / "model.safetensors").exists()
    torch.manual_seed(3)  # as make does
    plain = build_llama().eval()
    prompt = Sentences().ids[:2]
    with torch.no_grad():
        base = plain(input_ids=prompt).logits
        adapted = peft.PeftModel.from_pretrained(plain, saved).eval()(input_ids=prompt).logits
    torch.testing.assert_close(adapted, lora.logits, atol=1e-5, rtol=1e-4)
    assert (base - adapted).abs().max() > 0.01
