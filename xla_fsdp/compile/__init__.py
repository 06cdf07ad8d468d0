"""Replaying a step that was traced before."""

from xla_fsdp.compile.seen import CompileStepError
from xla_fsdp.compile.step import CompiledStep, compile_step

__all__ = ["CompileStepError", "CompiledStep", "compile_step"]
