"""Periodically plans how many workers each pool should have, from the load that a conductor
observes.

Nothing here reads a clock: times come with the snapshots. The live conductor and the simulated
cluster use the same planner.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from baton.core.cost import DecodeCost
from baton.core.pool_plan import PoolPlan
from conductor.load_forecast import LoadForecast, LoadTrend
from conductor.policy.decision import Decision
from conductor.policy.sizing import PoolCapacity, PoolSizes, SizingConfig, size_pools
from conductor.policy.snapshot import DecodeView, PrefillView, Snapshot

PLAN_SECONDS = 5.0
"""Interval between two plans."""

THROUGHPUT_MEMORY_SECONDS = 300.0
"""Work computed this long ago weighs 1/e of work computed now."""

MAX_MEASURED_TOKENS = 1 << 39
"""A decode worker's capacity from this size on is the placeholder for an unknown one, not a
measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """The planner's settings. ``start_seconds`` is the time that a worker takes to start; the load
    is forecast that far ahead. ``max_batch`` limits a decode worker's batch."""

    sizing: SizingConfig = field(default_factory=SizingConfig)
    start_seconds: float = 60.0
    max_batch: int = 256


@dataclass(slots=True)
class _PlanWindow:
    """The requests since the last plan. ``placed_tokens`` and ``cached_tokens`` exclude rejected
    requests, for which the number of cached tokens is unknown."""

    num_requests: int = 0
    prompt_tokens: int = 0
    placed_tokens: int = 0
    cached_tokens: int = 0
    work_seconds: float = 0.0


@dataclass(slots=True)
class _PrefillThroughput:
    """The uncached prompt tokens of the requests placed in about the last
    :data:`THROUGHPUT_MEMORY_SECONDS`, and the predicted time to compute them. The throughput is
    computed from actual requests, not from a typical prompt, since the time grows faster than
    linearly with a prompt's length."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float, passed_seconds: float) -> None:
        kept = math.exp(-passed_seconds / THROUGHPUT_MEMORY_SECONDS)
        self.tokens = self.tokens * kept + tokens
        self.seconds = self.seconds * kept + seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Planner:
    """Plans the sizes of the pools of prefill and decode workers. Requests on mixed workers don't
    count: the pools are sized for the load that mixed workers leave. Call :meth:`record_placed` and
    :meth:`record_rejected` as requests come, and :meth:`plan` every :data:`PLAN_SECONDS`. Several
    conductors are assumed to get equal shares of the requests."""

    config: PlannerConfig
    window_started_seconds: float
    last_plan: PoolPlan | None = None
    _window: _PlanWindow = field(default_factory=_PlanWindow)
    _trend: LoadTrend | None = None
    _prefill_throughput: _PrefillThroughput = field(default_factory=_PrefillThroughput)
    _sizing: PoolSizes | None = None
    """The last sizes; the next sizing starts from their demand peaks."""

    # -- requests --------------------------------------------------------------------------

    def record_placed(self, snapshot: Snapshot, num_tokens: int, decision: Decision) -> None:
        """Record a request that was placed for the first time; placing a request again adds no new
        load. Does nothing for a request on a mixed worker."""
        if decision.decode in snapshot.mixed:
            return
        cached = min(_cached_blocks(decision) * snapshot.block_tokens, num_tokens - 1)
        self._count_request(num_tokens)
        self._window.placed_tokens += num_tokens
        self._window.cached_tokens += cached
        self._window.work_seconds += decision.service_seconds

    def record_rejected(self, num_tokens: int) -> None:
        """Record a rejected request: it counts as load, since it will be retried."""
        self._count_request(num_tokens)

    def _count_request(self, num_tokens: int) -> None:
        self._window.num_requests += 1
        self._window.prompt_tokens += num_tokens

    # -- plans -----------------------------------------------------------------------------

    def plan(self, snapshot: Snapshot, num_conductors: int = 1) -> PoolPlan | None:
        """Make a plan. Return None before the first request."""
        self._close_window(snapshot, num_conductors)
        if self._trend is None:
            return None
        load = self._trend.forecast(self.config.start_seconds)
        sizing = size_pools(load, self._capacity(snapshot, load), self.config.sizing)
        self._sizing = sizing
        self.last_plan = PoolPlan(
            sizing.prefill,
            sizing.decode,
            sizing.reason,
            len(snapshot.prefills),
            len(snapshot.decodes),
            load.requests_per_second,
            load.prompt_tokens,
            load.answer_tokens,
            load.cached_share,
            sizing.alternatives,
        )
        return self.last_plan

    def _close_window(self, snapshot: Snapshot, num_conductors: int) -> None:
        now, window = snapshot.now_seconds, self._window
        passed = now - self.window_started_seconds
        if passed <= 0:
            return
        self.window_started_seconds, self._window = now, _PlanWindow()
        rate = window.num_requests * num_conductors / passed
        computed = window.placed_tokens - window.cached_tokens
        self._prefill_throughput.add(computed, window.work_seconds, passed)
        if window.num_requests:
            load = self._load(window, rate, snapshot.answer_tokens)
            trend = self._trend
            self._trend = trend.updated(now, load) if trend else LoadTrend.start(now, load)
        elif self._trend is not None:
            fewer = self._trend.requests_per_second.updated(now, 0.0)
            self._trend = replace(self._trend, requests_per_second=fewer)

    def _load(self, window: _PlanWindow, rate: float, answer_tokens: float) -> LoadForecast:
        known = self._trend.cached_share.level if self._trend is not None else 0.0
        cached = window.cached_tokens / window.placed_tokens if window.placed_tokens else known
        return LoadForecast(rate, window.prompt_tokens / window.num_requests, answer_tokens, cached)

    def _capacity(self, snapshot: Snapshot, load: LoadForecast) -> PoolCapacity:
        """Return the capacity of both pools. Values that have not been measured are 0."""
        sizing = self._sizing
        has_prefill_cost = any(view.is_measured for view in snapshot.prefills)
        decodes = [view for view in snapshot.decodes if view.is_measured]
        capacities = [v.capacity_tokens for v in decodes if v.capacity_tokens < MAX_MEASURED_TOKENS]
        return PoolCapacity(
            now_seconds=snapshot.now_seconds,
            num_prefill=len(snapshot.prefills),
            num_decode=len(snapshot.decodes),
            prefill_tokens_per_second=self._prefill_throughput.tokens_per_second
            if has_prefill_cost
            else 0.0,
            decode_tokens_per_second=_mean(self._decode_throughput(view, load) for view in decodes),
            decode_capacity_tokens=int(_mean(capacities)),
            queued_prompt_tokens=sum(view.queued_tokens for view in snapshot.prefills),
            projected_tokens=sum(view.projected_tokens for view in snapshot.decodes),
            late_prefill=sum(_has_late_prompt(view, snapshot) for view in snapshot.prefills),
            late_decode=sum(self._is_overfull(view) for view in decodes),
            prefill_demand=sizing.prefill_demand if sizing is not None else None,
            decode_demand=sizing.decode_demand if sizing is not None else None,
        )

    def _is_overfull(self, view: DecodeView) -> bool:
        """Whether a decode worker's present requests exceed the ITL SLO or its memory."""
        is_slow = view.step_seconds() > self.config.sizing.itl_slo_seconds
        return view.num_requests > 0 and (is_slow or view.free_tokens < 0)

    def _decode_throughput(self, view: DecodeView, load: LoadForecast) -> float:
        context = load.prompt_tokens + load.answer_tokens / 2
        itl_slo = self.config.sizing.itl_slo_seconds
        return decode_tokens_per_second(view.cost, context, itl_slo, self.config.max_batch)


def decode_tokens_per_second(
    cost: DecodeCost, context_tokens: float, itl_slo_seconds: float, max_batch: int
) -> float:
    """Return the throughput of the largest batch that meets the ITL SLO. If no batch meets the SLO,
    return the throughput of a batch of one request."""

    def seconds(batch: int) -> float:
        return cost.seconds(batch, int(batch * context_tokens))

    low, high = 1, max_batch
    while low < high:
        middle = (low + high + 1) // 2
        if seconds(middle) <= itl_slo_seconds:
            low = middle
        else:
            high = middle - 1
    return low / seconds(low) if seconds(low) else 0.0


def _has_late_prompt(view: PrefillView, snapshot: Snapshot) -> bool:
    """Whether a prompt waits whose TTFT deadline has passed. The queue is ordered by deadline."""
    return bool(view.queue) and view.queue[0].deadline_seconds < snapshot.now_seconds


def _cached_blocks(decision: Decision) -> int:
    """Return how many of the prompt's blocks are cached on the prefill worker or fetched to it. For
    a local prefill, count the blocks of the best prefill candidate instead."""
    scores = decision.prefill_scores
    chosen = [scored for scored in scores if scored.worker == decision.prefill]
    return max((s.local_blocks + s.fetched_blocks for s in chosen or scores[:1]), default=0)


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return statistics.fmean(known) if known else 0.0
