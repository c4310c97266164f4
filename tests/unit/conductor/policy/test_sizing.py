"""Tests pool sizing: exact forecasts and sizes, and that sizes do not flap over a day."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from baton.core.pool_plan import PoolAlternative
from conductor.load_forecast import LEVEL_SECONDS, HoltSmoother, LoadForecast, LoadTrend
from conductor.policy.sizing import (
    DemandPeaks,
    PoolCapacity,
    PoolSizes,
    SizingConfig,
    size_pools,
)

LOAD = LoadForecast(requests_per_second=10.0, prompt_tokens=2000.0, answer_tokens=200.0)
"""A load of 20,000 prompt tokens and 2,000 output tokens per second. An answer takes 10 s and has
2,100 tokens of KV on average: 210,000 tokens of KV in total."""

POOLS = PoolCapacity(
    now_seconds=1000.0,
    num_prefill=5,
    num_decode=4,
    prefill_tokens_per_second=5000.0,
    decode_tokens_per_second=1000.0,
    decode_capacity_tokens=100_000,
)
CONFIG = SizingConfig(utilisation=0.8, shrink_utilisation=0.5, shrink_seconds=300.0)


# -- the forecast --------------------------------------------------------------------------


def test_constant_load_is_forecast_unchanged() -> None:
    holt = HoltSmoother(0.0, 5.0)
    for now in (10.0, 20.0, 70.0):
        holt = holt.updated(now, 5.0)
    assert holt == HoltSmoother(70.0, 5.0, 0.0)
    assert holt.forecast(600.0) == 5.0


def test_one_step_of_smoothing() -> None:
    """An observation that comes LEVEL_SECONDS after the previous one changes the level by 1 - 1/e
    of the difference. The slope of this change is added to the trend with a smaller weight."""
    weight = 1 - math.exp(-1)
    holt = HoltSmoother(0.0, 10.0).updated(LEVEL_SECONDS, 20.0)
    assert holt.level == pytest.approx(10 + 10 * weight)
    slope = 10 * weight / LEVEL_SECONDS
    assert holt.trend == pytest.approx(slope * (1 - math.exp(-0.1)))
    assert holt.forecast(100.0) == pytest.approx(holt.level + 100 * holt.trend)


def test_ramp_is_followed() -> None:
    holt = HoltSmoother(0.0, 0.0)
    for now in range(10, 7200, 10):
        holt = holt.updated(float(now), now * 0.02)
    assert holt.trend == pytest.approx(0.02, rel=0.01)
    assert holt.forecast(300.0) == pytest.approx((7190 + 300) * 0.02, rel=0.01)


def test_observation_that_is_not_later_is_ignored() -> None:
    assert HoltSmoother(10.0, 5.0).updated(10.0, 99.0) == HoltSmoother(10.0, 5.0)
    assert HoltSmoother(10.0, 5.0).updated(9.0, 99.0) == HoltSmoother(10.0, 5.0)


def test_forecast_is_never_negative() -> None:
    assert HoltSmoother(0.0, 1.0, -0.1).forecast(60.0) == 0.0


def test_forecast_is_the_most_work_until_then() -> None:
    trend = LoadTrend(
        HoltSmoother(0.0, 10.0, -0.01),
        HoltSmoother(0.0, 1000.0, 1.0),
        HoltSmoother(0.0, 100.0),
        HoltSmoother(0.0, 0.5, -0.001),
    )
    assert trend.forecast(100.0) == LoadForecast(10.0, 1100.0, 100.0, pytest.approx(0.4))


# -- sizes ---------------------------------------------------------------------------------


def test_pools_match_the_load() -> None:
    """A pool grows until its utilisation is at most 80 %. It shrinks only as far as its utilisation
    stays at most 50 %.

    Prefill: 20,000 tokens per second need 4 workers of 5,000 at full load, and 5 at 80 %. Decode:
    2,000 tokens per second need 2 workers of 1,000, but 210,000 tokens of KV need 2.1 workers of
    100,000, which is 3 at 80 %. There are 4 decode workers, and none is removed, since the
    utilisation is above 50 % even with all 4.
    """
    sizing = size_pools(LOAD, POOLS, CONFIG)
    assert sizing == PoolSizes(
        5,
        4,
        "prefill 5 stay: load of 4.00 workers; decode 4 stay: load of 2.10 workers",
        (
            PoolAlternative("prefill", 4, 1.0),
            PoolAlternative("prefill", 5, 0.8),
            PoolAlternative("prefill", 6, pytest.approx(4 / 6)),
            PoolAlternative("decode", 3, pytest.approx(0.7)),
            PoolAlternative("decode", 4, pytest.approx(0.525)),
            PoolAlternative("decode", 5, pytest.approx(0.42)),
        ),
        DemandPeaks(1000.0, ((1000.0, 8),)),
        DemandPeaks(1000.0, ((1000.0, 5),)),
    )


def test_pool_grows_at_once() -> None:
    sizing = size_pools(replace(LOAD, requests_per_second=30.0), POOLS, CONFIG)
    assert (sizing.prefill, sizing.decode) == (15, 8)
    assert sizing.reason == (
        "prefill 5 to 15: load of 12.00 workers, at most 80% utilised; "
        "decode 4 to 8: load of 6.30 workers, at most 80% utilised"
    )


def test_cached_tokens_need_no_worker() -> None:
    needs = size_pools(replace(LOAD, cached_share=0.9), POOLS, CONFIG).prefill_demand
    assert needs == DemandPeaks(1000.0, ((1000.0, 1),))


def test_pool_shrinks_after_a_while_to_its_recent_peak() -> None:
    """The pool shrinks further as earlier peaks expire."""
    pools, sizes = POOLS, []
    for now, rate in ((0, 2.0), (100, 4.0), (200, 1.0), (299, 1.0), (300, 1.0), (400, 1.0)):
        load = replace(LOAD, requests_per_second=rate)
        sizing = size_pools(load, replace(pools, now_seconds=float(now)), CONFIG)
        sizes.append((sizing.prefill, sizing.decode))
        pools = replace(
            pools, prefill_demand=sizing.prefill_demand, decode_demand=sizing.decode_demand
        )
    # At 4 requests per second, 1.6 prefill and 0.84 decode workers are busy, for which 4 and 2 are
    # needed at 50 %. At 1 per second, 0.4 and 0.21 are busy, for which 1 and 1 are needed.
    assert sizes == [(5, 4)] * 4 + [(4, 2)] + [(1, 1)]
    assert sizing.prefill_demand == DemandPeaks(0.0, ((400.0, 1),))


def test_recent_peak_prevents_shrinking() -> None:
    needs = DemandPeaks(0.0, ((700.0, 3),))
    stays = size_pools(LOAD, replace(POOLS, prefill_demand=needs), CONFIG)
    assert (stays.prefill, stays.prefill_demand) == (5, DemandPeaks(0.0, ((1000.0, 8),)))
    idle = replace(LOAD, requests_per_second=0.0)
    later = replace(POOLS, now_seconds=1299.0, prefill_demand=stays.prefill_demand)
    sizing = size_pools(idle, later, CONFIG)
    assert sizing.prefill == 5
    assert sizing.reason.startswith("prefill 5 stay: 8 were needed 299 s ago")
    assert size_pools(idle, replace(later, now_seconds=1300.0), CONFIG).prefill == 1


def test_peaks_still_hold_after_a_manual_resize() -> None:
    """An operator has reduced the pool to 3 workers, although 4 were needed recently. The recent
    peaks still apply, so the pool does not shrink further."""
    pools = replace(POOLS, num_prefill=3, prefill_demand=DemandPeaks(0.0, ((900.0, 4), (950.0, 2))))
    sizing = size_pools(replace(LOAD, requests_per_second=1.0), pools, CONFIG)
    assert sizing.prefill == 3
    assert sizing.prefill_demand == DemandPeaks(0.0, ((900.0, 4), (950.0, 2), (1000.0, 1)))


IDLE_FOR_LONG = DemandPeaks(0.0, ((900.0, 1),))


def test_pools_stay_large_enough_for_admitted_requests() -> None:
    """45,000 prompt tokens wait. Within the TTFT SLO of 2 s a worker computes 10,000 tokens, so 5
    prefill workers are needed. 280,000 tokens of KV are reserved, and a decode worker holds
    100,000, so 3 decode workers are needed."""
    pools = replace(
        POOLS,
        queued_prompt_tokens=45_000,
        projected_tokens=280_000,
        prefill_demand=IDLE_FOR_LONG,
        decode_demand=IDLE_FOR_LONG,
    )
    idle = replace(LOAD, requests_per_second=0.0)
    sizing = size_pools(idle, pools, CONFIG)
    assert (sizing.prefill, sizing.decode) == (5, 3)
    assert sizing.reason == (
        "prefill 5 stay: the admitted requests need them; "
        "decode 4 to 3: the admitted requests need 3"
    )


def test_queued_tokens_are_spread_over_the_next_minute() -> None:
    """1,350,000 queued tokens in a minute are 22,500 per second, in addition to the 20,000 that
    arrive: 8.5 workers are busy."""
    sizing = size_pools(LOAD, replace(POOLS, queued_prompt_tokens=1_350_000), CONFIG)
    assert sizing.prefill == 11
    assert sizing.reason.startswith("prefill 5 to 11: load of 8.50 workers")


def test_sizes_stay_within_the_configured_bounds() -> None:
    config = replace(CONFIG, min_prefill=2, max_prefill=6, min_decode=2, max_decode=3)
    busy = size_pools(replace(LOAD, requests_per_second=99.0), replace(POOLS, num_decode=3), config)
    assert (busy.prefill, busy.decode) == (6, 3)
    assert busy.reason.startswith("prefill 5 to 6: load of 39.60 workers, and 6 is the maximum")
    pools = replace(POOLS, prefill_demand=IDLE_FOR_LONG, decode_demand=IDLE_FOR_LONG)
    idle = size_pools(replace(LOAD, requests_per_second=0.0), pools, config)
    assert (idle.prefill, idle.decode) == (2, 2)
    owed = replace(pools, projected_tokens=400_000)
    assert size_pools(replace(LOAD, requests_per_second=0.0), owed, config).decode == 4


def test_empty_pool_gets_its_minimum() -> None:
    idle = replace(LOAD, requests_per_second=0.0)
    sizing = size_pools(idle, replace(POOLS, num_prefill=0, num_decode=0), CONFIG)
    assert (sizing.prefill, sizing.decode) == (1, 1)


def test_pools_without_measurements_keep_their_sizes() -> None:
    unknown = replace(
        POOLS, prefill_tokens_per_second=0.0, decode_tokens_per_second=0.0, decode_capacity_tokens=0
    )
    sizing = size_pools(LOAD, unknown, CONFIG)
    assert (sizing.prefill, sizing.decode) == (5, 4)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("config", [CONFIG, SizingConfig()])
def test_sizes_do_not_flap_over_a_day(config: SizingConfig, seed: int) -> None:
    """Over a noisy day, with a decision every half minute, each pool grows in the morning and
    shrinks in the evening, in steps, and nearly always has enough workers."""
    generator = np.random.default_rng(seed)
    pools = replace(POOLS, num_prefill=1, num_decode=1, now_seconds=0.0)
    trend = LoadTrend.start(0.0, replace(LOAD, requests_per_second=5.0))
    sizes, short = [], 0
    for now in np.arange(30.0, 86_400.0, 30.0).tolist():
        mean = 20.0 - 15.0 * math.cos(2 * math.pi * now / 86_400)
        load = replace(LOAD, requests_per_second=generator.poisson(mean * 30) / 30)
        short += load.requests_per_second * load.prompt_tokens > pools.num_prefill * 5000
        trend = trend.updated(now, load)
        sizing = size_pools(trend.forecast(120.0), replace(pools, now_seconds=now), config)
        pools = replace(
            pools,
            num_prefill=sizing.prefill,
            num_decode=sizing.decode,
            prefill_demand=sizing.prefill_demand,
            decode_demand=sizing.decode_demand,
        )
        sizes.append((sizing.prefill, sizing.decode))
    assert short <= 1, "the pool may be too small only for the first half minute"
    for pool, busy in ((0, 14.0), (1, 7.35)):
        peak = math.ceil(busy / config.utilisation)
        counts = [each[pool] for each in sizes]
        changes = [later - earlier for earlier, later in pairwise(counts) if later != earlier]
        assert peak <= max(counts) <= peak * 1.15
        turns = sum((before > 0) != (after > 0) for before, after in pairwise(changes))
        assert turns <= 1, changes
        assert len(changes) <= 2 * peak


def test_while_no_speed_is_measured_pools_stay_and_no_demand_is_assumed() -> None:
    """Otherwise, the assumed demand would later be mistaken for a peak that was once needed."""
    unmeasured = replace(POOLS, prefill_tokens_per_second=0.0, decode_tokens_per_second=0.0)
    sizing = size_pools(LOAD, unmeasured, CONFIG)
    assert (sizing.prefill, sizing.decode) == (POOLS.num_prefill, POOLS.num_decode)
    assert sizing.reason == (
        f"prefill {POOLS.num_prefill} stay: the speed of its workers is not measured yet; "
        f"decode {POOLS.num_decode} stay: the speed of its workers is not measured yet"
    )
    for demand in (sizing.prefill_demand, sizing.decode_demand):
        assert demand is not None and demand.peaks == ()
