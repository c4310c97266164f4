"""Timings of one request's KV transfer, for telemetry."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import BlockRef


@dataclass(slots=True)
class KvTransferStats:
    """Statistics of one request's KV transfer.

    ``exposed_seconds`` is how long the transfer delays the second token: from ``last_chunk_at``,
    when the prompt was prefilled and its last chunk announced, to ``completed_at``, when all KV had
    arrived. ``scheduled_at`` is when the prefill worker announced that the prompt was nearly
    prefilled, ``reserved_at`` when blocks were reserved on this worker. All ``…_at`` are in
    monotonic seconds.

    ``size_bytes`` were read, for blocks of ``raw_bytes``. ``codecs`` are the codecs of the blocks;
    ``read_seconds`` includes decoding them, ``link_seconds`` does not."""

    transport: str = ""
    size_bytes: int = 0
    raw_bytes: int = 0
    codecs: set[KvCodecName] = field(default_factory=set)
    read_seconds: float = 0.0
    link_seconds: float = 0.0
    exposed_seconds: float = 0.0
    last_chunk_at: float = 0.0
    num_cached_blocks: int = 0
    scheduled_at: float | None = None
    reserved_at: float | None = None
    completed_at: float | None = None

    @property
    def codec(self) -> KvCodecName:
        """The strongest codec that blocks were in."""
        order = tuple(KvCodecName)
        return max(self.codecs, key=order.index, default=KvCodecName.NONE)

    def record_read(
        self, blocks: Sequence[BlockRef], size_bytes: int, raw_bytes: int, seconds: float
    ) -> None:
        """Record a read of ``size_bytes``, whether the blocks were good or not."""
        self.codecs.update(block.codec for block in blocks)
        self.size_bytes += size_bytes
        self.raw_bytes += raw_bytes
        self.read_seconds += seconds

    def details(self) -> dict[str, str]:
        return {
            "transport": self.transport,
            "kv_transfer_bytes": str(self.size_bytes),
            "kv_transfer_raw_bytes": str(self.raw_bytes),
            "kv_transfer_codec": self.codec.value,
            "kv_transfer_read_seconds": f"{self.read_seconds:.6f}",
            "kv_transfer_exposed_seconds": f"{self.exposed_seconds:.6f}",
            "decode_cached_blocks": str(self.num_cached_blocks),
        }
