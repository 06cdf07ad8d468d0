"""Compile a training step for a TPU slice ahead of time, and report its memory, traffic and time.

``preflight(build_step, topology="v5e:4x4", ...)`` returns a ``Report``; the same on the command
line is ``python -m xla_fsdp.preflight module:function``. ``fastest`` chooses options by it.
``tune`` searches for the fastest recipe, mesh and batch.
``rehearse(build_step, topology="v5e:2x2", steps=3)`` makes steps on virtual chips, as ``--run 3``
does. Importing this loads no torch_xla.
"""

from __future__ import annotations

from xla_fsdp.preflight.api import PreflightWarning, fastest, preflight
from xla_fsdp.preflight.compile.compiler import CompileError
from xla_fsdp.preflight.read.report import Report
from xla_fsdp.preflight.rehearse.rehearsal import Rehearsal, RehearsalError, rehearse
from xla_fsdp.preflight.search.tuned import Candidate, Tuned
from xla_fsdp.preflight.search.tuning import tune

__all__ = [
    "Candidate",
    "CompileError",
    "PreflightWarning",
    "Rehearsal",
    "RehearsalError",
    "Report",
    "Tuned",
    "fastest",
    "preflight",
    "rehearse",
    "tune",
]
