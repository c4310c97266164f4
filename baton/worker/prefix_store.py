"""What a worker asks of a KV store: prefixes come in before a prompt, and go out after it."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from baton.core.handoff import BlockRef
from baton.core.request import RequestSpec


class PrefixStore(Protocol):
    async def extend(self, spec: RequestSpec) -> dict[str, str]:
        """Brings the prefix of ``spec`` that the store holds, and this worker doesn't, into
        the device's prefix cache. Never raises for what the store does: a miss is a miss.
        Returns details of the request, for ``baton explain``."""
        ...

    def publish(self, blocks: Sequence[BlockRef]) -> None:
        """Offers blocks to the store, in the background. Their checksums were taken while
        they were pinned; they need not be pinned any more."""
        ...

    async def run(self) -> None:
        """Publishes until cancelled."""
        ...


class NoStore:
    """Where there is no store node."""

    async def extend(self, spec: RequestSpec) -> dict[str, str]:
        return {}

    def publish(self, blocks: Sequence[BlockRef]) -> None:
        pass

    async def run(self) -> None:
        await asyncio.Event().wait()
