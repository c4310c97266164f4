"""Describes the cluster that a command works on, and builds the error if it does not exist."""

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

from kubernetes import client

from baton.errors import NotFound
from baton.pools.kubernetes.api import CLUSTER_LABEL, PART_OF, PART_OF_LABEL
from baton.pools.kubernetes.client import KubernetesClient
from baton.pools.kubernetes.permissions import Forbidden


@dataclass(frozen=True, slots=True)
class KubernetesLocation:
    """A Baton cluster in Kubernetes. ``context`` is the kubeconfig's context, or in-cluster;
    ``server`` is the API server's URL."""

    context: str
    server: str
    namespace: str
    cluster: str

    def __str__(self) -> str:
        return (
            f"context {self.context} ({self.server}), namespace {self.namespace}, "
            f"cluster {self.cluster}"
        )


def location_of(kubernetes: KubernetesClient, cluster: str) -> KubernetesLocation:
    return KubernetesLocation(kubernetes.context, kubernetes.server, kubernetes.namespace, cluster)


async def missing_cluster_error(kubernetes: KubernetesClient, cluster: str) -> NotFound:
    """Return the error for a cluster that was not found. The error names the clusters in the
    namespace that the user can see."""
    where = f"context {kubernetes.context} ({kubernetes.server}), namespace {kubernetes.namespace}"
    if await _namespace_is_missing(kubernetes):
        return NotFound(f"{where}: there is no such namespace")
    names = sorted({name async for name in _cluster_names(kubernetes)})
    found = f"known clusters: {', '.join(names)}" if names else "this user sees no cluster there"
    return NotFound(f"{where}: there is no cluster {cluster!r} (--name); {found}")


async def _namespace_is_missing(kubernetes: KubernetesClient) -> bool:
    """Return whether the namespace certainly does not exist; False if the user may not read it."""
    read = client.CoreV1Api(kubernetes.api).read_namespace
    try:
        await kubernetes.call("get", "namespaces", read, kubernetes.namespace)
    except Forbidden:
        return False
    except NotFound:
        return True
    return False


async def _cluster_names(kubernetes: KubernetesClient) -> AsyncIterator[str]:
    """Yield the cluster label of each workload and pod that the user may list."""
    apps, core = client.AppsV1Api(kubernetes.api), client.CoreV1Api(kubernetes.api)
    lists = {
        "deployments": apps.list_namespaced_deployment,
        "statefulsets": apps.list_namespaced_stateful_set,
        "pods": core.list_namespaced_pod,
    }
    selector = f"{PART_OF_LABEL}={PART_OF},{CLUSTER_LABEL}"
    for resource, list_all in lists.items():
        try:
            answer: Any = await kubernetes.call(
                "list", resource, list_all, kubernetes.namespace, label_selector=selector
            )
        except Forbidden:
            continue
        items: Iterable[Any] = answer.items
        for item in items:
            yield item.metadata.labels[CLUSTER_LABEL]
