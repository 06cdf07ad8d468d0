"""Scripts of large models, in small: examples/imagenet/vit_10b.py and examples/llm."""

from __future__ import annotations

import importlib
import re

import pytest

from test.common.ranks import run_on_ranks, run_warm

SMALL_VIT = {"width": 32, "depth": 2, "heads": 2, "image": 28, "batch": 2}
SMALL_LLAMA = {
    "width": 32,
    "blocks": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "vocabulary": 64,
    "length": 16,
}


def make_steps(rank: int, module: str, sizes: dict[str, int]) -> bool:
    """Run two steps of a script's ``step``, in all its ways."""
    ways: list[dict[str, bool]] = [{}, {"flat": True}, {"scan": True}]
    if "llama" in module:
        ways += [{"lean": True}, {"lean": True, "offload": True}]
    for how in ways:
        step = importlib.import_module(module).step(**sizes, **how)
        step()
        step()
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "sizes"),
    [("examples.imagenet.vit_10b", SMALL_VIT), ("examples.llm.llama", SMALL_LLAMA)],
)
def test_a_step_for_preflight_runs(module: str, sizes: dict[str, int]) -> None:
    assert run_on_ranks(make_steps, 1, module, sizes) == [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "sizes"),
    [
        ("imagenet/vit_10b.py", "width depth heads"),
        ("llm/llama.py", "width blocks heads kv_heads ffn"),
    ],
)
def test_building_one_rank_is_reported(script: str, sizes: str) -> None:
    both = {**SMALL_VIT, **SMALL_LLAMA}
    flags = [f"--{name}={both[name]}" for name in sizes.split()]
    start = r"rank 0 of 8: [\d.]+ million elements in its shards, built in .* "
    size = r"[\d.]+ GiB of "
    done = run_warm(f"examples/{script}", "--ranks=8", *flags)
    assert re.match(rf"{start}{size}memory, {size}it shards in fp32$", done.stdout), done.stderr
    more = run_warm(f"examples/{script}", "--ranks=8", "--quick", "--optimizer", *flags)
    assert "GiB of it shards and two moments in fp32\n" in more.stdout, more.stderr


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", " --recipe=lean"])
def test_a_llama_learns_python_s_reference_and_writes_a_few_lines(more: str) -> None:
    flags = (
        "--num_ranks=4 --mesh=replica=2,shard=2 --width=64 --blocks=2 --ffn=128 --length=64 "
        "--steps=150 --log_steps=50 --generate=40"
    ) + more
    done = run_warm("examples/llm/train.py", *flags.split(), "--prompt=The ", timeout=500)
    assert done.returncode == 0, done.stderr
    losses = [float(each) for each in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < 2.7  # the bytes' own distribution has 3.3
    written = done.stdout.split("what is held out\n")[-1]
    assert written.startswith("The ")
    assert len(written.rstrip("\n")) >= 30


@pytest.mark.slow
def test_wrong_flags_of_the_llama() -> None:
    done = run_warm("examples/llm/train.py", "--heads=3")
    assert (done.returncode, "--heads must divide --width" in done.stderr) == (2, True)
    short = run_warm("examples/llm/train.py", "--text=pyproject.toml", "--length=100000")
    assert (short.returncode, "Traceback" in short.stderr) == (1, False)
    assert "a window 100000: use less" in short.stderr


def losses_of(*flags: str) -> list[str]:
    """What examples/llm/train.py reports of each step."""
    sizes = [f"--{name}={SMALL_LLAMA[name]}" for name in ("width", "blocks", "heads", "kv_heads")]
    how = ["--length=16", "--batch_size=2", "--steps=3", "--log_steps=1", "--generate=4"]
    done = run_warm("examples/llm/train.py", *sizes, *how, *flags)
    assert done.returncode == 0, done.stderr
    return re.findall(r"loss ([\d.]+)", done.stdout)


@pytest.mark.slow
def test_windows_cut_over_a_context_train_as_whole_ones() -> None:
    losses = losses_of("--num_ranks=1")
    assert len(losses) == 3
    flags = ("--attention=xla_fsdp", "--context=2", "--num_ranks=2")
    assert losses_of(*flags) == losses
    assert losses_of("--recipe=fast", *flags) == losses


def test_a_context_wants_attention_that_sees_it() -> None:
    done = run_warm("examples/llm/train.py", "--context=2")
    assert done.returncode == 2
    assert "--context wants --attention xla_fsdp" in done.stderr
