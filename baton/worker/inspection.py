"""A snapshot of a worker's blocks and requests, taken between two steps."""

from collections.abc import Callable
from dataclasses import dataclass

from baton.core.ids import WorkerId
from baton.core.kv_transfer import WorkerInspection
from baton.core.states import WorkerState
from baton.engine.engine import Engine
from baton.worker.staging_area import StagingArea


def inspect_engine(
    engine: Engine,
    worker: WorkerId,
    state: WorkerState,
    num_jobs: int,
    *,
    drained: bool,
    staging: "StagingInspection",
) -> WorkerInspection:
    """Inspect the engine and check its integrity, which visits all blocks. Call this in the
    engine's thread. ``staging`` is the state of the worker's staging area."""
    stats = engine.stats()
    return WorkerInspection(
        worker_id=worker,
        state=state.value,
        num_blocks=stats.pool.num_blocks,
        free_blocks=stats.pool.free,
        filling_blocks=stats.pool.filling,
        idle_blocks=stats.pool.idle,
        referenced_blocks=stats.pool.referenced,
        quarantined_blocks=stats.pool.quarantined,
        running_requests=stats.running,
        waiting_requests=stats.waiting,
        total_requests=num_jobs,
        violation=_integrity_error(engine.check_integrity) or staging.violation,
        description="\n".join(filter(None, [engine.describe(), staging.description])),
        drained=drained,
    )


@dataclass(frozen=True, slots=True)
class StagingInspection:
    """The state of a staging area; both texts are empty if there is none. ``violation`` is what its
    integrity check found."""

    violation: str = ""
    description: str = ""

    @classmethod
    def of(cls, area: StagingArea | None) -> "StagingInspection":
        """Inspect ``area``. Call this in the event loop."""
        if area is None:
            return cls()
        return cls(_integrity_error(area.check_integrity), area.describe())


def _integrity_error(check: Callable[[], None]) -> str:
    try:
        check()
    except AssertionError as error:
        return str(error) or "integrity violated"
    return ""
