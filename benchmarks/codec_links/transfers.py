"""The workers' parts of a KV transfer: the transport, the encoder of the source, and the decoder of
the reader."""

from collections.abc import Mapping, Sequence
from functools import partial

from baton.clock import SystemClock
from baton.core.ids import BlockId
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import CHECKSUM_XXH3, BlockRef
from baton.kv_codec.base import BlockCodec
from baton.transport.base import Peer, Transport
from baton.transport.host_memory import HostMemory
from baton.transport.reads import read_and_verify
from baton.transport.selection import open_transports
from benchmarks.codec_links.kv_pool import BLOCK_TOKENS, BenchPool
from benchmarks.codec_links.network import DEVICE
from decode_worker.block_decoder import BlockDecoder
from prefill_worker.block_encoder import BlockEncoder, ExportCodec

CLOCK = SystemClock()
TIMEOUT_SECONDS = 600.0
RECENT_TOKENS = 128
"""The default of ``kv_codec_recent_tokens``."""


def open_transport(name: str, memory: HostMemory, owner: str, address: str) -> Transport:
    """Open the transport ``name`` (grpc, or nixl over TCP)."""
    (transport,) = open_transports(
        [name],
        owner=owner,
        generation=1,
        region=memory.region,
        clock=CLOCK,
        listen_host=address,
        nixl_interfaces=(DEVICE,),
    ).values()
    return transport


def new_encoder(
    pool: BenchPool, codecs: Mapping[KvCodecName, BlockCodec], codec: KvCodecName, num_tokens: int
) -> BlockEncoder | None:
    """Return the encoder of a prompt of ``num_tokens`` tokens; None if it travels raw."""
    if codec is KvCodecName.NONE:
        return None
    recent = (num_tokens - RECENT_TOKENS) // BLOCK_TOKENS
    chosen = ExportCodec(codec, KvCodecName.LOSSLESS, recent)
    return BlockEncoder(pool.layout, pool.staging, codecs, chosen)


class ChunkReader:
    """Reads announced blocks as a decode worker does."""

    def __init__(
        self,
        pool: BenchPool,
        codecs: Mapping[KvCodecName, BlockCodec],
        transport: Transport,
        peer: Peer,
    ) -> None:
        self._layout = pool.layout
        self._decoder = BlockDecoder(pool.layout, pool.staging, codecs, CLOCK, TIMEOUT_SECONDS)
        self._transport = transport
        self._peer = peer

    async def read(self, blocks: Sequence[BlockRef], ids: Sequence[BlockId]) -> float:
        """Read, verify and decode blocks. Return for how long bytes were under way."""
        if any(block.codec is not KvCodecName.NONE for block in blocks):
            self._decoder.check(blocks, self._decoder.accepted(exact=False))
            decoded = await self._decoder.read(
                self._transport, self._peer, blocks, ids, TIMEOUT_SECONDS
            )
            assert not decoded.bad, decoded
            return decoded.link_seconds
        verify = partial(self._layout.verify_blocks, CHECKSUM_XXH3, blocks, ids)
        ranges = self._layout.transfer_ranges(blocks, ids)
        read = await read_and_verify(
            self._transport, self._peer, ranges, verify, TIMEOUT_SECONDS, CLOCK
        )
        assert read.num_verified == len(blocks), read
        return read.link_seconds
