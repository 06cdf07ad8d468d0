"""Flags of the examples: values that are checked as they are parsed, and switches.

Words: a *switch* is a yes/no option, given as ``--name`` or ``--no_name`` (without ``use_``).
Always true: a wrong value ends the program with exit code 2 and says what was expected.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def at_least(lowest: int) -> Callable[[str], int]:
    """Parses a whole number, ``lowest`` or more."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, {lowest} or more")
        return value

    return parse


def number(lowest: float, highest: float = math.inf) -> Callable[[str], float]:
    """Parses a number between the two, both included."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not lowest <= value <= highest or math.isinf(value):
            between = f"from {lowest:g} to {highest:g}" if highest < math.inf else f"{lowest:g} up"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {between}")
        return value

    return parse


def add_switch(
    group: argparse._ActionsContainer, name: str, default: bool | None, help_text: str
) -> None:
    """Add ``--name`` and ``--no_name``."""
    group.add_argument(f"--{name}", action="store_true", default=default, help=help_text)
    group.add_argument(
        f"--no_{name.removeprefix('use_')}",
        dest=name,
        action="store_false",
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS if default is False else f"turn off --{name}",
    )
