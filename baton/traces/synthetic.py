"""Traces that are made up, from a seed: the same arguments give the same trace."""

import heapq
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, count, dropwhile, islice
from typing import Protocol

import numpy as np

from baton.errors import Invalid
from baton.traces.prompt_context import PromptContext
from baton.traces.seed import seeded_generator
from baton.traces.session_workload import WORKLOADS, SessionWorkload
from baton.traces.trace import Trace, TraceRequest

BLOCK_TOKENS = 64

ANSWER_TOKENS_PER_SECOND = 50.0
"""A turn comes a pause after the answer before it has ended. When that is, only a replay knows;
this is a usual speed of reading along."""

MAX_CONTEXT_TOKENS = 131_072
"""A session ends before a turn whose prompt and answer would be longer: the window of Llama 3.1."""

MAX_REQUESTS = 10_000_000
"""All arrivals are in memory."""

MAX_REQUESTS_PER_SECOND = 10_000.0
"""The load of thousands of GPUs; what comes before the trace begins is made, too."""

MAX_BURSTINESS = 10.0
"""Beyond it a trace of any usual length is one burst, or none."""

WARM_UP_SESSIONS = 4.0
"""Sessions begin so many mean durations before the trace, which then has its rate from the start.
Of exponential durations it misses 2 %."""


class TraceGenerator(Protocol):
    """Makes a trace of ``num_requests`` arrivals, ``rate_per_second`` in the mean, those of all
    turns counted. Sessions begin as a renewal process whose gaps are Gamma-distributed with
    ``burstiness`` as coefficient of variation: 1 is Poisson, more is bursty (BurstGPT, Wang et
    al., KDD '25, fits such to a real service). Raises Invalid for arguments out of their range."""

    def __call__(
        self, num_requests: int, rate_per_second: float, seed: int, burstiness: float = 1.0
    ) -> Trace: ...


def _generate(
    kind: str, num_requests: int, rate_per_second: float, seed: int, burstiness: float = 1.0
) -> Trace:
    _check(num_requests, rate_per_second, burstiness)
    generator = seeded_generator(seed)
    ids = count()
    names = [kind] if kind in WORKLOADS else list(WORKLOADS)
    desks = [_SessionGenerator(name, WORKLOADS[name], generator, ids) for name in names]
    sessions = _sessions(desks, rate_per_second, burstiness, generator)
    arrivals = dropwhile(lambda arrival: arrival.at_seconds < 0, _merged(sessions))
    return Trace(f"{kind}-{seed}", BLOCK_TOKENS, _from_zero(islice(arrivals, num_requests)))


def _check(num_requests: int, rate_per_second: float, burstiness: float) -> None:
    if not 1 <= num_requests <= MAX_REQUESTS:
        raise Invalid(
            f"{num_requests:,} requests; it must be from 1 to {MAX_REQUESTS:,}",
            param="num_requests",
        )
    if not 0 < rate_per_second <= MAX_REQUESTS_PER_SECOND:
        raise Invalid(
            f"{rate_per_second} requests per second; it must be above 0 and at most "
            f"{MAX_REQUESTS_PER_SECOND:,.0f}",
            param="rate_per_second",
        )
    if not 0 < burstiness <= MAX_BURSTINESS:
        raise Invalid(
            f"burstiness {burstiness}; it must be above 0 (1 is Poisson) and at most "
            f"{MAX_BURSTINESS:g}",
            param="burstiness",
        )


class _SessionGenerator:
    """Sessions of one kind."""

    def __init__(
        self,
        name: str,
        workload: SessionWorkload,
        generator: np.random.Generator,
        ids: Iterator[int],
    ) -> None:
        self._name = name
        self._workload = workload
        self._generator = generator
        self._numbers = count()
        self._common = PromptContext(ids, BLOCK_TOKENS)
        self._common.extend(workload.heads.common_tokens)
        self._heads: dict[int, PromptContext] = {}
        ranks = range(1, workload.heads.count + 1)
        self._popularity = list(accumulate(rank**-workload.heads.zipf for rank in ranks))

    @property
    def mean_turns(self) -> float:
        return self._workload.mean_turns

    @property
    def mean_seconds(self) -> float:
        """From a session's first turn to its last."""
        workload = self._workload
        gap = workload.mean_pause_seconds + workload.answer.mean / ANSWER_TOKENS_PER_SECOND
        return (workload.mean_turns - 1) * gap

    def session(self, start_seconds: float) -> list[TraceRequest]:
        """The turns of one more, at least the first."""
        workload, generator = self._workload, self._generator
        session = f"{self._name}-{next(self._numbers)}"
        context, at, turns = self._head().fork(), start_seconds, list[TraceRequest]()
        for turn in range(generator.geometric(1 / workload.mean_turns)):
            context.extend((workload.message if turn else workload.opening).draw(generator))
            answer = workload.answer.draw(generator)
            if turns and context.num_tokens + answer > MAX_CONTEXT_TOKENS:
                break
            prompt = context.num_tokens
            turns.append(TraceRequest(at, prompt, answer, context.blocks(), session, self._name))
            context.extend(answer)
            at += answer / ANSWER_TOKENS_PER_SECOND
            at += generator.exponential(workload.mean_pause_seconds)
        return turns

    def _head(self) -> PromptContext:
        """Written when it is first asked for."""
        rank = _drawn(self._popularity, self._generator)
        if rank not in self._heads:
            head = self._common.fork()
            head.extend(self._workload.heads.lengths.draw(self._generator))
            self._heads[rank] = head
        return self._heads[rank]


def _drawn(cumulated: list[float], generator: np.random.Generator) -> int:
    """An index, by the weights whose running sums these are."""
    found = np.searchsorted(cumulated, generator.random() * cumulated[-1], side="right")
    return min(int(found), len(cumulated) - 1)


def _sessions(
    desks: list[_SessionGenerator],
    rate_per_second: float,
    burstiness: float,
    generator: np.random.Generator,
) -> Iterator[list[TraceRequest]]:
    """Without end, by their first turns. Each desk makes the same number of requests."""
    per_request = [1 / desk.mean_turns for desk in desks]
    mean_gap = len(desks) / (rate_per_second * sum(per_request))
    weights = list(accumulate(per_request))
    shape = burstiness**-2
    start = -WARM_UP_SESSIONS * max(desk.mean_seconds for desk in desks)
    while True:
        start += generator.gamma(shape, mean_gap / shape)
        yield desks[_drawn(weights, generator)].session(start)


def _merged(sessions: Iterator[list[TraceRequest]]) -> Iterator[TraceRequest]:
    """In the order of time: no session has a turn before its first, nor has any later session."""
    pending: list[tuple[float, int, TraceRequest]] = []
    numbers = count()
    for turns in sessions:
        while pending and pending[0][0] <= turns[0].at_seconds:
            yield heapq.heappop(pending)[2]
        for arrival in turns:
            heapq.heappush(pending, (arrival.at_seconds, next(numbers), arrival))


def _from_zero(arrivals: Iterator[TraceRequest]) -> tuple[TraceRequest, ...]:
    found = list(arrivals)
    first = found[0].at_seconds
    return tuple(replace(arrival, at_seconds=arrival.at_seconds - first) for arrival in found)


TRACE_GENERATORS: dict[str, TraceGenerator] = {
    kind: partial(_generate, kind) for kind in (*WORKLOADS, "mixed")
}
"""By name. What each is like is told in workload.py; ``mixed`` has as many requests of each."""
