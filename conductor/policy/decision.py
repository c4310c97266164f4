"""A placement decision: the chosen workers, the reason, and the scored alternatives."""

from dataclasses import dataclass

from baton.core.ids import WorkerId
from conductor.policy.snapshot import StoredPrefix


@dataclass(frozen=True, slots=True)
class ScoredWorker:
    """A candidate worker; lower scores are better. ``local_blocks`` of the prompt are cached on the
    worker or its host; ``fetched_blocks`` more are worth fetching from a peer's store.
    ``late_seconds`` is by how much the SLO is predicted to be missed: by the first token for a
    prefill worker, by the inter-token latency for a decode worker. ``service_seconds`` is the
    predicted prefill time or decode step time."""

    worker: WorkerId
    score: float
    queue_seconds: float = 0.0
    service_seconds: float = 0.0
    local_blocks: int = 0
    fetched_blocks: int = 0
    late_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """If ``prefill`` is None, ``decode`` serves the whole request. ``fetch_source`` is the store
    node to fetch the prefix from; ``service_seconds`` is the predicted prefill time;
    ``ttft_seconds`` and ``itl_seconds`` are predictions."""

    prefill: WorkerId | None
    decode: WorkerId
    reason: str
    fetch_source: StoredPrefix | None = None
    service_seconds: float = 0.0
    ttft_seconds: float = 0.0
    itl_seconds: float = 0.0
    prefill_scores: tuple[ScoredWorker, ...] = ()
    decode_scores: tuple[ScoredWorker, ...] = ()
