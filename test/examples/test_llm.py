"""examples/llm: a small Llama on 2 CPU ranks, with replayed and with traced steps; the whole job,
with checkpoints, an export that plain transformers loads, and fine-tuning of that."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.common.ranks import ROOT, run_python, run_warm

TRAIN = "examples/llm/train.py"
SMALL = ("--num_ranks=2", "--width=16", "--blocks=2", "--heads=2", "--kv_heads=1", "--ffn=32")
SHORT = ("--length=16", "--batch_size=2", "--steps=8", "--log_steps=1", "--generate=3")


def losses(text: Path, *more: str) -> list[float]:
    """Train; return the losses that are printed."""
    job = (TRAIN, f"--text={text}", *SMALL, *SHORT, *more)
    done = run_python(*job, timeout=600)
    assert done.returncode == 0, done.stderr
    return [float(each) for each in re.findall(r"loss ([\d.]+)", done.stdout)]


def test_a_file_of_options(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("length: 100000\ntext: pyproject.toml\ncompile_step: false\n")
    done = run_warm(TRAIN, f"--config={path}")
    assert (done.returncode, "a window 100000: use less" in done.stderr) == (1, True)
    path.write_text("lengthy: 3\n")
    done = run_warm(TRAIN, f"--config={path}", "--length=5")
    assert (done.returncode, "unrecognized arguments: --lengthy=3" in done.stderr) == (2, True)
    path.write_text("just words\n")
    done = run_warm(TRAIN, f"--config={path}")
    assert (done.returncode, "holds no lines 'option: value'" in done.stderr) == (2, True)


@pytest.fixture
def plain() -> Iterator[None]:
    """The example's modules, forgotten afterwards."""
    before, path = set(sys.modules), list(sys.path)
    sys.path[:0] = [str(ROOT / "examples" / "llm"), str(ROOT / "examples" / "shared")]
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(ROOT / "examples") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def perplexity(folder: Path, length: int, batch_size: int, ranks: int) -> float:
    """Of an exported model in plain transformers, on what ``train.py`` evaluates on."""
    from itertools import islice

    import torch
    from transformers import AutoModelForCausalLM

    from place import Place
    from text import read_text, tokenizer_of, windows

    model = AutoModelForCausalLM.from_pretrained(folder)
    held_out = read_text(None, tokenizer_of(folder), length).held_out
    losses = []
    for rank in range(ranks):
        place = Place(rank, ranks, torch.device("cpu"))
        for tokens, targets in islice(windows(held_out, place, length, batch_size, 0), 4):
            with torch.no_grad():
                losses.append(model(tokens, labels=targets, shift_labels=targets.contiguous()).loss)
    return torch.stack(losses).mean().exp().item()


def said(done: str, what: str) -> list[float]:
    """The numbers that stand after a word in what was printed."""
    return [float(each.replace(",", "")) for each in re.findall(rf"{what} ([\d.,]*\d)", done)]


@pytest.mark.slow
def test_a_job_goes_on_is_exported_fine_tuned_and_writes(tmp_path: Path, plain: None) -> None:
    run, export, tuned = (tmp_path / name for name in ("run", "export", "tuned"))
    job = (TRAIN, "--width=32", "--blocks=2", "--ffn=64", "--length=32", "--batch_size=4")
    whole = ("--warmup_steps=5", "--log_steps=10", f"--ckpt_dir={run}", "--save_steps=10")
    done = run_python(*job, *whole, "--num_ranks=2", "--steps=20", timeout=600)
    assert done.returncode == 0, done.stderr
    again = run_python(*job, *whole, "--num_ranks=2", "--steps=20", timeout=600)
    assert (again.returncode, "holds checkpoints up to step 20" in again.stderr) == (1, True)
    more = ("--resume=auto", "--steps=60", f"--export={export}", f"--logdir={tmp_path / 'tb'}")
    more += ("--eval_steps=40", "--generate=0", "--peak_tflops=1")
    on = run_python(*job, *whole, *more, "--num_ranks=4", "--batch_size=2", timeout=600)
    assert on.returncode == 0, on.stderr
    assert re.findall(r"^step (\d+): loss", on.stdout, re.M) == ["30", "40", "50", "60"]
    assert said(on.stdout, "loss")[-1] < said(done.stdout, "loss")[0] - 1
    assert len(re.findall(r"[\d.]+ % MFU, [\d,]+ tokens/s", on.stdout)) == 4
    assert list((tmp_path / "tb").iterdir())
    found = said(on.stdout, "perplexity")
    assert len(found) == 2
    assert perplexity(export, 32, 2, 4) == pytest.approx(found[-1], rel=1e-3)
    assert json.loads((export / "config.json").read_text())["use_cache"] is True

    flags = (f"--model={export}", "--lora=4", "--steps=20", "--length=32", "--generate=0")
    done = run_python(TRAIN, *flags, f"--export={tuned}", "--num_ranks=2", timeout=600)
    assert done.returncode == 0, done.stderr
    found = said(done.stdout, "perplexity")
    assert perplexity(tuned, 32, 8, 2) == pytest.approx(found[-1], rel=1e-3)
    assert not list(tuned.glob("adapter*"))
    wrote = run_python("examples/llm/generate.py", str(tuned), "--prompt=The ", "--generate=20")
    assert (wrote.returncode, wrote.stdout.startswith("The ")) == (0, True), wrote.stderr


@pytest.mark.slow
def test_replayed_steps_have_the_losses_of_traced_ones(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"a rank gathers what it needs, and scatters what it has. " * 20)
    found = losses(text)
    assert len(found) == 8
    assert found[-1] < found[0]
    assert found == losses(text, "--no_compile_step")
