"""``XlaFullyShardedDataParallel``: shard a module by wrapping it, as torch_xla's own FSDP does."""

from __future__ import annotations

import difflib
import inspect
import sys
import warnings
from collections import UserDict
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, ValuesView
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from xla_fsdp.distributed.collectives import Collectives
from xla_fsdp.fsdp.engine.config import FSDPConfig
from xla_fsdp.fsdp.engine.module_state import (
    ModuleState,
    attach,
    is_fsdp_module,
    is_wrapper,
    mark_state_dicts,
)
from xla_fsdp.fsdp.fsdp1_options import TorchOptions, translate
from xla_fsdp.fsdp.init.build import (
    ManagedModules,
    broadcast_values,
    build_unit,
    check_wrappable,
    communicate,
    refuse_subclasses,
    sharding,
)
from xla_fsdp.fsdp.init.meta_init import materialize
from xla_fsdp.fsdp.module_base import ShardedModule
from xla_fsdp.scan import scan_containers
from xla_fsdp.state.fsdp1_state_dict_type import StateDictTypes
from xla_fsdp.wrap import Ignored, Policy, wrap_children
from xla_fsdp.xla import ops

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from xla_fsdp.fsdp.option_types import TorchOptionTypes

_INNER = "_fsdp_wrapped_module"


def _hide_wrapped_module(
    wrapper: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Take the wrapped module's name out of the keys of a state dict."""
    inner = f"{prefix}{_INNER}."
    for key in [key for key in state if key.startswith(inner)]:
        state[prefix + key.removeprefix(inner)] = state.pop(key)


def _unhide_wrapped_module(wrapper: Any, state: dict[str, Any], prefix: str, *load: Any) -> None:
    """Put the wrapped module's name into keys, for nn.Module's own loading."""
    wrapper._load_errors = load[-1]
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}{_INNER}.{key.removeprefix(prefix)}"] = state.pop(key)


def _hide_in_report(wrapper: Any, report: Any) -> None:
    """Take the wrapped module's name out of the messages of a load."""
    for messages in (report.missing_keys, report.unexpected_keys, wrapper._load_errors):
        messages[:] = [message.replace(f"{_INNER}.", "") for message in messages]
    wrapper._load_errors = []


class WrappedRegistry(UserDict[str, Any]):
    """The parameters or buffers of a wrapper: the keys of the wrapped module's registry, but no
    items.

    Code that walks a model by ``named_children`` (the weight-decay groups of transformers) reads
    names from every module's registry, and ``torch.func.functional_call`` sets buffers in it.
    ``nn.Module`` reads ``items`` and ``values``; these are empty because it visits the wrapped
    module, too, and would find each tensor twice.
    """

    def __init__(self, module: nn.Module, registry: str) -> None:
        self._module, self._registry = module, registry

    @property
    def data(self) -> dict[str, Any]:  # type: ignore[override]
        return cast(dict[str, Any], getattr(self._module, self._registry))

    def items(self) -> ItemsView[str, Any]:
        return ItemsView({})

    def values(self) -> ValuesView[Any]:
        return ValuesView({})


class XlaFullyShardedDataParallel(ShardedModule, StateDictTypes):
    """Shard a module's parameters, gradients and optimizer state over the ranks.

    Wrap inner modules first (or give ``auto_wrap_policy``), the outermost model last; create the
    optimizer afterwards, and call ``optimizer.step()`` itself, not ``xm.optimizer_step``. Each
    wrapped module is one unit: its parameters are gathered before its forward and again before its
    backward, with one all-gather and one reduce-scatter per dtype (and one for each large matrix).
    Gradients are averaged over the ranks. Parameters and buffers move to this rank's XLA device.
    All ranks must hold the same values before wrapping (on CPU ranks that is checked).

    Args:
        module: the module to wrap; it must define ``forward``.
        reshard_after_forward: free unsharded parameters after forward and gather them again in
            backward. False holds them until backward. A number N shards them over groups of N
            neighbouring ranks until backward, which gathers them within these groups.
        flatten_parameters: concatenate the unit's parameters into vectors, one for each dtype and
            for trainable and frozen ones. Optimizers then see these vectors, so parameters of one
            vector cannot be in different optimizer groups.
        execute_sharding_on_init: run the sharding at once, to free the unsharded parameters.
        optimization_barrier_in_forward: tie the unit's gather to its inputs, and fence its outputs.
        optimization_barrier_in_backward: the same for gradients.
        sync_on_finalization: run the graph when a backward pass ends, before the optimizer.
        disable_reshard_on_root: for the outermost unit, whose backward follows at once, act as if
            ``reshard_after_forward`` were False, but for a large plain head, which is used in
            pieces.
        compute_dtype: dtype in which parameters are gathered and used, and gradients are computed
            and reduced, and to which floating-point inputs are cast; None for each parameter's own.
            Shards and their gradients have the parameter's own dtype in any case.
        buffer_dtype: dtype to which floating-point buffers are cast for each forward; None for no
            cast. What is stored keeps its own dtype. Running statistics (BatchNorm) are not cast,
            and a layer that has them computes in their dtype.
        fp32_reduce_scatter: reduce gradients in fp32 whatever the compute dtype.
        sharding_groups: replica groups to shard over (default: one group of all ranks).
        sharding_rank: the caller's position in its group.
        sharding_world_size: the size of a group.
        shard_param_on_dim_0: shard whole rows of dim 0; shards are then [rows, ...]. Stacks of
            matrices, as experts have, that are too few for the ranks are cut between rows of these.
        pin_layout_in_collective_ops: accepted, and ignored with a warning.
        reduce_scatter_bucket_size_mb: None for one reduce-scatter per unit and dtype, 0 for one
            per parameter, else at most so many MB in one.
        coalesce_all_gather_ops: one all-gather per unit and dtype; False for one per parameter.
        auto_wrap_policy: see ``xla_fsdp.wrap``; selects descendants to become units with the same
            options.
        auto_wrapper_callable: called as ``f(module, **options)`` for each module that the policy
            selects (default: this class), for example to add ``checkpoint_module``.
        param_init_fn: initializes modules built on the meta device (default: their
            ``reset_parameters``).
        collectives: replaces the communication, for example ``LocalCollectives`` to measure a
            program without it.
        ignored_modules: modules to leave as they are, with everything inside them: not sharded, not
            moved to the device, gradients not reduced. Units inside ``module`` ignore them, too.
        ignored_params: parameters to leave as they are in the same way.
        ignored_states: modules or parameters, in place of the two options above.
        scan_layers: run containers of identical units as one loop each: True for all containers
            that hold two or more units and nothing else, or names of containers. ``scan_blocks``
            does the same with more options, such as offloading of activations. "auto" for those of
            units that are recomputed, in the forwards that allow it; all others run one by one. By
            default "auto" for containers of eight units or more; False for none.
        scan_stacked: store the parameters of scanned blocks as stacks [num_blocks, ...], as
            ``stacked`` of ``scan_blocks``.
        torch_options: ``mesh``, and the options of torch's own FSDP under its names: see
            ``xla_fsdp.fsdp.fsdp1_options.TorchOptions``.

    Raises:
        TypeError: if ``module`` is not an ``nn.Module`` or a dtype is not a floating-point one.
        ValueError: if the module is wrapped already or has no forward, options contradict, the
            mesh is not one of this job's ranks, or blocks cannot be scanned.
    """

    _fsdp_is_wrapper = True
    # Of transformers models. It calls the wrapped model itself, not the wrapper, so the wrapper
    # must gather the parameters around it.
    _forward_methods = frozenset({"generate"})
    _casts_buffers = False  # for good, as torch_xla's own

    def __init__(
        self,
        module: nn.Module,
        reshard_after_forward: bool | int = True,
        flatten_parameters: bool = False,
        execute_sharding_on_init: bool = True,
        optimization_barrier_in_forward: bool = True,
        optimization_barrier_in_backward: bool = True,
        sync_on_finalization: bool = False,
        disable_reshard_on_root: bool = True,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        fp32_reduce_scatter: bool = False,
        sharding_groups: list[list[int]] | None = None,
        sharding_rank: int | None = None,
        sharding_world_size: int | None = None,
        shard_param_on_dim_0: bool = False,
        pin_layout_in_collective_ops: bool = False,
        reduce_scatter_bucket_size_mb: float | None = None,
        coalesce_all_gather_ops: bool = True,
        auto_wrap_policy: Policy | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        *,
        collectives: Collectives | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        ignored_params: Iterable[nn.Parameter] | None = None,
        ignored_states: Iterable[nn.Module | nn.Parameter] | None = None,
        scan_layers: bool | str | Iterable[str] | None = None,
        scan_stacked: bool = False,
        **torch_options: Unpack[TorchOptionTypes],
    ) -> None:
        check_wrappable(module)
        _check_names(type(self), torch_options)
        config = FSDPConfig(
            reshard_after_forward=reshard_after_forward,
            flatten_parameters=flatten_parameters,
            execute_sharding_on_init=execute_sharding_on_init,
            optimization_barrier_in_forward=optimization_barrier_in_forward,
            optimization_barrier_in_backward=optimization_barrier_in_backward,
            sync_on_finalization=sync_on_finalization,
            disable_reshard_on_root=disable_reshard_on_root,
            compute_dtype=compute_dtype,
            buffer_dtype=buffer_dtype,
            fp32_reduce_scatter=fp32_reduce_scatter,
            sharding_groups=sharding_groups,
            sharding_rank=sharding_rank,
            sharding_world_size=sharding_world_size,
            shard_param_on_dim_0=shard_param_on_dim_0,
            pin_layout_in_collective_ops=pin_layout_in_collective_ops,
            reduce_scatter_bucket_size_mb=reduce_scatter_bucket_size_mb,
            coalesce_all_gather_ops=coalesce_all_gather_ops,
            cast_buffers=self._casts_buffers,
        )
        fsdp1, before = TorchOptions(**torch_options), config
        config = translate(fsdp1, config) if torch_options else config
        config.warn_about_ignored()
        ignored = Ignored(ignored_modules, ignored_params, ignored_states)
        refuse_subclasses([module], ignored)
        if module in ignored.modules:
            warnings.warn(
                "ignored_modules holds the module that is wrapped: all of it is ignored, and "
                "nothing is sharded",
                stacklevel=2,
            )
        if scan_stacked and scan_layers in (None, False, "auto"):
            raise ValueError("scan_stacked says how scan_layers run; give scan_layers=True, too")
        if auto_wrap_policy is None and auto_wrapper_callable is not None:
            warnings.warn("auto_wrapper_callable is ignored without auto_wrap_policy", stacklevel=2)
        with ops.runtime().keep_host_rng():
            if auto_wrap_policy is not None:
                others = {
                    "param_init_fn": param_init_fn,
                    "collectives": collectives,
                    "mixed_precision": fsdp1.mixed_precision,
                    "sync_module_states": fsdp1.sync_module_states or None,
                }
                own = type(self) if self._casts_buffers else XlaFullyShardedDataParallel
                wrapper = auto_wrapper_callable or own
                options = _without_none({"mesh": config.mesh, **others})
                options = {**config.as_keywords(), **options}
                given = {**before.as_keywords(), **torch_options, **others}
                _wrap_inside(module, auto_wrap_policy, wrapper, ignored, options, given)
            managed = ManagedModules([module], ignored)
            if scan_layers or (scan_layers is None and managed.units):
                scan_containers(module, scan_layers, stacked=scan_stacked)
            _install_captures(module)
            communication = communicate(managed, config, collectives)
            origins = materialize(managed, param_init_fn) if managed.on_meta else {}
            if fsdp1.sync_module_states:
                broadcast_values(managed, communication)
            with sharding(managed, config, communication):
                [state] = build_unit(managed, config, communication, origins=origins)
                self._wrap(module, state)

    def _wrap(self, module: nn.Module, state: ModuleState) -> None:
        """Run ``module`` as the unit of ``state``, without adding to its names: ``named_modules``,
        ``state_dict`` and messages use those that modules had before, at any depth."""
        nn.Module.__init__(self)
        self._fsdp_wrapped_module = module
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self._load_errors: list[str] = []  # torch's own list, during load_state_dict
        # First, as hooks run in the order of registration, and those of ``attach`` expect names
        # without that of the wrapped module.
        attach(self, state)
        # A partial of its own for each wrapper, because torch sets an attribute on this hook.
        self.register_state_dict_post_hook(partial(_hide_wrapped_module))
        self.register_load_state_dict_pre_hook(_unhide_wrapped_module)
        self.register_load_state_dict_post_hook(_hide_in_report)
        mark_state_dicts(self)
        # Last, as nn.Module looks for each attribute that is set in them.
        self._parameters = cast(Any, WrappedRegistry(module, "_parameters"))
        self._buffers = cast(Any, WrappedRegistry(module, "_buffers"))

    @torch.compiler.disable(recursive=False)  # so that a call from dynamo arrives here
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward with its parameters gathered.

        Raises:
            RuntimeError: under ``torch.compile``.
        """
        return self._fsdp_run(self._fsdp_wrapped_module, args, kwargs)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules as ``nn.Module`` does; wrapper and wrapped module have the same name."""
        # A pass that raised may have left parameters unsharded; callers expect shards.
        self._fsdp_module_state.unit.schedule.cleanup_failed_passes()
        memo = set() if memo is None else memo
        if remove_duplicate and self in memo:
            return
        memo.add(self)
        yield prefix, self
        yield from self._fsdp_wrapped_module.named_modules(memo, prefix, remove_duplicate)

    def _named_members(
        self,
        get_members_fn: Any,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Any:
        # The wrapped module's own parameters are those of the wrapper, too.
        own: Any = super() if recurse else self._fsdp_wrapped_module
        return own._named_members(get_members_fn, prefix, recurse, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the wrapped module's children, by their own names."""
        return self._fsdp_wrapped_module.named_children()

    def children(self) -> Iterator[nn.Module]:
        """Yield the wrapped module itself, so that ``apply``, ``train`` and ``to`` reach it."""
        yield self._fsdp_wrapped_module

    def __getattr__(self, name: str) -> Any:
        """Look up attributes that the wrapper lacks in the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == _INNER:
                raise
            found = getattr(self._fsdp_wrapped_module, name)
            runs_forward = name in self._forward_methods and callable(found)
            return partial(self._run_method, name) if runs_forward else found

    def __getitem__(self, key: Any) -> Any:
        """Index the wrapped module (``nn.Sequential``)."""
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    def __len__(self) -> int:
        """Return the length of the wrapped module (``nn.Sequential``)."""
        return len(self._fsdp_wrapped_module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True  # by default ``__len__`` would decide, and most wrapped modules have none

    @torch.compiler.disable(recursive=False)
    def _run_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._fsdp_run_alone(getattr(self._fsdp_wrapped_module, name), args, kwargs)

    def _fsdp_register_method(self, name: str) -> None:
        self._forward_methods = self._forward_methods | {name}

    @property
    def xla_device(self) -> torch.device:
        """This rank's XLA device."""
        return self._fsdp_unit.device

    @property
    def rank(self) -> int:
        """This rank's number among those that share the parameters."""
        return self._fsdp_unit.group.collectives.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that share the parameters."""
        return self._fsdp_unit.group.collectives.num_shards

    def extra_repr(self) -> str:
        """Return the options that differ between units."""
        config = self._fsdp_unit.config
        return (
            f"rank={self.rank}, world_size={self.world_size}, "
            f"compute_dtype={config.compute_dtype}, "
            f"flatten_parameters={config.flatten_parameters}, "
            f"reshard_after_forward={config.reshard_after_forward}"
        )


def _without_none(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _check_names(wrapper: type, options: Mapping[str, Any]) -> None:
    """Raise TypeError if ``options`` has names that ``TorchOptions`` does not know."""
    if not options:
        return
    taken = [each.name for each in fields(TorchOptions)]
    wrong = [name for name in options if name not in taken]
    if not wrong:
        return
    parameters = inspect.signature(XlaFullyShardedDataParallel.__init__).parameters.values()
    taken += [each.name for each in parameters if each.kind is not each.VAR_KEYWORD][2:]
    name = wrong[0]
    near = difflib.get_close_matches(name, taken, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(taken))}"
    raise TypeError(f"{wrapper.__name__} has no option {name}; {hint}")


def _wrap_inside(
    module: nn.Module,
    policy: Policy,
    wrapper: Callable[..., nn.Module],
    ignored: Ignored,
    options: dict[str, Any],
    given: dict[str, Any],
) -> None:
    """Wrap the descendants that ``policy`` selects.

    Args:
        options: of most of them.
        given: the user's, which a policy may change for one of them.
    """
    if not callable(wrapper):
        raise TypeError(
            f"auto_wrapper_callable must be callable, got {type(wrapper).__name__}; see "
            f"xla_fsdp.wrap"
        )
    for name, inner in module.named_modules():
        if is_fsdp_module(inner):
            raise ValueError(
                f"{name} is wrapped with FSDP already; auto_wrap_policy wants a module without "
                f"FSDP units inside. Wrap by hand or by policy, not both"
            )

    def wrap(selected: nn.Module, **own: Any) -> nn.Module:
        chosen = _without_none({**given, **own}) if own else options
        return wrapper(selected, **{**chosen, **ignored.as_keywords()})

    wrap_children(module, policy, wrap, ignored)


# ---------------------------------------------------------------- models of transformers


def models_of_transformers(model: nn.Module) -> list[Any]:
    """Return the models of transformers that ``model`` is or contains."""
    # By name, as another rank, a thread of this process, may be about to import transformers.
    base = ("transformers.modeling_utils", "PreTrainedModel")
    return [
        each
        for each in model.modules()
        if any((of.__module__, of.__qualname__) == base for of in type(each).__mro__)
    ]


def _install_captures(model: nn.Module) -> None:
    """Let models of transformers register now the hooks that collect hidden states.

    They look for layers by class when they are first asked for them, and would find units in their
    places, whose children are those of the layers.
    """
    models = models_of_transformers(model)
    # Versions that have it load it with any model.
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    if not models or capturing is None:
        return
    units: list[tuple[dict[str, Any], str, Any]] = [
        (parent._modules, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and is_wrapper(child)
    ]
    for places, name, unit in units:
        places[name] = unit.module
    try:
        for each in models:
            capturing.maybe_install_capturing_hooks(each)
    finally:
        for places, name, unit in units:
            places[name] = unit
