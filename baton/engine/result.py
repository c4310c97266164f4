"""What an engine tells its worker."""

from dataclasses import dataclass

from baton.core.ids import BlockId, BlockKey, RequestId, TokenId
from baton.core.request import RequestOutput
from baton.engine.block_pool import BlockCounts
from baton.engine.plan import Plan


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """How far the prompt of a PREFILL request is after a step that computed some of it.

    KV of tokens [0, num_computed_tokens) is final; token p lies in
    ``block_ids[p // block_tokens]``, and ``block_ids`` is the table of the whole prompt.
    ``keys`` are the chain keys of the full ones among the final blocks.
    ``num_cached_tokens`` of them were found in the pool when the prompt was first scheduled.
    """

    request_id: RequestId
    num_computed_tokens: int
    block_ids: tuple[BlockId, ...]
    keys: tuple[BlockKey, ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class SealedRun:
    """Blocks [first, len(keys)) of a chain were sealed since the last run of their request, and
    are worth keeping. They are not pinned. ``tenant`` is the tag of whose quota they count to."""

    keys: tuple[BlockKey, ...]
    first: int
    tenant: bytes


@dataclass(frozen=True, slots=True)
class MigratedSequence:
    """An answer that another worker goes on with, from ``token_id`` on, which its client has
    already; ``progress`` is that of its KV, as after a prefill."""

    progress: PrefillProgress
    token_id: TokenId
    sealed: tuple[SealedRun, ...]


@dataclass(frozen=True, slots=True)
class ScheduledPrompt:
    """A prompt of which a step computes the first chunk, at the step's beginning; it had waited for
    ``waited_seconds`` by then."""

    request_id: RequestId
    at_seconds: float
    waited_seconds: float


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computed: ``num_tokens`` that attend to ``num_attended`` in all, in
    ``seconds``. ``is_prefill`` when none of its rows was a decode, ``is_decode`` when all were:
    ``num_decodes`` of ``num_rows``."""

    num_tokens: int
    num_attended: int
    seconds: float
    is_prefill: bool
    is_decode: bool = False
    num_rows: int = 1
    num_decodes: int = 0

    @classmethod
    def of(cls, plan: Plan, seconds: float) -> "StepWork":
        num_tokens = [len(row.token_ids) for row in plan.rows]
        attended = sum(
            count * row.start + count * (count + 1) // 2
            for count, row in zip(num_tokens, plan.rows, strict=True)
        )
        is_prefill, is_decode = min(num_tokens) > 1, max(num_tokens) == 1
        num_rows, num_decodes = len(num_tokens), num_tokens.count(1)
        return cls(sum(num_tokens), attended, seconds, is_prefill, is_decode, num_rows, num_decodes)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outputs of WHOLE, DECODE and PREFILL requests in batch order; progress of PREFILL.
    ``admitted`` are prompts that were begun; one that was preempted is not begun again. Those that
    were ``preempted`` gave their blocks to earlier ones, and wait for their turn anew."""

    outputs: tuple[RequestOutput, ...] = ()
    progress: tuple[PrefillProgress, ...] = ()
    sealed: tuple[SealedRun, ...] = ()
    work: StepWork | None = None
    admitted: tuple[ScheduledPrompt, ...] = ()
    preempted: tuple[RequestId, ...] = ()


@dataclass(frozen=True, slots=True)
class Reservation:
    """The block table of a hand-off's tokens. The answer gets its blocks as it grows.

    The first ``num_cached_blocks`` hold their KV already and must not be written to.
    """

    block_ids: tuple[BlockId, ...]
    num_cached_blocks: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """``queued_tokens`` are known tokens of prompts, waiting or begun, yet to be computed. A pause
    is a prompt that stood still for one whose turn came first."""

    running: int
    waiting: int
    held: int
    reserved: int
    queued_tokens: int
    num_steps: int
    num_preemptions: int
    num_pauses: int
    pool: BlockCounts
