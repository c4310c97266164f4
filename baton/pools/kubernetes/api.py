"""The few calls of the Kubernetes API that pools need.

Rights (RBAC) that the caller needs in its namespace: ``list`` and ``patch`` on pods; ``get`` and
``update`` on deployments/scale (for StatefulSets, on theirs), which may be bound to the pools by
resourceNames. Who does not name the pools (``kubernetes_pools``) needs ``list`` on deployments and
statefulsets, too. ``delete`` on pods is needed by :meth:`KubernetesPools.remove` alone, and only
when Kubernetes took another pod than the one that was named.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kubernetes import client

from baton.core.states import Role
from baton.errors import Invalid
from baton.pools.base import WORKER_ROLES
from baton.pools.kubernetes.client import KubernetesClient
from baton.pools.kubernetes.pod import (
    DELETION_COST,
    LEAVES_ANNOTATION,
    MIN_DELETION_COST,
    Pod,
    pod_from,
)

PART_OF_LABEL, PART_OF = "app.kubernetes.io/part-of", "baton"
CLUSTER_LABEL = "baton.dev/cluster"
ROLE_LABEL = "baton.dev/role"
POOL_LABEL = "baton.dev/pool"
"""On the Deployment (or StatefulSet) of a pool, and on its pods. Without the last, a pool is called
like its role."""


@dataclass(frozen=True, slots=True)
class KubernetesWorkload:
    """What keeps the pods of ``pool``. ``kind`` is Deployment or StatefulSet."""

    kind: str
    name: str
    role: Role
    replicas: int
    pool: str

    @property
    def resource(self) -> str:
        return f"{self.kind.lower()}s"


@dataclass(frozen=True, slots=True)
class WorkloadScale:
    """``version`` is the resourceVersion that was read."""

    replicas: int
    version: str


class KubernetesApi:
    """Of one Baton cluster. ``places`` says by the pool's name what it is (ROLE/DEPLOYMENT); None:
    the pools are found by their labels. Raises what :class:`KubernetesClient` does."""

    def __init__(
        self, kubernetes: KubernetesClient, cluster: str, places: Mapping[str, str] | None = None
    ) -> None:
        self._kubernetes = kubernetes
        self._namespace = kubernetes.namespace
        self._apps = client.AppsV1Api(kubernetes.api)
        self._core = client.CoreV1Api(kubernetes.api)
        self._selector = label_selector(cluster)
        self._places = places

    async def workloads(self) -> dict[str, KubernetesWorkload]:
        """By the names of their pools. Raises Invalid when two pools have the same one."""
        if self._places is not None:
            return {pool: await self._placed(pool, place) for pool, place in self._places.items()}
        pools: dict[str, KubernetesWorkload] = {}
        for kind in ("Deployment", "StatefulSet"):
            list_all = getattr(self._apps, f"list_namespaced_{_snake(kind)}")
            answer = await self._kubernetes.call(
                "list", f"{kind.lower()}s", list_all, self._namespace, label_selector=self._selector
            )
            for item in answer.items:
                found = _workload(kind, item)
                if found.pool in pools:
                    names = f"{pools[found.pool].name} and {found.name}"
                    raise Invalid(f"two pools are called {found.pool!r} ({POOL_LABEL}): {names}")
                pools[found.pool] = found
        return pools

    async def scale_of(self, workload: KubernetesWorkload) -> WorkloadScale:
        read = getattr(self._apps, f"read_namespaced_{_snake(workload.kind)}_scale")
        what = f"{workload.resource}/scale"
        answer = await self._kubernetes.call("get", what, read, workload.name, self._namespace)
        replicas = answer.spec.replicas if answer.spec is not None else None
        return WorkloadScale(replicas or 0, answer.metadata.resource_version)

    async def write_scale(self, workload: KubernetesWorkload, scale: WorkloadScale) -> None:
        """Only if nothing has changed since ``scale.version`` was read; Conflict otherwise."""
        write = getattr(self._apps, f"replace_namespaced_{_snake(workload.kind)}_scale")
        body = client.V1Scale(
            api_version="autoscaling/v1",
            kind="WorkloadScale",
            metadata=client.V1ObjectMeta(
                name=workload.name, namespace=self._namespace, resource_version=scale.version
            ),
            spec=client.V1ScaleSpec(replicas=scale.replicas),
        )
        what = f"{workload.resource}/scale"
        await self._kubernetes.call("update", what, write, workload.name, self._namespace, body)

    async def pods(self) -> list[Pod]:
        """Of all pools, those that are leaving, too."""
        answer = await self._kubernetes.call(
            "list", "pods", self._core.list_namespaced_pod, self._namespace,
            label_selector=self._selector,
        )  # fmt: skip
        return [_pod(item) for item in answer.items]

    async def mark(self, pod: Pod, num_replicas: int) -> None:
        """It is to go first, from a pool of so many."""
        notes = {DELETION_COST: str(MIN_DELETION_COST), LEAVES_ANNOTATION: str(num_replicas)}
        await self._annotate(pod, notes)

    async def unmark(self, pod: Pod) -> None:
        await self._annotate(pod, {DELETION_COST: None, LEAVES_ANNOTATION: None})

    async def _annotate(self, pod: Pod, notes: Mapping[str, str | None]) -> None:
        body = {"metadata": {"uid": pod.uid, "annotations": notes}}
        patch, content = self._core.patch_namespaced_pod, "application/merge-patch+json"
        await self._kubernetes.call(
            "patch", "pods", patch, pod.name, self._namespace, body, _content_type=content
        )

    async def delete(self, pod: Pod) -> None:
        """This very pod, and no later one of its name; it is given its time to drain."""
        body = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid=pod.uid))
        delete = self._core.delete_namespaced_pod
        await self._kubernetes.call("delete", "pods", delete, pod.name, self._namespace, body=body)

    async def _placed(self, pool: str, place: str) -> KubernetesWorkload:
        role, _, name = place.partition("/")
        workload = KubernetesWorkload("Deployment", name, Role(role), 0, pool)
        scale = await self.scale_of(workload)
        return KubernetesWorkload("Deployment", name, Role(role), scale.replicas, pool)


def label_selector(cluster: str) -> str:
    """Of all pools of a cluster, and of their pods."""
    roles = ",".join(role.value for role in WORKER_ROLES)
    return f"{PART_OF_LABEL}={PART_OF},{CLUSTER_LABEL}={cluster},{ROLE_LABEL} in ({roles})"


def _snake(kind: str) -> str:
    return {"Deployment": "deployment", "StatefulSet": "stateful_set"}[kind]


def _place(metadata: client.V1ObjectMeta | None) -> tuple[Role, str]:
    """What was listed by its labels has them."""
    assert metadata is not None and metadata.labels is not None
    role = Role(metadata.labels[ROLE_LABEL])
    return role, metadata.labels.get(POOL_LABEL, role.value)


def _workload(kind: str, item: Any) -> KubernetesWorkload:
    """Without a number, it is one."""
    (role, pool), replicas = _place(item.metadata), item.spec.replicas
    return KubernetesWorkload(
        kind, item.metadata.name, role, 1 if replicas is None else replicas, pool
    )


def _pod(item: client.V1Pod) -> Pod:
    role, pool = _place(item.metadata)
    return pod_from(item, role, pool)
