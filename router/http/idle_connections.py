"""Chooses which connections are closed when a router has as many as it may have."""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IdleConnection:
    """A connection without a request in progress, from ``network``. It times out at ``deadline``, a
    time of the event loop; ``close`` closes it at once."""

    network: str
    deadline: float
    close: Callable[[], None]


def choose_to_close(idle: Iterable[IdleConnection], count: int) -> list[IdleConnection]:
    """Return up to ``count`` connections: always the next of the network that has the most left,
    and of a network those that would time out first."""
    by_network: dict[str, list[IdleConnection]] = {}
    for each in idle:
        by_network.setdefault(each.network, []).append(each)
    ranked = [
        (len(connections) - position, -each.deadline, each)
        for connections in by_network.values()
        for position, each in enumerate(sorted(connections, key=lambda one: one.deadline))
    ]
    return [each for *_, each in heapq.nlargest(count, ranked, key=lambda entry: entry[:2])]
