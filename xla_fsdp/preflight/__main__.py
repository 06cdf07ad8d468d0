"""``python -m xla_fsdp.preflight module:function --topology v5e:4x4 ...``: print reports.

With ``--tune`` the fastest recipe, mesh and batch that fit are searched for.
With ``--run 3`` nothing is compiled for a TPU: three steps are made on virtual chips. Every
combination of the values given for options is examined; a failure is printed in one line.
Exit code 0 if every program compiles and fits (of a search: if one does; of a run: if all numbers
are finite and ranks agree), 1 if not or if a step raises, 2 for wrong usage, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import itertools
import json
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from xla_fsdp.distributed.launcher import INTERRUPTED_EXIT_CODE
from xla_fsdp.preflight.api import (
    PreflightWarning,
    check_options,
    describe_options,
    mesh_on,
    preflight,
)
from xla_fsdp.preflight.compile.compiler import CompileError
from xla_fsdp.preflight.read.html import about_run, page, tuned_page
from xla_fsdp.preflight.read.report import Failed, Report, full_text, table
from xla_fsdp.preflight.rehearse.rehearsal import PLAIN, Rehearsal, RehearsalError, rehearse
from xla_fsdp.preflight.search.tuned import Tuned
from xla_fsdp.preflight.search.tuning import DEPTH, RECIPE, InterruptedSearch, tune
from xla_fsdp.preflight.topologies import GIB, find_topology, known_names

USAGE_EXIT_CODE = 2

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Print reports on all combinations of options; return the exit code."""
    try:
        return _main(argv)
    except KeyboardInterrupt:
        _progress("")
        print("xla_fsdp.preflight: interrupted", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE


def _main(argv: Sequence[str] | None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    os.environ.setdefault("PJRT_DEVICE", "CPU")  # else torch_xla warns when it is imported
    try:
        _check_modes(parser, options)
        _check_writable(options.json, options.html, options.recipe_file)
        if options.tune:
            return _tune(_load(options.target), options)
        build_step, runs = _load(options.target), list(_runs(options))
        for _, keywords in runs:
            check_options(build_step, keywords)
    except ValueError as error:
        print(f"xla_fsdp.preflight: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    if options.run:
        return _rehearse_all(build_step, runs, options)
    warnings.simplefilter("ignore", PreflightWarning)  # reports show them
    examine = functools.partial(preflight, build_step, progress=_progress, **_limits(options))
    found = [_attempt(examine, *run, options) for run in runs]
    reports = [each for each in found if isinstance(each, Report)]
    if len(reports) == 1:
        print(full_text(reports[0]))
    elif reports:
        print(table(reports))
    _write(found, options)
    return 0 if len(reports) == len(runs) and all(report.fits for report in reports) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m xla_fsdp.preflight",
        description="What a training step needs on a TPU slice, asked of the TPU compiler; "
        "or some steps, made on virtual chips.",
        epilog=f"Topologies: {known_names()}",
    )
    parser.add_argument("target", help="module:function that builds the model and returns a step")
    parser.add_argument("--topology", action="append", help="default v5e:4x4; may be repeated")
    repeated: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument(
        "--mesh",
        **repeated,
        metavar="AXIS=SIZE,...",
        help="hand the function a mesh; may be repeated",
    )
    parser.add_argument(
        "--set", **repeated, metavar="OPTION=VALUE", help="fix an option of the function"
    )
    parser.add_argument(
        "--sweep",
        **repeated,
        metavar="OPTION=VALUE,VALUE",
        help="examine the function with each value of an option",
    )
    parser.add_argument(
        "--run", type=_whole, metavar="STEPS", help="make so many steps on virtual chips"
    )
    parser.add_argument(
        "--tune", action="store_true", help="search for the fastest recipe, mesh and batch that fit"
    )
    parser.add_argument(
        "--budget", type=_seconds, metavar="30m", help="end the search after so long (s, m or h)"
    )
    parser.add_argument("--recipe_file", type=Path, metavar="FILE", help="write the best recipe")
    parser.add_argument(
        "--depth",
        default=DEPTH,
        metavar="OPTION",
        help=f"the function's option for its number of layers (default: {DEPTH})",
    )
    parser.add_argument(
        "--jobs", type=_whole, help="compilations at once in a search (default: as many as fit)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with them")
    parser.add_argument(
        "--max_host_mem",
        type=_gib,
        default=10,
        metavar="GIB",
        help="end a compilation that takes more of this machine's memory (default: 10)",
    )
    parser.add_argument("--cache_dir", type=Path, help="default: in the user's cache folder")
    parser.add_argument("--flags", default="", help="more compiler flags, as LIBTPU_INIT_ARGS")
    parser.add_argument("--traceback", action="store_true", help="show where a step raised")
    return parser


def _number(convert: Callable[[str], float], what: str) -> Callable[[str], Any]:
    """Return a type of argparse for numbers above 0."""

    def converted(word: str) -> float:
        with contextlib.suppress(ValueError, KeyError):
            if 0 < (number := convert(word)) < float("inf"):
                return number
        raise argparse.ArgumentTypeError(f"{word!r} is no {what}")

    return converted


_whole = _number(int, "whole number, 1 or more")
_gib = _number(float, "size in GiB, more than 0")
_seconds = _number(
    lambda word: float(word[:-1]) * {"s": 1, "m": 60, "h": 3600}[word[-1]],
    "time such as 90s, 30m or 2h",
)


def _check_modes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Raise ValueError for options of another mode than that which was chosen."""

    def given(*names: str) -> str:
        changed = (each for each in names if getattr(options, each) != parser.get_default(each))
        return ", ".join(f"--{each}" for each in changed)

    if options.tune and options.run:
        raise ValueError("--tune compiles and --run makes steps: give one of them")
    if options.tune and len(options.topology or []) > 1:
        raise ValueError("--tune searches on one topology: give one")
    if options.run and (wrong := given("json", "html", "max_host_mem", "cache_dir", "flags")):
        raise ValueError(
            f"--run makes steps, and neither compiles for a TPU nor writes a report; leave out "
            f"{wrong}"
        )
    if not options.tune and (wrong := given("budget", "recipe_file", "depth", "jobs")):
        raise ValueError(f"{wrong}: these are of a search; add --tune")


def _limits(options: argparse.Namespace) -> dict[str, Any]:
    """Return what compilations may use, as ``preflight`` and ``tune`` take it."""
    most = round(options.max_host_mem * GIB)
    return {"max_host_mem": most, "cache_dir": options.cache_dir, "flags": options.flags}


def _tune(build_step: Callable[..., Any], options: argparse.Namespace) -> int:
    [topology] = options.topology or ["v5e:4x4"]
    choices = _choices(options)
    try:
        tuned = tune(
            build_step,
            topology=topology,
            choices=choices,
            tried_meshes=[_axes(words) for words in options.mesh] or None,
            depth_option=options.depth,
            budget=options.budget,
            jobs=options.jobs,
            progress=_progress,
            **_limits(options),
        )
    except CompileError as error:  # the compiler is not installed
        print(f"xla_fsdp.preflight: {error}", file=sys.stderr)
        return 1
    except InterruptedSearch as interrupted:
        _show_tuned(interrupted.tuned, options)
        raise
    _show_tuned(tuned, options)
    return 0 if tuned.best else 1


def _show_tuned(tuned: Tuned, options: argparse.Namespace) -> None:
    _progress("")
    print(tuned.text())
    if tuned.best and options.recipe_file:
        tuned.save(options.recipe_file)
        print(f"\nThe recipe is in {options.recipe_file}; train with batch={tuned.best.batch}")
    if options.json:
        options.json.write_text(tuned.to_json())
    if options.html:
        options.html.write_text(tuned_page(tuned, about_run(options.target)))


def _check_writable(*paths: Path | None) -> None:
    """Raise ValueError for a path that cannot be written, before minutes of compilation."""
    for path in filter(None, paths):
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"{path} cannot be written: expected a file in an existing directory")
        if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
            raise ValueError(f"{path} cannot be written: there is no permission; name another file")


def _load(target: str) -> Callable[..., Any]:
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise ValueError(f"{target!r} is not of the form module:function")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise ValueError(f"cannot import {module_name!r}: {error}") from error
    if not callable(found):
        raise ValueError(f"{module_name!r} has no function {name!r}")
    return found


def _runs(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    choices = _choices(options)
    for name in options.topology or ["v5e:4x4"]:
        topology = find_topology(name)
        meshes = [{"mesh": mesh_on(topology, _axes(words))} for words in options.mesh]
        for mesh, values in itertools.product(meshes or [{}], itertools.product(*choices.values())):
            yield name, {**mesh, **dict(zip(choices, values, strict=True))}


def _choices(options: argparse.Namespace) -> dict[str, list[Any]]:
    """Return the values of each option that --set and --sweep name."""
    fixed = [(name, [value]) for name, value in map(_pair, options.set)]
    swept = [(name, values.split(",")) for name, values in map(_pair, options.sweep)]
    examine: Callable[..., Any] = rehearse if options.run else tune if options.tune else preflight
    own_names = {*inspect.signature(examine).parameters} - {"options"}
    if options.run:
        own_names.add(PLAIN)
    choices: dict[str, list[Any]] = {}
    for name, words in fixed + swept:
        if name in own_names:
            instead = f"use --{name}" if name in ("mesh", "topology") else "call yours otherwise"
            raise ValueError(
                f"{name} cannot be set, as preflight itself gives or takes it; {instead}"
            )
        if name in choices:
            raise ValueError(f"{name} is given more than once; use one --sweep for all its values")
        is_recipe = options.tune and name == RECIPE  # which has a name, also if that is a number
        choices[name] = [*words] if is_recipe else [_value(word) for word in words]
    return choices


def _axes(words: str) -> dict[str, int]:
    pairs = [_pair(word) for word in words.split(",")]
    sizes = {name: int(size) for name, size in pairs if size.isdecimal()}
    if len(sizes) < len(pairs):
        raise ValueError(f"{words!r} is not of the form axis=size,axis=size, each axis once")
    return sizes


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not name.isidentifier() or not equals or not value:
        raise ValueError(f"{word!r} is not of the form option=value")
    return name, value


def _value(word: str) -> Any:
    """Convert "on" and "off" to a bool, a number to int or float; return other words as given, nan
    and inf, too."""
    if word in ("on", "off"):
        return word == "on"
    for number in (int, float):
        with contextlib.suppress(ValueError):
            found = number(word)
            if number is int or math.isfinite(found):
                return found
    return word


def _rehearse_all(
    build_step: Callable[..., Any],
    runs: Sequence[tuple[str, dict[str, Any]]],
    options: argparse.Namespace,
) -> int:
    most = max(find_topology(topology).num_ranks for topology, _ in runs)
    os.environ["CPU_NUM_DEVICES"] = str(most)  # read where torch_xla creates its devices
    tell = functools.partial(print, flush=True)
    run = functools.partial(rehearse, build_step, steps=options.run, tell=tell, progress=_progress)
    found = [_attempt(run, *each, options) for each in runs]
    return 0 if all(isinstance(each, Rehearsal) and each.is_sound for each in found) else 1


def _attempt(
    run: Callable[..., T], topology: str, keywords: dict[str, Any], options: argparse.Namespace
) -> T | Failed:
    """Run with options of the user's function; print what went wrong, and return it for the
    files."""
    try:
        return run(topology=topology, **keywords)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        _progress("")
        if options.traceback:
            traceback.print_exc()
        reason, hint = str(error), ""
        if not isinstance(error, CompileError | RehearsalError):
            reason = f"{type(error).__name__}: {' '.join(reason.split())}"
            hint = "" if options.traceback else " (--traceback shows where)"
        failed = Failed(topology, describe_options(keywords), reason)
        print(f"xla_fsdp.preflight: {failed.run}: {reason}{hint}", file=sys.stderr)
        return failed


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _write(found: Sequence[Report | Failed], options: argparse.Namespace) -> None:
    _progress("")
    if options.json:
        options.json.write_text(json.dumps([json.loads(each.to_json()) for each in found]))
    if options.html:
        reports = [each for each in found if isinstance(each, Report)]
        failed = [each for each in found if isinstance(each, Failed)]
        options.html.write_text(page(reports, failed, about_run(options.target)))


if __name__ == "__main__":
    sys.exit(main())
