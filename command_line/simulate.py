"""``baton simulate`` compares placement policies on a simulated cluster, in virtual time."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.core.ids import WorkerId
from baton.reports.console import open_console
from baton.reports.plots import Points, plot_cdfs, plot_goodput, plot_load, prepare_plots
from simulator.cluster import SimulatedCluster
from simulator.flag_checks import check_at_least
from simulator.goodput import Goodput, min_hopeless_misses, search_goodput
from simulator.request import SimulatedRequest
from simulator.result import Percentiles, SimulationResult, inter_token_latencies, summarize
from simulator.scenario import Scenario, Traffic, mean_rate


def run_simulate(
    traffic: Traffic,
    scenario: Scenario,
    policies: Sequence[str],
    num_seeds: int,
    find_goodput: bool,
    plots: Path | None,
    as_json: bool,
) -> None:
    """Simulate each policy and print the results. Raises Invalid for a wrong option, before the
    first simulation begins."""
    prepare_plots(plots)
    check_at_least("--seeds", num_seeds, 1)
    trace = traffic.trace_at_requested_rate
    clusters: dict[str, SimulatedCluster] = {}
    found: dict[str, Goodput] = {}
    with show_progress() as show:
        for number, policy in enumerate(policies, start=1):
            label = f"{policy} ({number} of {len(policies)})"
            show(label)
            clusters[policy] = scenario.run(trace, policy)
            if find_goodput:
                found[policy] = _search_goodput(traffic, scenario, policy, num_seeds, label, show)
    outcomes = {policy: summarize(cluster) for policy, cluster in clusters.items()}
    if plots is not None:
        _plot(plots, clusters, found)
    if as_json:
        print(json.dumps(_object(outcomes, found)))
    else:
        print(f"{trace.name}: {len(trace.requests):,} requests")
        open_console().print(_table(outcomes, found))


# -- the highest rate ----------------------------------------------------------------------


def _search_goodput(
    traffic: Traffic,
    scenario: Scenario,
    policy: str,
    num_seeds: int,
    label: str,
    show: Callable[[str], None],
) -> Goodput:
    """Find the highest rate that meets the SLO, beginning at the requested rate."""

    def run(rate: float, seed: int) -> SimulatedCluster:
        show(f"{label}: {rate:.2f} requests per second")
        trace = traffic.at_rate(rate, seed)
        return scenario.run(trace, policy, min_hopeless_misses(len(trace.requests)))

    seeds = range(traffic.seed, traffic.seed + (num_seeds if traffic.is_random else 1))
    return search_goodput(run, mean_rate(traffic.trace_at_requested_rate), seeds)


# -- output --------------------------------------------------------------------------------


def _object(outcomes: dict[str, SimulationResult], found: dict[str, Goodput]) -> dict[str, Any]:
    """Return the JSON output. Its top-level fields are those of the first policy. If there are
    several policies, its field ``policies`` maps each policy's name to that policy's fields."""
    by_policy = {policy: outcome.as_dict() for policy, outcome in outcomes.items()}
    for policy, best in found.items():
        by_policy[policy]["highest"] = asdict(best)
    first = next(iter(by_policy))
    flat = {"policy": first, **by_policy[first]}
    return flat if len(by_policy) == 1 else {**flat, "policies": by_policy}


def _table(outcomes: dict[str, SimulationResult], found: dict[str, Goodput]) -> Table:
    """Return the results as a table. A single policy gets a row per figure; several policies get a
    row each, with the main figures only."""
    highest = {policy: _format_goodput(best) for policy, best in found.items()}
    label = "highest rate within SLO"
    if len(outcomes) == 1:
        ((policy, outcome),) = outcomes.items()
        table = Table("", policy, box=None)
        for name, show, _ in _ROWS:
            table.add_row(name, show(outcome))
        if found:
            table.add_row(label, highest[policy])
        return table
    brief = [(name, show) for name, show, in_brief in _ROWS if in_brief]
    table = Table("policy", *(name for name, _ in brief), *([label] if found else []), box=None)
    for policy, outcome in outcomes.items():
        shown = [show(outcome) for _, show in brief]
        table.add_row(policy, *shown, *([highest[policy]] if found else []))
    return table


def _format_goodput(best: Goodput) -> str:
    return f"{best.rate_rps:.2f}/s" if best.rate_rps else "none"


def _format_shares(shares: Sequence[float | None]) -> str:
    return " ".join("-" if share is None else f"{share:.1%}" for share in shares)


def _format_seconds(percentiles: Percentiles) -> str:
    values = percentiles.values()
    return " ".join("-" if value is None else f"{value:.3g}" for value in values)


_ROWS: tuple[tuple[str, Callable[[SimulationResult], str], bool], ...] = (
    ("requests per second", lambda o: f"{o.rate_rps:.2f}", False),
    ("goodput", lambda o: f"{o.goodput_rps:.2f}/s", True),
    ("within SLO", lambda o: f"{o.attainment:.1%}", True),
    ("by length, short to long", lambda o: _format_shares(o.attainment_by_length_quartile), True),
    ("rejected", lambda o: f"{o.rejected_ratio:.1%}", True),
    ("cached", lambda o: f"{o.hit_ratio_tokens:.1%}", True),
    ("TTFT p50 p90 p99 (s)", lambda o: _format_seconds(o.ttft_seconds), True),
    ("ITL p50 p90 p99 (s)", lambda o: _format_seconds(o.tbt_seconds), True),
    ("imbalance", lambda o: f"{o.load_imbalance:.2f}", True),
    ("decode imbalance", lambda o: f"{o.decode_imbalance:.2f}", False),
    ("prefill utilisation", lambda o: f"{o.prefill_utilisation:.1%}", False),
    ("worst ratio of TTFT to its SLO", lambda o: f"{o.worst_slo_ratio:.2f}", False),
    ("restarts", lambda o: f"{o.restarts:,}", False),
    ("preemptions", lambda o: f"{o.preemptions:,}", False),
)
"""Label, value, and whether the figure is also shown in the table of several policies."""


# -- figures -------------------------------------------------------------------------------


def _plot(folder: Path, clusters: dict[str, SimulatedCluster], found: dict[str, Goodput]) -> None:
    latencies = {}
    for policy, cluster in clusters.items():
        ttfts = [job.ttft_seconds for job in cluster.jobs if not job.rejected]
        latencies[policy] = (ttfts, inter_token_latencies(cluster.jobs))
        plot_load(folder / f"load-{policy}.png", _waiting_requests(cluster))
    plot_cdfs(folder / "latency.png", latencies)
    if found:
        lines = {policy: best.by_seed[0].attainments for policy, best in found.items()}
        plot_goodput(folder / "goodput.png", lines)


def _waiting_requests(cluster: SimulatedCluster) -> dict[str, Points]:
    """Return, for each prefill worker over time, its number of requests without a first token."""
    changes: dict[WorkerId, list[tuple[float, int]]] = {each.id: [] for each in cluster.prefills}
    for job in _prefilled_jobs(cluster.jobs):
        assert job.prefill is not None
        changes[job.prefill] += [(job.arrival.arrival_seconds, 1), (job.first_token_at_seconds, -1)]
    lines: dict[str, Points] = {}
    for worker, steps in changes.items():
        steps.sort()
        counts = accumulate(step for _, step in steps)
        lines[worker] = [(at, count) for (at, _), count in zip(steps, counts, strict=True)]
    return lines


def _prefilled_jobs(jobs: Sequence[SimulatedRequest]) -> Iterator[SimulatedRequest]:
    return (job for job in jobs if job.prefill is not None and not job.rejected)


# -- the terminal --------------------------------------------------------------------------


@contextmanager
def show_progress() -> Iterator[Callable[[str], None]]:
    """Show the current simulation in a line on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    with Console(stderr=True).status("simulating") as status:
        yield lambda text: status.update(f"simulating {text}")
