"""Merged directories are what transformers' from_pretrained loads, also in parts and in bf16."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from test.common.shard_maker import FullModel, bits
from xla_fsdp.consolidate_sharded_ckpts import main

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request: pytest.FixtureRequest) -> Any:
    """A small Llama, with its head tied to its embedding or not."""
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=request.param == "tied",
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def save_shards(model: Any, directory: Path) -> None:
    """The files of three ranks."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    ties = {} if "lm_head.weight" in params else {"lm_head.weight": "model.embed_tokens.weight"}
    FullModel(params, ties=ties).save_safetensors(directory, 3)


@pytest.mark.parametrize("size", ["5GB", "9KB"])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_from_pretrained_gives_the_model_back(
    model: Any, tmp_path: Path, size: str, dtype: str | None
) -> None:
    shards, out = tmp_path / "shards", tmp_path / "hf"
    shards.mkdir()
    save_shards(model, shards)
    arguments = ["--ckpt_prefix", str(shards), "--save_path", f"{out}/", "--max_shard_size", size]
    assert main([*arguments, *(["--dtype", dtype] if dtype else [])]) == 0
    model.config.save_pretrained(out)
    assert (out / "model.safetensors.index.json").exists() == (size == "9KB")
    loaded, report = transformers.LlamaForCausalLM.from_pretrained(
        out, dtype="auto" if dtype is None else torch.bfloat16, output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = model if dtype is None else copy.deepcopy(model).to(torch.bfloat16)
    assert bits(loaded.state_dict()) == bits(expected.state_dict())


def test_parts_are_named_as_save_pretrained_names_them(model: Any, tmp_path: Path) -> None:
    save_shards(model, tmp_path)
    out, theirs = tmp_path / "hf", tmp_path / "theirs"
    size = ["--max_shard_size", "9KB"]
    assert main(["--ckpt_prefix", str(tmp_path), "--save_path", f"{out}/", *size]) == 0
    model.save_pretrained(theirs, max_shard_size=size[1])
    pattern = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
    for directory in (out, theirs):
        names = {path.name for path in directory.iterdir() if path.name.startswith("model")}
        assert len(names) > 2
        assert all(pattern.fullmatch(name) for name in names)
