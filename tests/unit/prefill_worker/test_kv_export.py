"""Tests the source side of a KV transfer: what it tells its reader, and when, and how it ends."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.kv_transfer import Endpoint, KvTransferChunk, KvTransferDone, KvTransferScheduled
from baton.engine.kv_window import KvWindow
from baton.engine.result import PrefillProgress
from baton.worker.kv_layout import KvLayout
from prefill_worker.kv_export import KvExport

ENDPOINT = Endpoint("memory", "prefill", 1, "host", 4096, b"")


def progress(num_tokens: int) -> PrefillProgress:
    block_ids = tuple(BlockId(number) for number in range(7))
    return PrefillProgress(RequestId("r"), num_tokens, block_ids, (), 0)


def open_export(closed: list[bool], window: KvWindow = KvWindow(16)) -> KvExport:
    """Return an export of 100 tokens in 7 blocks, which appends to ``closed`` whether it was
    complete when it closed."""
    layout = KvLayout("layout", 16, "xxh3", lambda block_ids: [0] * len(block_ids))
    return KvExport(layout, 100, window, reserve_ahead_tokens=20, on_close=closed.append)


async def test_receiver_reserves_blocks_when_little_of_the_prompt_is_left() -> None:
    closed: list[bool] = []
    export = open_export(closed)
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
    assert closed == [False]


async def test_the_stream_outlasts_a_read_if_the_answer_ends_with_its_first_token() -> None:
    """If the source ended the stream before the reader had acknowledged the blocks, the reader
    would fail, and the finished request would be placed again."""
    closed: list[bool] = []
    export = open_export(closed)
    export.attach_reader(ENDPOINT)
    events: AsyncGenerator[object] = export.events()
    export.record_progress(progress(80))
    await anext(events)  # KvTransferScheduled
    await anext(events)  # five blocks, which the reader now reads
    export.record_progress(progress(100))
    export.finish_prefill(TokenId(3), finished=True)
    assert await anext(events) == KvTransferDone(TokenId(3), True)
    end = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    assert closed == [] and not end.done()
    export.acknowledge(5)
    with pytest.raises(StopAsyncIteration):
        await end
    export.close()
    assert closed == [True]


async def test_no_chunk_is_announced_once_the_answer_has_ended() -> None:
    export = open_export([])
    export.attach_reader(ENDPOINT)
    events: AsyncGenerator[object] = export.events()
    export.record_progress(progress(80))
    await anext(events)  # KvTransferScheduled
    await anext(events)  # five blocks
    following = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    export.record_progress(progress(100))
    export.finish_prefill(TokenId(3), finished=True)
    assert await following == KvTransferDone(TokenId(3), True)
    export.close()


async def test_an_unread_export_closes_if_the_answer_ends_with_its_first_token() -> None:
    closed: list[bool] = []
    export = open_export(closed)
    export.record_progress(progress(100))
    export.finish_prefill(TokenId(3), finished=True)
    assert closed == [True]


async def test_blocks_before_the_window_are_not_announced() -> None:
    closed: list[bool] = []
    export = open_export(closed, KvWindow(16, 10))
    export.attach_reader(ENDPOINT)
    events: AsyncGenerator[object] = export.events()
    export.record_progress(progress(80))
    await anext(events)  # KvTransferScheduled
    following = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    assert not following.done(), "the first five blocks are computed, and not needed"
    export.record_progress(progress(100))
    export.finish_prefill(TokenId(3), finished=False)
    chunk = await following
    assert isinstance(chunk, KvTransferChunk)
    assert chunk.first_block == 0
    assert [block.offset_bytes for block in chunk.blocks] == [5 * 16, 6 * 16]
    await anext(events)  # KvTransferDone
    export.acknowledge(2)
    with pytest.raises(StopAsyncIteration):
        await anext(events)
    export.close()
    assert closed == [True]


async def test_a_stream_ends_although_nothing_after_the_window_was_announced() -> None:
    export = open_export([], KvWindow(16, 10))
    export.attach_reader(ENDPOINT)
    events: AsyncGenerator[object] = export.events()
    export.record_progress(progress(80))
    await anext(events)  # KvTransferScheduled
    export.finish_prefill(TokenId(3), finished=True)
    assert await anext(events) == KvTransferDone(TokenId(3), True)
    with pytest.raises(StopAsyncIteration):
        await anext(events)
