"""What a worker says of itself: what it has to do, what it holds, and how fast it is."""

from dataclasses import dataclass

from baton.core.cost import DecodeCost, PrefillCost

MAX_QUEUED = 32
"""Entries of a reported queue: what a heartbeat costs has a bound, and who comes after so many
others is not placed by the least of them."""

REFERENCE_PROMPT_TOKENS = 1024
"""Of a prompt, to compare workers' speeds by."""


@dataclass(frozen=True, slots=True)
class QueuedWork:
    """A prompt that waits, or several: seconds of computing, to be done ``deadline_seconds`` after
    the report; None where there is no deadline."""

    deadline_seconds: float | None
    work_seconds: float


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's report, made at ``at_seconds`` (wall time; 0: nothing was measured yet), between
    two steps.

    To read: ``queue`` by deadline, the last of :data:`MAX_QUEUED` entries standing for all others;
    ``queued_tokens`` are those of the same prompts; it is empty while ``prefill_cost`` is unknown.
    ``prefill_error`` is that cost's relative standard error for :data:`REFERENCE_PROMPT_TOKENS`
    tokens. To write: ``decode_requests`` that are here or on their way, with ``context_tokens`` of
    KV, and ``promised_tokens`` once their answers have grown as expected. ``answer_tokens`` is the
    mean of recent answers, nine in ten were longer than ``short_answer_tokens``. None is what
    nobody knows; ``link_bytes_per_second`` is that of other hosts.
    """

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    free_blocks: int = 0
    num_blocks: int = 0
    at_seconds: float = 0.0
    queue: tuple[QueuedWork, ...] = ()
    prefill_cost: PrefillCost | None = None
    prefill_error: float | None = None
    decode_requests: int = 0
    context_tokens: int = 0
    promised_tokens: int = 0
    decode_cost: DecodeCost | None = None
    answer_tokens: float | None = None
    short_answer_tokens: float | None = None
    link_bytes_per_second: float | None = None
