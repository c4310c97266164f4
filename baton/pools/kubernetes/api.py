"""The calls of the Kubernetes API that pools need.

Permissions (RBAC) that the caller needs in its namespace: ``list`` and ``patch`` on pods; ``get``
and ``update`` on deployments/scale (for StatefulSets, on statefulsets/scale), which may be
restricted to the pools by resourceNames. If ``kubernetes_pools`` is not set, ``list`` on
deployments and statefulsets is needed, too. ``delete`` on pods is needed only by
:meth:`KubernetesPools.remove`, when Kubernetes has removed a pod other than the given one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kubernetes import client

from baton.core.states import WORKER_ROLES, Role
from baton.errors import Invalid
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
"""These labels are on the Deployment (or StatefulSet) of a pool, and on its pods. Without
POOL_LABEL, a pool's name is its role."""


@dataclass(frozen=True, slots=True)
class KubernetesWorkload:
    """The workload that owns the pods of ``pool``. ``kind`` is Deployment or StatefulSet."""

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
    """A ``scale`` subresource. ``version`` is the resourceVersion that was read."""

    replicas: int
    version: str


class KubernetesApi:
    """The pools and pods of one Baton cluster. ``targets`` maps names of pools to ROLE/DEPLOYMENT;
    if it is None, the pools are found by their labels. Raises the errors of
    :class:`KubernetesClient`."""

    def __init__(
        self, kubernetes: KubernetesClient, cluster: str, targets: Mapping[str, str] | None = None
    ) -> None:
        self._kubernetes = kubernetes
        self._namespace = kubernetes.namespace
        self._apps = client.AppsV1Api(kubernetes.api)
        self._core = client.CoreV1Api(kubernetes.api)
        self._selector = label_selector(cluster)
        self._targets = targets

    async def workloads(self) -> dict[str, KubernetesWorkload]:
        """All workloads by the names of their pools. Raises Invalid when two pools have the same
        name."""
        if self._targets is not None:
            return {
                pool: await self._read_target(pool, place) for pool, place in self._targets.items()
            }
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

    async def read_scale(self, workload: KubernetesWorkload) -> WorkloadScale:
        read = getattr(self._apps, f"read_namespaced_{_snake(workload.kind)}_scale")
        what = f"{workload.resource}/scale"
        answer = await self._kubernetes.call("get", what, read, workload.name, self._namespace)
        replicas = answer.spec.replicas if answer.spec is not None else None
        return WorkloadScale(replicas or 0, answer.metadata.resource_version)

    async def write_scale(self, workload: KubernetesWorkload, scale: WorkloadScale) -> None:
        """Set the number of replicas. Raises Conflict when the workload has changed since
        ``scale.version`` was read."""
        write = getattr(self._apps, f"replace_namespaced_{_snake(workload.kind)}_scale")
        body = client.V1Scale(
            api_version="autoscaling/v1",
            kind="Scale",
            metadata=client.V1ObjectMeta(
                name=workload.name, namespace=self._namespace, resource_version=scale.version
            ),
            spec=client.V1ScaleSpec(replicas=scale.replicas),
        )
        what = f"{workload.resource}/scale"
        await self._kubernetes.call("update", what, write, workload.name, self._namespace, body)

    async def pods(self) -> list[Pod]:
        """The pods of all pools, including those that are being deleted."""
        answer = await self._kubernetes.call(
            "list", "pods", self._core.list_namespaced_pod, self._namespace,
            label_selector=self._selector,
        )  # fmt: skip
        return [_pod(item) for item in answer.items]

    async def mark_for_removal(self, pod: Pod, num_replicas: int) -> None:
        """Annotate the pod so that Kubernetes deletes it first. ``num_replicas`` is the current
        size of its pool."""
        annotations = {DELETION_COST: str(MIN_DELETION_COST), LEAVES_ANNOTATION: str(num_replicas)}
        await self._annotate(pod, annotations)

    async def remove_mark(self, pod: Pod) -> None:
        await self._annotate(pod, {DELETION_COST: None, LEAVES_ANNOTATION: None})

    async def _annotate(self, pod: Pod, annotations: Mapping[str, str | None]) -> None:
        body = {"metadata": {"uid": pod.uid, "annotations": annotations}}
        patch, content = self._core.patch_namespaced_pod, "application/merge-patch+json"
        await self._kubernetes.call(
            "patch", "pods", patch, pod.name, self._namespace, body, _content_type=content
        )

    async def delete(self, pod: Pod) -> None:
        """Delete this pod, but no later pod of the same name. The pod has its grace period to
        drain."""
        body = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid=pod.uid))
        delete = self._core.delete_namespaced_pod
        await self._kubernetes.call("delete", "pods", delete, pod.name, self._namespace, body=body)

    async def _read_target(self, pool: str, place: str) -> KubernetesWorkload:
        role, _, name = place.partition("/")
        workload = KubernetesWorkload("Deployment", name, Role(role), 0, pool)
        scale = await self.read_scale(workload)
        return KubernetesWorkload("Deployment", name, Role(role), scale.replicas, pool)


def label_selector(cluster: str) -> str:
    """The selector of all pools of a cluster, and of their pods."""
    roles = ",".join(role.value for role in WORKER_ROLES)
    return f"{PART_OF_LABEL}={PART_OF},{CLUSTER_LABEL}={cluster},{ROLE_LABEL} in ({roles})"


def _snake(kind: str) -> str:
    return {"Deployment": "deployment", "StatefulSet": "stateful_set"}[kind]


def _role_and_pool(metadata: client.V1ObjectMeta | None) -> tuple[Role, str]:
    """Role and pool from the labels, which an object that was found by them must have."""
    assert metadata is not None and metadata.labels is not None
    role = Role(metadata.labels[ROLE_LABEL])
    return role, metadata.labels.get(POOL_LABEL, role.value)


def _workload(kind: str, item: Any) -> KubernetesWorkload:
    """Convert a workload. If ``replicas`` is unset, it is one, as in Kubernetes."""
    (role, pool), replicas = _role_and_pool(item.metadata), item.spec.replicas
    return KubernetesWorkload(
        kind, item.metadata.name, role, 1 if replicas is None else replicas, pool
    )


def _pod(item: client.V1Pod) -> Pod:
    role, pool = _role_and_pool(item.metadata)
    return pod_from(item, role, pool)
