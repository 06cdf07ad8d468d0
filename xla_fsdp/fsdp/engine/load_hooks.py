"""Let ``load_state_dict`` of a sharded model take what it is given: shards, full tensors, or
upstream's shards.

Words: the *form* of a state dict is ``SHARDS`` (this rank's, as ``state_dict()`` gives them) or
``FULL`` (tensors of the plain model); upstream's shards have the form ``SHARDS`` and other names.
Always true: the form is decided once, for all units below the module that is loaded: by a mark that
our own state dicts carry, else by shapes; where neither tells, the user is asked. What was missing,
unexpected or of a wrong size is reported by original names and full shapes.
Full tensors are cut on the device where they are, so that the rank's device sees only its shard.
Shards of units that keep theirs in stacks become stacks (``shard_stacks``) when all are shards.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from xla_fsdp.checkpoint.plan import original_name
from xla_fsdp.fsdp.engine.named_params import NamedShard
from xla_fsdp.fsdp.engine.param import OriginalParam
from xla_fsdp.fsdp.engine.stacked_params import taken_in
from xla_fsdp.fsdp.engine.tp_params import own_parts

MARK = "xla_fsdp_form"

"""Key of the form in the metadata that torch's state dicts carry for each module."""

UPSTREAM_SEPARATOR = "_FSDP_SHARD_SEPARATOR_"

UPSTREAM_SHARD = "_fsdp_shard."


class Form(Enum):
    """What the tensors of a state dict are."""

    SHARDS = "shards"
    FULL = "full"


def mark_shards(local_metadata: dict[str, Any]) -> None:
    """Note in the metadata of a state dict that it holds shards."""
    local_metadata[MARK] = Form.SHARDS.value


def marked(state: Mapping[str, Any], module: nn.Module, form: Form) -> OrderedDict[str, Any]:
    """``state`` as a state dict that says its form, to be loaded into ``module``."""
    result = OrderedDict(state)
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    versions = getattr(state, "_metadata", {})
    metadata = {name: {**versions.get(name, {}), MARK: form.value} for name in names}
    # The attribute in which torch's state dicts carry what they say of each module.
    result._metadata = metadata  # type: ignore[attr-defined]
    return result


class StateLoading:
    """Makes shards of what a state dict holds for one module and the units in it.

    Knows the load that is going on, and no module: a reference back would make every model a cycle,
    which is freed some time later, with what of its graph has not been computed.
    """

    def __init__(self) -> None:
        self._done_in: list[str] | None = None  # the load in which an outer module did all

    def translate(
        self,
        shards: Sequence[NamedShard],
        inside: Iterable[StateLoading],
        state: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Before a module is loaded from ``state``: replace full tensors by shards.

        Args:
            shards: the sharded parameters of the module and of units in it, outer ones first.
            inside: those of the units in it, which have nothing left to do in this load.
            state: and what follows, as torch gives them to its hooks.

        Raises:
            ValueError: if the form cannot be told.
        """
        if self._done_in is errors:  # torch hands one list through all modules of a load
            return
        for shard in shards:
            shard.param.settle()  # else torch takes one without values for the full parameter
        _rename_upstream(state, prefix)
        _complete_ties(state, prefix, shards)
        if _form(state, prefix, shards, local_metadata.get(MARK)) is Form.FULL:
            for shard in shards:
                _Cut(state, prefix, shard, missing, errors).run()
        else:
            errors += _other_layouts(state, prefix, shards)
        taken_in(shards, state, prefix, missing)
        for other in inside:
            other._done_in = errors

    def finish(self) -> None:
        """Afterwards."""
        self._done_in = None


class _Cut:
    """Replaces the full tensors of one sharded parameter by this rank's shard."""

    def __init__(
        self,
        state: dict[str, Any],
        prefix: str,
        shard: NamedShard,
        missing: list[str],
        errors: list[str],
    ) -> None:
        self._state = state
        self._prefix = prefix
        self._shard = shard
        self._missing = missing
        self._errors = errors

    def run(self) -> None:
        """Do it; parts that are missing or of a wrong size keep their values."""
        if self._shard.param.is_flat:
            self._join()
        else:
            for name in self._shard.names_of(self._shard.param.members[0]):
                self._replace(self._prefix + name)

    def _replace(self, key: str) -> None:
        if key in self._state and isinstance(self._state[key], Tensor):
            param = self._shard.param
            fits = self._fits(key, self._state[key], param.members[0].whole_shape)
            self._state[key] = self._sliced([self._state[key]]) if fits else param.shard.detach()

    def _join(self) -> None:
        members = self._shard.param.members
        found = [self._take(self._shard.names_of(member)) for member in members]
        fits = [self._usable(*pair) for pair in zip(members, found, strict=True)]
        self._state[self._prefix + self._shard.key] = self._merged(found, fits)

    def _take(self, names: Sequence[str]) -> Any:
        """What the state dict has for a parameter of these names, which leave it."""
        values = [self._state.pop(self._prefix + name, None) for name in names]
        return next((value for value in values if value is not None), None)

    def _usable(self, member: OriginalParam, value: Any) -> bool:
        name = self._prefix + self._shard.names_of(member)[0]
        if value is None:
            self._missing.append(name)
            return False
        return self._fits(name, value, member.whole_shape)

    def _merged(self, found: Sequence[Any], fits: Sequence[bool]) -> Tensor:
        """The members that fit, and the rest as it is."""
        param = self._shard.param
        if not any(fits):
            return param.shard.detach()
        full = [
            value if fit else torch.zeros(member.whole_shape)
            for value, fit, member in zip(found, fits, param.members, strict=True)
        ]
        new = self._sliced([tensor.to(param.shard.dtype) for tensor in full])
        if all(fits):
            return new
        taken = [
            torch.full(member.whole_shape, fit)
            for member, fit in zip(param.members, fits, strict=True)
        ]
        return torch.where(self._sliced(taken), new, param.shard.detach().to(new.device))

    def _sliced(self, full: Sequence[Tensor]) -> Tensor:
        param = self._shard.param
        return param.slice_of(own_parts(full, param.members), self._shard.rank)

    def _fits(self, key: str, value: Any, shape: torch.Size) -> bool:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if found == tuple(shape):
            return True
        self._errors.append(
            f"size mismatch for {key}: the state dict holds {found}, the full parameter of the "
            f"model has shape {tuple(shape)}."
        )
        return False


# ---------------------------------------------------------------- which form


def _form(state: Mapping[str, Any], prefix: str, shards: Sequence[NamedShard], mark: Any) -> Form:
    """A mark that says shards only decides where shapes do not: a user may have put full tensors
    into what ``state_dict()`` returned. One tensor that can only be full makes all others full, and
    those of other shapes errors."""
    full, cut, unclear = _evidence(state, prefix, shards)
    if full or mark == Form.FULL.value:
        return Form.FULL
    if unclear and not cut and mark is None:
        raise ValueError(
            f"whether the state dict holds full tensors or shards cannot be told: {unclear[0]} and "
            f"all others are of a size for which both have one shape. Say it: call "
            f"xla_fsdp.load_full_state_dict(model, state_dict) or "
            f"xla_fsdp.load_sharded_state_dict(model, state_dict)"
        )
    return Form.SHARDS


def _evidence(
    state: Mapping[str, Any], prefix: str, shards: Sequence[NamedShard]
) -> tuple[list[str], list[str], list[str]]:
    """Names in the state dict that can only be full, that can only be shards, and others for which
    it matters. Sizes that fit neither say nothing."""
    full, cut, unclear = [], [], []
    for shard in shards:
        names = [name for member in shard.param.members for name in shard.names_of(member)]
        if shard.param.is_flat:
            cut += [shard.key] if prefix + shard.key in state else []
            full += [name for name in names if prefix + name in state]
            continue
        for name in names:
            value = state.get(prefix + name)
            if not isinstance(value, Tensor):
                continue
            is_full = value.shape == shard.param.members[0].whole_shape
            is_cut = value.shape == shard.param.shard_shape
            if is_full and is_cut:
                unclear += [name] if shard.param.packing.layout.num_shards > 1 else []
            elif is_full or is_cut:
                (full if is_full else cut).append(name)
    return full, cut, unclear


def _other_layouts(
    state: dict[str, Any], prefix: str, shards: Sequence[NamedShard]
) -> Iterator[str]:
    """One line for each shard that is cut otherwise than the model's, which keeps its value."""
    for shard in shards:
        own = shard.param.shard_shape
        names = [shard.key] if shard.param.is_flat else shard.names_of(shard.param.members[0])
        for key in [prefix + name for name in names]:
            value = state.get(key)
            if isinstance(value, Tensor) and value.shape != own:
                state[key] = shard.param.shard.detach()
                yield (
                    f"size mismatch for {key}: the state dict holds {tuple(value.shape)}, this "
                    f"rank's shard has shape {tuple(own)}. If it was sharded over another "
                    f"number of ranks or flattened otherwise, merge the shards of all ranks "
                    f"(consolidate_sharded_state_dicts) and load the result."
                )


# ---------------------------------------------------------------- names


def _complete_ties(state: dict[str, Any], prefix: str, shards: Sequence[NamedShard]) -> None:
    """One name of a tied parameter is enough: upstream and safetensors files have only one."""
    names: dict[int, list[str]] = defaultdict(list)
    for shard in shards:
        if not shard.param.is_flat:
            own = shard.names_of(shard.param.members[0])
            names[id(shard.param.slots)] += [prefix + name for name in own]
    for tied in names.values():
        present = [name for name in tied if name in state]
        for name in tied if present else ():
            state.setdefault(name, state[present[0]])


def _rename_upstream(state: dict[str, Any], prefix: str) -> None:
    """Take what upstream's wrappers add out of the names below ``prefix``."""
    for key in [key for key in state if key.startswith(prefix)]:
        name = _unwrapped_name(key.removeprefix(prefix))
        if prefix + name != key:
            state[prefix + name] = state.pop(key)


def _unwrapped_name(name: str) -> str:
    return original_name(name.replace(UPSTREAM_SEPARATOR, ".")).replace(UPSTREAM_SHARD, "")
