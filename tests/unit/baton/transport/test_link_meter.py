"""Tests the link meter, which estimates transfer times from measured ones."""

import numpy as np
import pytest

from baton.transport.link_meter import (
    MAX_UNMEASURED_ESTIMATES,
    PRIOR_BYTES_PER_SECOND,
    PRIOR_LATENCY_SECONDS,
    LinkMeter,
)
from baton.transport.reads import busy_seconds

KIB, MIB = 1 << 10, 1 << 20


def transfer_seconds(size: int, latency: float, rate: float) -> float:
    return latency + size / rate


def test_unknown_link_gets_the_prior_estimate() -> None:
    meter = LinkMeter()
    assert meter.bytes_per_second("a") is None
    expected = PRIOR_LATENCY_SECONDS + MIB / PRIOR_BYTES_PER_SECOND
    assert meter.estimate_seconds("a", MIB) == expected


def test_latency_and_bandwidth_are_separated() -> None:
    meter = LinkMeter()
    for size in (64 * KIB, 4 * MIB, 256 * KIB, MIB):
        meter.record("far", size, transfer_seconds(size, 0.04, 125e6))
    for size in (4 * KIB, 100 * KIB, 64 * MIB):
        expected = transfer_seconds(size, 0.04, 125e6)
        assert meter.estimate_seconds("far", size) == pytest.approx(expected)


def test_single_transfer_size_gives_no_latency() -> None:
    meter = LinkMeter()
    for _ in range(3):
        meter.record("a", MIB, 0.01)
    assert meter.estimate_seconds("a", 2 * MIB) == pytest.approx(0.02)
    assert meter.bytes_per_second("a") == pytest.approx(MIB / 0.01)


def test_changed_link_is_learnt_quickly() -> None:
    meter, chance = LinkMeter(), np.random.default_rng(3)
    sizes = chance.integers(16 * KIB, 8 * MIB, size=60).tolist()
    for size in sizes[:30]:
        meter.record("a", size, transfer_seconds(size, 0.0002, 5e9))
    for size in sizes[30:]:
        meter.record("a", size, transfer_seconds(size, 0.02, 125e6))
    expected = transfer_seconds(MIB, 0.02, 125e6)
    assert meter.estimate_seconds("a", MIB) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("small", "large"), [(0.01, 0.005), (0.0001, 0.1)])
def test_neither_latency_nor_bandwidth_is_negative(small: float, large: float) -> None:
    meter = LinkMeter()
    meter.record("a", 64 * KIB, small)
    meter.record("a", MIB, large)
    assert 0 <= meter.estimate_seconds("a", 0) <= meter.estimate_seconds("a", 10 * MIB)


def test_slow_link_that_is_never_used_is_tried_again() -> None:
    meter = LinkMeter()
    meter.record("a", MIB, 1.0)
    slow = [meter.estimate_seconds("a", MIB) for _ in range(MAX_UNMEASURED_ESTIMATES)]
    assert set(slow) == {1.0}
    assert meter.estimate_seconds("a", MIB) < 0.01
    meter.record("a", MIB, 1.0)
    assert meter.estimate_seconds("a", MIB) == 1.0


def test_invalid_measurements_are_ignored() -> None:
    meter = LinkMeter()
    meter.record("a", 0, 1.0)
    meter.record("a", MIB, 0.0)
    assert meter.bytes_per_second("a") is None


@pytest.mark.parametrize(
    ("intervals", "seconds"),
    [
        ([], 0.0),
        ([(1.0, 3.0)], 2.0),
        ([(5.0, 6.0), (1.0, 3.0)], 3.0),
        ([(1.0, 4.0), (2.0, 3.0), (3.5, 5.0)], 4.0),
    ],
)
def test_concurrent_reads_use_the_link_once(
    intervals: list[tuple[float, float]], seconds: float
) -> None:
    assert busy_seconds(intervals) == seconds
