"""Styles that change the layout of what goes into a module, or comes out of it.

Names, arguments and defaults are those of ``torch.distributed.tensor.parallel``.
Always true: tensors stay ordinary local ones, so ``use_local_output`` and ``use_local_input``
change nothing; a layout of None leaves an argument alone. What several cut layers inside take is
gathered once, and its gradient reduced once, whatever else takes it (see ``uses``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Placement

from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.tensor_parallel.layouts import change_problems, changed
from xla_fsdp.tensor_parallel.parallel_module import Forward, Step
from xla_fsdp.tensor_parallel.style import ParallelStyle

Layouts = Placement | Sequence[Placement | None] | None

Changes = tuple[tuple[Any, Any], ...]

"""For each of several tensors: the layout that it has, and the one that it is to have."""


class PrepareModuleInput(ParallelStyle):
    """Change the layouts of a module's inputs.

    Args:
        input_layouts: of the positional arguments, one for each, None for those to leave alone; or
            of the only one.
        desired_input_layouts: that they are to have.
        input_kwarg_layouts: of keyword arguments, by name.
        desired_input_kwarg_layouts: that these are to have.
        use_local_output: accepted; inputs are local tensors in any case.

    Raises:
        ValueError: if the two do not fit each other.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _several(input_layouts)
        self.desired_input_layouts = _several(desired_input_layouts)
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        _refuse(
            [
                *_length_problems("input_layouts", self.input_layouts, self.desired_input_layouts),
                *_name_problems(self.input_kwarg_layouts, self.desired_input_kwarg_layouts),
            ]
        )

    def find_problems(self, module: nn.Module) -> Iterator[str]:
        """See ``ParallelStyle``."""
        for number, (old, new) in enumerate(self._changes or ()):
            yield from _problems(old, new, f"its input {number}")
        for name, old in self.input_kwarg_layouts.items():
            yield from _problems(old, self.desired_input_kwarg_layouts[name], f"its input {name}")

    def steps(self, name: str, module: nn.Module, axis: AxisComm) -> Sequence[Step]:
        """See ``ParallelStyle``."""
        by_name = {
            each: (old, self.desired_input_kwarg_layouts[each])
            for each, old in self.input_kwarg_layouts.items()
        }
        return [_Inputs(name, axis, self._changes, by_name)]

    @property
    def _changes(self) -> Changes | None:
        if self.input_layouts is None or self.desired_input_layouts is None:
            return None
        return tuple(zip(self.input_layouts, self.desired_input_layouts, strict=True))

    def __repr__(self) -> str:
        return (
            f"PrepareModuleInput(input_layouts={self.input_layouts}, "
            f"desired_input_layouts={self.desired_input_layouts}, "
            f"input_kwarg_layouts={self.input_kwarg_layouts}, "
            f"desired_input_kwarg_layouts={self.desired_input_kwarg_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class PrepareModuleOutput(ParallelStyle):
    """Change the layouts of a module's outputs.

    Args:
        output_layouts: of the outputs, one for each, None for those to leave alone; or of the only
            one.
        desired_output_layouts: that they are to have.
        use_local_output: accepted; outputs are local tensors in any case.

    Raises:
        ValueError: if the two do not fit each other.
    """

    def __init__(
        self,
        *,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.output_layouts = _several(output_layouts) or ()
        self.desired_output_layouts = _several(desired_output_layouts) or ()
        self.use_local_output = use_local_output
        _refuse(
            list(
                _length_problems("output_layouts", self.output_layouts, self.desired_output_layouts)
            )
        )

    def find_problems(self, module: nn.Module) -> Iterator[str]:
        """See ``ParallelStyle``."""
        for number, (old, new) in enumerate(self._changes):
            yield from _problems(old, new, f"its output {number}")

    def steps(self, name: str, module: nn.Module, axis: AxisComm) -> Sequence[Step]:
        """See ``ParallelStyle``."""
        return [_Outputs(name, axis, self._changes)]

    @property
    def _changes(self) -> Changes:
        return tuple(zip(self.output_layouts, self.desired_output_layouts, strict=True))

    def __repr__(self) -> str:
        return (
            f"PrepareModuleOutput(output_layouts={self.output_layouts}, "
            f"desired_output_layouts={self.desired_output_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class PrepareModuleInputOutput(ParallelStyle):
    """``PrepareModuleInput`` and ``PrepareModuleOutput`` of one module.

    Args:
        input_layouts: and all others: see there; ``use_local_input`` is the ``use_local_output`` of
            the first.

    Raises:
        ValueError: if layouts do not fit each other.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def find_problems(self, module: nn.Module) -> Iterator[str]:
        """See ``ParallelStyle``."""
        yield from self.prepare_module_input.find_problems(module)
        yield from self.prepare_module_output.find_problems(module)

    def steps(self, name: str, module: nn.Module, axis: AxisComm) -> Sequence[Step]:
        """See ``ParallelStyle``."""
        both = (self.prepare_module_input, self.prepare_module_output)
        return [step for style in both for step in style.steps(name, module, axis)]

    def __repr__(self) -> str:
        return (
            f"PrepareModuleInputOutput({self.prepare_module_input}, {self.prepare_module_output})"
        )


# ---------------------------------------------------------------- steps


@dataclass(frozen=True)
class _Inputs:
    name: str
    axis: AxisComm
    changes: Changes | None
    by_name: Mapping[str, tuple[Any, Any]]

    def __call__(self, module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
        if self.changes is not None and len(args) != len(self.changes):
            raise ValueError(
                f"{self.name} was called with {len(args)} positional arguments, but input_layouts "
                f"has {len(self.changes)}; give one for each, None for those to leave alone"
            )
        where = f"{self.name}: its input"
        for number, change in enumerate(self.changes or ()):
            new = _changed(args[number], change, self.axis, f"{where} {number}")
            args = (*args[:number], new, *args[number + 1 :])
        kwargs = {
            name: _changed(
                value, self.by_name.get(name, (None, None)), self.axis, f"{where} {name}"
            )
            for name, value in kwargs.items()
        }
        return forward(*args, **kwargs)


@dataclass(frozen=True)
class _Outputs:
    name: str
    axis: AxisComm
    changes: Changes

    def __call__(self, module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        outputs = result if isinstance(result, tuple) else (result,)
        if len(outputs) != len(self.changes):
            raise ValueError(
                f"{self.name} returned {len(outputs)} outputs, but output_layouts has "
                f"{len(self.changes)}; give one for each, None for those to leave alone"
            )
        new = tuple(
            _changed(out, change, self.axis, f"{self.name}: its output {number}")
            for number, (out, change) in enumerate(zip(outputs, self.changes, strict=True))
        )
        return new if isinstance(result, tuple) else new[0]


def _changed(value: Any, change: tuple[Any, Any], axis: AxisComm, what: str) -> Any:
    old, new = change
    if old is None or new is None:
        return value
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} has the layout {old}, but is a {type(value).__name__}; give None")
    return changed(value, old, new, axis, what)


# ---------------------------------------------------------------- checks


def _several(layouts: Layouts) -> tuple[Placement | None, ...] | None:
    if layouts is None or isinstance(layouts, Placement):
        return None if layouts is None else (layouts,)
    return tuple(layouts)


def _problems(old: Any, new: Any, what: str) -> Iterator[str]:
    if old is not None and new is not None:
        yield from change_problems(old, new, what)


def _length_problems(
    what: str, given: Sequence[Any] | None, desired: Sequence[Any] | None
) -> Iterator[str]:
    if given is not None and (desired is None or len(given) != len(desired)):
        found = "none" if desired is None else len(desired)
        yield f"{what} has {len(given)} entries and desired_{what} {found}; give each a pair"


def _name_problems(given: Mapping[str, Any], desired: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*given} ^ {*desired}):
        where = "input_kwarg_layouts" if name in desired else "desired_input_kwarg_layouts"
        yield f"{name} is missing in {where}; give each keyword both layouts"


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ValueError("; ".join(problems))
