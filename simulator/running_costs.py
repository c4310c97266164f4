"""What GPUs cost to run: their price per hour, and the most power that they draw."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.errors import Invalid
from simulator.hardware import Gpu, get_gpu

MAX_DOLLARS_PER_HOUR = 10_000.0
"""Maximum price of a GPU-hour; a higher one is a typo."""

BOARD_WATTS = {
    "H100": 700,  # NVIDIA H100 Tensor Core GPU datasheet, SXM
    "H200": 700,  # NVIDIA H200 Tensor Core GPU datasheet, SXM
    "B200": 1000,  # NVIDIA Blackwell architecture technical brief, HGX B200
    "A100": 400,  # NVIDIA A100 Tensor Core GPU datasheet, 80 GB SXM
    "L40S": 350,  # NVIDIA L40S datasheet
    "MI300X": 750,  # AMD Instinct MI300X data sheet
    "RTX4090": 450,  # NVIDIA GeForce RTX 4090, specifications
    "RTX5090": 575,  # NVIDIA GeForce RTX 5090, specifications
}
"""The maximum power of a GPU's board, without its host."""

SECONDS_PER_HOUR = 3600
JOULES_PER_KWH = 3.6e6
MILLION = 1e6


@dataclass(frozen=True, slots=True)
class RunningCosts:
    """The costs of one GPU. ``is_price_assumed`` says that the price is the one of
    :mod:`simulator.hardware`. ``board_watts`` is the maximum power of its board, so energy is an
    upper bound for the GPUs, which does not include their hosts and cooling; None if unknown."""

    dollars_per_gpu_hour: float
    is_price_assumed: bool
    board_watts: int | None

    def dollars_per_million_tokens(self, tokens_per_second_per_gpu: float) -> float | None:
        """Return the price of a million tokens; None if there are no tokens."""
        if not tokens_per_second_per_gpu:
            return None
        return self.dollars_per_gpu_hour / SECONDS_PER_HOUR / tokens_per_second_per_gpu * MILLION

    def max_kwh_per_million_tokens(self, tokens_per_second_per_gpu: float) -> float | None:
        """Return an upper bound; None if there are no tokens or the power is unknown."""
        if not tokens_per_second_per_gpu or self.board_watts is None:
            return None
        return self.board_watts / tokens_per_second_per_gpu * MILLION / JOULES_PER_KWH


def running_costs(gpu: Gpu, prices: Mapping[str, float]) -> RunningCosts:
    """Return a GPU's costs. ``prices`` maps GPUs' names to the prices that replace the assumed
    ones."""
    price = prices.get(gpu.name)
    dollars = gpu.dollars_per_hour if price is None else price
    return RunningCosts(dollars, price is None, BOARD_WATTS.get(gpu.name))


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """Parse prices per hour like ``H100=1.99``. Raises Invalid for malformed texts, unknown GPUs,
    prices out of range, and two prices of one GPU."""
    prices: dict[str, float] = {}
    for text in texts:
        name, equals, price = text.partition("=")
        if not equals:
            raise Invalid(f"--price is {text!r}; it must be GPU=USD, like H100=1.99")
        gpu = get_gpu(name.strip()).name
        if gpu in prices:
            raise Invalid(f"--price gives two prices for {gpu}; it must give one")
        prices[gpu] = _parse_price(gpu, price)
    return prices


def _parse_price(gpu: str, text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 < price <= MAX_DOLLARS_PER_HOUR:
        raise Invalid(
            f"--price {gpu}={text}: the price must be dollars per hour, above 0 and at most "
            f"{MAX_DOLLARS_PER_HOUR:,.0f}"
        )
    return price
