"""A module that runs as a unit and does not show in names. Base class of the wrappers.

Words: the *wrapped* module is the one that the user gave. Always true: ``named_modules``,
``named_children``, ``named_parameters``, ``state_dict`` and messages use the names that modules had
before they were wrapped, at any depth; attributes that the wrapper lacks are the wrapped module's.
How the unit is made, and what users do with it, is left to ``fully_sharded``.

What users do with a sharded model, whichever interface made it.

Words: see ``unit`` and ``unit_host``. Always true: methods that concern parameters reach all units
inside the module, too.
Mixed into the wrapper's class (``fully_sharded``) and into those of ``fully_shard``; making units
is left to these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, KeysView
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp.checkpoint.save_numbers import numbered
from xla_fsdp.distributed.collectives import XlaCollectives
from xla_fsdp.distributed.groups import Communication
from xla_fsdp.distributed.shard_layout import join_name
from xla_fsdp.fsdp.clip_grad import clip_grads, clip_grads_by_value_
from xla_fsdp.fsdp.engine.module_state import (
    FSDPModuleBase,
    ModuleState,
    attach,
    close_failed_passes,
    mark_state_dicts,
    named_hosts,
    outermost_units,
    units_in,
)
from xla_fsdp.fsdp.engine.reduce_scatter import CommHook, Hook
from xla_fsdp.fsdp.engine.stacked_params import slice_of
from xla_fsdp.fsdp.state_dict.metadata import describe, refuse_other_groups, sharing_ranks
from xla_fsdp.fsdp.state_dict.model import cut_outside_units, refuse_cut_outside
from xla_fsdp.fsdp.state_dict.summon import SummonOptions, summoned

_INNER = "_fsdp_wrapped_module"

# Of transformers models; it calls the model itself, not its wrapper.
_KNOWN_FORWARD_METHODS = ("generate",)


class WrapperModule(FSDPModuleBase, nn.Module):
    """``module`` with its forward run by ``unit``.

    Args:
        module: the wrapped module.
        attachment: with the unit that holds the module's parameters; it is the root of the units
            inside the module from now on.
    """

    _fsdp_is_wrapper = True

    def __init__(self, module: nn.Module, attachment: ModuleState) -> None:
        super().__init__()
        self._forward_methods = {
            name for name in _KNOWN_FORWARD_METHODS if callable(getattr(module, name, None))
        }
        self._fsdp_wrapped_module = module
        self._parameters = ParametersOfChild(module)
        # Before names get their hidden child, which only nn.Module's own loading wants.
        attach(self, attachment)
        HiddenChild(_INNER).register_on(self)
        mark_state_dicts(self)

    @torch.compiler.disable(recursive=False)  # so that a call from dynamo arrives here
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, with its parameters gathered.

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
        """As in ``nn.Module``; wrapper and wrapped module go by the same name."""
        close_failed_passes(self)
        memo = set() if memo is None else memo
        if remove_duplicate and self in memo:
            return
        memo.add(self)
        yield prefix, self
        yield from self._fsdp_wrapped_module.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The wrapped module's children, by their own names."""
        return self._fsdp_wrapped_module.named_children()

    def children(self) -> Iterator[nn.Module]:
        """The wrapped module, which ``apply``, ``train`` and ``to`` must not miss."""
        yield self._fsdp_wrapped_module

    def __getattr__(self, name: str) -> Any:
        """Attributes that the wrapper lacks are the wrapped module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == _INNER:
                raise
            if name in self.__dict__["_forward_methods"]:
                return partial(self._run_method, name)
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        """Indexing goes to the wrapped module (``nn.Sequential``)."""
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    def __len__(self) -> int:
        """Length of the wrapped module (``nn.Sequential``)."""
        return len(self._fsdp_wrapped_module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        """True, as for any module; ``__len__`` would otherwise decide, and fail for most."""
        return True

    @torch.compiler.disable(recursive=False)
    def _run_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._fsdp_run_alone(getattr(self._fsdp_wrapped_module, name), args, kwargs)

    def _fsdp_register_method(self, name: str) -> None:
        if not callable(getattr(self.module, name, None)):
            raise ValueError(
                f"{type(self.module).__name__} has no method {name!r} to register; give the name "
                f"of a method of the wrapped module"
            )
        self._forward_methods.add(name)


class ShardedModule(FSDPModuleBase):
    """Methods of a module that runs as a unit."""

    # ------------------------------------------------------------ training

    @contextlib.contextmanager
    def no_sync(self, *, sharded: bool = False) -> Iterator[None]:
        """Accumulate gradients over the backward passes inside, and the first one outside.

        Args:
            sharded: False keeps full gradients on this rank, which that last pass adds and reduces
                in one: no traffic inside, at the cost of the memory of the full gradients. True
                reduces in every pass and adds shards, as without ``no_sync``: the traffic of every
                pass, and no memory beyond the shards. Loops that always use ``no_sync`` (those of
                integrations) choose between the two here.
        """
        units = self._fsdp_units()
        before = [(unit.settings.sync_gradients, unit.settings.is_last_backward) for unit in units]
        for unit in units:
            unit.settings.sync_gradients, unit.settings.is_last_backward = sharded, False
        try:
            yield
        finally:
            for unit, flags in zip(units, before, strict=True):
                unit.settings.sync_gradients, unit.settings.is_last_backward = flags

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in ``nn.Module``; gradients kept by ``no_sync`` are dropped as well (which
        ``optimizer.zero_grad()`` cannot do)."""
        for param in self.params_with_grad:
            if set_to_none or param.grad is None:
                param.grad = None
            else:
                param.grad.detach_().zero_()
        for unit in self._fsdp_units():
            unit.group.drop_kept()

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters that have a gradient."""
        return [param for param in self._fsdp_parameters() if param.grad is not None]

    def _fsdp_parameters(self) -> list[nn.Parameter]:
        """What is trained, also while modules hold full parameters in its place."""
        leaves = [leaf for unit in self._fsdp_units() for leaf in unit.group.leaves]
        held = self._fsdp_module().parameters()
        others = [param for param in held if isinstance(param, nn.Parameter)]
        return list({id(param): param for param in (*leaves, *others)}.values())

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        groups: list[list[int]] | None = None,
    ) -> Tensor:
        """Scale all gradients so that their norm, as one vector over all ranks, is at most
        ``max_norm``. Every rank must call it. May be called at any time outside of backward, also
        before the first forward or with no gradients at all (the norm is then 0).

        Args:
            max_norm: the largest norm allowed.
            norm_type: p of the p-norm, or ``float("inf")``.
            groups: replica groups to combine the norm over (default: the sharding groups).

        Returns:
            The norm before clipping, a lazy fp32 scalar on the device.

        Raises:
            ValueError: if ``norm_type`` is not positive.
            RuntimeError: if ``no_sync`` kept gradients that no backward has reduced since, or the
                model is stepped in backward.
        """
        self._fsdp_check_gradients("clip_grad_norm_")
        rank = self._fsdp_unit.group.collectives.rank
        over = None if groups is None else XlaCollectives(groups, rank, len(groups[0]))
        return clip_grads(self._fsdp_parameters(), max_norm, norm_type, over)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every gradient element into [-clip_value, clip_value].

        Args:
            clip_value: the largest magnitude allowed, not negative.

        Raises:
            ValueError: if it is negative or not a number.
            RuntimeError: if ``no_sync`` kept gradients that no backward has reduced since, or the
                model is stepped in backward.
        """
        self._fsdp_check_gradients("clip_grad_value_")
        clip_grads_by_value_(self.params_with_grad, clip_value)

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Reduce the gradients of all units in this module by ``hook`` (see ``comm_hooks``).

        Args:
            state: handed to the hook; ``comm_hooks.DefaultState()`` for those of that module.
            hook: called as ``hook(state, grad, shard)``.

        Raises:
            TypeError: if the hook cannot be called.
            ValueError: if a unit has a hook already, or shares its parameters with replicas.
        """
        if not callable(hook):
            raise TypeError(f"a communication hook is a function, got a {type(hook).__name__}")
        groups = [unit.group for unit in self._fsdp_units()]
        if any(group.reduction.comm_hook is not None for group in groups):
            raise ValueError("a communication hook is registered already; there is one for a unit")
        if any(group.replicas.num_shards > 1 for group in groups):
            raise ValueError(
                "a communication hook stands in for the reduce-scatter, but this mesh has "
                "replicas, over which gradients are summed after it; use set_all_reduce_hook"
            )
        for group in groups:
            group.reduction.comm_hook = CommHook(state, hook, group.collectives)

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        """Divide gradients by ``pre`` before the sum over ranks and by ``post`` after it (default:
        factors whose product is the number of ranks, so that gradients are averaged).

        Args:
            pre: positive divisor before the reduce-scatter.
            post: positive divisor after it.
            recursive: for the units inside as well.

        Raises:
            ValueError: if a factor is not positive.
        """
        if not (pre > 0 and post > 0):
            raise ValueError(f"gradient divide factors must be positive, got {pre} and {post}")
        for unit in self._fsdp_units() if recursive else [self._fsdp_unit]:
            reduction = unit.group.reduction
            reduction.predivide, reduction.postdivide = pre, post

    # ------------------------------------------------------------ state

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Inside the block, the modules of the units in ``module`` hold full leaf parameters, in
        the shards' dtype and under their original names. Every rank must enter it.

        Args:
            module: a wrapped module, or one that holds wrapped modules.
            recurse: also for units inside units; otherwise only the outermost in ``module``.
            writeback: cut what the block leaves in the parameters into shards again.
            rank0_only: gather on every rank, but show the result to rank 0 only; not together
                with ``writeback``.
            offload_to_cpu: hold them in host memory; the device then holds one unit's at a time.
            with_grads: full gradients, too.

        Raises:
            ValueError: for ``writeback`` together with ``rank0_only``.
            RuntimeError: inside a forward, a backward or another such block, and if a unit is
                called inside the block.
        """
        options = SummonOptions(writeback, rank0_only, offload_to_cpu, with_grads)
        units = units_in(module) if recurse else outermost_units(module)
        with summoned(units, options):
            yield

    def get_original_names_and_sharded_parameters(self) -> list[tuple[str, Tensor]]:
        """Name and shard of every sharded parameter, with the names from before wrapping. Of
        stacked blocks these are slices of the parameters that an optimizer sees."""
        return [(each.key, slice_of(each.param, each.group)) for each in self._fsdp_named_shards()]

    def get_shard_metadata(self) -> dict[str, Any]:
        """What is needed to merge this model's shards; save it along with ``state_dict()`` under
        the key ``shard_metadata``. A plain dict, see ``xla_fsdp.checkpoint.format``; with
        ``xla_fsdp.compat`` installed it also numbers the saves, see ``xla_fsdp.save_numbers``.

        Raises:
            ValueError: if units have different meshes, or slices along other dims than the first;
                if tensor parallelism has cut parameters that no unit shards.
        """
        refuse_cut_outside(cut_outside_units(self._fsdp_module()), "files of shards")
        refuse_other_groups(self._fsdp_communications())
        shards = list(self._fsdp_named_shards(remove_duplicate=False))
        ranks = sharing_ranks(shards, self._fsdp_attachment.communication)
        return numbered(describe(shards, self._fsdp_cast_buffers(), ranks).to_dict())

    def _fsdp_communications(self) -> list[tuple[str, Communication]]:
        """Of this unit, and of all others that have parameters."""
        return [
            (name, host._fsdp_attachment.communication)
            for name, host in named_hosts(self._fsdp_module())
            if not name or host._fsdp_unit.group.params
        ]

    def _fsdp_cast_buffers(self) -> dict[str, torch.dtype]:
        return {
            join_name(prefix, name): dtype
            for prefix, host in named_hosts(self._fsdp_module(), remove_duplicate=False)
            for name, dtype in host._fsdp_attachment.cast_buffers.items()
        }

    def _fsdp_check_gradients(self, method: str) -> None:
        if any(unit.group.steps_in_backward for unit in self._fsdp_units()):
            raise RuntimeError(
                f"{method} was called on a model that is stepped in backward: its gradients are "
                f"gone by now. Do without, or step after backward (remove() of what "
                f"step_in_backward returned)"
            )
        if any(unit.group.has_kept for unit in self._fsdp_units()):
            raise RuntimeError(
                f"{method} was called while gradients kept by no_sync() are not reduced yet; run "
                f"the last backward of the accumulation outside no_sync() first"
            )


class HiddenChild:
    """Takes a child's name out of its parent's state dicts, and puts it in for loading.

    nn.Module's own (de)serialization walks registered children, so the name is in its keys.

    Args:
        child: attribute name of the child.
    """

    def __init__(self, child: str) -> None:
        self._inner = f"{child}."
        self._errors: list[str] = []  # of the load that is going on

    def register_on(self, parent: nn.Module) -> None:
        """Register the hooks that do it."""
        # A partial because torch sets an attribute on this hook, which a method does not take.
        parent.register_state_dict_post_hook(partial(self._take_out))
        parent.register_load_state_dict_pre_hook(self._put_in)
        parent.register_load_state_dict_post_hook(self._take_out_of_report)

    def _take_out(
        self, parent: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        inner = prefix + self._inner
        for key in [key for key in state if key.startswith(inner)]:
            state[prefix + key.removeprefix(inner)] = state.pop(key)

    def _put_in(
        self,
        parent: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        self._errors = errors
        for key in [key for key in state if key.startswith(prefix)]:
            state[prefix + self._inner + key.removeprefix(prefix)] = state.pop(key)

    def _take_out_of_report(self, parent: nn.Module, report: Any) -> None:
        for messages in (report.missing_keys, report.unexpected_keys, self._errors):
            messages[:] = [message.replace(self._inner, "") for message in messages]
        self._errors = []


class ParametersOfChild(dict[str, Any]):
    """The parameter registry of a wrapper: it holds nothing, and knows its child's by name.

    Code that walks a model by ``named_children`` (the weight-decay groups of transformers) asks
    every module's registry for its names. ``items`` and ``values`` are empty, as nn.Module, which
    asks for those, visits the child as well. What is set here is set on the child.

    Args:
        child: the hidden child.
    """

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self._child = child

    def __iter__(self) -> Iterator[str]:
        return iter(self._child._parameters)

    def __len__(self) -> int:
        return len(self._child._parameters)

    def __contains__(self, name: object) -> bool:
        return name in self._child._parameters

    def __getitem__(self, name: str) -> Any:
        return self._child._parameters[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._child._parameters[name] = value

    def __delitem__(self, name: str) -> None:
        del self._child._parameters[name]

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """The child's parameter names."""
        return self._child._parameters.keys()
