"""Hand-made snapshots: workers, caches and requests with round numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import BlockKey, WorkerId
from conductor.policy.snapshot import (
    AdmissionRates,
    AnyBlockKey,
    DecodeView,
    LinkSpeed,
    PolicyQuery,
    PrefillView,
    QueuedPrefill,
    Snapshot,
    StoredPrefix,
    WorkerPool,
)

BLOCK = 16
CHAIN = tuple(BlockKey(bytes([number]) * 16) for number in range(8))
NOW = 0.0

PREFILL = PrefillCost(0.0, 0.01, 0.0)
"""A hundred tokens a second."""

DECODE = DecodeCost(0.01, 0.001, 0.0)
LINK = LinkSpeed(1e6, 1e6, 0.0)
"""With 1,000 bytes a token, a thousand tokens a second: ten times as fast as computing."""


@dataclass
class FakeCache:
    """``cached`` blocks by worker, what a store has, and shares of the chain's keys."""

    cached: dict[str, int] = field(default_factory=dict)
    held: StoredPrefix | None = None
    shares: Sequence[float] = ()

    def local_blocks(self, view: PrefillView, keys: Sequence[AnyBlockKey]) -> int:
        return min(self.cached.get(view.id, 0), len(keys))

    def holders(self, keys: Sequence[AnyBlockKey], count: int) -> list[WorkerId]:
        names = sorted(self.cached, key=lambda name: (-self.cached[name], name))
        return [WorkerId(name) for name in names[:count]]

    def stored(self, keys: Sequence[AnyBlockKey]) -> StoredPrefix | None:
        return self.held

    def share(self, key: AnyBlockKey) -> float:
        return dict(zip(CHAIN, self.shares, strict=False)).get(key, 0.0)  # type: ignore[call-overload, no-any-return]


def prefill(name: str, *queue: tuple[float, float], **fields: object) -> PrefillView:
    """``queue``: deadlines from now, and seconds of work."""
    dues = sorted(QueuedPrefill(NOW + deadline, work) for deadline, work in queue)
    busy = NOW if dues else 0.0
    free = busy + sum(due.work_seconds for due in dues)
    given = {"busy_until_seconds": busy, "free_at_seconds": free, "num_requests": len(dues)}
    return PrefillView(WorkerId(name), PREFILL, name, queue=dues, **(given | fields))  # type: ignore[arg-type]


def decode(name: str, promised: int = 0, capacity: int = 10_000, **fields: object) -> DecodeView:
    given = {"num_requests": int(promised > 0), "context_tokens": promised // 2}
    return DecodeView(
        WorkerId(name), DECODE, capacity, name, promised_tokens=promised,
        **(given | fields),  # type: ignore[arg-type]
    )  # fmt: skip


def snapshot(
    prefills: Sequence[PrefillView],
    decodes: Sequence[DecodeView],
    cache: FakeCache | None = None,
    *,
    num_placed: int = 0,
    admitted: AdmissionRates = AdmissionRates(),
    answer_tokens: float = 100.0,
) -> Snapshot:
    return Snapshot(
        NOW, num_placed, WorkerPool(prefills), WorkerPool(decodes), cache or FakeCache(), BLOCK,
        1000, LINK, answer_tokens, 16.0, admitted,
    )  # fmt: skip


def query(name: str = "request", num_tokens: int = 133, **fields: object) -> PolicyQuery:
    return PolicyQuery(name, num_tokens, 1000, CHAIN, **fields)  # type: ignore[arg-type]
