"""``baton scale`` and ``baton drain`` for a cluster that runs in Kubernetes."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.clock import SystemClock
from baton.config import Settings
from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import Invalid
from baton.registry.redis import RedisRegistry
from baton.runtime.pools.base import Pools, checked
from baton.runtime.pools.reach import NoReach, RegistryReach


def scale(settings: Settings, sizes: list[str]) -> None:
    """``sizes`` are like prefill=2. Raises what :class:`KubernetesPools` does."""
    wanted = sizes_of(sizes)

    async def run() -> None:
        async with kubernetes_pools(settings) as pools:
            await pools.scale(wanted)
            print(" ".join(f"{role}={count}" for role, count in (await pools.sizes()).items()))

    asyncio.run(run())


def drain(settings: Settings, worker: str) -> None:
    """``worker`` is a pod's name."""

    async def run() -> None:
        async with kubernetes_pools(settings) as pools:
            await pools.remove(WorkerId(worker))
            print(f"{worker} drains, and then goes")

    asyncio.run(run())


def sizes_of(texts: list[str]) -> dict[Role, int]:
    """Raises Invalid."""
    pairs = [text.partition("=") for text in texts]
    for name, _, count in pairs:
        if not count.isdecimal():
            raise Invalid(f"scale takes prefill=N and decode=N, not {name}={count}")
    return checked({name: int(count) for name, _, count in pairs})


@asynccontextmanager
async def kubernetes_pools(settings: Settings) -> AsyncIterator[Pools]:
    """Of ``settings.cluster`` in ``settings.kubernetes_namespace``. Raises Invalid when the client
    is not installed, or does not know whom to ask."""
    try:
        from baton.runtime.pools.kubernetes import KubernetesPools
        from baton.runtime.pools.kubernetes_api import open_api
    except ImportError as error:
        raise Invalid("pools in Kubernetes need the extra baton[kubernetes]") from error
    api = open_api(settings.kubernetes_namespace, settings.cluster)
    registry = RedisRegistry(settings.redis_url, settings.cluster) if settings.redis_url else None
    reach = RegistryReach(registry, settings.cluster_secret) if registry else NoReach()
    try:
        yield KubernetesPools(api, reach, SystemClock(), _tell)
    finally:
        api.close()
        if registry is not None:
            await registry.close()


def _tell(note: str) -> None:
    print(f"baton: {note}", file=sys.stderr)
