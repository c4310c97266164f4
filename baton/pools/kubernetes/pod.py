"""A worker's pod, as much of it as pools look at."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.pools.base import PoolWorker

if TYPE_CHECKING:
    from kubernetes.client import V1ContainerStatus, V1Pod, V1PodStatus

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Of a ReplicaSet's pods that are equally ready, the one with the least goes first."""

MIN_DELETION_COST = -(2**31)
"""Of a pod that is to go first; also how one is known that was drained to go."""

LEAVES_ANNOTATION = "baton.dev/leaves-pool-of"
"""How large the pool was that a pod was chosen to leave: whether that was written already can be
seen by it."""


@dataclass(frozen=True, slots=True)
class Pod:
    """``leaving``: it is being deleted. ``phase`` is Kubernetes' own: Pending, Running, Succeeded,
    Failed, Unknown. ``created_seconds`` since 1970."""

    name: str
    uid: str
    role: Role
    pool: str
    phase: str
    ready: bool
    leaving: bool
    created_seconds: float
    deletion_cost: int = 0
    leaves_pool_of: int = 0
    restarts: int = 0
    node: str = ""
    message: str = ""

    @property
    def id(self) -> WorkerId:
        """Its worker's, in the registry. A name may be used again, a UID is not."""
        return WorkerId(f"{self.name}.{self.uid}")

    def is_called(self, name: str) -> bool:
        """By its name, or by its worker's id."""
        return name in (self.name, self.id)

    @property
    def active(self) -> bool:
        """It is one of those that its ReplicaSet counts."""
        return not self.leaving and self.phase not in ("Succeeded", "Failed")

    @property
    def marked(self) -> bool:
        return self.deletion_cost == MIN_DELETION_COST

    @property
    def ordinal(self) -> int:
        """Of a StatefulSet's pod; -1 where there is none."""
        number = self.name.rpartition("-")[2]
        return int(number) if number.isdecimal() else -1

    def as_worker(self) -> PoolWorker:
        """Who names a worker names its pod."""
        return PoolWorker(WorkerId(self.name), self.role, self._state, self.node, self.message)

    @property
    def _state(self) -> str:
        if self.leaving or (self.active and self.marked):
            return "draining"
        if self.phase in ("Succeeded", "Failed"):
            return "stopped" if self.phase == "Succeeded" else "failed"
        if self.phase == "Pending":
            return "starting" if self.node else "pending"
        if self.ready:
            return "serving"
        return "restarting" if self.restarts else "starting"


def pod_from(item: "V1Pod", role: Role, pool: str) -> Pod:
    metadata, status = item.metadata, item.status
    assert metadata is not None and status is not None and item.spec is not None
    created, notes = metadata.creation_timestamp, metadata.annotations or {}
    conditions = status.conditions or []
    return Pod(
        name=metadata.name or "",
        uid=metadata.uid or "",
        role=role,
        pool=pool,
        phase=status.phase or "Unknown",
        ready=any(each.type == "Ready" and each.status == "True" for each in conditions),
        leaving=metadata.deletion_timestamp is not None,
        created_seconds=created.timestamp() if created is not None else 0.0,
        deletion_cost=_number(notes.get(DELETION_COST)),
        leaves_pool_of=_number(notes.get(LEAVES_ANNOTATION)),
        restarts=sum(each.restart_count for each in status.container_statuses or []),
        node=item.spec.node_name or "",
        message=_why_it_waits(status),
    )


def _number(text: str | None) -> int:
    """What is no number counts as 0, for a ReplicaSet as well."""
    try:
        return int(text or 0)
    except ValueError:
        return 0


def _why_it_waits(status: "V1PodStatus") -> str:
    """Unschedulable, an image that can't be pulled, a secret that is missing; of a container that
    keeps crashing, its last words."""
    for container in [*(status.init_container_statuses or []), *(status.container_statuses or [])]:
        waiting = container.state.waiting if container.state is not None else None
        if waiting is not None:
            told = _last_words(container) or waiting.message
            return ": ".join(part for part in (waiting.reason, told) if part)
    for condition in status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return condition.message or condition.reason or ""
    return ""


def _last_words(container: "V1ContainerStatus") -> str:
    """What its last life said in the end; Kubernetes itself only says how long it waits now."""
    ended = container.last_state.terminated if container.last_state is not None else None
    if ended is None:
        return ""
    return (ended.message or "").strip() or f"exit code {ended.exit_code}"
