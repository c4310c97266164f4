"""Finds out which probes a search will need next, so that several can run at once.

A search is a function that asks for the outcomes of probes, one after the other; which one it asks
for depends on the outcomes before. It is a pure function of them and cheap, so it can be run again
from its start whenever another outcome is known, and also with assumed outcomes, to see what it
would ask for next in each case.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import chain, islice, zip_longest
from typing import Any, TypeVar

P = TypeVar("P", bound=Hashable)
R = TypeVar("R")

Search = Callable[[Callable[[P], bool]], R]
"""Gets a function that returns a probe's outcome, and returns the search's result."""

MAX_CASES_PER_PROBE = 8
"""The number of cases of assumed outcomes that are examined, per probe that may be returned."""


class _Unknown(Exception):
    def __init__(self, probe: object) -> None:
        self.probe = probe


def next_probes(searches: Sequence[Search[P, Any]], known: Mapping[P, bool], most: int) -> list[P]:
    """Return up to ``most`` different probes whose outcomes are not ``known``: first the one that
    each unfinished search needs now, then those that it will need if outcomes are as assumed, those
    with the fewest assumptions first. Return none if all searches are finished."""
    found = (_probes_of(search, known, most) for search in searches)
    by_urgency = chain.from_iterable(zip_longest(*found))
    return list(islice(dict.fromkeys(each for each in by_urgency if each is not None), most))


def _probes_of(search: Search[P, Any], known: Mapping[P, bool], most: int) -> Iterator[P]:
    cases: deque[dict[P, bool]] = deque([{}])
    for _ in range(most * MAX_CASES_PER_PROBE):
        if not cases:
            return
        outcomes = cases.popleft()
        probe = _first_unknown(search, {**known, **outcomes})
        if probe is not None:
            yield probe
            cases += ({**outcomes, probe: False}, {**outcomes, probe: True})


def _first_unknown(search: Search[P, Any], known: Mapping[P, bool]) -> P | None:
    """Return the first probe that the search asks for and that is not known; None if it ends."""

    def outcome(probe: P) -> bool:
        if probe not in known:
            raise _Unknown(probe)
        return known[probe]

    try:
        search(outcome)
    except _Unknown as unknown:
        probe: P = unknown.probe  # type: ignore[assignment]
        return probe
    return None
