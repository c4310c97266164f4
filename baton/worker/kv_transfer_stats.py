"""Timings of one request's KV transfer, for telemetry."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import BlockRef
from baton.worker.read_times import ReadTimes, link_seconds, read_seconds


@dataclass(slots=True)
class KvTransferStats:
    """Statistics of one request's KV transfer.

    ``exposed_seconds`` is how long the transfer delays the second token: from ``last_chunk_at``,
    when the prompt was prefilled and its last chunk announced, to ``completed_at``, when all KV had
    arrived. ``scheduled_at`` is when the prefill worker announced that the prompt was nearly
    prefilled, ``reserved_at`` when blocks were reserved on this worker. All ``…_at`` are in
    monotonic seconds.

    ``size_bytes`` were read, for blocks of ``raw_bytes``. ``codecs`` are the codecs of the blocks,
    ``times`` those of the reads."""

    transport: str = ""
    size_bytes: int = 0
    raw_bytes: int = 0
    codecs: set[KvCodecName] = field(default_factory=set)
    times: list[ReadTimes] = field(default_factory=list)
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

    @property
    def read_seconds(self) -> float:
        """The time in which blocks were read, verified or decoded."""
        return read_seconds(self.times)

    @property
    def link_seconds(self) -> float:
        """The time in which bytes were under way."""
        return link_seconds(self.times)

    def record_read(
        self, blocks: Sequence[BlockRef], block_bytes: int, times: Iterable[ReadTimes]
    ) -> None:
        """Record a read of blocks, which have ``block_bytes`` each when they are raw, whether they
        were good or not."""
        self.codecs.update(block.codec for block in blocks)
        self.size_bytes += sum(block.size_bytes for block in blocks)
        self.raw_bytes += len(blocks) * block_bytes
        self.times += times

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
