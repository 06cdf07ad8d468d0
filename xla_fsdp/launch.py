"""``python -m xla_fsdp.launch [--num_ranks N] script.py ...``: an unmodified script on CPU ranks.

Every rank runs the program, a script or (with ``-m``) a module, as ``__main__`` in a namespace of
its own. Inside a rank ``torch_xla.launch``, ``xmp.spawn`` and ``xla_fsdp.launch`` just call their
function. The ranks start one after the other, each with its own command line, working directory and
random numbers, as processes would. Then they share these and all modules, and
``sys.modules["__main__"]`` is rank 0's namespace.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from xla_fsdp.distributed.launcher import INTERRUPTED_EXIT_CODE, RankError, launch, launch_script
from xla_fsdp.distributed.process_state import ProcessState, RandomState, root_logger_kept

USAGE_EXIT_CODE = 2


@dataclass(frozen=True)
class Program:
    """The program to run, compiled."""

    code: CodeType
    path: str
    called: str  # ``sys.argv[0]``
    import_from: str  # directory to put in front of ``sys.path``
    spec: ModuleSpec | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run a program on CPU ranks; return its exit code, 2 for wrong usage.

    Raises:
        SystemExit: as the program does.
    """
    options = _parser().parse_args(argv)
    device = os.environ.setdefault("PJRT_DEVICE", "CPU")
    if device != "CPU":
        return _usage_error(f"PJRT_DEVICE={device}: this starts CPU ranks; run the program itself")
    try:
        program = _load_module(options.program) if options.module else _load(options.program)
    except (OSError, ImportError) as error:
        return _usage_error(str(error))
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes in the source
        print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)
        return 1
    return _run(program, options)


def _run(program: Program, options: argparse.Namespace) -> int:
    mains: _Mains = defaultdict(partial(_new_main, program))
    try:
        with _as_main(program, options.args, mains[0]):  # pickle looks names up in that of rank 0
            if options.compat:
                _run_once(program, mains[0], options.num_ranks)
            else:
                _run_on_ranks(program, mains, options.num_ranks)
    except ValueError as error:
        return _usage_error(str(error))
    except (_ProgramError, RankError) as error:
        _print_cause(error, program)
        if isinstance(error, RankError):
            print(f"xla_fsdp.launch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m xla_fsdp.launch", description="Run a script on several CPU ranks."
    )
    parser.add_argument(
        "--num_ranks", type=int, help="default: XLA_FSDP_NUM_RANKS, else CPU_NUM_DEVICES, else 1"
    )
    parser.add_argument(
        "--compat",
        action="store_true",
        help="run a program written for torch_xla.distributed.fsdp: once, with ranks where it "
        "calls torch_xla.launch or xmp.spawn, and with this package under that name",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="program is a module's name")
    parser.add_argument("program", help="a Python file")
    rest = parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the program")
    rest.required = False  # else they are told as missing where the program is
    return parser


def _usage_error(what: str) -> int:
    print(f"xla_fsdp.launch: {what}", file=sys.stderr)
    return USAGE_EXIT_CODE


def _load(script: str) -> Program:
    path = os.path.abspath(script)  # as Python does: a program may change the directory
    code = compile(Path(script).read_bytes(), path, "exec", dont_inherit=True)
    return Program(code, path, script, str(Path(script).resolve().parent))


def _load_module(name: str) -> Program:
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    finally:
        sys.path.pop(0)
    get_code = getattr(spec and spec.loader, "get_code", None)
    code = get_code(spec.name) if spec is not None and get_code is not None else None
    if spec is None or code is None:
        raise ImportError(f"no module {name!r} that can be run")
    path = spec.origin or name
    return Program(code, path, path, str(Path.cwd()), spec)


_Mains = Mapping[int, ModuleType]
"""One ``__main__`` per rank, made where it is asked for."""


def _new_main(program: Program) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__ = program.path
    module.__spec__ = program.spec
    module.__package__ = program.spec.parent if program.spec else None
    return module


def _run_on_ranks(program: Program, mains: _Mains, num_ranks: int | None) -> None:
    def start_state(found: ProcessState, rank: int) -> ProcessState:
        return replace(found, main=mains[rank], random=RandomState.fresh())

    launch_script(_run_in_rank, (program, mains), num_ranks, start_state)


def _run_in_rank(rank: int, program: Program, mains: _Mains) -> None:
    _forget_absl_flags()
    exec(program.code, vars(mains[rank]))


def _forget_absl_flags() -> None:
    """Let no flag have the value that another rank's command line gave it: a flag that may be given
    repeatedly would collect the values of all ranks."""
    absl_flags = sys.modules.get("absl.flags")
    if absl_flags is not None:
        for name in absl_flags.FLAGS:
            absl_flags.FLAGS[name].unparse()
        absl_flags.FLAGS.unparse_flags()


def _run_once(program: Program, main_module: ModuleType, num_ranks: int | None) -> None:
    with root_logger_kept():
        from xla_fsdp import compat
        from xla_fsdp.xla.cpu_rank_patches import run_slot

        compat.install()
    first = RandomState.fresh()
    first.restore()

    def start_state(found: ProcessState, _: int) -> ProcessState:
        # A process that imports the program seeds where its main module does.
        return replace(found, random=found.random.or_fresh_where_equal(first))

    def start_ranks(fn: Any, args: Any) -> Any:
        return launch_script(fn, args, num_ranks, start_state)

    run_slot().start_ranks = start_ranks
    try:
        exec(program.code, vars(main_module))
    except RankError:
        raise
    except Exception as error:  # the program may raise anything
        raise _ProgramError from error


class _ProgramError(Exception):
    """The program raised an exception, the cause of this one, outside of ranks."""


@contextlib.contextmanager
def _as_main(program: Program, args: Sequence[str], module: ModuleType) -> Iterator[None]:
    """Set up ``sys`` inside the block as Python does for a main program."""
    argv, path, main_module = sys.argv, sys.path, sys.modules["__main__"]
    sys.argv, sys.path = [program.called, *args], [program.import_from, *path]
    sys.modules["__main__"] = module
    try:
        yield
    finally:
        sys.argv, sys.path, sys.modules["__main__"] = argv, path, main_module


def _print_cause(error: Exception, program: Program) -> None:
    """Print the cause with its traceback, without the frames that only start the program."""
    cause = error.__cause__
    if cause is None:
        return
    start = cause.__traceback__
    while start is not None and start.tb_frame.f_code is not program.code:
        start = start.tb_next
    shown = cause.with_traceback(start or cause.__traceback__)
    print("".join(traceback.format_exception(shown)), file=sys.stderr)


class _CallableModule(ModuleType):
    """A module that can be called like the function ``xla_fsdp.launch``.

    Importing this module replaces the package's attribute ``launch``, the function.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return launch(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    sys.exit(main())
