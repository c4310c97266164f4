"""The states of workers with the allowed transitions between them, and the roles of members."""

from enum import StrEnum


class WorkerState(StrEnum):
    JOINING = "joining"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


WORKER_TRANSITIONS: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.JOINING: frozenset({WorkerState.READY, WorkerState.DRAINING, WorkerState.GONE}),
    WorkerState.READY: frozenset({WorkerState.DRAINING, WorkerState.GONE}),
    # A worker that drained to change its role is ready again afterwards.
    WorkerState.DRAINING: frozenset({WorkerState.READY, WorkerState.GONE}),
    WorkerState.GONE: frozenset(),
}


class Role(StrEnum):
    ROUTER = "router"
    CONDUCTOR = "conductor"
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    """A worker that serves whole requests: it computes prompts and generates answers in the same
    steps, and transfers no KV."""
    KVSTORE = "kvstore"
    REDIS = "redis"
    MOCK = "mock"
    """A process of mock workers. Each of these workers is a separate member, with one of the
    roles in :data:`baton.core.worker_kinds.WORKER_KINDS`."""
