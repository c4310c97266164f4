"""What the store gave one request."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.ids import BlockKey, RequestId
from baton.core.member import Member


@dataclass(slots=True)
class PrefixFetch:
    """Grows while blocks come in. ``node`` holds the first ``num_stored`` of ``keys``. The request
    waited for ``seconds`` from ``began_at`` on, if the store was asked at all. ``split`` says which
    are still to come, while the prompt is computed: blocks [first, end) of ``keys``."""

    request_id: RequestId
    way: str = ""
    reason: str = ""
    dram_tokens: int = 0
    disk_tokens: int = 0
    began_at: float = 0.0
    seconds: float = 0.0
    error: str = ""
    node: Member | None = None
    keys: Sequence[BlockKey] = ()
    num_stored: int = 0
    is_fetched: bool = False
    split: tuple[int, int] | None = None

    def tiers(self, cached_tokens: int) -> dict[str, int]:
        """Of the ``cached_tokens`` of the request, what each tier gave; they add up."""
        disk = min(self.disk_tokens, cached_tokens)
        dram = min(self.dram_tokens, cached_tokens - disk)
        return {"device": cached_tokens - dram - disk, "dram": dram, "disk": disk}

    def details(self, cached_tokens: int) -> dict[str, str]:
        """For ``baton explain``: of the ``cached_tokens`` of the request, where each tier's came
        from; they add up."""
        told = {f"cached_{tier}": str(tokens) for tier, tokens in self.tiers(cached_tokens).items()}
        told["store_seconds"] = f"{self.seconds:.6f}"
        optional = {
            "store_way": self.way,
            "store_reason": self.reason,
            "store_error": self.error,
            "store_node": self.node.id if self.node is not None else "",
        }
        return told | {name: value for name, value in optional.items() if value}
