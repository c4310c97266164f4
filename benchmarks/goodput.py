"""Compare the goodput of placement policies in simulation, on a trace and on synthetic traffic.

    python -m benchmarks.goodput --trace FILE [--only 8+8 …] [--policies baton,…] [--processes 2]

Simulates H100 workers with Qwen3-8B (prefill at half of the peak FLOPS, decode at 0.7 of the memory
bandwidth), 0.35 million tokens of KV on each device and 3 million in each host's DRAM. SLO: a TTFT
of 2 s plus the prompt's prefill time with an empty cache, and a mean inter-token latency of 50 ms.
Goodput is the highest rate at which 90 % of the requests meet both. With the first seed, every rate
of a coarse grid is tried, then of a finer grid. With four other seeds, only rates near the first
seed's result are tried, in a wider range for synthetic traffic, since each seed generates different
traffic. Figures are medians over the seeds. Prints tables, and JSON as the last line.

``as deployed`` simulates the other policies as published: prompts first come first served, and no
prefix from a peer's store (except Mooncake's). Otherwise all policies run with Baton's workers.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from baton.traces.files import add_jitter, read_trace, scale_rate
from baton.traces.synthetic import TRACE_GENERATORS
from baton.traces.trace import Trace
from conductor.policy.config import BatonPolicyConfig
from conductor.policy.policies import PLACEMENT_POLICIES, get_policy
from conductor.policy.snapshot import LinkSpeed
from simulator.cluster import SimulatedCluster
from simulator.cluster_config import ClusterConfig
from simulator.goodput import SeedGoodput, find_goodput, min_hopeless_misses, rates_between
from simulator.hardware import get_gpu
from simulator.model_shapes import get_model_shape
from simulator.result import SimulationResult, summarize
from simulator.roofline import roofline
from testkit.machine import SYSTEM_CLOCK, describe

SEEDS = (1, 2, 3, 4, 5)
GRID_STEPS = (1.25, 1.05)
NEARBY_RATES = (0.95, 0.97, 0.99, 1.01, 1.03, 1.05)
"""For a trace, the rates that the other seeds try, relative to the first seed's result."""

WIDE = tuple(1.1**power for power in range(-4, 5))
FINER_RATES = (1.03, 1.06)
"""For synthetic traffic, the other seeds try the rates ``WIDE``, relative to the first seed's
result, and then ``FINER_RATES``, relative to the best of those."""

OVERLOAD = 1.5
REPORT_SECONDS = (0.0, 0.1, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class GoodputCase:
    """A load. ``low`` and ``high`` limit the rates to try, per second. ``kind`` names synthetic
    traffic; if it is empty, the trace is used."""

    name: str
    pool: int
    link: float
    low: float
    high: float
    deployed: bool = False
    kind: str = ""
    num_requests: int = 12_000

    def config(self, policy: str) -> ClusterConfig:
        costs = roofline(get_gpu("H100"), get_model_shape("qwen3-8b"))
        rival = self.deployed and policy not in ("baton", "full_scan")
        return ClusterConfig(
            num_prefill=self.pool,
            num_decode=self.pool,
            prefill_cost=costs.prefill,
            decode_cost=costs.decode,
            kv_bytes_per_token=costs.kv_bytes_per_token,
            device_tokens=350_000,
            node_tokens=3_000_000,
            link=LinkSpeed(self.link, 50e9),
            prefill_order="fcfs" if rival else "deadline",
            peer_fetch=not rival or policy.startswith("min_ttft"),
        )

    def traffic(self, trace: Path | None, rate: float, seed: int) -> Trace:
        if self.kind:
            return TRACE_GENERATORS[self.kind](self.num_requests, rate, seed, 1.0)
        assert trace is not None
        known = _jittered(trace, seed)
        own = len(known.requests) / known.requests[-1].arrival_seconds
        return scale_rate(known, rate / own)


SETTINGS = {
    each.name: each
    for each in (
        GoodputCase("8+8", 8, 50e9, 2.0, 32.0),
        GoodputCase("8+8 as deployed", 8, 50e9, 2.0, 32.0, deployed=True),
        GoodputCase("8+8 12.5 GB/s", 8, 12.5e9, 2.0, 32.0),
        GoodputCase("16+16", 16, 50e9, 4.0, 64.0),
        GoodputCase("16+16 12.5 GB/s", 16, 12.5e9, 4.0, 64.0),
        GoodputCase("chat", 8, 50e9, 60.0, 240.0, kind="chat", num_requests=8000),
        GoodputCase("rag", 8, 50e9, 60.0, 400.0, kind="rag", num_requests=8000),
        GoodputCase("agents", 8, 50e9, 20.0, 150.0, kind="agents", num_requests=8000),
        GoodputCase("reasoning", 8, 50e9, 0.4, 3.0, kind="reasoning", num_requests=3000),
        GoodputCase("few_shot", 8, 50e9, 300.0, 1500.0, kind="few_shot", num_requests=8000),
    )
}


@cache
def _jittered(trace: Path, seed: int) -> Trace:
    return add_jitter(read_trace(trace), seed)


def run(
    setting: GoodputCase,
    policy: str,
    trace: Path | None,
    give_up: bool,
    rate: float,
    seed: int,
    admission: bool = True,
    report_seconds: float = 0.0,
    num_conductors: int = 1,
) -> SimulatedCluster:
    traffic = setting.traffic(trace, rate, seed)
    place = get_policy(policy, BatonPolicyConfig(admission=admission))
    config = replace(
        setting.config(policy), report_seconds=report_seconds, num_conductors=num_conductors
    )
    cluster = SimulatedCluster(config, traffic, place)
    cluster.run(min_hopeless_misses(len(traffic.requests)) if give_up else None)
    return cluster


def search_goodput(setting: GoodputCase, policy: str, trace: Path | None) -> dict[str, Any]:
    """Return the goodput, and the other figures of the run with the median goodput."""
    began = SYSTEM_CLOCK()
    runs: Callable[[float, int], SimulatedCluster] = partial(run, setting, policy, trace, True)
    found = [_of_first_seed(setting, runs)]
    near = [found[0].rate_rps * factor for factor in (WIDE if setting.kind else NEARBY_RATES)]
    for seed in SEEDS[1:] if found[0].rate_rps else ():
        best = _best(runs, near, seed)
        if setting.kind and best.rate_rps:
            finer = _best(runs, [best.rate_rps * factor for factor in FINER_RATES], seed)
            best = max(best, finer, key=lambda each: each.rate_rps)
        found.append(best)
    rate = statistics.median(each.rate_rps for each in found)
    result = {
        "setting": setting.name,
        "policy": policy,
        "rate_rps": rate,
        "goodput_rps": statistics.median(each.goodput_rps for each in found),
        "goodput_by_seed": [each.goodput_rps for each in found],
    }
    if rate:
        result |= summarize(run(setting, policy, trace, False, rate, SEEDS[0])).as_dict() | result
    return result | {"search_seconds": SYSTEM_CLOCK() - began}


def _of_first_seed(
    setting: GoodputCase, runs: Callable[[float, int], SimulatedCluster]
) -> SeedGoodput:
    """Return the goodput with the first seed: try all rates in coarse steps, and then rates in fine
    steps, upwards from the highest rate that meets the SLO."""
    coarse = rates_between(setting.low, setting.high, GRID_STEPS[0])
    met = [rate for rate in coarse if _attained(runs, rate, SEEDS[0])]
    if not met:
        return SeedGoodput(SEEDS[0], 0.0, 0.0, 0.0)
    top = rates_between(max(met), max(met) * GRID_STEPS[0], GRID_STEPS[1])
    return find_goodput(runs, top, SEEDS[:1]).by_seed[0]


def _best(
    runs: Callable[[float, int], SimulatedCluster], rates: Sequence[float], seed: int
) -> SeedGoodput:
    """Return the result at the highest of ``rates`` at which 90 % of the requests meet the SLO. If
    there is none, the rate in the result is 0."""
    best = SeedGoodput(seed, 0.0, 0.0, 0.0)
    for rate in sorted(rates):
        found = _attained(runs, rate, seed)
        if found:
            best = SeedGoodput(seed, rate, found.goodput_rps, found.attainment)
    return best


def _attained(
    runs: Callable[[float, int], SimulatedCluster], rate: float, seed: int
) -> SimulationResult | None:
    cluster = runs(rate, seed)
    if cluster.stopped_early:
        return None
    outcome = summarize(cluster)
    return outcome if outcome.attainment >= 0.9 else None


def run_overloaded(setting: GoodputCase, trace: Path, capacity: float) -> list[dict[str, Any]]:
    """Measure a load of 1.5 times the capacity, with and without early rejection."""
    rows = []
    for admission in (True, False):
        found = [
            summarize(
                run(setting, "baton", trace, False, OVERLOAD * capacity, seed, admission)
            ).as_dict()
            for seed in SEEDS[:3]
        ]
        rows.append(_medians(found) | {"admission": admission})
    return rows


def run_with_stale_reports(setting: GoodputCase, trace: Path, rate: float) -> list[dict[str, Any]]:
    """Measure a load of nine tenths of the capacity with stale reports, with one conductor and with
    three."""
    rows = []
    for conductors in (1, 3):
        for seconds in REPORT_SECONDS:
            found = [
                summarize(
                    run(setting, "baton", trace, False, 0.9 * rate, seed, True, seconds, conductors)
                ).as_dict()
                for seed in SEEDS
            ]
            named = {"report_seconds": seconds, "num_conductors": conductors}
            rows.append(_medians(found) | named)
    return rows


def _medians(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = ("goodput_rps", "attainment", "rejected_ratio", "worst_slo_ratio")
    return {name: statistics.median(each[name] for each in found) for name in names}


def tables(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    chosen = [SETTINGS[name] for name in options.only or SETTINGS]
    policies = options.policies.split(",") if options.policies else PLACEMENT_POLICIES
    with ProcessPoolExecutor(options.processes) as pool:
        for setting in chosen:
            if not setting.kind and options.trace is None:
                continue
            futures = [
                pool.submit(search_goodput, setting, name, options.trace) for name in policies
            ]
            rows = []
            for future in futures:
                rows.append(future.result())
                done = rows[-1]
                label = f"{setting.name} {done['policy']}: {done['goodput_rps']:.2f}/s"
                print(f"{label}, {done['search_seconds']:.0f} s", file=sys.stderr, flush=True)
            _print(setting.name, rows)
            yield from rows


def _print(name: str, rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{name}\n{'policy':24}{'goodput':>9} {'rate':>7} {'hit':>6} {'TTFT, s':>21}"
          f" {'TBT, ms':>21} {'quartiles':>20} {'imbal.':>7} {'refused':>8}")  # fmt: skip
    for row in sorted(rows, key=lambda row: -row["goodput_rps"]):
        if not row["rate_rps"]:
            print(f"{row['policy']:24} none of the rates")
            continue
        ttft = " ".join(f"{value:6.2f}" for value in row["ttft_seconds"].values())
        gaps = " ".join(f"{1e3 * value:6.1f}" for value in row["tbt_seconds"].values())
        quarters = " ".join(f"{share:.2f}" for share in row["attainment_by_length_quartile"])
        print(f"{row['policy']:24}{row['goodput_rps']:9.2f} {row['rate_rps']:7.2f} "
              f"{row['hit_ratio_tokens']:6.3f}  {ttft}  {gaps}  {quarters} "
              f"{row['load_imbalance']:7.2f} {row['rejected_ratio']:8.3f}", flush=True)  # fmt: skip


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(SETTINGS))
    parser.add_argument("--policies", default="")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    machine = describe()
    print(machine)
    rows = list(tables(options))
    result: dict[str, Any] = {"machine": machine, "rows": rows}
    base = [row for row in rows if row["setting"] == "8+8" and row["policy"] == "baton"]
    if base:
        capacity = base[0]["rate_rps"]
        result["overload"] = run_overloaded(SETTINGS["8+8"], options.trace, capacity)
        result["stale"] = run_with_stale_reports(SETTINGS["8+8"], options.trace, capacity)
        for row in (*result["overload"], *result["stale"]):
            print({name: _short(value) for name, value in row.items()})
    print(json.dumps(result))


def _short(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main(sys.argv[1:])
