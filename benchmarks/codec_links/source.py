"""A prefill worker that exports KV: the source of KV transfers.

    python -m benchmarks.codec_links.source NUM_BLOCKS TRANSPORT

Answers first with its endpoint and the speeds of its codecs. A command is the name of a codec: all
blocks are announced at once, in lines ``[first block, blocks]``; commands that are numbers
acknowledge that many blocks. The last answer has the processor time.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict

from baton.core.ids import BlockId, BlockKey, RequestId, TokenId
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import KvTransferChunk
from baton.engine.kv_window import KvWindow
from baton.engine.result import PrefillProgress
from benchmarks.codec_links.commands import answer, keep_output_for_answers, next_command
from benchmarks.codec_links.kv_pool import BLOCK_TOKENS, fill, measured_codecs, new_pool, touch
from benchmarks.codec_links.network import SOURCE_ADDRESS
from benchmarks.codec_links.transfers import new_encoder, open_transport
from prefill_worker.kv_export import KvExport
from tests.contract.transport_peer import endpoint_to_json


async def serve(num_blocks: int, transport_name: str) -> None:
    pool = new_pool(num_blocks)
    fill(pool, num_blocks)
    touch(pool, num_blocks)
    # Without a reference, NIXL's agent would be closed, and its sockets with it.
    transport = open_transport(transport_name, pool.memory, "source", SOURCE_ADDRESS)
    endpoint = transport.export()
    codecs, speeds = measured_codecs()
    answer(
        {
            "endpoint": json.loads(endpoint_to_json(endpoint)),
            "speeds": [asdict(speed) for speed in speeds],
        }
    )
    tokens, window = num_blocks * BLOCK_TOKENS, KvWindow(BLOCK_TOKENS)
    while name := await next_command():
        began = time.process_time()
        export = KvExport(pool.layout, tokens, window, tokens, lambda complete: None)
        encoder = new_encoder(pool, codecs, KvCodecName(name), tokens)
        export.attach_reader(endpoint, encoder)
        block_ids = tuple(BlockId(index) for index in range(num_blocks))
        keys = (BlockKey(b"k" * 16),) * num_blocks
        export.record_progress(PrefillProgress(RequestId("r"), tokens, block_ids, keys, 0))
        export.finish_prefill(TokenId(1), finished=False)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_acknowledge(export, num_blocks))
            tasks.create_task(_announce(export))
        export.close()
        pool.staging.check_integrity()
        assert pool.staging.used_bytes == 0
        answer({"cpu_seconds": time.process_time() - began})
    transport.close()


async def _acknowledge(export: KvExport, num_blocks: int) -> None:
    count = 0
    while count < num_blocks:
        count = await next_command()
        export.acknowledge(count)


async def _announce(export: KvExport) -> None:
    async for event in export.events():
        if isinstance(event, KvTransferChunk):
            blocks = [
                [block.offset_bytes, block.size_bytes, block.checksum, block.codec.value]
                for block in event.blocks
            ]
            answer([event.first_block, blocks])


if __name__ == "__main__":
    keep_output_for_answers()
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2]))
