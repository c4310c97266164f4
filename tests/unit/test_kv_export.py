"""Tests when the source of a KV transfer tells the receiver to reserve blocks."""

import asyncio

from baton.core.ids import BlockId, RequestId
from baton.core.kv_transfer import Endpoint, KvTransferScheduled
from baton.engine.result import PrefillProgress
from baton.worker.kv_layout import KvLayout
from prefill_worker.kv_export import KvExport

ENDPOINT = Endpoint("memory", "prefill", 1, "host", 4096, b"")


def progress(num_tokens: int) -> PrefillProgress:
    block_ids = tuple(BlockId(number) for number in range(7))
    return PrefillProgress(RequestId("r"), num_tokens, block_ids, (), 0)


async def test_receiver_reserves_blocks_when_little_of_the_prompt_is_left() -> None:
    layout = KvLayout("layout", 16, "xxh3", lambda block_ids: [0] * len(block_ids))
    export = KvExport(layout, 100, 16, reserve_ahead_tokens=20, on_close=lambda complete: None)
    export.attach_reader(ENDPOINT)
    events = export.events()
    first = asyncio.ensure_future(anext(events))
    for computed in (16, 48, 79):
        export.record_progress(progress(computed))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not first.done(), computed
    export.record_progress(progress(80))
    assert await first == KvTransferScheduled(ENDPOINT, 100, "xxh3")
    chunk = await anext(events)
    assert chunk.first_block == 0 and len(chunk.blocks) == 5  # type: ignore[union-attr]
    export.close()
