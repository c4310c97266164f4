"""The order in which waiting prompts are computed: several policies by name, all starvation-free.

``fcfs`` and ``cached_first`` finish a prompt before they begin the next one. The other policies
order those prompts that can still have their first token in time. Prompts that can't, the late
ones, go behind them, in the order of their arrival. **Once a late prompt has waited for twice
as long as it should at most, it is overdue (:data:`OVERDUE_WAITS`), and overdue prompts get half of
each step (:data:`LATE_SHARE`).** So after its arrival a request has its first token within twice
its deadline or its starvation limit, whichever is less, plus twice the time that it takes to
compute what had arrived before it: twice what it would have waited under ``fcfs``. And however
great the overload, half of the steps is for requests in time. Most prompts that a burst makes late
are computed after it, before they are overdue, and make nobody else late.

No order can do much better for both: with prompts alike and a worker that is never idle, the order
does not change the mean wait ``W`` (Little's law). If a share ``g`` of the requests is in time and
waits ``s``, the others wait ``(W - g s) / (1 - g)`` on average.

All of this applies among requests of one priority and tenant. Requests of a lower priority get what
the others leave, until they have waited for their own priority's starvation limit
(:mod:`baton.core.priority`), which is infinite for ``BATCH``; from then on they get a share of each
step.

The functions are pure, and cheap enough to rank a thousand requests between two steps.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from baton.core.priority import STARVATION_LIMIT_SECONDS, Priority

LATE_SHARE = 0.5
"""The share of a step for overdue prompts while others wait. An overdue one waits at most
``1 / LATE_SHARE`` times as long as under ``fcfs``; with more, fewer requests are in time
(docs/results/placement.md has the curve)."""

OVERDUE_WAITS = 2.0
"""A late prompt is overdue after this multiple of the wait after which it was due. With 1, bursts
make many more requests late; with 3, late ones wait longer, and hardly more are in time
(docs/results/placement.md)."""

CACHED_TOKENS_PER_SECOND = 2000.0
"""For ``cached_first``: this many more cached tokens outweigh a second of waiting."""

WAIT_PER_WORK_SECOND = 10.0
"""For ``shortest``: one second less of work outweighs this many seconds of waiting."""


@dataclass(slots=True)
class WaitingPrompt:
    """A request whose prompt waits to be computed, or is being computed.

    ``deadline_seconds`` is a time, not a duration; it is infinite when there is no deadline. Until
    it is known, ``objective_seconds`` after the arrival takes its place: the TTFT objective,
    infinite when there is none. ``remaining_seconds`` is the predicted time of the remaining work,
    0 if unknown. ``cached_tokens`` counts the prompt's cached tokens, ``new_tokens`` those that
    must be computed. ``was_preempted``: the request was decoding before, and its client's stream
    has stalled."""

    arrival_seconds: float
    deadline_seconds: float = math.inf
    objective_seconds: float = math.inf
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

    @property
    def due_seconds(self) -> float:
        """When the first token is due: at the deadline. A request without a deadline has its
        objective instead, or the starvation limit of its priority if that is shorter."""
        if self.deadline_seconds < math.inf:
            return self.deadline_seconds
        limit = STARVATION_LIMIT_SECONDS[self.priority]
        return self.arrival_seconds + min(self.objective_seconds, limit)

    @property
    def latest_start_seconds(self) -> float:
        """When the computation must go on at the latest for the first token not to be late."""
        return self.due_seconds - self.remaining_seconds

    def is_late(self, now_seconds: float) -> bool:
        """Whether the first token can't come any more by the time when it is due."""
        return now_seconds > self.latest_start_seconds

    def is_overdue(self, now_seconds: float) -> bool:
        """Whether the request is late and has waited for :data:`OVERDUE_WAITS` times as long as it
        should at most, or for longer than the starvation limit of its priority."""
        wait = OVERDUE_WAITS * (self.due_seconds - self.arrival_seconds)
        return self.is_late(now_seconds) and (
            now_seconds > self.arrival_seconds + wait or self.is_starving(now_seconds)
        )

    def is_starving(self, now_seconds: float) -> bool:
        """Whether the request has waited for longer than the starvation limit of its priority."""
        return now_seconds > self.arrival_seconds + STARVATION_LIMIT_SECONDS[self.priority]


RankTimeFunction = Callable[[WaitingPrompt], float]
"""Computes the rank time of a request that is not late, in seconds."""

Rank = tuple[bool, bool, float]
"""A sort key: requests that go first because they were preempted, then those in time, then late
ones."""


@dataclass(frozen=True, slots=True)
class PrefillOrder:
    """A policy. If ``is_preemptive``, a prompt that is being computed is paused between two steps
    for one that goes before it; otherwise it is finished first, and no request counts as late."""

    compute_rank_time: RankTimeFunction
    is_preemptive: bool

    def rank(self, waiting: WaitingPrompt, now_seconds: float) -> Rank:
        """Return a sort key: the request with the lowest rank goes first."""
        is_late = self.is_late(waiting, now_seconds)
        rank_time = waiting.arrival_seconds if is_late else self.compute_rank_time(waiting)
        return not waiting.goes_first, is_late, rank_time

    def is_late(self, waiting: WaitingPrompt, now_seconds: float) -> bool:
        """Whether the request can't be in time any more, and this order takes that into account."""
        return self.is_preemptive and waiting.is_late(now_seconds)

    def is_overdue(self, waiting: WaitingPrompt, now_seconds: float) -> bool:
        """Whether the request is overdue, and this order takes that into account."""
        return self.is_preemptive and waiting.is_overdue(now_seconds)


def fcfs(waiting: WaitingPrompt) -> float:
    """Return the request's rank time for "first come, first served"."""
    return waiting.arrival_seconds


def cached_first(waiting: WaitingPrompt) -> float:
    """Return the request's rank time for "longest cached prefix first", which is useful because the
    prefix may be evicted while the request waits."""
    return waiting.arrival_seconds - waiting.cached_tokens / CACHED_TOKENS_PER_SECOND


def shortest(waiting: WaitingPrompt) -> float:
    """Return the request's rank time for "least remaining work first"."""
    return waiting.arrival_seconds + WAIT_PER_WORK_SECOND * waiting.remaining_seconds


def slack(waiting: WaitingPrompt) -> float:
    """Return the request's rank time for "least slack first": the request that must start soonest
    to meet its deadline goes first."""
    return waiting.latest_start_seconds


def deadline(waiting: WaitingPrompt) -> float:
    """Return the request's rank time for "earliest deadline first", which meets all deadlines if
    any order can (Liu and Layland, 1973)."""
    return waiting.due_seconds


PREFILL_ORDERS: dict[str, PrefillOrder] = {
    "fcfs": PrefillOrder(fcfs, is_preemptive=False),
    "cached_first": PrefillOrder(cached_first, is_preemptive=False),
    "shortest": PrefillOrder(shortest, is_preemptive=True),
    "slack": PrefillOrder(slack, is_preemptive=True),
    "deadline": PrefillOrder(deadline, is_preemptive=True),
}


def seconds_beside_late(work_seconds: float, late_seconds: float) -> float:
    """Return how long ``work_seconds`` of prompts in time take while ``late_seconds`` of overdue
    prompts wait, which get ``LATE_SHARE`` of each step until they are computed."""
    return work_seconds + min(work_seconds * LATE_SHARE / (1 - LATE_SHARE), late_seconds)


TokenShare = tuple[int, int]
"""An index into the ranked requests, and the maximum number of tokens for that request."""


def allocate_step_tokens(
    ranked: Sequence[WaitingPrompt],
    now_seconds: float,
    budget_tokens: int,
    least_served: Collection[bytes],
) -> list[TokenShare]:
    """Return the requests in the order in which they get tokens of a step, each with its limit.

    Requests that were preempted go first. Then come those that have waited for longer than the
    starvation limit of their priority while requests of a higher priority wait: they get
    ``LATE_SHARE`` of the step, and what the highest priority does not need of the rest. That
    applies to the tenants in ``least_served``; a tenant that has received more service than another
    would gain by sending more than can be computed.

    The rest of the step is given to requests as they rank, and so to priorities and tenants. Of
    what the requests of one tenant and priority get together, overdue ones get ``LATE_SHARE``, and
    what the others don't need of the rest. A request that gets nothing comes last, and may use
    what the others turn out not to need."""
    shares = _distribute(
        ranked, [i for i, each in enumerate(ranked) if each.goes_first], budget_tokens
    )
    rest = [i for i, each in enumerate(ranked) if not each.goes_first]
    top = min((ranked[i].priority for i in rest), default=Priority.NORMAL)
    fair = [i for i in rest if ranked[i].tenant in least_served]
    starving = [i for i in fair if ranked[i].priority > top and ranked[i].is_starving(now_seconds)]
    first = [i for i in fair if ranked[i].priority == top]
    shares += _share(ranked, starving, first, budget_tokens - _num_tokens(shares))
    rest = [i for i in rest if i not in starving]
    for members, num_tokens in _by_group(ranked, rest, budget_tokens - _num_tokens(shares)):
        overdue = [i for i in members if ranked[i].is_overdue(now_seconds)]
        others = [i for i in members if not ranked[i].is_overdue(now_seconds)]
        first_shares = _share(ranked, overdue, others, num_tokens)
        shares += first_shares
        shares += _distribute(ranked, others, num_tokens - _num_tokens(first_shares))
    has_share = {index for index, _ in shares}
    return shares + [(i, budget_tokens) for i in range(len(ranked)) if i not in has_share]


def _by_group(
    ranked: Sequence[WaitingPrompt], indices: list[int], num_tokens: int
) -> Iterator[tuple[list[int], int]]:
    """Yield the requests of each priority and tenant, and how many of ``num_tokens`` they get as
    they rank; not those that get nothing."""
    group = [(each.priority, each.tenant) for each in ranked]
    totals = dict[tuple[Priority, bytes], int]()
    for index, limit in _distribute(ranked, indices, num_tokens):
        totals[group[index]] = totals.get(group[index], 0) + limit
    for name, total in totals.items():
        yield [index for index in indices if group[index] == name], total


def _share(
    ranked: Sequence[WaitingPrompt], overdue: list[int], others: list[int], num_tokens: int
) -> list[TokenShare]:
    """Give overdue requests ``LATE_SHARE`` of ``num_tokens``, and what the others don't need of the
    rest."""
    wanted = sum(ranked[index].new_tokens for index in others)
    share = max(math.ceil(num_tokens * LATE_SHARE), num_tokens - wanted)
    return _distribute(ranked, overdue, share)


def _distribute(
    ranked: Sequence[WaitingPrompt], indices: list[int], num_tokens: int
) -> list[TokenShare]:
    """Give ``num_tokens`` to requests, one after the other, until none are left."""
    shares = []
    for index in indices:
        if num_tokens <= 0:
            break
        limit = min(ranked[index].new_tokens, num_tokens)
        shares.append((index, limit))
        num_tokens -= limit
    return shares


def _num_tokens(shares: list[TokenShare]) -> int:
    return sum(limit for _, limit in shares)
