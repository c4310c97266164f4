"""A worker's prefix store for clusters without store nodes."""

import asyncio
from collections.abc import Sequence

from baton.core.ids import BlockKey
from baton.core.request import RequestSpec
from baton.engine.result import StepResult
from prefill_worker.prefix_fetch import PrefixFetch


class NoStore:
    async def find_prefix(self, spec: RequestSpec, keys: Sequence[BlockKey]) -> PrefixFetch:
        return PrefixFetch(spec.request_id)

    async def fetch_prefix(self, prefix_fetch: PrefixFetch, num_cached: int) -> None:
        raise AssertionError("NoStore finds no prefix, so there is nothing to fetch")

    def start_split_fetch(self, prefix_fetch: PrefixFetch) -> None:
        pass

    def record_step(self, result: StepResult) -> None:
        pass

    async def publish_remaining(self) -> None:
        pass

    bytes_per_second: float | None = None

    async def run(self) -> None:
        await asyncio.Event().wait()
