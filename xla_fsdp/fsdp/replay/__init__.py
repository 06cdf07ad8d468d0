"""Replaying a step that was traced before."""

from xla_fsdp.fsdp.replay.seen import CompileStepError
from xla_fsdp.fsdp.replay.step import CompiledStep, compile_step

__all__ = ["CompileStepError", "CompiledStep", "compile_step"]
