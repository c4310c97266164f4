"""Builds snapshots of a cluster for tests of placement policies: workers, caches and requests with
round numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import BlockKey, WorkerId
from conductor.policy.snapshot import (
    AdmissionRates,
    AnyBlockKey,
    DecodeView,
    LinkSpeed,
    MixedView,
    PolicyQuery,
    PrefillView,
    QueuedPrefill,
    Snapshot,
    StoredPrefix,
    WorkerPool,
)

BLOCK_TOKENS = 16
BLOCK_KEYS = tuple(BlockKey(bytes([number]) * 16) for number in range(8))
NOW = 0.0

PREFILL = PrefillCost(0.0, 0.01, 0.0)
"""100 tokens per second."""

DECODE = DecodeCost(0.01, 0.001, 0.0)
LINK = LinkSpeed(1e6, 1e6, 0.0)
"""1,000 tokens per second at 1,000 bytes per token: ten times as fast as prefill."""


@dataclass
class FakeCache:
    """A fake prefix index. ``cached`` is the number of cached blocks of each worker. ``shares``
    has, for each of the first BLOCK_KEYS, the share of recent requests whose prompts contain that
    block."""

    cached: dict[str, int] = field(default_factory=dict)
    stored_prefix: StoredPrefix | None = None
    shares: Sequence[float] = ()

    def num_device_blocks(self, worker: WorkerId, keys: Sequence[AnyBlockKey]) -> int:
        return min(self.cached.get(worker, 0), len(keys))

    def num_local_blocks(self, view: PrefillView, keys: Sequence[AnyBlockKey]) -> int:
        return self.num_device_blocks(view.id, keys)

    def workers_with_prefix(self, keys: Sequence[AnyBlockKey], count: int) -> list[WorkerId]:
        names = sorted(self.cached, key=lambda name: (-self.cached[name], name))
        return [WorkerId(name) for name in names[:count]]

    def longest_stored_prefix(self, keys: Sequence[AnyBlockKey]) -> StoredPrefix | None:
        return self.stored_prefix

    def request_share(self, key: AnyBlockKey) -> float:
        return dict(zip(BLOCK_KEYS, self.shares, strict=False)).get(key, 0.0)  # type: ignore[call-overload, no-any-return]


def prefill(name: str, *queue: tuple[float, float], **fields: object) -> PrefillView:
    """Return a prefill worker. Each item of ``queue`` describes a queued prompt: the seconds until
    its deadline, and the seconds of prefill work that it needs."""
    queued = sorted(QueuedPrefill(NOW + deadline, work) for deadline, work in queue)
    busy = NOW if queued else 0.0
    free = busy + sum(item.work_seconds for item in queued)
    defaults = {"busy_until_seconds": busy, "free_at_seconds": free, "num_requests": len(queued)}
    return PrefillView(WorkerId(name), PREFILL, name, queue=queued, **(defaults | fields))  # type: ignore[arg-type]


def decode(name: str, promised: int = 0, capacity: int = 10_000, **fields: object) -> DecodeView:
    defaults = {"num_requests": int(promised > 0), "context_tokens": promised // 2}
    return DecodeView(
        WorkerId(name), DECODE, capacity, name, projected_tokens=promised,
        **(defaults | fields),  # type: ignore[arg-type]
    )  # fmt: skip


def mixed(
    name: str, *queue: tuple[float, float], promised: int = 0, capacity: int = 10_000,
    **fields: float
) -> MixedView:  # fmt: skip
    """Return a mixed worker with a queue of prompts, and answers that take ``promised`` tokens."""
    return MixedView(prefill(name, *queue), decode(name, promised, capacity), **fields)


def snapshot(
    prefills: Sequence[PrefillView],
    decodes: Sequence[DecodeView],
    cache: FakeCache | None = None,
    *,
    mixed: Sequence[MixedView] = (),
    num_placed: int = 0,
    admitted: AdmissionRates = AdmissionRates(),
    answer_tokens: float = 100.0,
) -> Snapshot:
    return Snapshot(
        NOW, num_placed, WorkerPool(prefills), WorkerPool(decodes), cache or FakeCache(),
        BLOCK_TOKENS,
        1000, LINK, answer_tokens, 16.0, admitted, WorkerPool(mixed),
    )  # fmt: skip


def query(name: str = "request", num_tokens: int = 133, **fields: object) -> PolicyQuery:
    return PolicyQuery(name, num_tokens, 1000, BLOCK_KEYS, **fields)  # type: ignore[arg-type]
