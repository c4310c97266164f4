"""A worker's load report: its queue, its KV memory, and its speed."""

import math
from dataclasses import dataclass

from baton.core.cost import DecodeCost, PrefillCost

MAX_QUEUED = 32
"""Maximum number of entries in a reported queue. This bounds the size of heartbeats; behind this
many prompts, the exact order no longer matters for placement."""

REFERENCE_PROMPT_TOKENS = 1024
"""Length of the prompt by which workers' speeds are compared."""


@dataclass(frozen=True, slots=True)
class QueuedWork:
    """One or several waiting prompts. ``work_seconds`` is the time that it takes to compute them.
    Their deadline is ``deadline_seconds`` after the report; None means that they have no
    deadline."""

    deadline_seconds: float | None
    work_seconds: float


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's load report, made at ``at_seconds`` (wall time; 0: nothing was measured yet),
    between two steps.

    Prefill: ``queue`` is ordered by deadline, and the last of :data:`MAX_QUEUED` entries stands for
    all others; it is empty while ``prefill_cost`` is unknown. ``queued_tokens`` counts the tokens
    of all these prompts that are still to be computed. ``prefill_error`` is the relative standard
    error of ``prefill_cost`` for :data:`REFERENCE_PROMPT_TOKENS` tokens. ``num_first_tokens``
    counts the first tokens of requests with a TTFT deadline that the worker has generated since its
    start, or that should have come by now; ``num_late_first_tokens`` counts those of them that came
    after their deadline or have not come yet.

    Decode: ``decode_requests`` counts the requests that decode on this worker or whose KV is being
    imported. They have ``context_tokens`` tokens of KV now, and will have ``promised_tokens`` once
    their answers have the predicted lengths. ``answer_tokens`` is the mean length of recent
    answers; nine in ten of these were longer than ``short_answer_tokens``.
    ``link_bytes_per_second`` is the bandwidth of KV transfers from other hosts. With
    ``window_tokens``, a request holds only about the last so many tokens of a part of its KV, which
    is ``windowed_share`` of each token's; tokens whose KV is not held are not counted. A block
    counts the KV of all layers.

    Both at once, as on a mixed worker: in the last seconds, steps that computed prompts took the
    share ``prompt_share`` of the time (0 to 1). Beside the answers that run now, a prompt takes
    ``prompt_slowdown`` times as long as alone (1 or more). A step with prompts and answers takes at
    most ``shared_step_seconds``; None means that it may take any time, or that prompts and answers
    do not share steps.

    None means unknown.
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
    num_first_tokens: int = 0
    num_late_first_tokens: int = 0
    decode_requests: int = 0
    context_tokens: int = 0
    promised_tokens: int = 0
    decode_cost: DecodeCost | None = None
    answer_tokens: float | None = None
    short_answer_tokens: float | None = None
    link_bytes_per_second: float | None = None
    window_tokens: int | None = None
    windowed_share: float = 1.0
    prompt_share: float = 0.0
    prompt_slowdown: float = 1.0
    shared_step_seconds: float | None = None

    def held_tokens(self, num_tokens: int) -> int:
        """Return the memory that a request of ``num_tokens`` takes, in tokens."""
        return held_tokens(num_tokens, self.window_tokens, self.windowed_share)


def held_tokens(num_tokens: int, window_tokens: int | None, windowed_share: float = 1.0) -> int:
    """Return the memory that a request of ``num_tokens`` takes, as the number of tokens whose whole
    KV would take as much. Of the part ``windowed_share`` of a token's KV, only that of the last
    ``window_tokens`` is kept (None: all of it)."""
    if window_tokens is None or num_tokens <= window_tokens:
        return num_tokens
    return math.ceil(num_tokens - (num_tokens - window_tokens) * windowed_share)
