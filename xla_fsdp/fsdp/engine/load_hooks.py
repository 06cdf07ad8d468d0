"""Let ``load_state_dict`` of a sharded model take shards, full tensors, or torch_xla's shards.

Invariants: whether a state dict holds shards or full tensors is decided once for each load, by the
mark in this package's state dicts, else by shapes; if neither decides, ``load_state_dict`` raises.
Errors name original parameters and full shapes. Full tensors are cut on the device where they are,
so that only the shard is copied to the rank's device. State dicts say which rank's shards they
hold; those of another rank are refused.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from xla_fsdp.checkpoint.format.plan import original_name
from xla_fsdp.fsdp.engine.param import FSDPParam, OriginalParam
from xla_fsdp.fsdp.engine.param_group import NamedShard
from xla_fsdp.fsdp.engine.stacked_params import stack_loaded_shards
from xla_fsdp.fsdp.engine.thread import package_code
from xla_fsdp.xla import ops
from xla_fsdp.xla.programs import copies_of

# Key of the form in a state dict's metadata, which torch has for each module.
MARK = "xla_fsdp_form"

# Parts of names in the state dicts of torch_xla's wrappers.
UPSTREAM_SEPARATOR = "_FSDP_SHARD_SEPARATOR_"
UPSTREAM_SHARD = "_fsdp_shard."


class Form(Enum):
    """What the tensors of a state dict are: this rank's shards, or the original model's tensors."""

    SHARDS = "shards"
    FULL = "full"


def marked(state: Mapping[str, Any], module: nn.Module, form: Form) -> OrderedDict[str, Any]:
    """Return a copy of ``state``, a state dict for ``module``, that is marked as ``form``."""
    result = OrderedDict(state)
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    versions = getattr(state, "_metadata", {})
    metadata = {name: {**versions.get(name, {}), MARK: form.value} for name in names}
    # Where torch stores a state dict's metadata of each module.
    result._metadata = metadata  # type: ignore[attr-defined]
    return result


def translate(
    shards: Sequence[NamedShard],
    state: dict[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Replace full tensors by shards, before a module is loaded from ``state``.

    Args:
        shards: the sharded parameters of the module and of units in it, outer ones first.
        state: this and the following are the arguments of torch's load hooks.

    Raises:
        ValueError: if neither mark nor shapes tell shards from full tensors; or the shards are
            those of another rank.
    """
    for shard in shards:
        # Without values it would have the shape of the full parameter, and torch compares.
        shard.param.finalize()
    load = _Load(shards, state, prefix, missing, errors)
    load.rename_upstream()
    load.complete_ties()
    if load.form(local_metadata.get(MARK)) is Form.FULL:
        load.cut()
    else:
        before = len(errors)
        load.drop_other_layouts()
        if len(errors) == before:
            own = places_of(each.param for each in shards)
            refuse_other_places(local_metadata.get(PLACES), own, "the state dict")
    stack_loaded_shards(shards, state, prefix, missing)
    load.copy_device_tensors()


@dataclass
class _Load:
    """One load of ``shards`` from the names in ``state`` that begin with ``prefix``."""

    shards: Sequence[NamedShard]
    state: dict[str, Any]
    prefix: str
    missing: list[str]
    errors: list[str]

    def rename_upstream(self) -> None:
        """Remove from the names what torch_xla's wrappers have added, and note their order."""
        given = [key for key in self.state if key.startswith(self.prefix)]
        upstream = any(UPSTREAM_SHARD.rstrip(".") in key for key in given)
        renamed: list[str] = []
        for key in given:
            name = key.removeprefix(self.prefix).replace(UPSTREAM_SEPARATOR, ".")
            name = self.prefix + original_name(name).replace(UPSTREAM_SHARD, "")
            if name != key:
                self.state[name] = self.state.pop(key)
            renamed.append(name)
        of_key = {key: shard.param for shard in self.shards for key in self._shard_keys(shard)}
        with upstream_lock:
            for param in dict.fromkeys(of_key[name] for name in renamed if name in of_key):
                upstream_order.pop(param, None)
                if upstream:
                    upstream_order[param] = next(_next_place)  # never used again: tells one file's

    def complete_ties(self) -> None:
        """Add the missing names of tied parameters, of which torch_xla and safetensors save one."""
        names: dict[object, list[str]] = defaultdict(list)
        for shard in self.shards:
            if not shard.param.is_flat:
                names[shard.param.slots] += self._keys(shard, shard.param.originals[0])
        for tied in names.values():
            present = [key for key in tied if key in self.state]
            for key in tied if present else ():
                self.state.setdefault(key, self.state[present[0]])

    def form(self, mark: Any) -> Form:
        """Return the form of the state dict, from its mark and the tensors' shapes.

        Shapes take precedence over a mark for shards, as a user may have put full tensors into the
        result of ``state_dict()``. One tensor that can only be full decides for all.
        """
        full, shards, either = self._evidence()
        if full or mark == Form.FULL.value:
            return Form.FULL
        if either and not shards and mark is None:
            raise ValueError(
                f"whether the state dict holds full tensors or shards cannot be told: {either[0]} "
                f"and all others are of a size for which both have one shape. Say it: call "
                f"xla_fsdp.load_full_state_dict(model, state_dict) or "
                f"xla_fsdp.load_sharded_state_dict(model, state_dict)"
            )
        return Form.SHARDS

    def cut(self) -> None:
        """Replace full tensors by shards; a tensor of a wrong size, by the model's own shard."""
        for shard in self.shards:
            param = shard.param
            if param.is_flat:
                self.state[self.prefix + shard.key] = self._flat_shard(shard)
                continue
            [original] = param.originals
            for key in self._keys(shard, original):
                if isinstance(value := self.state.get(key), Tensor):
                    fits = self._fits(key, value, original.whole_shape)
                    self.state[key] = param.cut([value]) if fits else param.shard.detach()

    def drop_other_layouts(self) -> None:
        """Replace shards of other shapes than the model's by its own, and report each."""
        for shard in self.shards:
            for key in self._shard_keys(shard):
                value, own = self.state.get(key), shard.param.shard_shape
                if isinstance(value, Tensor) and value.shape != own:
                    self.state[key] = shard.param.shard.detach()
                    self.errors.append(
                        f"size mismatch for {key}: the state dict holds {tuple(value.shape)}, this "
                        f"rank's shard has shape {tuple(own)}. If it was sharded over another "
                        f"number of ranks or flattened otherwise, merge the shards of all ranks "
                        f"(consolidate_sharded_state_dicts) and load the result."
                    )

    def copy_device_tensors(self) -> None:
        """Replace tensors of the device by copies, as a step gives the model's memory away: a
        snapshot is to be there for the next load."""
        on_device = {
            key: value
            for key, value in self.state.items()
            if key.startswith(self.prefix) and isinstance(value, Tensor)
            if value.device.type == "xla"
        }
        with package_code():
            copies = copies_of(list(on_device.values()))
        self.state.update(zip(on_device, copies, strict=True))

    def _keys(self, shard: NamedShard, original: OriginalParam) -> list[str]:
        return [self.prefix + name for name in shard.names_of(original)]

    def _shard_keys(self, shard: NamedShard) -> list[str]:
        if shard.param.is_flat:
            return [self.prefix + shard.key]
        return self._keys(shard, shard.param.originals[0])

    def _evidence(self) -> tuple[list[str], list[str], list[str]]:
        """Return the names of tensors that can only be full, that can only be shards, and that can
        be either although the parameter is sharded. Tensors of other shapes are in no list."""
        full: list[str] = []
        shards: list[str] = []
        either: list[str] = []
        for shard in self.shards:
            param = shard.param
            present = [key for key in self._shard_keys(shard) if key in self.state]
            if param.is_flat:
                shards += present
                names = [key for original in param.originals for key in self._keys(shard, original)]
                full += [key for key in names if key in self.state]
                continue
            for key in present:
                value = self.state[key]
                if not isinstance(value, Tensor):
                    continue
                is_full = value.shape == param.originals[0].whole_shape
                is_shard = value.shape == param.shard_shape
                if is_full and is_shard:
                    either += [key] if param.packing.layout.num_shards > 1 else []
                elif is_full or is_shard:
                    (full if is_full else shards).append(key)
        return full, shards, [key.removeprefix(self.prefix) for key in either]

    def _flat_shard(self, shard: NamedShard) -> Tensor:
        """Return a flat shard with the values of the originals that are in the state dict and fit,
        and its own values elsewhere."""
        param, originals = shard.param, shard.param.originals
        found = [self._pop(shard, original) for original in originals]
        if all(value is None for value in found):
            return param.shard.detach()
        fits = [value is not None for value in found]
        full = [
            torch.zeros(original.whole_shape) if value is None else value
            for value, original in zip(found, originals, strict=True)
        ]
        new = param.cut([tensor.to(param.shard.dtype) for tensor in full])
        if all(fits):
            return new
        pairs = zip(originals, fits, strict=True)
        is_new = param.cut([torch.full(original.whole_shape, fit) for original, fit in pairs])
        return torch.where(is_new, new, param.shard.detach().to(new.device))

    def _pop(self, shard: NamedShard, original: OriginalParam) -> Tensor | None:
        """Remove an original of a flat shard from the state dict and return it, if it is there and
        has the right shape; else report it and return None."""
        keys = self._keys(shard, original)
        values = [self.state.pop(key, None) for key in keys]
        value = next((value for value in values if value is not None), None)
        if value is None:
            self.missing.append(keys[0])
            return None
        return value if self._fits(keys[0], value, original.whole_shape) else None

    def _fits(self, key: str, value: Any, shape: torch.Size) -> bool:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if found == tuple(shape):
            return True
        self.errors.append(
            f"size mismatch for {key}: the state dict holds {found}, the full parameter of the "
            f"model has shape {tuple(shape)}."
        )
        return False


# ---------------------------------------------------------------- whose shards they are

PLACES = "xla_fsdp_places"
"""Key of the places in the metadata of a model's state dict, and in an optimizer's state dict."""

Places = list[list[int]]
"""Each is [rank, number of ranks] among the ranks that share a parameter, and then the same along
its tensor-parallel axis. Equal shards of replicas have one place."""


def places_of(params: Iterable[FSDPParam]) -> Places:
    """Return the places of parameters, each once; none of what is whole."""
    found = {_place(param) for param in params}
    return sorted(list(each) for each in found if each[1] * each[3] > 1)


def _place(param: FSDPParam) -> tuple[int, int, int, int]:
    cut = next(
        (o.placement for o in param.originals if o.placement and o.placement.parts > 1), None
    )
    part = (0, 1) if cut is None else (cut.mesh.local_rank(ops.rank()), cut.parts)
    return (param.collectives.rank, param.collectives.num_shards, *part)


def refuse_other_places(saved: Any, own: Places, what: str) -> None:
    """Raise ValueError if ``what`` says that it holds other shards than those that are loaded.

    Args:
        saved: the places in a state dict; None if it tells none.
        own: of the parameters that are loaded.
        what: names the state dict.
    """
    if saved is not None and saved != own:
        raise ValueError(
            f"{what} holds {_told(saved)}, and this rank loads {_told(own)}. Each rank loads the "
            f"file that it has saved, on as many ranks. For other ranks, or a file of one rank "
            f"alone, save by xla_fsdp.save_checkpoint on all ranks, or save "
            f"xla_fsdp.full_state_dict(model) and xla_fsdp.optim_state_dict(model, optimizer), "
            f"which all ranks call"
        )


def _told(places: Sequence[Sequence[int]]) -> str:
    if not places:
        return "parameters that are not sharded"
    rank, ranks, part, parts = places[0]
    tensor_parallel = f" (tensor-parallel part {part} of {parts})" if parts > 1 else ""
    return f"the shards of rank {rank} of {ranks}{tensor_parallel}"


# ---------------------------------------------------------------- the order of torch_xla's files

upstream_order: WeakKeyDictionary[FSDPParam, int] = WeakKeyDictionary()
"""Where a parameter was in the state dict of torch_xla's FSDP from which it was loaded last:
torch's optimizers know parameters by position."""
_next_place = count(1)
upstream_lock = threading.Lock()  # ranks on CPU are threads
