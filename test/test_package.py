"""Wheel and source archive, installed into an environment of their own outside of the tree.

Dependencies are those of this environment, linked by a path file, as torch alone takes gigabytes.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path

import pytest

from test.common.ranks import ROOT, environment
from xla_fsdp import __version__

ARCHIVED = ("README.md", "Makefile", "examples/mnist/train.py", "docs/index.md", "test/conftest.py")
MNIST = ["--fake_data", "--num_epochs=1", "--max_steps=2", "--compare_steps=0", "--min_accuracy=0"]


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel; ``source`` is the unpacked source archive, in ``folder``."""

    folder: Path
    source: Path

    def run(self, program: str, *arguments: str) -> str:
        """Run a program of the environment outside of the tree; return its output."""
        return run(self.folder, str(self.folder / "env" / "bin" / program), *arguments)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    if importlib.util.find_spec("build") is None:
        pytest.skip("no `build` here; pip install build")
    folder = tmp_path_factory.mktemp("package")
    run(folder, sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT))
    [wheel], [archive] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    python = folder / "env" / "bin" / "python"
    venv.create(folder / "env", with_pip=False)
    install = ["pip", "--python", str(python), "install", "--no-deps", str(wheel)]
    run(folder, sys.executable, "-m", *install)
    [packages] = (folder / "env").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return Installed(folder, folder / archive.name.removesuffix(".tar.gz"))


def run(folder: Path, *command: str) -> str:
    """Run a command in ``folder``, with no way to the tree; return its output."""
    env = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_archives_hold_what_they_should(installed: Installed) -> None:
    [wheel] = installed.folder.glob("*.whl")
    assert wheel.name == f"xla_fsdp-{__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert {"xla_fsdp/py.typed", "xla_fsdp/__init__.pyi"} <= set(names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"xla_fsdp"}
    described = next(name for name in names if name.endswith("dist-info/METADATA"))
    text = zipfile.ZipFile(wheel).read(described).decode()
    wanted = re.findall(r"^Requires-Dist: ([\w-]+)[^;]*?$", text, re.MULTILINE)  # without an extra
    first = ["torch", "numpy", "safetensors", "fsspec", "lazy_loader", "tqdm"]
    assert wanted == [*first, "typing_extensions"]
    assert [each for each in ARCHIVED if not (installed.source / each).is_file()] == []


def test_the_description_on_an_index_has_no_links_to_files(installed: Installed) -> None:
    [wheel] = installed.folder.glob("*.whl")
    [name] = [each for each in zipfile.ZipFile(wheel).namelist() if each.endswith("/METADATA")]
    shown = message_from_bytes(zipfile.ZipFile(wheel).read(name))
    text = shown.get_payload(decode=True).decode()
    assert shown["Description-Content-Type"] == "text/markdown"
    assert "One call" in text
    assert len(text.splitlines()) == len((ROOT / "README.md").read_text().splitlines())
    assert re.findall(r"\]\((?!https?:)[^)]*\)", text) == []


def test_with_an_address_links_lead_to_the_files_of_the_repository() -> None:
    described = runpy.run_path(str(ROOT / "setup.py"))["on_an_index"]
    readme = (ROOT / "README.md").read_text()
    text = described(readme, "https://example.org/blob/main/")
    links = re.findall(r"(!?)\[(?:[^\[\]]|\[\])*\]\(([^)\s]+)\)", text)
    own = [(mark, link) for mark, link in links if link.startswith("https://example.org/")]
    files = [
        re.split(r"[?#]", link.removeprefix("https://example.org/blob/main/"))[0] for _, link in own
    ]
    assert len(files) > 30
    assert [each for each in files if not (ROOT / each).exists()] == []
    assert len(links) == len(re.findall(r"\]\([^)]+\)", readme))
    assert [link for mark, link in own if mark] == [
        "https://example.org/blob/main/docs/pictures/memory.svg?raw=true"
    ]
    assert described("[a](#b) [c](https://d)", "https://e/") == "[a](#b) [c](https://d)"


def test_it_is_imported_from_its_environment(installed: Installed) -> None:
    code = "import xla_fsdp; print(xla_fsdp.__file__, xla_fsdp.__version__, xla_fsdp.launch)"
    place, version, *_ = installed.run("python", "-c", code).split()
    assert Path(place).is_relative_to(installed.folder)
    assert version == __version__


def test_its_commands_and_the_mnist_example_run(installed: Installed) -> None:
    assert "--ckpt_prefix" in installed.run("consolidate_sharded_ckpts", "--help")
    for module in ("launch", "preflight", "consolidate_sharded_ckpts"):
        assert "usage:" in installed.run("python", "-m", f"xla_fsdp.{module}", "--help")
    train = str(installed.source / "examples" / "mnist" / "train.py")
    installed.run("python", train, *MNIST, "--num_ranks", "2", "--ckpt_dir", "mnist")
    merged = list((installed.folder / "mnist").glob("*consolidated*"))
    assert len(merged) == 1
