"""What became of each request: for the debug headers, and for `baton explain`."""

import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from sys import intern
from typing import Any

from baton.core.ids import Epoch, RequestId, TenantId
from baton.core.kv_transfer import WorkerRef
from baton.core.placement import Placement
from baton.core.request import PROMPT_PREFILLED, RequestOutput
from baton.core.trace_context import TraceContext

MAX_RECORDS = 4096
"""About 5 KB each; the record that was written longest ago goes first."""

NO_TENANT = TenantId("")

MAX_DIGITS = 20
"""Of a number that a worker tells: as many bytes as there are."""

_TRANSPORT = re.compile(r"[a-z0-9_-]{1,32}")


@dataclass(slots=True)
class PlacementRecord:
    """One epoch. ``error`` is why it ended early; empty when it did not. Times are the clock's;
    ``ended_at`` is that of an early end."""

    epoch: Epoch
    placement: Placement
    error: str = ""
    asked_at: float = 0.0
    placed_at: float = 0.0
    ended_at: float | None = None

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
                "tbt_seconds": placement.tbt_seconds,
            },
            "alternatives": {
                "prefill": [asdict(each) for each in placement.prefill_alternatives],
                "decode": [asdict(each) for each in placement.decode_alternatives],
            },
            "error": self.error,
        }


@dataclass(slots=True)
class PinRecord:
    """A prefix to be kept (``cache_control``). ``error`` is why not all of it is."""

    num_tokens: int
    seconds: float
    pinned_blocks: int = 0
    store: str = ""
    error: str = ""

    def note(self, pinned_blocks: int, num_blocks: int, store: str) -> None:
        """The most that any store has."""
        if pinned_blocks >= self.pinned_blocks:
            self.pinned_blocks, self.store = pinned_blocks, store
            missing = num_blocks - pinned_blocks
            self.error = f"{missing} of {num_blocks} blocks are not in its DRAM" if missing else ""


@dataclass(slots=True)
class GenerationRecord:
    """One answer. Seconds count from the request's arrival, but for ``queue_seconds``, which
    placement took. ``cached_tokens`` is None until the prompt was read. ``is_promised`` says
    whether it has to meet the SLO. ``question`` is the epoch that a placement was asked for, and
    when, while there is no answer; ``trace`` is the request's span, if it is traced."""

    request_id: RequestId
    arrived_at: float
    num_prompt_tokens: int
    tenant: TenantId = NO_TENANT
    is_promised: bool = True
    placements: list[PlacementRecord] = field(default_factory=list)
    details: dict[str, str] = field(default_factory=dict)
    pins: list[PinRecord] = field(default_factory=list)
    cached_tokens: int | None = None
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    bytes_shipped: int = 0
    num_tokens: int = 0
    queue_seconds: float | None = None
    ttft_seconds: float | None = None
    total_seconds: float | None = None
    finish_reason: str = ""
    error: str = ""
    question: tuple[Epoch, float] | None = None
    trace: TraceContext | None = None

    def note_question(self, epoch: Epoch, now: float) -> None:
        self.question = (epoch, now)

    def note_placement(self, epoch: Epoch, placement: Placement, now: float) -> None:
        if self.queue_seconds is None:
            self.queue_seconds = now - self.arrived_at
        asked_at = now if self.question is None else self.question[1]
        self.question = None
        placed = PlacementRecord(epoch, placement, asked_at=asked_at, placed_at=now)
        self.placements.append(placed)

    def note_failure(self, error: str, now: float) -> None:
        """Of the last placement; another one may follow."""
        self.placements[-1].error = error
        self.placements[-1].ended_at = now

    def note_output(self, output: RequestOutput, now: float) -> None:
        if self.ttft_seconds is None and output.token_ids:
            self.ttft_seconds = now - self.arrived_at
            self.cached_tokens = min(output.cached_tokens, self.num_prompt_tokens)
            self.cached_by_tier = _cached_tokens_by_tier(self.cached_tokens, output.details)
        self.num_tokens += len(output.token_ids)
        if output.details:
            self._note_details(output.details)

    def note_refusal(self, output: RequestOutput) -> None:
        """A worker failed the request, perhaps after it had read the prompt: that is paid then."""
        if self.cached_tokens is None and PROMPT_PREFILLED in output.details:
            self.cached_tokens = min(max(output.cached_tokens, 0), self.num_prompt_tokens)

    def note_end(self, finish_reason: str, now: float, error: str = "") -> None:
        """The first one counts: exactly one terminal state."""
        if not self.finish_reason:
            self.finish_reason = finish_reason
            self.error = error
            self.total_seconds = now - self.arrived_at

    def question_span(self, epoch: int) -> TraceContext:
        assert self.trace is not None
        return self.trace.child("place", self.request_id, epoch)

    def attempt_span(self, epoch: int) -> TraceContext:
        """Under which workers tell of what they did for it."""
        assert self.trace is not None
        return self.trace.child("attempt", self.request_id, epoch)

    @property
    def named(self) -> dict[str, str]:
        """For the log: by what the request is found there, and its trace."""
        if self.trace is None:
            return {"request_id": self.request_id}
        return {"request_id": self.request_id, "trace_id": self.trace.trace_id}

    @property
    def transport(self) -> str:
        return self.details.get("transport", "")

    @property
    def store_seconds(self) -> float:
        """What the request waited for the store; 0 where that is not told."""
        try:
            seconds = float(self.details.get("store_seconds", "0"))
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
    def tbt_seconds(self) -> float | None:
        """Mean over the answer, once it has ended; None for a single token."""
        if self.total_seconds is None or self.ttft_seconds is None or self.num_tokens < 2:
            return None
        return (self.total_seconds - self.ttft_seconds) / (self.num_tokens - 1)

    def headers(self) -> dict[str, str]:
        """As far as known now."""
        known: dict[str, str] = {}
        if self.prefill is not None:
            known["x-baton-prefill"] = self.prefill.id
        if self.decode is not None:
            known["x-baton-decode"] = self.decode.id
        if _TRANSPORT.fullmatch(self.transport):  # it is a worker's word
            known["x-baton-transport"] = self.transport
        if self.transport or self.finish_reason:
            known["x-baton-bytes-shipped"] = str(self.bytes_shipped)
        return known

    def explain(self) -> dict[str, Any]:
        """Of several placements, the first one predicted the first token that the client got."""
        placements = [each.explain() for each in self.placements]
        first = placements[0] if placements else {}
        last = placements[-1] if placements else {}
        return {
            "request_id": self.request_id,
            "prefill": _worker_json(self.prefill),
            "decode": _worker_json(self.decode),
            "policy": last.get("policy", ""),
            "reason": last.get("reason", ""),
            "predicted": first.get("predicted", {"ttft_seconds": None, "tbt_seconds": None}),
            "actual": {"ttft_seconds": self.ttft_seconds, "tbt_seconds": self.tbt_seconds},
            "alternatives": last.get("alternatives", {"prefill": [], "decode": []}),
            "placements": placements,
            "transport": self.transport,
            "bytes_shipped": self.bytes_shipped,
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
        }

    def _note_details(self, details: Mapping[str, str]) -> None:
        shipped = details.get("bytes_shipped", "")
        if shipped.isdecimal() and len(shipped) < MAX_DIGITS:
            self.bytes_shipped += int(shipped)
        self.details.update((intern(name), value) for name, value in details.items())


class GenerationHistory:
    """The last requests, by the id that their client knows. One entry has one record for each
    answer (``n``, several prompts)."""

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._max_records = max_records
        self._records: OrderedDict[str, list[GenerationRecord]] = OrderedDict()

    def add(self, request_id: str, records: list[GenerationRecord]) -> None:
        self._records[request_id] = records
        while len(self._records) > self._max_records:
            self._records.popitem(last=False)

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """The first answer, with all of them under ``choices`` when there are several."""
        records = self._records.get(request_id)
        if not records:
            return None
        explained = {**records[0].explain(), "request_id": request_id}
        if len(records) > 1:
            explained["choices"] = [record.explain() for record in records]
        return explained


def _cached_tokens_by_tier(cached_tokens: int, details: Mapping[str, str]) -> dict[str, int]:
    """Adds up to ``cached_tokens``, whatever a worker says."""
    left, tiers = cached_tokens, {}
    for tier in ("disk", "dram"):
        told = details.get(f"cached_{tier}", "")
        tiers[tier] = min(int(told), left) if told.isdecimal() and len(told) < MAX_DIGITS else 0
        left -= tiers[tier]
    return {"device": left, "dram": tiers["dram"], "disk": tiers["disk"]}


def _worker_json(worker: WorkerRef | None) -> dict[str, Any] | None:
    if worker is None:
        return None
    return {"id": worker.id, "address": worker.address, "generation": worker.generation}
