"""A snapshot of a worker's blocks and requests, taken between two steps."""

from baton.core.ids import WorkerId
from baton.core.kv_transfer import WorkerInspection
from baton.core.states import WorkerState
from baton.engine.engine import Engine


def inspect_engine(
    engine: Engine, worker: WorkerId, state: WorkerState, num_jobs: int, *, drained: bool
) -> WorkerInspection:
    """Inspect the engine and check its integrity, which visits all blocks. Call this in the
    engine's thread."""
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
        violation=_integrity_error(engine),
        description=engine.describe(),
        drained=drained,
    )


def _integrity_error(engine: Engine) -> str:
    try:
        engine.check_integrity()
    except AssertionError as error:
        return str(error) or "integrity violated"
    return ""
