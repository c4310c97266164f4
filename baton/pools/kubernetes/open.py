"""Opens the pools of a cluster in Kubernetes according to the settings."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from baton.clock import Clock
from baton.config import Settings
from baton.core.states import Role
from baton.errors import Invalid
from baton.pools.leader_election import LeaseStore
from baton.pools.worker_admin import RegistryWorkerAdmin, UnavailableWorkerAdmin
from baton.registry.redis import RedisRegistry

if TYPE_CHECKING:
    from baton.pools.kubernetes.client import KubernetesClient
    from baton.pools.kubernetes.pools import KubernetesPools


@asynccontextmanager
async def open_kubernetes_pools(
    settings: Settings, clock: Clock, on_note: Callable[[str], None]
) -> AsyncIterator["KubernetesPools"]:
    """Open the pools of ``settings.cluster`` in ``settings.kubernetes_namespace``. Raises Invalid
    when the Kubernetes client is not installed or not configured."""
    client = kubernetes_client_for(settings)
    from baton.pools.kubernetes.api import KubernetesApi
    from baton.pools.kubernetes.pools import KubernetesPools

    api = KubernetesApi(client, settings.cluster, settings.kubernetes_pools or None)
    registry = (
        RedisRegistry(settings.redis_url, settings.cluster, settings.cluster_secret)
        if settings.redis_url
        else None
    )
    reach = RegistryWorkerAdmin(registry, settings.trust) if registry else UnavailableWorkerAdmin()
    chosen = {
        Role.PREFILL: settings.autoscale_prefill_pool,
        Role.DECODE: settings.autoscale_decode_pool,
    }
    named = {role: name for role, name in chosen.items() if name}
    try:
        yield KubernetesPools(api, reach, clock, on_note, settings.drain_timeout_seconds, named)
    finally:
        client.close()
        if registry is not None:
            await registry.close()


@asynccontextmanager
async def open_kubernetes_lease(settings: Settings, clock: Clock) -> AsyncIterator[LeaseStore]:
    """Open the lease by which the conductors of ``settings.cluster`` elect a leader. Raises
    Invalid."""
    client = kubernetes_client_for(settings)
    from baton.pools.kubernetes.lease import KubernetesLease

    name = settings.kubernetes_lease or f"baton-{settings.cluster}-conductor"
    try:
        yield KubernetesLease(client, name, clock)
    finally:
        client.close()


def kubernetes_client_for(settings: Settings) -> "KubernetesClient":
    """Open a client, which the caller must close. Raises Invalid if the Kubernetes client is not
    installed or not configured."""
    try:
        from baton.pools.kubernetes.client import open_kubernetes_client
    except ImportError as error:
        raise Invalid("pools in Kubernetes need the extra baton[kubernetes]") from error
    return open_kubernetes_client(settings.kubernetes_namespace)
