"""Styles that redistribute the inputs or outputs of a module.

Names, arguments and defaults are those of ``torch.distributed.tensor.parallel``. Inputs and outputs
are always local tensors, so ``use_local_output`` and ``use_local_input`` have no effect. A tensor
whose layout is None is not changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Placement

from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.tensor_parallel.mappings import redistribute, redistribute_problems
from xla_fsdp.tensor_parallel.parallel_module import Forward, ParallelStyle

Layouts = Placement | Sequence[Placement | None] | None

# By index or name of a tensor: its layout, and the desired layout.
Changes = dict[int | str, tuple[Placement, Placement]]


class PrepareModuleInput(ParallelStyle):
    """Change the layouts of a module's inputs.

    Args:
        input_layouts: layouts of all positional arguments, or of the only one; None for an argument
            that is not changed.
        desired_input_layouts: desired layouts of the positional arguments.
        input_kwarg_layouts: layouts of keyword arguments, by name.
        desired_input_kwarg_layouts: desired layouts of keyword arguments, by name.
        use_local_output: has no effect; inputs are always local tensors.

    Raises:
        ValueError: if layouts and desired layouts differ in number or names.
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
            *_length_problems("input_layouts", self.input_layouts, self.desired_input_layouts),
            *_name_problems(self.input_kwarg_layouts, self.desired_input_kwarg_layouts),
        )
        by_name = {
            name: (old, self.desired_input_kwarg_layouts[name])
            for name, old in self.input_kwarg_layouts.items()
        }
        by_index = _by_index(self.input_layouts, self.desired_input_layouts)
        self._changes = _without_none({**by_index, **by_name})

    def find_problems(self, module: nn.Module) -> Iterator[str]:
        for key, (old, new) in self._changes.items():
            yield from redistribute_problems(old, new, f"its input {key}")

    def run(
        self, module: nn.Module, forward: Forward, args: Any, kwargs: Any, axis: AxisComm, name: str
    ) -> Any:
        expected = None if self.desired_input_layouts is None else self.input_layouts
        if expected is not None and len(args) != len(expected):
            raise ValueError(
                f"{name} was called with {len(args)} positional arguments, but input_layouts "
                f"has {len(expected)}; give one for each, None for those to leave alone"
            )
        what = f"{name}: its input"
        args = [_changed(self._changes, key, arg, axis, what) for key, arg in enumerate(args)]
        kwargs = {
            key: _changed(self._changes, key, value, axis, what) for key, value in kwargs.items()
        }
        return forward(*args, **kwargs)


class PrepareModuleOutput(ParallelStyle):
    """Change the layouts of a module's outputs.

    Args:
        output_layouts: layouts of all outputs, or of the only one; None for an output that is not
            changed.
        desired_output_layouts: desired layouts of the outputs.
        use_local_output: has no effect; outputs are always local tensors.

    Raises:
        ValueError: if layouts and desired layouts differ in number.
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
            *_length_problems("output_layouts", self.output_layouts, self.desired_output_layouts)
        )
        self._changes = _without_none(_by_index(self.output_layouts, self.desired_output_layouts))

    def find_problems(self, module: nn.Module) -> Iterator[str]:
        for number, (old, new) in self._changes.items():
            yield from redistribute_problems(old, new, f"its output {number}")

    def run(
        self, module: nn.Module, forward: Forward, args: Any, kwargs: Any, axis: AxisComm, name: str
    ) -> Any:
        result = forward(*args, **kwargs)
        outputs = result if isinstance(result, tuple) else (result,)
        if len(outputs) != len(self.output_layouts):
            raise ValueError(
                f"{name} returned {len(outputs)} outputs, but output_layouts has "
                f"{len(self.output_layouts)}; give one for each, None for those to leave alone"
            )
        what = f"{name}: its output"
        new = tuple(
            _changed(self._changes, key, out, axis, what) for key, out in enumerate(outputs)
        )
        return new if isinstance(result, tuple) else new[0]


class PrepareModuleInputOutput(ParallelStyle):
    """``PrepareModuleInput`` and ``PrepareModuleOutput`` for one module, with their arguments;
    ``use_local_input`` is the ``use_local_output`` of ``PrepareModuleInput``.

    Raises:
        ValueError: if layouts and desired layouts differ in number or names.
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
        yield from self.prepare_module_input.find_problems(module)
        yield from self.prepare_module_output.find_problems(module)

    def run(
        self, module: nn.Module, forward: Forward, args: Any, kwargs: Any, axis: AxisComm, name: str
    ) -> Any:
        def prepared(*args: Any, **kwargs: Any) -> Any:
            return self.prepare_module_input.run(module, forward, args, kwargs, axis, name)

        return self.prepare_module_output.run(module, prepared, args, kwargs, axis, name)

    def __repr__(self) -> str:
        return (
            f"PrepareModuleInputOutput({self.prepare_module_input}, {self.prepare_module_output})"
        )


def _changed(changes: Changes, key: int | str, value: Any, axis: AxisComm, what: str) -> Any:
    if key not in changes:
        return value
    old, new = changes[key]
    if not isinstance(value, Tensor):
        found = type(value).__name__
        raise TypeError(f"{what} {key} has the layout {old}, but is a {found}; give None")
    return redistribute(value, old, new, axis, f"{what} {key}")


def _several(layouts: Layouts) -> tuple[Placement | None, ...] | None:
    if layouts is None:
        return None
    return (layouts,) if isinstance(layouts, Placement) else tuple(layouts)


def _by_index(given: Sequence[Any] | None, desired: Sequence[Any] | None) -> dict[int, Any]:
    return dict(enumerate(zip(given or (), desired or (), strict=False)))


def _without_none(changes: Mapping[Any, Any]) -> Changes:
    return {key: change for key, change in changes.items() if None not in change}


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


def _refuse(*problems: str) -> None:
    if problems:
        raise ValueError("; ".join(problems))
