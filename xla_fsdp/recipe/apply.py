"""``parallelize``: shard a model and its optimizer as a recipe says.

The features themselves are those of the wrapper, ``scan_blocks``, ``LinearCrossEntropy``,
``StreamedEmbedding``, ``step_in_backward`` and ``compile_step``; here is what a model allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from os import PathLike
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import NamedTuple  # Python's own is generic from 3.11 on

from xla_fsdp.distributed.mesh import EXPERT, TENSOR, Mesh, as_mesh
from xla_fsdp.distributed.placement import placement_in
from xla_fsdp.fsdp.engine.module_state import named_fsdp_modules
from xla_fsdp.fsdp.engine.shard_tensor import is_sharded
from xla_fsdp.fsdp.init.build import subclass_problems
from xla_fsdp.fsdp.wrapper import XlaFullyShardedDataParallel, models_of_transformers
from xla_fsdp.nn.activation_checkpoint import checkpoint_module
from xla_fsdp.optim.held_params import held_elsewhere
from xla_fsdp.optim.in_backward import step_in_backward
from xla_fsdp.optim.optimizers import (
    StepWatch,
    acts_elementwise,
    needs_closure,
    params_of,
    steps_elementwise,
)
from xla_fsdp.optim.rebind import hold_shards
from xla_fsdp.recipe import experts
from xla_fsdp.recipe.attention import LONG, NAME, WHERE_LONG
from xla_fsdp.recipe.causal_lm import (
    StreamedLoss,
    causal_lm_in,
    why_all_scores,
)
from xla_fsdp.recipe.ends import stream_ends
from xla_fsdp.recipe.forwards import watch_forwards
from xla_fsdp.recipe.options import Name, Recipe
from xla_fsdp.recipe.plan import Plan
from xla_fsdp.scan import scan_blocks
from xla_fsdp.scan.api import holds_blocks
from xla_fsdp.scan.block_scan import module_of
from xla_fsdp.scan.errors import NoLoopError
from xla_fsdp.wrap import (
    Ignored,
    Policy,
    has_forward,
    lambda_auto_wrap_policy,
    wrap_children,
)
from xla_fsdp.xla import ops

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from xla_fsdp.fsdp.option_types import WrapperOptionTypes

O = TypeVar("O")  # noqa: E741
OPT = TypeVar("OPT", bound=Optimizer)

OWNED = ("auto_wrapper_callable", "scan_layers", "scan_stacked")
"""Options of the wrapper that a recipe decides."""


class Parallelized(NamedTuple, Generic[O]):
    """What ``parallelize`` returns: the sharded model, its optimizer, and the recipe with what was
    chosen, whose ``explain()`` prints it."""

    model: XlaFullyShardedDataParallel
    optimizer: O
    recipe: Recipe


@overload
def parallelize(
    model: nn.Module,
    optimizer: None = None,
    recipe: Recipe | Name | PathLike[str] = "lean",
    *,
    auto_wrap_policy: Policy | None = None,
    **options: Unpack[WrapperOptionTypes],
) -> Parallelized[None]: ...
@overload
def parallelize(
    model: nn.Module,
    optimizer: OPT,
    recipe: Recipe | Name | PathLike[str] = "lean",
    *,
    auto_wrap_policy: Policy | None = None,
    **options: Unpack[WrapperOptionTypes],
) -> Parallelized[OPT]: ...
@overload
def parallelize(
    model: nn.Module,
    optimizer: Callable[[Iterable[nn.Parameter]], O],
    recipe: Recipe | Name | PathLike[str] = "lean",
    *,
    auto_wrap_policy: Policy | None = None,
    **options: Unpack[WrapperOptionTypes],
) -> Parallelized[O]: ...
def parallelize(
    model: nn.Module,
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Any] | None = None,
    recipe: Recipe | str | PathLike[str] = "lean",
    *,
    auto_wrap_policy: Policy | None = None,
    **options: Any,
) -> Parallelized[Any]:
    """Shard ``model`` and its optimizer with every feature of this package that the recipe wants
    and the model allows.

    Units are the elements of lists of modules of one class (a transformer's blocks), the embedding
    and the head where these are streamed, and what is left, the whole. Losses, parameters,
    state dicts and checkpoints are those of the plain model. With labels and in training mode the
    output of a causal language model of transformers then has a loss and no logits.

    What the model does not allow is left out, with one line that says which feature, which module
    and why: in ``recipe.explain()`` of the result, and from rank 0 to ``logging``. Some of it only
    a forward shows.

    Args:
        model: the model, not wrapped yet, with the same values on every rank (or on the meta
            device). It is changed.
        optimizer: one of the plain model's parameters: it then holds the shards of these, in the
            same groups; it has made no steps. Or a function that makes one of the sharded
            parameters, as ``partial(AdamW, lr=1e-3)``, for classes that wrap an optimizer. None
            leaves it to you to make one afterwards.
        recipe: a ``Recipe``, "lean", "fast" or "plain", or the file of a saved one (for type
            checkers a ``Path``).
        auto_wrap_policy: chooses the units instead; see ``xla_fsdp.wrap``.
        options: other options of ``XlaFullyShardedDataParallel``, for all units.

    Returns:
        (model, optimizer, recipe). Let ``recipe.compile(step)`` make the training step.

    Raises:
        TypeError: if ``model``, ``optimizer`` or ``recipe`` is something else.
        ValueError: if the model is sharded already, options contradict the recipe, the optimizer
            has made steps, or a field of the recipe is set and not possible.
    """
    chosen = Recipe.of(recipe)
    _check(model, optimizer, chosen, auto_wrap_policy, options)
    plan = Plan(chosen, type(model).__name__)
    options |= _options_of(chosen)
    ignored = _ignored(options)
    lists = dict(_lists_in(model, chosen, auto_wrap_policy, ignored, plan))
    apart = {name: _why_not_stacked(model, blocks, optimizer) for name, blocks in lists.items()}
    if mesh := _mesh_of_experts(options):
        experts.refuse_unfit(model, mesh)
    _choose_experts(model, plan)
    if plan.wants("attention"):
        _choose_attention(causal_lm_in(model), plan)
    ends = stream_ends(model, [each for found in lists.values() for each in found], plan, ignored)
    _cut_experts(model, plan, options)  # after the head's trial, which runs without ranks
    units = [ends.replaced.get(each, each) for found in lists.values() for each in found]
    if not options.get("flatten_parameters"):  # stacks and streamed ends are rows
        rows = any(map(plan.wants, ("scan", "streamed_head", "streamed_embedding")))
        options.setdefault("shard_param_on_dim_0", rows)
    sharded = _shard(model, units, ends.units(), apart, plan, options, ignored)
    if ends.streams_loss:
        StreamedLoss(ends.causal_lm, ends.causal_lm.get_output_embeddings())
    watch_forwards(sharded, plan)
    made = _bind(optimizer, sharded, plan)
    plan.refuse_impossible()
    return Parallelized(sharded, made, plan.finished(len(sharded._fsdp_units()), sharded, made))


# ---------------------------------------------------------------- checks


def _check(
    model: Any, optimizer: Any, recipe: Recipe, policy: Policy | None, options: dict[str, Any]
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"parallelize takes an nn.Module, got {type(model).__name__}")
    if not (optimizer is None or isinstance(optimizer, Optimizer) or callable(optimizer)):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; give an optimizer of the model's "
            f"parameters, a function that makes one of parameters, or None"
        )
    if problems := list(_problems(model, optimizer, recipe, policy, options)):
        raise ValueError("parallelize: " + "; ".join(problems))


def _problems(
    model: nn.Module,
    optimizer: Any,
    recipe: Recipe,
    policy: Policy | None,
    options: dict[str, Any],
) -> Iterator[str]:
    units = (name or "the model" for name, _ in named_fsdp_modules(model))
    # A unit of ``fully_shard``, or the module inside of a wrapper, shows by its parameters alone.
    shards = (name for name, each in model.named_parameters() if is_sharded(each))
    if sharded := next(chain(units, shards), None):
        yield f"{sharded} is sharded already; give the plain model"
    if owned := [name for name in OWNED if name in options]:
        yield f"{', '.join(owned)} is what a recipe decides; set its fields instead"
    yield from subclass_problems(model, _ignored(options))
    if policy is not None and recipe.units is not None:
        yield "auto_wrap_policy and the recipe's units both choose units; give one"
    if recipe.mesh is not None and options.get("mesh", options.get("device_mesh")) is not None:
        yield "a mesh is given, and the recipe has one; give one"
    own = {} if recipe.mesh is None else {"mesh": recipe.init_mesh()}
    if _mesh_of_experts({**options, **own}) and not (experts.whole(model) or _is_cut(model)):
        yield (
            f"the mesh has an axis {EXPERT}, and {type(model).__name__} has no experts of "
            f"transformers 5; cut those of your own by parallelize_module with ExpertParallel "
            f"first, or give the axis shard all ranks"
        )
    if recipe.mesh is not None and TENSOR in dict(recipe.mesh) and not _is_cut(model):
        yield (
            "the recipe's mesh has an axis tensor, and no layer of the model is cut over it; call "
            "parallelize_module(model, recipe.init_mesh()['tensor'], plan) first"
        )
    if recipe.compute_dtype is not None and options.get("compute_dtype") is not None:
        yield "compute_dtype is given, and the recipe has one; give one"
    own_params = {*model.parameters()}
    if isinstance(optimizer, Optimizer) and own_params.isdisjoint(params_of(optimizer)):
        yield (
            f"{type(optimizer).__name__} holds no parameter of {type(model).__name__}; make it of "
            f"model.parameters() of this model, or give a function that makes one"
        )
    if isinstance(optimizer, Optimizer) and optimizer.state:
        yield (
            f"{type(optimizer).__name__} has made steps before; parallelize first, then load its "
            f"state by load_optim_state_dict, or a checkpoint. For one that makes its state at "
            f"once, as Adagrad: parallelize(model, torch.optim.Adagrad), or a partial with options"
        )
    if isinstance(optimizer, Optimizer) and (why := _why_no_steps(optimizer)):
        yield why


def _why_no_steps(optimizer: Any) -> str:
    """Return why no step of ``optimizer`` could run on an XLA device, whatever the recipe."""
    kind = type(optimizer).__name__
    if any(group.get("fused") for group in optimizer.param_groups):
        return (
            f"{kind} has fused=True, for which torch has kernels on other devices only; make it "
            f"without, XLA fuses steps by itself"
        )
    if ops.world_size() > 1 and needs_closure(optimizer):
        return (
            f"{kind} calls its closure as often as products of whole parameters and gradients ask "
            f"for, and each rank would see its shards alone; leave the model unsharded, and step "
            f"it by xla_fsdp.optim.ZeroRedundancyOptimizer(params, {kind}, ...)"
        )
    return ""


def _options_of(recipe: Recipe) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if recipe.compute_dtype is not None:
        options["compute_dtype"] = getattr(torch, str(recipe.compute_dtype))
    if (mesh := recipe.init_mesh()) is not None:
        options["mesh"] = mesh[tuple(name for name in mesh.axis_names if name != TENSOR)]
    return options


def _mesh_of_experts(options: dict[str, Any]) -> Mesh | None:
    """Return the mesh that units are to have, if it has an axis for experts."""
    given = options.get("mesh") or options.get("device_mesh")
    mesh = None if given is None else as_mesh(given)
    return mesh if mesh is not None and EXPERT in mesh.axis_names else None


def _is_cut(model: nn.Module) -> bool:
    """Return whether a layer is cut over ranks, as ``parallelize_module`` does."""
    return any(
        placement_in(module, name) is not None
        for module in model.modules()
        for name in module._parameters
    )


def _ignored(options: dict[str, Any]) -> Ignored:
    names = ("ignored_modules", "ignored_params", "ignored_states")
    given = {name: list(options[name]) for name in names if options.get(name) is not None}
    options.update(given)  # lists, as several units read them
    return Ignored(*(given.get(name) for name in names))


# ---------------------------------------------------------------- units


def _lists_in(
    model: nn.Module, recipe: Recipe, policy: Policy | None, ignored: Ignored, plan: Plan
) -> Iterator[tuple[str, list[nn.Module]]]:
    """Yield the modules that become units, by the name of the container that they are in."""
    if policy is None and recipe.units is None:
        found = [each for each in _equal_lists(model, "") if each[1][0] not in ignored.modules]
        if not found:
            plan.leave_out(
                "units",
                "",
                "it has no list of several modules of one class, so it is one unit; name classes "
                "by units of the recipe, or give an auto_wrap_policy",
            )
        yield from found
        return
    selected: list[nn.Module] = []

    def select(module: nn.Module, **own: Any) -> nn.Module:
        if own:
            raise ValueError(
                f"auto_wrap_policy gives {type(module).__name__} options of its own, "
                f"{', '.join(own)}; parallelize takes options of all units only"
            )
        selected.append(module)
        return module  # replaces itself

    wrap_children(model, policy or _policy_of_names(model, recipe), select, ignored)
    names = {each: name.rpartition(".")[0] for name, each in model.named_modules()}
    for name in dict.fromkeys(names[each] for each in selected):
        yield name, [each for each in selected if names[each] == name]


def _policy_of_names(model: nn.Module, recipe: Recipe) -> Policy:
    there = {type(module).__name__ for module in model.modules()}
    names = recipe.units or ()
    if missing := sorted(set(names) - there):
        raise ValueError(
            f"the recipe's units names {', '.join(missing)}, which {type(model).__name__} does not "
            f"have"
        )
    return partial(lambda_auto_wrap_policy, lambda_fn=lambda each: type(each).__name__ in names)


def _equal_lists(module: nn.Module, name: str) -> Iterator[tuple[str, list[nn.Module]]]:
    """Yield the outermost containers that hold several modules of one class, with these."""
    if isinstance(module, nn.MultiheadAttention):
        return
    blocks = [each for each in module.children() if any(True for _ in each.parameters())]
    is_list = isinstance(module, nn.ModuleList | nn.Sequential) and len(blocks) > 1
    if is_list and len(set(map(type, blocks))) == 1 and has_forward(blocks[0]):
        yield name, blocks
        return
    for inner, child in module.named_children():
        yield from _equal_lists(child, f"{name}.{inner}".lstrip("."))


# ---------------------------------------------------------------- wrapping and loops


def _shard(
    model: nn.Module,
    units: Sequence[nn.Module],
    ends: Sequence[nn.Module],
    apart: Mapping[str, str],
    plan: Plan,
    options: dict[str, Any],
    ignored: Ignored,
) -> XlaFullyShardedDataParallel:
    remat = plan.remat
    options = {**options, "scan_layers": False}  # the recipe says which loops there are
    recomputed = set(units) - set(ends) if remat == "full" else set()
    wrapped = {*units, *ends} - {model}

    def wrap(module: nn.Module) -> nn.Module:
        module = checkpoint_module(module) if module in recomputed else module
        return XlaFullyShardedDataParallel(module, **options)

    policy = partial(lambda_auto_wrap_policy, lambda_fn=wrapped.__contains__)
    # Loops cannot take a cache, and recomputing would append to it again. With one, transformers
    # does not look at how ``position_ids`` pack texts, so it is off in recipes that could have it.
    configs = [getattr(each, "config", None) for each in model.modules()]  # of T5's decoder, too
    note = "config; texts packed by position_ids are kept apart"
    _turn_off(configs, "use_cache", plan, note)
    # Models of transformers recompute by ``torch.utils.checkpoint``, which knows no XLA device.
    parts = [part for each in models_of_transformers(model) for part in each.modules()]
    note = "model; remat says what is recomputed"
    _turn_off(parts, "gradient_checkpointing", plan, note)
    wrap_children(model, policy, wrap, ignored)
    if recomputed or remat != "full":
        plan.do("remat", remat if isinstance(remat, str) else f"all but {', '.join(remat)}")
    if plan.wants("scan"):
        _scan(model, apart, plan)
    if isinstance(remat, tuple) and not plan.has("scan"):
        raise ValueError(
            "the recipe's remat names activations to keep, which only loops do; nothing of "
            f"{plan.kind} runs as one"
        )
    return XlaFullyShardedDataParallel(model, **options)


def _turn_off(modules: Iterable[Any], name: str, plan: Plan, note: str) -> None:
    """Set an attribute of transformers' modules, or of their configs, to False where it is on."""
    if on := [each for each in modules if getattr(each, name, False)]:
        for each in on:
            setattr(each, name, False)
        plan.do(name, f"False in the {note}")


def _choose_experts(model: nn.Module, plan: Plan) -> None:
    for each in models_of_transformers(model):
        if before := experts.choose(each):
            plan.do("experts", f"grouped products, as {before} reads the device")


def _choose_attention(causal_lm: Any, plan: Plan) -> None:
    if causal_lm is None:
        if plan.recipe.attention:
            why = "only causal language models of transformers are known; call xla_fsdp.attention"
            plan.leave_out("attention", "", why)
    elif causal_lm.config._attn_implementation in (NAME, WHERE_LONG):
        plan.do("attention", "without all scores, as the model was given")
    elif why := why_all_scores(causal_lm):
        plan.leave_out("attention", "", why)
    else:
        causal_lm.set_attn_implementation({"": WHERE_LONG})
        plan.do("attention", f"without all scores from {LONG} tokens on")


def _cut_experts(model: nn.Module, plan: Plan, options: dict[str, Any]) -> None:
    mesh = _mesh_of_experts(options)
    if mesh is None:
        return
    # A unit takes values of the first rank that has the same experts, which has cut its own.
    source = 0 if options.get("sync_module_states") else None
    if experts.cut(model, mesh, source):
        plan.do("experts", f"a part of them on each of {mesh.size(EXPERT)} ranks")


def _scan(model: nn.Module, apart: Mapping[str, str], plan: Plan) -> None:
    """Run lists of units as loops, stacked where that is possible.

    Args:
        apart: why the blocks of a list cannot be stacked, by its name.
    """
    found = [(name, each) for name, each in model.named_modules() if holds_blocks(each)]
    offload = plan.wants("offload_activations")
    for name, container in found:
        if why := _why_no_loop(container):
            plan.leave_out("scan", name, why)
            continue
        why_apart = apart.get(name, "")
        ways = [True, False] if plan.wants("stacked") and not why_apart else [False]
        how: dict[str, Any] = {"remat": plan.remat, "offload_activations": offload}
        failed: dict[bool, str] = {}
        for stacked in ways:
            try:
                scan_blocks(list(container.children()), stacked=stacked, **how)
                break
            except NoLoopError as error:
                failed[stacked] = str(error)
        if len(failed) == len(ways):
            plan.leave_out("scan", name, failed[False])
            continue
        done = {"scan": True, "stacked": stacked, "offload_activations": offload}
        for feature in (each for each, is_done in done.items() if is_done):
            plan.do(feature, name or plan.kind)
        if plan.wants("stacked") and not stacked:
            plan.leave_out("stacked", name, why_apart or failed[True])
    if not found:
        plan.leave_out("scan", "", "no list holds units and nothing else")


def _why_no_loop(container: nn.Module) -> str:
    """Return what no loop can run of these blocks, where it shows before they are called."""
    for name, each in container.named_modules():
        if getattr(each, "running_mean", None) is not None:
            return f"{name} changes its running statistics in place, which a loop would lose"
    # Heads or tables, of which a forward may use some. What it does not use has no gradient, and
    # optimizers leave it alone; a stack would have zeros there, and decay.
    is_list = isinstance(container, nn.ModuleList)
    blocks = [module_of(unit) for unit in container.children()]
    inner = [each for block in blocks for each in block.modules()]
    is_torchs = all(type(each).__module__.startswith("torch.nn.modules.") for each in inner)
    if is_list and is_torchs and len(inner) == len(blocks):
        return "its modules are single layers, and no forward need run one after the other"
    return ""


def _why_not_stacked(model: nn.Module, blocks: Sequence[nn.Module], optimizer: Any) -> str:
    """Return why parameters of blocks cannot become a stack, one parameter of the optimizer."""
    return _why_tied(model, blocks) or _why_not_one_parameter(blocks, optimizer)


def _why_tied(model: nn.Module, blocks: Sequence[nn.Module]) -> str:
    inside = {module for block in blocks for module in block.modules()}
    outside = {
        param: f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if module not in inside
        for name, param in module._parameters.items()
        if param is not None
    }
    for block in blocks:
        for name, param in block.named_parameters():
            if param in outside:
                return f"{name} is tied to {outside[param]}, which cannot hold a slice of a stack"
    return ""


def _why_not_one_parameter(blocks: Sequence[nn.Module], optimizer: Any) -> str:
    if not isinstance(optimizer, Optimizer):
        return ""
    kind = type(optimizer).__name__
    if not (steps_elementwise(optimizer) or acts_elementwise(optimizer)):
        return f"{kind} does not treat every element of a parameter by itself"
    if place := held_elsewhere(optimizer):
        return f"{kind} holds parameters in {place}, not in its groups alone"
    group_of = {
        id(p): at for at, group in enumerate(optimizer.param_groups) for p in group["params"]
    }
    groups = [{n: group_of.get(id(p)) for n, p in block.named_parameters()} for block in blocks]
    differs = (n for each in groups for n in each if n in groups[0] and each[n] != groups[0][n])
    if (param := next(differs, None)) is not None:
        return f"{param} is not in the same parameter group of {kind} in all blocks"
    return ""


# ---------------------------------------------------------------- the optimizer


def _bind(optimizer: Any, model: XlaFullyShardedDataParallel, plan: Plan) -> Any:
    """Return the optimizer of the shards; let it step in backward if that is wanted."""
    if isinstance(optimizer, Optimizer):
        hold_shards(optimizer)
        own = {id(each) for each in model.parameters()}
        held = params_of(optimizer)
        if others := sum(id(each) not in own for each in held):
            plan.left_out.append(
                f"optimizer: {type(optimizer).__name__} holds {others} parameters that the model "
                f"has not, of which each rank has gradients of its own: make them a part of the "
                f"model, or average these over the ranks"
            )
    elif optimizer is not None:
        maker, optimizer = optimizer, optimizer(model.parameters())
        if not (hasattr(optimizer, "step") and hasattr(optimizer, "param_groups")):
            raise TypeError(
                f"{maker!r} was called with the sharded parameters and returned "
                f"{optimizer!r}; let it return the optimizer that it makes"
            )
        if why := _why_no_steps(optimizer):
            raise ValueError(f"parallelize: {why}")
    if plan.wants("step_in_backward"):
        if why := _why_not_in_backward(optimizer):
            plan.leave_out("step_in_backward", "", why)
        else:
            step_in_backward(model, optimizer)
            plan.do("step_in_backward", type(optimizer).__name__)
    return optimizer


def _why_not_in_backward(optimizer: Any) -> str:
    if optimizer is None:
        return "parallelize was given no optimizer"
    if not isinstance(optimizer, Optimizer) or hasattr(optimizer, "inner"):
        return f"{type(optimizer).__name__} is more than an optimizer of torch"
    hooks = [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
    ]
    if any(isinstance(hook, StepWatch) for hook in hooks):
        return f"{type(optimizer).__name__} was given to step_in_backward before"
    if hooks:
        return f"{type(optimizer).__name__} has hooks on its steps, which would run by parameter"
    if not steps_elementwise(optimizer):
        return (
            f"{type(optimizer).__name__} is not known to treat every element by itself; say so by "
            f"a static method is_elementwise(options) of its class"
        )
    return ""
