"""Simulates configurations of a cluster over a range of rates."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from baton.errors import Invalid
from baton.traces.files import scale_rate
from baton.traces.trace import Trace
from conductor.policy.policies import DEFAULT_POLICY
from simulator.cluster import SimulatedCluster
from simulator.cluster_config import ClusterConfig
from simulator.goodput import min_hopeless_misses
from simulator.scenario import Scenario, mean_rate

T = TypeVar("T")

NUM_RATES = 16
"""Rates per sweep. They are evenly spaced, since throughput is proportional to the rate."""

MAX_CONFIGURATIONS = 32
"""Maximum number of configurations that are simulated."""

MAX_SIMULATED_REQUESTS = 2_000_000
"""Maximum number of requests of all simulations: about a quarter of an hour on one core."""

MAX_MISSES_IN_A_ROW = 2
"""A configuration that misses the target at this many rates in a row is not simulated at higher
ones: one rate may be missed by bad luck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptConfiguration:
    """A cluster to simulate. ``label`` is its short name, and ``kind`` is what it is drawn as.
    ``workers`` has the number of workers of each role, and ``gpus_per_worker`` the GPUs of each of
    them. All workers together have ``num_gpus``."""

    label: str
    kind: str
    workers: dict[str, int]
    num_gpus: int
    gpus_per_worker: dict[str, int]
    cluster: ClusterConfig


@dataclass(frozen=True, slots=True)
class SweptRun:
    """A finished simulation of a configuration at ``rate_rps`` requests per second."""

    configuration: SweptConfiguration
    rate_rps: float
    cluster: SimulatedCluster


def rates_up_to(highest: float, num_rates: int = NUM_RATES) -> tuple[float, ...]:
    """Return evenly spaced rates; the last one is ``highest``."""
    return tuple(highest * number / num_rates for number in range(1, num_rates + 1))


def check_sweep_size(num_configurations: int, num_requests: int) -> None:
    """Raise Invalid if a sweep could simulate more than MAX_SIMULATED_REQUESTS requests."""
    configurations = min(num_configurations, MAX_CONFIGURATIONS)
    total = configurations * NUM_RATES * num_requests
    if total > MAX_SIMULATED_REQUESTS:
        most = MAX_SIMULATED_REQUESTS // (configurations * NUM_RATES)
        raise Invalid(
            f"the sweep would simulate {configurations} configurations at {NUM_RATES} rates with "
            f"{num_requests:,} requests each, {total:,} in total; at most "
            f"{MAX_SIMULATED_REQUESTS:,} are possible, so there may be {most:,} requests"
        )


def thin_out(configurations: Sequence[T], most: int) -> list[T]:
    """Return at most ``most`` configurations, which must be 2 or more. They are evenly spread, and
    the first and the last one are among them."""
    if len(configurations) <= most:
        return list(configurations)
    last = len(configurations) - 1
    return [configurations[round(last * number / (most - 1))] for number in range(most)]


def sweep(
    configurations: Sequence[SweptConfiguration],
    trace: Trace,
    rates: Sequence[float],
    target: float,
    show: Callable[[int, str], None],
) -> Iterator[SweptRun]:
    """Simulate each configuration at ascending ``rates``: the requests of ``trace``, closer
    together or farther apart. Higher rates are skipped after MAX_MISSES_IN_A_ROW misses of the
    share ``target``, and after a run in which less than half of ``target`` can be reached, which is
    left out. ``show`` is called before each simulation with the number of those that are done or
    skipped, and with a description."""
    own_rate = mean_rate(trace)
    hopeless = min_hopeless_misses(len(trace.requests), target / 2)
    for number, configuration in enumerate(configurations):
        misses = 0
        for index, rate in enumerate(rates):
            show(number * len(rates) + index, f"{configuration.label} at {rate:.3g} requests/s")
            scaled = scale_rate(trace, rate / own_rate)
            scenario = Scenario(config=configuration.cluster)
            cluster = scenario.run(scaled, DEFAULT_POLICY, hopeless)
            if cluster.stopped_early:
                break
            yield SweptRun(configuration, rate, cluster)
            misses = misses + 1 if _attainment(cluster) < target else 0
            if misses == MAX_MISSES_IN_A_ROW:
                break


def _attainment(cluster: SimulatedCluster) -> float:
    slo = cluster.config.itl_slo_seconds
    return sum(job.meets_slo(slo) for job in cluster.jobs) / len(cluster.jobs)
