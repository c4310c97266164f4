"""Run locust against a real CPU cluster: find its capacity, then run it at 80 % of that.

    python -m benchmarks.soak [--seconds 600] [--share 0.8] [--logs FOLDER]

The users are of all kinds in ``loadtest/locustfile.py`` except reasoning, with prompts and answers
a seventh as long, to fit the demo model's context. Each step of a ramp has twice the users of the
previous step, until the rate of answers hardly grows; capacity is the highest rate of answers. The
number of users for the long run is interpolated linearly between two steps of the ramp. Prints a
table, each kind of failure as locust counts it, and JSON as the last line; exits with 1 if a
request failed. In that case, the logs of all processes are copied to the folder ``--logs``.
"""

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import describe, pause
from tools.local_cluster import LocalCluster, local_cluster

LOCUSTFILE = Path(__file__).parents[1] / "loadtest" / "locustfile.py"
SHAPE = [
    "--user-weights", "chat=4,completion=2,rag=1,agent=1",
    "--length-scale", "0.15", "--think-scale", "0.3",
]  # fmt: skip
RAMP_USERS = (8, 16, 32, 64, 128, 256)
RAMP_SECONDS = 30
MIN_RATE_GROWTH = 1.1
"""If doubling the users raises the rate by less than this factor, the capacity is reached."""

SAMPLE_SECONDS = 6.0
SETTLE_SHARE = 0.2
"""The share of the run, from its start, that is ignored in the memory growth, since caches fill."""


@dataclass
class SoakRun:
    """The result of one run. ``rate_rps`` counts complete answers. The latencies, in milliseconds,
    are measured at the client. ``failures`` counts failures by kind of user and reason.
    ``memory_mib`` has the memory of each role over time, by role and kind (``own`` or
    ``shared``)."""

    users: int
    seconds: float
    num_requests: int
    num_failures: int
    rate_rps: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    tbt_ms_p50: float
    failures: dict[str, int]
    memory_mib: dict[str, list[float]] = field(default_factory=dict)

    @property
    def growth_mib(self) -> dict[str, float]:
        """How much each memory grew, in MiB: the median of the last fifth of the samples minus the
        median of the first fifth. Samples from the first ``SETTLE_SHARE`` of the run are left
        out."""
        return {name: growth(sizes) for name, sizes in self.memory_mib.items()}


def run(cluster: LocalCluster, users: int, seconds: int, watch: bool = False) -> SoakRun:
    """Run locust for ``seconds``, in its own process. Raises RuntimeError when it can't run."""
    with tempfile.TemporaryDirectory() as folder:
        output_path = Path(folder) / "locust"
        command = [
            sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", cluster.url, *SHAPE,
            "--headless", "--users", str(users), "--spawn-rate", str(users),
            "--run-time", f"{seconds}s", "--json-file", str(output_path), "--csv", str(output_path),
            "--only-summary",
        ]  # fmt: skip
        environment = {key: os.environ[key] for key in os.environ if not key.startswith("LOCUST_")}
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet) as locust:
            memory = sample_memory(cluster, locust) if watch else {}
        if not output_path.with_suffix(".json").exists():
            raise RuntimeError(f"locust exited with {locust.returncode} and wrote no results")
        rows = json.loads(output_path.with_suffix(".json").read_text())
        with Path(f"{output_path}_failures.csv").open(newline="") as file:
            failures = {
                f"{row['Name']}: {row['Error']}": int(row["Occurrences"])
                for row in csv.DictReader(file)
            }
    return _run_of(rows, users, seconds, failures, memory)


def sample_memory(cluster: LocalCluster, locust: subprocess.Popen[bytes]) -> dict[str, list[float]]:
    """Until ``locust`` has exited, sample the anonymous and the shared memory of each role, in MiB.
    Each sample is the sum over the role's processes."""
    sizes: dict[str, list[float]] = defaultdict(list)
    processes = [(entry["role"], entry["pid"]) for entry in cluster.status()["processes"]]
    while locust.poll() is None:
        now: dict[str, float] = defaultdict(float)
        for role, pid in processes:
            own, shared = resident_mib(pid)
            now[f"{role}, own"] += own
            now[f"{role}, shared"] += shared
        for name, mib in now.items():
            sizes[name].append(mib)
        pause(SAMPLE_SECONDS)
    return dict(sizes)


def resident_mib(pid: int) -> tuple[float, float]:
    """Return two sizes in MiB: a process's resident anonymous memory, and the shared memory that it
    has touched."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    own, shared = (int(fields[name].split()[0]) / 1024 for name in ("RssAnon", "RssShmem"))
    return own, shared


def _run_of(
    rows: Sequence[dict[str, Any]],
    users: int,
    seconds: float,
    failures: dict[str, int],
    memory: dict[str, list[float]],
) -> SoakRun:
    posts = [row for row in rows if row["method"] == "POST"]
    num_requests = sum(row["num_requests"] for row in posts)
    num_failures = sum(row["num_failures"] for row in posts)
    return SoakRun(
        users,
        seconds,
        num_requests,
        num_failures,
        (num_requests - num_failures) / seconds,
        _percentile(rows, "TTFT", 0.5),
        _percentile(rows, "TTFT", 0.99),
        _percentile(rows, "TBT", 0.5),
        failures,
        memory,
    )


def _percentile(rows: Sequence[dict[str, Any]], method: str, share: float) -> float:
    """Return a percentile, in milliseconds, of the response times in one method's rows. Each row
    has the number of requests by response time."""
    counts: dict[float, int] = defaultdict(int)
    for row in rows:
        if row["method"] == method:
            for milliseconds, count in row["response_times"].items():
                counts[float(milliseconds)] += count
    left = share * sum(counts.values())
    for milliseconds in sorted(counts):
        left -= counts[milliseconds]
        if left <= 0:
            return milliseconds
    return 0.0


def growth(sizes: Sequence[float]) -> float:
    settled = sizes[int(len(sizes) * SETTLE_SHARE) :]
    part = max(len(settled) // 5, 1)
    return statistics.median(settled[-part:]) - statistics.median(settled[:part])


def run_ramp(cluster: LocalCluster) -> list[SoakRun]:
    """Add users step by step until more users no longer increase the number of answers per
    second."""
    ramp: list[SoakRun] = []
    for users in RAMP_USERS:
        ramp.append(run(cluster, users, RAMP_SECONDS))
        print(format_run(ramp[-1]), flush=True)
        if len(ramp) > 1 and ramp[-1].rate_rps < MIN_RATE_GROWTH * ramp[-2].rate_rps:
            break
    return ramp


def users_for(ramp: Sequence[SoakRun], rate: float) -> int:
    """Return the number of users for a rate, interpolated between two steps of the ramp."""
    before, users_before = 0.0, 0
    for step in ramp:
        if step.rate_rps >= rate:
            part = (rate - before) / (step.rate_rps - before)
            return max(round(users_before + part * (step.users - users_before)), 1)
        before, users_before = step.rate_rps, step.users
    return users_before


def keep_logs(cluster: LocalCluster, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for log in cluster.home.glob("clusters/*/logs/*"):
        shutil.copy(log, folder)


def format_run(result: SoakRun) -> str:
    """Format a run as a line, with one more line per kind of failure."""
    failures = "".join(f"\n  {count} x {why}" for why, count in result.failures.items())
    return (
        f"{result.users:3d} users: {result.rate_rps:6.2f} answers/s, {result.num_failures} of "
        f"{result.num_requests} failed, first token p50 {result.ttft_ms_p50:.0f} ms, p99 "
        f"{result.ttft_ms_p99:.0f} ms, gap p50 {result.tbt_ms_p50:.1f} ms"
        f"{failures}"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--share", type=float, default=0.8)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="folder for logs if a request failed")
    options = parser.parse_args(arguments)
    machine = describe()
    print(machine)
    settings: dict[str, object] = {"threads": 1}
    with local_cluster(
        prefill=options.prefill, decode=options.decode, settings=settings
    ) as cluster:
        ramp = run_ramp(cluster)
        capacity = max(step.rate_rps for step in ramp)
        users = users_for(ramp, options.share * capacity)
        long = run(cluster, users, options.seconds, watch=True)
        print(
            format_run(long),
            f"{long.rate_rps / capacity:.2f} of the capacity",
            sep="\n",
            flush=True,
        )
        if options.logs and (long.failures or any(step.failures for step in ramp)):
            keep_logs(cluster, options.logs)
    for name, sizes in long.memory_mib.items():
        print(f"{name}: {sizes[-1]:.0f} MiB, grew by {long.growth_mib[name]:.1f}")
    result = {
        "machine": machine,
        "capacity_rps": capacity,
        "ramp": [asdict(step) for step in ramp],
        "run": asdict(long) | {"growth_mib": long.growth_mib},
    }
    print(json.dumps(result))
    return int(long.num_failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
