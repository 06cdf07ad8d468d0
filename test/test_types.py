"""What type checkers say of user code: nothing where it is right, and where it has a typo, that."""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from test.common.ranks import ROOT, run_python

RIGHT = """
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import compile_step, launch, load_checkpoint, parallelize

plain = nn.Linear(2, 2)
model, optimizer, recipe = parallelize(
    plain, torch.optim.AdamW(plain.parameters()), compute_dtype=torch.bfloat16
)
betas: torch.optim.AdamW = optimizer
made = parallelize(plain, partial(torch.optim.SGD, lr=0.1), "fast").optimizer
sgd: torch.optim.SGD = made
nothing: None = parallelize(plain, None, Path("recipe.json")).optimizer
wrapped = FSDP(plain, reshard_after_forward=False, use_orig_params=True)


@compile_step
def step(x: Tensor, scale: float = 1.0) -> Tensor:
    return scale * model(x)


loss: Tensor = step(torch.ones(2), scale=2.0)
again: Tensor = recipe.compile(lambda x: model(x))(torch.ones(2))
loaded = load_checkpoint("run", model, optimizer)
number: int | None = loaded["step"]


def train(rank: int) -> float:
    return 1.0 * rank


losses: list[float] = launch(train, num_ranks=2)
"""
WRONG = {
    "option of the wrapper": "FSDP(plain, reshard_after_foward=False)",
    "option of torch's": "FSDP(plain, use_orig_param=True)",
    "option of parallelize": "parallelize(plain, None, compute_dtyp=torch.bfloat16)",
    "recipe": 'parallelize(plain, None, "leen")',
    "type of the optimizer": "wrong: torch.optim.SGD = optimizer",
    "argument of a step": "step(torch.ones(2), scal=2.0)",
    "result of a step": "text: str = step(torch.ones(2))",
    "key of what is loaded": 'loaded["epoch"]',
    "results of ranks": "texts: list[str] = launch(train, num_ranks=2)",
    "format of files": 'save_checkpoint("run", model, file_format="safetensor")',
}
FIRST = len(RIGHT.splitlines()) + 3  # line of the first wrong one, after an import


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_type_checker_finds_typos_in_user_code(checker: str, tmp_path: Path) -> None:
    if find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed; it comes with the extra dev")
    lines = [RIGHT, "from xla_fsdp import save_checkpoint", *WRONG.values()]
    (tmp_path / "user.py").write_text("\n".join(lines) + "\n")
    arguments = [str(tmp_path / "user.py")]
    if checker == "mypy":
        # Without stubs of torch_xla and others, which are not the user's business.
        arguments += ["--ignore-missing-imports", "--follow-imports=silent"]
        arguments += ["--cache-dir", str(tmp_path / "cache"), "--config-file", ""]
    else:
        config = {"extraPaths": [str(ROOT)], "include": ["user.py"]}
        (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
        arguments = ["--project", str(tmp_path), "--pythonpath", sys.executable]
    done = run_python("-m", checker, *arguments, env={"MYPYPATH": str(ROOT)})
    found = {int(each) for each in re.findall(r"user\.py:(\d+):.*error", done.stdout)}
    said = {name: FIRST + number in found for number, name in enumerate(WRONG)}
    assert [name for name, was_found in said.items() if not was_found] == [], done.stdout
    assert found == set(range(FIRST, FIRST + len(WRONG))), done.stdout


def test_types_of_options_are_those_of_the_wrapper() -> None:
    from xla_fsdp.fsdp.fsdp1_options import TorchOptions
    from xla_fsdp.fsdp.option_types import TorchOptionTypes, WrapperOptionTypes
    from xla_fsdp.fsdp.wrapper import XlaFullyShardedDataParallel

    torchs = {each.name: each.type for each in fields(TorchOptions)}
    assert TorchOptionTypes.__annotations__.keys() == torchs.keys()
    parameters = inspect.signature(XlaFullyShardedDataParallel.__init__).parameters
    own = {name: each.annotation for name, each in parameters.items()}
    for name in ("self", "module", "auto_wrap_policy", "torch_options"):
        del own[name]
    assert get_type_hints(WrapperOptionTypes).keys() == own.keys() | torchs.keys()
    for name, written in {**own, **torchs}.items():
        found: Any = WrapperOptionTypes.__annotations__[name]
        assert found.__forward_arg__ == written, name
