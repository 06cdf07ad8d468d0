"""``docs/models.md``: which models train as the plain model does, how they can be sharded, and what
is refused. ``python -m test.common.model_table`` writes it, from what the ranks of two launches do.
"""

from __future__ import annotations

import gc
import re
import sys
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from test.common import model_doors
from test.common.compare import assert_close
from test.common.parity import join
from test.common.ranks import ROOT, run_on_ranks
from test.common.real_models import FAMILIES, RealTask
from test.common.training import train_plain, train_sharded

PAGE = ROOT / "docs" / "models.md"
RANKS = (2, 3)
WAYS: dict[str, dict[str, Any]] = {
    "wrapped": {},
    "rematerialized": {"remat": True},
    "as a loop": {"scan": True},
}
WORKS = "works"
REFUSED = "refused: "
TOLERANCE = 2e-5  # relative to the largest value of a tensor
# In fp32 the plain model is 5e-5 from its own values in fp64, where others are 1e-6 to 1e-5.
WIDER = {"Gemma3": 3e-4}
HEAD = f"""\
# Models that are tested

Small models of these families, by configuration and without weights, trained for three steps of
AdamW on 2 and on 3 ranks: losses, gradients and parameters equal those of the plain model on the
joined batch, to {TOLERANCE:g} of a tensor's largest value, in fp32 (Gemma3 to
{WIDER["Gemma3"]:g}, as rounding alone moves it by 5e-5). Each layer is a unit. *As a loop* is
`scan_layers`. The experts of the mixtures (`experts_implementation="batched_mm"`) get so few tokens
that some have none on some ranks. Of DiT the embeddings in each block are units, too, as the model
calls those of its first block by themselves.

Gradients of two batches, added up and clipped, in fp32 and bf16, on 2 ranks, through the wrapper,
`fully_shard` and a compiled step of `parallelize` (`"lean"`, not stepping in backward, where
nothing is left to clip), are tried of those with "all" under *doors*. In fp32 the update of all
parameters is the plain model's to {model_doors.TOLERANCE:g} of its norm; in bf16 it is off by no
more than {model_doors.IN_BF16} times as much as what the plain model does in bf16.

Also run, on 2 ranks, through the wrapper, `fully_shard` and `parallelize(..., "lean")`: a loop that
differentiates its inner step, as MAML does, and quantization in training (`prepare_qat`, each rank
with its own observers); losses are those of plain copies whose gradients are averaged. `LBFGS`
steps by [`ZeroRedundancyOptimizer`](optimizers.md). torch_xla has no gradients of sparse
embeddings.

Two kinds of model compile for minutes. RWKV of transformers loops over the tokens in Python: two
layers of width 32 and 16 tokens are 11,060 traced instructions, of such a Llama 1,462. Eager
experts, such as GPT-OSS's, ask the device which of them have tokens, and each answer is a program:
two layers took 147 s to trace and 66 s more to compile, and 0.1 and 17 s with
`experts_implementation="batched_mm"`; [`parallelize`](mixtures.md) computes them without asking. On
CPU ranks most of a long compilation is optimization: with `XLA_FLAGS` of
`--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false
--xla_cpu_parallel_codegen_split_count=1` RWKV's took 9 s in place of 106. The TPU
compiler takes 17 s for the same step on a v5e:2x2 (1.9 MiB of code).

`python -m test.common.model_table` makes this page, and the tests hold it to what they find.

"""


def found(names: Iterable[str], ways: Iterable[str] = WAYS) -> dict[tuple[str, str], str]:
    """For each model and way: ``WORKS``, ``REFUSED`` and the message, or what is wrong."""
    tasks = {(name, way): RealTask(name, **WAYS[way]) for name in names for way in ways}
    runs = {n: run_on_ranks(TRAIN_ALL, n, tasks, timeout=3000) for n in RANKS}
    return {
        each: _first_trouble([_verdict(task, n, [rank[each] for rank in runs[n]]) for n in RANKS])
        for each, task in tasks.items()
    }


TRAIN_ALL = "test.common.model_table:_train_all"  # this module may be __main__


def _train_all(rank: int, tasks: dict[Any, RealTask]) -> dict[Any, Any]:
    return {each: _attempt(task, rank) for each, task in tasks.items()}


def _attempt(task: RealTask, rank: int) -> Any:
    """What fails on one rank fails on all, so that the next model can run."""
    try:
        return train_sharded(task, rank)
    except Exception as error:
        return f"{_kind(error)}{error}\n\n{traceback.format_exc()}"
    finally:
        gc.collect()


def _kind(error: Exception) -> str:
    """``REFUSED``, if a statement of the package raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = f"{Path('xla_fsdp')}/" in last.filename and "raise" in (last.line or "")
    return REFUSED if ours else f"{type(error).__name__}: "


def _verdict(task: RealTask, num_ranks: int, ranks: list[Any]) -> str:
    errors = [each for each in ranks if isinstance(each, str)]
    if errors:
        return errors[0].split("\n")[0] if errors[0].startswith(REFUSED) else errors[0]
    own, plain = join(ranks), train_plain(task, num_ranks)
    tolerance = WIDER.get(task.family, TOLERANCE)
    limits = {"atol": 2e-7, "of_largest": tolerance, "smallest": 1e-3}
    try:
        assert_close(own.grads, plain.grads, what="gradient", **limits)
        assert_close(own.state, plain.state, what="state", **limits)
        for mine, expected in zip(own.losses, plain.losses, strict=True):
            assert abs(mine - expected) <= tolerance * abs(expected), f"loss {mine} for {expected}"
    except AssertionError as difference:
        return f"wrong on {num_ranks} ranks: {difference}"
    return WORKS


def _first_trouble(verdicts: list[str]) -> str:
    return next((each for each in verdicts if each != WORKS), WORKS)


# ---------------------------------------------------------------- the page


def page(results: dict[tuple[str, str], str]) -> str:
    """The text of ``docs/models.md``."""
    rows = [row(name, results) for name in FAMILIES]
    reasons = [line for name in FAMILIES for line in reasons_of(name, results)]
    columns = " | ".join(["model", *WAYS, "doors"])
    table = "\n".join([f"| {columns} |", f"|{'---|' * (len(WAYS) + 2)}", *rows])
    refused = "\n".join(["", "What is refused, and why:", "", *reasons, ""]) if reasons else ""
    return f"{HEAD}{table}\n{refused}"


def row(name: str, results: dict[tuple[str, str], str]) -> str:
    """A model's line of the table."""
    words = [results[name, way].split(":")[0] for way in WAYS]
    words.append("all" if name in model_doors.NAMES else "")
    return f"| {name} | {' | '.join(words)} |"


def reasons_of(name: str, results: dict[tuple[str, str], str]) -> list[str]:
    """What is refused of a model, with the first sentence of the message."""
    return [
        f"- {name}, {way}: {_first_sentence(results[name, way].removeprefix(REFUSED))}."
        for way in WAYS
        if results[name, way].startswith(REFUSED)
    ]


def _first_sentence(text: str) -> str:
    return re.split(r"\.\s", text)[0].rstrip(".")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    names = sys.argv[1:] or list(FAMILIES)
    results = found(names)
    for each, verdict in results.items():
        print(*each, verdict, sep=" | ")
    if not sys.argv[1:]:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(results))
