"""What the module attributes of one shard's members hold, and what they held before.

Always true: an owner holds what was shown there last and is not hidden yet, and the shard when
nothing is shown. Several units may own a parameter of a module that they share, one inside the
other, and be unsharded at once.
Who shows what, and when, is left to ``sharded_param``; what a stack is, to ``shard_stacks``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from xla_fsdp.members import Owner


@dataclass(frozen=True)
class StackPart:
    """Which slice of a stack, [length, *shape of the shard], a shard is.

    Args:
        number: of the slice.
        length: of the stack.
    """

    number: int
    length: int


class Places:
    """Of one shard.

    Args:
        shard: what stands for the parameter: the leaf.
        registered: whether it is so under its members' names; members of a flat one are no
            attributes when nothing is shown.

    Attributes:
        part: where the shard is in the leaf, if that is a stack; the first one's owners hold it.
        users: how many units have the parameter.
    """

    def __init__(self, shard: nn.Parameter, *, registered: bool) -> None:
        self.shard = shard
        self.part: StackPart | None = None
        self.users = 0
        self._registered = registered
        self._shown: list[tuple[Owner, Tensor]] = []

    def stack(self, leaf: nn.Parameter, part: StackPart) -> None:
        """From now on the shard is this part of ``leaf``."""
        self.shard, self.part = leaf, part
        self._registered = part.number == 0

    def show(self, owner: Owner, tensor: Tensor, *, idle: bool) -> None:
        """Let ``owner`` hold ``tensor``, unless it is ``idle`` and something else is shown."""
        if idle and self._shown:
            self._shown.insert(0, (owner, tensor))
            self.refresh(owner)
        else:
            self._shown.append((owner, tensor))
            owner.point_at(tensor)

    def hide(self, owner: Owner, tensor: Tensor) -> None:
        """Undo one ``show``."""
        for index in reversed(range(len(self._shown))):
            if self._shown[index][1] is tensor and self._shown[index][0] == owner:
                del self._shown[index]
                break
        self.refresh(owner)

    def held_by(self, owner: Owner) -> Tensor | None:
        """What the owner should hold; None for no attribute."""
        for place, tensor in reversed(self._shown):
            if place == owner:
                return tensor
        return self.shard if self._registered else None

    def refresh(self, owner: Owner) -> None:
        """Let ``owner`` hold what it should."""
        tensor = self.held_by(owner)
        if tensor is None:
            owner.remove()
        else:
            owner.point_at(tensor)
