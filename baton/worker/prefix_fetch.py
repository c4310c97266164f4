"""The state of one request's prefix fetch from the KV store."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.ids import BlockKey, RequestId
from baton.core.member import Member


@dataclass(slots=True)
class PrefixFetch:
    """``dram_tokens`` and ``disk_tokens`` grow as blocks arrive from these tiers of the store.
    Store node ``node`` has the first ``num_stored_blocks`` of ``keys``. The request waited
    ``wait_seconds`` for the store, starting at ``started_at`` (both 0 if the store was not
    queried). ``split_range`` is the half-open range of block indices in ``keys`` that is fetched
    while the prompt is prefilled."""

    request_id: RequestId
    mode: str = ""
    reason: str = ""
    dram_tokens: int = 0
    disk_tokens: int = 0
    started_at: float = 0.0
    wait_seconds: float = 0.0
    error: str = ""
    node: Member | None = None
    keys: Sequence[BlockKey] = ()
    num_stored_blocks: int = 0
    is_fetched: bool = False
    split_range: tuple[int, int] | None = None

    def tokens_by_tier(self, cached_tokens: int) -> dict[str, int]:
        """Split the request's ``cached_tokens`` by the tier they came from; the parts add up."""
        disk = min(self.disk_tokens, cached_tokens)
        dram = min(self.dram_tokens, cached_tokens - disk)
        return {"device": cached_tokens - dram - disk, "dram": dram, "disk": disk}

    def details(self, cached_tokens: int) -> dict[str, str]:
        """Return the details that ``baton explain`` shows, with the request's ``cached_tokens`` by
        tier."""
        details = {
            f"cached_{tier}": str(tokens)
            for tier, tokens in self.tokens_by_tier(cached_tokens).items()
        }
        details["store_wait_seconds"] = f"{self.wait_seconds:.6f}"
        optional = {
            "store_mode": self.mode,
            "store_reason": self.reason,
            "store_error": self.error,
            "store_node": self.node.id if self.node is not None else "",
        }
        return details | {name: value for name, value in optional.items() if value}
