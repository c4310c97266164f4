"""Synthetic traces, generated from a seed: the same arguments give the same trace."""

import heapq
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, count, dropwhile, islice
from typing import Protocol

import numpy as np

from baton.errors import Invalid
from baton.traces.session_workload import WORKLOADS, SessionWorkload
from baton.traces.trace import Trace, TraceRequest, seeded_generator


class PromptContext:
    """A text represented by the ids of its blocks. A fork shares the ids of the blocks that are
    full at that time; a partial block is continued by each fork separately."""

    def __init__(self, ids: Iterator[int], block_tokens: int) -> None:
        """``ids`` yields new block ids; all contexts of a trace share it."""
        self._ids = ids
        self._block_tokens = block_tokens
        self._full: list[int] = []
        self.num_tokens = 0

    def fork(self) -> "PromptContext":
        """Return a copy of the text that can be extended differently."""
        other = PromptContext(self._ids, self._block_tokens)
        other._full = self._full.copy()
        other.num_tokens = self.num_tokens
        return other

    def extend(self, num_tokens: int) -> None:
        """Append text that no other context has."""
        self.num_tokens += num_tokens
        while len(self._full) < self.num_tokens // self._block_tokens:
            self._full.append(next(self._ids))

    def block_ids(self) -> tuple[int, ...]:
        """Return the ids of all blocks. A partial last block gets a new id at each call, since it
        is never shared."""
        if self.num_tokens % self._block_tokens:
            return *self._full, next(self._ids)
        return tuple(self._full)


BLOCK_TOKENS = 64

ANSWER_TOKENS_PER_SECOND = 50.0
"""A turn arrives one pause after the end of the previous answer. When that answer ends depends on
the replay; traces assume this output speed."""

MAX_CONTEXT_TOKENS = 131_072
"""A session ends before a turn whose prompt and answer would be longer: the window of Llama 3.1."""

MAX_REQUESTS = 10_000_000
"""Limited because all arrivals are kept in memory."""

MAX_REQUESTS_PER_SECOND = 10_000.0
"""Limited because the warm-up before the trace is generated, too. This rate is the load of
thousands of GPUs."""

MAX_BURSTINESS = 10.0
"""Maximum burstiness; above it, a trace of any usual length is one burst, or none."""

WARM_UP_SESSIONS = 4.0
"""Sessions begin this many mean durations before the trace, so that the trace has its full rate
from the start. With exponential durations, 2 % of it are missing."""


class TraceGenerator(Protocol):
    """Generates a trace of ``num_requests`` arrivals (turns), ``rate_per_second`` on average.
    Sessions begin as a renewal process whose intervals are Gamma-distributed with ``burstiness`` as
    the coefficient of variation: 1 is a Poisson process, and higher values are burstier (BurstGPT,
    Wang et al., KDD '25, fits such a process to a real service). Raises Invalid for arguments that
    are out of range."""

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
    sources = [_SessionGenerator(name, WORKLOADS[name], generator, ids) for name in names]
    sessions = _sessions(sources, rate_per_second, burstiness, generator)
    arrivals = dropwhile(lambda arrival: arrival.arrival_seconds < 0, _merged(sessions))
    return Trace(f"{kind}-{seed}", BLOCK_TOKENS, _from_zero(islice(arrivals, num_requests)))


def _check(num_requests: int, rate_per_second: float, burstiness: float) -> None:
    if not 1 <= num_requests <= MAX_REQUESTS:
        raise Invalid(
            f"num_requests is {num_requests:,}; it must be from 1 to {MAX_REQUESTS:,}",
            param="num_requests",
        )
    if not 0 < rate_per_second <= MAX_REQUESTS_PER_SECOND:
        raise Invalid(
            f"rate_per_second is {rate_per_second}; it must be above 0 and at most "
            f"{MAX_REQUESTS_PER_SECOND:,.0f}",
            param="rate_per_second",
        )
    if not 0 < burstiness <= MAX_BURSTINESS:
        raise Invalid(
            f"burstiness is {burstiness}; it must be above 0 (1 is Poisson) and at most "
            f"{MAX_BURSTINESS:g}",
            param="burstiness",
        )


class _SessionGenerator:
    """Generates sessions of one kind."""

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
        self._session_numbers = count()
        self._common = PromptContext(ids, BLOCK_TOKENS)
        self._common.extend(workload.prefixes.common_tokens)
        self._prefixes: dict[int, PromptContext] = {}
        ranks = range(1, workload.prefixes.count + 1)
        self._popularity = list(accumulate(rank**-workload.prefixes.zipf for rank in ranks))

    @property
    def mean_turns(self) -> float:
        return self._workload.mean_turns

    @property
    def mean_seconds(self) -> float:
        """Mean time from a session's first turn to its last."""
        workload = self._workload
        interval = workload.mean_pause_seconds + workload.answer.mean / ANSWER_TOKENS_PER_SECOND
        return (workload.mean_turns - 1) * interval

    def generate(self, start_seconds: float) -> list[TraceRequest]:
        """Generate a session and return its turns, at least one."""
        workload, generator = self._workload, self._generator
        session = f"{self._name}-{next(self._session_numbers)}"
        context, at, turns = self._draw_prefix().fork(), start_seconds, list[TraceRequest]()
        for turn in range(generator.geometric(1 / workload.mean_turns)):
            context.extend((workload.message if turn else workload.first_message).draw(generator))
            answer = workload.answer.draw(generator)
            if turns and context.num_tokens + answer > MAX_CONTEXT_TOKENS:
                break
            prompt = context.num_tokens
            turns.append(TraceRequest(at, prompt, answer, context.block_ids(), session, self._name))
            context.extend(answer)
            at += answer / ANSWER_TOKENS_PER_SECOND
            at += generator.exponential(workload.mean_pause_seconds)
        return turns

    def _draw_prefix(self) -> PromptContext:
        """Draw a shared prefix, which is generated when it is first used."""
        rank = _drawn(self._popularity, self._generator)
        if rank not in self._prefixes:
            head = self._common.fork()
            head.extend(self._workload.prefixes.lengths.draw(self._generator))
            self._prefixes[rank] = head
        return self._prefixes[rank]


def _drawn(cumulated: list[float], generator: np.random.Generator) -> int:
    """Draw an index with a probability in proportion to its weight. ``cumulated`` are the
    cumulative sums of the weights."""
    index = np.searchsorted(cumulated, generator.random() * cumulated[-1], side="right")
    return min(int(index), len(cumulated) - 1)


def _sessions(
    sources: list[_SessionGenerator],
    rate_per_second: float,
    burstiness: float,
    generator: np.random.Generator,
) -> Iterator[list[TraceRequest]]:
    """Yield sessions without end, ordered by their first turns. On average, every kind of session
    contributes the same number of requests to the trace."""
    per_request = [1 / source.mean_turns for source in sources]
    mean_gap = len(sources) / (rate_per_second * sum(per_request))
    weights = list(accumulate(per_request))
    shape = burstiness**-2
    start = -WARM_UP_SESSIONS * max(source.mean_seconds for source in sources)
    while True:
        start += generator.gamma(shape, mean_gap / shape)
        yield sources[_drawn(weights, generator)].generate(start)


def _merged(sessions: Iterator[list[TraceRequest]]) -> Iterator[TraceRequest]:
    """Merge the turns of all sessions in order of time. Sessions are ordered by their first turns,
    so when a session begins, all turns before its first one are known and can be yielded."""
    pending: list[tuple[float, int, TraceRequest]] = []
    numbers = count()
    for turns in sessions:
        while pending and pending[0][0] <= turns[0].arrival_seconds:
            yield heapq.heappop(pending)[2]
        for arrival in turns:
            heapq.heappush(pending, (arrival.arrival_seconds, next(numbers), arrival))


def _from_zero(arrivals: Iterator[TraceRequest]) -> tuple[TraceRequest, ...]:
    collected = list(arrivals)
    first = collected[0].arrival_seconds
    return tuple(
        replace(arrival, arrival_seconds=arrival.arrival_seconds - first) for arrival in collected
    )


TRACE_GENERATORS: dict[str, TraceGenerator] = {
    kind: partial(_generate, kind) for kind in (*WORKLOADS, "mixed")
}
"""Generators by name. The kinds are described in session_workload.py; ``mixed`` has equally many
requests of each."""
