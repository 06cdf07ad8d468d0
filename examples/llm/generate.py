"""Let an exported model write, in plain transformers, without torch_xla.

python examples/llm/generate.py runs/llm/export --prompt "The "
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))  # what the examples share

from flags import at_least, number
from text import tokenizer_of


def main(argv: Sequence[str] | None = None) -> int:
    """Print the prompt and what the model makes of it; returns the exit code."""
    parser = argparse.ArgumentParser(description="Let an exported model write.")
    parser.add_argument("model", type=Path, help="folder that --export of train.py wrote")
    parser.add_argument("--prompt", default="The ")
    parser.add_argument("--generate", type=at_least(1), default=200, help="tokens to write")
    parser.add_argument("--temperature", type=number(0.01), default=0.5)
    parser.add_argument("--seed", type=at_least(0), default=0)
    options = parser.parse_args(argv)
    if not (options.model / "config.json").exists():
        parser.error(f"{options.model} holds no config.json; expected what train.py --export wrote")
    torch.manual_seed(options.seed)
    tokenizer = tokenizer_of(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    tokens = torch.tensor([tokenizer.encode(options.prompt)])
    found = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=options.generate,
        do_sample=True,
        temperature=options.temperature,
        pad_token_id=0,
    )
    print(tokenizer.decode(found[0].tolist()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
