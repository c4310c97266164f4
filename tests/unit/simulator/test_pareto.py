"""Tests the sweep over rates, the figures of its points, and which of them are Pareto-optimal."""

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from baton.clock import ManualClock
from baton.errors import Invalid
from baton.reports.plots import on_frontier
from baton.traces.synthetic import TRACE_GENERATORS
from baton.traces.trace import Trace
from command_line.pareto import SweepProgress, draw_report, remaining_seconds
from simulator.hardware import GPUS
from simulator.parallelism import PoolParallelism
from simulator.pareto import ParetoPoint, ParetoReport, mark_frontier, pareto_point
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

COSTS = RunningCosts(3.6, True, 720)
"""$0.001 and 720 J per GPU and second."""

TARGET = 0.9


def point(kind: str, rate: float, speed: float, throughput: float, met: float = 1) -> ParetoPoint:
    prefill, decode, mixed = {"mixed": (0, 0, 4), "split": (1, 3, 0)}.get(kind, (1, 1, 2))
    return ParetoPoint(
        label={"mixed": "4 mixed", "split": "1+3"}.get(kind, kind),
        kind=kind,
        workers={"prefill": prefill, "decode": decode, "mixed": mixed},
        num_gpus=4,
        gpus_per_worker={"prefill": 1, "decode": 1, "mixed": 1},
        rate_rps=rate,
        tokens_per_second_per_user=speed,
        tokens_per_second_per_gpu=throughput,
        attainment=met,
        meets_target=met >= TARGET,
        rejected_ratio=0.0,
        ttft_seconds={"p50": 0.5, "p90": 1.5, "p99": None},
        itl_seconds={"p50": 1 / speed, "p90": 0.03, "p99": 0.04},
        dollars_per_million_tokens=COSTS.dollars_per_million_tokens(throughput),
        max_kwh_per_million_tokens=COSTS.max_kwh_per_million_tokens(throughput),
    )


POINTS = mark_frontier(
    [
        point("mixed", 10.0, 20.0, 1000),
        point("mixed", 5.0, 40.0, 500),
        point("split", 8.0, 50.0, 800),
        point("split", 12.0, 30.0, 1100, met=0.7),
        point("other", 2.0, 60.0, 200),
    ]
)

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
    assert [each.on_frontier for each in POINTS] == [True, False, True, False, True]


# -- prices and energy ---------------------------------------------------------------------


def test_costs_of_tokens() -> None:
    assert COSTS.dollars_per_million_tokens(500) == pytest.approx(2.0)
    assert COSTS.max_kwh_per_million_tokens(500) == pytest.approx(0.4)
    assert COSTS.dollars_per_million_tokens(0) is COSTS.max_kwh_per_million_tokens(0) is None
    unknown = RunningCosts(1.0, False, None)
    assert unknown.max_kwh_per_million_tokens(1) is None


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


def test_figures_of_a_point_are_those_of_its_run(trace: Trace) -> None:
    (run,), _ = swept(trace, [20.0], configuration(1, 1))
    found = pareto_point(TARGET, COSTS, run)
    assert found is not None
    outcome = summarize(run.cluster)
    met = [job for job in run.cluster.jobs if job.meets_slo(0.05)]
    tokens = sum(job.arrival.num_answer_tokens for job in met)
    seconds = run.cluster.jobs[-1].arrival.arrival_seconds
    assert found.attainment == pytest.approx(outcome.attainment)
    assert found.meets_target == (len(met) >= 180)
    assert found.tokens_per_second_per_gpu == pytest.approx(tokens / seconds / 2, rel=1e-5)
    assert found.dollars_per_million_tokens == pytest.approx(
        1000 / found.tokens_per_second_per_gpu, rel=1e-5
    )
    assert found.tokens_per_second_per_user == pytest.approx(
        1 / (outcome.tbt_seconds["p50"] or 0), rel=1e-5
    )


# -- figure and progress -------------------------------------------------------------------


@pytest.mark.parametrize("points", [POINTS, ()])
def test_figure_has_the_points_that_meet_the_target(
    tmp_path: Path, points: tuple[ParetoPoint, ...]
) -> None:
    pytest.importorskip("matplotlib")
    about = {
        "model": "m$1",
        "gpu": "H100",
        "num_gpus": 4,
        "traffic": "chat <b> $2",
        "num_requests": 1000,
        "costs": "costs from the GPU's datasheet",
    }
    draw_report(ParetoReport(
        about=about, target=TARGET, ttft_seconds=2.0, itl_seconds=0.05, costs=COSTS, points=points,
    ), tmp_path)  # fmt: skip
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
    drawn = re.findall(r"<!-- (.*) -->", (tmp_path / "pareto.svg").read_text())
    assert any(text.startswith("m$1 on 4 × H100; chat") for text in drawn)
    assert ("4 mixed at 10/s" in drawn) == ("1+3 at 8/s" in drawn) == bool(points)
    assert "1+3 at 12/s" not in drawn  # it misses the target


def test_remaining_time_is_proportional() -> None:
    assert remaining_seconds(0, 10, 5.0) is None
    assert remaining_seconds(2, 10, 5.0) == 20.0
    assert remaining_seconds(10, 10, 5.0) == 0.0


def test_progress_is_shown_and_written_from_time_to_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Captured stderr is no terminal, so it gets a line every 10 s."""
    clock, shown = ManualClock(), list[str]()
    progress = SweepProgress(4, shown.append, clock)
    for done in range(3):
        progress(done, f"{done}+1")
        clock.advance(60.0 if done else 6.0)
    assert shown == [
        "0+1: 1 of 4",
        "1+1: 2 of 4, about 18 s left",
        "2+1: 3 of 4, about 66 s left",
    ]
    assert capsys.readouterr().err == "simulating 2+1: 3 of 4, about 66 s left\n"
