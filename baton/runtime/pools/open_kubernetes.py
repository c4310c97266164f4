"""Opens the pools of a cluster in Kubernetes, as the settings say where they are."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from baton.clock import Clock
from baton.config import Settings
from baton.errors import Invalid
from baton.registry.redis import RedisRegistry
from baton.runtime.pools.base import Pools
from baton.runtime.pools.reach import NoReach, RegistryReach


@asynccontextmanager
async def kubernetes_pools(
    settings: Settings, clock: Clock, on_note: Callable[[str], None]
) -> AsyncIterator[Pools]:
    """Of ``settings.cluster`` in ``settings.kubernetes_namespace``. Raises Invalid when the client
    is not installed, or does not know whom to ask."""
    try:
        from baton.runtime.pools.kubernetes import KubernetesPools
        from baton.runtime.pools.kubernetes_api import open_api
    except ImportError as error:
        raise Invalid("pools in Kubernetes need the extra baton[kubernetes]") from error
    api = open_api(settings.kubernetes_namespace, settings.cluster)
    registry = RedisRegistry(settings.redis_url, settings.cluster) if settings.redis_url else None
    reach = RegistryReach(registry, settings.trust) if registry else NoReach()
    try:
        yield KubernetesPools(api, reach, clock, on_note)
    finally:
        api.close()
        if registry is not None:
            await registry.close()
