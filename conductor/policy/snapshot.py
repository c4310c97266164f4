"""The cluster as the conductor believes it to be at the moment of a decision."""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import WorkerId

AnyBlockKey = Hashable
"""Of a block: a chain key, or a trace's id. Either stands for all blocks before it, too."""


@dataclass(frozen=True, slots=True, order=True)
class QueuedPrefill:
    """Work that waits at a worker, and when it is to be done."""

    deadline_seconds: float
    work_seconds: float


@dataclass(slots=True)
class PrefillView:
    """Its step ends at ``busy_until_seconds``; then it has all of ``queue``, by deadline, of
    ``queued_tokens`` in all, to compute. ``node`` is its host's store. While its cost is not
    ``measured``, it is a guess to prefer one by, and nobody is refused for it."""

    id: WorkerId
    cost: PrefillCost
    node: str = ""
    busy_until_seconds: float = 0.0
    queue: list[QueuedPrefill] = field(default_factory=list)
    num_requests: int = 0
    queued_tokens: int = 0
    free_at_seconds: float = 0.0
    """When all of it will have been computed."""
    measured: bool = True

    @property
    def load(self) -> float:
        return self.free_at_seconds

    def queue_seconds(self, now_seconds: float) -> float:
        return max(self.free_at_seconds - now_seconds, 0.0)


@dataclass(slots=True)
class DecodeView:
    """Of all requests that it has or will get: ``context_tokens`` are held once all are there,
    ``promised_tokens`` is what they will have grown to, both as of ``as_of_seconds``. ``measured``
    as of prefill workers."""

    id: WorkerId
    cost: DecodeCost
    capacity_tokens: int
    node: str = ""
    num_requests: int = 0
    context_tokens: int = 0
    promised_tokens: int = 0
    reads_until_seconds: float = 0.0
    """Until when it had better read no further prompt: see ``policy/alone.py``."""
    as_of_seconds: float = 0.0
    measured: bool = True
    prefill_cost: PrefillCost | None = None
    """None: it is not to read prompts while others can."""

    @property
    def load(self) -> float:
        return self.promised_tokens / self.capacity_tokens

    @property
    def free_tokens(self) -> int:
        return self.capacity_tokens - self.promised_tokens

    def step_seconds(self, more_requests: int = 0, more_tokens: int = 0) -> float:
        """Predicted time between two tokens, once it has that much more."""
        return self.cost.seconds(
            self.num_requests + more_requests, self.context_tokens + more_tokens
        )


WorkerViewT = TypeVar("WorkerViewT", PrefillView, DecodeView)


class WorkerPool(Generic[WorkerViewT]):
    """The workers of one kind, by id and in the order of their load. Who changes a view brackets
    that with :meth:`take` and :meth:`put`."""

    def __init__(self, views: Sequence[WorkerViewT] = ()) -> None:
        self._views: dict[str, WorkerViewT] = {}
        self._order: list[tuple[float, str]] = []
        self._ids: tuple[str, ...] | None = None
        for view in views:
            self.put(view)

    def take(self, worker: WorkerId) -> WorkerViewT:
        view = self._views[worker]
        del self._order[bisect_left(self._order, (view.load, worker))]
        return view

    def put(self, view: WorkerViewT) -> None:
        if view.id not in self._views:
            self._ids = None
        self._views[view.id] = view
        insort(self._order, (view.load, view.id))

    def remove(self, worker: WorkerId) -> None:
        self.take(worker)
        del self._views[worker]
        self._ids = None

    def least(self) -> Iterator[WorkerViewT]:
        """From the least loaded on; equals by their ids."""
        for _, worker in self._order:
            yield self._views[worker]

    @property
    def ids(self) -> tuple[str, ...]:
        """Sorted, as the ring wants them."""
        if self._ids is None:
            self._ids = tuple(sorted(self._views))
        return self._ids

    def __contains__(self, worker: str) -> bool:
        return worker in self._views

    def __getitem__(self, worker: str) -> WorkerViewT:
        return self._views[worker]

    def __iter__(self) -> Iterator[WorkerViewT]:
        return iter(self._views.values())

    def __len__(self) -> int:
        return len(self._views)


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The store node that holds most of a chain's leading blocks."""

    node: str
    num_blocks: int


class CacheView(Protocol):
    """What is believed about where blocks lie."""

    def local_blocks(self, view: PrefillView, keys: Sequence[AnyBlockKey]) -> int:
        """Leading blocks on the worker or in its host's store."""
        ...

    def holders(self, keys: Sequence[AnyBlockKey], count: int) -> list[WorkerId]:
        """Prefill workers with most of the leading blocks at hand, best first."""
        ...

    def stored(self, keys: Sequence[AnyBlockKey]) -> StoredPrefix | None: ...

    def share(self, key: AnyBlockKey) -> float:
        """The key's share of recent requests, 0 to 1."""
        ...


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Between hosts, and from a host's store to its own workers."""

    bytes_per_second: float
    host_bytes_per_second: float
    latency_seconds: float = 0.0005

    def seconds(self, size_bytes: float) -> float:
        return self.latency_seconds + size_bytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class AdmissionRates:
    """What became of recent requests, by the quarters of their prompts' lengths:
    ``edges_tokens`` are between them, ``shares`` say how many were let in, 0 to 1."""

    edges_tokens: tuple[int, ...] = ()
    shares: tuple[float, ...] = (1.0,)
    large_tokens: int = 0
    """199 of 200 are shorter."""

    def advantage(self, num_tokens: int) -> float:
        """How much more often such prompts are let in than those that fare worst."""
        return self.shares[bisect_left(self.edges_tokens, num_tokens)] - min(self.shares)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``num_placed`` counts decisions; ``answer_tokens`` is the mean of recent answers, and nine in
    ten were longer than ``short_answer_tokens``."""

    now_seconds: float
    num_placed: int
    prefills: WorkerPool[PrefillView]
    decodes: WorkerPool[DecodeView]
    cache: CacheView
    block_tokens: int
    kv_bytes_per_token: int
    link: LinkSpeed
    answer_tokens: float = 256.0
    short_answer_tokens: float = 16.0
    admitted: AdmissionRates = AdmissionRates()


@dataclass(frozen=True, slots=True)
class PolicyQuery:
    """``num_tokens`` are prompt and emitted tokens, ``keys`` those of their full blocks. The SLO:
    the first token within ``first_token_seconds`` (infinite: whenever) beyond what an idle worker
    with an empty cache takes, and the mean gap between tokens. ``promised`` was let in before: it
    is not refused."""

    request_id: str
    num_tokens: int
    max_new_tokens: int
    keys: Sequence[AnyBlockKey]
    session: str = ""
    excluded: frozenset[WorkerId] = frozenset()
    first_token_seconds: float = 2.0
    token_gap_seconds: float = 0.05
    promised: bool = False
