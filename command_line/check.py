"""``baton check`` runs the integrity check of every worker and store node."""

import asyncio
import json
from dataclasses import asdict
from typing import Any

from baton.config import baton_home
from baton.core.states import Role
from baton.core.worker_kinds import WORKER_KINDS
from baton.errors import BatonError, Unavailable
from orchestrator.cluster_state import ClusterFolder, ClusterState, ProcessState


def show_check(name: str, as_json: bool) -> None:
    """Run the integrity check of each worker and store node, and print the results. Raises
    Unavailable if one of them doesn't respond, and BatonError if a check fails, in both cases after
    all were checked."""
    report = asyncio.run(_check_members(ClusterFolder(baton_home(), name).read_running()))
    entries = [*report["workers"], *report["stores"]]
    if as_json:
        print(json.dumps(report))
    else:
        for entry in entries:
            result = f"no answer: {entry['error']}" if entry["error"] else entry["violation"]
            print(f"{entry['worker_id']:12} {result or 'sound'}")
    if failed := [entry for entry in entries if entry.get("violation")]:
        raise BatonError(f"{_members(failed)} failed the integrity check")
    if silent := [entry for entry in entries if entry["error"]]:
        raise Unavailable(f"{_members(silent)} did not answer")


def _members(entries: list[dict[str, Any]]) -> str:
    return ", ".join(entry["worker_id"] for entry in entries)


async def _check_members(state: ClusterState) -> dict[str, Any]:
    """Return what ``baton check --json`` prints: for each member its id and either the error, if it
    did not answer, or the fields of its :class:`WorkerInspection` or :class:`StoreStats`, in which
    ``violation`` is what the integrity check found."""
    report: dict[str, Any] = {"workers": [], "stores": []}
    for process in state.processes:
        if process.role in WORKER_KINDS:
            report["workers"].append(await _check_member(process, state))
        elif process.role == Role.KVSTORE:
            report["stores"].append(await _check_member(process, state))
    return report


async def _check_member(process: ProcessState, state: ClusterState) -> dict[str, Any]:
    from baton.rpc.kvstore_client import fetch_store_stats
    from baton.rpc.worker_client import inspect_worker

    fetch = fetch_store_stats if process.role == Role.KVSTORE else inspect_worker
    entry: dict[str, Any] = {"worker_id": process.id, "error": ""}
    if not process.address:
        return entry | {"error": f"it is {process.state}"}
    try:
        return entry | asdict(await fetch(process.address, state.credentials))
    except BatonError as error:  # a frozen process exceeds the deadline
        return entry | {"error": str(error)}
