"""Whether an answer was what was promised: goodput counts those that were."""

from dataclasses import dataclass
from enum import StrEnum

from router.generation.record import GenerationRecord


class SloOutcome(StrEnum):
    """LATE: the first token came too late, SLOW: the others too far apart; who was both is LATE.
    FAILED: there was no answer, or it broke off."""

    MET = "met"
    LATE = "late"
    SLOW = "slow"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SloTargets:
    """``first_token_seconds`` is meant beside what the prompt takes by itself, and 0 promises
    nothing; ``token_gap_seconds`` is the mean over an answer. As the conductor has them."""

    first_token_seconds: float = 2.0
    token_gap_seconds: float = 0.05

    def verdict(self, record: GenerationRecord) -> SloOutcome | None:
        """Of an answer that is over. None where nothing was promised (batches), or its client
        left before it was."""
        if not record.is_promised or record.finish_reason == "cancelled":
            return None
        if record.finish_reason == "error":
            return SloOutcome.FAILED
        if self._is_late(record):
            return SloOutcome.LATE
        gap = record.tbt_seconds
        return (
            SloOutcome.SLOW if gap is not None and gap > self.token_gap_seconds else SloOutcome.MET
        )

    def _is_late(self, record: GenerationRecord) -> bool:
        promised, took = self.first_token_seconds, record.ttft_seconds
        if not promised or took is None or took <= promised:
            return False
        return took > promised + predicted_prefill_seconds(record)


def predicted_prefill_seconds(record: GenerationRecord) -> float:
    """What the prompt was thought to take on the worker that read it; 0 where nobody knew."""
    if not record.placements:
        return 0.0
    placement = record.placements[0].placement
    reader = placement.prefill or placement.decode
    for scored in placement.prefill_alternatives:  # the chosen one is the first, nearly always
        if scored.worker == reader.id:
            return scored.service_seconds
    return 0.0
