"""A worker's pod, with the fields that pools need."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.pools.base import PoolWorker

if TYPE_CHECKING:
    from kubernetes.client import V1ContainerStatus, V1Pod, V1PodStatus

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Among equally ready pods of a ReplicaSet, the one with the lowest cost is deleted first."""

MIN_DELETION_COST = -(2**31)
"""Cost of a pod that is to be deleted first. It also marks pods that were drained for removal."""

LEAVES_ANNOTATION = "baton.dev/leaves-pool-of"
"""Annotation with the pool's size when this pod was chosen for removal. If the pool is smaller now,
its new size has already been written."""


DEFAULT_GRACE_SECONDS = 30.0
"""Kubernetes' own default of ``terminationGracePeriodSeconds``."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A worker's pod. ``is_deleting`` says whether the pod is being deleted. ``phase`` is
    Kubernetes' own: Pending, Running, Succeeded, Failed, Unknown. ``created_seconds`` is seconds
    since 1970. ``grace_seconds`` is how long the pod may drain once its deletion has begun."""

    name: str
    uid: str
    role: Role
    pool: str
    phase: str
    is_ready: bool
    is_deleting: bool
    created_seconds: float
    deletion_cost: int = 0
    leaves_pool_of: int = 0
    num_restarts: int = 0
    node: str = ""
    message: str = ""
    grace_seconds: float = DEFAULT_GRACE_SECONDS

    @property
    def id(self) -> WorkerId:
        """The worker's id in the registry. It contains the UID, since names may be reused."""
        return WorkerId(f"{self.name}.{self.uid}")

    def has_name_or_id(self, name: str) -> bool:
        """Whether ``name`` is the pod's name, or its worker's id."""
        return name in (self.name, self.id)

    @property
    def is_active(self) -> bool:
        """Whether the pod's ReplicaSet counts it as a replica."""
        return not self.is_deleting and self.phase not in ("Succeeded", "Failed")

    @property
    def is_marked(self) -> bool:
        return self.deletion_cost == MIN_DELETION_COST

    @property
    def ordinal(self) -> int:
        """The ordinal of a StatefulSet's pod; -1 for other pods."""
        number = self.name.rpartition("-")[2]
        return int(number) if number.isdecimal() else -1

    def as_worker(self) -> PoolWorker:
        """Return the worker as listed in the pools; its id there is the pod's name."""
        return PoolWorker(WorkerId(self.name), self.role, self._state, self.node, self.message)

    @property
    def _state(self) -> str:
        if self.is_deleting or (self.is_active and self.is_marked):
            return "draining"
        if self.phase in ("Succeeded", "Failed"):
            return "stopped" if self.phase == "Succeeded" else "failed"
        if self.phase == "Pending":
            return "starting" if self.node else "pending"
        if self.is_ready:
            return "serving"
        return "restarting" if self.num_restarts else "starting"


def pod_from(item: "V1Pod", role: Role, pool: str) -> Pod:
    metadata, status = item.metadata, item.status
    assert metadata is not None and status is not None and item.spec is not None
    created, annotations = metadata.creation_timestamp, metadata.annotations or {}
    conditions = status.conditions or []
    return Pod(
        name=metadata.name or "",
        uid=metadata.uid or "",
        role=role,
        pool=pool,
        phase=status.phase or "Unknown",
        is_ready=any(each.type == "Ready" and each.status == "True" for each in conditions),
        is_deleting=metadata.deletion_timestamp is not None,
        created_seconds=created.timestamp() if created is not None else 0.0,
        deletion_cost=_number(annotations.get(DELETION_COST)),
        leaves_pool_of=_number(annotations.get(LEAVES_ANNOTATION)),
        num_restarts=sum(each.restart_count for each in status.container_statuses or []),
        node=item.spec.node_name or "",
        message=_waiting_reason(status),
        grace_seconds=float(
            DEFAULT_GRACE_SECONDS
            if item.spec.termination_grace_period_seconds is None
            else item.spec.termination_grace_period_seconds
        ),
    )


def _number(text: str | None) -> int:
    """Parse an annotation. Malformed numbers count as 0, as they do for a ReplicaSet."""
    try:
        return int(text or 0)
    except ValueError:
        return 0


def _waiting_reason(status: "V1PodStatus") -> str:
    """Return why the pod does not run: for example, it is unschedulable, an image can't be pulled,
    a secret is missing, or a container keeps crashing (with its termination message)."""
    for container in [*(status.init_container_statuses or []), *(status.container_statuses or [])]:
        waiting = container.state.waiting if container.state is not None else None
        if waiting is not None:
            message = _last_termination(container) or waiting.message
            return ": ".join(part for part in (waiting.reason, message) if part)
    for condition in status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return condition.message or condition.reason or ""
    return ""


def _last_termination(container: "V1ContainerStatus") -> str:
    """Return the message or exit code with which the container last terminated; empty if it never
    did. The message of its waiting state only says how long Kubernetes waits before the next
    restart."""
    ended = container.last_state.terminated if container.last_state is not None else None
    if ended is None:
        return ""
    return (ended.message or "").strip() or f"exit code {ended.exit_code}"
