"""Judges whether an answer met the SLO. Goodput counts the answers that did."""

from dataclasses import dataclass
from enum import StrEnum

from router.generation.record import GenerationRecord


class SloOutcome(StrEnum):
    """MET: the answer is complete and met its SLO. LATE: the time to first token was too long.
    SLOW: only the mean inter-token latency was too long. FAILED: there was no answer, or it was
    incomplete."""

    MET = "met"
    LATE = "late"
    SLOW = "slow"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SloTargets:
    """The SLO, which the conductor also uses to place requests. The time to first token may be at
    most ``ttft_seconds`` plus the predicted time to compute the prompt; if ``ttft_seconds`` is 0,
    there is no limit. ``itl_seconds`` bounds the mean inter-token latency of an answer."""

    ttft_seconds: float = 2.0
    itl_seconds: float = 0.05

    def judge(self, record: GenerationRecord) -> SloOutcome | None:
        """Judge a finished answer. Returns None if the SLO does not apply to it (for example in a
        batch), or if the client disconnected."""
        if not record.has_slo or record.finish_reason == "cancelled":
            return None
        if record.finish_reason == "error":
            return SloOutcome.FAILED
        if self._is_late(record):
            return SloOutcome.LATE
        itl = record.mean_itl_seconds
        return SloOutcome.SLOW if itl is not None and itl > self.itl_seconds else SloOutcome.MET

    def _is_late(self, record: GenerationRecord) -> bool:
        target, ttft_seconds = self.ttft_seconds, record.ttft_seconds
        if not target or ttft_seconds is None or ttft_seconds <= target:
            return False
        return ttft_seconds > target + predicted_prefill_seconds(record)


def predicted_prefill_seconds(record: GenerationRecord) -> float:
    """Return the predicted number of seconds to compute the prompt on the first worker that was
    chosen for it; 0 if unknown."""
    if not record.placements:
        return 0.0
    placement = record.placements[0].placement
    worker = placement.prefill or placement.decode
    alternatives = (
        placement.mixed_alternatives if placement.is_mixed else placement.prefill_alternatives
    )
    for candidate in alternatives:  # usually the first one is the chosen one
        if candidate.worker == worker.id:
            return candidate.service_seconds
    return 0.0
