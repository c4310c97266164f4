"""The calls of the Kubernetes API that pools need.

Permissions (RBAC) that the caller needs in its namespace: ``list`` and ``patch`` on pods; ``get``
and ``update`` on deployments/scale (for StatefulSets, on statefulsets/scale), which may be
restricted to the pools by resourceNames. If ``kubernetes_pools`` is not set, ``list`` on
deployments and statefulsets is needed, too. ``delete`` on pods is needed only by
:meth:`KubernetesPools.remove`, when Kubernetes has removed a pod other than the given one.
:meth:`KubernetesPools.report` works even if the caller has only some of the permissions that allow
reading, and leaves out what the caller may not read.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kubernetes import client

from baton.core.states import Role
from baton.core.worker_kinds import WORKER_KINDS
from baton.errors import BatonError, Invalid, NotFound
from baton.pools.kubernetes.client import MERGE_PATCH, KubernetesClient
from baton.pools.kubernetes.permissions import Forbidden
from baton.pools.kubernetes.pod import (
    DELETION_COST,
    LEAVES_ANNOTATION,
    MIN_DELETION_COST,
    Pod,
    pod_from,
)
from baton.pools.kubernetes.scale import DEPLOYMENT, STATEFUL_SET, ScaleClient, WorkloadScale

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


class KubernetesApi:
    """The pools and pods of one Baton cluster. ``targets`` maps names of pools to ROLE/DEPLOYMENT;
    if it is None, the pools are found by their labels. The methods raise the errors of
    :class:`KubernetesClient`."""

    def __init__(
        self, kubernetes: KubernetesClient, cluster: str, targets: Mapping[str, str] | None = None
    ) -> None:
        self._kubernetes = kubernetes
        self._namespace = kubernetes.namespace
        self._apps = client.AppsV1Api(kubernetes.api)
        self._scales = ScaleClient(kubernetes)
        self._core = client.CoreV1Api(kubernetes.api)
        self._selector = label_selector(cluster)
        self._targets = targets

    async def workloads(
        self, on_error: Callable[[BatonError], None] | None = None
    ) -> dict[str, KubernetesWorkload]:
        """Return all workloads by the names of their pools. A workload that may not be read raises
        Forbidden, and one that is configured but does not exist raises NotFound; but if
        ``on_error`` is given, it is called with each such error instead, and these workloads are
        left out. Raises Invalid when two pools have the same name."""
        pools: dict[str, KubernetesWorkload] = {}
        for read in self._workload_sources():
            try:
                found_here = await read()
            except (Forbidden, NotFound) as error:
                if on_error is None:
                    raise
                on_error(error)
                continue
            for found in found_here:
                if found.pool in pools:
                    names = f"{pools[found.pool].name} and {found.name}"
                    raise Invalid(f"two pools are called {found.pool!r} ({POOL_LABEL}): {names}")
                pools[found.pool] = found
        return pools

    def _workload_sources(self) -> list[Callable[[], Awaitable[list[KubernetesWorkload]]]]:
        """Return functions that together read all workloads. Each makes one call to the API server,
        since RBAC may allow only some of these calls."""
        if self._targets is not None:
            return [partial(self._read_target, *target) for target in self._targets.items()]
        return [partial(self._list_workloads, kind) for kind in (DEPLOYMENT, STATEFUL_SET)]

    async def read_scale(self, workload: KubernetesWorkload) -> WorkloadScale:
        return await self._scales.read(workload.kind, workload.name)

    async def write_scale(
        self, workload: KubernetesWorkload, scale: WorkloadScale, dry_run: bool = False
    ) -> None:
        """Set the number of replicas. Raises Conflict when the workload has changed since
        ``scale.version`` was read."""
        await self._scales.write(workload.kind, workload.name, scale, dry_run)

    async def check_scale_writable(self, workload: KubernetesWorkload) -> None:
        """Raise Forbidden if the caller may not write the scale. If the write would fail for
        another reason, this check raises nothing: the write itself will raise the error."""
        try:
            await self.write_scale(workload, WorkloadScale(workload.replicas, ""), dry_run=True)
        except Forbidden:
            raise
        except BatonError:
            pass  # for example, an admission webhook that does not support dry runs

    async def pods(self) -> list[Pod]:
        """Return the pods of all pools, including those that are being deleted."""
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
        patch = self._core.patch_namespaced_pod
        await self._kubernetes.call(
            "patch", "pods", patch, pod.name, self._namespace, body, _content_type=MERGE_PATCH
        )

    async def delete(self, pod: Pod) -> None:
        """Delete this pod, but no later pod of the same name. The pod has its grace period to
        drain."""
        body = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid=pod.uid))
        delete = self._core.delete_namespaced_pod
        await self._kubernetes.call("delete", "pods", delete, pod.name, self._namespace, body=body)

    async def _read_target(self, pool: str, place: str) -> list[KubernetesWorkload]:
        role, _, name = place.partition("/")
        workload = KubernetesWorkload(DEPLOYMENT, name, Role(role), 0, pool)
        scale = await self.read_scale(workload)
        return [KubernetesWorkload(DEPLOYMENT, name, Role(role), scale.replicas, pool)]

    async def _list_workloads(self, kind: str) -> list[KubernetesWorkload]:
        list_all: Callable[..., Any] = {
            DEPLOYMENT: self._apps.list_namespaced_deployment,
            STATEFUL_SET: self._apps.list_namespaced_stateful_set,
        }[kind]
        answer = await self._kubernetes.call(
            "list", f"{kind.lower()}s", list_all, self._namespace, label_selector=self._selector
        )
        return [_workload(kind, item) for item in answer.items]


def label_selector(cluster: str) -> str:
    """Return the selector of all pools of a cluster, and of their pods."""
    roles = ",".join(role.value for role in WORKER_KINDS)
    return f"{PART_OF_LABEL}={PART_OF},{CLUSTER_LABEL}={cluster},{ROLE_LABEL} in ({roles})"


def _role_and_pool(metadata: client.V1ObjectMeta | None) -> tuple[Role, str]:
    """Return the role and the pool from the labels. An object that was found by its labels must
    have them."""
    assert metadata is not None and metadata.labels is not None
    role = Role(metadata.labels[ROLE_LABEL])
    return role, metadata.labels.get(POOL_LABEL, role.value)


def _workload(kind: str, item: Any) -> KubernetesWorkload:
    """Convert an object of the Kubernetes client to a workload. As in Kubernetes, ``replicas`` is 1
    if it is unset."""
    (role, pool), replicas = _role_and_pool(item.metadata), item.spec.replicas
    return KubernetesWorkload(
        kind, item.metadata.name, role, 1 if replicas is None else replicas, pool
    )


def _pod(item: client.V1Pod) -> Pod:
    role, pool = _role_and_pool(item.metadata)
    return pod_from(item, role, pool)
