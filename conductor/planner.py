"""How many workers there should be: from what a conductor sees of the load, every few seconds.

Nothing here looks at a clock: whoever asks says when it is. The live conductor and the simulated
cluster ask the same planner.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from baton.core.cost import DecodeCost
from baton.core.pool_plan import PoolAlternative, PoolPlan
from conductor.load_forecast import LoadForecast, LoadTrend
from conductor.policy.decision import Decision
from conductor.policy.sizing import PoolCapacity, PoolSizes, SizingConfig, size_pools
from conductor.policy.snapshot import DecodeView, Snapshot

PLAN_SECONDS = 5.0
"""Between two plans."""

THROUGHPUT_MEMORY_SECONDS = 300.0
"""What was computed so long ago counts 1/e of what is computed now."""

MAX_MEASURED_TOKENS = 1 << 39
"""A larger capacity is none that anybody has measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """``start_seconds`` is what a worker takes to start: the load is forecast so far ahead.
    ``max_batch`` bounds a decode worker's batch."""

    sizing: SizingConfig = field(default_factory=SizingConfig)
    start_seconds: float = 60.0
    max_batch: int = 256


@dataclass(slots=True)
class _PlanWindow:
    """What came since the last plan. Of refused requests nobody knows what they would have found
    computed already."""

    num_requests: int = 0
    prompt_tokens: int = 0
    placed_tokens: int = 0
    cached_tokens: int = 0
    work_seconds: float = 0.0


@dataclass(slots=True)
class _PrefillThroughput:
    """Prompt tokens computed, and the time that took, of about the last SPEED_SECONDS: by what
    comes, and not by some typical prompt, since long prompts take more than their share."""

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
    """:meth:`placed` and :meth:`refused` as requests come, :meth:`plan` every PLAN_SECONDS. Of
    several conductors, each gets an equal share of the requests."""

    config: PlannerConfig
    began_seconds: float
    last: PoolPlan | None = None
    _window: _PlanWindow = field(default_factory=_PlanWindow)
    _trend: LoadTrend | None = None
    _speed: _PrefillThroughput = field(default_factory=_PrefillThroughput)
    _sizing: PoolSizes | None = None
    """The last one: what was needed goes on."""

    # -- what comes ------------------------------------------------------------------------

    def placed(self, snapshot: Snapshot, num_tokens: int, decision: Decision) -> None:
        """For its first time: what is placed anew is no new load."""
        cached = min(_cached_blocks(decision) * snapshot.block_tokens, num_tokens - 1)
        self._count(num_tokens)
        self._window.placed_tokens += num_tokens
        self._window.cached_tokens += cached
        self._window.work_seconds += decision.service_seconds

    def refused(self, num_tokens: int) -> None:
        """It would have been load, and will be when it is tried again."""
        self._count(num_tokens)

    def _count(self, num_tokens: int) -> None:
        self._window.num_requests += 1
        self._window.prompt_tokens += num_tokens

    # -- what is planned -------------------------------------------------------------------

    def plan(self, snapshot: Snapshot, num_conductors: int = 1) -> PoolPlan | None:
        """None until there was a request."""
        self._observe(snapshot, num_conductors)
        if self._trend is None:
            return None
        load = self._trend.ahead(self.config.start_seconds)
        sizing = size_pools(load, self._capacity(snapshot, load), self.config.sizing)
        self._sizing = sizing
        self.last = PoolPlan(
            sizing.prefill,
            sizing.decode,
            sizing.reason,
            len(snapshot.prefills),
            len(snapshot.decodes),
            load.requests_per_second,
            load.prompt_tokens,
            load.answer_tokens,
            load.cached_share,
            tuple(PoolAlternative(e.pool, e.num_workers, e.utilisation)
                  for e in sizing.alternatives),
        )  # fmt: skip
        return self.last

    def _observe(self, snapshot: Snapshot, num_conductors: int) -> None:
        now, window = snapshot.now_seconds, self._window
        passed = now - self.began_seconds
        if passed <= 0:
            return
        self.began_seconds, self._window = now, _PlanWindow()
        rate = window.num_requests * num_conductors / passed
        computed = window.placed_tokens - window.cached_tokens
        self._speed.add(computed, window.work_seconds, passed)
        if window.num_requests:
            load = self._load(window, rate, snapshot.answer_tokens)
            seen = self._trend
            self._trend = seen.updated(now, load) if seen else LoadTrend.begun(now, load)
        elif self._trend is not None:
            fewer = self._trend.requests_per_second.updated(now, 0.0)
            self._trend = replace(self._trend, requests_per_second=fewer)

    def _load(self, window: _PlanWindow, rate: float, answer_tokens: float) -> LoadForecast:
        known = self._trend.cached_share.level if self._trend is not None else 0.0
        cached = window.cached_tokens / window.placed_tokens if window.placed_tokens else known
        return LoadForecast(rate, window.prompt_tokens / window.num_requests, answer_tokens, cached)

    def _capacity(self, snapshot: Snapshot, load: LoadForecast) -> PoolCapacity:
        """What nobody has measured is 0."""
        sizing = self._sizing
        read = any(view.measured for view in snapshot.prefills)
        writers = [view for view in snapshot.decodes if view.measured]
        capacities = [v.capacity_tokens for v in writers if v.capacity_tokens < MAX_MEASURED_TOKENS]
        return PoolCapacity(
            now_seconds=snapshot.now_seconds,
            num_prefill=len(snapshot.prefills),
            num_decode=len(snapshot.decodes),
            prefill_tokens_per_second=self._speed.tokens_per_second if read else 0.0,
            decode_tokens_per_second=_mean(self._writes(view, load) for view in writers),
            decode_capacity_tokens=int(_mean(capacities)),
            queued_prompt_tokens=sum(view.queued_tokens for view in snapshot.prefills),
            promised_tokens=sum(view.promised_tokens for view in snapshot.decodes),
            prefill_needs=sizing.prefill_needs if sizing is not None else None,
            decode_needs=sizing.decode_needs if sizing is not None else None,
        )

    def _writes(self, view: DecodeView, load: LoadForecast) -> float:
        context = load.prompt_tokens + load.answer_tokens / 2
        gap = self.config.sizing.token_gap_seconds
        return decode_tokens_per_second(view.cost, context, gap, self.config.max_batch)


def decode_tokens_per_second(
    cost: DecodeCost, context_tokens: float, gap_seconds: float, max_batch: int
) -> float:
    """Of the largest batch whose steps are short enough; of one answer if none is."""

    def seconds(batch: int) -> float:
        return cost.seconds(batch, int(batch * context_tokens))

    low, high = 1, max_batch
    while low < high:
        middle = (low + high + 1) // 2
        if seconds(middle) <= gap_seconds:
            low = middle
        else:
            high = middle - 1
    return low / seconds(low) if seconds(low) else 0.0


def _cached_blocks(decision: Decision) -> int:
    """At hand where it is read, or to be fetched there. Of one that its decode worker reads, as
    much as the best of the others has."""
    scores = decision.prefill_scores
    chosen = [scored for scored in scores if scored.worker == decision.prefill]
    return max((s.local_blocks + s.fetched_blocks for s in chosen or scores[:1]), default=0)


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return statistics.fmean(known) if known else 0.0
