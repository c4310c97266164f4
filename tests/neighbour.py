"""Measure the effect of one tenant's attacks on another tenant: `make neighbour`.

    python -m tests.neighbour [--seconds 30] [--only NAME …] [--tree DIR] [--rest 60] [--list]

Starts a cluster with the demo model and two tenants, the attacker and the neighbour. Each attack in
tests/attacks runs for ``--seconds`` with the attacker's key, which allows 60 requests a minute,
while the neighbour reads one stream after another. The guarantee: the neighbour's longest
inter-token latency is at most 250 ms longer than without the attack, each of its answers equals
that of an undisturbed cluster, no process exits, and ``--rest`` seconds later each process's
private memory has grown by at most a tenth. To warm up the cluster, each kind of request is sent
once before the first attack.

The attacker is a separate process with a low priority (nice), so that the CPU time that it uses on
the same machine disturbs the cluster little. The neighbour's latency without an attack (``alone``)
is measured for ``--seconds`` before each attack. After a violation, the next attack gets a new
cluster. With ``--tree``, the cluster runs another version's source. Prints a table, and JSON as the
last line. Exits with 1 if the guarantee was violated."""

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import redis
import yaml

from baton.core.api_key import hash_api_key
from testkit.local_cluster import LocalCluster, local_cluster
from testkit.machine import SYSTEM_CLOCK, describe, pause
from testkit.streams import StreamedAnswer, make_request_bodies, record_answers, traffic
from tests.attacks.collection import Attack, find_attacks, run_attacks, target_to_json
from tests.attacks.target import (
    REQUESTS_PER_MINUTE,
    VIOLATION_PREFIX,
    AttackTarget,
    MemberAddress,
    listening_sockets_of,
)

USUAL_REQUESTS = "usual_requests"
"""The name of the module that sends one request of each kind. It runs before the attacks, so that
the processes have created what they create only once."""

ATTACKER, NEIGHBOUR = "attacker-tenant-key-00", "neighbour-tenant-key-0"
SECRET = "a-cluster-secret-of-the-members"
MAX_EXTRA_GAP_SECONDS = 0.25
MAX_MEMORY_RATIO = 1.1
QUESTIONS, SHORTEST, LONGEST = 12, 150, 250
WARM_UP_SECONDS = 10.0
SAMPLE_SECONDS = 0.25
READY_SECONDS = 60.0
END_SECONDS = 60.0
"""How much longer than ``--seconds`` the attacking process may take to exit, on a busy machine."""

NICENESS = 10


@dataclass(frozen=True)
class StreamStats:
    """Statistics of the neighbour's streams in one period. ``gap_…`` are inter-token latencies, and
    ``first_token_max`` is the longest TTFT; all are in milliseconds. ``stolen`` is the share of CPU
    time that the hypervisor gave to other virtual machines; more than a few percent explain long
    latencies."""

    streams: int
    wrong: int
    failed: int
    gap_p50: float
    gap_p99: float
    gap_max: float
    first_token_max: float
    stolen: float
    errors: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        return bool(self.streams) and not (self.wrong or self.failed)


@dataclass(frozen=True)
class ProcessSnapshot:
    """The pid and private memory (in MiB) of each of the cluster's processes at one moment, by
    member id."""

    pids: dict[str, int]
    memory: dict[str, float]


@dataclass(frozen=True)
class AttackVerdict:
    """One attack and its effect on the neighbour. ``ended`` names the processes that exited.
    ``memory_…`` map each process to its memory in MiB. ``violations`` describes which parts of the
    guarantee were violated."""

    name: str
    finding: str
    alone: StreamStats
    during_attack: StreamStats
    ended: tuple[str, ...]
    memory_before: dict[str, float]
    memory_peak: dict[str, float]
    memory_after: dict[str, float]
    outcomes: dict[str, int]
    violations: tuple[str, ...] = field(default=())


class MemoryWatch:
    """Samples the processes' memory during the ``with`` block; ``peak`` maps each process to its
    highest memory in MiB."""

    def __init__(self, pids: dict[str, int]) -> None:
        self.peak: dict[str, float] = {}
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            for name, size in memory_of(self._pids).items():
                self.peak[name] = max(size, self.peak.get(name, 0.0))


class StealTime:
    """Measures the ``share`` of CPU time that the hypervisor takes away during the ``with``
    block."""

    def __enter__(self) -> "StealTime":
        self.share = 0.0
        self._before = psutil.cpu_times()
        return self

    def __exit__(self, *error: object) -> None:
        now = psutil.cpu_times()
        whole = sum(now) - sum(self._before)
        taken = getattr(now, "steal", 0.0) - getattr(self._before, "steal", 0.0)
        self.share = round(taken / whole, 4) if whole else 0.0


class SharedCluster:
    """A running cluster, the neighbour's requests, and the answers to them when nothing disturbs
    the cluster."""

    def __init__(self, cluster: LocalCluster, bodies: Sequence[dict[str, Any]]) -> None:
        self.cluster = cluster
        self._questions = record_answers(cluster.url, bodies, 2, NEIGHBOUR)

    def measure_streams(self, seconds: float) -> StreamStats:
        """Request streamed answers for the neighbour, another tenant of the cluster, one after the
        other for ``seconds``, and summarize the times between their tokens."""
        with StealTime() as stolen, self.run_streams() as answers:
            pause(seconds)
        return summarize_streams(answers, stolen.share)

    @contextmanager
    def run_streams(self) -> Iterator[list[StreamedAnswer]]:
        """Run the neighbour's streams during the ``with`` block; yield the list to which their
        answers are added."""
        with traffic(self.cluster.url, self._questions, 1, NEIGHBOUR) as answers:
            yield answers

    def snapshot(self) -> ProcessSnapshot:
        """Return the processes' pids and memory. Raises RuntimeError if the cluster's status can't
        be read."""
        pids = {entry["id"]: entry["pid"] for entry in self.cluster.status()["processes"]}
        return ProcessSnapshot(pids, memory_of(pids))

    def target(self, seconds: float) -> AttackTarget:
        return AttackTarget(
            url=self.cluster.url,
            attacker_key=ATTACKER,
            neighbour_key=NEIGHBOUR,
            cluster_secret=SECRET,
            redis_url=redis_url_of(self.cluster),
            members=members_of(self.cluster),
            seconds=seconds,
        )


@contextmanager
def run_shared_cluster(tree: Path | None = None) -> Iterator[SharedCluster]:
    """Run a cluster with both tenants and one worker of each role. It computes in float32, so that
    answers can be compared exactly."""
    limits = {"requests_per_minute": REQUESTS_PER_MINUTE}
    tenants = {
        "neighbour": {"keys": [hash_api_key(NEIGHBOUR)]},
        "attacker": {"keys": [hash_api_key(ATTACKER)], "limits": limits},
    }
    with tempfile.TemporaryDirectory(prefix="baton-neighbour-") as folder:
        path = Path(folder) / "tenants.yaml"
        path.write_text(yaml.safe_dump({"tenants": tenants}))
        settings: dict[str, object] = {
            "tenants_file": path,
            "cluster_secret": SECRET,
            "threads": 1,
            "dtype": "float32",
            "store_bytes": 64 * 2**20,
        }
        with local_cluster(None, 1, 1, settings, tree) as cluster:
            bodies = make_request_bodies(QUESTIONS, 1, SHORTEST, LONGEST)
            yield SharedCluster(cluster, bodies)


def run_attack(
    place: SharedCluster, attack: Attack, seconds: float, rest_seconds: float
) -> AttackVerdict:
    """Run one attack, and judge whether the guarantee held."""
    alone = place.measure_streams(seconds)
    before = place.snapshot()
    with StealTime() as stolen, MemoryWatch(before.pids) as watch, place.run_streams() as answers:
        outcomes = attack_from_subprocess([attack.name], place.target(seconds), seconds)[
            attack.name
        ]
    beside = summarize_streams(answers, stolen.share)
    pause(rest_seconds)
    after = place.snapshot()
    verdict = AttackVerdict(
        attack.name,
        attack.finding,
        alone,
        beside,
        tuple(sorted(n for n, pid in before.pids.items() if after.pids.get(n) != pid)),
        before.memory,
        watch.peak,
        after.memory,
        outcomes,
    )
    return replace(verdict, violations=tuple(describe_violations(verdict)))


def describe_violations(verdict: AttackVerdict) -> Iterator[str]:
    """Describe each violated part of the guarantee."""
    extra = verdict.during_attack.gap_max - verdict.alone.gap_max
    if extra > 1000 * MAX_EXTRA_GAP_SECONDS:
        yield f"an inter-token latency {extra:.0f} ms longer than alone"
    if not verdict.during_attack.is_exact:
        streams = verdict.during_attack
        yield f"{streams.wrong} wrong and {streams.failed} failed answers"
    yield from (outcome for outcome in verdict.outcomes if outcome.startswith(VIOLATION_PREFIX))
    if verdict.ended:
        yield f"exited: {', '.join(verdict.ended)}"
    for name, size in verdict.memory_after.items():
        before = verdict.memory_before.get(name, size)
        if size > before * MAX_MEMORY_RATIO:
            yield f"{name} grew from {before:.0f} to {size:.0f} MiB and did not shrink again"


def attack_from_subprocess(
    names: Sequence[str], target: AttackTarget, seconds: float
) -> dict[str, dict[str, int]]:
    """Run attacks from a separate process, each for ``seconds``; return their outcomes."""
    command = [sys.executable, "-m", "tests.neighbour", "--attack", *names]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as attacker:
        assert attacker.stdout is not None
        attacker.stdout.readline()  # wait until it has started: its seconds count from here
        try:
            output, errors = attacker.communicate(
                json.dumps(target_to_json(target)), len(names) * (seconds + END_SECONDS)
            )
        except subprocess.TimeoutExpired:
            attacker.kill()
            return {name: {"did not exit in time": 1} for name in names}
    if attacker.returncode != 0:
        raise RuntimeError(f"the attacking program failed:\n{errors[-3000:]}")
    counts: dict[str, dict[str, int]] = json.loads(output.splitlines()[-1])
    return counts


def members_of(cluster: LocalCluster) -> tuple[MemberAddress, ...]:
    """Return every process with its listening addresses. The addresses for framed connections are
    read from the registry, because ``baton status`` does not show them."""
    lines = framed_addresses(redis_url_of(cluster))
    return tuple(
        MemberAddress(
            id=entry["id"],
            role=entry["role"],
            pid=entry["pid"],
            grpc=entry["address"] if entry["role"] in ("prefill", "decode", "kvstore", "conductor")
            else "",
            framed_address=lines.get(entry["id"], ""),
            listening=listening_sockets_of(entry["pid"]),
        )
        for entry in cluster.status()["processes"]
    )  # fmt: skip


def framed_addresses(redis_url: str) -> dict[str, str]:
    """Return the framed-connection addresses by member. The registry's entries are searched as
    text, so that entries of another version can be read, too."""
    found = {}
    with redis.Redis.from_url(redis_url) as registry:
        for key in registry.keys("baton:*:member:*"):
            entry = re.search(rb'"framed_address":"([^"]+)"', registry.get(key) or b"")
            if entry is not None:
                found[key.decode().rpartition(":")[2]] = entry[1].decode()
    return found


def redis_url_of(cluster: LocalCluster) -> str:
    [state] = cluster.home.glob("clusters/*/state.json")
    return str(json.loads(state.read_text())["redis_url"])


def memory_of(pids: dict[str, int]) -> dict[str, float]:
    """Return the private memory (RSS without shared pages) in MiB of each running process and its
    children. KV pools and the store's arena don't count: they are shared memory, which fills up to
    its configured size."""
    sizes = {}
    for name, pid in pids.items():
        try:
            program = psutil.Process(pid)
            family = [program, *program.children(recursive=True)]
            memory = [each.memory_info() for each in family]
            sizes[name] = round(sum(each.rss - each.shared for each in memory) / 2**20, 1)
        except psutil.NoSuchProcess:
            continue
    return sizes


def summarize_streams(answers: Sequence[StreamedAnswer], stolen: float = 0.0) -> StreamStats:
    gaps = [
        later - earlier
        for answer in answers
        for earlier, later in zip(answer.token_times, answer.token_times[1:], strict=False)
    ]
    p50, p99, longest = (
        round(1000 * float(np.percentile(gaps or [0], q)), 1) for q in (50, 99, 100)
    )
    first = max((a.token_times[0] - a.started_at for a in answers if a.token_times), default=0.0)
    return StreamStats(
        streams=len(answers),
        wrong=sum(not answer.error and not answer.is_right for answer in answers),
        failed=sum(bool(answer.error) for answer in answers),
        gap_p50=p50,
        gap_p99=p99,
        gap_max=longest,
        first_token_max=round(1000 * first, 1),
        stolen=stolen,
        errors=tuple(sorted({answer.error[:200] for answer in answers if answer.error}))[:5],
    )


def run_all_attacks(
    attacks: Sequence[Attack], seconds: float, rest_seconds: float, tree: Path | None
) -> Iterator[AttackVerdict]:
    """Yield each attack's verdict as soon as it is known."""
    with ExitStack() as stack:
        place: SharedCluster | None = None
        for attack in attacks:
            if place is None:
                place = stack.enter_context(run_shared_cluster(tree))
                attack_from_subprocess(
                    [USUAL_REQUESTS], place.target(WARM_UP_SECONDS), WARM_UP_SECONDS
                )
                place.measure_streams(WARM_UP_SECONDS)
            verdict = run_attack(place, attack, seconds, rest_seconds)
            yield verdict
            if verdict.violations:
                place = None
                stack.pop_all().close()


def show(verdict: AttackVerdict) -> None:
    """Print an attack's verdict."""
    alone, beside = verdict.alone, verdict.during_attack
    print(f"{verdict.name}: {'; '.join(verdict.violations) or 'kept'}")
    print(f"  {verdict.finding}; the attacker's requests: {verdict.outcomes}")
    for what, figures in (("alone", alone), ("beside", beside)):
        print(
            f"  {what:7} gaps p50 {figures.gap_p50:7.1f} p99 {figures.gap_p99:7.1f}"
            f" max {figures.gap_max:7.1f} ms, first token at most {figures.first_token_max:7.1f}"
            f" ms, {figures.streams} streams, {figures.wrong} wrong, {figures.failed} failed,"
            f" {100 * figures.stolen:.1f} % of the processors stolen"
        )
    for error in beside.errors:
        print(f"  {error}")
    for name, before in verdict.memory_before.items():
        peak = verdict.memory_peak.get(name, 0.0)
        after = verdict.memory_after.get(name, 0.0)
        print(f"  {name:12} {before:7.1f} MiB before, {peak:7.1f} peak, {after:7.1f} after")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    if options.attack:
        psutil.Process().nice(NICENESS)
        print("begun", flush=True)
        print(json.dumps(run_attacks(options.attack, json.load(sys.stdin))))
        return 0
    attacks = [each for each in find_attacks() if not options.only or each.name in options.only]
    if options.list:
        for attack in attacks:
            print(f"{attack.name:24} {attack.finding}")
        return 0
    # Exit by exception, so that the cluster is stopped as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(describe(), flush=True)
    began, verdicts = SYSTEM_CLOCK(), []
    for verdict in run_all_attacks(attacks, options.seconds, options.rest, options.tree):
        verdicts.append(verdict)
        show(verdict)
    kept = not any(verdict.violations for verdict in verdicts)
    seconds = round(SYSTEM_CLOCK() - began)
    attack_figures = [asdict(verdict) for verdict in verdicts]
    print(
        json.dumps(
            {"ok": kept, "seconds": seconds, "machine": describe(), "attacks": attack_figures}
        )
    )
    return 0 if kept else 1


def _options(arguments: list[str]) -> argparse.Namespace:
    names = [attack.name for attack in find_attacks()]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of each attack")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds until the memory check")
    parser.add_argument("--only", nargs="+", default=[], choices=names)
    parser.add_argument("--tree", type=Path, help="source of another version to attack")
    parser.add_argument("--list", action="store_true", help="list the attacks and exit")
    parser.add_argument("--attack", nargs="+", default=[], help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
