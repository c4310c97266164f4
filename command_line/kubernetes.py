"""``baton scale``, ``baton drain`` and ``baton status`` for a cluster that runs in Kubernetes."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from baton.clock import SystemClock
from baton.config import Settings
from baton.core.ids import WorkerId
from baton.errors import Invalid
from baton.pools.base import PoolWorker
from baton.pools.kubernetes.open import open_kubernetes_pools

if TYPE_CHECKING:
    from baton.pools.kubernetes.api import KubernetesWorkload


def scale(settings: Settings, sizes: list[str]) -> None:
    """Resize pools. ``sizes`` are like decode-big=2. Raises the errors of
    :class:`KubernetesPools`."""
    wanted = parse_named_pool_sizes(sizes)

    async def run() -> None:
        async with open_kubernetes_pools(settings, SystemClock(), _print_note) as pools:
            await pools.resize(wanted)
            print(_format_sizes(await pools.pools()))

    asyncio.run(run())


def drain(settings: Settings, worker: str) -> None:
    """Drain and remove a worker. ``worker`` is its pod's name, or its id."""

    async def run() -> None:
        async with open_kubernetes_pools(settings, SystemClock(), _print_note) as pools:
            await pools.remove(WorkerId(worker))
            print(f"{worker} is draining, and will then be removed")

    asyncio.run(run())


def status(settings: Settings, as_json: bool) -> None:
    """Print the pools and their pods, as reported by Kubernetes."""

    async def run() -> None:
        async with open_kubernetes_pools(settings, SystemClock(), _print_note) as opened:
            pools, workers = await opened.pools(), await opened.workers()
        if as_json:
            report = {
                "pools": {
                    name: {"role": pool.role.value, "replicas": pool.replicas}
                    for name, pool in pools.items()
                },
                "workers": [asdict(worker) for worker in workers],
            }
            print(json.dumps(report))
        else:
            print(_format_sizes(pools))
            Console().print(_table(workers))

    asyncio.run(run())


def parse_named_pool_sizes(texts: list[str]) -> dict[str, int]:
    """Parse texts like ``decode=3`` into sizes by pool name. Raises Invalid."""
    wanted: dict[str, int] = {}
    for text in texts:
        name, _, count = text.partition("=")
        if not name or not count.isdecimal():
            raise Invalid(f"scale takes POOL=N, as in decode=3, not {text}")
        wanted[name] = int(count)
    return wanted


def _format_sizes(pools: "Mapping[str, KubernetesWorkload]") -> str:
    return " ".join(f"{name}={pool.replicas}" for name, pool in pools.items())


def _table(workers: Sequence[PoolWorker]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("POD", "ROLE", "STATE", "NODE", "MESSAGE"):
        table.add_column(column, overflow="fold")
    for worker in workers:
        table.add_row(worker.id, worker.role.value, worker.state, worker.node, worker.message)
    return table


def _print_note(note: str) -> None:
    print(f"baton: {note}", file=sys.stderr)
