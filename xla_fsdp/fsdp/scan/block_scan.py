"""Run the calls of identical blocks as one loop.

All calls but the last return placeholders; the call of the last block runs the loop. A forward must
call the blocks in order, each with the output of the previous block and otherwise the same
arguments; anything else raises.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp.distributed.xla.loop import LoopCache, TensorSpec
from xla_fsdp.fsdp.engine.autograd import on_device
from xla_fsdp.fsdp.engine.state import FSDPState, current_pass, running_units
from xla_fsdp.fsdp.scan.autograd import ForwardCounter, ScanCall
from xla_fsdp.fsdp.scan.block_inputs import Arguments, BlockState, SharedTensors, settings_of
from xla_fsdp.fsdp.scan.checks import refuse_hooks, refuse_host_tensors
from xla_fsdp.fsdp.scan.program import Blocks
from xla_fsdp.fsdp.scan.remat_policy import ActivationStore, policy_of
from xla_fsdp.fsdp.scan.tracing import BlockComparison, Template
from xla_fsdp.fsdp.scan.weights import BlockWeights, shards_of

# ---------------------------------------------------------------- placeholders

_METADATA = frozenset(
    {
        "shape.__get__", "dtype.__get__", "device.__get__", "ndim.__get__", "requires_grad.__get__",
        "is_leaf.__get__", "grad_fn.__get__", "layout.__get__", "size", "dim", "numel", "nelement",
        "ndimension", "is_floating_point", "is_complex", "element_size", "is_inference",
        "get_device", "_base.__get__", "is_meta.__get__", "is_cuda.__get__", "is_sparse.__get__",
        "is_quantized.__get__", "is_nested.__get__", "names.__get__", "itemsize.__get__",
        "is_xla.__get__", "is_cpu.__get__",
    }
)  # fmt: skip


class Placeholder(Tensor):
    """The output of block ``block`` of ``length``, before it is computed.

    It has a shape, a dtype and other metadata. Any other use raises, as a forward may only pass it
    to the next block.
    """

    block: int
    length: int

    @classmethod
    def after(cls, block: int, length: int, like: Tensor, dtype: torch.dtype) -> Placeholder:
        # Without requires_grad: torch's module hooks would pass it through an autograd node.
        made = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=dtype, device=like.device)
        made.block, made.length = block, length
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placeholder(output of block {self.block} of {self.length})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _name(func)
        if name in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise _misused(args, kwargs, name)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise _misused(args, kwargs, str(func))


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)  # the descriptor, if func reads a property
    return f"{owner.__name__}.{name}" if name == "__get__" and owner is not None else name


def _misused(args: Any, kwargs: Any, name: str) -> RuntimeError:
    flat, _ = torch.utils._pytree.tree_flatten((args, kwargs))
    used = next(each for each in flat if isinstance(each, Placeholder))
    return RuntimeError(
        f"the output of block {used.block} of {used.length} was used (by {name}) before block "
        f"{used.length - 1} was called. Scanned blocks run as one loop: between them a forward may "
        f"do nothing but hand each block's output to the next, as in `for block in blocks: x = "
        f"block(x, ...)`, for all of them. Move the rest into the blocks, or do not scan these"
    )


# ---------------------------------------------------------------- the scan

GATHER_ONCE_BELOW = 2**14
"""Elements. Biases and norms of blocks up to a width of 4096 are gathered once for all blocks and
stay unsharded from forward to backward, at most 32 KiB each in 16 bits."""


@dataclass(frozen=True)
class Options:
    """The options of ``scan_blocks`` that its loops depend on."""

    remat: str | tuple[str, ...] = "full"
    gather_once_below: int = GATHER_ONCE_BELOW
    offload_activations: bool = False


@dataclass
class _Pass:
    """A forward in which some, but not yet all, blocks have been called."""

    template: Template  # of block 0
    given: Arguments  # of block 0
    cast: list[Tensor]  # tensors of ``given`` in the compute dtype
    returned: Arguments  # structure of a block's output, without the tensor
    states: list[BlockState]  # by block
    key: Any  # equal for passes that can run the same loops
    last: Placeholder | None = None  # output of the block that was called last
    done: int = 0  # index of that block


class BlockScan:
    """The ``ForwardOverride`` shared by all blocks of a loop.

    Args:
        blocks: FSDP modules; referenced weakly, as each of them holds this object.
        options: options of the loop.
    """

    def __init__(self, blocks: Sequence[Any], options: Options) -> None:
        self.__setstate__(([_BlockRef(block) for block in blocks], options))

    def __getstate__(self) -> tuple[list[_BlockRef], Options]:
        # A copy runs the copied blocks and traces its own loops, so those are not copied.
        return self._blocks, self._options

    def __setstate__(self, state: tuple[list[_BlockRef], Options]) -> None:
        self._blocks, self._options = state
        self._policy = policy_of(self._options.remat)
        self._store = ActivationStore(self._options.offload_activations)
        self._pass: _Pass | None = None
        self._without_loop = False
        self._comparison = BlockComparison()
        self._loops = LoopCache()
        self._shared = SharedTensors()
        self._counter = ForwardCounter()

    def remove(self) -> None:
        """Run each block by itself again."""
        for block in (reference() for reference in self._blocks):
            if block is not None:
                block._fsdp_module_state.forward_override = None

    def run(self, unit: FSDPState, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the call of one block: return a placeholder, or for the last block the output.

        Raises:
            RuntimeError: if another block should be called now.
            TypeError: for arguments that a loop cannot take.
            ValueError: if blocks are not identical, or are called with different arguments.
        """
        given = Arguments.of((args, kwargs))
        blocks = [reference() for reference in self._blocks]
        if None in blocks:  # only this block was copied, without the others
            return unit.run(forward, args, kwargs)
        if current_pass() == -1:
            self._without_loop = _without_loop.get()
        # Otherwise this forward is recomputed in backward, maybe in a thread of autograd, which
        # does not have the context variable: it runs as the first time.
        if self._without_loop or (given.opaque and not torch.is_grad_enabled()):
            return unit.run(forward, args, kwargs)
        number = next(at for at, each in enumerate(blocks) if each._fsdp_unit is unit)
        current, self._pass = self._pass, None  # an error below ends the pass
        _check_arguments(number, given)
        if number == 0:
            current = self._begin(blocks, forward, given)
        else:
            current = self._go_on(current, number, blocks, forward, given)
        if number == len(blocks) - 1:
            result = self._run_loop(current, [block._fsdp_unit for block in blocks])
        else:
            dtype = unit.config.output_dtype or current.cast[0].dtype
            result = Placeholder.after(number, len(blocks), current.cast[0], dtype)
            current.last, self._pass = result, current
        return current.returned.put_together([result])

    def _begin(self, blocks: list[Any], forward: Callable[..., Any], given: Arguments) -> _Pass:
        units: list[FSDPState] = [block._fsdp_unit for block in blocks]
        units[0].context.abandon()
        for unit in units:
            unit.refuse_run()
        states = [BlockState.of(block) for block in blocks]
        for state in states:
            refuse_hooks(state)
            refuse_host_tensors(state)
        cast = [units[0].cast_input(tensor) for tensor in given.tensors]
        template = Template(
            units[0],
            _module(blocks[0]),
            forward,
            states[0],
            self._shared.of(states),
            given.without_tensors(),
            tuple(map(TensorSpec.of, cast)),
            _trained(units),
        )
        key = _key(template, states)
        returned = self._comparison.compare(0, template, key)
        return _Pass(template, given, cast, returned, states, key)

    def _go_on(
        self,
        current: _Pass | None,
        number: int,
        blocks: list[Any],
        forward: Callable[..., Any],
        given: Arguments,
    ) -> _Pass:
        if current is None or current.done + 1 != number:
            found = "block 0" if current is None else f"block {current.done + 1}"
            raise RuntimeError(
                f"block {number} of {len(blocks)} scanned blocks was called where {found} was "
                f"expected. Scanned blocks run as one loop, so a forward calls each of them once, "
                f"in order. Call them so, or run them one by one: remove() of what scan_blocks "
                f"returned"
            )
        _check_handed_on(current, number, given)
        current.done = number
        if not self._comparison.is_done(number, current.key):
            template = replace(
                current.template,
                unit=blocks[number]._fsdp_unit,
                module=_module(blocks[number]),
                forward=forward,
                state=current.states[number],
            )
            self._comparison.compare(number, template, current.key)
        return current

    def _run_loop(self, current: _Pass, units: list[FSDPState]) -> Tensor:
        template = current.template
        weights = BlockWeights(units[0].group, self._options.gather_once_below)
        numbers = range(len(template.state.tensors))
        own = [at for at in numbers if at not in template.shared]
        call = ScanCall(
            units,
            shards_of([unit.group for unit in units]),
            Blocks(template, weights, len(units), self._policy, self._store),
            [torch.stack([s.tensors[at].detach() for s in current.states]) for at in own],
            [template.state.tensors[at].detach() for at in sorted(template.shared)],
            self._loops,
            current.key,
            self._counter,
        )
        output = call.run(current.cast[0], current.cast[1:])
        if not running_units():
            units[0].context.forward_gate.clear()
        return units[0].cast_output(output)


_without_loop: ContextVar[bool] = ContextVar("_without_loop", default=False)


@contextlib.contextmanager
def blocks_one_by_one() -> Iterator[None]:
    """Run scanned blocks without a loop inside, and when backward recomputes these forwards."""
    token = _without_loop.set(True)
    try:
        yield
    finally:
        _without_loop.reset(token)


class _BlockRef:
    """A weak reference to a block that can be copied and pickled."""

    def __init__(self, block: Any) -> None:
        self._block = None if block is None else weakref.ref(block)

    def __reduce__(self) -> tuple[Any, ...]:
        return _BlockRef, (self(),)

    def __call__(self) -> Any:
        return None if self._block is None else self._block()


def _module(block: Any) -> nn.Module:
    return getattr(block, "_fsdp_wrapped_module", block)


def _trained(units: Sequence[FSDPState]) -> tuple[bool, ...]:
    """Return for each parameter whether any block trains it."""
    by_param = zip(*(unit.group.leaves for unit in units), strict=True)
    return tuple(any(leaf.requires_grad for leaf in leaves) for leaves in by_param)


def _key(template: Template, states: Sequence[BlockState]) -> Any:
    return (
        template.arguments.key,
        (*template.specs, *map(TensorSpec.of, template.state.tensors)),
        settings_of(states),
        template.shared,
        template.trained,
        (torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("xla")),
    )


def _check_arguments(number: int, given: Arguments) -> None:
    if given.opaque:
        raise TypeError(
            f"scanned block {number} was called with {', '.join(given.opaque)}, and a loop cannot "
            f"see what it does to that. Leave it out (the cache of a transformers model: "
            f"config.use_cache=False). Without gradients such calls run block by block"
        )
    if not given.tensors:
        raise TypeError(f"scanned block {number} was called without a tensor")
    pairs = zip(given.names, given.tensors, strict=True)
    on_host = [name for name, tensor in pairs if not on_device(tensor)]
    if on_host:
        raise TypeError(
            f"scanned block {number} was called with {', '.join(on_host)} in host memory; a loop "
            f"would keep the values of now. Move it to the XLA device before the loop"
        )


def _check_handed_on(current: _Pass, number: int, given: Arguments) -> None:
    x = given.tensors[0]
    if x is not current.last:
        what = repr(x) if isinstance(x, Placeholder) else "another tensor"
        raise ValueError(
            f"block {number} was called with {what} in the place of the output of block "
            f"{number - 1}. Scanned blocks run as one loop: a forward hands each one's output to "
            f"the next, and does nothing else between them"
        )
    if difference := current.given.first_difference(given):
        raise ValueError(
            f"block {number} was called with other arguments than block 0: {difference}. Make what "
            f"all blocks share once, before the loop, and give all of them the same"
        )
