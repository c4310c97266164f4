"""Finds the length of the longest prefix that is present, by bisection."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def count_leading(items: Sequence[Item], is_absent: Callable[[Item], bool]) -> int:
    """Return how many leading items are present, with O(log n) calls of ``is_absent``.

    This is exact if an item is only present with all items before it. Otherwise ``items[n - 1]`` is
    present and ``items[n]`` is absent for the result n, but an earlier item may be absent, too."""
    return bisect_left(items, True, key=is_absent)
