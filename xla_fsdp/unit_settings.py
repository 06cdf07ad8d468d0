"""What may be changed of a unit between steps, and its place in the tree of units.

Always true: what was asked for when the unit was made is in its ``FSDPConfig``; here is what users
may still change, through the methods of ``fsdp_module`` and ``sharded_module``.
What the settings do is left to ``unit``, ``unit_backward`` and ``full_params``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from xla_fsdp.backward import BackwardPass
from xla_fsdp.prefetch import UnitRef


@dataclass
class UnitSettings:
    """Of one unit.

    Args:
        backward: what the tree shares; the unit's own until it joins one.
        reshard_after_forward: free full parameters between forward and backward.
        keeps_larger: keep larger shards between them.
        keeps_on_root: hold full parameters until backward, where the unit is a root.
        reshard_after_backward: free full parameters after backward.
        unshard_in_backward: gather for backward without being asked.
        sync_gradients: reduce gradients in backward.
        is_last_backward: no further pass adds to the gradients before the step.
        forward_prefetch: units to gather no later than this one, in forward.
        backward_prefetch: the same in backward.
        is_root: whether the unit is in no other one.
    """

    backward: BackwardPass
    reshard_after_forward: bool
    keeps_larger: bool
    keeps_on_root: bool
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    sync_gradients: bool = True
    is_last_backward: bool = True
    forward_prefetch: list[UnitRef] = field(default_factory=list)
    backward_prefetch: list[UnitRef] = field(default_factory=list)
    is_root: bool = True

    @property
    def reshards_after_forward(self) -> bool:
        """Whether full parameters are freed between forward and backward."""
        if self.is_root and self.keeps_on_root:
            return False
        return self.reshard_after_forward

    @property
    def keeps_larger_shards(self) -> bool:
        """Whether backward gathers from larger shards."""
        return self.keeps_larger and self.reshards_after_forward

    @property
    def gathers_in_backward(self) -> bool:
        """Whether backward gathers from the shards."""
        return self.reshards_after_forward and not self.keeps_larger
