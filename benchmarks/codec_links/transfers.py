"""The workers' parts of a KV transfer: the transport, the encoder of the source, and the decoder of
the reader."""

from collections.abc import Mapping, Sequence

from baton.clock import SystemClock
from baton.core.ids import BlockId
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import BlockRef
from baton.kv_codec.base import BlockCodec
from baton.transport.base import Peer, Transport
from baton.transport.host_memory import HostMemory
from baton.transport.selection import open_transports
from baton.worker.block_encoder import BlockEncoder
from baton.worker.block_reader import BlockReader, BlockSource
from benchmarks.codec_links.kv_pool import BLOCK_TOKENS, BenchPool
from benchmarks.codec_links.network import DEVICE
from prefill_worker.export_encoder import ExportCodec, ExportEncoder

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
) -> ExportEncoder | None:
    """Return the encoder of a prompt of ``num_tokens`` tokens; None if it travels raw."""
    if codec is KvCodecName.NONE:
        return None
    recent = (num_tokens - RECENT_TOKENS) // BLOCK_TOKENS
    chosen = ExportCodec(codec, KvCodecName.LOSSLESS, recent)
    return ExportEncoder(BlockEncoder(pool.layout, pool.staging, codecs), chosen)


class ChunkReader:
    """Reads announced blocks as a decode worker does."""

    def __init__(
        self,
        pool: BenchPool,
        codecs: Mapping[KvCodecName, BlockCodec],
        transport: Transport,
        peer: Peer,
    ) -> None:
        self._reader = BlockReader(pool.layout, pool.staging, codecs, CLOCK, TIMEOUT_SECONDS)
        self._source = BlockSource(transport, peer, TIMEOUT_SECONDS)

    async def read(self, blocks: Sequence[BlockRef], ids: Sequence[BlockId]) -> float:
        """Read, verify and decode blocks. Return for how long bytes were under way."""
        self._reader.check(blocks, self._reader.accepted(exact=False))
        read = await self._reader.read(self._source, blocks, ids)
        assert not read.bad, read
        return read.link_seconds
