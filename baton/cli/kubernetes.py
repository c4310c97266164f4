"""``baton scale`` and ``baton drain`` for a cluster that runs in Kubernetes."""

import asyncio
import sys

from baton.clock import SystemClock
from baton.config import Settings
from baton.core.ids import WorkerId
from baton.core.states import Role
from baton.errors import Invalid
from baton.runtime.pools.base import checked
from baton.runtime.pools.open_kubernetes import kubernetes_pools


def scale(settings: Settings, sizes: list[str]) -> None:
    """``sizes`` are like prefill=2. Raises what :class:`KubernetesPools` does."""
    wanted = sizes_of(sizes)

    async def run() -> None:
        async with kubernetes_pools(settings, SystemClock(), _tell) as pools:
            await pools.scale(wanted)
            print(" ".join(f"{role}={count}" for role, count in (await pools.sizes()).items()))

    asyncio.run(run())


def drain(settings: Settings, worker: str) -> None:
    """``worker`` is a pod's name."""

    async def run() -> None:
        async with kubernetes_pools(settings, SystemClock(), _tell) as pools:
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


def _tell(note: str) -> None:
    print(f"baton: {note}", file=sys.stderr)
