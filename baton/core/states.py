"""States of things that live long enough to have some: one enum, one table each."""

from enum import StrEnum


class WorkerState(StrEnum):
    JOINING = "joining"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


WORKER_TRANSITIONS: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.JOINING: frozenset({WorkerState.READY, WorkerState.DRAINING, WorkerState.GONE}),
    WorkerState.READY: frozenset({WorkerState.DRAINING, WorkerState.GONE}),
    # Who drained to take another role is ready again.
    WorkerState.DRAINING: frozenset({WorkerState.READY, WorkerState.GONE}),
    WorkerState.GONE: frozenset(),
}


class Role(StrEnum):
    ROUTER = "router"
    CONDUCTOR = "conductor"
    PREFILL = "prefill"
    DECODE = "decode"
    KVSTORE = "kvstore"
    REDIS = "redis"
    MOCK = "mock"
    """A process of mock workers; each of them is a member in a worker's role."""
