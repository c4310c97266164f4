"""Tests local prefill on the decode worker, and how measured prefill speeds are compared."""

from dataclasses import replace

from baton.core.cost import PrefillCost
from baton.core.member import Member
from conductor.limits import MAX_MEASUREMENT_AGE_SECONDS
from conductor.policy.snapshot import (
    PrefillView,
)
from tests.unit.conductor.test_conductor import (
    PREFILL_COST,
    ConductorHarness,
    decode_member,
    keys,
    prefill_member,
)


async def test_short_prompt_may_be_prefilled_on_the_decode_worker() -> None:
    cluster = ConductorHarness(local_prefill=True)
    await cluster.announce(prefill_member("p"), decode_member("d"))
    placement = cluster.place("r", 40, keys(1, 2))
    assert (placement.prefill, placement.decode.id) == (None, "d")
    # The decode worker now has the blocks, but it may not compute for longer than one inter-token
    # latency.
    again = cluster.place("r2", 300, keys(*range(1, 19)))
    assert again.prefill is not None
    assert (
        cluster.conductor.snapshot().cache.num_local_blocks(
            PrefillView("d", PREFILL_COST), keys(1, 2)
        )
        == 2
    )  # type: ignore[arg-type]


async def test_local_prefill_is_off_on_cpus_unless_configured() -> None:
    for device, local_prefill, alone in (
        ("cpu", None, False), ("cpu", True, True), ("cuda:0", None, True), ("cuda:0", False, False),
    ):  # fmt: skip
        cluster = ConductorHarness(local_prefill=local_prefill)  # type: ignore[arg-type]
        await cluster.announce(prefill_member("p"), replace(decode_member("d"), device=device))
        assert (cluster.place("r", 40).prefill is None) is alone, (device, local_prefill)


async def test_similar_prefill_speeds_are_treated_as_equal() -> None:
    cluster = ConductorHarness()
    costs = {"p0": 0.001, "p1": 0.00105, "p2": 0.0009, "p3": 0.01}
    members = [prefill_member(n, prefill_cost=PrefillCost(0.0, c, 0.0)) for n, c in costs.items()]
    await cluster.announce(*members, decode_member("d"))
    assert prefill_seconds_per_token(cluster, *costs) == [0.00105, 0.00105, 0.00105, 0.01]


def prefill_seconds_per_token(cluster: ConductorHarness, *names: str) -> list[float]:
    return [cluster.prefill_view(name).cost.per_token_seconds for name in names]


def prefill_with_speed(name: str, pace: float, error: float | None) -> Member:
    return prefill_member(name, prefill_cost=PrefillCost(0.0, pace, 0.0), prefill_error=error)


async def test_uncertain_prefill_speeds_are_treated_as_equal() -> None:
    cluster = ConductorHarness()
    for error, pace in ((0.3, 0.001), (None, 0.001), (0.1, 0.002)):
        readers = prefill_with_speed("p0", 0.001, 0.0), prefill_with_speed("p1", 0.002, error)
        await cluster.announce(*readers, decode_member("d"))
        assert prefill_seconds_per_token(cluster, "p0", "p1") == [0.001, pace], error


async def test_pools_speed_comes_from_workers_with_reliable_measurements() -> None:
    cluster = ConductorHarness()
    unsure = [prefill_with_speed("p1", 0.003, 0.9), prefill_with_speed("p2", 0.005, None)]
    await cluster.announce(prefill_with_speed("p0", 0.001, 0.1), *unsure, decode_member("d"))
    assert prefill_seconds_per_token(cluster, "p0", "p1", "p2") == [0.001] * 3


async def test_slow_worker_is_tried_again_when_its_measurement_is_old() -> None:
    cluster = ConductorHarness()
    fast, slow = prefill_with_speed("p0", 0.001, 0.0), prefill_with_speed("p1", 0.01, 0.0)
    await cluster.announce(fast, slow, decode_member("d"))
    assert prefill_seconds_per_token(cluster, "p0", "p1") == [0.001, 0.01]
    cluster.clock.advance(MAX_MEASUREMENT_AGE_SECONDS + 1)
    await cluster.announce(prefill_with_speed("p0", 0.0011, 0.0), slow, decode_member("d"))
    assert prefill_seconds_per_token(cluster, "p0", "p1") == [0.0011, 0.0011]
    readers = prefill_with_speed("p0", 0.0011, 0.0), prefill_with_speed("p1", 0.0101, 0.0)
    await cluster.announce(*readers, decode_member("d"))
    assert prefill_seconds_per_token(cluster, "p0", "p1") == [0.0011, 0.0101]
