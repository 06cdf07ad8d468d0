"""``parallelize`` and causal language models that compute their loss in ways of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from test.common.ranks import run_on_ranks
from test.common.recipes import MODELS
from test.common.scenarios import make
from xla_fsdp.recipe.causal_lm import why_not_streamed

COMPUTES = "computes with its logits, or changes what the loss is of"


def output_of(loss: Any, logits: Any) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast(loss=loss, logits=logits)


def hidden_of(model: Any, input_ids: Tensor) -> Tensor:
    return model.model(input_ids=input_ids, use_cache=False).last_hidden_state


# Forwards of a Llama; what they do beside what its own does is in their names.


def nothing(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    labels = labels.to(logits.device)
    loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
    return output_of(loss, logits=logits)


def widens_at_once(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids)).float().contiguous()
    loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
    return output_of(loss, logits=logits)


def masks_labels(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    labels = labels.masked_fill(labels < 5, -100)
    loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
    return output_of(loss, logits=logits)


def stores_into_labels(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    labels[:, :3] = -100
    loss = self.loss_function(
        logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
    )
    return output_of(loss, logits=logits)


def gives_other_labels(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = self.loss_function(logits, labels.clamp(min=5), self.config.vocab_size, **kwargs)
    return output_of(loss, logits=logits)


def adds_penalty(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
    loss = loss + 0.1 * logits.logsumexp(dim=-1).square().mean()
    return output_of(loss, logits=logits)


def penalty(logits: Tensor) -> Tensor:
    return 0.1 * logits.logsumexp(dim=-1).square().mean()


def adds_penalty_by_name(
    self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any
) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
    return output_of(loss + penalty(logits=logits), logits=logits)


def scales_at_once(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids)) * 2
    loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
    return output_of(loss, logits=logits)


def scales_in_place(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    logits *= 2
    loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
    return output_of(loss, logits=logits)


def scales_by_a_method(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    logits.mul_(2)
    loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
    return output_of(loss, logits=logits)


def widens(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = self.loss_function(logits.double(), labels, self.config.vocab_size, **kwargs)
    return output_of(loss, logits=logits)


def has_own_loss(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = nn.CrossEntropyLoss()(logits.flatten(0, 1), labels.flatten())
    return output_of(loss, logits=logits)


def masks_in_place(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    labels.masked_fill_(labels < 5, -100)
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
    return output_of(loss, logits=logits)


def ignores_one_more(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = self.loss_function(logits, labels, self.config.vocab_size, ignore_index=5, **kwargs)
    return output_of(loss, logits=logits)


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def penalized(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.loss = output.loss + penalty(output.logits)
        return output

    return penalized


def takes_other_keywords(self: Any, input_ids: Any = None, labels: Any = None, **of: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = self.loss_function(logits, labels, self.config.vocab_size, **of)
    return output_of(loss, logits=logits)


def keeps_keywords(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = self.loss_function(logits, labels, self.config.vocab_size)
    return output_of(loss, logits=logits)


def pops_keywords(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    kwargs.pop("num_items_in_batch", None)
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
    return output_of(loss, logits=logits)


def names_a_keyword(
    self: Any,
    input_ids: Any = None,
    labels: Any = None,
    num_items_in_batch: Any = None,
    **kwargs: Any,
) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
    return output_of(loss / (num_items_in_batch or 1), logits=logits)


def penalizes_the_output(
    self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any
) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
    output = output_of(loss, logits=logits)
    output.loss = output.loss + penalty(output.logits)
    return output


def penalizes_by_tuple(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
    scores, scale = logits, 1.0
    return output_of(loss + scale * penalty(scores), logits=None)


def calls_its_head_again(
    self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any
) -> Any:
    hidden = hidden_of(self, input_ids)
    logits = self.lm_head(hidden)
    loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
    return output_of(loss + penalty(self.lm_head(hidden * 0.5)), logits=logits)


@decorated
def is_decorated(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
    return output_of(loss, logits=logits)


def returns_the_loss(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    return self.loss_function(logits, labels, self.config.vocab_size, **kwargs)


def counts_in_a_buffer(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    self.count += 1
    self.calls += 1
    return nothing(self, input_ids, labels, **kwargs)


def depends_on_the_batch(
    self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any
) -> Any:
    logits = self.lm_head(hidden_of(self, input_ids))
    loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
    return output_of(loss + penalty(logits) if len(input_ids) > 1 else loss, logits=logits)


def has_no_loss(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    return output_of(None, logits=self.lm_head(hidden_of(self, input_ids)))


def fails(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
    raise LookupError("this model wants pictures, too")


LEFT_OUT = (masks_labels, stores_into_labels, gives_other_labels, masks_in_place, adds_penalty,
    adds_penalty_by_name, scales_at_once, scales_in_place, scales_by_a_method, widens, has_own_loss,
    keeps_keywords, pops_keywords, names_a_keyword, ignores_one_more, penalizes_the_output,
    penalizes_by_tuple, calls_its_head_again, is_decorated)  # fmt: skip

PLAIN = (masks_labels, pops_keywords, names_a_keyword, ignores_one_more)
"""Some of them, whose losses are compared."""

STREAMED = (nothing, widens_at_once, takes_other_keywords, returns_the_loss)

REFUSED = (depends_on_the_batch,)
"""That a trial cannot find."""


def llama(forward: Callable[..., Any]) -> Any:
    model = make(MODELS["llama_untied"], seed=0)
    model.__class__ = type("OwnForCausalLM", (type(model),), {"forward": forward})
    return model


@pytest.mark.parametrize("forward", LEFT_OUT, ids=lambda each: each.__name__)
def test_what_is_left_out_is_told(forward: Any) -> None:
    why = why_not_streamed(llama(forward))
    if forward is ignores_one_more:
        assert "could not be tried: TypeError:" in why
        assert "multiple values for keyword argument 'ignore_index'" in why
    else:
        assert why == f"the forward of OwnForCausalLM {COMPUTES}"


def test_a_forward_that_cannot_be_tried_is_told() -> None:
    error = "LookupError: this model wants pictures, too"
    assert why_not_streamed(llama(fails)).endswith(f"could not be tried: {error}")
    assert why_not_streamed(llama(has_no_loss)).endswith(COMPUTES)


def test_what_is_streamed() -> None:
    assert not any(why_not_streamed(llama(each)) for each in STREAMED)
    for name in ("llama_untied", "gpt2_tied"):
        assert not why_not_streamed(make(MODELS[name]))


@pytest.mark.parametrize(
    ("kind", "why"),
    [("BartForCausalLM", COMPUTES), ("XLNetLMHeadModel", COMPUTES), ("MixtralForCausalLM", "")],
)
def test_models_of_transformers_with_losses_of_their_own_keep_their_head(
    kind: str, why: str
) -> None:
    import transformers

    cls = getattr(transformers, kind)
    config = cls.config_class()
    if not why:  # of mixtures the experts alone are large
        config.num_hidden_layers = 2
    with torch.device("meta"):
        found = why_not_streamed(cls(config))
    assert found == (f"the forward of {kind} {why}" if why else "")


def test_a_trial_changes_nothing() -> None:
    model = llama(counts_in_a_buffer)
    model.register_buffer("count", torch.zeros(()))
    model.calls = 0
    seen: list[Any] = []
    model.model.register_forward_hook(lambda *args: seen.append(args))
    before = {name: id(each) for name, each in model.state_dict(keep_vars=True).items()}
    generator = torch.get_rng_state()
    assert not why_not_streamed(model.eval())
    assert (model.count.item(), model.calls, seen, model.training) == (0, 0, [], False)
    assert before == {name: id(each) for name, each in model.state_dict(keep_vars=True).items()}
    assert torch.equal(generator, torch.get_rng_state())
    assert type(model.lm_head) is nn.Linear


def tokens() -> Tensor:
    return torch.arange(1, 13).reshape(2, 6)


GIVEN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "count": {"num_items_in_batch": 5},
    "shifted": {"shift_labels": torch.arange(3, 15).reshape(2, 6)},
}
"""Keywords of the loss."""


def loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


def losses(rank: int) -> dict[str, float | str]:
    import torch_xla

    from xla_fsdp import parallelize

    device = torch_xla.device()
    found: dict[str, float | str] = {}
    for forward in (*STREAMED, *PLAIN, *REFUSED):
        model, _, recipe = parallelize(llama(forward).train(), None, "lean")
        assert recipe.streamed_head == (forward not in PLAIN), forward
        ids = tokens().to(device)
        for given, options in GIVEN.items():
            moved = {
                name: each.to(device) if isinstance(each, Tensor) else each
                for name, each in options.items()
            }
            name = f"{forward.__name__} {given}"
            try:
                loss = loss_of(model(input_ids=ids, labels=ids.clone(), **moved))
                loss.backward()
                found[name] = loss.item()
            except RuntimeError as error:
                found[name] = str(error)
            except TypeError as error:  # where the forward gives a keyword itself
                found[name] = type(error).__name__
    return found


def plain_loss(forward: Any, options: dict[str, Any]) -> float | str:
    try:
        return loss_of(llama(forward).train()(tokens(), tokens(), **options)).item()
    except TypeError as error:
        return type(error).__name__


def test_losses_are_those_of_the_plain_model() -> None:
    [found] = run_on_ranks(losses, 1)
    for given, options in GIVEN.items():
        for forward in REFUSED:
            refusal = found.pop(f"{forward.__name__} {given}")
            assert "give parallelize a Recipe(streamed_head=False)" in refusal, forward
        for forward in (*STREAMED, *PLAIN):
            expected = plain_loss(forward, options)
            if isinstance(expected, float):
                expected = pytest.approx(expected, rel=1e-5)
            assert found.pop(f"{forward.__name__} {given}") == expected, (forward, given)
    assert not found


def replayed(rank: int) -> tuple[list[float], int]:
    import torch_xla

    from xla_fsdp import parallelize

    model, _, recipe = parallelize(llama(widens_at_once).train(), None, "lean")
    step = recipe.compile(lambda ids: model(input_ids=ids, labels=ids).loss)
    ids = tokens().to(torch_xla.device())
    return [step(ids).item() for _ in range(4)], step.replays


def test_a_streamed_loss_is_replayed() -> None:
    [(found, replays)] = run_on_ranks(replayed, 1)
    assert found == pytest.approx([plain_loss(widens_at_once, {})] * 4, rel=1e-5)
    assert replays == 2


def hooked(how: str) -> Any:
    model = llama(nothing).train()
    head = model.lm_head
    if how == "hook":
        head.register_forward_hook(lambda module, args, output: output * 2)
    elif how == "pre-hook":
        head.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    else:
        original = head.forward
        head.forward = lambda x: original(x) * 2
    return model


HOOKS = ("hook", "pre-hook", "forward")


def hooked_losses(rank: int) -> list[float]:
    import torch_xla

    from xla_fsdp import parallelize

    ids = tokens().to(torch_xla.device())
    models = [parallelize(hooked(how), None, "lean").model for how in HOOKS]
    return [each(input_ids=ids, labels=ids).loss.item() for each in models]


def test_a_head_with_hooks_or_a_forward_of_its_own_stays() -> None:
    [found] = run_on_ranks(hooked_losses, 1)
    expected = [hooked(how)(tokens(), tokens()).loss.item() for how in HOOKS]
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_forward_of_the_instance_is_tried() -> None:
    model = llama(nothing)
    model.forward = MethodType(adds_penalty, model)
    assert why_not_streamed(model).endswith(COMPUTES)
    model.forward = functools.partial(nothing, model)
    assert not why_not_streamed(model)
