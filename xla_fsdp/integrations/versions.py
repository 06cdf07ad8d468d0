"""Which versions of other projects the integrations are tested with.

Words: a *line* is what a version begins with, ``5.23`` for 5.23.0 and 5.23.1.
Always true: the integrations rely on how these projects work inside, so with a line that is not
listed here nothing is changed, and the message says what to install.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

TESTED = {
    "accelerate": ("1.15",),
    "lightning": ("2.6",),
    "lightning-fabric": ("2.6",),
    "transformers": ("5.23", "4.57"),
}

"""Lines by the name of the package, the newest that works with torch 2.9 first."""


class UntestedVersionError(ImportError):
    """A project is missing or of a version that the integrations are not tested with."""


def require(*packages: str) -> None:
    """Raise UntestedVersionError, for all of ``packages`` at once, unless they are tested."""
    problems = [problem for package in packages if (problem := _problem(package))]
    if problems:
        wanted = " ".join(f"'{package}=={TESTED[package][0]}.*'" for package in packages)
        raise UntestedVersionError(f"{'; '.join(problems)}. Install them: pip install {wanted}")


def _problem(package: str) -> str | None:
    lines = TESTED[package]
    expected = " or ".join(f"{line}.*" for line in lines)
    try:
        found = version(package)
    except PackageNotFoundError:
        return f"{package} is not installed; xla_fsdp works with {expected}"
    if any(f"{found}.".startswith(f"{line}.") for line in lines):
        return None
    return (
        f"{package} {found} is installed; xla_fsdp changes how it steps, saves and loads, and is "
        f"tested with {expected}"
    )
