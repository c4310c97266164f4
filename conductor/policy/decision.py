"""What was decided, why, and what else there was."""

from dataclasses import dataclass

from baton.core.ids import WorkerId
from conductor.policy.snapshot import StoredPrefix


@dataclass(frozen=True, slots=True)
class ScoredWorker:
    """A candidate: the lower the score, the better. ``local_blocks`` of the prompt are at hand
    there; of ``fetched_blocks`` more, a peer's store has a copy that is worth its way.
    ``late_seconds`` is by how much the first token is to miss its deadline."""

    worker: WorkerId
    score: float
    queue_seconds: float = 0.0
    service_seconds: float = 0.0
    local_blocks: int = 0
    fetched_blocks: int = 0
    late_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """Without ``prefill``, ``decode`` does the whole request. ``reuse`` names the store node to
    fetch from; ``service_seconds`` is the predicted work of the prefill worker."""

    prefill: WorkerId | None
    decode: WorkerId
    reason: str
    reuse: StoredPrefix | None = None
    service_seconds: float = 0.0
    ttft_seconds: float = 0.0
    tbt_seconds: float = 0.0
    prefill_scores: tuple[ScoredWorker, ...] = ()
    decode_scores: tuple[ScoredWorker, ...] = ()
