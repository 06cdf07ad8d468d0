"""One unit's forward: gather, compute, free; and what users ask of the unit.

Words: see ``unit_span``; parameters are *ahead* when they were gathered before their unit's turn.
Always true: outside a span and an open backward a unit holds no full parameter, unless the user
asked for it (``unshard``), so shards are the only truth for optimizers, state dicts and the next
forward.
Backward is left to ``unit_backward``, what the modules hold to ``full_params``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp.backward import BackwardPass, current_pass, running, running_units
from xla_fsdp.config import FSDPConfig
from xla_fsdp.full_params import FullParams, UnitState
from xla_fsdp.graph_nodes import through
from xla_fsdp.param_group import ParamGroup
from xla_fsdp.saved_params import SavedParams
from xla_fsdp.tree import map_tensors, tensors_in
from xla_fsdp.unit_backward import UnitBackward
from xla_fsdp.unit_nodes import Call, Enter, Exit, arrive, unshard
from xla_fsdp.unit_settings import UnitSettings
from xla_fsdp.unit_span import Span, Spans


class Unit:
    """Runs a module's forward with gathered parameters, and its backward likewise.

    Args:
        group: the unit's parameters; it may have none.
        config: the unit's options.
        device: this rank's XLA device.
        parts: of how many modules the unit runs the forward.

    Attributes:
        settings: what may be changed between steps.
        params: what the modules hold.
        in_backward: the half that backward works with.
    """

    def __init__(
        self, group: ParamGroup, config: FSDPConfig, device: torch.device, parts: int = 1
    ) -> None:
        self.group = group
        self.config = config
        self.device = device
        self.parts = parts
        self.settings = UnitSettings(
            BackwardPass(sync_on_end=config.sync_on_finalization),
            reshard_after_forward=config.frees_after_forward,
            keeps_larger=group.smaller is not None,
            keeps_on_root=config.disable_reshard_on_root,
        )
        self.params = FullParams(group, self.settings)
        self._spans = Spans(group, self.params, device)
        self.in_backward = UnitBackward(group, config, self.settings, self.params, self._spans)

    def join(self, root: Unit) -> None:
        """Become a part of the tree of units under ``root``."""
        self.settings.is_root = False
        self.settings.backward = root.settings.backward

    @property
    def backward(self) -> BackwardPass:
        """What the tree of units shares."""
        return self.settings.backward

    @property
    def state(self) -> UnitState:
        """What the modules hold."""
        return self.params.state

    # ------------------------------------------------------------ at the user's request

    def gather_ahead(self, before: Sequence[Tensor] = ()) -> None:
        """Gather the parameters now, once ``before`` are computed, for the next forward or
        backward to use."""
        self.params.gather_ahead(before)

    def linger(self) -> None:
        """What was gathered ahead may not be needed: drop it when the forwards are over."""
        self.backward.linger(self.in_backward)

    def unshard(self) -> None:
        """Let the modules hold full parameters until the next forward, backward or ``reshard``.
        They are connected to the shards: what is computed with them has gradients."""
        self.backward.abandon()
        if self.state is UnitState.SHARDED and self.group.params:
            self.gather_ahead()
            call = Call(self.in_backward, recomputed=False)
            self.params.show(unshard(call, self.params.take_ahead), UnitState.UNSHARDED)

    def reshard(self) -> None:
        """Undo ``unshard``."""
        self.params.reshard()

    @contextlib.contextmanager
    def showing(self, full: list[nn.Parameter]) -> Iterator[None]:
        """Let the modules hold these leaf parameters inside the block, in place of shards.

        Raises:
            RuntimeError: if they hold other full parameters at the time.
        """
        self.backward.abandon()
        with self.params.summoned(full):
            yield

    @contextlib.contextmanager
    def computing_with(self, full: list[Tensor]) -> Iterator[None]:
        """Let the modules hold these full parameters inside the block, for a forward that is traced
        apart from the program around it."""
        self.refuse_run()
        self.reshard()
        self.params.show(full, UnitState.FORWARD)
        try:
            yield
        finally:
            self.params.hide()

    # ------------------------------------------------------------ forward

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any, part: int = 0) -> Any:
        """``forward(*args, **kwargs)``, which is that of a part, with the parameters gathered.

        Raises:
            ValueError: if the forward changed a parameter in place.
        """
        span = self._spans.current
        if span is not None and part in span.running:  # the module calls itself
            return forward(*args, **kwargs)
        self.refuse_run()
        call = self._begin_run(part)
        given = map_tensors(self.cast_input, (args, kwargs))
        inputs = through(partial(Enter.apply, call), given)
        versions = [_version(tensor) for tensor in tensors_in(inputs)]
        compute = self._recompute if call.recomputed else self._compute
        result = compute(call, part, lambda: forward(*inputs[0], **inputs[1]))
        _write_back(given, inputs, versions)
        self._end_run()
        return map_tensors(self.cast_output, result)

    def refuse_run(self) -> None:
        """Raise RuntimeError where the parameters are not to be computed with."""
        if self.state is UnitState.SUMMONED:
            raise RuntimeError(
                "an FSDP unit was called inside summon_full_params, where its parameters are not "
                "connected to the shards that are trained. Call it outside of the block"
            )
        on_meta = [param.key for param in self.group.params if param.leaf.is_meta]
        if on_meta:
            raise RuntimeError(
                f"{', '.join(on_meta)}: on the meta device, without values. Give them memory by "
                f"model.to_empty(device=torch_xla.device()), then values by your own "
                f"initialization or load_state_dict"
            )

    def cast_input(self, tensor: Tensor) -> Tensor:
        """An input, as the unit computes with it."""
        return _cast(tensor, self.config.input_dtype(of_root=self.settings.is_root))

    def cast_output(self, tensor: Tensor) -> Tensor:
        """An output, as the unit returns it."""
        return _cast(tensor, self.config.output_dtype)

    def _begin_run(self, part: int) -> Call:
        """Go on with a span of several parts, or begin anew."""
        self.backward.stay(self.in_backward)
        span = self._spans.current
        if span is not None and part in span.done:
            self._spans.end()
        span = self._spans.current
        if span is None:
            self.backward.abandon()
        recomputed = current_pass() != -1
        return span.call if span and not recomputed else Call(self.in_backward, recomputed)

    def _end_run(self) -> None:
        spans, backward = self._spans, self.backward
        if spans.current is not None:
            backward.linger(self.in_backward)
        if not running_units():
            backward.forward_gate.clear()
            if self.settings.is_root and spans.current is None and current_pass() == -1:
                backward.end_forwards()

    def _compute(self, call: Call, part: int, forward: Callable[[], Any]) -> Any:
        """The original forward."""
        before = call.take_before()
        span = self._spans.current or self._begin_span(call, before)
        span.running.add(part)
        try:
            hooks = span.saved.hooks() if span.call.reshards else nullcontext()
            with running(self.in_backward), hooks:
                outputs = forward()
        except BaseException:
            self._spans.drop()
            raise
        span.running.discard(part)
        span.done.add(part)
        if len(span.done) < self.parts:
            return _exit(call, outputs, span.kept)
        self._spans.end_forward()
        outputs = _exit(call, outputs, span.kept)
        self._spans.end()
        return outputs

    def _begin_span(self, call: Call, before: list[Tensor]) -> Span:
        kept: list[Tensor] = []
        full = unshard(call, partial(self.params.for_forward, before, kept))
        if self.settings.is_root:
            full = [arrive(call, number, tensor) for number, tensor in enumerate(full)]
        if not call.reshards:
            kept = full
        saved = SavedParams(full, self.in_backward.full_for_saved)
        return self._spans.begin(Span(call, kept, saved), full)

    def _recompute(self, call: Call, part: int, forward: Callable[[], Any]) -> Any:
        """The same forward again, for a checkpoint, inside a backward pass.

        What it gathers stays for the backward that follows, which thus needs no gather of its own.
        """
        params, before = self.params, call.take_before()
        if params.state is UnitState.SHARDED:
            joined = self.group.gather.after(before, again=True)
            self.in_backward.open(partial(self.group.gather.full, joined))
        for_backward, versions = params.full, params.versions
        full = unshard(call, params.copies)
        saved = SavedParams(full, self.in_backward.full_for_saved)
        params.show(full, UnitState.BACKWARD, versions=versions)
        try:
            with saved.hooks() if call.reshards else nullcontext():
                outputs = forward()
        finally:
            params.show(for_backward, UnitState.BACKWARD, idle=True, versions=versions)
            saved.forget()
        return _exit(call, outputs, [] if call.reshards else full)


def _exit(call: Call, outputs: Any, kept: list[Tensor]) -> Any:
    """Tie the outputs; ``kept`` lives until backward."""
    return through(partial(Exit.apply, call, len(kept), *kept), outputs)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _write_back(given: Any, inputs: Any, versions: Sequence[int]) -> None:
    """A forward that changes an input in place changes the caller's tensor, as without FSDP."""
    pairs = zip(tensors_in(given), tensors_in(inputs), versions, strict=True)
    for original, moved, version in pairs:
        if moved is not original and _version(moved) > version:
            original.copy_(moved)
