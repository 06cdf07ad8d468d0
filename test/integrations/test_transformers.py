"""transformers' Trainer with ``fsdp_config={"xla": True}`` on this package, on two ranks: the same
training as plain torch; files that plain transformers loads; resuming, also on other ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from test.common.compare import assert_close
from test.common.ranks import run_on_ranks, run_python
from test.common.scenarios import RANKS, make
from xla_fsdp import integrations
from xla_fsdp.integrations import UntestedVersionError, require

try:
    require("transformers", "accelerate")
except UntestedVersionError as error:
    pytest.skip(str(error), allow_module_level=True)

import transformers

try:
    import peft
except ImportError:
    peft = None

from test.common.hf_jobs import (
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
from xla_fsdp.distributed.shard_layout import LANES
from xla_fsdp.fsdp.wrapper import XlaFullyShardedDataParallel
from xla_fsdp.integrations.transformers import install, shard_as_configured

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


TOLERANCE = {"atol": 2e-4, "rtol": 2e-3}


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
        sharded={
            name: param.to_local().numel() for name, param in trainer.model.named_parameters()
        },
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


def evaluated_first(directory: Path) -> list[bool]:
    """Evaluate, then train, twice: sharded from the first of them on."""
    options = {"min_num_params": 500, "transformer_layer_cls_to_wrap": None}
    trainer = make_trainer(directory, RANKS, config=options, max_steps=1, optim="sgd")
    sharded = []
    for call in (trainer.evaluate, trainer.train, trainer.train):
        call()
        sharded.append(isinstance(trainer.model, XlaFullyShardedDataParallel))
    return sharded


def best_model(directory: Path) -> tuple[State, State]:
    """What a job that ends with its best model has, and what the best checkpoint holds."""
    trainer = make_trainer(
        directory, RANKS, save_strategy="steps", eval_strategy="steps", save_steps=1, eval_steps=1,
        load_best_model_at_end=True, greater_is_better=True, metric_for_best_model="loss",
        max_steps=2,
    )  # fmt: skip
    trainer.train()
    best = load_file(Path(trainer.state.best_model_checkpoint, "model.safetensors"))
    return full(trainer), best


@dataclass
class Lora:
    """What a job that trained adapters found."""

    losses: list[float]
    trained: list[str]
    logits: Tensor
    state: State


def lora_job(directory: Path) -> Lora:
    """Train adapters, save them in the middle and at the end."""
    args = arguments(directory, RANKS, save_strategy="steps", save_steps=HALFWAY, learning_rate=0.1)
    trainer = InOrder(model=make(build_lora), args=args, train_dataset=Sentences())
    trainer.train()
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.model(input_ids=Sentences().ids[:2].to(args.device)).logits
    trained = [name for name, param in trainer.model.named_parameters() if param.requires_grad]
    return Lora(logged(trainer, "loss"), trained, logits.cpu(), full(trainer))


def by_recipe(directory: Path) -> dict[str, Any]:
    """Sharded by a recipe, saved in the middle and resumed without one."""
    saving = {"save_strategy": "steps", "save_steps": HALFWAY}
    trainer = make_trainer(directory, RANKS, settings={"recipe": "lean"}, accumulate=2, **saving)
    trainer.train()
    return {
        "losses": logged(trainer, "loss"),
        "norms": logged(trainer, "grad_norm"),
        "state": full(trainer),
        "evaluated": trainer.evaluate()["eval_loss"],
        "resumed": resume(directory, RANKS, accumulate=2),
    }


def two_ranks(rank: int, root: str) -> dict[str, Any]:
    return {
        "recipe": by_recipe(Path(root, "recipe")),
        "whole": whole_job(Path(root, "whole"), RANKS),
        "lora": peft and lora_job(Path(root, "lora")),
    }


def two_ranks_again(rank: int, root: str) -> dict[str, Any]:
    return {
        "random": with_random_numbers(Path(root, "random")),
        "evaluated first": evaluated_first(Path(root, "evaluated")),
        "best": best_model(Path(root, "best")),
    }


def one_rank(rank: int, root: str) -> State:
    return resume(Path(root, "whole"), 1, accumulate=2 * RANKS)  # the rank's batches as before


def one_rank_of_adapters(rank: int, root: str) -> State:
    args = arguments(Path(root, "resumed"), 1, accumulate=RANKS, learning_rate=0.1)
    trainer = InOrder(model=make(build_lora), args=args, train_dataset=Sentences())
    trainer.train(resume_from_checkpoint=str(Path(root, "lora", f"checkpoint-{HALFWAY}")))
    return full(trainer)


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
    assert_close(found["whole"].state, model.state_dict(), **TOLERANCE)


def test_a_recipe_trains_saves_and_resumes(found: dict[str, Any], plain: Any) -> None:
    model, losses, norms = plain
    done = found["recipe"]
    torch.testing.assert_close(done["losses"], losses, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(done["norms"], norms, atol=1e-4, rtol=1e-3)
    assert_close(done["state"], model.state_dict(), **TOLERANCE)
    assert_close(done["resumed"], model.state_dict(), **TOLERANCE)
    with torch.no_grad():
        expected = plain_loss(model.eval(), Sentences().ids).item()
    assert done["evaluated"] == pytest.approx(expected, rel=1e-3)


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


@pytest.fixture(scope="module")
def found_again(root: Path) -> dict[str, Any]:
    return run_on_ranks(two_ranks_again, RANKS, str(root))[0]


@pytest.mark.slow
def test_resuming_on_as_many_ranks_goes_on_bit_by_bit(found_again: dict[str, Any]) -> None:
    whole, resumed = found_again["random"]
    assert_equal(resumed, whole)


@pytest.mark.slow
def test_evaluating_before_training_shards_and_trains(found_again: dict[str, Any]) -> None:
    assert found_again["evaluated first"] == [True] * 3


@pytest.mark.slow
def test_the_best_model_is_loaded(found_again: dict[str, Any]) -> None:
    state, best = found_again["best"]
    assert_equal({name: state[name] for name in best}, best)


def test_resuming_on_another_number_of_ranks(found: dict[str, Any], root: Path) -> None:
    resumed = run_on_ranks(one_rank, 1, str(root))[0]
    assert_close(resumed, found["whole"].state, **TOLERANCE)


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


@pytest.mark.slow
@pytest.mark.skipif(peft is None, reason="peft is not installed")
def test_adapters_resume_on_another_number_of_ranks(found: dict[str, Any], root: Path) -> None:
    alone = run_on_ranks(one_rank_of_adapters, 1, str(root))[0]
    assert_close(alone, found["lora"].state, **TOLERANCE)


# ---------------------------------------------------------------- what is said and refused


@dataclass
class Arguments:
    """What of TrainingArguments decides how a model is wrapped."""

    fsdp_config: dict[str, Any]
    xla_fsdp_config: dict[str, Any]
    gradient_checkpointing: bool = False
    torch_compile: bool = False
    save_on_each_node: bool = False


def test_all_that_is_wrong_with_the_configuration_is_said_at_once() -> None:
    config = {
        "min_num_params": 0,
        "xla_fsdp_grad_ckpt": True,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer", "GPT2Block"],
    }
    args = Arguments(config, {"compute_type": "bfloat16"}, True, True, True)
    with pytest.raises(ValueError, match="cannot be followed") as raised:
        shard_as_configured(build_llama(), args)
    said = str(raised.value)
    assert "xla_fsdp_settings has compute_type; there are " in said
    assert ", compute_dtype," in said
    assert "names GPT2Block, which LlamaForCausalLM does not have" in said
    assert "gradient_checkpointing=True uses torch.utils.checkpoint" in said
    assert "torch_compile=True would cut" in said
    assert "save_on_each_node=True would write models without tensors" in said


def test_a_recipe_that_the_trainer_cannot_follow() -> None:
    config = {"xla_fsdp_grad_ckpt": True, "min_num_params": 0}
    args = Arguments(config, {"recipe": {"name": "lean", "compile_step": True}})
    with pytest.raises(ValueError, match=r"sets compile_step.*leave out xla_fsdp_grad_ckpt"):
        shard_as_configured(build_llama(), args)


def test_recomputation_needs_units() -> None:
    args = Arguments({"min_num_params": 0, "xla_fsdp_grad_ckpt": True}, {})
    with pytest.raises(ValueError, match="xla_fsdp_grad_ckpt needs transformer_layer_cls_to_wrap"):
        shard_as_configured(nn.Linear(2, 2), args)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"accelerate": "1.15.2", "transformers": "5.23.0"}, None),
        ({"accelerate": "1.15.0", "transformers": "5.2.3"}, "transformers 5.2.3 is installed"),
        ({"accelerate": "1.1.5", "transformers": "6.0.0.dev0"}, "accelerate 1.1.5 is installed"),
        ({"transformers": "5.23.1"}, "accelerate is not installed; xla_fsdp works with 1.15.*"),
    ],
)
def test_other_versions_are_told_what_to_install(
    found: dict[str, str], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package not in found:
            raise PackageNotFoundError(package)
        return found[package]

    monkeypatch.setattr(integrations, "version", version)
    if said is None:
        require("accelerate", "transformers")
        return
    with pytest.raises(UntestedVersionError) as raised:
        require("accelerate", "transformers")
    assert said in str(raised.value)
    assert "pip install 'accelerate==1.15.*' 'transformers==5.23.*'" in str(raised.value)


AS_IT_COMES = """
import sys
from pathlib import Path
from test.common.hf_jobs import InOrder, Sentences, arguments, build_llama
from test.common.scenarios import make

def run(rank):
    import torch, torch_xla, transformers
    class Look(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            seen.append(torch.cat([p.grad.flatten().cpu() for p in model.parameters()]))
        def on_optimizer_step(self, args, state, control, model=None, **_):
            seen.append(torch.cat([p.grad.flatten().cpu() for p in model.parameters()]))
    seen = []
    args = arguments(sys.argv[1], 2, max_steps=1, max_grad_norm=1e9, logging_strategy="no")
    InOrder(make(build_llama), args, train_dataset=Sentences(), callbacks=[Look()]).train()
    return seen

from xla_fsdp import launch
try:
    ranks = launch(run, num_ranks=2)
    print("equal on both ranks:", bool((ranks[0][-1] == ranks[1][-1]).all()))
except Exception as error:
    print(f"{type(error.__cause__).__name__}: {error.__cause__}")
"""


@pytest.mark.slow
def test_the_trainer_as_it_comes_mixes_shards_or_makes_no_optimizer(tmp_path: Path) -> None:
    done = run_python("-c", AS_IT_COMES, str(tmp_path))
    if transformers.__version__ < "5":
        assert "equal on both ranks: True" in done.stdout, done.stderr
    else:
        assert "'NoneType' object has no attribute 'param_groups'" in done.stdout, done.stderr


def test_the_configuration_of_fsdp_v2_is_refused_with_what_to_change() -> None:
    from xla_fsdp.integrations.transformers import install

    install()
    args: Any = SimpleNamespace(fsdp_config={"xla": True, "xla_fsdp_v2": True})
    with pytest.raises(ValueError, match=r"xla_fsdp_v2.*Take it out.*one rank for each chip"):
        transformers.Trainer(None, args)
    with pytest.raises(ValueError, match=r"xla_fsdp_v2"):
        transformers.Trainer(args=args)
