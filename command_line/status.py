"""The commands that show a running cluster: status, top, logs and explain."""

import asyncio
import json
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote

from rich.live import Live
from rich.table import Table

from baton.clock import SystemClock
from baton.config import baton_home
from baton.core.member import Member
from baton.core.pool_name import pool_name
from baton.core.pool_plan import PoolPlan
from baton.core.states import Role
from baton.core.worker_kinds import WORKER_KINDS
from baton.errors import BatonError, DeadlineExceeded, NotFound, Unavailable
from baton.network.pinned_tls import pinned_tls_context
from baton.registry.member_list import MemberList
from baton.reports.console import open_console
from command_line.explain import render_explanation
from orchestrator.cluster_state import ClusterFolder, ClusterState, ProcessState
from orchestrator.process_log import ProcessLog

REFRESH_SECONDS = 1.0
POLL_SECONDS = 0.2
PLAN_TIMEOUT_SECONDS = 2.0
"""The timeout for a conductor's pool plan."""


def wait_until_ready(name: str, timeout_seconds: float) -> None:
    """Wait until every process of the cluster serves. Raises NotFound if the cluster isn't running,
    Unavailable if a process has failed for good, and DeadlineExceeded after ``timeout_seconds``,
    with the state of each process that doesn't serve."""
    folder = ClusterFolder(baton_home(), name)
    clock = SystemClock()
    deadline = clock.monotonic() + timeout_seconds
    with asyncio.Runner() as runner:
        while not (state := folder.read_running()).ready:
            _check_not_failed(state)
            if clock.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"the cluster is not ready after {timeout_seconds:g} s: "
                    f"{_unready_processes(state)}"
                )
            runner.run(clock.sleep(POLL_SECONDS))
    _check_not_failed(state)


def _check_not_failed(state: ClusterState) -> None:
    if failed := [each for each in state.processes if each.state == "failed"]:
        raise Unavailable(", ".join(f"{each.id} has failed: {each.message}" for each in failed))


def _unready_processes(state: ClusterState) -> str:
    unready = [each for each in state.processes if each.state != "serving"]
    waits = state.obstacle or "no router is ready"
    return ", ".join(f"{each.id} is {each.state}" for each in unready) or waits


def show_status(name: str, as_json: bool) -> None:
    """Print the cluster's state. If the cluster isn't running, raise NotFound, or with ``as_json``
    print that it is not ready."""
    try:
        state: ClusterState | None = ClusterFolder(baton_home(), name).read_running()
    except NotFound:
        if not as_json:
            raise
        state = None
    if as_json:
        redis = asyncio.run(fetch_redis_problem(state)) if state else ""
        print(json.dumps(status_object(state, redis)))
    elif state is not None:
        print(f"{state.url}  {_readiness(state)}")
        if problem := asyncio.run(fetch_redis_problem(state)):
            print(f"Redis takes no announcements, so the last known members are used: {problem}")
        members = asyncio.run(fetch_members(state))
        open_console().print(_table(state, members))
        plans = asyncio.run(_pool_plan_lines(state, MemberList(members.values()).models))
        adapters = adapter_lines(members)
        settings, lost = settings_lines(state), lost_write_lines(state)
        for line in [*engine_lines(members), *adapters, *plans, *settings, *lost]:
            open_console().print(line, highlight=False, markup=False)


def _readiness(state: ClusterState) -> str:
    obstacle = f": {state.obstacle}" if state.obstacle else ""
    return "ready" if state.ready else f"not ready{obstacle}"


def status_object(state: ClusterState | None, redis: str = "") -> dict[str, Any]:
    """Return what ``baton status --json`` prints; scripts rely on its keys. ``redis`` says why
    Redis takes no announcements, or is empty."""
    if state is None:
        return {
            "ready": False,
            "url": "",
            "redis": redis,
            "models": {},
            "settings": {},
            "lost_writes": {},
            "processes": [],
        }
    return {
        "ready": state.ready,
        "url": state.url,
        "redis": redis,
        "models": state.models,
        "settings": state.settings,
        "lost_writes": state.lost_writes,
        "processes": [_process_object(process) for process in state.processes],
    }


def _process_object(process: ProcessState) -> dict[str, Any]:
    """Return a process's fields without the sockets, which ``baton doctor --sockets`` shows."""
    fields = asdict(process)
    del fields["sockets"]
    return fields


def engine_lines(members: dict[str, Member]) -> list[str]:
    """Describe the workers' engines: one line per engine, with the ids of its workers."""
    by_engine: dict[str, list[str]] = {}
    for member in members.values():
        if member.computed_by:
            by_engine.setdefault(member.computed_by, []).append(member.id)
    return [f"{', '.join(sorted(ids))}: {engine}" for engine, ids in sorted(by_engine.items())]


def adapter_lines(members: dict[str, Member]) -> list[str]:
    """Describe the LoRA adapters: one line per adapter and state, with the ids of its workers."""
    by_state: dict[str, list[str]] = {}
    for member in members.values():
        for adapter in member.adapters:
            state = f"not loaded: {adapter.error}" if adapter.error else "loaded"
            by_state.setdefault(f"adapter {adapter.name}: {state}", []).append(member.id)
    return [f"{state} ({', '.join(sorted(ids))})" for state, ids in sorted(by_state.items())]


def settings_lines(state: ClusterState) -> list[str]:
    """Describe how the settings of the processes, and of ``baton up`` itself, differ from the
    settings with which they were started."""
    by_id = {process.id: process.settings for process in state.processes}
    return describe_settings_by_id(by_id | {"baton up": state.settings})


def lost_write_lines(state: ClusterState) -> list[str]:
    """Describe what ``baton up`` could not write."""
    lost = ", ".join(f"{file} {writes} times" for file, writes in state.lost_writes.items())
    return [f"baton up could not write: {lost}"] if lost else []


def describe_settings_by_id(statuses: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Describe how the settings of processes differ from the settings with which they were started.
    There is one line per set of differences, which names all processes that have it, and no line
    for processes without differences. ``statuses`` maps a process's id to its status, in the form
    of :func:`describe_settings`."""
    by_text: dict[str, list[str]] = {}
    for process_id, status in statuses.items():
        by_text.setdefault(describe_settings(status), []).append(process_id)
    return [f"settings of {', '.join(ids)}: {text}" for text, ids in by_text.items() if text]


def describe_settings(status: Mapping[str, Any]) -> str:
    """Return the fields of a :class:`baton.serve.settings_watcher.SettingsStatus` in one line;
    empty if nothing differs."""
    parts = [f"{name} is now {value}" for name, value in status.get("changed", {}).items()]
    if names := status.get("restart_needed"):
        parts.append(f"restart needed: {', '.join(names)}")
    if error := status.get("rejected"):
        parts.append(f"config file rejected: {error}")
    return "; ".join(parts)


def show_top(name: str) -> None:
    folder = ClusterFolder(baton_home(), name)
    clock = SystemClock()
    with asyncio.Runner() as runner, Live(console=open_console(), screen=True) as live:
        try:
            while True:
                state = folder.read_running()
                live.update(_table(state, runner.run(fetch_members(state))), refresh=True)
                runner.run(clock.sleep(REFRESH_SECONDS))
        except KeyboardInterrupt:
            return


def show_log(name: str, process: str) -> None:
    folder = ClusterFolder(baton_home(), name)
    path = folder.logs / f"{process}.log"
    if not path.is_file():
        names = sorted(entry.stem for entry in folder.logs.glob("*.log"))
        raise NotFound(
            f"process {process!r} has no log; there are logs of: {', '.join(names) or 'none'}"
        )
    ProcessLog(path).write_to(sys.stdout)


@dataclass(frozen=True, slots=True)
class RouterAdminAddress:
    """A router's URL and admin key. ``certificate`` is the path of a certificate to trust if the
    router's certificate is not signed by a known authority."""

    url: str
    admin_key: str | None
    certificate: str | None = None

    @classmethod
    def of_cluster(cls, name: str) -> "RouterAdminAddress":
        """Return the address of a local cluster's router. Raises NotFound if the cluster isn't
        running."""
        state = ClusterFolder(baton_home(), name).read_running()
        return cls(state.url, state.admin_key, state.tls_certificate)


def show_explanation(address: RouterAdminAddress, request_id: str, as_json: bool) -> None:
    import httpx

    headers = {"authorization": f"Bearer {address.admin_key}"} if address.admin_key else {}
    url = f"{address.url.rstrip('/')}/admin/requests/{quote(request_id, safe='')}"
    try:
        tls = pinned_tls_context(address.certificate) or True
        response = httpx.get(url, headers=headers, timeout=10, trust_env=False, verify=tls)
    except httpx.HTTPError as error:
        raise Unavailable(f"the router does not answer: {error}") from error
    if response.status_code == 404:
        raise NotFound(f"the router does not remember request {request_id!r}")
    if response.status_code != 200:
        raise Unavailable(f"the router returned {response.status_code}: {response.text}")
    explanation = response.json()
    if as_json:
        print(json.dumps(explanation))
    else:
        open_console().print(
            *render_explanation(explanation), sep="\n", highlight=False, markup=False
        )


async def _pool_plan_lines(state: ClusterState, models: Collection[str]) -> list[str]:
    """Describe the plan of each conductor for the pools of each model, if it has one. Return an
    empty list if a conductor does not respond."""
    from baton.rpc.conductor_client import fetch_pool_plan

    addresses = [each.address for each in state.processes if each.role == Role.CONDUCTOR]
    try:
        plans = [
            (model, await fetch_pool_plan(a, state.credentials, PLAN_TIMEOUT_SECONDS, model))
            for a in addresses
            for model in sorted(models)
            if a
        ]
    except BatonError:
        return []
    return [
        f"planned: {' '.join(_planned_sizes(model, plan, models))} ({plan.reason})"
        for model, plan in plans
        if plan is not None
    ]


def _planned_sizes(model: str, plan: PoolPlan, models: Iterable[str]) -> list[str]:
    return [f"{pool_name(model, role, models)}={size}" for role, size in plan.sizes.items()]


async def fetch_redis_problem(state: ClusterState) -> str:
    """Return why Redis can't be reached or refuses what members write; empty if it takes it."""
    from baton.registry.redis import RedisRegistry

    registry = RedisRegistry(state.redis_url, state.cluster, state.cluster_secret)
    try:
        await registry.ping()
    except Unavailable as error:
        return str(error)
    finally:
        await registry.close()
    return ""


async def fetch_members(state: ClusterState) -> dict[str, Member]:
    from baton.registry.redis import RedisRegistry

    registry = RedisRegistry(state.redis_url, state.cluster, state.cluster_secret)
    try:
        return {member.id: member for member in await registry.members()}
    except Unavailable:
        return {}
    finally:
        await registry.close()


def _table(state: ClusterState, members: dict[str, Member]) -> Table:
    table = Table(box=None)
    for column in ("id", "role", "pid", "state", "address", "restarts", "running", "waiting"):
        table.add_column(column, no_wrap=True)
    table.add_column("free blocks", no_wrap=True)
    for process in state.processes:
        member = members.get(process.id)
        load = member.load if member and process.role in WORKER_KINDS else None
        cells = [str(load.running), str(load.waiting), str(load.free_blocks)] if load else [""] * 3
        table.add_row(
            process.id,
            process.role,
            str(process.pid),
            process.state,
            process.address,
            str(process.restarts or ""),
            *cells,
        )
    return table
