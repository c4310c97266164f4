"""Searches the highest rates at which clusters meet a target, for ``baton plan``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from simulator.cluster import SimulatedCluster
from simulator.cluster_config import ClusterConfig
from simulator.goodput import COARSE_STEP, highest_rate, min_hopeless_misses
from simulator.planned_workers import Workers
from simulator.rate_estimate import MeanRequest, estimated_rate
from simulator.result import summarize
from simulator.scenario import mean_rate
from simulator.search_ahead import next_probes
from simulator.simulation_pool import Simulation, SimulationPool

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
