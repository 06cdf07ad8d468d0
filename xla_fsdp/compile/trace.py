"""One traced step, from the tensors before it to the program that it makes."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from xla_fsdp.compile.host_numbers import HostNumbers, plain
from xla_fsdp.compile.program import (
    HostInput,
    Numbers,
    Program,
    Reference,
    candidates_of,
    kind_of,
)
from xla_fsdp.compile.seen import Seen, watching
from xla_fsdp.compile.slots import Slot
from xla_fsdp.compile.state import PLAIN, State
from xla_fsdp.fsdp.engine.schedule import Schedule
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.optim.optimizers import params_of
from xla_fsdp.xla import host, ops, programs
from xla_fsdp.xla.graph import ProgramInputs, inputs_of, tensor_id

MOST_ORDERS = 8  # of results, that are tried
_FIRST = operator.itemgetter(0)


class Trace:
    """One traced step, from the tensors before it to the program that it makes."""

    def __init__(
        self, state: State, leaves: Sequence[Any], device: torch.device, *, refuses: bool
    ) -> None:
        self.problem = ""
        self.program: Program | None = None
        self._device = device
        self._state = state
        self.arguments = list(leaves)
        self._numbers = state.numbers
        host.execute_pending()
        self.slots = state.slots()
        self.before: dict[Any, Any] = {w: slot.get() for w, (_, slot) in self.slots.items()}
        self._on_host = [(label, tensor, tensor._version) for label, tensor in state.host_tensors()]
        self._grads = [_grad_of(leaf) for leaf in leaves]
        held = [*self._own(leaves), *self.before.values()]
        ops.compute(held)
        programs.unshare(held)
        functional = [each for each in held if torch._is_functional_tensor(each)]
        self._shared = {*programs.buffers_of(programs.find_shared(functional))}
        self.seed = ops.get_rng_state(device)
        self.facts = state.facts()
        self.facts_after = self.facts
        self._options = self._numbers.options()
        self._begins = [count.begin for count in self._numbers.counts()]
        self._counts = [number for _, number in self._begins]
        self._with_state = [set(map(id, each.state)) for each in state.optimizers]
        self._unreduced = self._unreduced_now()
        self.found = HostNumbers()
        self._keys = self._numbers.keys_of(self._begins)
        self.seen = Seen(self.found, self._numbers.tensors(self._keys), refuses=refuses)
        self.buffers = self._find_buffers()
        self.constants: set[int | None] = set()  # buffers of those of loops, also new ones
        self._saved = dict(zip(map(id, held), programs.holders_of(held), strict=True))

    def note(self, problem: str) -> None:
        """Keep a problem, "" for none, unless there is one already."""
        self.problem = self.problem or problem

    def _own(self, values: Sequence[Any]) -> list[Tensor]:
        return [v for v in values if isinstance(v, Tensor) and v.device == self._device]

    def _find_buffers(self) -> dict[int, list[tuple[Reference, Tensor]]]:
        """Return what has each buffer that the step may use; slots are named by place."""
        held: list[tuple[Reference, Tensor]] = [
            (("slot", where), tensor) for where, tensor in self.before.items()
        ]
        held += [
            (("argument", number), leaf)
            for number, leaf in enumerate(self.arguments)
            if isinstance(leaf, Tensor) and leaf.device == self._device
        ]
        found: dict[int, list[tuple[Reference, Tensor]]] = {}
        for each, buffer in zip(held, programs.buffers_of([t for _, t in held]), strict=True):
            if buffer is None:
                continue
            found.setdefault(buffer, []).append(each)
            reference, tensor = found[buffer][0]
            if each[0][0] == "argument" and tensor is not each[1]:
                known = (
                    "another argument" if reference[0] == "argument" else "a tensor of the model"
                )
                self.problem = (
                    f"argument {each[0][1]} of the step shares its memory with {known}; hand over "
                    f"a clone"
                )
        return found

    def run(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the step and return its result, without a graph, as that would keep tensors which
        the program would compute; if it raises, put the tensors back that it has changed."""
        try:
            with watching(self.seen), self._numbers.traced(self.found, self._keys):
                result = pytree.tree_map_only(Tensor, Tensor.detach, step(*args, **kwargs))
        except BaseException:
            self._undo()
            raise
        self.note(self.found.problem)
        self.note(self._unknown_optimizer())
        self.note(self._argument_gradient())
        return result

    def _argument_gradient(self) -> str:
        """Say which argument the step leaves a gradient in, or would send one through."""
        for number, (leaf, before) in enumerate(zip(self.arguments, self._grads, strict=True)):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None and torch.is_grad_enabled():
                return f"argument {number} of the step has a graph; hand over its detach()"
            if _grad_of(leaf) is not before:
                return (
                    f"the step leaves a gradient in argument {number}; return what "
                    f"torch.autograd.grad gives, or put the tensor into state="
                )
        return ""

    def _unknown_optimizer(self) -> str:
        for optimizer in self.seen.optimizers.values():
            # Copies that this package steps to learn what an optimizer does are on the host.
            if self._own(params_of(optimizer)) and not self._state.has(optimizer):
                return (
                    f"the step calls the step of {type(optimizer).__name__}, an optimizer that is "
                    f"not in state="
                )
        return ""

    def _undo(self, *, compute_what_is_left: bool = False) -> None:
        """Put back what the step has changed: tensors, the places that hold them, and numbers."""
        held = [*self._own(self.arguments), *self.before.values()]
        changed = programs.find_pending(held)
        programs.put(changed, [self._saved[id(each)] for each in changed])
        pairs = zip(changed, programs.buffers_of(changed), strict=True)
        programs.own_buffers([each for each, buffer in pairs if buffer not in self._shared])
        for where, (_, slot) in {**self._state.slots(), **self.slots}.items():
            if slot.get() is not self.before.get(where):
                slot.set(self.before.get(where))
        for optimizer, known in zip(self._state.optimizers, self._with_state, strict=True):
            for param in [each for each in optimizer.state if id(each) not in known]:
                del optimizer.state[param]
        for count, number in zip(self._numbers.counts(), self._counts, strict=False):
            count.write(number)
        self._numbers.write_options(self._options)
        for context, units in self._unreduced:
            context.unreduced[:] = units
        if compute_what_is_left:
            known = {*map(id, held)}
            left = [each for each in self.seen.tensors() if id(each) not in known]
            self._keep_values(self._own(left))
        ops.set_rng_state(self.seed, self._device)
        ops.runtime().forget_collectives()
        programs.drop_pending()

    def _keep_values(self, left: Sequence[Tensor]) -> None:
        """Compute what the step keeps elsewhere, in buffers of its own."""
        own = {*map(ops.memory_of, [*self._own(self.arguments), *self.before.values()])}
        pending = programs.find_pending(left)
        copies = [
            each
            for each, buffer in zip(left, programs.buffers_of(left), strict=True)
            if buffer in self.buffers and ops.memory_of(each) not in own
        ]
        ops.compute(pending)
        programs.put(copies, programs.copies_of(copies))

    def compare(self, step: Callable[..., Any], args: Any, kwargs: Any, program: Program) -> str:
        """Trace the step, and undo what that changes; return how it differs from ``program``, which
        is about to be replayed, "" if it does not."""
        result = self.run(step, args, kwargs)
        try:
            traced = self._traced(result)
            again = None
            if traced is not None:
                inputs = traced.inputs
                code = programs.identify(traced.outputs, inputs.values, traced.donated)
                again = self._program(traced, code)
        finally:
            # What the step keeps in places that nobody knows is not put back: it gets its values.
            result = traced = None
            self._undo(compute_what_is_left=True)
        if self.problem:
            return self.problem
        if again is not None and program.does_the_same(again):
            return ""
        return self._difference(program, again)

    def _difference(self, program: Program, again: Program | None) -> str:
        what = "a check traced the step again and found another program than the one replayed"
        pairs = itertools.zip_longest(program.operations, self.seen.operations, fillvalue=("", ""))
        for (old, old_place), (new, place) in pairs:
            if old == new:
                continue
            if not new:
                return f"{what}: it no longer calls {old}, as it did at {old_place}"
            was = f"; it was {old} at {old_place}" if old else ""
            return f"{what}: first differs {new} at {place}{was}"
        if again is not None and len(again.hosts) == len(program.hosts):
            changed = [
                number
                for number, (old, new) in enumerate(zip(program.hosts, again.hosts, strict=True))
                if not old.same_constant(new)
            ]
            if changed:
                return f"{what}: {self.unknown(again, changed)}"
        return f"{what}, in backward, in what the step returns or in where it puts tensors"

    # ------------------------------------------------------------ the program

    def execute(self, result: Any) -> Any:
        """Run what was traced, and make ``program`` from it; returns the step's result."""
        leaves, tree = pytree.tree_flatten(result)
        traced = self._traced(result)
        self._saved = {}
        if traced is not None:
            leaves = self._run_program(traced)
        del traced, result
        programs.drop_pending()
        ops.sync()  # step closures, and the random number state
        if self.program is not None:
            self.program.last_seed = self._last_seed()
        return pytree.tree_unflatten([plain(each) for each in leaves], tree)

    def _traced(self, result: Any) -> _Traced | None:
        """Return what the step has traced, None if it computes nothing."""
        after = self._state.slots()
        held = {id(slot.get()): slot.get() for _, slot in after.values()}
        of_arguments = self._own([*self.arguments, *map(_grad_of, self.arguments)])
        leaves = self._own(pytree.tree_leaves(result))
        for each in (*leaves, *self._own(self.seen.tensors()), *of_arguments):
            held.setdefault(id(each), each)
        groups = _by_tensor(programs.find_pending(list(held.values())))
        self.facts_after = self._state.facts()
        if not groups:
            return None
        pending = {id(each) for group in groups for each in group}
        kept = set(programs.buffers_of([each for each in held.values() if id(each) not in pending]))
        donors = {
            buffer: id(tensor)
            for buffer, [(_, tensor), *_] in self.buffers.items()
            if id(tensor) in pending and buffer not in kept
        }
        self.note(self._find_moved(after, pending))
        self.note(self._find_views(groups))
        self.note(self._find_on_host())
        self.constants = {*programs.buffers_of(self._own(self._state.constants))}
        return _Traced(self, after, groups, donors, result)

    def _last_seed(self) -> tuple[str, int]:
        now = ops.get_rng_state(self._device)
        draws = programs.draws_until(self.seed, now, programs.next_seed)
        return ("constant", now) if draws is None else ("draws", draws)

    def _find_moved(self, after: dict[Any, tuple[str, Slot]], pending: set[int]) -> str:
        """Say which place got a tensor that the step has not computed, as a replay would not put
        it there."""
        for where, (label, slot) in after.items():
            before, now = self.before.get(where), slot.get()
            if before is not None and now is not before and id(now) not in pending:
                return (
                    f"the step puts a tensor into {label} that it has not computed; copy it there"
                )
        return ""

    def _find_views(self, groups: list[list[Tensor]]) -> str:
        """Say which tensors of the state, or arguments, that the step changes are views, or share
        memory, but are not one tensor: a replay would not change both."""
        number_of = {id(each): number for number, group in enumerate(groups) for each in group}
        held = [(label, self.before[where]) for where, (label, _) in self.slots.items()]
        held += [(f"argument {n}", each) for n, each in enumerate(self.arguments)]
        known: dict[int, tuple[str, int | None]] = {}
        view = ""
        for label, tensor in held:
            if not self._own([tensor]):
                continue
            now = label, number_of.get(id(tensor))
            first = known.setdefault(ops.memory_of(tensor), now)
            if first[1] != now[1]:
                return (
                    f"the step changes memory that {first[0]} and {label} share, of which one is a "
                    f"view of the other; keep one, and make the other from it in the step"
                )
            if now[1] is not None and programs.views_of(tensor):
                view = f"the step changes {label}, a view of a tensor; keep a clone of it there"
        return view

    def _find_on_host(self) -> str:
        for label, tensor, version in self._on_host:
            if tensor._version != version:
                return f"the step changes {label}, a tensor of the host; keep it on the device"
        return ""

    def _run_program(self, traced: _Traced) -> list[Any]:
        program = self._program(traced, b"")
        if self.problem:  # what views are a part of is computed from what it was before
            traced.donated.clear()
        code, results = programs.run_traced(
            traced.outputs, traced.inputs.values, traced.donated, self._copied(traced)
        )
        self.program = dataclasses.replace(program, code=code, compiled=programs.compiled())
        self.program.place(results, self.arguments)
        goals = self.program.outputs
        for group, goal, value in zip(traced.groups, goals, results, strict=True):
            # What the step's code has kept elsewhere, perhaps besides a place that it knows.
            elsewhere = [t for t in programs.find_pending(group) if not (goal and t._is_view())]
            programs.put_apart(elsewhere, value)
        return self.program.leaves(results, self.arguments)

    def _copied(self, traced: _Traced) -> dict[int, Tensor]:
        """Return copies of the inputs that are donated and whose buffers others may have."""
        values, buffers = traced.inputs.values, traced.inputs.buffers
        shared = [number for number in traced.donated if buffers[number] in self._shared]
        own = programs.copies_of([values[number] for number in shared])
        return dict(zip(shared, own, strict=True))

    def _program(self, traced: _Traced, code: bytes) -> Program:
        inputs, hosts = traced.references()
        outputs = [*map(traced.goals, traced.groups)]
        (returned, tree), emptied = traced.returned(), traced.emptied()
        return Program(
            code=code,
            facts=self.facts,
            slots=traced.slots,  # those that the above has named
            kinds=traced.kinds(),
            inputs=inputs,
            hosts=hosts,
            outputs=outputs,
            new=traced.new,
            emptied=emptied,
            returned=returned,
            tree=tree,
            numbers=self._numbers_after(),
            collectives=ops.runtime().traced_collectives(),
            last_seed=("draws", 0),
            unreduced=self._unreduced_now(),
            compiled=programs.compiled(),
            arguments=[
                weakref.ref(each) if isinstance(each, Tensor) else None for each in self.arguments
            ],
            operations=self.seen.operations,
        )

    def _unreduced_now(self) -> list[tuple[Schedule, list[FSDPState]]]:
        return [(each.schedule, list(each.schedule.unreduced)) for each in self._state.units]

    def _numbers_after(self) -> Numbers:
        now = [count.read() for count in self._numbers.counts()]
        deltas = [new - old for new, old in zip(now, self._counts, strict=False)]
        members = [[n for n, b in enumerate(self._begins) if b == one] for one in self._keys]
        keys = [*self._keys.values()]
        outcomes, updates = self.found.outcomes, self.found.updates
        return Numbers(self._options, self._counts, members, keys, deltas, outcomes, updates)

    def unknown(self, program: Program, positions: Sequence[int]) -> str:
        """Say which host inputs of a program nothing explains, and where they entered."""
        found = []
        for number in positions:
            value = program.hosts[number].value
            what = value.item() if not value.dim() else f"a tensor of shape {list(value.shape)}"
            place = self._place_of(value)
            found.append(f"{what:g}" if isinstance(what, float) else str(what))
            found[-1] += f" (entered at {place})" if place else ""
        if not found:
            return ""
        shown = "; ".join(dict.fromkeys(found))
        return f"the host computes a value anew in every step: {shown}"

    def _place_of(self, value: Tensor) -> str:
        if value.dim():
            return str(self.seen.places.get(tuple(value.shape), ""))
        for number, place in self.seen.places.items():
            if isinstance(number, float):
                try:
                    if torch.tensor(number, dtype=value.dtype) == value:
                        return str(place)
                except (OverflowError, RuntimeError):
                    continue
        return ""


def _grad_of(value: Any) -> Tensor | None:
    return value.grad if isinstance(value, Tensor) and value.is_leaf else None


def _by_tensor(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[int, list[Tensor]] = {}
    for each in tensors:
        groups.setdefault(tensor_id(each), []).append(each)
    return list(groups.values())


def _sort_like_donors(groups: list[list[Tensor]], donors: dict[int, int]) -> ProgramInputs:
    """Sort results like the inputs that they replace; return the program's inputs.

    XLA writes results over donated inputs of their size, first over first. Where that is not the
    input that the result is computed from, it keeps a copy of one of both.

    Args:
        groups: the tensors of each result, sorted in place.
        donors: of each donated buffer, the ``id`` of the tensor that has it.
    """
    inputs = inputs_of([group[0] for group in groups])
    for _ in range(MOST_ORDERS):  # inputs are in the order in which results first need them
        order = {donors[b]: number for number, b in enumerate(inputs.buffers) if b in donors}
        keys = [min(order.get(id(each), len(inputs.buffers)) for each in group) for group in groups]
        if keys == sorted(keys):
            break
        groups[:] = [group for _, group in sorted(zip(keys, groups, strict=True), key=_FIRST)]
        inputs = inputs_of([group[0] for group in groups])
    return inputs


class _Traced:
    """What a step has traced: where inputs of its program come from, and where its results go.

    Args:
        trace: is told what is wrong.
        after: the places that hold tensors after the step.
        groups: the tensors of each result, which are sorted.
        donors: of each buffer that results may use, the ``id`` of the tensor that has it.
        result: what the step returns.

    Attributes:
        slots: the places that the program reads or changes.
        new: numbers of those that get a new tensor.
        donated: positions of the inputs whose buffers results may use.
    """

    def __init__(
        self,
        trace: Trace,
        after: dict[Any, tuple[str, Slot]],
        groups: list[list[Tensor]],
        donors: dict[int, int],
        result: Any,
    ) -> None:
        self._trace, self._after, self.groups, self._result = trace, after, groups, result
        self.inputs = _sort_like_donors(groups, donors)
        self.donated = [n for n, buffer in enumerate(self.inputs.buffers) if buffer in donors]
        self.slots: list[Slot] = []
        self.new: set[int] = set()
        self._numbers: dict[Any, int] = {}  # of slots, by place
        self._holders: dict[int, list[Any]] = {}  # places by the ``id`` of the tensor there
        for where, (_, slot) in after.items():
            self._holders.setdefault(id(slot.get()), []).append(where)

    @property
    def outputs(self) -> list[Tensor]:
        return [group[0] for group in self.groups]

    def kinds(self) -> list[tuple[Any, ...] | None]:
        """Return ``kind_of`` what each slot held before the step."""
        return [kind_of(self._trace.before.get(slot.where)) for slot in self.slots]

    def emptied(self) -> list[int]:
        return [self._number(where) for where in self._trace.slots if where not in self._after]

    def references(self) -> tuple[list[Reference], list[HostInput]]:
        """Return where each input comes from, and those that come from the host."""
        references: list[Reference] = []
        values: list[Tensor] = []
        inputs, trace, seeds = self.inputs, self._trace, self._seeds()
        scalars = trace.seen.scalars()
        for number, (buffer, value) in enumerate(zip(inputs.buffers, inputs.values, strict=True)):
            if number in seeds:
                references.append(("seed", seeds[number]))
            elif buffer in trace.buffers:
                references.append(self._named(trace.buffers[buffer]))
            else:
                is_older = trace.seen.is_older(inputs.tensors[number]) or buffer in scalars
                if is_older and buffer not in trace.constants:
                    trace.note(_unknown_tensor(value, trace.seen.place_of(buffer)))
                references.append(("host", len(values)))
                values.append(value)
        hosts = [
            HostInput(at_host, at_host, value, candidates_of(at_host, trace.found.found))
            for at_host, value in zip(host.copies(values), values, strict=True)
        ]
        return references, hosts

    def _seeds(self) -> dict[int, int]:
        """Return after how many drawings each random number state is what an input holds; a state
        that is not reached so was set by the step itself."""
        states = host.copies([self.inputs.values[position] for position in self.inputs.seeds])
        before = self._trace.seed
        draws = [programs.draws_until(before, int(state.item()) % 2**64) for state in states]
        pairs = zip(self.inputs.seeds, draws, strict=True)
        return {position: count for position, count in pairs if count is not None}

    def goals(self, group: Sequence[Tensor]) -> list[Reference]:
        """Return where a result goes, whose traced tensor these Python tensors are."""
        found: list[Reference] = []
        for tensor in group:
            holders = self._holders.get(id(tensor), [])
            found += [("slot", self._number(where)) for where in holders]
            new = [each for each in holders if tensor is not self._trace.before.get(each)]
            self.new.update(map(self._number, new))
            if new and tensor.requires_grad:
                self._trace.note(_replaced(self._after[new[-1]][0], tensor))
            arguments = enumerate(self._trace.arguments)
            found += [("argument", number) for number, each in arguments if each is tensor]
        return list(dict.fromkeys(found))

    def returned(self) -> tuple[list[Reference], Any]:
        """Return what each leaf of the step's result is, and the tree around them."""
        leaves, tree = pytree.tree_flatten(self._result)
        numbers = {id(each): n for n, group in enumerate(self.groups) for each in group}
        return [self._returned(leaf, numbers) for leaf in leaves], tree

    def _returned(self, leaf: Any, numbers: dict[int, int]) -> Reference:
        if not isinstance(leaf, Tensor):
            if not isinstance(plain(leaf), PLAIN):
                self._trace.note(
                    f"the step returns a {type(leaf).__name__}; return tensors and plain values, "
                    f"in containers that torch.utils._pytree knows"
                )
            return ("plain", plain(leaf))
        if id(leaf) in numbers:
            number = numbers[id(leaf)]
            return self._changed(leaf, self.groups[number]) or ("result", number)
        [buffer] = programs.buffers_of([leaf]) if leaf.is_xla else [None]  # type: ignore[attr-defined]
        if buffer in self._trace.buffers:
            return self._named(self._trace.buffers[buffer])
        self._trace.note(
            f"the step returns a tensor of shape {list(leaf.shape)} that is neither computed on "
            f"the device nor one of its arguments or of the model"
        )
        return ("plain", None)

    def _changed(self, leaf: Tensor, group: list[Tensor]) -> Reference | None:
        """Return the place of the tensor that ``leaf`` is an alias of, if that is one which the
        step has changed: a result of its own would be donated with that by the next step."""
        memory = ops.memory_of(leaf)
        for tensor in group:
            if ops.memory_of(tensor) == memory:
                for goal in self.goals([tensor]):
                    if goal[0] == "argument" or goal[1] not in self.new:
                        return goal
        return None

    def _named(self, held: list[tuple[Reference, Tensor]]) -> Reference:
        """Return where a buffer comes from. Other slots that have it count, too: one of them may
        get another tensor, and it is not known which of them the step reads."""
        found = [(kind, self._number(at) if kind == "slot" else at) for (kind, at), _ in held]
        return found[0]

    def _number(self, where: Any) -> int:
        """Return the number of the slot at a place; one that it has not had is added."""
        if where not in self._numbers:
            self._numbers[where] = len(self.slots)
            _, slot = self._after.get(where) or self._trace.slots[where]
            self.slots.append(slot)
        return self._numbers[where]


def _replaced(label: str, tensor: Tensor) -> str:
    if tensor.is_leaf:
        return f"the step replaces {label}, a parameter; change it in place"
    return (
        f"the step keeps a tensor with a graph as {label}, and a replay makes no graph; keep its "
        f"detach()"
    )


def _unknown_tensor(value: Tensor, place: str) -> str:
    return (
        f"the step takes a tensor of shape {list(value.shape)} ({value.dtype}) that is neither an "
        f"argument nor inside of its state; it entered at {place}. Add what holds it to "
        f"state="
    )
