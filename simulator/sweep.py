"""Simulates configurations of a cluster over a range of rates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, takewhile
from typing import Generic, TypeVar, cast

from baton.errors import Invalid
from simulator.cluster import SimulatedCluster
from simulator.cluster_config import ClusterConfig
from simulator.goodput import min_hopeless_misses
from simulator.parallelism import PoolParallelism
from simulator.simulation_pool import Simulation, SimulationPool

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
    ``workers`` has the number of workers of each role, ``gpus_per_worker`` the GPUs of each of
    them, which share the model by ``parallelism``. All workers together have ``num_gpus``."""

    label: str
    kind: str
    workers: dict[str, int]
    num_gpus: int
    gpus_per_worker: dict[str, int]
    parallelism: PoolParallelism
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


_Place = tuple[int, int]
"""The numbers of a configuration and of a rate."""


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    """``value`` is what the evaluation returned. Both are None if the run stopped early."""

    attainment: float | None
    value: T | None


def sweep(
    configurations: Sequence[SweptConfiguration],
    pool: SimulationPool,
    rates: Sequence[float],
    target: float,
    show: Callable[[int, str], None],
    evaluate: Callable[[SweptRun], T],
) -> list[T]:
    """Simulate each configuration at ascending ``rates``: the requests of the pool's trace, closer
    together or farther apart. Return what ``evaluate`` returns for each run; it runs where the
    simulation did. Higher rates are skipped after MAX_MISSES_IN_A_ROW misses of the share
    ``target``, and after a run in which less than half of ``target`` can be reached, which is left
    out. ``show`` is called before each simulation with the number of those that are done or
    skipped, and with a description."""
    hopeless = min_hopeless_misses(len(pool.trace.requests), target / 2)
    numbers = range(len(configurations))
    num_done = [0] * len(configurations)

    def wanted(known: Mapping[_Place, _Outcome[T]]) -> list[_Place]:
        found = []
        for number in numbers:
            done = _runs_of(number, known)
            ended = len(done) == len(rates) or _has_ended(done, target)
            num_done[number] = len(rates) if ended else len(done)
            if not ended:
                found.append((number, len(done)))
        return found

    def simulation_of(place: _Place) -> Simulation[_Outcome[T]]:
        number, index = place
        configuration, rate = configurations[number], rates[index]
        return Simulation(
            label=f"{configuration.label} at {rate:.3g} requests/s",
            config=configuration.cluster,
            judge=partial(_judge, configuration, rate, evaluate),
            rate_rps=rate,
            give_up_misses=hopeless,
        )

    outcomes = pool.run_wanted(wanted, simulation_of, lambda label: show(sum(num_done), label))
    runs = [run for number in numbers for run in _runs_of(number, outcomes)]
    return [cast(T, run.value) for run in runs if run.attainment is not None]


def _runs_of(number: int, outcomes: Mapping[_Place, _Outcome[T]]) -> list[_Outcome[T]]:
    """Return the outcomes of a configuration's runs, lowest rate first."""
    indexes = takewhile(lambda index: (number, index) in outcomes, count())
    return [outcomes[number, index] for index in indexes]


def _has_ended(runs: Sequence[_Outcome[T]], target: float) -> bool:
    """True if higher rates are to be skipped."""
    if runs and runs[-1].attainment is None:
        return True
    last = [run.attainment or 0.0 for run in runs[-MAX_MISSES_IN_A_ROW:]]
    return len(last) == MAX_MISSES_IN_A_ROW and max(last) < target


def _judge(
    configuration: SweptConfiguration,
    rate: float,
    evaluate: Callable[[SweptRun], T],
    cluster: SimulatedCluster,
) -> _Outcome[T]:
    if cluster.stopped_early:
        return _Outcome(None, None)
    slo = cluster.config.itl_slo_seconds
    attainment = sum(job.meets_slo(slo) for job in cluster.jobs) / len(cluster.jobs)
    return _Outcome(attainment, evaluate(SweptRun(configuration, rate, cluster)))
