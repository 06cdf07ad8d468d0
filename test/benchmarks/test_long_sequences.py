"""The benchmark of long sequences: JAX's Llama is that of transformers, and its table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from test.common.ranks import ROOT, run_python

BENCHMARKS = ROOT / "benchmarks"
LENGTH = 512  # a block of the kernel
OF_A_LAYER = {
    "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
    "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj",
    "proj": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}  # fmt: skip


def losses() -> tuple[float, float]:
    """Of transformers' model and of JAX's with the same values; run in the child."""
    sys.path[:0] = [str(BENCHMARKS), str(ROOT / "examples/llm")]
    import jax
    import jax.numpy as jnp
    import torch
    import torch.nn.functional as F
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from torch import Tensor
    from transformers import LlamaForCausalLM

    from jax_llama import Model, Shape, parameter_shapes
    from llama import Sizes

    torch.manual_seed(0)
    shape = Shape(LENGTH, 2, width=256, heads=2, kv_heads=1, ffn=64, vocabulary=96)
    sizes = Sizes(shape.width, shape.blocks, shape.heads, shape.kv_heads, shape.ffn, 96)
    config = sizes.config()
    config.rms_norm_eps = 1e-5
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for value in model.parameters():  # far from where every model predicts all words alike
            value.copy_(torch.randn_like(value) * (0.15 if value.dim() > 1 else 0.5))
    tokens, targets = torch.randint(0, 96, (2, 1, LENGTH))
    theirs = F.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten()).item()

    def value_of(name: str) -> Tensor:
        if name == "tokens":
            return model.model.embed_tokens.weight
        if name in ("norm", "head"):
            return model.model.norm.weight if name == "norm" else model.lm_head.weight.t()
        names = [f"{OF_A_LAYER[name.removeprefix('block.')]}.weight"] * shape.blocks
        pairs = zip(model.model.layers, names, strict=True)
        return torch.stack([layer.get_parameter(each).t() for layer, each in pairs])

    values = {
        name: jnp.asarray(value_of(name).detach().numpy()) for name in parameter_shapes(shape)
    }
    assert {name: value.shape for name, value in values.items()} == parameter_shapes(shape)
    mesh = Mesh(jax.devices()[:1], ("shard",))
    ours = Model(shape, NamedSharding(mesh, PartitionSpec("shard", None, None)), interpret=True)
    found = jax.jit(ours.loss)(values, jnp.asarray(tokens.numpy()), jnp.asarray(targets.numpy()))
    return theirs, float(found)


@pytest.mark.slow
def test_the_jax_model_is_the_llama_of_transformers() -> None:
    pytest.importorskip("jax")
    done = run_python("-m", "test.benchmarks.test_long_sequences", env={"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    theirs, ours = json.loads(done.stdout.splitlines()[-1])
    assert ours == pytest.approx(theirs, rel=0.02)  # it computes in bf16


@pytest.mark.slow
def test_the_benchmark_writes_figures_of_ours_and_of_jax(tmp_path: Path) -> None:
    pytest.importorskip("libtpu")
    done = run_python(
        str(BENCHMARKS / "long_sequences.py"), "--topology", "v5e:2x2", "--lengths", "1024",
        "--blocks", "2", "--context", "2", "--only", "ours,ulysses,jax,alone",
        "--cache_dir", str(tmp_path),
        timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {
        cells[0]: cells[1:]
        for line in done.stdout.splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) > 4
    }
    assert rows[""] == ["ours", "ulysses", "jax", "alone", "/ ulysses", "/ jax", "/ alone"]
    peaks = [float(cell.replace(",", "")) for cell in rows["peak, MiB"][:3]]
    assert peaks[0] < peaks[2]
    for label in ("tokens/s, estimated", "wire, MB"):
        assert all(float(cell.replace(",", "")) > 0 for cell in rows[label][:3])


if __name__ == "__main__":
    print(json.dumps(losses()))
