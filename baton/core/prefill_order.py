"""Whose prompt is computed next: orders of those that wait, by name, and none of them starves.

An order gives each a moment, its turn, between its arrival and ``NORMAL_STARVATION_LIMIT_SECONDS``
later; the earliest turn goes first. So **whoever arrives more than
``NORMAL_STARVATION_LIMIT_SECONDS`` after another ranks behind it**, in every order.

Under a load that can't be served that alone would end in everybody being late. So those that have
waited for longer get no more than half of a step if others want it (:func:`allocate_step_tokens`).
**A request waits ``NORMAL_STARVATION_LIMIT_SECONDS``, and twice as long as it takes to compute what
had arrived until then, at most.**

All of that among requests of one priority. Those of a lower one get what the others leave, until
the patience of their class is over (:mod:`baton.core.priority`).

Pure, and cheap enough to be asked for a thousand requests between two steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.core.priority import STARVATION_LIMIT_SECONDS, Priority

NORMAL_STARVATION_LIMIT_SECONDS = STARVATION_LIMIT_SECONDS[Priority.NORMAL]

CACHED_TOKENS_PER_SECOND = 2000.0
"""Of ``cached_first``: how many more cached tokens outweigh a second of waiting."""

LATE_STRETCH = 9.4
"""Times what it was promised, whoever is late waits for those that are not: whom admission let in
has its first token within ten times. The later the better: under overload, who is served late
costs others their time (measured: 8 loses what 9.4 does not, and filling idle moments with the late
loses more)."""

SHORTEST_STRETCH = 10.0
"""Of ``shortest``: a second less of work outweighs as many of waiting."""


@dataclass(slots=True)
class WaitingPrompt:
    """What an order knows of a request whose prompt is to be computed, or is being computed.

    ``deadline_seconds`` is absolute, infinite when there is none. ``remaining_seconds`` is the
    work left as predicted, 0 when nobody knows; ``cached_tokens`` need no computing, the
    ``new_tokens`` do. ``preempted`` was being served before, and its client sees a stream that
    stands still.
    """

    arrival_seconds: float
    deadline_seconds: float = math.inf
    remaining_seconds: float = 0.0
    cached_tokens: int = 0
    new_tokens: int = 0
    tenant: bytes = b""
    preempted: bool = False
    priority: Priority = Priority.NORMAL

    @property
    def resumes(self) -> bool:
        """Goes before all others. Of low priority nobody does: it would be preempted again."""
        return self.preempted and self.priority <= Priority.NORMAL


OrderKey = Callable[[WaitingPrompt, float], float]
"""The moment whose earliest goes first, before it is held within the bound; seconds now."""

Rank = tuple[float, float]


@dataclass(frozen=True, slots=True)
class PrefillOrder:
    """``preemptive``: a prompt that is being computed pauses, between two steps, for one whose
    turn is earlier. Else it is finished first."""

    turn: OrderKey
    preemptive: bool

    def rank(self, waiting: WaitingPrompt, now_seconds: float) -> Rank:
        """The least goes first."""
        arrival = waiting.arrival_seconds
        turn = min(
            max(arrival, self.turn(waiting, now_seconds)), arrival + NORMAL_STARVATION_LIMIT_SECONDS
        )
        return (0.0 if waiting.resumes else 1.0), turn


def fcfs(waiting: WaitingPrompt, now_seconds: float) -> float:
    """First come, first served."""
    return waiting.arrival_seconds


def cached_first(waiting: WaitingPrompt, now_seconds: float) -> float:
    """The longest cached prefix first: it may be evicted while it waits."""
    head_start = waiting.cached_tokens / CACHED_TOKENS_PER_SECOND
    return waiting.arrival_seconds + NORMAL_STARVATION_LIMIT_SECONDS - head_start


def shortest(waiting: WaitingPrompt, now_seconds: float) -> float:
    """The least remaining work first."""
    return waiting.arrival_seconds + SHORTEST_STRETCH * waiting.remaining_seconds


def slack(waiting: WaitingPrompt, now_seconds: float) -> float:
    """Who must start first to be in time (least slack first); the late behind all others."""
    return _latest_start(waiting) if _in_time(waiting, now_seconds) else _late(waiting)


def deadline(waiting: WaitingPrompt, now_seconds: float) -> float:
    """The earliest deadline first, which meets all deadlines if anyone can (Liu and Layland,
    1973). Who can't meet its own any more goes behind those that can."""
    return waiting.deadline_seconds if _in_time(waiting, now_seconds) else _late(waiting)


def _late(waiting: WaitingPrompt) -> float:
    """When the late have waited long enough, in proportion to what they were promised."""
    allowed = waiting.deadline_seconds - waiting.arrival_seconds
    return waiting.arrival_seconds + LATE_STRETCH * allowed


def _latest_start(waiting: WaitingPrompt) -> float:
    return waiting.deadline_seconds - waiting.remaining_seconds


def _in_time(waiting: WaitingPrompt, now_seconds: float) -> bool:
    return now_seconds <= _latest_start(waiting)


PREFILL_ORDERS: dict[str, PrefillOrder] = {
    "fcfs": PrefillOrder(fcfs, preemptive=False),
    "cached_first": PrefillOrder(cached_first, preemptive=False),
    "shortest": PrefillOrder(shortest, preemptive=True),
    "slack": PrefillOrder(slack, preemptive=True),
    "deadline": PrefillOrder(deadline, preemptive=True),
}


def allocate_step_tokens(
    ranked: Sequence[WaitingPrompt], now_seconds: float, budget_tokens: int
) -> list[tuple[int, int]]:
    """Indexes of the ``ranked`` in the order in which they get tokens of a step, with how many at
    most. Those that have waited longer than the patience come first and have half of the budget
    between them, and what the others leave of theirs."""
    late = [i for i, each in enumerate(ranked) if _is_overdue(each, now_seconds)]
    others = [i for i, each in enumerate(ranked) if not _is_overdue(each, now_seconds)]
    left = budget_tokens
    if others:
        wanted = sum(ranked[i].new_tokens for i in others)
        left = max((budget_tokens + 1) // 2, budget_tokens - wanted)
    first: list[tuple[int, int]] = []
    for index in late:
        if left <= 0:
            break
        limit = min(ranked[index].new_tokens, left)
        first.append((index, limit))
        left -= limit
    rest = [*others, *late[len(first) :]]
    return first + [(index, budget_tokens) for index in rest]


def _is_overdue(waiting: WaitingPrompt, now_seconds: float) -> bool:
    patience = STARVATION_LIMIT_SECONDS[waiting.priority]
    return not waiting.resumes and now_seconds > waiting.arrival_seconds + patience
