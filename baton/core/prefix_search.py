"""Finds the length of the longest prefix that is present, by bisection."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def count_leading(items: Sequence[Item], is_absent: Callable[[Item], bool]) -> int:
    """Return how many leading items are present, with O(log n) calls of ``is_absent``.

    The result n is exact if an item is present only when all items before it are present, too.
    Otherwise, ``items[n - 1]`` is present and ``items[n]`` is absent, but an earlier item may be
    absent."""
    return bisect_left(items, True, key=is_absent)
