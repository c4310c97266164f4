"""Timings of one request's KV transfer, for telemetry."""

from dataclasses import dataclass


@dataclass(slots=True)
class KvTransferStats:
    """Statistics of one request's KV transfer.

    ``exposed_seconds`` is how long the transfer delays the second token: from ``last_chunk_at``,
    when the prompt was prefilled and its last chunk announced, to ``completed_at``, when all KV had
    arrived. ``scheduled_at`` is when the prefill worker announced that the prompt was nearly
    prefilled, ``reserved_at`` when blocks were reserved on this worker. All ``…_at`` are in
    monotonic seconds."""

    transport: str = ""
    size_bytes: int = 0
    read_seconds: float = 0.0
    exposed_seconds: float = 0.0
    last_chunk_at: float = 0.0
    num_cached_blocks: int = 0
    scheduled_at: float | None = None
    reserved_at: float | None = None
    completed_at: float | None = None

    def details(self) -> dict[str, str]:
        return {
            "transport": self.transport,
            "kv_transfer_bytes": str(self.size_bytes),
            "kv_transfer_read_seconds": f"{self.read_seconds:.6f}",
            "kv_transfer_exposed_seconds": f"{self.exposed_seconds:.6f}",
            "decode_cached_blocks": str(self.num_cached_blocks),
        }
