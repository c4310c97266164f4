"""A decode worker that imports KV: the reader of KV transfers.

    python -m benchmarks.codec_links.reader NUM_BLOCKS TRANSPORT

The first command is the source's endpoint, and is answered with the speeds of the codecs. Each
further command is a chunk of blocks; after each but the last one of a transfer, the answer is the
number of blocks that were read, and then the transfer's size and times.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict

from baton.core.ids import BlockId, BlockKey
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import BlockRef
from benchmarks.codec_links.commands import answer, keep_output_for_answers, next_command
from benchmarks.codec_links.kv_pool import measured_codecs, new_pool, touch
from benchmarks.codec_links.network import READER_ADDRESS
from benchmarks.codec_links.transfers import ChunkReader, open_transport
from tests.contract.transport_peer import endpoint_from_json


async def serve(num_blocks: int, transport_name: str) -> None:
    pool = new_pool(num_blocks)
    touch(pool)
    transport = open_transport(transport_name, pool.memory, "reader", READER_ADDRESS)
    peer = transport.connect(endpoint_from_json(json.dumps(await next_command())))
    codecs, speeds = measured_codecs()
    reader = ChunkReader(pool, codecs, transport, peer)
    answer({"speeds": [asdict(speed) for speed in speeds]})
    while chunk := await next_command():
        processor = time.process_time()
        size, link_seconds = 0, 0.0
        while True:
            first, described = chunk
            end = first + len(described)
            blocks = [
                BlockRef(at, length, checksum, BlockKey(b""), KvCodecName(codec))
                for at, length, checksum, codec in described
            ]
            link_seconds += await reader.read(blocks, [BlockId(n) for n in range(first, end)])
            size += sum(block.size_bytes for block in blocks)
            answer(end)
            if end == num_blocks:
                break
            chunk = await next_command()
        answer(
            {
                "bytes": size,
                "link_seconds": link_seconds,
                "cpu_seconds": time.process_time() - processor,
            }
        )


if __name__ == "__main__":
    keep_output_for_answers()
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2]))
