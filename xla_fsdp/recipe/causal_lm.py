"""Let a causal language model of transformers compute its loss by a ``LinearCrossEntropy``.

The model's own forward stays: it calls its head, and then its loss function with what the head
returned. With labels the head is given targets, too, and returns the loss of each token, which the
loss function then adds up.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xla_fsdp.distributed.context_parallel import mean_over_context
from xla_fsdp.fsdp.engine.autograd import on_device, version_of
from xla_fsdp.fsdp.transformers_hooks import models_of_transformers
from xla_fsdp.nn.chunked import LinearCrossEntropy

IGNORED = -100
"""The label that transformers ignores by default, and so does ``LinearCrossEntropy``."""

LOSS = "self.loss_function"
"""How a forward of transformers calls the default loss."""

OF_THE_LOSS = ("num_items_in_batch", "shift_labels", "ignore_index")
"""Keywords of a forward that its loss function alone uses."""


def causal_lm_in(model: nn.Module) -> Any:
    """Return the causal language model of transformers that ``model`` is or wraps, or None."""
    models = models_of_transformers(model)
    return next((each for each in models if _has_loss_of_tokens(each)), None)


def _has_loss_of_tokens(model: Any) -> bool:
    is_head = isinstance(model.get_output_embeddings(), nn.Module)
    return is_head and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def why_not_streamed(model: Any) -> str:
    """Return why the head of a causal language model cannot compute its loss; empty if it can."""
    head, kind = model.get_output_embeddings(), type(model).__name__
    if type(head) not in (nn.Linear, LinearCrossEntropy):
        # With its module, as PEFT has a class Linear, too.
        return f"it is a {type(head).__module__}.{type(head).__name__}, not an nn.Linear"
    if model.loss_function is not _default_loss():
        return f"{kind} has a loss function of its own"
    if "labels" not in inspect.signature(model.forward).parameters:
        return f"the forward of {kind} takes no labels"
    name = next(name for name, each in model.named_modules() if each is head)
    why = _why_unknown(inspect.unwrap(model.forward), f"self.{name}")
    return f"the forward of {kind} {why}" if why else ""


def _default_loss() -> Any:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss


def _why_unknown(forward: Callable[..., Any], head: str) -> str:
    """Return why it is not known that a forward hands what ``head`` returns, and the labels that it
    is given, to its loss function as they are; empty if it is."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError, TypeError):  # TypeError for what is no function
        return "cannot be read"
    changes = list(_changes(tree))
    made = [target for target, value in changes if _called(_as_it_is(value)) == head]
    losses = [node for node in ast.walk(tree) if _called(node) == LOSS]
    if len(losses) != 1:
        return "computes the loss by something else than its loss function"
    [logits, labels] = _arguments(losses[0])
    is_changed = sum(target == logits for target, _ in changes) > 1
    if made != [logits] or is_changed or not _is_only_handed_on(logits, tree):
        return "computes with the logits before it computes their loss"
    moved = re.compile(r"labels\.to\([\w.]+\.device\)")  # it is there already
    if labels != "labels" or not all(
        moved.fullmatch(ast.unparse(value)) for target, value in changes if target == "labels"
    ):
        return "changes the labels before it computes the loss"
    if not _hands_keywords_on(forward, losses[0], tree):
        return "does not hand all of its keywords on to its loss function"
    return ""


def _hands_keywords_on(forward: Callable[..., Any], loss: Any, tree: ast.AST) -> bool:
    """Return whether the loss function gets the forward's ``**kwargs``, which nothing else reads,
    and which alone tell what is of the loss."""
    name = _keywords_of(inspect.signature(forward))
    uses = [each for each in ast.walk(tree) if isinstance(each, ast.Name) and each.id == name]
    passed = [
        each.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for each in node.keywords
        if each.arg is None
    ]
    told = any(of_loss in ast.unparse(tree) for of_loss in OF_THE_LOSS)
    given = [ast.unparse(each.value) for each in loss.keywords if each.arg is None]
    return given == [name] and all(each in passed for each in uses) and not told


def _keywords_of(signature: inspect.Signature) -> str:
    """Return the name of the parameter for all other keywords, such as "kwargs"."""
    parameters = signature.parameters.values()
    return next((each.name for each in parameters if each.kind is each.VAR_KEYWORD), "")


def _as_it_is(value: ast.expr) -> ast.expr:
    """Return ``x`` for ``x.float()`` or ``x.contiguous()``, which the losses of tokens are."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if value.func.attr not in ("float", "contiguous"):
            break
        value = value.func.value
    return value


def _called(node: ast.AST) -> str:
    """Return what a call calls, as text; nothing for anything else."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _changes(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield name and value of each assignment, also to a part of the name."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                name = target.value if isinstance(target, ast.Subscript) else target
                yield ast.unparse(name), node.value


def _is_only_handed_on(logits: str, tree: ast.AST) -> bool:
    """Return whether nothing is computed with what has this name: it is given to the loss function,
    or as ``logits`` or in a tuple to the output, or asked for its device."""
    uses = Counter(each.id for each in ast.walk(tree) if isinstance(each, ast.Name))
    known = 1  # where it is made
    for node in ast.walk(tree):
        if _called(node) == LOSS or "output" in _called(node).lower():
            known += logits in _arguments(node)
        elif isinstance(node, ast.Tuple):
            known += logits in map(ast.unparse, node.elts)
        elif isinstance(node, ast.Attribute) and node.attr == "device":
            known += ast.unparse(node.value) == logits
    return uses[logits] == known


def _arguments(call: Any) -> list[str]:
    """Return what a call of a loss function takes for logits and labels, as text."""
    names = ("logits", "labels")
    given = dict(zip(names, call.args, strict=False))
    given |= {each.arg: each.value for each in call.keywords}
    return [ast.unparse(given[name]) if name in given else "" for name in names]


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


def _is_tracing(original: Callable[..., bool], tensor: Any = None) -> bool:
    return (isinstance(tensor, Tensor) and on_device(tensor)) or original(tensor)


def _packed(original: Callable[..., Any], position_ids: Tensor) -> Any:
    """Return the number of the text that each token is of, [N, length]."""
    if not on_device(position_ids):
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
            raise RuntimeError(MISUSED)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_ASKED = {getattr(Tensor, name).__get__ for name in ("device", "dtype", "requires_grad")}
"""What a forward may ask logits for."""

MISUSED = (
    "the model computes with its logits, or with other labels than it was given, and its head has "
    "returned the loss already; give parallelize a Recipe(streamed_head=False)"
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
        self._count: Any = None  # of targets in the whole batch, if the caller has told it
        self._labels: Tensor | None = None
        self._version = 0  # of the labels
        self._original = model.loss_function
        model.loss_function = self._loss
        model.forward = MethodType(_with_targets(model.forward, self), model)
        # Hooks of the unit run outside of it, so it is called with targets.
        head.register_forward_pre_hook(self._add_targets)
        head.register_forward_hook(self._guard_losses)

    def run(self, call: Callable[[], Any], labels: Tensor, targets: Tensor, count: Any) -> Any:
        """Run a forward of the model; its output has no logits."""
        self._labels, self._targets, self._count = labels, targets, count
        self._version = version_of(labels)
        try:
            return _without_losses(call())
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
        own = any(kwargs.get(name) is not None for name in OF_THE_LOSS)
        changed = labels is not self._labels or version_of(labels) != self._version
        if not isinstance(logits, LossesOfTokens) or changed or args or own:
            raise RuntimeError(MISUSED)
        count = self._count
        with torch._C.DisableTorchFunctionSubclass():
            total = logits.sum()
        if count is None:
            return mean_over_context(total, (self._targets != IGNORED).float().sum())
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)


def _with_targets(original: Any, streamed: StreamedLoss) -> Callable[..., Any]:
    """Return a forward that streams the loss where it is trained with labels."""
    signature = inspect.signature(original)

    @functools.wraps(getattr(original, "__func__", original))
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs).arguments
        options = given | given.get(_keywords_of(signature), {})
        kept = options.get("logits_to_keep", 0)  # 0 for all of them
        is_cut = isinstance(kept, Tensor) or kept != 0
        if options.get("labels") is None or not self.training or is_cut:
            return original(*args, **kwargs)
        # Models hand these on to their blocks, which have no use for them.
        others = {name: each for name, each in kwargs.items() if name not in OF_THE_LOSS}
        call = functools.partial(original, *args, **others)
        count = options.get("num_items_in_batch")
        return streamed.run(call, options["labels"], _targets(options), count)

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
