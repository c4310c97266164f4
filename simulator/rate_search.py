"""Searches the highest rates at which clusters meet a target, for ``baton plan``."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, zip_longest
from typing import Any, TypeVar

from baton.traces.trace import Trace
from simulator.cluster import SimulatedCluster
from simulator.cluster_config import ClusterConfig
from simulator.goodput import COARSE_STEP, highest_rate, min_hopeless_misses
from simulator.planned_workers import Workers
from simulator.result import summarize
from simulator.scenario import mean_rate
from simulator.simulation_pool import Simulation, SimulationPool
from simulator.step_cost import WorkerCosts

P = TypeVar("P", bound=Hashable)
R = TypeVar("R")

Search = Callable[[Callable[[P], bool]], R]
"""Gets a function that returns a probe's outcome, and returns the search's result."""

MAX_CASES_PER_PROBE = 8
"""The number of cases of assumed outcomes that are examined, per probe that may be returned."""


class _Unknown(Exception):
    def __init__(self, probe: object) -> None:
        self.probe = probe


def next_probes(searches: Sequence[Search[P, Any]], known: Mapping[P, bool], most: int) -> list[P]:
    """Return up to ``most`` different probes whose outcomes are not ``known``: first the one that
    each unfinished search needs now, then those that it will need if outcomes are as assumed, those
    with the fewest assumptions first. Return none if all searches are finished."""
    found = (_probes_of(search, known, most) for search in searches)
    by_urgency = chain.from_iterable(zip_longest(*found))
    return list(islice(dict.fromkeys(each for each in by_urgency if each is not None), most))


def _probes_of(search: Search[P, Any], known: Mapping[P, bool], most: int) -> Iterator[P]:
    cases: deque[dict[P, bool]] = deque([{}])
    for _ in range(most * MAX_CASES_PER_PROBE):
        if not cases:
            return
        outcomes = cases.popleft()
        probe = _first_unknown(search, {**known, **outcomes})
        if probe is not None:
            yield probe
            cases += ({**outcomes, probe: False}, {**outcomes, probe: True})


def _first_unknown(search: Search[P, Any], known: Mapping[P, bool]) -> P | None:
    """Return the first probe that the search asks for and that is not known; None if it ends."""

    def outcome(probe: P) -> bool:
        if probe not in known:
            raise _Unknown(probe)
        return known[probe]

    try:
        search(outcome)
    except _Unknown as unknown:
        probe: P = unknown.probe  # type: ignore[assignment]
        return probe
    return None


@dataclass(frozen=True, slots=True)
class MeanRequest:
    """The mean lengths of a trace's prompts and answers, in tokens."""

    prompt_tokens: int
    answer_tokens: int

    @classmethod
    def of(cls, trace: Trace) -> "MeanRequest":
        count = len(trace.requests)
        prompts = sum(each.num_prompt_tokens for each in trace.requests)
        answers = sum(each.num_answer_tokens for each in trace.requests)
        return cls(max(prompts // count, 1), max(answers // count, 1))

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens // 2


def estimated_rate(config: ClusterConfig, mean: MeanRequest) -> float:
    """Return the estimate in requests per second: that of the slower pool, and of the mixed
    workers."""
    prompt_seconds = config.prefill_cost.seconds(mean.prompt_tokens)
    answer_seconds = _answer_seconds(config, config.decode_costs, mean)
    pools = min(config.num_prefill / prompt_seconds, config.num_decode / answer_seconds)
    mixed = config.mixed_costs
    mixed_seconds = mixed.prefill.seconds(mean.prompt_tokens)
    mixed_seconds += _answer_seconds(config, mixed, mean)
    return pools + config.num_mixed / mixed_seconds


def _answer_seconds(config: ClusterConfig, costs: WorkerCosts, mean: MeanRequest) -> float:
    """Return a worker's time per answer in its largest batch within the ITL SLO and its memory; at
    least one answer."""
    low, high = 1, config.max_batch
    while low < high:
        middle = (low + high + 1) // 2
        tokens = middle * mean.context_tokens
        seconds = costs.decode.seconds(middle, tokens)
        fits = tokens <= costs.kv_capacity_tokens and seconds <= config.itl_slo_seconds
        low, high = (middle, high) if fits else (low, middle - 1)
    return mean.answer_tokens * costs.decode.seconds(low, low * mean.context_tokens) / low


MAX_RATE_FACTOR = 8
"""Highest rates are searched up to this many times the requested rate."""

MIN_TRACE_SECONDS = 15.0
"""Highest rates are searched up to the rate at which all requests arrive within this time. In a
shorter time even a hopeless overload would not show, since the TTFT SLO is seconds."""

MIN_TRACE_ANSWERS = 2
"""As :data:`MIN_TRACE_SECONDS`, in mean durations of an answer at the ITL SLO: before the first
answers end, there are fewer at a time than later."""


@dataclass(frozen=True, slots=True)
class HighestRate:
    """About the highest rate at which a cluster meets the target; 0 if it never does. Rates above
    ``searched_rps`` were not tried."""

    workers: Workers
    rate_rps: float
    searched_rps: float

    @property
    def may_be_higher(self) -> bool:
        return self.rate_rps * COARSE_STEP > self.searched_rps

    def as_dict(self) -> dict[str, object]:
        return {
            "kind": self.workers.kind,
            **self.workers.as_dict(),
            "rate_rps": self.rate_rps,
            "may_be_higher": self.may_be_higher,
        }


RateProbe = tuple[Workers, float]
"""Workers, and a rate in requests per second at which they may meet the target."""


@dataclass(frozen=True, slots=True)
class RateSearch:
    """Searches the highest rates at which at least the share ``target`` of the requests meets the
    SLO. At another rate than the trace's own, the same requests arrive closer together or farther
    apart. ``config_of`` returns the cluster of given workers."""

    pool: SimulationPool
    config_of: Callable[[Workers], ClusterConfig]
    itl_slo_seconds: float
    target: float
    show: Callable[[str], None]

    def best_of_each(self, groups: Sequence[Sequence[Workers]]) -> list[HighestRate]:
        """Return, for each group, the workers with about the highest rate. The groups' searches run
        at the same time. While there are more processes than searches, they also simulate what a
        search may need next, which changes no result."""
        trace = self.pool.trace
        mean, rate, most = MeanRequest.of(trace), mean_rate(trace), self._highest_searched()

        def estimate(workers: Workers) -> float:
            return -estimated_rate(self.config_of(workers), mean)

        searches = [partial(_best_of, sorted(each, key=estimate), rate, most) for each in groups]
        outcomes = self.pool.run_wanted(
            lambda known: next_probes(searches, known, self.pool.num_processes),
            self._simulation,
            self.show,
        )
        return [search(outcomes.__getitem__) for search in searches]

    def _highest_searched(self) -> float:
        """Return the highest rate to search: at higher ones, the trace is too short to tell what a
        cluster sustains."""
        trace = self.pool.trace
        answer_seconds = MeanRequest.of(trace).answer_tokens * self.itl_slo_seconds
        seconds = max(MIN_TRACE_SECONDS, MIN_TRACE_ANSWERS * answer_seconds)
        rate = mean_rate(trace)
        return max(rate, min(rate * MAX_RATE_FACTOR, len(trace.requests) / seconds))

    def _simulation(self, probe: RateProbe) -> Simulation[bool]:
        workers, rate = probe
        return Simulation(
            label=f"{workers} workers at {rate:.2f} requests per second",
            config=self.config_of(workers),
            judge=partial(_meets, self.target),
            rate_rps=rate,
            give_up_misses=min_hopeless_misses(len(self.pool.trace.requests), self.target),
        )


def _best_of(
    ordered: Sequence[Workers], rate: float, most: float, meets: Callable[[RateProbe], bool]
) -> HighestRate:
    """Search from ``rate`` up to ``most``. Workers that miss the target at a rate above the best
    one so far take a single run. Those with the highest estimate come first, so that most of the
    others do."""
    best = HighestRate(ordered[0], 0.0, most)
    for workers in ordered:
        if best.rate_rps and not meets((workers, rate)):
            continue
        found = highest_rate(_at_rates(meets, workers), rate, most)
        if found > best.rate_rps:
            best, rate = HighestRate(workers, found, most), found * COARSE_STEP
        if rate > most:
            break
    return best


def _at_rates(meets: Callable[[RateProbe], bool], workers: Workers) -> Callable[[float], bool]:
    return lambda rate: meets((workers, rate))


def _meets(target: float, cluster: SimulatedCluster) -> bool:
    return not cluster.stopped_early and summarize(cluster).attainment >= target
