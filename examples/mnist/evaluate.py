"""Test accuracy of a merged checkpoint, in plain PyTorch: no ranks, no FSDP, no torch_xla.

    python examples/mnist/evaluate.py runs/mnist/mnist_epoch_2_consolidated.pth

Prints one line of JSON: how many test images the model gets right, of how many, and how many are
near ties. Words: in a *near tie* the two best classes are so close that rounding, which differs
between devices, can swap them.
Always true: torch_xla is never imported here. ``train.py`` runs this file in a process of its own
to verify what it saved.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))  # what the examples share

from data import MnistData, load_mnist
from fake_data import make_fake_digits
from job import ROOT
from model import MnistNet, normalize

BATCH = 1000
CLOSE = {"float32": 1e-4, "float16": 0.1, "bfloat16": 0.2}
"""By compute dtype of the training: two log-probabilities closer than this are a near tie. On the
10,000 test images the sharded model's distances between the two best classes differed from the
plain one's by at most 1e-5, 0.08 and 0.17; that makes 0, 19 and 38 near ties, and it swapped 0, 1
and 4 of them."""


@dataclass(frozen=True)
class Score:
    """What a model makes of the test images."""

    correct: int
    total: int
    near_ties: int = 0

    @property
    def accuracy(self) -> float:
        """In percent."""
        return 100 * self.correct / self.total


def score(model: MnistNet, images: Tensor, labels: Tensor, close: float) -> Score:
    """Evaluate ``model`` on the CPU.

    Args:
        model: the plain network.
        images: uint8 ``[N, 28, 28]``.
        labels: int64 ``[N]``.
        close: the largest difference of log-probabilities that counts as a near tie.
    """
    correct = near_ties = 0
    model.eval()
    with torch.no_grad():
        for pixels, targets in zip(images.split(BATCH), labels.split(BATCH), strict=True):
            output = model(normalize(pixels))
            best = output.topk(2).values
            correct += int((output.argmax(1) == targets).sum())
            near_ties += int((best[:, 0] - best[:, 1] < close).sum())
    return Score(correct, len(labels), near_ties)


def load_digits(data_dir: Path, fake_data: bool) -> MnistData:
    """The digits that the flags ``--data_dir`` and ``--fake_data`` ask for."""
    return make_fake_digits() if fake_data else load_mnist(data_dir)


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate the file that the command line names."""
    parser = argparse.ArgumentParser(prog="evaluate.py", description="Evaluate a merged model.")
    parser.add_argument("model", type=Path, help="file written by the merge")
    parser.add_argument("--data_dir", type=Path, default=ROOT / "data" / "mnist")
    parser.add_argument("--fake_data", action="store_true")
    parser.add_argument("--compute_dtype", choices=CLOSE, default="float32", help="of the training")
    flags = parser.parse_args(argv)
    model = MnistNet()
    model.load_state_dict(torch.load(flags.model, weights_only=True)["model"])
    digits = load_digits(flags.data_dir, flags.fake_data)
    result = score(model, digits.test_images, digits.test_labels, CLOSE[flags.compute_dtype])
    if "torch_xla" in sys.modules:
        sys.exit("evaluate.py: torch_xla was imported, so this was no evaluation in plain PyTorch")
    print(json.dumps(asdict(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
