"""The results that an engine returns to its worker."""

from dataclasses import dataclass

from baton.core.ids import BlockId, BlockKey, RequestId, TokenId
from baton.core.request import RequestOutput
from baton.engine.block_pool import BlockCounts
from baton.engine.plan import Plan, Row


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Progress of a PREFILL request after a step that computed some of its prompt.

    The KV of tokens [0, num_computed_tokens) is final. ``block_ids`` is the block table of the
    whole prompt, in the order of :class:`baton.engine.kv_window.KvWindow`. ``sealed_keys`` are the
    keys of the leading blocks that are full of final KV. ``num_cached_tokens`` is the number of
    tokens whose KV was found in the pool when the prompt was first scheduled.
    """

    request_id: RequestId
    num_computed_tokens: int
    block_ids: tuple[BlockId, ...]
    sealed_keys: tuple[BlockKey, ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class SealedRun:
    """Blocks [first_new_block, len(keys)) of a chain, which were sealed since the request's
    previous SealedRun and may be published to the store. They are not pinned. ``tenant_tag`` is the
    tag of the tenant whose quota they count towards. If ``exact_kv`` is set, no lossy codec may be
    applied to them."""

    keys: tuple[BlockKey, ...]
    first_new_block: int
    tenant_tag: bytes
    exact_kv: bool = False


@dataclass(frozen=True, slots=True)
class MigratedSequence:
    """A running request that another worker continues after ``last_token_id``, which the client
    already has. ``progress`` describes the KV of all tokens before that one, in the same form as
    the KV of a PREFILL request."""

    progress: PrefillProgress
    last_token_id: TokenId
    sealed_runs: tuple[SealedRun, ...]


@dataclass(frozen=True, slots=True)
class ScheduledPrompt:
    """A prompt whose first chunk is computed by a step that started at ``start_seconds``, after the
    request had waited for ``waited_seconds``."""

    request_id: RequestId
    start_seconds: float
    waited_seconds: float


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step: ``num_tokens`` tokens, which attend to ``num_attended_tokens`` tokens
    in total, computed in ``seconds``. ``num_decodes`` of its ``num_rows`` rows were decodes; every
    row with a single token counts as a decode. ``is_prefill`` says that no row was a decode,
    ``is_decode`` that all rows were decodes. A decode may have drafts, ``num_drafts`` in all, which
    ``num_tokens`` includes."""

    num_tokens: int
    num_attended_tokens: int
    seconds: float
    is_prefill: bool
    is_decode: bool = False
    num_rows: int = 1
    num_decodes: int = 0
    num_drafts: int = 0

    @classmethod
    def from_plan(cls, plan: Plan, seconds: float) -> "StepWork":
        num_tokens = [len(row.token_ids) for row in plan.rows]
        attended = sum(
            count * row.start + count * (count + 1) // 2
            if row.attention_window is None
            else _attended_in_window(row, row.attention_window.max_attended)
            for count, row in zip(num_tokens, plan.rows, strict=True)
        )
        num_drafts = sum(row.num_drafts for row in plan.rows)
        if num_drafts:
            num_decodes = sum(row.num_tokens - row.num_drafts == 1 for row in plan.rows)
        else:
            num_decodes = num_tokens.count(1)
        num_rows = len(num_tokens)
        is_prefill, is_decode = num_decodes == 0, num_decodes == num_rows
        return cls(
            sum(num_tokens), attended, seconds, is_prefill, is_decode, num_rows, num_decodes,
            num_drafts,
        )  # fmt: skip


def _attended_in_window(row: Row, most: int) -> int:
    """Return how many tokens the row's tokens attend to in total, if each attends to at most
    ``most``."""
    num_growing = min(max(0, most - row.start), row.num_tokens)
    growing = num_growing * row.start + num_growing * (num_growing + 1) // 2
    return growing + (row.num_tokens - num_growing) * most


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outputs of all requests of a step in batch order, and the progress of PREFILL requests.
    ``admitted`` are the prompts that were scheduled for the first time (not those scheduled again
    after a preemption). ``preempted`` requests lost their blocks to requests of higher priority, or
    to earlier ones of the same priority, and are back in the waiting queue."""

    outputs: tuple[RequestOutput, ...] = ()
    progress: tuple[PrefillProgress, ...] = ()
    sealed_runs: tuple[SealedRun, ...] = ()
    work: StepWork | None = None
    admitted: tuple[ScheduledPrompt, ...] = ()
    preempted: tuple[RequestId, ...] = ()


@dataclass(frozen=True, slots=True)
class Reservation:
    """The blocks of a KV transfer: those of the request's block table that later tokens read, in
    the table's order. More blocks are added as the answer grows.

    The first ``num_cached_blocks`` blocks already contain their KV and must not be written to.
    """

    block_ids: tuple[BlockId, ...]
    num_cached_blocks: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The state of an engine, and its counters since it started. ``queued_tokens`` counts the
    uncomputed tokens of waiting and partly computed prompts. ``num_pauses`` counts how often a
    partly computed prompt got no tokens in a step because other prompts ranked before it.
    ``num_drafted_tokens`` counts the tokens drafted by speculative decoding, and
    ``num_accepted_tokens`` those of them that became part of an answer. ``num_first_tokens`` counts
    the first tokens of requests with a TTFT deadline, and ``num_late_first_tokens`` those of them
    that came after it."""

    running: int
    waiting: int
    exported: int
    reserved: int
    queued_tokens: int
    num_steps: int
    num_preemptions: int
    num_pauses: int
    pool: BlockCounts
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_first_tokens: int = 0
    num_late_first_tokens: int = 0
