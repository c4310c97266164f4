"""The cluster as the conductor believes it to be at the moment of a decision."""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

from baton.core.cost import DecodeCost, PrefillCost
from baton.core.ids import WorkerId
from baton.core.kv_codec import CodecSpeed
from baton.core.worker_load import held_tokens

MIN_ANSWER_SHARE = 0.1
"""Minimum share of a mixed worker's time that is assumed to be left for answers."""

AnyBlockKey = Hashable
"""A block's key: a chained hash, or a block id from a trace. Both also identify all blocks before
it."""


@dataclass(frozen=True, slots=True, order=True)
class QueuedPrefill:
    """Prefill work of one or several prompts that are queued at a worker, and its deadline."""

    deadline_seconds: float
    work_seconds: float


class PromptsOnly:
    """What concerns the prompts of a worker that writes no answers: its ``prefill`` part, of
    two."""

    __slots__ = ()

    @property
    def prefill(self) -> Self:
        return self

    @property
    def decode(self) -> None:
        return None


class AnswersOnly:
    """What concerns the answers of a worker that computes no prompts: its ``decode`` part."""

    __slots__ = ()

    @property
    def prefill(self) -> None:
        return None

    @property
    def decode(self) -> Self:
        return self


@dataclass(slots=True)
class PrefillView(PromptsOnly):
    """A prefill worker as the policies see it. Its current step ends at ``busy_until_seconds``;
    then it computes the prompts in ``queue``, which is ordered by deadline and has
    ``queued_tokens`` tokens to compute in total. ``node`` is the store node on its host. If
    ``is_measured`` is False, its cost is a guess, which affects the choice of a worker but is no
    reason to call a first token late. ``host`` identifies the host if KV is copied within it
    through memory; else it is empty. In ``wire_codecs``, KV may travel to a decode worker; in
    ``store_codec``, the worker stores blocks (None: as they are)."""

    id: WorkerId
    cost: PrefillCost
    node: str = ""
    busy_until_seconds: float = 0.0
    queue: list[QueuedPrefill] = field(default_factory=list)
    num_requests: int = 0
    queued_tokens: int = 0
    free_at_seconds: float = 0.0
    """When the whole queue will have been computed."""
    is_measured: bool = True
    late_margin: float = 0.0
    """The share of the TTFT SLO by which earlier a first token must be predicted, because first
    tokens of this worker came late although they were predicted in time."""
    host: str = ""
    wire_codecs: tuple[CodecSpeed, ...] = ()
    store_codec: CodecSpeed | None = None

    @property
    def load(self) -> float:
        return self.free_at_seconds

    def queue_seconds(self, now_seconds: float) -> float:
        return max(self.free_at_seconds - now_seconds, 0.0)


@dataclass(slots=True)
class DecodeView(AnswersOnly):
    """A decode worker as the policies see it, at the time ``as_of_seconds``. ``context_tokens`` is
    the KV, in tokens, of all requests placed on it, including those that have not arrived yet; it
    is expected to grow to ``projected_tokens``. If ``is_measured`` is False, ``cost`` is a guess:
    see :class:`PrefillView`, also for ``host`` and the codecs. ``window_tokens`` and
    ``windowed_share`` say how much memory a long request takes: see
    :class:`baton.core.worker_load.WorkerLoad`."""

    id: WorkerId
    cost: DecodeCost
    capacity_tokens: int
    node: str = ""
    num_requests: int = 0
    context_tokens: int = 0
    projected_tokens: int = 0
    local_prefill_until_seconds: float = 0.0
    """The worker should prefill no further prompt before this time: see
    ``conductor/policy/local_prefill.py``."""
    as_of_seconds: float = 0.0
    is_measured: bool = True
    prefill_cost: PrefillCost | None = None
    """If None, the worker must not prefill prompts while prefill workers are available."""
    window_tokens: int | None = None
    windowed_share: float = 1.0
    host: str = ""
    wire_codecs: tuple[CodecSpeed, ...] = ()
    store_codec: CodecSpeed | None = None

    def held_tokens(self, num_tokens: int) -> int:
        """Return the memory that a request of ``num_tokens`` takes, in tokens."""
        return held_tokens(num_tokens, self.window_tokens, self.windowed_share)

    @property
    def load(self) -> float:
        return self.projected_tokens / self.capacity_tokens

    @property
    def free_tokens(self) -> int:
        return self.capacity_tokens - self.projected_tokens

    def step_seconds(self, more_requests: int = 0, more_tokens: int = 0) -> float:
        """Predict the inter-token latency after adding ``more_requests`` requests with
        ``more_tokens`` tokens of context in total."""
        return self.cost.seconds(
            self.num_requests + more_requests, self.context_tokens + more_tokens
        )


@dataclass(slots=True)
class MixedView:
    """A worker that serves whole requests as the policies see it: as a prefill worker and as a
    decode worker. Like a mixed worker, it computes prompts and answers in the same steps.
    ``prefill.queue`` takes into account that answers delay prompts. A further prompt takes
    ``prompt_slowdown`` times as long as on an idle worker. Lately, steps with prompts took the
    share ``prompt_share`` of the time, from 0 to 1. If ``shared_step_seconds`` is set, no step with
    both prompts and answers takes longer."""

    prefill: PrefillView
    decode: DecodeView
    prompt_slowdown: float = 1.0
    prompt_share: float = 0.0
    shared_step_seconds: float | None = None

    @property
    def id(self) -> WorkerId:
        return self.decode.id

    @property
    def load(self) -> float:
        return self.decode.load

    def itl_seconds(self, more_requests: int, more_tokens: int) -> float:
        """Predict the mean inter-token latency after adding requests. If steps with prompts may be
        long, answers hardly get tokens from them, so they have only the rest of the time.
        Otherwise, answers get one token from each of these steps, too."""
        rest = max(1 - self.prompt_share, MIN_ANSWER_SHARE)
        step = self.decode.step_seconds(more_requests, more_tokens)
        if self.shared_step_seconds is None:
            return step / rest
        shared = max(self.shared_step_seconds, step)
        return 1 / (rest / step + (1 - rest) / shared) if step else 0.0


WorkerView = PrefillView | DecodeView | MixedView
"""A worker as the policies see it. ``prefill`` is its view as one that computes prompts, ``decode``
as one that writes answers; None if it does not."""

WorkerViewT = TypeVar("WorkerViewT", PrefillView, DecodeView, MixedView)


class WorkerPool(Generic[WorkerViewT]):
    """The views of the workers that do the same (:class:`PrefillView`, :class:`DecodeView` or
    :class:`MixedView`), by worker id and ordered by load. A view's load may only change between
    :meth:`take_for_update` and :meth:`put`, which take the view out of the order and put it back in
    its new place."""

    def __init__(self, views: Sequence[WorkerViewT] = ()) -> None:
        self._views: dict[str, WorkerViewT] = {}
        self._order: list[tuple[float, str]] = []
        self._ids: tuple[str, ...] | None = None
        for view in views:
            self.put(view)

    def take_for_update(self, worker: WorkerId) -> WorkerViewT:
        view = self._views[worker]
        del self._order[bisect_left(self._order, (view.load, worker))]
        return view

    def put(self, view: WorkerViewT) -> None:
        if view.id not in self._views:
            self._ids = None
        self._views[view.id] = view
        insort(self._order, (view.load, view.id))

    def remove(self, worker: WorkerId) -> None:
        self.take_for_update(worker)
        del self._views[worker]
        self._ids = None

    def by_load(self) -> Iterator[WorkerViewT]:
        """Iterate from the least loaded worker on; equal loads are ordered by id."""
        for _, worker in self._order:
            yield self._views[worker]

    @property
    def ids(self) -> tuple[str, ...]:
        """Worker ids, sorted as the hash ring requires."""
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
    """The store node that has the most leading blocks of a prompt, and their number."""

    node: str
    num_blocks: int


class CacheView(Protocol):
    """An estimate of where blocks are cached."""

    def num_device_blocks(self, worker: WorkerId, keys: Sequence[AnyBlockKey]) -> int:
        """Return how many leading blocks the worker has on its device."""
        ...

    def num_local_blocks(self, view: PrefillView, keys: Sequence[AnyBlockKey]) -> int:
        """Return how many leading blocks the worker has, or the store on its host, whichever has
        more."""
        ...

    def workers_with_prefix(self, keys: Sequence[AnyBlockKey], count: int) -> list[WorkerId]:
        """Return up to ``count`` workers that compute prompts, starting with those that have the
        most leading blocks on their device or in the store on their host."""
        ...

    def longest_stored_prefix(self, keys: Sequence[AnyBlockKey]) -> StoredPrefix | None:
        """Return the store node with the most leading blocks; None if no node has any of the
        blocks."""
        ...

    def request_share(self, key: AnyBlockKey) -> float:
        """Return the share of recent requests that have this block, from 0 to 1: see
        :class:`baton.placement.prefix_popularity.PrefixPopularity`."""
        ...


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Bandwidth between hosts, and from a host's store to its own workers."""

    bytes_per_second: float
    host_bytes_per_second: float
    latency_seconds: float = 0.0005

    def seconds(self, size_bytes: float) -> float:
        return self.latency_seconds + size_bytes / self.bytes_per_second

    @property
    def within_host(self) -> "LinkSpeed":
        """The link from a host's store to its own workers, through memory."""
        return LinkSpeed(self.host_bytes_per_second, self.host_bytes_per_second, 0.0)


@dataclass(frozen=True, slots=True)
class AdmissionRates:
    """Admission rates of recent requests, by quartile of prompt length. ``edges_tokens`` separate
    the quartiles; ``admitted_shares`` are the shares of requests that were admitted in each
    quartile, from 0 to 1."""

    edges_tokens: tuple[int, ...] = ()
    admitted_shares: tuple[float, ...] = (1.0,)
    large_tokens: int = 0
    """The 99.5th percentile of prompt lengths."""

    def advantage(self, num_tokens: int) -> float:
        """Return the admitted share of the quartile to which this prompt length belongs, minus the
        lowest admitted share of any quartile."""
        return self.admitted_shares[bisect_left(self.edges_tokens, num_tokens)] - min(
            self.admitted_shares
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The cluster at the moment of a decision. The pools have different workers: by what they do,
    whatever their kind, those that only compute prompts, those that only write answers, and in
    ``mixed`` those that serve whole requests.
    ``num_placed`` is the number of earlier placements.
    ``answer_tokens`` is the mean length of recent answers, and ``short_answer_tokens`` is the 10th
    percentile of their lengths."""

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
    admission_rates: AdmissionRates = AdmissionRates()
    mixed: WorkerPool[MixedView] = field(default_factory=WorkerPool)


@dataclass(frozen=True, slots=True)
class PolicyQuery:
    """A request to place. ``num_tokens`` counts prompt and emitted tokens; ``keys`` are the block
    keys of the full blocks of these tokens. The SLO is met if the TTFT is at most
    ``ttft_slo_seconds`` longer than on an idle worker with an empty cache (infinite: no limit), and
    the mean inter-token latency is at most ``itl_slo_seconds``. If ``must_admit`` is True, the
    request must not be rejected, because it was admitted before or because admission control is
    not in force. If ``exact_kv`` is True, no lossy codec may be applied to its KV.
    ``max_attended_tokens``: see :class:`baton.core.placement.PlacementQuery`."""

    request_id: str
    num_tokens: int
    max_new_tokens: int
    keys: Sequence[AnyBlockKey]
    session: str = ""
    excluded: frozenset[WorkerId] = frozenset()
    ttft_slo_seconds: float = 2.0
    itl_slo_seconds: float = 0.05
    must_admit: bool = False
    exact_kv: bool = False
    max_attended_tokens: int | None = None

    @property
    def needs_decode(self) -> bool:
        """Whether the answer may have more tokens than the first, which the worker that computes
        the prompt generates."""
        return self.max_new_tokens > 1

    def attended_tokens(self, num_tokens: int) -> int:
        """Return how many tokens the last of ``num_tokens`` tokens of this request attends to. The
        KV of about so many is held."""
        if self.max_attended_tokens is None:
            return num_tokens
        return min(num_tokens, self.max_attended_tokens)
