"""Specifies a load: which requests to send, and when. They come from a trace or are synthetic."""

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from baton.errors import Invalid
from baton.traces.synthetic import MAX_BURSTINESS, MAX_REQUESTS, TRACE_GENERATORS
from baton.traces.trace import Trace, TraceRequest, seeded_generator
from simulator.flag_checks import check_at_least, check_positive
from simulator.scenario import Traffic

PLAIN, BLOCK_TOKENS = "plain", 64
MAX_TOKENS = 1 << 20

DEFAULT_REQUESTS = 100
"""The number of requests when neither a number nor a duration is given."""

OVERSAMPLING = 1.5
"""A synthetic load for a duration is generated for this many times the duration, since arrivals are
random."""

CLOSED_REQUESTS = 4096
"""The number of requests generated for a closed loop with a duration. After the last request, the
loop starts again from the first, with different prompts."""


@dataclass(frozen=True, kw_only=True)
class RequestLengths:
    """The lengths, in tokens, of the prompts and answers of kind ``plain``. Lengths have a
    log-normal distribution: ``input_tokens`` and ``output_tokens`` are the means;
    ``input_spread`` and ``output_spread`` are the standard deviations of the logarithm. If a spread
    is 0, all lengths equal the mean. The first ``shared_tokens`` tokens are
    the same in all prompts."""

    input_tokens: int
    output_tokens: int
    input_spread: float
    output_spread: float
    shared_tokens: int

    def __post_init__(self) -> None:
        """Raise Invalid if a value is out of range."""
        for flag, tokens in (("input", self.input_tokens), ("output", self.output_tokens)):
            if not 1 <= tokens <= MAX_TOKENS:
                raise Invalid(f"--{flag}-tokens is {tokens}; it must be from 1 to {MAX_TOKENS:,}")
        for flag, spread in (("input", self.input_spread), ("output", self.output_spread)):
            if not 0 <= spread <= 3:
                raise Invalid(f"--{flag}-spread is {spread:g}; it must be from 0 to 3")
        if not 0 <= self.shared_tokens < self.input_tokens:
            raise Invalid(
                f"--shared-tokens is {self.shared_tokens}; it must be at least 0 and less than "
                "--input-tokens"
            )


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """Either ``rate`` requests per second arrive, however slow the answers are (an open loop), or
    ``concurrency`` users each wait for their answer (a closed loop)."""

    trace: Path | None
    kind: str | None
    lengths: RequestLengths
    requests: int | None
    duration: float | None
    rate: float | None
    concurrency: int | None
    burstiness: float
    rate_factor: float
    jitter_seconds: float
    think_seconds: float
    warm_up: float | None
    seed: int

    def __post_init__(self) -> None:
        """Raise Invalid if a value is out of range, or if options conflict."""
        if self.trace is not None and self.kind is not None:
            raise Invalid("--trace and --kind can't be combined")
        if self.kind is not None and self.kind not in (PLAIN, *TRACE_GENERATORS):
            known = ", ".join((PLAIN, *TRACE_GENERATORS))
            raise Invalid(f"--kind is {self.kind!r}; it must be one of {known}")
        if self.concurrency is not None and self.rate is not None:
            raise Invalid(
                "--rate (an open loop) and --concurrency (a closed loop) can't be combined"
            )
        for flag, value in (("--rate", self.rate), ("--duration", self.duration)):
            if value is not None:
                check_positive(flag, value)
        check_positive("--rate-factor", self.rate_factor)
        if self.concurrency is not None:
            check_at_least("--concurrency", self.concurrency, 1)
        if self.requests is not None:
            check_at_least("--requests", self.requests, 1)
        check_at_least("--seed", self.seed, 0)
        if not 0 <= self.burstiness <= MAX_BURSTINESS:
            raise Invalid(f"--burstiness is {self.burstiness:g}; it must be from 0 to 10")
        for flag, seconds in (("--think-seconds", self.think_seconds), ("--warm-up", self.warm_up)):
            if seconds is not None and not 0 <= seconds < math.inf:
                raise Invalid(f"{flag} is {seconds:g}; it must be finite and at least 0")
        if self.think_seconds and not self.is_closed_loop:
            raise Invalid("--think-seconds needs --concurrency N (a closed loop)")
        if self.jitter_seconds and self.trace is None:
            raise Invalid("--jitter-seconds needs --trace FILE")
        if self.trace is None and self.concurrency is None and self.rate is None:
            raise Invalid("baton bench needs --rate R, --concurrency N, or --trace FILE")

    @property
    def is_closed_loop(self) -> bool:
        return self.concurrency is not None

    @property
    def name(self) -> str:
        return self.trace.name if self.trace is not None else self.kind or PLAIN

    @property
    def warm_up_seconds(self) -> float:
        """The given warm-up time; by default a tenth of the duration, or 0 if there is no
        duration."""
        if self.warm_up is not None:
            return self.warm_up
        return 0.1 * self.duration if self.duration is not None else 0.0

    def warm_up_requests(self, num_requests: int) -> int:
        """Return how many of the first requests are not measured: a tenth if neither a duration nor
        a warm-up time is given, else 0."""
        counted = self.warm_up is None and self.duration is None
        return num_requests // 10 if counted else 0

    def make_trace(self) -> Trace:
        """Return the requests to send. In a closed loop, their arrival times are ignored. Raises
        Invalid if the trace can't be read, or if an option is out of range."""
        if self.trace is None and (self.kind or PLAIN) == PLAIN:
            rate = self._rate * self.rate_factor
            return self._limit(
                plain_trace(self.lengths, self._num_requests, rate, self.burstiness, self.seed)
            )
        traffic = Traffic(
            trace=self.trace,
            kind=self.kind,
            requests=self._num_requests,
            rate=self.rate if self.trace is not None else self._rate,
            burstiness=self.burstiness,
            rate_factor=self.rate_factor,
            jitter_seconds=self.jitter_seconds,
            seed=self.seed,
        )
        return self._limit(traffic.trace_at_requested_rate)

    @property
    def _rate(self) -> float:
        return self.rate or 1.0

    @property
    def _num_requests(self) -> int:
        if self.requests is not None:
            return self.requests
        if self.duration is None:
            return DEFAULT_REQUESTS
        if self.is_closed_loop:
            return CLOSED_REQUESTS
        count = math.ceil(self.duration * self._rate * self.rate_factor * OVERSAMPLING) + 16
        if count > MAX_REQUESTS:
            raise Invalid(
                f"--duration and the rate give {count:,} requests; the maximum is {MAX_REQUESTS:,}"
            )
        return count

    def _limit(self, trace: Trace) -> Trace:
        arrivals = trace.requests
        if self.duration is not None and not self.is_closed_loop:
            arrivals = tuple(each for each in arrivals if each.arrival_seconds < self.duration)
        return replace(trace, requests=arrivals[: self.requests])


def plain_trace(
    lengths: RequestLengths, count: int, rate: float, burstiness: float, seed: int
) -> Trace:
    """Generate independent requests. Their inter-arrival times have a Gamma distribution with
    ``burstiness`` as coefficient of variation: 1 gives Poisson arrivals, 0 gives even intervals."""
    generator = seeded_generator(seed)
    gaps = np.full(count, 1 / rate)
    if burstiness:
        shape = burstiness**-2
        gaps = generator.gamma(shape, 1 / (rate * shape), count)
    times = [0.0, *accumulate(gaps[:-1].tolist())]
    prompts = _draw_lengths(lengths.input_tokens, lengths.input_spread, count, generator)
    answers = _draw_lengths(lengths.output_tokens, lengths.output_spread, count, generator)
    shared = lengths.shared_tokens // BLOCK_TOKENS
    arrivals, next_block = [], shared
    for at, prompt, answer in zip(times, prompts, answers, strict=True):
        num_blocks = -(-prompt // BLOCK_TOKENS)
        own = max(num_blocks - shared, 1)
        blocks = (*range(num_blocks - own), *range(next_block, next_block + own))
        next_block += own
        arrivals.append(TraceRequest(at, prompt, answer, blocks))
    return Trace(PLAIN, BLOCK_TOKENS, tuple(arrivals))


def _draw_lengths(
    mean: int, spread: float, count: int, generator: np.random.Generator
) -> list[int]:
    if not spread:
        return [mean] * count
    drawn = generator.lognormal(np.log(mean) - spread**2 / 2, spread, count)
    lengths: list[int] = np.clip(np.round(drawn), 1, MAX_TOKENS).astype(int).tolist()
    return lengths


def group_by_session(arrivals: tuple[TraceRequest, ...]) -> list[list[TraceRequest]]:
    """Return the turns of each conversation, in order of the conversations' first turns. A request
    without a session is its own conversation."""
    found: dict[str, list[TraceRequest]] = {}
    for number, arrival in enumerate(arrivals):
        found.setdefault(arrival.session or f"\0{number}", []).append(arrival)
    return list(found.values())
