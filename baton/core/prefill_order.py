"""The order in which waiting prompts are computed: several policies by name, all starvation-free.

A policy assigns each request a time, its rank time, between its arrival and
``NORMAL_STARVATION_LIMIT_SECONDS`` later; the request with the earliest rank time goes first. So
**a request that arrives more than ``NORMAL_STARVATION_LIMIT_SECONDS`` after another ranks behind
it**, under every policy.

Under overload, that rule alone would make all requests late. So requests that have waited for
longer than the limit get no more than half of a step's tokens if other requests can use the rest
(:func:`allocate_step_tokens`). **A request waits at most ``NORMAL_STARVATION_LIMIT_SECONDS``, plus
twice the time that it takes to compute what had arrived before that limit passed**: twice, since it
may get only half of each step.

All of this applies among requests of one priority. Requests of a lower priority get what the others
leave, until they have waited for their own priority's starvation limit
(:mod:`baton.core.priority`), which is infinite for ``BATCH``.

The functions are pure, and cheap enough to rank a thousand requests between two steps.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from baton.core.priority import STARVATION_LIMIT_SECONDS, Priority

NORMAL_STARVATION_LIMIT_SECONDS = STARVATION_LIMIT_SECONDS[Priority.NORMAL]

CACHED_TOKENS_PER_SECOND = 2000.0
"""For ``cached_first``: this many more cached tokens outweigh a second of waiting."""

LATE_BUDGET_MULTIPLE = 9.4
"""A late request ranks behind those that can meet their deadline until this multiple of its TTFT
budget has passed, so that admitted requests have their first token within ten times the budget. A
large value is better: under overload, serving late requests makes others late. In measurements,
fewer requests met their SLOs with 8 than with 9.4, and fewer still when late requests were
computed in the slack of those in time."""

WAIT_PER_WORK_SECOND = 10.0
"""For ``shortest``: one second less of work outweighs this many seconds of waiting."""


@dataclass(slots=True)
class WaitingPrompt:
    """A request whose prompt waits to be computed, or is being computed.

    ``deadline_seconds`` is a time, not a duration; it is infinite when there is no deadline.
    ``remaining_seconds`` is the predicted time of the remaining work, 0 if unknown.
    ``cached_tokens`` counts the prompt's cached tokens, ``new_tokens`` those that must be computed.
    ``was_preempted``: the request was decoding before, and its client's stream has stalled."""

    arrival_seconds: float
    deadline_seconds: float = math.inf
    remaining_seconds: float = 0.0
    cached_tokens: int = 0
    new_tokens: int = 0
    tenant: bytes = b""
    was_preempted: bool = False
    priority: Priority = Priority.NORMAL

    @property
    def goes_first(self) -> bool:
        """Whether the request goes before all others because it was preempted. Requests of low
        priority don't, since they would be preempted again."""
        return self.was_preempted and self.priority <= Priority.NORMAL


RankTimeFunction = Callable[[WaitingPrompt, float], float]
"""Computes a request's rank time, before it is clamped to the starvation limit, from the request
and the current time in seconds."""

Rank = tuple[float, float]


@dataclass(frozen=True, slots=True)
class PrefillOrder:
    """A policy. If ``is_preemptive``, a prompt that is being computed is paused between two steps
    for a prompt whose rank time is earlier; otherwise it is finished first."""

    compute_rank_time: RankTimeFunction
    is_preemptive: bool

    def rank(self, waiting: WaitingPrompt, now_seconds: float) -> Rank:
        """Return a sort key: the request with the lowest rank goes first."""
        arrival = waiting.arrival_seconds
        rank_time = min(
            max(arrival, self.compute_rank_time(waiting, now_seconds)),
            arrival + NORMAL_STARVATION_LIMIT_SECONDS,
        )
        return (0.0 if waiting.goes_first else 1.0), rank_time


def fcfs(waiting: WaitingPrompt, now_seconds: float) -> float:
    """Return the request's rank time for "first come, first served"."""
    return waiting.arrival_seconds


def cached_first(waiting: WaitingPrompt, now_seconds: float) -> float:
    """Return the request's rank time for "longest cached prefix first", which is useful because the
    prefix may be evicted while the request waits."""
    head_start = waiting.cached_tokens / CACHED_TOKENS_PER_SECOND
    return waiting.arrival_seconds + NORMAL_STARVATION_LIMIT_SECONDS - head_start


def shortest(waiting: WaitingPrompt, now_seconds: float) -> float:
    """Return the request's rank time for "least remaining work first"."""
    return waiting.arrival_seconds + WAIT_PER_WORK_SECOND * waiting.remaining_seconds


def slack(waiting: WaitingPrompt, now_seconds: float) -> float:
    """Return the request's rank time for "least slack first": the request that must start soonest
    to meet its deadline goes first. Requests that can't meet their deadline any more go behind
    those that can."""
    return _latest_start(waiting) if _in_time(waiting, now_seconds) else _late_rank_time(waiting)


def deadline(waiting: WaitingPrompt, now_seconds: float) -> float:
    """Return the request's rank time for "earliest deadline first", which meets all deadlines if
    any order can (Liu and Layland, 1973). Requests that can't meet their deadline any more go
    behind those that can."""
    return waiting.deadline_seconds if _in_time(waiting, now_seconds) else _late_rank_time(waiting)


def _late_rank_time(waiting: WaitingPrompt) -> float:
    """Return the rank time of a request that can't meet its deadline any more: its arrival plus
    :data:`LATE_BUDGET_MULTIPLE` times its TTFT budget."""
    budget = waiting.deadline_seconds - waiting.arrival_seconds
    return waiting.arrival_seconds + LATE_BUDGET_MULTIPLE * budget


def _latest_start(waiting: WaitingPrompt) -> float:
    return waiting.deadline_seconds - waiting.remaining_seconds


def _in_time(waiting: WaitingPrompt, now_seconds: float) -> bool:
    return now_seconds <= _latest_start(waiting)


PREFILL_ORDERS: dict[str, PrefillOrder] = {
    "fcfs": PrefillOrder(fcfs, is_preemptive=False),
    "cached_first": PrefillOrder(cached_first, is_preemptive=False),
    "shortest": PrefillOrder(shortest, is_preemptive=True),
    "slack": PrefillOrder(slack, is_preemptive=True),
    "deadline": PrefillOrder(deadline, is_preemptive=True),
}


def allocate_step_tokens(
    ranked: Sequence[WaitingPrompt],
    now_seconds: float,
    budget_tokens: int,
    least_served: Collection[bytes],
) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the order in which requests get tokens of a step. Requests that have waited longer
    than their starvation limit come first: pairs of an index into ``ranked`` and the maximum number
    of tokens for that request. Together they get half of ``budget_tokens``, plus what the other
    requests don't need of the other half. The second result has the indexes of all other requests,
    in order; each may get all that is left.

    That applies to the tenants in ``least_served``. A tenant that has received more service than
    another gets what they leave, however long it has waited; otherwise it would gain by sending
    more than can be computed."""
    fair = [each.tenant in least_served or each.goes_first for each in ranked]
    overdue = [i for i, each in enumerate(ranked) if fair[i] and _is_overdue(each, now_seconds)]
    late = set(overdue)
    others = [i for i in range(len(ranked)) if i not in late]
    wanted = sum(ranked[i].new_tokens for i in others if fair[i])
    remaining = max((budget_tokens + 1) // 2, budget_tokens - wanted)
    first: list[tuple[int, int]] = []
    for index in overdue:
        if remaining <= 0:
            break
        limit = min(ranked[index].new_tokens, remaining)
        first.append((index, limit))
        remaining -= limit
    rest = [*others, *overdue[len(first) :]]
    return first, rest


def _is_overdue(waiting: WaitingPrompt, now_seconds: float) -> bool:
    limit = STARVATION_LIMIT_SECONDS[waiting.priority]
    return not waiting.goes_first and now_seconds > waiting.arrival_seconds + limit
