"""A worker's store where there is none."""

import asyncio
from collections.abc import Sequence

from baton.core.ids import BlockKey
from baton.core.request import RequestSpec
from baton.engine.result import StepResult
from baton.worker.prefix_fetch import PrefixFetch


class NoStore:
    async def find(self, spec: RequestSpec, keys: Sequence[BlockKey]) -> PrefixFetch:
        return PrefixFetch(spec.request_id)

    async def extend(self, extension: PrefixFetch, num_cached: int) -> None:
        raise AssertionError("nothing was found")

    def follow(self, extension: PrefixFetch) -> None:
        pass

    def note_step(self, result: StepResult) -> None:
        pass

    async def hand_over(self) -> None:
        pass

    bytes_per_second: float | None = None

    async def run(self) -> None:
        await asyncio.Event().wait()
