"""The configuration of a large fleet's simulation."""

import math
from dataclasses import dataclass

from baton.errors import Invalid
from baton.pools.scaling_policy import ScalingConfig
from baton.traces.diurnal import DiurnalRate
from conductor.planner import PlannerConfig
from simulator.cluster_config import ClusterConfig
from simulator.large_fleet.failures import DomainFailure, Topology

MAX_SLICES = 50_000_000

DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAutoscaling:
    """``start_seconds`` is the time that a worker takes from its request until it serves."""

    planner: PlannerConfig
    scaling: ScalingConfig
    start_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeFleetConfig:
    """``cluster`` has the pools' sizes (with autoscaling, their largest sizes), costs, links, SLOs,
    and the number of conductors, which get the workers' reports every ``cluster.report_seconds``.
    Requests arrive at ``rate`` for ``duration_seconds``, and are placed in slices of
    ``slice_seconds``. If ``autoscaling`` is given, the pools start at the sizes that the rate at
    the start needs."""

    cluster: ClusterConfig
    topology: Topology
    rate: DiurnalRate
    duration_seconds: float = DAY_SECONDS
    slice_seconds: float = 0.5
    failures: tuple[DomainFailure, ...] = ()
    autoscaling: FleetAutoscaling | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises Invalid for values out of range."""
        positive = {
            "duration_seconds": self.duration_seconds,
            "slice_seconds": self.slice_seconds,
            "rate.low_per_second": self.rate.low_per_second,
            "rate.period_seconds": self.rate.period_seconds,
        }
        for name, value in positive.items():
            if not 0 < value < math.inf:
                raise Invalid(f"{name} is {value:g}; it must be finite and above 0")
        if self.duration_seconds / self.slice_seconds > MAX_SLICES:
            raise Invalid(
                f"{self.duration_seconds:g} s have more than {MAX_SLICES:,} slices of "
                f"{self.slice_seconds:g} s; slices must be longer"
            )
        if self.cluster.num_mixed:
            raise Invalid("a large fleet has no mixed workers: they are not modelled")


def daily_rate(num_requests: float, tide: float, duration_seconds: float) -> DiurnalRate:
    """Return the rate at which ``num_requests`` requests arrive in a period of
    ``duration_seconds``, if the highest rate is ``tide`` times the lowest."""
    mean = num_requests / duration_seconds
    low = 2 * mean / (1 + tide)
    return DiurnalRate(low, low * tide, duration_seconds)
