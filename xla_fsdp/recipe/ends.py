"""Heads and embeddings of a model that become ones that are never whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from xla_fsdp.distributed.placement import placement_in
from xla_fsdp.fsdp.wrapper import models_of_transformers
from xla_fsdp.nn.chunked import LinearCrossEntropy, StreamedEmbedding
from xla_fsdp.nn.chunked.chunks import CHUNK_BYTES
from xla_fsdp.recipe.causal_lm import causal_lm_in, trace_masks, why_not_streamed
from xla_fsdp.recipe.plan import Plan
from xla_fsdp.wrap import Ignored

ENDS = (LinearCrossEntropy, StreamedEmbedding)


def stream_ends(model: nn.Module, units: Sequence[nn.Module], plan: Plan, ignored: Ignored) -> Ends:
    """Replace heads and embeddings outside of ``units`` by those that are never whole."""
    inside = {each for unit in units for each in unit.modules() if each is not unit}
    named = {name: each for name, each in model.named_modules() if each not in inside}
    ends = Ends(model, named, causal_lm_in(model), plan, ignored)
    if plan.wants("compile_step") and models_of_transformers(model):
        trace_masks()
    if plan.wants("streamed_head"):
        ends.stream_head()
    if plan.wants("streamed_embedding"):
        ends.stream_embeddings()
    return ends


@dataclass
class Ends:
    """Heads and embeddings outside of blocks."""

    model: nn.Module
    named: dict[str, nn.Module]  # modules of ``model`` outside of blocks
    causal_lm: Any  # the model of transformers that ``model`` is or holds, or None
    plan: Plan
    ignored: Ignored
    replaced: dict[nn.Module, nn.Module] = field(default_factory=dict)  # streamed ones, by others
    streams_loss: bool = False  # whether the loss of ``causal_lm`` is to come from its head

    def units(self) -> list[nn.Module]:
        """Return those that are units of their own: in any recipe those that are streamed, and both
        ends of a causal language model."""
        found: list[Any] = [each for each in self.named.values() if isinstance(each, ENDS)]
        if self.causal_lm is not None:
            both = (self.causal_lm.get_input_embeddings(), self.causal_lm.get_output_embeddings())
            found = [each for each in both if isinstance(each, nn.Module)] + found
        return list(dict.fromkeys([*found, *self.replaced.values()]))

    def stream_head(self) -> None:
        plan = self.plan
        for name, each in self.named.items():
            if isinstance(each, LinearCrossEntropy):
                plan.do("streamed_head", name)
        if plan.has("streamed_head"):
            return
        if self.causal_lm is None:
            plan.leave_out(
                "streamed_head",
                "",
                "only causal language models of transformers have a loss that is known; let the "
                "forward compute it by a LinearCrossEntropy",
            )
            return
        head = self.causal_lm.get_output_embeddings()
        name = next(name for name, each in self.named.items() if each is head)
        if why := why_not_streamed(self.causal_lm) or self._why_left(head):
            plan.leave_out("streamed_head", name, why)
            return
        new = LinearCrossEntropy.from_linear(head, reduction="none")
        self._replace("streamed_head", name, new)
        self.streams_loss = True

    def stream_embeddings(self) -> None:
        tokens = None if self.causal_lm is None else self.causal_lm.get_input_embeddings()
        found = {name: each for name, each in self.named.items() if isinstance(each, nn.Embedding)}
        for name, each in found.items():
            if isinstance(each, StreamedEmbedding):
                self.plan.do("streamed_embedding", name)
            elif tokens is None or each is tokens:
                if why := self._why_whole(each, is_large=each is tokens):
                    self.plan.leave_out("streamed_embedding", name, why)
                else:
                    new = StreamedEmbedding.from_embedding(each)
                    self._replace("streamed_embedding", name, new)
        if not found:
            self.plan.leave_out("streamed_embedding", "", "it has no nn.Embedding")

    def _replace(self, feature: str, name: str, new: nn.Module) -> None:
        self.replaced[self.named[name]] = new
        parent, _, own = name.rpartition(".")
        setattr(self.model.get_submodule(parent), own, new)
        self.plan.do(feature, name)

    def _why_whole(self, each: nn.Embedding, *, is_large: bool) -> str:
        if type(each) is not nn.Embedding:
            return f"{type(each).__name__} is not an nn.Embedding itself, but may compute more"
        if each.max_norm is not None or each.scale_grad_by_freq or each.sparse:
            return "it has max_norm, scale_grad_by_freq or sparse"
        small = each.weight.nbytes <= CHUNK_BYTES and self.plan.recipe.streamed_embedding is None
        if small and not is_large:
            return (
                f"its table takes {each.weight.nbytes:,} bytes, and up to {CHUNK_BYTES:,} are one "
                f"piece"
            )
        return self._why_left(each)

    def _why_left(self, module: nn.Module) -> str:
        params = self.ignored.params
        if module in self.ignored.modules or any(each in params for each in module.parameters()):
            return "it is ignored"
        if placement_in(module, "weight") is not None:
            return "tensor parallelism has cut its weight"
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        if any(hooks) or "forward" in vars(module):
            return "it has hooks, or a forward of its own"
        return ""
