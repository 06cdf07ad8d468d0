"""The loops of a scan, traced when they are first needed, and kept.

Words: a *key* is equal for passes that can run the same loops; it is made by ``blocks``.
Always true: for every key, blocks are compared with the first one before a loop is run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from xla_fsdp.fsdp.scan.arguments import Arguments
from xla_fsdp.fsdp.scan.guard import refusing_host_draws
from xla_fsdp.fsdp.scan.identical import (
    ADVICE,
    captured_problem,
    difference_of_bodies,
    difference_of_settings,
)
from xla_fsdp.fsdp.scan.offload import Keeping
from xla_fsdp.fsdp.scan.program import (
    BackwardProgram,
    ForwardProgram,
    Inputs,
    backward_program,
    forward_program,
)
from xla_fsdp.fsdp.scan.remat_policy import Policy
from xla_fsdp.fsdp.scan.state import BlockState
from xla_fsdp.fsdp.scan.template import Alone, Template, trace_alone
from xla_fsdp.fsdp.scan.weights import BlockWeights

T = TypeVar("T")


class Programs:
    """Everything that one scan has traced.

    Args:
        policy: which activations loops keep for backward.
        keeping: where.
    """

    def __init__(self, policy: Policy, keeping: Keeping) -> None:
        self._policy = policy
        self.keeping = keeping
        self._first: dict[Hashable, tuple[Alone, BlockState]] = {}
        self._checked: set[Hashable] = set()
        self._loops: dict[Hashable, Any] = {}

    def is_checked(self, number: int, key: Hashable) -> bool:
        """Whether block ``number`` was compared with the first one."""
        return (number, key) in self._checked

    def check(self, number: int, template: Template, key: Hashable) -> Arguments:
        """Trace a block alone and compare it with the first one, unless that was done; returns what
        blocks return, without the tensor.

        Raises:
            ValueError: if it differs, or cannot run in a loop.
        """
        if not self.is_checked(number, key):
            found = refusing_host_draws(lambda: trace_alone(template))
            first, state = self._first.setdefault(key, (found, template.state.without_tensors()))
            problem = captured_problem(found.body)
            difference = difference_of_bodies(first.body, found.body)
            if not problem and difference:
                hint = difference_of_settings(state, template.state, number)
                because = f" ({hint})" if hint else ""
                problem = f"block {number} differs from block 0: {difference}{because}. {ADVICE}"
            if problem:
                if number == 0:
                    del self._first[key]
                raise ValueError(problem)
            self._checked.add((number, key))
        return self._first[key][0].returned

    def forward(
        self,
        key: Hashable,
        template: Template,
        weights: BlockWeights,
        length: int,
        inputs: Inputs,
        needs: Sequence[bool] | None,
    ) -> ForwardProgram:
        """See ``program.forward_program``."""
        return self._kept(
            ("forward", needs, key),
            lambda: forward_program(
                template, weights, inputs, length, self._policy, self.keeping, needs
            ),
        )

    def backward(
        self,
        key: Hashable,
        template: Template,
        weights: BlockWeights,
        length: int,
        inputs: Inputs,
        forward: ForwardProgram,
        collected: Sequence[Tensor],
        needs: Sequence[bool],
        reduces: bool,
    ) -> BackwardProgram:
        """See ``program.backward_program``."""
        how = (tuple(needs), reduces, weights.group.reduction.predivide)
        return self._kept(
            ("backward", how, key),
            lambda: backward_program(
                template,
                weights,
                inputs,
                length,
                forward,
                collected,
                self.keeping,
                needs,
                reduces=reduces,
            ),
        )

    def _kept(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._loops:
            self._loops[key] = make()
        return self._loops[key]
