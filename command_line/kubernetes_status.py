"""``baton status`` for a cluster that runs in Kubernetes."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from baton.clock import SystemClock
from baton.config import Settings
from baton.errors import Unavailable
from baton.pools.kubernetes.open import OpenKubernetesCluster, open_kubernetes_cluster
from baton.reports.console import open_console
from command_line.kubernetes import print_note
from command_line.status import describe_settings_by_id

if TYPE_CHECKING:
    from baton.pools.base import PoolWorker
    from baton.pools.kubernetes.location import KubernetesLocation
    from baton.pools.kubernetes.report import PoolsReport


def status(settings: Settings, as_json: bool) -> None:
    """Print the pools and their pods, as reported by Kubernetes, and the changed settings that
    processes have not applied, as reported in the registry. For each part of this that can't be
    shown, a note says which part and why. Raises NotFound if there is no such cluster, Unauthorized
    if nothing may be read."""

    async def run() -> None:
        async with open_kubernetes_cluster(settings, SystemClock(), print_note) as cluster:
            if as_json:
                report, pending = await cluster.report(), await _pending_settings(cluster)
                print(json.dumps(_report_object(cluster.location, report, pending)))
                return
            print(cluster.location, flush=True)
            _show_report(await cluster.report())
            for line in describe_settings_by_id(await _pending_settings(cluster) or {}):
                open_console().print(line, highlight=False, markup=False)

    asyncio.run(run())


async def _pending_settings(cluster: OpenKubernetesCluster) -> dict[str, dict[str, Any]] | None:
    """Return the settings that each pod has not applied, by the pod's name; None if
    ``redis_url`` is not set or the registry can't be read."""
    try:
        pending = await cluster.pending_settings()
    except Unavailable as error:
        print_note(f"not shown: which settings wait for a restart: {error}")
        return None
    return None if pending is None else {pod: asdict(each) for pod, each in pending.items()}


def _show_report(report: "PoolsReport") -> None:
    sizes = [
        f"{name}={'?' if pool.replicas is None else pool.replicas}"
        for name, pool in report.pools.items()
    ]
    print(" ".join(sizes) or "the pools may not be read")
    open_console().print(_table([pod.as_worker() for pod in report.pods]))
    for refused in report.refused:
        hint = f"; {refused.hint}" if refused.hint else ""
        print_note(f"not shown, because RBAC does not allow it: {refused.permission}{hint}")
    for missing in report.missing:
        print_note(str(missing))


def _report_object(
    location: "KubernetesLocation",
    report: "PoolsReport",
    pending: Mapping[str, Mapping[str, Any]] | None,
) -> dict[str, Any]:
    """Return what ``--json`` prints. Scripts rely on its keys, so none may be renamed or removed.
    The first three keys are the same as for clusters of ``baton up``. The pid and the address of a
    process, which are printed there, are not known for pods: here they are 0 and empty."""
    workers = [pod.as_worker() for pod in report.pods]
    return {
        "ready": report.is_ready,
        "url": "",
        "processes": [_process_object(worker) for worker in workers],
        **asdict(location),
        "pools": {
            name: {"role": pool.role.value, "replicas": pool.replicas}
            for name, pool in report.pools.items()
        },
        "workers": [asdict(worker) for worker in workers],
        "missing": [str(missing) for missing in report.missing],
        "not_allowed": [refused.permission for refused in report.refused],
        "pending_settings": pending,
    }


def _process_object(worker: "PoolWorker") -> dict[str, Any]:
    return {
        "id": worker.id,
        "role": worker.role.value,
        "pid": 0,
        "state": worker.state,
        "address": "",
        "node": worker.node,
        "message": worker.message,
    }


def _table(workers: "list[PoolWorker]") -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("POD", "ROLE", "STATE", "NODE", "MESSAGE"):
        table.add_column(column, overflow="fold")
    for worker in workers:
        table.add_row(worker.id, worker.role.value, worker.state, worker.node, worker.message)
    return table
