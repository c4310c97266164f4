"""How fast each link has been, the basis of every estimate; and which links have ended."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import TypeVar

from baton.core.handoff import Endpoint

PRIOR_BYTES_PER_SECOND = 2e9
PRIOR_LATENCY_SECONDS = 0.5e-3
WEIGHT = 0.2
"""Of the newest measurement in the moving average."""

MIN_SIZE_BYTES = 64 * 1024
"""Smaller transfers say more about latency than about bandwidth."""

MAX_LINKS = 4096


P = TypeVar("P")


def earlier_lives(peers: Mapping[tuple[str, int], P], endpoint: Endpoint) -> list[P]:
    """Peers, by owner and generation, whose owner has been born again as ``endpoint`` says.
    They are dead, and what is held of them (a mapped pool, for one) would never be let go."""
    owner, generation = endpoint.owner, endpoint.generation
    return [peer for (name, life), peer in peers.items() if name == owner and life < generation]


class LinkMeter:
    """Moving averages of bandwidth, per peer; the least recently used are forgotten."""

    def __init__(self) -> None:
        self._rates: OrderedDict[str, float] = OrderedDict()

    def record(self, owner: str, size_bytes: int, seconds: float) -> None:
        if size_bytes < MIN_SIZE_BYTES or seconds <= 0:
            return
        rate = size_bytes / seconds
        before = self._rates.pop(owner, rate)
        self._rates[owner] = before + WEIGHT * (rate - before)
        if len(self._rates) > MAX_LINKS:
            self._rates.popitem(last=False)

    def bytes_per_second(self, owner: str) -> float | None:
        """None before anything was measured."""
        return self._rates.get(owner)

    def estimate_seconds(self, owner: str, size_bytes: int) -> float:
        rate = self._rates.get(owner, PRIOR_BYTES_PER_SECOND)
        return PRIOR_LATENCY_SECONDS + size_bytes / rate
