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
        self._changes = _Changes(
            "input",
            {**dict(enumerate(self.input_layouts)), **self.input_kwarg_layouts},
            {**dict(enumerate(self.desired_input_layouts)), **self.desired_input_kwarg_layouts},
        )

    def find_problems(self, module: nn.Module) -> Iterator[str]:
        return self._changes.problems()

    def run(
        self, module: nn.Module, forward: Forward, args: Any, kwargs: Any, axis: AxisComm, name: str
    ) -> Any:
        if self.input_layouts and len(args) != len(self.input_layouts):
            raise ValueError(
                f"{name} was called with {len(args)} positional arguments, but input_layouts "
                f"has {len(self.input_layouts)}; give one for each, None for those to leave alone"
            )
        args = self._changes.made(dict(enumerate(args)), axis, name).values()
        return forward(*args, **self._changes.made(kwargs, axis, name))


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
        self.output_layouts = _several(output_layouts)
        self.desired_output_layouts = _several(desired_output_layouts)
        self.use_local_output = use_local_output
        layouts, desired = self.output_layouts, self.desired_output_layouts
        self._changes = _Changes("output", dict(enumerate(layouts)), dict(enumerate(desired)))

    def find_problems(self, module: nn.Module) -> Iterator[str]:
        return self._changes.problems()

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
        new = tuple(self._changes.made(dict(enumerate(outputs)), axis, name).values())
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


class _Changes:
    """Layouts, and those that are desired, by the index or name of a tensor.

    Raises:
        ValueError: if one of both is missing.
    """

    def __init__(self, what: str, given: Mapping[Any, Any], desired: Mapping[Any, Any]) -> None:
        if lone := sorted(map(str, given.keys() ^ desired.keys())):
            raise ValueError(
                f"{what}_layouts are given for {[*given]}, and desired_{what}_layouts for "
                f"{[*desired]}; give {', '.join(lone)} both, or neither"
            )
        self._what = what
        pairs = {key: (old, desired[key]) for key, old in given.items()}
        self._pairs = {key: each for key, each in pairs.items() if None not in each}

    def problems(self) -> Iterator[str]:
        for key, (old, new) in self._pairs.items():
            yield from redistribute_problems(old, new, f"its {self._what} {key}")

    def made(self, values: Mapping[Any, Any], axis: AxisComm, name: str) -> dict[Any, Any]:
        """Return the values with their desired layouts."""
        return {key: self._changed(key, each, axis, name) for key, each in values.items()}

    def _changed(self, key: int | str, value: Any, axis: AxisComm, name: str) -> Any:
        if key not in self._pairs:
            return value
        old, new = self._pairs[key]
        what = f"{name}: its {self._what} {key}"
        if not isinstance(value, Tensor):
            found = type(value).__name__
            raise TypeError(f"{what} has the layout {old}, but is a {found}; give None")
        return redistribute(value, old, new, axis, what)


def _several(layouts: Layouts) -> tuple[Placement | None, ...]:
    return (layouts,) if isinstance(layouts, Placement) else tuple(layouts or ())
