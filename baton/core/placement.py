"""The placement of a request on workers: the query, its result, and the alternatives that were
considered."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.adapter import AdapterRef
from baton.core.ids import BlockKey, Epoch, RequestId, TenantId, WorkerId
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import WorkerRef
from baton.core.store import StoreHint

MAX_ALTERNATIVES = 8
"""Maximum number of alternatives per pool in a placement, since routers keep those of thousands of
requests."""


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """A query for a placement. ``num_tokens`` counts the prompt and the tokens emitted so far;
    ``block_keys`` are the keys of the full blocks of all these tokens. ``excluded`` are workers
    that failed this request before. Requests of one ``session`` are prefilled on the same worker
    unless cached prefixes or load favour another one. ``trace`` is the traceparent of the query's
    span; it is empty if the request is not traced. Only workers that have loaded ``adapter`` are
    chosen; None means the base model. If ``exact_kv`` is set, no lossy codec may be applied to the
    request's KV. ``max_attended_tokens`` is
    :attr:`baton.core.attention_window.AttentionWindow.max_attended`; None if the request has no
    attention window. Only workers of ``variant``, the id of the variant that ``block_keys`` are
    for, are chosen; if it is empty, workers of any one variant."""

    request_id: RequestId
    epoch: Epoch
    tenant: TenantId
    num_tokens: int
    max_new_tokens: int
    block_keys: tuple[BlockKey, ...] = field(repr=False)
    excluded: frozenset[WorkerId]
    model: str
    trace: str = ""
    session: str = ""
    adapter: AdapterRef | None = None
    exact_kv: bool = False
    max_attended_tokens: int | None = None
    variant: str = ""


@dataclass(frozen=True, slots=True)
class ScoredWorker:
    """A candidate worker; lower scores are better. ``queue_seconds`` is the predicted wait until
    the request would start there; ``service_seconds`` is the predicted time of the prefill, or of a
    decode step. ``local_blocks`` counts the blocks of the prompt that are cached on the worker's
    device; ``fetched_blocks`` counts further blocks that are worth fetching from a store.
    ``late_seconds`` is the predicted excess over the SLO: of the TTFT for a prefill worker, of the
    inter-token latency for a decode worker; 0 if the SLO is met. For a mixed worker,
    ``service_seconds`` and ``late_seconds`` are those of the prefill."""

    worker: WorkerId
    score: float
    queue_seconds: float = 0.0
    service_seconds: float = 0.0
    local_blocks: int = 0
    fetched_blocks: int = 0
    late_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ScoredCodec:
    """A codec in which the KV of a request could be transferred. ``decode_start_seconds`` is the
    predicted time from the start of the prefill until the decode worker has all KV."""

    codec: KvCodecName
    decode_start_seconds: float


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers of a request. If ``prefill`` is None, the ``decode`` worker also does the
    prefill. If both are the same worker, it is a prefill worker that also generates the answer:
    there is no decode worker, or the answer has one token. Predictions are None if nothing has been
    measured. Alternatives are ordered from best to worst, and include the chosen worker; whatever
    their kind, they are workers that only compute prompts, that only write answers, and
    (``mixed_alternatives``) that serve whole requests. ``kv_codec`` is the codec for the KV
    transfer, and the best of ``codec_alternatives``; these are empty if there is no transfer, or
    only raw KV can be transferred."""

    prefill: WorkerRef | None
    decode: WorkerRef
    reason: str
    store_hint: StoreHint | None = None
    policy: str = ""
    ttft_seconds: float | None = None
    itl_seconds: float | None = None
    prefill_alternatives: Sequence[ScoredWorker] = ()
    decode_alternatives: Sequence[ScoredWorker] = ()
    mixed_alternatives: Sequence[ScoredWorker] = ()
    kv_codec: KvCodecName = KvCodecName.NONE
    codec_alternatives: Sequence[ScoredCodec] = ()

    @property
    def is_mixed(self) -> bool:
        """Whether the request was placed on a worker that serves whole requests."""
        worker = self.decode.id
        return self.prefill is None and any(
            each.worker == worker for each in self.mixed_alternatives
        )

    @property
    def alternatives(self) -> dict[str, Sequence[ScoredWorker]]:
        """All alternatives, by what the workers do."""
        return {
            "prefill": self.prefill_alternatives,
            "decode": self.decode_alternatives,
            "mixed": self.mixed_alternatives,
        }

    @property
    def workers(self) -> tuple[WorkerRef, ...]:
        if self.prefill is None or self.prefill.id == self.decode.id:
            return (self.decode,)
        return self.prefill, self.decode
