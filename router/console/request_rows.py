"""The console's rows of answers in progress: where each is, and why it was placed there."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import islice
from typing import Any

from baton.core.kv_transfer import WorkerRef
from router.console.worker_rows import Rows
from router.generation.generation import MIGRATION_REASON
from router.generation.record import GenerationRecord
from router.limits import MAX_SHOWN_CHARACTERS, MAX_SHOWN_ENDED, MAX_SHOWN_REQUESTS

ENDED = "ended"


class Phase(StrEnum):
    """What an answer waits for. QUEUE: a placement. PREFILL: its first token; this includes the
    time in the prefill worker's queue. TRANSFER: the decode worker, which imports the KV. DECODE:
    the decode worker has it, and generates tokens."""

    QUEUE = "queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"


def phase_of(record: GenerationRecord) -> Phase:
    """Return the phase of an answer in progress. In a placement with two workers, the prefill
    worker sends the first token, and the decode worker all others."""
    if record.pending_query is not None or not record.placements:
        return Phase.QUEUE
    last = record.placements[-1]
    if last.ended_at is not None:
        return Phase.QUEUE
    num_tokens = record.num_tokens - last.num_tokens_before
    is_split = len(last.placement.workers) > 1
    if last.placement.reason == MIGRATION_REASON:  # nothing is to be computed again
        return Phase.DECODE if num_tokens else Phase.TRANSFER
    if num_tokens == 0:
        return Phase.PREFILL
    return Phase.TRANSFER if is_split and num_tokens == 1 else Phase.DECODE


def request_rows(records: Iterable[GenerationRecord]) -> Rows:
    """Return the rows of the first answers (MAX_SHOWN_REQUESTS), by answer id. ``arrived_at`` in a
    row is a monotonic time, so that the row of an answer that only waits does not change."""
    return {
        record.request_id: _request_row(record) for record in islice(records, MAX_SHOWN_REQUESTS)
    }


def ended_rows(finished: Sequence[GenerationRecord]) -> Rows:
    """Return the rows of the last :data:`MAX_SHOWN_ENDED` answers that have ended, by answer id."""
    return {record.request_id: _ended_row(record) for record in finished[-MAX_SHOWN_ENDED:]}


def _ended_row(record: GenerationRecord) -> dict[str, Any]:
    total_seconds = record.total_seconds or 0.0
    return {
        **_request_row(record),
        "phase": ENDED,
        "finish_reason": record.finish_reason,
        "total_seconds": round(total_seconds, 3),
        "ended_at": round(record.arrived_at + total_seconds, 3),
    }


def _request_row(record: GenerationRecord) -> dict[str, Any]:
    placement = record.placements[-1].placement if record.placements else None
    return {
        "id": record.request_id,
        "tenant": record.tenant,
        "phase": phase_of(record).value,
        "arrived_at": round(record.arrived_at, 3),
        "queue_seconds": record.queue_seconds,
        "ttft_seconds": record.ttft_seconds,
        "prefill": _worker_id(placement.prefill) if placement is not None else None,
        "decode": _worker_id(placement.decode) if placement is not None else None,
        "policy": placement.policy if placement is not None else "",
        "reason": placement.reason[:MAX_SHOWN_CHARACTERS] if placement is not None else "",
        "predicted_ttft_seconds": placement.ttft_seconds if placement is not None else None,
        "num_placements": len(record.placements),
        "last_error": record.placements[-2].error[:MAX_SHOWN_CHARACTERS]
        if len(record.placements) > 1
        else "",
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "cached_by_tier": dict(record.cached_by_tier),
        "num_tokens": record.num_tokens,
        "transport": record.transport[:32],
        "kv_transfer_bytes": record.kv_bytes_transferred,
    }


def _worker_id(worker: WorkerRef | None) -> str | None:
    return worker.id if worker is not None else None
