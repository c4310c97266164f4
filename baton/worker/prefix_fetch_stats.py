"""Statistics for telemetry: where a prompt's cached prefix came from, and how long fetching it
took."""

from dataclasses import dataclass


@dataclass(slots=True)
class PrefixFetchStats:
    """Statistics of one prompt's fetch from the store. ``mode`` and ``reason`` say whether the
    stored prefix was fetched, and why; they are empty if the store had no more of the prefix than
    the device. ``dram_tokens`` and ``disk_tokens`` grow as blocks arrive from the DRAM and SSD
    tiers of store node ``node``. The request waited ``wait_seconds`` for the store, starting at
    ``started_at`` (both 0 if the store was not queried)."""

    mode: str = ""
    reason: str = ""
    node: str = ""
    dram_tokens: int = 0
    disk_tokens: int = 0
    started_at: float = 0.0
    wait_seconds: float = 0.0
    error: str = ""

    def tokens_by_tier(self, cached_tokens: int) -> dict[str, int]:
        """Split the request's ``cached_tokens`` by the tier that they came from. The parts add up
        to ``cached_tokens``."""
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
            "store_node": self.node,
        }
        return details | {name: value for name, value in optional.items() if value}
