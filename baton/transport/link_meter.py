"""Measures the speed of each link, for estimates of transfer times."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from baton.core.kv_transfer import Endpoint

PRIOR_BYTES_PER_SECOND = 2e9
PRIOR_LATENCY_SECONDS = 0.5e-3
WEIGHT = 0.2
"""Weight of the newest measurement in the moving average."""

MIN_SIZE_BYTES = 64 * 1024
"""Minimum size for measuring bandwidth: smaller transfers say more about latency."""

TYPICAL_SIZE_BYTES = 256 * 1024
"""Much larger transfers get a proportionally lower weight, so that the fit minimizes the relative
error."""

MAX_UNMEASURED_ESTIMATES = 16
"""After this many estimates without a transfer the measurements are dropped, so that a link that
was judged too slow is tried again: it may have been slow only for a moment."""

MIN_SPREAD = 0.01
"""Minimum spread of measured sizes, relative to their mean square, for estimating the latency."""

MAX_LINKS = 4096

P = TypeVar("P")


def earlier_generations(peers: Mapping[tuple[str, int], P], endpoint: Endpoint) -> list[P]:
    """Return the peers that have the same owner as ``endpoint`` but an earlier generation.
    ``peers`` are keyed by owner and generation. The processes of the returned peers are dead, so
    the caller must disconnect them to free their resources (a mapped pool, for example)."""
    owner, generation = endpoint.owner, endpoint.generation
    return [peer for (name, other), peer in peers.items() if name == owner and other < generation]


@dataclass(slots=True)
class _LinearFit:
    """The sums from which a weighted least-squares fit of transfer times (in seconds) against sizes
    (in bytes) is computed. Newer transfers count more than older ones, and small ones about as much
    as large ones."""

    rate: float = 0.0
    ones: float = 0.0
    sizes: float = 0.0
    squares: float = 0.0
    times: float = 0.0
    products: float = 0.0
    num_estimates: int = 0

    def add(self, size_bytes: int, seconds: float) -> None:
        self.num_estimates = 0
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
        """Return the latency in seconds, and the seconds per byte; both are at least 0. If the
        sizes hardly differ, the latency can't be determined and is 0."""
        per_byte = self.products / self.squares
        spread = self.ones * self.squares - self.sizes**2
        if spread < MIN_SPREAD * self.ones * self.squares:
            return 0.0, per_byte
        latency = (self.squares * self.times - self.sizes * self.products) / spread
        slope = (self.ones * self.products - self.sizes * self.times) / spread
        if latency < 0:
            return 0.0, per_byte
        return (latency, slope) if slope >= 0 else (self.times / self.ones, 0.0)


class LinkMeter:
    """Records transfer times per peer; the least recently measured peers are dropped."""

    def __init__(self) -> None:
        self._fits: OrderedDict[str, _LinearFit] = OrderedDict()

    def record(self, owner: str, size_bytes: int, seconds: float) -> None:
        if size_bytes <= 0 or seconds <= 0:
            return
        fit = self._fits.pop(owner, None) or _LinearFit()
        fit.add(size_bytes, seconds)
        if size_bytes >= MIN_SIZE_BYTES:
            rate = size_bytes / seconds
            fit.rate += (WEIGHT if fit.rate else 1.0) * (rate - fit.rate)
        self._fits[owner] = fit
        if len(self._fits) > MAX_LINKS:
            self._fits.popitem(last=False)

    def bytes_per_second(self, owner: str) -> float | None:
        """Return a moving average of the bandwidth, latency included; None before the first
        measurement."""
        fit = self._fits.get(owner)
        return fit.rate if fit is not None and fit.rate else None

    def estimate_seconds(self, owner: str, size_bytes: int) -> float:
        fit = self._fits.get(owner)
        if fit is not None:
            fit.num_estimates += 1
            if fit.num_estimates > MAX_UNMEASURED_ESTIMATES:
                del self._fits[owner]
                fit = None
        if fit is None:
            return PRIOR_LATENCY_SECONDS + size_bytes / PRIOR_BYTES_PER_SECOND
        latency, per_byte = fit.parts()
        return latency + size_bytes * per_byte
