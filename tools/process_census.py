"""Measures what a local cluster's processes occupy: memory, descriptors, Redis keys, disk."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import redis

from testkit.local_cluster import LocalCluster

MIB = 1024 * 1024


@dataclass(frozen=True)
class ProcessUsage:
    """The usage of one process. ``own_mib`` is its resident anonymous memory, ``shared_mib`` the
    shared memory that it has touched."""

    name: str
    role: str
    pid: int
    own_mib: float
    shared_mib: float
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Census:
    """The usage of a whole cluster. ``home_mib`` is the size of its files by folder."""

    processes: list[ProcessUsage] = field(default_factory=list)
    redis_keys: int = 0
    home_mib: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def take_census(cluster: LocalCluster) -> Census:
    """Measure all processes that are serving. A process that ends meanwhile is left out."""
    [state_path] = cluster.home.glob("clusters/*/state.json")
    state = json.loads(state_path.read_text())
    serving = [entry for entry in state["processes"] if entry["state"] == "serving"]
    named = [("supervisor", "supervisor", state["supervisor_pid"])]
    named += [(entry["id"], entry["role"], entry["pid"]) for entry in serving]
    usages = [process_usage(*each) for each in named]
    return Census(
        [usage for usage in usages if usage is not None],
        count_redis_keys(state["redis_url"]),
        _folder_sizes(cluster.home),
    )


def process_usage(name: str, role: str, pid: int) -> ProcessUsage | None:
    """Return None if there is no such process any more."""
    folder = Path(f"/proc/{pid}")
    try:
        lines = (folder / "status").read_text().splitlines()
        descriptors = sum(1 for _ in (folder / "fd").iterdir())
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "RssAnon" not in fields:  # it has ended, and its parent has not collected it yet
        return None
    own, shared = (int(fields[key].split()[0]) * 1024 / MIB for key in ("RssAnon", "RssShmem"))
    return ProcessUsage(name, role, pid, own, shared, descriptors, int(fields["Threads"]))


def count_redis_keys(url: str) -> int:
    """Return the number of keys in Redis, or -1 if it can't be asked."""
    try:
        with redis.Redis.from_url(url, socket_timeout=5) as client:
            return int(client.dbsize())
    except redis.RedisError:
        return -1


def _folder_sizes(home: Path) -> dict[str, float]:
    sizes = {}
    for folder in sorted(home.iterdir()):
        blocks = 0
        for path in folder.rglob("*"):
            try:
                blocks += path.lstat().st_blocks
            except OSError:  # it was deleted meanwhile
                continue
        sizes[folder.name] = blocks * 512 / MIB
    return sizes
