"""Numbers that remember how they were computed from the host's.

While a step is traced, the numbers of optimizers (learning rates, counts of steps) are replaced by
``TracedFloat`` and ``TracedInt``. Their arithmetic records expressions, so that a later step can
compute the numbers that its program needs from new ones. A comparison or conversion records its
outcome, as the program may depend on it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

Expression = tuple[Any, ...]
"""("source", key), ("constant", number) or (function, expressions...)."""


def _operators(*names: str) -> dict[str, Callable[..., Any]]:
    return {name: getattr(operator, name) for name in names}


ARITHMETIC = _operators("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
UNARY = _operators("neg", "pos", "abs")
COMPARISONS = _operators("lt", "le", "gt", "ge", "eq", "ne")
CONVERSIONS: dict[str, Callable[..., Any]] = {
    "float": float,
    "int": int,
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
    "round": round,
}


@dataclass
class HostNumbers:
    """The numbers of one traced step.

    Attributes:
        found: every expression that was computed, with its number.
        outcomes: of comparisons, and of conversions that lose the expression.
        updates: how to compute each option that the step computed from old numbers, by key.
        problem: what is wrong if the step gave an option another value; "" if not.
    """

    found: dict[Expression, float] = field(default_factory=dict)
    outcomes: dict[Expression, Any] = field(default_factory=dict)
    updates: dict[Any, Expression] = field(default_factory=dict)
    problem: str = ""

    def source(self, key: Hashable, number: float) -> Any:
        """Return ``number`` as a traced number whose later values are known by ``key``."""
        return self.traced(number, ("source", key))

    def traced(self, number: float, expression: Expression) -> Any:
        """Return ``number`` as a traced number, if it is an int or a float."""
        if type(number) not in (int, float):
            return number
        self.found[expression] = number
        made = TracedInt(number) if isinstance(number, int) else TracedFloat(number)
        made.plain, made.expression, made.numbers = number, expression, self
        return made


class _Traced:
    plain: Any
    expression: Expression
    numbers: HostNumbers

    def __bool__(self) -> bool:
        return self._compared(bool, bool(self.plain))

    def __hash__(self) -> int:
        return hash(self.plain)

    def __repr__(self) -> str:
        return repr(self.plain)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self.plain), (self.plain,)

    def _compared(self, function: Callable[..., Any], outcome: Any, *others: Any) -> Any:
        compared = (function, self.expression, *map(expression_of, others))
        self.numbers.outcomes[compared] = outcome
        return outcome


class TracedFloat(_Traced, float):
    """A float with its expression."""


class TracedInt(_Traced, int):
    """An int with its expression."""


def plain(value: Any) -> Any:
    """Return the plain number of a traced one, anything else as it is."""
    return value.plain if isinstance(value, _Traced) else value


def expression_of(value: Any) -> Expression:
    """Return the expression of a number."""
    return value.expression if isinstance(value, _Traced) else ("constant", value)


def evaluate(expression: Expression, numbers: Mapping[Any, float]) -> Any:
    """Return the value of an expression; ``numbers`` are those of the sources by key."""
    head = expression[0]
    if head == "source":
        return numbers[expression[1]]
    if head == "constant":
        return expression[1]
    return head(*(evaluate(each, numbers) for each in expression[1:]))


def sources_of(expression: Expression) -> frozenset[Any]:
    """Return the keys of the sources in an expression."""
    if expression[0] == "source":
        return frozenset([expression[1]])
    if expression[0] == "constant":
        return frozenset()
    return frozenset().union(*map(sources_of, expression[1:]))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _binary(function: Callable[..., Any], *, reflected: bool) -> Callable[..., Any]:
    def method(self: _Traced, other: Any) -> Any:
        if not _is_number(other):
            return NotImplemented
        pair = (other, self) if reflected else (self, other)
        expression = (function, *map(expression_of, pair))
        return self.numbers.traced(function(*map(plain, pair)), expression)

    return method


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: _Traced) -> Any:
        return self.numbers.traced(function(self.plain), (function, self.expression))

    return method


def _comparison(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: _Traced, other: Any) -> Any:
        if not _is_number(other):
            return NotImplemented
        return self._compared(function, function(self.plain, plain(other)), other)

    return method


def _conversion(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: _Traced, *digits: int) -> Any:
        return self._compared(function, function(self.plain, *digits), *digits)

    return method


for _name, _function in ARITHMETIC.items():
    setattr(_Traced, f"__{_name}__", _binary(_function, reflected=False))
    setattr(_Traced, f"__r{_name}__", _binary(_function, reflected=True))
for _name, _function in UNARY.items():
    setattr(_Traced, f"__{_name}__", _unary(_function))
for _name, _function in CONVERSIONS.items():
    setattr(_Traced, f"__{_name}__", _conversion(_function))
for _name, _function in COMPARISONS.items():
    setattr(_Traced, f"__{_name}__", _comparison(_function))
