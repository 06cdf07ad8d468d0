"""Let a causal language model of transformers compute its loss by a ``LinearCrossEntropy``.

The model's own forward stays: it calls its head, and then its loss function with what the head
returned. With labels the head is given targets, too, and returns the loss of each token, which the
loss function then adds up.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import version
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xla_fsdp.distributed.context_parallel import mean_over_context
from xla_fsdp.fsdp.engine.autograd import on_device
from xla_fsdp.fsdp.engine.inputs import version_of
from xla_fsdp.fsdp.wrapper import models_of_transformers
from xla_fsdp.nn.activation_checkpoint import unbound_forward
from xla_fsdp.nn.chunked import LinearCrossEntropy
from xla_fsdp.recipe import attention

IGNORED = -100
"""The label that transformers ignores by default, and so does ``LinearCrossEntropy``."""

OF_THE_LOSS = ("num_items_in_batch", "shift_labels", "ignore_index")
"""Keywords of a forward that its loss function alone uses."""


def causal_lm_in(model: nn.Module) -> Any:
    """Return the causal language model of transformers that ``model`` is or wraps, or None."""
    for each in models_of_transformers(model):
        is_causal = type(each).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        if is_causal and isinstance(each.get_output_embeddings(), nn.Module):
            return each
    return None


def why_not_streamed(model: Any) -> str:
    """Return why the head of a causal language model cannot compute its loss; empty if it can."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    head, kind = model.get_output_embeddings(), type(model).__name__
    if type(head) not in (nn.Linear, LinearCrossEntropy):
        # With its module, as PEFT has a class Linear, too.
        return f"it is a {type(head).__module__}.{type(head).__name__}, not an nn.Linear"
    if model.loss_function is not ForCausalLMLoss:
        return f"{kind} has a loss function of its own"
    if "labels" not in inspect.signature(model.forward).parameters:
        return f"the forward of {kind} takes no labels"
    try:
        _try_streaming(model)
    except MisusedLossError:
        return f"the forward of {kind} computes with its logits, or changes what the loss is of"
    except Exception as error:  # a forward may raise anything about a batch without values
        return f"the forward of {kind} could not be tried: {type(error).__name__}: {error}"
    return ""


def _try_streaming(model: Any) -> None:
    """Stream the loss of a copy of the model that has no values.

    Raises:
        MisusedLossError: if the forward does not hand what the head returns, and the labels and
            keywords that it is given, to its loss function as they are.
    """
    trial = _without_values_and_hooks(model)
    forward = trial.forward
    head = LinearCrossEntropy.from_linear(trial.get_output_embeddings(), reduction="none")
    trial.set_output_embeddings(head)
    ids = torch.zeros(1, 4, dtype=torch.long, device="meta")
    parameters = inspect.signature(forward).parameters
    takes_all = _keywords_of(inspect.signature(forward)) != ""
    unread = {name: _Unread() for name in OF_THE_LOSS if takes_all or name in parameters}
    call = functools.partial(forward, input_ids=ids, labels=ids, **unread)
    with torch.device("meta"), torch.no_grad():
        StreamedLoss(trial, head).run(call, ids, ids, None, unread)


def why_all_scores(model: Any) -> str:
    """Return why the attention of a causal language model keeps a tensor of all scores; empty if it
    need not, which a copy of the model without values has shown."""
    kind, before = type(model).__name__, model.config._attn_implementation
    if (found := version("transformers")).startswith("4."):
        return f"transformers {found} says in another way what tokens see; it needs 5"
    if before != "sdpa":
        return f'it has attn_implementation="{before}", not "sdpa"'
    if not model._can_set_attn_implementation():
        return f"{kind} does not take attention by name"
    if attention.is_sdpa_replaced():
        return 'the attention that transformers calls "sdpa" is another function than its own'
    try:
        attention.register()
        trial = _without_values_and_hooks(model)
        trial.config.use_cache = False
        trial.set_attn_implementation({"": attention.WHERE_LONG})
        with torch.device("meta"), torch.no_grad():
            trial(input_ids=torch.zeros(1, 4, dtype=torch.long))
    except Exception as error:  # a model's own code may raise anything about such a mask
        return f"{kind} could not be tried: {type(error).__name__}: {error}"
    return ""


def _without_values_and_hooks(model: Any) -> Any:
    """Return a copy to try something on."""
    trace_masks()
    tensors = [*model.parameters(), *model.buffers()]
    trial = copy.deepcopy(model, {id(each): _without_values(each) for each in tensors}).train()
    for module in trial.modules():  # hooks may keep what they see
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return trial


def _without_values(tensor: Tensor) -> Tensor:
    # In bfloat16, as torch has grouped products of the experts of mixtures in no other dtype.
    dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
    empty = torch.empty_like(tensor, device="meta", dtype=dtype)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


class _Unread:
    """Stands for a keyword of the loss; nothing else can be computed with it."""

    def __bool__(self) -> bool:
        raise MisusedLossError


def _keywords_of(signature: inspect.Signature) -> str:
    """Return the name of the parameter for all other keywords, such as "kwargs"."""
    parameters = signature.parameters.values()
    return next((each.name for each in parameters if each.kind is each.VAR_KEYWORD), "")


def trace_masks() -> None:
    """Let transformers make the masks of XLA tensors without reading these, which would end the
    step's program: it asks whether texts are packed or padded, to leave masks out."""
    from transformers import masking_utils, modeling_utils

    for module, name, traced in (
        (masking_utils, "is_tracing", _is_tracing),
        (modeling_utils, "is_tracing", _is_tracing),
        (masking_utils, "find_packed_sequence_indices", _packed),
    ):
        original = getattr(module, name, None)
        if original is not None and not hasattr(original, "reads_no_device"):
            replacement: Any = functools.wraps(original)(functools.partial(traced, original))
            replacement.reads_no_device = True
            setattr(module, name, replacement)


def _is_unread(tensor: Tensor) -> bool:
    return on_device(tensor) or tensor.is_meta


def _is_tracing(original: Callable[..., bool], tensor: Any = None) -> bool:
    return (isinstance(tensor, Tensor) and _is_unread(tensor)) or original(tensor)


def _packed(original: Callable[..., Any], position_ids: Tensor) -> Any:
    """Return the number of the text that each token is of, [N, length]."""
    if not _is_unread(position_ids):
        return original(position_ids)
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps != 1).long().cumsum(-1)  # of bools torch_xla's cumsum is an OR


class LossesOfTokens(Tensor):
    """Losses in the place of logits: for the loss function alone, so that computing raises."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.float, Tensor.contiguous):  # as they are already
            return args[0]
        if func not in _ASKED:
            raise MisusedLossError
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_ASKED = {getattr(Tensor, name).__get__ for name in ("device", "dtype", "requires_grad")}
"""What a forward may ask logits for."""


class MisusedLossError(RuntimeError):
    """Something was computed with the losses of tokens, or they are of other labels."""

    def __init__(self) -> None:
        super().__init__(
            "the model computes with its logits, or with other labels than it was given, and its "
            "head has returned the loss already; give parallelize a Recipe(streamed_head=False)"
        )


class StreamedLoss:
    """Gives the head of a causal language model its targets, and adds up the losses it returns.

    Args:
        model: of transformers, for which ``why_not_streamed`` is empty; its forward and its loss
            function are replaced.
        head: its ``LinearCrossEntropy`` with reduction "none", or the unit of that.
    """

    def __init__(self, model: Any, head: nn.Module) -> None:
        self._targets: Tensor | None = None
        self._count: Any = None
        self._labels: Tensor | None = None
        self._version = 0  # of the labels
        self._kept: Mapping[str, Any] = {}
        self._is_taken = False
        self._original = model.loss_function
        model.loss_function = self._loss
        model._fsdp_streamed_loss = self  # by which a copy of the model finds its own
        model.forward = MethodType(_with_targets(model), model)
        # Hooks of the unit run outside of it, so it is called with targets.
        head.register_forward_pre_hook(self._add_targets)
        head.register_forward_hook(self._guard_losses)

    def run(
        self,
        call: Callable[[], Any],
        labels: Tensor,
        targets: Tensor,
        count: Any,
        kept: Mapping[str, Any],
    ) -> Any:
        """Run a forward of the model, which is given ``labels`` and hands ``kept`` of
        ``OF_THE_LOSS`` on; its output has no logits. ``count`` is the number of targets in the
        whole batch, if the caller has told it."""
        self._labels, self._targets, self._count = labels, targets, count
        self._version, self._kept, self._is_taken = version_of(labels), kept, False
        try:
            output = call()
            if not self._is_taken:
                raise MisusedLossError
            return _without_losses(output)
        finally:
            self._labels = self._targets = self._count = None

    def _add_targets(self, head: nn.Module, args: tuple[Any, ...]) -> Any:
        return None if self._targets is None else (*args, self._targets)

    def _guard_losses(self, head: nn.Module, args: Any, output: Tensor) -> None:
        if self._targets is not None:
            output.__class__ = LossesOfTokens

    def _loss(
        self, logits: Tensor, labels: Tensor, vocab_size: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self._targets is None:
            return self._original(logits, labels, vocab_size, *args, **kwargs)
        changed = labels is not self._labels or version_of(labels) != self._version
        changed |= any(kwargs.get(name) is not self._kept.get(name) for name in OF_THE_LOSS)
        if not isinstance(logits, LossesOfTokens) or changed or args:
            raise MisusedLossError
        self._is_taken = True
        count = self._count
        with torch._C.DisableTorchFunctionSubclass():
            total = logits.sum()
        if count is None:
            return mean_over_context(total, (self._targets != IGNORED).float().sum())
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)


def _with_targets(model: Any) -> Callable[..., Any]:
    """Return a forward for ``model`` that streams the loss where it is trained with labels."""
    signature, original = inspect.signature(model.forward), unbound_forward(model)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs).arguments
        options = given | given.get(_keywords_of(signature), {})
        kept = options.get("logits_to_keep", 0)  # 0 for all of them
        is_cut = isinstance(kept, Tensor) or kept != 0
        if options.get("labels") is None or not self.training or is_cut:
            return original(self, *args, **kwargs)
        # Models hand these on to their blocks, which have no use for them.
        others = {name: each for name, each in kwargs.items() if name not in OF_THE_LOSS}
        call = functools.partial(original, self, *args, **others)
        count, streamed = options.get("num_items_in_batch"), self._fsdp_streamed_loss
        return streamed.run(call, options["labels"], _targets(options), count, kept={})

    return forward


def _targets(options: Mapping[str, Any]) -> Tensor:
    """Return the next token of each, as the loss function of transformers takes it."""
    targets, ignored = options.get("shift_labels"), options.get("ignore_index", IGNORED)
    if targets is None:
        targets = F.pad(options["labels"], (0, 1), value=ignored)[..., 1:]
    return targets if ignored == IGNORED else targets.masked_fill(targets == ignored, IGNORED)


def _without_losses(output: Any) -> Any:
    """Return an output of a model without what took the place of the logits."""
    if isinstance(output, tuple):
        return tuple(each for each in output if not isinstance(each, LossesOfTokens))
    if not isinstance(output, Mapping):
        return output
    kept = {name: each for name, each in output.items() if not isinstance(each, LossesOfTokens)}
    return type(output)(**kept)
