"""Activation checkpointing: recompute a module's forward in backward to save activation memory.

When backward unpacks the first tensor that a checkpointed forward has saved, the forward runs again
and its saved tensors are used, by position, in the original graph. Inputs need not require a
gradient, keyword arguments and nested containers work, and checkpoints nest. While a forward runs,
it has what it saved, for calls of ``torch.autograd.grad`` in it. (Saved-tensor hooks as in
``torch.utils.checkpoint``, which does not support XLA devices.)

Invariants: the recomputation has the inputs, random numbers, autocast state, buffers and attributes
of the modules of the original forward, and changes none of them. It waits at a barrier for the
incoming gradients; else XLA would merge it with the original forward or run it early.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from xla_fsdp.distributed.context_parallel import current_context, in_context
from xla_fsdp.distributed.cpu_ranks import current_rank_thread
from xla_fsdp.distributed.higher_order import explain_hooks, in_transform
from xla_fsdp.fsdp.engine.autograd import before_backward, changed_in_place, on_device, present
from xla_fsdp.fsdp.engine.inputs import Inputs, version_of
from xla_fsdp.fsdp.engine.module_state import is_wrapper
from xla_fsdp.fsdp.engine.state import FSDPState
from xla_fsdp.fsdp.engine.thread import current_pass, scope, this_thread
from xla_fsdp.wrap import has_forward
from xla_fsdp.xla import ops

_SAME_TWICE = (
    "It must do the same both times: look for state that it changes, such as a cache that it "
    "appends to (of transformers models: set config.use_cache=False), and for branches on it."
)


def checkpoint_module(module: nn.Module) -> nn.Module:
    """Replace the forward of ``module`` by one that saves only its inputs for backward, and
    recomputes the rest.

    ``module`` may contain FSDP modules or be wrapped; ``FSDP(checkpoint_module(m))`` is the usual
    order.

    Returns:
        The same module.

    Raises:
        TypeError: if ``module`` is not an ``nn.Module``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"checkpoint_module takes an nn.Module, got {type(module).__name__}")
    if is_checkpointed(module):
        return module
    original = unbound_forward(module)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Transforms of torch.func allow no hooks on what autograd saves.
        if not torch.is_grad_enabled() or _mode.saves_activations or in_transform():
            return original(self, *args, **kwargs)
        return Region(self, partial(original, self)).run(args, kwargs)

    forward.is_checkpointed = True  # type: ignore[attr-defined]
    # A method, not a closure over the module: a deep copy must run its own weights.
    module.forward = MethodType(forward, module)
    return module


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether ``checkpoint_module`` has replaced the forward of ``module``."""
    return getattr(module.forward, "is_checkpointed", False)


class _Mode(threading.local):
    def __init__(self) -> None:
        self.saves_activations = False
        self.regions = 0  # whose forward runs in this thread


_mode = _Mode()


@contextlib.contextmanager
def regions_run_once() -> Iterator[None]:
    """Turn checkpointing off inside the block, for callers that recompute by themselves."""
    before, _mode.saves_activations = _mode.saves_activations, True
    try:
        yield
    finally:
        _mode.saves_activations = before


def in_region() -> bool:
    """Return whether the calling thread is in a checkpointed forward, for the first time."""
    return _mode.regions > 0


def checkpoint_wrapper(
    module: nn.Module,
    predicate: Callable[[nn.Module], bool] | None = None,
    *,
    every: int = 1,
) -> nn.Module:
    """Apply ``checkpoint_module`` to ``module``, or to those modules in it that ``predicate``
    selects.

    Recomputing fewer blocks takes more memory and less time:
    ``checkpoint_wrapper(model, lambda m: isinstance(m, Block), every=2)`` recomputes every second
    block. Works before and after wrapping with FSDP.

    Args:
        module: a module or a model.
        predicate: called with every module in ``module`` that has a forward, itself included,
            except FSDP wrappers. Selected modules may be nested.
        every: checkpoint only the first and every ``every``-th after it of the selected modules,
            in the order of ``named_modules()``.

    Returns:
        The same module.

    Raises:
        TypeError: if ``module`` is not an ``nn.Module``.
        ValueError: if ``every`` is below 1, or nothing was selected.
    """
    if every < 1:
        raise ValueError(f"every is {every}; give 1 for all selected modules, 2 for every second")
    if predicate is None:
        return checkpoint_module(module)
    candidates = [
        inner for inner in module.modules() if has_forward(inner) and not is_wrapper(inner)
    ]
    selected = [inner for inner in candidates if predicate(inner)]
    if not selected:
        raise ValueError(
            f"predicate selected none of the modules in {type(module).__name__}; it is called with "
            f"each of them and returns whether to rematerialize it"
        )
    for inner in selected[::every]:
        checkpoint_module(inner)
    return module


def unbound_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of ``module`` as a function of it: what is to be called in a new forward.

    A deep copy of the module must run its own weights, and functions are not copied. So a new
    forward is a method, and no closure over the module or its old forward.
    """
    forward = module.forward
    if isinstance(forward, MethodType) and forward.__self__ is module:
        return forward.__func__
    return functools.wraps(forward)(lambda self, *args, **kwargs: forward(*args, **kwargs))


class _Environment:
    """Random state, autocast state, context and what modules keep, at the beginning of a forward.

    Create it before the forward and call ``forget_unchanged`` after it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._device = ops.device()
        self._rank_thread = current_rank_thread()  # backward runs in one of autograd's
        self._xla_rng = ops.get_rng_state(self._device)
        self._cpu_rng: Tensor | None = torch.get_rng_state()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in ("xla", "cpu")
        ]
        self._context = current_context()
        self._modules = _ModuleState(module)

    def forget_unchanged(self) -> None:
        """Drop the state that the forward has not changed."""
        # CPU ranks share the CPU's random state, so it is restored only if the forward used it, or
        # another rank did meanwhile.
        if self._cpu_rng is not None and torch.equal(self._cpu_rng, torch.get_rng_state()):
            self._cpu_rng = None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state of the forward inside the block, and the present state after it."""
        xla_rng, cpu_rng = ops.get_rng_state(self._device), torch.get_rng_state()
        self._set(self._xla_rng, self._cpu_rng)
        try:
            with contextlib.ExitStack() as stack, self._modules.restored():
                for kind, dtype, enabled in self._autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                stack.enter_context(in_context(self._context))
                yield
        finally:
            self._set(xla_rng, None if self._cpu_rng is None else cpu_rng)

    def _set(self, xla_rng: int, cpu_rng: Tensor | None) -> None:
        ops.set_rng_state(xla_rng, self._device)
        if cpu_rng is not None:
            thread = self._rank_thread
            with contextlib.nullcontext() if thread is None else thread.turn():
                torch.set_rng_state(cpu_rng)  # not while another rank draws its model's values


class _ModuleState:
    """What modules keep between forwards, at the beginning of one: buffers, and attributes that
    their classes have given them. A forward may assign others, change tensors in place, and put
    something into containers."""

    def __init__(self, module: nn.Module) -> None:
        # Not of a wrapper, which shows the buffers of the module inside.
        modules = [inner for inner in module.modules() if not is_wrapper(inner)]
        registries = [slots for inner in modules for slots in (inner._buffers, vars(inner))]
        own = (value for inner in modules for value in _own_attributes(inner))
        containers = [value for value in own if type(value) in _CONTAINERS]
        self._contents = _contents([*registries, *containers])
        held = (value for each, _ in self._contents for value in _values(each))
        # Parameters of units, also those that have been resharded, are of other classes.
        tensors = [each for each in held if type(each) is Tensor]
        self._copies = {id(each): each.detach().clone() for each in tensors}
        self._need_grad = {id(each) for each in tensors if each.requires_grad}

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state inside the block, with copies of tensors, and the present one after
        it."""
        present = _contents([container for container, _ in self._contents])
        copies = self._copies.items()  # each without a graph, and no leaf, which nobody may change
        graphs = {at: each.detach().requires_grad_(at in self._need_grad) for at, each in copies}
        _fill(self._contents, {at: each.clone() for at, each in graphs.items()})
        try:
            yield
        finally:
            _fill(present, {})


_CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})

_Contents = Sequence[tuple[Any, Any]]
"""Containers, each with a copy that has what it held."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_flat_weights"}  # of recurrent layers


def _own_attributes(module: nn.Module) -> list[Any]:
    return [value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]


def _values(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


@contextlib.contextmanager
def undoing_changes(module: nn.Module) -> Iterator[Callable[[], bool]]:
    """Give containers and objects that modules hold, at any depth, their items back at the end;
    yield a function that returns whether these have changed inside."""
    own = [value for inner in module.modules() for value in _own_attributes(inner)]
    contents = _contents(_containers_in(own))
    changed: list[Any] = []
    try:
        yield lambda: bool(changed)
    finally:
        changed += [pair for pair in contents if not _same_items(*pair)]
        _fill(changed, {})


def _containers_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield containers, and the attributes of objects, in ``values`` and in each other."""
    waiting, seen = list(values), set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor | nn.Module | type) or callable(value) or id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) not in _CONTAINERS:
            value = getattr(value, "__dict__", None)
        if type(value) in _CONTAINERS:
            yield value
            waiting += _values(value)


def _same_items(container: Any, before: Any) -> bool:
    if len(container) != len(before):
        return False
    if isinstance(container, dict):
        return all(key in before and before[key] is value for key, value in container.items())
    if isinstance(container, set):
        return bool(container == before)
    return all(one is other for one, other in zip(container, before, strict=True))


def _contents(containers: Iterable[Any]) -> _Contents:
    once = {id(container): container for container in containers}
    return [(container, copy.copy(container)) for container in once.values()]


def _fill(contents: _Contents, instead: Mapping[int, Any]) -> None:
    """Give containers back what they held, or what is there ``instead``, by id."""
    for container, wanted in contents:
        container.clear()
        if isinstance(container, dict):
            container.update({key: instead.get(id(each), each) for key, each in wanted.items()})
        else:
            add = container.update if isinstance(container, set) else container.extend
            add([instead.get(id(each), each) for each in wanted])


class _Saved:
    """What one run of a forward saves for backward. The graph holds numbers in place of tensors,
    which a backward inside the forward (``torch.autograd.grad``) may still have."""

    def __init__(self) -> None:
        self._tensors: list[tuple[Tensor, int]] = []
        self.is_open = True

    def pack(self, tensor: Tensor) -> int:
        """Add a tensor; return its number."""
        self._tensors.append((tensor, version_of(tensor)))
        return len(self._tensors) - 1

    def unpack(self, number: int) -> Tensor:
        """Return a tensor, before ``close``.

        Raises:
            RuntimeError: after ``close``, or if the tensor was changed in place.
        """
        if not self.is_open:
            raise RuntimeError(
                "backward ran through the graph of a recomputation, which is never built on"
            )
        tensor, version = self._tensors[number]
        if version_of(tensor) != version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that torch.autograd.grad needs, called "
                f"inside a checkpointed forward, was changed in place after it was saved"
            )
        return tensor

    def changed(self) -> frozenset[int]:
        """Return the numbers of tensors that were changed in place after they were saved."""
        pairs = enumerate(self._tensors)
        return frozenset(at for at, (each, version) in pairs if version_of(each) != version)

    def close(self) -> list[Tensor]:
        """Remove and return all tensors, as the forward has ended."""
        tensors, self._tensors, self.is_open = self._tensors, [], False
        return [tensor for tensor, _ in tensors]


class Region:
    """One call of a checkpointed forward."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._name = type(module).__name__
        self._forward = forward
        self._units = [*this_thread.units]
        self._environment = _Environment(module)
        self._saved = _Saved()
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []  # of what the forward saved
        self._recomputed: list[Tensor] = []
        self._lost: frozenset[int] = frozenset()  # of these, what the forward changed after saving
        self._changed: list[int] = []  # inputs that the forward changed in place
        self._output_grads: list[Tensor] = []  # filled when backward reaches the outputs

    @property
    def unit(self) -> FSDPState | None:
        """The innermost unit around the region, if any."""
        return self._units[-1] if self._units else None

    def run(self, args: Any, kwargs: Any) -> Any:
        """Run the original forward."""
        inputs = Inputs(args, kwargs)
        self._form = inputs.form()
        self._needs_grad = [source.requires_grad for source in inputs.sources]
        before = [source.detach().clone() for source in inputs.sources]
        self._save_inputs(inputs.sources)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._saved.pack, self._pick)
        _mode.regions += 1
        try:
            # A backward in this thread saves in the same order here and when it is recomputed.
            with torch.autograd.set_multithreading_enabled(False), hooks:
                outputs = inputs.call_on_own(self._forward)
        except RuntimeError as error:
            explain_hooks(error)
            raise
        finally:
            _mode.regions -= 1
            self._kinds = _kinds(self._saved.close())
        self._changed = outputs.changed
        # The caller may change what it gets back.
        if kept := {*self._changed, *outputs.returned()}:
            pairs = enumerate(zip(before, inputs.sources, strict=True))
            self._save_inputs([old if at in kept else now for at, (old, now) in pairs])
        self._environment.forget_unchanged()
        # The step gets this list, not the region, which would live as long as the outputs.
        before_backward(partial(_note, self._output_grads), outputs.tensors)
        return outputs.replaced(outputs.tensors)

    def _save_inputs(self, tensors: Sequence[Tensor]) -> None:
        # By a node outside of the region's hooks, so that an outer checkpoint may drop them.
        self._saved_inputs = _SaveInputs.apply(torch.empty(0, requires_grad=True), *tensors)

    def _pick(self, number: int) -> Tensor:
        if self._saved.is_open:
            return self._saved.unpack(number)
        if not self._recomputed:
            self._recomputed = self._recompute()
            self._check()
        result = self._recomputed[number]
        if number in self._lost:
            raise changed_in_place(result)
        if current_pass() == -1:  # asked for outside of a backward pass, by a debugger say
            self._recomputed = []
        return result

    def _recompute(self) -> list[Tensor]:
        if current_pass() != -1:
            # By weak reference: a callback may outlive the step, and the inputs of a region that it
            # holds would become outputs of the step's program.
            own = weakref.ref(self)
            Variable._execution_engine.queue_callback(partial(_forget, own))
        # Usually unsharded already; not if backward began at a tensor inside the module.
        for unit in self._units:
            unit.ensure_unsharded()
        with scope(self.unit.log.unit if self.unit else "unit", "recompute"):
            return self._run_again()

    def _run_again(self) -> list[Tensor]:
        saved = _Saved()
        args, kwargs = self._inputs()
        hooks = torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack)
        try:
            with torch.enable_grad(), self._environment.restored():
                with hooks:
                    self._forward(*args, **kwargs)
                self._lost = saved.changed()
                return [tensor.detach() for tensor in saved.close()]
        except Exception as error:
            note = (
                f"Raised while the checkpointed forward of {self._name} was recomputed, in "
                f"backward. {_SAME_TWICE}"
            )
            _add_note(error, note)
            raise
        finally:
            saved.close()

    def _inputs(self) -> Any:
        """Return the inputs with new leaves, available only once the gradients of the outputs are;
        for tensors that the forward changes in place, with copies of leaves."""
        saved = self._saved_inputs.grad_fn.saved_tensors
        lazy = [tensor for tensor in saved if on_device(tensor)]
        ready = iter(ops.barrier([*lazy, *self._output_grads])[: len(lazy)])
        fresh = [next(ready) if on_device(t) else t.detach() for t in saved]
        for tensor, needed in zip(fresh, self._needs_grad, strict=True):
            tensor.requires_grad_(needed)
        with torch.enable_grad():
            fresh = [t.clone() if at in self._changed else t for at, t in enumerate(fresh)]
        return self._form.filled(fresh)

    def _check(self) -> None:
        found = _kinds(self._recomputed)
        if found != self._kinds:
            raise RuntimeError(
                f"the checkpointed forward of {self._name} saved {len(self._kinds)} tensors for "
                f"backward, and {len(found)} (or others) when it was recomputed. {_SAME_TWICE}"
            )


def _kinds(tensors: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def _add_note(error: Exception, note: str) -> None:
    """Add a note to what Python prints of ``error``; before Python 3.11 to its message."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.args = (*error.args[:-1], "\n".join(map(str, (*error.args[-1:], note))))


def _forget(region: weakref.ref[Region]) -> None:
    if (alive := region()) is not None:
        alive._recomputed = []


class _SaveInputs(torch.autograd.Function):
    """Saves the inputs of a region; never differentiated."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise AssertionError("nothing depends on the output of this node")


def _note(noted: list[Tensor], grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Store gradients of a region's outputs in ``noted``, for the barrier of the recomputation."""
    noted[:] = [grad.detach() for grad in present(grads)]
    Variable._execution_engine.queue_callback(noted.clear)
    return grads
