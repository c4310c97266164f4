"""Records of what happened to each request, for the debug headers and for `baton explain`."""

import math
import re
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from sys import intern
from typing import Any

from baton.core.ids import NO_TENANT, Epoch, RequestId, TenantId
from baton.core.kv_codec import KvCodecName
from baton.core.kv_transfer import WorkerRef
from baton.core.placement import Placement
from baton.core.request import CONTINUATION, NUMERIC, PROMPT_PREFILLED, RequestOutput
from baton.core.trace_context import TraceContext
from baton.core.variant import Variant
from router.limits import MAX_DIGITS, MAX_FINISHED_RECORDS, MAX_RECORDS

_LATENCIES = ("ttft_seconds", "itl_seconds")

_TRANSPORT = re.compile(r"[a-z0-9_-]{1,32}")


@dataclass(slots=True)
class PlacementRecord:
    """One placement of a request, in one epoch. If the placement ended early, ``error`` says why,
    and ``ended_at`` says when; otherwise ``error`` is empty and ``ended_at`` is None.
    ``num_tokens_before`` counts the answer's tokens from earlier placements. Times are monotonic,
    in seconds."""

    epoch: Epoch
    placement: Placement
    error: str = ""
    queried_at: float = 0.0
    placed_at: float = 0.0
    ended_at: float | None = None
    num_tokens_before: int = 0

    def explain(self) -> dict[str, Any]:
        placement = self.placement
        return {
            "epoch": self.epoch,
            "prefill": _worker_json(placement.prefill),
            "decode": _worker_json(placement.decode),
            "policy": placement.policy,
            "reason": placement.reason,
            "predicted": {
                "ttft_seconds": placement.ttft_seconds,
                "itl_seconds": placement.itl_seconds,
            },
            "alternatives": {
                name: [asdict(each) for each in found]
                for name, found in placement.alternatives.items()
            },
            "error": self.error,
            "kv_codec": _codec_json(placement),
        }


@dataclass(slots=True)
class PinRecord:
    """A prefix to be pinned (``cache_control``): the first ``num_tokens`` tokens of the prompt, for
    ``seconds``. ``store`` is the id of the store that has pinned the largest part of the prefix.
    ``error`` says why not all of the prefix's blocks are pinned; it is empty if all are pinned."""

    num_tokens: int
    seconds: float
    pinned_blocks: int = 0
    store: str = ""
    error: str = ""

    def record_pinned(self, pinned_blocks: int, num_blocks: int, store: str) -> None:
        """Record that a store pinned some blocks, unless another store has pinned more."""
        if pinned_blocks >= self.pinned_blocks:
            self.pinned_blocks, self.store = pinned_blocks, store
            missing = num_blocks - pinned_blocks
            self.error = (
                f"{missing} of {num_blocks} blocks are not in the store's DRAM" if missing else ""
            )


@dataclass(slots=True)
class GenerationRecord:
    """The record of what happened to one answer.

    Durations count from the request's arrival; ``queue_seconds`` is the time until the first
    placement. ``cached_tokens`` is None until the prompt has been computed. ``has_slo`` says
    whether the SLO applies to the request. ``pending_query`` is the epoch and the time of the
    placement query that has not been answered yet, or None. ``trace`` is the trace context of the
    request's span, or None if the request is not traced. ``variant`` is the variant of the model
    that the request was placed on last, or will be tried first; None while no worker is known.
    ``exact_kv`` says that its lossy codec is not applied to this request. ``refused`` is the
    placement that it would have got when a conductor refused it. ``is_numeric`` says that a worker
    may have continued the answer with other tokens than the one before it would have generated.
    """

    request_id: RequestId
    arrived_at: float
    num_prompt_tokens: int
    tenant: TenantId = NO_TENANT
    has_slo: bool = True
    placements: list[PlacementRecord] = field(default_factory=list)
    details: dict[str, str] = field(default_factory=dict)
    pins: list[PinRecord] = field(default_factory=list)
    cached_tokens: int | None = None
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    kv_bytes_transferred: int = 0
    num_tokens: int = 0
    queue_seconds: float | None = None
    ttft_seconds: float | None = None
    total_seconds: float | None = None
    finish_reason: str = ""
    error: str = ""
    pending_query: tuple[Epoch, float] | None = None
    trace: TraceContext | None = None
    variant: Variant | None = None
    exact_kv: bool = False
    model: str = ""
    refused: Placement | None = None
    is_numeric: bool = False

    def record_query(self, epoch: Epoch, now: float) -> None:
        self.pending_query = (epoch, now)

    def record_placement(self, epoch: Epoch, placement: Placement, now: float) -> None:
        if self.queue_seconds is None:
            self.queue_seconds = now - self.arrived_at
        asked_at = now if self.pending_query is None else self.pending_query[1]
        self.pending_query = None
        placed = PlacementRecord(
            epoch,
            placement,
            queried_at=asked_at,
            placed_at=now,
            num_tokens_before=self.num_tokens,
        )
        self.placements.append(placed)

    def record_failure(self, error: str, now: float) -> None:
        """Record why the last placement failed; another one may follow."""
        self.placements[-1].error = error
        self.placements[-1].ended_at = now

    def record_output(self, output: RequestOutput, now: float) -> None:
        if self.ttft_seconds is None and output.token_ids:
            self.ttft_seconds = now - self.arrived_at
            self._record_cached_tokens(output)
        elif output.cached_tokens and len(self.placements) == 1:  # told with the last output
            self._record_cached_tokens(output)
        self.num_tokens += len(output.token_ids)
        if output.details:
            self._record_details(output.details)

    def _record_cached_tokens(self, output: RequestOutput) -> None:
        self.cached_tokens = min(max(output.cached_tokens, 0), self.num_prompt_tokens)
        self.cached_by_tier = _cached_tokens_by_tier(self.cached_tokens, output.details)

    def record_error_output(self, output: RequestOutput) -> None:
        """Record the number of cached tokens from the output with which a worker ended the request
        early. The output has this number only if the worker had computed the prompt; the tenant is
        then charged for the prompt."""
        if self.cached_tokens is None and PROMPT_PREFILLED in output.details:
            self._record_cached_tokens(output)

    def record_end(self, finish_reason: str, now: float, error: str = "") -> None:
        """Record the end of the answer. Only the first call has an effect."""
        if not self.finish_reason:
            self.finish_reason = finish_reason
            self.error = error
            self.total_seconds = now - self.arrived_at

    def query_span(self, epoch: int) -> TraceContext:
        assert self.trace is not None
        return self.trace.child("place", self.request_id, epoch)

    def attempt_span(self, epoch: int) -> TraceContext:
        """Return the trace context of the attempt in an epoch. The workers' spans are its
        children."""
        assert self.trace is not None
        return self.trace.child("attempt", self.request_id, epoch)

    @property
    def log_fields(self) -> dict[str, str]:
        """Log fields that identify the request: its id, and its trace id if it is traced."""
        if self.trace is None:
            return {"request_id": self.request_id}
        return {"request_id": self.request_id, "trace_id": self.trace.trace_id}

    @property
    def transport(self) -> str:
        return self.details.get("transport", "")

    @property
    def store_wait_seconds(self) -> float:
        """Seconds that the request waited for the KV store; 0 if the worker reported none. Workers
        of the previous version report them as ``store_seconds``."""
        reported = self.details.get("store_wait_seconds", self.details.get("store_seconds", "0"))
        try:
            seconds = float(reported)
        except ValueError:
            return 0.0
        return seconds if 0 <= seconds < math.inf else 0.0

    @property
    def prefill(self) -> WorkerRef | None:
        return self.placements[-1].placement.prefill if self.placements else None

    @property
    def decode(self) -> WorkerRef | None:
        return self.placements[-1].placement.decode if self.placements else None

    @property
    def mean_itl_seconds(self) -> float | None:
        """Mean time between the answer's tokens; None until the answer has ended, and None if it
        has fewer than two tokens."""
        if self.total_seconds is None or self.ttft_seconds is None or self.num_tokens < 2:
            return None
        return (self.total_seconds - self.ttft_seconds) / (self.num_tokens - 1)

    @property
    def lossy_codec(self) -> str:
        """The lossy codec that workers may apply to KV of the model; empty if there is none."""
        return "" if self.variant is None else self.variant.lossy_codec

    @property
    def kv_codec(self) -> str:
        """The strongest codec that the request's KV may have passed: the lossy codec or, if the
        request wants exact KV, the codec of its last placement."""
        if self.lossy_codec and not self.exact_kv:
            return self.lossy_codec
        placed = self.placements[-1].placement if self.placements else None
        return (KvCodecName.NONE if placed is None else placed.kv_codec).value

    @property
    def continuation(self) -> str:
        """How the answer continued on another worker: ``exact``, with the tokens that would have
        come, or ``numeric``, where rounding or another seed may have changed them. Empty if it was
        not continued."""
        if not any(each.num_tokens_before for each in self.placements):
            return ""
        return NUMERIC if self.is_numeric else "exact"

    def headers(self) -> dict[str, str]:
        """Return the debug headers whose values are known now."""
        headers: dict[str, str] = {}
        if self.lossy_codec:
            headers["x-baton-kv-codec"] = self.kv_codec
        if self.prefill is not None:
            headers["x-baton-prefill"] = self.prefill.id
        if self.decode is not None:
            headers["x-baton-decode"] = self.decode.id
        if _TRANSPORT.fullmatch(self.transport):  # a worker's value, not to be trusted
            headers["x-baton-transport"] = self.transport
        if self.transport or self.finish_reason:
            headers["x-baton-kv-transfer-bytes"] = str(self.kv_bytes_transferred)
        return headers

    def explain(self) -> dict[str, Any]:
        """Return the record as a JSON object. The latencies in ``actual`` count from the request's
        arrival. To be comparable with them, ``predicted`` is the prediction for the first
        placement, not for the last one. For a request that was refused, these and the alternatives
        are those of the placement that it would have got; it has no workers."""
        placements = [each.explain() for each in self.placements]
        refused = PlacementRecord(Epoch(1), self.refused).explain() if self.refused else {}
        first = placements[0] if placements else refused
        last = placements[-1] if placements else refused
        return {
            "request_id": self.request_id,
            "prefill": _worker_json(self.prefill),
            "decode": _worker_json(self.decode),
            "policy": last.get("policy", ""),
            "reason": last.get("reason", ""),
            "predicted": first.get("predicted", dict.fromkeys(_LATENCIES)),
            "actual": {
                "ttft_seconds": self.ttft_seconds,
                "itl_seconds": self.mean_itl_seconds,
            },
            "alternatives": last.get("alternatives", {"prefill": [], "decode": [], "mixed": []}),
            "kv_codec": last.get("kv_codec", {}),
            "placements": placements,
            "transport": self.transport,
            "kv_transfer_bytes": self.kv_bytes_transferred,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.cached_tokens or 0,
            "cached_tokens_by_tier": self.cached_by_tier,
            "completion_tokens": self.num_tokens,
            "queue_seconds": self.queue_seconds,
            "ttft_seconds": self.ttft_seconds,
            "total_seconds": self.total_seconds,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "pins": [asdict(pin) for pin in self.pins],
            "details": dict(self.details),
            "continuation": self.continuation,
        }

    def _record_details(self, details: Mapping[str, str]) -> None:
        """Record what a worker has reported about the request, such as the size of its KV
        transfer."""
        size = details.get("kv_transfer_bytes", "")
        if size.isdecimal() and len(size) <= MAX_DIGITS:
            self.kv_bytes_transferred += int(size)
        self.is_numeric |= details.get(CONTINUATION) == NUMERIC
        self.details.update((intern(name), value) for name, value in details.items())


class GenerationHistory:
    """The records of the latest requests, by the request id that the client knows. A request has
    one record per answer: several if it has several prompts, or if ``n`` is above 1. Records are
    dropped by whole requests; those of the latest request are kept even if they are more than
    ``max_records``.

    ``inflight`` contains the records of all answers in progress, by answer id, in the order in
    which they began; admission bounds their number. ``finished`` contains the last
    answers (MAX_FINISHED_RECORDS), in the order of their ends. ``finished_tokens`` counts the
    tokens of all answers that have ended since the start."""

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._max_records = max_records
        self._records: OrderedDict[str, list[GenerationRecord]] = OrderedDict()
        self._num_records = 0
        self.inflight: dict[RequestId, GenerationRecord] = {}
        self.finished: deque[GenerationRecord] = deque(maxlen=MAX_FINISHED_RECORDS)
        self.finished_tokens = 0

    def add_records(self, request_id: str, records: list[GenerationRecord]) -> None:
        """Add the records of a request whose id is new."""
        self._records[request_id] = records
        self._num_records += len(records)
        while self._num_records > self._max_records and len(self._records) > 1:
            self._num_records -= len(self._records.popitem(last=False)[1])

    def begin(self, record: GenerationRecord) -> None:
        """Record that an answer is now in progress."""
        self.inflight[record.request_id] = record

    def end(self, record: GenerationRecord) -> None:
        """Record that an answer has ended. Call this once, after :meth:`begin`."""
        self.inflight.pop(record.request_id, None)
        self.finished.append(record)
        self.finished_tokens += record.num_tokens

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """Return the record of a request's first answer as a JSON object. If the request has
        several answers, ``choices`` contains the records of all of them. Return None if the request
        is not known."""
        records = self._records.get(request_id)
        if not records:
            return None
        explained = {**records[0].explain(), "request_id": request_id}
        if len(records) > 1:
            explained["choices"] = [record.explain() for record in records]
        return explained


def _codec_json(placement: Placement) -> dict[str, Any]:
    """Return the codec of a placement's KV transfer, and for each codec that was considered the
    predicted seconds until decoding can start; empty if none was considered."""
    if not placement.codec_alternatives:
        return {}
    seconds = {each.codec.value: each.decode_start_seconds for each in placement.codec_alternatives}
    return {"chosen": placement.kv_codec.value, "decode_start_seconds": seconds}


def _cached_tokens_by_tier(cached_tokens: int, details: Mapping[str, str]) -> dict[str, int]:
    """Split the cached tokens by tier. The result adds up to ``cached_tokens``, whatever the worker
    reports."""
    remaining, tiers = cached_tokens, {}
    for tier in ("disk", "dram"):
        count = details.get(f"cached_{tier}", "")
        is_valid = count.isdecimal() and len(count) <= MAX_DIGITS
        tiers[tier] = min(int(count), remaining) if is_valid else 0
        remaining -= tiers[tier]
    return {"device": remaining, "dram": tiers["dram"], "disk": tiers["disk"]}


def _worker_json(worker: WorkerRef | None) -> dict[str, Any] | None:
    if worker is None:
        return None
    return {"id": worker.id, "address": worker.address, "generation": worker.generation}
