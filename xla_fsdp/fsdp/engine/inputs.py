"""Run a forward on copies of its arguments' tensors, unnoticed by the caller.

A unit computes with copies of its inputs, behind a barrier and in its compute dtype; an outermost
one moves inputs from host memory to the device, as torch's FSDP does. The caller still sees what
the forward does to the arguments, and the forward which of them share memory. What it returns still
shares memory with the arguments, with what else it returns and with what the module keeps.

Invariants: the caller's containers are never copied. While the forward runs they hold the copies;
after it, the caller's own tensors and what the forward has put there. A copy that was changed in
place is written to the tensor it was made from, if that is on the device. An output that is a copy,
or a view of one, becomes the caller's tensor or the same view of it, unless the copy has another
dtype or was moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xla_fsdp.distributed.pytree import (
    Contents,
    Substitutes,
    copied,
    replace_entries,
    replaced,
    substitutes,
    tensors_in,
)


class Inputs:
    """The arguments of one forward.

    Attributes:
        sources: the tensors to copy: those of the arguments, or what several of them are views of.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        self._contents = Contents.of((*args, *kwargs.values()))
        self.sources, self._views = _find_views(self._contents.tensors)

    def call(self, forward: Callable[..., Any], copies: Sequence[Tensor]) -> Outputs:
        """Run ``forward`` with copies of ``sources``.

        Raises:
            ValueError: if it reshaped an argument in place, or changed one of several that share
                memory in a way that a view does not.
        """
        changes = Changes(self.sources, copies)
        own, lent = self._contents.tensors, _views_on(self._views, copies)
        by = substitutes(own, lent)
        # The caller's containers hold the copies meanwhile; ``back`` has what these replace.
        back: dict[int, tuple[Any, Any]] = {}
        for container in self._contents.containers:
            back.update(replace_entries(container, by))
        args = [replaced(value, by) for value in self._args]
        kwargs = {name: replaced(value, by) for name, value in self._kwargs.items()}
        try:
            result = forward(*args, **kwargs)
        except BaseException:
            changes.write(changes.unwritten(changes.changed()))
            raise
        finally:
            containers = self._take_back(back, own, lent)
            _refuse_reshaped(lent, own)
        outputs = Outputs(result, containers, changes, own, lent)
        changes.refuse_lost(outputs.changed)
        return outputs

    def call_on_own(self, forward: Callable[..., Any]) -> Outputs:
        """Run ``forward`` with the caller's tensors."""
        changes = Changes(self.sources, self.sources)
        result = forward(*self._args, **self._kwargs)
        own = self._contents.tensors
        return Outputs(result, self._reached(), changes, own, own)

    def form(self) -> InputForm:
        """Return the arguments as they are now, without their tensors."""
        slots = [object() for _ in self._contents.tensors]
        by = substitutes(self._contents.tensors, slots)
        values = (*self._args, *self._kwargs.values())
        tree = copied(values, self._contents.containers, by)
        return InputForm(tree, tuple(self._kwargs), slots, self._views)

    def _take_back(
        self, back: Substitutes, own: Sequence[Tensor], lent: Sequence[Tensor]
    ) -> list[Any]:
        """Put the caller's entries back, wherever the forward has moved them, and the caller's own
        tensors wherever it has put lent ones; return all containers that the caller reaches."""
        containers = self._reached()
        if containers:
            back = {**back, **substitutes(lent, own)}
        for container in containers:
            replace_entries(container, back)
        return containers

    def _reached(self) -> list[Any]:
        if not self._contents.containers:
            return []
        return Contents.of((*self._args, *self._kwargs.values())).containers


@dataclass(frozen=True)
class InputForm:
    """Arguments without tensors."""

    _tree: Any  # with an object of ``_slots`` for each tensor
    _names: tuple[str, ...]
    _slots: Sequence[object]
    _views: Sequence[View]

    def filled(self, copies: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) with copies of the sources, in containers of their own."""
        by = substitutes(self._slots, _views_on(self._views, copies))
        values = copied(self._tree, Contents.of(self._tree).containers, by)
        num_args = len(values) - len(self._names)
        return values[:num_args], dict(zip(self._names, values[num_args:], strict=True))


class Outputs:
    """What a forward has returned, and has put into the ``containers`` of its caller. The caller's
    ``own`` tensors are no outputs, nor what the forward was ``lent`` in their place.

    Attributes:
        tensors: those in memory of their own, and the changed copies.
        changed: numbers of the sources that were changed in place.
    """

    def __init__(
        self,
        result: Any,
        containers: list[Any],
        changes: Changes,
        own: Sequence[Tensor],
        lent: Sequence[Tensor],
    ) -> None:
        self._result, self._containers, self._changes = result, containers, changes
        found = Contents.of((result, *containers))
        kept = {id(each) for each in containers}
        self._copied = [each for each in found.containers if id(each) not in kept]
        self._found = found.tensors
        back = {id(tensor) for tensor in found.tensors}
        pairs = [pair for pair in zip(lent, own, strict=True) if id(pair[0]) in back]
        self._own = [pair for pair in pairs if _can_be_returned(*pair)]
        mine = {id(tensor) for tensor in own} | {id(copy) for copy, _ in self._own}
        others = [(each, changes.view(each)) for each in found.tensors if id(each) not in mine]
        self._new = [tensor for tensor, view in others if view is None]
        self._shared = [(tensor, view) for tensor, view in others if view is not None]
        self.changed = changes.changed()
        self.tensors = [*self._new, *changes.unwritten(self.changed)]

    def returned(self) -> list[int]:
        """Return the numbers of the sources whose memory the caller gets back."""
        found = {id(base_of(tensor)) for tensor in self._found}
        return [at for at, base in enumerate(self._changes.bases) if id(base) in found]

    def replaced(
        self, new: Sequence[Tensor], cast: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> Any:
        """Return the result with ``new`` in place of ``tensors``, also in the caller's containers
        and tensors; ``cast`` what the forward returned, and put into containers. Other containers
        in the result are copied where that changes them, as the module may keep them."""
        num_new = len(self._new)
        self._changes.write(new[num_new:])
        by = substitutes(self._new, [cast(tensor) for tensor in new[:num_new]])
        for tensor, view in self._shared:
            by[id(tensor)] = tensor, cast(view.on(self._changes.owner(view.source)))
        for container in self._containers:
            replace_entries(container, by)
        for copy, tensor in self._own:
            by[id(copy)] = copy, cast(tensor)
        by = {number: pair for number, pair in by.items() if pair[0] is not pair[1]}
        changed = [
            each for each in self._copied if any(id(tensor) in by for tensor in tensors_in(each))
        ]
        return copied(self._result, changed, by)


# ---------------------------------------------------------------- memory that tensors share


@dataclass(frozen=True)
class View:
    """How to make a tensor from the copy of a source."""

    source: int  # its number
    recipe: Tensor | None = None  # a view of it, whose view ops to repeat; None for the copy itself
    connected: bool = True  # whether the view has the source's graph

    def on(self, copy: Tensor) -> Tensor:
        """Return the view of a copy of its source."""
        if self.recipe is None:
            return copy
        with torch.set_grad_enabled(self.connected):
            # The strides of an XLA tensor do not describe its views; the recorded view ops do.
            return self.recipe._view_func_unsafe(copy)


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor that ``tensor`` is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def _views_on(views: Sequence[View], copies: Sequence[Tensor]) -> list[Tensor]:
    return [view.on(copies[view.source]) for view in views]


def _shared_views(group: Sequence[Tensor]) -> list[Tensor]:
    """Return those of several tensors with the same base that are views of shared memory: ``x.t()``
    of ``x`` and ``x.t()``, or two views of all of ``x``. Separate parts (``q, k, v = x.chunk(3)``)
    are not."""
    base = base_of(group[0])
    views = [tensor for tensor in group if tensor is not base and _can_be_made(tensor)]
    # Views that have more elements than the base must share some; others are usually chunks.
    shares = any(tensor is base for tensor in group)
    return views if shares or sum(view.numel() for view in views) > base.numel() else []


def _find_views(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[View]]:
    """Return sources, and how to make the tensors, all different, from them."""
    bases = [base_of(tensor) for tensor in tensors]
    groups: dict[int, list[Tensor]] = {}
    for base, tensor in zip(bases, tensors, strict=True):
        groups.setdefault(id(base), []).append(tensor)
    made = {id(view) for group in groups.values() if group[1:] for view in _shared_views(group)}
    origins = [
        base if id(tensor) in made else tensor for base, tensor in zip(bases, tensors, strict=True)
    ]
    sources = list({id(origin): origin for origin in origins}.values())
    number = {id(source): at for at, source in enumerate(sources)}
    return sources, [
        View(number[id(origin)])
        if origin is tensor
        else View(number[id(origin)], tensor, _is_connected(tensor, origin))
        for origin, tensor in zip(origins, tensors, strict=True)
    ]


def _is_connected(view: Tensor, base: Tensor) -> bool:
    # A view made without grad mode has requires_grad like its base, but no graph.
    return view.grad_fn is not None or not base.requires_grad


def _can_be_made(view: Tensor) -> bool:
    """Return whether the same view of a copy of the base, maybe in another dtype, has the gradient
    that ``view`` has."""
    base = base_of(view)
    return view.dtype == base.dtype and not _is_hooked(view) and _is_plain(view, base)


def _is_plain(view: Tensor, base: Tensor) -> bool:
    """Return whether the graph from ``base`` to ``view``, if there is one, has view ops only, and
    no function of the user's with another gradient."""
    if view.requires_grad and not base.requires_grad:
        return False
    node: Any = view.grad_fn
    if node is None:
        return True
    first = torch.autograd.graph.get_gradient_edge(base).node
    while node is not first:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return False
        if len(node.next_functions) != 1 or (node := node.next_functions[0][0]) is None:
            return False
    return True


def _is_hooked(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks) or (tensor.requires_grad and tensor.retains_grad)


def _can_be_returned(copy: Tensor, tensor: Tensor) -> bool:
    """Return whether a caller may get its own tensor in place of a copy of it."""
    if copy is tensor:
        return True
    is_like = copy.dtype == tensor.dtype and not _is_moved(copy, tensor)
    return is_like and not _is_hooked(copy)


def _is_moved(copy: Tensor, tensor: Tensor) -> bool:
    """Return whether ``copy`` was made of an argument in host memory. It is another tensor for the
    caller, as that of ``tensor.to(device)``: changes of it stay with it."""
    return copy.device != tensor.device


# ---------------------------------------------------------------- changes in place


def version_of(tensor: Tensor) -> int:
    """Return how often ``tensor`` was changed in place; 0 in inference mode, which counts none."""
    return 0 if tensor.is_inference() else tensor._version


def changes_of(tensor: Tensor) -> int:
    """Return how often the memory of ``tensor`` was changed in place, by whatever tensor."""
    # On the device not the version, which does not count changes of ``tensor.data``, nor any in
    # inference mode. Tensors made under a dispatch mode (preflight counts FLOPs by one) have no
    # other count.
    if torch._is_functional_tensor(tensor):
        return torch._functionalize_mutation_counter(tensor)
    return version_of(tensor)


def num_changes(tensors: Sequence[Tensor]) -> list[int]:
    """Return ``changes_of`` each tensor."""
    return list(map(changes_of, tensors))


def changed_since(before: Sequence[int], tensors: Sequence[Tensor]) -> list[int]:
    """Return the indices of the tensors that were changed in place since ``num_changes`` of them
    returned ``before``."""
    pairs = zip(before, num_changes(tensors), strict=True)
    return [at for at, (old, new) in enumerate(pairs) if new > old]


class Changes:
    """Changes in place, from now on, of copies of ``sources``, the caller's tensors. Some
    copies may be the sources themselves."""

    def __init__(self, sources: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        self._sources, self._copies = sources, copies
        self._counts = num_changes(copies)
        # Views get a new node with every change of their base, those without grad mode too.
        self.bases = [base_of(copy) for copy in copies]
        self._graphs = [base.grad_fn for base in self.bases]
        self._targets: list[Tensor] = []  # to write to

    def changed(self) -> list[int]:
        """Return the numbers of the changed tensors."""
        return changed_since(self._counts, self._copies)

    def unwritten(self, changed: Sequence[int]) -> list[Tensor]:
        """Make those changes to the caller's tensors of which autograd does not know; return the
        other changed copies, for ``write``."""
        known: dict[int, tuple[Tensor, Tensor]] = {}
        for at in changed:
            source, copy, base = self._sources[at], self._copies[at], self.bases[at]
            if _is_moved(copy, source):
                continue
            if base.grad_fn is not self._graphs[at]:
                if copy is not source or copy.device.type == "xla":
                    known[id(base)] = base, self.owner(at)
            elif copy is not source:
                # Without grad mode leaves can be changed too.
                with torch.no_grad():
                    source.copy_(copy)
        self._targets = [target for _, target in known.values()]
        return [base for base, _ in known.values()]

    def write(self, values: Sequence[Tensor]) -> None:
        """Write these values of the tensors that ``unwritten`` has returned."""
        for target, value in zip(self._targets, values, strict=True):
            if value is not target:
                target.copy_(value)

    def view(self, output: Tensor) -> View | None:
        """Return how to make an output from the caller's tensor; None if it shares no memory with
        the copies, or does so in a way that cannot be repeated."""
        base = base_of(output)
        for at, each in enumerate(self.bases):
            if each is base and _can_be_returned(self._copies[at], self._sources[at]):
                if output is base:
                    return View(at)
                if _can_be_made(output):
                    connected = torch.is_grad_enabled() and _is_connected(output, base)
                    return View(at, output, connected)
        return None

    def owner(self, at: int) -> Tensor:
        """Return the caller's tensor that a copy, or its base, was made from."""
        copy, source = self._copies[at], self._sources[at]
        return self.bases[at] if copy is source else source

    def refuse_lost(self, changed: Sequence[int]) -> None:
        """Raise ValueError if a tensor did not follow the change of one that it shares memory
        with."""
        for at in changed:
            for other in range(len(self._sources)):
                if other != at and not self._follows(other, at):
                    shapes = [list(self._sources[each].shape) for each in (at, other)]
                    raise ValueError(
                        f"an argument of shape {shapes[0]} was changed in place in the forward of "
                        f"an FSDP unit, and another one of shape {shapes[1]} shares memory with it "
                        f"in a way that the unit cannot repeat (by detach() or another dtype, "
                        f"say), so that it did not change. Pass one of them, and make the other "
                        f"from it inside of the forward; or pass a clone"
                    )

    def _follows(self, other: int, changed: int) -> bool:
        if all(self._sources[at] is self._copies[at] for at in (other, changed)):
            return True
        sources = self._sources[other], self._sources[changed]
        return not torch._C._is_alias_of(*sources) or _are_disjoint(*sources)  # type: ignore[attr-defined]


def _are_disjoint(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are views of the same tensor and surely share no element of it."""
    base = a._base
    if base is None or b._base is not base or not a.dtype == b.dtype == base.dtype:
        return False
    mask = torch.zeros(base.shape, dtype=torch.bool)
    a._view_func_unsafe(mask).fill_(True)
    return not b._view_func_unsafe(mask).any()


def _refuse_reshaped(lent: Sequence[Tensor], own: Sequence[Tensor]) -> None:
    for copy, tensor in zip(lent, own, strict=True):
        if copy is not tensor and not _is_moved(copy, tensor) and _is_reshaped(copy, tensor):
            raise ValueError(
                f"an argument of shape {list(tensor.shape)} was reshaped in place in the forward "
                f"of an FSDP unit (by unsqueeze_, t_ or resize_, say), which would be lost for the "
                f"caller. Use the function without underscore instead"
            )


def _is_reshaped(tensor: Tensor, before: Tensor) -> bool:
    """Return whether ``tensor``, once of the shape of ``before``, was reshaped in place."""
    if torch._is_functional_tensor(tensor):
        return torch._functionalize_has_metadata_mutation(tensor)
    return tensor.shape != before.shape or tensor.stride() != before.stride()
