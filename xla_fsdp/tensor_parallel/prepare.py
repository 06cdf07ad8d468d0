"""Styles that redistribute what goes into a module, or comes out of it.

Names, arguments and defaults are those of ``torch.distributed.tensor.parallel``. Inputs and outputs
are ordinary local tensors, so ``use_local_output`` and ``use_local_input`` change nothing; a layout
of None leaves an argument alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Placement

from xla_fsdp.distributed.mesh_axis import AxisComm
from xla_fsdp.tensor_parallel.parallel_module import Forward, ParallelStyle
from xla_fsdp.tensor_parallel.redistribute import redistribute, redistribute_problems

Layouts = Placement | Sequence[Placement | None] | None

# The layout that a tensor has, and the one that it is to have.
Change = tuple[Any, Any]


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
            *_length_problems("input_layouts", self.input_layouts, self.desired_input_layouts),
            *_name_problems(self.input_kwarg_layouts, self.desired_input_kwarg_layouts),
        )

    def find_problems(self, module: nn.Module) -> Iterator[str]:
        for number, change in enumerate(self._changes or ()):
            yield from _problems(change, f"its input {number}")
        for name in self.input_kwarg_layouts:
            yield from _problems(self._kwarg_change(name), f"its input {name}")

    def run(
        self, module: nn.Module, forward: Forward, args: Any, kwargs: Any, axis: AxisComm, name: str
    ) -> Any:
        if self._changes is not None:
            if len(args) != len(self._changes):
                raise ValueError(
                    f"{name} was called with {len(args)} positional arguments, but input_layouts "
                    f"has {len(self._changes)}; give one for each, None for those to leave alone"
                )
            args = [
                _changed(arg, change, axis, f"{name}: its input {number}")
                for number, (arg, change) in enumerate(zip(args, self._changes, strict=True))
            ]
        kwargs = {
            key: _changed(value, self._kwarg_change(key), axis, f"{name}: its input {key}")
            for key, value in kwargs.items()
        }
        return forward(*args, **kwargs)

    @property
    def _changes(self) -> tuple[Change, ...] | None:
        if self.input_layouts is None or self.desired_input_layouts is None:
            return None
        return tuple(zip(self.input_layouts, self.desired_input_layouts, strict=True))

    def _kwarg_change(self, name: str) -> Change:
        return self.input_kwarg_layouts.get(name), self.desired_input_kwarg_layouts.get(name)


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
            *_length_problems("output_layouts", self.output_layouts, self.desired_output_layouts)
        )

    def find_problems(self, module: nn.Module) -> Iterator[str]:
        for number, change in enumerate(self._changes):
            yield from _problems(change, f"its output {number}")

    def run(
        self, module: nn.Module, forward: Forward, args: Any, kwargs: Any, axis: AxisComm, name: str
    ) -> Any:
        result = forward(*args, **kwargs)
        outputs = result if isinstance(result, tuple) else (result,)
        if len(outputs) != len(self._changes):
            raise ValueError(
                f"{name} returned {len(outputs)} outputs, but output_layouts has "
                f"{len(self._changes)}; give one for each, None for those to leave alone"
            )
        new = tuple(
            _changed(out, change, axis, f"{name}: its output {number}")
            for number, (out, change) in enumerate(zip(outputs, self._changes, strict=True))
        )
        return new if isinstance(result, tuple) else new[0]

    @property
    def _changes(self) -> tuple[Change, ...]:
        return tuple(zip(self.output_layouts, self.desired_output_layouts, strict=True))


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


def _changed(value: Any, change: Change, axis: AxisComm, what: str) -> Any:
    old, new = change
    if old is None or new is None:
        return value
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} has the layout {old}, but is a {type(value).__name__}; give None")
    return redistribute(value, old, new, axis, what)


def _several(layouts: Layouts) -> tuple[Placement | None, ...] | None:
    if layouts is None:
        return None
    return (layouts,) if isinstance(layouts, Placement) else tuple(layouts)


def _problems(change: Change, what: str) -> Iterator[str]:
    old, new = change
    if old is not None and new is not None:
        yield from redistribute_problems(old, new, what)


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
