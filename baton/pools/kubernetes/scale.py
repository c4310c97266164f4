"""The ``scale`` subresource of Deployments and StatefulSets.

Permissions (RBAC): ``get`` and ``update`` on deployments/scale (or statefulsets/scale); the rule
may be limited to the workloads' names with ``resourceNames``.
"""

from dataclasses import dataclass

from kubernetes import client

from baton.pools.kubernetes.client import KubernetesClient

DEPLOYMENT, STATEFUL_SET = "Deployment", "StatefulSet"
_METHODS = {DEPLOYMENT: "deployment", STATEFUL_SET: "stateful_set"}


@dataclass(frozen=True, slots=True)
class WorkloadScale:
    """A ``scale`` subresource. ``version`` is the resourceVersion that was read; ``uid`` is the
    workload's UID."""

    replicas: int
    version: str
    uid: str = ""


class ScaleClient:
    """Reads and writes sizes of workloads in one namespace. ``kind`` is Deployment or StatefulSet.
    Raises the errors of :class:`KubernetesClient`."""

    def __init__(self, kubernetes: KubernetesClient) -> None:
        self._kubernetes = kubernetes
        self._namespace = kubernetes.namespace
        self._apps = client.AppsV1Api(kubernetes.api)

    async def read(self, kind: str, name: str) -> WorkloadScale:
        read = getattr(self._apps, f"read_namespaced_{_METHODS[kind]}_scale")
        answer = await self._kubernetes.call("get", _resource(kind), read, name, self._namespace)
        replicas = answer.spec.replicas if answer.spec is not None else None
        metadata = answer.metadata
        return WorkloadScale(replicas or 0, metadata.resource_version, metadata.uid or "")

    async def write(
        self, kind: str, name: str, scale: WorkloadScale, dry_run: bool = False
    ) -> None:
        """Set the number of replicas; with ``dry_run``, only check whether that is possible. Raises
        Conflict when the workload has changed since ``scale.version`` was read."""
        write = getattr(self._apps, f"replace_namespaced_{_METHODS[kind]}_scale")
        body = client.V1Scale(
            api_version="autoscaling/v1",
            kind="Scale",
            metadata=client.V1ObjectMeta(
                name=name, namespace=self._namespace, resource_version=scale.version
            ),
            spec=client.V1ScaleSpec(replicas=scale.replicas),
        )
        options = {"dry_run": "All"} if dry_run else {}
        await self._kubernetes.call(
            "update", _resource(kind), write, name, self._namespace, body, **options
        )


def _resource(kind: str) -> str:
    return f"{kind.lower()}s/scale"
