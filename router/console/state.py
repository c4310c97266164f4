"""The state that the console shows: facts about the cluster, and tables of rows by id, all of them
plain JSON values."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice

from baton.core.ids import WorkerId
from baton.core.member import Member
from baton.core.states import Role
from baton.placement.hash_ring import ring_shares
from router.console.cluster_reader import PoolsReader, RemoteReader
from router.console.recent_answers import find_recent_answers, summarize, tenant_sums
from router.console.request_rows import Phase, ended_rows, phase_of, request_rows
from router.console.tenant_rows import tenant_rows
from router.console.worker_rows import Row, Rows, pool_rows, worker_rows, workers_among
from router.generation.record import GenerationRecord
from router.limits import (
    MAX_FINISHED_RECORDS,
    MAX_RING_WORKERS,
    MAX_SHOWN_MODELS,
    MAX_SHOWN_POOL_WORKERS,
    MAX_SHOWN_REQUESTS,
    MAX_SHOWN_TENANTS,
    MAX_SHOWN_WORKERS,
)
from router.serving.context import RouterContext


@dataclass(frozen=True, slots=True)
class ConsoleState:
    """What the console shows at one time. ``cluster`` are single facts; ``tables`` contains the
    rows of each table, by the table's name and the row's id."""

    cluster: Row
    tables: Mapping[str, Rows] = field(default_factory=dict)


class StateBuilder:
    """Builds the state from the router's own view of the cluster and its records of requests. None
    of that costs a request anything. ``pools_reader`` is None if no supervisor started this
    router."""

    def __init__(
        self,
        context: RouterContext,
        remote_reader: RemoteReader,
        pools_reader: PoolsReader | None = None,
    ) -> None:
        self._context = context
        self._remote = remote_reader
        self._pools = pools_reader
        self._version = version("baton")

    async def build(self) -> ConsoleState:
        """Read what the router does not know itself, and build the state."""
        if self._pools is not None:
            await self._pools.refresh()
        await self._remote.refresh()
        return self._build()

    def _build(self) -> ConsoleState:
        context = self._context
        workers = workers_among(context.cluster.members)
        history, slo = context.telemetry.history, context.telemetry.metrics.slo
        now = context.clock.monotonic()
        finished = list(history.finished)
        recent = find_recent_answers(finished, MAX_FINISHED_RECORDS, now)
        inflight = list(history.inflight.values())
        sums = tenant_sums(recent, inflight, slo)
        refusals = context.telemetry.metrics.tenants.refusals()
        directory = context.tenants.authenticator.directory
        avoided = frozenset[WorkerId]().union(
            *(model.generation_context.avoided_workers() for model in context.models.all)
        )
        supervised = self._pools.pools if self._pools is not None else None
        tables = {
            "pools": pool_rows(workers, supervised["sizes"] if supervised else None),
            "workers": worker_rows(workers, avoided, context.cluster.incompatible_ids),
            "supervised": _supervised_rows(supervised),
            "stores": self._remote.stores,
            "requests": request_rows(inflight),
            "ended": ended_rows(finished),
            "tenants": tenant_rows(sums, refusals, directory),
            "rings": _ring_rows(context.cluster.ready_workers(lambda kind: kind.computes_prompts)),
        }
        cluster = {
            **self._describe_router(now),
            **_describe_inflight(inflight),
            "total_tokens": history.finished_tokens + sum(each.num_tokens for each in inflight),
            "recent": summarize(recent, slo),
            "num_workers": len(workers),
            "num_tenants": len(sums.keys() | directory.tenants.keys()),
            "limits": {
                "workers": MAX_SHOWN_WORKERS,
                "requests": MAX_SHOWN_REQUESTS,
                "tenants": MAX_SHOWN_TENANTS,
            },
        }
        return ConsoleState(cluster, tables)

    def _describe_router(self, now: float) -> Row:
        context = self._context
        cluster, directory = context.cluster, context.models
        names = [model.name for model in directory.all]
        adapters = directory.adapters.list() if directory.adapters is not None else ()
        counts = {role.value: len(cluster.ready_members(role)) for role in Role}
        return {
            "now": round(now, 3),
            "version": self._version,
            "models": [*names, *(adapter.ref.name for adapter in adapters)][:MAX_SHOWN_MODELS],
            "router": context.ids.instance_id,
            "is_draining": context.draining,
            "is_ready": any(model.workers.is_ready for model in context.models.all),
            "num_ready": counts,
            "registry_age_seconds": _whole_seconds(now - cluster.last_refreshed_at),
            "plans": self._remote.plans,
            "can_change_pools": self._pools is not None,
            "pools_error": self._pools.error if self._pools is not None else "",
            "needs_api_key": context.tenants.authenticator.directory.needs_keys,
        }


def _whole_seconds(seconds: float) -> int | None:
    return int(max(seconds, 0.0)) if math.isfinite(seconds) else None


def _describe_inflight(inflight: Sequence[GenerationRecord]) -> Row:
    """Count the answers in progress by phase: all of them, also those that are not shown."""
    phases = [phase_of(record) for record in inflight]
    return {
        "num_inflight": len(inflight),
        "phases": {phase.value: phases.count(phase) for phase in Phase},
    }


def _supervised_rows(pools: Row | None) -> Rows:
    """Return the supervisor's list of workers as rows, by id. It contains workers that start or
    stop, which may not be members of the cluster yet or any more."""
    if pools is None:
        return {}
    return {str(each["id"]): each for each in islice(pools["workers"], MAX_SHOWN_POOL_WORKERS)}


def _ring_rows(workers: Sequence[Member]) -> Rows:
    """Return the shares of the hash ring that each model's workers that compute prompts have.
    Routers use the ring while no conductor answers. ``shares`` is None for a ring that is too
    large."""
    by_model: dict[str, list[str]] = {}
    for worker in workers:
        by_model.setdefault(worker.model, []).append(worker.id)
    return {model: _ring_row(model, sorted(ids)) for model, ids in by_model.items()}


def _ring_row(model: str, ids: list[str]) -> Row:
    row: Row = {"model": model, "num_workers": len(ids), "shares": None}
    if len(ids) <= MAX_RING_WORKERS:
        shares = ring_shares(tuple(ids)).items()
        row["shares"] = {worker: round(share, 4) for worker, share in shares}
    return row
