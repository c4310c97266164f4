"""The console's rows of workers, and of the pools that they form."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from baton.core.ids import WorkerId, display_name
from baton.core.member import Member
from baton.core.states import WorkerState
from baton.core.worker_kinds import WORKER_KINDS
from router.limits import MAX_SHOWN_CHARACTERS, MAX_SHOWN_WORKERS

Row = dict[str, Any]
Rows = dict[str, Row]


def workers_among(members: Sequence[Member]) -> list[Member]:
    return [member for member in members if member.role in WORKER_KINDS]


def worker_rows(
    workers: Sequence[Member], avoided: Collection[WorkerId], incompatible: Collection[WorkerId]
) -> Rows:
    """Return the rows of the first workers (MAX_SHOWN_WORKERS), by id. ``avoided`` are workers that
    the router gives no requests because they failed; ``incompatible`` are workers that it never
    uses, because their logits may differ from those of the others."""
    return {
        worker.id: _worker_row(worker, _problem(worker.id, avoided, incompatible))
        for worker in workers[:MAX_SHOWN_WORKERS]
    }


def _problem(
    worker: WorkerId, avoided: Collection[WorkerId], incompatible: Collection[WorkerId]
) -> str:
    if worker in incompatible:
        return "its numerics differ from the other workers', so it is not used"
    return "it failed recently, so it is avoided" if worker in avoided else ""


def _worker_row(worker: Member, problem: str) -> Row:
    load = worker.load
    return {
        "id": worker.id,
        "name": display_name(worker.id),
        "pool": pool_key(worker),
        "role": worker.role.value,
        "model": worker.model,
        "state": worker.state.value,
        "problem": problem,
        "host": worker.host,
        "address": worker.address,
        "device": worker.device,
        "engine": worker.computed_by[:MAX_SHOWN_CHARACTERS],
        "transports": list(worker.transports),
        "running": load.running,
        "waiting": load.waiting,
        "queued_tokens": load.queued_tokens,
        "decode_requests": load.decode_requests,
        "used_blocks": max(load.num_blocks - load.free_blocks, 0),
        "num_blocks": load.num_blocks,
        "block_bytes": worker.block_tokens * worker.kv_bytes_per_token,
    }


def pool_key(worker: Member) -> str:
    """Return the key of the worker's pool: workers of one model and one role form a pool."""
    return f"{worker.model}|{worker.role.value}"


def pool_rows(workers: Sequence[Member], desired_sizes: Mapping[str, int] | None) -> Rows:
    """Return one row per pool, with the sums of its workers' loads. ``desired_sizes`` are the sizes
    that were requested last, by the pools' names (:mod:`baton.core.pool_name`); None if they are
    not known. A size that is named by its role alone belongs to a pool only if no other pool has
    that role."""
    rows: Rows = {}
    for worker in workers:
        row = rows.setdefault(pool_key(worker), _empty_pool(worker))
        row["num_workers"] += 1
        row["states"][worker.state.value] += 1
        for name in ("running", "waiting", "queued_tokens", "decode_requests", "num_blocks"):
            row[name] += getattr(worker.load, name)
        row["used_blocks"] += max(worker.load.num_blocks - worker.load.free_blocks, 0)
    roles = [row["role"] for row in rows.values()]
    for row in rows.values():
        names = [f"{row['model']}/{row['role']}"]
        names += [row["role"]] if roles.count(row["role"]) == 1 else []
        for name in names:
            if desired_sizes is not None and name in desired_sizes:
                row["name"], row["desired"] = name, desired_sizes[name]
                break
    return rows


def _empty_pool(worker: Member) -> Row:
    states = (WorkerState.READY, WorkerState.JOINING, WorkerState.DRAINING, WorkerState.GONE)
    sums = ("running", "waiting", "queued_tokens", "decode_requests", "num_blocks", "used_blocks")
    return {
        "model": worker.model,
        "role": worker.role.value,
        "name": worker.role.value,
        "computes_prompts": WORKER_KINDS[worker.role].computes_prompts,
        "writes_answers": WORKER_KINDS[worker.role].writes_answers,
        "num_workers": 0,
        "desired": None,
        "states": dict.fromkeys((state.value for state in states), 0),
        **dict.fromkeys(sums, 0),
    }
