"""Opens the pools of a cluster in Kubernetes, as the settings say where they are."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from baton.clock import Clock
from baton.config import Settings
from baton.core.states import Role
from baton.errors import Invalid
from baton.registry.redis import RedisRegistry
from baton.runtime.election import LeaseStore
from baton.runtime.pools.reach import NoReach, RegistryReach

if TYPE_CHECKING:
    from baton.runtime.pools.kubernetes import KubernetesPools
    from baton.runtime.pools.kubernetes_client import KubernetesClient


@asynccontextmanager
async def kubernetes_pools(
    settings: Settings, clock: Clock, on_note: Callable[[str], None]
) -> AsyncIterator["KubernetesPools"]:
    """Of ``settings.cluster`` in ``settings.kubernetes_namespace``. Raises Invalid when the client
    is not installed, or does not know whom to ask."""
    client = kubernetes_client(settings)
    from baton.runtime.pools.kubernetes import KubernetesPools
    from baton.runtime.pools.kubernetes_api import KubernetesApi

    api = KubernetesApi(client, settings.cluster, settings.kubernetes_pools or None)
    registry = (
        RedisRegistry(settings.redis_url, settings.cluster, settings.cluster_secret)
        if settings.redis_url
        else None
    )
    reach = RegistryReach(registry, settings.trust) if registry else NoReach()
    chosen = {
        Role.PREFILL: settings.autoscale_prefill_pool,
        Role.DECODE: settings.autoscale_decode_pool,
    }
    named = {role: name for role, name in chosen.items() if name}
    try:
        yield KubernetesPools(api, reach, clock, on_note, settings.drain_seconds, named)
    finally:
        client.close()
        if registry is not None:
            await registry.close()


@asynccontextmanager
async def kubernetes_lease(settings: Settings, clock: Clock) -> AsyncIterator[LeaseStore]:
    """By which the conductors of ``settings.cluster`` agree on one of them. Raises Invalid."""
    client = kubernetes_client(settings)
    from baton.runtime.pools.kubernetes_lease import KubernetesLease

    name = settings.kubernetes_lease or f"baton-{settings.cluster}-conductor"
    try:
        yield KubernetesLease(client, name, clock)
    finally:
        client.close()


def kubernetes_client(settings: Settings) -> "KubernetesClient":
    """For the caller to close. Raises Invalid as above."""
    try:
        from baton.runtime.pools.kubernetes_client import open_client
    except ImportError as error:
        raise Invalid("pools in Kubernetes need the extra baton[kubernetes]") from error
    return open_client(settings.kubernetes_namespace)
