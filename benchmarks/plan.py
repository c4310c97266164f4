"""Check the recommendations of ``baton plan`` with other traffic of the same kind.

    python -m benchmarks.plan [--gpus 16] [--kinds chat rag agents reasoning] [--trace FILE]
        [--itl-slos 0.05 0.025] [--seed 0] [--check-seed 1] [--gpu H100] [--model qwen3-8b]
        [--processes 2]

For each kind of traffic and each ITL SLO, plans with ``--seed``: the clusters of mixed workers,
prefill and decode workers, and both, which keep the SLO up to the highest rates. Then searches the
highest rate of each of these three with ``--check-seed``, from three quarters to four thirds of the
planned one, in steps of 1 %, and compares the recommended one, which had the highest rate in the
plan, with the best of them. Workers have one GPU each. With a trace, the second seed changes
arrivals within the trace's steps of three seconds. Prints a Markdown table, in the order in which
the rows are done, and JSON as the last line. ``--processes`` are divided among the cells; a plan
uses several if there are fewer cells.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from command_line.simulate_options import HardwareOptions, TrafficOptions
from conductor.policy.policies import DEFAULT_POLICY
from simulator.cluster import SimulatedCluster
from simulator.goodput import find_goodput, min_hopeless_misses, rates_between
from simulator.scenario import Scenario

TRAFFIC = {"chat": (120, 7000), "rag": (120, 5000), "agents": (60, 3000), "reasoning": (1.0, 4000)}
"""The rate of a plan, in requests per second, and its number of requests, by kind of traffic."""

TRACE = "conversation trace"
TRACE_RATE, JITTER_SECONDS = 20, 3
SEARCHED = (3 / 4, 4 / 3)
"""The rates that are searched with the second seed, as factors of the planned rate."""

KINDS = ("mixed", "split", "hybrid")


def baton(*arguments: object) -> dict[str, Any]:
    """Return the JSON that a ``baton`` command prints. ``baton plan`` ends with 1 if nothing meets
    the target at the requested rate."""
    command = [sys.executable, "-m", "baton", *map(str, arguments), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(f"{' '.join(command)} failed with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def traffic_flags(kind: str, options: argparse.Namespace, seed: int) -> list[object]:
    if kind == TRACE:
        return ["--trace", options.trace, "--rate", TRACE_RATE,
                "--jitter-seconds", JITTER_SECONDS, "--seed", seed]  # fmt: skip
    rate, num_requests = TRAFFIC[kind]
    return ["--kind", kind, "--rate", rate, "--requests", num_requests, "--seed", seed]


def kinds_of(options: argparse.Namespace) -> list[str]:
    return [*([TRACE] if options.trace else []), *options.kinds]


def check(kind: str, itl_slo: float, options: argparse.Namespace) -> dict[str, Any]:
    """Plan with one seed and search with another. Return the highest rate of each kind of cluster
    with both, and the rate of the recommended one divided by the best one's."""
    common = ["--model", options.model, "--gpu", options.gpu, "--gpus-per-worker", 1,
              "--tbt-slo", itl_slo]  # fmt: skip
    num_cells = len(kinds_of(options)) * len(options.itl_slos)
    planned = baton(
        "plan", "--gpus", options.gpus, *common, *traffic_flags(kind, options, options.seed),
        "--processes", max(options.processes // num_cells, 1),
    )  # fmt: skip
    rows: dict[str, dict[str, Any]] = {}
    for found in planned["highest_rates"]:
        sizes = {pool: found[pool] for pool in ("prefill", "decode", "mixed")}
        checked = highest_checked(kind, itl_slo, sizes, found["rate_rps"], options)
        rows[found["kind"]] = {**sizes, "planned_rps": found["rate_rps"], "checked_rps": checked,
                               "may_be_higher": found["may_be_higher"]}  # fmt: skip
    recommended = max(rows, key=lambda each: float(rows[each]["planned_rps"]))
    best = max(float(row["checked_rps"]) for row in rows.values())
    ratio = float(rows[recommended]["checked_rps"]) / best if best else None
    return {"traffic": kind, "itl_slo": itl_slo, "recommended": recommended, "ratio": ratio, **rows}


def highest_checked(
    kind: str, itl_slo: float, sizes: dict[str, int], planned: float, options: argparse.Namespace
) -> float:
    """Return the highest rate with the second seed near the planned one; 0 if there is none."""
    if not planned:
        return 0.0
    hardware = HardwareOptions(
        model=options.model, gpu=options.gpu, gpus_per_worker=1, tbt_slo=itl_slo
    ).hardware()
    if kind == TRACE:
        load = TrafficOptions(trace=options.trace, jitter_seconds=JITTER_SECONDS)
    else:
        load = TrafficOptions(kind=kind, requests=TRAFFIC[kind][1])
    traffic = load.traffic(planned)
    scenario = Scenario(config=hardware.config(sizes["prefill"], sizes["decode"], sizes["mixed"]))

    def run(rate: float, seed: int) -> SimulatedCluster:
        trace = traffic.at_rate(rate, seed)
        return scenario.run(trace, DEFAULT_POLICY, min_hopeless_misses(len(trace.requests)))

    rates = rates_between(*(planned * factor for factor in SEARCHED))
    return find_goodput(run, rates, [options.check_seed]).rate_rps


def show(found: dict[str, Any]) -> None:
    cells = []
    for kind in KINDS:
        row = found.get(kind)
        cells.append(
            "" if row is None else
            f"{row['prefill']}+{row['decode']}+{row['mixed']}: {row['planned_rps']:.3g}"
            f"{'+' if row['may_be_higher'] else ''}, {row['checked_rps']:.3g}"
        )  # fmt: skip
    ratio = "" if found["ratio"] is None else f"{found['ratio']:.3f}"
    slo = f"{found['itl_slo'] * 1e3:g} ms"
    print(
        f"| {found['traffic']} | {slo} | {' | '.join(cells)} | {found['recommended']} | {ratio} |"
    )
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpus", type=int, default=16)
    parser.add_argument("--gpu", default="H100")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--kinds", nargs="*", choices=TRAFFIC, default=list(TRAFFIC))
    parser.add_argument("--trace", type=Path, help="the conversation trace")
    parser.add_argument("--itl-slos", type=float, nargs="+", default=[0.05, 0.025])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args(arguments)
    print(describe())
    print("prefill + decode + mixed workers: highest rate with the plan's seed, with the other")
    print("| traffic | ITL SLO | mixed | split | hybrid | recommended | of the best |")
    print("|---|---|---|---|---|---|---|", flush=True)
    results = []
    with ProcessPoolExecutor(options.processes) as pool:
        cells = [
            pool.submit(check, kind, itl_slo, options)
            for itl_slo in options.itl_slos
            for kind in kinds_of(options)
        ]
        for cell in as_completed(cells):
            results.append(cell.result())
            show(results[-1])
    machine = describe()
    print(json.dumps({**machine, **vars(options), "trace": str(options.trace), "cells": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
