"""A job in training, as what it saves and as what it can take: between live objects and files.

Words: a *job* is a wrapped model and, perhaps, its optimizer and scheduler, seen from one rank.
Always true: what is saved is copied to host memory by one transfer; what is loaded has been checked
in full before ``take`` changes anything.
How ranks agree is ``save_load``'s business, what is in the files ``checkpoint``'s; an optimizer is
read and written by ``optim_state``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xla_fsdp import xla_ops
from xla_fsdp.checkpoint.format import ShardMetadata
from xla_fsdp.checkpoint.load_step import LoadedStep
from xla_fsdp.checkpoint.plain_values import Packed, pack
from xla_fsdp.checkpoint.rank_file import RankContent
from xla_fsdp.checkpoint.reshard import Target
from xla_fsdp.checkpoint.validate import CheckpointError
from xla_fsdp.cpu_ranks import current_rank_thread
from xla_fsdp.optim_entries import OptimizerState
from xla_fsdp.optim_records import record_of, state_from, tensors_of
from xla_fsdp.optim_state import (
    find_problems,
    find_write_problems,
    params_by_key,
    read_optimizer,
    write_optimizer,
)
from xla_fsdp.shard_stacks import to_host
from xla_fsdp.sharded_module import ShardedModule
from xla_fsdp.stacked_entries import Holding
from xla_fsdp.state_dict_types import unchosen
from xla_fsdp.unit_host import reshard_units


class LRScheduler(Protocol):
    """What is used of a learning rate scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass
class LiveJob:
    """What one rank trains.

    Args:
        model: the outermost sharded module.
        optimizer: made of its parameters, or None.
        lr_scheduler: or None.
    """

    model: ShardedModule
    optimizer: Optimizer | None
    lr_scheduler: LRScheduler | None
    metadata: ShardMetadata = field(init=False)
    params: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        reshard_units(self._module)
        data = self.model.get_shard_metadata()
        at = None if data["groups"] is None else xla_ops.rank()
        self.metadata = ShardMetadata.from_dict({**data, "global_rank": at})
        self.params = params_by_key(
            self.model.get_original_names_and_sharded_parameters(), self._module.named_parameters()
        )

    @property
    def _module(self) -> nn.Module:
        return self.model._fsdp_module()

    @property
    def group(self) -> int:
        """Which of the sharding groups, all of which hold the same, this rank is in."""
        at, groups = self.metadata.global_rank, self.metadata.groups or ()
        return next((index for index, group in enumerate(groups) if at in group), 0)

    # ------------------------------------------------------------ saving

    def find_save_problems(self, extra: Any) -> list[str]:
        """Why this cannot be saved, one line each."""
        problems = [] if self.optimizer is None else find_problems(self.optimizer, self.params)
        try:
            self._values(extra)
        except CheckpointError as error:
            problems += [problem.removeprefix("values.") for problem in error.problems]
        return problems

    def content(self, extra: Any) -> RankContent:
        """All that this rank saves; ``find_save_problems`` has found none."""
        state = None
        if self.optimizer is not None:
            state = read_optimizer(self.optimizer, self.params)
        model, states = self._tensors(), {} if state is None else tensors_of(state)
        values = self._values(extra)
        names = [(key, name) for key, each in states.items() for name in each]
        live = [*model.values(), *(states[key][name] for key, name in names), *values.tensors]
        copies = iter(to_host(live))
        model = {key: next(copies) for key in model}
        for key, name in names:
            states[key][name] = next(copies)
        record = None if state is None else record_of(state)
        metadata = replace(self.metadata, optimizer=record)
        return RankContent(metadata, model, states, Packed(values.json, list(copies)))

    def _values(self, extra: Any) -> Packed:
        """Everything that has no shards."""
        state = self._state()
        values = {
            "extra": extra,
            "model": {key: part for key, part in state.items() if not isinstance(part, Tensor)},
            "rng": {
                "device": xla_ops.get_rng_state(self.model._fsdp_unit.device),
                "host": torch.get_rng_state(),
            },
        }
        if self.lr_scheduler is not None:
            values["lr_scheduler"] = self.lr_scheduler.state_dict()
        return pack(values, "values")

    def _tensors(self) -> dict[str, Tensor]:
        """The state dict's tensors, each once."""
        return {
            key: value
            for key, value in self._state().items()
            if isinstance(value, Tensor) and key not in self.metadata.ties
        }

    def _state(self) -> dict[str, Any]:
        """This rank's shards, whichever type of state dict the user has chosen."""
        with unchosen(self._module):
            return self._module.state_dict()

    # ------------------------------------------------------------ loading

    def target(self) -> Target:
        """What this rank needs.

        Raises:
            CheckpointError: if the optimizer is of no use.
        """
        sharded = {record.key for record in self.metadata.params}
        tensors = self._tensors()
        whole = {key: tuple(t.shape) for key, t in tensors.items() if key not in sharded}
        if self.optimizer is None:
            return Target(self.metadata, whole)
        if problems := find_problems(self.optimizer, self.params):
            raise CheckpointError(problems)
        holding = Holding(self.params)
        groups = [holding.all_keys(group["params"]) for group in self.optimizer.param_groups]
        return Target(self.metadata, whole, groups)

    def find_load_problems(self, loaded: LoadedStep) -> list[str]:
        """Why what was loaded cannot be taken, one line each."""
        problems = []
        if self.lr_scheduler is not None and "lr_scheduler" not in loaded.values:
            problems.append("the checkpoint holds no lr_scheduler; load without one")
        if self.optimizer is not None:
            state = self._optimizer_state(loaded)
            problems += find_write_problems(self.optimizer, self.params, state)
        return problems

    def take(self, loaded: LoadedStep, *, strict: bool) -> None:
        """Go on from what was loaded; ``find_load_problems`` has found none."""
        self._take_model(loaded, strict)
        if self.optimizer is not None:
            write_optimizer(self.optimizer, self.params, self._optimizer_state(loaded))
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(loaded.values["lr_scheduler"])
        xla_ops.sync()
        if loaded.same_ranks:
            self._set_rng_state(loaded.values.get("rng"))

    def _optimizer_state(self, loaded: LoadedStep) -> OptimizerState:
        return state_from(loaded.groups, loaded.states, self.params)

    def _take_model(self, loaded: LoadedStep, strict: bool) -> None:
        live = self._state()
        state: dict[str, Any] = {
            key: tensor.reshape(live[key].shape) for key, tensor in loaded.model.items()
        }
        for alias, canonical in self.metadata.ties.items():
            if alias in live and canonical in state:
                state[alias] = state[canonical]
        state.update(loaded.values.get("model", {}))
        with unchosen(self._module):
            self._module.load_state_dict(state, strict=strict)

    def _set_rng_state(self, state: Any) -> None:
        if not isinstance(state, dict):
            return
        xla_ops.set_rng_state(state["device"], self.model._fsdp_unit.device)
        if current_rank_thread() is None or xla_ops.rank() == 0:  # threads share the host's
            torch.set_rng_state(state["host"])
