"""Decides whether a regular expression of strangers can be matched quickly.

Python's engine backtracks, and holds the interpreter meanwhile, so an expression could stop a
process for hours. This module counts the ways in which the engine may try to match a short name. It
walks through the parsed expression, since in the text, comments and flags can hide what is
repeated.
"""

from collections.abc import Iterable
from math import inf, prod
from re import _parser  # type: ignore[attr-defined]
from typing import Any

MAX_PATTERN = 256
MAX_PATHS = 100_000
"""Maximum number of ways to match a name. A way takes a tenth of a microsecond."""

REPEAT_PATHS = 30
"""How many ways a repeated character counts. There are fewer ways than the product in which three
of them can share a name of 40 characters."""

_SINGLE = ("LITERAL", "NOT_LITERAL", "ANY", "IN")


def is_quick_to_match(pattern: str) -> bool:
    """Whether ``pattern`` can be matched with a name of 40 characters in a hundredth of a second.
    Raises the errors of ``re.compile`` if it is not a regular expression."""
    return len(pattern) <= MAX_PATTERN and _count(_parser.parse(pattern)) <= MAX_PATHS


def _count(items: Iterable[tuple[Any, Any]]) -> float:
    """Return a bound on the ways to match a sequence of parsed items."""
    return prod(_count_item(str(operation), argument) for operation, argument in items)


def _count_item(operation: str, argument: Any) -> float:
    match operation:
        case "BRANCH":
            return sum(map(_count, argument[1]))
        case "SUBPATTERN":
            return _count(argument[3])
        case "ASSERT" | "ASSERT_NOT":
            return _count(argument[1])
        case "MAX_REPEAT" | "MIN_REPEAT":
            return _count_repeat(*argument)
        case "AT" | "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
            return 1
        case _:  # back-references, conditions and what later versions of Python add
            return inf


def _count_repeat(least: int, most: int, items: Any) -> float:
    if least == 0 and most == 1:
        return 1 + _count(items)
    is_single = len(items) == 1 and str(items[0][0]) in _SINGLE
    if not is_single:
        return inf
    return 1 if least == most else REPEAT_PATHS
