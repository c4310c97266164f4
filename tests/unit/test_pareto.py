"""Tests the sweep over rates, the figures of its points, and which of them are Pareto-optimal."""

import re
from collections.abc import Callable
from itertools import product

import pytest

from baton.errors import Invalid
from baton.pareto import on_frontier
from baton.traces.synthetic import TRACE_GENERATORS
from baton.traces.trace import Trace
from simulator.hardware import GPUS
from simulator.parallelism import PoolParallelism
from simulator.pareto import Slo, pareto_point, stricter_slos
from simulator.result import summarize
from simulator.running_costs import BOARD_WATTS, RunningCosts, parse_prices, running_costs
from simulator.simulated_hardware import SimulatedHardware
from simulator.simulation_pool import SimulationPool
from simulator.sweep import (
    SweptConfiguration,
    SweptRun,
    check_sweep_size,
    rates_up_to,
    sweep,
    thin_out,
)
from tests.pareto_cases import COSTS, report

# -- the frontier --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], []),
        ([(1, 1)], [True]),
        ([(1, 3), (2, 2), (3, 1)], [True, True, True]),
        ([(3, 1), (2, 1), (3, 0), (1, 2)], [True, False, False, True]),
        ([(2, 2), (1, 1), (2, 2)], [True, False, True]),  # equal points: both
        ([(1, 1), (2, 2), (1, 1)], [False, True, False]),  # equal points: neither
        ([(5, 1), (5, 2), (5, 2), (4, 2)], [False, True, True, False]),
        ([(0, -2.0), (0, -1.0), (-1, -0.5)], [False, True, True]),
    ],
)
def test_frontier_of(points: list[tuple[float, float]], expected: list[bool]) -> None:
    assert on_frontier(points) == expected


def test_frontier_is_the_definition() -> None:
    """For all lists of three points of a grid: a point is optimal if no other one beats it."""
    grid = [(x, y) for x in (0.0, 1.0, 2.0) for y in (0.0, 1.0, 2.0)]
    for points in product(grid, repeat=3):
        beaten = [any(x >= u and y >= v and (x, y) != (u, v) for x, y in points) for u, v in points]
        assert on_frontier(points) == [not each for each in beaten]


def test_only_points_that_meet_the_target_are_on_the_frontier() -> None:
    """The fourth point has the highest throughput, but misses the target."""
    points = report().points
    assert [each.by_slo[0].on_frontier for each in points] == [True, False, True, False, True]
    assert [each.by_slo[1].on_frontier for each in points] == [False, False, True, False, False]


# -- prices and energy ---------------------------------------------------------------------


def test_costs_of_tokens() -> None:
    assert COSTS.dollars_per_million_tokens(500) == pytest.approx(2.0)
    assert COSTS.tokens_per_second_per_gpu(2.0) == pytest.approx(500)
    assert COSTS.max_kwh_per_million_tokens(500) == pytest.approx(0.4)
    assert COSTS.min_tokens_per_joule(360) == 0.5
    assert COSTS.dollars_per_million_tokens(0) is COSTS.max_kwh_per_million_tokens(0) is None
    assert COSTS.min_tokens_per_joule(0) == 0
    unknown = RunningCosts(1.0, False, None)
    assert unknown.max_kwh_per_million_tokens(1) is unknown.min_tokens_per_joule(1) is None


def test_power_of_every_gpu_is_known() -> None:
    assert BOARD_WATTS.keys() == GPUS.keys()


def test_given_prices_replace_assumed_ones() -> None:
    prices = parse_prices(["h100=1.5", " L40S = 0.5"])
    assert prices == {"H100": 1.5, "L40S": 0.5}
    assert running_costs(GPUS["H100"], prices) == RunningCosts(1.5, False, 700)
    assert running_costs(GPUS["B200"], prices) == RunningCosts(4.99, True, 1000)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["H100"], "--price is 'H100'; it must be GPU=USD, like H100=1.99"),
        (["H1000=1"], "unknown GPU 'H1000'"),
        (["H100=cheap"], "--price H100=cheap: the price must be dollars per hour, above 0 and at"),
        (["H100=-1"], "--price H100=-1: the price must be"),
        (["H100=inf"], "--price H100=inf: the price must be"),
        (["H100=1", "H100=1"], "--price gives two prices for H100; it must give one"),
    ],
)
def test_wrong_prices_are_named(texts: list[str], message: str) -> None:
    with pytest.raises(Invalid, match=re.escape(message)):
        parse_prices(texts)


# -- the sweep -----------------------------------------------------------------------------

HARDWARE = SimulatedHardware(
    model="qwen3-8b", gpu="H100", gpus_per_worker=1, costs=None, link_gbytes=50.0,
    host_gbytes=50.0, device_tokens=None, node_tokens=None, hosts=0, order="deadline",
    report_seconds=0.0, conductors=1, ttft_slo=2.0, tbt_slo=0.05,
)  # fmt: skip


def configuration(prefill: int, decode: int) -> SweptConfiguration:
    return SweptConfiguration(
        label=f"{prefill}+{decode}",
        kind="split",
        workers={"prefill": prefill, "decode": decode},
        num_gpus=prefill + decode,
        gpus_per_worker={"prefill": 1, "decode": 1},
        parallelism=PoolParallelism(),
        cluster=HARDWARE.config(prefill, decode),
    )


@pytest.fixture(scope="module")
def trace() -> Trace:
    return TRACE_GENERATORS["chat"](200, 10.0, 3, 1.0)


def swept(
    trace: Trace, rates: list[float], *configurations: SweptConfiguration
) -> tuple[list[SweptRun], list[tuple[int, str]]]:
    shown: list[tuple[int, str]] = []
    show: Callable[[int, str], None] = lambda done, text: shown.append((done, text))  # noqa: E731
    with SimulationPool(trace, 1) as pool:
        return sweep(configurations, pool, rates, 0.9, show, lambda run: run), shown


def test_rates_are_evenly_spaced() -> None:
    assert rates_up_to(8.0, 4) == (2.0, 4.0, 6.0, 8.0)


def test_configurations_are_thinned_out_evenly() -> None:
    assert thin_out(range(5), 8) == [0, 1, 2, 3, 4]
    assert thin_out(range(11), 6) == [0, 2, 4, 6, 8, 10]
    assert len(set(thin_out(range(1000), 32))) == 32


def test_size_of_a_sweep_is_limited() -> None:
    check_sweep_size(10, 12_500)
    message = "10 configurations at 16 rates with 12,501 requests each, 2,000,160 in total"
    with pytest.raises(Invalid, match=f"{message}; at most 2,000,000 .* may be 12,500 requests"):
        check_sweep_size(10, 12_501)


def test_each_configuration_is_run_at_each_rate(trace: Trace) -> None:
    runs, shown = swept(trace, [1.0, 2.0], configuration(1, 1), configuration(1, 2))
    assert [(run.configuration.label, run.rate_rps) for run in runs] == [
        ("1+1", 1.0), ("1+1", 2.0), ("1+2", 1.0), ("1+2", 2.0),
    ]  # fmt: skip
    assert [done for done, _ in shown] == [0, 1, 2, 3]
    assert shown[3][1] == "1+2 at 2 requests/s"
    for run in runs:
        assert summarize(run.cluster).rate_rps == pytest.approx(run.rate_rps)


def test_higher_rates_are_skipped_after_misses(trace: Trace) -> None:
    """At 1,000 requests per second, hardly any request is within its SLO."""
    runs, shown = swept(trace, [1.0, 1000.0, 2000.0], configuration(1, 1))
    assert [run.rate_rps for run in runs] == [1.0]
    assert [done for done, _ in shown] == [0, 1]


# -- a point's figures ---------------------------------------------------------------------


def test_slos_begin_with_the_simulated_one_and_are_never_looser() -> None:
    slos = stricter_slos(Slo(2.0, 0.05))
    assert slos[0] == Slo(2.0, 0.05)
    assert len(set(slos)) == len(slos) == 12
    assert all(slo.ttft_seconds <= 2.0 and slo.itl_seconds <= 0.05 for slo in slos)


def test_figures_of_a_point_are_those_of_its_run(trace: Trace) -> None:
    (run,), _ = swept(trace, [20.0], configuration(1, 1))
    slos = stricter_slos(Slo(2.0, 0.05))
    point = pareto_point(slos, 0.9, COSTS, run)
    assert point is not None
    outcome = summarize(run.cluster)
    met = [job for job in run.cluster.jobs if job.meets_slo(0.05)]
    tokens = sum(job.arrival.num_answer_tokens for job in met)
    seconds = run.cluster.jobs[-1].arrival.arrival_seconds
    first = point.by_slo[0]
    assert first.attainment == pytest.approx(outcome.attainment)
    assert first.tokens_per_second_per_gpu == pytest.approx(tokens / seconds / 2, rel=1e-5)
    assert first.dollars_per_million_tokens == pytest.approx(
        1000 / first.tokens_per_second_per_gpu, rel=1e-5
    )
    assert point.tokens_per_second_per_user == pytest.approx(
        1 / (outcome.tbt_seconds["p50"] or 0), rel=1e-5
    )
    for slo, figures in zip(slos, point.by_slo, strict=True):
        stricter = 2.0 - slo.ttft_seconds
        expected = sum(
            job.first_token_at_seconds - job.deadline_seconds <= -stricter
            and job.itl_seconds <= slo.itl_seconds
            and not job.rejected
            for job in run.cluster.jobs
        )
        assert figures.attainment == expected / 200
        assert figures.meets_target == (expected >= 180)
    assert 0 < point.by_slo[-1].attainment < first.attainment
