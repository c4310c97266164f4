"""Tests the batched simulation of large fleets: its arithmetic by hand, the end of each request,
failures, autoscaling, and how close it is to the exact simulation."""

from dataclasses import replace

import numpy as np
import pytest

from baton.core.cost import DecodeCost, PrefillCost
from baton.errors import Invalid, Overloaded
from baton.pools.scaling_policy import PoolBounds, ScalingConfig
from baton.traces.diurnal import DiurnalRate
from baton.traces.synthetic import TRACE_GENERATORS
from conductor.planner import PlannerConfig
from conductor.policy.sizing import SizingConfig
from conductor.policy.snapshot import LinkSpeed
from simulator.cluster_config import ClusterConfig
from simulator.large_fleet import request_table
from simulator.large_fleet.arrays import sums_within_groups
from simulator.large_fleet.backlog import NUM_BINS, DeadlineBins, PrefillBacklog
from simulator.large_fleet.cell import run_cell
from simulator.large_fleet.config import FleetAutoscaling, LargeFleetConfig, daily_rate
from simulator.large_fleet.failures import DomainFailure, Topology, parse_failures
from simulator.large_fleet.request_table import RequestTable
from simulator.large_fleet.sample import RequestSample, sample_of
from simulator.large_fleet.simulation import LargeFleetSimulation
from simulator.result import summarize

CLUSTER = ClusterConfig(
    num_prefill=8,
    num_decode=8,
    prefill_cost=PrefillCost(0.01, 1e-4, 0.0),
    decode_cost=DecodeCost(0.01, 0.0, 0.0),
    kv_bytes_per_token=1000,
    device_tokens=100_000,
    node_tokens=1_000_000,
    link=LinkSpeed(50e9, 50e9),
)
TOPOLOGY = Topology(4, 2)
NO_CACHE = RequestSample(np.full(10, 1000.0), np.full(10, 101.0), np.zeros(10), np.zeros(10))
"""Requests that take 0.11 s to prefill and 1 s to answer."""


def fleet(rate: float, seconds: float = 60.0, **more: object) -> LargeFleetConfig:
    return LargeFleetConfig(
        cluster=CLUSTER,
        topology=TOPOLOGY,
        rate=DiurnalRate(rate, rate, 86_400.0),
        duration_seconds=seconds,
        **more,  # type: ignore[arg-type]
    )


def ran(config: LargeFleetConfig, sample: RequestSample = NO_CACHE) -> LargeFleetSimulation:
    """Run a simulation, and check that each request ended once."""
    simulation = LargeFleetSimulation(config, sample)
    assert sum(1 for _ in simulation.run()) >= config.duration_seconds / config.slice_seconds
    total = simulation.statistics.total()
    rejected = round((total.rejected_ratio or 0.0) * total.num_requests)
    assert total.num_requests == simulation.events.arrivals
    assert simulation.events.ends + rejected == total.num_requests
    return simulation


# -- arithmetic ----------------------------------------------------------------------------


def test_sums_within_groups_restart_with_each_group() -> None:
    sums = sums_within_groups(np.array([3, 3, 7, 9, 9]), np.array([1.0, 2.0, 4.0, 8.0, 16.0]))
    assert sums.tolist() == [1.0, 3.0, 4.0, 8.0, 24.0]


def test_earlier_deadlines_go_first() -> None:
    backlog = PrefillBacklog(2)
    backlog.add(np.array([0, 0]), np.array([2, 5]), np.array([1.0, 10.0]))
    done = backlog.seconds_until_done(
        np.array([0, 0, 1]),
        np.array([5, 2, 0]),
        np.array([0.5, 0.25, 3.0]),
        np.array([0.0, 0.0, 2.0]),
    )
    assert done.tolist() == [11.75, 1.25, 5.0]
    backlog.advance(4.0)
    assert backlog.due_seconds[0, [0, 2, 5]].tolist() == [0.0, 0.0, 7.0]
    assert backlog.total_seconds.tolist() == [7.0, 0.0]


def test_past_bins_join_the_first_one() -> None:
    bins, backlog = DeadlineBins((NUM_BINS - 2) * 0.5), PrefillBacklog(1)
    numbers = bins.number(np.array([0.4, 0.6, 2.0]))
    assert numbers.tolist() == [0, 1, 4]
    backlog.add(np.zeros(3, dtype=np.int64), bins.index(numbers), np.array([1.0, 2.0, 4.0]))
    assert bins.advance(1.1) == 2
    backlog.pass_bins(2)
    assert bins.index(numbers).tolist() == [0, 0, 2]
    assert backlog.due_seconds[0, :4].tolist() == [3.0, 3.0, 7.0, 7.0]


def test_table_reuses_slots_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    table = RequestTable()
    first = table.num_slots
    for _ in range(10):
        table.release(table.take(first))
    assert table.num_slots == first
    monkeypatch.setattr(request_table, "MAX_REQUESTS", first)
    with pytest.raises(Overloaded, match="too small"):
        table.take(first + 1)


# -- a fleet -------------------------------------------------------------------------------


def test_idle_fleet_takes_the_time_of_its_costs() -> None:
    total = ran(fleet(2.0)).statistics.total()
    assert total.attainment == 1.0
    assert total.ttft_p50_seconds == pytest.approx(0.11, rel=0.03)
    assert total.itl_p50_seconds == pytest.approx(0.01, rel=0.03)
    assert total.prefill_utilisation == pytest.approx(2.0 * 0.11 / 8, rel=0.25)


def test_overload_is_rejected_and_the_rest_is_in_time() -> None:
    """Eight workers compute at most 80 prompts a second, and the fixed time that they share."""
    total = ran(fleet(160.0)).statistics.total()
    assert total.rejected_ratio == pytest.approx(0.48, abs=0.05)
    assert total.attainment is not None and total.rejected_ratio is not None
    assert total.attainment > 0.95 * (1 - total.rejected_ratio)
    assert total.prefill_utilisation == pytest.approx(1.0, abs=0.05)


def test_equal_seeds_give_equal_results() -> None:
    results = [ran(fleet(40.0, seed=seed)).statistics.total() for seed in (3, 3, 4)]
    assert results[0] == results[1] != results[2]


def test_conductors_with_old_reports_balance_worse() -> None:
    stale = replace(CLUSTER, num_conductors=4, report_seconds=10.0)
    now, later = (
        ran(replace(fleet(55.0), cluster=cluster)).statistics.total()
        for cluster in (CLUSTER, stale)
    )
    assert now.ttft_p99_seconds is not None and later.ttft_p99_seconds is not None
    assert later.ttft_p99_seconds > now.ttft_p99_seconds


# -- failures ------------------------------------------------------------------------------


def test_topology_spreads_both_pools() -> None:
    assert TOPOLOGY.racks(8).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert TOPOLOGY.zones(8).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    failure = DomainFailure("rack", 1, 5.0, 10.0)
    assert np.flatnonzero(failure.affects(TOPOLOGY, 8)).tolist() == [2, 3]


def test_failures_are_parsed() -> None:
    found = parse_failures(["rack:3@36000:600", "zone:1@1.5:20"], TOPOLOGY)
    assert found == (
        DomainFailure("rack", 3, 36_000.0, 600.0),
        DomainFailure("zone", 1, 1.5, 20.0),
    )
    assert str(found[0]) == "rack:3@36000:600"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rack:4@1:1", "there is no rack 4; the racks are 0 to 3"),
        ("zone:2@1:1", "there is no zone 2; the zones are 0 to 1"),
        ("host:1@1:1", "must be rack:NUMBER@SECOND:SECONDS"),
    ],
)
def test_wrong_failures_are_named(text: str, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        parse_failures([text], TOPOLOGY)


def test_requests_on_a_failed_zone_are_answered_elsewhere() -> None:
    """At 40 requests a second there are about 40 answers and 4 prompts under way, half of them on
    the failed zone; more are placed there before the failure is noticed."""
    failed = ran(fleet(40.0, failures=(DomainFailure("zone", 0, 30.0, 20.0),)))
    total = failed.statistics.total()
    assert 20 <= total.restarts <= 120
    assert total.prefill_workers == pytest.approx(8 - 4 * 19 / 60, abs=0.1)


def test_failed_workers_lose_their_prefixes() -> None:
    cached = replace(NO_CACHE, cached_tokens=np.full(10, 900.0), reuse_seconds=np.full(10, 1e6))
    whole = ran(fleet(20.0), cached).statistics.total()
    failed = ran(fleet(20.0, failures=(DomainFailure("zone", 1, 0.0, 1.0),)), cached)
    assert whole.hit_ratio_tokens == pytest.approx(0.9)
    assert failed.statistics.total().hit_ratio_tokens == pytest.approx(0.45, abs=0.04)


def test_fleet_without_workers_rejects_until_they_are_back() -> None:
    everything = (DomainFailure("zone", 0, 10.0, 20.0), DomainFailure("zone", 1, 10.0, 20.0))
    total = ran(fleet(20.0, failures=everything)).statistics.total()
    assert total.rejected_ratio == pytest.approx(19 / 60, abs=0.06)


# -- autoscaling ---------------------------------------------------------------------------


def test_pools_follow_the_tide() -> None:
    autoscaling = FleetAutoscaling(
        planner=PlannerConfig(
            sizing=SizingConfig(max_prefill=8, max_decode=8, shrink_seconds=60.0),
            start_seconds=10.0,
        ),
        scaling=ScalingConfig(
            prefill=PoolBounds(1, 8),
            decode=PoolBounds(1, 8),
            max_workers=16,
            max_step_workers=2,
            cooldown_seconds=10.0,
        ),
        start_seconds=10.0,
    )
    config = fleet(1.0, 1200.0, autoscaling=autoscaling, slice_seconds=2.0)
    long = replace(NO_CACHE, prompt_tokens=np.full(10, 10_000.0))  # a second of work each
    simulation = ran(replace(config, rate=DiurnalRate(0.5, 5.0, 1200.0)), long)
    assert simulation.autoscaler is not None
    sizes = [step.sizes for _, step in simulation.autoscaler.steps]
    assert max(max(each.values()) for each in sizes) == 8
    total = simulation.statistics.total()
    assert total.prefill_workers < 7.5
    assert total.attainment is not None and total.attainment > 0.9


# -- beside the exact simulation -----------------------------------------------------------


def test_close_to_the_exact_simulation() -> None:
    trace = TRACE_GENERATORS["rag"](800, 12.0, 0)
    config = replace(
        CLUSTER, num_prefill=4, num_decode=4, prefill_cost=PrefillCost(0.01, 1.2e-4, 2e-9)
    )
    cluster = run_cell(config, trace)
    exact = summarize(cluster)
    sample = sample_of(cluster, trace.block_tokens)
    batched = ran(replace(fleet(12.0, 66.0), cluster=config), sample).statistics.total()
    assert batched.attainment == pytest.approx(exact.attainment, abs=0.02)
    assert batched.rejected_ratio == pytest.approx(exact.rejected_ratio, abs=0.02)
    assert batched.ttft_p50_seconds == pytest.approx(exact.ttft_seconds["p50"], rel=0.2)
    assert batched.itl_p50_seconds == pytest.approx(exact.tbt_seconds["p50"], rel=0.1)


def test_sample_of_too_few_requests_is_refused() -> None:
    trace = TRACE_GENERATORS["rag"](8, 12.0, 0)
    with pytest.raises(Invalid, match="too few"):
        sample_of(run_cell(CLUSTER, trace), trace.block_tokens)


def test_daily_rate_has_the_requests_and_the_tide() -> None:
    rate = daily_rate(50e6, 3.0, 86_400.0)
    assert rate.expected_arrivals(86_400.0) == pytest.approx(50e6)
    assert rate.high_per_second == pytest.approx(3 * rate.low_per_second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slice_seconds": 0.0}, "slice_seconds is 0; it must be finite and above 0"),
        ({"duration_seconds": 1e12}, "slices must be longer"),
        ({"cluster": replace(CLUSTER, num_mixed=1)}, "no mixed workers"),
    ],
)
def test_wrong_configurations_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        replace(fleet(1.0), **change)  # type: ignore[arg-type]
