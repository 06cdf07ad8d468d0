"""One shard parameter: what the optimizer sees, and the full parameters that it stands for.

Words: a *member* is one original parameter; a shard has one member, or several joined end to end
(*flat*). An *owner* is a module attribute that holds a member; a tied member has several.
Always true: outside a forward or backward pass of the units, owners of a one-member shard hold the
shard parameter (so names, optimizers and state dicts see it), and members of a flat shard are not
attributes at all; while unsharded, owners hold the full tensors. The shard parameter object never
changes. How shards travel between ranks is left to ``param_group``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xla_fsdp import xla_ops
from xla_fsdp.deferred_init import call_in_full, close_all
from xla_fsdp.layout import ShardLayout, offsets
from xla_fsdp.shard_view import ShardView
from xla_fsdp.tensor_placement import TensorPlacement
from xla_fsdp.ties import known_group, remember, remember_group


class ShardParameter(ShardView, nn.Parameter):
    """The leaf parameter that a rank keeps and its optimizer sees.

    A class of its own, so that copies of a model know their shards, too. Lightning and code written
    for upstream look for ``_is_sharded``.

    Attributes:
        shard_rank: place of this rank among those that hold other shards of the same parameter.
    """

    _is_sharded = True
    shard_rank = 0

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickled as what it is; nn.Parameter would come back as one of its own class."""
        return _restored_shard, (self.detach(), self.requires_grad, vars(self))


class UninitializedShard(ShardParameter):
    """A shard that has got memory, and no values yet: see ``deferred_init``."""

    was_open = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return call_in_full(func, args, kwargs or {})

    def settle(self) -> None:
        """The values are complete; from now on it is a shard like others."""
        close_all()
        self.__class__ = ShardParameter  # type: ignore[assignment]


class ParamState(Enum):
    """Where the owners of a shard's members point."""

    SHARDED = auto()
    UNSHARDED = auto()


class Owner:
    """One place in a module tree that holds a parameter.

    The module is not kept alive: it may itself be what holds the unit that owns this.

    Args:
        module: holds it.
        attribute: its name there.
    """

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self._module = weakref.ref(module)
        self.attribute = attribute

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owner) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled with the module."""
        return Owner, (self._module(), self.attribute)

    @property
    def _key(self) -> tuple[int, str]:
        return id(self._module()), self.attribute

    @property
    def module(self) -> nn.Module:
        """The module; an empty one once it is gone, when only a backward pass is left to do."""
        return self._module() or nn.Module()

    def point_at(self, tensor: Tensor) -> None:
        """Make the module's attribute this tensor.

        nn.Module.__setattr__ refuses tensors that are not leaf parameters, hence the registry.
        """
        module = self.module
        module._parameters[self.attribute] = tensor  # type: ignore[assignment]
        _refresh_rnn_weights(module)

    def remove(self) -> None:
        """Take the attribute off the module."""
        module = self.module
        module._parameters.pop(self.attribute, None)
        _refresh_rnn_weights(module)

    def holds(self, tensor: Tensor | None) -> bool:
        """Whether the attribute is this tensor; so it is where the module is gone."""
        module = self._module()
        return module is None or module._parameters.get(self.attribute) is tensor


@dataclass(frozen=True)
class Member:
    """An original parameter: its names (first the canonical one, then ties) in the unit.

    ``parts`` are the numbers of the unit's modules in which the names are; none means the first.
    Where tensor parallelism has cut the plain model's parameter, ``placement`` says how; the shape
    is that of the local one.
    """

    names: tuple[str, ...]
    shape: torch.Size
    owners: tuple[Owner, ...]
    parts: tuple[int, ...] = ()
    placement: TensorPlacement | None = None

    @property
    def whole_shape(self) -> torch.Size:
        """Shape of the plain model's parameter."""
        return self.shape if self.placement is None else torch.Size(self.placement.shape)

    @property
    def is_cut(self) -> bool:
        """Whether ranks along a tensor-parallel axis hold different parts."""
        return self.placement is not None and self.placement.dim is not None


class Places:
    """What the owners of one shard hold, and what they held before.

    Several units may own a parameter of a module that they share, one inside the other, and be
    unsharded at once. An owner holds what was shown there last and is not hidden yet, and the shard
    when nothing is shown.

    Args:
        shard: what stands for the parameter.
        registered: whether it is so under its members' names; members of a flat one are no
            attributes when nothing is shown.
    """

    def __init__(self, shard: nn.Parameter, *, registered: bool) -> None:
        self.shard = shard
        self._registered = registered
        self._shown: list[tuple[Owner, Tensor]] = []

    def show(self, owner: Owner, tensor: Tensor, *, idle: bool) -> None:
        """Let ``owner`` hold ``tensor``, unless it is ``idle`` and something else is shown."""
        self._shown.insert(0 if idle else len(self._shown), (owner, tensor))
        self.refresh(owner)

    def hide(self, owner: Owner, tensor: Tensor) -> None:
        """Undo one ``show``."""
        for index in reversed(range(len(self._shown))):
            if self._shown[index][0] == owner and self._shown[index][1] is tensor:
                del self._shown[index]
                break
        self.refresh(owner)

    def held_by(self, owner: Owner) -> Tensor | None:
        """What the owner should hold; None for no attribute."""
        shown = [tensor for place, tensor in self._shown if place == owner]
        return shown[-1] if shown else self.shard if self._registered else None

    def refresh(self, owner: Owner) -> None:
        """Let ``owner`` hold what it should."""
        tensor = self.held_by(owner)
        if tensor is None:
            owner.remove()
        else:
            owner.point_at(tensor)


class ShardedParam:
    """This rank's shard of one parameter, or of several that were flattened together.

    Args:
        key: name of the shard in the unit's state dict.
        members: the original parameters in joining order.
        shard: leaf parameter of ``layout.shard_numel`` elements on the rank's device; 1-D, or
            [rows, ...] where whole rows of a dim are sharded, which is in its place.
        layout: how the joined members are cut; along another dim, how the member is with that dim
            moved to the front.
        compute_dtype: what full parameters are gathered and used in; None for the shard's own.
        home: for a flat shard, the module that registers it under ``key``; otherwise None.
        places: what another unit's parameter with the same shard keeps of its owners.
        dim: which dim of a single member is cut.
    """

    def __init__(
        self,
        key: str,
        members: Sequence[Member],
        shard: nn.Parameter,
        layout: ShardLayout,
        compute_dtype: torch.dtype | None,
        home: nn.Module | None = None,
        places: Places | None = None,
        dim: int = 0,
    ) -> None:
        self.key = key
        self.members = tuple(members)
        self.layout = layout
        self.dim = dim
        self.compute_dtype = compute_dtype
        self.state = ParamState.SHARDED
        self.places = places or Places(shard, registered=home is None)
        self._home = home
        self._full: list[Tensor] = []
        if home is not None:
            home.register_parameter(key, shard)
        for owner in self._owners():
            self.places.refresh(owner)

    @property
    def shard(self) -> nn.Parameter:
        """The leaf parameter."""
        if isinstance(self.places.shard, UninitializedShard):
            self.places.shard.settle()
        return self.places.shard

    @property
    def is_flat(self) -> bool:
        """Whether the shard is registered on its own, apart from its members."""
        return self._home is not None

    @property
    def by_rows(self) -> bool:
        """Whether the shard has the shape of whole rows of its member's dim."""
        return self.shard.dim() > 1

    @property
    def row_shape(self) -> torch.Size:
        """Shape of a row of a single member."""
        shape = list(self.members[0].shape)
        return torch.Size([*shape[: self.dim], *shape[self.dim + 1 :]])

    @property
    def row_numel(self) -> int:
        """Elements of a row; 0 where the member has no dims."""
        return self.row_shape.numel() if self.members[0].shape else 0

    def in_rows(self, shard: Tensor) -> Tensor:
        """What is cut like the shard, with the dim that is cut in front."""
        return shard.movedim(self.dim, 0) if self.dim else shard

    def as_shard(self, rows: Tensor) -> Tensor:
        """The inverse: as many elements as a shard has, in its shape."""
        if not self.dim:
            return xla_ops.shaped(rows, self.places.shard.shape)
        return rows.reshape(-1, *self.row_shape).movedim(0, self.dim).contiguous()

    def unshard(self, full: Sequence[Tensor], *, idle: bool = False) -> None:
        """Point the owners at the full tensors, one per member in order.

        Args:
            full: the tensors.
            idle: no forward is about to use them, so one that another unit runs keeps its own.
        """
        self.check_owners()
        self._move(ParamState.SHARDED, ParamState.UNSHARDED)
        self._full = list(full)
        for member, tensor in zip(self.members, full, strict=True):
            for owner in member.owners:
                self.places.show(owner, tensor, idle=idle)

    @property
    def waits_for_memory(self) -> bool:
        """Whether an owner holds something on the meta device."""
        return any(held.is_meta for held in self._held())

    def _held(self) -> list[Tensor]:
        """What the owners hold."""
        held = (owner.module._parameters.get(owner.attribute) for owner in self._owners())
        return [tensor for tensor in held if tensor is not None]

    def take_memory(self, *, has_values: bool) -> None:
        """The owners hold what the user has put in place of a shard on the meta device: that is the
        shard from now on. Without values, it acts as the full parameter for whoever gives it some.

        Raises:
            ValueError: if it has another shape.
        """
        if self.places.shard.is_meta:
            new = next((tensor for tensor in self._held() if not tensor.is_meta), None)
            if new is None:
                return
            self._replace(new, has_values=has_values)
        for owner in self._owners():
            self.places.refresh(owner)

    def _replace(self, new: Tensor, *, has_values: bool) -> None:
        old = self.places.shard
        if new.shape != old.shape:
            raise ValueError(
                f"{self.key} is on the meta device as a shard of shape {tuple(old.shape)}, and was "
                f"given a tensor of shape {tuple(new.shape)}; give it this rank's shard "
                f"(distribute_tensor), or memory first (to_empty) and then full tensors"
            )
        kind = ShardParameter if has_values else UninitializedShard
        # A copy: what is computed from an alias is traced from the values that it once had.
        self.places.shard = kind(new.detach().clone(), requires_grad=old.requires_grad)
        vars(self.places.shard).update(vars(old))
        moved = known_group(old)
        remember(self, [self.places.shard])
        if moved is not None:
            remember_group(self.places.shard, moved)

    @contextlib.contextmanager
    def without_shard(self) -> Iterator[None]:
        """While the members are attributes, a flat shard need not be one."""
        if self._home is None:
            yield
            return
        del self._home._parameters[self.key]
        try:
            yield
        finally:
            self._home._parameters[self.key] = self.shard

    def reshard(self) -> None:
        """Point the owners back at the shard (of a flat shard: take the members away)."""
        self._move(ParamState.UNSHARDED, ParamState.SHARDED)
        full, self._full = self._full, []
        for member, tensor in zip(self.members, full, strict=True):
            for owner in member.owners:
                self.places.hide(owner, tensor)

    def _owners(self) -> list[Owner]:
        return [owner for member in self.members for owner in member.owners]

    def check_owners(self) -> None:
        """Raise ValueError if an owner does not hold what it should: a parameter that the user put
        in its place would silently be dropped."""
        if self.state is not ParamState.SHARDED:
            return
        expected = [(owner, self.places.held_by(owner)) for owner in self._owners()]
        if self._home is not None:
            expected = [(Owner(self._home, self.key), self.shard)]
        for owner, tensor in expected:
            if not owner.holds(tensor):
                raise ValueError(
                    f"{self.key} was replaced after wrapping (by load_state_dict(assign=True), by "
                    f"moving the module to another device, or by tying weights). FSDP trains the "
                    f"shard that it made. Load without assign, leave the module on its device, and "
                    f"tie weights before wrapping."
                )

    def split(self, stack: Tensor) -> list[Tensor]:
        """The members' full tensors out of a gathered stack [num_shards, shard_numel].

        The results are tensors of their own, not views: a view would keep the whole stack alive.
        """
        if self._has_whole_rows:
            return [self._from_rows(xla_ops.shaped(stack, (-1, self.row_numel)))]
        joined = xla_ops.shaped(stack, (stack.numel(),))
        numels = [member.shape.numel() for member in self.members]
        return [
            xla_ops.shaped(xla_ops.cut(joined, 0, start, numel), member.shape).clone()
            for member, numel, start in zip(self.members, numels, offsets(numels), strict=True)
        ]

    def stack(self, full: Sequence[Tensor]) -> Tensor:
        """The inverse of ``split``, with zeros as padding: [num_shards, shard_numel]."""
        if self._has_whole_rows:
            rows = self.in_rows(full[0]).reshape(-1, self.row_numel)
            missing = self.layout.padded_numel // self.row_numel - len(rows)
            rows = F.pad(rows, (0, 0, 0, missing)) if missing else rows
            return rows.reshape(self.layout.num_shards, -1)
        flat = [xla_ops.shaped(each, (each.numel(),)) for each in full]
        joined = torch.cat(flat) if len(flat) > 1 else flat[0]
        padding = self.layout.padded_numel - self.layout.numel
        if padding:
            joined = F.pad(joined, (0, padding))
        return joined.reshape(self.layout.num_shards, -1)

    @property
    def _has_whole_rows(self) -> bool:
        """Whether shards are rows of the one member, padding included. Only rows are padded and cut
        off then: elements of a padded matrix would be laid out anew."""
        if len(self.members) > 1 or not self.row_numel:
            return False
        return self.layout.shard_numel % self.row_numel == 0

    def _from_rows(self, rows: Tensor) -> Tensor:
        """The member from its rows, and rows of padding."""
        [member] = self.members
        wanted = xla_ops.cut(rows, 0, 0, member.shape.numel() // self.row_numel)
        if self.dim:
            return wanted.reshape(-1, *self.row_shape).movedim(0, self.dim).contiguous()
        return xla_ops.shaped(wanted, member.shape).clone()

    def slice_of(self, full: Sequence[Tensor], rank: int) -> Tensor:
        """``rank``'s shard of full members, in the shape of the shard, on their device."""
        return self.as_shard(slice_of([self.in_rows(t) for t in full], self.layout, rank))

    def _move(self, expected: ParamState, new: ParamState) -> None:
        if self.state is not expected:
            raise RuntimeError(
                f"{self.key} is {self.state.name}, but to become {new.name} it must be "
                f"{expected.name}"
            )
        self.state = new


def make_shard(
    tensors: Sequence[Tensor],
    layout: ShardLayout,
    rank: int,
    device: torch.device,
    row_shape: Sequence[int] = (),
    dim: int = 0,
) -> nn.Parameter:
    """Cut ``rank``'s shard, [rows, *row_shape], out of full tensors joined end to end; of a single
    one along ``dim``, where the rows then are.

    Only the slice moves to ``device``: a parameter in host memory never exists there in full. What
    is on the meta device stays there.
    """
    flat = slice_of([t.movedim(dim, 0) if dim else t for t in tensors], layout, rank)
    rows = flat.reshape(-1, *row_shape).movedim(0, dim).contiguous()
    shard = ShardParameter(
        rows if rows.is_meta else rows.to(device),
        requires_grad=any(tensor.requires_grad for tensor in tensors),
    )
    shard.shard_rank = rank
    if len(tensors) == 1:  # such as a mark that an optimizer's grouping looks for
        vars(shard).update(vars(tensors[0]))
    return shard


def slice_of(tensors: Sequence[Tensor], layout: ShardLayout, rank: int) -> Tensor:
    """``rank``'s part of full tensors joined end to end, on their device: [shard_numel], zeros as
    padding."""
    wanted = layout.slice_for(rank)
    numels = [tensor.numel() for tensor in tensors]
    pieces = []
    for tensor, numel, start in zip(tensors, numels, offsets(numels), strict=True):
        begin, end = max(wanted.start - start, 0), min(wanted.stop - start, numel)
        if begin < end:
            pieces.append(tensor.detach().reshape(-1)[begin:end])
    # A shard that lies wholly in the padding has no piece, and cat needs one.
    pieces.append(tensors[0].detach().new_zeros(layout.shard_numel - wanted.stop + wanted.start))
    return torch.cat(pieces)


def _restored_shard(data: Tensor, requires_grad: bool, marks: dict[str, Any]) -> ShardParameter:
    shard = ShardParameter(data, requires_grad=requires_grad)
    vars(shard).update(marks)
    return shard


def is_sharded(param: Tensor) -> bool:
    """Whether ``param`` is a shard made by this package (or by upstream's)."""
    return getattr(param, "_is_sharded", False)


def _refresh_rnn_weights(module: nn.Module) -> None:
    """nn.RNN and its kin compute with a list of their parameters that they keep on the side."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [module._parameters.get(name) for name in module._flat_weights_names]
