"""``parallelize`` and causal language models that compute their loss in ways of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.ranks import run_on_ranks
from test.common.recipes import MODELS
from test.common.scenarios import make
from xla_fsdp.recipe.causal_lm import why_not_streamed

CHANGED = "changes the labels before it computes the loss"
COMPUTES = "computes with the logits before it computes their loss"
OTHER = "computes the loss by something else than its loss function"


def output_of(loss: Any, logits: Any) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast(loss=loss, logits=logits)


def hidden_of(model: Any, input_ids: Tensor) -> Tensor:
    return model.model(input_ids=input_ids, use_cache=False).last_hidden_state


# Forwards of a Llama; what they do beside what its own does is in their names.


def nothing(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    labels = labels.to(logits.device)
    loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
    return output_of(loss, logits=logits)


def widens_at_once(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids)).float().contiguous()
    loss = self.loss_function(logits, labels, self.config.vocab_size)
    return output_of(loss, logits=logits)


def masks_labels(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    labels = labels.masked_fill(labels < 5, -100)
    loss = self.loss_function(logits, labels, self.config.vocab_size)
    return output_of(loss, logits=logits)


def stores_into_labels(self: Any, input_ids: Any = None, labels: Any = None, **kw: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    labels[:, :3] = -100
    loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
    return output_of(loss, logits=logits)


def gives_other_labels(self: Any, input_ids: Any = None, labels: Any = None, **kw: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = self.loss_function(logits, labels.clamp(min=5), self.config.vocab_size)
    return output_of(loss, logits=logits)


def adds_penalty(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = self.loss_function(logits, labels, self.config.vocab_size)
    loss = loss + 0.1 * logits.logsumexp(dim=-1).square().mean()
    return output_of(loss, logits=logits)


def penalty(logits: Tensor) -> Tensor:
    return 0.1 * logits.logsumexp(dim=-1).square().mean()


def adds_penalty_by_name(self: Any, input_ids: Any = None, labels: Any = None, **kw: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = self.loss_function(logits, labels, self.config.vocab_size)
    return output_of(loss + penalty(logits=logits), logits=logits)


def scales_at_once(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids)) * 2
    loss = self.loss_function(logits, labels, self.config.vocab_size)
    return output_of(loss, logits=logits)


def scales_in_place(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    logits *= 2
    loss = self.loss_function(logits, labels, self.config.vocab_size)
    return output_of(loss, logits=logits)


def scales_by_a_method(self: Any, input_ids: Any = None, labels: Any = None, **kw: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    logits.mul_(2)
    loss = self.loss_function(logits, labels, self.config.vocab_size)
    return output_of(loss, logits=logits)


def widens(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = self.loss_function(logits.double(), labels, self.config.vocab_size)
    return output_of(loss, logits=logits)


def has_own_loss(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = nn.CrossEntropyLoss()(logits.flatten(0, 1), labels.flatten())
    return output_of(loss, logits=logits)


def masks_in_place(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    labels.masked_fill_(labels < 5, -100)
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = self.loss_function(logits, labels, self.config.vocab_size)
    return output_of(loss, logits=logits)


def ignores_one_more(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = self.loss_function(logits, labels, self.config.vocab_size, ignore_index=5)
    return output_of(loss, logits=logits)


LEFT_OUT = {
    masks_labels: CHANGED, stores_into_labels: CHANGED, gives_other_labels: CHANGED,
    adds_penalty: COMPUTES, adds_penalty_by_name: COMPUTES, scales_at_once: COMPUTES,
    scales_in_place: COMPUTES, scales_by_a_method: COMPUTES,
    widens: COMPUTES, has_own_loss: OTHER,
}  # fmt: skip

STREAMED = (nothing, widens_at_once)

REFUSED = (masks_in_place, ignores_one_more)
"""That cannot be told from their text."""


def llama(forward: Callable[..., Any]) -> Any:
    model = make(MODELS["llama_untied"], seed=0)
    model.__class__ = type("OwnForCausalLM", (type(model),), {"forward": forward})
    return model


@pytest.mark.parametrize("forward", LEFT_OUT, ids=lambda each: each.__name__)
def test_what_is_left_out_is_told(forward: Any) -> None:
    assert why_not_streamed(llama(forward)) == f"the forward of OwnForCausalLM {LEFT_OUT[forward]}"


def test_what_is_streamed() -> None:
    assert not any(why_not_streamed(llama(each)) for each in STREAMED)
    assert not why_not_streamed(make(MODELS["llama_untied"]))


@pytest.mark.parametrize(
    ("kind", "why"),
    [("BartForCausalLM", OTHER), ("XLNetLMHeadModel", OTHER), ("BambaForCausalLM", COMPUTES)],
)
def test_models_of_transformers_with_losses_of_their_own_keep_their_head(
    kind: str, why: str
) -> None:
    import transformers

    cls = getattr(transformers, kind)
    with torch.device("meta"):
        assert why_not_streamed(cls(cls.config_class())) == f"the forward of {kind} {why}"


def tokens() -> Tensor:
    return torch.arange(1, 13).reshape(2, 6)


def losses(rank: int) -> dict[str, float | str]:
    import torch_xla

    from xla_fsdp import parallelize

    found: dict[str, float | str] = {}
    for forward in (*STREAMED, *LEFT_OUT, *REFUSED):
        model, _, recipe = parallelize(llama(forward).train(), None, "lean")
        assert recipe.streamed_head == (forward not in LEFT_OUT)
        ids = tokens().to(torch_xla.device())
        try:
            loss = model(input_ids=ids, labels=ids.clone()).loss
            loss.backward()
            found[forward.__name__] = loss.item()
        except RuntimeError as error:
            found[forward.__name__] = str(error)
    return found


def test_losses_are_those_of_the_plain_model() -> None:
    [found] = run_on_ranks(losses, 1)
    for forward in REFUSED:
        assert "give parallelize a Recipe(streamed_head=False)" in found.pop(forward.__name__)
    for forward in (*STREAMED, *LEFT_OUT):
        expected = llama(forward).train()(input_ids=tokens(), labels=tokens()).loss
        assert found.pop(forward.__name__) == pytest.approx(expected.item(), rel=1e-5)
    assert not found
