"""Where a request goes, and what else there was."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.ids import WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.store import StoreHint

MAX_ALTERNATIVES = 8
"""Of each pool that a placement tells of: routers remember them of thousands of requests."""


@dataclass(frozen=True, slots=True)
class PlacementAlternative:
    """A worker that was thought of: the lower the score, the better. The request would start there
    after ``queue_seconds``; ``service_seconds`` is what a prompt takes to compute, or a step of
    decoding. ``local_blocks`` are at hand there, ``fetched_blocks`` would come from a peer's store.
    By ``late_seconds`` it would miss its deadline."""

    worker: WorkerId
    score: float
    queue_seconds: float = 0.0
    service_seconds: float = 0.0
    local_blocks: int = 0
    fetched_blocks: int = 0
    late_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Without ``prefill``, ``decode`` does the whole request. Predictions are None where nothing
    was measured; alternatives are best first, the chosen one among them."""

    prefill: WorkerRef | None
    decode: WorkerRef
    reason: str
    store_hint: StoreHint | None = None
    policy: str = ""
    ttft_seconds: float | None = None
    tbt_seconds: float | None = None
    prefill_alternatives: Sequence[PlacementAlternative] = ()
    decode_alternatives: Sequence[PlacementAlternative] = ()

    @property
    def workers(self) -> tuple[WorkerRef, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)
