"""Measures how long new connections wait at a router to which another client, without a key, opens
connections that it leaves at once.

    python -m benchmarks.new_connections [--tree DIR] [--rates 0 300 1100] [--seconds 4]
                                         [--tls] [--same-source] [--only HOW …]

A neighbour with a key opens a connection every 50 ms, asks for the list of models, and takes the
time from connecting to the first byte of the answer. Beside it, a process of low priority opens
connections from another address (127.0.0.2), and leaves each of them: at once, after a request
line, after a whole request, by a reset, or half a second later, when it has been answered. With
``--same-source`` it uses the neighbour's address, as behind a load balancer. ``--tree`` measures
another version's source as well, both in turn; with it, the defaults take three minutes. Prints a
table, and JSON as the last line.
"""

import argparse
import asyncio
import json
import ssl
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil

from testkit.leaving_connections import DEPARTURES, Departure, leave
from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import SYSTEM_CLOCK, describe

KEY = "a-neighbour-with-a-key-0"
REQUEST = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n\r\n"
PROBE_SECONDS = 0.05
WARM_UP_PROBES = 10
PATIENCE_SECONDS = 30.0
"""How long the neighbour waits for an answer."""

NOBODY = "nobody"
ATTACKER, SAME = "127.0.0.2", "127.0.0.1"
NICENESS = 10


@dataclass(frozen=True)
class NewConnectionWaits:
    """The times from connecting to the first byte of the answer, in milliseconds. ``unanswered``
    counts the connections that broke or waited for more than 30 s. ``left_per_second`` is what the
    attacker achieved of ``per_second``. ``router_cpu`` is the router's share of one processor."""

    version: str
    how: str
    per_second: float
    left_per_second: float
    probes: int
    p50: float
    p99: float
    longest: float
    unanswered: int
    router_cpu: float


class Neighbour:
    """Opens connections to a cluster's router."""

    def __init__(self, cluster: LocalCluster, uses_tls: bool) -> None:
        url = httpx.URL(cluster.url)
        self.address = url.host, url.port or 80
        self.router = psutil.Process(cluster.processes("router")[0]["pid"])
        self._tls = ssl._create_unverified_context() if uses_tls else None

    async def probe(self, count: int) -> list[float | None]:
        """Open ``count`` connections at a fixed rate, however long the earlier ones wait. Return
        the seconds to the first byte of each answer, None without one."""
        async with asyncio.TaskGroup() as probes:
            began, tasks = SYSTEM_CLOCK(), []
            for number in range(count):
                await asyncio.sleep(max(began + number * PROBE_SECONDS - SYSTEM_CLOCK(), 0.0))
                tasks.append(probes.create_task(self._first_byte_seconds()))
        return [task.result() for task in tasks]

    async def _first_byte_seconds(self) -> float | None:
        began = SYSTEM_CLOCK()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                reader, writer = await asyncio.open_connection(*self.address, ssl=self._tls)
                try:
                    writer.write(REQUEST.encode())
                    found = await reader.read(12)
                finally:
                    writer.transport.abort()
        except (OSError, TimeoutError):
            return None
        return SYSTEM_CLOCK() - began if found.startswith(b"HTTP/1.1 200") else None


def measure(
    version: str, neighbour: Neighbour, how: str, rate: float, seconds: float, source: str
) -> NewConnectionWaits:
    asyncio.run(neighbour.probe(WARM_UP_PROBES))
    attack = json.dumps([*neighbour.address, how, rate, seconds, source])
    command = [sys.executable, "-m", "benchmarks.new_connections", "--attack", attack]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE) as attacker:
        assert attacker.stdout is not None
        attacker.stdout.readline()  # wait until it has started
        began, before = SYSTEM_CLOCK(), cpu_seconds(neighbour.router)
        found = asyncio.run(neighbour.probe(int(seconds / PROBE_SECONDS)))
        cpu = (cpu_seconds(neighbour.router) - before) / (SYSTEM_CLOCK() - began)
        left = int(attacker.stdout.readline())
    waits = [1000 * each for each in found if each is not None] or [0.0]
    p50, p99, longest = (round(float(np.percentile(waits, q)), 1) for q in (50, 99, 100))
    return NewConnectionWaits(
        version, how, rate, round(left / seconds), len(found), p50, p99, longest,
        found.count(None), round(cpu, 3),
    )  # fmt: skip


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure_all(options: argparse.Namespace) -> list[NewConnectionWaits]:
    versions = {"this": None, **({"other": options.tree} if options.tree else {})}
    cases = [(NOBODY, rate) for rate in options.rates if not rate]
    cases += [(how, rate) for rate in options.rates if rate for how in options.only]
    results = []
    with ExitStack() as stack:
        settings: dict[str, object] = {"api_keys": f"{KEY}=neighbour"}
        if options.tls:
            settings |= tls_settings(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        neighbours = {
            name: Neighbour(
                stack.enter_context(local_cluster(None, 1, 1, settings, tree)), options.tls
            )
            for name, tree in versions.items()
        }
        print(f"{'version':8} {'leaving':>16} {'left/s':>12} {'p50':>8} {'p99':>8} {'max':>8} ms, "
              "unanswered, the router's CPU", flush=True)  # fmt: skip
        for how, rate in cases:
            for name, neighbour in neighbours.items():
                source = SAME if options.same_source else ATTACKER
                result = measure(name, neighbour, how, rate, options.seconds, source)
                results.append(result)
                show(result)
    return results


def tls_settings(folder: Path) -> dict[str, object]:
    files = {"tls_certificate": folder / "one.pem", "tls_key": folder / "one.key"}
    command = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -keyout {} -out {}"
    command = command.format(files["tls_key"], files["tls_certificate"])
    subprocess.run(command.split(), check=True, capture_output=True)
    return dict(files)


def show(result: NewConnectionWaits) -> None:
    left = f"{result.left_per_second:.0f}/{result.per_second:.0f}"
    print(
        f"{result.version:8} {result.how:>16} {left:>12} {result.p50:8.1f} {result.p99:8.1f} "
        f"{result.longest:8.1f} {result.unanswered}/{result.probes} "
        f"{100 * result.router_cpu:.0f} %",
        flush=True,
    )


def attack(host: str, port: int, how: str, rate: float, seconds: float, source: str) -> None:
    psutil.Process().nice(NICENESS)
    print("begun", flush=True)
    departure = DEPARTURES.get(how, Departure())
    print(asyncio.run(leave((host, port), departure, rate, seconds, source)), flush=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tree", type=Path, help="source of another version to measure as well")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 300.0, 1100.0])
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each case")
    parser.add_argument("--only", nargs="+", choices=list(DEPARTURES), metavar="HOW",
                        default=[each for each in DEPARTURES if each != "after TLS hello"],
                        help=", ".join(DEPARTURES))  # fmt: skip
    parser.add_argument("--tls", action="store_true", help="let the router use TLS")
    parser.add_argument("--same-source", action="store_true", help="one address for both")
    parser.add_argument("--attack", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.attack:
        attack(*options.attack)
        return
    print(describe(), flush=True)
    results = measure_all(options)
    print(json.dumps({"machine": describe(), "waits": [asdict(each) for each in results]}))


if __name__ == "__main__":
    main(sys.argv[1:])
