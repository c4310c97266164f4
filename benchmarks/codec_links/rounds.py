"""Repeats measurements in turns, as often as there is time."""

from collections.abc import Awaitable, Callable, Sequence

Measure = Callable[[float], Awaitable[None]]


async def run_rounds(
    links: Sequence[float],
    max_rounds: int,
    measure: Measure,
    first_seconds: Callable[[float], float],
    repeat_until: float,
    end: float,
    now: Callable[[], float],
) -> list[float]:
    """Call ``measure`` for each of ``links``, up to ``max_rounds`` times in turns. A repetition,
    which is expected to take as long as the last one, must end before ``repeat_until``; the first
    time, which is expected to take ``first_seconds`` of the link, before ``end``. Return the links
    that were never measured."""
    last: dict[float, float] = {}
    for number in range(max_rounds):
        for link in links:
            if number == 0 and now() + first_seconds(link) > end:
                continue
            if number and (link not in last or now() + last[link] > repeat_until):
                continue
            began = now()
            await measure(link)
            last[link] = now() - began
    return [link for link in links if link not in last]


def shares(weights: Sequence[float], now: float, end: float) -> float:
    """Return when the first of the parts with ``weights`` has used its share of the time."""
    return now + (end - now) * weights[0] / sum(weights)
