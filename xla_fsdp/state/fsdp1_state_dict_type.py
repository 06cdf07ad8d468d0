"""``set_state_dict_type`` and ``state_dict_type`` of torch's own FSDP, for wrappers.

FULL is the original model's state dict, in host memory. SHARDED and LOCAL both mean this rank's
shards, which ``state_dict()`` also returns while no type is chosen; ``load_state_dict`` then takes
either kind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.optim import Optimizer

from xla_fsdp.fsdp.engine.module_state import FSDPModuleBase
from xla_fsdp.fsdp.engine.transitions import UnitState
from xla_fsdp.optim.optimizers import params_of, shallow_copy
from xla_fsdp.state.model import full_state_dict, load_full_state_dict, load_sharded_state_dict
from xla_fsdp.state.optim_api import cut_optim_state_dict, sharded_optim_state_dict
from xla_fsdp.state.optim_api import optim_state_dict as full_optim_state_dict

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT

CONFIGS = {
    FULL: (FullStateDictConfig, FullOptimStateDictConfig),
    SHARDED: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    LOCAL: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


class StateDictTypes(FSDPModuleBase):
    """Mixin of wrappers: return and load state dicts of the type that the user chose."""

    _chosen: StateDictSettings | None = None

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose the type for all wrappers in ``module``.

        Args:
            module: a wrapped module, or one that holds wrapped modules.
            state_dict_type: a ``torch.distributed.fsdp.StateDictType``.
            state_dict_config: the configuration class of that type. ``rank0_only`` counts for FULL.
                ``offload_to_cpu`` is ignored: FULL is always in host memory, so that the device
                holds one unit's unsharded parameters at a time.
            optim_state_dict_config: the same for ``optim_state_dict``.

        Returns:
            The previous settings.

        Raises:
            TypeError: if a configuration belongs to another type.
            ValueError: if there is no wrapper in ``module``.
        """
        settings = _settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = StateDictTypes.get_state_dict_type(module)
        for wrapper in _wrappers(module):
            wrapper._chosen = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return the chosen settings (default: SHARDED_STATE_DICT).

        Raises:
            ValueError: if there is no wrapper in ``module``.
        """
        return _wrappers(module)[0]._chosen or _settings(SHARDED, None, None)

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Choose the type inside the block; arguments as of ``set_state_dict_type``."""
        with unchosen(module):
            StateDictTypes.set_state_dict_type(
                module, state_dict_type, state_dict_config, optim_state_dict_config
            )
            yield

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return a state dict of the chosen type; arguments as in ``nn.Module``."""
        chosen = self._chosen
        # Inside summon_full_params the modules hold unsharded parameters already.
        is_summoned = self._fsdp_unit.state is UnitState.SUMMONED
        if chosen is None or chosen.state_dict_type is not FULL or is_summoned:
            return super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        full = full_state_dict(self, rank0_only=_rank0_only(chosen.state_dict_config))
        if destination is None and not prefix:
            return full
        found: dict[str, Any] = {} if destination is None else destination
        found.update({prefix + name: value for name, value in full.items()})
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict of the chosen type, or of either if none is chosen."""
        if self._chosen is None or assign:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        is_full = self._chosen.state_dict_type is FULL
        load = load_full_state_dict if is_full else load_sharded_state_dict
        with unchosen(self):
            return load(self, state_dict, strict)

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: Mapping[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return the optimizer's state by names of parameters: of the original model, or of this
        rank's shards if SHARDED or LOCAL was chosen. Every rank must call it.

        Args:
            model: the sharded model.
            optim: the optimizer of its parameters.
            optim_state_dict: what ``optim.state_dict()`` returned on this rank, to convert in the
                place of the present state.
            group: has no effect, as the mesh says who shares a parameter.

        Raises:
            ValueError: as ``xla_fsdp.optim_state_dict``, or if ``optim_state_dict`` is none.
        """
        if optim_state_dict is not None:
            optim = _with_state(optim, optim_state_dict)
        chosen = _wrappers(model)[0]._chosen
        if chosen is not None and chosen.state_dict_type is not FULL:
            return sharded_optim_state_dict(model, optim)
        only = chosen is not None and _rank0_only(chosen.optim_state_dict_config)
        return full_optim_state_dict(model, optim, rank0_only=only)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: Mapping[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """Convert the result of ``optim_state_dict`` to the argument of ``optim.load_state_dict``.

        Every rank must call it, under the type that was chosen for ``optim_state_dict``.

        Args:
            model: the sharded model.
            optim: the optimizer of its parameters; it need not have made a step.
            optim_state_dict: a full one, from any number of ranks, or one of this rank's shards.
            is_named_optimizer: must be False: parameters have numbers in torch's optimizers.
            load_directly: load it into ``optim``, too.
            group: has no effect, as in ``optim_state_dict``.

        Raises:
            ValueError: with every name, group or shape that does not fit.
        """
        if is_named_optimizer:
            raise ValueError("is_named_optimizer=True: torch's optimizers number their parameters")
        chosen = _wrappers(model)[0]._chosen
        full = chosen is None or chosen.state_dict_type is FULL
        cut = cut_optim_state_dict(model, optim, optim_state_dict, full=full)
        if load_directly:
            optim.load_state_dict(cut)
        return cut


@contextlib.contextmanager
def unchosen(module: nn.Module) -> Iterator[None]:
    """Clear the chosen types of the wrappers in ``module``, and restore them after the block."""
    before = [(each, each._chosen) for each in module.modules() if isinstance(each, StateDictTypes)]
    for wrapper, _ in before:
        wrapper._chosen = None
    try:
        yield
    finally:
        for wrapper, settings in before:
            wrapper._chosen = settings


def _with_state(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Optimizer:
    """Return a stand-in for ``optimizer`` that has the state of one of its state dicts."""
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"optim_state_dict has the entries {sorted(state_dict)}; give what optim.state_dict() "
            f"returned, with state and param_groups"
        )
    params = params_of(optimizer)
    state = {params[number]: entries for number, entries in state_dict["state"].items()}
    groups = [
        {**options, "params": own["params"]}
        for own, options in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    ]
    return shallow_copy(optimizer, state, groups)


def _wrappers(module: nn.Module) -> list[StateDictTypes]:
    found = [each for each in module.modules() if isinstance(each, StateDictTypes)]
    if not found:
        raise ValueError(
            f"there is no XlaFullyShardedDataParallel in this {type(module).__name__}; give the "
            f"wrapped model"
        )
    return found


def _settings(kind: StateDictType, config: Any, optim_config: Any) -> StateDictSettings:
    if kind not in CONFIGS:
        raise TypeError(f"state_dict_type is {kind!r}; give an xla_fsdp.StateDictType")
    for given, expected in zip((config, optim_config), CONFIGS[kind], strict=True):
        if given is not None and not isinstance(given, expected):
            raise TypeError(
                f"{kind.name} goes with a {expected.__name__}, got a {type(given).__name__}"
            )
    own, optimizers = CONFIGS[kind]
    return StateDictSettings(kind, config or own(), optim_config or optimizers())


def _rank0_only(config: Any) -> bool:
    return bool(getattr(config, "rank0_only", False))
