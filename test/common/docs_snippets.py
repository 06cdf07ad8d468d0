"""Run the Python that the README and the pages of docs/ show, in the directory given.

    python -m test.common.docs_snippets directory 2|4|slow|slow4

``2`` and ``4`` are numbers of ranks; ``FOUR`` names the pages that need four. Sections (from one
second-level heading to the next) share no names but those of ``given``; within a section snippets
continue each other. A snippet runs on all CPU ranks, unless an HTML comment before it,
``<!-- snippet: main -->``, has other words: ``main`` runs it once, in the main thread,
``skip (reason)`` not at all, ``slow`` and ``slow4`` (on four ranks) with the slow ones,
``continued`` with names of the sections before; ``check=name`` calls the function of that name in
``CHECKS`` with the names of the section.
Says in the end how many ran.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common.models import CLASSES, FEATURES, WIDTH, TwoLayers
from test.common.ranks import ROOT
from test.common.scenarios import make
from xla_fsdp import launch

FOUR = {"cpu_ranks", "first_model", "index", "meshes", "tensor_parallel"}
RANKS = 4 if sys.argv[-1].endswith("4") else 2
SLOW = ("slow", "slow4")
FENCE = re.compile(
    r"^(?:<!-- snippet: (.*?) -->\n)?```python\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
Space = dict[str, Any]


class Model(nn.Module):
    """What ``build_model()`` of the pages makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([TwoLayers(), TwoLayers()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def encode(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))

    def init_weights(self) -> None:
        for param in self.parameters():
            nn.init.normal_(param)


class Batches:
    """What ``loader`` of the pages is: two batches, on the rank's device."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        import torch_xla

        device = torch_xla.device()
        rows = torch.linspace(-1, 1, 3 * FEATURES).reshape(3, FEATURES)
        for scale in (1, 2):
            yield (scale * rows).to(device), (torch.arange(3) % CLASSES).to(device)


@dataclass(frozen=True)
class Snippet:
    """Code of a page; ``line`` is where it begins, ``words`` what the comment before it says."""

    path: Path
    line: int
    section: int
    words: tuple[str, ...]
    code: str

    def is_wanted(self, run: str) -> bool:
        usual = "4" if self.path.stem in FOUR else "2"
        kind = next((each for each in self.words if each in SLOW), usual)
        return kind == run and "skip" not in self.words


def pages() -> list[Path]:
    """The README and every page."""
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def snippets() -> list[Snippet]:
    """The Python of all pages, in order."""
    found = []
    for path in pages():
        text = path.read_text()
        for match in FENCE.finditer(text):
            before = text[: match.start(2)]
            section = before.count("\n## ")
            words = (match[1] or "ranks").split()
            found.append(Snippet(path, before.count("\n") + 1, section, tuple(words), match[2]))
    return found


def given() -> Space:
    """The names that the pages take for given."""
    import torch_xla

    from test.common.tensor_models import Llama
    from xla_fsdp import XlaFullyShardedDataParallel, load_checkpoint
    from xla_fsdp.wrap import transformer_auto_wrap_policy

    return {
        "__name__": "__main__",
        "torch": torch,
        "torch_xla": torch_xla,
        "nn": nn,
        "F": F,
        "Block": TwoLayers,
        "build_model": lambda: make(Model),
        "build_llama": lambda: make(Llama),
        "loader": Batches(),
        "loss_fn": F.cross_entropy,
        "policy": partial(transformer_auto_wrap_policy, transformer_layer_cls={TwoLayers}),
        "FSDP": XlaFullyShardedDataParallel,
        "load_checkpoint": load_checkpoint,
    }


def on_rank(rank: int, snippet: Snippet, spaces: list[Space]) -> None:
    """Run a snippet with the rank's names, and then its check."""
    space = spaces[rank] = spaces[rank] or prepared(snippet)
    run(snippet, space)


def prepared(snippet: Snippet) -> Space:
    """The names with which a section begins."""
    return {**given(), **EXTRA.get(snippet.path.stem, dict)()}


def run(snippet: Snippet, space: Space) -> None:
    """Run a snippet, whose lines are those of its page in tracebacks, and its check."""
    padded = "\n" * (snippet.line - 1) + snippet.code
    exec(compile(padded, str(snippet.path), "exec"), space)
    for word in snippet.words:
        if word.startswith("check="):
            CHECKS[word.removeprefix("check=")](space)


# ---------------------------------------------------------------- what single pages need


def tokens() -> Space:
    """Inputs of the tensor-parallel page."""
    import torch_xla

    from test.common.tensor_models import VOCABULARY

    ids = (torch.arange(2 * 8) % VOCABULARY).reshape(2, 8).to(torch_xla.device())
    return {"ids": ids, "targets": ids}


def hugging_face() -> Space:
    """A model and data for the Trainer, and what Accelerate prepares."""
    from test.common.hf_jobs import Sentences, build_llama
    from xla_fsdp.wrap import always_wrap_policy

    rows = torch.utils.data.TensorDataset(torch.ones(8, FEATURES), torch.arange(8) % CLASSES)
    return {
        "model": make(build_llama),
        "data": Sentences(),
        "loader": torch.utils.data.DataLoader(rows, batch_size=2),
        "policy": always_wrap_policy,
    }


def from_fsdp2() -> Space:
    """A directory that a job of plain torch saved, as FSDP2's are."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from xla_fsdp import one_rank_at_a_time

    with one_rank_at_a_time():
        if not Path("dcp").exists():
            model: nn.Module = make(Model, seed=11)
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.ones(2, FEATURES)).sum().backward()
            optimizer.step()
            model_state, optim_state = get_state_dict(model, optimizer)
            SAVED["dcp"] = {"model": model_state, "optim": optim_state["state"]}
            dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id="dcp")
    return {}


SAVED: dict[str, Space] = {}
"""What jobs have saved, by their directories: weights, and the optimizer's state."""


def whole(space: Space) -> Space:
    """The model of a section, whole, and its optimizer's state."""
    from xla_fsdp import full_state_dict, optim_state_dict

    model, optimizer = space["model"], space["optimizer"]
    state = optim_state_dict(model, optimizer)["state"]
    return {"model": dict(full_state_dict(model)), "optim": state}


def trained(space: Space) -> None:
    """Keep what was saved, for ``loaded_by_torch``."""
    SAVED["moved"] = whole(space)


def loaded_from_dcp(space: Space) -> None:
    """What FSDP2 saved has arrived."""
    same(whole(space), SAVED["dcp"])


def loaded_by_torch(space: Space) -> None:
    """What was saved here has arrived in a plain process."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optim_state = get_state_dict(space["model"], space["optimizer"])
    same({"model": model_state, "optim": optim_state["state"]}, SAVED["moved"])


def same(found: Space, expected: Space) -> None:
    """Compare weights and moments."""
    for name, value in expected["model"].items():
        assert torch.equal(found["model"][name], value), name
    assert found["optim"]
    for name, state in found["optim"].items():
        for what in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[what], expected["optim"][name][what]), (name, what)


def for_a_step() -> Space:
    """What a compiled step needs."""
    model = given()["FSDP"](make(Model))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": Batches()}


def saved_run() -> Space:
    """A checkpoint to merge."""
    launch(save_run, num_ranks=RANKS)
    return {}


def save_run(rank: int) -> None:
    """Save a step into ``run``."""
    from xla_fsdp import save_checkpoint

    model = given()["FSDP"](make(Model))
    save_checkpoint("run", model, torch.optim.AdamW(model.parameters()), step=1)


EXTRA: dict[str, Callable[[], Space]] = {
    "tensor_parallel": tokens,
    "hugging_face": hugging_face,
    "moving": from_fsdp2,
    "checkpoint_files": saved_run,
    "compile_step": for_a_step,
}
CHECKS: dict[str, Callable[[Space], None]] = {
    "trained": trained,
    "loaded_from_dcp": loaded_from_dcp,
    "loaded_by_torch": loaded_by_torch,
}


def main(which: str) -> int:
    """Run all wanted snippets, section by section; return how many failed."""
    wanted = [each for each in snippets() if each.is_wanted(which)]
    spaces: list[Space] = []
    failed, section = 0, None
    for snippet in wanted:
        if (snippet.path, snippet.section) != section and "continued" not in snippet.words:
            spaces = [{} for _ in range(RANKS + 1)]  # the last one is that of no rank
        section = snippet.path, snippet.section
        failed += not _succeeds(snippet, spaces)
    print(f"{len(wanted)} ran, {failed} failed")
    return failed


def _succeeds(snippet: Snippet, spaces: list[Space]) -> bool:
    try:
        if "main" in snippet.words:
            on_rank(RANKS, snippet, spaces)
        else:
            launch(on_rank, (snippet, spaces), num_ranks=RANKS)
    except (Exception, SystemExit):
        print(f"{snippet.path.relative_to(ROOT)}:{snippet.line} failed", file=sys.stderr)
        traceback.print_exc()
        return False
    return True


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[2] in SLOW:
        import transformers  # noqa: F401  (before launch, as the page says)
    os.chdir(sys.argv[1])
    gc.freeze()  # wrapping collects garbage, of which there is none in what is imported
    sys.exit(1 if main(sys.argv[2]) else 0)
