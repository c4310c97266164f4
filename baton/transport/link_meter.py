"""How fast each link has been, the basis of every estimate; and which links have ended."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from baton.core.kv_transfer import Endpoint

PRIOR_BYTES_PER_SECOND = 2e9
PRIOR_LATENCY_SECONDS = 0.5e-3
WEIGHT = 0.2
"""Of the newest measurement in the moving average."""

MIN_SIZE_BYTES = 64 * 1024
"""Smaller transfers say more about latency than about bandwidth."""

TYPICAL_SIZE_BYTES = 256 * 1024
"""What is much larger counts less in proportion, so that the error is relative."""

MAX_UNMEASURED_ESTIMATES = 16
"""Estimates in a row after which no transfer was measured: whoever was judged too slow to be used
is tried once more then, since it may have been a bad moment."""

LEAST_SPREAD = 0.01
"""Of measured sizes, relative to their mean square."""

MAX_LINKS = 4096

P = TypeVar("P")


def earlier_generations(peers: Mapping[tuple[str, int], P], endpoint: Endpoint) -> list[P]:
    """Peers, by owner and generation, whose owner has been born again as ``endpoint`` says.
    They are dead, and what is held of them (a mapped pool, for one) would never be let go."""
    owner, generation = endpoint.owner, endpoint.generation
    return [peer for (name, life), peer in peers.items() if name == owner and life < generation]


@dataclass(slots=True)
class _LinearFit:
    """Seconds against bytes: sums of a weighted least squares, the newest counting most, and small
    transfers about as much as large ones."""

    rate: float = 0.0
    ones: float = 0.0
    sizes: float = 0.0
    squares: float = 0.0
    times: float = 0.0
    products: float = 0.0
    num_unchecked: int = 0

    def add(self, size_bytes: int, seconds: float) -> None:
        self.num_unchecked = 0
        weight = (size_bytes + TYPICAL_SIZE_BYTES) ** -2
        for name, value in (
            ("ones", 1.0),
            ("sizes", size_bytes),
            ("squares", size_bytes**2),
            ("times", seconds),
            ("products", size_bytes * seconds),
        ):
            setattr(self, name, (1 - WEIGHT) * getattr(self, name) + weight * value)

    def parts(self) -> tuple[float, float]:
        """Latency in seconds and seconds per byte, none of them negative. Sizes that hardly differ
        say nothing about latency."""
        per_byte = self.products / self.squares
        spread = self.ones * self.squares - self.sizes**2
        if spread < LEAST_SPREAD * self.ones * self.squares:
            return 0.0, per_byte
        latency = (self.squares * self.times - self.sizes * self.products) / spread
        slope = (self.ones * self.products - self.sizes * self.times) / spread
        if latency < 0:
            return 0.0, per_byte
        return (latency, slope) if slope >= 0 else (self.times / self.ones, 0.0)


class LinkMeter:
    """What transfers took, per peer; the least recently used are forgotten."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, _LinearFit] = OrderedDict()

    def record(self, owner: str, size_bytes: int, seconds: float) -> None:
        if size_bytes <= 0 or seconds <= 0:
            return
        line = self._lines.pop(owner, None) or _LinearFit()
        line.add(size_bytes, seconds)
        if size_bytes >= MIN_SIZE_BYTES:
            rate = size_bytes / seconds
            line.rate += (WEIGHT if line.rate else 1.0) * (rate - line.rate)
        self._lines[owner] = line
        if len(self._lines) > MAX_LINKS:
            self._lines.popitem(last=False)

    def bytes_per_second(self, owner: str) -> float | None:
        """A moving average, latency included; None before anything was measured."""
        line = self._lines.get(owner)
        return line.rate if line is not None and line.rate else None

    def estimate_seconds(self, owner: str, size_bytes: int) -> float:
        line = self._lines.get(owner)
        if line is not None:
            line.num_unchecked += 1
            if line.num_unchecked > MAX_UNMEASURED_ESTIMATES:
                del self._lines[owner]
                line = None
        if line is None:
            return PRIOR_LATENCY_SECONDS + size_bytes / PRIOR_BYTES_PER_SECOND
        latency, per_byte = line.parts()
        return latency + size_bytes * per_byte
