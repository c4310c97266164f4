"""The conductor's estimate of each worker's load, from the worker's last report and the requests
sent since then."""

from bisect import insort
from collections import deque
from dataclasses import dataclass
from typing import Any

from baton.core.cost import DecodeCost
from baton.core.ids import WorkerId
from conductor.limits import MAX_ADVANCED_WORKERS, MAX_QUEUE_ENTRIES, MAX_UNREPORTED
from conductor.policy.config import MAX_LATE_MARGIN
from conductor.policy.decision import Decision
from conductor.policy.local_prefill import MAX_LOCAL_PREFILL_SHARE
from conductor.policy.snapshot import (
    AnswersOnly,
    DecodeView,
    MixedView,
    PolicyQuery,
    PrefillView,
    PromptsOnly,
    QueuedPrefill,
    WorkerPool,
    WorkerView,
)

LATE_MARGIN_STEP = 0.03
"""A late first token raises its worker's margin by this share of the TTFT SLO. With smaller steps,
margins are found later. Larger ones vary more, and refuse more at loads below the capacity."""

LATE_TARGET = 0.05
"""The share of first tokens that may be late. Each first token lowers its worker's margin by this
share of :data:`LATE_MARGIN_STEP`, so margins stay the same if this share is late. With 0.02, a
worker at 0.7 of its capacity refuses three times as many requests; with 0.07, more than a tenth of
the admitted are late under overload."""

MIN_ADVANCE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class PrefillLoadReport(PromptsOnly):
    """A prefill worker's load at ``at_seconds``: its current step takes ``busy_seconds`` more; then
    it computes ``queue``, ordered by deadline. For ``num_first_tokens`` and
    ``num_late_first_tokens``, see :class:`baton.core.worker_load.WorkerLoad`."""

    at_seconds: float
    busy_seconds: float
    queue: tuple[QueuedPrefill, ...]
    num_requests: int
    queued_tokens: int
    num_first_tokens: int = 0
    num_late_first_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DecodeLoadReport(AnswersOnly):
    """A decode worker's load at ``at_seconds``. If ``cost`` or ``capacity_tokens`` is None, its
    last known value stays."""

    at_seconds: float
    num_requests: int
    context_tokens: int
    projected_tokens: int
    cost: DecodeCost | None = None
    capacity_tokens: int | None = None
    window_tokens: int | None = None
    windowed_share: float = 1.0


@dataclass(frozen=True, slots=True)
class MixedLoadReport:
    """The load of a worker that serves whole requests: of its prompts, of its answers, and what
    they cost each other (see :class:`conductor.policy.snapshot.MixedView`)."""

    prefill: PrefillLoadReport
    decode: DecodeLoadReport
    prompt_slowdown: float
    prompt_share: float
    shared_step_seconds: float | None = None


LoadReport = PrefillLoadReport | DecodeLoadReport | MixedLoadReport


@dataclass(frozen=True, slots=True)
class _DispatchedPrompt:
    at_seconds: float
    queued: QueuedPrefill
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _DispatchedAnswer:
    at_seconds: float
    context_tokens: int
    projected_tokens: int


class LoadTracker:
    """Tracks the load of all pools as the policies see them. Each of ``num_conductors`` conductors
    is assumed to send equally many requests based on the same reports. So until a worker's next
    report, the prefill work that this conductor sends to the worker is multiplied by the number of
    conductors."""

    def __init__(self, num_conductors: int = 1) -> None:
        self.num_conductors = num_conductors
        self.prefills: WorkerPool[PrefillView] = WorkerPool()
        self.decodes: WorkerPool[DecodeView] = WorkerPool()
        self.mixed: WorkerPool[MixedView] = WorkerPool()
        self._pools: tuple[WorkerPool[Any], ...] = (self.prefills, self.decodes, self.mixed)
        self._unreported_prompts: dict[WorkerId, deque[_DispatchedPrompt]] = {}
        self._unreported_answers: dict[WorkerId, deque[_DispatchedAnswer]] = {}
        self._first_tokens: dict[WorkerId, tuple[int, int]] = {}
        """The last reported numbers of first tokens and of late ones."""
        self._advanced_seconds = 0.0
        self._to_advance: list[WorkerId] = []
        """The workers whose answers are still to be advanced, last one first."""

    # -- workers ---------------------------------------------------------------------------

    def add(self, view: WorkerView) -> None:
        """Add a worker to the pool of those that do the same."""
        if view.prefill is None:
            self.decodes.put(view)
        elif view.decode is None:
            self.prefills.put(view)
        else:
            self.mixed.put(view)
        if view.prefill is not None:
            self._unreported_prompts[view.id] = deque(maxlen=MAX_UNREPORTED)
        if view.decode is not None:
            self._unreported_answers[view.id] = deque(maxlen=MAX_UNREPORTED)

    def view(self, worker: WorkerId) -> WorkerView | None:
        """Return a worker's view; None for an unknown worker."""
        pool = self._pool_of(worker)
        return pool[worker] if pool is not None else None

    def _pool_of(self, worker: WorkerId) -> WorkerPool[Any] | None:
        return next((pool for pool in self._pools if worker in pool), None)

    def remove(self, worker: WorkerId) -> None:
        if (pool := self._pool_of(worker)) is not None:
            pool.remove(worker)
        self._unreported_prompts.pop(worker, None)
        self._first_tokens.pop(worker, None)
        self._unreported_answers.pop(worker, None)

    # -- reports ---------------------------------------------------------------------------

    def apply_report(self, worker: WorkerId, report: LoadReport) -> None:
        """Apply a report: its parts that say what the worker does. Reports of unknown workers are
        ignored."""
        pool = self._pool_of(worker)
        if pool is None:
            return
        view: WorkerView = pool.take_for_update(worker)
        if isinstance(view, MixedView) and isinstance(report, MixedLoadReport):
            view.prompt_slowdown, view.prompt_share = report.prompt_slowdown, report.prompt_share
            view.shared_step_seconds = report.shared_step_seconds
        if view.prefill is not None and report.prefill is not None:
            self._apply_prefill_report(view.prefill, report.prefill)
        if view.decode is not None and report.decode is not None:
            self._apply_decode_report(view.decode, report.decode)
        pool.put(view)

    def _apply_prefill_report(self, view: PrefillView, report: PrefillLoadReport) -> None:
        sent = self._unreported_prompts[view.id]
        while sent and sent[0].at_seconds <= report.at_seconds:
            sent.popleft()
        view.busy_until_seconds = report.at_seconds + report.busy_seconds
        view.queue = list(report.queue)
        view.free_at_seconds = view.busy_until_seconds + sum(q.work_seconds for q in view.queue)
        view.num_requests, view.queued_tokens = report.num_requests, report.queued_tokens
        self._update_late_margin(view, report)
        for prompt in sent:
            _add_prompt(view, prompt)

    def _update_late_margin(self, view: PrefillView, report: PrefillLoadReport) -> None:
        """Learn from the first tokens since the last report how early first tokens must be
        predicted so that only the share :data:`LATE_TARGET` of them is late. Whatever predictions
        do not know counts: other processes on the host, steps that compute several prompts, late
        prompts that are computed in between. This is adaptive conformal inference (Gibbs and
        Candès, "Adaptive conformal inference under distribution shift", 2021)."""
        now = report.num_first_tokens, report.num_late_first_tokens
        before = self._first_tokens.get(view.id, now)
        self._first_tokens[view.id] = now
        num_new, num_late = max(now[0] - before[0], 0), max(now[1] - before[1], 0)
        change = LATE_MARGIN_STEP * (num_late - LATE_TARGET * num_new)
        view.late_margin = min(max(view.late_margin + change, 0.0), MAX_LATE_MARGIN)

    def _apply_decode_report(self, view: DecodeView, report: DecodeLoadReport) -> None:
        sent = self._unreported_answers[view.id]
        while sent and sent[0].at_seconds <= report.at_seconds:
            sent.popleft()
        if report.cost is not None:
            view.cost, view.is_measured = report.cost, True
        if report.capacity_tokens is not None:
            view.capacity_tokens = report.capacity_tokens
        view.window_tokens, view.windowed_share = report.window_tokens, report.windowed_share
        view.num_requests = report.num_requests
        view.context_tokens = report.context_tokens
        view.projected_tokens = report.projected_tokens
        view.as_of_seconds = report.at_seconds
        for answer in sent:
            _add_answer(view, answer)

    def advance(self, now_seconds: float, answer_tokens: float) -> None:
        """Reduce the load of answers of every worker by the share of its tokens that it has
        presumably freed since its last report or update: the time since then, divided by the
        duration of an answer of ``answer_tokens`` tokens. Takes effect at most ten times a second
        for each worker, and for at most :data:`MAX_ADVANCED_WORKERS` workers in one call; the next
        calls continue with the others."""
        if not self._to_advance:
            if now_seconds - self._advanced_seconds < MIN_ADVANCE_SECONDS:
                return
            self._advanced_seconds = now_seconds
            self._to_advance = [view.id for pool in (self.decodes, self.mixed) for view in pool]
            self._to_advance.reverse()
        for _ in range(min(len(self._to_advance), MAX_ADVANCED_WORKERS)):
            self._advance_worker(self._to_advance.pop(), now_seconds, answer_tokens)

    def _advance_worker(self, worker: WorkerId, now_seconds: float, answer_tokens: float) -> None:
        pool = self._pool_of(worker)
        if pool is None or not _can_advance(pool[worker].decode, now_seconds):
            return
        view: DecodeView | MixedView = pool.take_for_update(worker)
        itl = view.itl_seconds(0, 0) if isinstance(view, MixedView) else view.step_seconds()
        _advance_answers(view.decode, now_seconds, itl * answer_tokens)
        pool.put(view)

    # -- dispatched requests ---------------------------------------------------------------

    def record_dispatch(
        self, now_seconds: float, query: PolicyQuery, decision: Decision, answer_tokens: float
    ) -> None:
        """Add a placed request to the load of its workers: the prefill work to the prefill worker,
        the context and the predicted answer to the decode worker. If a single worker serves the
        whole request, only that worker's load grows: a prefill worker's by the prefill work; a
        decode worker's by the context, the answer, and the time of the local prefill; a mixed
        worker's by the prefill work, the context and the answer."""
        work = decision.service_seconds * self.num_conductors
        projected = query.num_tokens + int(min(answer_tokens, query.max_new_tokens))
        answer = _DispatchedAnswer(
            now_seconds, query.attended_tokens(query.num_tokens), query.attended_tokens(projected)
        )
        prefill_worker = decision.prefill or decision.decode
        if prefill_worker in self.prefills:
            view = self.prefills.take_for_update(prefill_worker)
            self._add_dispatched_prompt(view, now_seconds, query, work)
            self.prefills.put(view)
        if decision.decode in self.decodes:
            decode = self.decodes.take_for_update(decision.decode)
            if decision.prefill is None:
                _record_local_prefill(decode, now_seconds, work)
            self._add_dispatched_answer(decode, answer)
            self.decodes.put(decode)
        if decision.decode in self.mixed:
            mixed = self.mixed.take_for_update(decision.decode)
            self._add_dispatched_prompt(mixed.prefill, now_seconds, query, work)
            self._add_dispatched_answer(mixed.decode, answer)
            self.mixed.put(mixed)

    def _add_dispatched_prompt(
        self, view: PrefillView, now_seconds: float, query: PolicyQuery, work_seconds: float
    ) -> None:
        idle_seconds = view.cost.seconds(query.num_tokens)
        queued = QueuedPrefill(now_seconds + query.ttft_slo_seconds + idle_seconds, work_seconds)
        prompt = _DispatchedPrompt(now_seconds, queued, query.num_tokens)
        self._unreported_prompts[view.id].append(prompt)
        _add_prompt(view, prompt)

    def _add_dispatched_answer(self, view: DecodeView, answer: _DispatchedAnswer) -> None:
        self._unreported_answers[view.id].append(answer)
        if not view.projected_tokens:
            view.as_of_seconds = answer.at_seconds
        _add_answer(view, answer)


def _can_advance(view: DecodeView, now_seconds: float) -> bool:
    return now_seconds > view.as_of_seconds and view.projected_tokens > 0


def _advance_answers(view: DecodeView, now_seconds: float, answer_seconds: float) -> None:
    passed = now_seconds - view.as_of_seconds
    share = min(passed / max(answer_seconds, passed), 1.0)
    view.as_of_seconds = now_seconds
    view.projected_tokens -= int(view.projected_tokens * share)
    view.context_tokens -= int(view.context_tokens * share)


def _record_local_prefill(view: DecodeView, now_seconds: float, seconds: float) -> None:
    start = max(view.local_prefill_until_seconds, now_seconds)
    view.local_prefill_until_seconds = start + seconds / MAX_LOCAL_PREFILL_SHARE


def _add_prompt(view: PrefillView, prompt: _DispatchedPrompt) -> None:
    _advance_queue(view, prompt.at_seconds)
    view.busy_until_seconds = max(view.busy_until_seconds, prompt.at_seconds)
    insort(view.queue, prompt.queued)
    _merge_first_entries(view.queue)
    view.free_at_seconds = max(view.free_at_seconds, prompt.at_seconds) + prompt.queued.work_seconds
    view.num_requests += 1
    view.queued_tokens += prompt.num_tokens


def _advance_queue(view: PrefillView, now_seconds: float) -> None:
    """Remove from the queue the prompts that must have been computed by now, and from the next
    prompt the part of its work that must have been done by now."""
    num_done = 0
    for queued in view.queue:
        if view.busy_until_seconds + queued.work_seconds > now_seconds:
            break
        view.busy_until_seconds += queued.work_seconds
        num_done += 1
    del view.queue[:num_done]
    if view.queue and view.busy_until_seconds < now_seconds:
        first = view.queue[0]
        remaining = first.work_seconds - (now_seconds - view.busy_until_seconds)
        view.queue[0] = QueuedPrefill(first.deadline_seconds, remaining)


def _merge_first_entries(queue: list[QueuedPrefill]) -> None:
    """Merge the first entries of a queue that has more than :data:`MAX_QUEUE_ENTRIES`. The merged
    entry has the latest of their deadlines. These prompts are computed first or, if they are late,
    after all others, so new prompts are forecast as before. If the last entries were merged, as in
    a worker's report, new prompts would overtake them, and the most overloaded worker would look
    best."""
    if len(queue) > MAX_QUEUE_ENTRIES:
        num_merged = len(queue) - MAX_QUEUE_ENTRIES + 1
        work = sum(queued.work_seconds for queued in queue[:num_merged])
        queue[:num_merged] = [QueuedPrefill(queue[num_merged - 1].deadline_seconds, work)]


def _add_answer(view: DecodeView, answer: _DispatchedAnswer) -> None:
    view.num_requests += 1
    view.context_tokens += view.held_tokens(answer.context_tokens)
    view.projected_tokens += view.held_tokens(answer.projected_tokens)
