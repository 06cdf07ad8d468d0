"""Other projects' training loops on this package: ``accelerate``, ``transformers``, ``lightning``.

Each module imports the project that it is named after, which is no dependency of this package. They
use internals of these projects, so each refuses versions that it is not tested with.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

# Prefixes of tested versions by package, newest that works with torch 2.9 first.
TESTED = {
    "accelerate": ("1.15",),
    "lightning": ("2.6",),
    "lightning-fabric": ("2.6",),
    "transformers": ("5.23", "4.57"),
}


class UntestedVersionError(ImportError):
    """A project is missing or of a version that the integrations are not tested with."""


def require(*packages: str) -> None:
    """Raise UntestedVersionError, for all of ``packages`` at once, unless they are tested."""
    problems = [problem for package in packages if (problem := _problem(package))]
    if problems:
        wanted = " ".join(f"'{package}=={TESTED[package][0]}.*'" for package in packages)
        raise UntestedVersionError(f"{'; '.join(problems)}. Install them: pip install {wanted}")


def _problem(package: str) -> str | None:
    expected = " or ".join(f"{tested}.*" for tested in TESTED[package])
    try:
        found = version(package)
    except PackageNotFoundError:
        return f"{package} is not installed; xla_fsdp works with {expected}"
    if any(f"{found}.".startswith(f"{tested}.") for tested in TESTED[package]):
        return None
    return (
        f"{package} {found} is installed; xla_fsdp changes how it steps, saves and loads, and is "
        f"tested with {expected}"
    )
